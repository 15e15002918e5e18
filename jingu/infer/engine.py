"""The inference engine: it turns requests into events, one step at a time. It uses no threads and no network.

A step is one forward pass over tokens of many sequences (continuous batching). The scheduler selects the tokens
(`jingu.infer.scheduler`), a speculator proposes draft tokens (`jingu.infer.speculation`), the model runner computes
logits with the paged KV cache (`jingu.infer.model_runner`), and each sequence takes its next token
(`jingu.infer.sequence`).

If a model is sharded over several ranks, each rank has an engine, makes the same calls and takes the same steps.

Shapes: B = 1, T tokens of a step, S source tokens, N rows of logits, K beams, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import abc
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.admission import Admission
from jingu.infer.beam_search import advance_beams, best_continuations, hypothesis_events
from jingu.infer.cuda_graphs import CudaGraphRunner
from jingu.infer.engine_interface import EngineSettings, EngineStats
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import SequenceChunk, pool_bytes
from jingu.infer.model_runner import ModelRunner
from jingu.infer.pacing import PrefillPacer
from jingu.infer.prediction_speculator import PredictionSpeculator
from jingu.infer.request import Event, Pooling, Request, Score, Token
from jingu.infer.sampling import (
    NON_FINITE_LOGITS,
    SamplingError,
    SamplingParams,
    SamplingRow,
    sample_rows,
    top_logprobs,
)
from jingu.infer.scheduler import ScheduledSequence, Scheduler
from jingu.infer.sequence import Sequence, SequenceGroup, score_targets
from jingu.infer.speculation import DraftModelSpeculator, NgramSpeculator, Speculator
from jingu.infer.state_cache import StateCache
from jingu.infer.structured_output import GrammarCompiler
from jingu.model.decoder import Decoder
from jingu.runtime.device import copy_to_device

# Appends the next token to a sequence and returns the event.
NextEvent = abc.Callable[[], Event]


class Engine:
    """The engine of one process, or of one of the ranks that share a model.

    Args:
        model: the model that generates.
        settings: None uses the defaults.
        draft_model: proposes draft tokens (speculative decoding); None: none, or prompt lookup (see `settings`).
        graphs: captures and replays steps as CUDA graphs; None launches operations one by one.
        any_rank_has_work: returns whether any rank has work, given whether this one has. Ranks with requests of their
            own must take the same number of steps if their forward passes gather parameters from each other (FSDP).

    Raises:
        JinguError: the model does not support the draft model, CUDA graphs or the attention backend.
    """

    def __init__(
        self,
        model: InferenceModel,
        settings: EngineSettings | None = None,
        draft_model: InferenceModel | None = None,
        graphs: CudaGraphRunner | None = None,
        any_rank_has_work: abc.Callable[[bool], bool] = bool,
    ) -> None:
        self.model = model
        self._any_rank_has_work = any_rank_has_work
        self.settings = settings or EngineSettings()
        block_size = self.settings.tokens_per_block(model)
        chunk_size = self.settings.prefill_chunk_size
        self._pools = self.settings.pools(model)
        self._admission = Admission(model, self.settings, self._pools)
        self._admission.check_drafts(draft_model)
        num_blocks = [pool.num_blocks for pool in self._pools]
        self._runner = ModelRunner(model, num_blocks, block_size, graphs, self.settings.attention_backend)
        limit = self.settings.max_prefill_seconds
        self._pacer = None if limit is None else PrefillPacer(limit, chunk_size)
        # As many states are kept for prefixes as sequences can have.
        self._states = StateCache(self.settings.max_num_seqs, block_size)
        self._scheduler = Scheduler(
            self._pools, self._runner.cache, self.settings.max_num_seqs, chunk_size, self._states, self._pacer
        )
        self._num_draft_tokens = self.settings.draft_tokens(draft_model)
        # Without draft tokens, there is nothing to propose.
        self._speculator: Speculator | None = NgramSpeculator() if self._num_draft_tokens else None
        if draft_model is not None:
            self._speculator = DraftModelSpeculator(draft_model, model, max(num_blocks), block_size, chunk_size)
        if self.settings.use_predictions:
            self._speculator = PredictionSpeculator(model, max(num_blocks), block_size, chunk_size)
        self._grammars = GrammarCompiler(model.tokenizer, model.spec.vocab_size, model.eos_token_ids[0])
        self._groups: dict[int, SequenceGroup] = {}
        self._events: list[Event] = []
        self._next_request_id = 0
        self._block_sizes = pool_bytes(model.spec, block_size, model.parameter.itemsize)
        total_bytes = sum(pool.num_usable * size for pool, size in zip(self._pools, self._block_sizes, strict=True))
        state_memory = self.settings.state_memory(model)
        self._state_size = state_memory // (2 * self.settings.max_num_seqs)
        total_bytes += state_memory
        self._stats = EngineStats(total_blocks=sum(pool.num_usable for pool in self._pools), total_bytes=total_bytes)

    # Complete results

    def run(self, requests: abc.Sequence[Request], error_fix: str = "Try --precision fp32.") -> list[list[Event]]:
        """Run requests in one batch, to their ends; return the events of each request.

        Steps may also advance requests that were submitted before; the next step returns their events.

        Args:
            error_fix: what the error of a request that fails tells the user to do.

        Raises:
            JinguError: a request does not fit the model, or fails, as with logits that are not finite. All requests
                have ended then, so that the engine can be used again.
        """
        # 1. A request that does not fit ends those before it.
        events: dict[int, list[Event]] = {}
        try:
            for request in requests:
                events[self.submit(request)] = []
        except JinguError:
            for request_id in events:
                self.cancel(request_id)
            self._events = [event for event in self._events if event.request_id not in events]
            raise
        # 2. Take steps until all have ended.
        unrelated: list[Event] = []
        fillers: set[int] = set()
        while self._any_rank_has_work(self._has_any(events) or self._has_any(fillers)):
            if not self._has_any(events) and not self._has_any(fillers):
                # Only other ranks have work: score something, so that this rank takes part in their forward passes.
                fillers = {
                    self.submit(request)
                    for request in self._score_requests((), [[self.model.tokenizer.eos_token_id]], None)
                }
            for event in self.step():
                if event.request_id not in fillers:
                    events.get(event.request_id, unrelated).append(event)
        self._events = unrelated + self._events
        # 3. An error of any of them is an error of the call.
        for event in chain(*events.values()):
            if event.error is not None:
                raise JinguError(f"{event.error}.", where=self.model.name, fix=error_fix)
        return list(events.values())

    def _has_any(self, request_ids: abc.Iterable[int]) -> bool:
        """Return whether any of these requests has not ended."""
        return any(request_id in self._groups for request_id in request_ids)

    def generate(self, requests: abc.Sequence[Request]) -> list[str]:
        """Run requests in one batch; return the text of each one's first choice. Raise JinguError as `run` does."""
        return [
            "".join(event.token.text for event in events if event.choice == 0 and event.token is not None)
            for events in self.run(requests)
        ]

    def score(
        self, context: abc.Sequence[int], continuations: abc.Sequence[abc.Sequence[int]], adapter: str | None = None
    ) -> list[Score]:
        """Return the log-probabilities of continuations after a context.

        The context is computed once for all continuations, and the scores do not depend on what else the engine
        computes. The context may have the virtual tokens of prompt tuning, use bidirectional attention (prefix LM), or
        be the source of an encoder-decoder, whose decoder then scores the continuations.

        Args:
            context: token ids, as a request's prompt; see `InferenceModel.encode`.
            continuations: token ids of each continuation, at least one id each.
            adapter: name of the LoRA adapter to use; None uses the base model.

        Raises:
            JinguError: context and continuations do not fit the model, or its logits are not finite.
        """
        return self.score_many([(context, continuations)], adapter)[0]

    def score_many(
        self,
        requests: abc.Sequence[tuple[abc.Sequence[int], abc.Sequence[abc.Sequence[int]]]],
        adapter: str | None = None,
    ) -> list[list[Score]]:
        """Return the scores of several contexts, each with its continuations, computed in one batch; see `score`."""
        batches = [self._score_requests(context, continuations, adapter) for context, continuations in requests]
        results = iter(self.run(list(chain(*batches))))
        return [list(chain(*(_scores_of(next(results)) for _ in batch))) for batch in batches]

    def _score_requests(
        self, context: abc.Sequence[int], continuations: abc.Sequence[abc.Sequence[int]], adapter: str | None
    ) -> list[Request]:
        """Return the requests that score the continuations of a context."""
        # A request has as many continuations as can run at a time; they share one computation of the context.
        longest = max(map(len, continuations), default=0)
        num_tokens = len(context) + self.model.spec.prompts[0]
        num_forks = min(
            (pool.num_usable - pool.most_blocks(num_tokens)) // (1 + pool.most_blocks(longest)) for pool in self._pools
        )
        num_forks = max(1, min(self.settings.max_num_seqs, num_forks))
        parts = [continuations[first : first + num_forks] for first in range(0, len(continuations), num_forks)]
        return [
            Request(
                tuple(context),
                SamplingParams(),
                longest,
                adapter=adapter,
                continuations=tuple(tuple(ids) for ids in part),
            )
            for part in parts
        ]

    def embed(
        self, prompts: abc.Sequence[abc.Sequence[int]], pooling: Pooling = "mean", adapter: str | None = None
    ) -> list[tuple[float, ...]]:
        """Return the embedding [D] of each prompt: final hidden states, pooled over its tokens and normalized to length
        1. With pooling "score", return the reward model's score [1] of each prompt.

        Raises:
            JinguError: the model has no embeddings or scores, a prompt does not fit it, or its states are not finite.
        """
        requests = [Request(tuple(prompt), SamplingParams(), 1, adapter=adapter, pooling=pooling) for prompt in prompts]
        return [event.embedding for (event,) in self.run(requests) if event.embedding is not None]

    # Requests

    def submit(self, request: Request) -> int:
        """Accept a request and return its id. Raise JinguError if it can never be served."""
        group = self._admission.make_group(request, self._next_request_id)
        # Beams and continuations fork from a single sequence.
        num_sequences = 1 if group.forks else request.n
        grammar = None if request.constraint is None else self._grammars.compile(request.constraint)
        for index in range(num_sequences):
            group.sequences.append(Sequence(group, index, self.model, grammar and grammar.copy()))
        self._next_request_id += 1
        self._groups[group.request_id] = group
        self._scheduler.waiting.extend(group.sequences)
        self._stats.prompt_tokens += group.num_prompt_tokens
        return group.request_id

    @cached_property
    def _score_weight_1D(self) -> Tensor:  # noqa: N802
        """The score head's weight in fp64, on the host, like the hidden states that it is multiplied with."""
        return cast(Decoder, self.model.module).head_weight().detach().cpu().double()

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens can be generated after a prompt of this length; see `Admission.max_new_tokens`."""
        return self._admission.max_new_tokens(prompt_tokens)

    def cancel(self, request_id: int) -> None:
        """End a request. The next step yields an event for each of its unfinished choices. Unknown ids are ignored."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return
        for choice in group.unfinished:
            self._events.append(group.event(choice, None, "cancelled"))
        self._scheduler.remove_group(group)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to compute or to return."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._events)

    # Steps

    def step(self) -> list[Event]:
        """Compute the next tokens of the sequences that the scheduler selects; return all new events."""
        start = time.perf_counter()
        # 1. Admit waiting sequences and select tokens.
        encoding = self._scheduler.admit()
        batch = self._scheduler.schedule(self._propose())
        num_tokens = [item.num_tokens for item in batch if item.sequence.num_uncomputed > 1]
        if batch:
            # 2. Compute them in one forward pass.
            outputs = self._forward(batch, encoding)
            # 3. Sample, and append the new tokens to their sequences.
            self._process(batch, outputs)
            self._stats.steps += 1
        seconds = time.perf_counter() - start
        self._stats.step_seconds += seconds
        if self._pacer is not None and len(num_tokens) < len(batch):
            self._pacer.observe(sum(num_tokens), seconds)
        events = self._events
        self._events = []
        return events

    def _propose(self) -> dict[Sequence, list[int]]:
        """Return draft tokens for the decoding sequences."""
        if self._speculator is None:
            return {}
        max_tokens = {}
        for sequence in self._scheduler.running:
            # One less than the rest of the output: the model samples one more token than it verifies.
            room = sequence.group.request.max_tokens - len(sequence.output_ids) - 1
            group = sequence.group
            # Draft tokens after a part of a prompt would be computed by chunks of the mixers.
            is_prompt = group.has_state and sequence.num_computed < len(group.prompt_ids)
            if sequence.num_uncomputed == 1 and not group.forks and room > 0 and not is_prompt:
                max_tokens[sequence] = min(self._num_draft_tokens, room)
        start = time.perf_counter()
        drafts = self._speculator.propose(max_tokens)
        self._stats.forward_seconds += time.perf_counter() - start
        return drafts

    def _forward(self, scheduled: list[ScheduledSequence], encoding: Sequence | None) -> list[Tensor]:
        """Compute scheduled tokens and draft tokens. Return for each sequence the logits [N, V] that it needs, or the
        hidden states [N, D] that its embedding is pooled from."""
        # 1. Plan the rows of the step in the KV cache.
        chunks = []
        for item in scheduled:
            sequence = item.sequence
            first = sequence.num_computed
            ids = [*sequence.token_ids[first : first + item.num_tokens], *item.draft_tokens]
            is_generated = first >= len(sequence.group.prompt_ids)
            chunks.append(
                SequenceChunk(
                    sequence.table,
                    first,
                    ids,
                    sequence.group.bidirectional,
                    is_generated,
                    len(item.draft_tokens) if sequence.group.has_state else 0,
                )
            )
        tokens_BT, positions_BT, starts = self._runner.cache.plan(chunks, encoding.table if encoding else None)
        # 2. Select the rows of logits: those of a sequence's last token and of its draft tokens, and none for a prompt
        # that continues in the next chunk. Log-probabilities of a prompt or a continuation need every row. An embedding
        # needs hidden states instead.
        rows: list[int] = []
        pooled_rows: list[int] = []
        counts = []
        adapter_rows = []
        dequantized_rows = []
        for item, chunk, start in zip(scheduled, chunks, starts, strict=True):
            sequence = item.sequence
            end = start + len(chunk.ids)
            count = 1 + len(item.draft_tokens) if item.num_tokens == sequence.num_uncomputed else 0
            if sequence.needs_all_tokens or sequence.score_targets is not None:
                count = len(chunk.ids)
            (rows if sequence.group.request.pooling is None else pooled_rows).extend(range(end - count, end))
            counts.append(count)
            num_dequantized = min(sequence.group.num_dequantized - chunk.first, item.num_tokens)
            dequantized_rows.append(range(start, start + max(num_dequantized, 0)))
            if sequence.group.adapter is not None:
                adapter_rows.append((start, len(chunk.ids), sequence.group.adapter))
        # 3. Run the forward pass with the adapter of each row.
        device = self._runner.cache.device
        num_rows = tokens_BT.shape[1]
        num_tokens = sum(len(chunk.ids) for chunk in chunks)
        prompt_rows = self.model.prompt_rows
        select_rows = prompt_rows.select(dequantized_rows, num_rows) if prompt_rows is not None else nullcontext()
        select_adapters = self.model.adapters.select(adapter_rows, num_rows, device) if adapter_rows else nullcontext()
        with select_adapters, select_rows:
            source_BS = copy_to_device([encoding.group.encoder_ids], device) if encoding else None
            begin = time.perf_counter()
            # A layer of multi-token prediction needs the hidden states of all tokens.
            all_rows = list(range(num_tokens)) if self.settings.use_predictions else pooled_rows
            logits_NV, hidden_ND = self._runner.compute(tokens_BT, positions_BT, rows, all_rows, source_BS)
            self._stats.forward_seconds += time.perf_counter() - begin
        if self.settings.use_predictions and self._speculator is not None:
            dtype = self.model.parameter.dtype
            for item, chunk, start in zip(scheduled, chunks, starts, strict=True):
                states_ND = hidden_ND[start : start + len(chunk.ids)].to(dtype)
                self._speculator.observe(item.sequence, chunk.first, states_ND)
            hidden_ND = hidden_ND[pooled_rows]
        # 4. Split logits and hidden states by sequence.
        is_pooling = [item.sequence.group.request.pooling is not None for item in scheduled]
        logits = logits_NV.split([0 if pools else count for pools, count in zip(is_pooling, counts, strict=True)])
        states = hidden_ND.cpu().split([count if pools else 0 for pools, count in zip(is_pooling, counts, strict=True)])
        return [states[index] if pools else logits[index] for index, pools in enumerate(is_pooling)]

    def _process(self, scheduled: list[ScheduledSequence], outputs: list[Tensor]) -> None:
        """Advance every sequence with its outputs, and end those that are finished."""
        # Sampling and scoring are batched over sequences, so that the host waits for the GPU once for each of them.
        beams: dict[SequenceGroup, list[Tensor]] = {}
        sampled_rows = self._sample(scheduled, outputs)
        scores = self._score(scheduled, outputs)
        for item, logits_NV in zip(scheduled, outputs, strict=True):
            sequence = item.sequence
            group = sequence.group
            first = sequence.num_computed
            if sequence.wants_prompt_logprobs:
                self._add_prompt_logprobs(group, first, logits_NV)
            sequence.num_computed += item.num_tokens
            # 1. Add scores or hidden states, or accept tokens. Chunks of an unfinished prompt only fill the cache.
            if sequence.score_targets is not None:
                sequence.add_scores(scores.get(sequence, []))
            elif group.request.pooling is not None:
                event = sequence.pool(logits_NV, self._score_weight_1D if group.request.pooling == "score" else None)
                self._events += [event] if event else []
            elif not sequence.num_uncomputed and not group.forks:
                self._accept(sequence, item.draft_tokens, sampled_rows[sequence])
                sequence.table.accept(sequence.num_computed - first - item.num_tokens)
            # 2. Put full blocks into the prefix cache, unless their values may not be finite.
            if sequence.finish_reason == "error":
                self._scheduler.discard_content(sequence)
            else:
                self._scheduler.mark_computed(sequence, first)
            # 3. Remove finished sequences, and advance groups that fork.
            if sequence.finish_reason is not None:
                self._scheduler.remove(sequence)
                if not group.unfinished:
                    del self._groups[group.request_id]
            elif group.request.num_beams > 1 and not sequence.num_uncomputed:
                beams.setdefault(group, []).append(logits_NV[0])
            elif group.request.continuations and not sequence.num_uncomputed:
                self._advance_scores(sequence, scores.get(sequence, []))
        self._advance_beams(beams)

    def _sample(self, scheduled: list[ScheduledSequence], outputs: list[Tensor]) -> dict[Sequence, list[NextEvent]]:
        """Sample all tokens of the step, on the device of the logits.

        Returns:
            For each sequence, functions that append its tokens, to be called in order.
        """
        rows: list[SamplingRow] = []
        logits: list[Tensor] = []
        events: dict[Sequence, list[NextEvent]] = {}
        counts: list[tuple[Sequence, int]] = []
        for item, logits_NV in zip(scheduled, outputs, strict=True):
            sequence = item.sequence
            is_complete = item.num_tokens == sequence.num_uncomputed
            is_plain = sequence.group.request.generates and not sequence.group.forks
            # Unfinished prompts have no logits; beams, scores and embeddings are not sampled.
            if not is_complete or not is_plain:
                continue
            try:
                sequence_rows = sequence.sampling_rows(item.draft_tokens)
            except SamplingError as error:
                events[sequence] = [partial(sequence.fail, error)]
                continue
            first = len(logits_NV) - 1 - len(item.draft_tokens)
            rows += sequence_rows
            logits.append(logits_NV[first : first + len(sequence_rows)])
            counts.append((sequence, len(sequence_rows)))
        tokens = iter(sample_rows(torch.cat(logits), rows) if rows else ())
        for sequence, count in counts:
            events[sequence] = [partial(sequence.take, next(tokens)) for _ in range(count)]
        return events

    def _accept(self, sequence: Sequence, draft_tokens: list[int], events: list[NextEvent]) -> None:
        """Append sampled tokens as long as they equal the draft tokens, and one more. Logits after a rejected draft
        token are invalid."""
        self._stats.draft_tokens += len(draft_tokens)
        # There may be fewer events than draft tokens: sampling ends at one that the grammar does not allow.
        for draft_token, next_event in zip([*draft_tokens, None][: len(events)], events, strict=True):
            self._stats.generated_tokens += 1
            self._events.append(next_event())
            is_draft = sequence.token_ids[-1] == draft_token and next_event is not events[-1]
            if sequence.finish_reason is not None or not is_draft:
                return
            sequence.num_computed += 1
            self._stats.accepted_tokens += 1

    def _score(self, scheduled: list[ScheduledSequence], outputs: list[Tensor]) -> dict[Sequence, list[Any]]:
        """Return pairs (log-probability, whether it is the largest) for the next targets of each sequence that scores a
        continuation. A context that is complete has the first target of each continuation."""
        tables: dict[Sequence, Tensor] = {}
        for item, logits_NV in zip(scheduled, outputs, strict=True):
            sequence = item.sequence
            # A continuation has a target for each row; a context has targets only after its last row.
            targets = sequence.next_targets
            if sequence.score_targets is not None:
                targets = targets[: len(logits_NV)]
            elif item.num_tokens != sequence.num_uncomputed:
                targets = []
            if targets:
                rows_NV = logits_NV if sequence.score_targets is not None else logits_NV[-1:].expand(len(targets), -1)
                tables[sequence] = score_targets(rows_NV[: len(targets)], targets)
        # A single transfer: the host waits for the GPU once.
        return dict(zip(tables, _read_tables(list(tables.values())), strict=True))

    def _advance_beams(self, logits: dict[SequenceGroup, list[Tensor]]) -> None:
        """Replace each group's beams with the best continuations of all its beams, or end its search."""
        parents = {group: self._scheduler.running_of(group) for group in logits}
        best = [best_continuations(group, parents[group], torch.stack(rows)) for group, rows in logits.items()]
        for group, continuations in zip(logits, _read_tables(best), strict=True):
            survivors = advance_beams(group, parents[group], continuations)
            # No score is finite: the KV cache may contain non-finite values, too.
            if survivors is None:
                for beam in parents[group]:
                    self._scheduler.discard_content(beam)
            self._scheduler.fork(parents[group], survivors or [])
            if not survivors:
                del self._groups[group.request_id]
                events = hypothesis_events(group, self.model, failed=survivors is None)
                self._stats.generated_tokens += sum(event.token is not None for event in events)
                self._events += events

    def _advance_scores(self, sequence: Sequence, scores: list[Any]) -> None:
        """Fork a complete context into its continuations, or yield the score of a complete continuation."""
        group = sequence.group
        # 1. Fork a context; continuations of one token are complete at once.
        if sequence.score_targets is None:
            forks = [sequence.fork_to_score(index) for index in group.unfinished]
            for fork, score in zip(forks, scores, strict=True):
                # The context's last row predicts the first token of every continuation.
                fork.add_scores([score])
            self._scheduler.fork([sequence], forks)
            complete = [fork for fork in forks if not fork.num_uncomputed]
        else:
            complete = [sequence]
        # 2. Yield the scores of complete continuations.
        for fork in complete:
            score = Score(sum(fork.token_logprobs), tuple(fork.token_logprobs), fork.is_greedy)
            group.scores[fork.index] = score
            if math.isnan(score.logprob):
                self._scheduler.discard_content(fork)
                self._events.append(group.event(fork.index, None, "error", error=NON_FINITE_LOGITS))
            else:
                self._events.append(group.event(fork.index, None, "length", score.logprob, score=score))
            self._scheduler.remove(fork)
        if not group.unfinished:
            del self._groups[group.request_id]

    def _add_prompt_logprobs(self, group: SequenceGroup, first: int, logits_NV: Tensor) -> None:
        """Add the log-probabilities of the prompt tokens that a chunk predicts; `first` is its first position."""
        decode = self.model.tokenizer.decode
        tokens = list(group.prompt_logprobs) if first else []
        if not first:
            # The first token has no log-probability, as nothing predicts it.
            tokens.append(Token(group.prompt_ids[0], decode([group.prompt_ids[0]], keep_special_tokens=True)))
        for token_id, logits_V in zip(group.prompt_ids[first + 1 :], logits_NV.cpu(), strict=False):
            text = decode([token_id], keep_special_tokens=True)
            tokens.append(Token(token_id, text, *top_logprobs(logits_V, token_id, group.request.logprobs or 0)))
        group.prompt_logprobs = tuple(tokens)

    def stats(self) -> EngineStats:
        """Return the engine's current state, and totals since its start."""
        offloader = self.model.expert_offloader
        block_counts = [pool.num_usable - pool.num_free for pool in self._pools]
        used_bytes = sum(count * size for count, size in zip(block_counts, self._block_sizes, strict=True))
        return replace(
            self._stats,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            used_blocks=sum(block_counts),
            used_bytes=used_bytes + self._state_size * (len(self._scheduler.running) + len(self._states)),
            cached_tokens=self._scheduler.cached_tokens(),
            prefix_cache_hits=self._scheduler.prefix_cache_hits,
            experts=None if offloader is None else offloader.stats(),
        )


def _scores_of(events: list[Event]) -> list[Score]:
    """Return the scores of a request's continuations, in their order."""
    return [event.score for event in sorted(events, key=lambda event: event.choice) if event.score is not None]


def _read_tables(tables: list[Tensor]) -> list[list[Any]]:
    """Return the rows of tables with the same number of columns, in one copy to the host."""
    if not tables:
        return []
    rows = iter(torch.cat(tables).tolist())
    return [list(islice(rows, len(table))) for table in tables]
