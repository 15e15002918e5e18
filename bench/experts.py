"""A mixture of experts of which a quarter is resident, beside itself with all of them in memory.

The model is SmolLM2-135M grown to 8 experts a block, 2 a token, each a copy of the feed-forward with noise of 0.3 of
its standard deviation: 1.3 GB in bf16. It continues real text, one stream and several together, both sides in one
process and in turns. The least bytes are what a clairvoyant (Belady) would have read for the same experts in the same
order, with as many slots. Beside them stands what no rule without foresight can be better than where one visit of a
layer says nothing of its next: the experts needed most often lie there all the time, the visits of each layer come in
random order, and the clairvoyant knows that order. Memory is measured in processes of their own.
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

import torch

from bench.smollm2 import smollm2
from jingu.checkpoint.grow import grow
from jingu.infer.engine import Engine
from jingu.infer.load import Loaded, load
from jingu.infer.request import Event, Request
from jingu.infer.sampling import Sampling

RESIDENT, EXPERTS, STREAMS, TOKENS, PROMPT, ROUNDS, THREADS = "25%", 8, (1, 2, 4, 8), 64, 24, 3, 2
Trace = Sequence[tuple[int, tuple[int, ...]]]


def requests(loaded: Loaded, streams: int, tokens: int, first: int) -> list[Request]:
    """Pieces of the standard library's source, to be continued."""
    ids = loaded.tokenizer.encode(Path(str(textwrap.__file__)).read_text(encoding="utf-8"))
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
    """Experts that Belady's rule reads: it gives away the slot of the one that is needed last."""
    uses = [(layer, expert) for layer, experts in trace for expert in experts]
    following, last = [0] * len(uses), dict[tuple[int, int], int]()
    for place in reversed(range(len(uses))):
        following[place] = last.get(uses[place], len(uses))
        last[uses[place]] = place
    held, read = dict[tuple[int, int], int](), 0
    for key, after in zip(uses, following, strict=True):
        if key not in held:
            read += 1
            if len(held) == slots:
                del held[max(held, key=held.__getitem__)]
        held[key] = after
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
    assert some.residency is not None
    some.residency.trace = []
    seconds: dict[str, list[float]] = {"whole": [], "some": []}
    same = True
    engines = {"whole": Engine(whole), "some": Engine(some)}
    for number in range(rounds):
        told = {}
        for name, engine in engines.items():
            told[name], took = answers(engine, requests(whole, streams, tokens, number))
            seconds[name].append(took)
        same = same and told["whole"] == told["some"]
    stats = some.residency.stats()
    slots = stats.resident_bytes * EXPERTS * len(some.model.blocks) // stats.total_bytes
    read = stats.misses + stats.read_ahead
    ratio = median(a / b for a, b in zip(seconds["whole"], seconds["some"], strict=True))
    rate = streams * tokens / median(seconds["some"])
    return (
        f"| {streams} | {rate:.1f} | {ratio:.2f} | {read / least(some.residency.trace, slots):.2f} | "
        f"{without_foresight(some.residency.trace, slots):.2f} | {stats.hits / (stats.hits + stats.misses):.0%} | "
        f"{'yes' if same else 'NO'} |"
    )


def worker(folder: str, resident: str, tokens: int) -> None:
    """Print the most memory (bytes) that generating took, and the size of the experts."""
    torch.set_num_threads(THREADS)
    loaded = load(Path(folder), "bf16", "cpu", experts_resident=resident)
    answers(Engine(loaded), requests(loaded, 1, tokens, 0))
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


def run(tiny: bool = False) -> str:
    """The table, as Markdown; `tiny` shows in a minute that it runs."""
    torch.set_num_threads(THREADS)
    tokens, rounds = (6, 1) if tiny else (TOKENS, ROUNDS)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "mixture"
        grow(smollm2(Path(place)), folder, experts=EXPERTS, active=2, noise=0.3, dtype="bf16")
        rows = [compare(folder, streams, tokens, rounds) for streams in STREAMS]
        told = memory(folder, tokens)
    titles = ("streams", "tokens/s", "× all resident (must: 0.5)", "bytes × the clairvoyant least (must: 1.3)")
    more = ("no rule without foresight less than", "found resident", "same to the last bit")
    head = [f"| {' | '.join((*titles, *more))} |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", told])
