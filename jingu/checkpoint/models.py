"""`jingu model list | inspect`: the models that jingu knows, and what one on disk is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jingu.checkpoint.hub import WrongTensorsError, described_model, open_model
from jingu.checkpoint.verbs import print_table, size_in_words
from jingu.errors import JinguError
from jingu.model.count import count_parameters, flops_per_token, generation_flops
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.spec import ModelSpec
from jingu.text.formats import tokenizer_file
from jingu.text.tokenizer import Tokenizer


def list_models() -> None:
    """Print every family with its presets."""
    rows = []
    for family in FAMILIES.values():
        for preset, spec in family.presets.items() or [("", None)]:
            sizes = ("", "", "", "", "") if spec is None else _sizes(spec)
            rows.append((family.name, preset, *sizes))
    print_table(("family", "preset", "parameters", "layers", "width", "heads", "context"), rows, right=(2, 3, 4, 5, 6))
    print("\nIn a run's file, `model: {preset: NAME}` takes one, and other settings beside it take its values' place.")


def _sizes(spec: ModelSpec) -> tuple[str, ...]:
    total = count_parameters(spec, parameter_shapes(spec)).total
    layers = f"{spec.encoder_layers}+{spec.layers}" if spec.encoder_layers else str(spec.layers)
    return f"{total:,}", layers, str(spec.width), str(spec.attention.heads), str(spec.context)


def inspect(model: Path, as_json: bool = False) -> None:
    """Print what a model is, whole or not: dimensions, parameters, bytes, operations a token, tokenizer, faults.

    Args:
        model: a run, a step of one, or a Hugging Face folder.

    Raises:
        JinguError: there is nothing here that describes a model.
    """
    found = _facts(model)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    wrong = [(name, what.replace("_", " ")) for what, names in found.pop("tensors").items() for name in names]
    print_table(("", ""), [(name.replace("_", " "), _words(name, value)) for name, value in _flat(found)], right=())
    if wrong:
        print()
        print_table(("tensor", "is"), wrong, right=())


def _facts(path: Path) -> dict[str, Any]:
    faults = []
    wrong: Mapping[str, list[str]] = {what: [] for what in ("missing", "left over", "of the wrong shape")}
    beside = (path, path / "tokenizer", path.absolute().parent.parent / "tokenizer")
    folder = next((place for place in beside if tokenizer_file(place)), None)
    try:
        opened = open_model(path)
        spec, folder = opened.spec, opened.tokenizer_folder or folder
    except JinguError as error:
        described = described_model(path)
        if described is None:
            raise
        spec = described
        if isinstance(error, WrongTensorsError):
            wrong = error.tensors
            counts = ", ".join(f"{len(names)} {what}" for what, names in wrong.items() if names)
            faults.append(f"the weights are not those that the model's config describes ({counts}).")
        else:
            faults.append(error.what)
    if folder is None:
        faults.append("there is no tokenizer.")
    shapes = parameter_shapes(spec)
    count = count_parameters(spec, shapes)
    tokenizer = None if folder is None else Tokenizer.load(folder)
    source = spec.context if spec.encoder_layers else 0
    return {
        "family": spec.family,
        "context": spec.context,
        "dimensions": {
            "layers": spec.layers,
            "encoder_layers": spec.encoder_layers,
            "width": spec.width,
            "heads": spec.attention.heads,
            "kv_heads": spec.attention.kv_heads,
            "head_size": spec.attention.head_size,
            "feed_forward": spec.feed_forward.size,
            "vocabulary": spec.vocabulary,
            "window": spec.attention.window,
            "tied_embeddings": spec.tied_embeddings,
        },
        "position": spec.position.model_dump(exclude_none=True),
        "parameters": {"total": count.total, "active": count.active, "embedding": count.embedding},
        "bytes": {"in_bf16": 2 * count.total, "in_fp32": 4 * count.total},
        "flops_per_token": {
            "training": round(flops_per_token(spec, shapes, spec.context, source)),
            "generating_the_first": round(generation_flops(spec, shapes, 0, source)),
            "generating_the_last": round(generation_flops(spec, shapes, spec.context, source)),
        },
        "tokenizer": None if tokenizer is None else {"entries": tokenizer.vocabulary, "end_id": tokenizer.end_id},
        "faults": faults,
        "tensors": {what.replace(" ", "_"): names for what, names in wrong.items()},
    }


def _flat(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    """One line a fact; those of a group begin with its name where that says what they are."""
    lines: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if not isinstance(value, dict):
            lines.append((name, value))
        elif name == "dimensions":
            lines.extend(value.items())
        else:
            lines.extend((f"{name} {key}", each) for key, each in value.items())
    return lines


def _words(name: str, value: Any) -> str:
    if name.startswith("bytes "):
        return size_in_words(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return " ".join(value) or "none"
    return "none" if value is None else str(value)
