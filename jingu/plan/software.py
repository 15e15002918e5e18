"""Training systems: how a system executes a step, which decides its time and its memory beside model and layout.

jingu's own settings are the defaults. `software.toml` has those of other systems, so that a published run can be
planned as it was made: `jingu plan --software megatron-2021`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from jingu.errors import JinguError
from jingu.tables import read_table


@dataclass(frozen=True, eq=False)
class Software:
    """How a training system executes a step.

    Attributes:
        weight_bytes: bytes of a weight that a rank owns; gradient_bytes: bytes of its gradient.
        reduce_bytes: bytes of a gradient element in communication; compute_bytes: bytes of the compute dtype.
        state_share: size of optimizer state that has the dtype of the master weights, relative to fp32.
        copies_weights: whether matmuls use gathered or cast copies of the weights that a rank owns.
        offload_copies_weights: whether a single rank that offloads uses FSDP, as on a GPU, which copies all weights
            to the device; on a CPU they stay where they are.
        fused_attention: whether attention never stores its scores.
        flash_attention: whether fused attention saves queries, keys and values as they are, as on GPUs.
        compiles_blocks: whether blocks are compiled, so that they compute again what is no result of a matmul; never
            those whose backward pass a pipeline schedule splits.
        attention_speed: speed of attention, relative to the fused kernel of PyTorch, or to two matmuls.
        ampere_attention: whether the kernel of attention is written for Ampere, and slower than matmuls on Hopper.
        saved_scores: bytes stored per score without fused attention.
        stores_biased_scores: whether attention with a trained bias stores its scores, as on CPUs.
        sequence_parallel: whether norms and residuals are also sharded over the ranks of `tensor`.
        saved_per_hidden: bytes that a block saves per element of a token's hidden state; 0: count them.
        saved_matmuls: share of the matmuls whose results selective checkpointing saves.
        traffic: bytes that elementwise operations of a forward pass move, relative to the bytes that blocks save which
            are not compiled; compiled_traffic: the same of compiled blocks.
        whole_logits: whether the logits of all tokens exist at the same time.
        chunk_logits: logits in a chunk of the loss (`jingu/training/loss.py`).
        logit_bytes: bytes of a logit and its gradient, in all dtypes in which they exist.
        logit_traffic: bytes that the loss moves per logit, in the forward and the backward pass.
        matmul_speed: speed of matmuls, relative to bf16.
        kernels: kernels in the forward pass of a block; expert_kernels: further ones of a mixture of experts.
        hides_launches: whether the host launches kernels ahead of the GPU, so that launches cost nothing while the GPU
            computes; otherwise, as with CUDA_LAUNCH_BLOCKING=1, each launch adds its time.
        overlap: share of the computing time that communication of gradients and weights can overlap with; 0: none.
        gathers_per_block: collectives in which ZeRO gathers, or reduces, a block.
        splits_sends: whether each rank of `tensor` sends only its part of the hidden states to the next stage.
        sends_in_turn: whether a pipeline rank sends and receives one message at a time, rather than both ways at once.
        overlaps_sends: whether hidden states are sent between stages during computation.
        sends_to_nodes: whether a token is sent to each node only once, even if several of its experts are there.
        overlaps_experts: whether the all-to-all overlaps with the computation of another micro-batch.
        buffers_per_stage: micro-batches, per stage, that a pipeline buffers on every rank; 0: those of the schedule.
        keeps_buffers: whether a pipeline has buffers for what it receives of all micro-batches, as PyTorch's.
        buckets_gib: GiB of buckets in which gradients are reduced and weights are gathered.
        context_gib: GiB of a GPU that driver and libraries take; group_gib: the same of a group of collectives.
        allocator_reuse: share of the memory of one moment of a step, such as the loss, that the allocator reuses in
            others, such as recomputation. The caching allocators of GPUs keep blocks for tensors of one size.
        reserved: memory that the allocator reserves, relative to that of the tensors.
    """

    name: str = "jingu"
    weight_bytes: float = 4.0
    gradient_bytes: float = 4.0
    reduce_bytes: float = 4.0
    compute_bytes: float = 2.0
    state_share: float = 1.0
    copies_weights: bool = True
    offload_copies_weights: bool = True
    fused_attention: bool = True
    flash_attention: bool = True
    compiles_blocks: bool = True
    attention_speed: float = 1.0
    ampere_attention: bool = False
    saved_scores: float = 5.0
    stores_biased_scores: bool = False
    sequence_parallel: bool = True
    saved_per_hidden: float = 0.0
    saved_matmuls: float = 1.0
    traffic: float = 1.5
    compiled_traffic: float = 1.0
    whole_logits: bool = False
    chunk_logits: float = 2.0**27
    logit_bytes: float = 6.0
    logit_traffic: float = 16.0
    matmul_speed: float = 1.0
    kernels: float = 30.0
    expert_kernels: float = 30.0
    hides_launches: bool = True
    overlap: float = 0.8
    gathers_per_block: float = 1.0
    splits_sends: bool = True
    sends_in_turn: bool = False
    overlaps_sends: bool = False
    sends_to_nodes: bool = False
    overlaps_experts: bool = False
    buffers_per_stage: float = 0.0
    keeps_buffers: bool = True
    buckets_gib: float = 0.0
    context_gib: float = 0.0
    group_gib: float = 0.0
    allocator_reuse: float = 0.35
    reserved: float = 1.0

    def eager(self) -> Software:
        """Return the same system with blocks that are not compiled."""
        return _eager(self) if self.compiles_blocks else self

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from those of jingu, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "name" and getattr(self, field.name) != field.default
        }


@cache
def _eager(software: Software) -> Software:
    # Cached, because searches use systems as keys.
    return replace(software, compiles_blocks=False)


@cache
def software_library() -> dict[str, Software]:
    """Return the known systems by name."""
    table = read_table(__file__, "software.toml")
    library = {"jingu": Software()}
    for name, row in table.items():
        like = library[row.pop("like", "jingu")]
        library[name] = replace(like, name=name, **row)
    return library


def find_software(text: str, base: Software | None = None) -> Software:
    """Return a system that is described as on the command line: `NAME`, `KEY=VALUE`, or both, separated by commas.

    Args:
        base: the system that a description without a name changes; None: jingu.

    Raises:
        JinguError: there is no such system or setting, or a value is wrong.
    """
    words = [word for word in text.split(",") if word]
    library = software_library()
    result = base or library["jingu"]
    if words and "=" not in words[0]:
        name = words.pop(0).lower()
        if name not in library:
            close = get_close_matches(name, library, n=3, cutoff=0.4) or list(library)
            what = f"there is no training system {name}."
            raise JinguError(what, where="--software", fix=f"Nearest names: {', '.join(close)}.")
        # What the precision of the run decides stays that of the run for jingu itself.
        result = library[name] if name != "jingu" else result
    return replace(result, **dict(_read_setting(word) for word in words))


def _read_setting(word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    kinds = {field.name: type(field.default) for field in fields(Software) if field.name != "name"}
    if key not in kinds:
        close = get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
        what = f"there is no setting {key} of a training system."
        raise JinguError(what, where="--software", fix=f"Did you mean {close}? The settings are {', '.join(kinds)}.")
    choices = {"true": True, "false": False}
    try:
        number = choices[value.lower()] if kinds[key] is bool else float(value)
    except (KeyError, ValueError):
        number = -1.0
    if number < 0 or number == float("inf") or number != number:
        expected = "true or false" if kinds[key] is bool else "a number that is not negative"
        raise JinguError(
            f"{key}={value} is not {expected}.", where="--software", fix=f"For example {key}={_example(key)}."
        )
    return key, number


def _example(key: str) -> str:
    return str(getattr(Software(), key)).lower()
