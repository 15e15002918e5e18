"""Initial weights of a run that starts from another model (`initialize.from`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jingu.config.schema import RunConfig
from jingu.config.sections.tune import FullSettings, SoftPromptBase
from jingu.errors import JinguError
from jingu.formats.models import load_matching_adapters, open_model
from jingu.formats.stored_model import fake_quantize
from jingu.model.adapter_layers import is_adapter
from jingu.model.quantized_weight import quantizing_reader
from jingu.model.weight_init import generator_for_name
from jingu.parallel.pipeline import ParallelModel
from jingu.text.tokenizer import Tokenizer


def load_initial_weights(model: ParallelModel, config: RunConfig, tokenizer: Tokenizer, *, adapters: bool) -> None:
    """Fill the parameters, in any layout, with those of the initial model; one whole tensor is in memory at a time.

    Args:
        adapters: whether to fill also the adapters whose initial values depend on the model or on `tune`.
    """
    assert config.initialize.from_ is not None
    initial = open_model(Path(config.initialize.from_))
    plan = model.sharding
    plan.fill(model, quantizing_reader(model.stages, initial.read), lambda name: not is_adapter(name))
    if not adapters or isinstance(config.tune, FullSettings):
        return
    if config.tune.initial_adapter is not None:
        # Adapters of an earlier run.
        stored = load_matching_adapters(Path(config.tune.initial_adapter), initial, model.spec)
        plan.fill(model, stored.read, is_adapter)
        return

    # DoRA: magnitudes start as the row norms of the weights that they scale, which may be quantized.
    base = fake_quantize(initial, model.spec)

    def row_norms(name: str) -> Tensor:
        return base.read(name.replace(".lora_m", ".weight")).double().square().sum(1).sqrt()

    plan.fill(model, row_norms, lambda name: name.endswith(".lora_m"))
    # Prompt tuning: virtual tokens start as embeddings of the vocabulary (Lester et al., 2021, section 3.2).
    if isinstance(config.tune, SoftPromptBase):
        ids = _initial_prompt_ids(config.tune, tokenizer, config.seed)
        names = ("prompt.embedding.weight", "encoder.prompt.embedding.weight")
        plan.fill(model, lambda _: initial.read("embedding.weight")[ids], names.__contains__)


def _initial_prompt_ids(settings: SoftPromptBase, tokenizer: Tokenizer, seed: int) -> Tensor:
    """Return ids of the tokens whose embeddings the virtual tokens start from: random ones, or those of a text."""
    count = settings.num_virtual_tokens
    if settings.init_text is None:
        return torch.randint(tokenizer.vocab_size, (count,), generator=generator_for_name("prompt", seed))
    ids = tokenizer.encode(settings.init_text)
    if not ids:
        raise JinguError("the text has no tokens.", where="tune.init_text", fix="Give a longer one, or null.")
    # Repeat the text until it is long enough.
    repeats = -(-count // len(ids))
    return torch.tensor(ids).repeat(repeats)[:count]
