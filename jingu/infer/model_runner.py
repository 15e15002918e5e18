"""The forward pass of a model over the tokens of a step.

Shapes: T tokens of a step, N rows of logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.attention_backend import BackendName, select_backend
from jingu.infer.block_manager import SCRATCH_BLOCK
from jingu.infer.cuda_graphs import CudaGraphRunner
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import BlockTable, PagedKVCache, SequenceChunk, cache_reaches
from jingu.model.attention import has_biases
from jingu.model.byte_weight import ByteWeight
from jingu.model.decoder import Decoder, cap_logits
from jingu.model.inputs import Inputs
from jingu.model.matmul_kernels import linear
from jingu.model.quantized_weight import PREPACKED_ROWS, PrepackedQuantizedWeight, PrepackedWeight, QuantizedWeight
from jingu.runtime.device import copy_to_device, force_eager


class ModelRunner:
    """Runs a model with a KV cache of its own.

    Args:
        num_blocks: number of KV cache blocks of each pool.
        graphs: captures and replays decoding steps; None launches operations one by one.
        backend: name of the attention backend.

    Raises:
        JinguError: the model does not support CUDA graphs or the attention backend.
    """

    def __init__(
        self,
        model: InferenceModel,
        num_blocks: Sequence[int],
        block_size: int,
        graphs: CudaGraphRunner | None = None,
        backend: BackendName = "gather",
    ) -> None:
        self.model = model
        self._graphs = graphs
        parameter = model.parameter
        attention = select_backend(backend, model.spec, parameter.dtype, parameter.device, block_size)
        self.cache = PagedKVCache(model.spec, num_blocks, block_size, parameter.device, attention)
        self.cache.row_multiple = _row_multiple(model, self.cache.row_multiple)
        if graphs is not None:
            _check_dense_decoder(model, "--cuda-graphs")
            # A captured step may depend only on the contents of its tensors, and not on slice bounds.
            self.cache.use_slices = False

    def compute(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        rows: Sequence[int],
        hidden_rows: Sequence[int] = (),
        source_BS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass that the cache has planned. Return logits [N, V] and final hidden states [N, D] of
        some rows, in fp32 or fp64, on the model's device.

        Args:
            rows: rows whose logits are needed.
            hidden_rows: rows whose hidden states are needed.
            source_BS: source tokens that the encoder reads in this step; None: no encoder runs.
        """
        model = self.model
        cache = self.cache
        # 1. Pad the head's rows like those of the model, so that a row's logits do not depend on their number.
        rows_N = copy_to_device(rows or [0], cache.device)
        rows_N = F.pad(rows_N, (0, cache.pad(len(rows_N)) - len(rows_N)))
        source = None if source_BS is None else Inputs(source_BS)
        hidden_ND = torch.empty(0, 0)

        # 2. Define the forward pass as a function of tensors only, as a CUDA graph needs it.
        def run_forward(inputs: Sequence[Tensor]) -> Tensor:
            tokens_BT, positions_BT, rows_N, *plan_tensors = inputs
            cache.set_graph_inputs(plan_tensors)

            def compute_head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
                nonlocal hidden_ND
                if hidden_rows:
                    hidden_ND = hidden_BTD[0].index_select(0, copy_to_device(list(hidden_rows), cache.device))
                return cap_logits(model.spec, linear(hidden_BTD[0, rows_N], weight_VD))

            model_inputs = Inputs(tokens_BT, positions_BT, source=source, cache=cache)
            logits_NV: Tensor = model.module(model_inputs, loss=compute_head)
            return logits_NV

        # 3. Run it, or replay its graph. FSDP and DTensor do not support inference mode.
        no_grad = torch.inference_mode() if model.world_size == 1 else torch.no_grad()
        with no_grad, nullcontext() if model.is_compiled else force_eager():
            inputs = [tokens_BT, positions_BT, rows_N, *cache.graph_inputs]
            shape = cache.graph_shape
            if self._graphs is None or shape is None or hidden_rows:
                logits_NV = run_forward(inputs)
            else:
                logits_NV = self._graphs.run((len(rows_N), shape), inputs, run_forward)
            dtype = torch.promote_types(logits_NV.dtype, torch.float32)
            return logits_NV[: len(rows)].to(dtype), hidden_ND.to(dtype)


def _row_multiple(model: InferenceModel, default: int) -> int:
    """Return the multiple to pad rows to, so that the result of a row does not depend on the number of rows."""
    head = cast(object, model.module.head_weight()) if isinstance(model.module, Decoder) else None
    if isinstance(head, QuantizedWeight | PrepackedQuantizedWeight | ByteWeight):
        return 1  # quantized kernels compute each row by itself, and padding rows would cost as much as others
    return PREPACKED_ROWS if isinstance(head, PrepackedWeight) else default


def compile_blocks(model: InferenceModel) -> InferenceModel:
    """Compile a model's blocks for any number of tokens, except attention over the KV cache. Return the model.

    Compilation happens here and not in the first step, so that all steps run the same code.

    Raises:
        JinguError: the model cannot be compiled.
    """
    _check_dense_decoder(model, "--compile")
    model = replace(model, is_compiled=True)
    for block in cast(Decoder, model.module).blocks:
        attention = cast(Any, block.attention)
        attention.attend_cache = torch.compiler.disable(attention.attend_cache)
        block.compile(dynamic=True)
    # Warm up with a chunk of a prompt, then with a single token.
    num_pools = len(cache_reaches(model.spec))
    runner = ModelRunner(model, [SCRATCH_BLOCK + 2] * num_pools, block_size=16)
    table = BlockTable([[SCRATCH_BLOCK + 1]] * num_pools)
    for chunk in (SequenceChunk(table, 0, [0] * 9), SequenceChunk(table, 9, [0])):
        tokens_BT, positions_BT, _ = runner.cache.plan([chunk], None)
        runner.compute(tokens_BT, positions_BT, [0])
    return model


def _check_dense_decoder(model: InferenceModel, option: str) -> None:
    """Raise JinguError unless steps of the model differ only in the contents of tensors."""
    spec = model.spec
    dense = isinstance(model.module, Decoder) and spec.num_encoder_layers is None and not any(spec.prompts)
    dynamic = spec.experts is not None or has_biases(spec) or spec.has_state
    if not dense or dynamic or model.adapters.names or model.read_adapter or model.world_size > 1:
        raise JinguError(
            "supports only single-process dense decoders without adapters, prompt tuning, position biases and layers "
            "with a state.",
            where=option,
            fix="Leave it out.",
        )
