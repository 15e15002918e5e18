"""`initialize.from`: a new run that begins with the weights of another model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from jingu.checkpoint.hub import open_model, parameter_shapes
from jingu.checkpoint.resume import complete_steps
from jingu.config.schema import LoraSettings, RunConfig
from jingu.errors import JinguError
from jingu.model.build import spec_from_settings
from jingu.model.lora import check_targets, is_adapter
from jingu.model.spec import Lora, ModelSpec
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
    if complete_steps(folder / "checkpoints") and begun.is_file():
        start = ModelSpec.from_json(begun.read_bytes(), begun)
        return spec_from_settings(settings, tokenizer.vocabulary, length, start)
    other = open_model(Path(config.initialize.from_))
    if other.tokenizer_folder is not None:
        _check_pieces(tokenizer, Tokenizer.load(other.tokenizer_folder), config)
    spec = spec_from_settings(settings, tokenizer.vocabulary, length, other.spec)
    if parameter_shapes(spec) != parameter_shapes(other.spec):
        here, there = _flat(spec), _flat(other.spec)
        differing = [
            f"{key} is {value}, there {there.get(key)}" for key, value in here.items() if there.get(key) != value
        ]
        raise JinguError(
            f"the run's model is not the one that it begins with: {'; '.join(differing)}.",
            where=config.initialize.from_,
            fix="Leave out of `model` what that model decides; `jingu model grow` makes a larger one of it.",
        )
    return spec


def with_adapters(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """The spec with the adapters that the run trains. Raises JinguError where that cannot be."""
    settings = config.tune
    if not isinstance(settings, LoraSettings):
        return spec
    if config.initialize.from_ is None or spec.encoder_layers is not None:
        what = "there is no model to begin with" if spec.encoder_layers is None else f"{spec.family} has an encoder"
        raise JinguError(
            f"adapters are trained beside a decoder's weights, and {what}.",
            where="initialize.from",
            fix="Name a decoder, or set tune.type=full.",
        )
    adapter = Lora(
        rank=settings.rank,
        alpha=settings.alpha,
        targets=tuple(settings.targets),
        rank_stabilised=settings.rank_stabilised,
    )
    adapted = spec.model_copy(update={"adapter": adapter})
    check_targets(list(parameter_shapes(adapted)), adapter)
    return adapted


def _flat(spec: ModelSpec) -> dict[str, object]:
    parts = {key: value if isinstance(value, dict) else {"": value} for key, value in spec.model_dump().items()}
    return {f"{key}.{name}".rstrip("."): value for key, part in parts.items() for name, value in part.items()}


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


def begin_with(model: nn.Module, path: Path) -> None:
    """Fill the parameters, in whatever layout, with those of a model on disk; one whole tensor in memory at a time."""
    sharing_of(model).fill(model, open_model(path).read, lambda name: not is_adapter(name))
