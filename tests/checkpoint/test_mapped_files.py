"""Tensors that are mapped from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.checkpoint.mapped_files import FileReader, FileRegion, file_region, map_tensor
from jingu.errors import JinguError


@settings(max_examples=50, deadline=None)
@given(
    places=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 300), st.integers(0, 90)), max_size=8),
    row=st.booleans(),
)
def test_tensors_are_filled_from_their_file_ranges(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[str, int, int]], row: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    stored = {name: bytes((7 * place + len(name)) % 251 for place in range(400)) for name in "ab"}
    for name, data in stored.items():
        (folder / name).write_bytes(data)
    if row:  # one after another in one file, told in another order
        ends = [sum(size for _, _, size in places[: number + 1]) for number in range(len(places))]
        places = [("a", min(300, end - size), size) for end, (_, _, size) in zip(ends, places, strict=True)][::-1]
    memories = [bytearray(size) for _, _, size in places]
    files = FileReader()
    for _ in range(2):
        files.read_into(
            [(FileRegion(folder / n, at), memoryview(own)) for (n, at, _), own in zip(places, memories, strict=True)]
        )
    assert [bytes(own) for own in memories] == [stored[name][at : at + size] for name, at, size in places]


def test_a_truncated_file(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(100))
    with pytest.raises(JinguError, match="shorter than it was"):
        FileReader().read_into([(FileRegion(tmp_path / "weights", 90), memoryview(bytearray(11)))])


def test_only_the_mapped_tensor_itself_has_a_file_range(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(torch.arange(12.0).numpy().tobytes())
    tensor = map_tensor(tmp_path / "weights", 8, torch.Size((2, 5)), torch.float32)
    assert file_region(tensor) == (tmp_path / "weights", 8)
    assert file_region(tensor.to(torch.float32)) == file_region(tensor)
    assert all(file_region(built) is None for built in (tensor.t(), tensor + 0, tensor[1], tensor.double()))
