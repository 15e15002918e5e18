"""Generation with SmolLM2-135M on 2 threads: one client and 16, beside transformers, llama.cpp and the products alone.

llama.cpp is node-llama-cpp's in a folder, `python -m bench infer=FOLDER`, made there with `npm install --ignore-scripts
node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64`. It reads the same GGUF file, and computes with matrices of 4 bits.
Every figure is of one process, the sides in turn, generate_batch last; tokens a second are those of the steps after
the prompts are read.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.smollm2 import smollm2

ONE_BY_ONE, PRODUCTS = "transformers' generate, one by one", "matrix products alone, PyTorch's own, 1 row"
CLIENTS, PROMPT, ANSWER, ROUNDS, THREADS = 16, 100, 64, 3, 2
SIZES = {"full": (CLIENTS, PROMPT, ANSWER, ROUNDS), "tiny": (4, 20, 5, 1)}


def run(llama: str = "", size: str = "full") -> str:
    """The table; `llama`: folder of node-llama-cpp."""
    import torch

    from jingu.infer.load import load

    clients, prompt, answer, rounds = SIZES[size]
    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (clients, prompt), generator=generator).tolist()
    with TemporaryDirectory() as folder:
        path = smollm2(Path(folder))
        loaded, theirs = load(path, "bf16"), _transformers(path, Path(folder))
        few = {"int8": load(path, "int8"), "int4": load(path, "int4")}
        sides: dict[str, Callable[[], float]] = {
            "one client": lambda: _ours(loaded, prompts[:1], answer)[0],
            f"{clients} clients": lambda: _ours(loaded, prompts, answer)[0],
            ONE_BY_ONE: lambda: _theirs(theirs, prompts[0], answer),
            PRODUCTS: lambda: _products(loaded, 1, answer, packed=False),
            "matrix products alone, as the engine has them, 1 row": lambda: (
                _products(loaded, 4, answer, packed=True) / 4
            ),
            "one client, int8": lambda: _ours(few["int8"], prompts[:1], answer)[0],
            "one client, int4": lambda: _ours(few["int4"], prompts[:1], answer)[0],
            "one client of llama.cpp, 4 bits": lambda: _llama(llama, path, prompts[0], answer),
        }
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                found[name].append(side())
    (outside, waste), bandwidth = _ours(loaded, prompts, answer)[1:], _bandwidth()
    # It leaves something behind that slows what follows in the process.
    found["transformers' generate_batch"] = [_theirs_together(theirs, prompts, answer) for _ in range(rounds)]
    rates = {name: median(values) for name, values in found.items()}
    lines = ["| | tokens a second | of one client |", "|---|---|---|"]
    one, together = rates["one client"], rates[f"{clients} clients"]
    lines += [f"| {name} | {_number(rate)} | {_number(rate / one)} |" for name, rate in rates.items()]
    bytes_a_token = 2 * sum(o * i for o, i in _shapes(loaded))
    lines += [
        "",
        f"One client has {one / rates[PRODUCTS]:.2f} of the rate of PyTorch's products (must be 0.8) and "
        f"{one / rates[ONE_BY_ONE]:.2f} times that of transformers (1.5). Together {clients} have {together / one:.2f} "
        f"times that of one (6) and {together / rates[ONE_BY_ONE]:.2f} times that of transformers (8).",
        "",
        f"Reading all weights at the memory's speed ({bandwidth / 1e9:.1f} GB/s) would allow "
        f"{bandwidth / bytes_a_token:.0f} tokens a second to one client. With {clients} clients, {outside:.1%} of the "
        f"time is outside of the model, and {waste:.1%} of the cache's pages are empty.",
    ]
    return "\n".join(lines)


def _number(rate: float) -> str:
    return "not here" if rate != rate else f"{rate:.2f}"


def _ours(loaded: Any, prompts: list[list[int]], answer: int) -> tuple[float, float, float]:
    """Tokens a second; the share of time outside the model; and the share of pages' places that hold nothing."""
    from jingu.infer.engine import Engine
    from jingu.infer.request import Request
    from jingu.infer.sampling import Sampling

    engine = Engine(loaded)
    for prompt in prompts:
        engine.submit(Request(tuple(prompt), Sampling(), answer, ignore_end=True))
    while engine.stats().generated_tokens < len(prompts):
        engine.step()
    before, start, wastes = engine.stats(), time.perf_counter(), []
    while engine.busy:
        engine.step()
        stats = engine.stats()
        if stats.pages_used:
            places = stats.pages_used * engine.settings.page_tokens
            wastes.append(1 - stats.cached_tokens / places)
    seconds, after = time.perf_counter() - start, engine.stats()
    rate = (after.generated_tokens - before.generated_tokens) / seconds
    return rate, (after.other_seconds - before.other_seconds) / seconds, sum(wastes) / len(wastes)


def _transformers(path: Path, folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from jingu.checkpoint.verbs import convert

    convert(path, folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).eval()


def _theirs(model: Any, prompt: list[int], answer: int) -> float:
    import torch

    ids = torch.tensor([prompt])

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        return time.perf_counter() - start

    return (answer - 1) / (seconds(answer) - seconds(1))


def _theirs_together(model: Any, prompts: list[list[int]], answer: int) -> float:
    """With the reading of prompts; not a number where it does not run."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    try:
        made = model.generate_batch(prompts, generation_config=settings)
    except Exception as error:  # it is written for accelerators
        print(f"generate_batch: {error}")
        return float("nan")
    tokens = sum(len(each.generated_tokens) for each in made.values())
    return tokens / (time.perf_counter() - start) if tokens else float("nan")


def _llama(folder: str, path: Path, prompt: list[int], answer: int) -> float:
    """Not a number where it is not installed."""
    if not folder:
        return float("nan")
    script = Path(__file__).with_name("llama.mjs")
    words = ["node", script, folder, path, str(THREADS), str(answer), json.dumps(prompt)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def _shapes(loaded: Any) -> list[tuple[int, int]]:
    spec = loaded.spec
    part, inner, width = spec.attention, spec.feed_forward.size, spec.width
    heads = part.heads * part.head_size
    block = [(heads + 2 * part.kv_heads * part.head_size, width), (width, heads), (2 * inner, width), (width, inner)]
    return block * spec.layers + [(spec.vocabulary, width)]


def _products(loaded: Any, rows: int, passes: int, *, packed: bool) -> float:
    """Rows a second that pass through products with matrices of the model's shapes, as often as there are tokens in an
    answer."""
    import torch

    from jingu.model.packed import Reordered
    from jingu.model.products import linear

    weights = [torch.randn(shape).to(torch.bfloat16) for shape in _shapes(loaded)]
    used = [Reordered.of(weight) for weight in weights] if packed else weights
    inputs = {size: torch.randn(rows, size).to(torch.bfloat16) for size in {weight.shape[1] for weight in weights}}
    with torch.inference_mode(not packed), torch.no_grad():
        for number in range(1 + passes):
            if number < 2:  # the first warms up
                start = time.perf_counter()
            for weight, matrix in zip(weights, used, strict=True):
                x = inputs[weight.shape[1]]
                linear(x, matrix) if packed else torch.nn.functional.linear(x, weight)
    return rows * passes / (time.perf_counter() - start)


def _bandwidth() -> float:
    """Bytes a second that two threads read."""
    import torch

    data = torch.ones(2**26)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best
