"""What many tests share: a pool of ranks, a little real text with its tokenizer and data set, tiny runs over it."""

from __future__ import annotations

import os

# Tests start hundreds of processes, each of which would compile the package again. An empty text means no.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Before anything imports torch, here and in the processes that tests start: the machine has few cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gc
import heapq
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from jingu.config.schema import RunConfig
from tests.rank_pool import RankPool
from tests.skips import is_allowed_skip

if TYPE_CHECKING:
    from jingu.infer.request import Token
    from jingu.runtime.ranks import RankInfo

# How long an example takes says little on a busy or slow machine. The fast tests try fewer examples.
for _profile, _num_examples in (("quick", 25), ("thorough", 100)):
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_num_examples,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("thorough")

# Nothing here has to survive a power cut, and bringing it to the disk is a sixth of a tiny run's time.
os.fsync = lambda _: None

MakeRun = Callable[..., RunConfig]

TINY_LLAMA = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 42,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device-type", default=None, help="the device of tests that are marked cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples of property tests before their modules are imported, and keep what is compiled."""
    sys.dont_write_bytecode = False
    if config.option.markexpr == "not slow":
        hypothesis.settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `slow_tests.txt`. Raises UsageError for a line that names no test of a file collected whole."""
    lines = (config.rootpath / "tests" / "slow_tests.txt").read_text(encoding="utf-8").splitlines()
    names = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in names:
            item.add_marker("slow")
    if any("::" in argument for argument in config.args):
        return
    files = {item.nodeid.partition("::")[0] for item in items}
    unknown = {name for name in names if name.partition("::")[0] in files} - {item.nodeid for item in items}
    if unknown:
        raise pytest.UsageError(f"tests/slow_tests.txt names no test: {', '.join(sorted(unknown))}")


def fail_unknown_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that `tests/skips.py` does not allow into a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
    reason = reason.removeprefix("Skipped: ")
    if not is_allowed_skip(report.nodeid, reason):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped: {reason}. tests/skips.py says which tests may be skipped."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_unknown_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_unknown_skip(report)
    return report


def pytest_collection_finish() -> None:
    """What the tests' modules have imported stays: to look through all of it again and again is a tenth of the work.

    And runs that name no number of threads take one, as other tests take the other cores.
    """
    gc.freeze()
    if "jingu.runtime.ranks" in sys.modules:
        sys.modules["jingu.runtime.ranks"].num_usable_cores = lambda: 1  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes shared by the whole session; as many start as a call asks for first."""
    pool = RankPool()
    yield pool
    pool.close()


@dataclass(frozen=True)
class Library:
    """A corpus of real text, the tokenizer trained on it, and the data set built of it."""

    text: Path
    tokenizer: Path
    data: Path


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A few of the standard library's own source files; 389 entries, so that no number of ranks divides them."""
    from jingu.data.build import build
    from jingu.text.tokenizer_commands import train

    place = tmp_path_factory.mktemp("library")
    found = Library(place / "text", place / "tokenizer", place / "data")
    found.text.mkdir()
    for module in (heapq, shlex, textwrap, json.decoder, json.encoder):
        shutil.copy(str(module.__file__), found.text / f"{module.__name__}.py")
    config = tiny(found, place / "runs", {})
    train(config)
    build(config)
    return found


@pytest.fixture
def tiny_run(library: Library, tmp_path: Path) -> MakeRun:
    """Makes a configuration of a tiny run under `tmp_path`: `tiny_run({"parallel.zero_stage": 3}, name="a")`."""

    def make(changes: dict[str, Any] | None = None, **more: Any) -> RunConfig:
        return tiny(library, tmp_path / "runs", {**(changes or {}), **more})

    return make


def tiny(library: Library, runs: Path, changes: dict[str, Any]) -> RunConfig:
    """20 fp64 steps of 8 × 33 tokens of a 2-layer llama, 32 wide; `changes` go by dotted keys."""
    settings: dict[str, Any] = {
        "runs_dir": str(runs),
        "seed": 5,
        "tokenizer": {"path": str(library.tokenizer), "vocab_size": 389},
        "data": {
            "input": str(library.text),
            "path": str(library.data),
            "suffixes": [".py"],
            "validation_fraction": 0.2,
            "num_workers": 1,
        },
        "model": dict(TINY_LLAMA),
        "batch": {"sequence_length": 33, "global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "schedule": {"type": "cosine", "warmup": 3},
        "train": {"steps": 20, "log_every": 1, "compile": False, "hang_timeout": None},
        "precision": {"type": "fp64"},
        "device": {"type": "cpu", "threads": 1},
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0},
    }
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = deepcopy(value)  # or later keys would be written into what the caller holds
    if not {"schedule", "schedule.warmup"} & changes.keys():
        settings["schedule"]["warmup"] = min(3, settings["train"]["steps"])
    return RunConfig.model_validate(settings)


@pytest.fixture
def answer() -> Callable[..., list[Token]]:
    """Tokens that the engine generates: `answer(model, tokenizer, prompt_ids, max_tokens, …)`."""
    from jingu.infer.engine import Engine
    from jingu.infer.inference_model import InferenceModel
    from jingu.infer.request import Request
    from jingu.infer.sampling import SamplingParams

    def answer(
        model: Any,
        tokenizer: Any,
        prompt: list[int],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        end_ids: tuple[int, ...] = (),
        start_id: int = -1,
        **settings: Any,
    ) -> list[Token]:
        engine = Engine(
            InferenceModel(model, model.spec, tokenizer, eos_token_ids=end_ids, decoder_start_token_id=start_id)
        )
        engine.submit(Request(tuple(prompt), sampling or SamplingParams(), max_tokens, **settings))
        tokens = []
        while engine.busy:
            tokens += [event.token for event in engine.step() if event.token is not None]
        return tokens

    return answer


@pytest.fixture
def in_steps() -> Callable[..., Any]:
    """Scores [T, V] of a sequence that a cache takes in pieces: `resolve_steps(model, ids_T, sizes, source_BS)`."""
    import torch

    from jingu.infer.attention_backend import GatherBackend
    from jingu.infer.kv_cache import BlockTable, PagedKVCache, SequenceChunk, cache_reaches
    from jingu.model.inputs import Inputs

    def in_steps(model: Any, ids_T: Any, sizes: list[int], source_BS: Any = None) -> Any:
        pools = len(cache_reaches(model.spec))
        cache = PagedKVCache(model.spec, [12] * pools, 8, torch.device("cpu"), GatherBackend(model.spec))
        held = BlockTable([list(range(2, 12))] * pools)
        scores, first = [], 0
        for size in sizes:
            begins = source_BS is not None and not first
            part = SequenceChunk(held, first, ids_T[first : first + size].tolist())
            ids_BT, positions_BT, _ = cache.plan([part], held if begins else None)
            source = Inputs(source_BS) if begins else None
            inputs = Inputs(ids_BT, positions_BT, source=source, cache=cache)
            scores.append(model.logits(model(inputs))[0, :size])
            first += size
        return torch.cat(scores)

    return in_steps


def train_all(rank: int, world: int, configs: list[RunConfig]) -> list[int]:
    """Train runs one after another as a rank of a group that exists; returns their exit codes."""
    from jingu.runtime.signals import StopRequest
    from jingu.training.commands import train_on_rank

    with peak_unmeasured():
        return [train_on_rank(config, this_rank(rank, world), StopRequest()) for config in configs]


def this_rank(rank: int, world: int) -> RankInfo:
    import torch

    from jingu.runtime.ranks import RankInfo

    return RankInfo(rank, world, torch.device("cpu"))


@contextmanager
def peak_unmeasured() -> Iterator[None]:
    """Measuring a machine's peak takes longer than training these models."""
    from jingu.training import session

    measured = session.measure_peak_flops
    session.measure_peak_flops = lambda *_: 1e9
    try:
        yield
    finally:
        session.measure_peak_flops = measured


@pytest.fixture
def peak() -> Iterator[None]:
    """`peak_unmeasured` for a test."""
    with peak_unmeasured():
        yield


@pytest.fixture
def train_on(ranks: RankPool) -> Callable[..., None]:
    """`train_on(4, config, ...)` trains runs to their ends on so many ranks of the pool (1: in this process)."""

    def train(world: int, *configs: RunConfig) -> None:
        from jingu.training.commands import train as train_here

        if world == 1:
            with peak_unmeasured():
                assert [train_here(config) for config in configs] == [0] * len(configs)
        else:
            for config in configs:
                assert ranks.run(train_all, world, [config]) == [[0]] * world

    return train


@dataclass(frozen=True)
class Done:
    """A run, read back from its folder."""

    folder: Path

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.split("\n") if line]
        return [row for row in rows if kind is None or row["type"] == kind]

    def column(self, name: str, kind: str = "train") -> list[Any]:
        """One value of each line of a kind."""
        return [row[name] for row in self.lines(kind)]

    def checkpoint(self) -> Path:
        """The newest one."""
        from jingu.checkpoint.resume import find_latest

        found = find_latest(self.folder / "checkpoints")
        assert found.folder is not None and found.skipped == []
        return found.folder

    def tensors(self) -> dict[str, Any]:
        """All tensors of the newest checkpoint."""
        from jingu.checkpoint import save_folder, store

        folder = self.checkpoint()
        reader = store.CheckpointReader(folder)
        return {name: reader.read(name) for name in save_folder.tensor_names(folder)}


@pytest.fixture
def done() -> Callable[[RunConfig], Done]:
    """Reads a run back: `done(config).column("loss")`."""
    return lambda config: Done(Path(config.runs_dir) / config.name)


PLANNED_RUN = """
name: planned
model: {num_layers: 8, hidden_size: 256, num_heads: 8}
tokenizer: {vocab_size: 1000, path: nowhere}
batch: {sequence_length: 128, global_batch_size: 128, micro_batch_size: 1}
"""


@pytest.fixture
def plan_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a run's file and a machine's."""
    (tmp_path / "run.yaml").write_text(PLANNED_RUN)
    (tmp_path / "cluster.yaml").write_text("like: h100\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
