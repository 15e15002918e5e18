"""`jingu config from-deepspeed`: convert a DeepSpeed configuration, and list what has no counterpart.

Keys and defaults are those of https://www.deepspeed.ai/docs/config-json and https://deepspeed.readthedocs.io.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jingu.config.schema import RunConfig
from jingu.config.strict_yaml import dump
from jingu.errors import JinguError

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/|#[^\n]*", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_STRING})|,(\s*[}}\]])")

_ENGINE_KEYS = (
    "aio allgather_bucket_size allgather_partitions buffer_count buffer_size contiguous_gradients fast_init"
    " gradient_predivide_factor ignore_unused_parameters max_in_cpu overlap_comm pin_memory pipeline_read"
    " pipeline_write prescale_gradients reduce_bucket_size reduce_scatter round_robin_gradients"
    " stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold"
    " stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size use_multi_rank_bucket_allreduce"
)
_NOT_NEEDED = {
    **dict.fromkeys(_ENGINE_KEYS.split(), "PyTorch's sharding engine decides this"),
    "stage3_gather_16bit_weights_on_model_save": "every checkpoint can be exported (`jingu export`)",
    "stage3_gather_fp16_weights_on_model_save": "every checkpoint can be exported (`jingu export`)",
    "zero_allow_untested_optimizer": "every optimizer here works with every stage",
    "zero_force_ds_cpu_optimizer": "every optimizer here works with every stage",
    "wall_clock_breakdown": "metrics.jsonl has the time of each step",
    "auto_cast": "inputs of a model of tokens are whole numbers",
}
_AXES = {"pipe": "pipeline", "model": "tensor", "tensor": "tensor", "sequence": "context", "expert": "expert"}


def from_deepspeed(file: Path, processes: int | None = None) -> None:
    """Print the configuration that corresponds to a DeepSpeed configuration.

    Args:
        processes: number of ranks, if the batch sizes in the file do not determine it.

    Raises:
        JinguError: the file cannot be read, is not a DeepSpeed configuration, or has values that no run can have.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JinguError(f"the file cannot be read: {getattr(error, 'strerror', error)}.", where=file) from None
    settings, notes = convert(parse(text, file), processes)
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


def parse(text: str, file: Path) -> dict[str, Any]:
    """Parse a JSON object that may have comments and trailing commas."""
    plain = _COMMENT.sub(lambda match: match[1] or " ", text)
    plain = _LAST_COMMA.sub(lambda match: match[1] or match[2], plain)
    try:
        tree = json.loads(plain)
    except json.JSONDecodeError as error:
        raise JinguError(f"this is not JSON: {error.msg.lower()}.", where=f"{file}:{error.lineno}") from None
    if not isinstance(tree, dict):
        raise JinguError("the file does not hold a configuration (an object in braces).", where=file)
    return tree


def convert(source: dict[str, Any], processes: int | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings as a tree, and a note for every key without a counterpart."""
    reader = _DeepSpeedReader(source)
    for part in (_zero, _topology, _precision, _optimizer, _scheduler, _rest):
        part(reader)
    _batch(reader, processes)
    reader.note_the_rest(reader.remaining)
    return reader.settings, reader.notes


class _DeepSpeedReader:
    """Converts a configuration key by key.

    Attributes:
        remaining: the keys that were not converted yet.
        settings: the converted settings.
        notes: what to tell the user, by DeepSpeed's keys.
    """

    def __init__(self, source: dict[str, Any]) -> None:
        self.remaining: dict[str, Any] = json.loads(json.dumps(source))
        self.settings: dict[str, Any] = {}
        self.notes: dict[str, str] = {}

    def take(self, key: str, default: Any = None) -> Any:
        """Remove the value of a dotted key and return it; the default if it is missing or "auto"."""
        *path, last = key.split(".")
        place: Any = self.remaining
        for part in path:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            return default
        value = place.pop(last)
        if value == "auto":
            self.notes[key] = 'with "auto" the launching program decides; the default is used here'
            return default
        return value

    def put(self, key: str, value: Any) -> None:
        """Set a dotted setting."""
        *path, last = key.split(".")
        place = self.settings
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value

    def move(self, key: str, setting: str, convert: Callable[[Any], Any], default: Any = None) -> None:
        """Copy a value to a setting."""
        value = self.take(key, default)
        if value is not None:
            self.put(setting, convert(value))

    def note_the_rest(self, place: dict[str, Any], prefix: str = "") -> None:
        """Add a note for every key that was not converted."""
        for key, value in place.items():
            if isinstance(value, dict) and key not in _NOT_NEEDED:
                self.note_the_rest(value, f"{prefix}{key}.")
            else:
                self.notes.setdefault(f"{prefix}{key}", _NOT_NEEDED.get(key, "no counterpart"))


def _topology(reader: _DeepSpeedReader) -> None:
    """Convert the axes of ranks: those of pipeline projects, and DeepSpeed's own."""
    reader.move("tensor_parallel.autotp_size", "parallel.tensor", int)
    reader.move("sequence_parallel_size", "parallel.context", int)
    axes = reader.take("model_topo.process_topology.axis", [])
    dims = reader.take("model_topo.process_topology.dims", [])
    names = _AXES | {"data": "shard" if reader.settings["parallel"]["zero_stage"] else "replicate"}
    for axis, size in zip(axes, dims, strict=False):
        if axis in names:
            reader.put(f"parallel.{names[axis]}", int(size))
        else:
            reader.notes[f"model_topo.process_topology.axis {axis}"] = "no counterpart"
    parts = reader.take("model_topo.parts")
    if not isinstance(parts, list):
        if parts not in (None, "parameters"):
            reader.notes["model_topo.parts"] = (
                "here stages are even by their cost, or parallel.layers_per_stage counts blocks"
            )
        return
    # In DeepSpeed the embedding and the head are layers; in jingu they belong to the first and the last stage.
    blocks = [int(part) for part in parts]
    blocks[0] -= 1
    blocks[-1] -= 1
    if min(blocks) >= 1:
        reader.put("parallel.layers_per_stage", blocks)
        why = "embedding and head count as layers there, and not in parallel.layers_per_stage"
    else:
        why = "a stage of the embedding or the head alone has no counterpart; stages are even by their cost"
    reader.notes["model_topo.parts"] = why


def _zero(reader: _DeepSpeedReader) -> None:
    zero = reader.remaining.get("zero_optimization", {})
    if isinstance(zero, bool):  # DeepSpeed's deprecated form: on or off
        reader.remaining["zero_optimization"] = {"stage": int(zero)}
    reader.put("parallel.zero_stage", int(reader.take("zero_optimization.stage", 0)))
    reader.move("zero_optimization.mics_shard_size", "parallel.shard", lambda size: "auto" if size <= 0 else int(size))
    parts = [f"zero_optimization.{part}" for part in ("offload_optimizer", "offload_param")]
    devices, paths = ([reader.take(f"{part}.{key}") for part in parts] for key in ("device", "nvme_path"))
    on_host = reader.take("zero_optimization.cpu_offload", False) or "cpu" in devices
    if "nvme" in devices:
        reader.put("parallel.offload.type", "disk")
        if any(paths):
            reader.put("parallel.offload.path", next(filter(None, paths)))
    elif on_host:
        reader.put("parallel.offload.type", "host")


def _precision(reader: _DeepSpeedReader) -> None:
    kind = [*(name for name in ("fp16", "bf16") if reader.take(f"{name}.enabled", False)), "fp32"][0]
    scale, power = reader.take("fp16.loss_scale", 0), reader.take("fp16.initial_scale_power", 16)
    settings = {
        "initial_loss_scale": float(scale or 2.0**power),
        "loss_scale_window": int(reader.take("fp16.loss_scale_window", 1000)),
        "hysteresis": int(reader.take("fp16.hysteresis", 2)),
        "min_loss_scale": float(reader.take("fp16.min_loss_scale", 1)),
    }
    if kind != "fp32" or not {"fp16.enabled", "bf16.enabled"} & reader.notes.keys():
        reader.put("precision", {"type": kind, **(settings if kind == "fp16" else {})})
    if kind == "fp16" and scale:
        reader.notes["fp16.loss_scale"] = "a fixed scale there; here it begins so, and adapts"
    narrow = reader.take("communication_data_type") or reader.take("data_types.grad_accum_dtype")
    narrow = "fp32" if reader.take("fp32_allreduce", False) else narrow
    if narrow in ("fp32", "fp16", "bf16"):
        reader.put("precision.reduce", narrow)


def _optimizer(reader: _DeepSpeedReader) -> None:
    if not reader.remaining.get("optimizer"):
        return
    name = str(reader.take("optimizer.type", "AdamW"))
    kind_by_name = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "lion": "lion"}
    if name.lower() not in kind_by_name:
        reader.notes["optimizer.type"] = f"there is no {name}; AdamW is in its place"
    kind = kind_by_name.get(name.lower(), "adamw")
    reader.put("optimizer.type", kind)
    reader.move("optimizer.params.lr", "optimizer.lr", float)
    betas = reader.take("optimizer.params.betas", [0.9, 0.999 if kind == "adamw" else 0.99])
    reader.put("optimizer.beta1", float(betas[0]))
    reader.put("optimizer.beta2", float(betas[1]))
    epsilon = reader.take("optimizer.params.eps", 1e-8)
    if kind == "adamw":
        reader.put("optimizer.eps", float(epsilon))
    decay = float(reader.take("optimizer.params.weight_decay", 0.0))
    reader.put("optimizer.weight_decay", decay)
    if decay:
        reader.notes["optimizer.params.weight_decay"] = "here norms and biases never decay"
    if name.lower() == "adam" and not reader.take("optimizer.params.adam_w_mode", True) and decay:
        reader.notes["optimizer.params.adam_w_mode"] = "decay as a part of the gradient has no counterpart"
    for switch in ("torch_adam", "adam_w_mode", "use_triton", "fused"):
        reader.take(f"optimizer.params.{switch}")


def _scheduler(reader: _DeepSpeedReader) -> None:
    if not reader.remaining.get("scheduler"):
        reader.put("schedule", {"type": "constant", "warmup": 0})
        return
    name, params = str(reader.take("scheduler.type")), "scheduler.params"
    types = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if name not in types:
        reader.notes["scheduler.type"] = f"there is no {name}; the default schedule is in its place"
        return
    reader.put("schedule.type", types[name])
    reader.move(f"{params}.warmup_max_lr", "optimizer.lr", float)
    reader.move(f"{params}.total_num_steps", "train.steps", int)
    warmup = reader.take(f"{params}.warmup_num_steps", 1000)
    if f"{params}.warmup_num_steps" not in reader.notes:  # "auto"
        reader.put("schedule.warmup", int(warmup))
    if reader.take(f"{params}.warmup_type", "log" if name != "WarmupCosineLR" else "linear") == "log":
        reader.notes[f"{params}.warmup_type"] = "the rate rises with the logarithm of the step there, and linearly here"
    starts = [reader.take(f"{params}.{key}", 0) for key in ("warmup_min_lr", "warmup_min_ratio")]
    if any(starts):
        reader.notes[f"{params}.warmup_min_lr"] = "here the rate rises from zero"
    if name == "WarmupCosineLR":
        rate, least = reader.settings.get("optimizer", {}).get("lr"), reader.take(f"{params}.cos_min_ratio", 0.0001)
        if rate is not None:
            reader.put("schedule.min_lr", float(least) * rate)


def _rest(reader: _DeepSpeedReader) -> None:
    interval = reader.take("pipeline.activation_checkpoint_interval", 0)
    if "activation_checkpointing" in reader.remaining or interval:
        reader.put("train.activation_checkpointing.type", "full")
    reader.take("activation_checkpointing.profile")
    clip = reader.take("gradient_clipping", 0.0)
    if "gradient_clipping" not in reader.notes:
        reader.put("train.max_grad_norm", float(clip) or None)
    reader.move("steps_per_print", "train.log_every", int)
    reader.move("seed", "seed", int)
    if reader.take("tensorboard.enabled", False):
        reader.put("train.tensorboard", True)


def _batch(reader: _DeepSpeedReader, processes: int | None) -> None:
    """Derive the batch sizes: two of DeepSpeed's three numbers, or the number of ranks, determine the third."""
    whole = reader.take("train_batch_size")
    micro = reader.take("train_micro_batch_size_per_gpu")
    times = reader.take("gradient_accumulation_steps")
    axes = reader.settings.get("parallel", {})
    ranks = processes or axes.get("shard", axes.get("replicate"))
    if whole is None and micro is not None:
        if not isinstance(ranks, int):
            ranks = 1
            reader.notes["train_batch_size"] = (
                "made of the other two for one rank; --processes N says how many there are"
            )
        whole = int(micro) * int(times or 1) * ranks
    if whole is not None:
        reader.put("batch.global_batch_size", int(whole))
        if micro is None and times is not None and isinstance(ranks, int):
            micro = int(whole) // int(times) // ranks
    if micro is not None:
        reader.put("batch.micro_batch_size", int(micro))
