"""Fingerprints of what every module gives in the first step, to compare layouts with.

A fingerprint of a token's features is a few fixed sums of them: small, and where ranks share the features, or each
has computed a part of a sum, the fingerprints add up to that of the whole.

Shapes: B rows, T tokens, F features, P sums.
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
from torch.utils._python_dispatch import _disable_current_modes

from jingu.model.sharding import styled
from jingu.parallel.mesh import data_rank
from jingu.parallel.pipeline import stages_of
from jingu.parallel.sharing import sharing_of

SUMS = 4
AXES = ("context", "tensor")
"""Mesh axes whose ranks see the same rows, and may share tokens or features."""


class Trace:
    """Notes outputs of a rank's modules until it has seen its rows of one step, and writes them at the end."""

    def __init__(self, folder: Path, rank: int, rows: int) -> None:
        self._file = folder / f"rank-{rank:05d}.safetensors"
        self._rows = rows
        self._found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._features: dict[str, int] = {}
        self._summands: set[str] = set()
        self._place: dict[str, Any] = {}

    def attach(self, model: nn.Module) -> None:
        """Begin to listen to the modules of a model, or of the stages of one that this rank has."""
        mesh = sharing_of(model).mesh
        axes = {axis: (mesh.get_local_rank(axis), mesh[axis].size()) for axis in AXES}
        self._place = {"first_row": data_rank(mesh) * self._rows, "axes": axes}
        for part in stages_of(model):
            if axes["tensor"][1] > 1:
                # Of a matrix whose inputs are divided each rank computes one summand, added up outside of the module.
                self._summands |= {name for name, _, style in styled(part) if style in ("row", "from_heads")}
            for name, module in part.named_modules():
                if name and not isinstance(module, nn.ModuleList):
                    module.register_forward_hook(self._listener(name, axes["tensor"][0]))

    def _listener(self, name: str, index: int) -> Any:
        @torch.no_grad()
        def listen(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # activation checkpointing computes it again, within the backward pass
            found = output[0] if isinstance(output, tuple) else output
            if not isinstance(found, Tensor) or found.dim() < 3:
                return
            notes = self._found.setdefault(name, [])
            # An embedding that two sides share is asked for both: the first one is followed.
            another = bool(notes) and notes[0][0].shape[1] != found.shape[1]
            if another or sum(len(note) for note, _ in notes) >= self._rows:
                return
            found_BTF = (found.full_tensor() if isinstance(found, DTensor) else found).flatten(2).double()
            self._features[name] = features = found_BTF.shape[-1]
            with _disable_current_modes():  # else selective activation checkpointing keeps these products, too
                whole, part = (found_BTF @ _sums(features, first, found.device) for first in (0, index * features))
            notes.append((whole.cpu(), part.cpu()))

        return listen

    def write(self) -> None:
        """Write what was found."""
        tensors = {}
        for name, notes in self._found.items():
            tensors[f"{name}/whole"] = torch.cat([whole for whole, _ in notes])
            tensors[f"{name}/part"] = torch.cat([part for _, part in notes])
        self._file.parent.mkdir(parents=True, exist_ok=True)
        place = json.dumps({**self._place, "features": self._features, "summands": sorted(self._summands)})
        save_file(tensors, self._file, {"place": place})


def _sums(features: int, first: int, device: torch.device) -> Tensor:
    """Coefficients [F, P] of the sums for features from `first` on: without a pattern that a mistake could share."""
    places_F1 = torch.arange(first + 1, first + features + 1, dtype=torch.float64, device=device).unsqueeze(1)
    return torch.sin(places_F1 * torch.tensor([1.0, 2**0.5, 3**0.5, 5**0.5], dtype=torch.float64, device=device))


@dataclass(frozen=True)
class Noted:
    """What one rank noted of a module."""

    first_row: int
    axes: dict[str, tuple[int, int]]
    features: int
    summand: bool
    """Whether the ranks of `tensor` hold summands of the output."""
    whole: Tensor
    """Fingerprints [B, T, P], the features counted from the first one on."""
    part: Tensor
    """The same, counted from where this rank stands on the axis `tensor`."""


def read_traces(folder: Path) -> dict[str, list[Noted]]:
    """By module, in the order in which modules gave their outputs on the ranks, the first rank's modules first."""
    modules: dict[str, list[Noted]] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            place = json.loads(file.metadata()["place"])
            axes = {axis: tuple(pair) for axis, pair in place["axes"].items()}
            for name, features in place["features"].items():
                noted = (file.get_tensor(f"{name}/{kind}") for kind in ("whole", "part"))
                modules.setdefault(name, []).append(
                    Noted(place["first_row"], axes, features, name in place["summands"], *noted)
                )
    return modules


def differences(first: Sequence[Noted], second: Sequence[Noted]) -> float | None:
    """Largest difference of a module's outputs in two layouts, as a share of the largest fingerprint; every copy
    that ranks hold is compared.

    Returns:
        None where the two cannot be laid over one another.
    """
    features = max(noted.features for noted in (*first, *second))
    tokens = max(noted.whole.shape[1] for noted in (*first, *second))
    placed = [list(_placed(side, features, tokens)) for side in (first, second)]
    if not all(placed):
        return None
    rows = max(row + len(values) for row, _, values in placed[0])
    whole_BTP = torch.full((rows, tokens, SUMS), torch.nan, dtype=torch.float64)
    for row, token, values in placed[0]:
        whole_BTP[row : row + values.shape[0], token : token + values.shape[1]] = values
    largest = 0.0
    for row, token, values in placed[1]:
        if not values.numel():
            continue
        apart = (whole_BTP[row : row + values.shape[0], token : token + values.shape[1]] - values).abs().max()
        largest = max(largest, float(apart.nan_to_num(torch.inf)))
    return largest / max(float(whole_BTP.abs().max()), 1e-300)


def _placed(side: Sequence[Noted], features: int, tokens: int) -> Iterator[tuple[int, int, Tensor]]:
    """First row, first token and fingerprints of the whole features, of every block that the ranks have noted."""
    shared: dict[tuple[int, int, int], list[Tensor]] = {}
    for noted in side:
        token, kept = _tokens(noted, tokens)
        if token is None:
            return
        parts = shared.setdefault((noted.first_row, token, noted.axes["context"][0]), [])
        if noted.summand:
            parts.append(noted.whole[:, :kept])
        elif noted.features == features:
            yield noted.first_row, token, noted.whole[:, :kept]
        elif noted.features * noted.axes["tensor"][1] == features:
            parts.append(noted.part[:, :kept])
    for row, token, context in [place for place, parts in shared.items() if parts]:
        parts = shared[row, token, context]
        yield row, token, torch.stack(parts).sum(0)


def _tokens(noted: Noted, tokens: int) -> tuple[int | None, int]:
    """Where the tokens of a block begin in the row and how many they are, without those that only fill it up.

    A row is filled up to divide over the ranks of `context` and `tensor`; then it is cut over `context`, and where
    tokens are treated one by one further over `tensor`.
    """
    held = noted.whole.shape[1]
    if held == tokens:
        return 0, tokens
    (context, contexts), (tensor, tensors) = noted.axes["context"], noted.axes["tensor"]
    per_rank = -(-tokens // (contexts * tensors))
    if held == per_rank:
        begin = (context * tensors + tensor) * per_rank
    elif held == per_rank * tensors:
        begin = context * held
    else:
        return None, 0
    return begin, max(0, min(held, tokens - begin))
