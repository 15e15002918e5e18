"""Which requests an engine accepts: those that fit the model, the settings and the KV cache."""

from __future__ import annotations

from collections import abc

from jingu.errors import JinguError, refuse
from jingu.infer.block_manager import BlockManager
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Pooling, Request, check_request_fits, check_token_ids, max_new_tokens
from jingu.infer.scheduler import most_step_tokens
from jingu.infer.sequence import SequenceGroup
from jingu.model.components import LongropeScaling, RotaryPositions
from jingu.runtime.log import log_warning


class Admission:
    """Checks requests, and makes their groups.

    Args:
        pools: the blocks of the KV cache.
    """

    def __init__(self, model: InferenceModel, settings: EngineSettings, pools: abc.Sequence[BlockManager]) -> None:
        self._model = model
        self._settings = settings
        self._pools = pools
        self._has_state = model.spec.has_state
        # Prompts beyond this length are longer than the original context of longrope.
        places = (layer.position for layer in model.spec.kinds)
        scalings = (place.scaling for place in places if isinstance(place, RotaryPositions))
        contexts = (each.original_max_position_embeddings for each in scalings if isinstance(each, LongropeScaling))
        self._original_context = min(contexts, default=model.spec.max_position_embeddings)
        self._has_warned = False

    def check_drafts(self, draft_model: InferenceModel | None) -> None:
        """Raise JinguError if layers with a state would propose draft tokens: only the model itself can return to its
        states before rejected ones."""
        by_prediction = self._settings.use_predictions and self._model.spec.prediction_layer.state_mixer is not None
        if by_prediction or (draft_model is not None and draft_model.spec.has_state):
            what = (
                "the layers that propose draft tokens have a state, and cannot return to a token before rejected ones."
            )
            raise JinguError(
                what, where="--draft-model", fix="Leave it out, or use a draft model with attention alone."
            )

    def make_group(self, request: Request, request_id: int) -> SequenceGroup:
        """Check a request against the model and the KV cache; return its group, which has no sequences yet.

        Raises:
            JinguError: the request can never be served.
        """
        # 1. Check the request against the model.
        model = self._model
        spec = model.spec
        prompt = list(request.prompt) or [model.tokenizer.eos_token_id]
        self._check_head(request.pooling)
        if request.pooling is not None:
            self._check_embeds()
            refuse(not request.prompt, "prompt", "empty", "1 token or more")
        check_request_fits(spec, prompt, request.max_tokens, request.generates)
        self._warn_of_long_prompt(prompt)
        for continuation in request.continuations:
            check_token_ids(spec, continuation, "continuations")
        check_token_ids(spec, request.stop_token_ids, "stop_token_ids")
        check_token_ids(spec, request.sampling.logit_bias, "logit_bias")
        refuse((request.logprobs or 0) > spec.vocab_size, "logprobs", request.logprobs, f"at most {spec.vocab_size}")
        # A beam search considers (1 + number of end tokens) candidates for each beam.
        max_beams = min(self._settings.max_num_seqs, spec.vocab_size // (1 + len(model.eos_token_ids)))
        too_many = request.num_beams > 1 and request.num_beams > max_beams
        refuse(too_many, "num_beams", request.num_beams, f"at most {max_beams}")
        # 2. Encoder-decoders read the prompt in the encoder.
        encoder_ids = None
        decoder_ids = prompt
        if spec.num_encoder_layers is not None:
            encoder_ids = spec.prompted((*request.prompt, model.tokenizer.eos_token_id), encoder=True)
            decoder_ids = [model.decoder_start_token_id]
        for is_unsupported, what in (
            (any(spec.prompts), "prompt tuning"),
            (model.is_prefix_lm, "prefix language models"),
            (encoder_ids is not None, "encoder-decoder models"),
        ):
            if request.prompt_logprobs and is_unsupported:
                raise JinguError(f"unavailable with {what}.", where="prompt_logprobs", fix="Leave it out.")
        # 3. Make the group, with virtual tokens in front of the prompt, and check that the KV cache has room for it.
        prompt_ids = spec.prompted(decoder_ids)
        group = SequenceGroup(
            request_id,
            request,
            encoder_ids,
            prompt_ids,
            num_prompt_tokens=len(prompt) if encoder_ids is None else len(request.prompt) + 1,
            adapter=None if request.adapter is None else model.adapters.find(request.adapter),
            num_virtual_tokens=spec.prompts[0],
            has_state=self._has_state,
        )
        if model.prompt_rows is not None and len(prompt_ids) >= model.prompt_rows.min_tokens:
            group.num_dequantized = len(prompt_ids)
        if model.is_prefix_lm:
            group.bidirectional = range(group.num_virtual_tokens, len(prompt_ids))
        self._check_cache_size(group)
        return group

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens can be generated after a prompt of this length: both the model's context and the KV
        cache must have room for them."""
        spec = self._model.spec
        # An empty prompt is replaced by the end token; an encoder-decoder's answer begins with a start token.
        prompt_tokens = max(prompt_tokens, 1)
        decoder_tokens = spec.prompts[0] + (prompt_tokens if spec.num_encoder_layers is None else 1)
        room = max_new_tokens(spec, prompt_tokens)
        step_tokens = most_step_tokens(self._settings.prefill_chunk_size, self._has_state)
        for pool in self._pools:
            if pool.most_blocks(decoder_tokens + room, step_tokens) > pool.num_usable:
                room = min(room, pool.num_usable * pool.block_size - decoder_tokens)
        return room

    def _warn_of_long_prompt(self, prompt: list[int]) -> None:
        """Warn once if a prompt is longer than the original context of longrope.

        The cache uses the factors for short texts up to there, and transformers those for long texts in all of it.
        """
        context = self._original_context
        if len(prompt) > context and not self._has_warned:
            self._has_warned = True
            log_warning(
                f"a prompt has {len(prompt):,} tokens, more than the model's original context of {context:,}: its "
                "first tokens are computed with the positions of short texts, so answers differ from transformers'."
            )

    def _check_head(self, pooling: Pooling | None) -> None:
        """Raise JinguError if the model lacks the head (LM or score) that a request needs. Embeddings need none."""
        has_score_head = self._model.spec.score_head
        if has_score_head and pooling is None:
            what = "this is a reward model, which gives scores and no text."
            raise JinguError(what, where="model", fix="Ask for scores (/v1/score, /v1/rerank) or embeddings.")
        if not has_score_head and pooling == "score":
            what = "this is a language model, which has no score head."
            raise JinguError(what, where="model", fix="Take a reward model: a run of the task reward.")

    def _check_embeds(self) -> None:
        """Raise JinguError unless the model has embeddings."""
        spec = self._model.spec
        if spec.num_encoder_layers is not None or any(spec.prompts) or self._model.world_size > 1:
            raise JinguError("embeddings support only single-process decoders without prompt tuning.", where="model")

    def _check_cache_size(self, group: SequenceGroup) -> None:
        """Raise JinguError unless the KV cache has room for a group with all sequences that it forks into."""
        # Forks share the full blocks of the prompt.
        block_size = self._pools[0].block_size
        num_prompt = len(group.prompt_ids)
        num_shared = num_prompt // block_size
        own_tokens = num_prompt - num_shared * block_size + group.request.max_tokens
        own_tokens -= not group.request.generates  # the last token of a continuation is a target only
        chunk = most_step_tokens(self._settings.prefill_chunk_size, group.has_state, group.bidirectional.stop)
        for pool in self._pools:
            num_blocks = pool.most_blocks(num_shared * block_size + own_tokens)
            if group.num_forks > 1:
                num_blocks = min(num_shared, pool.most_blocks(num_prompt))
                num_blocks += group.num_forks * pool.most_blocks(own_tokens)
            if max(num_blocks, pool.most_blocks(num_prompt, chunk)) <= pool.num_usable:
                continue
            num_tokens = num_shared * block_size + group.num_forks * own_tokens
            raise JinguError(
                f"prompt and output need up to {num_tokens} tokens, and the KV cache has room for "
                f"{pool.num_usable * block_size}.",
                where="prompt",
                fix="Ask for fewer tokens, or give the engine a larger KV cache (--kv-cache).",
            )
