"""The answers of a step of learning from rewards, with what is known of each of their tokens.

Shapes: R answers of the step, A tokens of the longest one. Only the model's own tokens count, not the replies of an
environment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jingu.align.rollouts import Sample


@dataclass(frozen=True)
class StepData:
    """The answers of a step, and values [R, A] of their tokens in fp64; 0 after the end of an answer.

    Attributes:
        samples: the answers.
        mask: whether there is a token.
        sampled: log-probabilities during generation.
        staleness: steps for which the weights that generated the answers have been trained since.
        old: log-probabilities before the first update of the step; None: use those of its forward pass.
        reference: log-probabilities under the reference model or the teacher; None if there is none.
        values: predictions of the critic before the first update; None if there is no critic.
        returns: targets of the critic; NaN where unknown.
        explained_variance: share of the variance of the returns that the critic predicts.
        advantages: advantage of each token; None before they are computed.
    """

    samples: list[Sample]
    mask: Tensor
    sampled: Tensor
    staleness: int = 0
    old: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    explained_variance: float = float("nan")
    advantages: Tensor | None = None

    @staticmethod
    def of(samples: list[Sample], staleness: int) -> StepData:
        """Return the data of a step whose answers have just been generated."""
        lengths_R = torch.tensor([len(sample.logprobs) for sample in samples])
        mask_RA = torch.arange(int(lengths_R.max())) < lengths_R[:, None]
        sampled_RA = torch.zeros(mask_RA.shape, dtype=torch.float64)
        logprobs = [value for sample in samples for value in sample.logprobs]
        sampled_RA[mask_RA] = torch.tensor(logprobs, dtype=torch.float64)
        return StepData(samples, mask_RA, sampled_RA, staleness)

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities under the weights at the beginning of the step."""
        if not self.staleness:
            return self.sampled
        assert self.old is not None
        return self.old

    def columns(self, answers: slice) -> dict[str, Tensor]:
        """Return the fields of a `PolicyBatch` with some of the answers; zeros for what there is not."""
        fields = {name: getattr(self, name) for name in ("sampled", "reference", "values", "returns", "advantages")}
        columns = {name: torch.zeros_like(self.sampled) if value is None else value for name, value in fields.items()}
        if self.old is not None:
            columns["old"] = self.old
        return {name: value_RA[answers] for name, value_RA in columns.items()}
