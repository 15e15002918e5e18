"""Expert offloading with a quarter of the experts resident, compared with all of them in memory.

There are two models. One is SmolLM2-135M grown to 8 experts per block, 2 per token: 1.3 GB in bf16, with random
routers. Each expert is a copy of the feed-forward with added noise of 0.3 of its standard deviation. The other model is
small, and is trained here together with its routers. Both continue real text, with one stream and with several streams
together. Both sides (all experts resident, a quarter resident) alternate in one process.

The minimum number of bytes is what a clairvoyant policy (Belady) would read for the same routing with the same number
of slots. The table also shows a lower bound for policies without foresight. It assumes that one access of a layer says
nothing about its next one: the accesses of each layer are put in random order; the policy keeps the most popular
experts resident, and is compared with the clairvoyant policy, which knows this order. Memory is measured in separate
processes.

`python -m bench experts=FOLDER` stores the trained mixture in FOLDER, and reuses it the next time.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.children import run_jingu
from bench.smollm2 import find_smollm2
from jingu.data.dataset import open_dataset
from jingu.formats.grow_model import GrowthOptions, grow_model
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.request import Event, Request
from jingu.infer.sampling import SamplingParams
from jingu.model.feed_forward_specs import Experts

RESIDENT, STREAMS, TOKENS, PROMPT, ROUNDS, THREADS = "25%", (1, 2, 4, 8), 64, 24, 3, 2
STEPS = 800
CONFIG = """
name: mixture
tokenizer: {{path: tokenizer, vocab_size: 4096, sample_bytes: 4000000}}
data: {{input: text, path: data, suffixes: [.py], validation_fraction: 0.03, invalid_utf8: skip}}
model:
  family: mixtral
  num_layers: 6
  hidden_size: 128
  num_heads: 2
  intermediate_size: 128
  experts: {{num_experts: 16, num_experts_per_token: 2, aux_loss_coef: 0.01, aux_loss_scope: layer}}
batch: {{sequence_length: 256, global_batch_size: 8}}
optimizer: {{type: adamw, lr: 2e-3}}
schedule: {{type: wsd, warmup: 0.03, decay: 0.5}}
train: {{steps: {steps}, compile: false}}
precision: {{type: fp32}}
device: {{type: cpu, threads: {threads}}}
evaluation: {{every: 0}}
checkpoint: {{every: 0}}
"""
# The accesses to experts in order: the layer, and the experts that its tokens need.
Trace = Sequence[tuple[int, tuple[int, ...]]]


def train_mixture(folder: Path, steps: int) -> Path:
    """Train a mixture of experts on the standard library's source and return its exported folder, inside `folder`.

    If the exported folder already exists, nothing is trained.
    """
    from examples.quickstart import collect

    if not (folder / "exported").exists():
        folder.mkdir(parents=True, exist_ok=True)
        collect(folder / "text")
        (folder / "run.yaml").write_text(CONFIG.format(steps=steps, threads=THREADS), encoding="utf-8")
        for words in ("tokenizer train run.yaml", "data build run.yaml", "train run.yaml"):
            run_jingu(folder, *words.split())
        run_jingu(folder, "export", "runs/mixture", "--to", "exported", "--dtype", "bf16")
    return folder / "exported"


def validation_ids(folder: Path, loaded: InferenceModel) -> list[int]:
    """Return token ids of real text that the model has not been trained on."""
    if not (folder.parent / "data").exists():
        return loaded.tokenizer.encode(Path(str(textwrap.__file__)).read_text(encoding="utf-8"))
    validation = open_dataset(folder.parent / "data", "validation")
    ids: list[int] = validation.gather(np.array([0]), 8192)[0].tolist()
    return ids


def build_requests(ids: list[int], streams: int, tokens: int, first: int) -> list[Request]:
    """Return one request per stream, each with a different part of the text as its prompt."""
    starts = [97 * (first * streams + number) for number in range(streams)]
    sampling = SamplingParams(temperature=0.8, seed=first)
    return [Request(tuple(ids[start : start + PROMPT]), sampling, tokens, ignore_eos=True) for start in starts]


def run_requests(engine: Engine, requests: list[Request]) -> tuple[list[Event], float]:
    """Run requests together; return their events, ordered by request, and the wall time in seconds."""
    started = time.perf_counter()
    ids = [engine.submit(request) for request in requests]
    events = []
    while engine.busy:
        events += engine.step()
    seconds = time.perf_counter() - started
    return [event for id_ in ids for event in events if event.request_id == id_], seconds


def count_optimal_reads(trace: Trace, slots: int) -> int:
    """Return the number of experts that Belady's policy reads: it evicts the expert whose next use is latest.

    Within one access, experts that are resident come first, and then those whose next use is latest, so that their
    slots can be reused. This order is a heuristic: of small traces, 2% have a better order, which mostly reads one
    expert less.
    """
    # Backward pass: for each access, when each of its experts is needed next.
    next_uses: list[dict[tuple[int, int], int]] = []
    next_access: dict[tuple[int, int], int] = {}
    for access, (layer, experts) in reversed([*enumerate(trace)]):
        uses = {(layer, expert): next_access.get((layer, expert), len(trace)) for expert in experts}
        next_uses.append(uses)
        next_access.update(dict.fromkeys(uses, access))
    # Forward pass: simulate the slots. Values are the next uses.
    resident: dict[tuple[int, int], int] = {}
    reads = 0
    for uses in reversed(next_uses):
        for key in sorted(uses, key=lambda key: (key not in resident, -uses[key])):
            if key not in resident:
                reads += 1
                if len(resident) == slots:
                    del resident[max(resident, key=resident.__getitem__)]
            resident[key] = uses[key]
    return reads


def bound_without_foresight(trace: Trace, slots: int) -> float:
    """Return the reads of a policy that keeps the most popular experts resident, relative to the clairvoyant policy.

    The accesses of each layer are shuffled first.
    """
    rng = random.Random(0)
    by_layer: dict[int, list[tuple[int, ...]]] = {}
    for layer, experts in trace:
        by_layer.setdefault(layer, []).append(experts)
    for accesses in by_layer.values():
        rng.shuffle(accesses)
    shuffled = [(layer, by_layer[layer].pop()) for layer, _ in trace]
    uses = Counter((layer, expert) for layer, experts in trace for expert in experts)
    # Popular experts are read once, the others at every use.
    saved = sum(count - 1 for _, count in uses.most_common(slots))
    return (uses.total() - saved) / count_optimal_reads(shuffled, slots)


def compare(folder: Path, streams: int, tokens: int, rounds: int) -> str:
    """Measure a model with a number of streams and return a row of the table."""
    resident = load(folder, "bf16", "cpu")
    offloaded = load(folder, "bf16", "cpu", resident_experts=RESIDENT)
    mixture = resident.spec.feed_forward
    assert offloaded.expert_offloader is not None and isinstance(mixture, Experts)
    offloaded.expert_offloader.trace = trace = []
    ids = validation_ids(folder, resident)
    engines = {"resident": Engine(resident), "offloaded": Engine(offloaded)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    same = True
    for number in range(rounds):
        events = {}
        for name, engine in engines.items():
            events[name], elapsed = run_requests(engine, build_requests(ids, streams, tokens, number))
            seconds[name].append(elapsed)
        same = same and events["resident"] == events["offloaded"]
    stats = offloaded.expert_offloader.stats()
    slots = stats.resident_bytes * mixture.num_experts * resident.spec.num_layers // stats.total_bytes
    reads = stats.misses + stats.prefetched
    ratio = median(a / b for a, b in zip(seconds["resident"], seconds["offloaded"], strict=True))
    rate = streams * tokens / median(seconds["offloaded"])
    return (
        f"| {resident.spec.num_layers} × {mixture.num_experts} | {streams} | {rate:.1f} | {ratio:.2f} | "
        f"{reads / count_optimal_reads(trace, slots):.2f} | {bound_without_foresight(trace, slots):.2f} | "
        f"{stats.hits / (stats.hits + stats.misses):.0%} | {'yes' if same else 'NO'} |"
    )


def worker(folder: str, resident: str, tokens: int) -> None:
    """Generate; print the peak memory, the bytes of resident experts and of all experts. Runs in a child process."""
    torch.set_num_threads(THREADS)
    model = load(Path(folder), "bf16", "cpu", resident_experts=resident)
    run_requests(Engine(model), build_requests(validation_ids(Path(folder), model), 1, tokens, 0))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    assert model.expert_offloader is not None
    stats = model.expert_offloader.stats()
    print(json.dumps([peak, stats.resident_bytes, stats.total_bytes]))


def measure_memory(folder: Path, tokens: int) -> str:
    """Return a sentence with the peak memory, relative to a process with the fewest resident experts."""
    figures = []
    for resident in ("1%", RESIDENT, "100%"):
        script = "import sys; from bench.experts import worker; worker(*sys.argv[1:3], int(sys.argv[3]))"
        command = [sys.executable, "-c", script, str(folder), resident, str(tokens)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        figures.append(json.loads(output))
    (base, fewest, _), (peak, slots, total), (full_peak, _, _) = [[value / 1e6 for value in row] for row in figures]
    return (
        f"With {RESIDENT}, the slots take {slots:.0f} MB of the experts' {total:.0f} MB. Measured (peak memory relative"
        f" to a process with {fewest:.0f} MB of slots): {peak - base + fewest:.0f} MB, with all experts resident"
        f" {full_peak - base + fewest:.0f} MB. Whole process: {peak:.0f} MB, with all experts resident"
        f" {full_peak:.0f} MB."
    )


def run(argument: str = "") -> str:
    """Return the table as Markdown.

    Args:
        argument: `tiny` for a check of a few minutes; otherwise the folder of the trained mixture.
    """
    torch.set_num_threads(THREADS)
    tiny = argument == "tiny"
    tokens, rounds = (6, 1) if tiny else (TOKENS, ROUNDS)
    with tempfile.TemporaryDirectory() as place:
        grown = Path(place) / "grown"
        grow_model(find_smollm2(Path(place)), grown, GrowthOptions(experts=8, active=2, noise=0.3), "bf16")
        learned = train_mixture(Path(argument if argument and not tiny else place) / "trained", 3 if tiny else STEPS)
        rows = [compare(folder, streams, tokens, rounds) for folder in (grown, learned) for streams in STREAMS]
        memory = measure_memory(grown, tokens)
    columns = ["layers × experts", "streams", "tokens/s", "× all resident (target: 0.5)"]
    columns += ["bytes read × clairvoyant minimum (target: 1.3)", "lower bound without foresight"]
    columns += ["hit rate", "bitwise equal"]
    head = [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", memory])
