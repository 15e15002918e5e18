"""`python -m bench cuda`: measure a machine whose card is at hand for half an hour only.

It runs from the source tree with what is installed, without a network. Each part is a process of at most 8 minutes, the
most telling first, and leaves a JSON file in `--out`; the same command goes on with the parts that are missing. All
results are in `results.json` and `results.md` there. `--device cpu --small` runs all of it on a machine without a card.

    python -m bench cuda [--device TYPE] [--small] [--out FOLDER] [--again] [PART ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

SECONDS = 480
ROOT = Path(__file__).parents[1]
# Settings of the models, sequence length and rows of a step.
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "gpt2-124m": ({"preset": "gpt2"}, 1024, 16),
    "llama-1.3b": (
        {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "intermediate_size": 5504, "vocab_size": 32000},
        2048,
        8,
    ),
    "llama-8b": (
        {
            "hidden_size": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
        2048,
        4,
    ),
}
SMALL = ({"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128, "vocab_size": 512}, 64, 2)
STREAMS = (1, 8, 64)
ADAPTED = ("*attention.*", "*.feed_forward.*")


class Place:
    """The device of a part, and how large it may be."""

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

        settings, sequence, rows = SMALL if self.small else SHAPES[name]
        if self.small:
            settings = {**settings, "family": "gpt2" if name.startswith("gpt2") else "llama"}
        return spec_from_settings(ModelSettings(**settings), 0, sequence), sequence, rows

    def synchronize(self) -> None:
        from jingu.runtime.device import device_module

        if self.device.type != "cpu":
            device_module(self.device).synchronize()

    def seconds(self, step: Callable[[], object], count: int) -> float:
        """Return the median seconds of a step, after two that do not count."""
        times = []
        for number in range(count + 2):
            self.synchronize()
            start = time.perf_counter()
            step()
            self.synchronize()
            times.append(time.perf_counter() - start)
            if number >= 2 and sum(times) > SECONDS / 4:
                break
        return median(times[2:])


# Parts


def probe(place: Place) -> list[dict[str, Any]]:
    """What the device is: peak of its products, bandwidth, memory."""
    import torch

    from jingu.runtime.device import measure_peak_flops, total_memory

    elements = 2**20 if place.small else 2**28
    source = torch.ones(elements, device=place.device)
    target = torch.empty_like(source)
    copy_seconds = place.seconds(lambda: target.copy_(source), 10)
    formats = {"bf16": torch.bfloat16, "fp32": torch.float32}
    peaks = {f"{name} TFLOP/s": measure_peak_flops(place.device, dtype) / 1e12 for name, dtype in formats.items()}
    return [{**peaks, "copy, GB/s": 8 * elements / copy_seconds / 1e9, "memory, GB": total_memory(place.device) / 1e9}]


def checks(place: Place) -> list[dict[str, Any]]:
    """The tests that are marked `cuda`: training, tuning and generation equal the CPU's; copies and memory."""
    words = ["-m", "cuda", "-p", "no:cacheprovider", "-rA", "--device-type", place.device.type, "tests/card"]
    process = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    lines = process.stdout.splitlines()
    rows = [line.partition(" ") for line in lines if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED"))]
    if not rows:
        return [{"problem": (process.stdout + process.stderr)[-800:]}]
    return [{"test": test, "result": result.lower()} for result, _, test in rows]


def train(place: Place, name: str) -> list[dict[str, Any]]:
    """Train in bf16 beside transformers with the same attention: tokens/s, share of the peak, memory."""
    return [_measure_step(place, name, side) for side in ("jingu", "transformers")]


def train_fp8(place: Place) -> list[dict[str, Any]]:
    """Train in FP8 with both kinds of scales, beside bf16."""
    return [_measure_step(place, "llama-1.3b", "jingu", scaling=scaling) for scaling in (None, "row", "tensor")]


def tune(place: Place) -> list[dict[str, Any]]:
    """LoRA of a model with random weights beside peft."""
    return [_measure_step(place, "llama-8b", side, lora=True) for side in ("jingu", "transformers")]


def _measure_step(
    place: Place, name: str, side: str, *, lora: bool = False, scaling: str | None = None
) -> dict[str, Any]:
    import gc

    import torch

    from jingu.errors import JinguError
    from jingu.model.count import flops_per_token
    from jingu.model.decoder import parameter_shapes
    from jingu.runtime.device import device_module, measure_peak_flops, peak_memory

    spec, sequence, rows = place.shape(name)
    figures = {"side": side, "model": name, "precision": f"fp8 ({scaling})" if scaling else "bf16"}
    gc.collect()
    if place.device.type != "cpu":
        device_module(place.device).empty_cache()
        device_module(place.device).reset_peak_memory_stats()
    try:
        if side == "jingu":
            step = _jingu_step(place, spec, sequence, rows, lora, scaling)
        else:
            step = _transformers_step(place, spec, sequence, rows, lora)
        rate = sequence * rows / place.seconds(step, place.steps)
    except (RuntimeError, ImportError, ValueError, JinguError) as error:
        # Out of memory, a library that is too old, or a card without FP8.
        return {**figures, "problem": str(error).splitlines()[0][:200]}
    flops = flops_per_token(spec, parameter_shapes(spec), sequence) * (2 / 3 if lora else 1)
    peak = measure_peak_flops(place.device, torch.bfloat16)
    memory = peak_memory(place.device) / 1e9
    return {**figures, "tokens/s": rate, "MFU": flops * rate / peak, "peak memory, GB": memory}


def _jingu_step(
    place: Place, spec: Any, sequence: int, rows: int, lora: bool, scaling: str | None = None
) -> Callable[[], object]:
    import torch

    from jingu.config.batch_plan import BatchPlan
    from jingu.config.schema import RunConfig
    from jingu.config.sections.parallel import ParallelSettings
    from jingu.config.sections.train import AdamWSettings, FP8Settings, PrecisionSettings
    from jingu.data.batch import Batch
    from jingu.model.spec import Lora
    from jingu.parallel.layout import Layout
    from jingu.parallel.materialize import materialize
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.runtime.device import has_compiler
    from jingu.training.optimizer import build_optimizer
    from jingu.training.precision import choose_precision
    from jingu.training.pretraining import Pretraining
    from jingu.training.step import train_step

    if lora:
        spec = spec.model_copy(update={"adapter": Lora(rank=16, alpha=32, target_modules=ADAPTED)})
    parallel = ParallelSettings()
    mesh = build_mesh(resolve_axis_sizes(parallel, 1, spec), place.device)
    compiled = has_compiler(place.device) and not place.small
    fp8 = FP8Settings.model_validate({"scaling": scaling}) if scaling else None
    precision = choose_precision(fp8 or PrecisionSettings(type="bf16"), place.device)
    shapes = _shapes(spec)
    model = materialize(
        spec, mesh, Layout(parallel, compile=compiled), precision, lambda name: _random(shapes[name], place.device)
    )
    optimizer = build_optimizer(AdamWSettings(), model)
    tokens = torch.randint(0, spec.vocab_size, (rows, sequence + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])

    class Constant(Pretraining):
        def batch(self, step: int, first: int, count: int) -> Batch:
            return batch

    task = Constant(None, spec, mesh, RunConfig(), compile=compiled)  # type: ignore[arg-type]
    plan = BatchPlan(rows, rows, 1, rows * sequence)
    return lambda: train_step(model, optimizer, task, plan, step=0, max_grad_norm=1.0)


def _shapes(spec: Any) -> Any:
    from jingu.model.decoder import parameter_shapes

    return parameter_shapes(spec)


def _random(shape: Any, device: Any) -> Any:
    """Return small random numbers: their values matter to no figure."""
    import torch

    return torch.randn(shape, device=device).mul_(0.02)


def _transformers_step(place: Place, spec: Any, sequence: int, rows: int, lora: bool) -> Callable[[], object]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jingu.model.families import FAMILIES

    values = FAMILIES[spec.family].hf_config(spec)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with place.device:
        # With adapters, peers keep the frozen weights in bf16; else fp32 masters and autocast.
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

    return step


def decode(place: Place, name: str) -> list[dict[str, Any]]:
    """Decode with several streams: tokens/s beside the bandwidth bound, which reads every weight once a step."""
    bandwidth = probe(place)[0]["copy, GB/s"] * 1e9
    model = _inference_model(place, name)
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    rows = []
    for graphs in (False, True) if place.device.type == "cuda" else (False,):
        for streams in STREAMS:
            seconds, steps, tokens = _decode(place, model, streams, graphs)
            bound = weights * steps / bandwidth
            figures = {"streams": streams, "CUDA graphs": graphs, "tokens/s": tokens / seconds}
            rows.append({"model": name, **figures, "of the bandwidth bound": bound / seconds})
    return rows


def _inference_model(place: Place, name: str) -> Any:
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


def _decode(place: Place, model: Any, streams: int, graphs: bool) -> tuple[float, int, int]:
    """Return the seconds of the steps in which all streams decode, their number, and the tokens."""
    from jingu.infer.cuda_graphs import CudaGraphRunner
    from jingu.infer.engine import Engine
    from jingu.infer.engine_interface import EngineSettings
    from jingu.infer.request import Request
    from jingu.infer.sampling import SamplingParams

    settings = EngineSettings(max_num_seqs=streams, block_size=16)
    engine = Engine(model, settings, None, CudaGraphRunner() if graphs else None)
    prompt, answer = (8, 16) if place.small else (128, 128)
    for number in range(streams):
        ids = tuple((number + place_in_row) % 200 for place_in_row in range(prompt))
        engine.submit(Request(ids, SamplingParams(), answer, ignore_eos=True))
    while engine.stats().generated_tokens < 4 * streams:
        engine.step()
    before = engine.stats()
    place.synchronize()
    start = time.perf_counter()
    while engine.stats().running == streams:
        engine.step()
    place.synchronize()
    after = engine.stats()
    seconds = time.perf_counter() - start
    return seconds, after.steps - before.steps, after.generated_tokens - before.generated_tokens


def profile(place: Place) -> list[dict[str, Any]]:
    """Where the time of a training step and of decoding goes: the slowest operations on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    spec, sequence, rows = place.shape("gpt2-124m")
    step = _jingu_step(place, spec, sequence, rows, False)
    model = _inference_model(place, "gpt2-124m")
    table = []
    for what, function in (("train", step), ("decode", lambda: _decode(place, model, 8, False))):
        function()
        is_cuda = place.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        with record(activities=activities) as profiler:
            function()
            place.synchronize()
        events = profiler.key_averages()
        times = {e.key: e.self_device_time_total if is_cuda else e.self_cpu_time_total for e in events}
        total = sum(times.values()) or 1
        slowest = sorted(times, key=times.__getitem__, reverse=True)[:8]
        table += [{"of": what, "operation": key[:60], "share": times[key] / total} for key in slowest]
    return table


PARTS: dict[str, Callable[[Place], list[dict[str, Any]]]] = {
    "probe": probe,
    "checks": checks,
    "train-gpt2": lambda place: train(place, "gpt2-124m"),
    "decode-8b": lambda place: decode(place, "llama-8b"),
    "tune-8b": tune,
    "train-1.3b": lambda place: train(place, "llama-1.3b"),
    "train-1.3b-fp8": train_fp8,
    "decode-1b": lambda place: decode(place, "llama-1.3b"),
    "profile": profile,
}


# Running


def run_part(name: str, device_type: str, small: bool, out: Path) -> None:
    """Run one part in this process, and write its file."""
    from jingu.runtime.ranks import join_process_group

    place = Place(device_type, small)
    start = time.perf_counter()
    with join_process_group(place.device.type, None):  # type: ignore[arg-type]
        rows = PARTS[name](place)
    record = {"part": name, "seconds": time.perf_counter() - start, "rows": rows}
    (out / f"{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def write_report(out: Path) -> None:
    """Write the results of all parts so far as JSON and as Markdown."""
    from bench.__main__ import describe_machine

    files = [out / f"{name}.json" for name in PARTS]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    machine = describe_machine()
    (out / "results.json").write_text(json.dumps({"machine": machine, "parts": records}, indent=1), encoding="utf-8")
    pages = [f"# Measurements on a card\n\n{machine}\n"]
    for record in records:
        keys = list(dict.fromkeys(key for row in record["rows"] for key in row))
        lines = [f"\n## {record['part']} ({record['seconds']:.0f} s)\n"]
        lines += [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
        lines += [f"| {' | '.join(_cell(row.get(key, '')) for key in keys)} |" for row in record["rows"]]
        pages.append("\n".join(lines) + "\n")
    (out / "results.md").write_text("".join(pages), encoding="utf-8")


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def main(words: list[str]) -> None:
    """Run the parts whose results are missing, each in a process of its own."""
    parser = argparse.ArgumentParser("python -m bench cuda", description=__doc__)
    parser.add_argument("--device", default="auto", help="cuda, xpu, npu or cpu")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the kit")
    parser.add_argument("--out", type=Path, default=Path("build/cuda"))
    parser.add_argument("--again", action="store_true", help="run parts that have results, too")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args(words)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)}; the parts are {', '.join(PARTS)}")
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.in_process:
        run_part(options.parts[0], options.device, options.small, options.out)
        return
    for name in options.parts or PARTS:
        file = options.out / f"{name}.json"
        if file.exists() and not options.again:
            continue
        print(f"{name} ...", flush=True)
        command = [sys.executable, "-m", "bench", "cuda", "--in-process", name, "--out", str(options.out)]
        command += ["--device", options.device, *(["--small"] if options.small else [])]
        problem = None
        try:
            process = subprocess.run(command, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True)
            if process.returncode:
                problem = process.stderr.strip()[-800:]
        except subprocess.TimeoutExpired:
            problem = f"not done after {SECONDS} s"
        note = options.out / f"{name}.problem.txt"
        note.unlink(missing_ok=True)
        if problem is not None:
            # Not the part's own file, so that the next call tries it again.
            note.write_text(problem, encoding="utf-8")
            print(f"{name} failed: {problem.splitlines()[-1] if problem else 'without words'}", flush=True)
        write_report(options.out)
    print(f"Results: {options.out / 'results.md'}")
