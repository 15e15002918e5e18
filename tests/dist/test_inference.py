"""The engine generates the same on ranks that share a model as on one process: 2 and 4 ranks, and a pipeline."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from jingu.config.sections.model import MixerSettings, ModelSettings
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.infer.distributed import DistributedEngine, distributed_engine
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import load
from jingu.infer.request import Event, Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import build_model
from jingu.model.experts import GroupedLinear
from jingu.model.layers import Linear
from jingu.model.quantized_weight import PrepackedQuantizedWeight
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer_training import train_tokenizer
from tests.conftest import this_rank
from tests.limits import PATIENCE
from tests.rank_pool import RankPool

SETTINGS = EngineSettings(max_num_seqs=3, prefill_chunk_size=16)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_kv_heads": 2},
    "gpt2": {"family": "gpt2"},
    "mixtral": {"family": "mixtral", "num_kv_heads": 2},
}
FEW: dict[str, dict[str, Any]] = {
    f"few-{name}": {**settings, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 288}
    for name, settings in FAMILIES.items()
}
"""Models whose matrices can be quantized, also if two ranks share them."""
STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"family": "lfm2", "num_kv_heads": 2},
    "qwen3_5_text": {
        "family": "qwen3_5_text",
        "num_kv_heads": 2,
        "head_dim": 8,
        "mixer": MixerSettings(num_heads=4, num_key_heads=2, key_head_dim=8, value_head_dim=6),
    },
}
LAYOUTS = {
    "llama": [(2, 1), (4, 1), (4, 2)],
    "gpt2": [(2, 1)],
    "mixtral": [(2, 1)],
    "lfm2": [(2, 1)],
    "qwen3_5_text": [(2, 1), (4, 2)],
}
"""Ranks and pipeline stages."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models as Hugging Face folders."""
    place = tmp_path_factory.mktemp("shared")
    tokenizer = train_tokenizer(iter(["the stop is near, the end is far. " * 3, "的数据 🙂"]), 281, ["<|endoftext|>"])
    tokenizer.save(place / "tokenizer")
    for name, settings in {**FAMILIES, **FEW, **STATES}.items():
        spec = spec_from_settings(
            ModelSettings(**{"hidden_size": 24, "num_heads": 4, "num_layers": 3, "initializer_range": 0.4, **settings}),
            tokenizer.vocab_size,
            64,
        )
        model = build_model(spec)
        init_weights(model, spec, 1)
        export_hf(spec, model.state_dict().__getitem__, place / "tokenizer", place / name)
        if name == "llama":
            write_adapter(place / "adapter", spec)
    return {name: place / name for name in (*FAMILIES, *FEW, *STATES)}


def write_adapter(folder: Path, spec: ModelSpec) -> None:
    """Write LoRA in the format of peft, for matrices that are divided by heads, outputs and inputs."""
    part, size, random = spec.attention, spec.feed_forward.intermediate_size, torch.Generator().manual_seed(1)
    outputs, inputs = part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
    shapes = {
        "self_attn.q_proj": (outputs, spec.hidden_size),
        "self_attn.v_proj": (inputs, spec.hidden_size),
        "self_attn.o_proj": (spec.hidden_size, outputs),
        "mlp.up_proj": (size, spec.hidden_size),
        "mlp.down_proj": (spec.hidden_size, size),
    }
    tensors = {}
    for layer in range(spec.num_layers):
        for name, (rows, columns) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(3, columns, generator=random)
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, 3, generator=random) / 5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [name.rpartition(".")[2] for name in shapes]
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": names, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def requests(adapter: str | None) -> list[Request]:
    """Return greedy and sampled requests: common prefixes, choices, a stop string, penalties, a bias of -inf."""
    alike = tuple(range(5, 36))
    bias = {7: float("-inf"), 9: 1.5}
    return [
        Request((9, 4, 30), SamplingParams(), 10, ignore_eos=True, logprobs=2, adapter=adapter),
        Request((*alike, 3), SamplingParams(temperature=0.9, seed=4), 7, n=2, ignore_eos=True),
        Request(
            (*alike, 8, 1),
            SamplingParams(temperature=1.1, top_k=40, top_p=0.9, seed=5),
            6,
            ignore_eos=True,
            adapter=adapter,
        ),
        Request(
            (), SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logit_bias=bias), 8, stop=("zz" * 700,)
        ),
    ]


def answers(engine: Engine | DistributedEngine) -> list[list[Any]]:
    """Return tokens, log-probabilities and finish reasons; two requests join late, and one is cancelled."""
    events: dict[int, list[Event]] = {}
    first, second, *later = requests(next(iter(engine.model.adapters.names), None))
    order = [engine.submit(first), engine.submit(second)]
    given_up = engine.submit(first)
    steps = 0
    while engine.busy:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        steps += 1
        if steps == 4:
            order += [engine.submit(request) for request in later]
            engine.cancel(given_up)
            with pytest.raises(JinguError):
                engine.submit(Request((1,) * 100, SamplingParams(), 10))
    assert [event.finish_reason for event in events[given_up] if event.finish_reason] == ["cancelled"]
    return [
        [
            (e.choice, e.token.id if e.token else None, e.token.logprob if e.token else None, e.finish_reason)
            for e in events[each]
        ]
        for each in order
    ]


def adapters_of(folder: Path) -> dict[str, Path]:
    return {"small": folder.parent / "adapter"} if folder.name == "llama" else {}


def shared_answers(rank: int, world: int, folder: Path, pipeline: int) -> list[list[Any]] | None:
    ranks = this_rank(rank, world)
    loaded = load(folder, "fp64", adapters=adapters_of(folder), ranks=ranks, pipeline=pipeline)
    engine = Engine(loaded, SETTINGS)
    with distributed_engine(engine, ranks) as leader:
        return None if leader is None else [*answers(leader), *answers(leader)]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gpt2", "mixtral", *STATES])
def test_ranks_generate_what_one_process_generates(family: str, folders: dict[str, Path], ranks: RankPool) -> None:
    engine = Engine(load(folders[family], "fp64", "cpu", adapters_of(folders[family])), SETTINGS)
    expected = [*answers(engine), *answers(engine)]
    if engine.model.adapters.names:
        assert expected[0] != answers(Engine(load(folders[family], "fp64", "cpu"), SETTINGS))[0]
    for world, pipeline in LAYOUTS[family]:
        actual, *others = ranks.run(shared_answers, world, folders[family], pipeline)
        assert others == [None] * (world - 1)
        assert actual is not None
        for events, expected_events in zip(actual, expected, strict=True):
            assert [each[:2] + each[3:] for each in events] == [each[:2] + each[3:] for each in expected_events], (
                world,
                pipeline,
            )
            for (*_, logprob, _), (*_, right, _) in zip(events, expected_events, strict=True):
                assert logprob == pytest.approx(right, abs=1e-9)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_ranks_share_quantized_matrices(precision: Any, folders: dict[str, Path], ranks: RankPool) -> None:
    """They are quantized before they are shared, as on one process; only sums over ranks are rounded differently."""
    for name, layouts in {"few-llama": [(2, 1)], "few-mixtral": [(2, 1)], "few-gpt2": [(2, 2), (4, 2)]}.items():
        expected = quantized_answers(folders[name], precision)
        for world, pipeline in layouts:
            actual = ranks.run(quantized_answers_on_rank, world, folders[name], precision, pipeline)[0]
            for (id_, logprob), (right_id, right) in zip(actual, expected, strict=True):
                assert id_ == right_id and logprob == pytest.approx(right, abs=1e-3), (name, world, pipeline)


def quantized_answers(folder: Path, precision: Any, ranks: Any = None, pipeline: int = 1) -> list[Any]:
    """Return greedy tokens and their log-probabilities, computed in fp32."""
    # One process would multiply bytes, where the CPU has no units for bf16.
    no_bytes = patch("jingu.infer.inference_model.has_byte_kernels", lambda: False)
    with no_bytes, patch.dict("jingu.infer.inference_model.DTYPES", bf16=torch.float32):
        loaded = load(folder, precision, "cpu", ranks=ranks, pipeline=pipeline)
    linear = [each for each in loaded.module.modules() if isinstance(each, Linear | GroupedLinear)]
    assert any(isinstance(each.weight, PrepackedQuantizedWeight | tuple) for each in linear)
    events = []
    with distributed_engine(Engine(loaded, SETTINGS), ranks) as engine:
        if engine is not None:
            for first in (3, 9):
                engine.submit(Request((first, 4, 30), SamplingParams(), 20, ignore_eos=True, logprobs=0))
            while engine.busy:
                events += [(event.token.id, event.token.logprob) for event in engine.step() if event.token]
    return events


def quantized_answers_on_rank(rank: int, world: int, folder: Path, precision: str, pipeline: int) -> list[Any]:
    return quantized_answers(folder, precision, this_rank(rank, world), pipeline)


def test_impossible_settings_are_refused_on_all_ranks(folders: dict[str, Path], ranks: RankPool) -> None:
    assert (
        ranks.run(refusals, 4, folders["few-gpt2"])
        == [
            [
                "does not divide the number of ranks",
                "expert offload supports only one process",
                "cannot share the 64 inputs of blocks.0.attention.output in whole groups of 32",
            ]
        ]
        * 4
    )
    with pytest.raises(JinguError, match="one process cannot hold 2 pipeline stages"):
        load(folders["llama"], pipeline=2)


def refusals(rank: int, world: int, folder: Path) -> list[str]:
    events = []
    for words, more in (
        ("does not divide the number of ranks", {"pipeline": 5, "precision": "fp32"}),
        ("expert offload supports only one process", {"resident_experts": "25%"}),
        ("cannot share the 64 inputs of blocks.0.attention.output in whole groups of 32", {"precision": "int4"}),
    ):
        try:
            load(folder, ranks=this_rank(rank, world), **more)  # type: ignore[arg-type]
        except JinguError as error:
            events.append(words if words in str(error) else str(error))
    return events


@pytest.mark.slow
def test_generate_and_serve_on_two_ranks(folders: dict[str, Path]) -> None:
    """`generate` prints the same as on one process; `serve` answers, and exits on SIGTERM."""

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "jingu", *words, "--precision", "fp64", "--device", "cpu"]

    folder = str(folders["llama"])
    alone, shared = (
        subprocess.run(
            command("generate", folder, "a", "--max-tokens", "20", *more),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        for more in ((), ("--processes", "2"))
    )
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    assert alone.stdout == shared.stdout != ""
    wrong = subprocess.run(command("generate", folder, "a", "--processes", "3"), capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.count("4 attention heads cannot be divided over 3 ranks") == 1

    server = subprocess.Popen(
        command("serve", folder, "--port", "0", "--template", "chatml", "--processes", "2"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        body = {"model": "llama", "prompt": "a", "max_tokens": 8, "temperature": 0}
        for _ in range(2):
            sent = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(sent, timeout=PATIENCE) as answer:
                text = json.load(answer)["choices"][0]["text"]
            assert text and alone.stdout.startswith(f"a{text}")
        server.send_signal(signal.SIGTERM)
        assert server.wait(300) == 0
    finally:
        server.kill()
