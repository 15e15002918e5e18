"""`jingu verify`: check that two layouts compute the same outputs, losses, gradients and updated weights.

Each layout is a separate short run, from the same initial weights over the same batches. Verification compares the
files of the runs: whole tensors by name in their checkpoints, metrics, and traces of the first step. It therefore works
for every layout that can train and save.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from jingu.checkpoint.resume import step_folder
from jingu.checkpoint.save_folder import tensor_names
from jingu.checkpoint.store import CheckpointReader
from jingu.config.batch_plan import divisors
from jingu.config.load import config_from_tree, dump_yaml
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.schedules import resolve_steps
from jingu.errors import JinguError, pluralize
from jingu.parallel.mesh import AXES, AxisSizes
from jingu.parallel.stages import plan_layout
from jingu.runtime.files import temporary_folder
from jingu.runtime.launcher import launch_local_ranks
from jingu.training.run import open_run
from jingu.training.trace import max_difference, read_traces

# Maximum difference of equal results, as a share of their size, by precision. Differences from rounding in another
# order stay well below.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
# The size of a tensor counts as at least this share of the largest size among tensors of its kind. Without that, a
# tensor that is zero except for rounding would have huge relative differences.
SIZE_FLOOR = 1e-3
# Keys of a line of metrics.jsonl that are not results of the computation.
_NO_RESULTS = frozenset({"type", "step", "lr", "tokens", "tokens_per_second", "seconds", "peak_share", "memory_bytes"})
_DESCRIPTIONS = {
    "output": "the output of {} in the forward pass",
    "loss": "{}",
    "gradient": "the gradient of {}",
    "weight": "the updated weight {}",
}


@dataclass(frozen=True)
class Comparison:
    """One result, compared between two layouts.

    Attributes:
        kind: output, loss, gradient or weight.
        step: the step, counted from 1.
        name: name of the module, the loss or the parameter.
        difference: the largest difference, as a share of the result's size; infinite if one layout lacks the result.
    """

    kind: str
    step: int
    name: str
    difference: float

    @property
    def description(self) -> str:
        return f"{_DESCRIPTIONS[self.kind].format(self.name)} (step {self.step})"


@dataclass(frozen=True)
class ComparedLayout:
    """A configuration with the number of ranks on which it runs.

    Attributes:
        sizes: sizes of the mesh axes.
    """

    config: RunConfig
    ranks: int
    sizes: AxisSizes

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 process"
        settings = self.config.parallel
        parts = [str(self.sizes)]
        if self.sizes.expert > 1:
            parts.append(f"{self.sizes.expert} expert")
        if self.sizes.context > 1 and settings.context_method == "ring":
            parts.append("ring")
        if self.sizes.pipeline > 1:
            parts.append(settings.pipeline_schedule)
        return ", ".join([*parts, f"zero {settings.zero_stage}"])


def verify(
    config: RunConfig,
    against: Sequence[str] | None = None,
    all_of: int | None = None,
    processes: int | None = None,
    steps: int = 3,
    precision: str = "fp64",
) -> int:
    """Compare two layouts of a run, and print the result.

    Args:
        against: overrides of `config` for the second layout; the first is that of `config`. None: compare one process
            with the layout of `config`.
        all_of: compare every valid layout of this number of ranks with one process instead.
        processes: number of ranks of the second layout; None: as few as possible.
        steps: number of optimizer steps to compare.
        precision: fp64, fp32, bf16 or fp16.

    Returns:
        The exit code: 0 if all results are equal, else 1.

    Raises:
        JinguError: a layout does not fit the model, the data or the machine, or its run failed.
    """
    Path(config.runs_dir).mkdir(parents=True, exist_ok=True)
    with temporary_folder(".verify-", Path(config.runs_dir)) as folder:
        runner = LayoutRunner(folder, config, steps)
        single = runner.layout(["parallel={zero_stage: 0}"], 1)
        if all_of is not None:
            return _verify_all(runner, single, all_of, precision)
        first = runner.layout([], None) if against else single
        second = runner.layout(list(against or ()), processes)
        message, is_equal = _compare_layouts(runner, first, second, precision)
        print(f"{first} vs. {second}, {steps} steps: {message}")
        return 0 if is_equal else 1


def _verify_all(runner: LayoutRunner, single: ComparedLayout, ranks: int, precision: str) -> int:
    """Compare every valid layout with one process, print the results, and return the exit code."""
    layouts = list(valid_layouts(runner, ranks))
    print(f"{pluralize(len(layouts), 'layout')} of {ranks} ranks vs. 1 process:", flush=True)
    num_equal = 0
    for layout in layouts:
        message, is_equal = _compare_layouts(runner, single, layout, precision)
        print(f"  {layout}: {message}", flush=True)
        num_equal += is_equal
    print(f"{num_equal} of {len(layouts)} are equal.")
    return 0 if num_equal == len(layouts) else 1


def valid_layouts(runner: LayoutRunner, ranks: int) -> Iterator[ComparedLayout]:
    """Yield every layout on a number of ranks that model and batch allow.

    These are all combinations of axis sizes, ZeRO stages, pipeline schedules and methods of context parallelism; and
    for mixtures of experts, with and without expert parallelism. An option varies only where it has an effect.
    """
    has_experts = runner.spec.experts is not None
    fields = ParallelSettings.model_fields
    schedules = get_args(fields["pipeline_schedule"].annotation)
    methods = get_args(fields["context_method"].annotation)
    for axis_sizes in product(divisors(ranks), repeat=len(AXES)):
        if math.prod(axis_sizes) != ranks:
            continue
        sizes = dict(zip(AXES, axis_sizes, strict=True))
        is_sharded = sizes["shard"] * sizes["context"] > 1
        options = {
            "zero_stage": (0, 1, 2, 3) if is_sharded else (0,),
            "expert": (1, "auto") if has_experts and is_sharded else (1,),
            "pipeline_schedule": schedules if sizes["pipeline"] > 1 else schedules[:1],
            "context_method": methods if sizes["context"] > 1 else methods[:1],
        }
        for values in product(*options.values()):
            update = {**sizes, **dict(zip(options, values, strict=True))}
            parallel = runner.config.parallel.model_copy(update=update)
            try:
                yield runner.fit(runner.config.model_copy(update={"parallel": parallel}), ranks)
            except JinguError:
                continue  # model or batch do not allow this combination


class LayoutRunner:
    """Runs layouts in a folder, each layout only once per precision.

    Args:
        folder: folder of the short runs.
        config: configuration of the run, in any layout.
        steps: number of optimizer steps of each short run.
    """

    def __init__(self, folder: Path, config: RunConfig, steps: int) -> None:
        self.folder = folder
        # The run may already exist in another layout, so the short runs are in a separate folder.
        overrides = [f"runs_dir={folder}", "evaluation.every=0", "checkpoint.resume=auto"]
        if resolve_steps(config.schedule.warmup, steps) > steps:
            overrides.append("schedule.warmup=1.0")
        self.config = _override(config, overrides)
        self.spec = open_run(self.config).spec
        self.steps = steps
        self._runs: dict[tuple[str, int, str], Path] = {}

    def layout(self, overrides: Sequence[str], ranks: int | None) -> ComparedLayout:
        """Return the layout of the configuration with overrides.

        Args:
            ranks: number of ranks; None: the product of the axis sizes that are set.

        Raises:
            JinguError: the overrides are wrong, or do not fit the model, the batch or the ranks.
        """
        config = _override(self.config, overrides)
        if ranks is None:
            sizes = config.parallel.model_dump(include=set(AXES)).values()
            ranks = math.prod(size for size in sizes if size != "auto")
        return self.fit(config, ranks)

    def fit(self, config: RunConfig, ranks: int) -> ComparedLayout:
        """Return the layout of a configuration on a number of ranks.

        If that is not possible with the micro-batch size of the configuration, `auto` replaces it.

        Raises:
            JinguError: model, batch and ranks do not fit each other.
        """
        try:
            sizes, _ = plan_layout(config, ranks, self.spec)
        except JinguError:
            batch = config.batch.model_copy(update={"micro_batch_size": "auto"})
            config = config.model_copy(update={"batch": batch})
            sizes, _ = plan_layout(config, ranks, self.spec)
        return ComparedLayout(config, ranks, sizes)

    def run(self, layout: ComparedLayout, precision: str) -> Path:
        """Train the steps in a layout, unless that is done already, and return the folder of the run.

        Raises:
            JinguError: the run failed.
        """
        key = (layout.config.model_dump_json(), layout.ranks, precision)
        if key not in self._runs:
            name = f"run-{len(self._runs)}"
            config = _override(layout.config, short_run_overrides(self.folder, name, self.steps, precision))
            config_file = self.folder / f"{name}.yaml"
            config_file.write_text(dump_yaml(config), encoding="utf-8")
            output = self.folder / f"{name}.txt"
            trace = str(self.folder / name / "trace")
            if launch_local_ranks(layout.ranks, ["train", str(config_file), "--trace", trace], output=output):
                sys.stderr.write(output.read_text(encoding="utf-8", errors="replace"))
                raise JinguError(f"the run of the layout {layout} failed; its output stands above.")
            self._runs[key] = self.folder / name
        return self._runs[key]


def _override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a configuration with overrides in the form of the command line."""
    return config_from_tree(config.model_dump(), overrides)


def short_run_overrides(folder: Path, name: str, steps: int, precision: str) -> list[str]:
    """Return overrides for a short run that logs and saves every step, without compilation and clipping."""
    return [
        *(f"runs_dir={folder}", f"name={name}", f"precision={{type: {precision}}}"),
        *(
            f"train.steps={steps}",
            "train.log_every=1",
            "train.compile=false",
            "train.tensorboard=false",
            "train.trackers=[]",
        ),
        # With clipping, one wrong gradient would change all others. The norm is compared separately.
        "train.max_grad_norm=null",
        *("checkpoint.every=1", f"checkpoint.keep_last={steps}"),
    ]


def _compare_layouts(
    runner: LayoutRunner, first: ComparedLayout, second: ComparedLayout, precision: str
) -> tuple[str, bool]:
    """Run two layouts, and return the result as text, and whether they are equal."""

    def compare(precision: str) -> list[Comparison]:
        return list(compare_runs(runner.run(first, precision), runner.run(second, precision), runner.steps))

    comparisons = compare(precision)
    divergence = first_divergence(comparisons, TOLERANCES[precision])
    if divergence is None:
        largest = max(comparisons, key=lambda comparison: comparison.difference)
        difference = f"{largest.difference:.1e} in {largest.description}"
        note = ""
        if all(comparison.kind != "gradient" for comparison in comparisons):
            note = " Gradients were not compared, because the optimizer stores no first moment."
        return f"equal in {precision}. The largest difference is {difference}.{note}", True
    # Run both again in another precision, to distinguish rounding from a bug.
    second_precision = "fp32" if precision == "fp64" else "fp64"
    return explain_divergence(divergence, precision, compare(second_precision), second_precision), False


def first_divergence(comparisons: Sequence[Comparison], tolerance: float) -> Comparison | None:
    """Return the first comparison, in the order of the computation, that exceeds the tolerance."""
    for comparison in comparisons:
        if not comparison.difference <= tolerance:  # written so that NaN also counts
            return comparison
    return None


def explain_divergence(
    divergence: Comparison, precision: str, again: Sequence[Comparison], second_precision: str
) -> str:
    """Return a text that describes the first difference, and whether it is rounding or a bug.

    Rounding shrinks in fp64; a bug does not.

    Args:
        divergence: the first difference, in `precision`.
        again: all comparisons in the precision `second_precision`. One of the two precisions must be fp64.
    """
    key = (divergence.kind, divergence.name)
    same = [comparison.difference for comparison in again if (comparison.kind, comparison.name) == key]
    other_difference = max(same, default=math.inf)
    wide, narrow = divergence.difference, other_difference
    if precision != "fp64":
        wide, narrow = narrow, wide
    if wide <= TOLERANCES["fp64"] or wide * 1000 < narrow:
        verdict = "It shrinks in fp64: rounding, not a bug"
    else:
        verdict = "It does not shrink in fp64: a bug, not rounding"
    return (
        f"diverged. The first difference is in {divergence.description}: {divergence.difference:.1e} of its size in "
        f"{precision} and {other_difference:.1e} in {second_precision}. {verdict}."
    )


def compare_runs(first: Path, second: Path, steps: int) -> Iterator[Comparison]:
    """Compare the results of two runs from `LayoutRunner.run`, and yield them in the order of the computation."""
    # 1. The outputs of all modules in the first step.
    first_traces = read_traces(first / "trace")
    second_traces = read_traces(second / "trace")
    for name, traces in first_traces.items():
        difference = max_difference(traces, second_traces[name]) if name in second_traces else math.inf
        if difference is not None:
            yield Comparison("output", 1, name, difference)
    order = {name: index for index, name in enumerate(first_traces)}
    first_metrics = _read_metrics(first)
    second_metrics = _read_metrics(second)
    for step in range(1, steps + 1):
        # 2. The losses of the step.
        a = first_metrics[step - 1]
        b = second_metrics[step - 1]
        for name in a.keys() - {"grad_norm"}:
            # A metric that is 0 except for rounding, such as a reward before the first update, has no size of its own.
            floor = SIZE_FLOOR * abs(a["loss"])
            yield Comparison("loss", step, name, _relative_difference(a[name], b[name], floor))
        # 3. The gradients, as the first moment of the optimizer: after the first step this is the gradient times a
        # factor. They are sorted in the order of the backward pass, which starts with parameters that belong to no
        # traced module, such as the head, and continues with the module that ran last.
        folders = [step_folder(run / "checkpoints", step) for run in (first, second)]
        gradients = _compare_tensors("gradient", step, folders, "optimizer/exp_avg/")
        yield from sorted(gradients, key=lambda gradient: -order.get(gradient.name.rpartition(".")[0], len(order)))
        yield Comparison("loss", step, "grad_norm", _relative_difference(a["grad_norm"], b["grad_norm"]))
        # 4. The updated weights.
        yield from _compare_tensors("weight", step, folders, "model/")


def _read_metrics(run: Path) -> list[dict[str, float]]:
    """Return the results of each step: losses and other metrics, and the gradient norm, by name."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {name: float(value) for name, value in record.items() if name not in _NO_RESULTS}
        for record in records
        if record["type"] == "train"
    ]


def _relative_difference(a: float, b: float, floor: float = 0.0) -> float:
    """Return the difference as a share of `a`, or of `floor` if that is larger; infinite if it is not finite."""
    if a == b:
        return 0.0
    difference = abs(a - b) / max(abs(a), floor, 1e-300)
    return difference if math.isfinite(difference) else math.inf


def _compare_tensors(kind: str, step: int, folders: Sequence[Path], prefix: str) -> list[Comparison]:
    """Compare the tensors of two checkpoints whose names start with `prefix`. Reads one pair at a time."""
    first_names, second_names = (set(tensor_names(folder, prefix)) for folder in folders)
    first, second = (CheckpointReader(folder) for folder in folders)
    differences: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for name in sorted(first_names | second_names):
        differences[name] = math.inf
        if name in first_names & second_names:
            a = first.read(name).double()
            b = second.read(name).double()
            if a.shape == b.shape:
                differences[name] = float((a - b).abs().max().nan_to_num(math.inf))
                sizes[name] = float(a.abs().max())
    floor = max(SIZE_FLOOR * max(sizes.values(), default=0.0), 1e-300)
    return [
        Comparison(kind, step, name.removeprefix(prefix), difference / max(sizes.get(name, 0.0), floor))
        for name, difference in differences.items()
    ]
