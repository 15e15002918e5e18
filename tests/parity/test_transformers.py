"""jingu's numbers against transformers': logits, loss, gradients, greedy text; both ways through files."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import BloomConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from jingu.checkpoint.hub import export_hf, load_model, open_hf, parameter_shapes
from jingu.errors import JinguError
from jingu.infer.cache import StaticCache
from jingu.infer.generate import generate, next_logits
from jingu.infer.sampling import Sampling
from jingu.model.attention import alibi_slopes
from jingu.model.decoder import Decoder
from jingu.model.families import FAMILIES
from jingu.model.families.names import entries, to_ours, to_theirs
from jingu.text.tokenizer import Tokenizer, train_tokenizer


@dataclass(frozen=True)
class Case:
    name: str
    config: Any
    tokens: int = 17


def llama_case(name: str, kind: Callable[..., Any] = LlamaConfig, tokens: int = 17, **settings: Any) -> Case:
    base = {
        "vocab_size": 317,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return Case(name, kind(**{**base, **settings}), tokens)


def rope_case(kind: str, **settings: Any) -> Case:
    """Scaled positions, in fp32 and fp64, up to twice an original context that generation stays within."""
    parameters = {"rope_type": kind, "rope_theta": 531.0, "factor": 2.5, **settings}
    return llama_case(f"llama-{kind}", tokens=61, max_position_embeddings=30, rope_parameters=parameters, head_dim=22)


def gpt2_case(name: str, **settings: Any) -> Case:
    base = {
        "vocab_size": 301,
        "n_embd": 30,
        "n_layer": 3,
        "n_head": 3,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return Case(name, GPT2Config(**{**base, **settings}))


def bloom_case(name: str, **settings: Any) -> Case:
    base = {
        "vocab_size": 303,
        "hidden_size": 48,
        "n_layer": 3,
        "n_head": 3,
        "seq_length": 64,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return Case(name, BloomConfig(**{**base, **settings}))


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


def named(*names: str) -> list[Case]:
    return [case for case in CASES if case.name in names]


def reference(case: Case, dtype: torch.dtype) -> Any:
    """transformers' model with every parameter random, biases and norms too."""
    torch.manual_seed(len(case.name))
    # BLOOM has no other than its own attention.
    attention = "eager" if isinstance(case.config, BloomConfig) else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(case.config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


class InFp64(ModuleType):
    """torch, whose fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def computing_in(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers computes norms, rotary tables and ALiBi in fp32 whatever the model's dtype. To compare in fp64,
    its own formulas are run with every such fp32 read as fp64; and BLOOM's GELU, whose constants are cut after eight
    digits, is torch's."""
    if dtype == torch.float64:
        for name in ("llama", "mistral", "qwen2", "qwen3", "bloom"):
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            monkeypatch.setattr(module, "torch", InFp64("torch"))
        monkeypatch.setattr(transformers.modeling_rope_utils, "torch", InFp64("torch"))
        bloom = transformers.models.bloom.modeling_bloom
        monkeypatch.setattr(bloom, "BloomGelu", lambda: nn.GELU(approximate="tanh"))
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def converted(model: Any, dtype: torch.dtype) -> Decoder:
    """jingu's model with the reference's weights, through config and name map."""
    config = model.config.to_dict()
    family = next(f for f in FAMILIES.values() if type(model).__name__ in f.architectures)
    spec = family.spec_from_hf(config)
    decoder = Decoder(spec).to(dtype)
    shapes, theirs = parameter_shapes(spec), model.state_dict()
    ours = {}
    for entry in entries(family.rules, spec, shapes):
        ours |= to_ours(entry, theirs[entry.theirs], spec, shapes)
    decoder.load_state_dict(ours)
    return decoder


def gradients_in_their_names(decoder: Decoder) -> dict[str, Tensor]:
    spec = decoder.spec
    held = dict(decoder.named_parameters())
    gradients = {}
    for entry in entries(FAMILIES[spec.family].rules, spec, parameter_shapes(spec)):
        pieces = [held[name].grad for name in entry.ours]
        assert all(piece is not None for piece in pieces)
        gradients[entry.theirs] = to_theirs(entry, pieces, spec)  # type: ignore[arg-type]
    return gradients


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def sample_tokens(case: Case, rows: int = 2) -> Tensor:
    return torch.randint(case.config.vocab_size, (rows, case.tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cached_generation_equals_uncached_and_transformers(case: Case, tokenizer: Tokenizer) -> None:
    theirs = reference(case, torch.float32)
    ours = converted(theirs, torch.float32)
    prompt = sample_tokens(case, rows=1)[0, :5].tolist()
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 5:].tolist()
    cached = [piece.id for piece in generate(ours, prompt, Sampling(), 20, [], tokenizer, end_ids=())]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(ours.logits(ours(torch.tensor([ids])))[0, -1].argmax()))
    assert cached == ids[5:] == expected


@pytest.mark.parametrize(
    "case",
    named("llama-1-kv-head-tied", "llama-6-heads-2-kv", "mistral-window", "bloom-3-heads", "gpt2-3-heads"),
    ids=lambda case: case.name,
)
def test_cache_in_uneven_pieces_equals_one_forward(case: Case) -> None:
    ours = converted(reference(case, torch.float64), torch.float64)
    tokens = sample_tokens(case)
    with torch.no_grad():
        whole = ours.logits(ours(tokens))
        cache = StaticCache(ours.spec.layers, case.tokens)
        first = 0
        for size in (4, 1, 7, 5):
            scores = next_logits(ours, tokens[:, first : first + size], cache)
            first += size
            assert relative(scores, whole[:, first - 1]) < 1e-12
    assert cache.length == first == case.tokens


def small(case: Case) -> Decoder:
    return converted(reference(case, torch.float32), torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_transformers_loads_what_we_export(case: Case, tokenizer_folder: Path, tmp_path: Path) -> None:
    decoder = small(case)
    state = decoder.state_dict()
    export_hf(decoder.spec, state.__getitem__, tokenizer_folder, tmp_path / "out", torch.float32, shard_bytes=40_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()

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
    pieces = list(generate(decoder, ours.encode(prompt), Sampling(), 16, [], ours))
    assert [piece.id for piece in pieces] == expected.tolist()
    assert "".join(piece.text for piece in pieces) == loaded.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exported_then_opened_is_bitwise(case: Case, tokenizer_folder: Path, tmp_path: Path) -> None:
    decoder = small(case)
    state = decoder.state_dict()
    export_hf(decoder.spec, state.__getitem__, tokenizer_folder, tmp_path / "out", torch.float32)
    opened = open_hf(tmp_path / "out")
    assert opened.spec == decoder.spec
    assert opened.end_ids == (Tokenizer.load(tokenizer_folder).end_id,)
    back = load_model(opened, torch.float32).state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


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


def test_windows_on_some_layers_only_are_refused() -> None:
    config = Qwen2Config(use_sliding_window=True, num_hidden_layers=4, max_window_layers=2).to_dict()
    with pytest.raises(JinguError, match="either all layers have the window, or none"):
        FAMILIES["qwen2"].spec_from_hf(config)
