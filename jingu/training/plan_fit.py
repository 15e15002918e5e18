"""`jingu plan MODEL --fit`: what a machine can do with a model, by kind of training, length and number of streams."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from jingu.config.batch_plan import BatchPlan
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import HostOffloadSettings, ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.formatting import print_table
from jingu.model.spec import ModelSpec
from jingu.parallel.mesh import AxisSizes
from jingu.plan.forecast import forecast, run_workload
from jingu.plan.machine import Machine
from jingu.plan.serving import SERVED_BYTES, plan_serving
from jingu.plan.software import Software
from jingu.plan.workload import Workload

# Settings of each kind of training, and lengths in tokens.
TUNINGS = {
    "full": [],
    "LoRA": ["tune.type=lora"],
    "QLoRA (int4)": ["tune.type=lora", "tune.quantization=int4"],
}
LENGTHS = (2048, 8192, 32768, 131072)
MAX_MICRO_BATCH = 256
# Forms of served weights.
FORMS = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class Training:
    """The largest micro-batch of a kind of training at a length; 0: none fits.

    Attributes:
        offload: whether optimizer state and weights must be in main memory.
        gib: planned memory of a GPU; tokens_per_second: of all GPUs.
    """

    tuning: str
    length: int
    micro_batch: int
    offload: bool = False
    gib: float = 0.0
    tokens_per_second: float = 0.0


@dataclass(frozen=True)
class Streams:
    """The sequences of a length that fit beside the weights of a served model; 0: none."""

    weights: str
    length: int
    streams: int
    tokens_per_second: float = 0.0


def fit_training(
    tuning: str, config: RunConfig, spec: ModelSpec, software: Software, machine: Machine, ranks: int
) -> list[Training]:
    """Return what fits at each length, with ZeRO 3 over all GPUs and full activation checkpointing."""
    config = config.model_copy(
        update={"parallel": ParallelSettings(zero_stage=3 if ranks > 1 else 0, shard=ranks, replicate=1)}
    )
    plan = BatchPlan(ranks, 1, 1, ranks)
    base = run_workload(config, spec, AxisSizes(1, 1, ranks, 1, 1, 1), plan, software)
    base = replace(base, checkpointing=ActivationCheckpointingSettings(type="full"))
    return [_largest(tuning, replace(base, sequence=length), machine) for length in LENGTHS]


def _largest(tuning: str, work: Workload, machine: Machine) -> Training:
    """Return the largest micro-batch that fits, offloaded only if nothing fits otherwise."""
    offloaded = replace(work, parallel=work.parallel.model_copy(update={"offload": HostOffloadSettings()}))
    for start in (work,) if machine.is_shared else (work, offloaded):
        best, micro = None, 1
        while micro <= MAX_MICRO_BATCH:
            outcome = forecast(replace(start, micro_batch=micro), machine, 1)
            if outcome.spare < 0:
                break
            best, micro = outcome, 2 * micro
        if best is not None:
            speed = best.work.tokens_per_step / best.step
            gib = best.memory.total / 2**30
            return Training(tuning, work.sequence, best.work.micro_batch, start is offloaded, gib, speed)
    return Training(tuning, work.sequence, 0)


def fit_streams(spec: ModelSpec, machine: Machine, gpus: int) -> list[Streams]:
    """Return how many streams of each length fit beside the weights."""
    result = []
    for name in FORMS:
        for length in LENGTHS:
            try:
                plan = plan_serving(spec, machine, gpus, length, SERVED_BYTES[name])
            except JinguError:
                result.append(Streams(name, length, 0))
                continue
            fitting = [speed for number, speed in plan.speeds.items() if number <= plan.max_streams]
            result.append(Streams(name, length, plan.max_streams, max(fitting, default=0.0)))
    return result


def print_fit(trainings: list[Training], streams: list[Streams], machine: Machine, gpus: int, as_json: bool) -> int:
    """Print what fits; return the exit code: 1 if nothing does."""
    if as_json:
        print(json.dumps({"training": [asdict(row) for row in trainings], "serving": [asdict(row) for row in streams]}))
    else:
        print(f"{gpus} × {machine.name}, {machine.usable_bytes / 2**30:,.1f} GiB each without driver and libraries\n")
        rows = []
        for row in trainings:
            cells = (row.tuning, f"{row.length:,}", str(row.micro_batch), f"{row.gib:,.1f}")
            note = "offload to main memory" if row.offload else ""
            text = (*cells, f"{row.tokens_per_second:,.0f}", note)
            rows.append(text if row.micro_batch else (*cells[:2], "–", "", "", "does not fit"))
        print_table(("training", "length", "micro-batch", "GiB", "tokens/s", ""), rows, range(1, 5))
        print()
        serving = [
            (row.weights, f"{row.length:,}", f"{row.streams:,}", f"{row.tokens_per_second:,.0f}") for row in streams
        ]
        print_table(("served weights", "length", "streams", "tokens/s"), serving, [1, 2, 3])
        print("\nassumed: ZeRO 3 over all GPUs, full activation checkpointing, a micro-batch a step")
    return int(not any(row.micro_batch for row in trainings) and not any(row.streams for row in streams))
