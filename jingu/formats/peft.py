"""Reading adapters in the format of peft: adapter_config.json, and tensors named after the base model's modules.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint (the names that peft 0.10 and later read).

Adapters are read as peft reads them. Every setting and tensor must be understood; anything else is refused, since the
model would be wrong. What jingu has no modules for, such as a LoRA of the embedding or whole parameters
(`modules_to_save`), becomes an update: a function that computes a parameter from the base model's.

Where Hugging Face keeps several matrices of jingu's in one, as in a fused QKV projection, each of them gets the
adapter's whole A matrix and its own rows of B.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from jingu.checkpoint.mapped_files import map_tensor
from jingu.errors import JinguError
from jingu.formats.huggingface import read_json
from jingu.formats.safetensors import read_header
from jingu.formats.stored_model import StoredModel, Update, add_bias, extend_base
from jingu.model.adapter_layers import RESIDUAL_INITS, initial_factors, merge_adapter
from jingu.model.decoder import parameter_shapes
from jingu.model.families import equivalent_spec, map_tensors
from jingu.model.families.name_map import TRANSPOSE, TensorMapping
from jingu.model.spec import DeepPrompt, Experts, Ia3, Lora, ModelSpec, SoftPrompt

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PROMPT_KEY = "prompt_embeddings"

_PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
# Settings of LoRA and IA3 that are understood, and those that do not change what a trained adapter computes. Any other
# must be unset.
_UNDERSTOOD = """
    peft_type r lora_alpha rank_pattern alpha_pattern use_rslora use_dora bias lora_bias modules_to_save
    trainable_token_indices init_lora_weights auto_mapping base_model_name_or_path revision task_type inference_mode
    peft_version megatron_core qalora_group_size lora_dropout target_modules exclude_modules layers_to_transform
    layers_pattern fan_in_fan_out feedforward_modules init_ia3_weights loftq_config eva_config corda_config
    lora_ga_config runtime_config
"""
# Initializations that leave the base model as it is.
_PLAIN_INITS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
_ADAPTER_KEY = re.compile(
    r"(.+)\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|ia3_l|token_adapter\.trainable_tokens_delta)"
    r"(?:\.weight|(\.bias))?"
)
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"
_WHOLE_KEY = re.compile(r"(.+?)(?:\.base_layer)?\.(weight|bias)")

# A matrix of Hugging Face's, and the tensors of its adapter.
Adapted = tuple[TensorMapping, Mapping[str, Tensor]]


def base_model_path(folder: Path) -> Path:
    """Return the path of the base model that peft's config names. Raises JinguError unless it exists here."""
    base = Path(str(_read_config(folder).get("base_model_name_or_path")))
    if not base.exists():
        raise JinguError(
            f"these are adapters for {base}, which is not a local folder.",
            where=folder / ADAPTER_CONFIG,
            fix="Fetch that model, and set base_model_name_or_path to its folder.",
        )
    return base


def read_adapters(folder: Path, base: StoredModel) -> StoredModel:
    """Open the adapters that peft wrote into `folder`, for a model. Raises JinguError if they do not fit."""
    config = _read_config(folder)
    weights: dict[str, Tensor] = {}
    for key, location in read_header(folder / ADAPTER_WEIGHTS).items():
        assert isinstance(location.dtype, torch.dtype)
        weights[key] = map_tensor(folder / ADAPTER_WEIGHTS, location.begin, location.shape, location.dtype)
    if config["peft_type"] in _PROMPT_TYPES:
        prompt, parameters = _read_prompt(weights, base.spec, config, folder)
        return StoredModel(base.spec.model_copy(update={"adapter": prompt}), parameters.__getitem__, None, folder)
    return _AdapterReader(folder, base, config).read(weights)


class _AdapterReader:
    """Reads one folder with LoRA or IA3 adapters.

    Attributes:
        spec: of the base model, changed where adapters need it: a tied head that they change gets a weight of its own,
            and modules to which they add biases get these.
        parameters: those of jingu's adapters, by name.
        updates: functions that compute parameters from those of the base model, by name.
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
        # A tied head has no tensor of its own in the base model, but adapters may change it.
        own = self.spec.model_copy(update={"tie_word_embeddings": False})
        # The names are those of the model's own family, or of the one as which it is exported.
        candidates = [_mappings(spec) for spec in (own, equivalent_spec(own))]
        unknown = [modules.keys() - {name.rpartition(".")[0] for name in mappings} for mappings in candidates]
        if all(unknown):
            raise self._error(f"the model has no module {min(unknown[0])}", "Choose another base model.")
        mappings = candidates[bool(unknown[0])]
        holders = {name: mapping.hf_name for mapping in mappings.values() for name in mapping.jingu_shapes}
        self._untie(modules, *(holders[name].removesuffix(".weight") for name in ("embedding.weight", "head.weight")))
        # Whole parameters first: adapters are added to them.
        for module, leaves in modules.items():
            for leaf in ("weight", "bias"):
                if leaf in leaves:
                    self._replace(mappings.get(f"{module}.{leaf}"), f"{module}.{leaf}", leaves.pop(leaf))
            if TOKEN_ROWS in leaves:
                rows = leaves.pop(TOKEN_ROWS)
                (name,) = mappings[f"{module}.weight"].jingu_shapes
                self._update(name, partial(_replace_rows, self._token_ids(module, rows), rows))
        adapted = [(mappings[f"{module}.weight"], leaves) for module, leaves in modules.items() if leaves]
        is_lora = self.config["peft_type"] == "LORA"
        return self._assemble(self._read_lora(adapted) if is_lora else self._read_ia3(adapted))

    def _error(self, what: str, fix: str = "Merge it with peft, and use the merged model.") -> JinguError:
        return JinguError(f"{what}.", where=self.folder, fix=fix)

    def _group(self, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each of Hugging Face's modules, by the end of their keys."""
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
        """Give a tied head a weight of its own if adapters change only the head or only the embedding."""
        changes_embedding = set(modules.get(embedding, ())) - {TOKEN_ROWS}
        if self.spec.tie_word_embeddings and (changes_embedding or head in modules):
            self.spec = self.spec.model_copy(update={"tie_word_embeddings": False})

    def _update(self, name: str, update: Update) -> None:
        self.updates.setdefault(name, []).append(update)

    def _replace(self, mapping: TensorMapping | None, key: str, tensor: Tensor) -> None:
        """Replace whole parameters by those of peft (`modules_to_save`, biases)."""
        if mapping is None or mapping.expert is not None or mapping.shape != tensor.shape:
            shape = "none" if mapping is None else list(mapping.shape)
            raise self._error(f"the adapter replaces {key} by one of shape {list(tensor.shape)}; the model has {shape}")
        for name, value in mapping.to_jingu(tensor).items():
            self._update(name, partial(_constant, value))

    def _token_ids(self, module: str, rows: Tensor) -> Tensor:
        """Return the ids of the tokens whose rows are trained."""
        indices = self.config.get("trainable_token_indices") or []
        if isinstance(indices, Mapping):
            indices = next((ids for name, ids in indices.items() if f".{module}".endswith(f".{name}")), [])
        if len(indices) != len(rows):
            raise self._error(
                f"{module} has {len(rows)} trained tokens, but trainable_token_indices has {len(indices)}"
            )
        return torch.tensor(indices)

    def _read_lora(self, adapted: Sequence[Adapted]) -> Lora:
        """Read LoRA matrices. jingu has one rank and one scale for all: ranks are padded, and B is scaled."""
        config = self.config
        use_rslora = bool(config.get("use_rslora"))
        use_dora = bool(config.get("use_dora"))

        def lora(rank: int, alpha: float) -> Lora:
            return Lora(rank=rank, alpha=alpha, target_modules=(), use_rslora=use_rslora, use_dora=use_dora)

        modules = [mapping.hf_name.removesuffix(".weight") for mapping, _ in adapted]
        ranks = self._per_module("rank_pattern", modules, config.get("r", 8))
        alphas = self._per_module("alpha_pattern", modules, config.get("lora_alpha", 8))
        # B times the scale of the module, so that pairs of any rank can be padded to the largest rank.
        pairs = [
            self._lora_pair(mapping, leaves, lora(rank, alpha))
            for (mapping, leaves), rank, alpha in zip(adapted, ranks, alphas, strict=True)
        ]
        width = max((len(a) for a, _ in pairs), default=1)
        scale = lora(config.get("r", 8), config.get("lora_alpha", 8)).scale
        for (mapping, leaves), (a, b) in zip(adapted, pairs, strict=True):
            self._store(mapping, "lora_a", pad(a, (0, 0, 0, width - len(a))), by_rows=False)
            self._store(mapping, "lora_b", pad(b, (0, width - len(a))) / scale)
            if use_dora:
                self._store(mapping, "lora_m", leaves["lora_magnitude_vector"])
        return lora(width, scale * (width**0.5 if use_rslora else width))

    def _per_module(self, key: str, modules: Sequence[str], default: Any) -> list[Any]:
        """Return a setting of each module: that of the first pattern that matches the end of its name, as in peft."""
        patterns = self.config.get(key) or {}
        try:
            compiled = {re.compile(rf"(.*\.)?({pattern})"): value for pattern, value in patterns.items()}
        except re.error as error:
            raise self._error(f"{key} has a pattern that is no regular expression ({error})") from error
        for pattern, text in zip(compiled, patterns, strict=True):
            if not any(map(pattern.fullmatch, modules)):
                raise self._error(f"{key} has {text}, which matches no module with an adapter")
        return [
            next((value for pattern, value in compiled.items() if pattern.fullmatch(module)), default)
            for module in modules
        ]

    def _lora_pair(self, mapping: TensorMapping, leaves: Mapping[str, Tensor], own: Lora) -> tuple[Tensor, Tensor]:
        """Return the matrices A and, times the scale, B of one of Hugging Face's modules."""
        module = mapping.hf_name.removesuffix(".weight")
        if set(leaves) == {"lora_embedding_A", "lora_embedding_B"} and not own.use_dora:
            a = leaves["lora_embedding_B"].t()
            b = leaves["lora_embedding_A"].t()
        elif set(leaves) - {"lora_B.bias"} == {"lora_A", "lora_B", *["lora_magnitude_vector"] * own.use_dora}:
            a = leaves["lora_A"]
            b = leaves["lora_B"]
        else:
            raise self._error(f"{module} has the tensors {', '.join(sorted(leaves))}, which is not supported")
        is_transposed = mapping.transform is TRANSPOSE
        outputs, inputs = reversed(mapping.shape) if is_transposed else mapping.shape
        if a.shape != (own.rank, inputs) or b.shape != (outputs, own.rank):
            raise self._error(
                f"the matrices of {module} have the shapes {list(a.shape)} and {list(b.shape)}, but by the config and "
                f"the model they would be {[own.rank, inputs]} and {[outputs, own.rank]}",
                "Use the config and the base model that belong to these tensors.",
            )
        if own.use_dora and (mapping.expert is not None or "lora_B.bias" in leaves):
            raise self._error(f"DoRA of {module} is not supported")
        if "lora_B.bias" in leaves:
            self._add_bias(mapping, own.scale * leaves["lora_B.bias"])
        b = own.scale * b
        init = str(self.config.get("init_lora_weights", True)).lower()
        if init in _PLAIN_INITS:
            return a, b
        # peft has subtracted the initial matrices from the base model. With a negative sign they join the adapter.
        read = extend_base(self.base, self.spec).read
        weight = mapping.to_hf([read(name) for name in mapping.jingu_shapes]).float()
        initial_a, initial_b = initial_factors(init, weight.t() if is_transposed else weight, own)
        return torch.cat([a, initial_a]), torch.cat([b, -own.scale * initial_b], 1)

    def _add_bias(self, mapping: TensorMapping, bias: Tensor) -> None:
        """Add to the biases of a module; give the model biases if it has none."""
        sizes = [shape[0] for shape in mapping.jingu_shapes.values()]
        for name, piece in zip(mapping.jingu_shapes, _rows_from_hf(mapping, bias).split(sizes), strict=True):
            bias_name = f"{name.removesuffix('.weight')}.bias"
            self.spec = add_bias(self.spec, bias_name, self.folder)
            self._update(bias_name, partial(torch.add, other=piece))

    def _read_ia3(self, adapted: Sequence[Adapted]) -> Ia3:
        for mapping, leaves in adapted:
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
        """Store a tensor under the names of jingu's modules.

        Args:
            by_rows: whether each of several modules gets its own rows; otherwise it gets the whole tensor.
        """
        modules = [name.removesuffix(".weight") for name in mapping.jingu_shapes]
        if mapping.expert is not None:
            assert isinstance(self.spec.feed_forward, Experts)
            shape = (self.spec.feed_forward.num_experts, *tensor.shape)
            self.parameters.setdefault(f"{modules[0]}.{leaf}", tensor.new_zeros(shape))[mapping.expert] = tensor
            return
        sizes = [shape[0] for shape in mapping.jingu_shapes.values()]
        pieces = _rows_from_hf(mapping, tensor).split(sizes) if by_rows else [tensor] * len(modules)
        for module, piece in zip(modules, pieces, strict=True):
            self.parameters[f"{module}.{leaf}"] = piece

    def _assemble(self, adapter: Lora | Ia3) -> StoredModel:
        """Return the adapters. Those for which jingu has no modules become updates."""
        by_module: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.parameters.items():
            module, _, leaf = name.rpartition(".")
            by_module.setdefault(module, {})[leaf] = tensor
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
    """Return the tensors of Hugging Face's that a model has, by name."""
    return {mapping.hf_name: mapping for mapping in map_tensors(spec)}


def _rows_from_hf(mapping: TensorMapping, rows: Tensor) -> Tensor:
    """Put what belongs to the outputs of a matrix into jingu's order. A transposed matrix keeps the order."""
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
    tokens = config["num_virtual_tokens"]
    prompt = weights[PROMPT_KEY]
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
    kind = config.get("peft_type")
    unsupported = [] if kind in ("LORA", "IA3", *_PROMPT_TYPES) else ["peft_type"]
    if kind in _PROMPT_TYPES:
        unsupported += [key for key in ("modules_to_save",) if config.get(key)]
    else:
        unsupported += [key for key, value in config.items() if value and key not in _UNDERSTOOD.split()]
    init = str(config.get("init_lora_weights", True)).lower()
    if init not in (*_PLAIN_INITS, *RESIDUAL_INITS):
        unsupported.append("init_lora_weights")
    if unsupported:
        settings = ", ".join(f"{key} to {config.get(key)!r}" for key in unsupported)
        raise JinguError(
            f"the adapter sets {settings}, which is not supported.",
            where=folder / ADAPTER_CONFIG,
            fix="Merge it with peft, and use the merged model. If the initialization is not supported, peft's "
            "save_pretrained can write a plain LoRA (path_initial_model_for_weight_conversion).",
        )
    return config
