"""Whole models with the gated delta rule in three of four layers, or in all, compared with a stack of attention layers.

All have as many active FLOPs per token at 2,048 tokens: the intermediate size of the plain stack makes up for the
difference. They alternate in one process, on one thread, in CPU time.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor

from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.prepack import prepack_weights
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.count import flops_per_token
from jingu.model.decoder import Decoder, build_model
from jingu.model.inputs import Inputs
from jingu.model.parameter_table import parameter_sizes
from jingu.model.resolve import find_family
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import init_weights
from jingu.runtime.device import retain_freed_memory
from jingu.text.tokenizer_training import train_tokenizer
from jingu.training.loss import linear_cross_entropy

VOCABULARY, STREAMS, ANSWER, ROUNDS = 2048, 16, 16, 3
LENGTHS = (2048, 4096, 8192, 16384)


def specs(width: int, layers: int, tokens: int) -> dict[str, ModelSpec]:
    """Return the specs of the models; all have as many active FLOPs at sequences of `tokens`."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "num_layers": layers, "max_position_embeddings": 32768}
    heads = width // 64
    sizes |= {"attention.num_heads": heads, "attention.num_kv_heads": heads, "attention.head_dim": 64}
    mixer = {
        "type": "gated_delta",
        "num_heads": heads,
        "num_key_heads": heads,
        "key_head_dim": 64,
        "value_head_dim": 64,
    }
    kinds = {"linear": {"mixer": mixer}, "full": {}}
    template = find_family("llama").template
    hybrid = replace_fields(
        template,
        **sizes,
        layer_kinds=kinds,
        layer_pattern=(["linear"] * 3 + ["full"]) * (layers // 4),
        **{"feed_forward.intermediate_size": 3 * width},
    )
    wanted = flops_per_token(hybrid, parameter_sizes(hybrid), tokens)

    def nearest(**fields: object) -> ModelSpec:
        candidates = (
            replace_fields(template, **sizes, **fields, **{"feed_forward.intermediate_size": size})
            for size in range(2 * width, 6 * width, 16)
        )
        return min(candidates, key=lambda spec: abs(flops_per_token(spec, parameter_sizes(spec), tokens) - wanted))

    return {"attention": nearest(), "3 of 4 delta rule": hybrid, "delta rule": nearest(mixer=mixer)}


def training_seconds(model: Decoder, tokens: int) -> float:
    """Return the CPU seconds of a forward and backward pass over a row."""
    ids_BT = torch.randint(VOCABULARY, (1, tokens))

    def loss(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return linear_cross_entropy(hidden_BTD, weight_VD, ids_BT)

    begin = time.process_time()
    total = model(Inputs(ids_BT), loss)
    total.sum().backward()
    model.zero_grad()
    return time.process_time() - begin


def decoding_seconds(engine: Engine, prompt: int) -> float:
    """Return the CPU seconds of a decoding step of `STREAMS` sequences after a prompt of this length."""
    ids = tuple(n % VOCABULARY for n in range(prompt))
    sampling = SamplingParams(temperature=1.0, seed=1)
    engine.submit(Request(ids, sampling, ANSWER, n=STREAMS, ignore_eos=True))
    before = engine.stats().generated_tokens
    while engine.stats().generated_tokens - before < STREAMS:
        engine.step()
    begin = time.process_time()
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return (time.process_time() - begin) / steps


def run(size: str = "") -> str:
    """Return the tables as Markdown; `tiny` measures short sequences once."""
    lengths, rounds, shape = ((128, 256), 1, (64, 4)) if size == "tiny" else (LENGTHS, ROUNDS, (256, 8))
    retain_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"])
    stacks = specs(*shape, lengths[0])
    models = {}
    for name, spec in stacks.items():
        models[name] = build_model(spec).train()
        init_weights(models[name], spec, 1)
    seconds: dict[tuple[str, int], float] = {}
    for tokens in lengths:
        for _ in range(rounds if tokens <= 4096 else 1):
            for name, model in models.items():
                value = training_seconds(model, tokens)
                seconds[name, tokens] = min(value, seconds.get((name, tokens), torch.inf))
    columns = " | ".join(f"{tokens:,} tokens" for tokens in lengths)
    table = [f"| training, tokens/s | {columns} | growth | × attention |", f"|---|{'---|' * len(lengths)}---|---|"]
    for name in models:
        rates = [tokens / seconds[name, tokens] for tokens in lengths]
        figures = " | ".join(f"{rate:,.0f}" for rate in rates)
        ratio = seconds["attention", lengths[0]] / seconds[name, lengths[0]]
        table.append(f"| {name} | {figures} | {rates[0] / rates[-1]:.2f} | {ratio:.2f} |")
    table += [
        "",
        f"| decoding, {STREAMS} streams after {lengths[-1]:,} tokens | ms a step | × attention |",
        "|---|---|---|",
    ]
    steps = {}
    for name, model in models.items():
        prepack_weights(model.eval())
        engine = Engine(
            InferenceModel(model, stacks[name], tokenizer),
            EngineSettings(max_num_seqs=STREAMS, prefill_chunk_size=1024, kv_cache_bytes=2 << 30),
        )
        steps[name] = median(decoding_seconds(engine, lengths[-1]) for _ in range(min(rounds, 2)))
        table.append(f"| {name} | {1000 * steps[name]:.1f} | {steps['attention'] / steps[name]:.2f} |")
    note = "Growth: time per token at the largest length relative to the smallest. × attention: at the smallest."
    return "\n".join([*table, "", note])


if __name__ == "__main__":
    print(run())
