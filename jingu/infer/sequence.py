"""A sequence: one output of a request in the engine, with its text; and the group of all sequences of a request.

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
# Distance between the seeds of a request's choices. It keeps them apart from requests with consecutive seeds.
_SEED_STRIDE = 0x9E3779B1
# Tokenizers decode an incomplete UTF-8 sequence to this character.
_REPLACEMENT = "\ufffd"


@dataclass(eq=False)
class SequenceGroup:
    """A request in the engine, with its sequences.

    Attributes:
        encoder_ids: source tokens of the encoder; None if the model has no encoder.
        prompt_ids: first tokens of the decoder, including virtual tokens.
        num_prompt_tokens: tokens of the prompt, without virtual tokens.
        adapter: the LoRA adapter of the request; None: the base model.
        num_dequantized: number of leading tokens that are multiplied by dequantized matrices: all tokens of a long
            prompt, or 0.
        num_virtual_tokens: tokens of prompt tuning, at the start of `prompt_ids`.
        bidirectional: positions that attend to each other, in a prefix LM. They are computed in one step, and their
            blocks cannot be shared with other requests.
        start_time: when its first sequence started, by `time.perf_counter`; 0 if none has.
        cached_tokens: prompt tokens that were found in the prefix cache.
        prompt_logprobs: log-probabilities of the prompt's tokens, to be reported with the first event.
        has_state: whether layers of the model keep a state.
        hypotheses: finished hypotheses of beam search with their scores, best first.
        scores: by index, the scores of complete continuations.
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
    has_state: bool = False
    hypotheses: list[tuple[float, list[int]]] = field(default_factory=list)
    scores: dict[int, Score] = field(default_factory=dict)

    @property
    def num_forks(self) -> int:
        """Number of sequences that one sequence of the group forks into: beams, or continuations to score."""
        return max(self.request.num_beams, len(self.request.continuations))

    @property
    def forks(self) -> bool:
        """Whether its sequences fork from the first one; if so, preemption makes all of them start over."""
        return self.num_forks > 1 or bool(self.request.continuations)

    @property
    def shares_blocks(self) -> bool:
        """Whether its KV blocks may be shared: their contents depend only on the tokens up to their end."""
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
        """Return an event of a choice. The first event of choice 0 includes the prompt's log-probabilities."""
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
        index: index of the choice, or of the continuation that it scores.
        token_ids: ids of prompt and output.
        table: its KV blocks, while it is running.
        num_computed: number of tokens whose keys and values are in these blocks.
        num_cached_blocks: number of leading blocks that came from the prefix cache.
        block_hashes: content hashes of its full blocks, and of those that the prompt will fill.
        cumulative_logprob: sum of the log-probabilities of the output's tokens, if they were requested; for a beam,
            its score.
        finish_reason: why the sequence has ended; None before its end.
        eos_token_ids: tokens that end the sequence.
        score_targets: tokens of a continuation to score; None for other sequences.
        token_logprobs: log-probabilities of the targets scored so far.
        is_greedy: whether all targets scored so far are the most likely tokens.
        pooled_D: running sum of the hidden states [D] to pool, in fp64; None before the first ones.
    """

    def __init__(self, group: SequenceGroup, index: int, model: InferenceModel, grammar: Grammar | None = None) -> None:
        request = group.request
        self.group = group
        self.index = index
        self.token_ids = list(group.prompt_ids)
        self.table = BlockTable([])
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
        # Outputs of an encoder-decoder contain sentinels, which are special tokens.
        keep = request.keep_special_tokens or group.encoder_ids is not None
        decode = partial(model.tokenizer.decode, keep_special_tokens=keep)
        self._detokenizer = IncrementalDetokenizer(decode, request.stop)

    @property
    def output_ids(self) -> list[int]:
        """Ids of the output so far."""
        return self.token_ids[len(self.group.prompt_ids) :]

    @property
    def text_prompt_ids(self) -> tuple[int, ...]:
        """Ids of the prompt without virtual tokens, for the repetition penalty."""
        return self.group.prompt_ids[self.group.num_virtual_tokens :]

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose keys and values are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def needs_all_tokens(self) -> bool:
        """Whether outputs of every prompt token are needed, so that none can come from the prefix cache."""
        return self.wants_prompt_logprobs or self.group.request.pooling == "mean"

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits after every token of the prompt are needed."""
        return self.group.request.prompt_logprobs and self.index == 0 and not self.output_ids

    def sampling_rows(self, draft_tokens: abc.Sequence[int]) -> list[SamplingRow]:
        """Return the sampling rows of the tokens after the last one and after each draft token.

        There is no row after a draft token that the grammar does not allow.

        Raises:
            SamplingError: llguidance stopped with an error, for example because the grammar has grown too large.
        """
        rows = [self.sampling_row(draft_tokens[:count]) for count in range(1 + len(draft_tokens))]
        if self._grammar is None:
            return rows
        bitmasks = self._grammar.bitmasks(draft_tokens)
        if self._grammar.error is not None:
            raise SamplingError("refused", f"the output constraint was given up here ({self._grammar.error})")
        return [replace(row, bitmask=bitmask) for row, bitmask in zip(rows, bitmasks, strict=False)]

    def sampling_row(self, draft_tokens: abc.Sequence[int]) -> SamplingRow:
        """Return the sampling row of the token after these draft tokens, without the grammar's bitmask."""
        request = self.group.request
        output = [*self.output_ids, *draft_tokens]
        return SamplingRow(
            request.sampling,
            self.text_prompt_ids,
            output,
            random_uniform(self._seed, len(output)) if request.sampling.temperature else 0.0,
            self.eos_token_ids if len(output) < request.min_tokens else (),
            num_logprobs=request.logprobs,
            logprob_temperature=request.sampling.temperature if request.scaled_logprobs else 1.0,
        )

    def take(self, sampled: SampledToken) -> Event:
        """Append a sampled token and return its event."""
        if not sampled.is_finite:
            return self.fail(SamplingError("error", NON_FINITE_LOGITS))
        if sampled.logprob is not None:
            self.cumulative_logprob += sampled.logprob
        text = self.append(sampled.token_id)
        token = Token(sampled.token_id, text, sampled.logprob, sampled.top)
        return self.group.event(self.index, token, self.finish_reason, self.cumulative_logprob)

    def fail(self, error: SamplingError) -> Event:
        """End the sequence because no token can be sampled, and return its event."""
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
            # The withheld text may still contain a complete stop string.
            reason = "stop" if self._detokenizer.stopped else reason
        self.finish_reason = reason
        return text

    def pool(self, hidden_ND: Tensor, score_weight_1D: Tensor | None = None) -> Event | None:
        """Add the hidden states of the last N tokens to the pooled sum; return the event when the prompt is complete.

        Args:
            score_weight_1D: the score head's weight, in fp64, if the request asks for a score; else None.
        """
        # 1. Add the states; start over at the first chunk, also after a preemption.
        if not len(hidden_ND):
            return None
        if self.pooled_D is None or self.num_computed == len(hidden_ND):
            self.pooled_D = hidden_ND.new_zeros(hidden_ND.shape[1], dtype=torch.float64)
        # Sum states one by one, so that the sum does not depend on how the prompt was split into chunks.
        self.pooled_D = torch.cat([self.pooled_D[None], hidden_ND]).cumsum(0)[-1]
        if self.num_uncomputed:
            return None
        # 2. Make the embedding or the score. Normalization makes a sum as good as a mean.
        if not self.pooled_D.isfinite().all():
            self.finish_reason = "error"
            return self.group.event(self.index, None, "error", error=NON_FINITE_STATES)
        self.finish_reason = "end"
        if score_weight_1D is not None:
            # A separate matmul for each sequence, so that the score does not depend on the batch.
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
        beam.table = BlockTable(
            [list(blocks) for blocks in self.table.blocks], dict(self.table.states), cross_kv=self.table.cross_kv
        )
        return beam

    def fork_to_score(self, index: int) -> Sequence:
        """Return a sequence that scores a continuation after this context. It refers to the same KV blocks."""
        targets = self.group.request.continuations[index]
        sequence = self.fork(targets[0], 0.0)
        sequence.index = index
        # The last token is only a target and needs no forward pass.
        sequence.token_ids[-1:] = targets[:-1]
        sequence.score_targets = targets
        sequence.token_logprobs = []
        return sequence

    @property
    def next_targets(self) -> abc.Sequence[int]:
        """Targets of the next rows of logits. For a context, the first token of each unfinished continuation."""
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


class IncrementalDetokenizer:
    """Converts token ids, one by one, into pieces of text that can be shown immediately.

    The bytes of an incomplete character are withheld until it is complete. Text that may be the beginning of a stop
    string is withheld until it is clear that it is not.

    Attributes:
        stopped: whether a stop string has occurred. The text ends before it.
    """

    def __init__(self, decode: abc.Callable[[list[int]], str], stop: abc.Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # New text is the text of ids[begin:] without that of ids[begin:context_end]. New tokens cannot be decoded by
        # themselves: tokenizers may drop the leading space of the first token, and a token may be part of a character.
        self._begin = 0
        self._context_end = 0
        self._num_returned = 0
        self._withheld = ""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """Return the text that is still withheld."""
        return "" if self.stopped else self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        text = self._withheld + self._decode_new(final=final)
        positions = [position for position in map(text.find, self._stop) if position >= 0]
        if positions:
            self.stopped = True
            self._withheld = ""
            return text[: min(positions)]
        # The end of the text may be the beginning of a stop string.
        num_withheld = 0 if final else max((_partial_match_length(text, stop) for stop in self._stop), default=0)
        end = len(text) - num_withheld
        self._withheld = text[end:]
        return text[:end]

    def _decode_new(self, *, final: bool) -> str:
        """Return complete characters that were not returned before; with `final`, incomplete ones too."""
        context = self._decode(self._ids[self._begin : self._context_end])
        text = self._decode(self._ids[self._begin :])[len(context) :]
        complete = text if final else text.rstrip(_REPLACEMENT)
        new = complete[self._num_returned :]
        if text and len(complete) == len(text):
            # All characters are complete: these tokens become the context of the next ones.
            self._begin = self._context_end
            self._context_end = len(self._ids)
            self._num_returned = 0
        else:
            self._num_returned = max(self._num_returned, len(complete))
        return new


def _partial_match_length(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
