"""Whole models with the gated delta rule in three of four layers, or in all, compared with a stack of attention layers.

All have as many active FLOPs per token at 2,048 tokens: the intermediate size of the plain stack makes up for the
difference. Times are CPU time on one thread.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor

from bench.children import measure_in_child
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.prepack import prepack_weights
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.count import flops_per_token
from jingu.model.decoder import build_model
from jingu.model.inputs import Inputs
from jingu.model.parameter_table import parameter_sizes
from jingu.model.resolve import find_family
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import init_weights
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


def training_seconds(spec: ModelSpec, tokens: int) -> float:
    """Return the CPU seconds of a forward and backward pass over a row: the shortest of `ROUNDS` after a first one.

    The first pass of a process maps the memory and builds the kernels, which a run does once.
    """
    model = build_model(spec).train()
    init_weights(model, spec, 1)
    ids_BT = torch.randint(VOCABULARY, (1, tokens))

    def loss(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return linear_cross_entropy(hidden_BTD, weight_VD, ids_BT)

    passes = []
    for _ in range(1 + (ROUNDS if tokens <= 4096 else 1)):
        begin = time.process_time()
        model(Inputs(ids_BT), loss).sum().backward()
        passes.append(time.process_time() - begin)
    return min(passes[1:])


def decoding_seconds(spec: ModelSpec, prompt: int) -> float:
    """Return the CPU seconds of a decoding step of `STREAMS` sequences after a prompt of this length."""
    model = build_model(spec)
    init_weights(model, spec, 1)
    prepack_weights(model.eval())
    tokenizer = train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"])
    settings = EngineSettings(max_num_seqs=STREAMS, prefill_chunk_size=1024, kv_cache_bytes=2 << 30)
    engine = Engine(InferenceModel(model, spec, tokenizer), settings)
    ids = tuple(n % VOCABULARY for n in range(prompt))
    engine.submit(Request(ids, SamplingParams(temperature=1.0, seed=1), ANSWER, n=STREAMS, ignore_eos=True))
    while engine.stats().generated_tokens < STREAMS:
        engine.step()
    begin = time.process_time()
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return (time.process_time() - begin) / steps


MEASURES = {"training": training_seconds, "decoding": decoding_seconds}


def run(size: str = "") -> str:
    """Return the tables as Markdown; `tiny` measures short rows of a small stack."""
    lengths, shape = ((128, 256), (64, 4)) if size == "tiny" else (LENGTHS, (256, 8))
    names = list(specs(*shape, lengths[0]))
    # Each measurement has a process of its own, so that none works in memory that another one has divided up.
    seconds = {
        (name, tokens): measure_in_child("hybrid_speed", "training", name, *shape, lengths[0], tokens)
        for tokens in lengths
        for name in names
    }
    columns = " | ".join(f"{tokens:,} tokens" for tokens in lengths)
    table = [f"| training, tokens/s | {columns} | growth | × attention |", f"|---|{'---|' * len(lengths)}---|---|"]
    for name in names:
        rates = [tokens / seconds[name, tokens] for tokens in lengths]
        figures = " | ".join(f"{rate:,.0f}" for rate in rates)
        ratio = seconds["attention", lengths[0]] / seconds[name, lengths[0]]
        table.append(f"| {name} | {figures} | {rates[0] / rates[-1]:.2f} | {ratio:.2f} |")
    table += ["", f"| decoding, {STREAMS} streams after {lengths[-1]:,} tokens | ms a step | × attention |"]
    table.append("|---|---|---|")
    steps = {
        name: measure_in_child("hybrid_speed", "decoding", name, *shape, lengths[0], lengths[-1]) for name in names
    }
    for name, step in steps.items():
        table.append(f"| {name} | {1000 * step:.1f} | {steps['attention'] / step:.2f} |")
    note = "Growth: time per token at the largest length relative to the smallest. × attention: at the smallest."
    return "\n".join([*table, "", note])


def main(measure: str, name: str, *numbers: str) -> None:
    """Print the seconds of one measurement.

    Args:
        numbers: width and layers of the stacks, the tokens at which their FLOPs are equal, and those of a sequence.
    """
    width, layers, compared, tokens = map(int, numbers)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(MEASURES[measure](specs(width, layers, compared)[name], tokens)))


if __name__ == "__main__":
    main(*sys.argv[1:])
