"""Adapters on disk as peft has them: adapter_config.json, and the small matrices under the base's names.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint (the names that peft 0.10 and later read).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.checkpoint.hub import OpenModel, open_model, open_run_apart, parameter_shapes
from jingu.checkpoint.stream import SafetensorsWriter, read_at, read_header
from jingu.checkpoint.verbs import write_model
from jingu.errors import JinguError
from jingu.model.families import FAMILIES
from jingu.model.families.names import SAME, entries
from jingu.model.lora import merged
from jingu.model.spec import Lora, ModelSpec
from jingu.runtime.files import new_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export(run: Path, to: Path) -> None:
    """Write the adapters of a run as peft loads them.

    Raises:
        JinguError: the run trains no adapters, or Hugging Face keeps one of its matrices in another arrangement.
    """
    opened, base, where = open_run_apart(run)
    adapter = opened.spec.adapter
    assert adapter is not None
    theirs = _their_modules(base.spec)
    names = [name for name in parameter_shapes(opened.spec) if name.endswith(".lora_a")]
    tensors: dict[str, Tensor] = {}
    for name in names:
        module = name.removesuffix(".lora_a")
        if module not in theirs:
            raise JinguError(
                f"Hugging Face keeps the matrix {module} in another arrangement, for which peft has no adapter.",
                where=run,
                fix="`jingu tune merge` writes the whole model.",
            )
        for leaf, their_leaf in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            tensors[f"{_PREFIX}{theirs[module]}.{their_leaf}.weight"] = opened.read(f"{module}.{leaf}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(where),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapter.rank_stabilised,
        "target_modules": [theirs[name.removesuffix(".lora_a")] for name in names],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(to) as place:
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        with SafetensorsWriter(place / WEIGHTS, kinds) as out:
            for tensor in tensors.values():
                out.write([tensor])
        (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"Wrote {to}: {len(names)} adapters, which peft loads onto {where} as exported.")


def merge(model: Path, to: Path, base: Path | None = None) -> None:
    """Write a model with its adapters merged into its matrices, as a Hugging Face folder.

    Args:
        model: a run that trained adapters; or, with `base`, a folder that peft wrote.
        base: the model that such adapters are for.
    """
    write_model(open_model(model) if base is None else with_adapters(open_model(base), model), to, "auto", False)


def with_adapters(base: OpenModel, folder: Path) -> OpenModel:
    """A model with the adapters that peft wrote into `folder`, merged. Raises JinguError where they do not fit."""
    config = _read_config(folder)
    header = read_header(folder / WEIGHTS)
    ours = {theirs: name for name, theirs in _their_modules(base.spec).items()}
    pairs: dict[str, tuple[str, str]] = {}
    for key in header:
        module, _, leaf = key.removeprefix(_PREFIX).rpartition(".lora_")
        if module not in ours or leaf not in ("A.weight", "B.weight"):
            raise JinguError(f"the model has no place for {key}.", where=folder / WEIGHTS, fix="Choose another base.")
        pairs[f"{ours[module]}.weight"] = (f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight")
    adapter = Lora(
        rank=config["r"], alpha=config["lora_alpha"], targets=("*",), rank_stabilised=bool(config.get("use_rslora"))
    )

    def stored(key: str) -> Tensor:
        place = header[key]
        assert isinstance(place.dtype, torch.dtype)
        return read_at(folder / WEIGHTS, place.begin, place.shape, place.dtype)

    def read(name: str) -> Tensor:
        weight = base.read(name)
        if name not in pairs:
            return weight
        a, b = (stored(key) for key in pairs[name])
        return merged(weight, a, b, adapter.scale)

    return replace(base, read=read)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JinguError(f"there is no adapter of peft here ({error}).", where=folder) from error
    plain = {"peft_type": "LORA", "use_dora": False, "fan_in_fan_out": False, "bias": "none"}
    other = [key for key, value in plain.items() if config.get(key, value) != value]
    other += [key for key in ("rank_pattern", "alpha_pattern", "modules_to_save") if config.get(key)]
    if other:
        raise JinguError(f"the adapter sets {', '.join(other)}, which is not supported.", where=folder / CONFIG)
    return dict(config)


def _their_modules(spec: ModelSpec) -> dict[str, str]:
    """Of each matrix that both sides keep alike, our module's name and theirs."""
    mapped = entries(FAMILIES[spec.family].rules, spec, parameter_shapes(spec))
    return {
        entry.ours[0].removesuffix(".weight"): entry.theirs.removesuffix(".weight")
        for entry in mapped
        if entry.transform is SAME and entry.expert is None and len(entry.ours) == 1
    }
