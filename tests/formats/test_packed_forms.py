"""Folders in the forms of GPTQ, AWQ, FP8, MXFP4, bitsandbytes and ModelOpt, against the libraries that define them.

GPTQ and AWQ are packed here by the published layout, number by number.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jingu.errors import JinguError
from jingu.formats.huggingface import open_hf, read_stored, spec_from_config
from jingu.formats.packed_forms import METHODS, find_forms
from jingu.formats.packed_matrices import join_packed
from jingu.formats.safetensors import read_header
from jingu.formats.stored_model import load_model

Tensors = dict[str, Tensor]
STEM = "model.layers.1.mlp.up_proj"
# The positions of eight outputs in a word of AWQ, from the lowest bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def read(tensors: Tensors, method: str, folder: Path, **config: Any) -> dict[str, Tensor]:
    """The matrices of some tensors by name, as jingu reads them from a file."""
    file = folder / "tensors.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    places = {key: (file, key, location) for key, location in read_header(file).items()}
    matrices = join_packed(places, METHODS[method].forms, {"quant_method": method, **config})
    result = {name: read_stored(stored) for name, stored in matrices.items()}
    assert all(result[name].shape == stored[2].shape for name, stored in matrices.items())
    return result


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Words of 32 bits from codes [R, C]: `32 / bits` codes of a row in each, from the lowest bits."""
    count = 32 // bits
    words = []
    for row in codes.tolist():
        groups = [row[start : start + count] for start in range(0, len(row), count)]
        words.append(
            [
                signed(sum((group[number] % 2**bits) << (bits * k) for k, number in enumerate(order or range(count))))
                for group in groups
            ]
        )
    return torch.tensor(words, dtype=torch.int32)


def integers(outputs: int, inputs: int, bits: int, groups: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [I, O], zero points [S, O] and scales [S, O]."""
    random = generator(seed)
    codes = torch.randint(2**bits, (inputs, outputs), generator=random)
    # Version 1 of GPTQ has no code for a zero point of 0, and AWQ none for 2**bits.
    zeros = torch.randint(1, 2**bits, (groups, outputs), generator=random)
    return codes, zeros, torch.rand(groups, outputs, generator=random) + 0.01


def pack_gptq(
    codes_IO: Tensor, zeros_SO: Tensor, scales: Tensor, index: Tensor | None, bits: int, version: int = 1
) -> Tensors:
    parts = {
        "qweight": pack(codes_IO.t(), bits).t(),
        "qzeros": pack(zeros_SO - int(version == 1), bits),
        "scales": scales,
        "g_idx": index,
    }
    return {name: part for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "order", ["sorted", "symmetric", "tiny", "by activations", "without index", "one group", "cut"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gptq(order: str, bits: int, version: int, dtype: torch.dtype, tmp_path: Path) -> None:
    inputs, size = (80, 32) if order == "cut" else (96, 32)
    if order == "one group":
        size = inputs
    index = torch.arange(inputs) // size
    groups = int(index.max()) + 1
    codes, zeros, scales = integers(48, inputs, bits, groups)
    if order == "symmetric":
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    if order == "tiny":
        scales /= 10000
    if order == "by activations":
        index = index[torch.randperm(inputs, generator=generator())]
    parts = pack_gptq(codes, zeros, scales.to(dtype), None if order == "without index" else index.int(), bits, version)
    config = {"bits": bits, "group_size": -1 if order == "one group" else size}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    matrix = read({f"m.{name}": part for name, part in parts.items()}, "gptq", tmp_path, **config)["m.weight"]
    # What the library computes in the dtype of the scales.
    expected = (scales.to(dtype)[index] * (codes - zeros[index]).to(dtype)).t()
    assert matrix.dtype == dtype and torch.equal(matrix, expected)


@pytest.mark.parametrize(
    ("packing", "version"), [("auto_round:auto_gptq", 1), ("auto_round", 2), ("auto_round:gptqmodel", 2)]
)
def test_gptq_of_auto_round(packing: str, version: int, tmp_path: Path) -> None:
    codes, zeros, scales = integers(48, 96, 4, 3)
    parts = pack_gptq(codes, zeros, scales.half(), None, 4, version)
    config = {"bits": 4, "group_size": 32, "packing_format": packing}
    assert find_forms({"quant_method": "auto-round", **config}, (), tmp_path) == METHODS["gptq"].forms
    matrix = read({f"m.{name}": part for name, part in parts.items()}, "gptq", tmp_path, **config)["m.weight"]
    index = torch.arange(96) // 32
    assert torch.equal(matrix, (scales.half()[index] * (codes - zeros[index]).half()).t())


def test_zero_points_of_0_borrow_in_version_1(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from whole words, and adds it to them again."""
    codes, zeros, scales = integers(16, 32, 4, 1)
    zeros[0, 3:6] = 0
    words = pack(zeros, 4) - 0x11111111
    parts = {**pack_gptq(codes, zeros, scales.half(), None, 4), "qzeros": words}
    matrix = read({f"m.{name}": part for name, part in parts.items()}, "gptq", tmp_path, bits=4, group_size=32)
    assert torch.equal(matrix["m.weight"], (scales.half() * (codes - zeros).half()).t())


@pytest.mark.parametrize("size", [32, 96, -1])
def test_awq(size: int, tmp_path: Path) -> None:
    index = torch.arange(96) // (96 if size < 0 else size)
    codes, zeros, scales = integers(48, 96, 4, int(index.max()) + 1)
    zeros[0, :5] = 0
    parts = {"qweight": pack(codes, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER), "scales": scales.half()}
    config = {"bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    matrix = read({f"m.{name}": part for name, part in parts.items()}, "awq", tmp_path, **config)["m.weight"]
    assert torch.equal(matrix, ((codes - zeros[index]).half() * scales.half()[index]).t())


def fp8(*shape: int) -> Tensor:
    """Every number of FP8 except NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    count = torch.Size(shape).numel()
    return codes.repeat(-(-count // len(codes)))[:count].view(shape).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("shape", [(48, 36), (3, 48, 36)], ids=["matrix", "experts"])
@pytest.mark.parametrize("grid", [(6, 3), (48, 1), (1, 1)], ids=["blocks", "rows", "one"])
def test_fp8(grid: tuple[int, int], shape: tuple[int, ...], scale_dtype: torch.dtype, tmp_path: Path) -> None:
    scale = torch.rand(*shape[:-2], *grid, generator=generator()) / 100 + 1e-3
    if scale_dtype == torch.uint8:
        scale = torch.randint(1, 250, scale.shape, generator=generator())
    scale = scale.to(scale_dtype)
    values = fp8(*shape)
    config = {"weight_block_size": [8, 12]} if grid == (6, 3) else {}
    matrix = read({"m.weight": values, "m.weight_scale_inv": scale}, "fp8", tmp_path, **config)["m.weight"]
    expected = Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32)
    assert torch.equal(matrix, expected)


def test_blocks_of_fp8_that_the_matrix_cuts(tmp_path: Path) -> None:
    values, scale = fp8(3, 13, 17), torch.rand(3, 3, 3, generator=generator())
    parts = {"m.experts.down_proj": values, "m.experts.down_proj_scale_inv": scale}
    matrix = read(parts, "fp8", tmp_path, weight_block_size=[5, 7])["m.experts.down_proj"]
    rows, columns = (torch.arange(size) // block for size, block in ((13, 5), (17, 7)))
    assert torch.equal(matrix, values.float() * scale[:, rows][:, :, columns])


def test_fp8_of_mistral_fbgemm_and_modelopt(tmp_path: Path) -> None:
    values, row_scale = fp8(48, 36), torch.rand(48, 1, generator=generator())
    parts = {"m.weight": values, "m.qscale_weight": row_scale}
    assert torch.equal(read(parts, "fp8", tmp_path)["m.weight"], values.float() * row_scale)
    parts = {"m.weight": values, "m.weight_scale": row_scale, "m.input_scale_ub": torch.ones(1)}
    assert torch.equal(read(parts, "fbgemm_fp8", tmp_path)["m.weight"], values.float() * row_scale)
    one_scale = torch.tensor(0.37)
    parts = {"m.weight": values, "m.weight_scale": one_scale, "m.k_scale": torch.ones(1)}
    matrices = read(parts, "modelopt", tmp_path)
    assert torch.equal(matrices["m.weight"], values.float() * one_scale) and len(matrices) == 1


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_of_experts(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    """As gpt-oss stores them: transformers' parameter is [E, I, O]."""
    blocks = torch.randint(256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator())
    scales = torch.randint(254, (3, 10, 2), dtype=torch.uint8, generator=generator())
    scales[0, 0] = torch.tensor([0, 253])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = {f"{name}_blocks": blocks, f"{name}_scales": scales.view(scale_dtype), f"{name}_bias": torch.ones(3, 10)}
    matrices = read(parts, "mxfp4", tmp_path)
    assert torch.equal(matrices[name], convert_moe_packed_tensors(blocks, scales)) and len(matrices) == 2
    with pytest.raises(JinguError, match=rf"{name}_blocks is no matrix in MXFP4: a scale is no number"):
        read({**parts, f"{name}_scales": torch.full_like(scales, 255)}, "mxfp4", tmp_path)


def test_gpt_oss(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    folder = tmp_path / "model"
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator())
        scales = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator())
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    change(folder, dense, None)
    expected = open_hf(folder)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        their_logits = theirs(torch.arange(3, 15)[None]).logits
    packed = shutil.copytree(folder, tmp_path / "packed")
    change(packed, tensors, {"quant_method": "mxfp4"})
    torch.testing.assert_close(logits(packed), their_logits, rtol=1e-4, atol=1e-5)
    ours = open_hf(packed)
    for part in ("gate", "up", "down"):
        name = f"blocks.1.feed_forward.{part}.weight"
        assert torch.equal(ours.read(name).float(), expected.read(name))
        for expert in (0, 3):
            assert torch.equal(ours.read(name, expert).float(), expected.read(name)[expert])
            assert torch.equal(expected.read(name, expert), expected.read(name)[expert])


def test_nvfp4_of_modelopt(tmp_path: Path) -> None:
    code_bytes = torch.randint(256, (6, 16), dtype=torch.uint8, generator=generator())
    scale, scale_2 = torch.rand(6, 2, generator=generator()).to(torch.float8_e4m3fn), torch.tensor(0.013)
    parts = {
        "m.weight": code_bytes,
        "m.weight_scale": scale,
        "m.weight_scale_2": scale_2,
        "m.input_scale": torch.ones(1),
    }
    matrix = read(parts, "modelopt", tmp_path)["m.weight"]
    codes = torch.stack([code_bytes & 15, code_bytes >> 4], -1).flatten(1)
    numbers = Fp8Dequantize(None)._unpack_fp4(code_bytes.view(torch.int8))
    assert codes.shape == numbers.shape == matrix.shape
    assert torch.equal(matrix, numbers * (scale.float() * scale_2).repeat_interleave(16, 1))


@pytest.mark.parametrize("shape", [(48, 64), (48, 96), (1, 66)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_bits_of_bitsandbytes(
    dtype: torch.dtype, kind: str, nested: bool, shape: tuple[int, int], tmp_path: Path
) -> None:
    weight = torch.randn(shape, generator=generator()).to(dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
    parts = {"m.weight": packed, **{f"m.weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    # The library's kernel for CPUs mixes up scales where blocks go on in the next row, so that a row is a block here.
    state.shape = torch.Size((weight.numel() // 64, 64)) if weight.numel() % 64 == 0 else state.shape
    expected = bnb.dequantize_4bit(packed, state)
    # It transposes a single row of bytes.
    expected = expected.t() if packed.shape[0] == 1 and expected.shape != weight.shape else expected
    matrix = read(parts, "bitsandbytes", tmp_path)["m.weight"]
    assert matrix.dtype == dtype and torch.equal(matrix, expected.view(shape))
    if packed.numel() % 4 == 0:
        # Bytes can be stored as numbers of another dtype.
        stored = {**parts, "m.weight": packed.flatten().view(torch.float32).unsqueeze(1)}
        assert torch.equal(read(stored, "bitsandbytes", tmp_path)["m.weight"], matrix)


def test_int8_of_bitsandbytes(tmp_path: Path) -> None:
    values = torch.randint(-127, 128, (48, 36), dtype=torch.int8, generator=generator())
    scale = torch.rand(48, generator=generator())
    parts = {"m.weight": values, "m.SCB": scale, "m.weight_format": torch.zeros((), dtype=torch.uint8)}
    matrix = read(parts, "bitsandbytes", tmp_path)["m.weight"]
    assert torch.equal(matrix, bnb.int8_vectorwise_dequant(values, scale))
    with pytest.raises(JinguError, match=r"m\.weight is no matrix in .*int8: weight_format is 2"):
        read({**parts, "m.weight_format": torch.tensor(2, dtype=torch.uint8)}, "bitsandbytes", tmp_path)


# Folders


def save_llama(folder: Path, family: str = "llama") -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    if family == "gpt2":
        config: Any = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32)
    elif family == "qwen3_moe":
        sizes |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
        config = transformers.Qwen3MoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    else:
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def change(folder: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def logits(folder: Path) -> Tensor:
    model = load_model(open_hf(folder), torch.float32)
    with torch.no_grad():
        return model.logits(model(torch.arange(3, 15)[None]))


def quantize_folder(folder: Path, method: str, changes: dict[str, Any] | None = None) -> None:
    """Replace the matrices of a tiny Llama's blocks by random ones in GPTQ's or AWQ's layout."""
    tensors = load_file(folder / "model.safetensors")
    for number, name in enumerate([name for name in tensors if name.endswith("_proj.weight")]):
        outputs, inputs = tensors.pop(name).shape
        codes, zeros, scales = integers(outputs, inputs, 4, inputs // 32, number)
        scales = scales.half() / 50
        stem = name.removesuffix("weight")
        if method == "gptq":
            index = (torch.arange(inputs) // 32).int()
            parts = pack_gptq(codes, zeros, scales, index, 4)
            # Older releases write a bias for every matrix.
            parts["bias"] = torch.zeros(outputs, dtype=torch.float16)
        else:
            parts = {"qweight": pack(codes, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER), "scales": scales}
        tensors |= {f"{stem}{part}": tensor for part, tensor in parts.items()}
    change(folder, tensors, {"quant_method": method, "bits": 4, "group_size": 32, **(changes or {})})


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_folder_computes_what_the_dequantized_one_does(method: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    quantize_folder(folder, method)
    result = logits(folder)
    for number, name in enumerate([name for name in tensors if name.endswith("_proj.weight")]):
        outputs, inputs = tensors[name].shape
        codes, zeros, scales = integers(outputs, inputs, 4, inputs // 32, number)
        index = torch.arange(inputs) // 32
        tensors[name] = ((codes - zeros[index]).half() * (scales.half() / 50)[index]).t().float()
    change(folder, tensors, None)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 15)[None]).logits
    torch.testing.assert_close(result, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(
    "options", [{"bnb_4bit_use_double_quant": True}, {"bnb_4bit_quant_type": "nf4"}, None], ids=str
)
def test_what_bitsandbytes_writes_is_read(options: dict[str, Any] | None, family: str, tmp_path: Path) -> None:
    """GPT-2 stores its matrices transposed, but not the quantized ones."""
    folder = save_llama(tmp_path / "model", family)
    how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    if options is not None:
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, device_map="cpu")
    model.save_pretrained(tmp_path / "quantized")
    # After saving: this changes the matrices in place.
    dequantized = model.dequantize(torch.float32)
    with torch.no_grad():
        theirs = dequantized(torch.arange(3, 15)[None]).logits
    torch.testing.assert_close(logits(tmp_path / "quantized"), theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(theirs, logits(folder), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [(8, 16), (16, 16)], ids=["aligned", "across gate and up"])
def test_experts_of_fp8_in_one_tensor(block: tuple[int, int], tmp_path: Path) -> None:
    """Blocks of 16 rows do not divide the 24 rows of a gate."""
    folder = save_llama(tmp_path / "model", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        matrices = {
            part: torch.stack([tensors.pop(f"{experts}.{expert}.{part}.weight") for expert in range(3)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        fused = {
            "gate_up_proj": torch.cat([matrices["gate_proj"], matrices["up_proj"]], 1),
            "down_proj": matrices["down_proj"],
        }
        for part, matrix in fused.items():
            values = (matrix * 1000).to(torch.float8_e4m3fn)
            grid = [-(-size // number) for size, number in zip(matrix.shape[1:], block, strict=True)]
            scale = torch.rand(3, *grid, generator=generator()) / 1000
            tensors |= {f"{experts}.{part}": values, f"{experts}.{part}_scale_inv": scale}
            scales = scale.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
            matrix = values.float() * scales[:, : matrix.shape[1], : matrix.shape[2]]
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for expert in range(3):
                pieces = zip(names, matrix[expert].chunk(len(names)), strict=True)
                plain |= {f"{experts}.{expert}.{name}.weight": piece.clone() for name, piece in pieces}
    change(folder, tensors, {"quant_method": "fp8", "weight_block_size": list(block)})
    quantized = open_hf(folder)
    ours = {
        name: quantized.read(name)
        for name in ("blocks.1.feed_forward.gate.weight", "blocks.0.feed_forward.down.weight")
    }
    one = quantized.read("blocks.1.feed_forward.up.weight", 2)
    change(folder, plain, None)
    expected = open_hf(folder)
    assert all(torch.equal(value, expected.read(name)) for name, value in ours.items())
    assert torch.equal(one, expected.read("blocks.1.feed_forward.up.weight", 2))


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
def test_experts_that_a_tool_has_stored_one_by_one(family: str, tmp_path: Path) -> None:
    """As llm-compressor writes them, though transformers has one tensor; in FP8 with a scale per row."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_local_experts": 3, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    model = (
        transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, intermediate_size_mlp=40))
        if family == "llama4_text"
        else transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    )
    for parameter in model.parameters():
        # Biases are zero at first.
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    dense = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        whole = tensors.pop(name)
        stem, kind = name.rpartition(".")[0], "bias" if name.endswith("bias") else "weight"
        if kind == "weight":
            scale = whole.abs().amax(1, keepdim=True) / 448
            values = (whole / scale).to(torch.float8_e4m3fn)
            dense[name] = values.float() * scale
        for expert in range(3):
            # Gates and ups follow each other, or take turns.
            rows = (values if kind == "weight" else whole)[expert].T
            pieces = {"down_proj": rows}
            if "gate_up" in name:
                halves = (rows[::2], rows[1::2]) if family == "gpt_oss" else rows.chunk(2)
                pieces = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
            for part, piece in pieces.items():
                tensors[f"{stem}.{expert}.{part}.{kind}"] = piece
                if kind == "weight":
                    row_scale = scale[expert].T
                    if "gate_up" in name:
                        two = (row_scale[::2], row_scale[1::2]) if family == "gpt_oss" else row_scale.chunk(2)
                        row_scale = two[part == "up_proj"]
                    tensors[f"{stem}.{expert}.{part}.weight_scale"] = row_scale
    change(tmp_path / "model", dense, None)
    packed = shutil.copytree(tmp_path / "model", tmp_path / "packed")
    change(packed, tensors, {"quant_method": "compressed-tensors", "format": "float-quantized"})
    ours, expected = open_hf(packed), open_hf(tmp_path / "model")
    for part in ("gate", "up", "down"):
        name = f"blocks.1.feed_forward.{part}.weight"
        assert torch.equal(ours.read(name), expected.read(name))
        assert torch.equal(ours.read(name, 2), expected.read(name, 2))
    torch.testing.assert_close(logits(packed), logits(tmp_path / "model"))
    del tensors["model.layers.1." + ("mlp" if family == "gpt_oss" else "feed_forward") + ".experts.2.up_proj.weight"]
    change(packed, tensors, {"quant_method": "compressed-tensors", "format": "float-quantized"})
    with pytest.raises(JinguError, match=r"experts\.2\.up_proj\.weight_scale is a part .* is missing"):
        open_hf(packed)


# Damage


DAMAGES: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "scales missing": (
        "gptq",
        lambda t: t.pop(f"{STEM}.scales"),
        rf"{STEM}\.qweight is a matrix in GPTQ.*scales is mis",
    ),
    "codes missing": (
        "gptq",
        lambda t: t.pop(f"{STEM}.qweight"),
        rf"part of a quantized matrix.*{STEM}\.qweight is mis",
    ),
    "zero points missing": ("awq", lambda t: t.pop(f"{STEM}.qzeros"), rf"{STEM}\.qzeros is missing"),
    "shape of scales": (
        "awq",
        lambda t: t.update({f"{STEM}.scales": t[f"{STEM}.scales"][:, 1:]}),
        rf"{STEM}\.qweight is no matrix in AWQ: scales has the shape \[2, 127\], not \[2, 128\]",
    ),
    "groups": (
        "awq",
        lambda t: t.update({f"{STEM}.{part}": t[f"{STEM}.{part}"][:1] for part in ("scales", "qzeros")}),
        rf"{STEM}\.qweight is no matrix in AWQ: scales has 1 groups for 64 inputs",
    ),
    "bits": (
        "gptq",
        lambda t: t.update({f"{STEM}.qzeros": t[f"{STEM}.qzeros"].repeat(1, 2)}),
        rf"{STEM}\.qweight is no matrix in GPTQ: it has 8 bits, and 4 in config",
    ),
    "dtype": (
        "gptq",
        lambda t: t.update({f"{STEM}.qweight": t[f"{STEM}.qweight"].long()}),
        rf"{STEM}\.qweight is no matrix in GPTQ: it is stored as int64",
    ),
    "index": (
        "gptq",
        lambda t: t.update({f"{STEM}.g_idx": t[f"{STEM}.g_idx"] + 7}),
        rf"{STEM}\.qweight is no matrix in GPTQ: g_idx names group 8 of 2",
    ),
    "a bias that is not zero": (
        "gptq",
        lambda t: t.update({f"{STEM}.bias": torch.ones(128)}),
        rf"unexpected: {STEM}\.bias",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_matrix_is_named(damage: str, tmp_path: Path) -> None:
    method, break_tensors, words = DAMAGES[damage]
    folder = save_llama(tmp_path / "model")
    quantize_folder(folder, method)
    tensors = load_file(folder / "model.safetensors")
    break_tensors(tensors)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    change(folder, tensors, config)
    with pytest.raises(JinguError, match=words):
        load_model(open_hf(folder), torch.float32)
    change(folder, tensors, None)
    with pytest.raises(JinguError, match=r"config\.json has no quantization_config that describes it"):
        open_hf(folder)


OTHER_DAMAGES: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], object], str]] = {
    "no scale": ("fp8", {}, lambda t: t.pop("m.weight_scale_inv"), r"m\.weight is no matrix in FP8: it has no scale"),
    "no matrix": ("fp8", {}, lambda t: t.pop("m.weight"), r"m\.weight_scale_inv is a part .* m\.weight is missing"),
    "grid": ("fp8", {"weight_block_size": [8, 9]}, lambda t: None, r"scale_inv has the shape \[6, 3\], not \[6, 4\]"),
    "block": ("fp8", {"weight_block_size": "8"}, lambda t: None, r"m\.weight is no matrix in FP8: its blocks have the"),
    "no state": (
        "bitsandbytes",
        {},
        lambda t: t.pop(next(k for k in t if "state" in k)),
        r"m\.weight .*nf4 is missing",
    ),
    "state": (
        "bitsandbytes",
        {},
        lambda t: t.update({k: t[k][:9] for k in t if "state" in k}),
        r"m\.weight is no matrix in bitsandbytes' 4 bits: quant_state.* is damaged",
    ),
    "scales": (
        "bitsandbytes",
        {},
        lambda t: t.update({"m.weight.absmax": t["m.weight.absmax"][1:]}),
        r"m\.weight .*absmax has the shape \[26\], not \[27\]",
    ),
    "bytes": (
        "bitsandbytes",
        {},
        lambda t: t.update({"m.weight": t["m.weight"][1:]}),
        r"it has 863 bytes for a matrix",
    ),
}


@pytest.mark.parametrize("damage", OTHER_DAMAGES)
def test_damages_of_other_forms_are_named(damage: str, tmp_path: Path) -> None:
    method, config, break_tensors, words = OTHER_DAMAGES[damage]
    if method == "fp8":
        parts = {"m.weight": fp8(48, 36), "m.weight_scale_inv": torch.ones(6, 3)}
        config = {"weight_block_size": [8, 12], **config}
    else:
        packed, state = bnb.quantize_4bit(torch.randn(48, 36), blocksize=64, quant_type="nf4")
        parts = {"m.weight": packed, **{f"m.weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    break_tensors(parts)
    with pytest.raises(JinguError, match=words):
        read(parts, method, tmp_path, **config)


def small_matrix(form: str) -> tuple[str, dict[str, Any], Tensors]:
    """The method, config and parts of a matrix `m` in a form."""
    codes, zeros, scales = integers(16, 64, 4, 2)
    if form == "gptq":
        parts = pack_gptq(codes, zeros, scales.half(), torch.arange(64, dtype=torch.int32) // 32, 4)
    elif form == "awq":
        parts = {"qweight": pack(codes, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER), "scales": scales.half()}
    elif form == "fp8":
        return form, {}, {"m.weight": fp8(48, 36), "m.weight_scale_inv": torch.ones(6, 3)}
    elif form == "modelopt":
        code_bytes = torch.zeros(6, 16, dtype=torch.uint8)
        parts = {"weight": code_bytes, "weight_scale": torch.ones(6, 2).to(torch.float8_e4m3fn)}
        parts |= {"weight_scale_2": torch.tensor(0.1)}
    elif form == "bitsandbytes":
        packed, state = bnb.quantize_4bit(torch.ones(48, 64), blocksize=64, quant_type="nf4", compress_statistics=True)
        parts = {"weight": packed, **{f"weight.{k}": part for k, part in state.as_dict(packed=True).items()}}
    elif form == "int8":
        parts = {"weight": torch.ones(16, 32, dtype=torch.int8), "SCB": torch.ones(16)}
    elif form == "integers":
        parts = {
            "weight_packed": pack(codes.t(), 4),
            "weight_scale": scales.t(),
            "weight_shape": torch.tensor([16, 64]),
        }
    else:
        parts = {"weight_packed": torch.zeros(6, 16, dtype=torch.uint8), "weight_global_scale": torch.ones(1)}
        parts |= {"weight_scale": torch.ones(6, 2).to(torch.float8_e4m3fn)}
    methods = {"int8": "bitsandbytes", "integers": "compressed-tensors", "fp4": "compressed-tensors"}
    config = {"bits": 4, "group_size": 32} if form in ("gptq", "awq") else {}
    return methods.get(form, form), config, {f"m.{name}": part for name, part in parts.items()}


SCALES = {
    "gptq": ["scales"],
    "awq": ["scales"],
    "fp8": ["weight_scale_inv"],
    "modelopt": ["weight_scale", "weight_scale_2"],
    "bitsandbytes": ["weight.nested_absmax", "weight.quant_map"],
    "int8": ["SCB"],
    "integers": ["weight_scale"],
    "fp4": ["weight_scale", "weight_global_scale"],
}


@pytest.mark.parametrize(("form", "part"), [(form, part) for form, parts in SCALES.items() for part in parts])
def test_a_scale_that_is_no_number_is_named(form: str, part: str, tmp_path: Path) -> None:
    method, config, parts = small_matrix(form)
    assert all(matrix.isfinite().all() for matrix in read(parts, method, tmp_path, **config).values())
    part_values = parts[f"m.{part}"].float().clone()
    part_values[(0,) * part_values.dim()] = torch.nan
    parts[f"m.{part}"] = part_values.to(parts[f"m.{part}"].dtype)
    with pytest.raises(JinguError, match=rf"m\..* is no matrix in .*: m\.{part} has the number nan"):
        read(parts, method, tmp_path, **config)


def test_a_divisor_of_zero_is_named(tmp_path: Path) -> None:
    method, config, parts = small_matrix("fp4")
    with pytest.raises(JinguError, match=r"m\.weight_global_scale has the number 0"):
        read({**parts, "m.weight_global_scale": torch.zeros(1)}, method, tmp_path, **config)


def scheme(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": 4, **weights}}}}


@pytest.mark.parametrize(
    ("form", "config", "left_out", "words"),
    [
        ("gptq", {"desc_act": True}, "g_idx", r"it has no g_idx, and its columns have the order"),
        ("integers", scheme(symmetric=False), None, r"it has no weight_zero_point, and its scheme is not symmetric"),
        ("integers", scheme(actorder="group"), None, r"it has no weight_g_idx, and its columns have the order"),
        ("integers", scheme(strategy="group", group_size=16), None, r"weight_scale has 2 groups for 64 columns"),
    ],
    ids=str,
)
def test_what_the_config_says_and_a_matrix_lacks(
    form: str, config: dict[str, Any], left_out: str | None, words: str, tmp_path: Path
) -> None:
    method, usual, parts = small_matrix(form)
    parts = {name: part for name, part in parts.items() if name != f"m.{left_out}"}
    read(parts, method, tmp_path, **usual)
    with pytest.raises(JinguError, match=rf"m\..* is no matrix in .*: {words}"):
        read(parts, method, tmp_path, **usual, **config)


@pytest.mark.parametrize("form", ["gptq", "awq", "integers", "fp4"])
def test_a_matrix_that_is_there_twice_is_named(form: str, tmp_path: Path) -> None:
    method, config, parts = small_matrix(form)
    with pytest.raises(JinguError, match=r"m\.\w+ is a matrix in .*, and another tensor is the same matrix m\.weight"):
        read({**parts, "m.weight": torch.ones(16, 64)}, method, tmp_path, **config)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "quant_method 'aqlm'"),
        ({"quant_method": "gptq", "bits": 3}, "quant_method 'gptq' with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq' with checkpoint_format 'marlin'"),
        (
            {"quant_method": "auto-round", "packing_format": "mlx"},
            "quant_method 'auto-round' with packing_format 'mlx'",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "quant_method 'awq' with version 'gemv'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "quant_method 'fp8' with expert_dtype 'fp4'"),
        ({"quant_method": "compressed-tensors", "format": "sparse-24-bitmask"}, "with format 'sparse-24-bitmask'"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "with sparsity_config 'sparse-24-bitmask'",
        ),
    ],
    ids=str,
)
def test_a_form_that_is_not_read_is_named(quantization: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    change(folder, load_file(folder / "model.safetensors"), quantization)
    for opening in (open_hf, lambda path: spec_from_config(path / "config.json")):
        with pytest.raises(JinguError, match=words):
            opening(folder)
