"""Hugging Face folders, and the one way to open a model wherever it lies.

Weights are safetensors (an 8-byte little-endian length, a JSON header, the raw tensors), read tensor by tensor: a
conversion holds one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jingu.checkpoint.manifest import MANIFEST
from jingu.checkpoint.packaged import PACKAGED, packaged_model
from jingu.checkpoint.remote import Place
from jingu.checkpoint.resume import checkpoints_of, complete_steps, newest, step_folder
from jingu.checkpoint.store import Reader
from jingu.checkpoint.stream import Header, read_at, read_header, read_often
from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.data import PrefixSettings
from jingu.errors import JinguError, either
from jingu.model.adapters import add_adapter, is_adapter
from jingu.model.decoder import Decoder, make_model, parameter_shapes
from jingu.model.families import FAMILIES, Family
from jingu.model.families.names import Entry, entries, read_ours
from jingu.model.packed import Packed, pack, packed_reader, unpack
from jingu.model.spec import Ia3, Lora, ModelSpec
from jingu.text.formats import tokenizer_file

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class OpenModel:
    """A model on disk, opened.

    Attributes:
        spec: what it is.
        read: one parameter by jingu's name, whole, on CPU, in the dtype it is stored in. Given a number, too, of one
            that holds a matrix of each expert: that expert's, without the rest, and where that is possible without a
            copy; any thread may ask so.
        tokenizer_folder: where its tokenizer lies; None where it has none.
        where: the folder or file, for messages.
        dtype: that most of its weights are stored in.
        special_ids: bos_token_id and the like, as the model's config has them; empty where it has none.
        generation: its generation_config.json; None where it has none.
        no_tokenizer: why it has none.
        reads_whole: whether it was trained to see beginnings in both directions (`data.objective` prefix).
    """

    spec: ModelSpec
    read: Callable[..., Tensor]
    tokenizer_folder: Path | None
    where: Place
    dtype: torch.dtype = torch.float32
    special_ids: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] | None = None
    no_tokenizer: str = "the model has no tokenizer."
    reads_whole: bool = False

    def _id(self, name: str) -> Any:
        said = None if self.generation is None else self.generation.get(name)
        return self.special_ids.get(name) if said is None else said

    @property
    def start_id(self) -> int | None:
        """What stands before the first token of a decoder with an encoder, where the model says so."""
        found: int | None = self._id("decoder_start_token_id")
        return found

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, where the model says so; empty: the tokenizer's end token."""
        ids = self._id("eos_token_id")
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)

    def tokenizer(self) -> Path:
        """The tokenizer's folder. Raises JinguError where there is none."""
        if self.tokenizer_folder is None:
            raise JinguError(
                self.no_tokenizer, where=self.where, fix="Put its tokenizer.json beside weights in safetensors."
            )
        return self.tokenizer_folder


@dataclass(frozen=True)
class Weights:
    """Stored weights, by the full names that the family's rules have, as Hugging Face arranges them.

    Attributes:
        dtype: of most of them.
    """

    shapes: Shapes
    read: Callable[[str], Tensor]
    dtype: torch.dtype


# Opening


def open_model(path: Path) -> OpenModel:
    """Open a run (its newest checkpoint), a step, a Hugging Face folder or a GGUF file; or, where nothing lies at the
    path, the packaged model of that name. Raises JinguError."""
    if str(path) in PACKAGED and not path.exists():
        path = packaged_model(str(path))
    if path.is_file() and path.suffix == ".gguf":
        from jingu.checkpoint.gguf import open_gguf

        return open_gguf(path)
    if not path.exists() and (steps := [step_folder(path.parent, each).name for each in complete_steps(path.parent)]):
        raise JinguError("the run has no such checkpoint.", where=path, fix=f"It has {either(steps, 'and')}.")
    if not path.is_dir():
        raise JinguError(
            "there is no such model folder." if not path.exists() else "a model is a folder or a .gguf file.",
            where=path,
            fix="Give a run (runs/NAME), a step of one (runs/NAME/checkpoints/step-00000100), a Hugging Face folder "
            "or a .gguf file; or the name of a packaged model: " + ", ".join(PACKAGED) + ".",
        )
    if (path / "adapter_config.json").is_file():
        from jingu.checkpoint.peft import open_peft

        return open_peft(path)
    if (path / MANIFEST).is_file() or (path / "model.json").is_file():
        opened, run = _open_run(path)
        return opened if opened.spec.adapter is None else with_adapters(opened, _base_of(run)[0])
    return open_hf(path)


def config_of(run: Path) -> RunConfig | None:
    """The configuration that a run was last started with; None where the folder has none."""
    return load_config(run / "config.yaml", []) if (run / "config.yaml").is_file() else None


def checkpoints_in(run: Path) -> Place:
    """Where the checkpoints of a run lie, given its folder."""
    config = config_of(run)
    return run / "checkpoints" if config is None else checkpoints_of(run, config)


def _open_run(path: Path) -> tuple[OpenModel, Path]:
    """The newest checkpoint of a run, or the one that `path` is; and the run's folder, with its spec and tokenizer."""
    if (path / MANIFEST).is_file():
        step: Place = path
        run = path.absolute().parent.parent
    else:
        step, run = newest(checkpoints_in(path), path), path
    if not (run / "model.json").is_file():
        raise JinguError(
            "this checkpoint lies outside its run, and so without the run's model.json.",
            where=step,
            fix="Move it back to runs/NAME/checkpoints/.",
        )
    spec = ModelSpec.from_json((run / "model.json").read_bytes(), run / "model.json")
    spec = spec.model_copy(update={"frozen": ()})  # of which only training asks
    reader = Reader(step)
    stored = {
        name.removeprefix("model/"): torch.Size(tensor.shape)
        for name, tensor in reader.manifest.tensors.items()
        if name.startswith("model/")
    }
    shapes = parameter_shapes(spec)
    _compare({name: shape for name, shape in shapes.items() if spec.adapter is None or is_adapter(name)}, stored, step)
    tokenizer, config = run / "tokenizer", config_of(run)
    whole = config is not None and isinstance(config.data.objective, PrefixSettings)

    def read(name: str, expert: int | None = None) -> Tensor:
        name = f"model/{name}"
        return reader.read(name) if expert is None else reader.read_expert(name, expert)

    return OpenModel(spec, read, tokenizer if tokenizer.is_dir() else None, step, reads_whole=whole), run


def with_adapters(own: OpenModel, base: OpenModel) -> OpenModel:
    """A model and adapters for it as one: merged into the weights as these are read, or else beside them. Weights that
    the adapters were trained beside as packed ones are what those stand for.

    Args:
        own: the adapters; its spec names them.
    """
    spec, adapter, held = own.spec.model_copy(update={"base": None}), own.spec.adapter, parameter_shapes(own.spec)
    base = rounded(base, own.spec)
    if isinstance(adapter, Lora | Ia3):
        made = replace(
            base,
            spec=spec.model_copy(update={"adapter": None}),
            read=lambda name, expert=None: add_adapter(
                adapter, held, name, base.read(name, expert), lambda leaf: own.read(leaf, expert)
            ),
        )
    else:
        made = replace(base, spec=spec, read=lambda name: (own if is_adapter(name) else base).read(name))
    folder = own.tokenizer_folder or base.tokenizer_folder
    return replace(made, tokenizer_folder=folder, where=own.where, reads_whole=own.reads_whole)


def rounded(opened: OpenModel, spec: ModelSpec) -> OpenModel:
    """A model whose weights are what those of `spec`, which may be packed, stand for."""
    kind = spec.base
    if kind is None:
        return opened
    with torch.device("meta"):
        packed = {name for name, part in make_model(spec).named_modules() if isinstance(part, Packed)}

    def stands_for(name: str, weight: Tensor) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        return unpack(*pack(weight, kind), kind).to(wide) if name in packed else weight

    return replace(opened, read=lambda name, expert=None: stands_for(name, opened.read(name, expert)))


def open_run_apart(path: Path) -> tuple[OpenModel, OpenModel, Path]:
    """A run, or a step of it, that trained adapters: these; the model that they stand beside; and where that lies."""
    opened, run = _open_run(path)
    if opened.spec.adapter is None:
        raise JinguError("this run trained no adapters.", where=path, fix="`jingu export` writes its model.")
    return opened, *_base_of(run)


def _base_of(run: Path) -> tuple[OpenModel, Path]:
    base = load_config(run / "config.yaml", []).initialize.from_
    assert base is not None
    return open_model(Path(base)), Path(base)


def open_hf(folder: Path) -> OpenModel:
    """Open a Hugging Face folder; weights are read when asked for.

    Raises:
        JinguError: no config, an unknown architecture, a config that asks for its own code, weights that are
            pickled, damaged, or not those that the config describes.
    """
    config = read_json(folder / "config.json", "this is no model: it has neither config.json nor model.json.")
    opened = open_described(folder, folder / "config.json", config, partial(_stored, folder))
    generation = folder / "generation_config.json"
    if generation.is_file():
        opened = replace(opened, generation=read_json(generation))
    return replace(opened, tokenizer_folder=folder if tokenizer_file(folder) else None)


def open_described(
    where: Path, described: Path, config: Mapping[str, Any], weights: Callable[[Family, Shapes], Weights]
) -> OpenModel:
    """A model that a Hugging Face config describes, without its tokenizer.

    Args:
        where: the model.
        described: where the config is from, for messages.
        weights: opens the weights, given the family and the shapes that should be there.
    """
    family = _family(config, described)
    try:
        spec = family.spec_from_hf(config)
    except JinguError as error:
        raise JinguError(error.what, where=f"{described}", fix=error.fix) from error
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise JinguError(
            f"this does not describe a model ({error}).", where=f"{described}", fix="Restore the original file."
        ) from error
    shapes = parameter_shapes(spec)
    mapped = entries(family.rules, spec, shapes)
    expected = {entry.theirs: entry.shape for entry in mapped}
    stored = weights(family, expected)
    _compare(expected, stored.shapes, where)
    holders: dict[str, list[Entry]] = {}
    for entry in mapped:
        for name in entry.ours:
            holders.setdefault(name, []).append(entry)
    # Parts of the last tensor that were not asked for yet: one that holds several is read once.
    waiting: dict[str, Tensor] = {}

    def read(name: str, expert: int | None = None) -> Tensor:
        if expert is not None:
            apart = holders[name][0].expert is not None
            entry = holders[name][expert if apart else 0]
            found = entry.to_ours(stored.read(entry.theirs))[name]
            return found if apart else found[expert]
        if name not in waiting:
            waiting.clear()
            waiting.update(read_ours(name, holders[name], stored.read))
        return waiting.pop(name)

    ids = {key: config[key] for key in SPECIAL_IDS if config.get(key) is not None}
    return OpenModel(spec, read, None, where, stored.dtype, ids)


def described_model(path: Path) -> ModelSpec | None:
    """What a run's model.json or a config.json says, whatever the weights are; None where there is neither."""
    for folder in (path, path.absolute().parent.parent):
        if (folder / "model.json").is_file():
            return ModelSpec.from_json((folder / "model.json").read_bytes(), folder / "model.json")
    if not (path / "config.json").is_file():
        return None
    config = read_json(path / "config.json")
    return _family(config, path / "config.json").spec_from_hf(config)


def load_model(
    opened: OpenModel,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    prepare: Callable[[Decoder], object] = lambda model: None,
) -> Decoder:
    """The model with its weights, cast to `dtype`, ready to compute.

    On CPU, weights that are stored in this dtype and order are not copied: they stay mapped from their file, of which
    the system reads what is used, and keeps what there is memory for.

    Args:
        prepare: is given the model before it has memory, and may take parts away that shall have none.
    """
    with torch.device("meta"):
        model = make_model(opened.spec)
    prepare(model)
    read = packed_reader([model], lambda name: opened.read(name).to(device))
    for name, parameter in list(model.named_parameters()):
        weight = read(name)
        weight = (weight.to(dtype) if weight.is_floating_point() else weight).contiguous()
        read_often(weight)
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(weight, requires_grad=parameter.requires_grad))
    return model.eval()


def _family(config: Mapping[str, Any], where: Path) -> Family:
    names = [str(name) for name in config.get("architectures") or []]
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    found = next((known[name] for name in names if name in known), None)
    if config.get("auto_map") and not (found and found.replaces_code):
        raise JinguError(
            "the model asks to run Python code that came with it (auto_map). jingu never runs such code.",
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
        f"the architecture {asked} is not one that jingu knows.",
        where=where,
        fix=f"{'The nearest are' if near else 'Known are'} {', '.join(near or known)}.",
    )


class WrongTensorsError(JinguError):
    """Weights that are not those that a config describes.

    Attributes:
        tensors: what is wrong (missing, left over, of the wrong shape), and the names of the tensors.
    """

    tensors: Mapping[str, list[str]] = {}


def _compare(expected: Shapes, stored: Shapes, where: Place) -> None:
    """Raise WrongTensorsError with every tensor that is missing, left over, or of another shape."""
    tensors = {
        "missing": [name for name in expected if name not in stored],
        "left over": [name for name in stored if name not in expected],
        "of the wrong shape": [
            f"{name} (has {list(stored[name])}, should have {list(expected[name])})"
            for name in expected
            if name in stored and stored[name] != expected[name]
        ],
    }
    if any(tensors.values()):
        complaints = "; ".join(f"{what}: {', '.join(names)}" for what, names in tensors.items() if names)
        error = WrongTensorsError(
            f"the weights are not those that the model's config describes: {complaints}.",
            where=where,
            fix="Use the config and the weights of the same model.",
        )
        error.tensors = tensors
        raise error


def _stored(folder: Path, family: Family, expected: Shapes) -> Weights:
    """What the weight files of a Hugging Face folder hold."""
    found = {key: (path, key, header) for path in _weight_files(folder) for key, header in read_header(path).items()}
    based = not family.base or any(key.startswith(family.base) for key in found)
    places: dict[str, tuple[Path, str, Header]] = {}
    for key, place in found.items():
        name = key if based or key in expected else family.base + key
        # A tied head may be stored all the same; it is the embedding again.
        if name in expected or not name.endswith((*family.ignored, "lm_head.weight")):
            places[name] = place

    def read(name: str) -> Tensor:
        path, key, header = places[name]
        if header.dtype not in FLOATS:
            raise JinguError(
                f"the tensor {key} is stored as {header.dtype}: the weights are quantised.",
                where=path,
                fix="Use the model's weights in a floating-point format.",
            )
        return read_at(path, header.begin, header.shape, header.dtype)

    largest = max((header for _, _, header in places.values()), key=lambda header: header.bytes, default=None)
    dtype = largest.dtype if largest and largest.dtype in FLOATS else torch.float32
    return Weights({name: header.shape for name, (_, _, header) in places.items()}, read, dtype)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, all of them present."""
    if (folder / INDEX).is_file():
        table = read_json(folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise JinguError("the index has no weight_map.", where=folder / INDEX, fix="Fetch the file again.")
        names = sorted(set(table.values()))
        absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if absent:
            raise JinguError(f"weight files are missing: {', '.join(absent)}.", where=folder, fix="Fetch these files.")
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = sorted(item.name for item in folder.iterdir() if item.suffix in _PICKLES)
    if pickled:
        raise JinguError(
            f"the weights are pickled ({', '.join(pickled)}). Reading a pickle runs code that is in it, so jingu "
            "does not.",
            where=folder,
            fix="Use the model's safetensors files; or, where you trust the source, load it with transformers and "
            "write it with save_pretrained, which makes safetensors.",
        )
    raise JinguError(f"there are no weights here (no {WEIGHTS}).", where=folder, fix="Fetch the model again.")


def read_json(
    path: Path, absent: str = "the file is missing.", fix: str = "Give a run or a Hugging Face folder."
) -> dict[str, Any]:
    """What a file says. Raises JinguError where it is absent, or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JinguError(absent, where=path.parent, fix=fix) from None
    except ValueError as error:
        raise JinguError(f"the file is damaged ({error}).", where=path, fix="Fetch the file again.") from error
    if not isinstance(value, dict):
        raise JinguError("the file is damaged (not a JSON object).", where=path, fix="Fetch the file again.")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
