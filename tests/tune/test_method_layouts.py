"""Every tuning method in every layout equals the run of one process: losses, gradient norms and weights, in fp64."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest
import torch

from jingu.data.batch import Batch
from jingu.errors import JinguError
from jingu.model.adapter_specs import Adapter, DeepPrompt, Ia3, Lora, SoftPrompt
from jingu.model.decoder import build_model
from jingu.model.spec import ModelSpec, replace_fields
from jingu.training.batch_transforms import model_inputs, prepend_virtual_tokens
from tests.dist.test_layouts import check, tiny
from tests.rank_pool import RankPool

ALL = ("*attention.*", "*.feed_forward.*")
METHODS: dict[str, Adapter] = {
    "lora": Lora(rank=3, alpha=6.0, target_modules=ALL),
    "dora": Lora(rank=2, alpha=6.0, target_modules=ALL, use_dora=True, use_rslora=True),
    "dropout": Lora(rank=3, alpha=6.0, target_modules=ALL, use_dora=True, dropout=0.3),
    "embedding and head": Lora(rank=2, alpha=6.0, target_modules=("embedding", "head", "*attention.q")),
    "tokens and biases": Lora(
        rank=2,
        alpha=6.0,
        target_modules=ALL,
        lora_bias=True,
        modules_to_save=("norm", "blocks.*.attention_norm"),
        trainable_token_indices=(3, 0, 30),
    ),
    "ia3": Ia3(target_modules=("*attention.k", "*attention.v", "*.feed_forward.down", "*.feed_forward.up")),
    "prompt": SoftPrompt(num_virtual_tokens=3),
    "p_tuning_mlp": SoftPrompt(num_virtual_tokens=3, encoder="mlp", encoder_hidden_size=10),
    "p_tuning_lstm": SoftPrompt(num_virtual_tokens=3, encoder="lstm", encoder_hidden_size=10),
    "prefix": DeepPrompt(num_virtual_tokens=3, encoder_hidden_size=10),
    "p_tuning_v2": DeepPrompt(num_virtual_tokens=3),
}
LAYOUTS: list[dict[str, Any]] = [{"zero_stage": 3}, {"tensor": 2}, {"pipeline": 2}]
MODELS: dict[str, ModelSpec] = {
    "llama": tiny("llama", kv_heads=2),
    "bloom": tiny("bloom"),
    "t5": tiny("t5", num_encoder_layers=2),
}
# A tied head has no matrix of its own, and the embedding of an encoder-decoder takes no adapters.
REFUSED = [("bloom", "embedding and head"), ("t5", "embedding and head"), ("t5", "tokens and biases")]


def spec_of(model: str, method: str) -> ModelSpec:
    return replace_fields(MODELS[model], adapter=METHODS[method])


@pytest.mark.parametrize("method", METHODS)
def test_a_method_in_each_layout(method: str, ranks: RankPool) -> None:
    check(ranks, spec_of("llama", method), 2, LAYOUTS)


@pytest.mark.parametrize("targets", [("embedding",), ()], ids=["lora", "tokens"])
def test_adapters_of_a_tied_embedding(targets: tuple[str, ...], ranks: RankPool) -> None:
    """The last stage of a pipeline has a copy of the embedding, which a LoRA does not change, but trained rows do."""
    tokens = () if targets else (3, 0, 30)
    adapter = Lora(rank=2, alpha=6.0, target_modules=(*targets, "*attention.q"), trainable_token_indices=tokens)
    spec = tiny("llama", kv_heads=2, tie_word_embeddings=True, adapter=adapter)
    check(ranks, spec, 2, [{"tensor": 2}, {"pipeline": 2}])


@pytest.mark.parametrize(("model", "method"), REFUSED)
def test_adapters_of_other_embeddings_are_refused(model: str, method: str) -> None:
    with pytest.raises(JinguError, match="has no matrix of its own" if model == "bloom" else "takes no adapters"):
        build_model(spec_of(model, method))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def combine(models: Iterable[str], fast: Collection[tuple[str, str]] = ()) -> list[Any]:
    """Return all allowed pairs of a model and a method, of which those that are not fast are slow tests."""
    pairs = [pair for pair in product(models, METHODS) if pair not in REFUSED]
    return [pair if pair in fast else slow(*pair) for pair in pairs]


@pytest.mark.parametrize(("model", "method"), combine(["t5"], fast=[("t5", "prompt"), ("t5", "p_tuning_v2")]))
def test_an_encoder_decoder_on_tensor_and_pipeline(model: str, method: str, ranks: RankPool) -> None:
    check(ranks, spec_of(model, method), 4, [{"tensor": 2, "pipeline": 2}])


@pytest.mark.parametrize(
    ("model", "method"), combine(["llama", "bloom"], fast=[("bloom", "p_tuning_v2"), ("llama", "prompt")])
)
def test_context_parallelism_with_packed_documents(model: str, method: str, ranks: RankPool) -> None:
    """Both methods of context parallelism; all documents of a row attend to one prompt."""
    layouts = [{"context": 2}, {"context": 2, "context_method": "ring"}]
    check(ranks, spec_of(model, method), 2, layouts, documents=True)


@pytest.mark.parametrize(("model", "method"), combine(MODELS))
def test_three_axes_and_zero_together(model: str, method: str, ranks: RankPool) -> None:
    layouts = [{"tensor": 2, "pipeline": 2, "zero_stage": zero} for zero in (2, 3)]
    check(ranks, spec_of(model, method), 8, layouts)


def test_adapters_of_experts(ranks: RankPool) -> None:
    mixture = tiny("mixtral", kv_heads=2, feed_forward={"num_experts": 4, "capacity_factor": 1.25})
    layouts: list[dict[str, Any]] = [{"zero_stage": 3, "expert": 2}, {"tensor": 2}, {"pipeline": 2}]
    check(ranks, replace_fields(mixture, adapter=METHODS["lora"]), 2, layouts)


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_weights_do_not_change_in_any_layout(tied: bool, ranks: RankPool) -> None:
    """The first pipeline stage trains nothing, and the last one has a copy of its frozen tied embedding."""
    spec = replace_fields(MODELS["llama"], tie_word_embeddings=tied, frozen_parameters=("embedding.*", "blocks.0.*"))
    check(ranks, spec, 2, LAYOUTS)


@pytest.mark.parametrize("method", ["p_tuning_mlp", "p_tuning_v2"])
@pytest.mark.parametrize("model", ["llama", "bloom"])
def test_packed_documents_share_one_prompt(model: str, method: str) -> None:
    spec = spec_of(model, method)
    torch.manual_seed(0)
    decoder = build_model(spec).double()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    texts = torch.arange(12).view(2, 6)
    documents, positions = torch.arange(2).repeat_interleave(6), torch.arange(6).repeat(2)
    row = Batch(texts.flatten()[None], texts.flatten()[None], positions[None], documents[None])
    together, apart = prepend_virtual_tokens(row, spec), prepend_virtual_tokens(Batch(texts, texts), spec)
    with torch.no_grad():
        result = decoder(model_inputs(together))[0, 3:].view(2, 6, -1)
        expected = decoder(apart.tokens)[:, 3:]
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
