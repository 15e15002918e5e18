"""Reinforcement learning (PPO, GRPO and its family) and on-policy distillation, as a task of the training loop.

A step generates answers to prompts, scores them, turns the rewards into advantages, and takes one or more updates.

Shapes: P prompts, G answers to each, R answers of a step or of a batch, A tokens of the longest of these;
B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.advantages import add_returns, shape_rewards
from jingu.align.alarms import Alarms
from jingu.align.answers import RewardHead
from jingu.align.asynchronous import AsynchronousRollouts, Rollout
from jingu.align.critic import SeparateCritic
from jingu.align.distillation import TeacherDivergence
from jingu.align.environment import Environments
from jingu.align.mismatch import choose_bounds
from jingu.align.policy_batch import PolicyBatch, longest_batch, make_policy_batch, row_length
from jingu.align.policy_checks import can_share_prompts, check_policy_run, load_run_prompts
from jingu.align.policy_loss import batch_loss, loss_denominator, value_loss
from jingu.align.prompt_set import Prompt
from jingu.align.reference import load_reference_model
from jingu.align.reward_list import Rewards, weak_fractions
from jingu.align.rollout_rewards import (
    add_rewards,
    agreement,
    describe_answers,
    find_audits,
    is_dead,
    split_groups,
)
from jingu.align.rollouts import Generator, Sample, write_rollout
from jingu.align.step_data import StepData
from jingu.align.token_logprobs import TokenLogProbs
from jingu.config.batch_plan import BatchPlan
from jingu.config.sections.policies import (
    ADVANTAGES,
    DistillationSettings,
    GrpoSettings,
    PolicySettings,
    PpoSettings,
    RewardedSettings,
    SharedCriticSettings,
)
from jingu.data.batch import Batch
from jingu.errors import JinguError, join_words
from jingu.infer.inference_model import InferenceModel
from jingu.infer.row_attention import RowAttention, compute_as_in_generation
from jingu.model.inputs import Inputs
from jingu.parallel.mesh import data_rank
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import TensorBlock
from jingu.parallel.zero import eval_mode
from jingu.runtime.device import force_eager
from jingu.runtime.ranks import gather_from_all
from jingu.tables import import_name
from jingu.training.batch_transforms import model_inputs, to_device
from jingu.training.evaluate import generate_samples
from jingu.training.initialize import keep_base
from jingu.training.precision import choose_precision
from jingu.training.run import Run
from jingu.training.task import Evaluation, Task, TaskFactory
from jingu.watch.activity import Activity

# Computes values [R, A] of the tokens of answers from hidden states and the weight of the head.
TokenHead = Callable[[Tensor, Tensor, PolicyBatch], Tensor]
# Number of different row lengths where each length costs a compilation or a pipeline schedule.
_MAX_LENGTHS = 8


class PolicyLearning(Task):
    """The task of learning from the rewards of the model's own answers, or from a teacher's judgment of them.

    Args:
        compile: whether to compile the loss.
    """

    def __init__(self, run: Run, mesh: DeviceMesh, compile: bool) -> None:
        settings = run.config.task
        assert isinstance(settings, PolicySettings)
        self.settings = settings
        self._run = run
        precision = choose_precision(run.config.precision, torch.device(mesh.device_type))
        environments = Environments(settings.environment) if settings.environment is not None else None
        prompts = load_run_prompts(run, environments)
        base = keep_base(run.config, run.spec, torch.device(mesh.device_type))
        self._generator = Generator(prompts, settings, run.tokenizer, precision, run.config.seed, environments, base)
        self._log_probs = TokenLogProbs(run.spec.vocab_size, mesh, compile=compile, softcap=run.spec.logit_softcap)
        # Only the first rank scores answers, and sends the rewards to the others.
        self._rewards = Rewards(settings.rewards, prompts.columns, run.tokenizer) if dist.get_rank() == 0 else None
        audits = [f"rewards/{name}" for name in self._rewards.audit_names] if self._rewards else []
        self.headline = ("reward", *audits, "kl", "length")
        if isinstance(settings, DistillationSettings):
            self.headline = ("loss", "kl", "length")
        self._asynchronous: AsynchronousRollouts | None = None
        if settings.generation_source is not None:
            self._asynchronous = AsynchronousRollouts(run, self._generator, torch.device(mesh.device_type))
        self._row_attention: RowAttention | None = None
        if settings.exact:
            sharing = [axis for axis in ("pipeline", "context", "tensor") if mesh[axis].size() > 1]
            if sharing:
                what = f"with {join_words(sharing, 'and')} parallelism, training splits matmuls, unlike generation."
                raise JinguError(what, where="task.exact", fix="Divide the model by parallel.zero_stage alone.")
            self._row_attention = RowAttention(run.spec, torch.device(mesh.device_type))
        self._shares_prompts = can_share_prompts(run)
        self._has_few_lengths = compile or mesh["pipeline"].size() > 1
        self._reference: ParallelModel | None = None
        self._fingerprint: str | None = None  # of the reference
        self._divergence: TeacherDivergence | None = None
        if isinstance(settings, DistillationSettings):
            self._reference, self._fingerprint = load_reference_model(run, mesh, settings.teacher, "task.teacher")
            if settings.beta is not None:
                if mesh["pipeline"].size() > 1:
                    what = "pipeline parallelism does not support distillation from the teacher's full distribution."
                    raise JinguError(what, where="task.beta", fix="Set it to null, or parallel.pipeline=1.")
                self._divergence = TeacherDivergence(
                    self._reference, mesh, run.spec, settings.beta, settings.temperature
                )
        elif settings.penalty is not None:
            path = settings.penalty.reference
            self._reference, self._fingerprint = load_reference_model(run, mesh, path, "task.kl.reference")
        self._critic: SeparateCritic | None = None
        self._value_head: RewardHead | None = None
        if isinstance(settings, PpoSettings):
            if isinstance(settings.critic, SharedCriticSettings):
                self._value_head = RewardHead(mesh)
            else:
                self._critic = SeparateCritic(run, mesh, settings, self.batch)
        # State of the current step; None before the first one.
        self._data: StepData | None = None
        self._update: tuple[BatchPlan, int] | None = None
        self._activity = Activity()
        self._is_first_update = True
        self._metrics: dict[str, float] = {}
        # Tokens, Σ entropy, Σ clipped, tokens of the first update, Σ |mismatch|, Σ importance weights after the cap;
        # and the largest mismatch and uncapped weight.
        self._sums = torch.zeros(6, dtype=torch.float64, device=mesh.device_type)
        self._largest = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
        self._alarms = Alarms()

    # A step

    def begin_step(self, model: ParallelModel, plan: BatchPlan, step: int) -> None:
        """Before the first update of a step, generate answers and score them."""
        number, update = divmod(step, plan.updates)
        self._is_first_update = update == 0
        self._update = plan, step
        self._activity = model.activity
        if update:
            return
        if self._row_attention is not None and self._data is None:
            for stage in model.stages:
                compute_as_in_generation(stage)
        self._sums.zero_()
        self._largest.zero_()
        # 1. Answers and their rewards.
        num_resampled = 0
        if self._asynchronous is None:
            rollout, num_resampled = self._generate(model, number)
        else:
            rollout = self._asynchronous.take(model, number)
            prompts = self._generator.prompts.prompts
            parts = [
                add_rewards(part, prompts, self._rewards) if part else [] for part in (rollout.samples, rollout.greedy)
            ]
            rollout = replace(rollout, samples=parts[0], greedy=parts[1])
        # 2. Log-probabilities under this model and the reference, and the critic's predictions, before any update.
        data = self._data = StepData.of(rollout.samples, number - rollout.weights_step)
        model.activity.enter("log-probs")
        # With stale rollouts, the KL divergence compares the reference with the current weights, not the sampler's.
        if plan.updates > 1 or (data.staleness > 0 and self._reference is not None):
            data = replace(data, old=self._score(model, plan, data, self._log_probs_head))
        if self._reference is not None:
            model.activity.enter("teacher" if isinstance(self.settings, DistillationSettings) else "reference")
            data = replace(data, reference=self._score(self._reference, plan, data, self._log_probs_head))
        model.activity.enter("critic")
        if self._critic is not None:
            data = replace(data, values=self._score(self._critic.model, plan, data, self._critic.values))
        elif self._value_head is not None:
            data = replace(data, values=self._score(model, plan, data, self._shared_values(model)))

        # 3. Advantages.
        self._data = data = self._add_advantages(data, rollout.greedy)
        self._metrics = self._describe(data, num_resampled)
        if dist.get_rank() == 0:
            folder = self._run.folder / "rollouts"
            common = {"weights_step": rollout.weights_step, "seed": self._run.config.seed}
            write_rollout(folder, number + 1, data.samples, **common, reference=self._fingerprint)
            self._alarms.check(self._observations(data), self._rewards.audit_names if self._rewards else [])

    def _generate(self, model: ParallelModel, number: int) -> tuple[Rollout, int]:
        """Generate the rollout of a step with the current weights; return it and the number of resampled groups."""
        settings = self.settings
        with self._generator.model_of(model) as generating:
            samples = self._rollout(generating, self._generator.select(number), number)
            samples, num_resampled = self._resample(generating, samples, number)
            greedy = []
            if isinstance(settings, GrpoSettings) and settings.needs_greedy:
                rows = [group[0].row for group in split_groups(samples, settings.answers_per_prompt)]
                prompts = [self._generator.prompts.prompts[row] for row in rows]
                greedy = self._rollout(generating, prompts, number, greedy=True)
        return Rollout(number, number, samples, greedy), num_resampled

    def _rollout(
        self, model: InferenceModel, prompts: list[Prompt], *arguments: int, greedy: bool = False
    ) -> list[Sample]:
        """Return scored answers to prompts, on every rank.

        Args:
            arguments: the step, and optionally the resampling attempt, of `Generator.generate`.
        """
        samples = self._generator.generate(model, prompts, *arguments, greedy=greedy)
        return add_rewards(samples, self._generator.prompts.prompts, self._rewards)

    def _resample(self, model: InferenceModel, samples: list[Sample], step: int) -> tuple[list[Sample], int]:
        """Replace groups whose rewards are all equal by answers to other prompts (dynamic sampling, Yu et al., 2025).

        Returns:
            All samples, and the number of replaced groups.
        """
        settings = self.settings
        groups = split_groups(samples, settings.answers_per_prompt)
        num_resampled = 0
        max_resampling = settings.max_resampling if isinstance(settings, GrpoSettings) else 0
        for attempt in range(1, max_resampling + 1):
            dead = [index for index, group in enumerate(groups) if is_dead(group)]
            if not dead:
                break
            first = step * settings.prompts_per_step
            prompts = self._generator.prompts.select(self._run.config.seed, first, len(dead), attempt)
            new_groups = split_groups(self._rollout(model, prompts, step, attempt), settings.answers_per_prompt)
            for index, group in zip(dead, new_groups, strict=True):
                if not is_dead(group):
                    groups[index] = group
                    num_resampled += 1
        return [sample for group in groups for sample in group], num_resampled

    def _score(self, model: ParallelModel, plan: BatchPlan, data: StepData, compute: TokenHead) -> Tensor:
        """Run a model over all answers of the step without gradients; return the values [R, A] of `compute`.

        Each data rank computes its own rows, and all ranks get all values.
        """
        mesh = model.sharding.mesh
        size = self._run.config.batch.global_batch_size
        starts = [
            update * size + data_rank(mesh) * plan.rows_per_rank + start
            for update in range(plan.updates)
            for start in range(0, plan.rows_per_rank, plan.micro_batch_size)
        ]
        batches = [self._rows(data, start, plan.micro_batch_size) for start in starts]
        values: list[Tensor] = []
        with eval_mode(model), force_eager():
            for batch in batches:
                # With several updates a step, all answers may take longer than the watchdog waits in one operation.
                self._activity.enter(self._activity.phase)
                on_device = to_device(batch, torch.device(mesh.device_type))
                assert isinstance(on_device, PolicyBatch)

                def head(hidden_BTD: Tensor, weight_VD: Tensor, batch: PolicyBatch = on_device) -> Tensor:
                    return compute(hidden_BTD, weight_VD, batch)

                inputs = model_inputs(on_device) if model.spec.score_head else self._inputs(on_device)
                values.append(model(inputs, loss=head).flatten())
        # Copy to the host once for all answers: every copy waits for the device.
        on_host = torch.cat(values).cpu().split([len(value_N) for value_N in values])
        parts = [
            (start, value_N.view(batch.mask.shape).where(batch.mask, 0.0).tolist())
            for start, batch, value_N in zip(starts, batches, on_host, strict=True)
        ]
        result_RA = torch.zeros_like(data.sampled)
        for start, rows in (part for rank_parts in gather_from_all(parts) for part in rank_parts):
            value_RA = torch.tensor(rows, dtype=torch.float64)
            result_RA[start : start + len(rows), : value_RA.shape[1]] = value_RA
        return result_RA

    def _log_probs_head(self, hidden_BTD: Tensor, weight_VD: Tensor, batch: PolicyBatch) -> Tensor:
        return self._compute_log_probs(hidden_BTD, weight_VD, batch)[0]

    def _shared_values(self, model: Any) -> TokenHead:
        """Return the function that computes the predictions of a critic that shares the model's hidden states.

        Args:
            model: the model, or one stage of it.
        """

        def values(hidden_BTD: Tensor, weight_VD: Tensor, batch: PolicyBatch) -> Tensor:
            # The score head is in the last stage, which is the one that calls this.
            score = model.stages[-1].score
            assert self._value_head is not None and score is not None
            return batch.by_answer(self._value_head.scores(hidden_BTD, score.weight, batch))

        return values

    def _add_advantages(self, data: StepData, greedy: list[Sample]) -> StepData:
        """Return the data with rewards after shaping, and with the advantage of each token."""
        settings = self.settings
        if not isinstance(settings, RewardedSettings):
            # Distillation: the advantage of a token is its log-probability under the teacher minus that of the student.
            assert data.reference is not None
            return _with_advantages(data, data.reference - data.logprobs)
        rewards = shape_rewards(settings, data, greedy)
        if isinstance(settings, PpoSettings):
            data, advantage_RA = add_returns(settings, data, rewards)
            return _with_advantages(data, advantage_RA, rewards.answers)
        assert isinstance(settings, GrpoSettings)
        entry = ADVANTAGES[settings.advantage]
        compute = import_name(entry.function)
        if entry.is_per_token:
            return _with_advantages(data, compute(settings, rewards), rewards.answers)
        advantage_RA = compute(settings, rewards).view(-1, 1) * data.mask
        return _with_advantages(data, advantage_RA, rewards.net)

    # Batches

    def batch(self, step: int, first: int, count: int) -> Batch:
        config = self._run.config
        if self._data is not None:
            update = step % self.settings.updates_per_step
            return self._rows(self._data, update * config.batch.global_batch_size + first, count)
        return longest_batch(self.settings, config.batch.sequence_length, count, shares_prompts=self._shares_prompts)

    def _rows(self, data: StepData, first: int, count: int) -> PolicyBatch:
        """Return answers [first, first + count) of the step."""
        answers = slice(first, first + count)
        length = self._row_length(data.samples, answers, count)
        columns = data.columns(answers)
        return make_policy_batch(data.samples[answers], columns, length, shares_prompts=self._shares_prompts)

    def _row_length(self, samples: list[Sample], answers: slice, count: int) -> int:
        """Return the tokens of a row of these answers.

        Args:
            samples: all answers of the step.
            count: answers of each batch of the step.
        """
        if not self._shares_prompts:
            return max(row_length([sample]) for sample in samples)
        if not self._has_few_lengths:
            return row_length(samples[answers])
        # All batches of a step get the same length, rounded up to one of _MAX_LENGTHS values.
        sequence_length = self._run.config.batch.sequence_length
        unit = -(-longest_batch(self.settings, sequence_length, count).tokens.shape[1] // _MAX_LENGTHS)
        longest = max(row_length(samples[first : first + count]) for first in range(0, len(samples), count))
        return longest + -longest % unit

    def denominator(self, batch: Batch) -> float:
        assert isinstance(batch, PolicyBatch)
        return loss_denominator(batch, self.settings)

    # The loss

    def loss_terms(self, model: ParallelModel) -> dict[str, float]:
        if isinstance(self.settings, PpoSettings) and isinstance(self.settings.critic, SharedCriticSettings):
            return {"loss": 1.0, "value_loss": self.settings.critic.weight, "value_clipped": 0.0}
        return {"loss": 1.0}

    def loss(self, model: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, PolicyBatch)

        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            logprob_RA, entropy_RA = self._compute_log_probs(hidden_BTD, weight_VD, batch)
            # In the first update the policy has not changed yet: take the old log-probabilities from this very forward
            # pass, so that the ratio is exactly 1 even if other kernels computed the stored ones.
            is_first = self._is_first_update
            rows = replace(batch, old=logprob_RA.detach()) if is_first or batch.old is None else batch
            loss, clipped_RA = batch_loss(rows, logprob_RA, self.settings)
            if self._data is not None:
                assert rows.old is not None and rows.sampled is not None
                mismatch_RA = (rows.old - rows.sampled).where(batch.mask & is_first, 0.0)
                self._record(batch.mask, entropy_RA, clipped_RA, mismatch_RA)
            if self._value_head is not None:
                assert isinstance(self.settings, PpoSettings)
                value_RA = self._shared_values(model)(hidden_BTD, weight_VD, batch)
                loss = torch.stack([loss, *value_loss(batch, value_RA, self.settings.value_clip)])
            if self._divergence is not None:
                return self._divergence(model_inputs(batch), hidden_BTD, weight_VD, batch.labels)
            return loss * self._log_probs.share

        total: Tensor = model(self._inputs(batch), loss=head)
        return total

    def _inputs(self, batch: Batch) -> Inputs:
        """Return the model inputs of a batch."""
        inputs = model_inputs(batch)
        if self._row_attention is None:
            return inputs
        # Padding may exceed the number of learned position embeddings.
        positions_T = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        positions_T = positions_T.clamp_max(self._run.spec.max_position_embeddings - 1)
        return replace(inputs, positions=positions_T.expand_as(batch.tokens), cache=self._row_attention)

    def _compute_log_probs(self, hidden_BTD: Tensor, weight_VD: Tensor, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [R, A]; 0 after the end of an answer."""
        # Row attention needs all tokens, also unlabeled ones: their number is a multiple that the kernels require.
        labels_BT = batch.labels if self._row_attention is None else batch.labels.clamp_min(0)
        logprob_BT, entropy_BT = self._log_probs(hidden_BTD, weight_VD, labels_BT, self.settings.temperature)
        return batch.by_answer(logprob_BT), batch.by_answer(entropy_BT)

    @torch.no_grad()
    def _record(self, mask_RA: Tensor, entropy_RA: Tensor, clipped_RA: Tensor, mismatch_RA: Tensor) -> None:
        """Accumulate the sums and maxima for the metrics of the step."""
        weight_RA = mismatch_RA.exp().where(mask_RA & self._is_first_update, 0.0)
        cap = self.settings.importance_cap or math.inf
        sums = (entropy_RA, clipped_RA, mask_RA & self._is_first_update, mismatch_RA.abs(), weight_RA.clamp_max(cap))
        self._sums += torch.stack([value.sum().double() for value in (mask_RA, *sums)])
        largest = torch.stack([mismatch_RA.abs().max(), weight_RA.max()])
        self._largest = torch.maximum(self._largest, largest.double())

    def state(self) -> Any:
        """Return the rollouts that are in flight."""
        return None if self._asynchronous is None else self._asynchronous.state()

    def load_state(self, state: Any) -> None:
        if self._asynchronous is not None:
            self._asynchronous.load_state(state)

    def tensors(self) -> dict[str, TensorBlock]:
        """Return the checkpoint tensors of a separate critic."""
        return {} if self._critic is None else self._critic.tensors()

    def end_step(self) -> dict[str, Tensor | float]:
        """Train a separate critic on the rows of the update, and return the metrics of the step so far.

        The host waits for the device only in the first update of a step.

        Raises:
            JinguError: generation and training disagree by more than `task.max_mismatch` or `task.max_mean_mismatch`.
        """
        sums, largest = self._sums.clone(), self._largest.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        tokens, entropy, clip_count, first, mismatch, importance = sums
        # Only the first update measures the mismatch.
        if self._is_first_update:
            precision = self._run.config.precision.type
            staleness = 0 if self._data is None else self._data.staleness
            bounds = choose_bounds(self.settings, self._run.spec, precision, staleness)
            mean, maximum = torch.stack([mismatch / first.clamp_min(1.0), largest[0]]).tolist()
            warning = bounds.check(mean, maximum, self._run.folder)
            if dist.get_rank() == 0:
                self._alarms.warn(warning)
        critic: dict[str, Tensor | float] = {}
        if self._critic is not None and self._update is not None:
            # A checkpoint may be copied during the next step, but the policy's optimizer step has waited for the copy:
            # from here on the critic's weights may change, too.
            self._activity.enter("critic")
            critic = self._critic.train(*self._update)
        weights = {"importance_mean": importance / first.clamp_min(1.0), "importance_max": largest[1]}
        return {
            **self._metrics,
            **critic,
            "entropy": entropy / tokens.clamp_min(1.0),
            "clipped": clip_count / tokens.clamp_min(1.0),
            "mismatch_mean": mismatch / first.clamp_min(1.0),
            "mismatch_max": largest[0],
            **(weights if self.settings.importance_cap is not None else {}),
        }

    def _observations(self, data: StepData) -> dict[str, float]:
        """Return the metrics of the rollout for the alarms."""
        observations = dict(self._metrics)
        # In distillation, the KL divergence is the loss itself, and starts high.
        if self.settings.penalty is None:
            observations.pop("kl", None)
        # The mean of -log π over tokens sampled from π estimates the entropy without a forward pass.
        observations["entropy"] = -fmean(data.sampled[data.mask].tolist())
        return observations

    def _describe(self, data: StepData, num_resampled: int) -> dict[str, float]:
        """Return the metrics of the rollout."""
        samples = data.samples
        metrics = describe_answers(samples, self.settings.answers_per_prompt)
        prompts = self._generator.prompts.prompts
        metrics |= weak_fractions(self.settings.rewards, [prompts[sample.row].columns for sample in samples])
        if self._asynchronous is not None:
            metrics["staleness"] = data.staleness
        if data.values is not None:
            metrics["explained_variance"] = data.explained_variance
        if isinstance(self.settings, GrpoSettings) and self.settings.max_resampling:
            metrics["resampled_groups"] = num_resampled
        for name in find_audits(samples[0], self.settings.rewards):
            metrics[f"agreement/{name}"] = agreement(samples, name, self.settings.answers_per_prompt)
        if data.reference is not None:
            metrics["kl"] = fmean((data.logprobs - data.reference)[data.mask].tolist())
        return metrics

    def evaluate(self, model: ParallelModel, micro_batch_size: int, *, final: bool) -> Evaluation:
        """Generate answers to the sample prompts; there is no validation loss."""
        return Evaluation({}, generate_samples(self._run, model))


def _with_advantages(data: StepData, advantage_RA: Tensor, reward_R: Tensor | None = None) -> StepData:
    """Return the data with the advantage of each token, also in its samples; and with the rewards of the answers."""
    rewards = [sample.reward for sample in data.samples]
    if reward_R is not None:
        rewards = [None if math.isnan(reward) else reward for reward in reward_R.tolist()]
    samples = [
        replace(sample, reward=reward, advantages=tuple(advantage_A[mask_A].tolist()))
        for sample, reward, advantage_A, mask_A in zip(data.samples, rewards, advantage_RA, data.mask, strict=True)
    ]
    return replace(data, samples=samples, advantages=advantage_RA)


POLICY_LEARNING = TaskFactory(PolicyLearning, check=check_policy_run)
