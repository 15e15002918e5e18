"""Head and cross-entropy, computed in chunks of tokens, so that the logits of all tokens never exist at the same time.

Shapes: N tokens (rows × sequence), D hidden size, V vocab (or this rank's shard of it), C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jingu.compat.torch_distributed import all_reduce
from jingu.model.matmul_kernels import matmul, matmul_accumulate
from jingu.parallel.tensor import VocabShard

# Elements of one chunk of logits. On CPU a chunk should be about as large as the caches (16 MB in fp32); on a GPU it
# should be large enough to use all of its units.
CHUNK_ELEMENTS = 2**22
CHUNK_ELEMENTS_ON_GPU = 2**27
# Minimum number of tokens in a chunk, however large the vocab is: matmuls with fewer rows are slow.
MIN_CHUNK_TOKENS = 256

# Computes, from the logits and labels of a chunk, the loss of each token and its gradient with respect to the logits.
# Where the label is -100, both are finite and are not used.
ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_loss(
    logits_CV: Tensor, labels_C: Tensor, smoothing: float = 0.0, z: float = 0.0, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each token of a chunk [C], and its gradient with respect to the logits [C, V].

    It computes in fp32 (fp64 for fp64 logits); the gradient has the dtype of the logits.

    Args:
        smoothing: label smoothing: share of the target that is spread evenly over the vocab (Szegedy et al., 2016).
        z: coefficient of the z-loss, the square of the softmax's log-sum-exp, which keeps logits near zero (PaLM,
            section 5).
        shard: the part of the vocab that the logits cover; None: all. Every rank of `tensor` returns the complete
            losses, and the gradient of its own logits.
    """
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    size, start = (wide_CV.shape[1], 0) if shard is None else (shard.size, shard.start)
    # 1. The column of each label in this rank's logits; 0 if another rank has it.
    column_C1 = (labels_C - start).unsqueeze(1)
    is_local_C1 = (column_C1 >= 0) & (column_C1 < wide_CV.shape[1])
    column_C1 = column_C1.where(is_local_C1, 0)
    # 2. Scores: log-probabilities, or with a sharded vocab logits minus their maximum.
    if shard is None:
        scores_CV = torch.log_softmax(wide_CV, 1)
    else:
        # Subtract the maximum over all ranks, so that no exponential overflows.
        max_C = all_reduce(wide_CV.amax(1), "max", shard.group)
        scores_CV = wide_CV - max_C.unsqueeze(1)
    target_C = (1.0 - smoothing) * (scores_CV.gather(1, column_C1) * is_local_C1).squeeze(1)
    if smoothing:
        target_C = target_C + smoothing / size * scores_CV.sum(1)
    # 3. Exponentials and their sum over all ranks. In place, because the chunk is the largest tensor of a step.
    gradient_CV = scores_CV.exp_()
    factor_C = torch.ones_like(target_C)
    if shard is not None:
        sum_C, target_C = all_reduce(torch.stack([gradient_CV.sum(1), target_C]), "sum", shard.group)
        target_C = target_C - sum_C.log()
        factor_C = 1.0 / sum_C
    losses_C = -target_C
    # 4. The z-loss.
    if z:
        log_sum_C = torch.logsumexp(wide_CV, 1) if shard is None else max_C + sum_C.log()
        losses_C = losses_C + z * log_sum_C.square()
        factor_C = factor_C * (1.0 + 2.0 * z * log_sum_C)
    if z or shard is not None:
        gradient_CV.mul_(factor_C.unsqueeze(1))
    # 5. The gradient is softmax - target.
    gradient_CV.scatter_add_(1, column_C1, (smoothing - 1.0) * is_local_C1.to(gradient_CV.dtype))
    if smoothing:
        gradient_CV.sub_(smoothing / size)
    return losses_C, gradient_CV.to(logits_CV.dtype)


@dataclass(frozen=True)
class ChunkedHead:
    """Computes losses of tokens and the gradients of their weighted sum, with the logits of one chunk in memory.

    Attributes:
        rows: number of tokens in a chunk (C).
        chunk: computes losses and gradients of a chunk.
        softcap: soft cap of the logits, before `chunk` receives them; None: they have none.
    """

    rows: int
    chunk: ChunkLoss
    softcap: float | None = None

    def compute(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        factors_N: Tensor,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss of each token [N], and the gradients of Σ factor · loss with respect to states and weight.

        Losses and the weight's gradient [V, D] are in fp32 (fp64 for fp64 states); the gradient of the hidden states
        [N, D] has their dtype. A gradient that is not needed is None.

        Args:
            factors_N: factor of each token's loss.
        """
        weight_VD = weight_VD.to(hidden_ND.dtype)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        losses_N = torch.empty(len(labels_N), dtype=wide, device=hidden_ND.device)
        hidden_gradient_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        # Sum over chunks in at least fp32: in bf16, small summands would be lost.
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        for start in range(0, hidden_ND.shape[0], self.rows):
            part = slice(start, start + self.rows)
            losses_N[part], gradient_CV = self._capped_chunk(matmul(hidden_ND[part], weight_VD.t()), labels_N[part])
            # Multiply the [C, D] side of each matmul by the factors, which is smaller than [C, V].
            factors_C1 = factors_N[part].unsqueeze(1)
            if hidden_gradient_ND is not None:
                torch.mul(matmul(gradient_CV, weight_VD), factors_C1, out=hidden_gradient_ND[part])
            if weight_gradient_VD is not None:
                matmul_accumulate(weight_gradient_VD, gradient_CV.t(), hidden_ND[part] * factors_C1)
            # Free it before the next chunk is computed.
            del gradient_CV
        return losses_N, hidden_gradient_ND, weight_gradient_VD

    def _capped_chunk(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses of a chunk, and their gradients with respect to the logits before the soft cap.

        It overwrites the logits.
        """
        if self.softcap is None:
            return self.chunk(logits_CV, labels_C)
        # In place, because the chunk is the largest tensor of a step.
        dtype = logits_CV.dtype
        logits_CV = logits_CV.to(torch.promote_types(dtype, torch.float32)).div_(self.softcap).tanh_()
        losses_C, gradient_CV = self.chunk(logits_CV * self.softcap, labels_C)
        # The derivative of tanh is 1 - tanh².
        gradient_CV.mul_(logits_CV.square_().neg_().add_(1))
        return losses_C, gradient_CV.to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy together. The forward pass also computes the gradients, while it has a chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        factors_N: Tensor | None,
        head: ChunkedHead,
        grads: bool,
    ) -> Tensor:
        # A frozen head, as with adapters, saves a third of the work.
        needs_hidden = grads and hidden_ND.requires_grad
        needs_weight = grads and weight_VD.requires_grad
        ctx.dtype = weight_VD.dtype
        has_label_N = labels_N >= 0
        factors_N = has_label_N if factors_N is None else (factors_N * has_label_N).to(hidden_ND.dtype)
        losses_N, *gradients = head.compute(hidden_ND, weight_VD, labels_N, factors_N, needs_hidden, needs_weight)
        ctx.save_for_backward(*gradients)
        total = torch.zeros((), dtype=losses_N.dtype, device=losses_N.device)
        # Sum chunk by chunk: a sum of partial sums has a smaller rounding error.
        for losses_C in (losses_N * factors_N).split(head.rows):
            total += losses_C.sum()
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = upstream[0]
        # Not in place: pipeline schedules that split the backward pass call this twice.
        hidden = None if hidden_gradient_ND is None else hidden_gradient_ND * scale.to(hidden_gradient_ND.dtype)
        weight = None if weight_gradient_VD is None else (weight_gradient_VD * scale).to(ctx.dtype)
        return hidden, weight, None, None, None, None


def chunked_head(hidden_BTD: Tensor, columns: int, chunk: ChunkLoss, softcap: float | None = None) -> ChunkedHead:
    """Return the `ChunkedHead` with the chunk size for the device of the hidden states.

    Args:
        columns: size of the largest vocab shard of any rank. All ranks must pass the same, to have equal chunks.
    """
    elements = CHUNK_ELEMENTS if hidden_BTD.device.type == "cpu" else CHUNK_ELEMENTS_ON_GPU
    rows = max(MIN_CHUNK_TOKENS, elements // columns)
    return ChunkedHead(rows, chunk, softcap)


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    chunk: ChunkLoss = chunk_loss,
    max_columns: int | None = None,
    factors_BT: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the sum of factor · loss over the labels that are not -100, a scalar in fp32 (fp64 for fp64 states).

    With `chunk_loss` the loss of a token is -log p(label), plus label smoothing and z-loss if it has them.

    Args:
        hidden_BTD: final hidden states.
        weight_VD: weight of the head.
        labels_BT: the token that each position predicts, or -100.
        chunk: computes the losses of a chunk: `chunk_loss`, or a compiled form of it.
        max_columns: size of the largest vocab shard of any rank, so that all ranks have equal chunks; None: V.
        factors_BT: factor of each token's loss; None: 1.
        softcap: soft cap of the logits; None: they have none.
    """
    head = chunked_head(hidden_BTD, max_columns or weight_VD.shape[0], chunk, softcap)
    hidden_ND = hidden_BTD.flatten(0, -2)
    labels_N = labels_BT.flatten()
    factors_N = None if factors_BT is None else factors_BT.flatten()
    if labels_N.device.type == "cpu":
        # Skip tokens without a label. On a GPU, the host would have to wait for their number.
        index = labels_N.ge(0).nonzero().flatten()
        if len(index) < len(labels_N):
            hidden_ND = hidden_ND[index]
            labels_N = labels_N[index]
            factors_N = None if factors_N is None else factors_N[index]
    grads = torch.is_grad_enabled()
    total: Tensor = _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, factors_N, head, grads)
    return total
