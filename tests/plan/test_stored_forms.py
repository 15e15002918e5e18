"""Plans of models whose matrices stay in the forms of other tools have the bytes that they have in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jingu.cli import main
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from tests.formats.test_packed_forms import save_llama
from tests.formats.test_stored_weights import keep, save_form, weights


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8", "nf4", "mxfp4", "experts nf4", "latent fp8"])
def test_a_served_model_has_the_planned_bytes(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_form(form, tmp_path / "model")
    words = ["plan", str(folder), "--serve", "--on", "l40s", "--gpus", "1", "--json", "tune.quantization=stored"]
    assert main(words) == 0
    plans = json.loads(capsys.readouterr().out)["weights"]
    stored = open_hf(folder)
    model = load_model(stored, torch.bfloat16, prepare=keep(stored))
    parts = {part.data_ptr(): part.nbytes for weight in weights(model) for part in weight.parts()}
    resident = sum(parts.values()) + sum(parameter.nbytes for parameter in model.parameters())
    assert plans == pytest.approx(resident, rel=1e-12)


def test_what_cannot_be_served_in_its_stored_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--serve", "--on", "l40s", "tune.quantization=stored"]
    folder = save_form("gptq", tmp_path / "model")
    assert main(["plan", str(folder), *words, "--gpus", "2"]) == 2
    assert "cannot be divided over 2 GPUs" in capsys.readouterr().err
    plain = save_llama(tmp_path / "plain")
    assert main(["plan", str(plain), *words, "--gpus", "1"]) == 2
    assert "no quantized matrices" in capsys.readouterr().err
    assert main(["plan", "llama-3-8b", *words, "--gpus", "1"]) == 2
    assert "llama-3-8b" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["gptq", "experts nf4"])
def test_adapters_of_a_stored_base_are_planned(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_form(form, tmp_path / "model")
    words = ["plan", str(folder), "--on", "l40s", "--gpus", "1", "--json", "batch.global_batch_size=1"]
    words += ["batch.sequence_length=32", "parallel.zero_stage=0", "tune.type=lora"]
    plans: dict[str, float] = {}
    for quantization in ("null", "stored"):
        assert main([*words, f"tune.quantization={quantization}"]) == 0
        plans[quantization] = json.loads(capsys.readouterr().out)["memory"]["weights"]
    stored = open_hf(folder)
    matrices = weights(load_model(stored, torch.bfloat16, prepare=keep(stored)))
    parts = {part.data_ptr(): part.nbytes for weight in matrices for part in weight.parts()}
    saving = sum(2 * weight.shape.numel() for weight in matrices) - sum(parts.values())
    assert plans["null"] - plans["stored"] == pytest.approx(saving, rel=1e-9)


@pytest.mark.parametrize("settings", [["--serve"], ["tune.type=lora"]])
def test_a_preset_has_no_stored_form(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--on", "h100", "--gpus", "1", *settings, "tune.quantization=stored"]) == 2
    assert "llama-3-8b is no folder with a model's files" in capsys.readouterr().err
