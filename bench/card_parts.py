"""The parts of `python -m bench cuda`. Each part is a generator of rows of figures.

If a figure cannot be measured, its row contains the problem and the traceback, and the part continues.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# Time limit of one part in seconds.
SECONDS = 480
ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Shape:
    """A model to measure.

    Attributes:
        settings: settings of the section `model`.
        sequence: tokens per row.
        rows: rows per training step.
    """

    settings: Row
    sequence: int
    rows: int


SHAPES = {
    "gpt2-124m": Shape({"preset": "gpt2"}, 1024, 16),
    "llama-1.3b": Shape(
        {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "intermediate_size": 5504, "vocab_size": 32000},
        2048,
        8,
    ),
    "llama-8b": Shape(
        {
            "hidden_size": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
        2048,
        2,
    ),
}
SMALL = Shape({"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128, "vocab_size": 512}, 64, 2)
# Numbers of sequences that decode at the same time.
STREAMS = (1, 8, 64)
# Target modules of LoRA.
ADAPTED = ("*attention.*", "*.feed_forward.*")


class Place:
    """The device that a part measures, and the size of its models.

    Attributes:
        device: the device.
        small: whether to use a tiny model in place of every model.
        steps: number of measured training steps.
    """

    def __init__(self, device_type: str, small: bool) -> None:
        import torch

        from jingu.runtime.device import find_device_type

        self.device = torch.device(find_device_type(device_type))  # type: ignore[arg-type]
        self.small = small
        self.steps = 3 if small else 20

    def shape(self, name: str) -> tuple[Any, int, int]:
        """Return the spec, sequence length and rows of a model."""
        from jingu.config.sections.model import ModelSettings
        from jingu.model.resolve import spec_from_settings

        shape = SMALL if self.small else SHAPES[name]
        settings = shape.settings
        if self.small:
            settings = {**settings, "family": "gpt2" if name.startswith("gpt2") else "llama"}
        return spec_from_settings(ModelSettings(**settings), 0, shape.sequence), shape.sequence, shape.rows

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        from jingu.runtime.device import device_module

        if self.device.type != "cpu":
            device_module(self.device).synchronize()

    def reset_memory(self) -> None:
        """Free the memory of the previous figure, and reset the peak memory."""
        from jingu.runtime.device import device_module

        gc.collect()
        if self.device.type != "cpu":
            device_module(self.device).empty_cache()
            device_module(self.device).reset_peak_memory_stats()

    def seconds(self, step: Callable[[], object], count: int) -> float:
        """Return the median seconds per step, after two warm-up steps.

        Args:
            count: number of measured steps; fewer if they would take more than an eighth of the part's time.
        """
        times = []
        for number in range(count + 2):
            self.synchronize()
            start = time.perf_counter()
            step()
            self.synchronize()
            times.append(time.perf_counter() - start)
            if number >= 2 and sum(times) > SECONDS / 8:
                break
        return median(times[2:])


def attempt(place: Place, figures: Row, measure: Callable[[], Row]) -> Row:
    """Return a row: `figures`, and the measured figures or the problem (such as out of memory, a missing library)."""
    place.reset_memory()
    try:
        return {**figures, **measure()}
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {**figures, "problem": lines[0][:200], "traceback": traceback.format_exc()}


def reached(place: Place, value: float, least: float, most: float = float("inf")) -> str:
    """Return whether a figure is in its target range, as a cell. Targets do not apply to small models and CPUs."""
    if place.small or place.device.type == "cpu":
        return "not measured"
    return "yes" if least <= value <= most else "no"


# The device, and the tests


def probe(place: Place) -> Rows:
    """Describe the device: peak FLOP/s of matmuls, bandwidth, memory, compiler, and installed libraries."""
    import torch

    from jingu.runtime.device import device_name, has_compiler, measure_peak_flops, total_memory

    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        peak = partial(measure_peak_flops, place.device, dtype)
        yield attempt(place, {"what": f"peak in {name}, TFLOP/s"}, lambda peak=peak: {"value": peak() / 1e12})
    yield attempt(place, {"what": "copy, GB/s"}, lambda: {"value": measure_bandwidth(place) / 1e9})
    yield {"what": "memory, GB", "value": total_memory(place.device) / 1e9}
    yield {"what": "device", "value": device_name(place.device)}
    yield {"what": "a compiler", "value": "yes" if has_compiler(place.device) else "no"}
    for module in ("transformers", "peft", "triton", "flash_attn_interface", "bitsandbytes", "torchao"):
        yield {"what": module, "value": _version(module)}


def _version(module: str) -> str:
    from importlib import import_module
    from importlib.util import find_spec

    if find_spec(module) is None:
        return "not installed"
    return str(getattr(import_module(module), "__version__", "installed"))


def measure_bandwidth(place: Place) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    import torch

    elements = 2**20 if place.small else 2**28
    source = torch.ones(elements, device=place.device)
    target = torch.empty_like(source)
    return 8 * elements / place.seconds(lambda: target.copy_(source), 10)


def checks(place: Place) -> Rows:
    """Run the tests that are marked `cuda`: training, tuning and generation as on CPU; copies; memory."""
    words = ["-m", "cuda", "-vv", "-p", "no:cacheprovider", "--device-type", place.device.type, "tests/card"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "pytest", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        match = re.match(r"tests/card/test_card\.py::(\S.*) (PASSED|FAILED|ERROR|SKIPPED)", line)
        if match is not None:
            yield {"test": match[1], "result": match[2].lower()}
    if process.wait():
        yield {"test": "all", "problem": lines[-1].strip() if lines else "", "traceback": "".join(lines)[-60_000:]}


# Training


def train(place: Place, name: str) -> Rows:
    """Train in bf16, compared with transformers with the same attention: tokens per second, MFU, memory."""
    target = {"gpt2-124m": 0.55, "llama-1.3b": 0.6}[name]
    row = attempt(place, {"side": "jingu", "model": name}, lambda: _train_figures(place, name, _jingu_step))
    if "MFU" in row:
        row["target"] = f"MFU {target}"
        row["reached"] = reached(place, row["MFU"], target)
    yield row
    yield attempt(
        place, {"side": "transformers", "model": name}, lambda: _train_figures(place, name, _transformers_step)
    )
    # Several documents per row, with a document mask (FlexAttention on CUDA).
    step = partial(_jingu_step, documents=True)
    yield attempt(place, {"side": "jingu, documents", "model": name}, lambda: _train_figures(place, name, step))


def train_fp8(place: Place) -> Rows:
    """Train in FP8 with one scale per tensor and per row, compared with bf16."""
    plain = 0.0
    for scaling in (None, "tensor", "row"):
        step = partial(_jingu_step, scaling=scaling)
        precision = f"fp8 ({scaling})" if scaling else "bf16"
        row = attempt(place, {"precision": precision}, lambda step=step: _train_figures(place, "llama-1.3b", step))
        if "tokens/s" in row and not scaling:
            plain = row["tokens/s"]
        elif "tokens/s" in row and plain:
            row |= {"× bf16": row["tokens/s"] / plain, "target": "more than bf16"}
            row["reached"] = reached(place, row["× bf16"], 1.0)
        yield row


def tune(place: Place) -> Rows:
    """Train LoRA adapters of a model with random weights, compared with peft."""
    theirs = attempt(place, {"side": "peft"}, lambda: _train_figures(place, "llama-8b", _transformers_step, lora=True))
    yield theirs
    row = attempt(place, {"side": "jingu"}, lambda: _train_figures(place, "llama-8b", _jingu_step, lora=True))
    if "tokens/s" in row and "tokens/s" in theirs:
        row |= {"× peft": row["tokens/s"] / theirs["tokens/s"], "target": "1.2 × peft"}
        row["reached"] = reached(place, row["× peft"], 1.2)
    yield row


def _train_figures(place: Place, name: str, build: Callable[..., Any], lora: bool = False) -> Row:
    """Return the figures of training steps.

    Args:
        build: returns a function that runs a step, and the planned memory in bytes or None.
    """
    import torch

    from jingu.model.count import flops_per_token
    from jingu.model.decoder import parameter_shapes
    from jingu.runtime.device import measure_peak_flops, peak_memory

    spec, sequence, rows = place.shape(name)
    step, planned = build(place, spec, sequence, rows, lora)
    start = time.perf_counter()
    step()
    place.synchronize()
    first_seconds = time.perf_counter() - start
    rate = sequence * rows / place.seconds(step, place.steps)
    memory = peak_memory(place.device)
    # A frozen weight needs no gradient, so two of three matmuls remain.
    flops = flops_per_token(spec, parameter_shapes(spec), sequence) * (2 / 3 if lora else 1)
    peak = measure_peak_flops(place.device, torch.bfloat16)
    figures = {"tokens/s": rate, "MFU": flops * rate / peak, "first step, s": first_seconds}
    figures["peak memory, GB"] = memory / 1e9
    if planned is not None:
        figures |= {"planned memory, GB": planned / 1e9, "plan / peak (target 0.98 to 1.02)": planned / memory}
    return figures


def _jingu_step(
    place: Place,
    spec: Any,
    sequence: int,
    rows: int,
    lora: bool = False,
    scaling: str | None = None,
    documents: bool = False,
) -> tuple[Callable[[], object], float]:
    """Return a function that runs a training step of jingu, and the memory in bytes that jingu's plan predicts.

    Args:
        scaling: scales of FP8, `tensor` or `row`; None: bf16.
        documents: whether each row has four documents with a document mask.
    """
    import torch

    from jingu.config.batch_plan import BatchPlan
    from jingu.config.schema import RunConfig
    from jingu.config.sections.optimizers import AdamWSettings
    from jingu.data.batch import Batch
    from jingu.model.adapter_specs import Lora
    from jingu.parallel.layout import Layout
    from jingu.parallel.materialize import materialize
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.plan.forecast import estimate_memory
    from jingu.runtime.device import has_compiler
    from jingu.training.optimizer import build_optimizer
    from jingu.training.precision import choose_precision
    from jingu.training.pretraining import Pretraining
    from jingu.training.step import train_step

    # The configuration of the run.
    if lora:
        spec = spec.model_copy(update={"adapter": Lora(rank=16, alpha=32, target_modules=ADAPTED)})
    precision_settings = {"type": "fp8", "scaling": scaling} if scaling else {"type": "bf16"}
    batch_settings = {"sequence_length": sequence, "global_batch_size": rows, "micro_batch_size": rows}
    config = RunConfig.model_validate({"name": "bench", "precision": precision_settings, "batch": batch_settings})
    # The model with random weights, and its optimizer.
    sizes = resolve_axis_sizes(config.parallel, 1, spec)
    mesh = build_mesh(sizes, place.device)
    compiled = has_compiler(place.device) and not place.small
    precision = choose_precision(config.precision, place.device)
    shapes = _shapes(spec)
    model = materialize(
        spec,
        mesh,
        Layout(config.parallel, compile=compiled),
        precision,
        lambda name: _random(shapes[name], place.device),
    )
    optimizer = build_optimizer(AdamWSettings(), model)
    tokens = torch.randint(0, spec.vocab_size, (rows, sequence + 1))
    # Four documents per row.
    numbers = torch.arange(sequence).mul(4).div(sequence, rounding_mode="floor").expand(rows, -1)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], documents=numbers.contiguous() if documents else None)

    class Constant(Pretraining):
        """A task whose batch is the same in every step."""

        def batch(self, step: int, first: int, count: int) -> Batch:
            return batch

    task = Constant(None, spec, mesh, RunConfig(), compile=compiled)  # type: ignore[arg-type]
    plan = BatchPlan(rows, rows, 1, rows * sequence)
    planned = estimate_memory(config, spec, sizes, plan, precision).total
    return partial(train_step, model, optimizer, task, plan, step=0, max_grad_norm=1.0), planned


def _shapes(spec: Any) -> Any:
    from jingu.model.decoder import parameter_shapes

    return parameter_shapes(spec)


def _random(shape: Any, device: Any) -> Any:
    """Return small random weights. No figure depends on their values."""
    import torch

    return torch.randn(shape, device=device).mul_(0.02)


def _transformers_step(
    place: Place, spec: Any, sequence: int, rows: int, lora: bool = False
) -> tuple[Callable[[], object], None]:
    """Return a function that runs the same training step with transformers (and peft), and None for the plan."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jingu.model.families import FAMILIES

    values = FAMILIES[spec.family].hf_config(spec)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with place.device:
        # As is usual: frozen weights in bf16 with adapters; otherwise fp32 master weights and autocast.
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if lora else torch.float32, attn_implementation="sdpa"
        )
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(0, spec.vocab_size, (rows, sequence), device=place.device)

    def step() -> None:
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, None


# Decoding


@dataclass(frozen=True)
class Way:
    """A configuration of decoding.

    Attributes:
        graphs: whether to use CUDA graphs.
        compiled: whether blocks are compiled.
        backend: the engine's attention backend.
    """

    graphs: bool = False
    compiled: bool = False
    backend: Any = "gather"

    def __str__(self) -> str:
        words = ["graphs"] * self.graphs + ["compiled"] * self.compiled + [str(self.backend)]
        return ", ".join(words)


def decode(place: Place, name: str) -> Rows:
    """Decode with 1, 8 and 64 streams: tokens per second, compared with the bandwidth bound.

    The bound is the time to read every weight once per step.
    """
    bandwidth = measure_bandwidth(place)
    model = _inference_model(place, name)
    ways = [Way()]
    if place.device.type == "cuda":
        # Compiling changes the blocks for good, so this comes last.
        flex = Way(graphs=True, backend="flex")
        ways = [flex, Way(graphs=True), Way(graphs=True, backend="flash"), Way(), replace(flex, compiled=True)]
    # The models by whether they are compiled. The compiled one is shared by all figures that need it.
    models = {False: model}
    for way in ways:
        single = 0.0
        for streams in STREAMS:
            figures = {"model": name, "way": str(way), "streams": streams}
            row = attempt(place, figures, partial(_decode_figures, place, models, way, streams, bandwidth))
            if "tokens/s" in row:
                single = single or row["tokens/s"]
                row |= _decode_targets(place, name, row, single)
            yield row


def _decode_targets(place: Place, name: str, row: Row, single: float) -> Row:
    """Compare a row with the targets, which exist for the 8B model with 1 and 64 streams.

    Args:
        single: tokens per second of one stream.
    """
    if name != "llama-8b" or row["streams"] == 8:
        return {}
    if row["streams"] == 1:
        share = row["of the bandwidth bound"]
        return {"target": "0.8 of the bound", "reached": reached(place, share, 0.8)}
    times = row["tokens/s"] / single
    return {"× one stream": times, "target": "20 × one stream", "reached": reached(place, times, 20)}


def _inference_model(place: Place, name: str) -> Any:
    """Return a model with random weights in bf16 for the engine."""
    import torch

    from jingu.infer.inference_model import InferenceModel
    from jingu.parallel.layout import Layout, Precision
    from jingu.parallel.materialize import materialize
    from jingu.text.tokenizer_training import train_tokenizer

    spec, _, _ = place.shape(name)
    shapes = _shapes(spec)
    precision = Precision.uniform(torch.bfloat16)
    (module,) = materialize(spec, None, Layout(), precision, lambda key: _random(shapes[key], place.device)).stages
    return InferenceModel(module.eval(), spec, train_tokenizer(iter(["some text"]), 270, ["<|endoftext|>"]))


def _decode_figures(place: Place, models: dict[bool, Any], way: Way, streams: int, bandwidth: float) -> Row:
    """Return the figures of decoding.

    Args:
        models: models by whether they are compiled; the compiled one is added when it is first needed.
        bandwidth: memory bandwidth in bytes per second.
    """
    from jingu.infer.model_runner import compile_blocks

    if way.compiled not in models:
        models[True] = compile_blocks(models[False])
    model = models[way.compiled]
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    engine = _decoding_engine(place, model, way, streams)
    before = engine.stats()
    place.synchronize()
    start = time.perf_counter()
    steps = 4 if place.small else 64
    for _ in range(steps):
        engine.step()
    place.synchronize()
    seconds = time.perf_counter() - start
    after = engine.stats()
    figures: Row = {"tokens/s": (after.generated_tokens - before.generated_tokens) / seconds}
    figures["ms a step"] = 1000 * seconds / steps
    figures["of the bandwidth bound"] = weights * steps / bandwidth / seconds
    if place.device.type == "cpu":
        busy = (after.forward_seconds - before.forward_seconds) / (after.step_seconds - before.step_seconds)
    else:
        busy = _device_seconds(place, engine.step, 8) / (seconds / steps)
    figures["time outside the model"] = max(0.0, 1.0 - busy)
    return figures


def _decoding_engine(place: Place, model: Any, way: Way, streams: int) -> Any:
    """Return an engine with `streams` sequences that have finished prefill and warmed up decoding."""
    from jingu.infer.cuda_graphs import CudaGraphRunner
    from jingu.infer.engine import Engine
    from jingu.infer.engine_interface import EngineSettings
    from jingu.infer.request import Request
    from jingu.infer.sampling import SamplingParams

    settings = EngineSettings(max_num_seqs=streams, attention_backend=way.backend)
    engine = Engine(model, settings, None, CudaGraphRunner() if way.graphs else None)
    # These lengths keep the number of keys in one range throughout, so that one CUDA graph serves all steps.
    prompt, answer = (8, 16) if place.small else (130, 120)
    for number in range(streams):
        ids = tuple((number + place_in_row) % 200 for place_in_row in range(prompt))
        engine.submit(Request(ids, SamplingParams(), answer, ignore_eos=True))
    # Warm up with four steps in which all streams decode. The second one captures the graph.
    warm = 0
    while warm < 4:
        before = engine.stats().generated_tokens
        engine.step()
        warm += engine.stats().generated_tokens - before == streams
    return engine


def _device_seconds(place: Place, step: Callable[[], object], count: int) -> float:
    """Return the seconds per step during which the device computes, averaged over `count` steps."""
    events = _profile(place, lambda: [step() for _ in range(count)])
    return sum(event.self_device_time_total for event in events) / 1e6 / count


def _profile(place: Place, function: Callable[[], object]) -> Any:
    """Return the profiler's totals per operation for a call of `function`."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    kinds = {"cuda": "CUDA", "xpu": "XPU", "npu": "PrivateUse1"}
    device_kind = getattr(ProfilerActivity, kinds.get(place.device.type, ""), None)
    with record(activities=[ProfilerActivity.CPU, *([device_kind] if device_kind else [])]) as profiler:
        function()
        place.synchronize()
    return profiler.key_averages()


def profile(place: Place) -> Rows:
    """Profile a training step and decoding: the eight slowest operations of each, as shares of the time."""
    name = "gpt2-124m"
    spec, sequence, rows = place.shape(name)

    def slowest(what: str, function: Callable[[], object]) -> Rows:
        function()
        on_host = place.device.type == "cpu"
        times = {}
        for event in _profile(place, function):
            times[event.key] = event.self_cpu_time_total if on_host else event.self_device_time_total
        total = sum(times.values()) or 1
        for key in sorted(times, key=times.__getitem__, reverse=True)[:8]:
            yield {"of": what, "operation": key[:60], "share": times[key] / total}

    yield from slowest("train", _jingu_step(place, spec, sequence, rows)[0])
    engine = _decoding_engine(place, _inference_model(place, name), Way(), 8)
    yield from slowest("decode", lambda: [engine.step() for _ in range(4)])


PARTS: dict[str, Callable[[Place], Rows]] = {
    "probe": probe,
    "checks": checks,
    "train-gpt2": partial(train, name="gpt2-124m"),
    "decode-8b": partial(decode, name="llama-8b"),
    "train-1.3b": partial(train, name="llama-1.3b"),
    "tune-8b": tune,
    "train-1.3b-fp8": train_fp8,
    "decode-1b": partial(decode, name="llama-1.3b"),
    "profile": profile,
}
