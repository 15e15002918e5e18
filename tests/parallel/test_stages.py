"""How blocks are shared by stages, and what is refused before any rank starts."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError
from jingu.model.families import FAMILIES
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.stages import balance_stages, plan_layout, rank_of_stage, split_blocks

LLAMA = FAMILIES["llama"].template


def spec(layers: int, **changes: Any) -> ModelSpec:
    return replace_fields(LLAMA, num_layers=layers, **changes)


def sizes(ranks: int, of: ModelSpec, **given: Any) -> list[int]:
    return [len(part) for part in split_blocks(ParallelSettings(**given), ranks, of)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=9), st.integers(2, 4))
def test_no_other_division_has_a_cheaper_largest_stage(costs, stages):
    layers = len(costs) - 2
    if stages > layers:
        return
    blocks = [*costs[1:-1]]
    blocks[0] += costs[0]
    blocks[-1] += costs[-1]

    def largest(ends: list[int]) -> int:
        return max(sum(blocks[first:end]) for first, end in pairwise([0, *ends]))

    parts = balance_stages(costs, stages)
    assert sum(parts) == layers and min(parts) >= 1
    ends = [sum(parts[: number + 1]) for number in range(stages)]
    assert largest(ends) == min(largest([*cut, layers]) for cut in combinations(range(1, layers), stages - 1))


def test_a_large_head_takes_the_place_of_blocks():
    small, large = spec(12, vocab_size=1000, hidden_size=384), spec(12, vocab_size=32000, hidden_size=384)
    assert sizes(4, small, pipeline=4) == [3, 3, 3, 3]
    parts = sizes(4, large, pipeline=4)
    assert sum(parts) == 12 and parts[-1] == 1


def test_zbv_goes_there_and_back():
    places = [rank_of_stage(ParallelSettings(pipeline_schedule="zbv"), 3, stage) for stage in range(6)]
    assert places == [0, 1, 2, 2, 1, 0]
    assert [rank_of_stage(ParallelSettings(pipeline_schedule="interleaved"), 3, stage) for stage in range(6)] == [
        0,
        1,
        2,
    ] * 2


def test_parts_by_hand():
    assert sizes(8, spec(32), pipeline=8, layers_per_stage=[1, 5, 5, 5, 5, 5, 5, 1]) == [1, 5, 5, 5, 5, 5, 5, 1]


@pytest.mark.parametrize(
    ("given", "batch", "words"),
    [
        ({"pipeline": 8}, {}, r"6 blocks cannot be shared by 8 stages\. Set it to 6 or less"),
        (
            {"pipeline": 4, "pipeline_schedule": "zbv"},
            {},
            r"6 blocks cannot be shared by 8 stages \(4 ranks with 2 each\)\. Set it to 3 or less",
        ),
        (
            {"pipeline": 4, "layers_per_stage": [1, 2, 2, 2]},
            {},
            r"layers_per_stage has 4 numbers with the sum 7, for 4 stages and 6 blocks\. Give 4 numbers "
            "that add up to 6, such",
        ),
        (
            {"pipeline": 2, "layers_per_stage": [2, 2, 2]},
            {},
            r"layers_per_stage has 3 numbers with the sum 6, for 2 stages",
        ),
        (
            {"pipeline": 4},
            {"global_batch_size": 3},
            r"1f1b needs at least as many as stages, 4, but a step has 3 micro-bat",
        ),
        (
            {"pipeline": 2, "pipeline_schedule": "interleaved"},
            {"global_batch_size": 7, "micro_batch_size": 1},
            r"interleaved needs a multiple of the ranks of the pipeline, 2, or fewer than twice as many, "
            "but a step has 7",
        ),
        (
            {"pipeline": 2, "pipeline_schedule": "zbv", "zero_stage": 3},
            {},
            r"zbv cannot run with ZeRO 3: .* Set parallel.zero_stage=2",
        ),
        (
            {"pipeline": 2, "pipeline_schedule": "gpipe", "stages_per_rank": 2},
            {},
            r"gpipe has one stage per rank, not 2",
        ),
        (
            {"pipeline": 2, "pipeline_schedule": "interleaved", "stages_per_rank": 1},
            {},
            r"interleaved has at least two stages per rank, not 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(given, batch, words):
    config = RunConfig.model_validate({"parallel": given, "batch": batch})
    with pytest.raises(JinguError, match=words):
        plan_layout(config, given["pipeline"], spec(6))


def test_selective_activation_checkpointing_is_no_match_for_two_backward_passes():
    train = {"activation_checkpointing": {"type": "selective"}}
    split, whole = (
        RunConfig.model_validate({"parallel": {"pipeline": 2, "pipeline_schedule": schedule}, "train": train})
        for schedule in ("zbv", "1f1b")
    )
    with pytest.raises(JinguError, match="zbv runs two backward passes"):
        plan_layout(split, 2, spec(6))
    plan_layout(whole, 2, spec(6))


def test_selective_activation_checkpointing_is_no_match_for_shared_experts():
    train, mixtral = {"activation_checkpointing": {"type": "selective"}}, FAMILIES["mixtral"].template
    config = RunConfig.model_validate({"parallel": {"expert": 2}, "train": train})
    with pytest.raises(JinguError, match="records every operation of a block, including those that gather the experts"):
        plan_layout(config, 2, mixtral)


def test_an_encoder_s_blocks_are_counted_first_and_its_backward_pass_is_whole():
    t5 = replace_fields(FAMILIES["t5"].template, num_layers=3, num_encoder_layers=5)
    parts = split_blocks(ParallelSettings(layers_per_stage=[2, 6]), 2, t5)
    assert parts == [range(2), range(2, 8)]
    config = RunConfig.model_validate({"parallel": {"pipeline": 2, "pipeline_schedule": "zbv"}})
    with pytest.raises(JinguError, match="where the decoder begins receives the encoder's hidden states"):
        plan_layout(config, 2, t5)


def test_an_automatic_micro_batch_leaves_several_a_stage():
    config = RunConfig.model_validate({"parallel": {"pipeline": 2}, "batch": {"global_batch_size": 32}})
    assert plan_layout(config, 2, spec(6))[1].accumulation == 8
    assert plan_layout(config, 4, spec(6))[1].accumulation == 8
    few = RunConfig.model_validate({"parallel": {"pipeline": 2}, "batch": {"global_batch_size": 3}})
    assert plan_layout(few, 2, spec(6))[1].accumulation == 3
