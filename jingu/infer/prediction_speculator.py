"""Speculation with a model's own layer of multi-token prediction (DeepSeek-V3, 2024).

The layer receives the hidden states that the model has computed, each with the embedding of the token that followed,
and predicts the token after that one. It has a KV cache of its own. For further draft tokens it receives its own
hidden states. As with all speculation, a draft token is accepted only if the model itself samples it.

Shapes: T tokens of a step, N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.attention_backend import GatherBackend
from jingu.infer.block_manager import BlockManager
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import BlockTable, PagedKVCache, SequenceChunk, cache_reaches
from jingu.infer.sequence import Sequence
from jingu.infer.speculation import Draft, Speculator, complete_drafts
from jingu.model.attention import BlockContext
from jingu.model.decoder import Decoder, cap_logits
from jingu.model.matmul_kernels import linear
from jingu.model.prediction import PredictionLayer
from jingu.model.rotary import query_factors

OPTION = "--draft-model"


@dataclass(eq=False)
class _State:
    """What the layer knows of a sequence.

    Attributes:
        first: position in the sequence of its first entry of the layer's cache. After a prefix of the prefix cache,
            whose hidden states nobody has, it is above 0.
        num_computed: number of its entries.
        states: hidden states [N, D] of the positions after these that the model has computed.
        inputs: hidden states [N, D] before the tokens that the layer reads next.
        is_current: whether the model has computed tokens of the sequence in the last step.
    """

    table: BlockTable
    first: int
    num_computed: int
    states: Tensor
    inputs: Tensor
    is_current: bool = True

    @property
    def next_position(self) -> int:
        """The position of the first of `states`."""
        return self.first + self.num_computed


class PredictionSpeculator(Speculator):
    """Proposes the tokens that the model's layer of multi-token prediction predicts.

    Args:
        num_blocks: blocks of the layer's cache.
        chunk_size: maximum number of tokens of prompts that the layer reads in a step.

    Raises:
        JinguError: the model has no such layer, or several processes share it.
    """

    def __init__(self, model: InferenceModel, num_blocks: int, block_size: int, chunk_size: int) -> None:
        if model.load_prediction_layer is None:
            raise JinguError(
                "the model has no layers of multi-token prediction, or is divided over processes.",
                where=OPTION,
                fix="Name a smaller model, or leave it out.",
            )
        assert isinstance(model.module, Decoder)
        self._model = model.module
        self._layer: PredictionLayer = model.load_prediction_layer()
        self._chunk_size = chunk_size
        spec = model.spec.uniform(model.spec.prediction_layer)
        self._kind = spec.default_layer
        self._pool = BlockManager(num_blocks, block_size, cache_reaches(spec)[0])
        device = model.parameter.device
        self._cache = PagedKVCache(spec, [num_blocks], block_size, device, GatherBackend(spec))
        self._states: dict[Sequence, _State] = {}

    def observe(self, sequence: Sequence, first: int, states_ND: Tensor) -> None:
        """Keep the hidden states that the model has computed from position `first` on."""
        state = self._states.get(sequence)
        # Positions of rejected draft tokens are computed again; those of a preempted sequence all are.
        known = -1 if state is None else first - state.next_position
        if state is None or not 0 <= known <= len(state.states):
            if state is not None:
                self._release(sequence)
            state = self._states[sequence] = _State(BlockTable([[]]), first, 0, states_ND[:0], states_ND[:0])
            known = 0
        state.states = torch.cat((state.states[:known], states_ND))
        state.is_current = True

    def propose(self, max_tokens: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return draft tokens; see `Speculator`. The state of sequences that the last step left out is dropped."""
        for sequence in [sequence for sequence, state in self._states.items() if not state.is_current]:
            self._release(sequence)
        drafts = []
        budget = self._chunk_size
        for sequence in list(self._states):
            draft = self._catch_up(sequence, max_tokens.get(sequence, 0), budget)
            if draft is not None:
                budget -= len(draft.chunk.ids) - 1
                drafts.append(draft)
        return complete_drafts(drafts, self._compute)

    def _catch_up(self, sequence: Sequence, max_tokens: int, budget: int) -> Draft | None:
        """Return the tokens whose predecessors the model has computed, as a draft; None if there are none."""
        state = self._states[sequence]
        state.is_current = False
        # The states behind the last token belong to draft tokens that were rejected.
        begin = state.next_position
        count = min(len(state.states), len(sequence.token_ids) - 1 - begin, budget + 1)
        if count < 1 or sequence.finish_reason is not None:
            return None
        if begin + count < len(sequence.token_ids) - 1:
            max_tokens = 0  # a prompt that continues
        end = state.num_computed + count
        table = state.table.blocks[0]
        num_new = self._pool.blocks_for(end + max_tokens) - len(table)
        if num_new > self._pool.num_free:
            self._release(sequence)
            return None
        self._pool.release_behind(table, state.num_computed)
        table += [self._pool.allocate() for _ in range(num_new)]
        ids = sequence.token_ids[begin + 1 : begin + 1 + count]
        draft = Draft(sequence, SequenceChunk(state.table, state.num_computed, ids), max_tokens)
        state.num_computed = end
        state.inputs, state.states = state.states[:count], state.states[count:]
        return draft

    def _compute(self, drafts: list[Draft], numbers: list[int]) -> Tensor:
        """Run the layer; return the logits [N, V] after the drafts with these numbers."""
        cache, model = self._cache, self._model
        tokens_BT, positions_BT, starts = cache.plan([draft.chunk for draft in drafts], None)
        states = [self._states[draft.sequence] for draft in drafts]
        states_TD = states[0].inputs.new_zeros(tokens_BT.shape[1], states[0].inputs.shape[1])
        last_rows = []
        for state, start in zip(states, starts, strict=True):
            end = start + len(state.inputs)
            states_TD[start:end] = state.inputs
            last_rows.append(end - 1)
        with torch.inference_mode():
            assert model.embedding is not None
            embedded_BTD = model.embed_tokens(model.embedding, tokens_BT)
            wide = torch.promote_types(states_TD.dtype, torch.float32)
            scaling = self._kind.attention.query_scaling
            context = BlockContext(
                rotary=cache.rotary(self._kind.position, self._kind.attention.rotary_size, positions_BT, wide),
                query_factor=None if scaling is None else query_factors(scaling, positions_BT, wide),
            )
            cache.begin(None)
            states_BTD = self._layer(states_TD.unsqueeze(0), embedded_BTD, context, cache.layer(0))
            last_ND = states_BTD[0, last_rows]
        for number, state in enumerate(states):
            state.inputs = last_ND[number : number + 1]
        return self._logits(last_ND[numbers]) if numbers else last_ND

    def _logits(self, states_ND: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states."""
        with torch.inference_mode():
            padding = self._cache.pad(len(states_ND)) - len(states_ND)
            rows_ND = F.pad(states_ND, (0, 0, 0, padding))
            logits_NV = cap_logits(self._model.spec, linear(rows_ND, self._model.head_weight()))
            return logits_NV[: len(states_ND)].to(torch.promote_types(logits_NV.dtype, torch.float32))

    def _release(self, sequence: Sequence) -> None:
        self._pool.release_all(self._states.pop(sequence).table.blocks[0])
