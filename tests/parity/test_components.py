"""Components of ordinary attention against transformers: logits and gradients of random models of awkward sizes.

Specs are written by hand, and a table of names carries the weights of transformers' model over, because these tests are
about the components and not about reading files. Norms and biases are random, so that an absent one shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from jingu.model.decoder import Decoder, build_model
from jingu.model.parameter_table import parameter_table
from jingu.model.parts import saved_bytes
from jingu.model.spec import ModelSpec
from jingu.plan.workload import _count_saved
from jingu.training.loss import linear_cross_entropy
from tests.parity.fp64 import randomize

TOKENS, VOCABULARY, LAYERS = 41, 317, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
WINDOW = {"attention.sliding_window": 7}
MIXED = {"layer_kinds": {"sliding_attention": WINDOW, "full_attention": {}}, "layer_pattern": KINDS}


def spec(
    attention: dict[str, Any] | None = None,
    feed_forward: dict[str, Any] | None = None,
    norm: dict[str, Any] | None = None,
    position: dict[str, Any] | None = None,
    **others: Any,
) -> ModelSpec:
    """Return a spec like Llama's with these differences."""
    base = {
        "family": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_layers": LAYERS,
        "max_position_embeddings": 96,
        "norm": {"type": "rms", "eps": 1e-6, **(norm or {})},
        "position": {"type": "rope", **(position or {})},
        "attention": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16, **(attention or {})},
        "feed_forward": {"type": "gated", "intermediate_size": 88, **(feed_forward or {})},
    }
    return ModelSpec.model_validate({**base, **others})


def config(name: str, **settings: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**SIZES, **settings})


def names(**changes: str) -> dict[str, str]:
    """Return jingu's names of the modules of a block by those of Llama, with changes."""
    plain = {f"self_attn.{part}_proj": f"attention.{part}" for part in "qkv"}
    plain |= {f"mlp.{part}_proj": f"feed_forward.{part}" for part in ("gate", "up", "down")}
    plain |= {"self_attn.o_proj": "attention.output", "mlp.gate_up_proj": "feed_forward.gate,feed_forward.up"}
    plain |= {"self_attn.qkv_proj": "attention.q,attention.k,attention.v"}
    plain |= {f"self_attn.{part}_norm": f"attention.{part}_norm" for part in "qk"}
    plain |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
    return plain | {key.replace("__", "."): value for key, value in changes.items()}


SANDWICH = names(
    post_attention_layernorm="attention_output_norm",
    pre_feedforward_layernorm="feed_forward_norm",
    post_feedforward_layernorm="feed_forward_output_norm",
)
BEHIND = names(post_attention_layernorm="attention_output_norm", post_feedforward_layernorm="feed_forward_output_norm")


def gemma2() -> tuple[Any, ModelSpec, dict[str, str]]:
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    kinds = {"sliding_window": 7, "layer_types": KINDS}
    theirs = config("Gemma2", head_dim=22, query_pre_attn_scalar=20, **caps, **kinds)
    return (
        theirs,
        spec(
            attention={"head_dim": 22, "scale": 20**-0.5, "softcap": 3.0},
            feed_forward={"activation": "gelu_tanh"},
            norm={"offset": True},
            norm_placement="around",
            embedding_scale="sqrt_hidden_size",
            round_embedding_scale=True,
            logit_softcap=5.0,
            **MIXED,
        ),
        SANDWICH,
    )


def gemma3() -> tuple[Any, ModelSpec, dict[str, str]]:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0},
    }
    theirs = config(
        "Gemma3Text",
        head_dim=22,
        query_pre_attn_scalar=20,
        sliding_window=7,
        layer_types=KINDS,
        rope_parameters=rope,
    )
    kinds = {
        "sliding_attention": {**WINDOW, "position": {"type": "rope", "theta": 50.0}},
        "full_attention": {},
    }
    return (
        theirs,
        spec(
            attention={"head_dim": 22, "scale": 20**-0.5, "qk_norm": True},
            feed_forward={"activation": "gelu_tanh"},
            norm={"offset": True},
            position={"theta": 700.0, "scaling": {"type": "linear", "factor": 3.0}},
            norm_placement="around",
            embedding_scale="sqrt_hidden_size",
            round_embedding_scale=True,
            layer_kinds=kinds,
            layer_pattern=KINDS,
        ),
        SANDWICH,
    )


def olmo2() -> tuple[Any, ModelSpec, dict[str, str]]:
    theirs = config("Olmo2", num_key_value_heads=3, rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    attention = {"num_kv_heads": 3, "qk_norm": True, "qk_norm_width": "all_heads"}
    ours = spec(attention=attention, norm={"eps": 1e-5}, position={"theta": 50.0}, norm_placement="behind")
    return theirs, ours, BEHIND


def olmo3() -> tuple[Any, ModelSpec, dict[str, str]]:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "attention_factor": 1.2}
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {**yarn, "rope_theta": 50.0},
    }
    theirs = config("Olmo3", sliding_window=7, layer_types=KINDS, rope_parameters=rope)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "attention_factor": 1.2}
    kinds = {
        "sliding_attention": {**WINDOW, "position.scaling": None},
        "full_attention": {},
    }
    ours = spec(
        attention={"qk_norm": True, "qk_norm_width": "all_heads"},
        norm={"eps": 1e-5},
        position={"theta": 50.0, "scaling": scaling},
        norm_placement="behind",
        layer_kinds=kinds,
        layer_pattern=KINDS,
    )
    return theirs, ours, BEHIND


def cohere2() -> tuple[Any, ModelSpec, dict[str, str]]:
    theirs = config("Cohere2", sliding_window=7, layer_types=KINDS, logit_scale=0.3)
    kinds = {"sliding_attention": WINDOW, "full_attention": {"position": {"type": "none"}}}
    ours = spec(
        norm={"type": "layer", "eps": 1e-5, "bias": False},
        position={"interleaved": True},
        block_order="parallel_one_norm",
        logit_scale=0.3,
        layer_kinds=kinds,
        layer_pattern=KINDS,
    )
    return theirs, ours, names()


def granite() -> tuple[Any, ModelSpec, dict[str, str]]:
    theirs = config(
        "Granite", embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.4, logits_scaling=2.5
    )
    ours = spec(attention={"scale": 0.4}, embedding_scale=3.0, residual_scale=0.7, logit_scale=0.4)
    return theirs, ours, names()


def phi3(original: int = 20) -> tuple[Any, ModelSpec, dict[str, str]]:
    """Longrope on three quarters of the head; the rows are longer than the original context."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.4, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.0, 5.0, 7.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 50.0, "partial_rotary_factor": 0.75, **factors}
    theirs = config(
        "Phi3",
        rope_parameters={**rope, "original_max_position_embeddings": original},
        original_max_position_embeddings=original,
        partial_rotary_factor=0.75,
        resid_pdrop=0.0,
    )
    scale = {
        "type": "longrope",
        **factors,
        "original_max_position_embeddings": original,
        "attention_factor": (1 + torch.log(torch.tensor(96 / original)) / torch.log(torch.tensor(float(original))))
        .sqrt()
        .item(),
    }
    position = {"theta": 50.0, "partial_rotary_factor": 0.75, "scaling": scale}
    return theirs, spec(norm={"eps": 1e-5}, position=position), names()


def apertus() -> tuple[Any, ModelSpec, dict[str, str]]:
    theirs = config("Apertus", rope_parameters={"rope_type": "default", "rope_theta": 50.0}, dtype="float32")
    return (
        theirs,
        spec(
            attention={"qk_norm": True},
            feed_forward={"type": "plain", "activation": "xielu"},
            norm={"eps": 1e-5},
            position={"theta": 50.0},
        ),
        names(
            attention_layernorm="attention_norm",
            feedforward_layernorm="feed_forward_norm",
            mlp__act_fn__alpha_p="feed_forward.alpha_p.weight",
            mlp__act_fn__alpha_n="feed_forward.alpha_n.weight",
        ),
    )


def nanochat() -> tuple[Any, ModelSpec, dict[str, str]]:
    theirs = config("NanoChat", final_logit_softcapping=5.0)
    return (
        theirs,
        spec(
            attention={"qk_norm": True, "qk_norm_after_rotary": True},
            feed_forward={"type": "plain", "activation": "relu2"},
            norm={"has_weight": False},
            embedding_norm=True,
            logit_softcap=5.0,
        ),
        names(mlp__fc1="feed_forward.up", mlp__fc2="feed_forward.down"),
    )


def glm4() -> tuple[Any, ModelSpec, dict[str, str]]:
    theirs = config("Glm4", head_dim=16, partial_rotary_factor=0.5, attention_bias=True, rms_norm_eps=1e-6)
    return (
        theirs,
        spec(
            attention={"qkv_bias": True},
            position={"partial_rotary_factor": 0.5, "interleaved": True},
            norm_placement="around",
        ),
        names(
            post_self_attn_layernorm="attention_output_norm",
            post_attention_layernorm="feed_forward_norm",
            post_mlp_layernorm="feed_forward_output_norm",
        ),
    )


def hunyuan() -> tuple[Any, ModelSpec, dict[str, str]]:
    rope = {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 20.0, "factor": 1.0}
    theirs = config("HunYuanDenseV1", head_dim=16, rope_parameters=rope, rms_norm_eps=1e-6)
    return (
        theirs,
        spec(
            attention={"qk_norm": True, "qk_norm_after_rotary": True},
            position={"theta": 20.0, "scaling": {"type": "alpha", "alpha": 50.0}},
        ),
        names(self_attn__query_layernorm="attention.q_norm", self_attn__key_layernorm="attention.k_norm"),
    )


def ministral3() -> tuple[Any, ModelSpec, dict[str, str]]:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 50.0,
        "factor": 4.0,
        "original_max_position_embeddings": 9,
        "llama_4_scaling_beta": 0.4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    theirs = config("Ministral3", head_dim=16, rope_parameters=rope, rms_norm_eps=1e-6, sliding_window=None)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9, "attention_factor": 1.0}
    attention = {"query_scaling": {"beta": 0.4, "length": 9}}
    return theirs, spec(attention=attention, position={"theta": 50.0, "scaling": scaling}), names()


def neox() -> tuple[Any, ModelSpec, dict[str, str]]:
    theirs = config("GPTNeoX", rotary_pct=0.5, rope_parameters={"rope_theta": 50.0, "partial_rotary_factor": 0.5})
    return (
        theirs,
        spec(
            attention={"num_kv_heads": 3, "qkv_bias": True, "output_bias": True},
            feed_forward={"type": "plain", "activation": "gelu", "bias": True},
            norm={"type": "layer", "eps": 1e-5},
            position={"theta": 50.0, "partial_rotary_factor": 0.5},
            block_order="parallel",
        ),
        names(
            attention__query_key_value="attention.q,attention.k,attention.v",
            attention__dense="attention.output",
            mlp__dense_h_to_4h="feed_forward.up",
            mlp__dense_4h_to_h="feed_forward.down",
        ),
    )


CASES: dict[str, Callable[[], tuple[Any, ModelSpec, dict[str, str]]]] = {
    function.__name__: function
    for function in (
        gemma2, gemma3, olmo2, olmo3, cohere2, granite, phi3, apertus, nanochat, glm4, hunyuan, ministral3, neox,
    )
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CASES)


def transform(name: str, key: str, value: Tensor) -> Tensor:
    """Rearrange a tensor of a family that stores heads in another order."""
    if name == "nanochat" and key.endswith(("q_proj.weight", "k_proj.weight")):
        # It rotates in the other direction: the halves of each head change places.
        return value.unflatten(0, (-1, 2, 8)).flip(1).flatten(0, 2)
    if name == "neox" and "query_key_value" in key:
        return value.unflatten(0, (3, 3, 16)).transpose(0, 1).flatten(0, 2)
    return value


def pairs(name: str, table: dict[str, str], ours: Decoder, held: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return for each parameter of jingu its name, itself, and the tensor of transformers that belongs to it."""
    own = dict(ours.named_parameters())
    table = {**table, "embed_tokens": "embedding", "embed_in": "embedding", "norm": "norm", "final_layer_norm": "norm"}
    result = []
    for key, value in held.items():
        module, _, leaf = key.removeprefix("model.").removeprefix("gpt_neox.").rpartition(".")
        prefix = ""
        if module in ("lm_head", "embed_out"):
            module = "head"
        elif module.startswith("layers."):
            _, number, module = module.split(".", 2)
            prefix = f"blocks.{number}."
            module = table.get(f"{module}.{leaf}") or f"{table[module]}.{leaf}".replace(",", f".{leaf},")
            leaf = ""
        else:
            module = table[module]
        targets = [f"{prefix}{part}.{leaf}".removesuffix(".") for part in module.split(",")]
        pieces = transform(name, key, value).split([own[target].shape[0] for target in targets])
        result += [(target, own.pop(target), piece) for target, piece in zip(targets, pieces, strict=True)]
    assert not own
    return result


def models(name: str) -> tuple[Any, Decoder, dict[str, str]]:
    torch.manual_seed(len(name))
    theirs_config, our_spec, table = CASES[name]()
    theirs = AutoModelForCausalLM.from_config(theirs_config, attn_implementation="eager", dtype=torch.float32)
    theirs = randomize(theirs, torch.float32, 0.1)
    ours = build_model(our_spec)
    with torch.no_grad():
        for _, target, value in pairs(name, table, ours, dict(theirs.named_parameters())):
            target.copy_(value)
    return theirs, ours, table


def sample() -> Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert float((actual - expected).detach().abs().max() / expected.detach().std()) < 1e-5, what


@EACH
def test_logits_loss_and_gradients_equal_those_of_transformers(name: str) -> None:
    theirs, ours, table = models(name)
    ids = sample()
    logits = theirs(ids).logits
    close(ours.logits(ours(ids)), logits)
    labels = ids.roll(-1, 1)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    softcap = ours.spec.logit_softcap
    loss = ours(ids, loss=lambda states, head: linear_cross_entropy(states, head, labels, softcap=softcap))
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-6)
    expected.backward()
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter, value in pairs(name, table, ours, gradients):
        assert float((parameter.grad - value).norm() / value.norm()) < 1e-5, key


@EACH
def test_text_in_steps_equals_the_whole_row(name: str, in_steps: Callable[..., Tensor]) -> None:
    """Past windows and chunks, with a cache in pieces of several tokens and of one."""
    _, ours, _ = models(name)
    ids = sample()[0]
    if name == "phi3":
        ids = ids[:19]  # a longer row has other frequencies for its first tokens
    with torch.no_grad():
        whole = ours.eval().logits(ours(ids[None]))[0]
        sizes = [13, 1, 1, 4, 1, 1, 20] if len(ids) == TOKENS else [13, 1, 1, 4]
        close(in_steps(ours, ids, sizes), whole)


@EACH
def test_the_table_has_the_parameters_of_the_modules(name: str) -> None:
    our_spec = CASES[name]()[1]
    assert [(key, tuple(own.shape)) for key, own in build_model(our_spec).named_parameters()] == [
        (key, entry.shape) for key, entry in parameter_table(our_spec).items()
    ]


@EACH
@pytest.mark.parametrize("size", [2, 4])
def test_saved_bytes_are_those_that_autograd_counts(name: str, size: int) -> None:
    our_spec = CASES[name]()[1]
    for layer in our_spec.kinds:
        # The factor 1 + w of a norm, and constants of the soft cap, are saved once for all tokens.
        counted = _count_saved(our_spec.uniform(layer), size)
        assert saved_bytes(our_spec, layer, size) == pytest.approx(counted, rel=0.02)


LATENT = {"num_kv_heads": 3, "latent": {"rank": 22, "rotary_dim": 6, "query_rank": 18}}


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize(
    "attention",
    [
        {"output_gate": True},
        {"value_dim": 10},
        {"value_dim": 24},
        {"sinks": True},
        LATENT,
        {**LATENT, "value_dim": 14},
        {**LATENT, "value_dim": 14, "latent": {"rank": 22, "rotary_dim": 6}},
    ],
    ids=["gate", "narrow values", "wide values", "sinks", "latent", "latent, narrow", "latent, without query rank"],
)
def test_saved_bytes_of_attention(attention: dict[str, Any], size: int) -> None:
    ours = spec(attention=attention)
    assert saved_bytes(ours, ours.default_layer, size) == pytest.approx(_count_saved(ours, size), rel=0.001)
