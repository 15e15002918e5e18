"""Generation with latent attention compared with grouped-query attention of as many active FLOPs per token.

Both are dense Llamas of 8 × 512 that differ in attention alone; the intermediate size makes up for the difference of
FLOPs. They alternate in one process, on one thread, in CPU time.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import stored_numbers
from jingu.infer.prepack import prepack_weights
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.count import generation_flops
from jingu.model.decoder import build_model
from jingu.model.parameter_table import parameter_sizes
from jingu.model.resolve import find_family
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer_training import train_tokenizer

VOCABULARY, PROMPT, ANSWER, ROUNDS = 8192, 512, 64, 5
LATENT = {
    "attention.head_dim": 96,
    "attention.value_dim": 64,
    "attention.num_kv_heads": 8,
    "attention.latent": {"rank": 128, "rotary_dim": 32},
}


def specs() -> dict[str, ModelSpec]:
    """Return the specs of both models."""
    attention = {"attention.num_heads": 8, "attention.num_kv_heads": 2, "attention.head_dim": 64}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_layers": 8, "max_position_embeddings": 1024}
    sizes["feed_forward.intermediate_size"] = 1536
    plain = replace_fields(find_family("llama").template, **sizes, **attention)
    wanted = generation_flops(plain, parameter_sizes(plain), PROMPT)
    candidates = (
        replace_fields(plain, **LATENT, **{"feed_forward.intermediate_size": size}) for size in range(512, 2049, 16)
    )
    latent = min(candidates, key=lambda spec: abs(generation_flops(spec, parameter_sizes(spec), PROMPT) - wanted))
    return {"grouped queries": plain, "latent": latent}


def one_round(engine: Engine, streams: int) -> float:
    """Return the CPU seconds of the decoding steps of a batch, without its prompts."""
    for number in range(streams):
        prompt = tuple((7 * n + number) % VOCABULARY for n in range(PROMPT))
        engine.submit(Request(prompt, SamplingParams(), ANSWER, ignore_eos=True))
    while engine.stats().generated_tokens % (streams * ANSWER) < streams:
        engine.step()
    begin = time.process_time()
    while engine.busy:
        engine.step()
    return time.process_time() - begin


def run() -> str:
    """Return the table as Markdown."""
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"])
    engines: dict[str, Engine] = {}
    numbers: dict[str, Any] = {}
    for name, spec in specs().items():
        model = build_model(spec)
        init_weights(model, spec, 1)
        prepack_weights(model.eval())
        engines[name] = Engine(InferenceModel(model, spec, tokenizer), EngineSettings(block_size=16))
        numbers[name] = sum(map(stored_numbers, spec.layers))
    rows = []
    for streams in (1, 16):
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                seconds[name].append(one_round(engine, streams))
        base = median(seconds["grouped queries"])
        for name, values in seconds.items():
            ratio = median(values) / base
            milliseconds = 1000 * median(values) / ANSWER
            rows.append(f"| {streams} | {name} | {milliseconds:.1f} | {ratio:.2f} | {numbers[name]:,} |")
    head = "| streams | attention | ms a step | × grouped queries (target 1.15) | numbers a token in the cache |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(run())
