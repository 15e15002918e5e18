"""Matrices of 8 and 4 bits beside bf16: a single stream of SmolLM2-135M, and what the rounding costs.

The weights come in 4 bits already (Q4_1), which our 4 bits would find again; for the quality the dims of states and
feed-forwards are therefore shuffled: in bf16 the model says what it said, but every group of 32 holds other elements.
"""

from __future__ import annotations

import inspect
import json
import math
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.smollm2 import smollm2
from jingu.checkpoint.hub import OpenModel, load_model, open_model
from jingu.infer.arrange import arrange
from jingu.infer.engine import Engine
from jingu.infer.load import load
from jingu.infer.request import Request
from jingu.infer.sampling import Sampling
from jingu.model.quantised import round_blocks, round_ends
from jingu.text.tokenizer import Tokenizer

KINDS, TOKENS, ROUNDS, LENGTH, WINDOWS, THREADS = ("bf16", "int8", "int4"), 64, 3, 512, 8, 1


def shuffled(opened: OpenModel) -> OpenModel:
    """The same model, with the dims of its states and of its feed-forwards in another order."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randperm(opened.spec.width, generator=generator)
    inner = torch.randperm(opened.spec.feed_forward.size, generator=generator)

    def read(name: str) -> Tensor:
        weight = opened.read(name)
        if name.endswith(("norm.weight", "output.weight", "down.weight")):
            weight = weight[states]
        if name.endswith(("gate.weight", "up.weight")):
            weight = weight[inner]
        if name.endswith("down.weight"):
            return weight[:, inner]
        return weight if name.endswith(("norm.weight", "output.weight")) else weight[:, states]

    return replace(opened, read=read)


def scores(opened: OpenModel, kind: str, ids_WL: Tensor) -> Tensor:
    """Log-probabilities [W, L, V] of windows of real text."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16

    def prepare(model: torch.nn.Module) -> None:
        if kind in ("int8", "int4"):
            round_blocks(model, kind)
            round_ends(model, dtype)

    model = load_model(opened, dtype, prepare=prepare)
    arrange(model)
    with torch.no_grad():
        return torch.stack([model.logits(model(ids_L[None]))[0].float().log_softmax(-1) for ids_L in ids_WL])


def quality(path: Path, windows: int) -> dict[str, tuple[float, float]]:
    """Of each kind the bits per byte of text, and how far its probabilities are from fp32's (KL, in nats a token)."""
    opened = open_model(path)
    tokenizer = Tokenizer.load(opened.tokenizer())
    text = (textwrap.__doc__ or "") + inspect.getsource(textwrap) + inspect.getsource(json.decoder)
    ids_WL = torch.tensor(tokenizer.encode(text)[: windows * LENGTH]).view(-1, LENGTH)
    size = sum(len(tokenizer.decode(ids_L[1:].tolist()).encode()) for ids_L in ids_WL)
    mixed = shuffled(opened)
    exact = scores(mixed, "fp32", ids_WL)
    found = {}
    for kind in KINDS:
        these = scores(mixed, kind, ids_WL)
        told = -these[:, :-1].gather(2, ids_WL[:, 1:, None]).sum().item() / math.log(2) / size
        found[kind] = told, (exact.exp() * (exact - these)).sum(-1).mean().item()
    return found


def speeds(path: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Processor seconds a token of one stream, in turns."""
    engines = {kind: Engine(load(path, kind, "cpu")) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, engine in engines.items():
            request = Request(engine.loaded.encode("The capital of France is"), Sampling(), tokens, ignore_end=True)
            started = time.process_time()
            engine.run([request])
            if number:
                seconds[kind].append((time.process_time() - started) / tokens)
    return seconds


def run(tiny: bool = False) -> str:
    """The table, as Markdown; `tiny` shows in half a minute that it runs."""
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as place:
        path = smollm2(Path(place))
        seconds = speeds(path, 8 if tiny else TOKENS, 1 if tiny else ROUNDS)
        found = quality(path, 1 if tiny else WINDOWS)
    rows = ["| | ms a token | × bf16 | bits per byte | KL from fp32 |", "|---|---|---|---|---|"]
    for kind in KINDS:
        beside = median(a / b for a, b in zip(seconds["bf16"], seconds[kind], strict=True))
        told, divergence = found[kind]
        rows.append(f"| {kind} | {1e3 * median(seconds[kind]):.1f} | {beside:.2f} | {told:.4f} | {divergence:.4f} |")
    return "\n".join(rows)
