"""`initialize.from`: a new run that begins with the weights of another model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from jingu.checkpoint.hub import open_model, rounded
from jingu.checkpoint.peft import open_adapters
from jingu.checkpoint.resume import checkpoints_of, complete_steps
from jingu.config.schema import RunConfig
from jingu.config.sections.tune import (
    DeepPromptBase,
    FullSettings,
    Ia3Settings,
    LoraSettings,
    PrefixTuningSettings,
    PTuningSettings,
    SoftPromptBase,
    Tune,
)
from jingu.errors import JinguError
from jingu.model.adapters import check_targets, is_adapter, matches
from jingu.model.build import spec_from_settings
from jingu.model.decoder import parameter_shapes
from jingu.model.initialise import generator_for
from jingu.model.packed import packed_reader
from jingu.model.spec import Adapter, DeepPrompt, Ia3, Lora, ModelSpec, SoftPrompt, places
from jingu.parallel.pipeline import stages_of
from jingu.parallel.sharing import sharing_of
from jingu.text.tokenizer import Tokenizer


def spec_of_run(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> ModelSpec:
    """The spec of a run's model: from its settings, or that of the model it begins with and the settings beside it.

    A run that has a checkpoint needs that other model no more.

    Raises:
        JinguError: `spec_from_settings` does, or the other model cannot be opened, has parameters of other names or
            shapes, or other pieces behind the tokenizer's ids.
    """
    settings, length = config.model, config.batch.sequence_length
    if config.initialize.from_ is None:
        return spec_from_settings(settings, tokenizer.vocabulary, length)
    begun = folder / "model.json"
    if complete_steps(checkpoints_of(folder, config)) and begun.is_file():
        start = ModelSpec.from_json(begun.read_bytes(), begun)
        return spec_from_settings(settings, tokenizer.vocabulary, length, start)
    other = open_model(Path(config.initialize.from_))
    if other.spec.adapter is not None:
        raise JinguError(
            "the model to begin with has a trained prompt, which cannot be merged into its weights.",
            where="initialize.from",
            fix="Begin with the model that it was trained for; with tune.start its prompt can be the first of yours.",
        )
    if other.tokenizer_folder is not None:
        _check_pieces(tokenizer, Tokenizer.load(other.tokenizer_folder), config)
    spec = spec_from_settings(settings, tokenizer.vocabulary, length, other.spec)
    named = spec if settings.preset is None else spec_from_settings(settings, tokenizer.vocabulary, length)
    if parameter_shapes(named) != parameter_shapes(other.spec):
        here, there = places(named), places(other.spec)
        differing = [
            f"{key} is {value}, there {there.get(key)}" for key, value in here.items() if there.get(key) != value
        ]
        raise JinguError(
            f"the run's model is not the one that it begins with: {'; '.join(differing)}.",
            where=config.initialize.from_,
            fix="Leave out of `model` what that model decides; `jingu model grow` makes a larger one of it.",
        )
    return spec


def trained_spec(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """The spec with what the run trains of it: a part of the weights, or adapters. Raises JinguError where that cannot
    be."""
    settings = config.tune
    if isinstance(settings, FullSettings):
        return _partly_frozen(spec, settings)
    if config.initialize.from_ is None:
        raise JinguError(
            "adapters are trained for a model's weights, and there is no model to begin with.",
            where="initialize.from",
            fix="Name one, or set tune.type=full.",
        )
    if isinstance(settings, SoftPromptBase) and settings.position == "back":
        _check_encoder(spec)
    adapter = _adapter(settings, spec.width)
    adapted = spec.model_copy(update={"adapter": adapter, "base": settings.base})
    check_targets(list(parameter_shapes(adapted)), adapter)
    length, prompt = config.batch.sequence_length, max(adapted.prompts)
    if prompt and length + prompt > spec.context:
        raise JinguError(
            f"a prompt of {prompt} tokens and sequences of {length} are more than the model's context of "
            f"{spec.context} tokens.",
            where="tune.length",
            fix=f"Set batch.sequence_length to {spec.context - prompt} or less, or a shorter prompt.",
        )
    return adapted


def _adapter(settings: Tune, width: int) -> Adapter:
    if isinstance(settings, LoraSettings):
        same = settings.model_dump(include={"rank", "alpha", "targets", "rank_stabilised", "dropout"})
        return Lora(**same, magnitudes=settings.dora)
    if isinstance(settings, Ia3Settings):
        return Ia3(targets=tuple(settings.targets))
    if isinstance(settings, SoftPromptBase):
        plain = SoftPrompt(tokens=settings.length, behind=settings.position == "back")
        if not isinstance(settings, PTuningSettings):
            return plain
        return plain.model_copy(update={"encoder": settings.encoder, "hidden": settings.hidden or width})
    assert isinstance(settings, DeepPromptBase)
    hidden = settings.hidden if isinstance(settings, PrefixTuningSettings) else None
    return DeepPrompt(tokens=settings.length, hidden=hidden, in_encoder=settings.in_encoder)


def _check_encoder(spec: ModelSpec) -> None:
    if spec.encoder_layers is None:
        raise JinguError(
            f"{spec.family} is a decoder, which predicts no text before a prompt: it can only stand in front.",
            where="tune.position",
            fix="Set it to front.",
        )


def _partly_frozen(spec: ModelSpec, settings: FullSettings) -> ModelSpec:
    frozen, names = list(settings.freeze), list(parameter_shapes(spec))
    for pattern in frozen:
        if not any(matches(name, [pattern]) for name in names):
            raise JinguError(
                f"no weight of the model has a name like {pattern}.",
                where="tune.freeze",
                fix="Names are such as embedding.weight and blocks.0.attention.q.weight; * stands for anything.",
            )
    if settings.last is not None:
        if settings.last > spec.layers:
            raise JinguError(f"the model has {spec.layers} blocks, not {settings.last}.", where="tune.last")
        before = ["embedding*", "positions*", "relative_bias*", "encoder.*"]
        frozen += [*before, *(f"blocks.{layer}.*" for layer in range(spec.layers - settings.last))]
    if all(matches(name, frozen) for name in names):
        raise JinguError("nothing of the model is left to be trained.", where="tune.freeze", fix="Freeze less.")
    return spec.model_copy(update={"frozen": tuple(frozen)})


def _check_pieces(ours: Tokenizer, theirs: Tokenizer, config: RunConfig) -> None:
    """An id must mean the same to the run as to the weights."""
    pieces, known = ours.pieces(), theirs.pieces()
    moved = sum(pieces.get(piece) != id_ for piece, id_ in known.items())
    if moved:
        raise JinguError(
            f"{moved:,} of the {len(known):,} pieces that the model to begin with knows have other ids, or none, in "
            "the run's tokenizer.",
            where=config.tokenizer.path,
            fix="Set tokenizer.path to the model's own tokenizer (and build the data set with it), or begin with what "
            f"`jingu model grow {config.initialize.from_} --tokenizer {config.tokenizer.path}` writes.",
        )


def begin_with(model: nn.Module, config: RunConfig, tokenizer: Tokenizer, *, adapters: bool) -> None:
    """Fill the parameters, in whatever layout, with those of the model that the run begins with; one whole tensor in
    memory at a time.

    Args:
        adapters: also fill those of adapters that have something to begin with.
    """
    assert config.initialize.from_ is not None
    base, spec = open_model(Path(config.initialize.from_)), model.spec
    assert isinstance(spec, ModelSpec)
    sharing_of(model).fill(model, packed_reader(stages_of(model), base.read), lambda name: not is_adapter(name))
    if not adapters or isinstance(config.tune, FullSettings):
        return
    if config.tune.start is not None:
        other = open_adapters(Path(config.tune.start), base, spec)
        sharing_of(model).fill(model, other.read, is_adapter)
        return

    beside = rounded(base, spec)

    def lengths(name: str) -> Tensor:
        return beside.read(name.replace(".lora_m", ".weight")).double().square().sum(1).sqrt()

    sharing_of(model).fill(model, lengths, lambda name: name.endswith(".lora_m"))
    if isinstance(config.tune, SoftPromptBase):
        ids = _first_prompt(config.tune, tokenizer, config.seed)
        start = ("prompt.embedding.weight", "encoder.prompt.embedding.weight")
        sharing_of(model).fill(model, lambda _: base.read("embedding.weight")[ids], start.__contains__)


def _first_prompt(settings: SoftPromptBase, tokenizer: Tokenizer, seed: int) -> Tensor:
    """Ids of the tokens whose vectors a prompt begins with."""
    if settings.initial_text is None:
        generator = generator_for("prompt", seed)
        return torch.randint(tokenizer.vocabulary, (settings.length,), generator=generator)
    ids = tokenizer.encode(settings.initial_text)
    if not ids:
        raise JinguError("there is no token in the text.", where="tune.initial_text", fix="Give a text, or null.")
    return torch.tensor(ids).repeat(-(-settings.length // len(ids)))[: settings.length]
