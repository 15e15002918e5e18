"""The data layer: opening at any size, batches from a warm page cache, steps with them, building beside `datasets.map`.

Opening: sparse files of 64 shards, of which only the header and the last entry of each index hold anything, as a data
set of that size would have them. Building: the same text, the same tokenizer, one process each, both to the disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SHARDS = 64
SEQUENCE = 2048
OPEN = """
import sys, time
from pathlib import Path
import torch
from jingu.data.batches import BatchSource, Windows
from jingu.data.dataset import open_dataset
from jingu.data.mixture import plan_mixture
from jingu.runtime.device import peak_memory
cpu = torch.device("cpu")
before, started = peak_memory(cpu), time.perf_counter()
windows = Windows(open_dataset(Path(sys.argv[1]), "train"), 2048, 0)
source = BatchSource((windows,), plan_mixture([(0, [1.0])], [None]), 8)
print(time.perf_counter() - started, (peak_memory(cpu) - before) // 1024)
"""


def simulated(folder: Path, tokens: int) -> Path:
    """A data set of so many tokens in documents of 1,000, as sparse files."""
    from jingu.data.indexed import HEADER, MAGIC
    from jingu.data.manifest import Manifest, Shard, Split

    folder.mkdir()
    size, documents = tokens // SHARDS, tokens // SHARDS // 1000
    shards = []
    for number in range(SHARDS):
        name = f"train-{number:05d}"
        with (folder / f"{name}.bin").open("wb") as stream:
            stream.truncate(4 * size)
        with (folder / f"{name}.idx").open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, 1, 4, documents, documents + 1))
            stream.seek(HEADER.size + 4 * (documents - 1))
            stream.write(np.array([1000], "<i4").tobytes())
            stream.seek(HEADER.size + 12 * documents - 8)
            stream.write(np.array([4 * (size - 1000)], "<i8").tobytes())
            stream.truncate(HEADER.size + 20 * documents + 8)
        made = {"documents": documents, "tokens": size, "text_bytes": 0, "bin_xxh3": "", "idx_xxh3": ""}
        sizes = {"bin_bytes": 4 * size, "idx_bytes": HEADER.size + 20 * documents + 8}
        shards.append(Shard(name=name, **made, **sizes))
    manifest = {"tokenizer": "", "vocabulary": 100_000, "end_id": 0, "dtype": "int32", "settings": {}}
    counts = {"empty": 0, "invalid": 0, "replaced": 0}
    Manifest(**manifest, **counts, train=Split(shards=shards), held_out=Split()).save(folder)
    return folder


def opening(place: Path, sizes: dict[str, int], rounds: int) -> list[str]:
    """Time and memory to open, each time in a process of its own."""
    rows, times = [], []
    for name, tokens in sizes.items():
        folder = simulated(place / f"of-{tokens}", tokens // (SHARDS * 1000) * SHARDS * 1000)
        command = [sys.executable, "-c", OPEN, str(folder)]
        runs = [
            [float(word) for word in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]
            for _ in range(rounds)
        ]
        times.append(median(run[0] for run in runs))
        grown = median(run[1] for run in runs) / 1000
        rows.append(
            f"| opening {name} tokens in {SHARDS} shards | {times[-1] * 1000:.1f} ms, {grown:.1f} MB | 1 s, 1 MB |"
        )
    return [*rows, f"| the larger beside the smaller | {times[-1] / times[0]:.2f} × | 1.2 × |"]


def filled(folder: Path, tokens: int, vocabulary: int) -> Path:
    """A simulated data set that holds ids."""
    simulated(folder, tokens // (SHARDS * 1000) * SHARDS * 1000)
    noise = np.random.default_rng(0).integers(0, vocabulary, tokens // SHARDS, dtype=np.int32).tobytes()
    for path in folder.glob("*.bin"):
        size = path.stat().st_size
        path.write_bytes(noise[:size])
    return folder


def batches(place: Path, tokens: int, seconds: float) -> list[str]:
    """Tokens a second of one process in micro-batches of 8, and the files it opens meanwhile."""
    from jingu.data.batches import BatchSource, Windows
    from jingu.data.dataset import TokenDataset, open_dataset
    from jingu.data.mixture import plan_mixture

    folder = filled(place / "batches", tokens, 100_000)
    opened: list[str] = []
    counting = [False]
    sys.addaudithook(lambda event, arguments: opened.append(event) if counting[0] and event == "open" else None)
    rows = []
    for reading in ("mmap", "lazy", "cached"):
        dataset: TokenDataset = open_dataset(folder, "train", reading)
        windows = Windows(dataset, SEQUENCE, 0)
        source = BatchSource((windows,), plan_mixture([(0, [1.0])], [None]), 8)
        counting[0], opened[:] = True, []
        started, step = time.perf_counter(), 0
        while time.perf_counter() - started < seconds or step < 1000:
            source.batch(step, 0, 8)
            step += 1
        rate = step * 8 * SEQUENCE / (time.perf_counter() - started) / 1e6
        counting[0] = False
        found = f"{rate:.0f} M tokens/s, {len(opened)} files opened meanwhile"
        rows.append(f"| {step:,} batches, {reading} | {found} | {f'20 M, {SHARDS}' if reading == 'mmap' else ''} |")
    return rows


def stepping(place: Path, tokens: int, rounds: int, steps: int) -> list[str]:
    """Training steps (of `bench.train_step`'s model) with data from the loader beside steps with the same batch again

    and again; some of each in turn, in a process of its own.
    """
    from bench.train_step import VOCABULARY

    folder = filled(place / "stepping", tokens, VOCABULARY)
    command = [sys.executable, "-m", "bench.data", str(folder), str(rounds), str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    ratios = [float(word) for word in done.stdout.split()]
    shown = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    return [f"| a training step with real data / with constant data | {median(ratios):.3f} ({shown}) | 1.01 |"]


def steps_with_and_without(folder: Path, rounds: int, steps: int) -> None:
    """Child process: print the ratio of each round."""
    import torch

    from bench.train_step import BATCH, SEQUENCE, THREADS, trainer
    from jingu.data.batches import BatchSource, Windows
    from jingu.data.dataset import open_dataset
    from jingu.data.loader import Loader
    from jingu.data.mixture import plan_mixture

    torch.set_num_threads(THREADS)
    source = BatchSource(
        (Windows(open_dataset(folder, "train"), SEQUENCE, 0),), plan_mixture([(0, [1.0])], [None]), BATCH
    )
    loader, step, done = Loader(source.batch, pinned=False), trainer("fp32", False), 0
    constant = source.batch(0, 0, BATCH)
    step(constant)
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(steps):
            step(constant)
        between = time.perf_counter()
        for _ in range(steps):
            step(loader.batch(done, 0, BATCH))
            done += 1
        print((time.perf_counter() - between) / (between - started), flush=True)


def corpus(folder: Path, megabytes: float) -> Path:
    """Lines of JSON made of the standard library's own text."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources]
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as stream:
        written = number = 0
        while written < megabytes * 1e6:
            text = texts[number % len(texts)][:4000]
            written += stream.write(json.dumps({"text": f"{number} {text}"}) + "\n")
            number += 1
    return folder / "corpus.jsonl"


def building(place: Path, megabytes: float) -> list[str]:
    """Tokens a second and core, of `jingu data build` and of `datasets.map` with the same tokenizer in batches."""
    import torch

    from jingu.config.schema import RunConfig
    from jingu.data.build import build
    from jingu.data.manifest import Manifest
    from jingu.runtime.device import peak_memory
    from jingu.text.tokenizer import Tokenizer
    from jingu.text.verbs import train

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    text = corpus(place, megabytes)
    settings: dict[str, Any] = {
        "tokenizer": {"path": str(place / "tokenizer"), "vocabulary": 8000, "sample_bytes": 2_000_000},
        "data": {"input": str(text), "path": str(place / "built"), "workers": 1},
    }
    config = RunConfig.model_validate(settings)
    with contextlib.redirect_stdout(io.StringIO()):
        train(config)
        started = time.process_time()
        build(config)
        ours = time.process_time() - started
    manifest = Manifest.load(place / "built")
    assert manifest is not None
    tokens = manifest.train.tokens + manifest.held_out.tokens
    peak = peak_memory(torch.device("cpu")) / 1e6
    found = f"{tokens / ours / 1e6:.2f} M tokens/s a core; at most {peak:.0f} MB"
    rows = [f"| `jingu data build`, one process | {found} | 1 GB |"]
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    fast = PreTrainedTokenizerFast.from_pretrained(str(place / "tokenizer"))
    end = Tokenizer.load(place / "tokenizer").end_id
    started = time.process_time()
    loaded = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(place / "cache"))
    mapped = loaded.map(
        lambda rows: {"ids": [[*ids, end] for ids in fast(rows["text"], add_special_tokens=False)["input_ids"]]},
        batched=True,
        remove_columns=["text"],
    )
    mapped.save_to_disk(str(place / "mapped"))
    theirs = time.process_time() - started
    assert sum(map(len, mapped["ids"])) == tokens
    rows.append(f"| `datasets.map`, batched, one process | {tokens / theirs / 1e6:.2f} M tokens/s a core | |")
    return [*rows, f"| jingu beside datasets | {theirs / ours:.2f} × | 1.5 × |"]


def run(size: str = "full") -> str:
    """The table, as Markdown; `tiny` only shows that it runs, without the training steps."""
    tiny = size == "tiny"
    sizes = {"1 billion": 10**9} | ({} if tiny else {"1 trillion": 10**12})
    tokens, seconds, megabytes = (640_000, 0.1, 0.3) if tiny else (64_000_000, 5.0, 40.0)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        rows = [*opening(place, sizes, 1 if tiny else 5), *batches(place, tokens, seconds)]
        rows += [] if tiny else stepping(place, tokens, 7, 6)
        rows += building(place, megabytes)
    return "\n".join(["| | | must reach |", "|---|---|---|", *rows])


if __name__ == "__main__":
    steps_with_and_without(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
