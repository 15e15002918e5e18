"""From text to an exported model, with the commands that a user types."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from jingu.cli import main
from tests.conftest import TINY_LLAMA

RUN = {
    "name": "small",
    "tokenizer": {"vocab_size": 389, "path": "tokenizer"},
    "data": {"input": "text", "path": "data", "suffixes": [".py"], "validation_fraction": 0.2, "num_workers": 1},
    "batch": {"sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 4},
    "optimizer": {"type": "adamw", "lr": 0.01},
    "train": {"steps": 30, "log_every": 5},
    "precision": {"type": "fp32"},
    "device": {"type": "cpu", "threads": 1},
    "evaluation": {"every": 15, "num_sequences": 8, "sample_prompts": ["def "], "max_new_tokens": 8},
    "checkpoint": {"every": 15},
}
MODELS = {
    "llama": TINY_LLAMA,
    "gpt2": {"family": "gpt2", "num_layers": 2, "hidden_size": 32, "num_heads": 4},
}


def jingu(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints."""
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("model", MODELS)
def test_from_text_to_an_exported_model(model, library, peak, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(library.text, "text")
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, "model": MODELS[model]}), encoding="utf-8")
    assert "389 entries" in jingu(capsys, "tokenizer", "train", "run.yaml")
    assert "validation" in jingu(capsys, "data", "build", "run.yaml")
    jingu(capsys, "train", "run.yaml")
    lines = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["type"] == "train"]
    assert losses[0] > 5.5 and losses[-1] < losses[0] - 0.5
    first, last = [line for line in lines if line["type"] == "evaluation"]
    assert first["loss"] > last["loss"] > 0 and last["bits_per_byte"] > 0
    assert len([line for line in lines if line["type"] == "sample"]) == 2

    jingu(capsys, "export", "runs/small", "--to", "exported")
    prompts = ["def push(heap", "    return ", "春"]
    with_transformers(Path("exported"), Path("runs/small"), prompts)
    for prompt in prompts:
        words = ["--max-tokens", "12", "--precision", "fp32"]
        ours = jingu(capsys, "generate", "runs/small", prompt, *words)
        assert ours == jingu(capsys, "generate", "exported", prompt, *words)
        assert ours == jingu(capsys, "generate", "runs/small/checkpoints/step-00000030", prompt, *words)
        assert ours == greedy_text(Path("exported"), prompt, 12) + "\n"

    jingu(capsys, "report", "runs/small")
    page = Path("runs/small/report.html").read_text(encoding="utf-8")
    assert "small" in page and "</html>" in page
    listed = jingu(capsys, "checkpoint", "list", "runs/small")
    assert "step-00000015" in listed and "step-00000030" in listed and "complete" in listed
    assert jingu(capsys, "checkpoint", "verify", "runs/small").count(": good (") == 2
    difference = jingu(
        capsys, "checkpoint", "diff", *(f"runs/small/checkpoints/step-000000{step}" for step in ("15", "30"))
    )
    assert "model/embedding.weight" in difference and "0 tensors are equal" in difference
    same = jingu(capsys, "checkpoint", "diff", "runs/small", "runs/small/checkpoints/step-00000030")
    assert same.endswith(" tensors are equal to the last bit, 0 differ.\n")


def with_transformers(exported: Path, run: Path, prompts: list[str]) -> None:
    """The logits of transformers equal jingu's within 1e-4 in fp32, on text of the corpus."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jingu.formats.models import open_model
    from jingu.formats.stored_model import load_model
    from jingu.text.tokenizer import Tokenizer

    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    ours = load_model(open_model(run), torch.float32, torch.device("cpu"))
    tokenizer, their_tokenizer = Tokenizer.load(run / "tokenizer"), AutoTokenizer.from_pretrained(exported)
    text = Path("text/heapq.py").read_text(encoding="utf-8")
    for sample in (*prompts, text[:150], text[2000:2150]):
        ids = tokenizer.encode(sample)
        assert ids == their_tokenizer(sample, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([ids[:64]])
        with torch.no_grad():
            torch.testing.assert_close(ours.logits(ours(tokens)), theirs(tokens).logits, rtol=0, atol=1e-4)


def greedy_text(exported: Path, prompt: str, count: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(written[0], skip_special_tokens=True)


# Compiling


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler here")
def test_compiled_blocks_train_the_same_model(tiny_run, train_on, done):
    changes = {"train.steps": 5, "precision.type": "fp32", "evaluation.every": 5, "evaluation.num_sequences": 2}
    plain, compiled = tiny_run(changes, name="plain"), tiny_run({**changes, "train.compile": True}, name="compiled")
    train_on(1, plain, compiled)
    assert done(compiled).column("compile", "start") == [True]
    assert done(compiled).column("loss") == pytest.approx(done(plain).column("loss"), rel=1e-4)
    assert done(compiled).column("loss", "evaluation") == pytest.approx(
        done(plain).column("loss", "evaluation"), rel=1e-4
    )


def test_training_without_a_compiler(tiny_run, train_on, done, monkeypatch, tmp_path, capsys):
    """With compile: true, a warning is printed and training continues; with auto, nothing is printed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    train_on(1, tiny_run({"train.steps": 1, "train.compile": True}, name="true"))
    assert (
        "train.compile is on, but this machine has no compiler; training continues without it.\n"
        in capsys.readouterr().err
    )
    train_on(1, tiny_run({"train.steps": 1, "train.compile": "auto"}, name="auto"))
    assert "compil" not in capsys.readouterr().err.replace(str(tmp_path), "")  # the path has this test's name


def test_a_failing_compiler_does_not_stop_the_run(tiny_run, train_on, done, monkeypatch, tmp_path, capsys):
    """There is a g++, but it is broken."""
    broken = tmp_path / "bin" / "g++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'internal compiler error: of this test' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    plain, failing = ({"train.steps": 2, "train.compile": compiles} for compiles in (False, True))
    train_on(1, tiny_run(plain, name="plain"))
    capsys.readouterr()
    train_on(1, tiny_run(failing, name="failing"))
    stderr = capsys.readouterr().err
    assert (
        "torch.compile failed (" in stderr
        and "); training continues without it.\n" in stderr
        and "Traceback" not in stderr
    )
    runs = [done(tiny_run(name=name)) for name in ("plain", "failing")]
    assert runs[1].column("compile", "start") == [False]
    assert runs[0].column("loss") == runs[1].column("loss")


# TensorBoard, where asked for


def test_tensorboard_has_the_numbers_of_metrics(tiny_run, train_on, done):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny_run({"train.steps": 3, "train.tensorboard": True})
    train_on(1, config)
    events = event_accumulator.EventAccumulator(str(done(config).folder / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx(done(config).column("loss"), rel=1e-6)
