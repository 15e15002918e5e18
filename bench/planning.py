"""Compare the planner with published runs: seconds per step, and memory of the fullest GPU.

The rows are in bench/planning/; the head of each file names its source. `python -m bench planning=FOLDER` also predicts
the rows of another folder, whose files have the same columns, with the efficiency that was fitted to the rows here.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.count import flops_per_token
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.mesh import AXES, AxisSizes
from jingu.plan.calibration import Measurement, fit_efficiency, prediction_errors
from jingu.plan.machine import Efficiency, find_machine
from jingu.plan.memory import fullest_stage
from jingu.plan.workload import Software, Workload, model_sizes

FOLDER = Path(__file__).parent / "planning"
# Most rows to which an efficiency is fitted.
MAX_FIT = 20
Row = dict[str, str]

# How the frameworks of the published runs execute a step.
# Megatron-LM of 2021 to 2023: fp16 weights and gradients with fp32 master weights and moments, dropout, attention
# scores in memory, no overlap of communication.
MEGATRON = Software(
    weight_bytes=2.0,
    gradient_bytes=2.0,
    reduce_bytes=2.0,
    state_share=1.5,
    copies_weights=False,
    whole_logits=True,
    fused_attention=False,
    sequence_parallel=False,
    saved_per_hidden=34.0,
    traffic=1.0,
    kernels=60,
    overlap=0.0,
)
# OneFlow of 2021: fp32 weights that are cast to fp16, gradients in both dtypes, logits and their gradient also in fp32.
# Collectives run between matmuls (nccl_use_compute_stream); sends of hidden states overlap with matmuls.
ONEFLOW = replace(MEGATRON, gradient_bytes=6.0, logit_bytes=10.0, overlaps_sends=True)
# llm-foundry: eager elementwise operations in fp32, attention with an early Triton kernel.
FOUNDRY = Software(reduce_bytes=2.0, traffic=2.5)
# Megatron-Core and NeMo of 2024 to 2026. The speed of fp8 matmuls includes the casts of their inputs. The number of
# kernels of a mixture of experts depends on how the host launches them; for eager blocks it is inferred from two rows
# of mixtures.csv in which the host is the bottleneck.
MCORE = Software(weight_bytes=2.0, reduce_bytes=2.0, traffic=1.0)
MIXTURE_FP8_SPEED = 1.3
EXPERT_KERNELS = {"eager": 300, "graphs": 100, "drop": 100}
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
        work: the step.
        machine: name of the machine in jingu's library.
        seconds: measured seconds per step.
        gib: measured memory of the fullest GPU in GiB; None: not measured.
        nic_gbs: network bandwidth per GPU in GB/s, if it differs from the library's machine.
        reserved: measured memory relative to that of the tensors, because of fragmentation.
        context: GiB of driver and libraries that the measurement includes.
    """

    work: Workload
    machine: str
    seconds: float
    gib: float | None = None
    nic_gbs: float | None = None
    reserved: float = 1.0
    context: float = 0.0

    @property
    def memory_error(self) -> float | None:
        """Relative error of the planned memory: planned / measured - 1; None: not measured."""
        if self.gib is None:
            return None
        return (fullest_stage(self.work)[1].total / 2**30 * self.reserved + self.context) / self.gib - 1


def read_rows(name: str, folder: Path) -> list[Row]:
    """Return the rows of a CSV file, without comments; an empty list if the file does not exist."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
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


# Sets of rows


def vtrain(name: str, folder: Path) -> list[Case]:
    """Return vTrain's rows.

    The rows of 175B would mean 61% of the peak FLOP/s with full recomputation, so only attention was recomputed.
    """
    cases = []
    for row in read_rows(name, folder):
        tensor, data, pipeline = whole(row, *(f"{axis} parallelism" for axis in ("tensor", "data", "pipeline")))
        layers, hidden, heads, sequence = whole(row, "# layers", "hidden size", "attention heads", "sequence length")
        micro, batch = whole(row, "micro batch", "global batch")
        selective = hidden >= 12288
        software = replace(MEGATRON, sequence_parallel=selective)
        axes = {"tensor": tensor, "replicate": data, "pipeline": pipeline}
        spec = gpt(layers, hidden, heads, sequence)
        work = workload(spec, axes, micro, batch, software, "selective" if selective else "full")
        cases.append(Case(work, "a100-80", float(row["iteration time (ms)"]) / 1e3))
    return cases


def sc21(folder: Path) -> list[Case]:
    """Return table 1 of Narayanan et al., 2021. It gives TFLOP/s per GPU, counted with the formula of the paper."""
    cases = []
    for row in read_rows("megatron_sc21_table1", folder):
        tensor, pipeline, cards, hidden, layers, batch = whole(row, "tp", "pp", "gpus", "hidden", "layers", "gbs")
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        axes = {"tensor": tensor, "pipeline": pipeline, "replicate": cards // tensor // pipeline}
        work = workload(gpt(layers, hidden, int(row["heads"]), 2048), axes, 1, batch, MEGATRON)
        cases.append(Case(work, "a100-80", flops / (float(row["tflops_gpu"]) * 1e12 * cards)))
    return cases


def korthikanti(folder: Path) -> list[Case]:
    """Return tables 3 and 5 of Korthikanti et al., 2022."""
    cases = []
    for row in read_rows("korthikanti_2022", folder):
        layers, hidden, heads, tensor, pipeline, chunks = whole(row, "layers", "hidden", "heads", "tp", "pp", "vp")
        micro, batch = whole(row, "mbs", "gbs")
        axes = {"tensor": tensor, "pipeline": pipeline}
        parallel = {"pipeline_schedule": "interleaved", "stages_per_rank": chunks} if chunks > 1 else {}
        spec = gpt(layers, hidden, heads, 2048)
        parallel_software = replace(MEGATRON, sequence_parallel=True)
        full = workload(spec, axes, micro, batch, MEGATRON, "full", **parallel)
        selective = workload(spec, axes, micro, batch, parallel_software, "selective", **parallel)
        cases.append(Case(full, "a100-80", float(row["iter_s_full_recompute"])))
        cases.append(Case(selective, "a100-80", float(row["iter_s_selective_sp"])))
    return cases


def foundry(kind: str, folder: Path) -> list[Case]:
    """Return llm-foundry's MPT models with FSDP.

    Args:
        kind: beginning of the GPU's name.
    """
    cases = []
    for row in read_rows("llm_foundry_mpt_fsdp", folder):
        if not row["GPU"].startswith(kind):
            continue
        sequence, cards, micro, batch = whole(row, "SeqLen (T)", "# GPUs", "MicroBatchSize", "GlobalBatchSize")
        software = FOUNDRY
        if "fp8" in row["Precision"]:
            software = replace(software, matmul_speed=1.6)
        spec = gpt(*MPT[row["Model"]], sequence, 50368, tie_word_embeddings=True)
        checkpointing = "full" if row["Activation Checkpointing"] == "True" else "none"
        zero = 3 if row["Sharding Strategy"] == "FULL_SHARD" else 2
        work = workload(spec, {"shard": cards}, micro, batch, software, checkpointing, zero_stage=zero)
        machine = {"h100_80gb": "h100", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}[row["GPU"]]
        cases.append(Case(work, machine, batch * sequence / (float(row["Throughput (T/s/GPU)"]) * cards)))
    return cases


def zero_bubble(folder: Path) -> list[Case]:
    """Return the rows of Qi et al., 2023, whose schedules jingu has: 1F1B, and interleaved 1F1B."""
    cases = []
    for row in read_rows("zero_bubble", folder):
        if not row["samples_s_gpu"] or row["schedule"] not in ("1F1B", "1F1B-I"):
            continue
        layers, heads, hidden, ranks, micro, batches = whole(
            row, "layers", "heads", "hidden", "pp", "mbs", "microbatches"
        )
        # Embedding and head count as one layer each when layers are divided over stages.
        sizes = [(layers + 2) // ranks - (rank in (0, ranks - 1)) for rank in range(ranks)]
        parallel: dict[str, Any] = {"layers_per_stage": sizes}
        if row["schedule"] == "1F1B-I":
            parallel = {"pipeline_schedule": "interleaved"}
        spec = gpt(layers, hidden, heads, 1024, 50304)
        work = workload(spec, {"pipeline": ranks}, micro, micro * batches, MEGATRON, "none", **parallel)
        seconds = micro * batches / (float(row["samples_s_gpu"]) * ranks)
        cases.append(Case(work, "a100-80", seconds, float(row["mem_gb"]) * 1e9 / 2**30))
    return cases


def oneflow(folder: Path) -> list[Case]:
    """Return OneFlow's GPT on V100 GPUs. Its pipelines buffer three micro-batches per stage; all stages are equal."""
    cases = []
    for row in read_rows("oneflow_gpt_v100", folder):
        data, tensor, pipeline, batch, micro = whole(row, "dp", "tp", "pp", "gbs", "mbs")
        layers, hidden, heads = whole(row, "layers", "hidden", "heads")
        axes = {"replicate": data, "tensor": tensor, "pipeline": pipeline}
        software = replace(ONEFLOW, in_flight=3 * pipeline)
        equal = [layers // pipeline] * pipeline
        work = workload(gpt(layers, hidden, heads, 2048), axes, micro, batch, software, layers_per_stage=equal)
        gib = float(row["mem_mib"]) / 1024
        # Network: the eight GPUs of a node share a link of 100 Gbit/s, 12.5 GB/s. Memory: that of the whole process,
        # including driver and NCCL.
        cases.append(Case(work, "v100-16", float(row["iter_ms"]) / 1e3, gib, 12.5 / 8, context=0.6))
    return cases


def torchtitan(folder: Path) -> list[Case]:
    """Return torchtitan's Llama 3.1, from several versions of its page of benchmarks."""
    cases = []
    for row in read_rows("torchtitan", folder):
        cards, shard, tensor, pipeline, context, sequence = whole(row, "gpus", "fsdp", "tp", "pp", "cp", "seq")
        preset = FAMILIES["llama"].presets[row["model"].replace("llama3.1", "llama-3.1")]
        spec = replace_fields(preset, max_position_embeddings=sequence)
        compiled = row["compile"] == "yes"
        # Selective activation checkpointing saves every second matmul. The loss is computed from the logits of all
        # tokens; since June 2025 it is compiled.
        logits = 6.0 if row["source"] >= "202506" else (12.0 if compiled else 14.0)
        software = Software(
            whole_logits=True,
            saved_matmuls=0.5,
            logit_bytes=logits,
            traffic=1.0 if compiled else 2.0,
            matmul_speed=1.4 if row["precision"].startswith("float8") else 1.0,
        )
        checkpointing = "full" if row["ac"] == "full" else "selective"
        axes = {"shard": shard, "tensor": tensor, "pipeline": pipeline, "context": context}
        micro = 1 if pipeline > 1 else int(row["local_batch"])
        parallel = {"zero_stage": 3 if pipeline == 1 else 1, "context_method": "ring"}
        work = workload(spec, axes, micro, int(row["gbs"]), software, checkpointing, **parallel)
        machine = "h200" if "H200" in row["source"] else "h100-96"
        seconds = work.tokens_per_step / (float(row["tps_gpu"]) * cards)
        gib = float(row["mem_gib"]) if row["mem_gib"] else None
        # torchtitan reports the memory that the allocator has reserved.
        cases.append(Case(work, machine, seconds, gib, reserved=1.03))
    return cases


def mixtures(machines: tuple[str, ...], folder: Path) -> list[Case]:
    """Return mixtures of experts in NVIDIA's frameworks, on the given machines."""
    presets = FAMILIES["mixtral"].presets | FAMILIES["qwen3_moe"].presets
    cases = []
    for row in read_rows("mixtures", folder):
        if row["machine"] not in machines:
            continue
        cards, tensor, expert, pipeline, chunks = whole(row, "gpus", "tp", "ep", "pp", "chunks")
        micro, batch, sequence = whole(row, "mbs", "gbs", "seq")
        spec = replace_fields(presets[row["model"]], max_position_embeddings=sequence)
        software = replace(
            MCORE,
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
        cases.append(Case(work, row["machine"], seconds))
    return cases


SETS: dict[str, Callable[[Path], list[Case]]] = {
    "vTrain, several nodes": lambda folder: vtrain("vtrain_multi_a100", folder),
    "vTrain, one node": lambda folder: vtrain("vtrain_single_a100", folder),
    "Megatron SC'21": sc21,
    "Korthikanti 2022": korthikanti,
    "llm-foundry, A100": lambda folder: foundry("a100", folder),
    "llm-foundry, H100": lambda folder: foundry("h100", folder),
    "zero bubble": zero_bubble,
    "OneFlow, V100": oneflow,
    "torchtitan": torchtitan,
    "mixtures, H100": lambda folder: mixtures(("h100",), folder),
    "mixtures, B200, GB200, GB300": lambda folder: mixtures(("b200", "gb200", "gb300"), folder),
}


# Errors


def measurement(case: Case) -> Measurement:
    """Return a row in the form that calibration expects."""
    machine = find_machine(case.machine)
    if case.nic_gbs is not None:
        machine = machine.model_copy(update={"nic_gbs": case.nic_gbs})
    return Measurement(case.work, machine, case.seconds)


def time_errors(measurements: Sequence[Measurement]) -> list[float]:
    """Return the relative errors of predictions with the library's default efficiency."""
    return prediction_errors(measurements, Efficiency())


def fitted(fit: Sequence[Measurement], tried: Sequence[Measurement]) -> list[float]:
    """Return the relative errors on rows `tried`, with the efficiency fitted to rows `fit`."""
    return prediction_errors(tried, fit_efficiency(fit))


def split_key(case: Case) -> tuple[int, ...]:
    """Return the key by which rows are sorted, so that every n-th row is a sample of all sizes and layouts."""
    work = case.work
    return (work.spec.hidden_size, work.sizes.tensor, work.micro_batch, *work.sizes.shape, work.accumulation)


def held_out(cases: list[Case]) -> tuple[list[float], int]:
    """Return the errors on rows that the fit has not seen, and the number of rows that it has seen.

    With more than 40 rows, 20 are for the fit. Otherwise, six-fold cross-validation.
    """
    rows = [measurement(case) for case in sorted(cases, key=split_key)]
    if len(rows) > 2 * MAX_FIT:
        stride = len(rows) // MAX_FIT
        fit_numbers = range(0, MAX_FIT * stride, stride)
        rest = [row for number, row in enumerate(rows) if number not in fit_numbers]
        return fitted([rows[number] for number in fit_numbers], rest), MAX_FIT
    errors = []
    for fold in range(6):
        rest = [row for number, row in enumerate(rows) if number % 6 != fold]
        errors += fitted(rest, rows[fold::6])
    return errors, len(rows) * 5 // 6


def constant_mfu(cases: list[Case]) -> list[float]:
    """Return the errors of a baseline that predicts every row with the same MFU, the median of all rows."""
    shares = []
    for case in cases:
        work, machine = case.work, find_machine(case.machine)
        flops = flops_per_token(work.spec, parameter_shapes(work.spec), work.sequence) * work.tokens_per_step
        shares.append(flops / (machine.peak_tflops * 1e12 * work.ranks * case.seconds))
    return [share / median(shares) - 1 for share in shares]


def mean_error(errors: Sequence[float]) -> str:
    """Return the mean absolute error as a cell."""
    return f"{fmean(map(abs, errors)):.1%}" if errors else "–"


def run(argument: str = "") -> str:
    """Return the errors of all sets as a table.

    Args:
        argument: folder with further rows on which the fitted efficiency is tried; empty or `tiny`: none.
    """
    folder = Path(argument) if argument not in ("", "tiny") else None
    lines = [
        "| rows | number | library alone: median | fitted, unseen rows: mean | constant MFU: mean | memory: mean "
        "| worst |",
        "|---|---|---|---|---|---|---|",
    ]
    everything: list[float] = []
    for name, load in SETS.items():
        cases = load(FOLDER)
        alone = time_errors([measurement(case) for case in cases])
        everything += alone
        unseen, _ = held_out(cases)
        if folder is not None:
            other = [measurement(case) for case in load(folder)]
            rows = [measurement(case) for case in sorted(cases, key=split_key)]
            unseen = fitted(rows[:: -(-len(rows) // MAX_FIT)], other) if other else []
        memory = [error for case in cases if (error := case.memory_error) is not None]
        worst = f"{max(map(abs, memory)):.1%}" if memory else "–"
        middle = f"{median(map(abs, alone)):.1%}"
        cells = [name, str(len(cases)), middle, mean_error(unseen), mean_error(constant_mfu(cases)), mean_error(memory)]
        lines.append(f"| {' | '.join([*cells, worst])} |")
    lines.append(f"\nLibrary alone, all rows: median {median(map(abs, everything)):.1%}.")
    return "\n".join(lines)
