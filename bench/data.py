"""The data layer: opening data sets, batches from a warm page cache, training steps, building.

Opening uses 64 shards of sparse files, which have the size of a real data set; only the header and the last entries of
each index are filled in. Building is compared with `datasets.map`: the same text, the same tokenizer, one process each,
and both write to disk.
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
from jingu.data.dataset import open_dataset
from jingu.data.mixture import MixtureDataset
from jingu.data.row_sources import WindowDataset
from jingu.data.mixture import plan_mixture
from jingu.runtime.device import peak_memory
cpu = torch.device("cpu")
before, started = peak_memory(cpu), time.perf_counter()
windows = WindowDataset(open_dataset(Path(sys.argv[1]), "train"), 2048, 0)
source = MixtureDataset((windows,), plan_mixture([(0, [1.0])], [None]), 8)
print(time.perf_counter() - started, (peak_memory(cpu) - before) // 1024)
"""


def create_sparse_dataset(folder: Path, tokens: int) -> Path:
    """Write a data set of `tokens` tokens in documents of 1,000, as sparse files."""
    from jingu.data.dataset_manifest import DatasetManifest, ShardEntry, SplitEntry
    from jingu.data.indexed_dataset import HEADER, MAGIC

    folder.mkdir()
    size = tokens // SHARDS
    documents = size // 1000
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
        counts = {"documents": documents, "tokens": size, "text_bytes": 0}
        files = {"bin_bytes": 4 * size, "idx_bytes": HEADER.size + 20 * documents + 8, "bin_xxh3": "", "idx_xxh3": ""}
        shards.append(ShardEntry(name=name, **counts, **files))
    manifest = {"tokenizer": "", "vocab_size": 100_000, "eos_token_id": 0, "dtype": "int32", "settings": {}}
    counts = {"empty": 0, "invalid": 0, "replaced": 0}
    DatasetManifest(**manifest, **counts, train=SplitEntry(shards=shards), validation=SplitEntry()).save(folder)
    return folder


def measure_open(parent: Path, sizes: dict[str, int], rounds: int) -> list[str]:
    """Return rows with the time and memory of opening data sets, each measured in a new process."""
    rows = []
    times = []
    for name, tokens in sizes.items():
        folder = create_sparse_dataset(parent / f"of-{tokens}", tokens // (SHARDS * 1000) * SHARDS * 1000)
        command = [sys.executable, "-c", OPEN, str(folder)]
        runs = [
            [float(word) for word in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]
            for _ in range(rounds)
        ]
        times.append(median(run[0] for run in runs))
        memory = median(run[1] for run in runs) / 1000
        rows.append(
            f"| opening {name} tokens in {SHARDS} shards | {times[-1] * 1000:.1f} ms, {memory:.1f} MB | 1 s, 1 MB |"
        )
    return [*rows, f"| larger / smaller | {times[-1] / times[0]:.2f} × | 1.2 × |"]


def create_dataset(folder: Path, tokens: int, vocab_size: int) -> Path:
    """Write a data set of random ids below `vocab_size`."""
    create_sparse_dataset(folder, tokens // (SHARDS * 1000) * SHARDS * 1000)
    noise = np.random.default_rng(0).integers(0, vocab_size, tokens // SHARDS, dtype=np.int32).tobytes()
    for path in folder.glob("*.bin"):
        size = path.stat().st_size
        path.write_bytes(noise[:size])
    return folder


def measure_batches(parent: Path, tokens: int, seconds: float) -> list[str]:
    """Return rows with the tokens/s of one process that reads micro-batches of 8, and the number of opened files."""
    from jingu.data.dataset import TokenDataset, open_dataset
    from jingu.data.mixture import MixtureDataset, plan_mixture
    from jingu.data.row_sources import WindowDataset

    folder = create_dataset(parent / "batches", tokens, 100_000)
    events: list[str] = []
    # An audit hook cannot be removed, so it is switched on and off.
    enabled = [False]

    def count_open(event: str, _arguments: Any) -> None:
        if enabled[0] and event == "open":
            events.append(event)

    sys.addaudithook(count_open)
    rows = []
    # Read batches with each reader for some seconds, at least 1,000 of them.
    for reader in ("mmap", "lazy", "cached"):
        dataset: TokenDataset = open_dataset(folder, "train", reader)
        windows = WindowDataset(dataset, SEQUENCE, 0)
        source = MixtureDataset((windows,), plan_mixture([(0, [1.0])], [None]), 8)
        events.clear()
        enabled[0] = True
        started = time.perf_counter()
        step = 0
        while time.perf_counter() - started < seconds or step < 1000:
            source.batch(step, 0, 8)
            step += 1
        rate = step * 8 * SEQUENCE / (time.perf_counter() - started) / 1e6
        enabled[0] = False
        target = f"20 M, {SHARDS}" if reader == "mmap" else ""
        rows.append(f"| {step:,} batches, {reader} | {rate:.0f} M tokens/s, {len(events)} files opened | {target} |")
    return rows


def measure_steps(parent: Path, tokens: int, rounds: int, steps: int) -> list[str]:
    """Return a row that compares training steps with real data to steps that repeat one batch.

    The model is that of `bench.train_step`. Groups of both kinds of steps alternate in one child process.
    """
    from bench.train_step import VOCABULARY

    folder = create_dataset(parent / "steps", tokens, VOCABULARY)
    command = [sys.executable, "-m", "bench.data", str(folder), str(rounds), str(steps)]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    ratios = [float(word) for word in process.stdout.split()]
    shown = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    return [f"| a training step with real data / with constant data | {median(ratios):.3f} ({shown}) | 1.01 |"]


def compare_steps(folder: Path, rounds: int, steps: int) -> None:
    """Print, for each round, the time of steps with real data relative to constant data. Runs in a child process."""
    import torch

    from bench.train_step import BATCH, SEQUENCE, THREADS, make_step
    from jingu.data.batch_prefetch import BatchPrefetcher
    from jingu.data.dataset import open_dataset
    from jingu.data.mixture import MixtureDataset, plan_mixture
    from jingu.data.row_sources import WindowDataset

    torch.set_num_threads(THREADS)
    source = MixtureDataset(
        (WindowDataset(open_dataset(folder, "train"), SEQUENCE, 0),), plan_mixture([(0, [1.0])], [None]), BATCH
    )
    prefetcher = BatchPrefetcher(source.batch, pin_memory=False)
    step = make_step("fp32", False)
    step_number = 0
    constant = source.batch(0, 0, BATCH)
    step(constant)
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(steps):
            step(constant)
        between = time.perf_counter()
        for _ in range(steps):
            step(prefetcher.batch(step_number, 0, BATCH))
            step_number += 1
        print((time.perf_counter() - between) / (between - started), flush=True)


def write_corpus(folder: Path, megabytes: float) -> Path:
    """Write a JSON Lines file of `megabytes` with the source of the standard library."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources]
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as stream:
        written = number = 0
        while written < megabytes * 1e6:
            text = texts[number % len(texts)][:4000]
            written += stream.write(json.dumps({"text": f"{number} {text}"}) + "\n")
            number += 1
    return folder / "corpus.jsonl"


def measure_build(parent: Path, megabytes: float) -> list[str]:
    """Return rows with the tokens/s per core of `jingu data build` and of batched `datasets.map`."""
    import torch

    from jingu.config.schema import RunConfig
    from jingu.data.build import build
    from jingu.data.dataset_manifest import DatasetManifest
    from jingu.runtime.device import peak_memory
    from jingu.text.tokenizer import Tokenizer
    from jingu.text.tokenizer_commands import train

    # Limit the tokenizer of both sides to one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    text = write_corpus(parent, megabytes)
    # jingu.
    settings: dict[str, Any] = {
        "tokenizer": {"path": str(parent / "tokenizer"), "vocab_size": 8000, "sample_bytes": 2_000_000},
        "data": {"input": str(text), "path": str(parent / "built"), "num_workers": 1},
    }
    config = RunConfig.model_validate(settings)
    with contextlib.redirect_stdout(io.StringIO()):
        train(config)
        started = time.process_time()
        build(config)
        jingu_seconds = time.process_time() - started
    manifest = DatasetManifest.load(parent / "built")
    assert manifest is not None
    tokens = manifest.train.tokens + manifest.validation.tokens
    peak = peak_memory(torch.device("cpu")) / 1e6
    rate = tokens / jingu_seconds / 1e6
    rows = [f"| `jingu data build`, one process | {rate:.2f} M tokens/s per core; at most {peak:.0f} MB | 1 GB |"]

    # datasets, with the tokenizer that jingu has trained.
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    fast = PreTrainedTokenizerFast.from_pretrained(str(parent / "tokenizer"))
    end = Tokenizer.load(parent / "tokenizer").eos_token_id
    started = time.process_time()
    corpus = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(parent / "cache"))
    mapped = corpus.map(
        lambda rows: {"ids": [[*ids, end] for ids in fast(rows["text"], add_special_tokens=False)["input_ids"]]},
        batched=True,
        remove_columns=["text"],
    )
    mapped.save_to_disk(str(parent / "mapped"))
    datasets_seconds = time.process_time() - started
    assert sum(map(len, mapped["ids"])) == tokens
    rate = tokens / datasets_seconds / 1e6
    rows.append(f"| `datasets.map`, batched, one process | {rate:.2f} M tokens/s per core | |")
    return [*rows, f"| jingu / datasets | {datasets_seconds / jingu_seconds:.2f} × | 1.5 × |"]


def run(size: str = "full") -> str:
    """Return the table as Markdown. Size `tiny` is a quick check without the training steps."""
    tiny = size == "tiny"
    sizes = {"1 billion": 10**9}
    if not tiny:
        sizes["1 trillion"] = 10**12
    tokens, seconds, megabytes = (640_000, 0.1, 0.3) if tiny else (64_000_000, 5.0, 40.0)
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        rows = [*measure_open(parent, sizes, 1 if tiny else 5), *measure_batches(parent, tokens, seconds)]
        if not tiny:
            rows += measure_steps(parent, tokens, 7, 6)
        rows += measure_build(parent, megabytes)
    return "\n".join(["| | | target |", "|---|---|---|", *rows])


if __name__ == "__main__":
    compare_steps(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
