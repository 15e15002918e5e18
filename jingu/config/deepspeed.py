"""`jingu config from-deepspeed`: convert a DeepSpeed configuration, and list the keys without a counterpart.

Keys and defaults follow https://www.deepspeed.ai/docs/config-json and https://deepspeed.readthedocs.io.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jingu.config.schema import RunConfig
from jingu.config.strict_yaml import dump
from jingu.errors import JinguError
from jingu.tables import flatten, read_table

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/|#[^\n]*", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_STRING})|,(\s*[}}\]])")

_TABLES = read_table(__file__, "deepspeed.toml")
_TYPES: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}
# The largest exponent of two in fp32.
_MAX_SCALE_POWER = 127
_WORDS: dict[Callable[[Any], Any], str] = {int: "a whole number", float: "a number", bool: "true or false"}


def from_deepspeed(file: Path, processes: int | None = None) -> None:
    """Print the configuration that corresponds to a DeepSpeed configuration, and notes on keys that differ.

    Args:
        processes: number of ranks, from which missing batch sizes are computed.

    Raises:
        JinguError: the file cannot be read, is not a DeepSpeed configuration, or has a value that is invalid in a run.
    """
    settings, notes = convert(read(file), processes, file)
    try:
        RunConfig.model_validate(settings)
    except ValidationError as error:
        mistake = error.errors()[0]
        where = ".".join(map(str, mistake["loc"]))
        raise JinguError(f"{where} would be {mistake['input']}: {mistake['msg'].lower()}.", where=file) from None
    print(dump(settings) if settings else "", end="")
    if notes:
        print("\n# These keys of the DeepSpeed configuration have no counterpart, or another meaning:")
        for key, why in notes.items():
            print(f"#   {key}: {why}")


def read(file: Path) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a tree. Raises JinguError if the file cannot be read or parsed."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JinguError(f"the file cannot be read ({error}).", where=file) from None
    return parse(text, file)


def parse(text: str, file: Path) -> dict[str, Any]:
    """Parse a JSON object that may have comments and trailing commas. Raises JinguError if it is not one."""
    plain = _COMMENT.sub(lambda match: match[1] or " ", text)
    plain = _LAST_COMMA.sub(lambda match: match[1] or match[2], plain)
    try:
        tree = json.loads(plain)
    except json.JSONDecodeError as error:
        raise JinguError(f"this is not JSON: {error.msg.lower()}.", where=f"{file}:{error.lineno}") from None
    if not isinstance(tree, dict):
        raise JinguError("the file contains no configuration (an object in braces).", where=file)
    return tree


def convert(
    source: dict[str, Any], processes: int | None = None, file: Path | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert a DeepSpeed configuration.

    Args:
        file: the file of the configuration, for messages.

    Returns:
        The settings as a tree, and notes by DeepSpeed's dotted keys: for each key without a counterpart, or with
        another meaning.

    Raises:
        JinguError: a value is not a number, or not as many numbers as expected.
    """
    keys = _DeepSpeedKeys(source, file)
    # 1. Keys whose values are copied.
    for key, setting, kind in _TABLES["copied"]:
        value = keys.take_number(key, _TYPES[kind])
        if value is not None:
            keys.settings[setting] = value
    # 2. Keys that need a conversion. _topology reads the ZeRO stage, and _batch the number of ranks, so order matters.
    for convert_part in (_zero, _topology, _precision, _optimizer, _scheduler, _clipping):
        convert_part(keys)
    _batch(keys, processes)
    # 3. A note for every key that is left: the reason of the innermost part of its path that has one.
    for key in keys.remaining:
        reasons = (_TABLES["not_needed"].get(part) for part in reversed(key.split(".")))
        keys.notes.setdefault(key, next(filter(None, reasons), "no counterpart"))
    return _nest(keys.settings), keys.notes


def _nest(settings: dict[str, Any]) -> dict[str, Any]:
    """Return dotted settings as a tree."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return tree


class _DeepSpeedKeys:
    """A DeepSpeed configuration while it is converted, key by key.

    Args:
        source: the configuration.
        file: the file of the configuration, for messages.

    Attributes:
        remaining: values that are not yet converted, by dotted key.
        settings: converted settings, by dotted key.
        notes: notes for the user, by DeepSpeed's key.
    """

    def __init__(self, source: dict[str, Any], file: Path | None) -> None:
        self._file = file
        self.remaining = flatten(source)
        self.settings: dict[str, Any] = {}
        self.notes: dict[str, str] = {}

    def has_section(self, name: str) -> bool:
        """Return whether the section has a key that is not yet converted."""
        return any(key.startswith(f"{name}.") for key in self.remaining)

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a dotted key and return its value; return the default if the key is missing or "auto"."""
        value = self.remaining.pop(key, default)
        if value == "auto":
            self.notes[key] = 'with "auto" the launching program decides; the default is used here'
            return default
        return value

    def take_number(self, key: str, kind: Callable[[Any], Any], default: Any = None, least: int | None = None) -> Any:
        """Remove a dotted key and return its number; return the default if the key is missing, null or "auto".

        Args:
            kind: type of the number.
            least: the smallest number that is allowed; None: any number is.

        Raises:
            JinguError: the value is not such a number.
        """
        value = self.take(key)
        return default if value is None else self._convert(key, value, kind, least)

    def take_numbers(
        self, key: str, kind: Callable[[Any], Any], default: list[Any], least: int | None = None
    ) -> list[Any]:
        """Remove a dotted key and return its list of numbers, as many as in the default unless that is empty.

        Args:
            kind, least: as for `take_number`.

        Raises:
            JinguError: the value is not such a list.
        """
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, list) or (default and len(value) != len(default)):
            size = f" of {len(default)} numbers" if default else ""
            raise self.wrong(key, value, f"a list{size}")
        return [self._convert(key, item, kind, least) for item in value]

    def _convert(self, key: str, value: Any, kind: Callable[[Any], Any], least: int | None) -> Any:
        with suppress(ValueError, TypeError, OverflowError):
            number = kind(value)
            if least is None or number >= least:
                return number
        raise self.wrong(key, value, _WORDS[kind] + ("" if least is None else f" of at least {least}"))

    def wrong(self, key: str, value: Any, requirement: str) -> JinguError:
        """Return the error for a value that is not as expected."""
        return JinguError(f"{key} is {value!r}, and should be {requirement}.", where=self._file, fix="Correct it.")


def _zero(keys: _DeepSpeedKeys) -> None:
    """Convert the ZeRO stage, MiCS and offload."""
    # In DeepSpeed's deprecated form the section is a boolean.
    stage = keys.take_number("zero_optimization", int, 0)
    keys.settings["parallel.zero_stage"] = keys.take_number("zero_optimization.stage", int, stage)
    size = keys.take_number("zero_optimization.mics_shard_size", int)
    if size is not None:
        keys.settings["parallel.shard"] = size if size > 0 else "auto"
    parts = [f"zero_optimization.{part}" for part in ("offload_optimizer", "offload_param")]
    devices = [keys.take(f"{part}.device") for part in parts]
    paths = [keys.take(f"{part}.nvme_path") for part in parts]
    on_host = keys.take("zero_optimization.cpu_offload", False) or "cpu" in devices
    if "nvme" in devices:
        keys.settings["parallel.offload.type"] = "disk"
        if any(paths):
            keys.settings["parallel.offload.path"] = next(filter(None, paths))
    elif on_host:
        keys.settings["parallel.offload.type"] = "host"


def _topology(keys: _DeepSpeedKeys) -> None:
    """Convert `model_topo`: the mesh axes and pipeline stages in the configurations of pipeline projects."""
    axes = keys.take("model_topo.process_topology.axis", [])
    if not isinstance(axes, list):
        raise keys.wrong("model_topo.process_topology.axis", axes, "a list of names")
    dims = keys.take_numbers("model_topo.process_topology.dims", int, [], least=1)
    names = _TABLES["axes"] | {"data": "shard" if keys.settings["parallel.zero_stage"] else "replicate"}
    for axis, size in zip(map(str, axes), dims, strict=False):
        if axis in names:
            keys.settings[f"parallel.{names[axis]}"] = size
        else:
            keys.notes[f"model_topo.process_topology.axis {axis}"] = "no counterpart"
    parts = keys.remaining.get("model_topo.parts")
    if isinstance(parts, list) and parts:
        # In DeepSpeed the embedding and the head are layers; in jingu they belong to the first and the last stage.
        blocks = keys.take_numbers("model_topo.parts", int, [])
        blocks[0] -= 1
        blocks[-1] -= 1
        why = "a stage with only the embedding or the head has no counterpart; stages are balanced by cost instead"
        if min(blocks) >= 1:
            keys.settings["parallel.layers_per_stage"] = blocks
            why = "DeepSpeed counts embedding and head as layers; parallel.layers_per_stage does not"
        keys.notes["model_topo.parts"] = why
    elif keys.take("model_topo.parts", "parameters") != "parameters":
        keys.notes["model_topo.parts"] = "here stages are balanced by cost, or set by parallel.layers_per_stage"


def _precision(keys: _DeepSpeedKeys) -> None:
    """Convert fp16, bf16, loss scaling, and the dtype of gradient reduction."""
    kind = "fp32"
    for name in ("bf16", "fp16"):
        if keys.take(f"{name}.enabled", False):
            kind = name
    scale = keys.take_number("fp16.loss_scale", float, 0.0)
    power = keys.take_number("fp16.initial_scale_power", float, 16)
    if power > _MAX_SCALE_POWER:
        raise keys.wrong("fp16.initial_scale_power", power, f"at most {_MAX_SCALE_POWER}")
    # With "auto" the precision is unknown, and the default applies.
    if kind != "fp32" or not {"fp16.enabled", "bf16.enabled"} & keys.notes.keys():
        keys.settings["precision.type"] = kind
    if kind == "fp16":
        keys.settings["precision.initial_loss_scale"] = scale or 2.0**power
        if scale:
            keys.notes["fp16.loss_scale"] = "a fixed scale in DeepSpeed; here it is the initial scale, and adapts"
    else:
        for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
            keys.settings.pop(f"precision.{name}", None)
    reduce = keys.take("communication_data_type") or keys.take("data_types.grad_accum_dtype")
    if keys.take("fp32_allreduce", False):
        reduce = "fp32"
    if reduce in ("fp32", "fp16", "bf16"):
        keys.settings["precision.reduce"] = reduce


def _optimizer(keys: _DeepSpeedKeys) -> None:
    """Convert the optimizer; one without a counterpart becomes AdamW."""
    if not keys.has_section("optimizer"):
        return
    name = str(keys.take("optimizer.type", "AdamW"))
    kind = _TABLES["optimizers"].get(name.lower())
    if kind is None:
        keys.notes["optimizer.type"] = f"there is no {name}; AdamW is in its place"
        kind = "adamw"
    betas = keys.take_numbers("optimizer.params.betas", float, [0.9, 0.999 if kind == "adamw" else 0.99])
    decay = keys.take_number("optimizer.params.weight_decay", float, 0.0)
    keys.settings |= {
        "optimizer.type": kind,
        "optimizer.beta1": betas[0],
        "optimizer.beta2": betas[1],
        "optimizer.weight_decay": decay,
    }
    if kind == "lion":
        keys.settings.pop("optimizer.eps", None)
    is_decoupled = keys.take("optimizer.params.adam_w_mode", True) or name.lower() != "adam"
    if decay:
        keys.notes["optimizer.params.weight_decay"] = "here norms and biases never decay"
        if not is_decoupled:
            keys.notes["optimizer.params.adam_w_mode"] = "weight decay in the gradient (L2) has no counterpart"
    # These keys choose an implementation of the same update, so they need no note.
    for switch in ("torch_adam", "use_triton", "fused"):
        keys.take(f"optimizer.params.{switch}")


def _scheduler(keys: _DeepSpeedKeys) -> None:
    """Convert the learning rate schedule and its warmup."""
    if not keys.has_section("scheduler"):
        keys.settings |= {"schedule.type": "constant", "schedule.warmup": 0}
        return
    name = str(keys.take("scheduler.type"))
    params = "scheduler.params"
    if name not in _TABLES["schedules"]:
        keys.notes["scheduler.type"] = f"there is no {name}; the default schedule is in its place"
        return
    keys.settings["schedule.type"] = _TABLES["schedules"][name]
    warmup = keys.take_number(f"{params}.warmup_num_steps", int, 1000)
    if f"{params}.warmup_num_steps" not in keys.notes:  # "auto"
        keys.settings["schedule.warmup"] = warmup
    if keys.take(f"{params}.warmup_type", "log" if name != "WarmupCosineLR" else "linear") == "log":
        keys.notes[f"{params}.warmup_type"] = "warmup is logarithmic in DeepSpeed, and linear here"
    min_values = [keys.take(f"{params}.{key}", 0) for key in ("warmup_min_lr", "warmup_min_ratio")]
    if any(min_values):
        keys.notes[f"{params}.warmup_min_lr"] = "here warmup starts from zero"
    if name == "WarmupCosineLR" and "optimizer.lr" in keys.settings:
        min_ratio = keys.take_number(f"{params}.cos_min_ratio", float, 0.0001)
        keys.settings["schedule.min_lr"] = min_ratio * keys.settings["optimizer.lr"]


def _clipping(keys: _DeepSpeedKeys) -> None:
    """Convert gradient clipping and activation checkpointing."""
    interval = keys.take("pipeline.activation_checkpoint_interval", 0)
    if interval or keys.has_section("activation_checkpointing"):
        keys.settings["train.activation_checkpointing.type"] = "full"
    keys.take("activation_checkpointing.profile")
    max_norm = keys.take_number("gradient_clipping", float, 0.0)
    if "gradient_clipping" not in keys.notes:  # "auto"
        keys.settings["train.max_grad_norm"] = max_norm or None


def _batch(keys: _DeepSpeedKeys, processes: int | None) -> None:
    """Convert the batch sizes. DeepSpeed has three numbers for them; missing ones follow from the number of ranks."""
    batch = keys.take_number("train_batch_size", int, least=1)
    micro = keys.take_number("train_micro_batch_size_per_gpu", int, least=1)
    accumulation = keys.take_number("gradient_accumulation_steps", int, least=1)
    # Without the number of ranks, the axis of data-parallel ranks in `model_topo` stands for it.
    ranks = processes or keys.settings.get("parallel.shard", keys.settings.get("parallel.replicate"))
    if batch is None and micro is not None:
        if not isinstance(ranks, int):
            ranks = 1
            keys.notes["train_batch_size"] = "computed for one rank; --processes N sets the number of ranks"
        batch = micro * (accumulation or 1) * ranks
    if batch is not None:
        keys.settings["batch.global_batch_size"] = batch
        if micro is None and accumulation is not None and isinstance(ranks, int):
            micro = batch // accumulation // ranks
    if micro is not None:
        keys.settings["batch.micro_batch_size"] = micro
