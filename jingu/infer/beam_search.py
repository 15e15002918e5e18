"""Beam search. Each step keeps the best continuations of all beams together. Scores, the treatment of end tokens and
the stopping rule are those of transformers' `generate` with `early_stopping=False`.

Shapes: K beams, V vocabulary.
"""

from __future__ import annotations

import math
from collections import abc

import torch
from torch import Tensor

from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Event, Token
from jingu.infer.sampling import NON_FINITE_LOGITS, SamplingRow, apply_penalties, widest_dtype
from jingu.infer.sequence import Sequence, SequenceGroup
from jingu.runtime.device import copy_to_device


def best_continuations(group: SequenceGroup, beams: abc.Sequence[Sequence], logits_KV: Tensor) -> Tensor:
    """Return [M, 3]: score, beam and token of the best continuations of all beams, best first."""
    logprobs_KV = logits_KV.log_softmax(-1)
    rows = [SamplingRow(group.request.sampling, beam.text_prompt_ids, beam.output_ids) for beam in beams]
    past_K1 = copy_to_device([[beam.cumulative_logprob] for beam in beams], logits_KV.device, logprobs_KV.dtype)
    scores_KV = apply_penalties(logprobs_KV, rows) + past_K1
    # Even if all end tokens of every beam are among the best, `num_beams` other candidates are left.
    best = scores_KV.flatten().topk(group.request.num_beams * (1 + len(beams[0].eos_token_ids)))
    size = logits_KV.shape[1]
    columns = (best.values, best.indices // size, best.indices % size)
    return torch.stack([column.to(widest_dtype(logits_KV)) for column in columns], 1)


def advance_beams(
    group: SequenceGroup, beams: abc.Sequence[Sequence], best: abc.Sequence[tuple[float, float, float]]
) -> list[Sequence] | None:
    """Return the beams to continue, best first; an empty list ends the search. Add finished hypotheses to
    `group.hypotheses`. Return None if no score is finite.

    Args:
        best: rows of `best_continuations`.
    """
    request = group.request
    num_beams = request.num_beams
    eos_token_ids = beams[0].eos_token_ids
    length = len(beams[0].output_ids) + 1
    if not math.isfinite(best[0][0]):
        return None
    survivors: list[Sequence] = []
    # 1. Split the continuations into finished hypotheses and beams to continue.
    for rank, (score, *places) in enumerate(best):
        beam, token_id = map(int, places)
        if token_id in eos_token_ids or length == request.max_tokens:
            # A hypothesis counts only if it ranks among the best `num_beams` continuations.
            if rank < num_beams:
                hypothesis = [*beams[beam].output_ids, token_id]
                group.hypotheses.append((score / length**request.length_penalty, hypothesis))
        elif len(survivors) < num_beams:
            survivors.append(beams[beam].fork(token_id, score))
    # 2. Keep the best hypotheses.
    group.hypotheses.sort(key=lambda hypothesis: hypothesis[0], reverse=True)
    del group.hypotheses[num_beams:]
    if survivors and len(group.hypotheses) == num_beams:
        # 3. Stop unless the best beam, if it ended now with its current score, would beat the worst hypothesis.
        best_score = survivors[0].cumulative_logprob / length**request.length_penalty
        return survivors if best_score > group.hypotheses[-1][0] else []
    return survivors


def hypothesis_events(group: SequenceGroup, model: InferenceModel, failed: bool) -> list[Event]:
    """Return the events of the best hypotheses, or error events if the search failed on non-finite logits."""
    if failed:
        return [group.event(choice, None, "error", error=NON_FINITE_LOGITS) for choice in range(group.request.n)]
    events = []
    for choice, (score, token_ids) in enumerate(group.hypotheses[: group.request.n]):
        sequence = Sequence(group, choice, model)
        for token_id in token_ids:
            text = sequence.append(token_id)
            events.append(group.event(choice, Token(token_id, text), sequence.finish_reason, score))
    return events
