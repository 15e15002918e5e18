"""jingu's numbers against transformers': logits, loss, gradients, greedy text; both ways through files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BloomConfig, GlmConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.model.attention import alibi_slopes
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.families.name_map import expand_rules
from jingu.model.inputs import Inputs
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity.fp64 import fp64_in_place_of_fp32, randomize
from tests.parity.greedy_generation import check_greedy_generation
from tests.parity.small_llama import SMALL_LLAMA

# What configurations of GPT-2 and BLOOM have in common.
BLOCKS = {"n_layer": 3, "n_head": 3, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Case:
    name: str
    config: Any
    tokens: int = 17


def llama_case(name: str, kind: Callable[..., Any] = LlamaConfig, tokens: int = 17, **settings: Any) -> Case:
    return Case(name, kind(**{**SMALL_LLAMA, "num_hidden_layers": 3, **settings}), tokens)


def rope_case(kind: str, **settings: Any) -> Case:
    """Scaled positions, in fp32 and fp64, up to twice an original context that generation stays within."""
    parameters = {"rope_type": kind, "rope_theta": 531.0, "factor": 2.5, **settings}
    return llama_case(f"llama-{kind}", tokens=61, max_position_embeddings=30, rope_parameters=parameters, head_dim=22)


def gpt2_case(name: str, **settings: Any) -> Case:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    base = {"vocab_size": 301, "n_embd": 30, "n_positions": 64, **BLOCKS, **dropout}
    return Case(name, GPT2Config(**{**base, **settings}))


def bloom_case(name: str, **settings: Any) -> Case:
    base = {"vocab_size": 303, "hidden_size": 48, "seq_length": 64, **BLOCKS}
    return Case(name, BloomConfig(**{**base, **settings}))


class Described:
    """A model that transformers does not carry, written down from its published description: weights by the names
    of its files, and a function of them and the tokens.

    Baichuan 2: arXiv 2309.10305 and the names and layout of its published files. ChatGLM3: arXiv 2406.12793 and
    the same. Their own code is not at hand here, so these say what the descriptions do, as plainly as possible.
    """

    def __init__(self, config: DescribedConfig, weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights

    def __call__(self, tokens: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.config.forward(self.weights, self.config.values, tokens))

    def named_parameters(self) -> Any:
        return self.weights.items()

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def generate(self, tokens: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        for _ in range(max_new_tokens):
            tokens = torch.cat((tokens, self(tokens).logits[:, -1:].argmax(-1)), dim=1)
        return tokens


@dataclass(frozen=True)
class DescribedConfig:
    values: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    forward: Callable[[dict[str, Tensor], dict[str, Any], Tensor], Tensor]

    @property
    def vocab_size(self) -> int:
        return int(self.values["vocab_size"])

    def to_dict(self) -> dict[str, Any]:
        return self.values


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def turned(pairs: Tensor) -> Tensor:
    """[B, T, H, n] complex numbers, turned by position / 10000^(i/n)."""
    tokens, n = pairs.shape[1], pairs.shape[3]
    angles = torch.arange(tokens).to(pairs.real.dtype)[:, None] / 10000.0 ** (torch.arange(n).to(pairs.real.dtype) / n)
    return pairs * torch.polar(torch.ones_like(angles), angles)[:, None]


def attended(q: Tensor, k: Tensor, v: Tensor, slopes: list[float] | None = None) -> Tensor:
    """Causal attention over [B, T, H, K]; with slopes, minus slope times distance."""
    tokens = q.shape[1]
    scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=q.dtype)[:, None, None] * distance
    probabilities = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshk->bthk", probabilities, v).flatten(2)


def baichuan2(w: dict[str, Tensor], c: dict[str, Any], tokens: Tensor) -> Tensor:
    heads, epsilon = c["num_attention_heads"], c["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][tokens]
    for number in range(c["num_hidden_layers"]):
        p = f"model.layers.{number}."
        h = rms(x, w[p + "input_layernorm.weight"], epsilon)
        packed = h @ w[p + "self_attn.W_pack.weight"].T
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in packed.chunk(3, dim=-1))
        slopes = None
        if "max_position_embeddings" in c:
            q, k = (turned(torch.complex(*part.chunk(2, dim=-1))) for part in (q, k))
            q, k = (torch.cat((part.real, part.imag), dim=-1) for part in (q, k))
        else:
            slopes = {3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8]}[heads]
        x = x + attended(q, k, v, slopes) @ w[p + "self_attn.o_proj.weight"].T
        h = rms(x, w[p + "post_attention_layernorm.weight"], epsilon)
        gate, up = (h @ w[f"{p}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    return rms(x, w["model.norm.weight"], epsilon) @ (head / head.norm(dim=1, keepdim=True)).T


def baichuan2_case(name: str, heads: int = 3, **position: int) -> Case:
    width, inner = 48, 88
    layer = {
        "input_layernorm": (width,),
        "self_attn.W_pack": (3 * width, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes = {"model.embed_tokens.weight": (317, width), "model.norm.weight": (width,), "lm_head.weight": (317, width)}
    shapes |= {f"model.layers.{n}.{part}.weight": shape for n in range(2) for part, shape in layer.items()}
    values = {
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
        "model_type": "baichuan",
        "vocab_size": 317,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "rms_norm_eps": 1e-6,
        "model_max_length": 64,
        **position,
    }
    return Case(name, DescribedConfig(values, shapes, baichuan2))


def chatglm3(w: dict[str, Tensor], c: dict[str, Any], tokens: Tensor) -> Tensor:
    heads, groups, size = c["num_attention_heads"], c["multi_query_group_num"], c["kv_channels"]
    epsilon = c["layernorm_epsilon"]

    def rotated(part: Tensor) -> Tensor:
        first, rest = part.chunk(2, dim=-1)
        pairs = turned(torch.view_as_complex(first.unflatten(-1, (-1, 2)).contiguous()))
        return torch.cat((torch.view_as_real(pairs).flatten(-2), rest), dim=-1)

    x = w["transformer.embedding.word_embeddings.weight"][tokens]
    for number in range(c["num_layers"]):
        p = f"transformer.encoder.layers.{number}."
        h = rms(x, w[p + "input_layernorm.weight"], epsilon)
        packed = h @ w[p + "self_attention.query_key_value.weight"].T + w[p + "self_attention.query_key_value.bias"]
        q, k, v = packed.split((heads * size, groups * size, groups * size), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part in (q, k, v))
        k, v = (part.repeat_interleave(heads // groups, dim=2) for part in (rotated(k), v))
        x = x + attended(rotated(q), k, v) @ w[p + "self_attention.dense.weight"].T
        h = rms(x, w[p + "post_attention_layernorm.weight"], epsilon)
        gate, up = (h @ w[p + "mlp.dense_h_to_4h.weight"].T).chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.dense_4h_to_h.weight"].T
    return rms(x, w["transformer.encoder.final_layernorm.weight"], epsilon) @ w["transformer.output_layer.weight"].T


def chatglm3_case(name: str, heads: int, groups: int, size: int) -> Case:
    width, inner, packed = 42, 70, (heads + 2 * groups) * size
    layer = {
        "input_layernorm.weight": (width,),
        "self_attention.query_key_value.weight": (packed, width),
        "self_attention.query_key_value.bias": (packed,),
        "self_attention.dense.weight": (width, heads * size),
        "post_attention_layernorm.weight": (width,),
        "mlp.dense_h_to_4h.weight": (2 * inner, width),
        "mlp.dense_4h_to_h.weight": (width, inner),
    }
    shapes = {
        "transformer.embedding.word_embeddings.weight": (311, width),
        "transformer.encoder.final_layernorm.weight": (width,),
        "transformer.output_layer.weight": (311, width),
    }
    shapes |= {f"transformer.encoder.layers.{n}.{part}": shape for n in range(2) for part, shape in layer.items()}
    values = {
        "architectures": ["ChatGLMModel"],
        "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
        "model_type": "chatglm",
        "vocab_size": 311,
        "padded_vocab_size": 311,
        "hidden_size": width,
        "ffn_hidden_size": inner,
        "num_layers": 2,
        "num_attention_heads": heads,
        "multi_query_attention": True,
        "multi_query_group_num": groups,
        "kv_channels": size,
        "seq_length": 64,
        "layernorm_epsilon": 1e-5,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "original_rope": True,
    }
    return Case(name, DescribedConfig(values, shapes, chatglm3))


LLAMA3 = {"original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CASES = [
    llama_case("llama-3-heads-odd-vocabulary"),
    llama_case("llama-1-kv-head-tied", num_key_value_heads=1, tie_word_embeddings=True),
    llama_case("llama-6-heads-2-kv", num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-3),
    llama_case(
        "llama-biases-base",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 531.0},
    ),
    llama_case("llama-wide-heads-gelu", head_dim=22, hidden_act="gelu", num_hidden_layers=1),
    rope_case("linear"),
    rope_case("dynamic"),
    rope_case("yarn", original_max_position_embeddings=16),
    rope_case("yarn", factor=4.0, beta_fast=8.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.9, truncate=False),
    rope_case("llama3", **LLAMA3),
    llama_case("mistral-window", MistralConfig, sliding_window=5, num_key_value_heads=1),
    llama_case("mistral-no-window", MistralConfig, sliding_window=None, num_key_value_heads=3, head_dim=10),
    llama_case("qwen2-tied", Qwen2Config, num_key_value_heads=1, tie_word_embeddings=True),
    llama_case(
        "qwen2-window",
        Qwen2Config,
        num_key_value_heads=3,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=0,
    ),
    llama_case("glm-1-group", GlmConfig, num_key_value_heads=1, head_dim=12, pad_token_id=None),
    llama_case(
        "glm-wide-heads-no-biases",
        GlmConfig,
        num_key_value_heads=3,
        head_dim=20,
        attention_bias=False,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 531.0, "partial_rotary_factor": 0.5},
    ),
    llama_case("qwen3-wide-heads", Qwen3Config, num_key_value_heads=1, head_dim=22),
    llama_case(
        "qwen3-tied-biases",
        Qwen3Config,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        attention_bias=True,
        head_dim=16,
    ),
    bloom_case("bloom-3-heads"),
    bloom_case("bloom-6-heads-untied", n_head=6, tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    gpt2_case("gpt2-3-heads"),
    gpt2_case("gpt2-untied-inner-relu", tie_word_embeddings=False, n_inner=50, activation_function="relu"),
    gpt2_case("gpt2-1-head-gelu", n_head=1, activation_function="gelu", n_layer=1, layer_norm_epsilon=1e-3),
]
DESCRIBED = [
    baichuan2_case("baichuan2-rotary", max_position_embeddings=64),
    baichuan2_case("baichuan2-alibi"),
    baichuan2_case("baichuan2-alibi-4-heads", heads=4),
    chatglm3_case("chatglm3-2-groups", 6, 2, 12),
    chatglm3_case("chatglm3-1-group-3-heads", 3, 1, 20),
]


def named(*names: str) -> list[Case]:
    return [case for case in CASES if case.name in names]


def reference(case: Case, dtype: torch.dtype) -> Any:
    """transformers' model with every parameter random, biases and norms too."""
    torch.manual_seed(len(case.name))
    if isinstance(case.config, DescribedConfig):
        weights = {name: 0.25 * torch.randn(shape) for name, shape in case.config.shapes.items()}
        return Described(case.config, {name: w.to(dtype).requires_grad_() for name, w in weights.items()})
    # BLOOM has no other than its own attention.
    attention = "eager" if isinstance(case.config, BloomConfig) else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(case.config, attn_implementation=attention)
    return randomize(model, dtype, 0.1)


@pytest.fixture
def computing_in(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers computes norms, rotary tables and ALiBi in fp32 whatever the model's dtype; and the constants of
    BLOOM's GELU have eight digits only, so that torch's takes its place."""
    if dtype != torch.float64:
        yield
        return
    with fp64_in_place_of_fp32(monkeypatch, "llama", "mistral", "qwen2", "qwen3", "bloom", "glm") as replacement:
        monkeypatch.setattr(transformers.modeling_rope_utils, "torch", replacement)
        bloom = transformers.models.bloom.modeling_bloom
        monkeypatch.setattr(bloom, "BloomGelu", lambda: nn.GELU(approximate="tanh"))
        yield


def converted(model: Any, dtype: torch.dtype) -> Decoder:
    """jingu's model with the reference's weights, through config and name map."""
    config = model.config.to_dict()
    name = config["architectures"][0] if isinstance(model, Described) else type(model).__name__
    family = next(f for f in FAMILIES.values() if name in f.architectures)
    spec = family.spec_from_hf(config)
    decoder = Decoder(spec).to(dtype)
    theirs, ours = model.state_dict(), {}
    for entry in expand_rules(family.rules, spec, parameter_shapes(spec)):
        ours |= entry.to_jingu(theirs[entry.hf_name])
    decoder.load_state_dict(ours)
    return decoder


def gradients_in_their_names(decoder: Decoder) -> dict[str, Tensor]:
    spec = decoder.spec
    held = dict(decoder.named_parameters())
    gradients = {}
    for entry in expand_rules(FAMILIES[spec.family].rules, spec, parameter_shapes(spec)):
        pieces = [held[name].grad for name in entry.jingu_shapes]
        assert all(piece is not None for piece in pieces)
        gradients[entry.hf_name] = entry.to_hf(pieces)  # type: ignore[arg-type]
    return gradients


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def sample_tokens(case: Case, rows: int = 2) -> Tensor:
    return torch.randint(case.config.vocab_size, (rows, case.tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES + DESCRIBED, ids=lambda case: case.name)
@pytest.mark.usefixtures("computing_in")
def test_logits_loss_and_gradients_equal(case: Case, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    theirs = reference(case, dtype)
    ours = converted(theirs, dtype)
    tokens = sample_tokens(case)

    expected = theirs(tokens, use_cache=False).logits
    logits = ours.logits(ours(tokens))
    assert logits.dtype == dtype
    assert relative(logits, expected) < limit

    labels = tokens[:, 1:].flatten()
    losses = [torch.nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), labels) for x in (logits, expected)]
    assert relative(losses[0], losses[1]) < limit
    for loss in losses:
        loss.backward()
    named = dict(theirs.named_parameters())
    gradients = gradients_in_their_names(ours)
    assert set(gradients) == set(named)
    # A key's bias moves all scores of a query alike: its gradient is zero but for rounding, so it has no relative
    # error. Everything is measured on the scale of the largest gradient instead, and the rest also by itself.
    largest = max(float(p.grad.norm()) for p in named.values())
    for name, gradient in gradients.items():
        difference = float((gradient - named[name].grad).norm())
        assert difference < limit * largest, name
        if not name.endswith("k_proj.bias"):
            assert difference < limit * float(named[name].grad.norm()), name


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["def greet(name):\n    return f'hello {name}'\n", "for i in range(10):\n    print(i)\n", "数据流 🙂 café"]
    return train_tokenizer(iter(texts), 290, ["<|endoftext|>"])


@pytest.fixture
def tokenizer_folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("case", CASES + DESCRIBED, ids=lambda case: case.name)
def test_cached_generation_equals_uncached_and_transformers(
    case: Case, tokenizer: Tokenizer, answer: Callable[..., Any]
) -> None:
    theirs = reference(case, torch.float32)
    ours = converted(theirs, torch.float32)
    prompt = sample_tokens(case, rows=1)[0, :5].tolist()
    check_greedy_generation(ours, theirs, prompt, 20, partial(answer, ours, tokenizer))


@pytest.mark.parametrize(
    "case",
    named("llama-1-kv-head-tied", "llama-6-heads-2-kv", "mistral-window", "bloom-3-heads", "gpt2-3-heads"),
    ids=lambda case: case.name,
)
def test_cache_in_uneven_pieces_equals_one_forward(case: Case, in_steps: Callable[..., Tensor]) -> None:
    ours = converted(reference(case, torch.float64), torch.float64)
    tokens = sample_tokens(case, rows=1)
    with torch.no_grad():
        assert relative(in_steps(ours, tokens[0], [4, 1, 7, 5]), ours.logits(ours(tokens))[0]) < 1e-12


@pytest.mark.parametrize("case", CASES + DESCRIBED, ids=lambda case: case.name)
def test_what_is_exported_is_opened_to_the_last_bit_and_by_transformers(
    case: Case, tokenizer_folder: Path, tmp_path: Path, answer: Callable[..., Any]
) -> None:
    decoder = converted(reference(case, torch.float32), torch.float32)
    state = decoder.state_dict()
    family = export_hf(
        decoder.spec, state.__getitem__, tokenizer_folder, tmp_path / "out", torch.float32, shard_bytes=40_000
    )
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    opened = open_hf(tmp_path / "out")
    # What transformers has no class for is written as a family that computes the same, if there is one.
    written_as = {"baichuan2-rotary": "llama", "chatglm3-2-groups": "glm", "chatglm3-1-group-3-heads": "glm"}
    assert family.name == written_as.get(case.name, decoder.spec.family)
    if case.name not in written_as:
        assert opened.spec == decoder.spec
    assert opened.eos_token_ids == (Tokenizer.load(tokenizer_folder).eos_token_id,)
    back = load_model(opened, torch.float32).state_dict()
    assert back.keys() == state.keys()
    if decoder.spec.normalize_lm_head and not family.equivalent:
        state["head.weight"] = torch.nn.functional.normalize(state["head.weight"])
    assert all(torch.equal(back[name], state[name]) for name in state)
    if family.equivalent:
        return

    model, notes = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    assert model.dtype == torch.float32
    tokens = sample_tokens(case)
    with torch.no_grad():
        difference = (decoder.logits(decoder(tokens)) - model.eval()(tokens).logits).abs().max()
    assert difference < 1e-4

    ours = Tokenizer.load(tokenizer_folder)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = "def greet(name):\n"
    ids = loaded(prompt, return_tensors="pt")
    assert ids.input_ids[0].tolist() == ours.encode(prompt)
    expected = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids.input_ids.shape[1] :]
    # What a model names as its end is also what it was exported with.
    found = answer(decoder, ours, ours.encode(prompt), 16)
    assert [token.id for token in found] == expected.tolist()
    assert "".join(token.text for token in found) == loaded.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    "case",
    named("llama-1-kv-head-tied", "bloom-3-heads", "gpt2-3-heads", "gpt2-untied-inner-relu"),
    ids=lambda case: case.name,
)
def test_what_transformers_saves_is_opened(case: Case, tmp_path: Path) -> None:
    theirs = reference(case, torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    ours = load_model(open_hf(tmp_path / "theirs"), torch.float32)
    tokens = sample_tokens(case)
    with torch.no_grad():
        assert relative(ours.logits(ours(tokens)), theirs(tokens).logits) < 1e-5


@pytest.mark.parametrize(
    "case", named("llama-linear", "llama-dynamic", "llama-yarn", "llama-llama3"), ids=lambda case: case.name
)
def test_older_spelling_of_scaled_positions(case: Case) -> None:
    """Up to release 4 transformers kept the base by itself, and the kind first under `type`."""
    config = case.config.to_dict()
    expected = FAMILIES["llama"].spec_from_hf(config)
    scaling = config.pop("rope_parameters")
    for kind in ("type", "rope_type"):
        older = {key: value for key, value in scaling.items() if key not in ("rope_theta", "rope_type")}
        older[kind] = scaling["rope_type"]
        assert FAMILIES["llama"].spec_from_hf({**config, "rope_theta": 531.0, "rope_scaling": older}) == expected


def test_alibi_slopes_equal() -> None:
    for heads in range(1, 130):
        theirs = transformers.models.bloom.modeling_bloom._get_alibi_slopes(heads, torch.device("cpu"))
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), theirs)


def test_an_option_that_changes_no_number_is_passed_over() -> None:
    """Published configs of Llama 2 ask for products in slices."""
    config = llama_case("sliced").config.to_dict()
    assert FAMILIES["llama"].spec_from_hf({**config, "pretraining_tp": 2}) == FAMILIES["llama"].spec_from_hf(config)


def test_windows_on_some_layers() -> None:
    """With `layer_types`, and without as in older files; a list of another length is refused."""
    settings = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 4, "max_window_layers": 3}
    config = Qwen2Config(**settings).to_dict()
    for types in (config["layer_types"], None):
        spec = FAMILIES["qwen2"].spec_from_hf({**config, "layer_types": types})
        assert [layer.attention.sliding_window for layer in spec.layers] == [None, None, None, 9]
    with pytest.raises(JinguError, match="names 3 layers, and num_hidden_layers is 4"):
        FAMILIES["qwen2"].spec_from_hf({**config, "layer_types": config["layer_types"][1:]})


@pytest.mark.parametrize("case", DESCRIBED, ids=lambda case: case.name)
def test_code_that_a_family_replaces_is_not_asked_for(case: Case, tmp_path: Path) -> None:
    """The config names code, which is not there; weights and config are enough."""
    theirs = reference(case, torch.float32)
    save_file({name: w.detach() for name, w in theirs.weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case.config.values))
    ours = load_model(open_hf(tmp_path), torch.float32)
    tokens = sample_tokens(case)
    with torch.no_grad():
        assert relative(ours.logits(ours(tokens)), theirs(tokens).logits) < 1e-5


def test_the_first_baichuan_is_refused() -> None:
    with pytest.raises(JinguError, match="first Baichuan"):
        FAMILIES["baichuan2"].spec_from_hf({**DESCRIBED[0].config.values, "vocab_size": 64000})


def test_a_beginning_that_is_seen_whole_is_theirs_with_such_a_mask() -> None:
    case = llama_case("prefix", num_key_value_heads=1)
    theirs = reference(case, torch.float32)
    ours, tokens = converted(theirs, torch.float32), sample_tokens(case)
    seen_TT = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    seen_TT[:6, :6] = True
    reach = torch.where(torch.arange(tokens.shape[1]) < 6, 6, 0).expand_as(tokens)
    mask = torch.zeros(2, 1, *seen_TT.shape, dtype=torch.float32).masked_fill(~seen_TT, -torch.inf)
    expected = theirs(input_ids=tokens, attention_mask=mask).logits
    found = ours.logits(ours(Inputs(tokens, prefix_lengths=reach)))
    assert relative(found, expected) < 1e-5
