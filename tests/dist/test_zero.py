"""ZeRO 0 to 3 on 2 and 4 ranks: the same run as on one process, in fp64, to nine digits; and what each stage does."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.conftest import train_all
from tests.dist.comparison import assert_same_evaluation_and_tensors

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model.tie_word_embeddings": False},
    "llama-tied": {"model.tie_word_embeddings": True},
    "gpt2": {"model.family": "gpt2", "model.num_kv_heads": None},
}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "world"),
    [
        ("llama", 2),
        *(slow(*other) for other in (("llama", 4), ("llama-tied", 2), ("llama-tied", 4), ("gpt2", 2), ("gpt2", 4))),
    ],
)
def test_every_zero_stage_equals_one_process(model, world, tiny_run, train_on, done):
    """Losses, norms of the gradient (clipped at some steps), weights, held-out loss and samples of 8 steps.

    Each rank accumulates over 2 micro-batches; one process cuts the same global batch into 8. The 5 held-out
    sequences leave some ranks without any.
    """
    changes = {**MODELS[model], "train.steps": 8, "evaluation.every": 4, "evaluation.num_sequences": 5}
    changes |= {"evaluation.sample_prompts": ["def ", ""], "evaluation.max_new_tokens": 4}
    alone = tiny_run(changes, name="alone")
    train_on(1, alone)
    one = done(alone)
    losses, norms, weights = one.column("loss"), one.column("grad_norm"), one.tensors()
    assert len(one.column("text", "sample")) == 4
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5 and max(norms) > 1.0 > min(norms)
    layout = {"batch.micro_batch_size": 8 // world // 2}
    configs = [tiny_run({**changes, **layout, "parallel.zero_stage": zero}, name=f"zero-{zero}") for zero in range(4)]
    if world == 4:
        hybrid = {**changes, **layout, "parallel.replicate": 2}
        configs += [tiny_run({**hybrid, "parallel.zero_stage": zero}, name=f"hybrid-{zero}") for zero in (1, 3)]
    train_on(world, *configs)
    for config in configs:
        many = done(config)
        assert many.lines("start")[0]["ranks"] == world
        assert many.column("loss") == pytest.approx(losses, rel=1e-9), config.name
        assert many.column("grad_norm") == pytest.approx(norms, rel=1e-9), config.name
        assert_same_evaluation_and_tensors(many, one, weights, config.name)


def rows_seen(rank: int, world: int, config: Any) -> list[list[list[int]]]:
    """Return the tokens of each step in the order in which this rank reads them."""
    from jingu.training.pretraining import Pretraining

    seen: list[list[list[int]]] = []
    original_batch = Pretraining.batch

    def noting(self: Pretraining, step: int, first: int, count: int) -> Any:
        batch = original_batch(self, step, first, count)
        while len(seen) <= step:
            seen.append([])
        seen[step] += batch.tokens.tolist()
        return batch

    with patch.object(Pretraining, "batch", noting):
        assert train_all(rank, world, [config]) == [0]
    return seen


def test_ranks_share_the_rows_of_each_step_in_their_order(tiny_run, ranks):
    """The first micro-batch is also seen by the dry run, before step 0."""
    from jingu.config.batch_plan import plan_batch
    from jingu.training.run import open_run

    changes = {"train.steps": 3, "batch.global_batch_size": 20, "batch.micro_batch_size": 1}
    config = tiny_run(changes)
    run = open_run(config)
    source = run.source
    expected = [source.batch(step, 0, 20).tokens.tolist() for step in range(3)]
    for world in (2, 4):
        plan = plan_batch(config.batch, world)
        seen = ranks.run(rows_seen, world, tiny_run({**changes, "parallel.zero_stage": world - 1}, name=f"on-{world}"))
        for rank, rows in enumerate(seen):
            rows[0] = rows[0][plan.micro_batch_size :]
            first = rank * plan.rows_per_rank
            assert rows == [step[first : first + plan.rows_per_rank] for step in expected]


def counted(rank: int, world: int, configs: list[Any]) -> list[dict[str, int]]:
    """Count the collectives of each run that move parameters or gradients, by kind."""
    import torch.distributed as dist

    results = []
    for config in configs:
        count: Counter[str] = Counter()
        kinds = {
            "gather": ["all_gather_single", "all_gather_into_tensor"],
            "scatter": ["reduce_scatter_single", "reduce_scatter_tensor"],
            "reduce": ["all_reduce"],
        }
        originals = {name: getattr(dist, name) for names in kinds.values() for name in names if hasattr(dist, name)}

        def counting(kind: str, original: Any, count: Counter[str] = count) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                tensor = keywords.get("tensor", keywords.get("output", arguments[0] if arguments else None))
                alone = dist.get_world_size(keywords.get("group")) == 1
                count[kind] += not alone and (tensor is None or tensor.numel() > 3)  # few numbers are a loss or votes
                return original(*arguments, **keywords)

            return call

        for kind, names in kinds.items():
            for name in set(names) & originals.keys():
                setattr(dist, name, counting(kind, originals[name]))
        try:
            assert train_all(rank, world, [config]) == [0]
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        results.append(dict(count))
    return results


def test_collectives_of_each_zero_stage(tiny_run, ranks):
    """Collectives of one step of 2 micro-batches, for the 3 groups of parameters (2 blocks and the rest)."""
    configs = [
        tiny_run(
            {"parallel.zero_stage": zero, "batch.micro_batch_size": 2, "train.steps": steps}, name=f"{zero}-{steps}"
        )
        for zero in range(4)
        for steps in (1, 2)
    ]
    counts = ranks.run(counted, 2, configs)
    assert counts[0] == counts[1]
    of_a_step = []
    for one, two in zip(counts[0][::2], counts[0][1::2], strict=True):
        of_a_step.append({kind: two[kind] - one.get(kind, 0) for kind in two if two[kind] != one.get(kind, 0)})
    assert of_a_step == [
        {"reduce": 3},  # whole gradients, summed once
        {"gather": 3, "scatter": 3},  # parameters gathered once, gradients whole until the last micro-batch
        {"gather": 3, "scatter": 6},  # gradients sharded after each micro-batch
        {
            "gather": 10,
            "scatter": 6,
        },  # parameters gathered for each pass but the rest's backward, which follows at once
    ]


def stored_bytes(rank: int, world: int, configs: list[Any]) -> list[tuple[int, int, int]]:
    """Return the bytes of parameters, gradients and gathered parameters of this rank at its optimizer step."""
    from jingu.parallel.sharding import local_tensor
    from jingu.training import step as step_module

    sizes: list[tuple[int, int, int]] = []

    def size(tensors: Any) -> int:
        storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]  # several tensors may share one
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    original = step_module.scale_gradients
    for config in configs:

        def looking(model: Any, *arguments: Any) -> Any:
            from torch.distributed.fsdp import FSDPModule

            gathered = [
                parameter._unsharded_param
                for module in model.modules()
                if isinstance(module, FSDPModule)
                for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params
                if hasattr(parameter, "_unsharded_param")
            ]
            model_bytes, gathered_bytes = size(model.parameters()), size(gathered)
            gradients = size(p.grad for p in model.parameters() if p.grad is not None)
            sizes.append((model_bytes, gradients, gathered_bytes))
            return original(model, *arguments)

        with patch.object(step_module, "scale_gradients", looking):
            assert train_all(rank, world, [config]) == [0]
    return sizes


def test_each_rank_stores_its_share(tiny_run, ranks):
    """From stage 1 on, the optimizer step sees a rank's share of weights and gradients, and nothing is gathered."""
    configs = [tiny_run({"parallel.zero_stage": zero, "train.steps": 1}, name=f"held-{zero}") for zero in range(4)]
    of_first = ranks.run(stored_bytes, 4, configs)[0]
    whole = of_first[0][0]
    assert of_first[0][1] == whole
    for parameters, gradients, gathered in of_first[1:]:
        assert parameters == gradients
        assert whole / 4 <= parameters < whole / 3
        assert gathered == 0


def test_bf16_with_checkpointing_follows_fp32(tiny_run, train_on, done):
    steps = {"train.steps": 8}
    changes = {**steps, "train.activation_checkpointing.type": "full"}
    exact = tiny_run({**steps, "precision.type": "fp32"}, name="fp32")
    train_on(1, exact)
    losses = done(exact).column("loss")
    runs = [tiny_run({**changes, "precision.type": "bf16", "parallel.zero_stage": z}, name=f"bf16-{z}") for z in (0, 3)]
    train_on(2, *runs)
    for run in runs:
        assert done(run).column("loss") == pytest.approx(losses, rel=0.02)
        assert done(run).column("loss") != losses
        tensors = done(run).tensors()
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}  # masters and state
    fp64 = tiny_run(steps, name="fp64")
    train_on(1, fp64)
    assert losses == pytest.approx(done(fp64).column("loss"), rel=1e-4)
