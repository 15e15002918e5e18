"""Training layers of multi-token prediction: their loss by its definition, layouts, what is kept, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jingu.errors import JinguError
from jingu.model.decoder import build_model
from jingu.model.inputs import Inputs
from jingu.model.prediction import shift_labels
from jingu.model.resolve import find_family
from jingu.model.spec import replace_fields
from jingu.training.commands import train

MTP: dict[str, Any] = {"model.mtp_layers": 2, "model.mtp_loss_weight": 0.3, "train.steps": 3}


# The layers are like the last one, or of a kind of their own, with a window and a narrow feed-forward.
WINDOW = {"attention.sliding_window": 3, "feed_forward.intermediate_size": 20}
KINDS = {"layer_kinds": {"full": {}, "window": WINDOW}, "layer_pattern": ("full", "full"), "mtp_kind": "window"}


@pytest.mark.parametrize("kinds", [{}, KINDS], ids=["like the last", "of their own kind"])
def test_each_layer_predicts_one_token_further_of_the_same_document(kinds: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = {"attention.num_heads": 3, "attention.num_kv_heads": 3, "attention.head_dim": 8}
    spec = replace_fields(
        find_family("llama").template,
        vocab_size=31,
        hidden_size=24,
        num_layers=2,
        max_position_embeddings=16,
        mtp_layers=2,
        mtp_loss_weight=1.0,
        **heads,
        **kinds,
    )
    model = build_model(spec).double().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(31, (2, 11))
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1).masked_fill(documents != shifted(documents), -100)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, depth: int = 0) -> torch.Tensor:
        logits = (hidden @ weight.T).flatten(0, 1)
        expected = shift_labels(labels, documents, depth, -100) if depth else labels
        return torch.nn.functional.cross_entropy(logits, expected.flatten(), reduction="sum")

    total, further = model(Inputs(ids, documents=documents), loss=loss, further=loss)
    # By the definition: token by token, and each document alone.
    main, losses = torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for row in range(2):
        for document in documents[row].unique():
            part = ids[row, documents[row] == document]
            states = model(Inputs(part.unsqueeze(0)))
            main += nll(model.logits(states)[0, :-1], part[1:])
            for number, layer in enumerate(model.mtp):
                depth = number + 1
                nexts = torch.nn.functional.pad(part[depth:], (0, depth)).unsqueeze(0)
                context = model.prediction_context(Inputs(part.unsqueeze(0)), states)
                states = layer(states, model.embedding(nexts), context)
                losses[number] += nll(model.logits(states)[0, : -depth - 1], part[depth + 1 :])
    torch.testing.assert_close(total, main, rtol=1e-11, atol=0)
    torch.testing.assert_close(further, losses.mean(), rtol=1e-11, atol=0)


def shifted(documents: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(documents[:, 1:], (0, 1), value=-1)


def nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def test_layouts_train_the_same(tiny_run, train_on, done):
    one = tiny_run(MTP, name="one")
    zero = tiny_run({**MTP, "parallel.zero_stage": 3}, name="zero")
    tensor = tiny_run({**MTP, "parallel.tensor": 2}, name="tensor")
    train_on(1, one)
    train_on(2, zero, tensor)
    for column in ("loss", "mtp_loss", "grad_norm"):
        for run in (zero, tensor):
            assert done(run).column(column) == pytest.approx(done(one).column(column), rel=1e-9)
    assert done(one).column("mtp_loss")[0] > 5 and done(one).column("mtp_loss")[-1] < done(one).column("mtp_loss")[0]


def test_without_a_weight_they_are_kept(tiny_run, done):
    start = tiny_run(MTP, name="start")
    assert train(start) == 0
    tuned = tiny_run({"train.steps": 2, "initialize.from": str(done(start).folder)}, name="tuned")
    assert train(tuned) == 0
    before, after = done(start).tensors(), done(tuned).tensors()
    kept = [name for name in before if name.startswith("model/mtp.")]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    assert not torch.equal(before["model/embedding.weight"], after["model/embedding.weight"])


@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_layouts_that_are_refused(axis, tiny_run, ranks):
    from jingu.parallel.mesh import resolve_axis_sizes

    spec = replace_fields(find_family("llama").template, mtp_layers=1, mtp_loss_weight=0.1)
    config = tiny_run({f"parallel.{axis}": 2})
    with pytest.raises(JinguError, match=f"multi-token prediction is trained without {axis} parallelism"):
        resolve_axis_sizes(config.parallel, 2, spec)
