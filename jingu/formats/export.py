"""`jingu export` and `jingu import`: write a model as a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from jingu.chat.chat_format import find_chat_format
from jingu.checkpoint.manifest import safetensors_header
from jingu.checkpoint.save_folder import write_all
from jingu.checkpoint.shards import DTYPE_NAMES, has_nan_or_infinity, tensor_bytes
from jingu.errors import JinguError
from jingu.formats.description import build_config, special_token_ids
from jingu.formats.huggingface import INDEX, WEIGHTS, report_broken_weights, write_json
from jingu.formats.importance import Importance, measure_importance
from jingu.formats.models import open_model
from jingu.formats.provenance import copy_provenance
from jingu.formats.quantized_forms import FORMS, Form, QuantizedDtype, choose_form
from jingu.formats.safetensors import CHUNK_ELEMENTS
from jingu.formats.stored_model import StoredModel, normalize_head
from jingu.model.families import FAMILIES, Family, constant_tensors, equivalent_spec, map_tensors
from jingu.model.families.name_map import IDENTITY, TRANSPOSE, TensorMapping
from jingu.model.parameter_table import keeps_wide
from jingu.model.spec import ModelSpec
from jingu.runtime.device import DTYPES, single_thread
from jingu.runtime.files import create_folder_atomically
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_files import copy_tokenizer

ReadTensor = Callable[[str], Tensor]

# Maximum size of a weight file. A file with a single tensor may be larger.
SHARD_BYTES = 5_000_000_000


def convert(model: Path, to: Path, dtype: str = "auto", check: bool = False) -> None:
    """Write any model (a run, a step of one, a Hugging Face folder, a GGUF file) as a Hugging Face folder.

    Args:
        dtype: dtype to write, a name in `DTYPES`; auto: the dtype of most stored weights (fp32 if they are quantized).
            A name in `FORMS` quantizes the matrices of the blocks; the other weights are written as with auto.
        check: whether weights that contain NaN or infinity are an error; otherwise they are only reported.

    Raises:
        JinguError: the model cannot be read or has no tokenizer, `to` is not empty, or the check fails.
    """
    convert_calibrated(model, to, dtype, check, None)


def convert_calibrated(model: Path, to: Path, dtype: str, check: bool, calibrate: Path | None) -> None:
    """Write a model as `convert` does.

    Args:
        calibrate: file of a text, whose tokens tell how important the columns of quantized matrices are.
    """
    write_model(open_model(model), to, dtype, check, calibrate)
    copy_provenance(model, to)


def write_model(model: StoredModel, to: Path, dtype: str, check: bool, calibrate: Path | None = None) -> None:
    """Write an open model as a Hugging Face folder, and print its path. Arguments and errors: as for `convert`."""
    if model.spec.adapter is not None:
        raise JinguError(
            "the run trained a prompt, which cannot be merged into weights.",
            where=model.where,
            fix="`jingu tune export` writes it in the format of peft.",
        )
    torch_dtype = DTYPES.get(dtype, model.dtype)
    form = dtype if dtype in FORMS else None
    stored_dtype: torch.dtype | QuantizedDtype = torch_dtype
    if form is not None:
        _require_empty(to)
        importance = None if calibrate is None else measure_importance(model, calibrate)
        stored_dtype = QuantizedDtype(form, torch_dtype, importance)
    family = export_hf(model.spec, model.read, model.tokenizer(), to, stored_dtype, source=model, check=check)
    architecture = family.classifier if model.spec.score_head else family.architectures[0]
    loaders = f"transformers loads it as {architecture}"
    if family.equivalent:
        loaders = "transformers has no such architecture: jingu loads it, and so does the code of its authors"
    elif form is not None:
        loaders = f"vLLM loads it, and with the package compressed-tensors, transformers does as {architecture}"
    print(f"Wrote {to} in {form or str(torch_dtype).removeprefix('torch.')}; {loaders}.")
    chat_format = find_chat_format(to, Tokenizer.load(to))
    if chat_format is not None and chat_format.stop:
        print(f"Its answers end with the text {chat_format.stop[0]!r}, which is no token: set it as a stop string.")


def export_hf(
    spec: ModelSpec,
    read: ReadTensor,
    tokenizer_folder: Path,
    to: Path,
    dtype: torch.dtype | QuantizedDtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    *,
    source: StoredModel | None = None,
    check: bool = False,
) -> Family:
    """Write a Hugging Face folder that transformers loads. The folder is created atomically: complete or not at all.

    Only one parameter at a time is in memory.

    Args:
        read: returns a whole parameter by jingu's name (`StoredModel.read`, or a dictionary's `__getitem__`).
        tokenizer_folder: folder with the tokenizer to copy.
        to: a new or empty folder.
        dtype: dtype of the written weights, and the form of quantized ones.
        shard_bytes: maximum size of a weight file.
        source: the model that supplies config, generation config and chat templates; None: the special token ids
            come from the tokenizer.
        check: whether weights that contain NaN or infinity in `dtype` are an error; otherwise they are logged.

    Returns:
        The family that was written. It differs from the model's own if transformers lacks that family and jingu knows
        an equivalent one.

    Raises:
        JinguError: the folder is not empty, the disk is full, the model has a shape that its Hugging Face
            architecture does not support, or the check fails.
    """
    _require_empty(to)
    # Convert the model to a family that transformers has, if possible.
    same = equivalent_spec(spec)
    if same.normalize_lm_head != spec.normalize_lm_head:
        read = normalize_head(read)
    spec = same
    family = FAMILIES[spec.family]
    # Describe the model in config.json.
    source_config = {} if source is None else source.config
    if not source_config:
        source_config = special_token_ids(Tokenizer.load(tokenizer_folder), spec)
    generation_config = None if source is None else source.generation_config
    # Without a generation config, transformers takes these settings from the config.
    if generation_config is None and "model_type" not in source_config:
        generation_config = source_config
    # This refuses what the family's config cannot express.
    config = build_config(spec, source_config, dtype if isinstance(dtype, torch.dtype) else dtype.scales)
    plan = _plan_weights(spec, dtype)
    if plan.form is not None:
        config |= {"quantization_config": plan.form.config(plan.plain_modules)}
    with create_folder_atomically(to) as folder:
        write_json(folder / "config.json", config)
        if generation_config is not None:
            write_json(folder / "generation_config.json", generation_config)
        copy_tokenizer(tokenizer_folder, folder, None if source is None else source.chat_templates)
        with single_thread():  # casts and checks on one thread are as fast as the disk
            broken = _write_weights(folder, plan, read, shard_bytes)
        report_broken_weights(broken, str(plan.dtype).removeprefix("torch."), to, check=check)
    return family


def _require_empty(to: Path) -> None:
    """Raise a `JinguError` unless `to` is a new or empty folder."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        content = "an earlier export" if (to / "config.json").is_file() else "something"
        raise JinguError(
            f"there is {content} here already, and it is not overwritten.",
            where=to,
            fix="Delete it first, or choose another folder.",
        )


@dataclass(frozen=True)
class _WeightPlan:
    """The tensors to write.

    Attributes:
        mappings: the tensors by Hugging Face's names.
        dtype: dtype of what is not quantized, and of scales.
        form: form of the quantized matrices; None: there are none.
        matrices: names of the quantized matrices.
        plain_modules: modules with a matrix that is not quantized, apart from embeddings.
        importance: of the columns of the matrices, if it was measured.
        wide: names of the tensors that have at least fp32.
    """

    mappings: Sequence[TensorMapping]
    dtype: torch.dtype
    form: Form | None = None
    matrices: frozenset[str] = frozenset()
    plain_modules: Sequence[str] = ()
    importance: Importance | None = None
    wide: frozenset[str] = frozenset()

    def dtype_of(self, mapping: TensorMapping) -> torch.dtype:
        """Return the dtype of a tensor that is not quantized."""
        return torch.promote_types(self.dtype, torch.float32) if mapping.hf_name in self.wide else self.dtype

    def layout(self, mapping: TensorMapping) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of the stored tensors of one of Hugging Face's, by name."""
        if self.form is None or mapping.hf_name not in self.matrices:
            return {mapping.hf_name: (self.dtype_of(mapping), mapping.shape)}
        parts = self.form.layout(mapping.shape, self.dtype)
        module = mapping.hf_name.removesuffix("weight")
        return {f"{module}{suffix}": part for suffix, part in parts.items()}

    def importance_of(self, mapping: TensorMapping) -> Tensor | None:
        """Return the importance of the columns of a matrix, all of whose rows have the same inputs."""
        importance = (self.importance or {}).get(next(iter(mapping.jingu_shapes)))
        return importance if importance is None or mapping.expert is None else importance[mapping.expert]

    def num_bytes(self, mapping: TensorMapping) -> int:
        """Return the bytes of the stored tensors of one of Hugging Face's."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.layout(mapping).values())


def _plan_weights(spec: ModelSpec, dtype: torch.dtype | QuantizedDtype) -> _WeightPlan:
    """Return the tensors to write. As in `quantize_blocks`, the matrices of blocks are quantized, apart from routers.

    Raises:
        JinguError: the matrices cannot have the form.
    """
    stored_name = FAMILIES[spec.family].stored_name
    mappings = [
        replace(mapping, hf_name=stored_name(mapping.hf_name))
        for mapping in (*map_tensors(spec), *constant_tensors(spec))
    ]
    wide = frozenset(
        mapping.hf_name for mapping in mappings if any(keeps_wide(name, spec) for name in mapping.jingu_shapes)
    )
    if isinstance(dtype, torch.dtype):
        return _WeightPlan(mappings, dtype, wide=wide)
    weights = [mapping for mapping in mappings if len(mapping.shape) == 2 and mapping.hf_name.endswith(".weight")]
    in_blocks = [mapping for mapping in weights if all("blocks." in name for name in mapping.jingu_shapes)]
    matrices = {
        mapping.hf_name: mapping.shape
        for mapping in in_blocks
        if not any(name.endswith((".router.weight", "shared_gate.weight")) for name in mapping.jingu_shapes)
    }
    wrong_mapping = next((mapping for mapping in in_blocks if mapping.transform is TRANSPOSE), None)
    if wrong_mapping is not None:
        what = f"{spec.family} stores its matrices transposed (such as {wrong_mapping.hf_name})"
        reason = f"what loads {dtype.form} expects a row for each output"
        raise JinguError(f"{what}, and {reason}.", where="--dtype", fix="Use bf16 or fp16.")
    # A linear module that is not listed is expected to be quantized. Embeddings are no linear modules.
    embeddings = {mapping.hf_name for mapping in mappings if "embedding.weight" in mapping.jingu_shapes}
    plain = [
        mapping.hf_name.removesuffix(".weight")
        for mapping in weights
        if mapping.hf_name not in matrices and mapping.hf_name not in embeddings
    ]
    # A tied head is a module, too, and the head has another name in the files of some families.
    if "lm_head" not in plain:
        plain.append("lm_head")
    form = choose_form(dtype.form, matrices)
    return _WeightPlan(mappings, dtype.scales, form, frozenset(matrices), plain, dtype.importance, wide)


def _write_weights(folder: Path, plan: _WeightPlan, read: ReadTensor, shard_bytes: int) -> list[str]:
    """Write the weight files, and their index if there are several; return names of tensors with NaN or infinity."""
    sizes = [plan.num_bytes(mapping) for mapping in plan.mappings]
    shards = _split_into_shards(plan.mappings, sizes, shard_bytes)
    read = _cache_last(read)
    index: dict[str, str] = {}
    broken: list[str] = []
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout = {key: part for mapping in shard for key, part in plan.layout(mapping).items()}
        header = safetensors_header((key, DTYPE_NAMES[dtype], shape) for key, (dtype, shape) in layout.items())
        with (folder / name).open("xb", buffering=0) as file:
            write_all(file, memoryview(header))
            for mapping in shard:
                if not _write_tensor(file, plan, mapping, read):
                    broken.append(mapping.hf_name)
        index |= dict.fromkeys(layout, name)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": index})
    return broken


def _write_tensor(file: FileIO, plan: _WeightPlan, mapping: TensorMapping, read: ReadTensor) -> bool:
    """Write one of Hugging Face's tensors; return whether all of its values are finite."""
    if plan.form is not None and mapping.hf_name in plan.matrices:
        weight = torch.cat([*_chunks(_hf_parts(mapping, read), plan.dtype)])
        for part in plan.form.encode(weight, plan.importance_of(mapping)).values():
            write_all(file, tensor_bytes(part.contiguous()))
        return not has_nan_or_infinity(weight)
    is_finite = True
    elements = 0
    for chunk in _chunks(_hf_parts(mapping, read), plan.dtype_of(mapping)):
        is_finite = is_finite and not has_nan_or_infinity(chunk)
        elements += chunk.numel()
        write_all(file, tensor_bytes(chunk))
    # The header is written already, so another number of elements would damage the file.
    if elements != prod(mapping.shape):
        raise ValueError(f"{mapping.hf_name} has {elements} elements")
    return is_finite


def _chunks(parts: Iterable[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield tensors a few rows at a time: contiguous, in host memory, and cast to `dtype`."""
    for part in map(torch.atleast_1d, parts):
        for chunk in part.split(max(1, CHUNK_ELEMENTS * len(part) // max(1, part.numel()))):
            yield chunk.to("cpu", dtype).contiguous()


def _cache_last(read: ReadTensor) -> ReadTensor:
    """Return a version of `read` that caches one tensor.

    It avoids repeated reads where Hugging Face has a tensor per expert: all are slices of one of jingu's parameters.
    """
    cache: dict[str, Tensor] = {}

    def read_cached(name: str) -> Tensor:
        if name not in cache:
            cache.clear()
            cache[name] = read(name)
        return cache[name]

    return read_cached


def _hf_parts(mapping: TensorMapping, read: ReadTensor) -> Iterator[Tensor]:
    """Yield the parts of one Hugging Face tensor, which are concatenated along the first dim.

    A tensor that concatenates several of jingu's parameters is yielded one parameter at a time, to save memory; any
    other tensor is one part.
    """
    if mapping.transform is IDENTITY and mapping.expert is None:
        yield from (read(name).detach() for name in mapping.jingu_shapes)
    else:
        yield mapping.to_hf([read(name).detach() for name in mapping.jingu_shapes])


def _split_into_shards(
    mappings: Sequence[TensorMapping], sizes: Sequence[int], shard_bytes: int
) -> list[list[TensorMapping]]:
    """Divide the tensors, in order, into shards of at most `shard_bytes`; a larger tensor has a shard of its own."""
    shards: list[list[TensorMapping]] = [[]]
    total = 0
    for mapping, size in zip(mappings, sizes, strict=True):
        if shards[-1] and total + size > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(mapping)
        total += size
    return shards
