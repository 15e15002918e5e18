"""`jingu export --to FILE.gguf --check`: llama.cpp opens the file, and its token ids and logits are compared."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from jingu.errors import JinguError
from jingu.formats.gguf import open_gguf
from jingu.formats.stored_model import StoredModel, load_model
from jingu.model.inputs import Inputs
from jingu.text.corpus_file import import_optional
from jingu.text.tokenizer import Tokenizer

# Texts that tokenizers treat differently: spaces, digits, case, line breaks, scripts, combined characters, code.
TEXTS = (
    "some text, and 12345 more", " leading", "trailing  ", "中文 text", "isn't IT'S\n\n\n   x\t\ty", "a  b   c",
    "1 22 333 4444 55555", "e\u0301é naïve", "!!!??? --- ...", "🙂👍🏽 emoji", "x\r\n\r\ny",
    "def f(x):\n    return x**2", "Ελληνικά, русский, العربية", "<0x41> ▁ Ġ",
)  # fmt: skip
# The largest mean difference of log-probabilities in nats. Both have the weights of the file, but llama.cpp also rounds
# what it multiplies with them, unless they are fp32.
_MAX_DIFFERENCE = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.05}
_MAX_DIFFERENCE_QUANTIZED = 0.2


def check_gguf(file: Path, model: StoredModel, dtype: str) -> None:
    """Compare how llama.cpp and jingu run a GGUF file, and with which ids the model's tokenizer; print the result.

    Args:
        model: the model that was exported.

    Raises:
        JinguError: llama.cpp is not installed or does not open the file, or a text has other ids or log-probabilities.
    """
    library = import_optional("llama_cpp", "--check of a GGUF file", str(file), "llama-cpp-python")
    tokenizer = Tokenizer.load(model.tokenizer())
    try:
        llama = library.Llama(
            str(file), n_ctx=512, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False
        )  # fmt: skip
    except ValueError as error:
        raise JinguError(
            f"llama.cpp cannot open the file ({error}).", where=file, fix="Report it, with the model."
        ) from error
    try:
        _compare_ids(llama, tokenizer, file, normalize_text=_normalizes_to_nfc(tokenizer))
        difference = _compare_logits(llama, open_gguf(file), tokenizer)
    finally:
        llama.close()
    limit = _MAX_DIFFERENCE.get(dtype, _MAX_DIFFERENCE_QUANTIZED)
    if difference > limit:
        raise JinguError(
            f"llama.cpp computes other log-probabilities from the file than jingu, by {difference:.4f} nats on "
            f"average; rounding in {dtype} explains {limit}.",
            where=file,
            fix="Report it, with the model; or choose a wider --dtype.",
        )
    print(f"llama.cpp gives the same ids for {len(TEXTS)} texts, and log-probabilities within {difference:.1e} nats.")


def _normalizes_to_nfc(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer normalizes text to NFC."""
    return bool(json.loads(tokenizer.content).get("normalizer") == {"type": "NFC"})


def _compare_ids(llama: Any, tokenizer: Tokenizer, file: Path, *, normalize_text: bool) -> None:
    """Compare the ids of texts.

    Args:
        normalize_text: whether they are normalized to NFC before, which llama.cpp does not do.
    """
    for raw_text in TEXTS:
        text = unicodedata.normalize("NFC", raw_text) if normalize_text else raw_text
        expected_ids = tokenizer.encode(text)
        ids = llama.tokenize(text.encode(), add_bos=False, special=False)
        if ids != expected_ids:
            raise JinguError(
                f"llama.cpp tokenizes {text!r} as {ids}, and jingu as {expected_ids}.",
                where=file,
                fix="llama.cpp has no such tokenizer; export the model as a Hugging Face folder.",
            )


def _compare_logits(llama: Any, model: StoredModel, tokenizer: Tokenizer) -> float:
    """Return the mean difference of the log-probabilities of the tokens of a text, in nats."""
    ids = [*tokenizer.prompt_prefix_ids, *(number for text in TEXTS for number in tokenizer.encode(text))]
    ids = ids[: min(500, model.spec.max_position_embeddings - 1)]
    llama.reset()
    llama.eval(ids)
    theirs = torch.from_numpy(np.array(llama.scores[: len(ids)]))
    decoder = load_model(model, torch.float32)
    with torch.inference_mode():
        ours = decoder.logits(decoder(Inputs(torch.tensor([ids]))))[0]
    return float((_logprobs(theirs, ids) - _logprobs(ours, ids)).abs().mean())


def _logprobs(logits_TV: Tensor, ids: list[int]) -> Tensor:
    """Return the log-probabilities [T - 1] of the tokens after the first."""
    return log_softmax(logits_TV[:-1].double(), dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
