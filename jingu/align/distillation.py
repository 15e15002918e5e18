"""Distillation from full distributions: the divergence of a student from its teacher, over the vocabulary.

Shapes: B rows, C tokens of a row on a context rank, N = B · C, M tokens of a chunk, D hidden size, V vocab.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch_distributed import all_reduce
from jingu.data.batch import IGNORE_INDEX
from jingu.model.decoder import cap_logits
from jingu.model.inputs import Inputs
from jingu.model.matmul_kernels import matmul
from jingu.model.spec import ModelSpec
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.tensor import VocabShard
from jingu.parallel.token_sharding import TokenSharding
from jingu.parallel.zero import eval_mode
from jingu.training.loss import linear_cross_entropy


def _log_softmax(logits_MV: Tensor, shard: VocabShard | None) -> Tensor:
    """Return log-probabilities of this rank's part of the vocabulary."""
    if shard is None:
        return torch.log_softmax(logits_MV, 1)
    shifted_MV = logits_MV - all_reduce(logits_MV.amax(1), "max", shard.group).unsqueeze(1)
    return shifted_MV - all_reduce(shifted_MV.exp().sum(1), "sum", shard.group).log().unsqueeze(1)


def generalized_jsd(
    student_MV: Tensor, teacher_MV: Tensor, beta: float, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Return the generalized Jensen-Shannon divergence [M] and its gradient [M, V] w.r.t. the student's logits.

    With M = β · teacher + (1 - β) · student it is β · KL(teacher ‖ M) + (1 - β) · KL(student ‖ M); at β = 0 it is
    KL(teacher ‖ student), at β = 1 KL(student ‖ teacher) (Agarwal et al., 2024, equation 1).
    """
    student_MV, teacher_MV = (_log_softmax(logits_MV, shard) for logits_MV in (student_MV, teacher_MV))
    p_MV, q_MV = student_MV.exp(), teacher_MV.exp()
    # Derivatives w.r.t. the student's log-probabilities, up to a constant per row, which the softmax cancels.
    if beta == 0.0:
        terms_MV = q_MV * (teacher_MV - student_MV)
        slope_MV = -q_MV
    elif beta == 1.0:
        slope_MV = terms_MV = p_MV * (student_MV - teacher_MV)
    else:
        mixture_MV = torch.logaddexp(student_MV + math.log1p(-beta), teacher_MV + math.log(beta))
        slope_MV = (1.0 - beta) * p_MV * (student_MV - mixture_MV)
        terms_MV = beta * q_MV * (teacher_MV - mixture_MV) + slope_MV
    sums_2M = torch.stack([terms_MV.sum(1), slope_MV.sum(1)])
    if shard is not None:
        sums_2M = all_reduce(sums_2M, "sum", shard.group)
    return sums_2M[0], slope_MV - p_MV * sums_2M[1].unsqueeze(1)


class TeacherDivergence:
    """The divergence of a model from its teacher, summed over the labeled tokens of a batch.

    Both heads compute their logits chunk by chunk. This excludes pipeline parallelism, where the whole teacher would
    have to run within the last stage.
    """

    def __init__(
        self, teacher: ParallelModel, mesh: DeviceMesh, spec: ModelSpec, beta: float, temperature: float
    ) -> None:
        self._teacher = teacher
        self._tokens = TokenSharding(mesh)
        self._vocab = VocabShard.of(mesh, spec.vocab_size)
        self._shard = self._vocab if mesh["tensor"].size() > 1 else None
        self._softcap = spec.logit_softcap
        self._beta = beta
        self._temperature = temperature

    def __call__(self, inputs: Inputs, hidden_BCD: Tensor, weight_VD: Tensor, labels_BT: Tensor) -> Tensor:
        """Return this context rank's part of the sum, differentiable w.r.t. hidden states and head of the model."""
        labels_BC = self._tokens.shard_context(labels_BT, fill=IGNORE_INDEX)
        # Pass the index of each token in place of its label: the chunk function looks up the teacher's state by it.
        number_BC = torch.arange(labels_BC.numel(), device=labels_BC.device).view_as(labels_BC)
        number_BC = number_BC.where(labels_BC >= 0, IGNORE_INDEX)
        totals = []

        def head(teacher_BCD: Tensor, teacher_VD: Tensor) -> Tensor:
            # The teacher calls this inside the model's own loss, so the weights of both heads are gathered here.
            chunk = partial(self._chunk, teacher_BCD.flatten(0, 1), teacher_VD)
            with torch.enable_grad():
                most, softcap = self._vocab.most, self._softcap
                total = linear_cross_entropy(hidden_BCD, weight_VD, number_BC, chunk, most, softcap=softcap)
                totals.append(total)
            return totals[0].detach()

        with eval_mode(self._teacher):
            self._teacher(inputs, loss=head)
        return totals[0]

    def _chunk(
        self, teacher_ND: Tensor, teacher_VD: Tensor, logits_MV: Tensor, number_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_MV.dtype, torch.float32)
        teacher_MV = matmul(teacher_ND[number_M.clamp_min(0)], teacher_VD.to(teacher_ND.dtype).t())
        teacher_MV = cap_logits(self._teacher.spec, teacher_MV)
        student_MV, teacher_MV = (logits.to(wide) / self._temperature for logits in (logits_MV, teacher_MV))
        losses_M, gradient_MV = generalized_jsd(student_MV, teacher_MV, self._beta, self._shard)
        return losses_M, (gradient_MV / self._temperature).to(logits_MV.dtype)
