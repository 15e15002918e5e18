"""From settings and a number of ranks to the axes of the mesh, or to words that say why not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError
from jingu.model.families import FAMILIES
from jingu.model.spec import replace_fields
from jingu.parallel.mesh import AXES, resolve_axis_sizes

LLAMA = FAMILIES["llama"].template  # 6 heads


def sizes(ranks: int, spec: Any = LLAMA, **settings: Any) -> str:
    return str(resolve_axis_sizes(ParallelSettings(**settings), ranks, spec))


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({}, 1, "1"),
        ({}, 8, "8 shard"),
        ({"zero_stage": 0}, 8, "8 replicate"),
        ({"shard": 4}, 8, "2 replicate × 4 shard"),
        ({"replicate": 4, "zero_stage": 3}, 8, "4 replicate × 2 shard"),
        ({"replicate": 8}, 8, "8 replicate"),
    ],
)
def test_auto_takes_the_ranks_that_are_left(settings, ranks, expected):
    assert sizes(ranks, **settings) == expected


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({"zero_stage": 0, "shard": 4}, 4, "ZeRO 0 shards nothing, but parallel.shard is 4"),
        (
            {"shard": 3},
            8,
            r"the layout shard 3 does not divide the number of ranks, 8\. Start 3 processes or a multiple",
        ),
        ({"shard": 2, "replicate": 2}, 8, "replicate 2 × shard 2 = 4 is not the number of ranks, 8. Start 4 processes"),
        ({"tensor": 4}, 4, r"6 attention heads cannot be divided over 4 ranks\. Choose 1, 2, 3 or 6\."),
        ({"tensor": 2, "context": 2}, 4, "the 3 attention heads of a tensor rank cannot be divided over 2 ranks.*ring"),
        ({"expert": 2}, 2, "the model has no experts"),
        ({"tensor": "auto", "context": "auto"}, 8, "context and tensor are both auto"),
        ({"async_tensor_parallel": True}, 8, "no messages to overlap, since parallel.tensor is 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(settings, ranks, words):
    with pytest.raises(JinguError, match=words):
        sizes(ranks, **settings)


@given(
    st.integers(1, 64),
    st.integers(0, 3),
    st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, "auto"]) for axis in AXES}),
)
def test_the_axes_multiply_to_the_ranks_or_it_is_refused(ranks, zero, axes):
    spec = replace_fields(LLAMA, attention=LLAMA.attention.model_copy(update={"num_heads": 36, "num_kv_heads": 36}))
    try:
        found = resolve_axis_sizes(ParallelSettings(zero_stage=zero, **axes), ranks, spec)
    except JinguError:
        return
    product = 1
    for axis, size in zip(AXES, found.shape, strict=True):
        product *= size
        assert axes[axis] in (size, "auto")
    assert product == ranks
    assert zero or found.shard == 1
