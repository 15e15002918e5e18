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
from jingu.model.parts import score_bytes
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.mesh import AXES, AxisSizes
from jingu.plan import memory, step_time
from jingu.plan.calibration import Measurement, fit_efficiency, prediction_errors
from jingu.plan.machine import Efficiency, Machine, find_machine
from jingu.plan.memory import fullest_stage
from jingu.plan.step_time import Neighbors
from jingu.plan.workload import BlockSizes, Software, Stage, Workload, model_sizes

FOLDER = Path(__file__).parent / "planning"
# Most rows to which an efficiency is fitted.
MAX_FIT = 20
Row = dict[str, str]


@dataclass(frozen=True, eq=False)
class PublishedSystem(Software):
    """How the training system of a published run executes a step. The defaults are those of jingu.

    Attributes:
        logit_bytes: bytes of a logit and its gradient, in all dtypes in which they exist.
        traffic: bytes that elementwise operations of a forward pass move, relative to the saved bytes.
        kernels: number of kernels in a block's forward pass.
        expert_kernels: additional kernels of a mixture of experts: routing, permutation, matmuls.
        overlap: share of the computing time that communication of gradients and weights can overlap with; 0: none.
        copies_weights: whether matmuls use gathered or cast copies of the weights that a rank owns.
        whole_logits: whether the logits of all tokens exist at the same time.
        saved_matmuls: share of the matmuls whose results selective checkpointing saves.
        fused_attention: whether attention never stores its scores.
        sequence_parallel: whether norms and residuals are also sharded over the ranks of `tensor`.
        saved_per_hidden: bytes that a block saves per element of a token's hidden state; None: count them.
        saved_scores: bytes stored per score without fused attention.
        in_flight: micro-batches in flight on every rank of a pipeline; None: derive them from the schedule.
        overlaps_sends: whether hidden states are sent between stages during computation.
        sends_to_nodes: whether a token is sent to each node only once, even if several of its experts are there.
        overlaps_experts: whether the all-to-all overlaps with the computation of another micro-batch.
        matmul_speed: speed of matmuls, relative to bf16.
    """

    logit_bytes: float = Software.logit_bytes
    traffic: float = Software.traffic
    kernels: int = Software.kernels
    expert_kernels: int = Software.expert_kernels
    overlap: float = Software.overlap
    copies_weights: bool = True
    whole_logits: bool = False
    saved_matmuls: float = 1.0
    fused_attention: bool = True
    sequence_parallel: bool = True
    saved_per_hidden: float | None = None
    saved_scores: float = 5.0
    in_flight: int | None = None
    overlaps_sends: bool = False
    sends_to_nodes: bool = False
    overlaps_experts: bool = False
    matmul_speed: float = 1.0

    def saved_bytes(self, block: BlockSizes, work: Workload) -> float:
        """Return the bytes per token that a block saves for its backward pass, without attention scores."""
        per_hidden = self.saved_per_hidden
        return block.saved_bytes if per_hidden is None else per_hidden * work.spec.hidden_size


# What such a system does differently, for the functions of the planner that dispatch on the software. Each begins with
# jingu's formula where a system shares it.
_in_flight = memory.micro_batches_in_flight.dispatch(Software)
_gathered_memory = memory.gathered_memory.dispatch(Software)
_matmul_seconds = step_time.matmul_seconds.dispatch(Software)
_loss_bytes = memory.loss_bytes.dispatch(Software)
_attention_seconds = step_time.attention_seconds.dispatch(Software)
_count_passes = step_time.count_passes.dispatch(Software)
_expert_seconds = step_time.expert_seconds.dispatch(Software)


@memory.micro_batches_in_flight.register
def _(software: PublishedSystem, work: Workload, stage: Stage) -> float:
    if software.in_flight is None or work.sizes.pipeline == 1:
        return _in_flight(software, work, stage)
    return min(work.accumulation, software.in_flight)


@memory.block_activations.register
def _(software: PublishedSystem, block: BlockSizes, work: Workload) -> tuple[float, float, float]:
    sizes, spec, layer = work.sizes, work.spec, block.layer
    assert layer is not None
    tokens = work.tokens / sizes.tensor
    input_bytes = (tokens if software.sequence_parallel else work.tokens) * spec.hidden_size * software.compute_bytes
    total = tokens * software.saved_bytes(block, work)
    inputs = 0.0
    if software.sequence_parallel and software.saved_per_hidden is None:
        # Ranks of `tensor` gather the tokens before attention and feed-forward, and keep them.
        inputs = (work.tokens - tokens) * (block.num_attention + 1) * spec.hidden_size * software.compute_bytes
    if not software.sequence_parallel:
        # Norms, residuals and dropout are replicated on the ranks of `tensor` (Korthikanti et al., 2022, equation 2).
        total += (work.tokens - tokens) * 10 * spec.hidden_size
    total += inputs
    of_score = score_bytes(layer, software.compute_bytes) if software.fused_attention else software.saved_scores
    scores = of_score * layer.attention.num_heads / sizes.tensor * work.tokens * work.sequence
    if block.experts is not None and sizes.expert > 1:
        # The all-to-all stores the rows of tokens in two more orders.
        total += 2 * tokens * block.experts.num_experts_per_token * spec.hidden_size * software.compute_bytes
    if not software.fused_attention:
        # Selective checkpointing recomputes the scores alone.
        return total + scores, total, input_bytes
    outputs = software.saved_matmuls * block.matmul_outputs * software.compute_bytes
    selective = tokens * (outputs + 4 * layer.attention.num_heads)
    return total + scores, selective + input_bytes + inputs, input_bytes


@memory.gathered_memory.register
def _(software: PublishedSystem, work: Workload, stage: Stage, parts: Any) -> dict[str, float]:
    return _gathered_memory(software, work, stage, parts) if software.copies_weights else {}


@memory.loss_bytes.register
def _(software: PublishedSystem, work: Workload) -> float:
    if not software.whole_logits:
        return _loss_bytes(software, work)
    states = 2 * work.tokens * work.spec.hidden_size * software.compute_bytes
    return states + work.tokens * -(-work.spec.vocab_size // work.sizes.tensor) * software.logit_bytes


@step_time.matmul_seconds.register
def _(software: PublishedSystem, flops: float, num_bytes: float, machine: Machine) -> float:
    return _matmul_seconds(software, flops / software.matmul_speed, num_bytes, machine)


@step_time.traffic_bytes.register
def _(software: PublishedSystem, part: BlockSizes, work: Workload) -> float:
    tokens = work.tokens / work.sizes.tensor
    result = tokens * software.saved_bytes(part, work)
    if not software.sequence_parallel:
        result += (work.tokens - tokens) * 8 * work.spec.hidden_size * software.compute_bytes
    result += step_time.permutation_bytes(part, work)
    if not software.fused_attention and part.layer is not None:
        heads = part.layer.attention.num_heads / work.sizes.tensor
        result += part.num_attention * heads * work.tokens * work.sequence * software.saved_scores * 2
    return result


@step_time.attention_seconds.register
def _(software: PublishedSystem, part: BlockSizes, work: Workload, machine: Machine) -> float:
    if software.fused_attention:
        return _attention_seconds(software, part, work, machine)
    # Attention as two matmuls, which compute the scores behind the mask as well.
    efficiency = machine.efficiency.model_copy(update={"attention": machine.efficiency.matmul * 0.6})
    machine = machine.model_copy(update={"efficiency": efficiency})
    return _attention_seconds(software, replace(part, is_causal=False), work, machine)


@step_time.count_passes.register
def _(software: PublishedSystem, full: float, selective: float) -> tuple[float, float]:
    if software.fused_attention:
        return _count_passes(software, full, selective)
    # Selective checkpointing recomputes attention scores.
    return 3.0 + full + selective, 2.5 + full + 0.6 * selective


@step_time.expert_seconds.register
def _(software: PublishedSystem, size: float, block: BlockSizes, group: Neighbors, machine: Machine) -> float:
    if not software.sends_to_nodes or block.experts is None or group.ranks == 1:
        return _expert_seconds(software, size, block, group, machine)
    # Each node receives a token at most once; the expected number of nodes with chosen experts follows from the
    # probability that a node has none. The network therefore carries a share of the bytes.
    choices, nodes = block.experts.num_experts_per_token, group.ranks / group.in_node
    share = nodes * (1 - (1 - 1 / nodes) ** choices) / choices
    faster = machine.model_copy(update={"nic_gbs": machine.nic_gbs / share})
    return _expert_seconds(software, size, block, group, faster)


@step_time.exposed_seconds.register
def _(software: PublishedSystem, kind: str, seconds: float, computing: float) -> float:
    if kind == "expert" and software.overlaps_experts:
        return max(0.0, seconds - software.overlap * computing)
    if kind == "pipeline" and software.overlaps_sends:
        return max(0.0, seconds - computing)
    return seconds


@step_time.boundary_bytes.register
def _(software: PublishedSystem, work: Workload) -> float:
    tokens = work.tokens / work.sizes.tensor if software.sequence_parallel else work.tokens
    return tokens * work.spec.hidden_size * software.compute_bytes


# How the frameworks of the published runs execute a step.
# Megatron-LM of 2021 to 2023: fp16 weights and gradients with fp32 master weights and moments, dropout, attention
# scores in memory, no overlap of communication.
MEGATRON = PublishedSystem(
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
FOUNDRY = PublishedSystem(reduce_bytes=2.0, traffic=2.5)
# Megatron-Core and NeMo of 2024 to 2026. The speed of fp8 matmuls includes the casts of their inputs. The number of
# kernels of a mixture of experts depends on how the host launches them; for eager blocks it is inferred from two rows
# of mixtures.csv in which the host is the bottleneck.
MCORE = PublishedSystem(weight_bytes=2.0, reduce_bytes=2.0, traffic=1.0)
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
        software = PublishedSystem(
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
        memory_errors = [error for case in cases if (error := case.memory_error) is not None]
        worst = f"{max(map(abs, memory_errors)):.1%}" if memory_errors else "–"
        middle = f"{median(map(abs, alone)):.1%}"
        cells = [
            name,
            str(len(cases)),
            middle,
            mean_error(unseen),
            mean_error(constant_mfu(cases)),
            mean_error(memory_errors),
        ]
        lines.append(f"| {' | '.join([*cells, worst])} |")
    lines.append(f"\nLibrary alone, all rows: median {median(map(abs, everything)):.1%}.")
    return "\n".join(lines)
