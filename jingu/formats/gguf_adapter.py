"""LoRA adapters as GGUF files, which llama.cpp puts beside the matrices of a model, and Ollama (`ADAPTER`).

The layout is that of llama.cpp's `convert_lora_to_gguf.py`: for a matrix NAME, the tensors `NAME.lora_a` [R, I] and
`NAME.lora_b` [O, R], with a dim for experts before them. Their product is multiplied by alpha / R.

Shapes: R rank, I inputs, O outputs, E experts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.formats.gguf import open_tensors
from jingu.formats.gguf_export import find_architecture, matrix_mappings, partial_file
from jingu.formats.gguf_names import moves_columns
from jingu.formats.gguf_write import OutputTensor, write_gguf
from jingu.formats.stored_model import StoredModel, read_lora_pair
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import parameter_shapes
from jingu.model.families import equivalent_spec
from jingu.model.families.name_map import TensorMapping
from jingu.model.trainable import is_trained
from jingu.runtime.files import write_error, write_text_atomically
from jingu.text.corpus_file import import_optional

_LEAVES = ("lora_a", "lora_b")
_MERGE = "Merge them: `jingu export RUN --to MODEL.gguf` writes the merged model."


def write_gguf_adapters(adapters: StoredModel, base: StoredModel, base_path: Path, to: Path) -> None:
    """Write LoRA adapters as a GGUF file in fp32, and a Modelfile for Ollama beside it, which names the base model.

    Raises:
        JinguError: the file exists, or llama.cpp has no such adapters or no such base model.
    """
    library = import_optional("gguf", "writing GGUF files", str(to))
    if to.exists():
        raise JinguError("the file exists already.", where=to, fix="Delete it first, or choose another name.")
    adapter = adapters.spec.adapter
    if not isinstance(adapter, Lora) or adapter.use_dora or adapter.lora_bias:
        kind = "use_dora or lora_bias" if isinstance(adapter, Lora) else "virtual tokens or factors (only LoRA)"
        raise JinguError(f"llama.cpp has no adapters with {kind}.", where=to, fix=_MERGE)
    name = find_architecture(equivalent_spec(base.spec), to)
    left_out = {key for key in parameter_shapes(adapters.spec) if is_trained(key, adapters.spec)}
    tensors: dict[str, Tensor] = {}
    for mapping in matrix_mappings(base.spec, name, library, to):
        modules = [parameter.removesuffix(".weight") for parameter in mapping.jingu_shapes]
        adapted = [module for module in modules if f"{module}.lora_a" in left_out]
        if adapted:
            left_out -= {f"{module}.{leaf}" for module in adapted for leaf in _LEAVES}
            pair = _join_pairs(mapping, adapters, base, adapted)
            tensors |= {f"{mapping.hf_name}.{leaf}": part for leaf, part in zip(_LEAVES, pair, strict=True)}
    if left_out:
        raise JinguError(f"llama.cpp has no adapters such as {min(left_out)}.", where=to, fix=_MERGE)
    metadata = {
        library.Keys.General.ARCHITECTURE: name,
        library.Keys.General.TYPE: library.GGUFType.ADAPTER,
        library.Keys.General.NAME: to.stem,
        library.Keys.Adapter.TYPE: "lora",
        library.Keys.Adapter.LORA_ALPHA: float(adapter.alpha),
    }
    fp32 = library.GGMLQuantizationType.F32
    outputs = [OutputTensor(key, tuple(part.shape), fp32, partial(iter, [part])) for key, part in tensors.items()]
    try:
        with partial_file(to) as file:
            write_gguf(file, metadata, outputs, library)
    except OSError as error:
        raise write_error(error, to) from error
    write_text_atomically(to.with_name("Modelfile"), f"FROM {base_path}\nADAPTER ./{to.name}\n")


def _join_pairs(
    mapping: TensorMapping, adapters: StoredModel, base: StoredModel, adapted: list[str]
) -> tuple[Tensor, Tensor]:
    """Return the tensors A and B of a matrix of the file: of a fused one, with the sum of its parts' ranks."""
    adapter = adapters.spec.adapter
    assert isinstance(adapter, Lora)
    shape = next(iter(mapping.jingu_shapes.values()))
    if len(shape) == 3:
        pairs = [read_lora_pair(adapters, base, adapted[0], expert) for expert in range(shape[0])]
        a, b = (torch.stack([pair[part] for pair in pairs]) for part in (0, 1))
    else:
        blocks = {module: read_lora_pair(adapters, base, module) for module in adapted}
        a = torch.cat([block[0] for block in blocks.values()])
        rows = {name.removesuffix(".weight"): sizes[0] for name, sizes in mapping.jingu_shapes.items()}
        parts = [blocks[module][1] if module in blocks else a.new_zeros(size, 0) for module, size in rows.items()]
        b = torch.block_diag(*parts)
        if moves_columns(mapping.transform):
            a = mapping.transform.to_hf(a, mapping.spec)
        else:
            b = mapping.transform.to_hf(b, mapping.spec)
    # B has the scale of its module; llama.cpp multiplies by alpha / rank.
    return a, b * (a.shape[-2] / adapter.alpha)


def read_gguf_adapters(file: Path, base: StoredModel) -> StoredModel:
    """Open the LoRA adapters in a GGUF file, for a model.

    Raises:
        JinguError: the file is damaged, has no adapters, or they do not fit the model.
    """
    library = import_optional("gguf", "reading GGUF files", str(file))
    metadata, tensors = open_tensors(file, library)
    if (metadata.get("general.type"), metadata.get(library.Keys.Adapter.TYPE)) != ("adapter", "lora"):
        fix = "Give a file that `jingu tune export` or llama.cpp's convert_lora_to_gguf.py has written."
        raise JinguError("the file has no LoRA adapters.", where=file, fix=fix)
    name = find_architecture(equivalent_spec(base.spec), file)
    if metadata.get("general.architecture") != name:
        what = f"the adapters are for {metadata.get('general.architecture')}, and the model is {name}."
        raise JinguError(what, where=file, fix="Choose another base model.")
    parameters: dict[str, Tensor] = {}
    for mapping in matrix_mappings(base.spec, name, library, file):
        pair = [tensors.pop(f"{mapping.hf_name}.{leaf}", None) for leaf in _LEAVES]
        if pair[0] is not None and pair[1] is not None:
            parameters |= _divide_pair(mapping, pair[0](), pair[1](), file)
    if tensors:
        fix = "Merge them with llama.cpp, and use the merged model."
        raise JinguError(f"the file has a tensor {min(tensors)}, which is not supported.", where=file, fix=fix)
    ranks = {key.removesuffix(".lora_a"): a.shape[-2] for key, a in parameters.items() if key.endswith(".lora_a")}
    alpha = float(metadata.get(library.Keys.Adapter.LORA_ALPHA) or 0.0)
    adapter = Lora(
        rank=max(ranks.values(), default=1),
        alpha=alpha or 1.0,
        target_modules=tuple(ranks),
        rank_pattern=tuple(ranks.items()),
        # Without alpha, the product is not scaled.
        alpha_pattern=() if alpha else tuple((module, float(rank)) for module, rank in ranks.items()),
    )
    spec = base.spec.model_copy(update={"adapter": adapter})

    def read(name: str, expert: int | None = None) -> Tensor:
        return parameters[name] if expert is None else parameters[name][expert]

    return StoredModel(spec, read, None, file, generation_config=base.generation_config)


def _divide_pair(mapping: TensorMapping, a: Tensor, b: Tensor, file: Path) -> dict[str, Tensor]:
    """Return jingu's matrices A and B of the modules that a matrix of the file holds, by name."""
    shape = mapping.shape
    sizes = (*shape[:-2], shape[-2], a.shape[-2]), (*shape[:-2], a.shape[-2], shape[-1])
    if (tuple(b.shape), tuple(a.shape)) != sizes:
        what = f"the matrices {list(a.shape)} and {list(b.shape)} do not fit {mapping.hf_name} {list(shape)}."
        raise JinguError(what, where=file, fix="Choose another base model.")
    if b.dim() == 2:
        if moves_columns(mapping.transform):
            a = mapping.transform.to_jingu(a, mapping.spec)
        else:
            b = mapping.transform.to_jingu(b, mapping.spec)
    modules = [name.removesuffix(".weight") for name in mapping.jingu_shapes]
    parts = b.split([size[-2] for size in mapping.jingu_shapes.values()], -2)
    pairs = {f"{module}.lora_b": part for module, part in zip(modules, parts, strict=True)}
    return pairs | {f"{module}.lora_a": a for module in modules}
