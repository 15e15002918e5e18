"""A tiny model with a tokenizer."""

from __future__ import annotations

import pytest

from jingu.config.sections.model import ModelSettings
from jingu.infer.load import Loaded, loaded
from jingu.model.build import spec_from_settings
from jingu.model.decoder import make_model
from jingu.model.initialise import initialise
from jingu.text.tokenizer import Tokenizer
from jingu.text.training import train_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    texts = ["the stop is near, the end is far. " * 3, "的数据 🙂 naïve"]
    return train_tokenizer(iter(texts), 280, ["<|endoftext|>"])


@pytest.fixture(scope="package")
def tiny(tokenizer: Tokenizer) -> Loaded:
    """A llama of 2 × 24 in fp32, context 64, whose text is noise."""
    settings = ModelSettings(width=24, heads=3, layers=2, initial_std=0.4)
    return filled(settings, tokenizer)


@pytest.fixture(scope="package")
def answering(tokenizer: Tokenizer) -> Loaded:
    """An encoder-decoder as small."""
    settings = ModelSettings(family="t5", width=24, heads=3, layers=2, encoder_layers=2, initial_std=0.4)
    return filled(settings, tokenizer)


def filled(settings: ModelSettings, tokenizer: Tokenizer, context: int = 64) -> Loaded:
    spec = spec_from_settings(settings, tokenizer.vocabulary, context)
    model = make_model(spec)
    initialise(model, spec, 1)
    return loaded(model.eval(), spec, tokenizer)
