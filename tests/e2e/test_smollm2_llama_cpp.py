"""A real model in llama.cpp: SmolLM2-135M-Instruct, exported as GGUF files, generates, scores and chats as in jingu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import jingu
from jingu.cli import main
from jingu.formats.gguf_check import TEXTS
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.model.inputs import Inputs
from jingu.text.tokenizer import Tokenizer
from jingu.tune.row_formats import parse_messages
from tests.e2e.test_smollm2 import model_file  # noqa: F401 (a fixture)

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.slow
PROMPT = "The history of the city of Paris begins"
DOCUMENTS = Path(__file__).parents[2] / "docs"
WINDOW, NUM_WINDOWS = 512, 6
MESSAGES = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "It is Paris."},
    {"role": "user", "content": "  And of Italy?  <b>Isn't it</b> Rome?\n\n"},
]


@pytest.fixture(scope="module")
def export(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:  # noqa: F811
    """Return a function that exports the model as a GGUF file of a dtype, once, in a folder of its own."""
    parent = tmp_path_factory.mktemp("exported")

    def write(dtype: str) -> Path:
        file = parent / dtype / "model.gguf"
        if not file.is_file():
            assert main(["export", str(model_file), "--to", str(file), "--dtype", dtype]) == 0
        return file

    return write


def open_file(file: Path, **options: Any) -> Any:
    """Open a file in llama.cpp, which computes attention in fp32."""
    fp32 = {"type_k": 0, "type_v": 0, "flash_attn": False}
    return llama_cpp.Llama(str(file), n_ctx=WINDOW, n_threads=1, verbose=False, **fp32, **options)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_200_tokens_are_the_same(dtype: str, export: Callable[[str], Path]) -> None:
    model = jingu.load(export(dtype), precision="fp32")
    expected = model.generate(PROMPT, max_tokens=200, temperature=0.0)
    opened = open_file(export(dtype))
    for text in (PROMPT, *TEXTS):
        ids = opened.tokenize(text.encode(), add_bos=False, special=False)
        assert ids == model.inference_model.tokenizer.encode(text)
    (choice,) = opened.create_completion(PROMPT, max_tokens=200, temperature=0.0, repeat_penalty=1.0)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == expected


def read_text() -> str:
    return "\n".join((DOCUMENTS / name).read_text(encoding="utf-8") for name in ("architecture.md", "glossary.md"))


def perplexity(file: Path) -> float:
    """Return llama.cpp's perplexity of a file on this project's documents, in windows."""
    opened = open_file(file, logits_all=True)
    ids = opened.tokenize(read_text().encode(), add_bos=False, special=False)[: WINDOW * NUM_WINDOWS]
    assert len(ids) == WINDOW * NUM_WINDOWS
    losses = []
    for window in torch.tensor(ids).split(WINDOW):
        opened.reset()
        opened.eval(window.tolist())
        losses.append(cross_entropy(torch.from_numpy(np.array(opened.scores[: WINDOW - 1])), window[1:]))
    opened.close()
    return float(torch.stack(losses).mean().exp())


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_perplexity_is_that_of_jingu(dtype: str, export: Callable[[str], Path]) -> None:
    model = open_model(export(dtype))
    decoder = load_model(model, torch.float32)
    windows = torch.tensor(Tokenizer.load(model.tokenizer()).encode(read_text())[: WINDOW * NUM_WINDOWS]).split(WINDOW)
    with torch.inference_mode():
        losses = [cross_entropy(decoder.logits(decoder(Inputs(ids[None])))[0, :-1], ids[1:]) for ids in windows]
    expected = float(torch.stack(losses).mean().exp())
    assert abs(perplexity(export(dtype)) / expected - 1) < 1e-3


@pytest.mark.parametrize(("dtype", "llama_type"), [("q8_0", "Q8_0"), ("q4_k_m", "Q4_K_M")])
def test_quantized_files_are_those_of_llama_cpp(
    dtype: str, llama_type: str, export: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its quantizer writes the same bytes (k-quants from the file in fp16), so that the perplexity is the same, too."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{llama_type}")
    theirs = tmp_path / "theirs.gguf"
    source = str(export("fp32" if dtype == "q8_0" else "fp16")).encode()
    assert llama_cpp.llama_model_quantize(source, str(theirs).encode(), ctypes.byref(parameters)) == 0
    expected, actual = ({each.name: each for each in gguf.GGUFReader(file).tensors} for file in (theirs, export(dtype)))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].tensor_type == tensor.tensor_type
        np.testing.assert_array_equal(actual[name].data, tensor.data, err_msg=name)


def test_llama_cpp_chats_with_the_template_of_the_file(
    export: Callable[[str], Path],
    model_file: Path,  # noqa: F811
) -> None:
    """It opens what the Modelfile names, and its chat handler takes the template from there."""
    lines = (export("fp32").parent / "Modelfile").read_text().splitlines()
    (name,) = (line.removeprefix("FROM ") for line in lines if line.startswith("FROM "))
    opened = open_file(export("fp32").parent / name)
    model = jingu.load(model_file, precision="fp32")
    assert model.chat_format is not None
    answer = opened.create_chat_completion(MESSAGES, temperature=0.0, repeat_penalty=1.0, max_tokens=100)
    prompt_ids = opened.input_ids[: answer["usage"]["prompt_tokens"]].tolist()
    assert tuple(prompt_ids) == model.chat_format.encode_prompt(parse_messages(MESSAGES))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == model.chat(MESSAGES, max_tokens=100, temperature=0.0)
