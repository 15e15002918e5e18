"""Reading Hugging Face folders: a config.json, and weights in safetensors that are read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.checkpoint.mapped_files import map_file, map_tensor
from jingu.errors import JinguError
from jingu.formats.packed_forms import check_method, find_forms
from jingu.formats.packed_matrices import PackedMatrix, Stored, join_packed
from jingu.formats.safetensors import read_header
from jingu.formats.stored_model import PackingReader, Shapes, StoredModel, compare_shapes
from jingu.formats.stored_names import (
    decoder_config,
    decoder_tensors,
    divide_convolutions,
    divide_experts,
    is_composite,
    separate_experts,
)
from jingu.formats.unread import unread_architecture
from jingu.model.families import FAMILIES, Family, map_tensors
from jingu.model.families.common_keys import check_common_keys
from jingu.model.families.name_map import IDENTITY, TABLES, TRANSPOSE, TensorMapping, read_parameter
from jingu.model.quantized_weight import StoredWeight
from jingu.model.spec import ModelSpec
from jingu.runtime.files import read_json
from jingu.runtime.log import log_info, log_warning
from jingu.text.tokenizer_formats import find_tokenizer_file

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Modules of other libraries around a model or a part of it, whose names some files contain.
_WRAPPERS = {
    "module": "DistributedDataParallel or DeepSpeed",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "base_model": "peft",
    "base_layer": "peft",
}
# Elements that are compared at a time.
_CHUNK = 1 << 24

Mappings = Sequence[TensorMapping]


@dataclass(frozen=True)
class StoredWeights:
    """Weights with Hugging Face's names and shapes.

    Attributes:
        shapes: shape of each stored tensor by name.
        read: `read(name)` returns a tensor, and `read(name, expert)` that of an expert, of a tensor [E, ...].
        dtype: dtype of most weights, judged by the largest tensor; fp32 if that is quantized.
        packed: the quantized matrices that can be computed with as they are stored, by name.
    """

    shapes: Shapes
    read: Callable[..., Tensor]
    dtype: torch.dtype
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict)


def open_hf(folder: Path) -> StoredModel:
    """Open a Hugging Face folder. Weights are read lazily.

    Raises:
        JinguError: the config is missing, names an unknown architecture or needs custom code (`auto_map`); or the
            weights are pickled, damaged, or not those that the config describes.
    """
    config = read_model_json(folder / "config.json", "this is no model: it has neither config.json nor model.json.")
    is_part = is_composite(config)
    config, complete_config = _decoder_configs(config, folder / "config.json")
    open_weights = partial(_open_weights, folder, config, is_part)
    model = replace(open_from_config(folder, folder / "config.json", complete_config, open_weights), config=config)
    if is_part and (model.spec.logit_scale != 1.0 or model.spec.logit_softcap is not None):
        # transformers leaves them out in composite models, though the weights were trained with them.
        log_warning(f"{folder}: logits are scaled or capped, as in the model of text alone.")
    generation_config = folder / "generation_config.json"
    if generation_config.is_file():
        model = replace(model, generation_config=read_model_json(generation_config))
    return replace(model, tokenizer_folder=folder if find_tokenizer_file(folder) else None)


def open_from_config(
    where: Path,
    config_file: Path,
    config: Mapping[str, Any],
    open_weights: Callable[[Family, Mappings], StoredWeights],
    map_names: Callable[[ModelSpec], list[TensorMapping]] = map_tensors,
) -> StoredModel:
    """Open a model that a Hugging Face config describes, without its tokenizer.

    Args:
        where: the model's folder or file.
        config_file: the file that contains the config, for messages.
        open_weights: opens the weights, given the family and the expected tensors, with an untied head.
        map_names: returns the tensors of a model in this format.

    Raises:
        JinguError: the config is not supported, or the weights are not those that it describes.
    """
    family, spec = _read_spec(config, config_file)
    # A tied head may be stored too.
    untied_map = map_names(spec.model_copy(update={"tie_word_embeddings": False}))
    weights = open_weights(family, untied_map)
    further = [entry.hf_name for entry in untied_map if next(iter(entry.jingu_shapes)).startswith("mtp.")]
    if further and not any(name in weights.shapes for name in further):
        # transformers leaves these layers out, whatever the config says.
        spec = spec.without_predictions()
        untied_map = map_names(spec.model_copy(update={"tie_word_embeddings": False}))
    if spec.tie_word_embeddings and not spec.score_head:
        spec, weights = _resolve_tied_head(spec, weights, untied_map, where)
    mappings = [each for mapping in map_names(spec) for each in separate_experts(mapping, weights.shapes)]
    # Compare all shapes before any weight is read.
    model_shapes = {mapping.hf_name: mapping.shape for mapping in mappings}
    shapes, read_tensor = divide_convolutions(model_shapes, weights.shapes, weights.read)
    weights = replace(weights, shapes=shapes, read=read_tensor)
    compare_shapes(model_shapes, weights.shapes, where)
    # For each of jingu's parameters, the stored tensors that contain it.
    sources: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        for name in mapping.jingu_shapes:
            sources.setdefault(name, []).append(mapping)
    # Parameters that were read together with another one, as they share a stored tensor, and not yet requested.
    unread: dict[str, Tensor] = {}

    def read(name: str, expert: int | None = None) -> Tensor:
        if expert is not None:
            return _read_expert(name, sources[name], expert, weights.read)
        if name not in unread:
            unread.clear()
            unread.update(read_parameter(name, sources[name], weights.read))
        return unread.pop(name)

    if weights.packed:
        in_blocks = {key for key, matrix in weights.packed.items() if matrix.form.blocks is not None}
        names = {name for name, holders in sources.items() if all(each.hf_name in in_blocks for each in holders)}
        keep = partial(_keep_packed, sources, weights.packed)
        packing = PackingReader(read, keep, frozenset(names), partial(_read_blocks, sources, weights.packed))
        return StoredModel(spec, packing, None, where, weights.dtype, config)
    return StoredModel(spec, read, None, where, weights.dtype, config)


def _read_expert(name: str, mappings: Mappings, expert: int, read: Callable[..., Tensor]) -> Tensor:
    """Return the matrix of an expert, of which there is a stored tensor, or one for all experts."""
    separate = mappings[0].expert is not None
    mapping = mappings[expert if separate else 0]
    if separate:
        return mapping.to_jingu(read(mapping.hf_name))[name]
    shapes = {each: torch.Size((1, *shape[1:])) for each, shape in mapping.jingu_shapes.items()}
    tensor = read(mapping.hf_name, expert).unsqueeze(0)
    return replace(mapping, jingu_shapes=shapes).to_jingu(tensor)[name][0]


def _memory_of(resident: Callable[[str], PackedMatrix], hf_names: Iterable[str]) -> list[Tensor]:
    """Return the parts of matrices in memory."""
    return [part for name in hf_names for part in resident(name).memory]


def _read_blocks(
    sources: Mapping[str, Mappings], matrices: Mapping[str, PackedMatrix], name: str, expert: int | None = None
) -> Tensor:
    """Return a parameter that is stored in MXFP4, or its part of an expert, as GGUF's blocks."""

    def read(hf_name: str, number: int | None = None) -> Tensor:
        return (matrices[hf_name] if number is None else matrices[hf_name].part(number)).read_blocks()

    if expert is None:
        return read_parameter(name, sources[name], read)[name]
    return _read_expert(name, sources[name], expert, read)


def _keep_packed(
    sources: Mapping[str, Mappings], packed: Mapping[str, PackedMatrix], device: torch.device
) -> Callable[[str], StoredWeight | None]:
    """Return a function that returns a matrix as it is stored, by its parameter's name; None if it is not quantized."""
    files = lru_cache(maxsize=None)(map_file)
    resident = lru_cache(maxsize=None)(lambda hf_name: packed[hf_name].to(device, files))
    resident_part = lru_cache(maxsize=None)(lambda hf_name, expert: packed[hf_name].part(expert).to(device, files))

    def keep(name: str) -> StoredWeight | None:
        mappings = sources[name]
        if any(mapping.hf_name not in packed for mapping in mappings):
            return None
        first, rows = mappings[0], None
        names = list(first.jingu_shapes)
        if first.transform is IDENTITY and len(names) > 1:
            # Some rows of a fused matrix.
            sizes = [shape[0] for shape in first.jingu_shapes.values()]
            begin = sum(sizes[: names.index(name)])
            rows = slice(begin, begin + first.jingu_shapes[name][0])
            mappings = [replace(first, jingu_shapes={name: first.jingu_shapes[name]})]

        def read_packed(hf_name: str, expert: int | None = None) -> Tensor:
            matrix = resident(hf_name)
            if expert is not None:
                matrix = matrix.part(expert)
            return (matrix if rows is None else matrix.narrow(rows)).read()

        def dequantize(expert: int | None = None) -> Tensor:
            if expert is None:
                return read_parameter(name, mappings, read_packed)[name]
            return _read_expert(name, mappings, expert, read_packed)

        number = () if first.expert is None else (len(mappings),)
        shape = torch.Size((*number, *first.jingu_shapes[name]))
        hf_names = [each.hf_name for each in mappings]

        def select(experts: range) -> StoredWeight:
            """Return the matrices of some experts, of which alone the parts are in memory."""

            def read_part(hf_name: str, expert: int | None = None) -> Tensor:
                matrix = resident(hf_name) if expert is None else resident_part(hf_name, expert)
                return (matrix if rows is None else matrix.narrow(rows)).read()

            def dequantize_part(number: int | None = None) -> Tensor:
                if number is None:
                    return torch.stack([dequantize_part(each) for each in range(len(experts))])
                return _read_expert(name, mappings, experts[number], read_part)

            def memory() -> list[Tensor]:
                separate = first.expert is not None
                matrices = (
                    resident(hf_names[expert]) if separate else resident_part(hf_names[0], expert) for expert in experts
                )
                return [part for matrix in matrices for part in matrix.memory]

            return StoredWeight(torch.Size((len(experts), *shape[1:])), dequantize_part, memory)

        parts = partial(_memory_of, resident, hf_names)
        return StoredWeight(shape, dequantize, parts, select if len(shape) == 3 else None)

    return keep


def _resolve_tied_head(
    spec: ModelSpec, weights: StoredWeights, mappings: Sequence[TensorMapping], where: Path
) -> tuple[ModelSpec, StoredWeights]:
    """Return the spec and the weights of a model with a tied head, given what is stored of the two tensors.

    As in transformers: if only the head is stored, it is the embedding too; if both are and differ, they are not tied.

    Args:
        mappings: mappings of the model with an untied head.
    """
    names = {name: mapping.hf_name for mapping in mappings for name in mapping.jingu_shapes}
    embedding, head = names["embedding.weight"], names["head.weight"]
    if head not in weights.shapes:
        return spec, weights
    shapes = {name: shape for name, shape in weights.shapes.items() if name != head}
    if embedding not in shapes:
        shapes[embedding] = weights.shapes[head]
        return spec, replace(
            weights,
            shapes=shapes,
            read=lambda name, expert=None: weights.read(head if name == embedding else name, expert),
        )
    if _are_equal(weights, embedding, head):
        return spec, replace(weights, shapes=shapes)
    log_warning(
        f"{where}: the config ties {head} to {embedding}, but the file has both, and they differ. As in transformers, "
        "they are not tied."
    )
    return spec.model_copy(update={"tie_word_embeddings": False}), weights


def _are_equal(weights: StoredWeights, first: str, second: str) -> bool:
    """Return whether two tensors have the same values in the dtype of most weights."""
    if weights.shapes[first] != weights.shapes[second]:
        return False
    pair = [weights.read(name).flatten().split(_CHUNK) for name in (first, second)]
    return all(torch.equal(a.to(weights.dtype), b.to(weights.dtype)) for a, b in zip(*pair, strict=True))


def spec_from_config(path: Path) -> ModelSpec:
    """Return the spec of the model that a config.json describes. Raises JinguError if it describes none."""
    return _read_spec(_decoder_configs(read_model_json(path), path)[1], path)[1]


def _decoder_configs(config: dict[str, Any], config_file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a model's decoder as it is, and with the values of transformers for absent keys."""
    own_config = decoder_config(config, config_file)
    family = find_family(own_config, config_file)
    return own_config, family.complete(own_config, is_part=is_composite(config))


def _read_spec(config: Mapping[str, Any], config_file: Path) -> tuple[Family, ModelSpec]:
    """Return the family and the spec of the model that a config describes.

    Raises:
        JinguError: the architecture is unknown, or values are missing, wrong or not supported.
    """
    family = find_family(config, config_file)
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        check_method(quantization, config_file)
    try:
        spec = family.spec_from_hf(config)
        check_common_keys(config, spec)
        return family, spec
    except JinguError as error:
        raise JinguError(error.what, where=f"{config_file}", fix=error.fix) from error


def has_class(family: Family, config: Mapping[str, Any]) -> bool:
    """Return whether a config with an `auto_map` is read without that code, as transformers reads it."""
    table = TABLES.get(family.name, {})
    names = (family.name, family.model_type, *table.get("further_model_types", ()))
    return family.equivalent is not None or config.get("model_type") in names


def find_family(config: Mapping[str, Any], where: Path) -> Family:
    """Return the family of the architecture that a config names.

    Raises:
        JinguError: the architecture is unknown, or it needs code that came with the model.
    """
    names = [str(name) for name in config.get("architectures") or []]
    families = {name: family for family in FAMILIES.values() for name in family.architectures}
    readable = {**families}
    for family in FAMILIES.values():
        readable |= {family.classifier: family, family.body: family}
    match = next((readable[name] for name in names if name in readable), None)
    if config.get("auto_map") and not (match and has_class(match, config)):
        raise JinguError(
            "the model asks to run Python code that came with it (auto_map). jingu never runs such code.",
            where=where,
            fix="Use a release of the model for an architecture built into transformers.",
        )
    if match:
        return match
    if not names and config.get("model_type") in FAMILIES:
        return FAMILIES[config["model_type"]]
    model_type = str(config.get("model_type"))
    name = names[0] if names else model_type
    what = f"jingu does not support the architecture {name}"
    raise unread_architecture(what, [*names, model_type], where, FAMILIES)


def _open_weights(
    folder: Path, config: Mapping[str, Any], is_part: bool, family: Family, mappings: Mappings
) -> StoredWeights:
    """Open the weight files of a Hugging Face folder. Quantized matrices are dequantized as they are read.

    Args:
        is_part: whether the model is the decoder of a composite model.
        mappings: the expected tensors.
    """
    shapes = {mapping.hf_name: mapping.shape for mapping in mappings}
    files = _weight_files(folder, config.get("transformers_weights"))
    places = {key: (path, key, location) for path in files for key, location in read_header(path).items()}
    if is_part:
        places, left_out = decoder_tensors(places)
        modules = sorted({key.removeprefix("model.").partition(".")[0] for key in left_out})
        log_info(f"{folder}: only the decoder is read, without {', '.join(modules) or 'other parts'}.")
    quantization = config.get("quantization_config") or {}
    tensors = divide_experts(join_packed(places, find_forms(quantization, places, folder), quantization), shapes)
    by_name: dict[str, Stored] = {}
    extra = _unused_names(family, mappings)
    for key, tensor in tensors.items():
        name = _hf_name(family.module_name(key), family.base, {*shapes, *extra})
        if name in extra:
            continue
        if name in by_name:
            raise JinguError(
                f"{name} is stored twice, as {by_name[name][1]} and as {key}.",
                where=folder,
                fix="Delete one of the two from the files.",
            )
        # A reward model has no head, but some files contain it.
        is_filler = f"{name.removesuffix('bias')}weight" in shapes and _is_filler(key, tensors)
        if name in shapes or not (is_filler or name.endswith((*family.ignored, "lm_head.weight"))):
            by_name[name] = tensor
    _check_wrappers(by_name, shapes, family.base, folder)
    # Quantized matrices have a row for each output, also in families that store other matrices transposed.
    turned = {mapping.hf_name for mapping in mappings if mapping.transform is TRANSPOSE}
    turned &= {name for name, (_, _, location) in by_name.items() if isinstance(location, PackedMatrix)}

    def read(name: str, expert: int | None = None) -> Tensor:
        path, key, location = by_name[name]
        if expert is not None:
            location = location.part(expert)
        tensor = read_stored((path, key, location))
        return tensor.t() if name in turned else tensor

    largest = max((location for _, _, location in by_name.values()), key=lambda location: location.bytes, default=None)
    dtype = largest.dtype if largest and largest.dtype in FLOAT_DTYPES else torch.float32
    assert isinstance(dtype, torch.dtype)
    stored_shapes = {name: location.shape for name, (_, _, location) in by_name.items()}
    stored_shapes |= {name: torch.Size(reversed(stored_shapes[name])) for name in turned}
    packed = {
        name: location
        for name, (_, _, location) in by_name.items()
        if isinstance(location, PackedMatrix) and name not in turned
    }
    return StoredWeights(stored_shapes, read, dtype, packed)


def _unused_names(family: Family, mappings: Mappings) -> set[str]:
    """Return the names of the keys and values of layers that attend to those of other layers.

    Some files have them, though no model uses them.
    """
    spec = mappings[0].spec
    sharing = [number for number, layer in enumerate(spec.layers) if layer.attention.shares_kv]
    parts = {f"blocks.*.attention.{part}.weight" for part in ("k", "v", "k_norm")}
    names = [rule.hf_name for rule in family.rules if parts.issuperset(rule.jingu_names)]
    return {name.replace("*", str(number)) for name in names for number in sharing}


def _is_filler(key: str, tensors: Mapping[str, Stored]) -> bool:
    """Return whether a tensor is a bias of zeros, which some tools write for all quantized matrices."""
    matrix = tensors.get(f"{key.removesuffix('bias')}weight")
    if not key.endswith(".bias") or matrix is None or not isinstance(matrix[2], PackedMatrix):
        return False
    return not read_stored(tensors[key]).any()


def read_stored(tensor: Stored) -> Tensor:
    """Return a tensor, dequantized if it is a quantized matrix. Raises JinguError if it has no floating-point dtype."""
    path, key, location = tensor
    if isinstance(location, PackedMatrix):
        return location.read()
    if location.dtype not in FLOAT_DTYPES:
        raise JinguError(
            f"the tensor {key} is stored as {location.dtype}: the weights are quantized.",
            where=path,
            fix="Use the model's weights in a floating-point format.",
        )
    assert isinstance(location.dtype, torch.dtype)
    return map_tensor(path, location.begin, location.shape, location.dtype)


def _hf_name(key: str, base: str, names: Collection[str]) -> str:
    """Return the name in the model of a stored tensor. As in transformers, the prefix of the body may be missing, or be
    there once too often.

    A model that was saved without its head (such as LlamaModel) lacks the prefix.

    Args:
        base: that prefix, such as `model.`.
        names: names of the model's tensors.
    """
    if key in names or not base:
        return key
    shorter = key.removeprefix(base)
    return shorter if shorter in names else (base + key if base + key in names else key)


def _check_wrappers(file_names: Collection[str], model_names: Collection[str], base: str, where: Path) -> None:
    """Raise JinguError if missing tensors are there under the names that they have in something around the model.

    transformers does not read such names either, and starts from random weights.
    """
    missing = set(model_names) - set(file_names)
    for key in file_names:
        if key in model_names:
            continue
        parts = key.split(".")
        wrapper = next((part for part in parts if part in _WRAPPERS), None)
        # peft has `base_model.model.` around a model that may have a module `model` itself.
        plain = [part for part in parts if part not in _WRAPPERS]
        names = {_hf_name(".".join(name), base, model_names) for name in (plain, plain[1:])}
        if wrapper is not None and (names & missing or _WRAPPERS[wrapper] == "peft"):
            library = _WRAPPERS[wrapper]
            raise JinguError(
                f"the tensors have the names of a model inside {library} (such as {key}).",
                where=where,
                fix="Merge the adapters (merge_and_unload), and save the merged model."
                if library == "peft"
                else f"Save the model itself, without {wrapper}.",
            )
        ends = [".".join(parts[start:]) for start in range(1, len(parts))]
        end = next((end for end in ends if _hf_name(end, base, model_names) in missing), None)
        if end is not None:
            raise JinguError(
                f"the names of the tensors begin with {key.removesuffix(end)}, which those of the model do not.",
                where=where,
                fix=f"Rename them (such as {key} to {_hf_name(end, base, model_names)}), or save only this part of the "
                "model.",
            )


def _weight_files(folder: Path, file: str | None = None) -> list[Path]:
    """Return the paths of the safetensors files. Raises JinguError if some are missing.

    As in transformers, a single file takes precedence over an index.

    Args:
        file: the file or index that the config names (`transformers_weights`).
    """
    if file is not None:
        if Path(file).name != file or not (folder / file).is_file():
            what = f"the config names the weight file {file} (transformers_weights), which is not here."
            raise JinguError(what, where=folder, fix="Fetch this file.")
        return _indexed_files(folder, file) if file.endswith(".index.json") else [folder / file]
    if (folder / WEIGHTS).is_file():
        other_files: list[Path] | None = None
        with suppress(JinguError):  # the index may be damaged
            other_files = _indexed_files(folder, INDEX, check=False)
        if (folder / INDEX).is_file() and other_files != [folder / WEIGHTS]:
            log_warning(
                f"{folder} has both {WEIGHTS} and an index of other files. As in transformers, {WEIGHTS} is read. "
                "Delete what is not needed."
            )
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed_files(folder, INDEX)
    variants = sorted(item.name for item in folder.glob("*.safetensors*"))
    if variants:
        raise JinguError(
            f"there is no {WEIGHTS} and no index of it here, only {', '.join(variants[:5])}, which transformers does "
            "not read without being told.",
            where=folder,
            fix=f"Fetch the missing files, or, if one of these is the whole model, rename it to {WEIGHTS}.",
        )
    pickle_files = sorted(item.name for item in folder.iterdir() if item.suffix in _PICKLE_SUFFIXES)
    if pickle_files:
        raise JinguError(
            f"the weights are pickled ({', '.join(pickle_files)}). jingu does not read pickles, which can run code.",
            where=folder,
            fix="Use the model's safetensors files; or, if you trust the source, load the model with transformers and "
            "save it with save_pretrained, which writes safetensors.",
        )
    raise JinguError(f"there are no weights here (no {WEIGHTS}).", where=folder, fix="Fetch the model again.")


def _indexed_files(folder: Path, index: str, *, check: bool = True) -> list[Path]:
    """Return the paths of the files that an index names. Raises JinguError if it is damaged or some are missing.

    Args:
        check: whether missing files are an error.
    """
    table = read_model_json(folder / index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise JinguError("the index has no weight_map.", where=folder / index, fix="Fetch the file again.")
    names = sorted(set(table.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing and check:
        raise JinguError(f"weight files are missing: {', '.join(missing)}.", where=folder, fix="Fetch these files.")
    return [folder / name for name in names]


def read_model_json(
    path: Path, missing: str = "the file is missing.", fix: str = "Give a run or a Hugging Face folder."
) -> dict[str, Any]:
    """Return the JSON object in a file. Raises JinguError if the file is missing or damaged.

    Args:
        missing: the message if the file is missing.
        fix: the fix if the file is missing.
    """
    if not path.exists():
        raise JinguError(missing, where=path.parent, fix=fix)
    return read_json(path, "Fetch the file again.")


def report_broken_weights(names: Sequence[str], dtype: str, to: Path, *, check: bool) -> None:
    """Report weights of an export that contain NaN or infinity. Raises JinguError if `check` is set.

    Args:
        names: theirs; empty: nothing is reported.
        dtype: of the written weights.
    """
    problem = f"{len(names)} of the weights contain NaN or infinity in {dtype}: {', '.join(names)}."
    if names and check:
        raise JinguError(
            problem,
            where=to,
            fix="Nothing was written. Use an earlier checkpoint, or another dtype if the weights are too large for it.",
        )
    if names:
        log_warning(f"{to}: {problem}")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with transformers' indentation."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
