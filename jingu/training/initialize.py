"""Initial weights of a run that starts from another model (`initialize.from`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from jingu.config.schema import RunConfig
from jingu.config.sections.tune import FullSettings, SoftPromptBase
from jingu.data.objective import batch_function
from jingu.errors import JinguError
from jingu.formats.models import load_matching_adapters, open_model
from jingu.formats.stored_model import StoredModel, fake_quantize, load_model, residual_base, stored_matrices
from jingu.model.adapter_layers import initial_factors
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.layers import Linear
from jingu.model.quantize import keep_stored
from jingu.model.quantized_weight import quantizing_reader
from jingu.model.spec import ModelSpec
from jingu.model.trainable import is_adapter, is_trained
from jingu.model.weight_init import generator_for_name
from jingu.parallel.pipeline import ParallelModel
from jingu.text.tokenizer import Tokenizer
from jingu.training.batch_transforms import model_inputs
from jingu.training.run import Run

# Number of rows of training data from which EVA computes principal directions.
_EVA_ROWS = 8


def load_initial_weights(model: ParallelModel, run: Run, *, adapters: bool) -> None:
    """Fill the parameters of a model in any layout with those of the initial model.

    Only one whole tensor is in memory at a time. Parameters that the initial model does not have keep their values.

    Args:
        adapters: whether to also fill the parameters that are trained, including those of adapters whose initial values
            depend on the initial model, the data or `tune`. False: only frozen ones, as a checkpoint has the others.
    """
    config, spec = run.config, model.spec
    assert config.initialize.from_ is not None
    initial = open_model(Path(config.initialize.from_))
    plan = model.sharding
    frozen = quantizing_reader(model.stages, residual_base(initial, spec).read)

    def is_stored(name: str) -> bool:
        # Unless the initial model is a reward model, the score head is new and keeps its random values.
        return not is_adapter(name) and (name != "score.weight" or initial.spec.score_head)

    plan.fill(model, frozen, lambda name: is_stored(name) and (adapters or not is_trained(name, spec)))
    if not adapters or isinstance(config.tune, FullSettings):
        return
    if config.tune.initial_adapter is not None:
        # Adapters of an earlier run.
        initial_adapters = load_matching_adapters(Path(config.tune.initial_adapter), initial, spec)
        plan.fill(model, initial_adapters.read, lambda name: is_trained(name, spec))
        return
    if isinstance(spec.adapter, Lora):
        _fill_lora(model, spec.adapter, initial, run)
    # Prompt tuning: virtual tokens start as embeddings of the vocabulary (Lester et al., 2021, section 3.2).
    if isinstance(config.tune, SoftPromptBase):
        ids = _initial_prompt_ids(config.tune, run.tokenizer, config.seed)
        names = ("prompt.embedding.weight", "encoder.prompt.embedding.weight")
        plan.fill(model, lambda _: initial.read("embedding.weight")[ids], names.__contains__)


def keep_base(config: RunConfig, spec: ModelSpec, device: torch.device) -> Callable[[Decoder], object]:
    """Return a function that gives a model the frozen matrices as the initial model stores them, for `materialize`.

    It does nothing for other values of `tune.quantization`.

    Raises:
        JinguError: the initial model has no quantized matrices.
    """
    if spec.quantization != "stored" or config.initialize.from_ is None:
        return lambda model: None
    initial = open_model(Path(config.initialize.from_))
    return partial(keep_stored, keep=stored_matrices(initial, device, "tune.quantization"))


def _fill_lora(model: ParallelModel, adapter: Lora, initial: StoredModel, run: Run) -> None:
    """Fill the parameters of LoRA whose initial values depend on the initial model or the data.

    These are DoRA's magnitudes, rows of trained tokens, and, for most values of `init_lora_weights`, A and B.
    """
    plan = model.sharding
    # The weights with the values that they have after quantization. Every rank reads whole tensors.
    base = fake_quantize(initial, model.spec)

    def row_norms(name: str) -> Tensor:
        return base.read(name.replace(".lora_m", ".weight")).double().square().sum(1).sqrt()

    @lru_cache(maxsize=1)
    def factors(module: str) -> dict[str, Tensor]:
        weight = initial.read(f"{module}.weight")
        if adapter.init_lora_weights == "loftq":
            # LoftQ starts from the quantization error (Li et al., 2023, arXiv:2310.08659; with one iteration).
            weight = weight.float() - base.read(f"{module}.weight").float()
        a, b = initial_factors(adapter.init_lora_weights, weight, adapter.of_module(module))
        return {"lora_a": a, "lora_b": b}

    def factor(name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        return factors(module)[leaf]

    # DoRA: magnitudes start as the row norms of the weights that they scale, after quantization.
    plan.fill(model, row_norms, lambda name: name.endswith(".lora_m"))
    ids = list(adapter.trainable_token_indices)
    plan.fill(model, lambda _: initial.read("embedding.weight")[ids], lambda name: name.endswith(".token_rows"))
    if adapter.init_lora_weights == "eva":
        directions = _principal_inputs(initial, adapter, run)
        plan.fill(model, lambda name: directions[name], directions.__contains__)
    elif adapter.init_lora_weights != "default":
        plan.fill(model, factor, lambda name: name.endswith((".lora_a", ".lora_b")))


@torch.no_grad()
def _principal_inputs(initial: StoredModel, adapter: Lora, run: Run) -> dict[str, Tensor]:
    """Return A [R, I] of each adapted layer: the principal directions of its inputs on the first rows of the data.

    EVA: Paischer et al., 2024, arXiv:2410.07170; here without centering, and without redistributing ranks between
    layers. Every rank computes all directions with the whole model on the CPU, so they do not depend on the layout.

    Shapes: R rank, I inputs of the layer, N tokens.
    """
    reference = load_model(initial, torch.float32)
    directions: dict[str, Tensor] = {}

    def observe(name: str, rank: int, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # Incremental SVD: append the new rows to the scaled directions of earlier rows, and keep the main directions.
        rows_NI = inputs[0].flatten(0, -2).float()
        rows_NI = torch.cat([directions[name], rows_NI]) if name in directions else rows_NI
        _, values, right = torch.linalg.svd(rows_NI, full_matrices=False)
        directions[name] = (values.unsqueeze(1) * right)[: 4 * rank]

    for module_name, module in reference.named_modules():
        name = f"{module_name}.lora_a"
        if isinstance(module, Linear) and "blocks." in name and name in parameter_shapes(run.spec):
            module.register_forward_pre_hook(partial(observe, name, adapter.of_module(module_name).rank))
    read_batch = batch_function(run.source, run.objective)
    for row in range(min(_EVA_ROWS, run.config.batch.global_batch_size)):
        reference(model_inputs(read_batch(0, row, 1)))
    return {
        name: normalize(rows[: adapter.of_module(name.removesuffix(".lora_a")).rank])
        for name, rows in directions.items()
    }


def _initial_prompt_ids(settings: SoftPromptBase, tokenizer: Tokenizer, seed: int) -> Tensor:
    """Return the ids of the tokens whose embeddings the virtual tokens start from.

    These are the tokens of `tune.init_text`, repeated until there are enough, or random ones.

    Raises:
        JinguError: the text has no tokens.
    """
    count = settings.num_virtual_tokens
    if settings.init_text is None:
        return torch.randint(tokenizer.vocab_size, (count,), generator=generator_for_name("prompt", seed))
    ids = tokenizer.encode(settings.init_text)
    if not ids:
        raise JinguError("the text has no tokens.", where="tune.init_text", fix="Give a longer one, or null.")
    # Repeat the text until it is long enough.
    repeats = -(-count // len(ids))
    return torch.tensor(ids).repeat(repeats)[:count]
