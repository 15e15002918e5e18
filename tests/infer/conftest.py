"""Tiny models with a tokenizer."""

from __future__ import annotations

import pytest

from jingu.config.sections.model import ModelSettings
from jingu.infer.inference_model import InferenceModel
from jingu.model.decoder import build_model
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    texts = ["the stop is near, the end is far. " * 3, "的数据 🙂 naïve"]
    return train_tokenizer(iter(texts), 280, ["<|endoftext|>"])


@pytest.fixture(scope="package")
def tiny(tokenizer: Tokenizer) -> InferenceModel:
    """A llama with 2 layers, hidden size 24 and a context of 64 in fp32, whose text is noise."""
    settings = ModelSettings(hidden_size=24, num_heads=3, num_layers=2, initializer_range=0.4)
    return filled(settings, tokenizer)


@pytest.fixture(scope="package")
def answering(tokenizer: Tokenizer) -> InferenceModel:
    """An encoder-decoder of the same size."""
    settings = ModelSettings(
        family="t5", hidden_size=24, num_heads=3, num_layers=2, num_encoder_layers=2, initializer_range=0.4
    )
    return filled(settings, tokenizer)


def filled(settings: ModelSettings, tokenizer: Tokenizer, context: int = 64) -> InferenceModel:
    spec = spec_from_settings(settings, tokenizer.vocab_size, context)
    model = build_model(spec)
    init_weights(model, spec, 1)
    return InferenceModel(model.eval(), spec, tokenizer)
