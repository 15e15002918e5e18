"""One output sequence of a request while it is generated, and the group of all sequences of a request.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections import abc
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from jingu.infer.detokenizer import IncrementalDetokenizer
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import BlockTable
from jingu.infer.multi_lora import Adapter
from jingu.infer.request import Event, FinishReason, Request, Score, Token
from jingu.infer.sampling import (
    NON_FINITE_LOGITS,
    SampledToken,
    SamplingError,
    SamplingRow,
    random_uniform,
)
from jingu.infer.structured_output import Grammar
from jingu.runtime.device import copy_to_device

NON_FINITE_STATES = "the model's hidden states are not finite"
# Keeps the random numbers of neighbouring seeds and of one request's choices apart.
_SEED_STRIDE = 0x9E3779B1


@dataclass(eq=False)
class SequenceGroup:
    """A request in the engine, with its sequences.

    Attributes:
        encoder_ids: what the encoder reads; None: the model has none.
        prompt_ids: what the decoder starts with, virtual tokens included.
        num_prompt_tokens: tokens of the prompt, without virtual ones.
        adapter: the LoRA adapter that it uses; None: the base model.
        num_dequantized: tokens from the first that are multiplied by dequantized matrices: a long prompt, or none.
        num_virtual_tokens: of prompt tuning, at the start of `prompt_ids`.
        bidirectional: positions that see each other, in a prefix LM. They are computed in one step, and their blocks
            cannot be shared with other requests.
        start_time: when its first sequence started, by `time.perf_counter`.
        prompt_logprobs: to be reported with the first event.
        hypotheses: complete ones of beam search, with their scores, best first.
        scores: by index, of the continuations that are complete.
    """

    request_id: int
    request: Request
    encoder_ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...]
    num_prompt_tokens: int
    adapter: Adapter | None = None
    num_dequantized: int = 0
    num_virtual_tokens: int = 0
    bidirectional: range = range(0)
    start_time: float = 0.0
    cached_tokens: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: tuple[Token, ...] = ()
    hypotheses: list[tuple[float, list[int]]] = field(default_factory=list)
    scores: dict[int, Score] = field(default_factory=dict)

    @property
    def num_forks(self) -> int:
        """How many sequences one sequence of the group forks into: beams, or continuations to score."""
        return max(self.request.num_beams, len(self.request.continuations))

    @property
    def forks(self) -> bool:
        """Whether its sequences fork from the first one, and start over together when they are preempted."""
        return self.num_forks > 1 or bool(self.request.continuations)

    @property
    def shares_blocks(self) -> bool:
        """Whether its KV blocks depend on nothing but the tokens up to their end, so that others may use them."""
        return self.encoder_ids is None and not self.bidirectional

    @property
    def unfinished(self) -> list[int]:
        """Indices of the choices or continuations that have not ended."""
        if self.request.continuations:
            return [index for index in range(len(self.request.continuations)) if index not in self.scores]
        if self.request.num_beams > 1:
            return list(range(self.request.n))
        return [sequence.index for sequence in self.sequences if sequence.finish_reason is None]

    def event(
        self,
        choice: int,
        token: Token | None,
        reason: FinishReason | None,
        logprob: float = 0.0,
        error: str | None = None,
        score: Score | None = None,
    ) -> Event:
        """Return an event of a choice; the first one of choice 0 brings the prompt's log-probabilities."""
        prompt_logprobs: tuple[Token, ...] = ()
        if choice == 0:
            prompt_logprobs = self.prompt_logprobs
            self.prompt_logprobs = ()
        counts = (self.num_prompt_tokens, self.cached_tokens)
        return Event(
            self.request_id, choice, token, reason, error, *counts, self.start_time, prompt_logprobs, logprob, score
        )


class Sequence:
    """One output of a request: its tokens, its KV blocks, and how it ends.

    Attributes:
        index: of the choice, or of the continuation that it scores.
        token_ids: of prompt and output.
        table: its KV blocks, while it is running.
        num_computed: tokens whose keys and values are in these blocks.
        num_cached_blocks: how many of the blocks, from the first, came from the prefix cache.
        block_hashes: of its full blocks, and of those that the prompt will fill.
        cumulative_logprob: sum of the log-probabilities of the output's tokens.
        finish_reason: None while it is generated.
        eos_token_ids: tokens that end it.
        score_targets: a continuation to score; None: the sequence generates.
        token_logprobs: of the targets scored so far.
        is_greedy: whether these are the most likely tokens.
        pooled_D: sum of the hidden states [D] that the embedding is made of so far, in fp64.
    """

    def __init__(self, group: SequenceGroup, index: int, model: InferenceModel, grammar: Grammar | None = None) -> None:
        request = group.request
        self.group = group
        self.index = index
        self.token_ids = list(group.prompt_ids)
        self.table = BlockTable()
        self.num_computed = 0
        self.num_cached_blocks = 0
        self.block_hashes: list[bytes] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.eos_token_ids = (*(() if request.ignore_eos else model.eos_token_ids), *request.stop_token_ids)
        self.score_targets: tuple[int, ...] | None = None
        self.token_logprobs: list[float] = []
        self.is_greedy = True
        self.pooled_D: Tensor | None = None
        self._seed = request.sampling.seed + index * _SEED_STRIDE
        self._grammar = grammar
        # The output of an encoder-decoder contains sentinels, which are special tokens.
        keep = request.keep_special_tokens or group.encoder_ids is not None
        decode = partial(model.tokenizer.decode, keep_special_tokens=keep)
        self._detokenizer = IncrementalDetokenizer(decode, request.stop)

    @property
    def output_ids(self) -> list[int]:
        """Ids of the output so far."""
        return self.token_ids[len(self.group.prompt_ids) :]

    @property
    def text_prompt_ids(self) -> tuple[int, ...]:
        """Ids of the prompt without virtual tokens, as penalties count them."""
        return self.group.prompt_ids[self.group.num_virtual_tokens :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def needs_all_tokens(self) -> bool:
        """Whether something of every token of the prompt is needed, so that none can come from the prefix cache."""
        return self.wants_prompt_logprobs or self.group.request.pooling == "mean"

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits after every token of the prompt are needed."""
        return self.group.request.prompt_logprobs and self.index == 0 and not self.output_ids

    def sampling_rows(self, draft_tokens: abc.Sequence[int]) -> list[SamplingRow]:
        """Return what decides the tokens after the last one and after each draft token.

        There is no row after a draft token that the grammar does not allow.

        Raises:
            SamplingError: the grammar was given up.
        """
        rows = [self.sampling_row(draft_tokens[:count]) for count in range(1 + len(draft_tokens))]
        if self._grammar is None:
            return rows
        bitmasks = self._grammar.bitmasks(draft_tokens)
        if self._grammar.error is not None:
            raise SamplingError("refused", f"the output constraint was given up here ({self._grammar.error})")
        return [replace(row, bitmask=bitmask) for row, bitmask in zip(rows, bitmasks, strict=False)]

    def sampling_row(self, draft_tokens: abc.Sequence[int]) -> SamplingRow:
        """Return what decides the token after these draft tokens, apart from the grammar."""
        request = self.group.request
        output = [*self.output_ids, *draft_tokens]
        return SamplingRow(
            request.sampling,
            self.text_prompt_ids,
            output,
            random_uniform(self._seed, len(output)),
            self.eos_token_ids if len(output) < request.min_tokens else (),
            num_logprobs=request.logprobs,
            logprob_temperature=request.sampling.temperature if request.scaled_logprobs else 1.0,
        )

    def take(self, sampled: SampledToken) -> Event:
        """Continue with a token, and return its event."""
        if not sampled.is_finite:
            return self.fail(SamplingError("error", NON_FINITE_LOGITS))
        if sampled.logprob is not None:
            self.cumulative_logprob += sampled.logprob
        text = self.append(sampled.token_id)
        token = Token(sampled.token_id, text, sampled.logprob, sampled.top)
        return self.group.event(self.index, token, self.finish_reason, self.cumulative_logprob)

    def fail(self, error: SamplingError) -> Event:
        """End the sequence, as no token can be sampled, and return its event."""
        self.finish_reason = error.reason
        return self.group.event(self.index, None, error.reason, self.cumulative_logprob, str(error))

    def append(self, token_id: int) -> str:
        """Append a token and return the text that it completes. Set `finish_reason` if the sequence ends with it."""
        self.token_ids.append(token_id)
        reason: FinishReason | None = "end" if token_id in self.eos_token_ids else None
        text = "" if reason else self._detokenizer.push(token_id)
        if self._grammar is not None and self._grammar.accept(token_id):
            reason = "end"
        if reason is None and self._detokenizer.stopped:
            reason = "stop"
        if reason is None and len(self.output_ids) == self.group.request.max_tokens:
            reason = "length"
        if reason is not None:
            text += self._detokenizer.finish()
            # The text that was withheld may contain a complete stop string, now that nothing follows.
            reason = "stop" if self._detokenizer.stopped else reason
        self.finish_reason = reason
        return text

    def pool(self, hidden_ND: Tensor, score_weight_1D: Tensor | None = None) -> Event | None:
        """Add the hidden states of the last N tokens to the embedding; return its event when it is complete.

        Args:
            score_weight_1D: the score head's weight, in fp64, where the request wants a score.
        """
        if not len(hidden_ND):
            return None
        if self.pooled_D is None or self.num_computed == len(hidden_ND):
            self.pooled_D = hidden_ND.new_zeros(hidden_ND.shape[1], dtype=torch.float64)
        # Summed one by one, so that the sum does not depend on how the prompt was divided into chunks.
        self.pooled_D = torch.cat([self.pooled_D[None], hidden_ND]).cumsum(0)[-1]
        if self.num_uncomputed:
            return None
        if not self.pooled_D.isfinite().all():
            self.finish_reason = "error"
            return self.group.event(self.index, None, "error", error=NON_FINITE_STATES)
        self.finish_reason = "end"
        if score_weight_1D is not None:
            # A product of its own, so that the score does not depend on the batch.
            pooled_D = score_weight_1D @ self.pooled_D
        else:
            pooled_D = normalize(self.pooled_D, dim=0)
        embedding = tuple(pooled_D.float().tolist())
        return replace(self.group.event(self.index, None, "end"), embedding=embedding)

    def fork(self, token_id: int, logprob: float) -> Sequence:
        """Return a beam that continues this one with a token. It refers to the same KV blocks."""
        beam = copy(self)
        beam.token_ids = [*self.token_ids, token_id]
        beam.cumulative_logprob = logprob
        beam.block_hashes = list(self.block_hashes)
        beam.table = BlockTable(list(self.table.blocks), self.table.cross_kv)
        return beam

    def fork_to_score(self, index: int) -> Sequence:
        """Return a sequence that scores a continuation after this context. It refers to the same KV blocks."""
        targets = self.group.request.continuations[index]
        sequence = self.fork(targets[0], 0.0)
        sequence.index = index
        # The last token is a target only: nothing follows it.
        sequence.token_ids[-1:] = targets[:-1]
        sequence.score_targets = targets
        sequence.token_logprobs = []
        return sequence

    @property
    def next_targets(self) -> abc.Sequence[int]:
        """What the next rows of logits are to predict: of a context, the first target of each continuation."""
        if self.score_targets is not None:
            return self.score_targets[len(self.token_logprobs) :]
        continuations = self.group.request.continuations
        return [continuations[index][0] for index in self.group.unfinished] if continuations else []

    def add_scores(self, scores: abc.Sequence[tuple[float, float]]) -> None:
        """Add the log-probabilities of the next targets, and whether each is the most likely token."""
        self.token_logprobs += [logprob for logprob, _ in scores]
        self.is_greedy = self.is_greedy and all(is_best for _, is_best in scores)


def score_targets(logits_NV: Tensor, targets: abc.Sequence[int]) -> Tensor:
    """Return [N, 2]: the log-probability of each row's target, and 1 if it is the most likely token."""
    targets_N = copy_to_device(targets, logits_NV.device, torch.int64)
    logprobs_N = logits_NV.log_softmax(1).gather(1, targets_N[:, None])[:, 0]
    is_best_N = logits_NV.argmax(1) == targets_N
    return torch.stack([logprobs_N, is_best_N.to(logprobs_N.dtype)], 1)
