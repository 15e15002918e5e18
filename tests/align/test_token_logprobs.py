"""Log-probabilities of tokens, their entropies and gradients equal torch.log_softmax over whole logits, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jingu.align.token_logprobs import TokenLogProbs
from jingu.config.sections.model import ModelSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.model.resolve import spec_from_settings
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.parallel.sharding import shard_range
from jingu.training import loss as loss_module
from tests.conftest import TINY_LLAMA
from tests.rank_pool import RankPool


def reference(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    has_token = tokens >= 0
    chosen = log_probs.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    return chosen * has_token, (entropies * has_token).detach()


def draw(rows: int, length: int, width: int, vocabulary: int, seed: int) -> tuple[Tensor, ...]:
    """Hidden states, head, tokens of which some are -100, and a factor on each log-probability."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
    tokens[torch.rand(rows, length, generator=generator) < 0.3] = -100
    return hidden, weight, tokens, torch.randn(rows, length, dtype=torch.float64, generator=generator)


@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    vocabulary=st.integers(1, 41),
    chunk=st.integers(1, 64),
    temperature=st.sampled_from([1.0, 0.7, 1.9]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_equals_log_softmax(rows: int, length: int, vocabulary: int, chunk: int, temperature: float, seed: int) -> None:
    hidden, weight, tokens, factors = draw(rows, length, 5, vocabulary, seed)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
        patch.setattr(loss_module, "MIN_CHUNK_TOKENS", 1)
        for function in (TokenLogProbs(vocabulary), reference):
            x = hidden.clone().requires_grad_()
            w = weight.clone().requires_grad_()
            log_probs, entropies = function(x, w, tokens, temperature)
            (log_probs * factors).sum().backward()
            results.append((log_probs.detach(), entropies, x.grad, w.grad))
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


def test_entropies_have_no_gradient_and_a_frozen_head_none() -> None:
    hidden, weight, tokens, _ = draw(2, 5, 4, 11, 0)
    log_probs, entropies = TokenLogProbs(11)(hidden.requires_grad_(), weight, tokens)
    assert not entropies.requires_grad
    log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert not TokenLogProbs(11)(hidden, weight, tokens)[0].requires_grad


def test_gradients_can_be_asked_for_twice() -> None:
    """Schedules that split the backward pass do so."""
    hidden, weight, tokens, _ = draw(2, 5, 4, 11, 0)
    total = TokenLogProbs(11)(hidden.requires_grad_(), weight.requires_grad_(), tokens)[0].sum()
    first = torch.autograd.grad(total, hidden, retain_graph=True)
    both = torch.autograd.grad(total, (hidden, weight))
    torch.testing.assert_close(first[0], both[0], rtol=0, atol=0)


def on_ranks(rank: int, world: int, axes: dict[str, Any], seed: int) -> list[Tensor]:
    """The results of a loss of whole rows that is not linear in their log-probabilities, on one rank."""
    spec = spec_from_settings(ModelSettings.model_validate(TINY_LLAMA), 13, 7)
    mesh = build_mesh(resolve_axis_sizes(ParallelSettings.model_validate(axes), world, spec), torch.device("cpu"))
    hidden, weight, tokens, factors = draw(3, 7, 5, 13, seed)
    start, count = shard_range(13, mesh["tensor"].size(), mesh.get_local_rank("tensor"))
    context = mesh["context"].size()
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % context))
    x = padded.chunk(context, 1)[mesh.get_local_rank("context")].clone().requires_grad_()
    w = weight[start : start + count].clone().requires_grad_()
    head = TokenLogProbs(13, mesh)
    log_probs, entropies = head(x, w, tokens, 0.8)
    ((log_probs * factors).sum(1).square().sum() * head.share).backward()
    assert x.grad is not None and w.grad is not None
    return [log_probs.detach(), entropies, x.grad, w.grad]


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 2}])
def test_vocabulary_and_tokens_divided_over_ranks(axes: dict[str, int], ranks: RankPool) -> None:
    hidden, weight, tokens, factors = draw(3, 7, 5, 13, 4)
    x = hidden.clone().requires_grad_()
    w = weight.clone().requires_grad_()
    log_probs, entropies = reference(x, w, tokens, 0.8)
    (log_probs * factors).sum(1).square().sum().backward()
    assert x.grad is not None and w.grad is not None
    results = ranks.run(on_ranks, 2, axes, 4)
    for result in results:
        torch.testing.assert_close(result[0], log_probs.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(result[1], entropies, rtol=1e-10, atol=1e-12)
    hidden_grads = [result[2] for result in results]
    weight_grads = [result[3] for result in results]
    # Ranks of `tensor` have summands of the hidden states' gradient, those of `context` of the weight's.
    if "tensor" in axes:
        torch.testing.assert_close(sum(hidden_grads)[:, :7], x.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(torch.cat(weight_grads), w.grad, rtol=1e-10, atol=1e-12)
    else:
        torch.testing.assert_close(torch.cat(hidden_grads, 1)[:, :7], x.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sum(weight_grads), w.grad, rtol=1e-10, atol=1e-12)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations return.

    Attributes:
        peak: the most that existed at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return results


ROWS, LENGTH, VOCABULARY = 4, 256, 2048


def peak_of(function: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> int:
    """Return the most bytes that forward and backward take."""
    x = hidden.clone().requires_grad_()
    w = weight.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch, PeakBytes() as meter:
        patch.setattr(loss_module, "CHUNK_ELEMENTS", 8 * VOCABULARY)
        patch.setattr(loss_module, "MIN_CHUNK_TOKENS", 1)
        log_probs, entropies = function(x, w, tokens, temperature)
        (log_probs.sum(1).square().sum() + entropies.sum()).backward()
    assert x.grad is not None and w.grad is not None
    return meter.peak


def peak_on_ranks(rank: int, world: int) -> int:
    spec = spec_from_settings(ModelSettings.model_validate(TINY_LLAMA), VOCABULARY, LENGTH)
    axes = resolve_axis_sizes(ParallelSettings(tensor=world), world, spec)
    mesh = build_mesh(axes, torch.device("cpu"))
    hidden, weight, tokens, _ = draw(ROWS, LENGTH, 4, VOCABULARY, 0)
    start, count = shard_range(VOCABULARY, world, rank)
    part = weight[start : start + count].bfloat16()
    return peak_of(TokenLogProbs(VOCABULARY, mesh), hidden.bfloat16(), part, tokens, 0.8)


def test_whole_logits_never_exist(ranks: RankPool) -> None:
    """Neither in forward nor in backward."""
    hidden, weight, tokens, _ = draw(ROWS, LENGTH, 4, VOCABULARY, 0)
    logits = int(tokens.ge(0).sum()) * VOCABULARY * torch.bfloat16.itemsize
    here = hidden.bfloat16(), weight.bfloat16(), tokens, 0.8
    assert peak_of(reference, *here) > logits
    assert peak_of(TokenLogProbs(VOCABULARY), *here) < logits / 3
    # With the vocabulary divided, a rank has half of the logits.
    assert max(ranks.run(peak_on_ranks, 2)) < logits / 2 / 3
