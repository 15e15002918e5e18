"""Loading a model from disk for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from jingu.chat.chat_format import ChatFormat, find_chat_format
from jingu.compat.torch import has_byte_kernels
from jingu.config.sections.parallel import DeviceType, ParallelSettings
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import StoredModel, load_model, stored_matrices
from jingu.infer.expert_offload import ExpertOffloader
from jingu.infer.multi_lora import LoraAdapters, LoraWeights, read_lora_adapter
from jingu.infer.prepack import prepack_weights
from jingu.model.block import Block
from jingu.model.decoder import Decoder
from jingu.model.layers import widen_vectors
from jingu.model.prediction import PredictionLayer
from jingu.model.quantize import keep_stored, quantize_blocks, quantize_embedding_and_head
from jingu.model.quantized_weight import PromptRows, has_int4_kernel
from jingu.model.spec import ModelSpec, QuantizationFormat
from jingu.parallel.layout import Layout
from jingu.parallel.layout import Precision as Dtypes
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.parallel.pipeline import Model
from jingu.runtime.device import (
    DTYPES,
    check_fp8,
    check_number_format,
    device_name,
    find_device_type,
    has_fast_bf16,
)
from jingu.runtime.log import log_warning
from jingu.runtime.ranks import RankInfo
from jingu.text.tokenizer import Tokenizer

Precision = Literal["auto", "fp32", "bf16", "fp64", "int8", "int4", "fp8", "stored"]
_KINDS: dict[str, QuantizationFormat] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}


@dataclass(eq=False)
class InferenceModel:
    """A model in memory with its tokenizer, ready for the engine.

    Attributes:
        module: the network, or this rank's shard of it.
        name: display name.
        eos_token_ids: tokens that end an output; an empty tuple is replaced by the tokenizer's end token.
        decoder_start_token_id: first token of an encoder-decoder's decoder; -1 is replaced by the tokenizer's.
        prompt_prefix_ids: tokens in front of each prompt (BOS), if the model was trained with them.
        is_prefix_lm: whether the tokens of a prompt attend to each other in both directions, as in training.
        expert_offloader: computes the experts if only some of them are in memory; else None.
        adapters: LoRA adapters that requests can use.
        read_adapter: reads an adapter that is to be added at runtime; None: adapters cannot be added.
        prompt_rows: tells quantized matrices which rows of a step belong to long prompts; None: they need no selection.
        default_sampling: sampling parameters that its generation_config.json recommends, by name.
        world_size: number of ranks that share the model.
        is_compiled: whether its blocks are compiled for inference.
        load_prediction_layer: reads the model's first layer of multi-token prediction, which only speculation needs;
            None: there is none.
    """

    module: Model
    spec: ModelSpec
    tokenizer: Tokenizer
    name: str = "model"
    eos_token_ids: tuple[int, ...] = ()
    decoder_start_token_id: int = -1
    prompt_prefix_ids: tuple[int, ...] = ()
    is_prefix_lm: bool = False
    expert_offloader: ExpertOffloader | None = None
    adapters: LoraAdapters = field(default_factory=LoraAdapters)
    read_adapter: Callable[[Path], LoraWeights] | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    prompt_rows: PromptRows | None = None
    world_size: int = 1
    is_compiled: bool = False
    load_prediction_layer: Callable[[], PredictionLayer] | None = None

    def __post_init__(self) -> None:
        if not self.eos_token_ids:
            self.eos_token_ids = (self.tokenizer.eos_token_id,)
        if self.decoder_start_token_id < 0:
            self.decoder_start_token_id = self.tokenizer.decoder_start_token_id

    @property
    def parameter(self) -> Tensor:
        """An arbitrary floating-point parameter, for its dtype and device."""
        return next(parameter for parameter in self.module.parameters() if parameter.is_floating_point())

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return the token ids of a prompt. For an encoder, sentinels in the text are parsed as special tokens."""
        return (*self.prompt_prefix_ids, *encode_prompt(self.spec, self.tokenizer, prompt))


def _check_processes(
    ranks: RankInfo | None, resident_experts: str | None, pipeline: int, runtime_adapters: bool, precision: Precision
) -> None:
    """Raise a JinguError for options that do not fit the number of processes."""
    if ranks is not None and precision == "stored":
        what = "matrices in their stored form cannot be divided over processes."
        raise JinguError(what, where="--precision", fix="Leave out --processes, or choose another precision.")
    if ranks is not None and runtime_adapters:
        what = "only a model of a single process can load adapters later."
        raise JinguError(what, where="--runtime-adapters", fix="Name them at the start with --adapter.")
    if ranks is not None and resident_experts is not None:
        raise JinguError(
            "expert offload supports only one process.",
            where="--processes",
            fix="Leave out --resident-experts.",
        )
    if ranks is None and pipeline > 1:
        raise JinguError(
            f"one process cannot hold {pipeline} pipeline stages.",
            where="--pipeline",
            fix=f"Start at least as many processes: --processes {pipeline}.",
        )


def check_language_model(path: Path) -> None:
    """Raise JinguError for a reward model."""
    if open_model(path).spec.score_head:
        what = "this is a reward model, which gives scores and no text."
        raise JinguError(what, where=path, fix="`jingu serve` gives its scores.")


def _open_supported_model(path: Path, ranks: RankInfo | None) -> StoredModel:
    """Open a model. Raise JinguError for a reward model that the engine cannot compute."""
    stored_model = open_model(path)
    spec = stored_model.spec
    if spec.score_head and (ranks is not None or spec.num_encoder_layers is not None or any(spec.prompts)):
        what = "scores support only single-process decoders without prompt tuning."
        raise JinguError(what, where=path, fix="Leave out --processes, or take another reward model.")
    return stored_model


def _open_without_predictions(
    path: Path, ranks: RankInfo | None
) -> tuple[StoredModel, Callable[[torch.dtype, torch.device], PredictionLayer] | None]:
    """Open a model without its layers of multi-token prediction, which only speculation needs.

    Returns:
        The model, and a function that reads the first of these layers; None if there is none, or for several ranks.
    """
    whole_model = _open_supported_model(path, ranks)
    has_layers = whole_model.spec.mtp_layers > 0 and ranks is None
    model = replace(whole_model, spec=whole_model.spec.without_predictions())
    return model, partial(_load_prediction_layer, whole_model) if has_layers else None


def _load_prediction_layer(stored_model: StoredModel, dtype: torch.dtype, device: torch.device) -> PredictionLayer:
    """Read the first layer of multi-token prediction of a model."""
    spec = stored_model.spec
    with torch.device("meta"):
        layer = PredictionLayer(spec, Block(spec, spec.prediction_layer)).to(dtype)
    widen_vectors(layer)
    for name, parameter in list(layer.named_parameters()):
        path, _, leaf = name.rpartition(".")
        weight = stored_model.read(f"mtp.0.{name}").to(device, parameter.dtype)
        setattr(layer.get_submodule(path), leaf, nn.Parameter(weight, requires_grad=False))
    return layer.eval()


def _choose_dtype(precision: Precision, device: torch.device, use_bytes: bool) -> torch.dtype:
    """Return the dtype of activations. Raise JinguError if the device does not compute in the precision."""
    if precision == "fp8":
        check_fp8(device, "--precision")
    # CPU kernels for quantized matrices, apart from the byte kernels, are fast with bf16 activations only, even on CPUs
    # without hardware for bf16.
    is_bf16 = has_fast_bf16(device) or (precision in _KINDS and device.type == "cpu" and not use_bytes)
    default_precision = "bf16" if is_bf16 else "fp32"
    return check_number_format(DTYPES[precision if precision in DTYPES else default_precision], device)


def load(
    path: Path,
    precision: Precision = "auto",
    device: DeviceType = "auto",
    adapters: Mapping[str, Path] | None = None,
    resident_experts: str | None = None,
    ranks: RankInfo | None = None,
    pipeline: int = 1,
    runtime_adapters: bool = False,
) -> InferenceModel:
    """Load a run, a step of a run, a Hugging Face folder or a GGUF file.

    Args:
        precision: auto computes in bf16 if the device has hardware for it, else in fp32. int8, int4 and fp8 quantize
            the matrices; fp8 quantizes activations, too. stored leaves matrices that other tools have quantized as they
            are stored, and dequantizes them in each use.
        adapters: by name, a run that trained adapters, or a folder in the format of peft.
        resident_experts: how much of the experts is in memory (25%, 3GB). The others are read when they are needed,
            from the model's files, or from a temporary file if they are quantized. None keeps all of them in memory.
        ranks: this process and the other ranks that share the model, all of which call this; None: a single process.
        pipeline: number of pipeline stages over the ranks.
        runtime_adapters: whether adapters can be added after loading.

    Raises:
        JinguError: the model cannot be read, or does not support an option.
    """
    _check_processes(ranks, resident_experts, pipeline, runtime_adapters, precision)
    stored_model, load_prediction_layer = _open_without_predictions(path, ranks)
    lora_weights = {key: read_lora_adapter(folder, stored_model) for key, folder in (adapters or {}).items()}
    tokenizer = Tokenizer.load(stored_model.tokenizer())
    place = torch.device(find_device_type(device)) if ranks is None else ranks.device
    kind = _KINDS.get(precision)
    use_bytes = kind not in (None, "fp8") and ranks is None and use_byte_kernels(stored_model.spec, place)
    dtype = _choose_dtype(precision, place, use_bytes)
    if kind is not None:
        _warn_of_slow_matmuls(kind, stored_model.spec, dtype, place)
    offloader = None
    if resident_experts is not None:
        offloader = ExpertOffloader(stored_model, resident_experts, dtype, place, kind)

    change_matrices = _matrix_changes(stored_model, precision, dtype, place)

    def prepare(model: Decoder) -> None:
        if offloader is not None:
            offloader.replace_experts(model)
        change_matrices(model)

    model = _load_module(stored_model, dtype, place, ranks, pipeline, prepare)
    prompt_rows = None if kind is None or use_bytes else _find_prompt_rows(stored_model.spec, kind, place)
    lora_adapters = LoraAdapters(model, dtype)
    for adapter_name, weights in lora_weights.items():
        lora_adapters.attach(adapter_name, weights)
    for stage in model.stages:
        # Runtime adapters need separate projections: one may adapt only some of those that would be joined.
        prepack_weights(stage, not runtime_adapters, prompt_rows, as_bytes=use_bytes)
    # Prepend BOS only if the tokenizer and the model's configuration agree.
    has_bos = tokenizer.prompt_prefix_ids == [stored_model.special_token_ids.get("bos_token_id")]
    start_id = stored_model.decoder_start_token_id
    return InferenceModel(
        model,
        stored_model.spec,
        tokenizer,
        name=model_name(path),
        eos_token_ids=stored_model.eos_token_ids,
        decoder_start_token_id=-1 if start_id is None else start_id,
        prompt_prefix_ids=tuple(tokenizer.prompt_prefix_ids) if has_bos else (),
        is_prefix_lm=stored_model.is_prefix_lm,
        expert_offloader=offloader,
        adapters=lora_adapters,
        read_adapter=partial(read_lora_adapter, base=stored_model) if runtime_adapters else None,
        default_sampling=stored_model.default_sampling,
        prompt_rows=prompt_rows,
        world_size=1 if ranks is None else ranks.world,
        load_prediction_layer=load_prediction_layer and partial(load_prediction_layer, dtype, place),
    )


def _matrix_changes(
    stored_model: StoredModel, precision: Precision, dtype: torch.dtype, place: torch.device
) -> Callable[[Decoder], object]:
    """Return a function that gives a model on the meta device the matrices of a precision."""
    if precision == "stored":
        return partial(keep_stored, keep=stored_matrices(stored_model, place, "--precision"))

    def quantize(model: Decoder) -> None:
        kind = _KINDS.get(precision)
        if kind is not None:
            quantize_blocks(model, kind)
        if kind not in (None, "fp8"):
            quantize_embedding_and_head(model, dtype)

    return quantize


def use_byte_kernels(spec: ModelSpec, device: torch.device) -> bool:
    """Return whether int8 kernels (`ByteWeight`) multiply the quantized matrices of a model."""
    # Mixtures of experts use the other kernels, as experts may be read from disk in the layout of those.
    is_mixture = spec.experts is not None
    return device.type == "cpu" and not has_fast_bf16(device) and has_byte_kernels() and not is_mixture


def _find_prompt_rows(spec: ModelSpec, kind: QuantizationFormat, device: torch.device) -> PromptRows | None:
    """Return the selection of rows for a model's quantized matrices; None if they need none."""
    # The rows of experts and encoders are not those of the step, and devices other than CPUs treat all rows alike.
    is_dense = spec.num_encoder_layers is None and spec.experts is None
    return PromptRows(kind) if is_dense and device.type == "cpu" and kind != "fp8" else None


def _warn_of_slow_matmuls(kind: QuantizationFormat, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Warn if quantized matrices save memory but no time on this device."""
    name = device_name(device)
    explanation = "dequantized for each matmul, which saves memory, but no time."
    if device.type == "cpu":
        if kind == "fp8":
            log_warning(f"{name} has no units for FP8: the matmuls of --precision fp8 are computed in fp32, slowly.")
    elif spec.experts is not None:
        log_warning(f"{name} has no kernel for experts in {kind}: their matrices are {explanation}")
    elif kind == "int4" and dtype != torch.bfloat16:
        log_warning(f"{name}'s kernel for int4 computes in bf16, which this GPU lacks: matrices are {explanation}")
    elif kind == "int4" and not has_int4_kernel(device):
        log_warning(f"PyTorch has no kernel for int4 on {name}: matrices are {explanation}")


def load_chat_model(
    load: Callable[[], InferenceModel], path: Path, template: str | None = None
) -> tuple[InferenceModel, ChatFormat | None]:
    """Load a model, add the end tokens of its chat template, and return it with its chat format.

    Args:
        load: loads the model.
        path: the model's folder or file.
        template: name or file of a chat template; None: the model's own.

    Raises:
        JinguError: there is no such template; checked before the model is loaded, which takes long.
    """
    if template is not None:
        find_chat_format(path, Tokenizer.load(open_model(path).tokenizer()), template)
    model = load()
    chat_format = find_chat_format(path, model.tokenizer, template)
    if chat_format is None:
        return model, None
    # Remove duplicates, but keep the order.
    end_ids = dict.fromkeys((*model.eos_token_ids, *chat_format.eos_token_ids))
    return replace(model, eos_token_ids=tuple(end_ids)), chat_format


def model_name(path: Path) -> str:
    """Return the display name of a model."""
    return path.stem if path.suffix == ".gguf" else path.absolute().name


def _load_module(
    stored: StoredModel,
    dtype: torch.dtype,
    place: torch.device,
    ranks: RankInfo | None,
    pipeline: int,
    prepare: Callable[[Decoder], object],
) -> Model:
    """Return a model, or this rank's shard of it, in the same layout as in training."""
    if ranks is None:
        return load_model(stored, dtype, place, prepare)
    # Pipeline stages, and tensor parallelism over the ranks of a stage.
    settings = ParallelSettings(pipeline=pipeline, tensor="auto", zero_stage=0)
    mesh = build_mesh(resolve_axis_sizes(settings, ranks.world, stored.spec), ranks.device)
    precision = Dtypes.uniform(dtype)
    return materialize(stored.spec, mesh, Layout(settings), precision, stored.read, prepare=prepare).eval()


def encode_prompt(spec: ModelSpec, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of a prompt, without BOS."""
    return tokenizer.encode(prompt, parse_special_tokens=spec.num_encoder_layers is not None)
