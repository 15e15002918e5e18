"""Beam search: at each step the likeliest continuations of all beams together go on. Scores, ends and the rule by which
a search is over are those of transformers' `generate` (with `early_stopping=False`).

Shapes: K beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jingu.infer.choice import NOT_FINITE, Choice, Job
from jingu.infer.load import Loaded
from jingu.infer.request import Event, Token
from jingu.infer.sampling import penalised


def extend(job: Job, beams: Sequence[Choice], logits_KV: Tensor) -> list[Choice] | None:
    """The beams that go on, best first; none: the search is over. Hypotheses that end are put into `job.found`. None
    where no score is a finite number."""
    request, prompt = job.request, job.prompt[job.trained :]
    wanted, ends, length = request.beams, beams[0].ends, len(beams[0].generated) + 1
    rows = zip(beams, logits_KV.log_softmax(-1), strict=True)
    scores_KV = torch.stack(
        [penalised(row_V, prompt, beam.generated, request.sampling) + beam.logprob for beam, row_V in rows]
    )
    best = scores_KV.flatten().topk(wanted * (1 + len(ends)))
    if not best.values[0].isfinite():
        return None
    going: list[Choice] = []
    for rank, (score, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        beam, id_ = divmod(place, scores_KV.shape[1])
        if id_ in ends or length == request.max_tokens:
            if rank < wanted:
                job.found.append((score / length**request.length_penalty, [*beams[beam].generated, id_]))
        elif len(going) < wanted:
            going.append(beams[beam].fork(id_, score))
    job.found.sort(key=lambda each: each[0], reverse=True)
    del job.found[wanted:]
    if going and len(job.found) == wanted:
        # The best of what goes on could still be found, were it to end with the score that it has.
        best_left = going[0].logprob / length**request.length_penalty
        return going if best_left > job.found[-1][0] else []
    return going


def hypotheses(job: Job, loaded: Loaded, broken: bool) -> list[Event]:
    """The events of the best that were found; where the search is broken, of its errors."""
    events = []
    for number, (score, ids) in enumerate([] if broken else job.found[: job.request.n]):
        choice = Choice(job, number, loaded)
        for id_ in ids:
            text = choice.grow(id_)
            events.append(job.event(number, Token(id_, text), choice.finish, score))
    for number in range(job.request.n if broken else 0):
        events.append(replace(job.event(number, None, "error"), error=NOT_FINITE))
    return events
