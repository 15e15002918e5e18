"""A model on disk in any format: its spec, and a function that reads its parameters one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from jingu.checkpoint.mapped_files import expect_repeated_reads
from jingu.checkpoint.remote import CheckpointPath
from jingu.errors import JinguError
from jingu.model.adapter_layers import RESIDUAL_INITS, initial_factors, merge_parameter
from jingu.model.adapter_specs import Ia3, Lora
from jingu.model.decoder import Decoder, build_model, parameter_shapes
from jingu.model.quantize import keep_stored
from jingu.model.quantized_weight import QuantizedWeight, StoredWeight, dequantize, quantize
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.trainable import is_adapter, is_trained
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize

SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
Shapes = Mapping[str, torch.Size]
Update = Callable[[Tensor], Tensor]
# The field of the spec that gives a module a bias, by the module's name.
_BIAS_FIELDS = {
    **dict.fromkeys(("q", "k", "v"), "attention.qkv_bias"),
    "output": "attention.output_bias",
    **dict.fromkeys(("gate", "up", "down"), "feed_forward.bias"),
}


@dataclass(frozen=True)
class StoredModel:
    """A model on disk whose parameters are read lazily.

    Attributes:
        read: `read(name)` returns a whole parameter by jingu's name, on CPU, in its stored dtype (if it is quantized,
            in that in which its form is computed). `read(name, expert)` returns one expert's matrix of a parameter
            [E, ...] without reading the others, if possible without a copy; it is thread-safe.
        tokenizer_folder: folder of the tokenizer; None if the model has none.
        where: the folder or file, for messages.
        dtype: dtype of most stored weights.
        config: contents of the model's config.json, or those keys of it that another format has; empty: none.
        generation_config: contents of generation_config.json; None if there is none.
        chat_templates: texts of the chat templates that the model was trained with, by name; None: those of the
            tokenizer.
        tokenizer_problem: why the model has no tokenizer, if it has none.
        is_prefix_lm: whether the model was trained with bidirectional attention within prefixes.
        updates: only for adapters: functions that compute a parameter from that of the base model, by name, where jingu
            has no adapter module for the change.
        parts: the places of adapters and their base model; empty for a model in one place, `where`.
        has_int4_blocks: whether most elements of the model's matrices are stored in blocks of 4 bits.
    """

    spec: ModelSpec
    read: Callable[..., Tensor]
    tokenizer_folder: Path | None
    where: CheckpointPath
    dtype: torch.dtype = torch.float32
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] | None = None
    chat_templates: Mapping[str, str] | None = None
    tokenizer_problem: str = "the model has no tokenizer."
    is_prefix_lm: bool = False
    updates: Mapping[str, Update] = field(default_factory=dict)
    has_int4_blocks: bool = False
    parts: tuple[CheckpointPath, ...] = ()

    @property
    def special_token_ids(self) -> dict[str, Any]:
        """bos_token_id and so on, from the model's config; empty if it has none."""
        return {key: self.config[key] for key in SPECIAL_TOKEN_KEYS if self.config.get(key) is not None}

    def _token_ids(self, key: str) -> Any:
        """Return the id or ids of a special token. generation_config.json takes precedence over config.json."""
        value = None if self.generation_config is None else self.generation_config.get(key)
        return self.special_token_ids.get(key) if value is None else value

    @property
    def decoder_start_token_id(self) -> int | None:
        """The first token that the decoder of an encoder-decoder reads; None if the model's files do not define it."""
        token_id: int | None = self._token_ids("decoder_start_token_id")
        return token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text. Empty if the model's files define none: the tokenizer's EOS token then applies."""
        ids = self._token_ids("eos_token_id")
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

    @property
    def default_sampling(self) -> dict[str, float]:
        """Sampling parameters that generation_config.json recommends, by name."""
        config = dict(self.generation_config or {})
        if config.get("do_sample"):
            # transformers' default.
            config.setdefault("temperature", 1.0)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        # A top_k of 0 means no limit.
        return {name: config[name] for name in names if config.get(name) or (name == "temperature" and name in config)}

    def tokenizer(self) -> Path:
        """Return the tokenizer's folder. Raises JinguError if there is none."""
        if self.tokenizer_folder is None:
            fix = "Put its tokenizer.json next to weights in safetensors."
            raise JinguError(self.tokenizer_problem, where=self.where, fix=fix)
        return self.tokenizer_folder


@dataclass(frozen=True)
class PackingReader:
    """`StoredModel.read` of a model with quantized matrices, which also returns these as they are stored.

    Where adapters or other changes apply to the parameters, another function takes its place.

    Attributes:
        read: reads a parameter.
        keep: returns the function that returns a matrix as it is stored (`jingu.model.quantize.keep_stored`), given the
            device.
        block_names: names of the parameters that are stored in MXFP4.
        read_blocks: returns one of these, or its part of an expert, with the bytes of GGUF's blocks for its columns.
    """

    read: Callable[..., Tensor]
    keep: Callable[[torch.device], Callable[[str], StoredWeight | None]]
    block_names: frozenset[str]
    read_blocks: Callable[..., Tensor]

    def __call__(self, name: str, expert: int | None = None) -> Tensor:
        return self.read(name, expert)


def stored_matrices(model: StoredModel, device: torch.device, where: str) -> Callable[[str], StoredWeight | None]:
    """Return the function that returns a matrix of a model as it is stored, for `keep_stored`.

    Raises:
        JinguError: no matrix is quantized, or adapters change them; `where` is the setting that asks for them.
    """
    if not isinstance(model.read, PackingReader):
        what = f"{model.where} has no quantized matrices to keep as they are stored"
        raise JinguError(
            f"{what}, or adapters are merged into them.",
            where=where,
            fix="Name a folder in one of the forms in docs/guides/hub.md (with its adapters apart), or another format.",
        )
    return model.read.keep(device)


def stored_bytes(model: StoredModel, plain_bytes: float) -> float:
    """Return the mean bytes of a number in the matrices of a model's blocks, as they are stored.

    Args:
        plain_bytes: bytes of a number in those that are not quantized.
    """
    decoder, stored_bytes = _build_stored(model)
    shapes = parameter_shapes(decoder.spec)
    plain = {name: part.shape for name, part in decoder.named_parameters()}
    numbers, plain_numbers = (
        sum(
            shape.numel()
            for name, shape in each.items()
            if "blocks." in name and "router" not in name and len(shape) > 1
        )
        for each in (shapes, plain)
    )
    return (stored_bytes + plain_numbers * plain_bytes) / numbers


def served_bytes(model: StoredModel, plain_bytes: float) -> float:
    """Return the bytes of all parameters of a model whose quantized matrices stay as they are stored.

    Args:
        plain_bytes: bytes of a number in the parameters that are not quantized.
    """
    decoder, stored_bytes = _build_stored(model)
    return stored_bytes + plain_bytes * sum(part.numel() for part in decoder.parameters())


def _build_stored(model: StoredModel) -> tuple[Any, int]:
    """Return a model without memory, but for its quantized matrices, and the bytes of these."""
    with torch.device("meta"):
        decoder = build_model(model.spec.without_predictions())
    keep_stored(decoder, stored_matrices(model, torch.device("cpu"), "tune.quantization"))
    weights = [module for module in decoder.modules() if isinstance(module, StoredWeight)]
    # Matrices that one stored tensor holds share its parts.
    parts = {part.data_ptr(): part.nbytes for module in weights for part in module.parts()}
    return decoder, sum(parts.values())


# Adapters and quantization, which are applied when a parameter is read


def apply_adapters(adapters: StoredModel, base: StoredModel) -> StoredModel:
    """Return a base model with adapters. LoRA and IA³ are merged into the weights; prompts remain separate modules.

    If the adapters were trained on a quantized base, the base weights are quantized and dequantized first.
    """
    adapter = adapters.spec.adapter
    adapted_shapes = parameter_shapes(adapters.spec)
    spec = _merged_spec(adapters).model_copy(update={"quantization": None})
    base = extend_base(fake_quantize(residual_base(base, adapters.spec), adapters.spec), spec)
    if isinstance(adapter, Lora | Ia3):
        # Merge when a weight is read, so that inference has no additional cost.

        def read_merged(name: str, expert: int | None = None) -> Tensor:
            if is_trained(name, adapters.spec):
                return adapters.read(name, expert)
            weight = base.read(name, expert)
            if name in adapters.updates:
                weight = adapters.updates[name](weight)
            return merge_parameter(adapter, adapted_shapes, name, weight, lambda leaf: adapters.read(leaf, expert))

        model = replace(base, spec=spec.model_copy(update={"adapter": None}), read=read_merged)
    else:
        model = replace(base, spec=spec, read=lambda name: (adapters if is_adapter(name) else base).read(name))
    return replace(
        model,
        tokenizer_folder=adapters.tokenizer_folder or base.tokenizer_folder,
        where=adapters.where,
        parts=(adapters.where, *(base.parts or (base.where,))),
        is_prefix_lm=adapters.is_prefix_lm,
        config=adapters.config or base.config,
        generation_config=base.generation_config if adapters.generation_config is None else adapters.generation_config,
        chat_templates=adapters.chat_templates,
    )


def _merged_spec(adapters: StoredModel) -> ModelSpec:
    """Return the spec of a model into whose parameters the adapters can be merged.

    A tied head is untied if the embedding has a LoRA. A module whose LoRA has a bias gets a bias.
    """
    spec = adapters.spec
    names = parameter_shapes(spec)
    if "embedding.lora_a" in names:
        spec = spec.model_copy(update={"tie_word_embeddings": False})
    for name in names:
        if name.endswith(".lora_bias"):
            spec = add_bias(spec, name.removesuffix("lora_bias") + "bias", adapters.where)
    return spec


def add_bias(spec: ModelSpec, name: str, where: CheckpointPath) -> ModelSpec:
    """Return a spec whose model has the bias `name`. Raises JinguError if no spec can describe such a bias."""
    if name in parameter_shapes(spec):
        return spec
    field = _BIAS_FIELDS.get(name.split(".")[-2])
    if field is None or (spec.experts is not None and field == "feed_forward.bias"):
        raise JinguError(
            f"the adapter adds a bias {name}, which the model cannot have.",
            where=where,
            fix="Merge it with peft, and use the merged model.",
        )
    return replace_fields(spec, **{field: True})


def residual_base(base: StoredModel, spec: ModelSpec) -> StoredModel:
    """Return the base model with the frozen weights that the adapters of `spec` were trained with.

    PiSSA and OLoRA initialize an adapter from its matrix, and subtract that initial product from the frozen weight. For
    any other adapter, `base` is returned unchanged.
    """
    adapter = spec.adapter
    if not isinstance(adapter, Lora) or adapter.init_lora_weights not in RESIDUAL_INITS:
        return base
    names = parameter_shapes(spec)

    def read(name: str, expert: int | None = None) -> Tensor:
        weight = base.read(name, expert)
        module = name.removesuffix(".weight")
        if f"{module}.lora_a" not in names:
            return weight
        module_adapter = adapter.of_module(module)
        a, b = initial_factors(module_adapter.init_lora_weights, weight, module_adapter)
        return weight - module_adapter.scale * (b @ a)

    return replace(base, read=read)


def read_lora_pair(
    adapters: StoredModel, base: StoredModel, module: str, expert: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return matrices A [R, I] and B [O, R] such that B A is the change of the base model's weight by a module's LoRA.

    B includes the scale. For PiSSA and OLoRA, R is twice the rank: the initial matrices, which were subtracted from the
    weight, are appended with a negative sign.
    """
    adapter = adapters.spec.adapter
    assert isinstance(adapter, Lora)
    module_adapter = adapter.of_module(module)
    a = adapters.read(f"{module}.lora_a", expert)
    b = module_adapter.scale * adapters.read(f"{module}.lora_b", expert)
    if module_adapter.init_lora_weights not in RESIDUAL_INITS:
        return a, b
    initial_a, initial_b = initial_factors(
        module_adapter.init_lora_weights, base.read(f"{module}.weight", expert), module_adapter
    )
    return torch.cat([a, initial_a.to(a.dtype)]), torch.cat([b, -module_adapter.scale * initial_b.to(b.dtype)], 1)


def extend_base(base: StoredModel, spec: ModelSpec) -> StoredModel:
    """Return a base model that also has the parameters that only `spec` has.

    These are an untied head, which equals the embedding, and biases, which are zero.
    """
    shapes = parameter_shapes(spec)
    names = parameter_shapes(base.spec)

    def read(name: str, expert: int | None = None) -> Tensor:
        if name in names:
            return base.read(name, expert)
        return base.read("embedding.weight") if name == "head.weight" else torch.zeros(shapes[name], dtype=base.dtype)

    return replace(base, read=read)


def fake_quantize(model: StoredModel, spec: ModelSpec) -> StoredModel:
    """Return a model whose matrices are quantized and dequantized again, by the method that `spec.quantization` names.

    These matrices are read as fp32 (fp64 if stored so). Parameters that `spec` does not quantize are unchanged.
    """
    kind = spec.quantization
    if kind is None or kind == "stored":
        return model
    with torch.device("meta"):
        modules = build_model(spec).named_modules()
        quantized_names = {name for name, module in modules if isinstance(module, QuantizedWeight)}

    def read(name: str, expert: int | None = None) -> Tensor:
        weight = model.read(name, expert)
        if name not in quantized_names:
            return weight
        wide_dtype = torch.promote_types(weight.dtype, torch.float32)
        return dequantize(*quantize(weight, kind), kind).to(wide_dtype)

    return replace(model, read=read)


def load_model(
    source: StoredModel,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    prepare: Callable[[Decoder], object] = lambda model: None,
) -> Decoder:
    """Return the model with its weights, cast to `dtype`, in eval mode.

    On CPU, weights that are stored in this dtype and arrangement are not copied: they stay memory-mapped, and the
    system reads the pages that are used.

    Args:
        prepare: called with the model on the meta device; may remove parts that are not needed.
    """

    def read(name: str) -> Tensor:
        return source.read(name).to(device)

    (model,) = materialize(source.spec, None, Layout(), Precision.uniform(dtype), read, prepare=prepare).stages
    for parameter in model.parameters():
        expect_repeated_reads(parameter)
    return model.eval()


class TensorMismatchError(JinguError):
    """The stored weights differ from those that a config describes.

    Attributes:
        tensors: names of tensors by problem: `missing`, `unexpected`, `of the wrong shape`.
    """

    tensors: Mapping[str, list[str]] = {}


def compare_shapes(model_shapes: Shapes, file_shapes: Shapes, where: CheckpointPath) -> None:
    """Raise TensorMismatchError, which lists all tensors that are missing, unexpected or of the wrong shape, if any."""
    tensors = {
        "missing": [name for name in model_shapes if name not in file_shapes],
        "unexpected": [name for name in file_shapes if name not in model_shapes],
        "of the wrong shape": [
            f"{name} (has {list(file_shapes[name])}, should have {list(model_shapes[name])})"
            for name in model_shapes
            if name in file_shapes and file_shapes[name] != model_shapes[name]
        ],
    }
    if any(tensors.values()):
        problems = "; ".join(f"{what}: {', '.join(names)}" for what, names in tensors.items() if names)
        error = TensorMismatchError(
            f"the weights are not those that the model's config describes: {problems}.",
            where=where,
            fix="Use the config and the weights of the same model.",
        )
        error.tensors = tensors
        raise error


def normalize_head(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of `read` that divides each row of the head's weight by its norm, as Baichuan 2's head does."""

    def read_normalized(name: str, expert: int | None = None) -> Tensor:
        value = read(name) if expert is None else read(name, expert)
        wide = torch.promote_types(value.dtype, torch.float32)
        return normalize(value.to(wide)) if name == "head.weight" else value

    return read_normalized
