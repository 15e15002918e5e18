"""Greedy generation: jingu's engine, its model without a cache, and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def check_greedy_generation(
    ours: Any, theirs: Any, prompt: list[int], num_tokens: int, answer: Callable[..., list[Any]]
) -> None:
    """Check that all three give the same tokens.

    Args:
        answer: returns the engine's tokens for a prompt, as the fixture of that name.
    """
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    cached = [token.id for token in answer(prompt, num_tokens, ignore_eos=True)]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(ours.logits(ours(torch.tensor([ids])))[0, -1].argmax()))
    assert cached == ids[len(prompt) :] == expected
