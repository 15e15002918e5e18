"""Mistakes in settings, told so that a newcomer can mend them: what is wrong, where, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.config.strict_yaml import Document, KeyPath
from jingu.config.tree import (
    Kind,
    all_keys,
    describe,
    field_kinds,
    fields,
    find,
    item_kinds,
    item_sections,
    meaning_of,
    sections,
    takes_text,
    written,
)
from jingu.errors import JinguError, either

Told = tuple[str, str | None]
"""What is wrong, and what to do about it."""

# Our settings, and the names that other tools give them.
_ELSEWHERE = {
    "batch.global_size": "batch_size global_batch_size train_batch_size",
    "batch.micro_size": "accumulation gradient_accumulation gradient_accumulation_steps micro_batch_size"
    " per_device_train_batch_size",
    "batch.sequence_length": "block_size max_length max_seq_len max_seq_length seq_len seq_length",
    "checkpoint.every": "save_every save_steps",
    "data.held_out": "test_size valid_fraction",
    "data.input": "corpus files",
    "evaluation.every": "eval_every eval_steps",
    "model.context": "context_length max_position_embeddings",
    "model.family": "architecture model_type",
    "model.feed_forward": "ffn_hidden_size intermediate_size",
    "model.head_size": "head_dim",
    "model.heads": "attention_heads n_head n_heads num_attention_heads",
    "model.initial_std": "initializer_range",
    "model.kv_heads": "num_key_value_heads",
    "model.layers": "n_layer n_layers num_hidden_layers num_layers",
    "model.norm_epsilon": "rms_norm_eps",
    "model.rope_base": "rope_theta",
    "model.tied_embeddings": "tie_word_embeddings",
    "model.width": "d_model dim hidden_size n_embd",
    "optimizer.beta1": "beta_1",
    "optimizer.beta2": "beta_2",
    "optimizer.epsilon": "eps",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "wd",
    "parallel.context": "context_parallel context_parallel_size cp sequence_parallel",
    "parallel.expert": "ep expert_model_parallel_size expert_parallel",
    "parallel.pipeline": "pipeline_model_parallel_size pipeline_parallel pipeline_parallel_size pp",
    "parallel.replicate": "data_parallel_replicate_degree hybrid_shard",
    "parallel.shard": "data_parallel_shard_degree fsdp",
    "parallel.tensor": "tensor_model_parallel_size tensor_parallel tensor_parallel_size tp",
    "parallel.zero": "zero_optimization zero_stage",
    "precision.type": "bf16 dtype fp16",
    "runs": "output_dir",
    "schedule": "scheduler",
    "schedule.minimum": "min_lr",
    "schedule.type": "lr_scheduler_type",
    "schedule.warmup": "warmup_ratio warmup_steps",
    "seed": "random_seed",
    "tokenizer.special_tokens": "bos_token eos_token",
    "tokenizer.vocabulary": "vocab_size",
    "train.activation_checkpointing": "checkpointing gradient_checkpointing",
    "train.clip_norm": "grad_clip gradient_clipping max_grad_norm",
    "train.log_every": "logging_steps",
    "train.steps": "epochs iterations max_iters max_steps num_steps total_steps",
}
OUR_KEYS = {theirs: ours for ours, names in _ELSEWHERE.items() for theirs in names.split()}
"""Settings of ours by the names that other tools give them."""
OUR_VALUES = {
    "adam": "adamw",
    "bfloat16": "bf16",
    "double": "fp64",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "gpu": "cuda",
    "half": "fp16",
    "inverse_sqrt": "noam",
    "wsd": "warmup-stable-decay",
}
"""Values of ours by the names that other tools give them."""
_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false", "true": "true", "false": "false"}
_MOST = 12
"""Mistakes told at once; a file with more of them is more likely another kind of file."""


def mistakes_in(document: Document) -> list[JinguError]:
    """Every mistake in what was read, in its order, told in our own words.

    On the way it is fitted to what settings take, in place: an empty section is one of defaults, and a setting that
    takes text takes unquoted letters as written, though they would be a number elsewhere (`name: 007`).
    """
    places = {path: place for place, path in enumerate(document.origins)}
    found = sorted(_check(document.value, RunConfig, (), document), key=lambda each: places.get(each[0], len(places)))
    return [JinguError(what, where=document.origin(path).where, fix=fix) for path, (what, fix) in found]


def combined(mistakes: list[JinguError]) -> JinguError:
    """One error that tells of all of them: alone as it is, several one a line."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = [f"- {mistake}" for mistake in mistakes[:_MOST]]
    if len(mistakes) > _MOST:
        lines.append(f"- and {len(mistakes) - _MOST} more")
    return JinguError("\n".join([f"there are {len(mistakes)} mistakes in the settings:", *lines]))


def nearest(word: str, choices: list[str], cutoff: float = 0.6) -> str | None:
    """The choice that `word` was most likely meant to be; None where there is none, or two are as near."""
    plain = word.lower().replace("-", "_")
    ratios = [SequenceMatcher(None, plain, choice.lower().replace("-", "_")).ratio() for choice in choices]
    best = max(ratios, default=0.0)
    return choices[ratios.index(best)] if best >= cutoff and ratios.count(best) == 1 else None


def _near_value(value: Any, choices: list[str]) -> str | None:
    if not isinstance(value, str):
        return None
    known = OUR_VALUES.get(value.lower().replace("-", "_"))
    return known if known in choices else nearest(value, choices, cutoff=0.7)


def _check(
    section: dict[str, Any], model: type[Settings], path: KeyPath, document: Document
) -> Iterator[tuple[KeyPath, Told]]:
    """The mistakes in a section, with their paths."""
    for key, value in list(section.items()):
        here, field = (*path, key), fields(model).get(key)
        if field is None:
            yield here, _unknown(here, model, section, document)
        elif variants := sections(field):
            if value is None:
                del section[key]
            elif not isinstance(value, dict):
                yield here, _not_a_section(here, field, value, document)
            elif variant := variants.get("") or variants.get(str(value.get("type", _default_type(field)))):
                yield from _check(value, variant, here, document)
            else:
                yield (*here, "type"), _wrong_tag(_dotted(here), value["type"], list(variants))
        elif (items := item_sections(field)) and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _check(item, items, (*here, index), document)
                else:
                    what = f"{_dotted((*here, index))} is a section of settings, not {_given(item)}."
                    yield (*here, index), (what, f"Its settings are: {', '.join(fields(items))}.")
        else:
            section[key] = _as_written(value, field, here, document)
            yield from _wrong_values(section[key], field, model, here, document)


def _as_written(value: Any, field: FieldInfo, path: KeyPath, document: Document) -> Any:
    """A value; where text is taken, the letters of what would be a number elsewhere."""

    def letters(one: Any, at: KeyPath) -> Any:
        origin = document.origins.get(at)
        return origin.written if isinstance(one, bool | int | float) and origin and origin.written is not None else one

    if not isinstance(value, list):
        return letters(value, path) if takes_text(field_kinds(field)) else value
    return [letters(one, (*path, n)) for n, one in enumerate(value)] if takes_text(item_kinds(field)) else value


def _wrong_values(
    value: Any, field: FieldInfo, model: type[Settings], path: KeyPath, document: Document
) -> Iterator[tuple[KeyPath, Told]]:
    """The value of a setting, or items of it, where they are of the wrong type or out of range."""
    try:
        model.model_validate({path[-1]: value})
    except ValidationError as error:
        # A list's branch of a union fails too when one of its items does: only the item is told.
        items = sorted({part for each in error.errors() for part in each["loc"][1:] if isinstance(part, int)})
        if not items:
            yield path, _wrong(_dotted(path), value, field_kinds(field), path, field, document)
        for index in items:
            name, here = f"item {index + 1} of {_dotted(path)}", (*path, index)
            yield here, _wrong(name, value[index], item_kinds(field), here, field, document)


def _default_type(field: FieldInfo) -> str:
    return str(field.get_default(call_default_factory=True).type)


def _unknown(path: KeyPath, model: type[Settings], section: dict[str, Any], document: Document) -> Told:
    """A key that no setting has: the nearest that one does have, here or in another section."""
    parent, key = path[:-1], str(path[-1])
    field = find(parent)
    owners = [tag for tag, one in sections(field).items() if key in fields(one)] if field else []
    if field and owners:
        return _of_another_type(path, section.get("type", _default_type(field)), owners, document)
    if "." in key and find(tuple(key.split("."))):
        first, rest = key.split(".", 1)
        fix = f"In a file, write `{first}:` and, indented on the next line, `{rest}:`."
        return f"{key} is written with a dot, which is for the command line.", fix
    if guess := _guess(key, [_dotted((*parent, name)) for name in fields(model)]):
        fix = f"Did you mean {guess}?"
    else:
        fix = f"{f'{_dotted(parent)} has' if parent else 'The top level has'}: {', '.join(fields(model))}."
    return f"{_dotted(path)} is not a setting.", fix


def _guess(key: str, here: list[str]) -> str | None:
    """The dotted key that an unknown one was most likely meant to be."""
    leaf = key.lower().replace("-", "_")
    if leaf in OUR_KEYS:
        return OUR_KEYS[leaf]
    names = [name.rsplit(".", 1)[-1] for name in here]
    if near := nearest(leaf, names):
        return here[names.index(near)]
    everywhere: dict[str, list[str]] = {}
    for dotted in all_keys():
        everywhere.setdefault(dotted.rsplit(".", 1)[-1], []).append(dotted)
    everywhere.pop("type", None)
    close = nearest(leaf, list(everywhere), cutoff=0.75)
    return either(everywhere[close]) if close else None


def _of_another_type(path: KeyPath, chosen: str, owners: list[str], document: Document) -> Told:
    """A key that another type of the section has."""
    section, key = _dotted(path[:-1]), path[-1]
    tag = document.origins.get((*path[:-1], "type"))
    fix = f"Remove {key}, or choose {section}.type {either(owners)}."
    if tag and not tag.in_file and document.origin(path).in_file:
        fix += f" To replace the whole section of the file, write '{section}={{type: {chosen}}}'."
    here = f"the type here is {chosen} ({tag.where if tag else 'the default'})"
    return f"{section}.{key} is a setting of {section}.type {either(owners)}, and {here}.", fix


def _wrong_tag(name: str, tag: Any, tags: list[str]) -> Told:
    """A `type:` that does not exist."""
    near = _near_value(tag, tags)
    what = f"{name}.type takes {either(tags)}, {_but(_given(tag, bare=True))}."
    return what, f"Did you mean {near}?" if near else None


def _not_a_section(path: KeyPath, field: FieldInfo, value: Any, document: Document) -> Told:
    """One value where a section should be: perhaps its `type:`, or a colon without its space."""
    name, variants = _dotted(path), sections(field)
    keys = fields(next(iter(variants.values())))
    tags = [kind.value for kind in field_kinds(keys["type"])] if "type" in keys else []
    tags = tags if "" in variants else list(variants)
    near = _near_value(value, tags)
    if (near or list(keys) == ["type"]) and document.origin(path).in_file:
        fix = f"Write `{name}:` and, indented on the next line, `type: {near or either(tags)}`."
    elif near or list(keys) == ["type"]:
        fix = f"Write {name}.type={near or either(tags)}."
    elif isinstance(value, str) and value.partition(":")[0] in keys:
        fix = f"Put a space after the colon: {value.replace(':', ': ', 1)}."
    else:
        fix = f"Its settings are: {', '.join(keys)}."
    return f"{name} is a section of settings, not {_given(value)}.", fix


def _wrong(name: str, value: Any, takes: list[Kind], path: KeyPath, field: FieldInfo, document: Document) -> Told:
    """A value of the wrong type, or out of range."""
    letters = document.origin(path).written
    choices = [written(kind.value) for kind in takes if kind.value is not None]
    bare = bool(choices) and len(choices) == len(takes)
    given = letters if letters is not None and value is not None else _given(value, bare=bare)
    meaning = meaning_of(field).split(". ")[0].rstrip(".")
    hints = [_hint(takes, value, choices, field), f"Meaning: {meaning}." if meaning else None]
    return f"{name} takes {describe(takes)}, {_but(given)}.", " ".join(filter(None, hints)) or None


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
    if value.lower() in _BOOLEANS and bool in types:
        return f"Write {_BOOLEANS[value.lower()]}."
    if value.lower() in ("none", "nil") and type(None) in types:
        return "Write null."
    digits = value.replace("_", "").replace(",", "").strip()
    if (int in types or float in types) and _is_number(digits):
        return "Write it without quotes." if digits == value else f"Write {digits}."
    if any(get_origin(each) is list for each in types):
        return f"Write [{value}]."
    near = _near_value(value, choices)
    return f"Did you mean {near}?" if near else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _given(value: Any, *, bare: bool = False) -> str:
    """A value in words: `the text "many"`, `a list`, `3.5`; nothing for null."""
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        short = _short(value)
        return (short if bare and short.strip() else f'the text "{short}"') if value else "an empty text"
    return "" if value is None else written(value)


def _but(given: str) -> str:
    return f"not {given}" if given else "and here it is empty (null)"


def _dotted(path: KeyPath) -> str:
    return ".".join(_short(str(part)) for part in path)


def _short(text: str) -> str:
    """Text of others inside a message: one line, no control characters, not too long."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
