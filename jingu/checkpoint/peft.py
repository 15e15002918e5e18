"""Adapters on disk as peft has them: adapter_config.json, and what was trained under the base's names.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint (the names that peft 0.10 and later read). Where
Hugging Face keeps several of our matrices in one, the adapter of that one has the ranks of all of them: their first
small matrices one upon the other, and the second ones side by side in a block diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from jingu.checkpoint.hub import OpenModel, Shapes, open_model, open_run_apart, read_json, with_adapters, write_json
from jingu.checkpoint.stream import read_at, read_header
from jingu.errors import JinguError, counted
from jingu.model.adapters import is_adapter
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.families.names import TRANSPOSED, Entry, entries
from jingu.model.prompts import DeepPromptLayer, SoftPromptLayer
from jingu.model.spec import Adapter, DeepPrompt, Ia3, Lora, ModelSpec, SoftPrompt
from jingu.runtime.files import new_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _PROMPT = "base_model.model.", "prompt_embeddings"
Read = Callable[[str], Tensor]
Reads = Callable[[Mapping[str, Tensor], ModelSpec, Mapping[str, Any], Path], tuple[Adapter, dict[str, Tensor]]]
"""Our adapter and its parameters, from peft's tensors and config for a model."""


def write_adapters(own: OpenModel, base: OpenModel, where: Path, to: Path) -> None:
    """Write adapters as peft loads them onto the base as exported.

    Args:
        own: the adapters, named by its spec.
        where: the base, for the config.

    Raises:
        JinguError: peft has no such adapters.
    """
    adapter, spec = own.spec.adapter, base.spec
    assert adapter is not None
    if isinstance(adapter, Lora | Ia3):
        config, tensors = _beside(own, base, adapter)
    else:
        config, tensors = _prompt(own, adapter)
    # Beside an encoder's matrices no task is needed, and peft's class for it asks for what transformers 5 has no more.
    encodes = "SEQ_2_SEQ_LM" if isinstance(adapter, SoftPrompt | DeepPrompt) else None
    config |= {
        "task_type": "CAUSAL_LM" if spec.encoder_layers is None else encodes,
        "base_model_name_or_path": str(where),
        "inference_mode": True,
    }
    with new_folder(to) as place:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, place / WEIGHTS, metadata={"format": "pt"})
        write_json(place / CONFIG, config)


# Beside matrices


def _beside(own: OpenModel, base: OpenModel, adapter: Lora | Ia3) -> tuple[dict[str, Any], dict[str, Tensor]]:
    held, spec = parameter_shapes(own.spec), base.spec
    tensors: dict[str, Tensor] = {}
    targets: dict[str, int] = {}
    """Their modules, and how many of ours that have adapters each holds."""
    inner: list[str] = []
    conv = False
    for entry, modules in _modules(spec):
        count = sum(f"{module}.{leaf}" in held for module in modules for leaf in ("lora_a", "ia3_in", "ia3_out"))
        if not count:
            continue
        module = entry.theirs.removesuffix(".weight")
        targets[module] = count
        conv = conv or entry.transform is TRANSPOSED
        leaves = _lora if isinstance(adapter, Lora) else _ia3
        found = leaves(own, base, held, entry, modules)
        tensors |= {f"{_PREFIX}{module}.{leaf}": tensor for leaf, tensor in found.items()}
        inner += [module] if f"{next(iter(modules))}.ia3_in" in held else []
    # Releases of peft that know experts as one tensor look for the last part of the names that they had before.
    names = sorted({name.rpartition(".")[2] if ".experts." in name else name for name in targets})
    config: dict[str, Any] = {"target_modules": names, "fan_in_fan_out": conv}
    if isinstance(adapter, Ia3):
        return {**config, "peft_type": "IA3", "feedforward_modules": inner}, tensors
    several = {name: count for name, count in targets.items() if count > 1}
    grown = {
        name: adapter.alpha * (count**0.5 if adapter.rank_stabilised else count) for name, count in several.items()
    }
    return {
        **config,
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": {name: adapter.rank * count for name, count in several.items()},
        "alpha_pattern": grown,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilised,
        "use_dora": adapter.magnitudes,
        "bias": "none",
    }, tensors


Modules = Mapping[str, int]
"""Modules of ours that one matrix of theirs holds, and how many outputs each has."""


def _modules(spec: ModelSpec) -> Iterator[tuple[Entry, Modules]]:
    for entry in entries(FAMILIES[spec.family].rules, spec, parameter_shapes(spec)):
        if entry.theirs.endswith(".weight") and len(entry.shape) > 1:
            yield entry, {name.removesuffix(".weight"): shape[0] for name, shape in entry.ours.items()}


def _lora(own: OpenModel, base: OpenModel, held: Shapes, entry: Entry, modules: Modules) -> dict[str, Tensor]:
    having = [module for module in modules if f"{module}.lora_a" in held]
    a, b = ({m: own.read(f"{m}.{leaf}", entry.expert) for m in having} for leaf in ("lora_a", "lora_b"))
    some = next(iter(b.values()))
    parts = [b[m] if m in b else some.new_zeros(rows, 0) for m, rows in modules.items()]
    found = {
        "lora_A.weight": torch.cat(list(a.values())),
        "lora_B.weight": _rows_to_theirs(entry, torch.block_diag(*parts)),
    }
    if f"{having[0]}.lora_m" in held:
        lengths = [
            own.read(f"{m}.lora_m") if m in having else base.read(f"{m}.weight").to(some.dtype).square().sum(1).sqrt()
            for m in modules
        ]
        found["lora_magnitude_vector"] = _rows_to_theirs(entry, torch.cat(lengths))
    return found


def _ia3(own: OpenModel, base: OpenModel, held: Shapes, entry: Entry, modules: Modules) -> dict[str, Tensor]:
    first = f"{next(iter(modules))}.ia3_in"
    if first in held:
        return {"ia3_l": own.read(first).unsqueeze(0)}
    having = {m: own.read(f"{m}.ia3_out") for m in modules if f"{m}.ia3_out" in held}
    some = next(iter(having.values()))
    factors = [having[m] if m in having else some.new_ones(rows) for m, rows in modules.items()]
    return {"ia3_l": _rows_to_theirs(entry, torch.cat(factors)).unsqueeze(1)}


def _rows_to_theirs(entry: Entry, rows: Tensor) -> Tensor:
    """What belongs to the outputs of a matrix, in the order that theirs has. A transposed one keeps it."""
    return rows if entry.transform is TRANSPOSED else entry.transform.to_theirs(rows, entry.spec)


# Prompts


def _prompt(own: OpenModel, adapter: SoftPrompt | DeepPrompt) -> tuple[dict[str, Any], dict[str, Tensor]]:
    spec = own.spec
    config: dict[str, Any] = {
        "num_virtual_tokens": adapter.tokens,
        "num_layers": spec.layers,
        "num_attention_heads": spec.attention.heads,
        "token_dim": spec.width,
        "num_transformer_submodules": 1,
    }
    if isinstance(adapter, DeepPrompt):
        if spec.prompts[1]:
            raise JinguError("peft knows no prompts in an encoder's blocks.", where=own.where, fix=_ELSE)
        layers = [f"blocks.{layer}.attention.prompt" for layer in range(spec.layers)]
        pairs = [_filled(DeepPromptLayer(adapter, spec), layer, own.read).keys_and_values() for layer in layers]
        rows = [x.flatten(1).detach() for pair in pairs for x in pair]
        if spec.encoder_layers is not None:  # There every other pair is for the attention to the encoder, and unused.
            rows = [
                x for pair in zip(rows[::2], rows[1::2], strict=True) for x in (*pair, *map(torch.zeros_like, pair))
            ]
        config |= {
            "peft_type": "PREFIX_TUNING",
            "num_layers": len(rows) // 2,
            "num_attention_heads": spec.attention.kv_heads,
            "token_dim": spec.attention.kv_heads * spec.attention.head_size,
            "num_transformer_submodules": 1 if spec.encoder_layers is None else 2,
        }
        return config, {_PROMPT: torch.cat(rows, 1)}
    if adapter.behind:
        raise JinguError("peft knows no prompts behind a text.", where=own.where, fix=_ELSE)
    prefix = "prompt" if spec.encoder_layers is None else "encoder.prompt"
    vectors = _filled(SoftPromptLayer(adapter, spec), prefix, own.read).vectors().detach()
    made = {"peft_type": "P_TUNING", "encoder_hidden_size": adapter.hidden} if adapter.encoder != "none" else {}
    return {**config, "peft_type": "PROMPT_TUNING", **made}, {_PROMPT: vectors}


_ELSE = "Use the run itself; every verb takes it."
Layer = Any


def _filled(module: Layer, prefix: str, read: Read) -> Layer:
    """A module with its parameters read."""
    for name, parameter in module.named_parameters():
        value = read(f"{prefix}.{name}")
        parameter.data = value
    return module


# Reading


def open_peft(folder: Path) -> OpenModel:
    """Adapters that peft wrote together with the model that they name, which must be a folder here."""
    base = Path(str(_read_config(folder).get("base_model_name_or_path")))
    if not base.exists():
        raise JinguError(
            f"these are adapters for {base}, which is no folder here.",
            where=folder / CONFIG,
            fix="Fetch that model, and set base_model_name_or_path to where it lies.",
        )
    under = open_model(base)
    return with_adapters(read_adapters(folder, under), under)


def find_adapters(path: Path, base: OpenModel) -> OpenModel:
    """Adapters of a run, or those that peft wrote into a folder, for a model. Raises JinguError where there are none,
    or where the run's are for a model of another depth."""
    if (path / CONFIG).is_file():
        return read_adapters(path, base)
    if not path.is_dir():
        what = "there is no such folder of adapters."
        raise JinguError(what, where=path, fix="Give a run that trained adapters, or a folder of peft.")
    opened = open_run_apart(path)[0]
    there, here = ((spec.encoder_layers or 0) + spec.layers for spec in (opened.spec, base.spec))
    if there != here:
        what = f"these adapters are for a model of {counted(there, 'block')}, and this one has {here:,}."
        raise JinguError(what, where=path, fix="Choose another base.")
    return opened


def open_adapters(path: Path, base: OpenModel, spec: ModelSpec) -> OpenModel:
    """The same, for a model of `spec`. Raises JinguError where that has others."""
    opened = find_adapters(path, base)
    wanted = {name: shape for name, shape in parameter_shapes(spec).items() if is_adapter(name)}
    there = {name for name in parameter_shapes(opened.spec) if is_adapter(name)}
    if there != set(wanted) or any(opened.read(name).shape != shape for name, shape in wanted.items()):
        raise JinguError(
            "the adapters to begin with are of another kind or size, or for another model.",
            where=path,
            fix="Give the same settings under `tune` that they were trained with.",
        )
    return opened


def read_adapters(folder: Path, base: OpenModel) -> OpenModel:
    """The adapters that peft wrote into `folder`, for a model. Raises JinguError where they do not fit."""
    config = _read_config(folder)
    theirs: dict[str, Tensor] = {}
    for key, place in read_header(folder / WEIGHTS).items():
        assert isinstance(place.dtype, torch.dtype)
        theirs[key] = read_at(folder / WEIGHTS, place.begin, place.shape, place.dtype)
    readers: dict[str, Reads] = {"LORA": _read_lora, "IA3": _read_ia3}
    adapter, held = readers.get(config["peft_type"], _read_prompt)(theirs, base.spec, config, folder)
    spec = base.spec.model_copy(update={"adapter": adapter})
    return OpenModel(spec, lambda name, expert=None: held[name] if expert is None else held[name][expert], None, folder)


def _matched(
    theirs: Mapping[str, Tensor], spec: ModelSpec, folder: Path
) -> Iterator[tuple[Entry, Modules, dict[str, Tensor]]]:
    """Matrices that have adapters: theirs, our modules, and the adapter's tensors by their last name."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in theirs.items():
        module, _, leaf = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        found.setdefault(module, {})[leaf] = tensor
    for entry, modules in _modules(spec):
        parts = found.pop(entry.theirs.removesuffix(".weight"), None)
        if parts is not None:
            yield entry, modules, parts
    if found:
        raise JinguError(f"the model has no place for {next(iter(found))}.", where=folder, fix="Choose another base.")


def _read_lora(
    theirs: Mapping[str, Tensor], spec: ModelSpec, config: Mapping[str, Any], folder: Path
) -> tuple[Lora, dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    stable, magnitudes = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    if magnitudes and config.get("lora_bias"):
        raise JinguError("the adapter has biases, which is not supported.", where=folder / CONFIG)

    def of_rank(rank: int, alpha: float, targets: Sequence[str] = ()) -> Lora:
        return Lora(rank=rank, alpha=alpha, targets=tuple(targets), rank_stabilised=stable, magnitudes=magnitudes)

    whole = of_rank(config["r"], config["lora_alpha"])
    experts: dict[str, list[Tensor]] = {}
    for entry, modules, parts in _matched(theirs, spec, folder):
        name = entry.theirs.removesuffix(".weight")
        rank = ranks.get(name, config["r"])
        scale = of_rank(rank, alphas.get(name, config["lora_alpha"])).scale / whole.scale
        a, b = parts["lora_A"], scale * parts["lora_B"]
        if entry.expert is not None:
            for leaf, matrix in (("lora_a", a), ("lora_b", b)):
                experts.setdefault(f"{next(iter(modules))}.{leaf}", []).append(matrix)
            continue
        sizes = list(modules.values())
        rows = {"lora_b": _rows_to_ours(entry, b).split(sizes)}
        if magnitudes:
            rows["lora_m"] = _rows_to_ours(entry, parts["lora_magnitude_vector"]).split(sizes)
        for number, module in enumerate(modules):
            held |= {f"{module}.lora_a": a, **{f"{module}.{leaf}": pieces[number] for leaf, pieces in rows.items()}}
    held |= {name: torch.stack(each) for name, each in experts.items()}
    return of_rank(whole.rank, whole.alpha, sorted({name.rpartition(".")[0] for name in held})), held


def _read_ia3(
    theirs: Mapping[str, Tensor], spec: ModelSpec, _config: Mapping[str, Any], folder: Path
) -> tuple[Ia3, dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    for entry, modules, parts in _matched(theirs, spec, folder):
        factors = parts["ia3_l"]
        if factors.shape[0] == 1:
            held[f"{next(iter(modules))}.ia3_in"] = factors.squeeze(0)
            continue
        rows = _rows_to_ours(entry, factors.squeeze(1)).split(list(modules.values()))
        held |= {f"{module}.ia3_out": piece for module, piece in zip(modules, rows, strict=True)}
    return Ia3(targets=tuple(sorted({name.rpartition(".")[0] for name in held}))), held


def _rows_to_ours(entry: Entry, rows: Tensor) -> Tensor:
    return rows if entry.transform is TRANSPOSED else entry.transform.to_ours(rows, entry.spec)


def _read_prompt(
    theirs: Mapping[str, Tensor], spec: ModelSpec, config: Mapping[str, Any], folder: Path
) -> tuple[SoftPrompt | DeepPrompt, dict[str, Tensor]]:
    tokens, rows = config["num_virtual_tokens"], theirs[_PROMPT]
    encodes, wanted = spec.encoder_layers is not None, spec.width
    if config["peft_type"] == "PREFIX_TUNING":
        pairs = spec.layers * (2 if encodes else 1)
        wanted = 2 * pairs * spec.attention.kv_heads * spec.attention.head_size
    if rows.shape != (tokens, wanted):
        raise JinguError(
            f"the prompt is {list(rows.shape)} numbers, and for this model it would be {[tokens, wanted]}.",
            where=folder,
            fix="Choose another base.",
        )
    if config["peft_type"] != "PREFIX_TUNING":
        return SoftPrompt(tokens=tokens), {f"{'encoder.' if encodes else ''}prompt.embedding.weight": rows}
    pieces = rows.chunk(2 * pairs, 1)
    held: dict[str, Tensor] = {}
    for layer in range(spec.layers):
        first = layer * (4 if encodes else 2)
        for leaf, piece in zip("kv", pieces[first : first + 2], strict=True):
            held[f"blocks.{layer}.attention.prompt.{leaf}.weight"] = piece.t()
    return DeepPrompt(tokens=tokens, in_encoder=False), held


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(
        folder / CONFIG, f"there is no adapter of peft here (no {CONFIG}).", "Give a folder that has one."
    )
    kinds = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
    other = ["peft_type"] if config.get("peft_type") not in kinds else []
    other += ["bias"] if config.get("bias", "none") != "none" else []
    other += [key for key in ("modules_to_save", "target_parameters", "lora_bias") if config.get(key)]
    if other:
        raise JinguError(
            f"the adapter sets {', '.join(f'{key} to {config.get(key)!r}' for key in other)}, which is not supported.",
            where=folder / CONFIG,
        )
    return config
