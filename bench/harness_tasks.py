"""Parity with lm-evaluation-harness on all task files that its package has.

The rows of each task are made by `bench.task_rows`. Both sides load the same task file, draw the same shots, and score
the same documents with a tiny Llama in fp32; answers have at most 8 tokens and are greedy. A task is equal if prompts,
log-probabilities (up to 0.001), texts and the values of all metrics are, document by document, and so are the scores of
the task. Functions of a task that draw random numbers start from the same seed whenever either side calls them.

`python -m bench harness_tasks=N` takes every N-th task file, and those whose path contains a word with
`harness_tasks=WORD`. `harness_tasks=templates` takes one file of each template (`template_of`), those of most files
first: files of a template have the same code, settings and expressions, and differ in their words and in where their
data are. `harness_tasks=templates:I/N` takes every N-th template, beginning with the I-th, so that N processes can
divide them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import Any

from bench.task_rows import Row, argument_texts, functions_of, make_rows, search_columns

NUM_DOCUMENTS = 3
NUM_SHOT_ROWS = 40
MAX_NEW_TOKENS = 8
CONTEXT = 1024
TOLERANCE = 1e-3
# The values of single documents are texts or vectors, which the two sides arrange in different ways.
_CORPUS = ("brier_score", "likelihood", "bleu", "chrf", "chrf++", "ter")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
# Keys by which tasks get data or models of their own.
_SPECIAL = {"doc_to_image": "reads images", "doc_to_audio": "reads audio", "class": "is a class of Python"}


@dataclass
class Outcome:
    """What became of a task: equal, or the reason why not; `needs` names what this machine lacks."""

    task: str
    state: str
    reason: str = ""
    shape: str = field(default="", repr=False)


def run(argument: str = "1") -> str:
    """Return the table of counts as Markdown."""
    comparison = Comparison()
    if argument.startswith("templates"):
        return _compare_templates(comparison, argument.partition(":")[2] or "0/1")
    files = task_files()
    sample = "all" if argument == "1" else f"one of {argument} files"
    files = files[:: int(argument)] if argument.isdigit() else [file for file in files if argument in str(file)]
    outcomes = []
    start = time.monotonic()
    for number, file in enumerate(files, 1):
        outcomes += comparison.compare(file)
        if number % 500 == 0:
            print(f"{number:,} of {len(files):,} files, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return format_outcomes(outcomes, sample)


def _compare_templates(comparison: Comparison, share: str) -> str:
    """Return the table of counts of one file of each template, each counted as often as files have the template.

    Args:
        share: "I/N": every N-th template, beginning with the I-th.
    """
    first, step = map(int, share.split("/"))
    templates = sorted(group_files(), key=lambda files: (-len(files), files[0]))
    outcomes: list[Outcome] = []
    selected = templates[first::step]
    for files in selected:
        for outcome in comparison.compare(files[0]):
            outcomes += [outcome] * len(files)
            fields = [outcome.task, outcome.state, outcome.reason, outcome.shape, len(files)]
            print(json.dumps(fields), file=sys.stderr, flush=True)
    return format_outcomes(outcomes, f"of {len(selected):,} of {len(templates):,} templates")


def group_files() -> list[list[Path]]:
    """Return the files of tasks by their template."""
    from lm_eval.tasks._yaml_loader import load_yaml

    groups: dict[str, list[Path]] = {}
    for file in task_files():
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            try:
                config = dict(load_yaml(file, resolve_func=True))
            except (Exception, SystemExit) as error:  # of the packaged code
                groups.setdefault(_describe(error), []).append(file)
                continue
        if "group" not in config and isinstance(config.get("task"), str):
            groups.setdefault(template_of(config), []).append(file)
    return list(groups.values())


def template_of(config: Row) -> str:
    """Return a text that tasks share whose shapes differ only in words: the text around expressions, the strings in
    them, fixed choices, and the words of fixed shots."""
    settings = dict(config)
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        value = settings.get(key)
        if isinstance(value, list):
            settings[key] = len(value)
        elif isinstance(value, str) and not value.isidentifier():
            expressions = re.findall(r"\{\{.*?\}\}|\{%.*?%\}", value, re.DOTALL)
            settings[key] = [re.sub(r"\"[^\"]*\"|'[^']*'", "''", each) for each in expressions]
    shots = settings.get("fewshot_config")
    if isinstance(shots, dict) and isinstance(shots.get("samples"), list):
        columns = sorted({key for sample in shots["samples"] for key in sample})
        settings["fewshot_config"] = {**shots, "samples": [len(shots["samples"]), columns]}
    return shape_of(settings)


def format_outcomes(outcomes: Sequence[Outcome], sample: str = "all") -> str:
    """Return the table of counts, and the reasons of tasks that are not equal.

    Args:
        sample: which files were compared.
    """
    tasks = [outcome for outcome in outcomes if outcome.state != "group"]
    counts = Counter(outcome.state for outcome in tasks)
    shapes = len({outcome.shape for outcome in tasks if outcome.shape})
    compared = counts["equal"] + counts["different"] + counts["refused"]
    local = len(tasks) - counts["needs more"]
    lines = [
        "| task files | tasks |",
        "|---|---|",
        f"| {sample}, of {shapes} different shapes | {len(tasks):,} |",
        f"| need images, packages or data that make_rows cannot make | {counts['needs more']:,} |",
        f"| the others | {local:,} |",
        f"| no rows found with which the harness runs | {counts['no rows']:,} |",
        f"| compared | {compared:,} |",
        f"| loaded and scored by jingu | {counts['equal'] + counts['different']:,} |",
        f"| equal in every document | {counts['equal']:,} ({counts['equal'] / max(local, 1):.1%} of the others) |",
    ]
    reasons = Counter((outcome.state, outcome.reason) for outcome in tasks if outcome.state != "equal")
    examples = {(outcome.state, outcome.reason): outcome.task for outcome in reversed(tasks)}
    lines += ["", "| not equal | reason | tasks | such as |", "|---|---|---|---|"]
    for (state, reason), count in reasons.most_common():
        words = reason.replace(f"{Path.cwd()}/", "").replace("|", "/").replace("\n", " ")[:140]
        lines.append(f"| {state} | {words} | {count:,} | {examples[state, reason]} |")
    return "\n".join(lines)


def task_root() -> Path:
    """Return the folder of the harness's tasks."""
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def task_files() -> list[Path]:
    """Return all files of the harness that define a task."""
    return sorted(file for file in task_root().rglob("*.yaml") if "\ntask:" in f"\n{file.read_text(encoding='utf-8')}")


class Comparison:
    """Both sides, with one tiny model."""

    def __init__(self) -> None:
        import datasets
        import evaluate
        import huggingface_hub
        from lm_eval.models.huggingface import HFLM

        from jingu.evaluate import statistics
        from jingu.evaluate.scoring import AnswerCache, Scorer
        from jingu.evaluate.task_file import TaskIndex
        from jingu.infer.engine import Engine
        from jingu.infer.inference_model import load

        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        datasets.disable_progress_bars()
        # No request to a hub, which each task would repeat.
        datasets.config.HF_HUB_OFFLINE = True
        evaluate.config.HF_EVALUATE_OFFLINE = True
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        # Errors of scores are compared elsewhere; here they would take most of the time.
        statistics.BOOTSTRAP_DRAWS = 1_000
        self._place = tempfile.TemporaryDirectory()
        self._folder = Path(self._place.name)
        write_model(self._folder / "model")
        self._harness = HFLM(
            pretrained=str(self._folder / "model"), dtype="float32", batch_size=16, device="cpu", max_length=CONTEXT
        )
        self._scorer = Scorer(Engine(load(self._folder / "model", "fp32", "cpu")), AnswerCache(None))
        self._index = TaskIndex([], sorted(task_root().rglob("*.py")))
        self._answers: dict[str, Any] = {}
        self._columns: dict[str, tuple[dict[str, str], str]] = {}

    def compare(self, file: Path) -> list[Outcome]:
        """Compare the task of a file."""
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return self._compare(file)

    def _compare(self, file: Path) -> list[Outcome]:
        from lm_eval.tasks._yaml_loader import load_yaml

        try:
            config = dict(load_yaml(file, resolve_func=True))
        except (Exception, SystemExit) as error:  # of the packaged code
            return [Outcome(file.stem, "needs more", _describe(error))]
        if "group" in config or not isinstance(config.get("task"), str):
            return [Outcome(file.stem, "group")]
        name = config["task"]
        for key, reason in _SPECIAL.items():
            if config.get(key):
                return [Outcome(name, "needs more", reason)]
        if config.get("custom_dataset"):
            return [Outcome(name, "needs more", "makes its data with code of its own")]
        shape = shape_of(config)
        if shape not in self._columns:
            self._columns[shape] = search_columns(config, lambda columns: self._check(config, columns), _lacks)
        columns, error = self._columns[shape]
        if error:
            state = "needs more" if _needs_more(error) else "no rows"
            return [Outcome(name, state, error, shape)]
        return [self._compare_task(file, config, columns, shape)]

    def _check(self, config: Row, columns: dict[str, str]) -> tuple[int, str]:
        """Return how many steps of the harness work with some columns, and the error of the next one."""
        step = 0
        try:
            task = harness_task(config, columns)
            step = 1
            task.build_all_requests()
            choices = task.doc_to_choice(task.eval_docs[0]) if config.get("doc_to_choice") is not None else []
            if not isinstance(choices, list):
                raise TypeError(f"doc_to_choice gives {choices!r}")
            _check_labels(task)
            step = 2
            aggregate(task, self._values_of(task, self._fake))
        except (Exception, SystemExit) as error:  # of the packaged code
            return step, _describe(error)
        return 3, ""

    @staticmethod
    def _fake(kind: str, _arguments: tuple[Any, ...]) -> Any:
        return {"generate_until": "red 1 A", "loglikelihood_rolling": -3.5}.get(kind, (-2.5, False))

    def _values_of(self, task: Any, answer: Any) -> list[tuple[list[tuple[Any, ...]], list[Any], dict[str, Any]]]:
        """Return of each document the arguments of its requests, the responses, and the metrics."""
        by_document: dict[int, list[Any]] = {}
        for instance in task.instances:
            response = answer(instance.request_type, instance.args)
            instance.resps = [response] * instance.repeats
            by_document.setdefault(instance.doc_id, []).append(instance)
        task.apply_filters()
        results = []
        for instances in by_document.values():
            instances.sort(key=lambda instance: instance.idx)
            values = {}
            for name in instances[0].filtered_resps:
                responses = [instance.filtered_resps[name] for instance in instances]
                metrics = task.process_results(instances[0].doc, responses)
                values |= {f"{metric},{name}": value for metric, value in metrics.items()}
            arguments = [instance.args for instance in instances]
            results.append((arguments, [instance.resps[0] for instance in instances], values))
        return results

    def _answer(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        return self._answers[repr((kind, arguments))]

    def _compute(self, instances: Sequence[Any]) -> None:
        """Compute the responses of the harness that are not known from an earlier task."""
        missing: dict[str, dict[str, Any]] = {}
        for instance in instances:
            key = repr((instance.request_type, instance.args))
            if key not in self._answers:
                missing.setdefault(instance.request_type, {})[key] = instance
        for kind, group in missing.items():
            responses = getattr(self._harness, kind)(list(group.values()))
            self._answers |= dict(zip(group, responses, strict=True))

    def _compare_task(self, file: Path, config: Row, columns: dict[str, str], shape: str) -> Outcome:
        from jingu.errors import JinguError
        from jingu.evaluate.evaluation import evaluate_task, prepare_task

        name = config["task"]
        try:
            theirs = harness_task(config, columns)
            theirs.build_all_requests()
            self._compute(theirs.instances)
            expected = self._values_of(theirs, self._answer)
            scores = aggregate(theirs, expected)
        except (Exception, SystemExit) as error:  # of the packaged code
            return Outcome(name, "no rows", _describe(error), shape)
        try:
            self._index.load(str(file))
            task = self._index.tasks[name]
            prepared = prepare_task(task.model_copy(update=self._local_data(config, columns, task)))
            result = evaluate_task(prepared, self._scorer)
        except JinguError as error:
            return Outcome(name, "refused", error.what, shape)
        except (Exception, SystemExit) as error:  # a fault of jingu, which the table shows
            return Outcome(name, "different", f"crash: {_describe(error)}", shape)
        if len(result.records) != len(expected):
            return Outcome(name, "different", "the number of documents", shape)
        for record, (arguments, responses, values) in zip(result.records, expected, strict=True):
            if difference := describe_difference(record, arguments, responses, values):
                return Outcome(name, "different", difference, shape)
        for key, score in scores.items():
            if key not in result.metrics or not _is_close(result.metrics[key].value, score):
                return Outcome(name, "different", f"the task's {key.partition(',')[0]}", shape)
        return Outcome(name, "equal", "", shape)

    def _local_data(self, config: Row, columns: dict[str, str], task: Any) -> dict[str, Any]:
        """Return the changes of a task that give it the rows, and short greedy answers."""
        files = {}
        for split, rows in split_rows(config, columns).items():
            file = self._folder / f"{len(files)}.jsonl"
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
            files[split] = str(file)
        settings = type(task.generation_kwargs).model_validate(short_generation(config))
        data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        return {**data, "generation_kwargs": settings, "repeats": 1, **seeded_processes(task.model_dump())}


def short_generation(config: Row) -> dict[str, Any]:
    """Return the generation settings of a task with few new tokens, and without sampling."""
    settings = dict(config.get("generation_kwargs") or {})
    for key in ("max_new_tokens", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"):
        settings.pop(key, None)
    return {**settings, "do_sample": False, "max_gen_toks": MAX_NEW_TOKENS}


def split_rows(config: Row, columns: dict[str, str]) -> dict[str, list[Row]]:
    """Return the rows of each split that a task names: a few to evaluate, more for shots."""
    evaluated = config.get("test_split") or config.get("validation_split")
    shots = config.get("fewshot_config")
    names = [*(config.get(key) for key in _SPLITS), *([shots.get("split")] if isinstance(shots, dict) else [])]
    count = max(NUM_SHOT_ROWS, 2 * int(config.get("num_fewshot") or 0))
    many = [name for name in names if name and name != evaluated]
    rows = {name: make_rows(columns, range(100, 100 + count)) for name in many}
    # Where shots come from the evaluated rows, there must be enough of them.
    needs_more = bool(config.get("num_fewshot")) and not many
    number = 2 + int(config["num_fewshot"]) if needs_more else NUM_DOCUMENTS
    return {**rows, evaluated: make_rows(columns, range(max(number, NUM_DOCUMENTS)))}


def harness_task(config: Row, columns: dict[str, str]) -> Any:
    """Return the harness's task with rows in place of its data."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    class LocalTask(ConfigurableTask):  # type: ignore[misc]  # the harness has no type annotations
        def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
            splits = split_rows(config, columns)
            self.dataset = datasets.DatasetDict(
                {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
            )

    settings = {key: value for key, value in config.items() if key not in ("group", "include")}
    if config.get("output_type", "generate_until") == "generate_until":
        settings["generation_kwargs"] = short_generation(config)
    settings |= {"repeats": 1, **seeded_processes(config)}
    task = LocalTask(config=settings)
    task.set_fewshot_seed(seed=1234)
    return task


def seeded_processes(config: Row) -> dict[str, Any]:
    """Return the settings `process_docs` of a task and of its shots, as functions that seed their random numbers first:
    either side calls them another number of times."""
    changes: dict[str, Any] = {}
    if callable(config.get("process_docs")):
        changes["process_docs"] = _seed_first(config["process_docs"])
    shots = config.get("fewshot_config")
    if isinstance(shots, dict) and callable(shots.get("process_docs")):
        changes["fewshot_config"] = {**shots, "process_docs": _seed_first(shots["process_docs"])}
    return changes


def _seed_first(function: Callable[..., Any]) -> Callable[..., Any]:
    names = getattr(getattr(function, "func", function), "__globals__", {})
    generators = [random, *(value for value in names.values() if isinstance(value, random.Random))]

    def process(*arguments: Any) -> Any:
        for generator in generators:
            generator.seed(0)
        return function(*arguments)

    return process


def _check_labels(task: Any) -> None:
    """Raise ValueError if the right answer of a document is none of its choices, as in no real data."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    for document in task.eval_docs:
        target = task.doc_to_target(document)
        choices = task.doc_to_choice(document)
        for label in target if isinstance(target, list) else [target]:
            is_known = label in choices if isinstance(label, str) else 0 <= int(label) < len(choices)
            if task.multiple_input == 0 and not is_known:
                raise ValueError(f"the label {label!r} is not among the choices")


def aggregate(task: Any, results: Sequence[tuple[Any, Any, Row]]) -> dict[str, float]:
    """Return the scores of a task, as the harness aggregates the metrics of its documents."""
    values: dict[str, list[Any]] = {}
    for _, _, metrics in results:
        for key, value in metrics.items():
            values.setdefault(key, []).append(value)
    functions = task.aggregation()
    return {key: functions.get(key.partition(",")[0], mean)(each) for key, each in values.items()}


def describe_difference(record: Row, arguments: list[tuple[Any, ...]], responses: list[Any], values: Row) -> str:
    """Return what differs in a document; empty if nothing does."""
    texts = [tuple(part for part in each if isinstance(part, str)) for each in arguments]
    own = [tuple(text for text in pair if text) or ("",) for pair in record["pairs"]]
    if [tuple(filter(None, each)) or ("",) for each in texts] != own:
        return "prompts"
    for answer, response in zip(record["answers"], responses, strict=True):
        if isinstance(response, str):
            if answer["text"] != response:
                return "generated texts"
            continue
        logprob = response[0] if isinstance(response, tuple | list) else response
        if not math.isclose(answer["logprob"], logprob, abs_tol=TOLERANCE):
            return "log-probabilities"
    for key, value in values.items():
        if key.partition(",")[0] in _CORPUS:
            continue
        if key not in record["metrics"]:
            return f"no metric {key.partition(',')[0]}"
        if not _is_close(record["metrics"][key], value):
            return f"metric {key.partition(',')[0]}"
    return ""


def _is_close(first: Any, second: Any) -> bool:
    """Return whether values are equal up to the rounding of log-probabilities."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_close, first, second))
    try:
        one, two = float(first), float(second)
    except (TypeError, ValueError):
        return str(first) == str(second)
    return (math.isnan(one) and math.isnan(two)) or math.isclose(one, two, rel_tol=1e-4, abs_tol=TOLERANCE)


def shape_of(config: Row) -> str:
    """Return a text that tasks with the same columns and code share."""
    ignored = ("task", "task_alias", "tag", "dataset_name", "dataset_path", "dataset_kwargs", "metadata", "include")
    settings = {key: value for key, value in config.items() if key not in (*ignored, "description")}
    parts = [
        (each.__code__.co_code.hex(), argument_texts(function))
        for function in functions_of(settings)
        if hasattr(each := getattr(function, "func", function), "__code__")
    ]
    text = json.dumps([settings, sorted(parts)], sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _needs_more(error: str) -> bool:
    """Return whether an error comes from a missing package, program, file or network."""
    return _lacks(error) or error.startswith(("LookupError", "OSError")) or "required" in error


def _lacks(error: str) -> bool:
    """Return whether an error is that of a missing package, file or network, whatever the rows are."""
    words = ("ImportError", "ModuleNotFoundError", "ConnectionError", "FileNotFoundError", "HTTPError")
    return error.startswith((*words, "OfflineModeIsEnabled", "LocalEntryNotFoundError"))


def write_model(folder: Path) -> None:
    """Write a tiny Llama with random weights, and a byte tokenizer, in the format of transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jingu.text.tokenizer_training import train_tokenizer

    words = "red blue green small large old young warm cold happy stone river tree bird house road cloud field"
    tokenizer = train_tokenizer(iter([f"Question: {words} Answer: A B C D\n"] * 20), 420, ["<|endoftext|>", "<pad>"])
    tokenizer.save(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"pad_token": "<pad>"}
    file.write_text(json.dumps(settings), encoding="utf-8")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer.vocab()), max_position_embeddings=CONTEXT, initializer_range=0.3, **sizes, **ids
        )
    )
    model.save_pretrained(folder)
