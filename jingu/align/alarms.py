"""Warnings about reinforcement learning runs that go wrong."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from jingu.runtime.log import log_warning

# Nats per token. At 0.5, an answer of 100 tokens is e^50 times as likely as under the reference.
_MAX_KL = 0.5
# Share of pairs of answers that reward and audit rank alike.
_MIN_AGREEMENT = 0.6
# Bounds on the entropy, relative to its mean over the first ten steps.
_MIN_ENTROPY, _MAX_ENTROPY = 0.1, 3.0


class Alarms:
    """Checks the metrics of each step and issues every warning at most once."""

    def __init__(self) -> None:
        self._history: list[dict[str, float]] = []
        self._first_entropies: list[float] = []
        self._kinds: set[str] = set()

    def check(self, metrics: dict[str, float], audit_names: list[str]) -> None:
        """Check the metrics of a step.

        Args:
            audit_names: rewards that are measured but not trained on.
        """
        self._history = [*self._history[-19:], metrics]
        if len(self._first_entropies) < 10:
            self._first_entropies.append(metrics["entropy"])
        if metrics["truncated"] > 0.5:
            self.warn("More than half of the answers are cut off: raise task.max_new_tokens.")
        if metrics.get("unscored", 0.0) > 0.5:
            self.warn(
                "More than half of the answers could not be scored, and nothing is learned from them: a reward gave "
                "None for them. Look at rollouts/; if a reward applies to some rows only, set required: false in it."
            )
        elif metrics.get("dead_groups", 0.0) > 0.8:
            self.warn(
                "In more than 80% of the groups all rewards are equal, and nothing is learned from them. If the model "
                "has learned its prompts, end the run; otherwise choose prompts that it solves now and then, or set "
                "task.max_resampling."
            )
        if len(self._history) < 20:
            return
        # Compare the last ten steps with the ten before them.
        for name in audit_names:
            change = self._change(f"rewards/{name}")
            if self._change("reward") > 0.0 and change < 0.0:
                self.warn(
                    f"The reward rises while the audit {name} falls: the model may exploit the reward. Look at "
                    "rollouts/, and correct the reward or stop earlier."
                )

            # Without pairs of answers that an audit tells apart, there is no agreement.
            values = [earlier.get(f"agreement/{name}", math.nan) for earlier in self._history[10:]]
            values = [value for value in values if not math.isnan(value)]
            if self._change("reward") > 0.0 and change <= 0.0 and values and fmean(values) < _MIN_AGREEMENT:
                self.warn(
                    f"The reward and the audit {name} rank only {fmean(values):.0%} of the pairs of answers alike "
                    "(50% is chance): what is learned is not what the audit measures. Correct the reward, or train the "
                    "reward model on more pairs, also of answers by this model."
                )
        self._check_entropy()
        if "kl" in metrics:
            self._check_kl([earlier["kl"] for earlier in self._history[10:]])

    def _check_entropy(self) -> None:
        """Compare the entropy of the last ten steps with that of the first ten."""
        ratio = fmean(metrics["entropy"] for metrics in self._history[10:]) / max(fmean(self._first_entropies), 1e-9)
        if ratio < _MIN_ENTROPY:
            self.warn(
                "The entropy has fallen below a tenth of what it was: answers to a prompt hardly differ, and little "
                "can be learned from them. End the run, or raise task.clip_high and lower optimizer.lr."
            )
        elif ratio > _MAX_ENTROPY:
            self.warn(
                "The entropy has risen to more than three times what it was: answers turn into noise. Lower "
                "optimizer.lr, or set task.kl."
            )

    def _check_kl(self, values: list[float]) -> None:
        """Warn if the KL divergence of the last ten steps is large, or significantly negative."""
        mean = fmean(values)
        if mean > _MAX_KL:
            self.warn(
                f"The KL divergence from the reference exceeds {_MAX_KL:g} nats per token: answers may no longer be "
                "the text that the rewards were made for. Raise task.kl.beta, or lower optimizer.lr."
            )
        elif mean < -0.01 and mean < -4 * stdev(values) / math.sqrt(len(values)):
            self.warn(
                "The KL divergence from the reference is estimated below 0, which it cannot be: answers are not "
                "sampled from the probabilities that are trained. Look at mismatch_mean, and set precision.type=fp32 "
                "or task.exact."
            )

    def _change(self, name: str) -> float:
        values = [metrics[name] for metrics in self._history]
        return fmean(values[10:]) - fmean(values[:10])

    def warn(self, message: str) -> None:
        """Issue a warning, unless it is empty or one of its kind (with the same first words) was issued."""
        kind = " ".join(message.split()[:8])
        if message and kind not in self._kinds:
            self._kinds.add(kind)
            log_warning(message)
