"""Evaluation during training: loss on the validation split, evaluation tasks, and generated samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from jingu.config.sections.data import PrefixLmSettings
from jingu.data.objective import SpanCorruption
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.evaluate.smooth_measures import compute_smooth_measures
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.parallel.mesh import data_rank, num_data_ranks, num_row_replicas
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.zero import eval_mode
from jingu.runtime.device import force_eager
from jingu.runtime.ranks import RankInfo, all_ranks_agree
from jingu.training.batch_transforms import to_device
from jingu.training.run import Run
from jingu.training.step import sum_losses, sum_over_ranks
from jingu.training.task import Task
from jingu.training.validation import ValidationRows


@dataclass(frozen=True)
class EvaluationResult:
    """Loss of a model on validation rows.

    Attributes:
        loss: mean loss in nats per token.
        bits_per_byte: loss in bits per byte of text, which is comparable between tokenizers, and with compressors; None
            for span corruption, where the model reads most of the text instead of predicting it.
        tokens: number of tokens in the loss; for span corruption, this includes sentinels and EOS.
        bytes: bytes of text of these tokens; None for span corruption.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    bytes: int | None


def evaluate(
    model: ParallelModel,
    task: Task,
    rows: ValidationRows,
    byte_lengths: np.ndarray,
    num_rows: int,
    micro_batch_size: int,
) -> EvaluationResult:
    """Evaluate the first `num_rows` validation rows, divided over the data-parallel ranks. Every rank must call it.

    Args:
        byte_lengths: bytes of text per token of the vocabulary, by id.
    """
    mesh = model.sharding.mesh
    device = torch.device(mesh.device_type)
    lengths = torch.from_numpy(byte_lengths.astype(np.int64))
    loss_1 = torch.zeros(1, dtype=torch.float64, device=device)
    counts_2 = torch.zeros(2, dtype=torch.float64, device=device)  # tokens, bytes
    with eval_mode(model), force_eager():
        # A forward pass gathers sharded parameters, so every rank must run the same number of them. A rank that has no
        # rows left runs on padding.
        for start in range(0, num_rows, micro_batch_size * num_data_ranks(mesh)):
            first = start + data_rank(mesh) * micro_batch_size
            batch = rows.batch(first, micro_batch_size, end=num_rows)
            labels = batch.labels[batch.labels >= 0]
            loss_1 += task.loss(model, to_device(batch, device))
            counts_2[0] += labels.numel()
            counts_2[1] += lengths[labels].sum()
    loss = float(sum_losses(loss_1, mesh).item())
    # Ranks that share a row have each counted its tokens.
    tokens, size = (sum_over_ranks(counts_2) / num_row_replicas(mesh)).tolist()
    tokens = max(tokens, 1.0)
    size = max(size, 1.0)
    if isinstance(rows.objective, SpanCorruption):
        return EvaluationResult(loss / tokens, None, int(tokens), None)
    return EvaluationResult(loss / tokens, loss / math.log(2) / size, int(tokens), int(size))


def average_results(results: Mapping[str, EvaluationResult], shares: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics by name: means over the sources, and with several sources also each source's own.

    Args:
        results: results by source.
        shares: weight of each source in the means: its share of the run's samples.
    """
    if not results:
        return {}
    losses = {name: result.loss for name, result in results.items()}
    bits = {name: result.bits_per_byte for name, result in results.items() if result.bits_per_byte is not None}
    metrics: dict[str, float | None] = {"loss": _weighted_mean(losses, shares), "bits_per_byte": None}
    if bits:
        metrics["bits_per_byte"] = _weighted_mean(bits, shares)
    metrics["tokens"] = sum(result.tokens for result in results.values())
    metrics["bytes"] = sum(result.bytes or 0 for result in results.values()) or None
    if len(results) > 1:
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()}
        metrics |= {f"bits_per_byte/{name}": value for name, value in bits.items()}
    return metrics


def _weighted_mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[name] * value for name, value in values.items()) / sum(weights[name] for name in values)


def _inference_model(run: Run, model: ParallelModel) -> InferenceModel:
    """Return the trained model as a model of the inference engine."""
    prefix_lm = isinstance(run.config.data.objective, PrefixLmSettings)
    return InferenceModel(model, model.spec, run.tokenizer, is_prefix_lm=prefix_lm)


def measure_tasks(run: Run, model: ParallelModel) -> dict[str, dict[str, float]]:
    """Return smooth measures on the evaluation tasks of a run, by task and measure.

    Every rank must call it, because it gathers parameters. The data-parallel ranks divide the documents, except for an
    encoder-decoder with sharded parameters.
    """
    if not run.tasks:
        return {}
    mesh = model.sharding.mesh
    inference_model = _inference_model(run, model)
    # An encoder runs only in some steps of the engine. If each rank had other requests, the ranks would gather its
    # parameters in different steps, and hang. So all ranks score all documents then.
    if num_data_ranks(mesh) == 1 or (model.spec.num_encoder_layers is not None and run.config.parallel.zero_stage > 0):
        scorer = Scorer(Engine(inference_model), AnswerCache(None))
    else:
        engine = Engine(inference_model, any_rank_has_work=lambda has_work: not all_ranks_agree(not has_work))
        share = RankInfo(data_rank(mesh), num_data_ranks(mesh), torch.device(mesh.device_type))
        scorer = Scorer(engine, AnswerCache(None), share)
    with eval_mode(model):
        return {task.settings.task: compute_smooth_measures(task, scorer) for task in run.tasks}


def generate_samples(run: Run, model: ParallelModel) -> list[tuple[str, str]]:
    """Return (prompt, continuation) for each sample prompt. Every rank must call it, because it gathers parameters."""
    settings = run.config.evaluation
    engine = Engine(_inference_model(run, model))
    requests = [
        Request(
            engine.model.encode(prompt), SamplingParams(temperature=0.7, top_p=0.9, seed=seed), settings.max_new_tokens
        )
        for seed, prompt in enumerate(settings.sample_prompts, start=run.config.seed)
    ]
    with eval_mode(model):
        return list(zip(settings.sample_prompts, engine.generate(requests), strict=True))
