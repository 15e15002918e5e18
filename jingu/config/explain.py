"""Mistakes in settings, told so that a newcomer can mend them: what is wrong, where, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jingu.config.schema import RunConfig, Settings
from jingu.config.strict_yaml import Document, KeyPath
from jingu.config.tree import Kind, all_keys, describe, either, field_kinds, find, item_kinds, sections, written
from jingu.errors import JinguError

# Names that other tools give to our settings.
_ELSEWHERE = {
    "accumulation": "batch.micro_size",
    "architecture": "model.family",
    "attention_heads": "model.heads",
    "batch_size": "batch.global_size",
    "beta_1": "optimizer.beta1",
    "beta_2": "optimizer.beta2",
    "block_size": "batch.sequence_length",
    "bf16": "precision.type",
    "bos_token": "tokenizer.special_tokens",
    "checkpointing": "train.activation_checkpointing",
    "context_length": "model.context",
    "corpus": "data.input",
    "d_model": "model.width",
    "dim": "model.width",
    "dtype": "precision.type",
    "eos_token": "tokenizer.special_tokens",
    "epochs": "train.steps",
    "eps": "optimizer.epsilon",
    "eval_every": "evaluation.every",
    "eval_steps": "evaluation.every",
    "ffn_hidden_size": "model.feed_forward",
    "files": "data.input",
    "fp16": "precision.type",
    "global_batch_size": "batch.global_size",
    "grad_clip": "train.clip_norm",
    "gradient_accumulation": "batch.micro_size",
    "gradient_accumulation_steps": "batch.micro_size",
    "gradient_checkpointing": "train.activation_checkpointing",
    "gradient_clipping": "train.clip_norm",
    "head_dim": "model.head_size",
    "hidden_size": "model.width",
    "initializer_range": "model.initial_std",
    "intermediate_size": "model.feed_forward",
    "iterations": "train.steps",
    "learning_rate": "optimizer.lr",
    "logging_steps": "train.log_every",
    "lr_scheduler_type": "schedule.type",
    "max_grad_norm": "train.clip_norm",
    "max_iters": "train.steps",
    "max_length": "batch.sequence_length",
    "max_position_embeddings": "model.context",
    "max_seq_len": "batch.sequence_length",
    "max_seq_length": "batch.sequence_length",
    "max_steps": "train.steps",
    "micro_batch_size": "batch.micro_size",
    "min_lr": "schedule.minimum",
    "model_type": "model.family",
    "n_embd": "model.width",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "num_hidden_layers": "model.layers",
    "num_key_value_heads": "model.kv_heads",
    "num_layers": "model.layers",
    "num_steps": "train.steps",
    "output_dir": "runs",
    "per_device_train_batch_size": "batch.micro_size",
    "random_seed": "seed",
    "rms_norm_eps": "model.norm_epsilon",
    "rope_theta": "model.rope_base",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "scheduler": "schedule",
    "seq_len": "batch.sequence_length",
    "seq_length": "batch.sequence_length",
    "test_size": "data.held_out",
    "tie_word_embeddings": "model.tied_embeddings",
    "total_steps": "train.steps",
    "train_batch_size": "batch.global_size",
    "valid_fraction": "data.held_out",
    "vocab_size": "tokenizer.vocabulary",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "wd": "optimizer.weight_decay",
    "zero_optimization": "parallel.zero",
    "zero_stage": "parallel.zero",
}
_MOST = 12
"""Mistakes told at once; a file with more of them is more likely another kind of file."""
# Values that other tools have for ours.
_VALUES = {
    "adam": "adamw",
    "bfloat16": "bf16",
    "double": "fp64",
    "float32": "fp32",
    "float64": "fp64",
    "gpu": "cuda",
    "inverse_sqrt": "noam",
    "wsd": "warmup-stable-decay",
}
_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def explain(error: ValidationError, document: Document) -> list[JinguError]:
    """Every mistake that pydantic found in `document`, in the order of the document, told in our own words."""
    found: dict[KeyPath, JinguError] = {}
    for detail in error.errors(include_url=False):
        for path, mistake in _mistakes(detail, document):
            found.setdefault(path, mistake)
    for path in [path for path in found if any(other[: len(path)] == path for other in found if other != path)]:
        del found[path]  # A list's branch of a union fails too when one of its items does.
    order = {path: place for place, path in enumerate(document.origins)}
    return [found[path] for path in sorted(found, key=lambda path: order.get(path, len(order)))]


def combined(mistakes: list[JinguError]) -> JinguError:
    """One error that tells of all of them: alone as it is, several one a line."""
    if len(mistakes) == 1:
        return mistakes[0]
    shown = [f"- {mistake}" for mistake in mistakes[:_MOST]]
    rest = [f"- and {len(mistakes) - _MOST} more"] if len(mistakes) > _MOST else []
    lines = "\n".join(shown + rest)
    return JinguError(f"there are {len(mistakes)} mistakes in the settings:\n{lines}")


def nearest(word: str, choices: list[str], cutoff: float = 0.6) -> str | None:
    """The choice that `word` was most likely meant to be; None where there is none, or two are as near."""
    plain = word.lower().replace("-", "_")
    ratios = sorted(
        ((SequenceMatcher(None, plain, choice.lower().replace("-", "_")).ratio(), choice) for choice in choices),
        reverse=True,
    )
    (best, choice), (second, _) = [*ratios, (0.0, ""), (0.0, "")][:2]
    return choice if best >= cutoff and best > second else None


def _near_value(value: Any, choices: list[str]) -> str | None:
    if not isinstance(value, str):
        return None
    known = _VALUES.get(value.lower().replace("-", "_"))
    return known if known in choices else nearest(value, choices, cutoff=0.7)


def _mistakes(detail: Any, document: Document) -> Iterator[tuple[KeyPath, JinguError]]:
    """The mistakes behind one of pydantic's, each with its path."""
    path, field, model = _locate(detail["loc"], document.value)
    value = _value(document.value, path)
    kind = detail["type"]
    if kind == "extra_forbidden":
        yield path, _unknown(path, model, document)
    elif field is None:
        yield path, JinguError(f"this is no section of settings, but {_given(value)}.", where=_where(document, path))
    elif kind.startswith("union_tag"):
        yield (*path, "type"), _wrong_type_tag(path, field, value, document)
    elif kind == "value_error":
        words = str(detail["ctx"]["error"]).rstrip(".")
        yield path, JinguError(f"{_dotted(path)}: {words}.", where=_where(document, path))
    elif items := _wrong_items(detail, field, value):
        for index in items:
            takes, name = item_kinds(field), f"item {index + 1} of {_dotted(path)}"
            yield (*path, index), _wrong(name, takes, (*path, index), value[index], field, document)
    else:
        yield path, _wrong(_dotted(path), field_kinds(field), path, value, field, document)


def _locate(loc: tuple[str | int, ...], value: Any) -> tuple[KeyPath, FieldInfo | None, type[Settings]]:
    """The path in the document, the field and the section's model, from pydantic's location.

    That one has the tag of a section's variant, and names of a union's branches, among the keys.
    """
    model: type[Settings] = RunConfig
    field: FieldInfo | None = None
    path: KeyPath = ()
    rest = list(loc)
    while rest:
        key = rest.pop(0)
        field = model.model_fields.get(str(key))
        path = (*path, key)
        variants = sections(field) if field else {}
        if not variants or not rest:
            break
        model = variants[str(rest.pop(0))] if "" not in variants else variants[""]
        if not rest:
            break
    return path, field, model


def _wrong_items(detail: Any, field: FieldInfo, value: Any) -> list[int]:
    """Indices of the items that are wrong, where the value is rightly a list."""
    indices = [part for part in detail["loc"] if isinstance(part, int)]
    return indices[:1] if isinstance(value, list) and item_kinds(field) else []


def _unknown(path: KeyPath, model: type[Settings], document: Document) -> JinguError:
    """A key that no setting has: the nearest that one does have, here or in another section."""
    key, where = str(path[-1]), _where(document, path)
    parent, dotted = path[:-1], _dotted(path)
    variants = sections(found) if (found := find(parent)) else {}
    owners = [tag for tag, variant in variants.items() if key in variant.model_fields]
    if owners:
        return _other_variant(parent, key, owners, document)
    if "." in key and find(tuple(key.split("."))):
        first, rest = key.split(".", 1)
        return JinguError(
            f"{key} is written with a dot, which is for the command line.",
            where=where,
            fix=f"In a file, write `{first}:` and, indented on the next line, `{rest}:`.",
        )
    here = [_dotted((*parent, name)) for name in model.model_fields]
    guess = _guess(key, here)
    if guess:
        return JinguError(f"{dotted} is not a setting.", where=where, fix=f"Did you mean {guess}?")
    place = f"{_dotted(parent)} has" if parent else "The top level has"
    names = ", ".join(model.model_fields)
    return JinguError(f"{dotted} is not a setting.", where=where, fix=f"{place}: {names}.")


def _guess(key: str, here: list[str]) -> str | None:
    """The dotted key that an unknown one was most likely meant to be."""
    leaf = key.lower().replace("-", "_")
    if leaf in _ELSEWHERE:
        return _ELSEWHERE[leaf]
    names = [name.rsplit(".", 1)[-1] for name in here]
    if near := nearest(leaf, names):
        return here[names.index(near)]
    everywhere: dict[str, list[str]] = {}
    for dotted in all_keys():
        everywhere.setdefault(dotted.rsplit(".", 1)[-1], []).append(dotted)
    everywhere.pop("type", None)
    close = nearest(leaf, list(everywhere), cutoff=0.75)
    return either(everywhere[close]) if close else None


def _other_variant(parent: KeyPath, key: str, owners: list[str], document: Document) -> JinguError:
    """A key that another variant of the section has."""
    section, path = _dotted(parent), (*parent, key)
    dotted = _dotted(path)
    default = str(find(parent).get_default().type)  # type: ignore[union-attr]
    chosen = _value(document.value, (*parent, "type"), default)
    tag = document.origins.get((*parent, "type"))
    fix = f"Remove {key}, or choose {section}.type {either(owners)}."
    if tag and not tag.in_file and document.origin(path).in_file:
        fix += f" To replace the whole section of the file, write '{section}={{type: {chosen}}}'."
    return JinguError(
        f"{dotted} is a setting of {section}.type {either(owners)}, and the type here is {chosen}"
        f" ({tag.where if tag else 'the default'}).",
        where=_where(document, path),
        fix=fix,
    )


def _wrong_type_tag(path: KeyPath, field: FieldInfo, value: Any, document: Document) -> JinguError:
    """A `type:` that does not exist, or a section of several types that is not a section."""
    if not isinstance(value, dict):
        return _not_a_section(path, field, value, document)
    name, tags = _dotted(path), list(sections(field))
    tag = value.get("type")
    near = _near_value(tag, tags)
    return JinguError(
        f"{name}.type takes {either(tags)}, {_but(_given(tag, bare=True))}.",
        where=_where(document, (*path, "type")),
        fix=f"Did you mean {near}?" if near else None,
    )


def _not_a_section(path: KeyPath, field: FieldInfo, value: Any, document: Document) -> JinguError:
    """One value where a section should be: perhaps its `type:`, or a colon without its space."""
    variants = sections(field)
    keys = next(iter(variants.values())).model_fields
    tags = (
        list(variants) if "" not in variants else [k.value for k in field_kinds(keys["type"])] if "type" in keys else []
    )
    text = value if isinstance(value, str) else ""
    near = _near_value(text, tags)
    if near or list(keys) == ["type"]:
        fix = f"Write {_nested((*path, 'type'), near or either(tags), document)}."
    elif text.partition(":")[0] in keys:
        fix = f"Put a space after the colon: {text.replace(':', ': ', 1)}."
    else:
        fix = f"Its settings are: {', '.join(keys)}."
    return JinguError(
        f"{_dotted(path)} is a section of settings, not {_given(value)}.", where=_where(document, path), fix=fix
    )


def _wrong(name: str, takes: list[Kind], path: KeyPath, value: Any, field: FieldInfo, document: Document) -> JinguError:
    """A value of the wrong type, or out of range."""
    where = _where(document, path)
    if sections(field):
        return _not_a_section(path, field, value, document)
    choices = [written(kind.value) for kind in takes if kind.type.__class__ is not type and kind.value is not None]
    bare = bool(choices) and len(choices) == len(takes)
    letters = document.origin(path).written
    given = letters if letters is not None and value is not None else _given(value, bare=bare)
    meaning = (field.description or "").split(". ")[0].rstrip(".")
    hint = _hint(takes, value, choices, field)
    return JinguError(
        f"{name} takes {describe(takes)}, {_but(given)}.",
        where=where,
        fix=" ".join(filter(None, [hint, f"Meaning: {meaning}." if meaning else ""])) or None,
    )


def _hint(takes: list[Kind], value: Any, choices: list[str], field: FieldInfo) -> str | None:
    """What to write instead, for the slips that people make most."""
    types = [kind.type for kind in takes]
    if isinstance(value, float) and int in types and value.is_integer():
        return f"Write {int(value)}."
    if value is None and types != [str]:
        default = field.get_default(call_default_factory=True)
        return None if default is None else f"Leave the key out to take the default, {written(default)}."
    if not isinstance(value, str):
        return None
    if value.lower() in ("true", "false", *_BOOLEANS) and bool in types:
        return f"Write {_BOOLEANS.get(value.lower(), value.lower())}."
    if value.lower() in ("none", "nil") and type(None) in types:
        return "Write null."
    if (int in types or float in types) and (number := _number(value)) is not None:
        return number
    if any(get_origin(each) is list for each in types):
        return f"Write [{value}]."
    near = _near_value(value, choices)
    return f"Did you mean {near}?" if near else None


def _number(text: str) -> str | None:
    """What to write for a number that was given as text."""
    plain = text.replace("_", "").replace(",", "").strip()
    try:
        float(plain)
    except ValueError:
        return None
    return "Write it without quotes." if plain == text else f"Write {plain}."


def _given(value: Any, *, bare: bool = False) -> str:
    """A value in words: `the text "many"`, `a list`, `3.5`."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        if not value:
            return "an empty text"
        short = _short(value)
        return short if bare and short.strip() else f'the text "{short}"'
    return written(value)


def _but(given: str) -> str:
    return f"not {given}" if given else "and here it is empty (null)"


def _nested(path: KeyPath, value: str, document: Document) -> str:
    """How a setting is written where the document came from: in a file, or on the command line."""
    *parents, last = map(str, path)
    if document.origin(path).in_file:
        return f"`{parents[0]}:` and, indented on the next line, `{last}: {value}`"
    return f"{_dotted(path)}={value}"


def _value(root: Any, path: KeyPath, default: Any = None) -> Any:
    for key in path:
        try:
            root = root[key]
        except (KeyError, IndexError, TypeError):
            return default
    return root


def _where(document: Document, path: KeyPath) -> str:
    return document.origin(path).where


def _dotted(path: KeyPath) -> str:
    return ".".join(_short(str(part)) for part in path)


def _short(text: str) -> str:
    """Text of others inside a message: one line, no control characters, not too long."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
