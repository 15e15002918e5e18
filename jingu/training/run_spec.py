"""The spec of the model that a run trains: from its settings, from the model it starts from, and from `tune`."""

from __future__ import annotations

from pathlib import Path

from jingu.checkpoint.resume import checkpoints_path, complete_steps
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
from jingu.formats.models import open_model
from jingu.model.adapter_layers import check_targets, matches_any
from jingu.model.decoder import parameter_shapes
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import Adapter, DeepPrompt, Ia3, Lora, ModelSpec, SoftPrompt, flatten_fields
from jingu.text.tokenizer import Tokenizer


def build_run_spec(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> ModelSpec:
    """Return the spec of a run's model: from its settings, or from the initial model and the settings beside it.

    A run that has a checkpoint needs the initial model no longer.

    Raises:
        JinguError: the settings are wrong; or the initial model cannot be opened, has other parameters, or was trained
            with another tokenizer.
    """
    settings = config.model
    length = config.batch.sequence_length
    if config.initialize.from_ is None:
        return spec_from_settings(settings, tokenizer.vocab_size, length)
    stored_spec = folder / "model.json"
    if complete_steps(checkpoints_path(folder, config)) and stored_spec.is_file():
        spec = ModelSpec.from_json(stored_spec.read_bytes(), stored_spec)
        return spec_from_settings(settings, tokenizer.vocab_size, length, spec)
    initial = open_model(Path(config.initialize.from_))
    if initial.spec.adapter is not None:
        raise JinguError(
            "the initial model has a trained prompt, which cannot be merged into its weights.",
            where="initialize.from",
            fix="Start from the model that the prompt was trained for; tune.initial_adapter can start from the prompt.",
        )
    if initial.tokenizer_folder is not None:
        _check_tokenizers(tokenizer, Tokenizer.load(initial.tokenizer_folder), config)
    spec = spec_from_settings(settings, tokenizer.vocab_size, length, initial.spec)
    # A preset beside the initial model must describe the same parameters.
    described = spec if settings.preset is None else spec_from_settings(settings, tokenizer.vocab_size, length)
    if parameter_shapes(described) != parameter_shapes(initial.spec):
        initial_fields = flatten_fields(initial.spec)
        differences = [
            f"{key} is {value}, there {initial_fields.get(key)}"
            for key, value in flatten_fields(described).items()
            if initial_fields.get(key) != value
        ]
        raise JinguError(
            f"the run's model differs from the one that it starts from: {'; '.join(differences)}.",
            where=config.initialize.from_,
            fix="Leave out of `model` what the initial model decides; `jingu model grow` makes a larger one of it.",
        )
    return spec


def _check_tokenizers(tokenizer: Tokenizer, initial: Tokenizer, config: RunConfig) -> None:
    """Raise JinguError unless an id means the same to the run as to the initial weights."""
    ids = tokenizer.vocab()
    initial_ids = initial.vocab()
    moved = sum(ids.get(piece) != token_id for piece, token_id in initial_ids.items())
    if moved:
        raise JinguError(
            f"{moved:,} of the {len(initial_ids):,} tokens of the initial model have other ids, or none, in the run's "
            "tokenizer.",
            where=config.tokenizer.path,
            fix="Set tokenizer.path to the model's own tokenizer (and build the data set with it), or start from what "
            f"`jingu model grow {config.initialize.from_} --tokenizer {config.tokenizer.path}` writes.",
        )


def apply_tuning(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Add to the spec what `tune` trains: a part of the weights, or adapters.

    Raises:
        JinguError: the model or the configuration does not allow it.
    """
    settings = config.tune
    if isinstance(settings, FullSettings):
        return _freeze(spec, settings)
    if config.initialize.from_ is None:
        raise JinguError(
            "adapters are trained for the weights of a model, and the run starts from none.",
            where="initialize.from",
            fix="Name one, or set tune.type=full.",
        )
    if isinstance(settings, SoftPromptBase) and settings.position == "back" and spec.num_encoder_layers is None:
        raise JinguError(
            f"{spec.family} is a decoder, whose prompt must stand before the text.",
            where="tune.position",
            fix="Set it to front.",
        )
    adapter = _build_adapter(settings, spec.hidden_size)
    tuned = spec.model_copy(update={"adapter": adapter, "quantization": settings.quantization})
    check_targets(list(parameter_shapes(tuned)), adapter)
    # Virtual tokens take positions of their own.
    length = config.batch.sequence_length
    virtual_tokens = max(tuned.prompts)
    room = spec.max_position_embeddings - virtual_tokens
    if virtual_tokens and length > room:
        raise JinguError(
            f"{virtual_tokens} virtual tokens and sequences of {length} are more than the model's context of "
            f"{spec.max_position_embeddings} tokens.",
            where="tune.num_virtual_tokens",
            fix=f"Set batch.sequence_length to {room} or less, or train fewer virtual tokens.",
        )
    return tuned


def _build_adapter(settings: Tune, hidden_size: int) -> Adapter:
    if isinstance(settings, LoraSettings):
        fields = settings.model_dump(include={"rank", "alpha", "target_modules", "use_rslora", "dropout", "use_dora"})
        return Lora(**fields)
    if isinstance(settings, Ia3Settings):
        return Ia3(target_modules=tuple(settings.target_modules))
    if isinstance(settings, SoftPromptBase):
        prompt = SoftPrompt(num_virtual_tokens=settings.num_virtual_tokens, after_input=settings.position == "back")
        if isinstance(settings, PTuningSettings):
            size = settings.encoder_hidden_size or hidden_size
            return prompt.model_copy(update={"encoder": settings.encoder, "encoder_hidden_size": size})
        return prompt
    assert isinstance(settings, DeepPromptBase)
    prefix_size = settings.encoder_hidden_size if isinstance(settings, PrefixTuningSettings) else None
    return DeepPrompt(
        num_virtual_tokens=settings.num_virtual_tokens, encoder_hidden_size=prefix_size, in_encoder=settings.in_encoder
    )


def _freeze(spec: ModelSpec, settings: FullSettings) -> ModelSpec:
    """Freeze the parameters that match `tune.freeze`, and the blocks before the last trainable ones."""
    names = list(parameter_shapes(spec))
    patterns = list(settings.freeze)
    for pattern in patterns:
        if not any(matches_any(name, [pattern]) for name in names):
            raise JinguError(
                f"no parameter of the model matches {pattern}.",
                where="tune.freeze",
                fix="Names are such as embedding.weight and blocks.0.attention.q.weight; * matches anything.",
            )
    trainable = settings.num_trainable_layers
    if trainable is not None:
        if trainable > spec.num_layers:
            raise JinguError(
                f"the model has {spec.num_layers} blocks, not {trainable}.", where="tune.num_trainable_layers"
            )
        patterns += ["embedding*", "positions*", "relative_bias*", "encoder.*"]
        patterns += [f"blocks.{layer}.*" for layer in range(spec.num_layers - trainable)]
    if all(matches_any(name, patterns) for name in names):
        raise JinguError("all parameters of the model are frozen.", where="tune.freeze", fix="Freeze fewer.")
    return spec.model_copy(update={"frozen_parameters": tuple(patterns)})
