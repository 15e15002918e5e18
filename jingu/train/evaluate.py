"""Held-out loss in nats a token and in bits per byte, and texts that show how the model writes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from jingu.config.sections.data import PrefixSettings
from jingu.data.objective import SpanCorruption
from jingu.infer.engine import Engine
from jingu.infer.load import loaded
from jingu.infer.request import Request
from jingu.infer.sampling import Sampling
from jingu.parallel.apply import scoring
from jingu.parallel.mesh import data_rank, data_ranks, row_copies
from jingu.parallel.pipeline import Model
from jingu.parallel.sharing import sharing_of
from jingu.runtime.device import eager
from jingu.train.run import Run
from jingu.train.step import summed_losses, summed_over_ranks
from jingu.train.task import HeldOut, Task, to_device


@dataclass(frozen=True)
class Evaluation:
    """What held-out text costs the model. Bits per byte compare across tokenizers, and with compressors; of a text of
    which the model reads the greater part they would say nothing, and there are none."""

    loss: float
    bits_per_byte: float | None
    tokens: int
    """Of the loss; of removed spans, the sentinels and the end are among them."""
    bytes: int | None


def evaluate(
    model: Model, task: Task, rows: HeldOut, byte_lengths: np.ndarray, *, sequences: int | None, micro_size: int
) -> Evaluation:
    """Evaluate the first `sequences` held-out rows (None: all), spread over the ranks.

    Every rank runs the same number of forward passes, since sharded parameters are gathered in each; a rank that
    has no rows left runs on rows without labels.
    """
    mesh = sharing_of(model).mesh
    device = torch.device(mesh.device_type)
    count = rows.count if sequences is None else min(sequences, rows.count)
    ranks, rank = data_ranks(mesh), data_rank(mesh)
    lengths = torch.from_numpy(byte_lengths.astype(np.int64))
    losses = torch.zeros(1, dtype=torch.float64, device=device)
    counts = torch.zeros(2, dtype=torch.float64, device=device)  # tokens, bytes
    with scoring(model), eager():
        for start in range(0, count, micro_size * ranks):
            batch = rows.batch(start + rank * micro_size, micro_size, end=count)
            kept = batch.labels[batch.labels >= 0]
            losses += task.loss(model, to_device(batch, device))
            counts[0] += kept.numel()
            counts[1] += lengths[kept].sum()
    loss = float(summed_losses(losses, mesh).item())
    tokens, size = (summed_over_ranks(counts) / row_copies(mesh)).tolist()
    tokens, size = max(tokens, 1.0), max(size, 1.0)
    if isinstance(rows.objective, SpanCorruption):
        return Evaluation(loss / tokens, None, int(tokens), None)
    return Evaluation(loss / tokens, loss / math.log(2) / size, int(tokens), int(size))


def write_samples(run: Run, model: Model) -> list[tuple[str, str]]:
    """(prompt, continuation) for each prompt. Every rank must call it: sharded parameters are gathered as it writes."""
    prompts, tokens = run.config.evaluation.prompts, run.config.evaluation.prompt_tokens
    whole = isinstance(run.config.data.objective, PrefixSettings)
    engine = Engine(loaded(model, model.spec, run.tokenizer, reads_whole=whole))
    requests = [
        Request(engine.loaded.encode(prompt), Sampling(temperature=0.7, top_p=0.9, seed=seed), tokens)
        for seed, prompt in enumerate(prompts, start=run.config.seed)
    ]
    with scoring(model):
        return list(zip(prompts, engine.run(requests), strict=True))
