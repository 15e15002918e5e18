"""Writing GGUF files, which llama.cpp, Ollama and LM Studio run (format: see `jingu.formats.gguf`).

The `gguf` package names the tensors, and quantizes where it has the format; llama.cpp's own quantizer does the others
(k-quants), from a temporary file in fp16.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.formats.description import build_config
from jingu.formats.gguf import has_head_size, hf_config, metadata_keys
from jingu.formats.gguf_check import check_gguf
from jingu.formats.gguf_names import (
    ARCHITECTURES,
    architecture_entries,
    full_key,
    gguf_mappings,
    parts_of,
    split_latents,
    written_classes,
)
from jingu.formats.gguf_write import OutputTensor, write_gguf
from jingu.formats.huggingface import find_family, report_broken_weights
from jingu.formats.importance import Importance, measure_importance
from jingu.formats.safetensors import TensorLocation
from jingu.formats.stored_model import PackingReader, StoredModel, normalize_head
from jingu.model.components import LinearScaling, Llama3Scaling, RotaryPositions, YarnScaling
from jingu.model.families import FAMILIES, equivalent_spec
from jingu.model.families.name_map import TensorMapping
from jingu.model.feed_forward_specs import Experts
from jingu.model.rotary import rotary_frequencies
from jingu.model.spec import ModelSpec, replace_fields
from jingu.runtime.files import fsync_path, write_error, write_text_atomically
from jingu.runtime.log import log_info
from jingu.tables import flatten
from jingu.text.corpus_file import import_optional
from jingu.text.gguf_metadata import tokenizer_metadata
from jingu.text.tokenizer import Tokenizer

# The dtypes of a file, with GGUF's name of the tensor type. The package quantizes the first ones; of the others the
# name is that of llama.cpp's mixture of types.
PACKAGE_TYPES = {
    "fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0",
    "q5_1": "Q5_1", "mxfp4": "MXFP4",
}  # fmt: skip
LLAMA_CPP_TYPES = {
    "q6_k": "MOSTLY_Q6_K", "q5_k_m": "MOSTLY_Q5_K_M", "q5_k_s": "MOSTLY_Q5_K_S", "q4_k_m": "MOSTLY_Q4_K_M",
    "q4_k_s": "MOSTLY_Q4_K_S", "q3_k_m": "MOSTLY_Q3_K_M", "q2_k": "MOSTLY_Q2_K", "iq4_nl": "MOSTLY_IQ4_NL",
    "iq4_xs": "MOSTLY_IQ4_XS",
}  # fmt: skip
# Elements of a row that share scales in llama.cpp's types, apart from iq4_nl.
_SUPERBLOCK = 256
# What llama.cpp has in fp32 in every file and computes with in no other type, beside vectors and all but weights.
_FP32_NAMES = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "_norm.weight", "position_embd.weight", "shortconv.conv.weight",
    "ssm_conv1d.weight", "ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight",
)  # fmt: skip
_PHI3_TOKENS = {"<s>", "</s>", "<unk>", "<|endoftext|>"}
# The matrix of latents' keys and values, which is divided.
_LATENTS = "attn_kv_b.weight"

_AS_FOLDER = "Export the model as a Hugging Face folder (--to FOLDER)."

# Fields of a spec that change what it computes, beside those of its layers and norms.
_COMPUTED = (
    "vocab_size", "hidden_size", "num_layers", "embedding_scale",
    "logit_scale", "logit_softcap", "embedding_norm", "normalize_lm_head", "scale_lm_head", "per_layer_inputs",
    "head_bias",
)  # fmt: skip


def export_gguf(
    model: StoredModel, to: Path, dtype: str = "auto", check: bool = False, calibrate: Path | None = None
) -> None:
    """Write a model as a GGUF file, and a Modelfile for Ollama beside it. Both are complete or not written at all.

    Args:
        dtype: a key of `PACKAGE_TYPES` or `LLAMA_CPP_TYPES`; auto: the dtype of most stored weights, and
            matrices that are stored in MXFP4 as they are.
        check: whether llama.cpp opens the file, and its token ids and log-probabilities are compared with jingu's, and
            weights that contain NaN or infinity are an error; otherwise they are logged. A file that differs is not
            kept.
        calibrate: file of a text, from which the importance matrix of llama.cpp's types is computed.

    Raises:
        JinguError: the file exists, a package is missing, the check fails, or llama.cpp has no such model, tokenizer or
            format.
    """
    library = import_optional("gguf", "writing GGUF files", str(to))
    if to.exists():
        raise JinguError("the file exists already.", where=to, fix="Delete it first, or choose another name.")
    model, dtype = _keep_blocks(model, dtype)
    model = _as_llama_cpp(model, to)
    spec = model.spec
    name = find_architecture(spec, to)
    tokenizer = Tokenizer.load(model.tokenizer())
    metadata = _model_metadata(spec, name, model, to) | tokenizer_metadata(tokenizer, spec.vocab_size)
    metadata |= {"general.name": _model_name(to, tokenizer)} | _end_tokens(model, tokenizer)
    fp32 = library.GGMLQuantizationType.F32
    tensors = _output_tensors(spec, name, model, fp32, library, to)
    _check_round_trip(spec, name, metadata, [tensor.name for tensor in tensors], to)
    metadata |= _number_metadata(spec, name, model, library, to)
    odd_matrices = [tensor for tensor in tensors if len(tensor.shape) > 1 and tensor.shape[-1] % _SUPERBLOCK]
    if odd_matrices and dtype in LLAMA_CPP_TYPES and dtype != "iq4_nl":
        log_info(
            f"{to}: {len(odd_matrices)} matrices get another type than {dtype}, which llama.cpp chooses, because their "
            f"rows have no multiple of {_SUPERBLOCK} elements (such as {odd_matrices[0].name})."
        )

    def write(file: Path, package_dtype: str) -> None:
        broken = _write_file(file, spec, name, model, metadata, PACKAGE_TYPES[package_dtype], library)
        report_broken_weights(broken, package_dtype, to, check=check)

    try:
        with partial_file(to) as partial:
            if dtype in PACKAGE_TYPES:
                write(partial, dtype)
            else:
                importance = {} if calibrate is None else measure_importance(model, calibrate)
                by_gguf_name = _importance_by_gguf_name(spec, name, importance, library, to)
                _quantize_with_llama_cpp(partial, to, dtype, by_gguf_name, lambda file: write(file, "fp16"))
            if check:
                check_gguf(partial, model, dtype)
    except OSError as error:
        raise write_error(error, to) from error
    write_text_atomically(to.with_name("Modelfile"), _modelfile(to, model))


def _keep_blocks(model: StoredModel, dtype: str) -> tuple[StoredModel, str]:
    """Return a model that gives matrices in MXFP4 only if the file keeps them so, and the dtype of other weights."""
    reader = model.read
    has_blocks = isinstance(reader, PackingReader) and bool(reader.block_names)
    if dtype == "auto":
        dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(model.dtype, "fp32")
        # Numbers in MXFP4 are exact in bf16.
        return model, "bf16" if has_blocks else dtype
    if isinstance(reader, PackingReader) and dtype != "mxfp4":
        model = replace(model, read=reader.read)
    return model, dtype


def _as_llama_cpp(model: StoredModel, to: Path) -> StoredModel:
    """Return a model as llama.cpp can describe it: of a known family, and without what it does not compute."""
    spec, read = equivalent_spec(model.spec), model.read
    if spec.normalize_lm_head != model.spec.normalize_lm_head:
        read = normalize_head(read)
    if spec.mtp_layers:
        log_info(f"{to}: the layers of multi-token prediction are left out, which llama.cpp does not use.")
        spec = spec.without_predictions()
    if spec.tie_word_embeddings and ARCHITECTURES[find_architecture(spec, to)].get("needs_head"):
        spec, read = spec.model_copy(update={"tie_word_embeddings": False}), _copy_embedding(read)
    return replace(model, spec=spec, read=read)


def _copy_embedding(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def read_copy(name: str, expert: int | None = None) -> Tensor:
        return read("embedding.weight" if name == "head.weight" else name, expert)

    return read_copy


@contextmanager
def partial_file(to: Path) -> Iterator[Path]:
    """Yield the path of a file that becomes `to` if the context ends without an error."""
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.{uuid4().hex}")
    try:
        yield partial
        fsync_path(partial)
        partial.replace(to)
    finally:
        partial.unlink(missing_ok=True)


def find_architecture(spec: ModelSpec, to: Path) -> str:
    """Return GGUF's name of the architecture of a model. Raises JinguError if llama.cpp would compute another model."""
    family = FAMILIES[spec.family]
    architecture = family.architectures[0]
    has_experts = _experts(spec) is not None
    names = [name for name, table in ARCHITECTURES.items() if architecture in written_classes(table)]
    if len(names) > 1:
        names = [name for name in names if ("expert_count" in metadata_keys(name).values()) == has_experts]
    table = ARCHITECTURES[names[0]] if names else {}
    problem, attention = "", spec.attention
    if spec.adapter is not None or spec.score_head:
        problem = "llama.cpp has no such model: it has adapters that cannot be merged, or a score head"
    elif not names:
        problem = f"jingu does not write {architecture} as GGUF"
    elif table.get("equal_heads") and attention.num_kv_heads != attention.num_heads:
        problem = "llama.cpp computes this architecture only with as many key-value heads as heads"
    elif attention.sliding_window is not None and attention.sliding_window < spec.max_position_embeddings:
        problem = f"llama.cpp ignores the window of {attention.sliding_window:,} tokens of this architecture"
    elif "folded" in table and spec.tie_word_embeddings and spec.embedding_scale != spec.logit_scale:
        problem = "llama.cpp has no scalars of embedding and logits for a tied head"
    elif has_experts and spec.experts is not None and _has_best_groups(spec.experts):
        problem = "llama.cpp scores groups of experts by their two best experts, and this model by the best one"
    if problem:
        raise JinguError(f"{problem}.", where=to, fix=_AS_FOLDER)
    return names[0]


def _experts(spec: ModelSpec) -> Experts | None:
    """Return the experts of a model; None: no layer has some."""
    return next((layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, Experts)), None)


def _has_best_groups(experts: Experts) -> bool:
    router = experts.router
    return router.type == "top_k" and router.num_groups > 1 and router.group_score == "best"


def _check_round_trip(spec: ModelSpec, name: str, metadata: dict[str, Any], names: list[str], to: Path) -> None:
    """Raise JinguError if the metadata describe another model, as llama.cpp has no key for what differs.

    Args:
        names: names of the file's tensors.
    """
    vocabulary = TensorLocation(torch.Size((spec.vocab_size, spec.hidden_size)), torch.float32, 0, 0)
    # Scaling by Llama 3's rule is in a tensor.
    infos = {each: vocabulary for each in names if each != "rope_freqs.weight"}
    config = hf_config({**metadata, "general.architecture": name}, infos, to, _proportional_divisors(spec))
    file_spec = replace_fields(spec, **ARCHITECTURES[name].get("folded", {}))
    both = [_computed_fields(each) for each in (file_spec, find_family(config, to).spec_from_hf(config))]
    differing = sorted(key for key in both[0].keys() | both[1].keys() if both[0].get(key) != both[1].get(key))
    if differing:
        key = differing[0]
        values = " instead of ".join(str(each.get(key)) for each in reversed(both))
        raise _refuse_model(f"this model: it would have {key} = {values}", to)


def _computed_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a spec that change what it computes, by their paths, rounded as in a file."""
    fields = {key: getattr(spec, key) for key in _COMPUTED}
    for number, layer in enumerate(spec.layers):
        window = layer.attention.sliding_window
        parts = layer.model_dump()
        if window is not None and window >= spec.max_position_embeddings:
            parts["attention"]["sliding_window"] = None
        if isinstance(layer.position, RotaryPositions) and isinstance(layer.position.scaling, Llama3Scaling):
            parts["position"]["scaling"] = None
        if not layer.has_attention:
            # What attention and its positions would be.
            del parts["attention"], parts["position"]
        elif isinstance(layer.position, RotaryPositions):
            # The number of pairs counts.
            size = layer.attention.head_dim
            parts["position"]["partial_rotary_factor"] = int(size * layer.position.partial_rotary_factor / 2)
        fields |= flatten(parts, f"layers.{number}.")
    fields |= flatten({"norm": spec.norm.model_dump()})
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in fields.items()}


# Metadata


def _model_metadata(spec: ModelSpec, name: str, model: StoredModel, to: Path) -> dict[str, Any]:
    """Return the metadata that describe the model."""
    keys = metadata_keys(name)
    config = build_config(spec, model.config, torch.float32)
    metadata: dict[str, Any] = {"general.type": "model"}
    values: dict[str, Any] = {gguf_key: config[key] for key, gguf_key in keys.items() if config.get(key) is not None}
    if has_head_size(name):
        size = spec.attention.head_dim
        rope_dims = spec.position.rotated_dims(size) if isinstance(spec.position, RotaryPositions) else size
        values |= {"rope.dimension_count": rope_dims, "attention.key_length": size, "attention.value_length": size}
    if "rope.freq_base_swa" in keys.values():
        window_positions = [layer.position for layer in spec.layers if layer.attention.sliding_window is not None]
        bases = [float(place.theta) for place in window_positions if isinstance(place, RotaryPositions)]
        if bases:
            values["rope.freq_base_swa"] = bases[0]
    values["vocab_size"] = spec.vocab_size
    values.setdefault("context_length", spec.max_position_embeddings)
    values.setdefault("block_count", spec.num_layers)
    # GPT-2's config leaves it out where it is four times the hidden size.
    values.setdefault("feed_forward_length", spec.default_layer.intermediate_size)
    if "attention.head_count_kv" in keys.values():
        values["attention.head_count_kv"] = spec.attention.num_kv_heads
        if "without_attention" in ARCHITECTURES[name]:
            counts = [layer.attention.num_kv_heads if layer.has_attention else 0 for layer in spec.layers]
            values["attention.head_count_kv"] = counts
    if "full_attention_interval" in keys.values():
        values["full_attention_interval"] = 1 + [layer.has_attention for layer in spec.layers].index(True)
    if "mixer_head_size" in ARCHITECTURES[name]:
        values["ssm.inner_size"] = config[ARCHITECTURES[name]["mixer_head_size"]] * values["ssm.time_step_rank"]
    experts = _experts(spec)
    if experts is not None:
        values["expert_count"] = experts.num_experts
        values["expert_feed_forward_length"] = experts.intermediate_size
        if experts.shared_intermediate_size:
            values["expert_shared_feed_forward_length"] = experts.shared_intermediate_size
    values |= architecture_entries(name, "fixed")
    variants = ARCHITECTURES[name].get("variants", ())
    class_name = FAMILIES[spec.family].architectures[0]
    variant = next((variant for variant in variants if variant["hugging_face"] == class_name), None)
    if variant is not None:
        values |= {key: value for key, value in variant["when"].items() if value is not True}
        values |= variant.get("fixed", {})
    values |= _scaling_metadata(spec, name, to)
    try:
        for part in parts_of(name):
            values |= part.write(spec)
    except JinguError as error:
        raise JinguError(error.what, where=to, fix=_AS_FOLDER) from error
    return metadata | {full_key(name, key): value for key, value in values.items()}


def _number_metadata(spec: ModelSpec, name: str, model: StoredModel, library: ModuleType, to: Path) -> dict[str, Any]:
    """Return the metadata that are parameters of the model: a list with a number for each layer."""
    values: dict[str, list[float]] = {}
    for mapping in _mappings(spec, name, library, to):
        key = _number_key(mapping, name)
        if key is not None:
            values.setdefault(full_key(name, key), []).append(float(model.read(next(iter(mapping.jingu_shapes)))))
    return values


def _scaling_metadata(spec: ModelSpec, name: str, to: Path) -> dict[str, Any]:
    """Return the metadata of scaled rotary frequencies. Llama 3's scaling is a tensor (`rope_freqs.weight`)."""
    if not isinstance(spec.position, RotaryPositions):
        return {}
    scaling = spec.position.scaling
    values: dict[str, Any] = {"rope.freq_base": float(spec.position.theta)}
    if isinstance(scaling, LinearScaling):
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    elif isinstance(scaling, YarnScaling):
        has_weights = any("rope.scaling.yarn_log_multiplier" in part.keys for part in parts_of(name))
        usual = 0.1 * np.log(scaling.factor) + 1
        is_usual = abs(scaling.attention_factor - usual) < 1e-6 and (scaling.beta_fast, scaling.beta_slow) == (32, 1)
        if not (is_usual or has_weights) or not scaling.truncate:
            raise _refuse_model("this variant of YaRN", to)
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling.factor),
            "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
        }
    elif scaling is not None and not isinstance(scaling, Llama3Scaling):
        raise _refuse_model(f"rotary scaling of the type {scaling.type}", to)
    return values


def _refuse_model(what: str, to: Path) -> JinguError:
    return JinguError(f"llama.cpp does not compute {what}.", where=to, fix=_AS_FOLDER)


def _model_name(to: Path, tokenizer: Tokenizer) -> str:
    """Return the name of the model: that of the file.

    llama.cpp takes the tokenizer of a model whose name has "phi-3" for that of Phi-3, and opens no file without its
    tokens.
    """
    if tokenizer.special_tokens.keys() >= _PHI3_TOKENS:
        return to.stem
    return re.sub("(phi)-?3", r"\1 3", to.stem, flags=re.IGNORECASE)


def _end_tokens(model: StoredModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the metadata of the tokens that end an answer: llama.cpp has one key for the first, one for another."""
    ids = list(model.eos_token_ids) or [tokenizer.eos_token_id]
    ids = [number for number in ids if number < model.spec.vocab_size]
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return dict(zip(keys, ids, strict=False))


def _modelfile(to: Path, model: StoredModel) -> str:
    """Return the text of a Modelfile: how `ollama create` imports the file, with the model's sampling defaults."""
    names = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "repetition_penalty": "repeat_penalty"}
    lines = [f"FROM ./{to.name}"]
    for key, name in names.items():
        value = (model.generation_config or {}).get(key)
        if value is not None:
            lines.append(f"PARAMETER {name} {value}")
    return "\n".join(lines) + "\n"


# Tensors


def _write_file(
    file: Path, spec: ModelSpec, name: str, model: StoredModel, metadata: dict[str, Any], kind: str, library: ModuleType
) -> list[str]:
    """Write a GGUF file whose matrices have the type `kind`; return names of tensors with NaN or infinity."""
    general = library.Keys.General
    tensors = _output_tensors(spec, name, model, library.GGMLQuantizationType[kind], library, file)
    if any(tensor.kind.name == "MXFP4" for tensor in tensors):
        kind = "MXFP4"
    file_type = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}.get(kind, f"MOSTLY_{kind}")
    first = {general.ARCHITECTURE: name, general.FILE_TYPE: int(library.LlamaFileType[file_type])}
    if kind not in ("F32", "F16", "BF16"):
        first[general.QUANTIZATION_VERSION] = library.GGML_QUANT_VERSION
    return write_gguf(file, first | metadata, tensors, library)


def _mappings(spec: ModelSpec, name: str, library: ModuleType, to: Path) -> list[TensorMapping]:
    """Return the mappings of the tensors of the file. Raises JinguError if llama.cpp lacks one."""
    try:
        mappings = gguf_mappings(spec, name)
    except LookupError as error:
        raise _refuse_model(f"models of this architecture with all of these parts ({error})", to) from error
    number = {name: number for number, name in library.MODEL_ARCH_NAMES.items()}[name]
    stems = {library.TENSOR_NAMES[tensor] for tensor in library.MODEL_TENSORS[number]}
    for mapping in mappings:
        stem = re.sub(r"\.\d+\.", ".{bid}.", mapping.hf_name)
        if not stems & {stem, stem.rpartition(".")[0]} and _number_key(mapping, name) is None:
            raise _refuse_model(f"models of this architecture with {mapping.hf_name}", to)
    return mappings


def _number_key(mapping: TensorMapping, name: str) -> str | None:
    """Return the key of a parameter that is a number in the metadata; None: it is a tensor."""
    key = mapping.hf_name.split(".", 2)[-1]
    return key if key in architecture_entries(name, "numbers") else None


def matrix_mappings(spec: ModelSpec, name: str, library: ModuleType, to: Path) -> list[TensorMapping]:
    """Return the mappings of the matrices of the file, or of all experts, which adapters can stand beside.

    Embeddings, and experts of which one tensor holds several matrices, are left out.
    """
    return [
        mapping
        for mapping in _mappings(equivalent_spec(spec), name, library, to)
        if len(mapping.shape) == 2 + mapping.transform.of_experts
        and "embedding.weight" not in mapping.jingu_shapes
        and not (mapping.transform.of_experts and len(mapping.jingu_shapes) > 1)
        and not mapping.hf_name.endswith(_LATENTS)
    ]


def _importance_by_gguf_name(
    spec: ModelSpec, name: str, importance: Importance, library: ModuleType, to: Path
) -> dict[str, Tensor]:
    """Return the importance of the columns of each matrix, those of all experts one after the other."""
    first_names = {mapping.hf_name: next(iter(mapping.jingu_shapes)) for mapping in _mappings(spec, name, library, to)}
    return {
        gguf_name: importance[first].flatten().contiguous()
        for gguf_name, first in first_names.items()
        if first in importance
    }


def _output_tensors(
    spec: ModelSpec, name: str, model: StoredModel, kind: Any, library: ModuleType, to: Path
) -> list[OutputTensor]:
    """Return the tensors of the file in the order of the model's. Raises JinguError if llama.cpp lacks one."""
    tensors = []
    for mapping in _mappings(spec, name, library, to):
        shape = tuple(mapping.shape)
        if _number_key(mapping, name) is not None:
            continue
        if mapping.hf_name.endswith(_LATENTS):
            tensors += _latent_tensors(mapping, model, kind, library)
            continue
        tensor_type = _tensor_type(mapping.hf_name, shape, kind, library)
        if _read_blocks(mapping, model) is not None:
            tensor_type = library.GGMLQuantizationType.MXFP4
        tensors.append(OutputTensor(mapping.hf_name, shape, tensor_type, partial(_read_parts, mapping, model)))
    divisors = _proportional_divisors(spec)
    if isinstance(spec.position, RotaryPositions) and isinstance(spec.position.scaling, Llama3Scaling):
        divisors = _frequency_divisors(spec.position, spec.attention.head_dim)
    if divisors is not None:
        fp32, factors = library.GGMLQuantizationType.F32, divisors
        tensors.append(OutputTensor("rope_freqs.weight", tuple(factors.shape), fp32, lambda: iter([factors])))
    return tensors


def _latent_tensors(mapping: TensorMapping, model: StoredModel, kind: Any, library: ModuleType) -> list[OutputTensor]:
    """Return the tensors of the keys and of the values of latents, which are one parameter."""
    (parameter,) = mapping.jingu_shapes

    def read(part: int) -> Iterator[Tensor]:
        yield split_latents(model.read(parameter).detach(), mapping.spec)[part]

    tensors = []
    for number, leaf in enumerate(("attn_k_b", "attn_v_b")):
        name = mapping.hf_name.replace("attn_kv_b", leaf)
        shape = tuple(split_latents(torch.empty(mapping.shape, device="meta"), mapping.spec)[number].shape)
        tensors.append(OutputTensor(name, shape, _tensor_type(name, shape, kind, library), partial(read, number)))
    return tensors


def _proportional_divisors(spec: ModelSpec) -> Tensor | None:
    """Return what the frequencies of proportional positions are divided by, which rotate some pairs of a head alone."""
    for layer in spec.layers:
        position, size = layer.position, layer.attention.head_dim
        if isinstance(position, RotaryPositions) and position.proportional:
            divisors = torch.full((size // 2,), 1e30)
            divisors[: int(size * position.partial_rotary_factor / 2)] = 1.0
            return divisors
    return None


def _frequency_divisors(position: RotaryPositions, size: int) -> Tensor:
    """Return by how much scaling divides each rotary frequency of a head of `size` dims."""
    last = torch.zeros((), dtype=torch.float64)
    plain = position.model_copy(update={"scaling": None})
    frequencies = [rotary_frequencies(each, each.rotated_dims(size), last, torch.float64) for each in (plain, position)]
    return frequencies[0] / frequencies[1]


def _read_parts(mapping: TensorMapping, model: StoredModel) -> Iterator[Tensor]:
    """Yield the parts of a tensor of the file: the matrix of each expert, or the only one.

    What is stored in MXFP4 is given as the bytes of blocks.
    """
    read = _read_blocks(mapping, model) or model.read
    first = next(iter(mapping.jingu_shapes))
    if mapping.transform.of_experts and len(mapping.jingu_shapes) == 1 and len(mapping.jingu_shapes[first]) == 3:
        for expert in range(mapping.jingu_shapes[first][0]):
            yield read(first, expert)[None]
    else:
        yield mapping.to_hf([read(name).detach() for name in mapping.jingu_shapes])


def _read_blocks(mapping: TensorMapping, model: StoredModel) -> Callable[..., Tensor] | None:
    """Return the function that reads parameters of a tensor of the file as blocks, if all are stored in MXFP4."""
    reader = model.read
    if isinstance(reader, PackingReader) and reader.block_names.issuperset(mapping.jingu_shapes):
        return reader.read_blocks
    return None


def _tensor_type(name: str, shape: tuple[int, ...], kind: Any, library: ModuleType) -> Any:
    """Return the type of a tensor in a file of the type `kind`, as llama.cpp's converter chooses it."""
    types = library.GGMLQuantizationType
    if len(shape) == 1 or name.endswith(_FP32_NAMES) or not name.endswith(".weight"):
        return types.F32
    if kind == types.MXFP4 and "ffn_" not in name:
        # As llama.cpp does: most weights of models in MXFP4 are in feed-forward layers.
        kind = types.Q8_0
    block = library.GGML_QUANT_SIZES[kind][0]
    # With one block a row, llama.cpp's kernels for AMX compute other products, up to NaN. They compute no experts.
    is_short = len(shape) == 2 and shape[-1] == block > 1
    return types.F16 if is_short or shape[-1] % block else kind


# k-quants


def _quantize_with_llama_cpp(
    partial: Path, to: Path, dtype: str, importance: Mapping[str, Tensor], write: Callable[[Path], None]
) -> None:
    """Write a temporary file in fp16, and let llama.cpp quantize it.

    Args:
        importance: of the columns of matrices by GGUF's names; empty: all are equally important.

    Raises:
        JinguError: llama.cpp is not installed, or refuses the file.
    """
    library = import_optional("llama_cpp", f"quantizing as {dtype}", str(to), "llama-cpp-python")
    source = partial.with_suffix(".fp16")
    try:
        write(source)
        # llama.cpp reports each tensor. Its levels are not those of the package, which takes warnings for errors.
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        parameters = library.llama_model_quantize_default_params()
        parameters.ftype = getattr(library, f"LLAMA_FTYPE_{LLAMA_CPP_TYPES[dtype]}")
        if importance:
            entries = [
                (key.encode(), ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float)), values.numel())
                for key, values in importance.items()
            ]
            # An entry without a name ends the list.
            matrix = (library.llama_model_imatrix_data * (len(entries) + 1))(*entries)
            parameters.imatrix = matrix
        code = library.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(parameters))
    finally:
        source.unlink(missing_ok=True)
    if code or not partial.is_file():
        raise JinguError(
            f"llama.cpp could not quantize the model as {dtype} (code {code}).",
            where=to,
            fix="Choose q8_0; k-quants need matrices whose rows have a multiple of 256 elements.",
        )
