"""Memory and time that reinforcement learning adds to a step: generation, and models beside the trained one.

The phases of a step run one after another on the same GPUs: generation, scoring with other models, updates. The memory
of a run is that of the phase that needs most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from jingu.infer.kv_cache import MAX_MEMORY_SHARE
from jingu.model.spec import ModelSpec
from jingu.plan.collectives import Neighbors, ring_seconds
from jingu.plan.forecast import Forecast
from jingu.plan.machine import Machine
from jingu.plan.memory import RankMemory, fullest_stage
from jingu.plan.serving import cache_bytes, decode_seconds, prompt_seconds
from jingu.plan.step_time import stage_time, step_time
from jingu.plan.workload import Workload, model_sizes, num_parameters


@dataclass(frozen=True)
class AuxiliarySpec:
    """A model beside the trained one.

    Attributes:
        role: "frozen" scores answers and is sharded like the trained model; "trained" also has an optimizer; "whole" is
            unsharded in the first rank's main memory, in fp32.
    """

    name: str
    spec: ModelSpec
    role: Literal["frozen", "trained", "whole"]


@dataclass(frozen=True)
class Rollouts:
    """How a step generates answers.

    Attributes:
        prompts: prompts of a step, over all ranks; answers: answers to each.
        new_tokens: tokens of an answer; streams: answers that a rank generates at a time.
        updates: optimizer steps of a step.
        prepacks: whether matrices are copied into the layout of a CPU's kernels.
        shares_prompts: whether the answers to a prompt share one copy of it in training.
    """

    prompts: int
    answers: int
    new_tokens: int
    streams: int
    updates: int = 1
    prepacks: bool = False
    shares_prompts: bool = False
    auxiliaries: Sequence[AuxiliarySpec] = ()


def add_rollouts(result: Forecast, rollouts: Rollouts) -> Forecast:
    """Extend the forecast of one update of the trained model to a whole step with generation and scoring."""
    update = _update_workload(result.work, rollouts)
    phases = _phases(result, update, rollouts)
    fullest = max(phases, key=lambda name: phases[name].total)
    totals = {name: memory.total for name, memory in phases.items()}
    seconds = _seconds(result.work, update, result.machine, rollouts)
    return replace(
        result,
        seconds=seconds,
        memory=phases[fullest],
        updates=rollouts.updates,
        phases=totals,
        further_models=tuple(_beside(result.work, each) for each in rollouts.auxiliaries if each.role == "trained"),
    )


def _update_workload(work: Workload, rollouts: Rollouts) -> Workload:
    """Return the workload of an update, in which a row is an answer with its share of the prompt's tokens."""
    if not rollouts.shares_prompts:
        return work
    prompt = max(1, work.sequence - rollouts.new_tokens)
    sharing = min(rollouts.answers, work.micro_batch)
    return replace(work, sequence=work.sequence - prompt + ceil(prompt / sharing))


def _beside(work: Workload, auxiliary: AuxiliarySpec) -> Workload:
    """Return the same workload for another model."""
    return replace(work, model=model_sizes(auxiliary.spec, work.software.compute_bytes))


def _phases(result: Forecast, update: Workload, rollouts: Rollouts) -> dict[str, RankMemory]:
    """Return the memory of the fullest rank in each phase of a step."""
    work, machine = result.work, result.machine
    own_update = fullest_stage(update)[1]
    device = {part: size for part, size in result.memory.device.items() if part in ("weights", "optimizer state")}
    host = dict(result.memory.host)
    trained_models: dict[str, RankMemory] = {}
    # 1. Persistent state: the trained model and its auxiliaries.
    for auxiliary in rollouts.auxiliaries:
        name = f"{auxiliary.name} weights"
        if auxiliary.role == "whole":
            size = 4.0 * num_parameters(auxiliary.spec)
            (device if machine.is_shared else host)[name] = size
            continue
        memory = fullest_stage(_beside(update, auxiliary))[1]
        place, parts = (host, memory.host) if memory.host else (device, memory.device)
        place[name] = parts["weights"]
        if auxiliary.role == "trained":
            place[f"{auxiliary.name} optimizer state"] = parts["optimizer state"]
            trained_models[auxiliary.name] = memory
    # 2. Updates, one model after the other.
    parts_in_use = {part: size for part, size in own_update.device.items() if part not in device}
    phases = {"update": RankMemory(device | parts_in_use, host)}
    for name, memory in trained_models.items():
        parts_in_use = {
            f"{name} {part}": size for part, size in memory.device.items() if part not in ("weights", "optimizer state")
        }
        phases[f"{name} update"] = RankMemory(device | parts_in_use, host)
    # 3. Generation: with several ranks, each one has a whole copy of the model.
    streams = min(rollouts.streams, _answers_of_rank(work, rollouts))
    cache = streams * cache_bytes(work.spec, work.sequence, 1, work.software.compute_bytes)
    generation = {"cache": min(cache, MAX_MEMORY_SHARE * machine.memory_gib * 2**30)}
    if work.ranks > 1:
        # Prepacking replaces the matrices of this copy, so it adds nothing.
        generation["gathered copy"] = num_parameters(work.spec) * work.software.weight_bytes
    elif rollouts.prepacks:
        generation["prepacked copy"] = _matrix_numbers(work) * work.software.compute_bytes
    phases["generation"] = RankMemory(device | generation, host)
    return phases


def _matrix_numbers(work: Workload) -> int:
    """Return the number of elements in matrices of linear layers and the head, without embeddings and experts."""
    parts = (*work.model.blocks, work.model.head)
    weights = (weight for part in parts for weight in part.weights if weight.is_matmul and len(weight.shape) == 2)
    return sum(prod(weight.shape) for weight in weights)


def _answers_of_rank(work: Workload, rollouts: Rollouts) -> int:
    return ceil(rollouts.prompts / work.ranks) * rollouts.answers


def _forward_seconds(work: Workload, machine: Machine) -> float:
    """Return the seconds of the forward passes over the rows of an update."""
    return work.accumulation * max(stage_time(work, stage, machine).forward for stage in work.stages)


def _seconds(work: Workload, update: Workload, machine: Machine, rollouts: Rollouts) -> dict[str, float]:
    """Return the seconds of a step by term: generation, scores, and all updates."""
    answers = _answers_of_rank(work, rollouts)
    prompt = max(1, work.sequence - rollouts.new_tokens)
    weights = num_parameters(work.spec) * work.software.weight_bytes
    # Continuous batching: a finished stream makes room for the next answer.
    streams = min(rollouts.streams, answers)
    context = prompt + rollouts.new_tokens // 2
    generation = answers / streams * rollouts.new_tokens * decode_seconds(work.spec, machine, streams, context, weights)
    generation += answers / rollouts.answers * prompt_seconds(work.spec, machine, prompt)
    everyone = Neighbors(work.ranks, min(work.ranks, machine.gpus_per_node))
    generation += ring_seconds(weights, everyone, machine, len(work.model.blocks))
    seconds = {term: value * rollouts.updates for term, value in step_time(update, machine).items()}
    seconds["generation"] = generation
    if rollouts.updates > 1:
        seconds["log-probabilities"] = rollouts.updates * _forward_seconds(update, machine)
    for auxiliary in rollouts.auxiliaries:
        if auxiliary.role != "whole":
            model_work = _beside(update, auxiliary)
            value = _forward_seconds(model_work, machine)
            value += sum(step_time(model_work, machine).values()) * (auxiliary.role == "trained")
            seconds[auxiliary.name] = rollouts.updates * value
    return seconds
