"""Mixtures of experts against transformers': logits, both losses, gradients, greedy text; both ways through files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.model.decoder import Decoder
from jingu.model.experts import auxiliary_losses
from jingu.model.families.llama import MIXTRAL, QWEN3_MOE
from jingu.model.feed_forward_specs import Experts, RandomProjectionRouter
from jingu.model.spec import replace_fields
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity.fp64 import randomize
from tests.parity.greedy_generation import check_greedy_generation
from tests.parity.small_llama import SMALL_LLAMA

TOKENS = 17
BASE = {**SMALL_LLAMA, "num_key_value_heads": 1}


def mixtral(**settings: Any) -> MixtralConfig:
    return MixtralConfig(**{**BASE, "intermediate_size": 40, **settings})


def qwen3_moe(**settings: Any) -> Qwen3MoeConfig:
    sizes = {"moe_intermediate_size": 22, "num_experts": 6, "num_experts_per_tok": 3}
    return Qwen3MoeConfig(**{**BASE, **sizes, "head_dim": 22, **settings})


CASES = {
    "mixtral-8-2": mixtral(num_local_experts=8),
    "mixtral-5-1-tied": mixtral(num_local_experts=5, num_experts_per_tok=1, tie_word_embeddings=True),
    "mixtral-3-all-gelu": mixtral(num_local_experts=3, num_experts_per_tok=3, hidden_act="gelu", num_hidden_layers=1),
    "mixtral-window": mixtral(num_local_experts=4, sliding_window=7),
    "qwen3-6-3": qwen3_moe(),
    "qwen3-window": qwen3_moe(use_sliding_window=True, sliding_window=5),
    "qwen3-normalised-biased": qwen3_moe(norm_topk_prob=True, attention_bias=True),
}
EACH = pytest.mark.parametrize("name", CASES)


def reference(name: str, dtype: torch.dtype) -> Any:
    """transformers' model with every parameter random, biases and norms too."""
    torch.manual_seed(len(name))
    kind = MixtralForCausalLM if name.startswith("mixtral") else Qwen3MoeForCausalLM
    model = kind._from_config(CASES[name], attn_implementation="sdpa", experts_implementation="eager")
    model = randomize(model, dtype, 0.1)
    if dtype == torch.float64:
        _compute_in_fp64(model)
    return model


def _compute_in_fp64(model: Any) -> None:
    """transformers computes norms, rotary tables and routers in fp32 whatever the model's dtype. To compare in fp64,
    they are given the same formulas without the casts."""

    def norm(module: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

        return forward

    def router(module: Any) -> Any:
        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = x.reshape(-1, module.hidden_dim) @ module.weight.t()
            top, indices = logits.softmax(-1).topk(module.top_k, dim=-1)
            if getattr(module, "norm_topk_prob", True):
                top = top / top.sum(-1, keepdim=True)
            return logits, top, indices

        return forward

    def tables(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        config = model.config
        size = config.head_dim or config.hidden_size // config.num_attention_heads
        powers = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = position_ids[..., None].double() / config.rope_parameters["rope_theta"] ** powers
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = norm(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = tables
        elif kind.endswith("TopKRouter"):
            module.forward = router(module)


def converted(theirs: Any, folder: Path, dtype: torch.dtype) -> Decoder:
    """jingu's model with the reference's weights, by way of the files that transformers writes."""
    theirs.save_pretrained(folder, max_shard_size="60KB")
    return load_model(open_hf(folder), dtype).train()


def sample(rows: int = 2) -> Tensor:
    return torch.randint(317, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def gradient_in_their_names(ours: Decoder, name: str) -> Tensor:
    """Of a parameter of theirs in memory, where the experts' gates and ups are stacked."""
    table = {
        "model.embed_tokens.weight": "embedding.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "head.weight",
    }
    parts = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "self_attn.o_proj": "attention.output",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        **{f"self_attn.{part}_proj": f"attention.{part}" for part in "qkv"},
        "mlp.gate": "feed_forward.router",
    }
    held = dict(ours.named_parameters())
    if name in table:
        return held[table[name]].grad
    block, _, rest = name.removeprefix("model.layers.").partition(".")
    prefix = f"blocks.{block}."
    if rest == "mlp.experts.gate_up_proj":
        return torch.cat([held[f"{prefix}feed_forward.{part}.weight"].grad for part in ("gate", "up")], dim=1)
    if rest == "mlp.experts.down_proj":
        return held[f"{prefix}feed_forward.down.weight"].grad
    part, _, kind = rest.rpartition(".")
    return held[f"{prefix}{parts[part]}.{kind}"].grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@EACH
def test_logits_losses_and_gradients_equal(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The loss with the balancing loss in it. transformers computes that over all rows at once, in fp32 if its
    logits are: so the rows here are given to its function one by one, and its mean taken."""
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    theirs = reference(name, dtype)
    ours = converted(theirs, tmp_path, dtype)
    experts, tokens = ours.spec.feed_forward, sample()
    assert isinstance(experts, Experts) and experts.aux_loss_coef == CASES[name].router_aux_loss_coef == 0.001

    out = theirs(tokens, use_cache=False, output_router_logits=True)
    logits = ours.logits(ours(tokens))
    assert logits.dtype == dtype
    assert relative(logits, out.logits) < limit

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((hidden @ weight.T)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    trained = torch.full((2,), 0.5)
    losses = ours(tokens, loss=head, auxiliary=lambda routings: auxiliary_losses(routings, experts, trained))
    gates = [logits.unflatten(0, tokens.shape) for logits in out.router_logits]
    rows = [
        load_balancing_loss_func(tuple(gate[row] for gate in gates), experts.num_experts, experts.num_experts_per_token)
        for row in (0, 1)
    ]
    balance = (rows[0] + rows[1]) / 2
    cross = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert relative(losses[0], cross) < limit
    # transformers counts and averages in fp32.
    assert relative(losses[1], balance.to(dtype)) < 1e-5
    squares = torch.stack([logits.logsumexp(-1).square().mean() for logits in out.router_logits]).mean()
    assert relative(losses[2], squares) < limit

    losses[0].backward()
    cross.backward()
    largest = max(float(p.grad.norm()) for p in theirs.parameters())
    for their_name, parameter in theirs.named_parameters():
        difference = float((gradient_in_their_names(ours, their_name) - parameter.grad).norm())
        assert difference < limit * largest, their_name
        # A key's bias and the gate of a token that all experts serve by rank have gradients of rounding alone.
        if not their_name.endswith("k_proj.bias") and float(parameter.grad.norm()) > 1e-6 * largest:
            assert difference < limit * float(parameter.grad.norm()), their_name


@pytest.mark.parametrize("name", ["mixtral-8-2", "qwen3-6-3"])
def test_the_balancing_loss_has_the_gradient_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(name, torch.float32)
    ours = converted(theirs, tmp_path, torch.float32)
    experts, tokens = ours.spec.feed_forward, sample(rows=1)
    assert isinstance(experts, Experts)
    gates = theirs(tokens, use_cache=False, output_router_logits=True).router_logits
    load_balancing_loss_func(gates, experts.num_experts, experts.num_experts_per_token).backward()
    losses = ours(
        tokens,
        loss=lambda hidden, weight: hidden.sum() * 0,
        auxiliary=lambda routings: auxiliary_losses(routings, experts, torch.ones(1)),
    )
    losses[1].backward()
    for their_name, parameter in theirs.named_parameters():
        if their_name.endswith("mlp.gate.weight"):
            assert relative(gradient_in_their_names(ours, their_name), parameter.grad) < 1e-5


@EACH
def test_cached_generation_equals_uncached_and_transformers(
    name: str, tokenizer: Tokenizer, tmp_path: Path, answer: Callable[..., Any]
) -> None:
    theirs = reference(name, torch.float32)
    ours = converted(theirs, tmp_path, torch.float32).eval()
    prompt = sample(rows=1)[0, :5].tolist()
    check_greedy_generation(ours, theirs, prompt, 16, partial(answer, ours, tokenizer))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(["def greet(name):\n    return f'hello {name}'\n"]), 290, ["<|endoftext|>"])


@EACH
def test_both_ways_through_files_is_bitwise(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Ours exported and opened again; and the same names and tensors as transformers writes, which loads ours."""
    theirs = reference(name, torch.float32)
    decoder = converted(theirs, tmp_path / "theirs", torch.float32).eval()
    state = decoder.state_dict()
    tokenizer.save(tmp_path / "tokenizer")
    out = tmp_path / "out"
    export_hf(decoder.spec, state.__getitem__, tmp_path / "tokenizer", out, torch.float32, shard_bytes=40_000)
    assert (out / "model.safetensors.index.json").exists()
    opened = open_hf(out)
    assert opened.spec == decoder.spec
    back = load_model(opened, torch.float32).state_dict()
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)

    written, expected = stored_tensors(out), stored_tensors(tmp_path / "theirs")
    assert (
        sum(".experts." in key for key in expected)
        == 3 * decoder.spec.num_layers * decoder.spec.feed_forward.num_experts
    )
    assert written.keys() == expected.keys() and all(torch.equal(written[key], expected[key]) for key in expected)

    # transformers' grouped kernel does not take every width.
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, experts_implementation="eager"
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    with torch.no_grad():
        assert relative(decoder.logits(decoder(sample())), model.eval()(sample()).logits) < 1e-5


@pytest.mark.parametrize("name", ["mixtral-8-2", "qwen3-6-3"])
def test_what_concerns_training_alone_survives_the_files(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = converted(reference(name, torch.float32), tmp_path / "theirs", torch.float32)
    experts = decoder.spec.feed_forward.model_copy(
        update={"z_loss_coef": 0.01, "capacity_factor": 1.5, "aux_loss_scope": "layer"}
    )
    spec = replace_fields(decoder.spec, feed_forward=experts)
    tokenizer.save(tmp_path / "tokenizer")
    export_hf(spec, decoder.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "out", torch.float32)
    assert open_hf(tmp_path / "out").spec == spec
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    with torch.no_grad():
        assert relative(decoder.eval().logits(decoder(sample())), model.eval()(sample()).logits) < 1e-5


@pytest.mark.parametrize("changes", [{"router": RandomProjectionRouter()}, {"shared_intermediate_size": 8}])
def test_what_transformers_has_not_is_refused(changes: dict[str, Any]) -> None:
    for family in (MIXTRAL, QWEN3_MOE):
        spec = replace_fields(family.template, feed_forward=family.template.feed_forward.model_copy(update=changes))
        with pytest.raises(JinguError, match=f"cannot express this model's feed_forward.{next(iter(changes))}"):
            family.hf_config(spec)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors
