"""A run of an encoder-decoder: trained, stopped and gone on with, laid out over ranks, generated with, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jingu.checkpoint.hub import load_model, open_model
from jingu.cli import main
from jingu.data.build import build
from jingu.data.dataset import open_dataset
from jingu.data.indexed import IndexedWriter
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.verbs import train as train_tokenizer
from jingu.train.run import open_run

T5 = {
    "data.objective": {"type": "span_corruption", "rate": 0.25, "mean_length": 2.5, "sentinels": 8},
    "model.family": "t5",
    "model.kv_heads": None,
    "model.head_size": 9,
    "tokenizer.vocabulary": 397,
    "train.steps": 6,
}
MIXTURE = {
    **T5,
    "model": {
        "preset": "cpm2-moe-198b",
        "layers": 2,
        "width": 32,
        "heads": 4,
        "feed_forward": 42,
        "experts": {"number": 4, "router": "top_k", "balance": 0.01},
        "vocabulary": 397,
    },
}


@pytest.fixture(scope="module")
def corrupted(library, tmp_path_factory) -> dict[str, Any]:
    """Settings of a run over a tokenizer with sentinels, and the data set built with it."""
    from jingu.config.schema import RunConfig

    place = tmp_path_factory.mktemp("corrupted")
    settings: dict[str, Any] = {"tokenizer.path": str(place / "tokenizer"), "data.path": str(place / "data")}
    config = RunConfig.model_validate(
        {
            "tokenizer": {"path": settings["tokenizer.path"], "vocabulary": 397},
            "data": {
                "input": str(library.text),
                "path": settings["data.path"],
                "suffixes": [".py"],
                "held_out": 0.2,
                "workers": 1,
                "objective": T5["data.objective"],
            },
        }
    )
    train_tokenizer(config)
    build(config)
    return settings


def test_the_tokenizer_has_the_sentinels(corrupted):
    tokenizer = Tokenizer.load(Path(corrupted["tokenizer.path"]))
    assert list(tokenizer.special_tokens) == ["<|endoftext|>", *(f"<extra_id_{n}>" for n in range(8))]


LAYOUTS = [{"zero": 3}, {"tensor": 2}, {"context": 2}]
PIPELINES = [
    {"pipeline": 2, "parts": [1, 3]},  # cut inside the encoder
    {"pipeline": 2, "parts": [2, 2]},  # between the two
    {"pipeline": 2, "schedule": "interleaved"},
]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (T5, [LAYOUTS[1], PIPELINES[0]]),
        (MIXTURE, [LAYOUTS[1], PIPELINES[2]]),
        pytest.param(T5, [*({"zero": n} for n in range(4)), LAYOUTS[2], PIPELINES[1]], marks=pytest.mark.slow),
        pytest.param(MIXTURE, [*LAYOUTS[::2], *PIPELINES[:2]], marks=pytest.mark.slow),
    ],
    ids=["t5", "cpm2-mixture", "t5-more", "cpm2-mixture-more"],
)
def test_every_layout_is_the_run_of_one_process(model, layouts, corrupted, tiny_run, train_on, done):
    changes = {**corrupted, **model, "evaluation.every": 3, "evaluation.sequences": 5, "evaluation.prompts": ["def "]}
    changes |= {"evaluation.prompt_tokens": 4}
    alone = tiny_run({**changes, "batch.micro_size": 2}, name="alone")
    train_on(1, alone)
    one = done(alone)
    losses, norms, weights = one.column("loss"), one.column("grad_norm"), one.tensors()
    assert losses[-1] < losses[0] - 0.3
    assert "model/encoder.blocks.0.attention.q.weight" in weights
    # Of a text that the encoder reads in part, bits per byte would say nothing.
    assert one.column("bits_per_byte", "evaluation") == [None] * 2
    assert one.column("tokens", "evaluation") == [5 * (8 + 3 + 1)] * 2
    configs = [
        tiny_run({**changes, "batch.micro_size": 2, "parallel": layout}, name=f"layout-{number}")
        for number, layout in enumerate(layouts)
    ]
    train_on(2, *configs)
    for config in configs:
        many = done(config)
        assert many.column("loss") == pytest.approx(losses, rel=1e-9), config.name
        assert many.column("grad_norm") == pytest.approx(norms, rel=1e-9), config.name
        assert many.column("loss", "evaluation") == pytest.approx(one.column("loss", "evaluation"), rel=1e-9)
        assert many.column("text", "sample") == one.column("text", "sample")
        theirs = many.tensors()
        assert theirs.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{config.name} {name}")


def test_a_stopped_run_goes_on_to_the_same_bytes(corrupted, tiny_run, train_on, done):
    """Also with blocks that are computed again in the backward pass."""
    changes = {**corrupted, **T5, "schedule": {"type": "constant", "warmup": 0}}
    whole = tiny_run(changes, name="whole")
    train_on(1, whole)
    again = {**changes, "train.activation_checkpointing": {"type": "full"}}
    train_on(1, tiny_run({**again, "train.steps": 3}, name="stopped"))
    stopped = tiny_run(again, name="stopped")
    train_on(1, stopped)
    expected, found = done(whole).tensors(), done(stopped).tensors()
    assert done(stopped).column("step") == list(range(1, 7))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_generated_inspected_and_exported(corrupted, tiny_run, train_on, tmp_path, capsys):
    config = tiny_run({**corrupted, **T5, "precision.type": "fp32", "train.steps": 40, "batch.micro_size": 8})
    train_on(1, config)
    run, out = Path(config.runs) / config.name, tmp_path / "exported"
    capsys.readouterr()
    assert main(["generate", str(run), "def <extra_id_0>heappop", "--max-tokens", "9", "--precision", "fp32"]) == 0
    text = capsys.readouterr().out
    assert main(["model", "inspect", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["family"], facts["dimensions"]["encoder_layers"], facts["faults"]) == ("t5", 2, [])
    assert main(["export", str(run), "--to", str(out)]) == 0

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    ours = load_model(open_model(run), torch.float32)
    tokenizer = Tokenizer.load(out)
    mark = tokenizer.special_tokens["<extra_id_0>"]
    source = torch.tensor([[*tokenizer.encode("def "), mark, *tokenizer.encode("heappop"), tokenizer.end_id]])
    target = torch.tensor([[tokenizer.start_id, 5, 77, 201]])
    with torch.no_grad():
        logits = model(input_ids=source, decoder_input_ids=target).logits
        torch.testing.assert_close(ours.logits(ours(target, source_BS=source)), logits, rtol=1e-4, atol=1e-5)
    ids = model.generate(source, max_new_tokens=9, do_sample=False)[0, 1:].tolist()
    assert "<extra_id_0>" in text and text == loaded.decode(ids).removesuffix("<|endoftext|>") + "\n"
    capsys.readouterr()
    assert main(["generate", str(out), "def <extra_id_0>heappop", "--max-tokens", "9", "--precision", "fp32"]) == 0
    assert capsys.readouterr().out == text


def test_objective_and_model_must_fit(corrupted, tiny_run):
    with pytest.raises(JinguError) as error:
        open_run(tiny_run({**corrupted, **T5, "data.objective": {"type": "causal"}}))
    assert str(error.value) == (
        "data.objective.type: t5 has an encoder, and causal gives that no source to read. Set it to span_corruption, "
        "or choose a model.family without an encoder (llama)."
    )
    with pytest.raises(JinguError) as error:
        open_run(tiny_run({**corrupted, **T5, "model.family": "llama", "model.head_size": 8}))
    assert str(error.value) == (
        "data.objective.type: llama has no encoder, and span_corruption gives it a source to read. Set it to causal, "
        "or choose a model.family with an encoder (t5)."
    )
    held_out = open_dataset(Path(corrupted["data.path"]), "held_out").tokens
    with pytest.raises(JinguError, match=f"which do not fill one sequence of {held_out + 1:,}"):
        open_run(tiny_run({**corrupted, **T5, "batch.sequence_length": held_out + 1, "evaluation.every": 1}))


def test_without_sentinels_the_tokenizer_is_refused(tiny_run):
    with pytest.raises(JinguError, match=r"the tokenizer lacks 3 of the 3 sentinels .* such as <extra_id_0>"):
        open_run(tiny_run({**T5, "tokenizer.vocabulary": 389}))


def test_it_trains_on_a_data_set_of_cpm2(corrupted, tiny_run, train_on, done, tmp_path):
    chance = np.random.default_rng(3)
    kinds = {
        name: IndexedWriter(tmp_path / f"story_{name}", "uint16") for name in ("context", "target", "target_offset")
    }
    for _ in range(30):
        kept, removed = chance.integers(20, 30, (2, 16)), chance.integers(20, 30, (2, 4))
        context = [id_ for n in range(2) for id_ in [*kept[n], 397 + n]]
        target = [id_ for n in range(2) for id_ in [397 + n, *removed[n]]]
        for writer, ids in zip(kinds.values(), (context, target, [0, 5, 5, 5]), strict=True):
            writer.add(np.array(ids), np.array([len(ids)]))
    for writer in kinds.values():
        writer.close()
    changes = {**corrupted, **T5, "data.path": str(tmp_path / "story"), "train.steps": 8, "evaluation.every": 0}
    run = tiny_run({**changes, "data.objective": {"type": "target_files", "target_length": 20}})
    train_on(1, run)
    losses = done(run).column("loss")
    assert losses[-1] < losses[0] - 0.5
