"""CPM-2's data sets, written from their description: every removed span is in the target, in order."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jingu.config.schema import RunConfig
from jingu.data.batch import Batch
from jingu.data.mixture import MixtureDataset
from jingu.data.objective import batch_function, build_objective
from jingu.data.open_sources import open_sources
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer, sentinel_tokens
from jingu.text.tokenizer_training import train_tokenizer

MARKED = 300
"""The first sentinel id: the size of the tokenizer when the files were written."""


def write(prefix: Path, documents: list[list[int]]) -> None:
    """Write Megatron's format in uint16 from its description; numbers that are too large wrap around, as they did."""
    lengths = [len(ids) for ids in documents]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(documents), len(documents) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(lengths)}q", *(2 * sum(lengths[:n]) for n in range(len(lengths))))
    index += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(ids).astype("<u2").tobytes() for ids in documents))
    Path(f"{prefix}.idx").write_bytes(index)


Span = list[int]
Document = list[tuple[list[int], Span]]
"""Alternating pairs of remaining and removed text."""


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    chance, result = np.random.default_rng(5), []
    for _ in range(40):
        pieces = chance.integers(1, 7)
        result.append(
            [
                (chance.integers(3, 200, chance.integers(1, 9)).tolist(), chance.integers(3, 200, 3).tolist())
                for _ in range(pieces)
            ]
        )
    return result


@pytest.fixture
def files(tmp_path: Path, documents: list[Document]) -> Path:
    contexts, targets, offsets = [], [], []
    for document in documents:
        contexts.append([id_ for n, (rest, _) in enumerate(document) for id_ in [*rest, MARKED + n]])
        spans = [[MARKED + n, *span] for n, (_, span) in enumerate(document)]
        targets.append([id_ for span in spans for id_ in span])
        offsets.append([x for n, span in enumerate(spans) for x in (sum(map(len, spans[:n])), len(span))])
    for kind, content in (("context", contexts), ("target", targets), ("target_offset", offsets)):
        write(tmp_path / f"story_document_{kind}", content)
    return tmp_path / "story_document"


def config_of(files: Path, **objective: Any) -> RunConfig:
    settings = {"type": "target_files", "first_sentinel": MARKED, "target_length": 40, **objective}
    data = {"data": {"path": str(files), "objective": settings}}
    return RunConfig.model_validate(
        data
        | {"batch": {"sequence_length": 31, "global_batch_size": 4}, "train": {"steps": 3}, "evaluation": {"every": 0}}
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(
        iter(["some text"]), 300, ["<|endoftext|>", *(f"<s_{n}>" for n in range(20)), *sentinel_tokens(3)]
    )


def opened(config: RunConfig, tokenizer: Tokenizer) -> tuple[MixtureDataset, Callable[[int, int, int], Batch]]:
    source = open_sources(config, tokenizer)
    return source, batch_function(source, build_objective(config, source, tokenizer))


def test_every_span_of_a_window_is_in_its_target(files: Path, documents: list[Document], tokenizer: Tokenizer) -> None:
    source, batch_of = opened(config_of(files, sentinel="<s_N>"), tokenizer)
    marks = [tokenizer.special_tokens[f"<s_{n}>"] for n in range(20)]
    stream: list[tuple[int | None, Span | None]] = []
    for document in documents:
        for rest, span in document:
            stream += [*((id_, None) for id_ in rest), (None, span)]
    seen = set()
    for step in range(len(stream) // 31 // 4):
        batch = batch_of(step, 0, 4)
        assert batch.source is not None
        _, _, starts = source.locate(step)
        for number, start in enumerate(starts.tolist()):
            window = [stream[(start + place) % len(stream)] for place in range(31)]
            expected, target, count = [], [], 0
            for id_, span in window:
                if span is None:
                    expected.append(id_)
                else:
                    expected.append(marks[count])
                    target += [marks[count], *span]
                    count += 1
            target.append(marks[count])
            assert batch.source.tokens[number].tolist() == expected
            assert batch.labels[number].tolist() == [*target, *[-100] * 40][:40]
            assert (
                batch.tokens[number, : len(target)].tolist()
                == [tokenizer.decoder_start_token_id, *target[:39]][: len(target)]
            )
            seen.update((start + place) % len(stream) for place in range(31))
    assert len(seen) > 0.8 * len(stream)
    assert batch.tokens[1:3].equal(batch_of(step, 1, 2).tokens)


def test_overflowed_offsets_are_restored(files: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    spans = [[MARKED + n, *range(3, 203)] for n in range(400)]
    write(tmp_path / "long_context", [[id_ for n in range(400) for id_ in (7, MARKED + n)]])
    write(tmp_path / "long_target", [[id_ for span in spans for id_ in span]])
    write(tmp_path / "long_target_offset", [[x for n in range(400) for x in (201 * n, 201)]])
    _, batch_of = opened(config_of(tmp_path / "long", sentinel="<s_N>", target_length=5000), tokenizer)
    for step in range(6):
        spans_there = (batch_of(step, 0, 4).labels >= 0).sum(1)
        assert set(spans_there.tolist()) <= {15 * 201 + 1, 16 * 201 + 1}


def test_incompatible_settings_are_refused(files: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(
        JinguError, match=r"objective\.sentinel: a sample needs \d+ sentinels, but the tokenizer has 3 by"
    ):
        opened(config_of(files), tokenizer)[1](0, 0, 4)
    with pytest.raises(
        JinguError, match=r"a sample needs 1 sentinel, but the tokenizer has 0 by that name\. Use short"
    ):
        opened(config_of(files, sentinel="<x_N>"), tokenizer)
    write(files.with_name("story_document_target_offset"), [[0, 4]])
    with pytest.raises(JinguError, match=r"target_offset\.idx: it has 1 document, but story_document_context has 40\."):
        open_sources(config_of(files, sentinel="<s_N>"), tokenizer)
    write(files.with_name("story_document_target_offset"), [[0, 4, 5, 2]] * 40)
    with pytest.raises(
        JinguError, match=r"target\.idx: document \d+ has no target for its id 30\d\. Copy the file again"
    ):
        opened(config_of(files, sentinel="<s_N>"), tokenizer)[1](0, 0, 4)
    files.with_name("story_document_target.bin").unlink()
    with pytest.raises(JinguError, match=r"story_document_target\.bin: the file cannot be read"):
        open_sources(config_of(files, sentinel="<s_N>"), tokenizer)
