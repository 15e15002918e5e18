"""`jingu verify`: whether two layouts compute the same: outputs, losses, gradients and updated weights, name by name.

Each layout is a short run of its own from the same first weights over the same batches. What is compared is what the
runs leave behind: whole tensors by name in their checkpoints, metrics, and traces of the first step. So it holds for
every layout that can train and save.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from torch import Tensor

from jingu.checkpoint.files import names
from jingu.checkpoint.resume import step_folder
from jingu.checkpoint.store import Reader
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError, counted
from jingu.model.spec import Experts
from jingu.parallel.mesh import AXES, AxisSizes
from jingu.parallel.stages import plan_layout
from jingu.runtime.local import start_local_ranks
from jingu.train.run import open_run
from jingu.train.trace import differences, read_traces

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
"""Largest share of its size by which a tensor may differ: rounding in another order stays well below."""
FLOOR = 1e-3
"""A tensor counts as at least this share of the largest of its kind: one that is zero but for rounding has no size."""
_TOLD = frozenset({"type", "step", "lr", "tokens", "tokens_per_second", "seconds", "peak_share", "memory_bytes"})
"""What a line of metrics.jsonl holds besides results of the computation."""


@dataclass(frozen=True)
class Check:
    """One thing that was compared."""

    kind: str
    """output, loss, gradient or weight."""
    step: int
    """The step, counted from 1."""
    name: str
    difference: float
    """Largest difference as a share of the size; infinite where one side lacks it."""

    @property
    def words(self) -> str:
        kinds = {
            "output": "the output of {0} in the forward pass",
            "loss": "{0}",
            "gradient": "the gradient of {0}",
            "weight": "the updated weight {0}",
        }
        return f"{kinds[self.kind].format(self.name)} (step {self.step})"


@dataclass(frozen=True)
class Layout:
    """A configuration and the number of ranks that it runs on."""

    config: RunConfig
    ranks: int
    sizes: AxisSizes

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 process"
        sizes, settings = self.sizes, self.config.parallel
        expert = f", {sizes.expert} expert" if sizes.expert > 1 else ""
        ring = ", ring" if sizes.context > 1 and settings.context_by == "ring" else ""
        schedule = f", {settings.schedule}" if sizes.pipeline > 1 else ""
        return f"{sizes}{expert}{ring}{schedule}, zero {settings.zero}"


def verify(
    config: RunConfig,
    against: Sequence[str] | None = None,
    all_of: int | None = None,
    processes: int | None = None,
    steps: int = 3,
    precision: str = "fp64",
) -> int:
    """Compare the layout of `config` with the one that the overrides `against` make of it.

    Args:
        against: without it, the layout of `config` is compared with one process.
        all_of: compare every valid layout of so many ranks with one process instead.
        processes: ranks of the second layout; without it, as few as it takes.
        steps: optimizer steps to compare.
        precision: format of the computation: fp64, fp32, bf16 or fp16.

    Returns:
        0 where the layouts are equal, else 1.

    Raises:
        JinguError: a layout that the model, the data or the machine does not allow.
    """
    Path(config.runs).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=config.runs) as name:
        bench = Workbench(Path(name), config, steps)
        alone = bench.layout(["parallel={zero: 0}"], 1)
        if all_of is not None:
            return _verify_all(bench, alone, all_of, precision)
        first = bench.layout([], None) if against else alone
        second = bench.layout(list(against or ()), processes)
        told, equal = _judge(bench, first, second, precision)
        print(f"{first} beside {second}, {steps} steps: {told}")
        return 0 if equal else 1


def _verify_all(bench: Workbench, alone: Layout, ranks: int, precision: str) -> int:
    layouts = list(valid_layouts(bench, ranks))
    print(f"{counted(len(layouts), 'layout')} of {ranks} ranks beside 1 process:", flush=True)
    unequal = 0
    for layout in layouts:
        told, equal = _judge(bench, alone, layout, precision)
        print(f"  {layout}: {told}", flush=True)
        unequal += not equal
    print(f"{len(layouts) - unequal} of {len(layouts)} are equal.")
    return 1 if unequal else 0


def valid_layouts(bench: Workbench, ranks: int) -> Iterator[Layout]:
    """Every mix of axes that the model and the batch allow, with every stage of ZeRO that shards something in it, every
    schedule of a pipeline, and both ways to divide tokens."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    experts = isinstance(bench.spec.feed_forward, Experts)
    schedules, exchanges = (
        get_args(ParallelSettings.model_fields[field].annotation) for field in ("schedule", "context_by")
    )
    for shape in product(divisors, repeat=len(AXES)):
        if math.prod(shape) != ranks:
            continue
        sizes = dict(zip(AXES, shape, strict=True))
        sharded = sizes["shard"] * sizes["context"] > 1
        choices = {
            "zero": (0, 1, 2, 3) if sharded else (0,),
            "expert": (1, "auto") if experts and sharded else (1,),
            "schedule": schedules if sizes["pipeline"] > 1 else schedules[:1],
            "context_by": exchanges if sizes["context"] > 1 else exchanges[:1],
        }
        for chosen in product(*choices.values()):
            parallel = bench.config.parallel.model_copy(update={**sizes, **dict(zip(choices, chosen, strict=True))})
            try:
                yield bench.fitted(bench.config.model_copy(update={"parallel": parallel}), ranks)
            except JinguError:
                continue  # an impossible mix


class Workbench:
    """Runs layouts in a folder, each one once."""

    def __init__(self, folder: Path, config: RunConfig, steps: int) -> None:
        self.folder = folder
        # A folder of its own: the run may exist already, in another layout.
        self.config = self._changed(config, [f"runs={folder}", "evaluation.every=0", "checkpoint.resume=auto"])
        self.spec = open_run(self.config).spec
        self.steps = steps
        self._recorded: dict[tuple[str, int, str], Path] = {}

    def layout(self, words: Sequence[str], ranks: int | None) -> Layout:
        """The run's configuration with other settings, on so many ranks, or on as few as it takes.

        Raises:
            JinguError: settings that are wrong or do not fit the model, the batch or the ranks.
        """
        config = self._changed(self.config, words)
        if ranks is None:
            given = [getattr(config.parallel, axis) for axis in AXES]
            ranks = math.prod(size for size in given if size != "auto")
        return self.fitted(config, ranks)

    def fitted(self, config: RunConfig, ranks: int) -> Layout:
        """A configuration on so many ranks; where its micro batch is too large for a rank's share, with another one."""
        try:
            sizes, _ = plan_layout(config, ranks, self.spec)
        except JinguError:
            config = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": "auto"})})
            sizes, _ = plan_layout(config, ranks, self.spec)
        return Layout(config, ranks, sizes)

    def record(self, layout: Layout, precision: str) -> Path:
        """The folder of a short run of a layout.

        Raises:
            JinguError: the run broke off.
        """
        key = (layout.config.model_dump_json(), layout.ranks, precision)
        if key not in self._recorded:
            name = f"run-{len(self._recorded)}"
            config = self._changed(layout.config, short_run(self.folder, name, self.steps, precision))
            file, words = self.folder / f"{name}.yaml", self.folder / f"{name}.txt"
            file.write_text(dump_yaml(config), encoding="utf-8")
            trace = str(self.folder / name / "trace")
            if start_local_ranks(layout.ranks, ["train", str(file), "--trace", trace], output=words):
                sys.stderr.write(words.read_text(encoding="utf-8", errors="replace"))
                raise JinguError(f"the run of the layout {layout} broke off; its words stand above.")
            self._recorded[key] = self.folder / name
        return self._recorded[key]

    def _changed(self, config: RunConfig, words: Sequence[str]) -> RunConfig:
        file = self.folder / "changed.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        return load_config(file, words)


def short_run(folder: Path, name: str, steps: int, precision: str) -> list[str]:
    """Overrides for a run that leaves what is compared, every step of it."""
    return [
        *(f"runs={folder}", f"name={name}", f"precision={{type: {precision}}}"),
        *(f"train.steps={steps}", "train.log_every=1", "train.compile=false", "train.tensorboard=false"),
        # Clipping would spread one wrong gradient over all; the norm is compared by itself.
        "train.clip_norm=null",
        *("checkpoint.every=1", f"checkpoint.keep={steps}"),
    ]


def _judge(bench: Workbench, first: Layout, second: Layout, precision: str) -> tuple[str, bool]:
    """What is to be said of two layouts, and whether they are equal."""

    def compared(kind: str) -> list[Check]:
        return list(checks(bench.record(first, kind), bench.record(second, kind), bench.steps))

    found = compared(precision)
    worst = first_divergence(found, TOLERANCES[precision])
    if worst is None:
        largest = max(found, key=lambda check: check.difference)
        return f"equal in {precision}. The largest difference is {largest.difference:.1e} in {largest.words}.", True
    other = "fp32" if precision == "fp64" else "fp64"
    return explain(worst, precision, compared(other), other), False


def first_divergence(found: Sequence[Check], tolerance: float) -> Check | None:
    """The first check, in the order of the computation, that is beyond the tolerance."""
    return next((check for check in found if not check.difference <= tolerance), None)


def explain(worst: Check, precision: str, others: Sequence[Check], other: str) -> str:
    """What diverges first, and whether it is rounding, which shrinks in fp64, or a bug, which does not."""
    same = [check.difference for check in others if (check.kind, check.name) == (worst.kind, worst.name)]
    again = max(same, default=math.inf)
    wide, narrow = (worst.difference, again) if precision == "fp64" else (again, worst.difference)
    if wide <= TOLERANCES["fp64"] or wide * 1000 < narrow:
        verdict = "It shrinks in fp64: rounding, not a bug"
    else:
        verdict = "It does not shrink in fp64: a bug, not rounding"
    return (
        f"diverged. What differs first is {worst.words}, by {worst.difference:.1e} of its size in {precision} and "
        f"{again:.1e} in {other}. {verdict}."
    )


def checks(first: Path, second: Path, steps: int) -> Iterator[Check]:
    """Everything that two runs have left, compared in the order of the computation."""
    ours, theirs = (read_traces(run / "trace") for run in (first, second))
    for name, noted in ours.items():
        apart = differences(noted, theirs[name]) if name in theirs else math.inf
        if apart is not None:
            yield Check("output", 1, name, apart)
    ran = {name: place for place, name in enumerate(ours)}
    lines = [_metrics(run) for run in (first, second)]
    for step in range(1, steps + 1):
        a, b = (side[step - 1] for side in lines)
        for name in a.keys() - {"grad_norm"}:
            yield Check("loss", step, name, _apart(a[name], b[name]))
        stored = [step_folder(run / "checkpoints", step) for run in (first, second)]
        # After the first step the optimizer's first moment is the gradient, but for a factor.
        gradients = _tensors("gradient", step, stored, "optimizer/exp_avg/")
        # The way back: a parameter of the module that ran last comes first; what is no module's own, such as the
        # head's weight, before all of them.
        yield from sorted(gradients, key=lambda check: -ran.get(check.name.rpartition(".")[0], len(ran)))
        yield Check("loss", step, "grad_norm", _apart(a["grad_norm"], b["grad_norm"]))
        yield from _tensors("weight", step, stored, "model/")


def _metrics(run: Path) -> list[dict[str, float]]:
    """The results of each step: losses by name, and the norm of the gradient."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        {name: float(value) for name, value in line.items() if name not in _TOLD}
        for line in lines
        if line["type"] == "train"
    ]


def _apart(a: float, b: float) -> float:
    apart = abs(a - b) / max(abs(a), 1e-300) if a != b else 0.0
    return apart if math.isfinite(apart) else math.inf


def _tensors(kind: str, step: int, folders: Sequence[Path], prefix: str) -> list[Check]:
    """Tensors of two checkpoints, by name."""
    first, second = (set(names(folder, prefix)) for folder in folders)
    readers = [Reader(folder) for folder in folders]
    found: list[tuple[str, float, float]] = []
    for name in sorted(first | second):
        apart = size = math.inf
        if name in first & second:
            apart, size = _difference(*(reader.read(name) for reader in readers))
        found.append((name.removeprefix(prefix), apart, size))
    floor = FLOOR * max((size for _, _, size in found if size < math.inf), default=0.0)
    return [
        Check(kind, step, name, apart / max(size, floor, 1e-300) if apart < math.inf else apart)
        for name, apart, size in found
    ]


def _difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Largest difference and largest magnitude."""
    if a.shape != b.shape:
        return math.inf, math.inf
    if not a.numel():
        return 0.0, 0.0
    apart = (a.double() - b.double()).abs().max().nan_to_num(math.inf)
    return float(apart), float(a.double().abs().max())
