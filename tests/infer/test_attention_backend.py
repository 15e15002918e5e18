"""FlashAttention-3 is used where everything that it needs is there; what is missing is named where it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jingu.errors import JinguError
from jingu.infer import attention_backend
from jingu.infer.attention_backend import FlashBackend, GatherBackend, select_backend
from tests.dist.test_layouts import MODELS

CARD = torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("model", "dtype", "device", "words"),
    [
        ("llama", BF16, torch.device("cpu"), "flash needs a CUDA device"),
        ("llama", FP32, CARD, "flash needs bf16 or fp16"),
        ("bloom", BF16, CARD, "flash supports only decoders without position biases"),
        ("t5", BF16, CARD, "flash supports only decoders without position biases"),
        ("llama", BF16, CARD, r"flash needs FlashAttention-3 \(the package flash_attn_interface\)"),
    ],
)
def test_what_is_missing_is_named(model: str, dtype: torch.dtype, device: torch.device, words: str) -> None:
    with pytest.raises(JinguError, match=f"^attention_backend: {words}. Use auto or gather"):
        select_backend("flash", MODELS[model], dtype, device)
    assert isinstance(select_backend("auto", MODELS[model], dtype, device), GatherBackend)


def test_an_old_pytorch_is_named_and_a_new_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = []
    monkeypatch.setattr(attention_backend, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    assert isinstance(select_backend("auto", MODELS["llama"], BF16, CARD), FlashBackend)
    assert activated == ["FA3"]

    def old_varlen_attn(query: Any, key: Any, value: Any) -> None: ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old_varlen_attn)
    with pytest.raises(JinguError, match=r"flash needs PyTorch 2.12 or newer, and this is 2\."):
        select_backend("flash", MODELS["llama"], BF16, CARD)
    assert isinstance(select_backend("auto", MODELS["llama"], BF16, CARD), GatherBackend)
