"""`jingu model list | inspect`: list the models that jingu supports, and describe a model on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jingu.errors import JinguError
from jingu.formats.models import open_model, read_spec
from jingu.formats.stored_model import TensorMismatchError
from jingu.formatting import format_bytes, print_table
from jingu.model.count import count_parameters, flops_per_token, generation_flops
from jingu.model.families import FAMILIES
from jingu.model.parameter_table import parameter_sizes
from jingu.model.spec import ModelSpec
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import find_tokenizer_file


def list_models() -> None:
    """Print every family with its presets."""
    rows = []
    for family in FAMILIES.values():
        for preset, spec in family.presets.items() or [("", None)]:
            sizes = ("", "", "", "", "") if spec is None else _sizes(spec)
            rows.append((family.name, preset, *sizes))
    header = ("family", "preset", "parameters", "layers", "hidden size", "heads", "positions")
    print_table(header, rows, right=(2, 3, 4, 5, 6))
    print("\nIn a run's file `model: {preset: NAME}` selects one; other settings of `model` override its values.")


def _sizes(spec: ModelSpec) -> tuple[str, ...]:
    total = count_parameters(spec, parameter_sizes(spec)).total
    layers = f"{spec.num_encoder_layers}+{spec.num_layers}" if spec.num_encoder_layers else str(spec.num_layers)
    return f"{total:,}", layers, str(spec.hidden_size), str(spec.attention.num_heads), str(spec.max_position_embeddings)


def inspect_model(model: Path, as_json: bool = False) -> None:
    """Print a description of a model: dimensions, parameters, bytes, FLOPs per token, tokenizer, problems.

    The model need not be complete: missing weights or a missing tokenizer are listed as problems.

    Args:
        model: a run, a step of one, a Hugging Face folder, or any other model that `open_model` opens.
        as_json: whether to print a JSON object instead of tables.

    Raises:
        JinguError: there is no model, or neither its weights nor a config can be read.
    """
    facts = _facts(model)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    problems = [(name, what.replace("_", " ")) for what, names in facts.pop("tensors").items() for name in names]
    print_table(("", ""), [(name.replace("_", " "), _format(name, value)) for name, value in _flat(facts)], right=())
    if problems:
        print()
        print_table(("tensor", "problem"), problems, right=())


def _facts(path: Path) -> dict[str, Any]:
    """Return the description of a model that `inspect_model` prints."""
    problems = []
    wrong_tensors: Mapping[str, list[str]] = {what: [] for what in ("missing", "unexpected", "of the wrong shape")}
    # Search for a tokenizer even if the weights are missing: beside the model, in a run, or in the run of a step.
    candidates = (path, path / "tokenizer", path.absolute().parent.parent / "tokenizer")
    tokenizer_folder = next((folder for folder in candidates if find_tokenizer_file(folder)), None)
    try:
        model = open_model(path)
        spec = model.spec
        tokenizer_folder = model.tokenizer_folder or tokenizer_folder
    except JinguError as error:
        description = read_spec(path)
        if description is None:
            raise
        spec = description
        if isinstance(error, TensorMismatchError):
            wrong_tensors = error.tensors
            counts = ", ".join(f"{len(names)} {what}" for what, names in wrong_tensors.items() if names)
            problems.append(f"the weights are not those that the model's config describes ({counts}).")
        else:
            problems.append(error.what)
    if tokenizer_folder is None:
        problems.append("there is no tokenizer.")
    shapes = parameter_sizes(spec)
    count = count_parameters(spec, shapes)
    context = spec.max_position_embeddings
    source = context if spec.num_encoder_layers else 0
    tokenizer = None
    if tokenizer_folder is not None:
        loaded_tokenizer = Tokenizer.load(tokenizer_folder)
        tokenizer = {"vocab_size": loaded_tokenizer.vocab_size, "eos_token_id": loaded_tokenizer.eos_token_id}
    return {
        "family": spec.family,
        "max_position_embeddings": context,
        "dimensions": {
            "num_layers": spec.num_layers,
            "num_encoder_layers": spec.num_encoder_layers,
            "hidden_size": spec.hidden_size,
            "num_heads": spec.attention.num_heads,
            "num_kv_heads": spec.attention.num_kv_heads,
            "head_dim": spec.attention.head_dim,
            "intermediate_size": spec.default_layer.intermediate_size,
            "vocab_size": spec.vocab_size,
            "sliding_window": spec.attention.sliding_window,
            "tie_word_embeddings": spec.tie_word_embeddings,
        },
        "position": spec.position.model_dump(exclude_none=True),
        **({"layers": _layer_kinds(spec)} if spec.layer_pattern else {}),
        "parameters": {"total": count.total, "active": count.active, "embedding": count.embedding},
        "bytes": {"in_bf16": 2 * count.total, "in_fp32": 4 * count.total},
        "flops_per_token": {
            "training": round(flops_per_token(spec, shapes, context, source)),
            "generating_the_first": round(generation_flops(spec, shapes, 0, source)),
            "generating_the_last": round(generation_flops(spec, shapes, context, source)),
        },
        "tokenizer": tokenizer,
        "problems": problems,
        "tensors": {what.replace(" ", "_"): names for what, names in wrong_tensors.items()},
    }


def _layer_kinds(spec: ModelSpec) -> dict[str, Any]:
    """Return for each kind of layer the numbers of its layers, and the fields in which it differs."""
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(spec.layer_pattern):
        numbers.setdefault(name, []).append(number)
    return {name: {"numbers": numbers[name], **spec.layer_kinds[name]} for name in numbers}


def _flat(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the facts as a flat list. Names in a group are prefixed with that of the group, except for dimensions."""
    lines: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if not isinstance(value, dict):
            lines.append((name, value))
        elif name == "dimensions":
            lines.extend(value.items())
        else:
            lines.extend((f"{name} {key}", item) for key, item in value.items())
    return lines


def _format(name: str, value: Any) -> str:
    if name.startswith("bytes "):
        return format_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return " ".join(value) or "none"
    return "none" if value is None else str(value)
