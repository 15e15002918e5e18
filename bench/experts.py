"""Mixtures of experts of which a quarter is resident, beside themselves with all of them in memory.

One is SmolLM2-135M grown to 8 experts a block, 2 a token, each a copy of the feed-forward with noise of 0.3 of its
standard deviation: 1.3 GB in bf16, but its routers are drawn from a seed. The other is small, and trained here, routers
and all. They continue real text, one stream and several together, both sides in one process and in turns. The least
bytes are what a clairvoyant (Belady) would have read for the same experts in the same order, with as many slots. Beside
them stands what no rule without foresight can be better than where one visit of a layer says nothing of its next: the
experts needed most often lie there all the time, the visits of each layer come in random order, and the clairvoyant
knows that order. Memory is measured in processes of their own.

`python -m bench experts=FOLDER` keeps the trained mixture in FOLDER, and takes it from there the next time.
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

from bench.precision import jingu
from bench.smollm2 import smollm2
from jingu.checkpoint.grow import grow
from jingu.data.dataset import open_dataset
from jingu.infer.engine import Engine
from jingu.infer.load import Loaded, load
from jingu.infer.request import Event, Request
from jingu.infer.sampling import Sampling
from jingu.model.spec import Experts

RESIDENT, STREAMS, TOKENS, PROMPT, ROUNDS, THREADS = "25%", (1, 2, 4, 8), 64, 24, 3, 2
STEPS = 800
CONFIG = """
name: mixture
tokenizer: {{path: tokenizer, vocabulary: 4096, sample_bytes: 4000000}}
data: {{input: text, path: data, suffixes: [.py], held_out: 0.03, invalid_utf8: skip}}
model:
  family: mixtral
  layers: 6
  width: 128
  heads: 2
  feed_forward: 128
  experts: {{number: 16, active: 2, balance: 0.01, balance_over: layer}}
batch: {{sequence_length: 256, global_size: 8}}
optimizer: {{type: adamw, lr: 2e-3}}
schedule: {{type: warmup-stable-decay, warmup: 0.03, decay: 0.5}}
train: {{steps: {steps}, compile: false}}
precision: {{type: fp32}}
device: {{type: cpu, threads: {threads}}}
evaluation: {{every: 0}}
checkpoint: {{every: 0}}
"""
Trace = Sequence[tuple[int, tuple[int, ...]]]


def trained(folder: Path, steps: int) -> Path:
    """A mixture that has learned to write Python from the standard library's source; all of it is in `folder`."""
    from examples.quickstart import collect

    if not (folder / "exported").exists():
        folder.mkdir(parents=True, exist_ok=True)
        collect(folder / "text")
        (folder / "run.yaml").write_text(CONFIG.format(steps=steps, threads=THREADS), encoding="utf-8")
        for words in ("tokenizer train run.yaml", "data build run.yaml", "train run.yaml"):
            jingu(folder, *words.split())
        jingu(folder, "export", "runs/mixture", "--to", "exported", "--dtype", "bf16")
    return folder / "exported"


def text_of(folder: Path, loaded: Loaded) -> list[int]:
    """Real text to be continued, which the trained mixture has not learned from: ids."""
    if not (folder.parent / "data").exists():
        return loaded.tokenizer.encode(Path(str(textwrap.__file__)).read_text(encoding="utf-8"))
    held_out = open_dataset(folder.parent / "data", "held_out")
    ids: list[int] = held_out.gather(np.array([0]), 8192)[0].tolist()
    return ids


def requests(ids: list[int], streams: int, tokens: int, first: int) -> list[Request]:
    """Pieces of a text, to be continued."""
    starts = [97 * (first * streams + number) for number in range(streams)]
    sampling = Sampling(temperature=0.8, seed=first)
    return [Request(tuple(ids[start : start + PROMPT]), sampling, tokens, ignore_end=True) for start in starts]


def answers(engine: Engine, asked: list[Request]) -> tuple[list[Event], float]:
    """All that is told, and seconds."""
    started = time.perf_counter()
    numbers = [engine.submit(request) for request in asked]
    told = []
    while engine.busy:
        told += engine.step()
    seconds = time.perf_counter() - started
    return [told_of for number in numbers for told_of in told if told_of.request == number], seconds


def least(trace: Trace, slots: int) -> int:
    """Experts that Belady's rule reads: it gives away the slot of the one that is needed last. Of what a visit needs,
    those that are there come first, then those that are needed again last: their slots can be had for the others. Tried
    against every order of small traces, it reads more than the least in 2% of them, mostly by one."""
    following, next_visit = list[dict[tuple[int, int], int]](), dict[tuple[int, int], int]()
    for visit, (layer, experts) in reversed([*enumerate(trace)]):
        following.append({(layer, expert): next_visit.get((layer, expert), len(trace)) for expert in experts})
        next_visit.update(dict.fromkeys(following[-1], visit))
    held, read = dict[tuple[int, int], int](), 0
    for needed in reversed(following):
        for key in sorted(needed, key=lambda key: (key not in held, -needed[key])):
            if key not in held:
                read += 1
                if len(held) == slots:
                    del held[max(held, key=held.__getitem__)]
            held[key] = needed[key]
    return read


def without_foresight(trace: Trace, slots: int) -> float:
    """Reads of the rule that keeps the most popular experts, as a multiple of the clairvoyant's, where the visits of
    each layer are in random order."""
    dice, by_layer = random.Random(0), dict[int, list[tuple[int, ...]]]()
    for layer, experts in trace:
        by_layer.setdefault(layer, []).append(experts)
    for visits in by_layer.values():
        dice.shuffle(visits)
    shuffled = [(layer, by_layer[layer].pop()) for layer, _ in trace]
    uses = Counter((layer, expert) for layer, experts in trace for expert in experts)
    kept = uses.most_common(slots)
    return (uses.total() - sum(count - 1 for _, count in kept)) / least(shuffled, slots)


def compare(folder: Path, streams: int, tokens: int, rounds: int) -> str:
    """A line of the table."""
    whole, some = load(folder, "bf16", "cpu"), load(folder, "bf16", "cpu", experts_resident=RESIDENT)
    assert some.residency is not None and isinstance(whole.spec.feed_forward, Experts)
    some.residency.trace, ids = [], text_of(folder, whole)
    seconds: dict[str, list[float]] = {"whole": [], "some": []}
    same = True
    engines = {"whole": Engine(whole), "some": Engine(some)}
    for number in range(rounds):
        told = {}
        for name, engine in engines.items():
            told[name], took = answers(engine, requests(ids, streams, tokens, number))
            seconds[name].append(took)
        same = same and told["whole"] == told["some"]
    stats, mixture, trace = some.residency.stats(), whole.spec.feed_forward, some.residency.trace
    slots = stats.resident_bytes * mixture.number * whole.spec.layers // stats.total_bytes
    read = stats.misses + stats.read_ahead
    ratio = median(a / b for a, b in zip(seconds["whole"], seconds["some"], strict=True))
    rate = streams * tokens / median(seconds["some"])
    return (
        f"| {whole.spec.layers} × {mixture.number} | {streams} | {rate:.1f} | {ratio:.2f} | "
        f"{read / least(trace, slots):.2f} | {without_foresight(trace, slots):.2f} | "
        f"{stats.hits / (stats.hits + stats.misses):.0%} | {'yes' if same else 'NO'} |"
    )


def worker(folder: str, resident: str, tokens: int) -> None:
    """Print the most memory (bytes) that generating took, and the size of the experts."""
    torch.set_num_threads(THREADS)
    loaded = load(Path(folder), "bf16", "cpu", experts_resident=resident)
    answers(Engine(loaded), requests(text_of(Path(folder), loaded), 1, tokens, 0))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    assert loaded.residency is not None
    stats = loaded.residency.stats()
    print(json.dumps([peak, stats.resident_bytes, stats.total_bytes]))


def memory(folder: Path, tokens: int) -> str:
    """Peak beside that of a process with the fewest experts: the difference is what the setting costs."""
    figures = []
    for resident in ("1%", RESIDENT, "100%"):
        words = [
            sys.executable,
            "-c",
            "import sys; from bench.experts import worker; worker(*sys.argv[1:3], int(sys.argv[3]))",
        ]
        told = subprocess.run(
            [*words, folder, resident, str(tokens)], check=True, capture_output=True, text=True
        ).stdout
        figures.append(json.loads(told))
    (base, fewest, _), (peak, stated, total), (all_, _, _) = figures
    used = (peak - base + fewest) / 1e6
    slots = f"With {RESIDENT} the slots are {stated / 1e6:.0f} MB of the experts' {total / 1e6:.0f} MB. "
    beside = f"Measured (peak of the process beside one with {fewest / 1e6:.0f} MB of slots): {used:.0f} MB, "
    all_told = f"with all resident {(all_ - base + fewest) / 1e6:.0f} MB. "
    return slots + beside + all_told + f"The whole process: {peak / 1e6:.0f} MB, with all {all_ / 1e6:.0f} MB."


def run(argument: str = "") -> str:
    """The table; `tiny` shows in some minutes that it runs, any other word is the trained mixture's folder."""
    torch.set_num_threads(THREADS)
    tiny = argument == "tiny"
    tokens, rounds = (6, 1) if tiny else (TOKENS, ROUNDS)
    with tempfile.TemporaryDirectory() as place:
        grown = Path(place) / "grown"
        grow(smollm2(Path(place)), grown, experts=8, active=2, noise=0.3, dtype="bf16")
        learned = trained(Path(argument if argument and not tiny else place) / "trained", 3 if tiny else STEPS)
        rows = [compare(folder, streams, tokens, rounds) for folder in (grown, learned) for streams in STREAMS]
        told = memory(grown, tokens)
    titles = ("layers × experts", "streams", "tokens/s", "× all resident (must: 0.5)")
    more = ("bytes × the clairvoyant least (must: 1.3)", "no rule without foresight less than")
    last = ("found resident", "same to the last bit")
    head = [f"| {' | '.join((*titles, *more, *last))} |", "|---|---|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", told])
