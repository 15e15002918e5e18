"""Reading GGUF files, which contain metadata, a tokenizer and weights (usually quantized) in one file.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, metadata, tensor infos,
padding, tensors. The `gguf` package maps tensor names and dequantizes. The header is parsed here, because the package
trusts the sizes in a damaged file and takes seconds for a large vocabulary.
"""

from __future__ import annotations

import atexit
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jingu.checkpoint.mapped_files import map_tensor
from jingu.errors import JinguError
from jingu.formats.gguf_names import (
    ARCHITECTURES,
    METADATA,
    architecture_entries,
    full_key,
    gguf_mappings,
    join_latents,
    parts_of,
)
from jingu.formats.gguf_parts import USE_FOLDER, FileContents, merge
from jingu.formats.huggingface import StoredWeights, open_from_config
from jingu.formats.safetensors import CHUNK_ELEMENTS, TensorLocation
from jingu.formats.stored_model import StoredModel
from jingu.formats.unread import unread_architecture
from jingu.model.families import FAMILIES
from jingu.model.spec import ModelSpec
from jingu.runtime.files import temporary_folder
from jingu.runtime.log import log_warning
from jingu.text.corpus_file import import_optional
from jingu.text.gguf_tokenizer import write_gguf_tokenizer

# Value types of the metadata: scalars with their `struct` codes, strings and arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Tensor types that need no dequantization.
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# Tensor types with 16 equidistant levels per block of 32 elements of a row, as in `--precision int4`.
_INT4_TYPES = ("Q4_0", "Q4_1", "Q4_K")

# Tensors from which keys of the config are computed. They are no parameters.
_CONFIG_TENSORS = ("rope_freqs.weight",)
# Copies of embedding and head in layers of multi-token prediction.
_COPIES = (".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight")

Metadata = Mapping[str, Any]

# Where no architecture says otherwise, keys of config.json that say whether there are biases.
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}


def metadata_keys(name: str) -> dict[str, str]:
    """Return the keys of config.json whose values an architecture of GGUF has, with its keys."""
    table = ARCHITECTURES[name]
    changes = architecture_entries(name, "changes")
    keys = {**table.get("keys", ARCHITECTURES["llama"]["keys"]), **changes}
    return {key: gguf_key for key, gguf_key in keys.items() if gguf_key}


def has_head_size(name: str) -> bool:
    """Return whether files of an architecture have the size of attention heads."""
    return "num_attention_heads" in metadata_keys(name)


def open_gguf(path: Path) -> StoredModel:
    """Open a GGUF file. Weights are read lazily; quantized weights are dequantized to fp32.

    Raises:
        JinguError: the `gguf` package is not installed; or the file is damaged, has an architecture or quantization
            that jingu does not support, or its tensors differ from those that its metadata describe.
    """
    library = import_optional("gguf", "reading GGUF files", str(path))
    try:
        metadata, infos = _read_header(path, library)
        if metadata.get("general.type") == "adapter":
            fix = "Name the base model, and this file with `--adapter NAME=FILE`."
            raise JinguError("the file has adapters, and no model.", where=path, fix=fix)
        config = hf_config(metadata, infos, path, _read_divisors(path, infos))
        _check_metadata(metadata, config, library, path)
    except (ValueError, struct.error, OSError) as error:
        raise _damaged(path, error) from error
    name = metadata["general.architecture"]
    model = open_from_config(
        path,
        path,
        config,
        lambda _, mappings: _open_weights(
            path, library, _without_shared_kv(infos, mappings[0].spec), _numbers_by_name(metadata)
        ),
        lambda spec: gguf_mappings(spec, name),
    )
    matrices = [info for key, info in infos.items() if key.startswith("blk.")]
    num_4bit = sum(info.shape.numel() for info in matrices if info.dtype in _INT4_TYPES)
    # The config is not that of a folder, but made for the reader.
    model = replace(model, config=model.special_token_ids)
    model = replace(model, has_int4_blocks=2 * num_4bit > sum(info.shape.numel() for info in matrices))
    # The tokenizer is part of the file. Write it to a temporary folder, which is deleted when the process ends.
    until_exit = ExitStack()
    atexit.register(until_exit.close)
    folder = until_exit.enter_context(temporary_folder("jingu-tokenizer-"))
    try:
        write_gguf_tokenizer(metadata, model.spec.max_position_embeddings, folder)
    except JinguError as error:
        return replace(model, tokenizer_problem=error.what)
    return replace(model, tokenizer_folder=folder)


def _numbers_by_name(metadata: Metadata) -> dict[str, float]:
    """Return the parameters that are numbers in the metadata, one for each layer, by the names of their mappings."""
    name = metadata["general.architecture"]
    by_key = {key: metadata.get(full_key(name, key)) for key in ARCHITECTURES[name].get("numbers", {})}
    layers = range(metadata[f"{name}.block_count"])
    return {
        f"blk.{layer}.{key}": values[layer] if isinstance(values, list) else values
        for key, values in by_key.items()
        for layer in layers
        if values is not None
    }


def _without_shared_kv(infos: Mapping[str, TensorLocation], spec: ModelSpec) -> dict[str, TensorLocation]:
    """Return the tensors without those of keys and values that no layer uses: it shares those of an earlier layer."""
    sharing = [number for number, layer in enumerate(spec.layers) if layer.shares_kv]
    names = {f"blk.{number}.{part}.weight" for number in sharing for part in ("attn_k", "attn_v", "attn_k_norm")}
    return {name: info for name, info in infos.items() if name not in names}


def _open_weights(
    path: Path, library: ModuleType, infos: Mapping[str, TensorLocation], numbers: Mapping[str, float]
) -> StoredWeights:
    """Open the file's tensors.

    Args:
        infos: location of each tensor in the file, by its name.
        numbers: parameters that are numbers in the metadata.
    """
    tensors = {name: info for name, info in infos.items() if name not in _CONFIG_TENSORS and not name.endswith(_COPIES)}
    shapes = {name: info.shape for name, info in tensors.items()}
    shapes |= dict.fromkeys(numbers, torch.Size((1,)))
    for name in [name for name in tensors if name.endswith(".attn_k_b.weight")]:
        keys, values = shapes.pop(name), shapes.pop(name.replace("attn_k_b", "attn_v_b"))
        joint = join_latents(torch.empty(keys, device="meta"), torch.empty(values, device="meta"))
        shapes[name.replace("attn_k_b", "attn_kv_b")] = joint.shape

    def read(name: str, expert: int | None = None) -> Tensor:
        if name in numbers:
            return torch.tensor([numbers[name]])
        if name not in tensors:
            return join_latents(
                read(name.replace("attn_kv_b", "attn_k_b")), read(name.replace("attn_kv_b", "attn_v_b"))
            )
        info = tensors[name]
        return _read_tensor(path, library, info if expert is None else info.part(expert))

    largest = max(infos.values(), key=lambda info: info.bytes)
    return StoredWeights(shapes, read, largest.dtype if isinstance(largest.dtype, torch.dtype) else torch.float32)


def _read_tensor(path: Path, library: ModuleType, info: TensorLocation) -> Tensor:
    """Return a tensor in the file's arrangement. A quantized one is dequantized to fp32, a few rows at a time."""
    if isinstance(info.dtype, torch.dtype):
        return map_tensor(path, info.begin, info.shape, info.dtype)
    kind = library.GGMLQuantizationType[info.dtype]
    value = torch.empty(info.shape)
    rows = value.view(-1, info.shape[-1])
    width = info.bytes // max(1, len(rows))
    step = max(1, CHUNK_ELEMENTS // max(1, info.shape[-1]))
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        raw = map_tensor(path, info.begin + first * width, torch.Size((len(part), width)), torch.uint8)
        part.copy_(torch.from_numpy(library.quants.dequantize(raw.numpy(), kind)))
    return value


def open_tensors(path: Path, library: ModuleType) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]:
    """Return the metadata of a GGUF file, and for each of its tensors a function that reads it.

    Raises:
        JinguError: the file is damaged, or has a quantization that is not supported.
    """
    try:
        metadata, infos = _read_header(path, library)
    except (ValueError, struct.error, OSError) as error:
        raise _damaged(path, error) from error
    return metadata, {name: partial(_read_tensor, path, library, info) for name, info in infos.items()}


def _damaged(path: Path, error: Exception) -> JinguError:
    what = f"the GGUF file is damaged or cut short ({error})."
    return JinguError(what, where=path, fix="Fetch the file again.")


# The header


class _Cursor:
    """Reads the values of a header in sequence. Raises ValueError or struct.error at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(f"<{code}")
        if code == "f":
            # The shortest decimal that has this fp32 value: 1e-05 rather than 9.99999974e-06.
            return float(str(np.float32(value)))
        return value

    def text(self) -> str:
        size = self.scalar("Q")
        self._check_room(size)
        self.position += size
        return self._data[self.position - size : self.position].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            self._check_room(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"an array of the unknown type {kind}")
        code = f"<{_SCALARS[kind]}"
        self._check_room(struct.calcsize(code) * count)
        values = np.frombuffer(self._data, code, count, self.position)
        self.position += values.nbytes
        return values.tolist()

    def _check_room(self, size: int) -> None:
        if size > len(self._data) - self.position:
            raise ValueError("a value extends beyond the end of the file")


def _read_header(path: Path, library: ModuleType) -> tuple[dict[str, Any], dict[str, TensorLocation]]:
    """Return the metadata and the location of each tensor by name.

    Raises:
        ValueError, struct.error: the file is damaged or cut short.
        JinguError: the library cannot dequantize a tensor.
    """
    # Parse the header.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        size = len(data)
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"format version {version}, not 2 or 3")
        num_tensors = cursor.scalar("Q")
        num_values = cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.scalar("I"))
        entries = [(cursor.text(), *_read_info(cursor)) for _ in range(num_tensors)]
        start = cursor.position
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    # Compute the location of each tensor. Offsets are relative to the first tensor, which is aligned.
    start += -start % alignment
    infos: dict[str, TensorLocation] = {}
    for name, shape, number, offset in entries:
        kind = library.GGMLQuantizationType(number)
        block_size, block_bytes = library.GGML_QUANT_SIZES[kind]
        if name in infos or shape[-1] % block_size:
            raise ValueError(f"tensor {name} appears twice, or its rows are not whole blocks")
        dtype = _TORCH_DTYPES.get(kind.name, kind.name)
        infos[name] = TensorLocation(shape, dtype, start + offset, prod(shape) // block_size * block_bytes)
        if infos[name].begin + infos[name].bytes > size:
            raise ValueError(f"tensor {name} extends beyond the end of the file")
    _check_types(path, library, infos)
    return metadata, infos


def _read_info(cursor: _Cursor) -> tuple[torch.Size, int, int]:
    """Return shape, type number and offset of a tensor. GGUF lists the dims in reverse order."""
    dims = cursor.scalar("I")
    if not 1 <= dims <= 4:
        raise ValueError(f"a tensor of {dims} dims")
    shape = [cursor.scalar("Q") for _ in range(dims)]
    if not 0 < prod(shape) < 1 << 60:
        raise ValueError(f"a tensor of shape {shape}")
    return torch.Size(reversed(shape)), cursor.scalar("I"), cursor.scalar("Q")


def _check_types(path: Path, library: ModuleType, infos: Mapping[str, TensorLocation]) -> None:
    """Raise JinguError for quantization formats that the library cannot dequantize."""
    unsupported_types = []
    for name in sorted({info.dtype for info in infos.values() if isinstance(info.dtype, str)}):
        kind = library.GGMLQuantizationType[name]
        try:
            library.quants.dequantize(np.zeros((1, library.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            unsupported_types.append(name)
    if unsupported_types:
        raise JinguError(
            f"the weights are quantized as {', '.join(unsupported_types)}, which jingu cannot dequantize.",
            where=path,
            fix="Use a file with another quantization (Q4_K, Q8_0, F16 and many others are supported).",
        )


# The model


def hf_config(
    metadata: Metadata, infos: Mapping[str, TensorLocation], path: Path, divisors: Tensor | None
) -> dict[str, Any]:
    """Return the contents of the config.json that a Hugging Face folder of this model would have.

    Args:
        divisors: what rotary frequencies are divided by (rope_freqs.weight); None: the file does not say.
    """
    name = str(metadata.get("general.architecture"))
    experts = metadata.get(f"{name}.expert_count") or 0
    if name not in ARCHITECTURES or (experts and "expert_count" not in metadata_keys(name).values()):
        with_experts = " with experts" if name in ARCHITECTURES else ""
        what = f"jingu does not support the architecture {name}{with_experts} in GGUF"
        if name in METADATA["unread"]:
            what = f"{what}. Missing: {METADATA['unread'][name]}"
        raise unread_architecture(what, [name], path, FAMILIES)
    if "token_embd.weight" not in infos:
        raise ValueError("there is no token_embd.weight")

    def get(key: str) -> Any:
        return metadata.get(full_key(name, key))

    table = ARCHITECTURES[name]
    variant = find_variant(name, get)
    config = {
        "architectures": [variant["hugging_face"]],
        "vocab_size": infos["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in infos,
        "norm_topk_prob": True,
        **architecture_entries(name, "constants"),
        **variant.get("constants", {}),
    }
    config |= {key: get(gguf_key) for key, gguf_key in metadata_keys(name).items() if get(gguf_key) is not None}
    # The layers of multi-token prediction are counted with the others.
    if config.get("num_nextn_predict_layers"):
        config["num_hidden_layers"] -= config["num_nextn_predict_layers"]
    for key, gguf_key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        config[f"{key}_token_id"] = metadata.get(f"tokenizer.ggml.{gguf_key}_token_id")
    if has_head_size(name):
        config |= {**_head_config(table, get), "rope_scaling": _rope_scaling(metadata, name, divisors, path)}
    config |= {key: f"blk.0.{tensor}" in infos for key, tensor in table.get("biases", _BIASES).items()}
    if "mixer_head_size" in table:
        config[table["mixer_head_size"]] = (get("ssm.inner_size") or 0) // (get("ssm.time_step_rank") or 1)
    try:
        for part in parts_of(name):
            config = merge(config, part.read(FileContents(get, infos, divisors, config["vocab_size"])))
    except JinguError as error:
        raise JinguError(error.what, where=path, fix=error.fix) from error
    config = {key: value for key, value in config.items() if value is not None}
    if not isinstance(_layers(config), int) or _layers(config) > len(infos):
        raise ValueError(f"{_layers(config)} layers in {len(infos)} tensors")
    return config


def find_variant(name: str, get: Callable[[str], Any]) -> Mapping[str, Any]:
    """Return the entry in gguf.toml of a file: that of its architecture, or of a variant whose metadata it has.

    Args:
        get: returns a value of the metadata.
    """
    table: Mapping[str, Any] = ARCHITECTURES[name]
    for variant in table.get("variants", ()):
        if all(get(key) if value is True else (get(key) or 0) == value for key, value in variant["when"].items()):
            return {**table, **variant}
    return table


def _head_config(table: Mapping[str, Any], get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the keys of config.json about the size of heads, their rotated share, their scale, and their windows.

    Args:
        table: the architecture's entry in gguf.toml.
        get: returns a value of the metadata.
    """
    heads, width = get("attention.head_count") or 1, get("embedding_length")
    size = get("attention.key_length") or (None if table.get("has_partial_rotary") else get("rope.dimension_count"))
    keys: dict[str, Any] = {"head_dim": size}
    if table.get("has_partial_rotary"):
        keys["head_dim"] = size = size or width // heads
        keys["partial_rotary_factor"] = (get("rope.dimension_count") or size) / size
    if "query_scale_layers" in table:
        keys["query_pre_attn_scalar"] = width // heads if get("block_count") == table["query_scale_layers"] else size
    kv_heads = get("attention.head_count_kv")
    if isinstance(kv_heads, list) and "without_attention" in table:
        keys["num_key_value_heads"] = max(kv_heads)
        keys["layer_types"] = ["full_attention" if number else table["without_attention"] for number in kv_heads]
        return keys
    # Which layers have windows: one of so many has none, or a flag for each.
    pattern = get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        keys["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in pattern]
    else:
        keys["sliding_window_pattern"] = pattern
    return keys


def _check_metadata(metadata: Metadata, config: Metadata, library: ModuleType, path: Path) -> None:
    """Raise JinguError if a metadata key that jingu does not read changes the numbers; warn of unknown keys.

    Args:
        config: the model's config in Hugging Face's form, from `hf_config`.
    """
    name = metadata["general.architecture"]
    known_keys = {*metadata_keys(name).values(), *METADATA["harmless"], *ARCHITECTURES[name].get("numbers", ())}
    known_keys |= {key for part in parts_of(name) for key in part.keys}
    variant = find_variant(name, lambda key: metadata.get(f"{name}.{key}"))
    constants = {**architecture_entries(name, "fixed"), **variant.get("fixed", {})}
    values = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    in_library = {key.removeprefix("{arch}.") for key in _library_keys(library.Keys)}
    for key in sorted(values.keys() - (known_keys - constants.keys())):
        neutral = {**METADATA["neutral"], **constants}.get(key)
        value = values[key]
        if value == neutral or (neutral is None and not value):
            continue
        if neutral is None and key not in in_library:
            log_warning(f"{path}: jingu does not know the metadata {name}.{key} = {str(value)[:40]}, and ignores it.")
            continue
        raise JinguError(
            f"the metadata {name}.{key} = {str(value)[:40]} changes the model's numbers, and jingu does not read it.",
            where=path,
            fix=USE_FOLDER,
        )
    head_dim = config.get("head_dim")
    is_partial = head_dim and values.get("rope.dimension_count", head_dim) != head_dim
    table = ARCHITECTURES[name]
    if is_partial and not (table.get("has_partial_rotary") or table.get("has_proportional_rotary")):
        raise JinguError(
            f"only {values['rope.dimension_count']} of a head's {head_dim} dims are rotated, which jingu does not "
            "support in GGUF.",
            where=path,
            fix=USE_FOLDER,
        )


def _library_keys(table: type) -> Iterator[str]:
    """Yield the keys of metadata in a class of the package, and in the classes within it."""
    for value in vars(table).values():
        if isinstance(value, type):
            yield from _library_keys(value)
        elif isinstance(value, str):
            yield value


def _layers(config: Metadata) -> Any:
    return config.get("num_hidden_layers", config.get("n_layer"))


def _read_divisors(path: Path, infos: Mapping[str, TensorLocation]) -> Tensor | None:
    """Return what the file divides rotary frequencies by; None: it does not."""
    info = infos.get("rope_freqs.weight")
    return None if info is None else map_tensor(path, info.begin, info.shape, _TORCH_DTYPES["F32"]).double()


def _rope_scaling(metadata: Metadata, name: str, divisors: Tensor | None, path: Path) -> dict[str, Any] | None:
    """Return the `rope_scaling` of the architecture `name` for config.json; None if frequencies are not scaled."""
    # Older files have a factor of linear scaling under a key of its own.
    legacy = metadata.get(f"{name}.rope.scale_linear")
    factor = metadata.get(f"{name}.rope.scaling.factor") or legacy
    kind = metadata.get(f"{name}.rope.scaling.type") or ("linear" if factor not in (None, 0.0, 1.0) else "none")
    if divisors is not None and not ARCHITECTURES[name].get("has_proportional_rotary"):
        return llama3_scaling(path, divisors, float(metadata.get(f"{name}.rope.freq_base", 10000.0)))
    if kind == "none":
        return None
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": metadata.get(f"{name}.rope.scaling.original_context_length"),
        "truncate": ARCHITECTURES[name].get("yarn_truncate") if kind == "yarn" else None,
    }
    return {key: value for key, value in scaling.items() if value is not None}


def llama3_scaling(path: Path, divisors: Tensor, base: float) -> dict[str, Any]:
    """Return the rotary scaling of Llama 3.1 and later, from the tensor by which frequencies are divided.

    Args:
        divisors: that tensor, rope_freqs.weight.
        base: base of the rotary frequencies.

    Raises:
        JinguError: the tensor is not that of a scaling by Llama 3's rule.
    """
    # Llama 3 and 4 share the first value and the last, and 3 and 4 have one of the others each. The factor is the
    # largest divisor.
    low = 1.0
    context = 8192
    factor = float(divisors.max())
    # The full rotations of a frequency within the original context decide how much of the factor applies to it.
    turns = context * base ** -(torch.arange(len(divisors), dtype=torch.float64) / len(divisors)) / (2 * torch.pi)
    for high in (4.0, 1.0):
        interpolation = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns > low).double()
        if torch.allclose(divisors, 1 / ((1 - interpolation) / factor + interpolation), rtol=1e-4):
            break
    else:
        raise JinguError(
            "the file scales rotary frequencies by factors (rope_freqs.weight) that are not those of Llama 3.",
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
