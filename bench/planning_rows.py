"""Rows of published runs: each table's columns, and how its training system executed a step.

A table is recognised by its columns, so that any file with the same columns can be read. The rows here are in
bench/planning/; the head of each file names its source.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.model.count import flops_per_token
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.resolve import find_preset
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.mesh import AXES, AxisSizes
from jingu.plan.machine import Machine, find_machine
from jingu.plan.software import Software, find_software, software_library
from jingu.plan.workload import Workload, model_sizes

FOLDER = Path(__file__).parent / "planning"
Row = dict[str, str]
LIBRARY = software_library()

# The speed of fp8 matmuls includes the casts of their inputs. The number of kernels of a mixture of experts depends on
# how the host launches them; for eager blocks it is inferred from two rows of mixtures.csv in which the host is the
# bottleneck.
MIXTURE_FP8_SPEED = 1.3
EXPERT_KERNELS = {"eager": 300.0, "graphs": 100.0, "drop": 100.0}
# Layers, hidden size and heads of MPT models; a head has 64 or 128 dims.
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


@dataclass(frozen=True)
class Case:
    """A published row: a step, the machine, and the measurements.

    Attributes:
        table: rows that were measured together; system: tables of one training system on one kind of machine.
        work: the step.
        machine: where it ran.
        seconds: measured seconds per step; None: not measured.
        gib: measured memory of the fullest GPU in GiB; None: not measured.
        fits: whether the step ran, or ran out of memory; None: not said.
    """

    table: str
    system: str
    work: Workload
    machine: Machine
    seconds: float | None = None
    gib: float | None = None
    fits: bool | None = None


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV file, without comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    # In one file, the header also begins with a number sign.
    return list(csv.DictReader(line for line in lines if not line.startswith("#") or line.startswith("# GPUs,")))


def whole(row: Row, *keys: str) -> list[int]:
    """Return cells of a row as integers."""
    return [int(float(row[key])) for key in keys]


def gpt(layers: int, hidden: int, heads: int, sequence: int, vocab: int = 51200, **fields: Any) -> ModelSpec:
    """Return the spec of a GPT-2 with the given dimensions."""
    dims = {
        "attention.num_heads": heads,
        "attention.num_kv_heads": heads,
        "attention.head_dim": hidden // heads,
        "feed_forward.intermediate_size": 4 * hidden,
    }
    template = FAMILIES["gpt2"].template
    fields |= {"num_layers": layers, "hidden_size": hidden, "vocab_size": vocab, "max_position_embeddings": sequence}
    return replace_fields(template, **fields, **dims)


def workload(
    spec: ModelSpec,
    axes: dict[str, int],
    micro: int,
    rows: int,
    software: Software,
    checkpointing: str = "full",
    **parallel: Any,
) -> Workload:
    """Return the step of a published run.

    Args:
        axes: sizes of the mesh axes; the others are 1.
        micro: micro-batch size.
        rows: sequences per step.
        software: how the framework executes a step.
        parallel: further settings of the section `parallel`.
    """
    sizes = AxisSizes(**{axis: axes.get(axis, 1) for axis in (*AXES, "expert")})
    settings = ParallelSettings(**({"zero_stage": 0} | parallel))
    return Workload(
        model_sizes(spec, software.compute_bytes),
        sizes,
        settings,
        spec.max_position_embeddings,
        micro,
        max(1, rows // (micro * sizes.data)),
        ActivationCheckpointingSettings.model_validate({"type": checkpointing}),
        software=software,
    )


# Tables


def vtrain(row: Row) -> list[Case]:
    """Return a row of vTrain: Megatron-LM with full recomputation on one node, or on several."""
    tensor, data, pipeline = whole(row, *(f"{axis} parallelism" for axis in ("tensor", "data", "pipeline")))
    layers, hidden, heads, sequence = whole(row, "# layers", "hidden size", "attention heads", "sequence length")
    micro, batch = whole(row, "micro batch", "global batch")
    axes = {"tensor": tensor, "replicate": data, "pipeline": pipeline}
    spec = gpt(layers, hidden, heads, sequence)
    is_small = tensor * data * pipeline <= 8
    work = workload(spec, axes, micro, batch, LIBRARY["megatron-2021"], "none" if is_small else "full")
    table = "vTrain, one node" if is_small else "vTrain, several nodes"
    return [Case(table, "vTrain", work, find_machine("a100-80"), float(row["iteration time (ms)"]) / 1e3)]


# Micro-batch and stages per rank of the rows of SC'21, by billions of parameters (Megatron-LM, examples/sc21).
SC21_STEPS = {
    1.7: (16, 1),
    3.6: (16, 1),
    7.5: (16, 1),
    18.4: (8, 1),
    39.1: (4, 1),
    76.1: (2, 3),
    145.6: (2, 2),
    310.1: (1, 2),
    529.6: (1, 3),
    1008.0: (1, 1),
}


def sc21(row: Row) -> list[Case]:
    """Return a row of table 1 of Narayanan et al., 2021. It gives TFLOP/s per GPU, counted as in the paper."""
    tensor, pipeline, cards, hidden, layers, batch = whole(row, "tp", "pp", "gpus", "hidden", "layers", "gbs")
    flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    axes = {"tensor": tensor, "pipeline": pipeline, "replicate": cards // tensor // pipeline}
    micro, chunks = SC21_STEPS.get(float(row["params_b"]), (1, 1))
    parallel = {"pipeline_schedule": "interleaved", "stages_per_rank": chunks} if chunks > 1 else {}
    spec = gpt(layers, hidden, int(row["heads"]), 2048)
    work = workload(spec, axes, micro, batch, LIBRARY["megatron-2021"], **parallel)
    seconds = flops / (float(row["tflops_gpu"]) * 1e12 * cards)
    return [Case("Megatron SC'21", "Megatron", work, find_machine("a100-80"), seconds)]


def korthikanti(row: Row) -> list[Case]:
    """Return a row of tables 3 and 5 of Korthikanti et al., 2022, which gives two steps."""
    layers, hidden, heads, tensor, pipeline, chunks = whole(row, "layers", "hidden", "heads", "tp", "pp", "vp")
    micro, batch = whole(row, "mbs", "gbs")
    axes = {"tensor": tensor, "pipeline": pipeline}
    parallel = {"pipeline_schedule": "interleaved", "stages_per_rank": chunks} if chunks > 1 else {}
    spec = gpt(layers, hidden, heads, 2048)
    cases = []
    for software, kind, key in (
        ("megatron-2021", "full", "iter_s_full_recompute"),
        ("megatron-2022", "selective", "iter_s_selective_sp"),
    ):
        work = workload(spec, axes, micro, batch, LIBRARY[software], kind, **parallel)
        cases.append(Case("Korthikanti 2022", "Megatron", work, find_machine("a100-80"), float(row[key])))
    return cases


def foundry(row: Row) -> list[Case]:
    """Return a row of llm-foundry's MPT models with FSDP."""
    sequence, cards, micro, batch = whole(row, "SeqLen (T)", "# GPUs", "MicroBatchSize", "GlobalBatchSize")
    software = LIBRARY["llm-foundry"]
    if "fp8" in row["Precision"]:
        software = replace(software, matmul_speed=1.6)
    spec = gpt(*MPT[row["Model"]], sequence, 50368, tie_word_embeddings=True)
    checkpointing = "full" if row["Activation Checkpointing"] == "True" else "none"
    zero = 3 if row["Sharding Strategy"] == "FULL_SHARD" else 2
    work = workload(spec, {"shard": cards}, micro, batch, software, checkpointing, zero_stage=zero)
    machine = find_machine({"h100_80gb": "h100", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}[row["GPU"]])
    table = f"llm-foundry, {machine.name[:4].upper()}"
    seconds = batch * sequence / (float(row["Throughput (T/s/GPU)"]) * cards)
    return [Case(table, table, work, machine, seconds)]


def zero_bubble(row: Row) -> list[Case]:
    """Return a row of Qi et al., 2023, with a schedule that jingu has: 1F1B, interleaved 1F1B and ZB-H1."""
    schedules: dict[str, dict[str, Any]] = {
        "1F1B": {},
        "1F1B-I": {"pipeline_schedule": "interleaved", "stages_per_rank": "auto"},
    }
    if not row["samples_s_gpu"] or row["schedule"] not in schedules:
        return []
    layers, heads, hidden, ranks, micro, batches = whole(row, "layers", "heads", "hidden", "pp", "mbs", "microbatches")
    parallel = dict(schedules[row["schedule"]])
    # Embedding and head count as one layer each when layers are divided over stages; an interleaved stage is one layer.
    chunks = (layers + 2) // ranks if parallel else 1
    stages = ranks * chunks
    sizes = [(layers + 2) // stages - (stage in (0, stages - 1)) for stage in range(stages)]
    if min(sizes) > 0:
        parallel |= {"layers_per_stage": sizes} | ({"stages_per_rank": chunks} if chunks > 1 else {})
    spec = gpt(layers, hidden, heads, 1024, 50304)
    work = workload(spec, {"pipeline": ranks}, micro, micro * batches, LIBRARY["megatron-2023"], "none", **parallel)
    seconds = micro * batches / (float(row["samples_s_gpu"]) * ranks)
    gib = float(row["mem_gb"]) * 1e9 / 2**30
    return [Case("zero bubble", "zero bubble", work, find_machine("a100-80"), seconds, gib)]


def oneflow(row: Row) -> list[Case]:
    """Return a row of OneFlow's GPT on V100 GPUs, whose stages are all equal."""
    data, tensor, pipeline, batch, micro = whole(row, "dp", "tp", "pp", "gbs", "mbs")
    layers, hidden, heads = whole(row, "layers", "hidden", "heads")
    axes = {"replicate": data, "tensor": tensor, "pipeline": pipeline}
    equal = [layers // pipeline] * pipeline
    spec = gpt(layers, hidden, heads, 2048)
    # Without tensor parallelism, collectives have a stream of their own (oneflow_gpt/training.py).
    software = replace(LIBRARY["oneflow-2021"], overlap=Software().overlap if tensor == 1 else 0.0)
    work = workload(spec, axes, micro, batch, software, layers_per_stage=equal)
    # The eight GPUs of a node share a link of 100 Gbit/s, 12.5 GB/s.
    machine = find_machine("v100-16").model_copy(update={"nic_gbs": 12.5 / 8})
    gib = float(row["mem_mib"]) / 1024
    return [Case("OneFlow, V100", "OneFlow", work, machine, float(row["iter_ms"]) / 1e3, gib)]


def torchtitan(row: Row) -> list[Case]:
    """Return a row of torchtitan's Llama 3.1, from several versions of its page of benchmarks."""
    cards, shard, tensor, pipeline, context, sequence = whole(row, "gpus", "fsdp", "tp", "pp", "cp", "seq")
    preset = FAMILIES["llama"].presets[row["model"].replace("llama3.1", "llama-3.1")]
    spec = replace_fields(preset, max_position_embeddings=sequence)
    software = LIBRARY["torchtitan-compiled" if row["compile"] == "yes" else "torchtitan"]
    if row["source"] >= "202506":
        software = LIBRARY["torchtitan-2025"]
    if row["precision"].startswith("float8"):
        software = replace(software, matmul_speed=1.4)
    checkpointing = "full" if row["ac"] == "full" else "selective"
    axes = {"shard": shard, "tensor": tensor, "pipeline": pipeline, "context": context}
    # Until 2025 a rank had as many micro-batches as stages. Pipelines keep weights gathered, and gradients whole.
    micro = max(1, int(row["local_batch"]) // pipeline)
    parallel: dict[str, Any] = {"zero_stage": 3 if pipeline == 1 else 1, "context_method": "ring"}
    if "nterleaved" in (row["schedule"] or ""):
        parallel |= {"pipeline_schedule": "interleaved", "stages_per_rank": 2}
    work = workload(spec, axes, micro, int(row["gbs"]), software, checkpointing, **parallel)
    machine = find_machine("h200" if "H200" in row["source"] else "h100-96")
    seconds = work.tokens_per_step / (float(row["tps_gpu"]) * cards)
    return [Case("torchtitan", "torchtitan", work, machine, seconds, float(row["mem_gib"]) if row["mem_gib"] else None)]


def mixtures(row: Row) -> list[Case]:
    """Return a row of mixtures of experts in NVIDIA's frameworks."""
    presets = FAMILIES["mixtral"].presets | FAMILIES["qwen3_moe"].presets
    cards, tensor, expert, pipeline, chunks = whole(row, "gpus", "tp", "ep", "pp", "chunks")
    micro, batch, sequence = whole(row, "mbs", "gbs", "seq")
    spec = replace_fields(presets[row["model"]], max_position_embeddings=sequence)
    software = replace(
        LIBRARY["megatron-core"],
        matmul_speed=MIXTURE_FP8_SPEED if row["precision"] == "fp8" else 1.0,
        expert_kernels=EXPERT_KERNELS[row["host"]],
        sends_to_nodes=row["dispatcher"] != "alltoall",
        overlaps_experts=row["overlap"] == "yes",
        # Interleaved stages (chunks) let sends of hidden states overlap with computation.
        overlaps_sends=chunks > 1,
    )
    # There, `tensor` does not divide experts, but more ranks share them: a rank has the same number of elements.
    axes = {"tensor": tensor, "pipeline": pipeline, "shard": cards // tensor // pipeline}
    axes["expert"] = max(1, expert // tensor)
    parallel: dict[str, Any] = {"zero_stage": 3 if row["sharded"] == "yes" else 1}
    if chunks > 1:
        parallel |= {"pipeline_schedule": "interleaved", "stages_per_rank": chunks}
    work = workload(spec, axes, micro, batch, software, row["recompute"], **parallel)
    # A row gives seconds per step, tokens per second and GPU, or TFLOP/s per GPU.
    tokens = work.tokens_per_step
    if row["step_s"]:
        seconds = float(row["step_s"])
    elif row["tokens_s_gpu"]:
        seconds = tokens / (float(row["tokens_s_gpu"]) * cards)
    else:
        flops = flops_per_token(spec, parameter_shapes(spec), sequence) * tokens
        seconds = flops / (float(row["tflops_gpu"]) * 1e12 * cards)
    table = f"mixtures, {'H100' if row['machine'] == 'h100' else 'B200, GB200, GB300'}"
    return [Case(table, table, work, find_machine(row["machine"]), seconds)]


# Columns of the general form: software, machine and model; sizes of the axes; further settings; measurements.
AXES_OF_COLUMNS = {
    "pp": "pipeline",
    "dp": "replicate",
    "fsdp": "shard",
    "cp": "context",
    "tp": "tensor",
    "ep": "expert",
}
MEASUREMENTS = ("iter_s", "mem_gib")
GENERAL_COLUMNS = (
    *("table", "software", "machine", "nic_gbs", "model", "layers", "hidden", "heads", "vocab", "seq"),
    *(*AXES_OF_COLUMNS, "zero", "mbs", "gbs", "recompute", "schedule", "chunks"),
    *(*MEASUREMENTS, "fits"),
)


def general(row: Row) -> list[Case]:
    """Return a row of a table with columns of its own names, which any published run can be written in.

    `software` and `machine` are names of the planner's libraries. The model is a preset (`model`), or a GPT of
    `layers`, `hidden`, `heads` and `vocab`. Sizes of axes that are not given are 1. Measured are `iter_s`, `mem_gib`,
    or `fits` (yes or no).

    Raises:
        JinguError: a cell is missing or wrong, or nothing was measured.
    """
    sequence = _count(row, "seq", 2048)
    if row.get("model"):
        spec = replace_fields(find_preset(row["model"]), max_position_embeddings=sequence)
    else:
        spec = gpt(*(_count(row, key) for key in ("layers", "hidden", "heads")), sequence, _count(row, "vocab", 51200))
    sizes = {axis: _count(row, column, 1) for column, axis in AXES_OF_COLUMNS.items()}
    zero = _count(row, "zero", 3 if sizes["shard"] > 1 else 0, least=0)
    parallel: dict[str, Any] = {"zero_stage": zero}
    if row.get("schedule"):
        stages = _count(row, "chunks") if row.get("chunks") else "auto"
        parallel |= {"pipeline_schedule": row["schedule"], "stages_per_rank": stages}
    micro, data = _count(row, "mbs", 1), sizes["shard"] * sizes["replicate"]
    rows = _count(row, "gbs", micro * data)
    if rows % (micro * data):
        raise JinguError(f"{rows} sequences a step are no multiple of {micro} on each of {data} data-parallel ranks.")
    software = find_software(row["software"])
    work = workload(spec, sizes, micro, rows, software, row.get("recompute") or "none", **parallel)
    machine = find_machine(row["machine"])
    if row.get("nic_gbs"):
        machine = machine.model_copy(update={"nic_gbs": _positive(row, "nic_gbs")})
    seconds, gib = (_positive(row, key) if row.get(key) else None for key in MEASUREMENTS)
    fits = {"yes": True, "no": False, "": None}.get((row.get("fits") or "").lower(), "")
    if fits == "":
        raise JinguError(f"it is {row['fits']}, and should be yes or no.", where="fits")
    if seconds is None and gib is None and fits is None:
        raise JinguError("nothing was measured.", fix=f"Give {', '.join(MEASUREMENTS)} or fits.")
    name = row.get("table") or row["software"]
    return [Case(name, name, work, machine, seconds, gib, fits)]


def _positive(row: Row, column: str) -> float:
    """Return a positive number of a row."""
    try:
        value = float(row.get(column) or "")
    except ValueError:
        value = nan
    if not 0 < value < inf:
        raise JinguError(f"it is {row.get(column) or 'empty'}, and should be a positive number.", where=column)
    return value


def _count(row: Row, column: str, default: int | None = None, *, least: int = 1) -> int:
    """Return an integer of a row; without a default, the cell must not be empty."""
    text = row.get(column) or ""
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not least <= value < inf or value != int(value):
        raise JinguError(f"it is {text or 'empty'}, and should be an integer of at least {least}.", where=column)
    return int(value)


# The tables by columns that only they have together.
TABLES: tuple[tuple[tuple[str, ...], Callable[[Row], list[Case]]], ...] = (
    (("tensor parallelism", "iteration time (ms)"), vtrain),
    (("pct_peak", "agg_pflops"), sc21),
    (("iter_s_full_recompute", "iter_s_selective_sp"), korthikanti),
    (("Sharding Strategy", "Throughput (T/s/GPU)"), foundry),
    (("samples_s_gpu", "microbatches"), zero_bubble),
    (("iter_ms", "mem_mib", "dp"), oneflow),
    (("tps_gpu", "local_batch"), torchtitan),
    (("dispatcher", "host"), mixtures),
    (("software", "machine"), general),
)


def read_cases(path: Path) -> list[Case]:
    """Return the cases of a CSV file, or of all files of a folder that have the columns of a table.

    Raises:
        JinguError: a file does not exist, or has the columns of no table; or a row of it is wrong.
    """
    if path.is_dir():
        return [case for file in sorted(path.glob("*.csv")) if _reader(file) for case in read_cases(file)]
    if not path.is_file():
        raise JinguError("the file does not exist.", where=path, fix="Name a CSV file, or a folder of them.")
    reader = _reader(path)
    if reader is None:
        forms = "; ".join(", ".join(columns) for columns, _ in TABLES)
        raise JinguError("it has the columns of no known table.", where=path, fix=f"Tables are known by: {forms}.")
    rows = read_rows(path)
    unread = [column for column in rows[0] if column is not None and column not in GENERAL_COLUMNS]
    if reader is general and unread:
        print(f"{path}: columns that are not read: {', '.join(unread)}.", file=sys.stderr)
    return [case for number, row in enumerate(rows, 1) for case in _read_row(reader, row, path, number)]


def _read_row(reader: Callable[[Row], list[Case]], row: Row, path: Path, number: int) -> list[Case]:
    """Return the cases of a row; errors name the row."""
    if None in row or None in row.values():
        raise JinguError(f"row {number}: it has more or fewer cells than there are columns.", where=path)
    try:
        return reader(row)
    except ValidationError as error:
        (first, *_) = error.errors()
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}."
    except (JinguError, ArithmeticError, ValueError) as error:
        what = str(error)
    raise JinguError(f"row {number}: {what}", where=path)


def _reader(path: Path) -> Callable[[Row], list[Case]] | None:
    columns = set(next(iter(read_rows(path)), {}))
    return next((reader for names, reader in TABLES if columns.issuperset(names)), None)
