"""Quantized matrices against the library that defines their layout, and exports that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.formats.dequantize import dequantize
from jingu.formats.export import convert, export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.importance import MAX_PIECES, measure_importance
from jingu.formats.packed_forms import compressed_codes
from jingu.formats.quantized_forms import CALIBRATED_FORMS, FORMS, choose_form
from jingu.formats.stored_model import load_model
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

BLOCKS = {"fp8_block": (128, 128)}
# The largest relative error of random matrices (normally distributed, rows of different sizes).
ERRORS = {"fp8": 0.03, "fp8_block": 0.03, "int4": 0.11, "nvfp4": 0.1, "mxfp4": 0.12}


def matrix(dtype: torch.dtype = torch.float32, rows: int = 128, columns: int = 384) -> Tensor:
    """A matrix with rows of different sizes, one of which is zero."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    weight[3] = 0
    return weight.to(dtype)


def decode(parts: dict[str, Tensor], block: tuple[int, int] | None = None) -> Tensor:
    return dequantize(compressed_codes(parts, block))


def library_matrix(parts: dict[str, Tensor], form_format: str, group: dict[str, Any]) -> Tensor:
    """The matrix that compressed-tensors computes."""
    compressor = BaseCompressor.get_value_from_registry(form_format)
    copies = {suffix: part.clone() for suffix, part in parts.items()}
    weight: Tensor = compressor.decompress(copies, QuantizationScheme(**group))["weight"]
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_the_library_reads_what_is_written(name: str, dtype: torch.dtype) -> None:
    weight = matrix(dtype)
    form = choose_form(name, {"w": weight.shape})
    parts = form.encode(weight, None)
    assert {suffix: (part.dtype, part.shape) for suffix, part in parts.items()} == form.layout(weight.shape, dtype)
    theirs = library_matrix(parts, form.format, form.config([])["config_groups"]["group_0"])
    ours = decode(parts, BLOCKS.get(name))
    # The library rounds FP4 to bf16, whatever the dtype of the model.
    assert torch.equal(ours.to(theirs.dtype), theirs)
    assert (ours.float() - weight.float()).norm() / weight.float().norm() < ERRORS[name]
    assert not ours[3].any()


def test_ties_of_fp4_are_even_and_extremes_are_kept() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, -6.0, 0, 0.1, 5.1, 6.0])
    weight = values.repeat(2)[None]
    parts = choose_form("mxfp4", {"w": weight.shape}).encode(weight, None)
    expected = torch.tensor([0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -4, -6, 0, 0, 6, 6.0])
    assert torch.equal(decode(parts)[0], expected.repeat(2))


@pytest.mark.parametrize(
    ("form_format", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 64}),
        ("int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "symmetric": False, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_library_writes_is_read(form_format: str, weights: dict[str, Any], dtype: torch.dtype) -> None:
    weight = matrix(dtype)
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    scheme = QuantizationScheme(**group)
    assert scheme.weights is not None
    size = weights.get("group_size") or (weight.numel() if weights["strategy"] == "tensor" else weight.shape[1])
    groups = weight.reshape(-1, size)
    low, high = groups.amin(1), groups.amax(1)
    scale, zero = calculate_qparams(low, high, scheme.weights)
    shape = (weight.shape[0], -1) if weights["strategy"] != "tensor" else (1,)
    state = {"weight": weight, "weight_scale": scale.reshape(shape).to(dtype)}
    state["weight_zero_point"] = zero.reshape(shape)
    compressor = BaseCompressor.get_value_from_registry(form_format)
    parts = compressor.compress(state, scheme)
    assert torch.equal(decode(parts), library_matrix(parts, form_format, group))


def test_columns_in_the_order_of_their_activations_are_read() -> None:
    weight = matrix()
    parts = choose_form("int4", {"w": weight.shape}).encode(weight, None)
    plain = decode(parts)
    order = torch.arange(384).flip(0)
    groups = (torch.arange(384) // 128)[order]
    # The same scales, named by column instead of by position.
    again = decode({**parts, "weight_g_idx": groups[order].int()})
    assert torch.equal(again, plain)


def build(family: str, place: Path, **settings: Any) -> Path:
    """Write a tiny model in Hugging Face's layout."""
    train_tokenizer(iter(["some text"]), 257, ["<|endoftext|>"]).save(place / "tokenizer")
    values = {
        "family": family,
        "hidden_size": 128,
        "num_heads": 4,
        "num_layers": 2,
        "intermediate_size": 256,
        **settings,
    }
    model = Decoder(spec_from_settings(ModelSettings(**values), 257, 32))
    init_weights(model, model.spec, 3)
    export_hf(model.spec, model.state_dict().__getitem__, place / "tokenizer", place / "plain")
    return place / "plain"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("qwen3", {"tie_word_embeddings": True})])
def test_transformers_loads_an_export(name: str, family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    source = build(family, tmp_path, **settings)
    convert(source, tmp_path / "out", name)
    # The library computes FP4 in bf16 only.
    dtype = torch.bfloat16 if name.endswith("fp4") else torch.float32
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).eval()
    ours = load_model(open_hf(tmp_path / "out"), dtype).eval()
    plain = load_model(open_hf(source), dtype).eval()
    ids = torch.arange(20)[None] * 7 % 257
    with torch.no_grad():
        our_logits, plain_logits = (model.logits(model(ids)).float() for model in (ours, plain))
        their_logits = theirs(ids).logits.float()
    # With FP8, the inputs of matrices are quantized, too, which costs about as much as the weights.
    tolerance = {"fp8": 0.1, "fp8_block": 0.1, "int4": 1e-5}.get(name, 0.05)
    assert (our_logits - their_logits).norm() / their_logits.norm() < tolerance
    assert 1e-4 < (our_logits - plain_logits).norm() / plain_logits.norm() < 0.3
    # Exported again without a form, the same numbers are stored.
    convert(tmp_path / "out", tmp_path / "dense", "fp32")
    dense = load_model(open_hf(tmp_path / "dense"), dtype).state_dict()
    assert all(torch.equal(value, dense[key]) for key, value in ours.state_dict().items())
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    source = build("mixtral", tmp_path, experts={"num_experts": 4, "num_experts_per_token": 2})
    convert(source, tmp_path / "out", "int4")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight_packed" in names
    assert "model.layers.0.block_sparse_moe.gate.weight" in names and "lm_head.weight" in names
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [*(f"model.layers.{index}.block_sparse_moe.gate" for index in range(2)), "lm_head"]
    plain, ours = (load_model(open_hf(folder), torch.float32).state_dict() for folder in (source, tmp_path / "out"))
    for key, value in plain.items():
        error = (ours[key] - value).norm() / value.norm()
        assert error < 0.11 if "blocks." in key else error == 0


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    source = build("llama", tmp_path / "odd", hidden_size=60, num_heads=6, intermediate_size=100)
    with pytest.raises(JinguError, match=r"a scale for 32 columns or more, and the matrix .* has (60|100)"):
        convert(source, tmp_path / "out", "int4")
    with pytest.raises(JinguError, match="128 × 128 numbers, and the matrix"):
        convert(source, tmp_path / "out", "fp8_block")
    convert(source, tmp_path / "fp8", "fp8")
    source = build("gpt2", tmp_path / "gpt2")
    with pytest.raises(JinguError, match="stores its matrices transposed"):
        convert(source, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
    assert main(["export", str(source), "--to", str(tmp_path / "model.gguf"), "--dtype", "int4"]) == 2


TEXT = "The quick brown fox jumps over the lazy dog, and some text follows. " * 40


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_importance_is_the_mean_square_of_inputs(family: str, tmp_path: Path) -> None:
    experts = {"experts": {"num_experts": 4, "num_experts_per_token": 2}} if family == "mixtral" else {}
    source = build(family, tmp_path, **experts)
    (tmp_path / "text.txt").write_text(TEXT)
    model = open_hf(source)
    ours = measure_importance(model, tmp_path / "text.txt")
    shapes = {name: shape for name, shape in parameter_shapes(model.spec).items() if name.startswith("blocks.")}
    assert ours.keys() == {name for name, shape in shapes.items() if len(shape) > 1 and "router" not in name}
    # transformers' modules have the same inputs.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, arguments: inputs.update({name: arguments[0].detach()})

    theirs.model.layers[1].self_attn.o_proj.register_forward_pre_hook(keep("blocks.1.attention.output.weight"))
    theirs.model.layers[1].self_attn.k_proj.register_forward_pre_hook(keep("blocks.1.attention.k.weight"))
    if family == "llama":
        theirs.model.layers[0].mlp.down_proj.register_forward_pre_hook(keep("blocks.0.feed_forward.down.weight"))
    ids = torch.tensor(Tokenizer.load(source).encode(TEXT))
    theirs(ids[: len(ids) // 32 * 32].view(-1, 32)[:MAX_PIECES])
    for name, values in inputs.items():
        expected = values.flatten(0, -2).square().mean(0)
        assert (ours[name] - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("name", CALIBRATED_FORMS)
def test_important_columns_are_rounded_better(name: str) -> None:
    weight = matrix()
    form = choose_form(name, {"w": weight.shape})
    importance = torch.ones(384)
    importance[::7] = 1000.0
    plain, weighted = (decode(form.encode(weight, each)).float() for each in (None, importance))
    errors = [((each - weight).square() * importance).sum() for each in (plain, weighted)]
    assert errors[1] < 0.9 * errors[0] or (name == "mxfp4" and errors[1] < errors[0])


def test_a_calibration_is_refused_where_it_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = build("llama", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("short")
    words = ["export", str(source), "--to", str(tmp_path / "out"), "--calibrate", str(text), "--dtype"]
    assert main([*words, "fp8"]) == 2
    assert "fp8 has nothing to calibrate" in capsys.readouterr().err
    assert main([*words, "int4"]) == 2
    assert "a calibration needs at least 1,024" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    text.write_text(TEXT)
    assert main([*words, "int4"]) == 0
    convert(source, tmp_path / "again", "int4")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "again")]
    key = "model.layers.0.mlp.down_proj.weight_scale"
    assert not torch.equal(files[0][key], files[1][key])


@pytest.mark.parametrize("damage", ["weight_scale", "weight_shape", "shape"])
def test_a_damaged_matrix_is_named(damage: str, tmp_path: Path) -> None:
    convert(build("llama", tmp_path), tmp_path / "out", "int4")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj."
    if damage == "shape":
        tensors[f"{name}weight_scale"] = tensors[f"{name}weight_scale"][:-1].clone()
    else:
        del tensors[name + damage]
    save_file(tensors, file)
    with pytest.raises(JinguError) as error:
        load_model(open_hf(tmp_path / "out"), torch.float32)
    assert name in str(error.value)
