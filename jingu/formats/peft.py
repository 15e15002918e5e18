"""Reading adapters in the format of peft: adapter_config.json, and tensors named after the base model's modules.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint (the names that peft 0.10 and later read).

A setting or tensor that jingu does not support is refused, because the model would compute something else than in peft.
jingu has no modules for some changes, such as a LoRA of the embedding or whole parameters (`modules_to_save`). Such a
change becomes an update: a function that computes a parameter from that of the base model.

One matrix of Hugging Face can contain several of jingu's, as a fused QKV projection does. Each of these gets the whole
matrix A of the adapter, and its own rows of B.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from jingu.checkpoint.mapped_files import map_tensor
from jingu.errors import JinguError
from jingu.formats.description import ModelDescription, find_end_ids
from jingu.formats.huggingface import read_model_json
from jingu.formats.peft_experts import take_expert_adapters
from jingu.formats.safetensors import read_header
from jingu.formats.stored_model import StoredModel, Update, add_bias, extend_base
from jingu.model.adapter_layers import RESIDUAL_INITS, initial_factors, merge_adapter
from jingu.model.adapter_specs import DeepPrompt, Ia3, Lora, SoftPrompt
from jingu.model.decoder import parameter_shapes
from jingu.model.families import equivalent_spec, map_tensors
from jingu.model.families.name_map import TRANSPOSE, TensorMapping
from jingu.model.parts import cached_numbers
from jingu.model.spec import ModelSpec
from jingu.runtime.hub import is_available, parse_name
from jingu.runtime.log import log_warning
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import find_tokenizer_file

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PROMPT_KEY = "prompt_embeddings"

_PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
# Settings of LoRA and IA3 that are read here, and settings that do not matter once an adapter is trained. Any other
# setting must be unset.
_UNDERSTOOD = """
    peft_type r lora_alpha rank_pattern alpha_pattern use_rslora use_dora bias lora_bias modules_to_save
    trainable_token_indices init_lora_weights auto_mapping base_model_name_or_path revision task_type inference_mode
    peft_version megatron_core qalora_group_size lora_dropout target_modules exclude_modules layers_to_transform
    layers_pattern fan_in_fan_out feedforward_modules init_ia3_weights loftq_config eva_config corda_config
    lora_ga_config runtime_config target_parameters
"""
# Initializations that do not change the base model.
_PLAIN_INITS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
_ADAPTER_KEY = re.compile(
    r"(.+)\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|ia3_l|token_adapter\.trainable_tokens_delta)"
    r"(?:\.weight|(\.bias))?"
)
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"
_WHOLE_KEY = re.compile(r"(.+?)(?:\.base_layer)?\.(weight|bias)")

# A weight matrix of Hugging Face, and the tensors of its adapter by the end of their keys.
Adapted = tuple[TensorMapping, Mapping[str, Tensor]]


def base_model_path(folder: Path) -> Path:
    """Return the path of the base model that peft's config names.

    Raises:
        JinguError: nothing exists at that path, or it leads back to the same adapters.
    """
    base = _named_base(folder)
    # The base model can consist of adapters and another base model.
    visited_folders = {folder.resolve()}
    further = base
    while (further / ADAPTER_CONFIG).is_file():
        if further.resolve() in visited_folders:
            raise JinguError(
                f"the base model of these adapters, {base}, consists of the adapters themselves.",
                where=folder / ADAPTER_CONFIG,
                fix="Set base_model_name_or_path to the folder of the model that they were trained on.",
            )
        visited_folders.add(further.resolve())
        further = _named_base(further)
    if not is_available(base):
        raise JinguError(
            f"these are adapters for {base}, which is neither a local folder nor a name on the hub.",
            where=folder / ADAPTER_CONFIG,
            fix="Fetch that model, and set base_model_name_or_path to its folder.",
        )
    return base


def _named_base(folder: Path) -> Path:
    config = _read_config(folder)
    name = str(config.get("base_model_name_or_path"))
    revision = config.get("revision")
    if revision is None or Path(name).exists() or parse_name(name) is None:
        return Path(name)
    return Path(f"{name}@{revision}")


def read_adapters(folder: Path, base: StoredModel) -> StoredModel:
    """Open the adapters in a peft folder.

    Args:
        base: the model that the adapters will be applied to.

    Raises:
        JinguError: the folder has no adapters, jingu does not support them, or they do not fit the model.
    """
    config = _read_config(folder)
    weights: dict[str, Tensor] = {}
    for key, location in read_header(folder / ADAPTER_WEIGHTS).items():
        if not isinstance(location.dtype, torch.dtype):
            raise JinguError(
                f"the tensor {key} has the dtype {location.dtype}, which is not supported.",
                where=folder / ADAPTER_WEIGHTS,
                fix="Convert it to bf16 or fp32.",
            )
        weights[key] = map_tensor(folder / ADAPTER_WEIGHTS, location.begin, location.shape, location.dtype)
    if config["peft_type"] in _PROMPT_TYPES:
        prompt, parameters = _read_prompt(weights, base.spec, config, folder)
        spec = base.spec.model_copy(update={"adapter": prompt})
        adapters = StoredModel(spec, parameters.__getitem__, None, folder)
    else:
        adapters = _AdapterReader(folder, base, config).read(weights)
    return _add_description(adapters, base, folder)


def _add_description(adapters: StoredModel, base: StoredModel, folder: Path) -> StoredModel:
    """Return adapters with the tokenizer and the generation config in their folder.

    Without a generation config there, the tokens that end an answer of the tokenizer's chat template are added to those
    of the base model, if the base has another template.
    """
    generation_config = base.generation_config
    if (folder / "generation_config.json").is_file():
        generation_config = read_model_json(folder / "generation_config.json")
        adapters = replace(adapters, generation_config=generation_config)
    if find_tokenizer_file(folder) is None:
        return adapters
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > base.spec.vocab_size:
        log_warning(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} entries, more than the {base.spec.vocab_size:,} of "
            "the base model, whose tokenizer is used instead."
        )
        return adapters
    adapters = replace(adapters, tokenizer_folder=folder)
    templates = None if base.tokenizer_folder is None else Tokenizer.load(base.tokenizer_folder).chat_templates
    if adapters.generation_config is None and tokenizer.chat_templates not in ({}, base.chat_templates, templates):
        description = ModelDescription(base.config, generation_config)
        description = description.add_end_ids(find_end_ids(tokenizer), tokenizer.eos_token_id)
        return replace(adapters, config=description.config, generation_config=description.generation_config)
    return adapters


class _AdapterReader:
    """Reads one folder with LoRA or IA3 adapters.

    Attributes:
        spec: the spec of the base model, extended where the adapters need it: with an untied head, and with biases.
        parameters: the parameters of jingu's adapter modules, by name.
        updates: for each parameter of the base model that is changed, the functions to apply to it, in order.
    """

    def __init__(self, folder: Path, base: StoredModel, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.base = base
        self.config = config
        self.spec = base.spec
        self.parameters: dict[str, Tensor] = {}
        self.updates: dict[str, list[Update]] = {}

    def read(self, weights: Mapping[str, Tensor]) -> StoredModel:
        """Return the adapters, given peft's tensors by their keys."""
        modules = self._group(weights)
        # Untie the head to get its name: adapters may change a tied head, which is no tensor of the base model.
        untied_spec = self.spec.model_copy(update={"tie_word_embeddings": False})
        # peft's names are those of the model's own family, or of the equivalent family to which jingu exports it.
        candidates = [_mappings(spec) for spec in (untied_spec, equivalent_spec(untied_spec))]
        expert_adapters = take_expert_adapters(modules, candidates[0], untied_spec)
        if self.config.get("target_parameters") and not expert_adapters:
            parameters = ", ".join(map(str, self.config["target_parameters"]))
            raise self._error(f"it adapts the parameters {parameters}, and of these jingu reads the experts of a layer")
        unknown = [modules.keys() - {name.rpartition(".")[0] for name in mappings} for mappings in candidates]
        if all(unknown):
            raise self._error(f"the model has no module {min(unknown[0])}", "Choose another base model.")
        mappings = candidates[bool(unknown[0])]
        holders = {name: mapping.hf_name for mapping in mappings.values() for name in mapping.jingu_shapes}
        self._untie(modules, *(holders[name].removesuffix(".weight") for name in ("embedding.weight", "head.weight")))
        # Replace whole parameters first, because the adapters are added to the replaced ones.
        for module, leaves in modules.items():
            for leaf in ("weight", "bias"):
                if leaf in leaves:
                    self._replace(mappings.get(f"{module}.{leaf}"), f"{module}.{leaf}", leaves.pop(leaf))
            if TOKEN_ROWS in leaves:
                rows = leaves.pop(TOKEN_ROWS)
                (name,) = mappings[f"{module}.weight"].jingu_shapes
                self._update(name, partial(_replace_rows, self._token_ids(module, rows), rows))
        adapted_modules = [(mappings[f"{module}.weight"], leaves) for module, leaves in modules.items() if leaves]
        adapted_modules += expert_adapters
        is_lora = self.config["peft_type"] == "LORA"
        return self._assemble(self._read_lora(adapted_modules) if is_lora else self._read_ia3(adapted_modules))

    def _error(self, what: str, fix: str = "Merge it with peft, and use the merged model.") -> JinguError:
        return JinguError(f"{what}.", where=self.folder, fix=fix)

    def _group(self, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Group peft's tensors by Hugging Face's module, with the end of the key (such as `lora_A`) as their name."""
        modules: dict[str, dict[str, Tensor]] = {}
        for key, tensor in weights.items():
            name = key.removeprefix(PREFIX)
            if match := _ADAPTER_KEY.fullmatch(name):
                leaf = f"{match[2]}{match[3] or ''}"
            elif match := _WHOLE_KEY.fullmatch(name):
                leaf = match[2]
            else:
                raise self._error(f"the adapter has a tensor {key}, which is not supported")
            modules.setdefault(match[1], {})[leaf] = tensor
        return modules

    def _untie(self, modules: Mapping[str, Mapping[str, Tensor]], embedding: str, head: str) -> None:
        """Untie a tied head if adapters change it, or if they change more of the embedding than single rows.

        Args:
            embedding, head: Hugging Face's names of the two modules.
        """
        changes_embedding = set(modules.get(embedding, ())) - {TOKEN_ROWS}
        if self.spec.tie_word_embeddings and (changes_embedding or head in modules):
            self.spec = self.spec.model_copy(update={"tie_word_embeddings": False})

    def _update(self, name: str, update: Update) -> None:
        self.updates.setdefault(name, []).append(update)

    def _replace(self, mapping: TensorMapping | None, key: str, tensor: Tensor) -> None:
        """Replace a whole parameter by the tensor in peft's file (`modules_to_save`, biases).

        Args:
            mapping: the parameter's mapping; None: the model has no such parameter.
            key: Hugging Face's name of the parameter.
        """
        if mapping is None or mapping.expert is not None or mapping.shape != tensor.shape:
            shape = "none" if mapping is None else list(mapping.shape)
            raise self._error(f"the adapter replaces {key} by one of shape {list(tensor.shape)}; the model has {shape}")
        for name, value in mapping.to_jingu(tensor).items():
            self._update(name, partial(_constant, value))

    def _token_ids(self, module: str, rows: Tensor) -> Tensor:
        """Return the ids of the tokens whose embedding rows are trained, from `trainable_token_indices`."""
        indices = self.config.get("trainable_token_indices") or []
        if isinstance(indices, Mapping):
            indices = next((ids for name, ids in indices.items() if f".{module}".endswith(f".{name}")), [])
        if len(indices) != len(rows):
            raise self._error(
                f"{module} has {len(rows)} trained tokens, but trainable_token_indices has {len(indices)}"
            )
        return torch.tensor(indices)

    def _read_lora(self, adapters: Sequence[Adapted]) -> Lora:
        """Read LoRA matrices.

        peft allows a rank and an alpha per module, and jingu has one for all. Matrices are padded with zeros to the
        largest rank, and B is multiplied by the ratio of the scales.
        """
        config = self.config
        use_rslora = bool(config.get("use_rslora"))
        use_dora = bool(config.get("use_dora"))

        def lora(rank: int, alpha: float) -> Lora:
            return Lora(rank=rank, alpha=alpha, target_modules=(), use_rslora=use_rslora, use_dora=use_dora)

        modules = [mapping.hf_name.removesuffix(".weight") for mapping, _ in adapters]
        ranks = self._per_module("rank_pattern", modules, config.get("r", 8))
        alphas = self._per_module("alpha_pattern", modules, config.get("lora_alpha", 8))
        # B includes the scale of its module, so that padding to the largest rank does not change the product.
        pairs = [
            self._lora_pair(mapping, leaves, lora(rank, alpha))
            for (mapping, leaves), rank, alpha in zip(adapters, ranks, alphas, strict=True)
        ]
        width = max((len(a) for a, _ in pairs), default=1)
        scale = lora(config.get("r", 8), config.get("lora_alpha", 8)).scale
        for (mapping, leaves), (a, b) in zip(adapters, pairs, strict=True):
            self._store(mapping, "lora_a", pad(a, (0, 0, 0, width - len(a))), by_rows=False)
            self._store(mapping, "lora_b", pad(b, (0, width - len(a))) / scale)
            if use_dora:
                self._store(mapping, "lora_m", leaves["lora_magnitude_vector"])
        # Choose alpha so that rank `width` has the same scale.
        return lora(width, scale * (width**0.5 if use_rslora else width))

    def _per_module(self, key: str, modules: Sequence[str], default: Any) -> list[Any]:
        """Return a setting for each module. As in peft, the first pattern that matches the end of its name applies.

        Args:
            key: `rank_pattern` or `alpha_pattern`.
            default: the value for modules that no pattern matches.
        """
        patterns = self.config.get(key) or {}
        try:
            patterns_compiled = {re.compile(rf"(.*\.)?({pattern})"): value for pattern, value in patterns.items()}
        except re.error as error:
            raise self._error(f"{key} has a pattern that is no regular expression ({error})") from error
        for pattern, text in zip(patterns_compiled, patterns, strict=True):
            if not any(map(pattern.fullmatch, modules)):
                raise self._error(f"{key} has {text}, which matches no module with an adapter")
        return [
            next((value for pattern, value in patterns_compiled.items() if pattern.fullmatch(module)), default)
            for module in modules
        ]

    def _lora_pair(self, mapping: TensorMapping, leaves: Mapping[str, Tensor], lora: Lora) -> tuple[Tensor, Tensor]:
        """Return matrix A [R, I], and B [O, R] times the scale, of one of Hugging Face's modules.

        R is twice the rank of `lora` if peft subtracted the initial matrices from the base model (PiSSA, OLoRA).
        """
        module = mapping.hf_name.removesuffix(".weight")
        # An embedding is the transposed weight of a linear layer, so its A and B change places.
        if set(leaves) == {"lora_embedding_A", "lora_embedding_B"} and not lora.use_dora:
            a = leaves["lora_embedding_B"].t()
            b = leaves["lora_embedding_A"].t()
        elif set(leaves) - {"lora_B.bias"} == {"lora_A", "lora_B", *["lora_magnitude_vector"] * lora.use_dora}:
            a = leaves["lora_A"]
            b = leaves["lora_B"]
        else:
            raise self._error(f"{module} has the tensors {', '.join(sorted(leaves))}, which is not supported")
        is_transposed = mapping.transform is TRANSPOSE
        outputs, inputs = reversed(mapping.shape) if is_transposed else mapping.shape
        if a.shape != (lora.rank, inputs) or b.shape != (outputs, lora.rank):
            raise self._error(
                f"the matrices of {module} have the shapes {list(a.shape)} and {list(b.shape)}, but by the config and "
                f"the model they would be {[lora.rank, inputs]} and {[outputs, lora.rank]}",
                "Use the config and the base model that belong to these tensors.",
            )
        if lora.use_dora and (mapping.expert is not None or "lora_B.bias" in leaves):
            raise self._error(f"DoRA of {module} is not supported")
        if "lora_B.bias" in leaves:
            self._add_bias(mapping, lora.scale * leaves["lora_B.bias"])
        b = lora.scale * b
        init = str(self.config.get("init_lora_weights", True)).lower()
        if init in _PLAIN_INITS:
            return a, b
        # peft subtracted the initial product from the base model. Append the initial matrices with a negative sign.
        read = extend_base(self.base, self.spec).read
        weight = mapping.to_hf([read(name) for name in mapping.jingu_shapes]).float()
        initial_a, initial_b = initial_factors(init, weight.t() if is_transposed else weight, lora)
        return torch.cat([a, initial_a]), torch.cat([b, -lora.scale * initial_b], 1)

    def _add_bias(self, mapping: TensorMapping, bias: Tensor) -> None:
        """Add the bias of a LoRA to that of its module. If the module has no bias, the spec gets one."""
        sizes = [shape[0] for shape in mapping.jingu_shapes.values()]
        for name, piece in zip(mapping.jingu_shapes, _rows_from_hf(mapping, bias).split(sizes), strict=True):
            bias_name = f"{name.removesuffix('.weight')}.bias"
            self.spec = add_bias(self.spec, bias_name, self.folder)
            self._update(bias_name, partial(torch.add, other=piece))

    def _read_ia3(self, adapters: Sequence[Adapted]) -> Ia3:
        """Read IA3 vectors. peft stores factors of a module's inputs as [1, I], and of its outputs as [O, 1]."""
        for mapping, leaves in adapters:
            module = mapping.hf_name.removesuffix(".weight")
            if set(leaves) != {"ia3_l"} or mapping.expert is not None:
                raise self._error(f"{module} has the tensors {', '.join(sorted(leaves))}, which is not supported")
            factors = leaves["ia3_l"]
            if factors.shape[0] == 1:
                self._store(mapping, "ia3_in", factors.squeeze(0), by_rows=False)
            else:
                self._store(mapping, "ia3_out", factors.squeeze(1))
        return Ia3(target_modules=())

    def _store(self, mapping: TensorMapping, leaf: str, tensor: Tensor, *, by_rows: bool = True) -> None:
        """Store an adapter's tensor under the names of jingu's modules.

        Args:
            leaf: jingu's name of the tensor in its module, such as `lora_a`.
            by_rows: whether the first dim is that of the outputs, so that each of jingu's modules gets its own rows;
                otherwise each gets the whole tensor.
        """
        modules = [name.removesuffix(".weight") for name in mapping.jingu_shapes]
        if mapping.expert is not None:
            assert self.spec.experts is not None
            shape = (self.spec.experts.num_experts, *tensor.shape)
            self.parameters.setdefault(f"{modules[0]}.{leaf}", tensor.new_zeros(shape))[mapping.expert] = tensor
            return
        sizes = [shape[0] for shape in mapping.jingu_shapes.values()]
        pieces = _rows_from_hf(mapping, tensor).split(sizes) if by_rows else [tensor] * len(modules)
        for module, piece in zip(modules, pieces, strict=True):
            self.parameters[f"{module}.{leaf}"] = piece

    def _assemble(self, adapter: Lora | Ia3) -> StoredModel:
        """Return the adapters as a model. Adapters for which jingu has no modules become updates."""
        by_module: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.parameters.items():
            module, _, leaf = name.rpartition(".")
            by_module.setdefault(module, {})[leaf] = tensor
        # Adapt every module, to learn for which of them jingu has adapter modules.
        everywhere = adapter.model_copy(update={"target_modules": tuple(by_module)})
        shapes = parameter_shapes(self.spec.model_copy(update={"adapter": everywhere}))
        targets = []
        for module, parts in sorted(by_module.items()):
            if all(f"{module}.{leaf}" in shapes for leaf in parts):
                targets.append(module)
                continue
            for leaf in ("weight", "bias"):
                self._update(f"{module}.{leaf}", partial(merge_adapter, leaf=leaf, parts=parts, adapter=adapter))
        adapter = adapter.model_copy(update={"target_modules": tuple(targets)})
        spec = self.spec.model_copy(update={"adapter": adapter})
        parameters = self.parameters

        def read(name: str, expert: int | None = None) -> Tensor:
            return parameters[name] if expert is None else parameters[name][expert]

        updates = {name: partial(_apply_all, steps) for name, steps in self.updates.items() if name in shapes}
        return StoredModel(spec, read, None, self.folder, updates=updates)


def _mappings(spec: ModelSpec) -> dict[str, TensorMapping]:
    """Return the mapping of each of a model's tensors, by Hugging Face's name."""
    return {mapping.hf_name: mapping for mapping in map_tensors(spec)}


def _rows_from_hf(mapping: TensorMapping, rows: Tensor) -> Tensor:
    """Reorder the rows of a tensor, one per output of a matrix, from Hugging Face's order to jingu's.

    A transposed matrix has the same order in both.
    """
    return rows if mapping.transform is TRANSPOSE else mapping.transform.to_jingu(rows, mapping.spec)


def _constant(value: Tensor, _old: Tensor) -> Tensor:
    return value


def _replace_rows(ids: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return weight.index_copy(0, ids, rows.to(weight.dtype))


def _apply_all(updates: Sequence[Update], value: Tensor) -> Tensor:
    for update in updates:
        value = update(value)
    return value


def _read_prompt(
    weights: Mapping[str, Tensor], spec: ModelSpec, config: Mapping[str, Any], folder: Path
) -> tuple[SoftPrompt | DeepPrompt, dict[str, Tensor]]:
    """Return the adapter and its parameters for prompt tuning, P-tuning or prefix tuning.

    peft stores the virtual tokens as [virtual tokens, hidden size], or for prefix tuning the keys and values of all
    layers side by side, [virtual tokens, columns].

    Raises:
        JinguError: the shape is not that of a prompt for this model.
    """
    tokens = config.get("num_virtual_tokens")
    prompt = weights.get(PROMPT_KEY)
    if tokens is None or prompt is None:
        absent = f"num_virtual_tokens in {ADAPTER_CONFIG}" if tokens is None else f"the tensor {PROMPT_KEY}"
        raise JinguError(
            f"the prompt is incomplete: {absent} is missing.", where=folder, fix="Save it again with peft."
        )
    has_encoder = spec.num_encoder_layers is not None
    is_prefix = config["peft_type"] == "PREFIX_TUNING"
    # In an encoder-decoder, every second pair of keys and values is for cross-attention, and is not used.
    pairs_per_layer = 2 if has_encoder else 1
    columns = pairs_per_layer * sum(map(cached_numbers, spec.layers)) if is_prefix else spec.hidden_size
    if prompt.shape != (tokens, columns):
        raise JinguError(
            f"the prompt has shape {list(prompt.shape)}, and for this model it would be {[tokens, columns]}.",
            where=folder,
            fix="Choose another base model.",
        )
    if not is_prefix:
        name = "encoder.prompt.embedding.weight" if has_encoder else "prompt.embedding.weight"
        return SoftPrompt(num_virtual_tokens=tokens), {name: prompt}
    pieces = prompt.chunk(2 * pairs_per_layer * spec.num_layers, 1)
    parameters: dict[str, Tensor] = {}
    for layer in range(spec.num_layers):
        first = 2 * pairs_per_layer * layer
        parameters[f"blocks.{layer}.attention.prompt.k.weight"] = pieces[first].t()
        parameters[f"blocks.{layer}.attention.prompt.v.weight"] = pieces[first + 1].t()
    return DeepPrompt(num_virtual_tokens=tokens, in_encoder=False), parameters


def _read_config(folder: Path) -> dict[str, Any]:
    """Return peft's config.

    Raises:
        JinguError: it is missing or damaged, or has settings that jingu does not support.
    """
    config = read_model_json(
        folder / ADAPTER_CONFIG,
        f"there is no adapter of peft here (no {ADAPTER_CONFIG}).",
        "Give a folder that has one.",
    )
    kind = config.get("peft_type")
    unsupported_keys = [] if kind in ("LORA", "IA3", *_PROMPT_TYPES) else ["peft_type"]
    if kind in _PROMPT_TYPES:
        unsupported_keys += [key for key in ("modules_to_save",) if config.get(key)]
    else:
        unsupported_keys += [key for key, value in config.items() if value and key not in _UNDERSTOOD.split()]
    init = str(config.get("init_lora_weights", True)).lower()
    if init not in (*_PLAIN_INITS, *RESIDUAL_INITS):
        unsupported_keys.append("init_lora_weights")
    if unsupported_keys:
        settings = ", ".join(f"{key} to {config.get(key)!r}" for key in unsupported_keys)
        raise JinguError(
            f"the adapter sets {settings}, which is not supported.",
            where=folder / ADAPTER_CONFIG,
            fix="Merge it with peft, and use the merged model. If the initialization is not supported, peft's "
            "save_pretrained can write a plain LoRA (path_initial_model_for_weight_conversion).",
        )
    if kind == "LORA":
        _check_sizes(config, folder / ADAPTER_CONFIG)
    return config


def _check_sizes(config: Mapping[str, Any], where: Path) -> None:
    """Raise JinguError unless every rank is a positive whole number, and every alpha a positive number."""
    fix = "Correct the file, or save the adapter again with peft."
    for name, pattern_name, types in (("r", "rank_pattern", (int,)), ("lora_alpha", "alpha_pattern", (int, float))):
        patterns = config.get(pattern_name) or {}
        if not isinstance(patterns, Mapping):
            what = f"{pattern_name} is {patterns!r}, and should be an object with a number for each pattern."
            raise JinguError(what, where=where, fix=fix)
        sizes = {name: config.get(name, 8)} | {f"{pattern_name}.{key}": value for key, value in patterns.items()}
        for key, value in sizes.items():
            if type(value) not in types or not 0 < value < math.inf:
                noun = "whole number" if name == "r" else "number"
                raise JinguError(f"{key} is {value!r}, and should be a {noun} above 0.", where=where, fix=fix)
