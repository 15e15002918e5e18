"""Speculative decoding (Leviathan et al., 2023): cheap draft tokens, which the model verifies in one forward pass.

A draft token is accepted only if the model itself samples it, so outputs do not change, greedy or not. The draft model
samples with the same random numbers as the model: if their probabilities agree, they sample the same token (Daliri et
al., 2025).

Shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.block_manager import BlockManager
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import BlockTable, SequenceChunk, cache_reaches
from jingu.infer.model_runner import ModelRunner
from jingu.infer.sampling import sample_rows
from jingu.infer.sequence import Sequence


class Speculator(Protocol):
    """Proposes draft tokens."""

    def observe(self, sequence: Sequence, first: int, states_ND: Tensor) -> None:
        """Receive the hidden states of the tokens that the model has computed, from position `first` on."""
        return

    def propose(self, max_tokens: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return draft tokens for the sequences that are keys, at most as many as the values."""


class NgramSpeculator(Speculator):
    """Prompt lookup (Saxena, 2023): proposes the tokens after an earlier occurrence of the last three or two tokens."""

    def propose(self, max_tokens: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return draft tokens; see `Speculator`."""
        return {sequence: _look_up(sequence.token_ids, count) for sequence, count in max_tokens.items()}


def _look_up(ids: list[int], count: int) -> list[int]:
    for size in (3, 2):
        # Search from the end: the latest occurrence is the best guess.
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                return ids[start + size : start + size + count]
    return []


@dataclass(eq=False)
class _DraftState:
    """State of a sequence in the draft model's cache: `num_computed` of its tokens, then the tokens of `draft_ids`."""

    table: BlockTable
    num_computed: int = 0
    draft_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Draft:
    """A proposal in progress for one sequence.

    Attributes:
        chunk: the tokens that the drafting model reads next.
        max_tokens: draft tokens to propose; 0 if the chunk ends before the sequence's last token.
        tokens: the draft tokens so far.
    """

    sequence: Sequence
    chunk: SequenceChunk
    max_tokens: int
    tokens: list[int] = field(default_factory=list)


def complete_drafts(
    drafts: list[Draft], compute: abc.Callable[[list[Draft], list[int]], Tensor]
) -> dict[Sequence, list[int]]:
    """Return the draft tokens of sequences. Each round adds one token to every unfinished draft.

    Args:
        compute: runs one forward pass for drafts; returns the logits [N, V] after the chunks of the numbered ones.
    """
    proposals: dict[Sequence, list[int]] = {}
    while drafts:
        drafts.sort(key=lambda draft: len(draft.chunk.ids) > 1)
        numbers = [number for number, draft in enumerate(drafts) if draft.max_tokens]
        logits_NV = compute(drafts, numbers)
        drafts = [drafts[number] for number in numbers]
        rows = [draft.sequence.sampling_row(draft.tokens) for draft in drafts]
        further = []
        for draft, token in zip(drafts, sample_rows(logits_NV, rows) if rows else (), strict=True):
            if not token.is_finite:
                continue
            draft.tokens.append(token.token_id)
            proposals[draft.sequence] = draft.tokens
            if len(draft.tokens) < draft.max_tokens:
                end = draft.chunk.first + len(draft.chunk.ids)
                further.append(replace(draft, chunk=SequenceChunk(draft.chunk.table, end, [token.token_id])))
        drafts = further
    return proposals


class DraftModelSpeculator(Speculator):
    """Proposes the tokens of a smaller decoder, which has the same tokenizer and a KV cache of its own.

    Args:
        draft: the smaller model.
        target: the model that verifies the draft tokens.
        prefill_chunk_size: maximum number of prompt tokens that the draft model reads in a step.

    Raises:
        JinguError: the models cannot be combined.
    """

    def __init__(
        self, draft: InferenceModel, target: InferenceModel, num_blocks: int, block_size: int, prefill_chunk_size: int
    ) -> None:
        _check_draft_model(draft, target)
        self._spec = draft.spec
        self._target_vocab_size = target.spec.vocab_size
        self._prefill_chunk_size = prefill_chunk_size
        reaches = cache_reaches(draft.spec)
        self._pools = [BlockManager(num_blocks, block_size, reach) for reach in reaches]
        self._runner = ModelRunner(draft, [num_blocks] * len(reaches), block_size)
        self._states: dict[Sequence, _DraftState] = {}

    def propose(self, max_tokens: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return draft tokens; see `Speculator`. The state of all other sequences is dropped."""
        for sequence in [sequence for sequence in self._states if sequence not in max_tokens]:
            self._release(sequence)
        # The draft model reads the new tokens of each sequence, within the budget for prompts.
        drafts = []
        budget = self._prefill_chunk_size
        for sequence, count in max_tokens.items():
            draft = self._catch_up(sequence, count, budget)
            if draft is not None:
                budget -= len(draft.chunk.ids) - 1
                drafts.append(draft)
        proposals = complete_drafts(drafts, self._compute)
        for sequence, tokens in proposals.items():
            # The draft model has read all but the last one.
            self._states[sequence].draft_ids = tokens[:-1]
        return proposals

    def _catch_up(self, sequence: Sequence, max_tokens: int, budget: int) -> Draft | None:
        """Return the tokens that the draft model has not read yet, as a draft; None if it has no room for them."""
        # 1. Find the new tokens.
        state = self._states.setdefault(sequence, _DraftState(BlockTable([[] for _ in self._pools])))
        num_virtual = sequence.group.num_virtual_tokens
        last = len(sequence.token_ids) - num_virtual - 1
        if state.num_computed > last:
            # The sequence was preempted before it took a token.
            state.num_computed = last
            state.draft_ids = []
        # 2. Keep the keys and values of accepted draft tokens. The last token is read again for its logits.
        new_ids = sequence.token_ids[num_virtual + state.num_computed :]
        num_accepted = 0
        while (
            num_accepted < min(len(new_ids) - 1, len(state.draft_ids))
            and new_ids[num_accepted] == state.draft_ids[num_accepted]
        ):
            num_accepted += 1
        state.num_computed += num_accepted
        state.draft_ids = []
        # 3. Allocate blocks for the chunk and the draft tokens, if context, vocabulary and cache have room.
        ids = new_ids[num_accepted : num_accepted + budget + 1]
        end = state.num_computed + len(ids)
        num_new = self._pools[0].blocks_for(end + max_tokens) - len(state.table.blocks[0])
        too_long = end + max_tokens > self._spec.max_position_embeddings
        has_room = all(num_new <= pool.num_free for pool in self._pools)
        if too_long or max(ids) >= self._spec.vocab_size or not has_room:
            self._release(sequence)
            return None
        for pool, table in zip(self._pools, state.table.blocks, strict=True):
            # After a preemption the last token is read again.
            pool.release_behind(table, max(state.num_computed - 1, 0))
            table += [pool.allocate() for _ in range(num_new)]
        chunk = SequenceChunk(state.table, state.num_computed, ids)
        state.num_computed = end
        is_complete = num_accepted + len(ids) == len(new_ids)
        return Draft(sequence, chunk, max_tokens if is_complete else 0)

    def _compute(self, drafts: list[Draft], numbers: list[int]) -> Tensor:
        """Return the logits [N, V] after the drafts with these numbers: -inf for tokens that the target alone has."""
        tokens_BT, positions_BT, starts = self._runner.cache.plan([draft.chunk for draft in drafts], None)
        rows = [starts[number] + len(drafts[number].chunk.ids) - 1 for number in numbers]
        logits_NV = self._runner.compute(tokens_BT, positions_BT, rows)[0].cpu()
        return F.pad(logits_NV, (0, self._target_vocab_size - logits_NV.shape[1]), value=-torch.inf)

    def _release(self, sequence: Sequence) -> None:
        for pool, table in zip(self._pools, self._states.pop(sequence).table.blocks, strict=True):
            pool.release_all(table)


def _check_draft_model(draft: InferenceModel, target: InferenceModel) -> None:
    has_encoder = {draft.spec.num_encoder_layers, target.spec.num_encoder_layers} != {None}
    for is_unsupported, what, fix in (
        (has_encoder, "speculative decoding does not support encoder-decoder models.", "Leave it out."),
        (target.world_size > 1, "speculative decoding supports only a single process.", "Leave it out."),
        (draft.spec.prompts[0], "a draft model cannot have prompt tuning.", "Use the model that it was tuned from."),
    ):
        if is_unsupported:
            raise JinguError(what, where="--draft-model", fix=fix)
    target_vocab = target.tokenizer.vocab()
    draft_vocab = draft.tokenizer.vocab()
    if target_vocab != draft_vocab:
        different = sum(draft_vocab.get(token) != token_id for token, token_id in target_vocab.items())
        detail = f", of which {different:,} are missing in the draft model or have another id" if different else ""
        raise JinguError(
            f"the draft model has {len(draft_vocab):,} tokens and the model {len(target_vocab):,}{detail}.",
            where="--draft-model",
            fix="Use a smaller model with the same tokenizer.",
        )
