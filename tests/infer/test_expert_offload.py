"""Experts larger than memory: answers equal those of a model completely in memory, within the limit."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.experts import count_optimal_reads
from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.expert_offload import OPTION, ExpertOffloader, ReuseDistancePredictor
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import build_model, parameter_shapes
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec
from jingu.model.weight_init import init_weights
from jingu.runtime.device import parse_size
from jingu.text.tokenizer import Tokenizer

SPECS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "family": "mixtral",
        "hidden_size": 24,
        "num_heads": 3,
        "intermediate_size": 10,
        "experts": {"num_experts": 5, "num_experts_per_token": 2},
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "hidden_size": 20,
        "num_heads": 2,
        "intermediate_size": 7,
        "experts": {"num_experts": 9, "num_experts_per_token": 3},
    },
    "cpm2": {
        "family": "cpm2",
        "num_encoder_layers": 2,
        "hidden_size": 12,
        "num_heads": 2,
        "intermediate_size": 11,
        "experts": {"num_experts": 6, "num_experts_per_token": 1, "router": "random_projection"},
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("mixtures")
    tokenizer.save(place / "tokenizer")
    for name, changes in SPECS.items():
        spec = spec_from_settings(
            ModelSettings(num_layers=3, initializer_range=0.4, **changes), tokenizer.vocab_size, 64
        )
        model = build_model(spec)
        init_weights(model, spec, 1)
        export_hf(spec, model.state_dict().__getitem__, place / "tokenizer", place / name)
    return {name: place / name for name in SPECS}


def generate_events(model: InferenceModel, prompts: list[tuple[int, ...]]) -> list[Any]:
    """Return all events of some requests that run together."""
    engine = Engine(model)
    for prompt in prompts:
        engine.submit(Request(prompt, SamplingParams(temperature=1.0), 9, logprobs=3, ignore_eos=True))
    events = []
    while engine.busy:
        events += engine.step()
    return events


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", SPECS)
def test_answers_are_bitwise_equal_within_the_memory_limit(
    folders: dict[str, Path], family: str, precision: Any
) -> None:
    prompts = [tuple(range(3, 3 + length)) for length in (1, 7, 23)]
    whole = load(folders[family], precision)
    expected = generate_events(whole, prompts)
    assert len({event.token.id for event in expected}) > 5
    mixture = whole.spec.feed_forward
    one = 3 * mixture.intermediate_size * whole.spec.hidden_size * (4 if precision == "fp32" else 2)
    for resident, slots in ((f"{2 * one}", 2), ("34%", None), ("100%", None)):
        some = load(folders[family], precision, resident_experts=resident)
        assert some.expert_offloader is not None
        some.expert_offloader.trace = []
        assert generate_events(some, prompts) == expected, resident
        actual = some.expert_offloader.stats()
        assert slots is None or actual.resident_bytes == slots * one
        assert actual.resident_bytes <= parse_size(resident, actual.total_bytes, OPTION)
        uses = sum(len(experts) for _, experts in some.expert_offloader.trace)
        assert actual.hits + actual.misses == uses
        assert actual.bytes_read == (actual.misses + actual.prefetched) * one
        if resident == "100%":
            assert actual.bytes_read <= actual.total_bytes
        else:
            assert actual.misses > 0
        held = sum(parameter.numel() for parameter in some.module.parameters())
        shapes = parameter_shapes(whole.spec).items()
        assert held <= sum(shape.numel() for name, shape in shapes if not expert_matrix(name))


def expert_matrix(name: str) -> bool:
    return name.endswith(tuple(f"feed_forward.{part}.weight" for part in ("gate", "up", "down")))


def test_runs_with_and_without_adapters(tiny_run, ranks, train_on, done) -> None:
    """Experts are read directly from a checkpoint of several ranks, and adapters are merged while reading."""
    mixture = {
        "model.family": "mixtral",
        "model.intermediate_size": 10,
        "model.experts": {
            "num_experts": 4,
            "num_experts_per_token": 2,
            "shared_intermediate_size": 6,
            "shared_expert_gate": True,
        },
        "precision.type": "fp32",
        "train.steps": 2,
    }
    base = tiny_run({**mixture, "parallel.tensor": 2}, name="base")
    adapted = tiny_run(
        {
            **mixture,
            "initialize.from": str(Path(base.runs_dir) / "base"),
            "tune": {"type": "lora", "rank": 3, "target_modules": ["blocks.*"]},
        },
        name="adapted",
    )
    train_on(2, base)
    train_on(1, adapted)
    for config in (base, adapted):
        opened = open_model(done(config).folder)
        for name, parameter in load_model(opened, torch.float32).named_parameters():
            for number in (0, len(parameter) - 1) if parameter.dim() == 3 else ():
                assert torch.equal(opened.read(name, number), parameter[number]), name
        expected = generate_events(load(done(config).folder, "fp32"), [(5, 6, 7)])
        assert generate_events(load(done(config).folder, "fp32", resident_experts="25%"), [(5, 6, 7)]) == expected


def test_read_errors_are_reported_and_not_cached(folders: dict[str, Path]) -> None:
    whole, some = load(folders["mixtral"], "fp32"), load(folders["mixtral"], "fp32", resident_experts="25%")
    tokens_BT, residency = torch.tensor([[4, 5, 6, 7]]), some.expert_offloader
    assert residency is not None
    read, object_ = residency._stored_model.read, residency._stored_model

    def fails(name: str, number: int) -> torch.Tensor:
        raise OSError("the disk is gone")

    with torch.no_grad():
        object.__setattr__(object_, "read", fails)
        for _ in range(2):
            with pytest.raises(OSError, match="disk is gone"):
                some.module(tokens_BT)
        object.__setattr__(object_, "read", read)
        assert torch.equal(some.module(tokens_BT), whole.module(tokens_BT))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), slots=st.integers(2, 15), tokens=st.lists(st.integers(1, 20), max_size=12))
def test_every_row_is_computed_by_its_expert(
    folders: dict[str, Path], seed: int, slots: int, tokens: list[int]
) -> None:
    """In any order of visits, the result is the sum of the requested experts."""
    opened = open_model(folders["mixtral"])
    assert isinstance(opened.spec, ModelSpec)
    residency = ExpertOffloader(opened, f"{slots * 3 * 24 * 10 * 4}", torch.float32, torch.device("cpu"))
    model = load_model(opened, torch.float32, prepare=residency.replace_experts)
    plain = load_model(opened, torch.float32)
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    with torch.no_grad():
        for count in tokens:
            layer = dice.randrange(3)
            x_BTD = torch.randn(1, count, 24, generator=generator)
            mine, theirs = (built.blocks[layer] for built in (model, plain))
            mine.feed_forward_norm(x_BTD)
            assert torch.equal(mine.feed_forward(x_BTD)[0], theirs.feed_forward(x_BTD)[0])
            assert len(residency._slot_of) + len(residency._free) == slots


def test_a_large_layer_does_not_evict_all_others(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 1 needs more slots than there are, but does not evict everything that other layers need."""
    opened = open_model(folders["mixtral"])
    residency = ExpertOffloader(opened, f"{5 * 3 * 24 * 10 * 4}", torch.float32, torch.device("cpu"))
    load_model(opened, torch.float32, prepare=residency.replace_experts)
    monkeypatch.setattr(residency, "_predict", lambda layer: [])
    for layer, needed in ((0, [0, 1]), (1, [0]), (2, [0, 1]), (0, [0, 1]), (1, [0, 1, 2, 3, 4])):
        residency._chosen_NK = np.array(needed)[:, None]
        count_E = torch.tensor([int(expert in needed) for expert in range(5)])
        with torch.no_grad():
            residency._compute(layer, torch.zeros(len(needed), 24), count_E)
    assert len(residency._slot_of) == 5 and any(layer != 1 for layer, _ in residency._slot_of)


@given(
    visits=st.lists(
        st.tuples(st.integers(0, 1), st.sets(st.integers(0, 2), min_size=1).map(lambda actual: tuple(sorted(actual)))),
        max_size=7,
    ),
    slots=st.integers(1, 4),
)
def test_the_clairvoyant_policy_reads_least(visits: list[tuple[int, tuple[int, ...]]], slots: int) -> None:
    """Beside all that can be done, what a visit needs in any order and each in the slot of any other: never less, and
    no more where a visit needs one."""
    reads: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}  # by what is held afterwards
    for layer, experts in visits:
        after: dict[frozenset[tuple[int, int]], int] = {}
        for order in permutations([(layer, expert) for expert in experts]):
            now = reads
            for key in order:
                then: dict[frozenset[tuple[int, int]], int] = {}
                for held, read in now.items():
                    gone = [{each} for each in held] if len(held) == slots else [set()]
                    nexts = [held] if key in held else [held - each | {key} for each in gone]
                    for each in nexts:
                        then[each] = min(then.get(each, 99), read + (key not in held))
                now = then
            for held, read in now.items():
                after[held] = min(after.get(held, 99), read)
        reads = after
    fewest = min(reads.values())
    assert count_optimal_reads(visits, slots) >= fewest
    if all(len(experts) == 1 for _, experts in visits):
        assert count_optimal_reads(visits, slots) == fewest


def test_cyclic_visits_keep_the_next_layers() -> None:
    """If every visit needs every expert, those of the layer just visited are needed last."""
    foresight = ReuseDistancePredictor(layers=4, experts=3, active=3)
    every = np.array([[0, 1, 2]] * 5)
    for _ in range(40):
        for layer in (1, 2, 3):  # as decoders after an encoder, whose layer 0 was seen once
            foresight.visit(layer, every)
    order = foresight.distance_LE.mean(1).argsort()
    assert order.tolist() == [1, 2, 3, 0]
    foresight.visit(1, every[:, [0, 1, 1]])
    assert foresight.distance_LE[1].argmax() == 2


def test_router_predictions_are_weighted_by_their_accuracy() -> None:
    foresight = ReuseDistancePredictor(layers=2, experts=8, active=2)
    guess_NK = np.array([[3, 5]])
    for number in range(900):
        foresight.visit(0, np.array([[0, 1]]))
        likely_E = foresight.predict(1, guess_NK)
        foresight.visit(1, np.array([[3, 5 if number % 4 == 0 else 6]]))  # the first guess is right, the second rarely
    assert likely_E[3] == pytest.approx(0.99, abs=1e-6) and likely_E[5] == pytest.approx(0.25, abs=0.01)
    assert likely_E[[0, 1, 2, 4, 6, 7]] == pytest.approx((2 - 0.99 - 0.25) / 6, abs=0.02)
    assert foresight.predict(1, np.repeat(guess_NK, 9, 0))[5] == pytest.approx(1 - 0.75**9, abs=0.05)


def test_recent_visits_count_more_than_frequent_ones() -> None:
    """Recent use counts more than frequent use, and a long prompt counts as one visit."""
    foresight = ReuseDistancePredictor(layers=1, experts=6, active=1)
    foresight.visit(0, np.full((500, 1), 0))
    for _ in range(40):
        foresight.visit(0, np.array([[1]]))
    for _ in range(12):
        foresight.visit(0, np.array([[2]]))
    assert foresight.distance_LE[0].argsort()[:2].tolist() == [2, 1]


def test_sizes() -> None:
    assert [parse_size(text, 1000, OPTION) for text in ("25%", "12.5 %", "100%", "7", "3kB", "1.5GiB", "2MB")] == [
        250, 125, 1000, 7, 3000, 1610612736, 2000000,
    ]  # fmt: skip
    for text in ("", "0", "-3", "101%", "much", "25%%", "1e3", "nan"):
        with pytest.raises(JinguError, match=r"is (not a size|more than all)"):
            parse_size(text, 1000, OPTION)


def test_impossible_settings_are_refused(folders: dict[str, Path], tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(JinguError) as error:
        load(folders["mixtral"], "fp32", resident_experts="2880")
    assert "2880 of the experts' 43,200 bytes is room for 1 of them; at least 2 must be resident." in str(error.value)
    assert "Give 5,760 bytes or more, or 13.4%." in str(error.value)
    load(folders["mixtral"], "fp32", resident_experts="13.4%")
    spec = spec_from_settings(ModelSettings(hidden_size=12, num_heads=2, num_layers=1), tokenizer.vocab_size, 64)
    model = build_model(spec)
    init_weights(model, spec, 1)
    tokenizer.save(tmp_path / "tokenizer")
    export_hf(spec, model.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "dense")
    with pytest.raises(JinguError, match="no mixture of experts"):
        load(tmp_path / "dense", "fp32", resident_experts="25%")


def test_the_command(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(folders["mixtral"]), "the ", "--max-tokens", "5", "--precision", "fp32"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    assert main([*words, "--resident-experts", "25%"]) == 0
    events = capsys.readouterr()
    assert events.out == expected and "of 43,200 bytes of experts were resident" in events.err
    assert main([*words, "--resident-experts", "lots"]) == 2
    assert "--resident-experts: lots is not a size." in capsys.readouterr().err
