"""Adapters in the format of peft: adapter_config.json, and tensors under the names of the base model's modules.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint (the names that peft 0.10 and later read).

Where Hugging Face keeps several matrices of jingu's in one, as in a fused QKV projection, the adapter of that
matrix has the sum of the ranks: the A matrices are concatenated, and the B matrices form a block diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from jingu.checkpoint.mapped_files import map_tensor
from jingu.errors import JinguError
from jingu.formats.huggingface import read_json, write_json
from jingu.formats.safetensors import read_header
from jingu.formats.stored_model import Shapes, StoredModel
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.families.name_map import TRANSPOSE, TensorMapping, expand_rules
from jingu.model.prompt_tuning import DeepPromptLayer, SoftPromptLayer
from jingu.model.spec import Adapter, DeepPrompt, Ia3, Lora, ModelSpec, SoftPrompt
from jingu.runtime.files import create_folder_atomically

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PROMPT = "prompt_embeddings"
_PEFT_TYPES = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
_USE_THE_RUN = "Use the run itself: every command accepts it."

# Modules of jingu's that one matrix of Hugging Face's holds, and the number of outputs of each.
Modules = Mapping[str, int]
# Reads peft's tensors and config for a model into jingu's adapter and its parameters.
AdapterReader = Callable[[Mapping[str, Tensor], ModelSpec, Mapping[str, Any], Path], tuple[Adapter, dict[str, Tensor]]]


# Writing


def write_adapters(adapters: StoredModel, base: StoredModel, base_path: Path, to: Path) -> None:
    """Write adapters so that peft loads them onto the exported base model.

    Args:
        base_path: where the base model is, for the config.

    Raises:
        JinguError: peft has no such adapters.
    """
    adapter = adapters.spec.adapter
    assert adapter is not None
    if isinstance(adapter, Lora | Ia3):
        config, tensors = _convert_weights(adapters, base, adapter)
        # With an encoder, peft's class for the task asks for what transformers 5 no longer has; none is needed.
        encoder_decoder_task = None
    else:
        config, tensors = _convert_prompt(adapters, adapter)
        encoder_decoder_task = "SEQ_2_SEQ_LM"
    config |= {
        "task_type": "CAUSAL_LM" if base.spec.num_encoder_layers is None else encoder_decoder_task,
        "base_model_name_or_path": str(base_path),
        "inference_mode": True,
    }
    with create_folder_atomically(to) as folder:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / _WEIGHTS, metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, config)


def _convert_weights(
    adapters: StoredModel, base: StoredModel, adapter: Lora | Ia3
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return peft's config and tensors for LoRA or IA3."""
    shapes = parameter_shapes(adapters.spec)
    tensors: dict[str, Tensor] = {}
    # Hugging Face's modules, and how many of jingu's in each have adapters.
    targets: dict[str, int] = {}
    feedforward_modules: list[str] = []
    is_conv = False
    for mapping, modules in _matrices(base.spec):
        count = sum(f"{module}.{leaf}" in shapes for module in modules for leaf in ("lora_a", "ia3_in", "ia3_out"))
        if not count:
            continue
        module = mapping.hf_name.removesuffix(".weight")
        targets[module] = count
        is_conv = is_conv or mapping.transform is TRANSPOSE
        if isinstance(adapter, Lora):
            leaves = _convert_lora(adapters, base, shapes, mapping, modules)
        else:
            leaves = _convert_ia3(adapters, shapes, mapping, modules)
        tensors |= {f"{_PREFIX}{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
        if f"{next(iter(modules))}.ia3_in" in shapes:
            feedforward_modules.append(module)
    # Releases of peft that know experts as one tensor look for the last part of the names that they had before.
    names = sorted({name.rpartition(".")[2] if ".experts." in name else name for name in targets})
    config: dict[str, Any] = {"target_modules": names, "fan_in_fan_out": is_conv}
    if isinstance(adapter, Ia3):
        return {**config, "peft_type": "IA3", "feedforward_modules": feedforward_modules}, tensors
    # A fused matrix has the ranks of all its parts; alpha grows with them, so that the scale stays the same.
    fused = {name: count for name, count in targets.items() if count > 1}
    lora_config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": {name: adapter.rank * count for name, count in fused.items()},
        "alpha_pattern": {
            name: adapter.alpha * (count**0.5 if adapter.use_rslora else count) for name, count in fused.items()
        },
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "bias": "none",
    }
    return config | lora_config, tensors


def _matrices(spec: ModelSpec) -> Iterator[tuple[TensorMapping, Modules]]:
    """Yield Hugging Face's weight matrices with the modules of jingu's that each holds."""
    for mapping in expand_rules(FAMILIES[spec.family].rules, spec, parameter_shapes(spec)):
        if mapping.hf_name.endswith(".weight") and len(mapping.shape) > 1:
            yield mapping, {name.removesuffix(".weight"): shape[0] for name, shape in mapping.jingu_shapes.items()}


def _convert_lora(
    adapters: StoredModel, base: StoredModel, shapes: Shapes, mapping: TensorMapping, modules: Modules
) -> dict[str, Tensor]:
    """Return peft's tensors for one matrix of Hugging Face's."""
    adapted = [module for module in modules if f"{module}.lora_a" in shapes]
    a = [adapters.read(f"{module}.lora_a", mapping.expert) for module in adapted]
    b = {module: adapters.read(f"{module}.lora_b", mapping.expert) for module in adapted}
    example = next(iter(b.values()))
    # A part without an adapter has rows of zeros.
    blocks = [b[module] if module in b else example.new_zeros(rows, 0) for module, rows in modules.items()]
    tensors = {
        "lora_A.weight": torch.cat(a),
        "lora_B.weight": _rows_to_hf(mapping, torch.block_diag(*blocks)),
    }
    if f"{adapted[0]}.lora_m" in shapes:
        # DoRA: the magnitude of a part without an adapter is the norm of its weights.
        magnitudes = []
        for module in modules:
            if module in adapted:
                magnitudes.append(adapters.read(f"{module}.lora_m"))
            else:
                weight = base.read(f"{module}.weight").to(example.dtype)
                magnitudes.append(weight.square().sum(1).sqrt())
        tensors["lora_magnitude_vector"] = _rows_to_hf(mapping, torch.cat(magnitudes))
    return tensors


def _convert_ia3(adapters: StoredModel, shapes: Shapes, mapping: TensorMapping, modules: Modules) -> dict[str, Tensor]:
    """Return peft's tensor for one matrix of Hugging Face's: factors of its inputs or of its outputs."""
    input_factors = f"{next(iter(modules))}.ia3_in"
    if input_factors in shapes:
        return {"ia3_l": adapters.read(input_factors).unsqueeze(0)}
    adapted = {module: adapters.read(f"{module}.ia3_out") for module in modules if f"{module}.ia3_out" in shapes}
    example = next(iter(adapted.values()))
    factors = [adapted[module] if module in adapted else example.new_ones(rows) for module, rows in modules.items()]
    return {"ia3_l": _rows_to_hf(mapping, torch.cat(factors)).unsqueeze(1)}


def _rows_to_hf(mapping: TensorMapping, rows: Tensor) -> Tensor:
    """Put what belongs to the outputs of a matrix into Hugging Face's order. A transposed matrix keeps the order."""
    return rows if mapping.transform is TRANSPOSE else mapping.transform.to_hf(rows, mapping.spec)


def _rows_from_hf(mapping: TensorMapping, rows: Tensor) -> Tensor:
    """Undo `_rows_to_hf`."""
    return rows if mapping.transform is TRANSPOSE else mapping.transform.to_jingu(rows, mapping.spec)


def _convert_prompt(
    adapters: StoredModel, adapter: SoftPrompt | DeepPrompt
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return peft's config and tensor for prompt tuning, P-tuning or prefix tuning."""
    spec = adapters.spec
    config: dict[str, Any] = {
        "num_virtual_tokens": adapter.num_virtual_tokens,
        "num_layers": spec.num_layers,
        "num_attention_heads": spec.attention.num_heads,
        "token_dim": spec.hidden_size,
        "num_transformer_submodules": 1,
    }
    if isinstance(adapter, DeepPrompt):
        prefix = _convert_prefix(adapters, adapter)
        heads = spec.attention.num_kv_heads
        config |= {
            "peft_type": "PREFIX_TUNING",
            "num_layers": prefix.shape[1] // (2 * heads * spec.attention.head_dim),
            "num_attention_heads": heads,
            "token_dim": heads * spec.attention.head_dim,
            "num_transformer_submodules": 1 if spec.num_encoder_layers is None else 2,
        }
        return config, {_PROMPT: prefix}
    if adapter.after_input:
        raise JinguError("peft has no prompts after a text.", where=adapters.where, fix=_USE_THE_RUN)
    name = "prompt" if spec.num_encoder_layers is None else "encoder.prompt"
    layer = SoftPromptLayer(adapter, spec)
    _load_parameters(layer, name, adapters)
    if adapter.encoder == "none":
        config |= {"peft_type": "PROMPT_TUNING"}
    else:
        config |= {"peft_type": "P_TUNING", "encoder_hidden_size": adapter.encoder_hidden_size}
    return config, {_PROMPT: layer.vectors().detach()}


def _convert_prefix(adapters: StoredModel, adapter: DeepPrompt) -> Tensor:
    """Return the keys and values of all layers side by side, [virtual tokens, 2 × layers × K]."""
    spec = adapters.spec
    if spec.prompts[1]:
        raise JinguError("peft has no prompts in the blocks of an encoder.", where=adapters.where, fix=_USE_THE_RUN)
    parts: list[Tensor] = []
    for number in range(spec.num_layers):
        layer = DeepPromptLayer(adapter, spec)
        _load_parameters(layer, f"blocks.{number}.attention.prompt", adapters)
        keys_and_values = [x.flatten(1).detach() for x in layer.keys_and_values()]
        parts += keys_and_values
        if spec.num_encoder_layers is not None:
            # Every other pair is for the cross-attention, and unused.
            parts += [torch.zeros_like(x) for x in keys_and_values]
    return torch.cat(parts, 1)


def _load_parameters(module: nn.Module, prefix: str, adapters: StoredModel) -> None:
    for name, parameter in module.named_parameters():
        parameter.data = adapters.read(f"{prefix}.{name}")


# Reading


def base_model_path(folder: Path) -> Path:
    """Return the path of the base model that peft's config names. Raises JinguError unless it exists here."""
    base = Path(str(_read_config(folder).get("base_model_name_or_path")))
    if not base.exists():
        raise JinguError(
            f"these are adapters for {base}, which is no folder here.",
            where=folder / ADAPTER_CONFIG,
            fix="Fetch that model, and set base_model_name_or_path to its folder.",
        )
    return base


def read_adapters(folder: Path, base: StoredModel) -> StoredModel:
    """Open the adapters that peft wrote into `folder`, for a model. Raises JinguError if they do not fit."""
    config = _read_config(folder)
    weights: dict[str, Tensor] = {}
    for key, location in read_header(folder / _WEIGHTS).items():
        assert isinstance(location.dtype, torch.dtype)
        weights[key] = map_tensor(folder / _WEIGHTS, location.begin, location.shape, location.dtype)
    readers: dict[str, AdapterReader] = {"LORA": _read_lora, "IA3": _read_ia3}
    read_kind = readers.get(config["peft_type"], _read_prompt)
    adapter, parameters = read_kind(weights, base.spec, config, folder)
    spec = base.spec.model_copy(update={"adapter": adapter})

    def read(name: str, expert: int | None = None) -> Tensor:
        return parameters[name] if expert is None else parameters[name][expert]

    return StoredModel(spec, read, None, folder)


def _match(
    weights: Mapping[str, Tensor], spec: ModelSpec, folder: Path
) -> Iterator[tuple[TensorMapping, Modules, dict[str, Tensor]]]:
    """Yield the matrices that have adapters, the modules in each, and the adapter's tensors by their last name."""
    by_module: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        module, _, leaf = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        by_module.setdefault(module, {})[leaf] = tensor
    for mapping, modules in _matrices(spec):
        leaves = by_module.pop(mapping.hf_name.removesuffix(".weight"), None)
        if leaves is not None:
            yield mapping, modules, leaves
    if by_module:
        what = f"the model has no module {next(iter(by_module))}."
        raise JinguError(what, where=folder, fix="Choose another base model.")


def _read_lora(
    weights: Mapping[str, Tensor], spec: ModelSpec, config: Mapping[str, Any], folder: Path
) -> tuple[Lora, dict[str, Tensor]]:
    ranks = config.get("rank_pattern") or {}
    alphas = config.get("alpha_pattern") or {}
    use_dora = bool(config.get("use_dora"))

    def lora(rank: int, alpha: float, targets: Sequence[str] = ()) -> Lora:
        use_rslora = bool(config.get("use_rslora"))
        return Lora(rank=rank, alpha=alpha, target_modules=tuple(targets), use_rslora=use_rslora, use_dora=use_dora)

    common = lora(config["r"], config["lora_alpha"])
    parameters: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for mapping, modules, leaves in _match(weights, spec, folder):
        name = mapping.hf_name.removesuffix(".weight")
        own = lora(ranks.get(name, config["r"]), alphas.get(name, config["lora_alpha"]))
        a = leaves["lora_A"]
        # jingu has one scale for all modules: the difference goes into B.
        b = own.scale / common.scale * leaves["lora_B"]
        if mapping.expert is not None:
            module = next(iter(modules))
            experts.setdefault(f"{module}.lora_a", []).append(a)
            experts.setdefault(f"{module}.lora_b", []).append(b)
            continue
        outputs = list(modules.values())
        parts = {"lora_b": _rows_from_hf(mapping, b).split(outputs)}
        if use_dora:
            parts["lora_m"] = _rows_from_hf(mapping, leaves["lora_magnitude_vector"]).split(outputs)
        for number, module in enumerate(modules):
            parameters[f"{module}.lora_a"] = a
            for leaf, pieces in parts.items():
                parameters[f"{module}.{leaf}"] = pieces[number]
    parameters |= {name: torch.stack(matrices) for name, matrices in experts.items()}
    targets = sorted({name.rpartition(".")[0] for name in parameters})
    return lora(common.rank, common.alpha, targets), parameters


def _read_ia3(
    weights: Mapping[str, Tensor], spec: ModelSpec, _config: Mapping[str, Any], folder: Path
) -> tuple[Ia3, dict[str, Tensor]]:
    parameters: dict[str, Tensor] = {}
    for mapping, modules, leaves in _match(weights, spec, folder):
        factors = leaves["ia3_l"]
        if factors.shape[0] == 1:
            parameters[f"{next(iter(modules))}.ia3_in"] = factors.squeeze(0)
            continue
        rows = _rows_from_hf(mapping, factors.squeeze(1)).split(list(modules.values()))
        parameters |= {f"{module}.ia3_out": piece for module, piece in zip(modules, rows, strict=True)}
    return Ia3(target_modules=tuple(sorted({name.rpartition(".")[0] for name in parameters}))), parameters


def _read_prompt(
    weights: Mapping[str, Tensor], spec: ModelSpec, config: Mapping[str, Any], folder: Path
) -> tuple[SoftPrompt | DeepPrompt, dict[str, Tensor]]:
    tokens = config["num_virtual_tokens"]
    prompt = weights[_PROMPT]
    has_encoder = spec.num_encoder_layers is not None
    is_prefix = config["peft_type"] == "PREFIX_TUNING"
    # With an encoder every other pair of keys and values is for the cross-attention, and unused.
    pairs_per_layer = 2 if has_encoder else 1
    pairs = spec.num_layers * pairs_per_layer
    columns = 2 * pairs * spec.attention.num_kv_heads * spec.attention.head_dim if is_prefix else spec.hidden_size
    if prompt.shape != (tokens, columns):
        raise JinguError(
            f"the prompt has shape {list(prompt.shape)}, and for this model it would be {[tokens, columns]}.",
            where=folder,
            fix="Choose another base model.",
        )
    if not is_prefix:
        name = "encoder.prompt.embedding.weight" if has_encoder else "prompt.embedding.weight"
        return SoftPrompt(num_virtual_tokens=tokens), {name: prompt}
    pieces = prompt.chunk(2 * pairs, 1)
    parameters: dict[str, Tensor] = {}
    for layer in range(spec.num_layers):
        first = 2 * pairs_per_layer * layer
        parameters[f"blocks.{layer}.attention.prompt.k.weight"] = pieces[first].t()
        parameters[f"blocks.{layer}.attention.prompt.v.weight"] = pieces[first + 1].t()
    return DeepPrompt(num_virtual_tokens=tokens, in_encoder=False), parameters


def _read_config(folder: Path) -> dict[str, Any]:
    """Read peft's config. Raises JinguError for what jingu does not support."""
    config = read_json(
        folder / ADAPTER_CONFIG,
        f"there is no adapter of peft here (no {ADAPTER_CONFIG}).",
        "Give a folder that has one.",
    )
    unsupported = [key for key in ("modules_to_save", "target_parameters", "lora_bias") if config.get(key)]
    if config.get("peft_type") not in _PEFT_TYPES:
        unsupported.append("peft_type")
    if config.get("bias", "none") != "none":
        unsupported.append("bias")
    if unsupported:
        settings = ", ".join(f"{key} to {config.get(key)!r}" for key in unsupported)
        raise JinguError(f"the adapter sets {settings}, which is not supported.", where=folder / ADAPTER_CONFIG)
    return config
