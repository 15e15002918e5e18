"""Generation with SmolLM2-135M on 2 threads, for one client and 16, in the default precision of the machine.

It is compared with transformers, with llama.cpp, and with the matmuls alone. `python -m bench infer=FOLDER` uses
llama.cpp from a folder in which `npm install --ignore-scripts node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64` was run.
llama.cpp reads the same GGUF file and computes with its 4-bit matrices. All sides alternate in one process, except
generate_batch, which runs last. Tokens/s are those of decoding, without prefill (generate_batch: including prefill).
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.smollm2 import find_smollm2

ONE_BY_ONE, MATMULS = "transformers' generate, one by one", "matmuls alone, PyTorch's own, 1 row"
CLIENTS, PROMPT, ANSWER, ROUNDS, THREADS = 16, 100, 64, 3, 2
SIZES = {"full": (CLIENTS, PROMPT, ANSWER, ROUNDS), "tiny": (4, 20, 5, 1)}


def run(llama: str = "", size: str = "full") -> str:
    """Return the table as Markdown.

    Args:
        llama: the folder in which node-llama-cpp is installed; empty: llama.cpp is left out.
        size: `full`, or `tiny` for a quick check.
    """
    import torch

    from jingu.infer.inference_model import load

    clients, prompt, answer, rounds = SIZES[size]
    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (clients, prompt), generator=generator).tolist()
    # Sides alternate; each round measures all of them.
    with TemporaryDirectory() as folder:
        path = find_smollm2(Path(folder))
        model = load(path)
        dtype = model.parameter.dtype
        reference = _load_transformers(path, Path(folder), dtype)
        quantized = {"int8": load(path, "int8"), "int4": load(path, "int4")}
        sides: dict[str, Callable[[], float]] = {
            "one client": lambda: _run_engine(model, prompts[:1], answer)[0],
            f"{clients} clients": lambda: _run_engine(model, prompts, answer)[0],
            ONE_BY_ONE: lambda: _run_transformers(reference, prompts[0], answer),
            MATMULS: lambda: _run_matmuls(model, 1, answer, packed=False),
            "matmuls alone, in the engine's layout, 1 row": lambda: _run_matmuls(model, 4, answer, packed=True) / 4,
            "one client, int8": lambda: _run_engine(quantized["int8"], prompts[:1], answer)[0],
            f"{clients} clients, int8": lambda: _run_engine(quantized["int8"], prompts, answer)[0],
            "one client, int4": lambda: _run_engine(quantized["int4"], prompts[:1], answer)[0],
            f"{clients} clients, int4": lambda: _run_engine(quantized["int4"], prompts, answer)[0],
            "one client of llama.cpp, 4 bits": lambda: _run_llama(llama, path, prompts[0], answer),
        }
        figures: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                figures[name].append(side())
    _, outside, empty = _run_engine(model, prompts, answer)
    bandwidth = _measure_bandwidth()
    # Last, because it slows down everything after it in this process.
    figures["transformers' generate_batch"] = [_run_generate_batch(reference, prompts, answer) for _ in range(rounds)]
    # The table, and the ratios with their targets.
    rates = {name: median(values) for name, values in figures.items()}
    one = rates["one client"]
    together = rates[f"{clients} clients"]
    bytes_per_token = dtype.itemsize * sum(rows * columns for rows, columns in _matrix_shapes(model))
    lines = ["| | tokens/s | × one client |", "|---|---|---|"]
    lines += [f"| {name} | {_format_rate(rate)} | {_format_rate(rate / one)} |" for name, rate in rates.items()]
    lines += [
        "",
        f"The default precision is {str(dtype).removeprefix('torch.')}. "
        f"One client reaches {one / rates[MATMULS]:.2f} of the rate of PyTorch's matmuls (target: 0.8) and "
        f"{one / rates[ONE_BY_ONE]:.2f} times the rate of transformers (target: 1.5). {clients} clients together reach "
        f"{together / one:.2f} times the rate of one (target: 6) and {together / rates[ONE_BY_ONE]:.2f} times the rate "
        "of transformers (target: 8).",
        "",
        f"Reading all weights at memory bandwidth ({bandwidth / 1e9:.1f} GB/s) would allow "
        f"{bandwidth / bytes_per_token:.0f} tokens/s for one client. With {clients} clients, {outside:.1%} of the time "
        f"is spent outside the model, and {empty:.1%} of the KV cache's blocks are empty.",
    ]
    return "\n".join(lines)


def _format_rate(rate: float) -> str:
    return "not installed" if math.isnan(rate) else f"{rate:.2f}"


def _run_engine(model: Any, prompts: list[list[int]], answer: int) -> tuple[float, float, float]:
    """Decode; return tokens/s, the share of time outside the model, and the share of empty positions in used blocks.

    Prefill is not measured.
    """
    from jingu.infer.engine import Engine
    from jingu.infer.request import Request
    from jingu.infer.sampling import SamplingParams

    engine = Engine(model)
    for prompt in prompts:
        engine.submit(Request(tuple(prompt), SamplingParams(), answer, ignore_eos=True))
    while engine.stats().generated_tokens < len(prompts):
        engine.step()
    before = engine.stats()
    start = time.perf_counter()
    empty_shares = []
    while engine.busy:
        engine.step()
        stats = engine.stats()
        if stats.used_blocks:
            positions = stats.used_blocks * engine.settings.tokens_per_block(engine.model)
            empty_shares.append(1 - stats.cached_tokens / positions)
    seconds = time.perf_counter() - start
    after = engine.stats()
    rate = (after.generated_tokens - before.generated_tokens) / seconds
    # Time in steps outside of forward passes.
    overhead = (after.step_seconds - after.forward_seconds) - (before.step_seconds - before.forward_seconds)
    return rate, overhead / seconds, sum(empty_shares) / len(empty_shares)


def _load_transformers(path: Path, folder: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from jingu.formats.export import convert

    convert(path, folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).eval()


def _run_transformers(model: Any, prompt: list[int], answer: int) -> float:
    """Return the tokens/s of decoding with transformers' generate: the time of one token (prefill) is subtracted."""
    import torch

    ids = torch.tensor([prompt])

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        return time.perf_counter() - start

    return (answer - 1) / (seconds(answer) - seconds(1))


def _run_generate_batch(model: Any, prompts: list[list[int]], answer: int) -> float:
    """Return the tokens/s of transformers' generate_batch, including prefill; NaN if it does not run here."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    try:
        outputs = model.generate_batch(prompts, generation_config=settings)
    except Exception as error:  # generate_batch is written for accelerators
        print(f"generate_batch: {error}")
        return math.nan
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return tokens / (time.perf_counter() - start) if tokens else math.nan


def _run_llama(folder: str, path: Path, prompt: list[int], answer: int) -> float:
    """Return the tokens/s of llama.cpp; NaN if it is not installed."""
    if not folder:
        return math.nan
    script = Path(__file__).with_name("llama.mjs")
    command = ["node", script, folder, path, str(THREADS), str(answer), json.dumps(prompt)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _matrix_shapes(model: Any) -> list[tuple[int, int]]:
    """Return the shapes [outputs, inputs] of all matrices that multiply a token."""
    spec = model.spec
    part, inner, width = spec.attention, spec.feed_forward.intermediate_size, spec.hidden_size
    heads = part.num_heads * part.head_dim
    block = [(heads + 2 * part.num_kv_heads * part.head_dim, width), (width, heads), (2 * inner, width), (width, inner)]
    return block * spec.num_layers + [(spec.vocab_size, width)]


def _run_matmuls(model: Any, rows: int, passes: int, *, packed: bool) -> float:
    """Return the rows/s of matmuls with random matrices of the model's shapes.

    Args:
        rows: rows of inputs per matmul.
        passes: number of passes over all matrices.
        packed: whether matrices are in the layout of the engine, rather than PyTorch's.
    """
    import torch

    from jingu.model.matmul_kernels import linear
    from jingu.model.quantized_weight import PrepackedWeight

    dtype = model.parameter.dtype
    weights = [torch.randn(shape).to(dtype) for shape in _matrix_shapes(model)]
    matrices = [PrepackedWeight.pack(weight) for weight in weights] if packed else weights
    inputs = {size: torch.randn(rows, size).to(dtype) for size in {weight.shape[1] for weight in weights}}
    with torch.inference_mode(not packed), torch.no_grad():
        for number in range(1 + passes):
            if number < 2:  # the first pass warms up
                start = time.perf_counter()
            for weight, matrix in zip(weights, matrices, strict=True):
                x = inputs[weight.shape[1]]
                linear(x, matrix) if packed else torch.nn.functional.linear(x, weight)
    return rows * passes / (time.perf_counter() - start)


def _measure_bandwidth() -> float:
    """Return the memory bandwidth in bytes/s when all threads of PyTorch read; the best of five trials."""
    import torch

    data = torch.ones(2**26)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best
