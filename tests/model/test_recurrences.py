"""Delta rule, state space and short convolution: all forms agree, documents are as if alone, and states continue.

Every test runs for all of them, at awkward sizes. tests/parity/test_recurrences.py compares with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from jingu.model.chunked_scan import document_starts
from jingu.model.gated_delta import GatedDeltaMixer, chunked_delta_rule, recurrent_delta_rule
from jingu.model.mixer_parts import Mixer, MixerState, RowPiece, mix_pieces, mix_with_parents
from jingu.model.mixer_specs import GatedDelta, ShortConv, StateSpace
from jingu.model.short_conv import ShortConvMixer, causal_convolution
from jingu.model.state_space import (
    StateSpaceInputs,
    StateSpaceMixer,
    chunked_state_space,
    recurrent_state_space,
    step_lengths,
)

ROWS, GROUPS, HEADS, KEY, VALUE = 2, 2, 4, 6, 5

# Tensors of the tokens [B, T, …], and weights.
Parts = tuple[list[Tensor], list[Tensor]]
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recurrence:
    """A recurrence in both of its forms.

    Attributes:
        make: makes random inputs of a number of tokens in fp64; decays are slow, so that old tokens still count.
        chunked: takes inputs, document starts, a state, and the chunk size.
        recurrent: takes inputs, document starts and a state.
        state: shape of the state of a row.
    """

    make: Callable[[int], Parts]
    chunked: Callable[[Parts, Tensor | None, Tensor | None, int], Result]
    recurrent: Callable[[Parts, Tensor | None, Tensor | None], Result]
    state: tuple[int, ...]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def delta(decay_channels: int | None, most: float) -> Recurrence:
    def make(tokens: int) -> Parts:
        decay_shape = (ROWS, tokens, HEADS) if decay_channels is None else (ROWS, tokens, HEADS, decay_channels)
        decay, beta = -0.1 * normal(*decay_shape).abs(), most * torch.rand(ROWS, tokens, HEADS).double()
        q, k = normal(2, ROWS, tokens, GROUPS, KEY)
        return [q, k, normal(ROWS, tokens, HEADS, VALUE), decay, beta], []

    return Recurrence(
        make,
        lambda parts, starts, state, size: chunked_delta_rule(*parts[0], starts, state, size),
        lambda parts, starts, state: recurrent_delta_rule(*parts[0], starts, state),
        (HEADS, KEY, VALUE),
    )


def state_space_inputs(parts: Parts) -> StateSpaceInputs:
    (x, step, b, c), (rate, skip, bias) = parts
    return StateSpaceInputs(x, step_lengths(step, bias, (0.01, 0.9)), b, c, rate, skip)


def make_state_space(tokens: int) -> Parts:
    b, c = normal(2, ROWS, tokens, GROUPS, KEY)
    weights = [-0.2 * normal(HEADS).abs(), normal(HEADS), normal(HEADS)]
    return [normal(ROWS, tokens, HEADS, VALUE), normal(ROWS, tokens, HEADS), b, c], weights


def convolution(taps: int, channels: int) -> Recurrence:
    """Return a convolution, whose two forms are one."""
    return Recurrence(
        lambda tokens: ([normal(ROWS, tokens, channels)], [normal(channels, taps), normal(channels)]),
        lambda parts, starts, state, size: causal_convolution(*parts[0], *parts[1], starts, state),
        lambda parts, starts, state: causal_convolution(*parts[0], *parts[1], starts, state),
        (taps - 1, channels),
    )


WIDTH = 10


def mixer(module: Mixer, state_shapes: list[tuple[int, ...]]) -> Recurrence:
    """Return a mixer, whose weights and states are passed as arguments; its states are flattened into one tensor."""
    names = [name for name, _ in module.named_parameters()]
    sizes = [math.prod(shape) for shape in state_shapes]

    def make(tokens: int) -> Parts:
        return [normal(ROWS, tokens, WIDTH)], [0.5 * normal(*weight.shape) for weight in module.parameters()]

    def run(parts: Parts, starts: Tensor | None, state: Tensor | None, size: int | None) -> Result:
        before = None
        if state is not None:
            pieces = zip(state.split(sizes, -1), state_shapes, strict=True)
            before = MixerState(*(piece.unflatten(-1, shape) for piece, shape in pieces))
        arguments = (*parts[0], starts, before)
        module.chunk_size = size or 64
        y, after = functional_call(module, dict(zip(names, parts[1], strict=True)), arguments, {"decode": size is None})
        return y, torch.cat([part.flatten(1) for part in after if part is not None], -1)

    return Recurrence(
        make,
        lambda parts, starts, state, size: run(parts, starts, state, size),
        lambda parts, starts, state: run(parts, starts, state, None),
        (sum(sizes),),
    )


def delta_mixer(**settings: Any) -> Mixer:
    spec = GatedDelta(num_heads=4, num_key_heads=2, key_head_dim=6, value_head_dim=5, **settings)
    return GatedDeltaMixer(spec, spec.rows(WIDTH))


def state_space_mixer(**settings: Any) -> Mixer:
    spec = StateSpace(num_heads=4, num_groups=2, head_dim=5, state_size=6, **settings)
    return StateSpaceMixer(spec, spec.rows(WIDTH))


RECURRENCES = {
    "delta rule": delta(None, 1.0),
    "negative eigenvalues": delta(None, 2.0),
    "decay per channel": delta(KEY, 1.0),
    "state space": Recurrence(
        make_state_space,
        lambda parts, starts, state, size: chunked_state_space(state_space_inputs(parts), starts, state, size),
        lambda parts, starts, state: recurrent_state_space(state_space_inputs(parts), starts, state),
        (HEADS, KEY, VALUE),
    ),
    "convolution": convolution(4, 7),
}
MIXERS: dict[str, tuple[Mixer, list[tuple[int, ...]]]] = {
    "delta mixer": (delta_mixer(), [(3, 44), (4, 6, 5)]),
    "KDA mixer": (
        delta_mixer(decay_per_channel=True, gate_rank=3, gate_activation="sigmoid", decay_bound=-5.0),
        [(3, 44), (4, 6, 5)],
    ),
    "state space mixer": (state_space_mixer(), [(3, 44), (4, 6, 5)]),
    "short convolution mixer": (
        ShortConvMixer(ShortConv(bias=True), ShortConv(bias=True).rows(WIDTH)),
        [(2, WIDTH)],
    ),
}
KINDS = RECURRENCES | {name: mixer(*parts) for name, parts in MIXERS.items()}
ALL = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def cast(parts: Parts, dtype: torch.dtype) -> Parts:
    return [part.to(dtype) for part in parts[0]], [part.to(dtype) for part in parts[1]]


def pick(parts: Parts, row: slice = slice(None), tokens: slice = slice(None)) -> Parts:
    return [part[row, tokens] for part in parts[0]], parts[1]


def gradients(parts: Parts, state: Tensor, run: Callable[[Parts, Tensor], Result]) -> list[Tensor]:
    """Return outputs, the new state, and the gradients of a random function of both by inputs, weights and state."""
    leaves = [part.clone().requires_grad_() for part in (*parts[0], *parts[1], state)]
    number = len(parts[0])
    y, after = run((leaves[:number], leaves[number:-1]), leaves[-1])
    generator = torch.Generator().manual_seed(3)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in (y, after))
    assert isinstance(total, Tensor)
    return [y.detach(), after.detach(), *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]


def run(kind: Recurrence, parts: Parts, state: Tensor | None, size: int | None, starts: Tensor | None = None) -> Result:
    """Run the form with chunks of a size, or the recurrent form if the size is None."""
    return kind.recurrent(parts, starts, state) if size is None else kind.chunked(parts, starts, state, size)


def starts_of(lengths: list[int]) -> Tensor:
    """Return the starts of documents of these lengths, in reverse order in the second row."""
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in (lengths, lengths[::-1])]
    return document_starts(torch.stack(numbers))


@ALL
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (63, 64), (64, 64), (131, 64), (50, 7), (33, 8), (33, 24)])
def test_chunks_equal_single_tokens(kind: Recurrence, tokens: int, size: int) -> None:
    torch.manual_seed(0)
    parts, state = kind.make(tokens), normal(ROWS, *kind.state)
    by_chunk = gradients(parts, state, lambda inputs, before: kind.chunked(inputs, None, before, size))
    at_once = gradients(parts, state, lambda inputs, before: kind.recurrent(inputs, None, before))
    for a, b in zip(by_chunk, at_once, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    # As in decoding, each token with the state after the one before.
    outputs = []
    for token in range(tokens):
        y, state = kind.recurrent(pick(parts, tokens=slice(token, token + 1)), None, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), by_chunk[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(state, by_chunk[1], rtol=1e-9, atol=1e-11)


@ALL
@pytest.mark.parametrize("size", [16, None], ids=["chunked", "recurrent"])
def test_documents_of_a_row_are_as_if_alone(kind: Recurrence, size: int | None) -> None:
    """Their borders lie within chunks, on their borders, and several in one chunk."""
    torch.manual_seed(1)
    lengths = [3, 1, 12, 1, 1, 30, 16, 5]
    parts, starts = kind.make(sum(lengths)), starts_of(lengths)

    def run_alone(inputs: Parts, before: Tensor) -> Result:
        """Run each document alone; the first one of a row continues the state before it."""
        rows = []
        for row, row_lengths in enumerate((lengths, lengths[::-1])):
            place, state, outputs = 0, before[row : row + 1], []
            for length in row_lengths:
                y, after = run(kind, pick(inputs, slice(row, row + 1), slice(place, place + length)), state, size)
                outputs.append(y)
                place, state = place + length, torch.zeros_like(state)
            rows.append((torch.cat(outputs, 1), after))
        outputs, states = zip(*rows, strict=True)
        return torch.cat(outputs), torch.cat(states)

    before = normal(ROWS, *kind.state)
    packed = gradients(parts, before, lambda inputs, state: run(kind, inputs, state, size, starts))
    alone = gradients(parts, before, run_alone)
    for a, b in zip(packed, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@ALL
def test_a_document_changes_nothing_in_others(kind: Recurrence) -> None:
    """Not one bit of their outputs and gradients, in fp32."""
    torch.manual_seed(2)
    parts, starts = cast(kind.make(90), torch.float32), starts_of([21, 40, 29])
    first = [part.clone() for part in parts[0]]
    for part in first:
        part[0, :21] *= 1.7
        part[1, 29:69] *= 1.7
    state = torch.zeros(ROWS, *kind.state)
    both = [
        gradients((inputs, parts[1]), state, lambda x, before: kind.chunked(x, starts, before, 16))
        for inputs in (parts[0], first)
    ]
    for index, (a, b) in enumerate(zip(*both, strict=True)):
        if index == 0 or 2 <= index < 2 + len(first):
            # (The gradients of a convolution do not depend on its inputs.)
            assert index or not (torch.equal(a[0, :21], b[0, :21]) or torch.equal(a[1, 29:69], b[1, 29:69]))
            assert torch.equal(a[0, 21:], b[0, 21:]) and torch.equal(a[1, :29], b[1, :29])
            assert torch.equal(a[1, 69:], b[1, 69:])


@ALL
@torch.no_grad()
def test_a_row_continues_from_a_state(kind: Recurrence) -> None:
    """To the bit if it is divided between chunks, and with few tokens more than a convolution has taps."""
    torch.manual_seed(3)
    parts, starts = cast(kind.make(83), torch.float32), starts_of([37, 2, 44])
    y, after = kind.chunked(parts, starts, None, 16)
    for borders in ([0, 48, 64, 83], [0, 1, 3, 37, 39, 41, 80, 83]):
        state, outputs = None, []
        for first, last in pairwise(borders):
            place = slice(first, last)
            piece, state = kind.chunked(pick(parts, tokens=place), starts[:, place], state, 16)
            outputs.append(piece)
        assert state is not None
        if borders[1] == 48:
            assert torch.equal(torch.cat(outputs, 1), y) and torch.equal(state, after)
        torch.testing.assert_close(torch.cat(outputs, 1), y)
        torch.testing.assert_close(state, after)


@ALL
@torch.no_grad()
def test_rows_do_not_depend_on_each_other(kind: Recurrence) -> None:
    """Not one bit in inference: a sequence among others gets the numbers that it gets alone."""
    torch.manual_seed(4)
    pieces = [cast(kind.make(40), torch.float32) for _ in range(9)]
    weights = pieces[0][1]
    inputs = [torch.cat(parts) for parts in zip(*(piece[0] for piece in pieces), strict=True)]
    state = torch.randn(len(inputs[0]), *kind.state)
    for tokens in (40, 1):
        parts = pick((inputs, weights), tokens=slice(tokens))
        for size in (16, None):
            together = run(kind, parts, state, size)
            for row in range(0, len(state), 5):
                one = slice(row, row + 1)
                alone = run(kind, pick(parts, one), state[one], size)
                assert all(torch.equal(a[one], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("kind", RECURRENCES.values(), ids=RECURRENCES)
def test_narrow_inputs_keep_a_wide_state(kind: Recurrence) -> None:
    torch.manual_seed(5)
    parts = cast(kind.make(70), torch.bfloat16)
    state = torch.randn(ROWS, *kind.state)
    exact, exact_after = kind.recurrent(cast(parts, torch.float64), None, state.double())
    for y, after in (kind.chunked(parts, None, state, 64), kind.recurrent(parts, None, state)):
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=0.02)
        # The state of a convolution consists of inputs, which are narrow.
        is_convolution = len(kind.state) == 2
        assert after.dtype == (torch.bfloat16 if is_convolution else torch.float32)
        torch.testing.assert_close(after.double(), exact_after, rtol=2**-8 if is_convolution else 1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["delta rule", "decay per channel", "state space"])
def test_strong_decays_keep_precision_and_gradients(name: str) -> None:
    """Tokens after one that deletes the state are as precise as others, although logarithms of decays are summed."""
    torch.manual_seed(6)
    kind = RECURRENCES[name]
    parts = kind.make(200)
    decay = parts[1][0] if name == "state space" else parts[0][3]
    if name == "state space":
        decay.mul_(80)  # to about -16, the strongest in published models
    else:
        decay[:, 3::9] = -90.0
        decay[:, 70] = -1e6
        decay[0, 71:90] = -1e-4
    state = normal(ROWS, *kind.state)
    exact = gradients(parts, state, lambda x, before: kind.recurrent(x, None, before))
    narrow = gradients(cast(parts, torch.float32), state.float(), lambda x, before: kind.chunked(x, None, before, 64))
    for a, b in zip(narrow, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6 * b.abs().max().item() + 1e-12)


@pytest.mark.parametrize(("module", "shapes"), MIXERS.values(), ids=MIXERS)
def test_states_have_the_size_of_the_formula(module: Mixer, shapes: list[tuple[int, ...]]) -> None:
    assert module.spec.state_shapes(WIDTH) == shapes
    module.bfloat16()
    for tokens in (1, 70):
        for decode in (False, True):
            x = torch.randn(ROWS, tokens, WIDTH, dtype=torch.bfloat16)
            state = [part for part in module(x, decode=decode)[1] if part is not None]
            assert [part.shape[1:] for part in state] == shapes
            assert [part.dtype for part in state] == [torch.bfloat16, torch.float32][: len(shapes)]
            # They keep nothing else in memory.
            assert all(part.untyped_storage().nbytes() == part.nbytes for part in state)
    module.float()


@pytest.mark.parametrize(("module", "shapes"), MIXERS.values(), ids=MIXERS)
@torch.no_grad()
def test_pieces_of_several_sequences_are_as_if_alone(module: Mixer, shapes: list[tuple[int, ...]]) -> None:
    """To the bit: prompts, single tokens, and several tokens that continue a sequence, in one row and in any order."""
    torch.manual_seed(7)
    module.chunk_size = 16
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    lengths = [(70, False), (1, True), (5, True), (1, True), (33, False), (5, True), (1, False), (1, True)]
    pieces = [RowPiece(*piece) for piece in lengths]
    x = torch.randn(1, sum(piece.length for piece in pieces), WIDTH)
    state = MixerState(*(torch.randn(len(pieces), *shape) for shape in shapes))
    parts, gate = module.project(x)
    y, after = mix_pieces(module, parts, pieces, state)
    y = module.finish(y, gate)
    first = 0
    for number, piece in enumerate(pieces):
        one, place = slice(number, number + 1), slice(first, first + piece.length)
        before = MixerState(*(None if part is None else part[one] for part in state))
        alone, alone_after = module(x[:, place], None, before, decode=piece.decode)
        assert torch.equal(alone, y[:, place])
        for a, b in zip(alone_after, after, strict=True):
            assert (a is None and b is None) or torch.equal(a, b[one])
        first += piece.length


@pytest.mark.parametrize("module", [module for module, _ in MIXERS.values()], ids=MIXERS)
def test_documents_continue_their_parents(module: Mixer) -> None:
    """As if each answer followed a prompt of its own, with the gradients of the prompt from all of its answers."""
    torch.manual_seed(8)
    module.double().chunk_size = 16
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    # Lengths of two prompts with their answers, of a document that none continues, of padding, and of answers to a
    # prompt whose only token belongs to them.
    families = [[20, 7, 33, 1], [1, 16, 2], [9], [3], [0, 5, 3]]
    documents, parents = [], []
    for family in families:
        first = len(set(documents))
        for number, length in enumerate(family):
            documents += [first + number] * length
            parents += [first] * length
    x = normal(2, len(documents), WIDTH)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    documents_BT, parents_BT = (torch.tensor([numbers, numbers]) for numbers in (documents, parents))
    parts, gate = module.project(inputs[0])
    y = module.finish(mix_with_parents(module, parts, documents_BT, parents_BT), gate)
    pieces, start = [], 0
    for prompt, *answers in families:
        parent = inputs[1][:, start : start + prompt]
        pieces += [module(parent)[0]] if prompt else []
        start += prompt
        for answer in answers:
            both = torch.cat((parent, inputs[1][:, start : start + answer]), 1)
            pieces.append(module(both)[0][:, prompt:])
            start += answer
    expected = torch.cat(pieces, 1)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    upstream = normal(*y.shape)
    results = [
        torch.autograd.grad(output, (x, *module.parameters()), upstream)
        for x, output in zip(inputs, (y, expected), strict=True)
    ]
    module.float()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
