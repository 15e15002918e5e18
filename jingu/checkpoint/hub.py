"""Hugging Face folders, out and in, and the one way to open a model wherever it lies.

Weights are safetensors (an 8-byte little-endian length, a JSON header, the raw tensors), written and read tensor by
tensor: a conversion holds one tensor at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jingu.checkpoint.manifest import MANIFEST, read_manifest
from jingu.checkpoint.resume import complete_steps, step_folder
from jingu.checkpoint.store import read_tensor
from jingu.errors import JinguError
from jingu.model.decoder import Decoder
from jingu.model.families import FAMILIES, Family
from jingu.model.families.family import exported_config
from jingu.model.families.names import Entry, entries, read_ours, to_theirs
from jingu.model.spec import ModelSpec
from jingu.runtime.files import new_folder
from jingu.text.tokenizer import Tokenizer

SHARD_BYTES = 5_000_000_000
"""Largest weight file of an export, but for one with a single larger tensor."""
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class OpenModel:
    """A model on disk, opened.

    Attributes:
        spec: what it is.
        read: one parameter by jingu's name, whole, on CPU, in the dtype it is stored in.
        tokenizer_folder: where its tokenizer lies; None where it has none.
        end_ids: tokens that end a text, where the model says so; empty: the tokenizer's end token.
        where: the folder, for messages.
    """

    spec: ModelSpec
    read: Callable[[str], Tensor]
    tokenizer_folder: Path | None
    end_ids: tuple[int, ...]
    where: Path


def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Names and shapes of the model's parameters, in its order."""
    with torch.device("meta"):
        model = Decoder(spec)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


# Opening


def open_model(path: Path) -> OpenModel:
    """Open a run (its newest checkpoint), a step of a run, or a Hugging Face folder. Raises JinguError."""
    if not path.is_dir():
        raise JinguError(
            "There is no such model folder." if not path.exists() else "A model is a folder; this is a file.",
            where=path,
            fix="Give a run (runs/NAME), a step of one (runs/NAME/checkpoints/step-00000100) or a Hugging Face folder.",
        )
    if (path / MANIFEST).is_file():
        return _open_step(path)
    if (path / "model.json").is_file():
        checkpoints = path / "checkpoints"
        steps = complete_steps(checkpoints)
        if not steps:
            raise JinguError(
                "This run has no checkpoint yet.", where=path, fix="Train it first: `jingu train` saves one."
            )
        return _open_step(step_folder(checkpoints, steps[-1]))
    return open_hf(path)


def _open_step(step: Path) -> OpenModel:
    """A checkpoint of a run; its spec and tokenizer lie in the run's folder."""
    run = step.absolute().parent.parent
    if not (run / "model.json").is_file():
        raise JinguError(
            "This checkpoint lies outside its run, and so without the run's model.json.",
            where=step,
            fix="Move it back to runs/NAME/checkpoints/.",
        )
    spec = ModelSpec.from_json((run / "model.json").read_bytes(), run / "model.json")
    stored = {
        name.removeprefix("model/"): torch.Size(tensor.shape)
        for name, tensor in read_manifest(step / MANIFEST).tensors.items()
        if name.startswith("model/")
    }
    _compare(parameter_shapes(spec), stored, step)
    tokenizer = run / "tokenizer"
    return OpenModel(
        spec, lambda name: read_tensor(step, f"model/{name}"), tokenizer if tokenizer.is_dir() else None, (), step
    )


def open_hf(folder: Path) -> OpenModel:
    """Open a Hugging Face folder; weights are read when asked for.

    Raises:
        JinguError: no config, an unknown architecture, a config that asks for its own code, weights that are
            pickled, damaged, or not those that the config describes.
    """
    config = _read_json(folder / "config.json", "This is no model: it has neither config.json nor model.json.")
    family = _family(config, folder)
    try:
        spec = family.spec_from_hf(config)
    except JinguError as error:
        raise JinguError(error.what, where=f"{folder / 'config.json'}", fix=error.fix) from error
    shapes = parameter_shapes(spec)
    mapped = entries(family.rules, spec, shapes)
    expected = {entry.theirs: _their_shape(entry, spec, shapes) for entry in mapped}
    stored = _Stored(folder, family, expected)
    _compare(expected, stored.shapes(), folder)
    holders: dict[str, list[Entry]] = {}
    for entry in mapped:
        for name in entry.ours:
            holders.setdefault(name, []).append(entry)

    def read(name: str) -> Tensor:
        return read_ours(name, holders[name], stored.read, spec, shapes)

    has_tokenizer = (folder / "tokenizer.json").is_file()
    return OpenModel(spec, read, folder if has_tokenizer else None, _end_ids(folder, config), folder)


def described_model(path: Path) -> ModelSpec | None:
    """What a run's model.json or a config.json says, whatever the weights are; None where there is neither."""
    for folder in (path, path.absolute().parent.parent):
        if (folder / "model.json").is_file():
            return ModelSpec.from_json((folder / "model.json").read_bytes(), folder / "model.json")
    if not (path / "config.json").is_file():
        return None
    config = _read_json(path / "config.json")
    return _family(config, path).spec_from_hf(config)


def load_model(opened: OpenModel, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The model with its weights, cast to `dtype`, ready to compute."""
    with torch.device("meta"):
        model = Decoder(opened.spec)
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(opened.read(name))
    return model.eval()


def _family(config: Mapping[str, Any], folder: Path) -> Family:
    where = folder / "config.json"
    names = [str(name) for name in config.get("architectures") or []]
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    found = next((known[name] for name in names if name in known), None)
    if config.get("auto_map") and not (found and found.replaces_code):
        raise JinguError(
            "The model asks to run Python code that came with it (auto_map). jingu never runs such code.",
            where=where,
            fix="Use a release of the model for an architecture built into transformers.",
        )
    if found:
        return found
    if not names and config.get("model_type") in FAMILIES:
        return FAMILIES[config["model_type"]]
    asked = names[0] if names else str(config.get("model_type"))
    near = get_close_matches(asked, known, n=3, cutoff=0.4)
    raise JinguError(
        f"The architecture {asked} is not one that jingu knows.",
        where=where,
        fix=f"{'The nearest are' if near else 'Known are'} {', '.join(near or known)}.",
    )


def _their_shape(entry: Entry, spec: ModelSpec, shapes: Shapes) -> torch.Size:
    return to_theirs(entry, [torch.empty(shapes[name], device="meta") for name in entry.ours], spec).shape


def _end_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else of config.json: none, one or several."""
    path = folder / "generation_config.json"
    ids = _read_json(path).get("eos_token_id") if path.is_file() else None
    ids = config.get("eos_token_id") if ids is None else ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)


def _compare(expected: Shapes, stored: Shapes, where: Path) -> None:
    """Raise JinguError with every tensor that is missing, left over, or of another shape."""
    wrong = [
        f"{name} (has {list(stored[name])}, should have {list(expected[name])})"
        for name in expected
        if name in stored and stored[name] != expected[name]
    ]
    complaints = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("missing", [name for name in expected if name not in stored]),
            ("left over", [name for name in stored if name not in expected]),
            ("of the wrong shape", wrong),
        )
        if names
    ]
    if complaints:
        raise JinguError(
            f"The weights are not those that the model's config describes: {'; '.join(complaints)}.",
            where=where,
            fix="Use the config and the weights of the same model.",
        )


class _Stored:
    """The weight files of a Hugging Face folder, by the family's full names."""

    def __init__(self, folder: Path, family: Family, expected: Shapes) -> None:
        self._files: dict[Path, Any] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        places = {key: path for path in _weight_files(folder) for key in self._open(path).keys()}  # noqa: SIM118
        based = not family.base or any(key.startswith(family.base) for key in places)
        for key, path in places.items():
            name = key if based or key in expected else family.base + key
            # A tied head may be stored all the same; it is the embedding again.
            if name in expected or not name.endswith((*family.ignored, "lm_head.weight")):
                self._places[name] = (path, key)

    def shapes(self) -> dict[str, torch.Size]:
        return {
            name: torch.Size(self._open(path).get_slice(key).get_shape()) for name, (path, key) in self._places.items()
        }

    def read(self, name: str) -> Tensor:
        path, key = self._places[name]
        tensor: Tensor = self._open(path).get_tensor(key)
        if tensor.dtype not in DTYPE_NAMES:
            raise JinguError(
                f"The tensor {key} is stored as {tensor.dtype}: the weights are quantised.",
                where=path,
                fix="Use the model's weights in a floating-point format.",
            )
        return tensor

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise JinguError(
                    f"The weight file is damaged or cut short ({error}).", where=path, fix="Fetch the file again."
                ) from error
        return self._files[path]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, all of them present."""
    if (folder / INDEX).is_file():
        table = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise JinguError("The index has no weight_map.", where=folder / INDEX, fix="Fetch the file again.")
        names = sorted(set(table.values()))
        absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if absent:
            raise JinguError(f"Weight files are missing: {', '.join(absent)}.", where=folder, fix="Fetch these files.")
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = sorted(item.name for item in folder.iterdir() if item.suffix in _PICKLES)
    if pickled:
        raise JinguError(
            f"The weights are pickled ({', '.join(pickled)}). Reading a pickle runs code that is in it, so jingu "
            "does not.",
            where=folder,
            fix="Use the model's safetensors files; or, where you trust the source, load it with transformers and "
            "write it with save_pretrained, which makes safetensors.",
        )
    raise JinguError(f"There are no weights here (no {WEIGHTS}).", where=folder, fix="Fetch the model again.")


def _read_json(path: Path, absent: str = "The file is missing.") -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JinguError(absent, where=path.parent, fix="Give a run or a Hugging Face folder.") from None
    except ValueError as error:
        raise JinguError(f"The file is damaged ({error}).", where=path, fix="Fetch the file again.") from error
    if not isinstance(value, dict):
        raise JinguError("The file is damaged (not a JSON object).", where=path, fix="Fetch the file again.")
    return value


# Exporting


def export_hf(
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer_folder: Path,
    to: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that transformers loads as it is; it appears whole or not at all.

    Args:
        read: a parameter by jingu's name, whole (`OpenModel.read`, or a dictionary's `__getitem__`).
        tokenizer_folder: its files are copied.
        to: a new or empty folder.
        dtype: of the weights written.
        shard_bytes: largest weight file.

    Raises:
        JinguError: the target holds something, the disk is full, or the model has a shape that its Hugging Face
            architecture has not.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        kind = "an earlier export" if (to / "config.json").is_file() else "something"
        raise JinguError(
            f"There is {kind} here already, and it is not overwritten.",
            where=to,
            fix="Delete it first, or choose another folder.",
        )
    family = FAMILIES[spec.family]
    end = Tokenizer.load(tokenizer_folder).end_id
    config = {
        "architectures": [family.architectures[0]],
        **exported_config(family, spec),
        "bos_token_id": end,
        "eos_token_id": end,
        # Releases of transformers before 5 know the first name, later ones the second.
        "torch_dtype": str(dtype).removeprefix("torch."),
        "dtype": str(dtype).removeprefix("torch."),
    }
    with new_folder(to) as folder:
        _write_json(folder / "config.json", config)
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        _write_json(folder / "generation_config.json", ids)
        for name in _TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, folder / name)
        _write_weights(folder, spec, read, dtype, shard_bytes)


def _write_weights(
    folder: Path, spec: ModelSpec, read: Callable[[str], Tensor], dtype: torch.dtype, shard_bytes: int
) -> None:
    shapes = parameter_shapes(spec)
    mapped = entries(FAMILIES[spec.family].rules, spec, shapes)
    sizes = [prod(_their_shape(entry, spec, shapes)) * dtype.itemsize for entry in mapped]
    shards = _shards(mapped, sizes, shard_bytes)
    table: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, spec, shapes, read, dtype)
        table |= {entry.theirs: name for entry in shard}
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": table})


def _shards(mapped: Sequence[Entry], sizes: Sequence[int], shard_bytes: int) -> list[list[Entry]]:
    """Cut the list into runs of at most `shard_bytes`."""
    shards: list[list[Entry]] = [[]]
    held = 0
    for entry, size in zip(mapped, sizes, strict=True):
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += size
    return shards


def _write_shard(
    path: Path,
    shard: Sequence[Entry],
    spec: ModelSpec,
    shapes: Shapes,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> None:
    """One safetensors file: the header follows from the shapes, so tensors pass through one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in shard:
        shape = _their_shape(entry, spec, shapes)
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[entry.theirs] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        held: tuple[tuple[str, ...], list[Tensor]] = ((), [])  # the experts of one tensor follow each other
        for entry in shard:
            if held[0] != entry.ours:
                held = ((), [])  # let go of the last ones first
                held = (entry.ours, [read(name).detach() for name in entry.ours])
            tensor = to_theirs(entry, held[1], spec).to("cpu", dtype)
            if list(tensor.shape) != header[entry.theirs]["shape"]:
                raise ValueError(f"{entry.theirs} has shape {list(tensor.shape)}")
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
