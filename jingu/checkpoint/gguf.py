"""GGUF files: metadata, a tokenizer and weights, often quantised, in one file; read only.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, metadata, tensor infos,
padding, the tensors. The header is parsed here, with bounds; names and quantisation are the `gguf` package's.
"""

from __future__ import annotations

import atexit
import mmap
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jingu.checkpoint.hub import OpenModel, Shapes, Weights, open_described
from jingu.checkpoint.stream import ELEMENTS, Header, read_at
from jingu.errors import JinguError
from jingu.text.gguf import write_tokenizer
from jingu.text.storage import package

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's converter makes of a Hugging Face architecture; ends of names.

    Attributes:
        permuted: matrices whose rows are reordered, from halves of a head to pairs that rotate together.
        transposed: matrices that Hugging Face keeps input-first.
    """

    hugging_face: str
    permuted: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()


_ARCHITECTURES = {
    "llama": _Architecture(
        "LlamaForCausalLM", permuted=("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
    ),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM"),
    "gpt2": _Architecture("GPT2LMHeadModel", transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
}


def open_gguf(path: Path) -> OpenModel:
    """Open a GGUF file; weights are read when asked for, quantised ones as fp32.

    Raises:
        JinguError: the `gguf` package is missing, or the file is damaged, or of an architecture or a quantisation
            that is not known here, or its tensors are not those that its metadata describe.
    """
    library = package("gguf", "reading GGUF files", str(path))
    try:
        metadata, infos = _read_header(path, library)
        config = _hf_config(metadata, infos, path)
    except (ValueError, struct.error, OSError) as error:
        raise JinguError(
            f"the GGUF file is damaged or cut short ({error}).", where=path, fix="Fetch the file again."
        ) from error
    name = metadata["general.architecture"]
    opened = open_described(path, path, config, lambda _, shapes: _weights(path, library, infos, name, config, shapes))
    folder = Path(tempfile.mkdtemp(prefix="jingu-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        write_tokenizer(metadata, opened.spec.context, folder)
    except JinguError as error:
        return replace(opened, no_tokenizer=error.what)
    return replace(opened, tokenizer_folder=folder)


def _weights(
    path: Path, library: ModuleType, infos: Mapping[str, Header], name: str, config: Metadata, expected: Shapes
) -> Weights:
    """The file's tensors by the names that are expected; what nobody expects keeps its own.

    Args:
        name: of the architecture.
        config: Hugging Face's.
    """
    architecture = _ARCHITECTURES[name]
    number = {name: kind for kind, name in library.MODEL_ARCH_NAMES.items()}[name]
    table = library.get_tensor_name_map(number, _layers(config))
    places, known = {}, {"rope_freqs.weight"}
    for wanted in expected:
        expert = _EXPERT.search(wanted)
        theirs = table.get_name(_EXPERT.sub(".experts.", wanted), try_suffixes=(".weight", ".bias"))
        if theirs in infos:
            known.add(theirs)
            places[wanted] = infos[theirs] if expert is None else _slice(infos[theirs], int(expert[1]))
    places |= {name: info for name, info in infos.items() if name not in known}
    shapes = {
        name: torch.Size(reversed(info.shape)) if name.endswith(architecture.transposed) else info.shape
        for name, info in places.items()
    }

    def read(name: str) -> Tensor:
        tensor = _read(path, library, places[name])
        if name.endswith(architecture.transposed):
            return tensor.t()
        if name.endswith(architecture.permuted):
            heads = (None if "q_proj" in name else config.get("num_key_value_heads")) or config["num_attention_heads"]
            return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    largest = max(infos.values(), key=lambda info: info.bytes)
    return Weights(shapes, read, largest.dtype if isinstance(largest.dtype, torch.dtype) else torch.float32)


def _read(path: Path, library: ModuleType, info: Header) -> Tensor:
    """A tensor as it lies in the file, dequantised a few rows at a time."""
    if isinstance(info.dtype, torch.dtype):
        return read_at(path, info.begin, info.shape, info.dtype)
    kind = library.GGMLQuantizationType[info.dtype]
    whole = torch.empty(info.shape)
    rows = whole.view(-1, info.shape[-1])
    width = info.bytes // max(1, len(rows))
    step = max(1, ELEMENTS // max(1, info.shape[-1]))
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        raw = read_at(path, info.begin + first * width, torch.Size((len(part), width)), torch.uint8)
        part.copy_(torch.from_numpy(library.quants.dequantize(raw.numpy(), kind)))
    return whole


def _slice(info: Header, number: int) -> Header:
    """One expert's matrix of those that the file keeps in one tensor."""
    size = info.bytes // info.shape[0]
    return Header(info.shape[1:], info.dtype, info.begin + number * size, size)


# The header


class _Cursor:
    """Reads values one after another; ValueError or struct.error where the file ends."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.place = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.place)
        self.place += struct.calcsize(f"<{code}")
        # 1e-5 was written, not 9.99999974e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def text(self) -> str:
        size = self.scalar("Q")
        self._room(size)
        self.place += size
        return self._data[self.place - size : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            self._room(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"an array of the unknown type {kind}")
        code = f"<{_SCALARS[kind]}"
        self._room(struct.calcsize(code) * count)
        values = np.frombuffer(self._data, code, count, self.place)
        self.place += values.nbytes
        return values.tolist()

    def _room(self, size: int) -> None:
        if size > len(self._data) - self.place:
            raise ValueError("a value reaches beyond the end")


def _read_header(path: Path, library: ModuleType) -> tuple[dict[str, Any], dict[str, Header]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor, size = _Cursor(data), len(data)
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.place = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"format version {version}, not 2 or 3")
        tensors, values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(values):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.scalar("I"))
        found = [(cursor.text(), *_read_info(cursor)) for _ in range(tensors)]
        start = cursor.place
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    start += -start % alignment
    infos: dict[str, Header] = {}
    for name, shape, number, offset in found:
        kind = library.GGMLQuantizationType(number)
        block, width = library.GGML_QUANT_SIZES[kind]
        if name in infos or shape[-1] % block:
            raise ValueError(f"tensor {name} appears twice, or its rows are no whole blocks")
        dtype = _PLAIN.get(kind.name, kind.name)
        infos[name] = Header(shape, dtype, start + offset, prod(shape) // block * width)
        if infos[name].begin + infos[name].bytes > size:
            raise ValueError(f"tensor {name} reaches beyond the end")
    _check_types(path, library, infos)
    return metadata, infos


def _read_info(cursor: _Cursor) -> tuple[torch.Size, int, int]:
    """Shape, type and offset of a tensor."""
    dims = cursor.scalar("I")
    if not 1 <= dims <= 4:
        raise ValueError(f"a tensor of {dims} dims")
    shape = [cursor.scalar("Q") for _ in range(dims)]
    if not 0 < prod(shape) < 1 << 60:
        raise ValueError(f"a tensor of shape {shape}")
    return torch.Size(reversed(shape)), cursor.scalar("I"), cursor.scalar("Q")


def _check_types(path: Path, library: ModuleType, infos: Mapping[str, Header]) -> None:
    """Refuse quantisations that the library cannot undo."""
    unknown = []
    for name in sorted({info.dtype for info in infos.values() if isinstance(info.dtype, str)}):
        kind = library.GGMLQuantizationType[name]
        try:
            library.quants.dequantize(np.zeros((1, library.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            unknown.append(name)
    if unknown:
        raise JinguError(
            f"the weights are quantised as {', '.join(unknown)}, which cannot be undone here.",
            where=path,
            fix="Use a file with another quantisation (Q4_K, Q8_0, F16 and many others are read).",
        )


# The model


def _hf_config(metadata: Metadata, infos: Mapping[str, Header], path: Path) -> dict[str, Any]:
    """The config that Hugging Face would have of this model."""
    name = str(metadata.get("general.architecture"))
    experts = metadata.get(f"{name}.expert_count") or 0
    if name not in _ARCHITECTURES or (experts and name not in ("llama", "qwen3moe")):
        near = get_close_matches(name, _ARCHITECTURES, n=3, cutoff=0.4) or list(_ARCHITECTURES)
        with_experts = " with experts" if name in _ARCHITECTURES else ""
        raise JinguError(
            f"the architecture {name}{with_experts} is not one that jingu reads from GGUF.",
            where=path,
            fix=f"It reads {', '.join(near)}; other models it takes as Hugging Face folders.",
        )
    if "token_embd.weight" not in infos:
        raise ValueError("there is no token_embd.weight")

    def get(key: str) -> Any:
        return metadata.get(f"{name}.{key}")

    tokens = {"bos": "bos", "eos": "eos", "pad": "padding"}
    config = {
        "architectures": ["MixtralForCausalLM" if experts and name == "llama" else _ARCHITECTURES[name].hugging_face],
        "vocab_size": infos["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in infos,
        **{f"{key}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id") for key, theirs in tokens.items()},
    }
    if name == "gpt2":
        config |= {
            "n_positions": get("context_length"),
            "n_embd": get("embedding_length"),
            "n_layer": get("block_count"),
            "n_head": get("attention.head_count"),
            "n_inner": get("feed_forward_length"),
            "layer_norm_epsilon": get("attention.layer_norm_epsilon"),
        }
    else:
        config |= {
            "max_position_embeddings": get("context_length"),
            "hidden_size": get("embedding_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv"),
            "head_dim": get("attention.key_length") or get("rope.dimension_count"),
            "intermediate_size": get("feed_forward_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "rope_theta": get("rope.freq_base"),
            "rope_scaling": _rope_scaling(metadata, name, infos, path),
            "attention_bias": "blk.0.attn_q.bias" in infos,
            "mlp_bias": "blk.0.ffn_up.bias" in infos,
            "num_local_experts": experts or None,
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": get("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    config = {key: value for key, value in config.items() if value is not None}
    if not isinstance(_layers(config), int) or _layers(config) > len(infos):
        raise ValueError(f"{_layers(config)} layers in {len(infos)} tensors")
    return config


def _layers(config: Metadata) -> Any:
    return config.get("num_hidden_layers", config.get("n_layer"))


def _rope_scaling(metadata: Metadata, name: str, infos: Mapping[str, Header], path: Path) -> dict[str, Any] | None:
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in infos:
        return _llama3_scaling(path, infos["rope_freqs.weight"], float(metadata.get(f"{name}.rope.freq_base", 10000.0)))
    if kind == "none":
        return None
    scaling = {
        "rope_type": kind,
        "factor": metadata.get(f"{name}.rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get(f"{name}.rope.scaling.original_context_length"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(path: Path, info: Header, base: float) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, of which the file holds only what each frequency is divided by."""
    found = read_at(path, info.begin, info.shape, _PLAIN["F32"]).double()
    low, high, context, factor = 1.0, 4.0, 8192, float(found.max())
    turns = context * base ** -(torch.arange(len(found), dtype=torch.float64) / len(found)) / (2 * torch.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(found, 1 / ((1 - share) / factor + share), rtol=1e-4):
        raise JinguError(
            "the file scales rotary positions by factors (rope_freqs.weight) that are not those of Llama 3.",
            where=path,
            fix="Use the model's Hugging Face folder.",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
