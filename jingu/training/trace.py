"""Fingerprints of every module's output in the first step, with which `jingu verify` compares layouts.

The fingerprint of a token consists of a few fixed weighted sums of its features, so it is small. It is also linear: if
ranks divide the features, or each rank computes one summand of the output, the fingerprints of the ranks add up to that
of the whole output.

Shapes: B rows, T tokens, F features, P sums in a fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jingu.compat.torch import in_backward, without_dispatch_modes
from jingu.model.sharding_table import iterate_styles
from jingu.parallel.mesh import data_rank
from jingu.parallel.pipeline import ParallelModel

# Frequencies of the sines that are the weights of the sums, one per sum.
_FREQUENCIES = (1.0, 2**0.5, 3**0.5, 5**0.5)
NUM_SUMS = len(_FREQUENCIES)
# Mesh axes whose ranks have the same rows, and may divide tokens or features.
TOKEN_AXES = ("context", "tensor")


class Trace:
    """Records fingerprints of the outputs of this rank's modules in the first step, and writes them at the end.

    Args:
        folder: folder in which every rank writes a file.
        rows: number of rows of a step on this rank.
    """

    def __init__(self, folder: Path, rank: int, rows: int) -> None:
        self._file = folder / f"rank-{rank:05d}.safetensors"
        self._rows = rows
        self._records: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._features: dict[str, int] = {}
        self._summands: set[str] = set()
        self._position: dict[str, Any] = {}

    def attach(self, model: ParallelModel) -> None:
        """Register a forward hook on every module of this rank's stages."""
        mesh = model.sharding.mesh
        axes = {axis: (mesh.get_local_rank(axis), mesh[axis].size()) for axis in TOKEN_AXES}
        tensor_rank, tensor_ranks = axes["tensor"]
        self._position = {"first_row": data_rank(mesh) * self._rows, "axes": axes}
        for stage in model.stages:
            if tensor_ranks > 1:
                # If the input features of a matrix are divided, each rank computes one summand of its output. The sum
                # over ranks is computed outside the module.
                styles = iterate_styles(stage)
                self._summands |= {name for name, _, style in styles if style in ("row", "from_heads")}
            for name, module in stage.named_modules():
                if name and not isinstance(module, nn.ModuleList):
                    module.register_forward_hook(self._hook(name, tensor_rank))

    def _hook(self, name: str, tensor_rank: int) -> Any:
        """Return a forward hook that records the output of a module, until it has recorded the rows of one step."""

        @torch.no_grad()
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if in_backward():
                return  # activation checkpointing recomputes the module in the backward pass
            if isinstance(output, tuple):
                output = output[0]
            if not isinstance(output, Tensor) or output.dim() < 3:
                return
            records = self._records.setdefault(name, [])
            # Encoder and decoder may share an embedding, which is then called for both. Record only the first.
            is_other_side = bool(records) and records[0][0].shape[1] != output.shape[1]
            if is_other_side or sum(len(rows) for rows, _ in records) >= self._rows:
                return
            if isinstance(output, DTensor):
                output = output.full_tensor()
            output_BTF = output.flatten(2).double()
            features = output_BTF.shape[-1]
            self._features[name] = features
            # Without this, selective activation checkpointing would also save these matmuls.
            with without_dispatch_modes():
                whole_BTP = output_BTF @ _coefficients(features, 0, output.device)
                part_BTP = output_BTF @ _coefficients(features, tensor_rank * features, output.device)
            records.append((whole_BTP.cpu(), part_BTP.cpu()))

        return record

    def write(self) -> None:
        """Write all records to the file of this rank."""
        tensors = {}
        for name, records in self._records.items():
            tensors[f"{name}/whole"] = torch.cat([whole_BTP for whole_BTP, _ in records])
            tensors[f"{name}/part"] = torch.cat([part_BTP for _, part_BTP in records])
        self._file.parent.mkdir(parents=True, exist_ok=True)
        header = {**self._position, "features": self._features, "summands": sorted(self._summands)}
        save_file(tensors, self._file, {"header": json.dumps(header)})


def _coefficients(features: int, first: int, device: torch.device) -> Tensor:
    """Return the coefficients [F, P] of the sums, for features from `first` on.

    Their pattern is irregular, so that errors in the features hardly cancel out.
    """
    feature_F1 = torch.arange(first + 1, first + features + 1, dtype=torch.float64, device=device).unsqueeze(1)
    return torch.sin(feature_F1 * torch.tensor(_FREQUENCIES, dtype=torch.float64, device=device))


@dataclass(frozen=True)
class ModuleTrace:
    """The record of a module on one rank.

    Attributes:
        first_row: index of the rank's first row in the global batch.
        axes: the rank's index on each axis of `TOKEN_AXES`, and the size of the axis.
        features: number of features on this rank.
        is_summand: whether the ranks of `tensor` hold summands of the output.
        whole_BTP: fingerprints if this rank holds all features, numbered from 0.
        part_BTP: fingerprints if this rank holds a part of the features, numbered from `tensor` index × `features`.
    """

    first_row: int
    axes: dict[str, tuple[int, int]]
    features: int
    is_summand: bool
    whole_BTP: Tensor  # noqa: N815
    part_BTP: Tensor  # noqa: N815


def read_traces(folder: Path) -> dict[str, list[ModuleTrace]]:
    """Return the traces of all ranks by module.

    Modules are in the order in which they ran on the first rank, then those of further ranks.
    """
    traces: dict[str, list[ModuleTrace]] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["header"])
            axes = {axis: tuple(pair) for axis, pair in header["axes"].items()}
            for name, features in header["features"].items():
                tensors = [file.get_tensor(f"{name}/{kind}") for kind in ("whole", "part")]
                trace = ModuleTrace(header["first_row"], axes, features, name in header["summands"], *tensors)
                traces.setdefault(name, []).append(trace)
    return traces


def max_difference(first: Sequence[ModuleTrace], second: Sequence[ModuleTrace]) -> float | None:
    """Return the largest difference of a module's outputs in two layouts, as a share of the largest fingerprint.

    All copies on all ranks are compared.

    Args:
        first: traces of all ranks in one layout.
        second: traces of all ranks in the other layout.

    Returns:
        The difference; infinite if a part is missing or not finite. None if the shapes do not tell which tokens a rank
        holds.
    """
    features = max(trace.features for trace in (*first, *second))
    tokens = max(trace.whole_BTP.shape[1] for trace in (*first, *second))
    first_blocks = list(_global_blocks(first, features, tokens))
    second_blocks = list(_global_blocks(second, features, tokens))
    if not first_blocks or not second_blocks:
        return None
    # Assemble the whole output of the first layout, then compare each block of the second with it.
    rows = max(row + len(block_BTP) for row, _, block_BTP in first_blocks)
    whole_BTP = torch.full((rows, tokens, NUM_SUMS), torch.nan, dtype=torch.float64)
    for row, token, block_BTP in first_blocks:
        whole_BTP[row : row + block_BTP.shape[0], token : token + block_BTP.shape[1]] = block_BTP
    largest = 0.0
    for row, token, block_BTP in second_blocks:
        if block_BTP.numel():
            expected_BTP = whole_BTP[row : row + block_BTP.shape[0], token : token + block_BTP.shape[1]]
            difference = (expected_BTP - block_BTP).abs().max().nan_to_num(torch.inf)
            largest = max(largest, float(difference))
    return largest / max(float(whole_BTP.abs().max()), 1e-300)


def _global_blocks(traces: Sequence[ModuleTrace], features: int, tokens: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the first row, the first token and the fingerprints of all features, for every block of the output.

    Args:
        features: number of features of the whole output.
        tokens: number of tokens of a row.
    """
    # Fingerprints that add up to one block, by first row, first token and index on `context`.
    summands: dict[tuple[int, int, int], list[Tensor]] = {}
    for trace in traces:
        first_token, count = _token_range(trace, tokens)
        if first_token is None:
            return
        key = (trace.first_row, first_token, trace.axes["context"][0])
        if trace.is_summand:
            summands.setdefault(key, []).append(trace.whole_BTP[:, :count])
        elif trace.features == features:
            yield trace.first_row, first_token, trace.whole_BTP[:, :count]
        elif trace.features * trace.axes["tensor"][1] == features:
            summands.setdefault(key, []).append(trace.part_BTP[:, :count])
    for (row, token, _), parts in summands.items():
        yield row, token, torch.stack(parts).sum(0)


def _token_range(trace: ModuleTrace, tokens: int) -> tuple[int | None, int]:
    """Return the first token of a rank's block within the row, and the number of its tokens that are not padding.

    A row is padded so that it can be divided over the ranks of `context` and `tensor`. It is divided over `context`; in
    modules that treat tokens independently, such as norms, it is also divided over `tensor`.

    Args:
        tokens: number of tokens of a row, without this padding.

    Returns:
        (None, 0) if the size of the block does not tell.
    """
    size = trace.whole_BTP.shape[1]
    if size == tokens:
        return 0, tokens
    context, contexts = trace.axes["context"]
    tensor, tensors = trace.axes["tensor"]
    per_rank = -(-tokens // (contexts * tensors))
    if size == per_rank:
        first = (context * tensors + tensor) * per_rank
    elif size == per_rank * tensors:
        first = context * size
    else:
        return None, 0
    return first, max(0, min(size, tokens - first))
