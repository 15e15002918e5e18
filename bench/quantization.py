"""8-bit and 4-bit quantization compared with the default precision: speed of one stream of SmolLM2-135M, and quality.

The weights of the GGUF file are already quantized to 4 bits (Q4_1), and quantizing the same groups again would lose
almost nothing. So the hidden and intermediate dims are shuffled before quality is measured: the model is equivalent,
but every group of 32 contains other elements.
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

from bench.smollm2 import find_smollm2
from jingu.formats.models import open_model
from jingu.formats.stored_model import StoredModel, load_model
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load, use_byte_kernels
from jingu.infer.prepack import prepack_weights
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.quantize import quantize_blocks, quantize_embedding_and_head
from jingu.runtime.device import has_fast_bf16
from jingu.text.tokenizer import Tokenizer

KINDS, TOKENS, ROUNDS, LENGTH, WINDOWS, THREADS = ("fp32", "bf16", "int8", "int4"), 64, 3, 512, 8, 1


def shuffle_dims(stored: StoredModel) -> StoredModel:
    """Return an equivalent model with its hidden and intermediate dims in random order."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randperm(stored.spec.hidden_size, generator=generator)
    inner = torch.randperm(stored.spec.feed_forward.intermediate_size, generator=generator)

    def read(name: str) -> Tensor:
        weight = stored.read(name)
        if name.endswith(("norm.weight", "output.weight", "down.weight")):
            weight = weight[states]
        if name.endswith(("gate.weight", "up.weight")):
            weight = weight[inner]
        if name.endswith("down.weight"):
            return weight[:, inner]
        return weight if name.endswith(("norm.weight", "output.weight")) else weight[:, states]

    return replace(stored, read=read)


def log_probs(stored: StoredModel, kind: str, ids_WL: Tensor) -> Tensor:
    """Return log-probabilities [W, L, V] of windows of real text.

    Args:
        kind: a compute dtype, or `int8` or `int4`.
    """
    is_quantized = kind in ("int8", "int4")
    as_bytes = is_quantized and use_byte_kernels(stored.spec, torch.device("cpu"))
    dtype = torch.float32 if kind == "fp32" or as_bytes else torch.bfloat16

    def prepare(model: torch.nn.Module) -> None:
        if is_quantized:
            quantize_blocks(model, kind)
            quantize_embedding_and_head(model, dtype)

    model = load_model(stored, dtype, prepare=prepare)
    prepack_weights(model, as_bytes=as_bytes)
    with torch.no_grad():
        return torch.stack([model.logits(model(ids_L[None]))[0].float().log_softmax(-1) for ids_L in ids_WL])


def measure_quality(path: Path, windows: int) -> dict[str, tuple[float, float]]:
    """Return for each kind the bits per byte of text, and the KL divergence from fp32 in nats per token."""
    stored = open_model(path)
    tokenizer = Tokenizer.load(stored.tokenizer())
    text = (textwrap.__doc__ or "") + inspect.getsource(textwrap) + inspect.getsource(json.decoder)
    ids_WL = torch.tensor(tokenizer.encode(text)[: windows * LENGTH]).view(-1, LENGTH)
    size = sum(len(tokenizer.decode(ids_L[1:].tolist()).encode()) for ids_L in ids_WL)
    shuffled = shuffle_dims(stored)
    exact_WLV = log_probs(shuffled, "fp32", ids_WL)
    quality = {}
    for kind in KINDS:
        log_probs_WLV = exact_WLV if kind == "fp32" else log_probs(shuffled, kind, ids_WL)
        bits = -log_probs_WLV[:, :-1].gather(2, ids_WL[:, 1:, None]).sum().item() / math.log(2)
        divergence = (exact_WLV.exp() * (exact_WLV - log_probs_WLV)).sum(-1).mean().item()
        quality[kind] = (bits / size, divergence)
    return quality


def measure_speed(path: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds per token of one stream for each kind; the kinds alternate."""
    engines = {kind: Engine(load(path, kind, "cpu")) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, engine in engines.items():
            request = Request(
                engine.model.encode("The capital of France is"), SamplingParams(), tokens, ignore_eos=True
            )
            started = time.process_time()
            engine.generate([request])
            if number:
                seconds[kind].append((time.process_time() - started) / tokens)
    return seconds


def run(tiny: bool = False) -> str:
    """Return the table as Markdown. `tiny` is a check of half a minute."""
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as place:
        path = find_smollm2(Path(place))
        seconds = measure_speed(path, 8 if tiny else TOKENS, 1 if tiny else ROUNDS)
        quality = measure_quality(path, 1 if tiny else WINDOWS)
    default = "bf16" if has_fast_bf16(torch.device("cpu")) else "fp32"
    rows = [f"| | ms per token | × {default} (default) | bits per byte | KL from fp32 |", "|---|---|---|---|---|"]
    for kind in KINDS:
        speedup = median(a / b for a, b in zip(seconds[default], seconds[kind], strict=True))
        bits, divergence = quality[kind]
        rows.append(f"| {kind} | {1e3 * median(seconds[kind]):.1f} | {speedup:.2f} | {bits:.4f} | {divergence:.4f} |")
    return "\n".join(rows)
