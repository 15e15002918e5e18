"""`jingu generate`: a model continues a prompt in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from jingu.checkpoint.hub import load_model, open_model
from jingu.errors import JinguError
from jingu.infer.generate import encode_prompt
from jingu.infer.generate import generate as pieces_of
from jingu.infer.sampling import Sampling
from jingu.runtime.device import has_fast_bf16
from jingu.text.tokenizer import Tokenizer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def generate(
    model: Path,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] | None = None,
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Print the prompt and its continuation (with an encoder, its answer) as it grows; then, to stderr, the speed.

    Args:
        model: a run, a step of a run, a Hugging Face folder or a GGUF file.
        prompt: empty to begin a new document.
        max_tokens: most tokens to generate.
        precision: auto computes in bf16 where the device has units for it, else in fp32.

    Raises:
        JinguError: what is wrong with the model, the prompt or the settings.
    """
    sampling = Sampling(temperature, top_k, 1.0 if top_p is None else top_p, repetition_penalty, seed)
    opened = open_model(model)
    tokenizer = Tokenizer.load(opened.tokenizer())
    place = torch.device(_device(device))
    name = precision if precision != "auto" else "bf16" if has_fast_bf16(place) else "fp32"
    decoder = load_model(opened, _DTYPES[name], place)
    ids = encode_prompt(opened.spec, tokenizer, prompt)
    if tokenizer.beginning == [opened.special_ids.get("bos_token_id")]:  # The model was trained so, and says it.
        ids = tokenizer.beginning + ids
    pieces = pieces_of(
        decoder, ids, sampling, max_tokens, stop or (), tokenizer, opened.end_ids or None, opened.start_id
    )
    start = time.perf_counter()
    sys.stdout.write(prompt if opened.spec.encoder_layers is None else "")
    count = 0
    for count, piece in enumerate(pieces, start=1):  # noqa: B007
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    seconds = time.perf_counter() - start
    print(f"{count} tokens, {count / seconds:.1f} a second", file=sys.stderr)


def _device(choice: str) -> str:
    if choice == "cuda" and not torch.cuda.is_available():
        raise JinguError("no CUDA device is to be found.", where="--device", fix="Use auto or cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice
