"""The bytes of GGUF files, compared with those that the package `gguf` writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from math import nextafter
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from jingu.checkpoint.mapped_files import map_tensor
from jingu.formats import gguf_write
from jingu.formats.gguf_write import OutputTensor, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "a name, 名",
    "llama.block_count": 3,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["a", "", "中文", "\n"],
    "tokenizer.ggml.token_type": [1, 1, 3, -1],
    "tokenizer.ggml.scores": [0.0, -1.5, -1e4, 3.25],
    "tokenizer.ggml.merges": [],
    "flags": [True, False],
}


def write_with_the_package(file: Path, tensors: dict[str, tuple[Kind, torch.Tensor]]) -> None:
    """Write the metadata and tensors with `gguf.GGUFWriter`."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(METADATA["general.name"])
    writer.add_block_count(3)
    writer.add_rope_freq_base(10000.0)
    writer.add_add_bos_token(False)
    writer.add_token_list(METADATA["tokenizer.ggml.tokens"])
    writer.add_token_types(METADATA["tokenizer.ggml.token_type"])
    writer.add_token_scores(METADATA["tokenizer.ggml.scores"])
    writer.add_token_merges([])
    writer.add_array("flags", [True, False])
    for name, (kind, value) in tensors.items():
        content = gguf.quants.quantize(value.float().numpy(), kind)
        writer.add_tensor(name, content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hard_numbers() -> torch.Tensor:
    """Numbers that quantization rounds in every direction: ties, neighbors of ties, zeros, tiny and large ones."""
    halves = torch.arange(-127, 128).float() / 2
    neighbors = torch.tensor([nextafter(0.5, 0), -0.5 + 2.0**-25, 0.5 - 2.0**-25, 126.5, -126.5, -0.0, 0.0])
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 6, 64)[:, None]
    # Blocks with the largest number 127 have the scale 1, so that the others are codes.
    blocks = torch.cat([halves, neighbors, torch.zeros(26)]).view(9, 32)
    blocks[:, 0] = 127.0
    values[0] = 0.0
    values[1:4] = blocks.reshape(3, 96)
    return values


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [96, 1 << 17])
def test_the_bytes_are_those_of_the_package(
    kind: Kind, dtype: torch.dtype, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_write, "_CHUNK", chunk)
    monkeypatch.setattr(gguf_write, "_FLUSH_BYTES", chunk)
    values = hard_numbers().to(dtype)
    if dtype is torch.float16:
        values = values.nan_to_num(posinf=6e4, neginf=-6e4)
    experts = values[:60].view(3, 20, 96)
    (tmp_path / "mapped").write_bytes(b"123" + values.view(torch.uint8).numpy().tobytes())
    mapped = map_tensor(tmp_path / "mapped", 3, values.shape, dtype)
    reads: dict[str, tuple[Kind, torch.Tensor, Callable[[], Any]]] = {
        "mapped.weight": (kind, values, partial(iter, [mapped])),
        "experts.weight": (kind, experts, partial(iter, experts.split(1))),
        "columns.weight": (kind, values[:32].t().contiguous(), partial(iter, [values[:32].t()])),
        "norm.weight": (Kind.F32, values[5, :7], partial(iter, [values[5, :7]])),
    }
    tensors = [OutputTensor(name, tuple(value.shape), of, read) for name, (of, value, read) in reads.items()]
    write_gguf(tmp_path / "ours.gguf", METADATA, tensors, gguf)
    write_with_the_package(tmp_path / "theirs.gguf", {name: (of, value) for name, (of, value, _) in reads.items()})
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_a_tensor_of_another_size_is_no_file(tmp_path: Path) -> None:
    tensor = OutputTensor("a", (4, 32), Kind.F16, lambda: iter([torch.zeros(3, 32)]))
    with pytest.raises(ValueError, match="a has another size"):
        write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, [tensor], gguf)


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
def test_errors_of_the_disk_are_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_write, "_FLUSH_BYTES", 0)
    tensors = [OutputTensor(key, (4, 32), Kind.F16, lambda: iter([torch.zeros(4, 32)])) for key in "abc"]

    def fail(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="No space left"):
        write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, tensors, gguf)
