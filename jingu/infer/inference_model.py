"""Loading a model from disk for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from jingu.chat.chat_format import ChatFormat, find_chat_format
from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import StoredModel, load_model
from jingu.infer.expert_offload import ExpertOffloader
from jingu.infer.multi_lora import LoraAdapters, attach_lora_adapters, read_lora_adapters
from jingu.infer.prepack import prepack_weights
from jingu.model.decoder import Decoder
from jingu.model.quantize import quantize_blocks, quantize_embedding_and_head
from jingu.model.spec import ModelSpec, QuantizationFormat
from jingu.parallel.layout import Layout
from jingu.parallel.layout import Precision as Dtypes
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.parallel.pipeline import Model, ParallelModel
from jingu.runtime.device import DTYPES, has_fast_bf16
from jingu.runtime.ranks import RankInfo
from jingu.text.tokenizer import Tokenizer

Precision = Literal["auto", "fp32", "bf16", "fp64", "int8", "int4"]
Device = Literal["auto", "cpu", "cuda"]
_KINDS: dict[str, QuantizationFormat] = {"int8": "int8", "int4": "int4"}


@dataclass(eq=False)
class InferenceModel:
    """A model in memory with its tokenizer, ready for the engine.

    Attributes:
        module: the network, or this rank's part of it.
        name: for people.
        eos_token_ids: tokens that end an output; empty: the tokenizer's.
        decoder_start_token_id: first token of an encoder-decoder's decoder; -1: the tokenizer's.
        prompt_prefix_ids: what a prompt starts with (BOS), where the model was trained so.
        is_prefix_lm: whether the tokens of a prompt see each other in both directions, as in training.
        expert_offloader: of a mixture of experts, only some of which are in memory.
        adapters: LoRA adapters that requests can use.
        default_sampling: sampling parameters that its generation_config.json recommends, by name.
        world_size: number of ranks that share the model.
        is_compiled: whether its blocks are compiled for inference.
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
    adapters: LoraAdapters = field(default_factory=lambda: LoraAdapters(()))
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    world_size: int = 1
    is_compiled: bool = False

    def __post_init__(self) -> None:
        if not self.eos_token_ids:
            self.eos_token_ids = (self.tokenizer.eos_token_id,)
        if self.decoder_start_token_id < 0:
            self.decoder_start_token_id = self.tokenizer.decoder_start_token_id

    @property
    def parameter(self) -> Tensor:
        """Any floating-point parameter, for the dtype and the device."""
        return next(parameter for parameter in self.module.parameters() if parameter.is_floating_point())

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return the token ids of a prompt. For an encoder, sentinels written in the text become special tokens."""
        return (*self.prompt_prefix_ids, *encode_prompt(self.spec, self.tokenizer, prompt))


def _check_processes(ranks: RankInfo | None, resident_experts: str | None, pipeline: int) -> None:
    """Raise a JinguError for options that do not fit the number of processes."""
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


def load(
    path: Path,
    precision: Precision = "auto",
    device: Device = "auto",
    adapters: Mapping[str, Path] | None = None,
    resident_experts: str | None = None,
    ranks: RankInfo | None = None,
    pipeline: int = 1,
) -> InferenceModel:
    """Load a run, a step of a run, a Hugging Face folder or a GGUF file.

    Args:
        precision: auto computes in bf16 where the device has units for it, else in fp32; int8 and int4 do the same with
            matrices that are rounded to so many bits.
        adapters: name → a run that trained adapters, or a folder of peft's.
        resident_experts: how much of a mixture's experts is in memory (25%, 3GB), the rest being read when it is
            needed from the model's files, or from one that holds them rounded; None: all.
        ranks: this process among those that share the model, each of which calls this; None: it has all of it.
        pipeline: stages that they divide its blocks into.

    Raises:
        JinguError: what is wrong with it.
    """
    _check_processes(ranks, resident_experts, pipeline)
    stored_model = open_model(path)
    lora_weights = read_lora_adapters(adapters or {}, stored_model)  # before the model, as loading takes time
    tokenizer = Tokenizer.load(stored_model.tokenizer())
    place = torch.device(resolve_device(device)) if ranks is None else ranks.device
    kind = _KINDS.get(precision)
    # The CPU kernels for quantized matrices are fast with bf16 activations only, also on CPUs without units for bf16.
    default_precision = "bf16" if kind is not None or has_fast_bf16(place) else "fp32"
    name = precision if precision in DTYPES else default_precision
    dtype = DTYPES[name]
    offloader: ExpertOffloader | None = None
    if resident_experts is not None:
        offloader = ExpertOffloader(stored_model, resident_experts, dtype, place, kind)

    def prepare(model: Decoder) -> None:
        if offloader is not None:
            offloader.take_over(model)
        if kind is not None:
            quantize_blocks(model, kind)
            quantize_embedding_and_head(model, dtype)

    model: Model
    if ranks is None:
        model = load_model(stored_model, dtype, place, prepare)
    else:
        model = _load_shared(stored_model, dtype, ranks, pipeline, prepare)
    lora_adapters = attach_lora_adapters(model, lora_weights, dtype)
    for stage in model.stages:
        prepack_weights(stage)
    # Prepend BOS only where both the tokenizer and the model's configuration say so.
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
        default_sampling=stored_model.default_sampling,
        world_size=1 if ranks is None else ranks.world,
    )


def load_chat_model(
    load: Callable[[], InferenceModel], path: Path, template: str | None = None
) -> tuple[InferenceModel, ChatFormat | None]:
    """Load a model that ends its answers as its chat template does, and return it with its chat format.

    Args:
        load: loads the model.
        path: the model's folder or file.
        template: name or file of a chat template; None: the model's own.

    Raises:
        JinguError: there is no such template. This is checked before the model is loaded, which takes long.
    """
    if template is not None:
        find_chat_format(path, Tokenizer.load(open_model(path).tokenizer()), template)
    model = load()
    chat_format = find_chat_format(path, model.tokenizer, template)
    if chat_format is None:
        return model, None
    # Without duplicates, in order.
    end_ids = dict.fromkeys((*model.eos_token_ids, *chat_format.eos_token_ids))
    return replace(model, eos_token_ids=tuple(end_ids)), chat_format


def model_name(path: Path) -> str:
    """Return the name of a model for people."""
    return path.stem if path.suffix == ".gguf" else path.absolute().name


def _load_shared(
    stored: StoredModel, dtype: torch.dtype, ranks: RankInfo, pipeline: int, prepare: Callable[[Decoder], object]
) -> ParallelModel:
    """Return this rank's part of a model, divided by the tables that training uses."""
    # Pipeline stages, and tensor parallelism over the ranks of a stage.
    settings = ParallelSettings(pipeline=pipeline, tensor="auto", zero_stage=0)
    mesh = build_mesh(resolve_axis_sizes(settings, ranks.world, stored.spec), ranks.device)
    precision = Dtypes.uniform(dtype)
    return materialize(stored.spec, mesh, Layout(settings), precision, stored.read, prepare=prepare).eval()


def encode_prompt(spec: ModelSpec, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of a prompt, without BOS."""
    return tokenizer.encode(prompt, parse_special_tokens=spec.num_encoder_layers is not None)


def resolve_device(choice: Device) -> str:
    """Return the device to use. Raise JinguError where it is not available."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise JinguError("no CUDA device is to be found.", where="--device", fix="Use auto or cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice
