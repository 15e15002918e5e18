"""The spec of the model that a run trains: from its settings or its initial model, with adapters and frozen weights."""

from __future__ import annotations

from pathlib import Path

import torch

from jingu.checkpoint.resume import checkpoints_path, complete_steps
from jingu.config.schema import RunConfig
from jingu.config.sections import tune
from jingu.config.sections.data import PrefixLmSettings
from jingu.config.sections.policies import PpoSettings, RolloutSettings, SharedCriticSettings
from jingu.config.sections.tasks import RewardSettings
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import stored_matrices
from jingu.model.adapter_layers import RESIDUAL_INITS, check_saved_modules, check_targets
from jingu.model.adapter_specs import Adapter, DeepPrompt, Ia3, Lora, SoftPrompt
from jingu.model.decoder import parameter_shapes
from jingu.model.resolve import expand_targets, spec_from_settings
from jingu.model.spec import ModelSpec, flatten_fields
from jingu.model.trainable import matches_any
from jingu.text.tokenizer import Tokenizer


def build_run_spec(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> ModelSpec:
    """Return the spec of a run's model, from its settings or from the initial model (`initialize.from`).

    Settings of `model` override those of the initial model, as long as the parameters keep their shapes. A run that has
    a checkpoint no longer needs the initial model: it reads the stored spec instead.

    Args:
        folder: folder of the run.

    Returns:
        The spec without adapters and frozen parameters, which `apply_tuning` adds.

    Raises:
        JinguError: the settings are wrong; or the initial model cannot be opened, has parameters of other names or
            shapes, or was trained with another tokenizer.
    """
    settings = config.model
    length = config.document_length
    if settings.mtp_loss_weight and config.task.type != "pretraining":
        raise JinguError(
            f"multi-token prediction is trained with the task pretraining, and this one is {config.task.type}.",
            where="model.mtp_loss_weight",
            fix="Leave it out; the layers are then kept as they are.",
        )
    # 1. Random weights: the settings alone determine the spec.
    if config.initialize.from_ is None:
        return spec_from_settings(settings, tokenizer.vocab_size, length)
    # 2. A run with a checkpoint: read the spec that its first start stored.
    stored_spec = folder / "model.json"
    if complete_steps(checkpoints_path(folder, config)) and stored_spec.is_file():
        # The stored spec includes the adapter. Remove it, because `apply_tuning` adds it again.
        spec = ModelSpec.from_json(stored_spec.read_bytes(), stored_spec).model_copy(update={"adapter": None})
        return spec_from_settings(settings, tokenizer.vocab_size, length, spec)
    # 3. A new run: start from the spec of the initial model.
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
    # If there is also a preset, it must describe the same parameters as the initial model.
    from_settings = spec if settings.preset is None else spec_from_settings(settings, tokenizer.vocab_size, length)
    if parameter_shapes(from_settings) != parameter_shapes(initial.spec):
        initial_fields = flatten_fields(initial.spec)
        differences = [
            f"{key} is {value}, there {initial_fields.get(key)}"
            for key, value in flatten_fields(from_settings).items()
            if initial_fields.get(key) != value
        ]
        raise JinguError(
            f"the run's model differs from the one that it starts from: {'; '.join(differences)}.",
            where=config.initialize.from_,
            fix="Leave out of `model` what the initial model decides; `jingu model grow` makes a larger one of it.",
        )
    return spec


def _check_tokenizers(tokenizer: Tokenizer, initial: Tokenizer, config: RunConfig) -> None:
    """Raise JinguError unless each token of the initial model has the same id in the run's tokenizer."""
    ids = tokenizer.vocab()
    initial_ids = initial.vocab()
    differences = sum(ids.get(piece) != token_id for piece, token_id in initial_ids.items())
    if differences:
        raise JinguError(
            f"{differences:,} of the {len(initial_ids):,} tokens of the initial model have other ids, or none, in the "
            "run's tokenizer.",
            where=config.tokenizer.path,
            fix="Set tokenizer.path to the model's own tokenizer (and build the data set with it), or start from what "
            f"`jingu model grow {config.initialize.from_} --tokenizer {config.tokenizer.path}` writes.",
        )


def _check_states(config: RunConfig) -> None:
    """Raise JinguError for settings that need attention in all layers, in a model whose layers keep states."""
    is_exact = isinstance(config.task, RolloutSettings) and config.task.exact
    for where, is_set, problem in (
        ("data.objective", isinstance(config.data.objective, PrefixLmSettings), "prefixes attend in both directions"),
        ("tune.type", isinstance(config.tune, tune.DeepPromptBase), "the prompt consists of keys and values"),
        ("task.exact", is_exact, "training rounds chunks of a state differently from generation"),
    ):
        if is_set:
            what = f"some layers keep a state instead of keys and values, and {problem}."
            raise JinguError(what, where=where, fix="Choose another setting, or a model with attention in all layers.")


def apply_tuning(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the spec with the heads that `task` needs, and with the adapters or frozen parameters of `tune`.

    Raises:
        JinguError: model, task and `tune` do not fit each other.
    """
    settings = config.tune
    if spec.has_state:
        _check_states(config)
    # 1. Heads: a score head for reward models, a value head for PPO with a shared critic.
    has_score_head = isinstance(config.task, RewardSettings)
    if spec.score_head and not has_score_head:
        raise JinguError(
            f"the initial model is a reward model, which gives no logits for the task {config.task.type}.",
            where="initialize.from",
            fix="Start from the model that it was trained from.",
        )
    has_value_head = isinstance(config.task, PpoSettings) and isinstance(config.task.critic, SharedCriticSettings)
    spec = spec.model_copy(update={"score_head": has_score_head, "value_head": has_value_head})
    # 2. Full fine-tuning: all parameters are trained, except for frozen ones.
    if isinstance(settings, tune.FullSettings):
        return _freeze(spec, settings)
    # 3. Adapters: build their spec, and check that it fits the model.
    if config.initialize.from_ is None:
        raise JinguError(
            "adapters are trained for an existing model, but the run starts from random weights.",
            where="initialize.from",
            fix="Name one, or set tune.type=full.",
        )
    if isinstance(settings, tune.SoftPromptBase) and settings.position == "back" and spec.num_encoder_layers is None:
        raise JinguError(
            f"{spec.family} is a decoder, whose prompt must stand before the text.",
            where="tune.position",
            fix="Set it to front.",
        )
    adapter = _build_adapter(settings, spec)
    tuned_spec = spec.model_copy(update={"adapter": adapter, "quantization": settings.quantization})
    check_targets(list(parameter_shapes(tuned_spec)), adapter)
    if isinstance(adapter, Lora):
        check_saved_modules(list(parameter_shapes(tuned_spec)), adapter, is_quantized=settings.quantization is not None)
        if adapter.init_lora_weights == "loftq" and settings.quantization is None:
            raise JinguError(
                "LoftQ starts from the quantization error, but nothing is quantized.",
                where="tune.init_lora_weights",
                fix="Set tune.quantization, or choose another initialization.",
            )
    if settings.quantization == "stored":
        _check_stored(config, adapter)
    # 4. Virtual tokens occupy positions of the model's context.
    length = config.batch.sequence_length
    virtual_tokens = max(tuned_spec.prompts)
    room = spec.max_position_embeddings - virtual_tokens
    if virtual_tokens and length > room:
        raise JinguError(
            f"{virtual_tokens} virtual tokens and sequences of {length} are more than the model's context of "
            f"{spec.max_position_embeddings} tokens.",
            where="tune.num_virtual_tokens",
            fix=f"Set batch.sequence_length to {room} or less, or train fewer virtual tokens.",
        )
    return tuned_spec


def _check_stored(config: RunConfig, adapter: Adapter) -> None:
    """Raise JinguError if the initial model's matrices cannot stay as they are stored."""
    assert config.initialize.from_ is not None
    stored_matrices(open_model(Path(config.initialize.from_)), torch.device("cpu"), "tune.quantization")
    if isinstance(adapter, Lora) and adapter.init_lora_weights in (*RESIDUAL_INITS, "loftq"):
        raise JinguError(
            f"{adapter.init_lora_weights} changes the frozen matrices, or starts from the error of quantizing them, so "
            "they cannot keep their stored form.",
            where="tune.init_lora_weights",
            fix="Choose another initialization, or another value of tune.quantization.",
        )


def _build_adapter(settings: tune.Tune, spec: ModelSpec) -> Adapter:
    """Return the spec of the adapter, with target modules as patterns of jingu's module names."""
    if isinstance(settings, tune.LoraSettings):
        fields = settings.model_dump(include=Lora.model_fields.keys() - {"type"})
        for name, values in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
            fields[name] = [(path, value) for key, value in values.items() for path in expand_targets([key], spec)]
        for name in ("target_modules", "modules_to_save"):
            fields[name] = expand_targets(fields[name], spec)
        return Lora.model_validate(fields)
    if isinstance(settings, tune.Ia3Settings):
        return Ia3(target_modules=expand_targets(settings.target_modules, spec))
    if isinstance(settings, tune.SoftPromptBase):
        prompt = SoftPrompt(num_virtual_tokens=settings.num_virtual_tokens, after_input=settings.position == "back")
        if isinstance(settings, tune.PTuningSettings):
            size = settings.encoder_hidden_size or spec.hidden_size
            return prompt.model_copy(update={"encoder": settings.encoder, "encoder_hidden_size": size})
        return prompt
    assert isinstance(settings, tune.DeepPromptBase)
    prefix_size = settings.encoder_hidden_size if isinstance(settings, tune.PrefixTuningSettings) else None
    return DeepPrompt(
        num_virtual_tokens=settings.num_virtual_tokens, encoder_hidden_size=prefix_size, in_encoder=settings.in_encoder
    )


def _freeze(spec: ModelSpec, settings: tune.FullSettings) -> ModelSpec:
    """Return the spec with frozen parameters.

    These are the parameters that match `tune.freeze`. With `tune.num_trainable_layers`, embeddings and encoder are
    frozen too, and all blocks but that many last ones.

    Raises:
        JinguError: a pattern matches no parameter, the model has fewer blocks, or nothing remains to train.
    """
    names = list(parameter_shapes(spec))
    patterns = list(settings.freeze)
    for pattern in patterns:
        if not any(matches_any(name, [pattern]) for name in names):
            is_tied_head = spec.tie_word_embeddings and not spec.score_head and matches_any("head.weight", [pattern])
            cause = ": the head is tied to the embedding, whose name is embedding.weight" if is_tied_head else ""
            raise JinguError(
                f"no parameter of the model matches {pattern}{cause}.",
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
