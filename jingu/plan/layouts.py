"""The layouts of a run: how a model and the data-parallel ranks can be divided, and which layouts are valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

from jingu.config.batch_plan import divisors
from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError
from jingu.parallel.mesh import resolve_axis_sizes
from jingu.parallel.stages import check_layout
from jingu.plan.workload import Workload


def model_divisions(base: Workload, ranks: int, reject: Callable[[str, str], None]) -> Iterator[ParallelSettings]:
    """Yield all divisions of the model over ranks: pipeline, tensor, context and experts.

    Args:
        reject: is called with the reason and an example for each division that does not fit.
    """
    spec = base.spec
    layers = (spec.num_encoder_layers or 0) + spec.num_layers
    experts = [1] if spec.experts is None else divisors(spec.experts.num_experts)
    for pipeline, tensor, context in product(divisors(ranks), repeat=3):
        # A rank of `context` needs a token.
        if ranks % (pipeline * tensor * context) or context > base.sequence:
            continue
        if pipeline > layers:
            reject("fewer blocks than stages", f"{layers} blocks over {pipeline} stages")
            continue
        data = ranks // (pipeline * tensor * context)
        for expert, method in product(experts, ("ulysses", "ring") if context > 1 else ("ulysses",)):
            if data * context % expert:
                continue
            update: dict[str, object] = {"pipeline": pipeline, "tensor": tensor, "context": context, "expert": expert}
            update |= {"context_method": method, "shard": data, "replicate": 1, "zero_stage": 1}
            settings = base.parallel.model_copy(update=update)
            try:
                resolve_axis_sizes(settings, ranks, spec)
            except JinguError as error:
                reject(rejection_reason(error), f"{error.what}")
                continue
            yield settings


def schedule_names(pipeline: int, layers: int) -> list[tuple[str, int | str]]:
    """Return all schedules of a pipeline, each with its number of stages per rank."""
    if pipeline == 1:
        return [("1f1b", "auto")]
    several = range(2, layers // pipeline + 1)
    names: list[tuple[str, int | str]] = [("gpipe", "auto"), ("1f1b", "auto"), ("zbv", "auto")]
    names += [("interleaved", number) for number in several]
    return [*names, *(("zero_bubble", number) for number in (1, *several))]


@cache
def data_divisions(data: int, context: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the stages of ZeRO, each with the numbers of ranks that share the state beside those of `context`."""
    shards = tuple(shard for shard in reversed(divisors(data)) if shard * context > 1)
    return ((0, (1,)), *((zero, shards) for zero in (1, 2, 3) if shards))


def layout_conflict(work: Workload) -> JinguError | None:
    """Return the error of an invalid layout; None if it is valid."""
    try:
        check_layout(work.parallel, work.checkpointing.type, work.spec, work.sizes, work.accumulation)
    except JinguError as error:
        return error
    return None


def rejection_reason(error: JinguError) -> str:
    """Return the kind of an error, without its numbers."""
    where = str(error.where or "layout").rpartition(".")[2]
    return {"tensor": "heads or dims do not divide", "context": "heads do not divide"}.get(
        where, f"{where} does not fit"
    )


def describe_layout(work: Workload) -> str:
    """Return a short description of a layout."""
    settings = work.parallel
    parts = [str(work.sizes), f"ZeRO {settings.zero_stage}", f"micro-batch {work.micro_batch}"]
    if work.sizes.expert > 1:
        parts.insert(1, f"{work.sizes.expert} expert")
    if work.sizes.pipeline > 1:
        parts.append(settings.pipeline_schedule)
    if work.sizes.context > 1:
        parts.append(settings.context_method)
    if work.checkpointing.type != "none":
        parts.append(f"{work.checkpointing.type} recomputation")
    if settings.offload.type != "none":
        parts.append(f"offload to {settings.offload.type}")
    return ", ".join(parts)
