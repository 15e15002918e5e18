"""A run of an encoder-decoder: trained, stopped and gone on with, laid out over ranks, generated with, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jingu.cli import main
from jingu.data.build import build
from jingu.data.dataset import open_dataset
from jingu.data.indexed_dataset import IndexedWriter
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.model.inputs import Inputs
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_commands import train as train_tokenizer
from jingu.training.run import open_run

T5 = {
    "data.objective": {"type": "span_corruption", "noise_density": 0.25, "mean_span_length": 2.5, "num_sentinels": 8},
    "model.family": "t5",
    "model.num_kv_heads": None,
    "model.head_dim": 9,
    "tokenizer.vocab_size": 397,
    "train.steps": 6,
}
MIXTURE = {
    **T5,
    "model": {
        "preset": "cpm2-moe-198b",
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 42,
        "experts": {"num_experts": 4, "router": "top_k", "aux_loss_coef": 0.01},
        "vocab_size": 397,
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
            "tokenizer": {"path": settings["tokenizer.path"], "vocab_size": 397},
            "data": {
                "input": str(library.text),
                "path": settings["data.path"],
                "suffixes": [".py"],
                "validation_fraction": 0.2,
                "num_workers": 1,
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


LAYOUTS = [{"zero_stage": 3}, {"tensor": 2}, {"context": 2}]
PIPELINES = [
    {"pipeline": 2, "layers_per_stage": [1, 3]},  # cut inside the encoder
    {"pipeline": 2, "layers_per_stage": [2, 2]},  # between the two
    {"pipeline": 2, "pipeline_schedule": "interleaved"},
]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (T5, [LAYOUTS[1], PIPELINES[0]]),
        pytest.param(MIXTURE, [LAYOUTS[1], PIPELINES[2]], marks=pytest.mark.slow),
        pytest.param(T5, [*({"zero_stage": n} for n in range(4)), LAYOUTS[2], PIPELINES[1]], marks=pytest.mark.slow),
        pytest.param(MIXTURE, [*LAYOUTS[::2], *PIPELINES[:2]], marks=pytest.mark.slow),
    ],
    ids=["t5", "cpm2-mixture", "t5-more", "cpm2-mixture-more"],
)
def test_every_layout_equals_one_process(model, layouts, corrupted, tiny_run, train_on, done):
    changes = {
        **corrupted,
        **model,
        "evaluation.every": 3,
        "evaluation.num_sequences": 5,
        "evaluation.sample_prompts": ["def "],
    }
    changes |= {"evaluation.max_new_tokens": 4}
    alone = tiny_run({**changes, "batch.micro_batch_size": 2}, name="alone")
    train_on(1, alone)
    one = done(alone)
    losses, norms, weights = one.column("loss"), one.column("grad_norm"), one.tensors()
    assert losses[-1] < losses[0] - 0.3
    assert "model/encoder.blocks.0.attention.q.weight" in weights
    # Of a text that the encoder reads in part, bits per byte would say nothing.
    assert one.column("bits_per_byte", "evaluation") == [None] * 2
    assert one.column("tokens", "evaluation") == [5 * (8 + 3 + 1)] * 2
    configs = [
        tiny_run({**changes, "batch.micro_batch_size": 2, "parallel": layout}, name=f"layout-{number}")
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


def test_a_stopped_run_resumes_to_the_same_bytes(corrupted, tiny_run, train_on, done):
    """Also with activation checkpointing."""
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
    config = tiny_run({**corrupted, **T5, "precision.type": "fp32", "train.steps": 40, "batch.micro_batch_size": 8})
    train_on(1, config)
    run, out = Path(config.runs_dir) / config.name, tmp_path / "exported"
    capsys.readouterr()
    assert main(["generate", str(run), "def <extra_id_0>heappop", "--max-tokens", "9", "--precision", "fp32"]) == 0
    text = capsys.readouterr().out
    assert main(["model", "inspect", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["family"], facts["dimensions"]["num_encoder_layers"], facts["problems"]) == ("t5", 2, [])
    assert main(["export", str(run), "--to", str(out)]) == 0

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    ours = load_model(open_model(run), torch.float32)
    tokenizer = Tokenizer.load(out)
    mark = tokenizer.special_tokens["<extra_id_0>"]
    source = torch.tensor([[*tokenizer.encode("def "), mark, *tokenizer.encode("heappop"), tokenizer.eos_token_id]])
    target = torch.tensor([[tokenizer.decoder_start_token_id, 5, 77, 201]])
    with torch.no_grad():
        logits = model(input_ids=source, decoder_input_ids=target).logits
        torch.testing.assert_close(
            ours.logits(ours(Inputs(target, source=Inputs(source)))), logits, rtol=1e-4, atol=1e-5
        )
    ids = model.generate(source, max_new_tokens=9, do_sample=False)[0, 1:].tolist()
    assert "<extra_id_0>" in text and text == loaded.decode(ids).removesuffix("<|endoftext|>") + "\n"
    capsys.readouterr()
    assert main(["generate", str(out), "def <extra_id_0>heappop", "--max-tokens", "9", "--precision", "fp32"]) == 0
    assert capsys.readouterr().out == text


def test_objective_and_model_must_fit(corrupted, tiny_run):
    with pytest.raises(JinguError) as error:
        open_run(tiny_run({**corrupted, **T5, "data.objective": {"type": "causal"}}))
    assert str(error.value) == (
        "data.objective.type: t5 has an encoder, for which the objective causal has no input. Set it to "
        "span_corruption, or choose a model.family without an encoder (llama)."
    )
    with pytest.raises(JinguError) as error:
        open_run(tiny_run({**corrupted, **T5, "model.family": "llama", "model.head_dim": 8}))
    assert str(error.value) == (
        "data.objective.type: the objective span_corruption needs an encoder, and llama has none. Set it to causal, "
        "or choose a model.family with an encoder (t5)."
    )
    held_out = open_dataset(Path(corrupted["data.path"]), "validation").tokens
    with pytest.raises(JinguError, match=f"fewer than one sequence of {held_out + 1:,}"):
        few_spans = {"type": "span_corruption", "num_sentinels": 8, "mean_span_length": 5000.0}
        changes = {"batch.sequence_length": held_out + 1, "evaluation.every": 1, "data.objective": few_spans}
        open_run(tiny_run({**corrupted, **T5, **changes}))


def test_without_sentinels_the_tokenizer_is_refused(tiny_run):
    with pytest.raises(JinguError, match=r"the tokenizer lacks 3 of the 3 sentinels .* such as <extra_id_0>"):
        open_run(tiny_run({**T5, "tokenizer.vocab_size": 389}))


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
