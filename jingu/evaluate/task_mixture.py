"""Training data from tasks: a mixture of task files, rendered as rows of prompts and answers.

Sample j of a mixture is a pure function of j: its task and template (the quotas of `jingu.data.mixture`), its document
(a `Permutation` for each epoch), and its shots (random numbers, keyed by the sample's number in its task). Rates are
those of seqio (Roberts et al., 2022), and caps for each template those of FLAN (Longpre et al., 2023).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from jingu.config.sections.data import DataSettings
from jingu.data import build as data_build
from jingu.data.mixture import plan_mixture
from jingu.data.permutation import Permutation, random_uint64
from jingu.errors import JinguError, pluralize
from jingu.evaluate.held_out import check_held_out, profile_task
from jingu.evaluate.prompts import PromptRenderer
from jingu.evaluate.task_data import Row, TaskData, fingerprint_of, read_training_rows
from jingu.evaluate.task_file import TaskIndex, TaskSettings, find_task_files
from jingu.runtime.checksums import record_file
from jingu.runtime.files import read_error, write_text_atomically

# A line that distinguishes a mixture file from other YAML files.
_HEAD = re.compile(r"^mixture:", re.MULTILINE)


class MixtureModel(BaseModel):
    """Base class of the parts of a mixture file; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Member(MixtureModel):
    """A task (or group, tag, NAME@TEMPLATE) or another mixture file, with its rate.

    Attributes:
        rate: total rate of all its tasks; null: the sum of the tasks' own rates.
    """

    task: str | None = None
    mixture: str | None = None
    rate: PositiveFloat | None = None


class MixtureSettings(MixtureModel):
    """Contents of a mixture file. In a mixture within another one, the outer mixture decides about `samples`,
    `num_fewshot`, `form`, `max_per_template`, `include` and `seed`.

    Attributes:
        samples: number of rows; null: the number of documents of all tasks, up to their caps.
        num_fewshot: numbers of shots; one of them is drawn for each row.
        form: completion (for base models), or messages (for a chat template).
        scale, maximum, temperature: a task with n documents has the rate min(n · scale, maximum)^(1 / temperature).
        max_per_template: maximum number of documents for each template of a task; null: no limit.
        include: folders with additional tasks.
        held_out: tasks, groups, tags or task clusters; no task of the mixture may be related to them.
    """

    mixture: str
    members: list[Member] = Field(min_length=1)
    samples: PositiveInt | None = None
    num_fewshot: list[int] = [0]
    form: Literal["completion", "messages"] = "completion"
    scale: PositiveFloat = 1.0
    maximum: PositiveFloat | None = None
    temperature: PositiveFloat = 1.0
    max_per_template: PositiveInt | None = None
    include: list[str] = []
    held_out: list[str] = []
    seed: int = 0


@dataclass(frozen=True)
class _Stream:
    """The documents of a task with one of its templates."""

    task: TaskSettings
    rows: list[Row]
    size: int
    seed: int

    @cached_property
    def renderer(self) -> PromptRenderer:
        return PromptRenderer(self.task, TaskData(self.rows, self.rows, excludes_own=True), 0)

    @property
    def key(self) -> int:
        """A random key of the task's name, so that its samples do not depend on the rest of the mixture."""
        return int.from_bytes(blake2b(self.task.task.encode(), digest_size=6).digest(), "little")

    def render(self, number: int, form: str, num_fewshot: list[int]) -> dict[str, Any]:
        """Return a training row: sample `number` of this stream."""
        # 1. Find the document. With a cap, all epochs use the same documents: the first ones of epoch 0.
        epoch, position = divmod(number, self.size)
        if self.size < len(self.rows):
            position = int(Permutation(self.size, self.seed, epoch, self.key, 1)(np.array([position]))[0])
            epoch = 0
        index = int(Permutation(len(self.rows), self.seed, epoch, self.key)(np.array([position]))[0])
        # 2. Draw the shots, with spare ones in case the document or copies of it are among them.
        random = Random(int(random_uint64("mixture", 1, self.seed, self.key, number)[0]))
        row = self.rows[index]
        shots = random.choice(num_fewshot)
        places = random.sample(range(len(self.rows)), min(len(self.rows), 2 * shots + 1))
        shot_rows = [self.rows[place] for place in places if self.rows[place] != row][:shots]
        # 3. Render the prompt and the answer.
        sample = self.renderer.render_sample(index, row, shot_rows)
        context, answer = sample.pairs[sample.gold[0] if self.task.output_type == "multiple_choice" else 0]
        if self.task.output_type == "generate_until":
            answer = self.task.target_delimiter + sample.gold[0]
        about = {"task": self.task.task, "index": index, "shots": len(shot_rows)}
        if not context:
            return {"text": answer, **about}
        if form == "messages":
            turns = (("user", context.strip()), ("assistant", answer.strip()))
            return {"messages": [{"role": role, "content": content} for role, content in turns], **about}
        return {"prompt": context, "completion": answer, **about}


def _read_settings(file: Path) -> MixtureSettings:
    """Read a mixture file. Raise JinguError if it is not valid."""
    try:
        return MixtureSettings.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise read_error(file, error) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JinguError(f"it is not YAML: {' '.join(str(error).split())}.", where=file, fix="Correct it.") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise JinguError(f"this is not a mixture: {'; '.join(problems)}.", where=file, fix="Correct it.") from None


class TaskMixture:
    """A mixture of tasks, with all their documents.

    Raises:
        JinguError: a file is not valid, a task has no training split, or a task is related to a held-out task.
    """

    def __init__(self, file: Path) -> None:
        self.settings = _read_settings(file)
        self.index = TaskIndex([file.parent / folder for folder in self.settings.include])
        self._rows: dict[str, list[Row]] = {}
        self._held_out: list[str] = []
        rates = self._expand(file, self.settings, ())
        self.streams = [
            _Stream(self.index.tasks[name], self._rows[name], self._size(name), self.settings.seed) for name in rates
        ]
        self.mixture = plan_mixture([(0, [*rates.values()])], [None] * len(rates))
        self.rates = rates
        self._profiles = [profile_task(stream.task, stream.rows) for stream in self.streams]
        self.held_out = check_held_out(self._profiles, self.index, self._held_out, file)

    def _size(self, name: str) -> int:
        """Return how many documents of a task are used, at most `max_per_template`."""
        return min(len(self._rows[name]), self.settings.max_per_template or len(self._rows[name]))

    def _expand(self, file: Path, settings: MixtureSettings, parents: tuple[Path, ...]) -> dict[str, float]:
        """Return the rate of each task. A task in several members has the sum of its rates."""
        if file.resolve() in parents:
            raise JinguError("this mixture contains itself.", where=file, fix="Remove it from its members.")
        self._held_out += settings.held_out
        rates: dict[str, float] = {}
        for member in settings.members:
            if member.mixture is not None:
                inner = file.parent / member.mixture
                shares = self._expand(inner, _read_settings(inner), (*parents, file.resolve()))
            elif member.task is not None:
                path, at, template = member.task.partition("@")
                # Paths of task files are relative to the mixture file.
                path = str(file.parent / path) if path.endswith((".yaml", ".yml")) else path
                names = self.index.load(f"{path}{at}{template}")
                shares = {name: self._natural_rate(name, settings) for name in names}
            else:
                raise JinguError("a member of this mixture has neither task nor mixture.", where=file, fix="Name one.")
            factor = 1.0 if member.rate is None else member.rate / sum(shares.values())
            for name, share in shares.items():
                rates[name] = rates.get(name, 0.0) + share * factor
        return rates

    def _natural_rate(self, name: str, settings: MixtureSettings) -> float:
        if name not in self._rows:
            self._rows[name] = rows = read_training_rows(self.index.tasks[name])
            if max(settings.num_fewshot) >= len(rows):
                what = f"{max(settings.num_fewshot)} shots are requested, but {name} has only {len(rows) - 1} other "
                raise JinguError(f"{what}documents.", where=settings.mixture, fix="Set num_fewshot to less.")
        scaled_size = self._size(name) * settings.scale
        return float(min(scaled_size, settings.maximum or scaled_size) ** (1 / settings.temperature))

    def __len__(self) -> int:
        return self.settings.samples or sum(stream.size for stream in self.streams)

    def render(self, samples: range, form: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield samples of the mixture as training rows; `form` overrides the form of the mixture file."""
        form = form or self.settings.form
        stream_ids, numbers = self.mixture.locate(np.array(samples, np.int64))
        for stream_id, number in zip(stream_ids.tolist(), numbers.tolist(), strict=True):
            yield self.streams[stream_id].render(number, form, self.settings.num_fewshot)

    def write(self, file: Path, *, as_text: bool = False) -> dict[str, Any]:
        """Write all samples as JSON Lines, print the rows of each task, and return the provenance of the mixture.

        Args:
            as_text: write prompt and answer as one text, even if the mixture has the form of messages.
        """
        form = "completion" if as_text else self.settings.form
        rows = self.render(range(len(self)), form)
        if as_text:
            rows = ({"text": row.get("text") or row["prompt"] + row["completion"]} for row in rows)
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in lines)
        write_text_atomically(file, text)
        print(f"mixture {self.settings.mixture}: {pluralize(len(self), 'row')} in {file}")
        for stream, count in zip(self.streams, self.mixture.counts(len(self)), strict=True):
            unused_rows = len(stream.rows) - min(stream.size, count)
            usage = f"{pluralize(count, 'row')}, {count / stream.size:.2f} epochs"
            print(f"  {stream.task.task}: {usage}, {unused_rows:,} of {len(stream.rows):,} documents unused")
        tasks = [{"task": profile.task, "cluster": profile.cluster, "data": profile.data} for profile in self._profiles]
        return {
            "name": self.settings.mixture,
            "hash": fingerprint_of(text),
            "seed": self.settings.seed,
            "tasks": tasks,
            "held_out": self.held_out,
        }


def _is_mixture(text: str, *, as_text: bool) -> bool:
    """Return whether an input is a mixture file. With `as_text`, other YAML files may be inputs, too."""
    if not text.endswith((".yaml", ".yml")):
        return False
    path = Path(text)
    if not as_text or not path.is_file():
        return True
    return _HEAD.search(path.read_text(encoding="utf-8", errors="replace")) is not None


def find_mixture(data: DataSettings, *, as_text: bool = False) -> Path | None:
    """Return the mixture file among the inputs; None if there is none. Raises JinguError if it has company."""
    inputs = [data.input] if isinstance(data.input, str) else data.input
    mixture = next((text for text in inputs if _is_mixture(text, as_text=as_text)), None)
    if mixture is not None and len(inputs) > 1:
        what = f"{mixture} is a mixture of tasks, which cannot stand beside other files."
        raise JinguError(what, where="data.input", fix="Make it a source of its own (data.sources).")
    return None if mixture is None else Path(mixture)


def describe_mixture(file: Path) -> dict[str, str]:
    """Return the checksums of a mixture file, of the mixtures and task files that it names, and of what these include
    and run, by their names."""
    checksums = {file.name: record_file(file).xxh3}
    for member in _read_settings(file).members:
        name = member.mixture or (member.task or "").partition("@")[0]
        path = file.parent / name
        if member.mixture is not None and path.name not in checksums:
            checksums |= describe_mixture(path)
        elif path.suffix in (".yaml", ".yml"):
            checksums[path.name] = record_file(path).xxh3
            for part in find_task_files(path)[1:]:
                checksums[os.path.relpath(part, path.parent)] = record_file(part).xxh3
    return checksums


def render_mixture(data: DataSettings, *, as_text: bool = False) -> tuple[DataSettings, dict[str, Any] | None]:
    """Replace a mixture file among the inputs with a file of its rows or texts; also return the mixture's provenance,
    or None if there is no mixture file."""
    mixture = find_mixture(data, as_text=as_text)
    if mixture is None:
        return data, None
    file = Path(f"{data.path}.rows.jsonl")
    record = TaskMixture(mixture).write(file, as_text=as_text)
    record["files"] = describe_mixture(mixture)
    return data.model_copy(update={"input": str(file), "text_field": "text"}), record


# Builds the data sets of a run like `jingu.data.build`, and accepts mixture files, which it renders as texts.
build = partial(data_build.build, render=partial(render_mixture, as_text=True))
