"""GGUF files, written here with the gguf package from transformers models: numbers, tokenizer, damage."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from jingu.cli import main
from jingu.errors import JinguError
from jingu.formats.gguf import llama3_scaling
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.infer.generate import InferenceOptions
from jingu.text.sentencepiece import _message
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

TEXT = "some text, and 12345 more text:\n    it is text; isn't it?  中文 text"
QUANTISED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


SIZES = {
    "vocab_size": 317,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def of_kind(kind: str, **changes: Any) -> Any:
    """Return a model of another family, with random biases and norms."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**{**SIZES, "rms_norm_eps": 1e-5, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows in GGUF, as llama.cpp's converter writes it."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def written(path: Path, model: Any, matrices: str = "F32", **changes: Any) -> Path:
    """Write a model as GGUF; `changes` replace metadata of the model (None: omitted)."""
    config, random = model.config, np.random.default_rng(0)
    name = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    facts = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if name != "gpt2":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        facts |= {
            f"{name}.attention.head_count_kv": config.num_key_value_heads,
            f"{name}.feed_forward_length": config.intermediate_size,
            f"{name}.rope.dimension_count": size,
            f"{name}.attention.key_length": size if name.startswith("qwen3") else None,
            f"{name}.expert_count": getattr(config, "num_local_experts", None),
            f"{name}.expert_used_count": getattr(config, "num_experts_per_tok", None),
            f"{name}.expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        }
        writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
        writer.add_float32(f"{name}.rope.freq_base", config.rope_parameters["rope_theta"])
    else:
        facts |= {f"{name}.feed_forward_length": 4 * config.hidden_size}
        writer.add_float32(f"{name}.attention.layer_norm_epsilon", config.layer_norm_epsilon)
    for key, value in {**facts, **changes}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(writer.arch and gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for key, tensor in unfused(model.state_dict()).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            values = permuted(values, heads)
        if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T
        values, kind = np.ascontiguousarray(values), Kind[matrices if values.ndim > 1 else "F32"]
        if kind.name.endswith("_K"):  # what the package can undo but not do: any bytes are a valid block
            block, size = gguf.GGML_QUANT_SIZES[kind]
            values = random.integers(0, 256, (len(values), values.shape[1] // block * size), dtype=np.uint8)
        else:
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unfused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack experts by matrix as llama.cpp's converter does, not in pairs like transformers."""
    result = {}
    for key, tensor in state.items():
        if key.endswith("experts.gate_up_proj"):
            halves = tensor.chunk(2, dim=1)
            result |= {
                key.replace("gate_up", part) + ".weight": half
                for part, half in zip(("gate", "up"), halves, strict=True)
            }
        else:
            result[key + ".weight" if key.endswith("experts.down_proj") else key] = tensor
    return result


def logits_of(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = load_model(open_model(path), torch.float32)
    with torch.no_grad():
        return model.logits(model(tokens))


MODELS = {
    "llama": lambda: llama(),
    "llama-tied-base": lambda: llama(
        tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    ),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, num_key_value_heads=3),
    "qwen2": lambda: of_kind("Qwen2", tie_word_embeddings=True),
    "qwen3": lambda: of_kind("Qwen3", head_dim=24),
    "mixtral": lambda: of_kind("Mixtral", num_local_experts=5),
    "qwen3_moe": lambda: of_kind(
        "Qwen3Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, head_dim=24, norm_topk_prob=True
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=301, n_embd=30, n_layer=2, n_head=3, n_positions=64, initializer_range=0.2)
    ).eval(),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_logits_equal_the_model_that_was_written(make: Any, tmp_path: Path) -> None:
    model = make()
    tokens = torch.randint(0, model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    result = logits_of(written(tmp_path / "model.gguf", model), tokens)
    assert (result - expected).norm() / expected.norm() < 1e-5


def test_a_file_grows(tmp_path: Path) -> None:
    """The source has permuted, quantized tensors, which are read one by one."""
    tokenizer = a_tokenizer()
    facts = tokenizer_facts(tokenizer)
    path = written(tmp_path / "model.gguf", llama(hidden_size=96, vocab_size=tokenizer.vocab_size), "Q8_0", **facts)
    to = tmp_path / "grown"
    options = ["--num-layers", "3", "--hidden-size", "192", "--noise", "0.1"]
    assert main(["model", "grow", str(path), "--to", str(to), *options]) == 0
    tokens = torch.arange(20)[None]
    expected, result = logits_of(path, tokens), logits_of(to, tokens)
    assert (result - expected).norm() / expected.norm() < 1e-5


def test_the_spec_equals_the_models(tmp_path: Path) -> None:
    model = llama(rms_norm_eps=1e-5, initializer_range=0.02)
    opened = open_model(written(tmp_path / "model.gguf", model))
    model.save_pretrained(tmp_path / "folder")
    assert opened.spec == open_model(tmp_path / "folder").spec
    assert opened.eos_token_ids == (2,)
    assert opened.special_token_ids == {"bos_token_id": 1, "eos_token_id": 2}


def test_the_scaling_of_llama_3_is_derived_from_its_factors(tmp_path: Path) -> None:
    """The factors as llama.cpp's converter computes them, from the published scaling."""
    for factor in (8.0, 32.0):
        factors = []
        for dim in range(0, 128, 2):
            wavelength = 2 * np.pi * 5e5 ** (dim / 128)
            smooth = (8192 / wavelength - 1) / (4 - 1)
            between = 1 / ((1 - smooth) / factor + smooth)
            factors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else between)
        for change in (1, 1.01):
            divisors = torch.tensor(factors).double() * change
            if change == 1:
                assert llama3_scaling(tmp_path, divisors, 5e5) == {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            else:
                with pytest.raises(JinguError, match="not those of Llama 3"):
                    llama3_scaling(tmp_path, divisors, 5e5)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the package: random blocks hold infinities
@pytest.mark.parametrize("kind", QUANTISED)
def test_every_quantization_equals_the_gguf_package(kind: str, tmp_path: Path) -> None:
    model = llama(hidden_size=256, intermediate_size=256, num_attention_heads=2, num_hidden_layers=1)
    path = written(tmp_path / "model.gguf", model, kind)
    opened = open_model(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for ours, theirs in (("embedding", "token_embd"), ("blocks.0.feed_forward.down", "blk.0.ffn_down")):
        tensor = stored[f"{theirs}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(opened.read(f"{ours}.weight").float().numpy(), expected)
    assert opened.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """Its reader is independent of ours, and restores the order of rows itself."""
    tokenizer = a_tokenizer()
    model = llama(hidden_size=96, vocab_size=tokenizer.vocab_size)
    written(tmp_path / "model.gguf", model, "Q8_0", **tokenizer_facts(tokenizer))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = theirs(tokens).logits
    result = logits_of(tmp_path / "model.gguf", tokens)
    assert (result - expected).norm() / expected.norm() < 1e-5


# The tokenizer


def a_tokenizer() -> Tokenizer:
    return train_tokenizer(iter([TEXT] * 9), 317, ["<|pad|>", "<|begin|>", "<|end|>"])


def tokenizer_facts(tokenizer: Tokenizer, pre: str = "llama-bpe") -> dict[str, Any]:
    model = tokenizer._spec["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": by_id,
        "tokenizer.ggml.token_type": [3 if name in tokenizer.special_tokens else 1 for name in by_id],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def test_the_tokenizer_is_imported(tmp_path: Path) -> None:
    tokenizer = a_tokenizer()
    opened = open_model(written(tmp_path / "model.gguf", llama(), **tokenizer_facts(tokenizer)))
    result = Tokenizer.load(opened.tokenizer())
    assert result.encode(TEXT) == tokenizer.encode(TEXT)
    assert result.decode(result.encode(TEXT)) == TEXT
    assert result.special_tokens == tokenizer.special_tokens
    assert result.eos_token_id == 2
    theirs = transformers.AutoTokenizer.from_pretrained(opened.tokenizer())
    assert theirs(TEXT)["input_ids"] == [1, *tokenizer.encode(TEXT)]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    assert theirs.apply_chat_template([{"role": "user", "content": "words"}], tokenize=False) == "words"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Ġ12345", "Ġisn", "'t", "Ġ", "Ġit"]),
        ("smollm", ["Ġ", "1", "2", "3", "4", "5", "Ġisn", "'t", "Ġ", "Ġit"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4", "5", "Ġisn", "'t", "Ġ", "Ġit"]),
        ("llama-bpe", ["Ġ", "123", "45", "Ġisn", "'t", "Ġ", "Ġit"]),
    ],
)
def test_pre_tokenizers_split_numbers(pre: str, pieces: list[str], tmp_path: Path) -> None:
    """The published rules: whole numbers (GPT-2), single digits (SmolLM, Qwen2), by threes (Llama 3)."""
    facts = tokenizer_facts(a_tokenizer(), pre)
    folder = open_model(written(tmp_path / "model.gguf", llama(), **facts)).tokenizer()
    spec = Tokenizer.load(folder)._inner.pre_tokenizer
    assert [piece for piece, _ in spec.pre_tokenize_str(" 12345 isn't  it")] == pieces


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        *((pre, True) for pre in ("llama3", "llama-v3", "llama-bpe", "falcon3")),
        *((pre, False) for pre in ("smaug-bpe", "gpt-2", "qwen2")),
    ],
)
def test_llama_3_begins_with_bos_unless_the_file_says_otherwise(pre: str, expected: bool, tmp_path: Path) -> None:
    """The defaults are those of llama.cpp."""
    facts = tokenizer_facts(a_tokenizer(), pre)
    for more, begins in ({}, expected), ({"add_bos_token": False}, False), ({"add_bos_token": True}, True):
        facts |= {f"tokenizer.ggml.{key}": value for key, value in more.items()}
        tokenizer = Tokenizer.load(open_model(written(tmp_path / "model.gguf", llama(), **facts)).tokenizer())
        assert tokenizer.prompt_prefix_ids == [1] * begins


@pytest.mark.parametrize(("kind", "model"), [("llama", "bpe"), ("t5", "unigram")])
def test_pieces_with_scores(kind: str, model: str, tmp_path: Path) -> None:
    """The reference is a sentencepiece model, converted as llama.cpp's converter does."""
    out, lines = io.BytesIO(), [TEXT] * 50 + list("abcdefghijklmnopqrstuvwxyz")
    options = {"vocab_size": 330 if kind == "llama" else 46, "model_type": model, "byte_fallback": kind == "llama"}
    rule = "identity" if kind == "llama" else "nmt_nfkc"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        normalization_rule_name=rule,
        remove_extra_whitespaces=kind == "t5",
        minloglevel=2,
        **options,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(theirs.vocab_size())
    types = [
        2 if theirs.is_unknown(id_) else 3 if theirs.is_control(id_) else 6 if theirs.is_byte(id_) else 1 for id_ in ids
    ]
    facts = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [theirs.id_to_piece(id_) for id_ in ids],
        "tokenizer.ggml.scores": [theirs.get_score(id_) for id_ in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.chat_template": "{{ messages }}",
    }
    if kind == "t5":
        parsed = _message("Model")()
        parsed.ParseFromString(out.getvalue())
        facts["tokenizer.ggml.precompiled_charsmap"] = list(parsed.normalizer.precompiled_charsmap)
        facts["tokenizer.ggml.remove_extra_whitespaces"] = 1
    opened = open_model(written(tmp_path / "model.gguf", llama(vocab_size=theirs.vocab_size()), **facts))
    tokenizer = Tokenizer.load(opened.tokenizer())
    assert tokenizer.eos_token_id == 2
    for text in (TEXT, "", " x", "Ａ text ﬁ", "it  is\n"):
        assert tokenizer.encode(text) == theirs.encode(text)
    hugging_face = transformers.AutoTokenizer.from_pretrained(opened.tokenizer())
    assert hugging_face(TEXT)["input_ids"] == [1] * (kind == "llama") + theirs.encode(TEXT)
    assert hugging_face.chat_template == "{{ messages }}"
    assert tokenizer.prompt_prefix_ids == [1] * (kind == "llama")


def test_a_killed_process_leaves_no_tokenizer_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "model.gguf", llama(vocab_size=300), **tokenizer_facts(a_tokenizer()))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # What the process starts inherits its output: the pipe ends when all of them have ended.
        os.dup2(write_end, 1)
        tokenizer_folder = open_model(file).tokenizer_folder
        os.write(1, str(tokenizer_folder).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        folder = Path(pipe.read().decode())
    os.waitpid(child, 0)
    assert folder.parent == tmp_path / "temporary"
    assert list(folder.parent.iterdir()) == []


def test_a_prompt_starts_with_the_bos_token_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The BOS token is added if file and tokenizer say so: the text equals that of transformers."""
    tokenizer = a_tokenizer()
    facts = {**tokenizer_facts(tokenizer), "tokenizer.ggml.add_bos_token": True}
    path = written(tmp_path / "model.gguf", llama(vocab_size=tokenizer.vocab_size, initializer_range=0.5), **facts)
    assert main(["import", str(path), "--to", str(tmp_path / "folder")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    ids = reader("text", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == 1
    expected = reader.decode(theirs.generate(ids, max_new_tokens=9, do_sample=False)[0], skip_special_tokens=True)
    capsys.readouterr()
    assert main(["generate", str(path), "text", "--max-tokens", "9", "--precision", "fp32"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "the file's tokenizer is of the kind bert; jingu supports"),
        ({"tokenizer.ggml.model": "llama"}, "the file's tokenizer is damaged"),
        (
            {"tokenizer.ggml.pre": "klingon"},
            r"pre-tokenizer \(tokenizer\.ggml\.pre\) is 'klingon', which jingu does not support",
        ),
        ({"tokenizer.ggml.merges": ["x yzzy"]}, "the file's tokenizer is damaged"),
    ],
)
def test_an_unsupported_tokenizer_is_reported_when_it_is_used(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "model.gguf", llama(), **{**tokenizer_facts(a_tokenizer()), **changes})
    with pytest.raises(JinguError, match=words):
        open_model(path).tokenizer()


# Bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "t5"}, "architecture t5 in GGUF. Missing: encoder-decoders in GGUF"),
        ({"general.architecture": "lama"}, "does not support the architecture lama in GGUF. `jingu model list`"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, r"missing: blk\.0\.ffn_gate_inp\.weight"),
        ({"llama.rope.scaling.type": "odd"}, "rope_scaling to 'odd', which is not supported"),
        ({"llama.embedding_length": None}, "lacks 'hidden_size'"),
        ({"llama.embedding_length": "wide"}, "this does not describe a model"),
        ({"llama.attention.head_count": 0}, "this does not describe a model"),
        ({"llama.block_count": 1 << 31}, "2147483648 layers in 21 tensors"),
        (
            {"llama.block_count": 3, "llama.embedding_length": 64},
            r"missing: blk\.2\..*of the wrong shape: token_embd\.weight \(has \[317, 48\]",
        ),
        ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, "only 4 of a head's 8 dims are rotated"),
        ({"llama.attention.sliding_window": 16}, "metadata llama.attention.sliding_window = 16 changes the model's"),
        ({"llama.attention.clamp_kqv": 8}, "attention.clamp_kqv = 8 changes"),
        ({"llama.rope.scaling.attn_factor": 2}, "rope.scaling.attn_factor = 2 changes"),
        ({"llama.expert_gating_func": 2}, "expert_gating_func = 2 changes"),
        ({"llama.attention.head_count_kv": [3, 1]}, "this does not describe a model"),
        ({"llama.block_count": 1}, r"unexpected: blk\.1\.attn_q\.weight, blk\.1\.attn_k\.weight"),
    ],
    ids=str,
)
def test_models_that_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", llama(), **changes)
    with pytest.raises(JinguError, match=words):
        open_model(path)


def test_metadata_without_effect_are_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"attention.sliding_window": 0, "expert_weights_scale": 1, "rope.scaling.finetuned": 1, "vocab_size": 317}
    path = written(tmp_path / "a.gguf", llama(), **{f"llama.{key}": value for key, value in neutral.items()})
    assert open_model(path).spec == open_model(written(tmp_path / "b.gguf", llama())).spec
    assert not caplog.records
    open_model(written(tmp_path / "c.gguf", llama(), **{"llama.moon_phase": 3}))
    assert "does not know the metadata llama.moon_phase = 3" in caplog.text


def test_an_old_factor_of_rotary_scaling_is_read(tmp_path: Path) -> None:
    """llama.cpp reads `rope.scale_linear` as `rope.scaling.factor`, and takes a factor without type for linear."""
    keys = [
        {"llama.rope.scale_linear": 4},
        {"llama.rope.scaling.factor": 4},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4},
    ]
    specs = [open_model(written(tmp_path / "a.gguf", llama(), **key)).spec for key in keys]
    assert specs[0] == specs[1] == specs[2] != open_model(written(tmp_path / "a.gguf", llama())).spec
    for neutral in (
        {"llama.rope.scale_linear": 1},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4},
    ):
        assert (
            open_model(written(tmp_path / "a.gguf", llama(), **neutral)).spec
            == open_model(written(tmp_path / "b.gguf", llama())).spec
        )


def test_a_missing_pre_tokenizer_is_guessed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = tokenizer_facts(a_tokenizer())
    del facts["tokenizer.ggml.pre"]
    folder = open_model(written(tmp_path / "model.gguf", llama(), **facts)).tokenizer()
    assert "does not name its pre-tokenizer" in caplog.text
    rules = Tokenizer.load(folder)._inner.pre_tokenizer
    pieces = [piece for piece, _ in rules.pre_tokenize_str(" 12345 isn't+=it")]
    # Punctuation first, then GPT-2's words, then numbers, by threes.
    assert pieces == ["Ġ", "123", "45", "Ġisn", "'", "t", "+=", "it"]


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "model.gguf", llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(JinguError, match=r"needs the package gguf.*`pip install gguf`"):
        open_model(path)


def test_a_file_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "model.gguf", llama(), **tokenizer_facts(a_tokenizer())).read_bytes()
    path = tmp_path / "cut.gguf"
    for keep in [*range(0, 64, 3), *range(64, len(whole), 4001), len(whole) - 1]:
        path.write_bytes(whole[:keep])
        with pytest.raises(JinguError, match="damaged or cut short"):
            open_model(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_wrong_byte_in_the_header_is_refused_or_harmless(place: int, value: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if not path.exists():
        written(path, llama(num_hidden_layers=1))
    data = bytearray(path.read_bytes())
    data[place] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    try:
        opened = open_model(damaged)
    except JinguError:
        return
    load_model(opened, torch.float32)
    assert json.loads(opened.spec.to_json())["family"] == "llama"


@pytest.mark.parametrize(("matrices", "expected"), [("Q4_0", "int4"), ("Q8_0", "auto")])
def test_blocks_of_4_bits_are_used_where_few_tokens_are_faster(
    matrices: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "model.gguf", llama(hidden_size=96), matrices)
    monkeypatch.setattr("jingu.infer.generate.has_fast_bf16", lambda _: False)
    assert InferenceOptions(device="cpu").use_int4_blocks(path).precision == expected
    assert ("--precision int4" in capsys.readouterr().err) == (expected == "int4")
    assert InferenceOptions("fp32", "cpu").use_int4_blocks(path).precision == "fp32"
    monkeypatch.setattr("jingu.infer.generate.has_fast_bf16", lambda _: True)
    assert InferenceOptions(device="cpu").use_int4_blocks(path).precision == "auto"
