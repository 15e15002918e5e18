"""A model on disk, made ready to answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from jingu.checkpoint.hub import OpenModel, load_model, open_model
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.infer.adapters import Adapters, read_beside, stand_beside
from jingu.infer.arrange import arrange
from jingu.infer.residency import Residency
from jingu.model.decoder import Decoder, make_model
from jingu.model.packed import packed_reader
from jingu.model.quantised import round_blocks, round_ends
from jingu.model.spec import Kind, ModelSpec
from jingu.parallel.apply import parallelize
from jingu.parallel.mesh import axis_sizes, build_mesh
from jingu.parallel.pipeline import Model, Pipeline, stages_of
from jingu.parallel.sharing import sharing_of
from jingu.parallel.stages import check_groups
from jingu.runtime.device import PRECISIONS, has_fast_bf16
from jingu.runtime.ranks import Ranks
from jingu.text.tokenizer import Tokenizer

Precision = Literal["auto", "fp32", "bf16", "fp64", "int8", "int4"]
Device = Literal["auto", "cpu", "cuda"]
_KINDS: dict[str, Kind] = {"int8": "int8", "int4": "int4"}


@dataclass(frozen=True)
class Loaded:
    """A model in memory, and what is needed to speak with it.

    Attributes:
        end_ids: tokens that end a text.
        start_id: what stands before the first token of a decoder with an encoder.
        template: the tokenizer's own template for conversations; None: it has none.
        name: of the model, for people.
        beginning: what a prompt begins with, where the model was trained so.
        reads_whole: whether the tokens of a prompt see each other, and not only those before them, as in training.
        residency: its experts, where only some of them are in memory.
        adapters: that requests can ask for.
        ranks: processes that share it.
        compiled: whether its blocks are compiled for answers, and not only for training.
    """

    model: Model
    spec: ModelSpec
    tokenizer: Tokenizer
    template: str | None
    end_ids: tuple[int, ...]
    start_id: int
    name: str
    beginning: tuple[int, ...] = ()
    reads_whole: bool = False
    residency: Residency | None = None
    adapters: Adapters = field(default_factory=lambda: Adapters(()))
    ranks: int = 1
    compiled: bool = False

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Ids of a prompt. To an encoder, the names of sentinels in it stand for them, as they do in the answer."""
        return (*self.beginning, *encode_prompt(self.spec, self.tokenizer, prompt))


def load(
    path: Path,
    precision: Precision = "auto",
    device: Device = "auto",
    adapters: Mapping[str, Path] | None = None,
    experts_resident: str | None = None,
    ranks: Ranks | None = None,
    pipeline: int = 1,
) -> Loaded:
    """Load a run, a step of a run, a Hugging Face folder or a GGUF file.

    Args:
        precision: auto computes in bf16 where the device has units for it, else in fp32; int8 and int4 do the same with
            matrices that are rounded to so many bits.
        adapters: name → a run that trained adapters, or a folder of peft's.
        experts_resident: how much of a mixture's experts is in memory (25%, 3GB), the rest being read when it is
            needed from the model's files, or from one that holds them rounded; None: all.
        ranks: this process among those that share the model, each of which calls this; None: it has all of it.
        pipeline: stages that they divide its blocks into.

    Raises:
        JinguError: what is wrong with it.
    """
    if ranks is not None and experts_resident is not None:
        raise JinguError(
            "a model that processes share has all experts in memory.",
            where="--processes",
            fix="Leave out --experts-resident.",
        )
    if ranks is None and pipeline > 1:
        what = f"one process cannot be {pipeline} stages."
        raise JinguError(what, where="--pipeline", fix=f"Start as many or more: --processes {pipeline}.")
    opened = open_model(path)
    found = read_beside(adapters or {}, opened)  # what is wrong with them is told first: loading takes its time
    tokenizer = Tokenizer.load(opened.tokenizer())
    place = torch.device(device_of(device)) if ranks is None else ranks.device
    name = precision if precision in PRECISIONS else "bf16" if has_fast_bf16(place) else "fp32"
    dtype = PRECISIONS[name]
    kind = _KINDS.get(precision)
    residency = None if experts_resident is None else Residency(opened, experts_resident, dtype, place, kind)

    def prepare(model: Decoder) -> None:
        if residency is not None:
            residency.take_over(model)
        if kind is not None:
            round_blocks(model, kind)
            round_ends(model, dtype)

    model: Model
    if ranks is None:
        model = load_model(opened, dtype, place, prepare)
    else:
        model = _shared(opened, dtype, ranks, pipeline, prepare)
    beside = stand_beside(model, found, dtype)
    for stage in stages_of(model):
        arrange(stage)
    begins = tokenizer.beginning == [opened.special_ids.get("bos_token_id")]  # the model was trained so, and says it
    beginning = tuple(tokenizer.beginning) if begins else ()
    made = loaded(
        model, opened.spec, tokenizer, end_ids=opened.end_ids, start_id=opened.start_id, name=name_of(path),
        beginning=beginning, reads_whole=opened.reads_whole,
    )  # fmt: skip
    return replace(made, residency=residency, adapters=beside, ranks=1 if ranks is None else ranks.world)


def name_of(path: Path) -> str:
    """What a model is called."""
    return path.stem if path.suffix == ".gguf" else path.absolute().name


def _layout(pipeline: int) -> ParallelSettings:
    """How ranks share a model that answers: a stage's matrices and heads are divided over those that have it."""
    return ParallelSettings(pipeline=pipeline, tensor="auto", zero=0)


def _shared(
    opened: OpenModel, dtype: torch.dtype, ranks: Ranks, pipeline: int, prepare: Callable[[Decoder], object]
) -> Model:
    """This rank's part of a model, by the tables that training divides it by; `prepare` as of `load_model`."""
    settings = _layout(pipeline)
    sizes = axis_sizes(settings, ranks.world, opened.spec)
    mesh = build_mesh(sizes, ranks.device)
    with torch.device("meta"):
        whole = make_model(opened.spec)
    prepare(whole)
    check_groups(whole, sizes.tensor)
    model = parallelize(
        whole.to(dtype),
        mesh,
        settings,
        compute=dtype,
        reduce=dtype,
        activation_checkpointing=ActivationCheckpointingSettings(),
        compile=False,
        prepare=prepare,
    )
    model.to_empty(device=ranks.device)
    sharing_of(model).fill(model, packed_reader(stages_of(model), opened.read))
    if isinstance(model, Pipeline):
        model.refresh_copies()
    return model.eval()


def loaded(
    model: Model,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    *,
    end_ids: tuple[int, ...] = (),
    start_id: int | None = None,
    name: str = "model",
    beginning: tuple[int, ...] = (),
    reads_whole: bool = False,
) -> Loaded:
    """A model that is in memory already; what it does not say itself, its tokenizer says."""
    ends = end_ids or (tokenizer.end_id,)
    start = tokenizer.start_id if start_id is None else start_id
    return Loaded(model, spec, tokenizer, tokenizer.chat_template, ends, start, name, beginning, reads_whole)


def encode_prompt(spec: ModelSpec, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt, without what it should begin with."""
    return tokenizer.encode(prompt, special=spec.encoder_layers is not None)


def device_of(choice: Device) -> str:
    """The device of a choice. JinguError where it is not there."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise JinguError("no CUDA device is to be found.", where="--device", fix="Use auto or cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice
