"""The spec of a run's model, from its settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.model.components import RotaryPositions
from jingu.model.families import FAMILIES, Family, map_tensors
from jingu.model.families.name_map import TensorMapping
from jingu.model.feed_forward_specs import Experts, NoFeedForward
from jingu.model.spec import ModelSpec, repeat_pattern, replace_fields


def spec_from_settings(
    settings: ModelSettings, vocabulary: int, context: int, start: ModelSpec | None = None
) -> ModelSpec:
    """Return the preset, or the family's template, changed by the user's settings.

    Dimensions that follow from changed ones, such as the head size from the hidden size, are computed again.

    Args:
        settings: the section `model` of the configuration.
        vocabulary: number of entries of the run's tokenizer.
        context: tokens per sequence of the run's batches.
        start: the spec of the model from which the run starts; it replaces a preset.

    Raises:
        JinguError: the family or preset is unknown, dimensions do not fit together, or the model is too small for the
            tokenizer or the sequences.
    """
    # Find the family and the template.
    preset = start or _preset(settings)
    family = find_family(settings.family or (preset.family if preset else "llama"))
    template = preset or family.template
    if preset and preset.family != family.name:
        raise JinguError(
            f"the {f'preset {settings.preset!r}' if start is None else 'model that the run starts from'} is of the "
            f"family {preset.family!r}, not {family.name!r}.",
            where="model.family",
            fix="Leave it out: the family is known.",
        )
    _check_family(settings, template, family)
    # The head size follows from the hidden size and the number of heads, if the user changes one of them.
    head_size = settings.head_dim
    # A head of latent attention has sizes of its own.
    is_latent = template.attention.latent is not None
    if head_size is None and (settings.hidden_size or settings.num_heads) and not is_latent:
        heads = settings.num_heads or template.attention.num_heads
        head_size = _head_size(settings.hidden_size or template.hidden_size, heads)
    # Fields that are None keep the value of the template.
    values = {
        "vocab_size": _vocabulary(settings, vocabulary, preset),
        "max_position_embeddings": _context(settings, context, preset),
        "hidden_size": settings.hidden_size,
        "num_layers": settings.num_layers,
        "layer_pattern": _pattern(settings, template),
        "num_encoder_layers": template.num_encoder_layers and (settings.num_encoder_layers or settings.num_layers),
        "norm.eps": settings.norm_eps,
        "position.theta": settings.rope_theta,
        "attention.num_heads": settings.num_heads,
        "attention.num_kv_heads": (None if is_latent else settings.num_kv_heads) or settings.num_heads,
        "attention.head_dim": head_size,
        "tie_word_embeddings": settings.tie_word_embeddings,
        "scale_lm_head": template.scale_lm_head and settings.tie_word_embeddings is not False,
        "initializer_range": settings.initializer_range,
        "mtp_layers": settings.mtp_layers,
        "mtp_loss_weight": settings.mtp_loss_weight,
        **_feed_forward(settings, template, family),
        **_mixers(settings, template),
    }
    return replace_fields(template, **{path: value for path, value in values.items() if value is not None})


def _check_family(settings: ModelSettings, template: ModelSpec, family: Family) -> None:
    """Raise JinguError for settings of components that the family does not have."""
    experts = settings.experts.model_dump(exclude_none=True)
    has_encoder = template.num_encoder_layers is not None
    has_rotary = isinstance(template.position, RotaryPositions)
    has_attention = any(layer.has_attention for layer in template.kinds)
    has_feed_forward = any(layer.intermediate_size for layer in template.kinds)
    for setting, has, what, where, example in (
        (settings.num_encoder_layers, has_encoder, "encoder", "model.num_encoder_layers", "one (t5)"),
        (settings.rope_theta, has_rotary, "rotary positions", "model.rope_theta", "them (llama)"),
        (
            settings.num_kv_heads,
            template.attention.latent is None,
            "key-value heads",
            "model.num_kv_heads",
            "them (llama)",
        ),
        (settings.num_heads or settings.num_kv_heads, has_attention, "attention", "model.num_heads", "it (llama)"),
        (settings.intermediate_size, has_feed_forward, "feed-forward", "model.intermediate_size", "one (llama)"),
        (experts, family.experts, "experts", f"model.experts.{next(iter(experts), None)}", "them (mixtral)"),
    ):
        if setting and not has:
            fix = f"Leave it out, or choose a family that has {example}."
            raise JinguError(f"the family {family.name!r} has no {what}.", where=where, fix=fix)


def _preset(settings: ModelSettings) -> ModelSpec | None:
    return None if settings.preset is None else find_preset(settings.preset)


def find_preset(name: str) -> ModelSpec:
    """Return the spec of a published model. Raises JinguError for an unknown name."""
    presets = {name: spec for family in FAMILIES.values() for name, spec in family.presets.items()}
    _check_known("preset", name, presets)
    return presets[name]


def find_family(name: str) -> Family:
    """Return the family of this name. Raises JinguError, with similar names, if there is none."""
    _check_known("family", name, FAMILIES)
    return FAMILIES[name]


def _check_known(kind: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        near = get_close_matches(name, choices, n=3)
        hint = f"The nearest are {', '.join(near)}; " if near else ""
        raise JinguError(
            f"there is no {kind} {name!r}.", where=f"model.{kind}", fix=f"{hint}`jingu model list` shows all."
        )


def _vocabulary(settings: ModelSettings, tokenizer: int, preset: ModelSpec | None) -> int:
    """Return the number of embedding rows: at least as many as the tokenizer has entries."""
    if settings.vocab_size == "auto":
        return max(tokenizer, preset.vocab_size) if preset else tokenizer
    if settings.vocab_size < tokenizer:
        raise JinguError(
            f"the model has {settings.vocab_size} embedding rows, but the tokenizer has {tokenizer} entries.",
            where="model.vocab_size",
            fix=f"Use auto, or at least {tokenizer}.",
        )
    return settings.vocab_size


def _context(settings: ModelSettings, sequence: int, preset: ModelSpec | None) -> int:
    """Return the longest sequence of the model: at least as long as the sequences of the batches."""
    context = settings.max_position_embeddings or (preset.max_position_embeddings if preset else sequence)
    if context < sequence:
        raise JinguError(
            f"the model is made for {context} tokens, but the batch has sequences of {sequence}.",
            where="model.max_position_embeddings",
            fix=f"Raise model.max_position_embeddings to {sequence} or more, or shorten batch.sequence_length.",
        )
    return context


def _head_size(width: int, heads: int) -> int:
    """Return the hidden size divided by the number of heads. Raises JinguError if it is not divisible."""
    if width % heads:
        below = width // heads * heads
        near = " or ".join(str(width) for width in (below, below + heads) if width)
        raise JinguError(
            f"a hidden size of {width} is not divisible by {heads} heads.",
            where="model.num_heads",
            fix=f"Use a hidden size of {near}, another number of heads, or set model.head_dim.",
        )
    return width // heads


def _pattern(settings: ModelSettings, template: ModelSpec) -> tuple[str, ...]:
    """Return the kinds of all layers."""
    number = settings.num_layers or template.num_layers
    pattern = settings.layer_pattern
    if pattern is None:
        return repeat_pattern(template.layer_pattern, number)
    unknown = next((name for name in pattern if name not in template.layer_kinds), None)
    if unknown is not None or not pattern:
        kinds = ", ".join(template.layer_kinds)
        what = f"all layers of {template.family} are equal"
        fix = "Leave it out, or choose a family whose layers differ, such as qwen3_5_text."
        if kinds:
            what, fix = f"the kinds of layers of {template.family} are {kinds}, not {unknown}", "Name some of these."
        raise JinguError(f"{what}.", where="model.layer_pattern", fix=fix)
    return tuple(pattern[layer % len(pattern)] for layer in range(number))


# By the type of a mixer, its numbers of heads, with the size of each and the number that divides them. All heads
# together follow the hidden size.
_MIXER_HEADS = {
    "gated_delta": (("num_key_heads", "key_head_dim", None), ("num_heads", "value_head_dim", "num_key_heads")),
    "state_space": (("num_heads", "head_dim", "num_groups"),),
}


def _mixers(settings: ModelSettings, template: ModelSpec) -> dict[str, object]:
    """Return the fields of the mixers with a state, by their paths in the spec; nothing if none changes."""
    changes = settings.mixer.model_dump(exclude_none=True)
    mixer = next((layer.state_mixer for layer in template.kinds if layer.state_mixer is not None), None)
    if mixer is None:
        if changes:
            what = f"the family {template.family!r} has no mixer with a state."
            fix = "Leave it out, or choose a family that has one, such as qwen3_5_text."
            raise JinguError(what, where=f"model.mixer.{next(iter(changes))}", fix=fix)
        return {}
    fields = mixer.model_dump()
    unknown = next((name for name in changes if name not in fields), None)
    if unknown is not None:
        known = ", ".join(name for name in type(settings.mixer).model_fields if name in fields)
        what = f"the mixer of {template.family} ({mixer.type}) has no {unknown}."
        raise JinguError(what, where=f"model.mixer.{unknown}", fix=f"It has {known}.")
    if settings.norm_eps is not None and "eps" in fields:
        changes["eps"] = settings.norm_eps
    width = settings.hidden_size or template.hidden_size
    for number, size, divisor in _MIXER_HEADS.get(mixer.type, ()):
        if number not in changes and (settings.hidden_size is not None or size in changes):
            heads = fields[number] * fields[size] * width / (changes.get(size, fields[size]) * template.hidden_size)
            multiple = 1 if divisor is None else changes.get(divisor, fields[divisor])
            changes[number] = multiple * max(1, round(heads / multiple))
    if not changes:
        return {}
    kinds = {
        name: {**kind, "mixer": {**kind["mixer"], **changes}} if template.kind(name).state_mixer else kind
        for name, kind in template.layer_kinds.items()
    }
    top = {f"mixer.{name}": value for name, value in changes.items()} if template.mixer is not None else {}
    return {**top, "layer_kinds": kinds}


def _feed_forward(settings: ModelSettings, template: ModelSpec, family: Family) -> dict[str, object]:
    """Return the fields of the feed-forward, by their paths in the spec."""
    experts = settings.experts.model_dump(exclude_none=True)
    part = template.feed_forward
    values: dict[str, object] = {}
    # Settings of experts turn a dense feed-forward into a mixture, with the family's defaults.
    if experts and not isinstance(part, Experts):
        assert family.experts is not None and not isinstance(part, NoFeedForward)
        values = {"": family.experts, ".intermediate_size": part.intermediate_size, ".activation": part.activation}
        part = family.experts
    if settings.intermediate_size or (settings.hidden_size and not isinstance(part, NoFeedForward)):
        values[".intermediate_size"] = settings.intermediate_size or family.feed_forward_size(
            settings.hidden_size or template.hidden_size
        )
    router = experts.pop("router", None)
    # A router of the same type keeps the family's settings; another type gets its own defaults.
    if isinstance(part, Experts) and router not in (None, part.router.type):
        experts["router"] = {"type": router}
    for name in ("scores", "correction", "correction_rate"):
        if name in experts:
            experts[f"router.{name}"] = experts.pop(name)
    values |= {f".{name}": value for name, value in experts.items()}
    return {f"feed_forward{path}": value for path, value in values.items()}


def expand_targets(targets: Iterable[str], spec: ModelSpec) -> tuple[str, ...]:
    """Translate `tune.target_modules`, which may contain Hugging Face's names, to patterns of jingu's module names.

    As in peft, `q_proj` stands for every module whose name ends in it, `all-linear` for all matrices of the blocks, and
    a regular expression for the modules whose whole name it matches. Any other target stays as it is.
    """

    patterns: list[str] = []
    # Map the tensors of the base model: the spec of a resumed run already has the adapter. A tied head has a name too.
    spec = spec.model_copy(update={"adapter": None, "tie_word_embeddings": False})
    try:
        mappings = map_tensors(spec)
    except LookupError:
        # Hugging Face has no such model, for example a Mixtral with a shared expert.
        mappings = []
    for target in targets:
        if target == "all-linear":
            patterns += ["*attention.*", *["*.mixer.*"] * spec.has_state, "*.feed_forward.*"]
            continue
        names = [
            name.removesuffix(".weight")
            for mapping in mappings
            if f".{mapping.hf_name}".endswith(f".{target}.weight")
            for name in mapping.jingu_shapes
        ]
        # One pattern for all blocks, unless the target is a module of one block.
        if not re.search(r"\b\d+\b", target):
            names = [re.sub(r"\bblocks\.\d+\.", "blocks.*.", name) for name in names]
        patterns += names or _match_modules(target, mappings) or [target]
    return tuple(dict.fromkeys(patterns))


def _match_modules(pattern: str, mappings: Iterable[TensorMapping]) -> list[str]:
    """Return jingu's names of the matrices whose module in Hugging Face's model a regular expression matches."""
    matrices = [mapping for mapping in mappings if len(mapping.shape) == 2 and mapping.hf_name.endswith(".weight")]
    modules = [name.removesuffix(".weight") for mapping in matrices for name in mapping.jingu_shapes]
    # A pattern of jingu's names may be a regular expression too.
    if any(fnmatchcase(module, pattern) for module in modules):
        return []
    with suppress(re.error):
        compiled = re.compile(pattern)
        matches = [mapping for mapping in matrices if compiled.fullmatch(mapping.hf_name.removesuffix(".weight"))]
        return [name.removesuffix(".weight") for mapping in matches for name in mapping.jingu_shapes]
    return []
