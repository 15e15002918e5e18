"""The chunked loss equals torch's cross-entropy over whole logits, in value and gradient."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from jingu.training import loss as loss_module
from jingu.training.loss import chunk_loss, linear_cross_entropy


def reference(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.t()).flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 9),
    width=st.integers(1, 7),
    vocabulary=st.integers(1, 41),
    chunk=st.integers(1, 64),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_equals_whole_logits_in_fp64(rows, length, width, vocabulary, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = -100
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
        patch.setattr(loss_module, "MIN_CHUNK_TOKENS", 1)
        for function in (linear_cross_entropy, reference):
            x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            total = function(x, w, labels)
            (total * 0.37).backward()
            results.append((total, x.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.15, 0.0), (0.0, 0.02), (0.1, 0.01)])
def test_smoothing_z_loss_and_factors(smoothing, z):
    """Against torch's own smoothing, and autograd through the rest."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 7, 5, dtype=torch.float64, generator=generator)
    weight = torch.randn(11, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    labels[0, 2:5] = -100
    factors = torch.rand(3, 7, dtype=torch.float64, generator=generator) * 2
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = x @ w.t()
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none", label_smoothing=smoothing
    )
    losses = losses + z * logits.logsumexp(-1).flatten().square() * (labels.flatten() >= 0)
    (losses * factors.flatten()).sum().backward()
    a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = linear_cross_entropy(a, b, labels, partial(chunk_loss, smoothing=smoothing, z=z), factors_BT=factors)
    total.backward()
    torch.testing.assert_close(total, (losses * factors.flatten()).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(a.grad, x.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(b.grad, w.grad, rtol=1e-11, atol=1e-13)


def test_only_gradients_that_are_wanted_are_computed(monkeypatch):
    """A head that is not trained takes one product less, an evaluation two."""
    products = []
    counted = loss_module.matmul_accumulate
    monkeypatch.setattr(loss_module, "matmul_accumulate", lambda *a: products.append("weight") or counted(*a))
    counting = loss_module.matmul
    monkeypatch.setattr(loss_module, "matmul", lambda *a: products.append("other") or counting(*a))
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(5, 4), torch.tensor([[1, 2, 3], [4, 0, -100]])
    linear_cross_entropy(hidden.requires_grad_(), weight, labels).backward()
    assert products == ["other", "other"] and hidden.grad is not None and weight.grad is None
    products.clear()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight.requires_grad_(), labels)
    assert products == ["other"]


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[[1e4]]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    total = linear_cross_entropy(hidden, weight, torch.tensor([[1]]))
    total.backward()
    assert total.item() == pytest.approx(2e4)
    assert torch.isfinite(hidden.grad).all()


def test_bf16_is_summed_in_fp32():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 64, 16, generator=generator).bfloat16()
    weight = (torch.randn(300, 16, generator=generator) * 0.1).bfloat16()
    labels = torch.randint(0, 300, (4, 64), generator=generator)
    total = linear_cross_entropy(hidden, weight, labels)
    exact = reference(hidden.double(), weight.double(), labels)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=2e-3)


def test_no_gradient_no_work():
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    total = linear_cross_entropy(hidden, weight, torch.full((2, 3), -100))
    assert total.item() == 0.0 and not total.requires_grad
