"""Settings of tasks in which the model generates answers and learns from their rewards, or from a teacher."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Discriminator, Field, model_validator

from jingu.config.sections.base import (
    Description,
    Fraction,
    NonNegative,
    PathText,
    Positive,
    Settings,
    default_type,
    names_of,
)
from jingu.config.sections.rewards import ModelReward, Reward
from jingu.config.sections.task_base import AuxiliaryModel, TaskBase
from jingu.plugins import Registry, expect_type

Coefficient = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]


class NoKlSettings(Settings):
    """No KL penalty."""

    type: Literal["none"] = "none"


class KlSettings(Settings):
    """KL penalty: the objective minus beta times the KL divergence from a reference model.

    A token changes the divergence in two ways: by its own log π/π_ref, and by those of the tokens that follow it. An
    estimator with both parts has the gradient of the divergence of whole answers (Tang and Munos, 2025).

    Attributes:
        estimator: Estimator of the divergence: k1 in the reward, or k2_sequence or k2 in the loss; no others, because
            k1 in the loss has no gradient on average, and k3 has that of another divergence. k1: log π/π_ref, which
            the rewards of earlier tokens include. k2_sequence: the same gradient in the loss: each token counts with
            the sum of log π/π_ref over itself and all later tokens. k2: (log π/π_ref)²/2 of each token, without its
            effect on later tokens: less noise, but the gradient of the divergence only for answers of one token.
        beta: Coefficient of the KL divergence.
        reference: The reference model: a run, a checkpoint, or a Hugging Face folder; null: `initialize.from`.
    """

    type: Literal["kl"] = "kl"
    estimator: Literal["k1", "k2", "k2_sequence"] = "k2"
    beta: AboveZero = 0.001
    reference: PathText | None = None


Kl = Annotated[NoKlSettings | KlSettings, Discriminator("type"), default_type("kl")]


class SeparateCriticSettings(Settings):
    """A separate critic: a model with a score head. All of its weights are trained, and saved in the run's checkpoints.

    Attributes:
        model: Model that the critic starts from: a run of the task `reward`, or any model with the same tokenizer;
            null: `initialize.from`, or random weights.
        lr_multiplier: The critic's learning rate, as a multiple of `optimizer.lr`. It uses the run's optimizer and
            schedule.
    """

    type: Literal["separate"] = "separate"
    model: PathText | None = None
    lr_multiplier: AboveZero = 1.0


class SharedCriticSettings(Settings):
    """A linear head on the hidden states of the trained model. The value loss trains the model too. It needs no second
    model in memory.

    Attributes:
        weight: Coefficient of the value loss.
    """

    type: Literal["shared"] = "shared"
    weight: AboveZero = 0.1


Critic = Annotated[SeparateCriticSettings | SharedCriticSettings, Discriminator("type"), default_type("separate")]


class EnvironmentSettings(Settings):
    """An environment: it replies to each turn of the model until the answer ends.

    Attributes:
        path: Class of the environment: `module:class`, `file.py:class`, or the name of a plug-in. Its methods are
            begin(row); step(answer), which returns a text, or None to end the answer; and score(), which returns the
            reward. null: there are only tools, and an answer ends with a turn without a tool call.
        tools: Functions that the model may call: `module:function` or `file.py:function`, or names of methods of the
            class. Each needs a docstring and annotated arguments.
        max_turns: Maximum number of the model's turns in an answer.
        timeout: Seconds that one call may take, for all answers of a rank together.
    """

    path: PathText | None = None
    tools: list[str] = []
    max_turns: Positive = 4
    timeout: AboveZero = 60.0


ENVIRONMENTS: Registry[str] = Registry("environments", {})
"""The classes of environments that plug-ins name, each as `module:name`."""


class SynchronousSettings(Settings):
    """The ranks of the run generate the answers of a step, then train on them."""

    type: Literal["none"] = "none"


class GenerationProcessesSettings(Settings):
    """Separate processes generate answers while the ranks train. They run on the machine of the first rank: on GPUs
    that no rank uses, or else on the GPU of the first rank. They receive the new weights after each step.

    Attributes:
        staleness: Age, in steps, of the weights that generate answers, compared with the trained ones. It is always
            exactly this, except in the first steps; 0: training waits for each rollout.
        processes: Number of processes; each holds a whole copy of the model.
        threads: CPU threads per process; null: as many as the first rank has.
        timeout: Seconds that the answers of a step may take.
    """

    type: Literal["processes"] = "processes"
    staleness: NonNegative = 1
    processes: Positive = 1
    threads: Positive | None = None
    timeout: AboveZero = 3600.0


class GenerationServerSettings(Settings):
    """A server generates the answers. It speaks OpenAI's protocol with token ids and log-probabilities: `jingu serve`,
    or vLLM. It serves the model that the run starts from. After each step it loads the run's adapter from the run's
    folder, so it must be able to read this folder.

    Attributes:
        staleness: Age, in steps, of the adapter that generates answers, compared with the trained one. It is always
            exactly this, except in the first steps; 0: training waits for each rollout.
        url: URL of the server, ending in /v1.
        api_key_file: File with the API key, which is sent as a bearer token; null: no key.
        timeout: Seconds that one request may take.
        retries: Number of retries after a failed request.
        concurrency: Maximum number of concurrent requests; each asks for one answer.
    """

    type: Literal["server"] = "server"
    staleness: NonNegative = 1
    url: Annotated[str, Field(pattern=r"^https?://"), Description("an address such as http://localhost:8000/v1")] = (
        "http://localhost:8000/v1"
    )
    api_key_file: PathText | None = None
    timeout: AboveZero = 600.0
    retries: NonNegative = 4
    concurrency: Positive = 64


Asynchronous = Annotated[
    SynchronousSettings | GenerationProcessesSettings | GenerationServerSettings,
    Discriminator("type"),
    default_type("processes"),
]


class RolloutSettings(TaskBase):
    """Settings of every task that generates answers.

    Attributes:
        prompts: JSON Lines file of prompts. Each row has a `prompt` (a text, or messages) and the columns that the
            rewards read.
        template: Chat template for prompts that are messages: a name or a file; auto: the tokenizer's own.
        prompts_per_step: Prompts per step.
        answers_per_prompt: Answers to each prompt.
        updates_per_step: Optimizer steps per rollout; each uses the answers to an equal part of the prompts.
        max_new_tokens: Maximum number of tokens in an answer, including an environment's replies.
        temperature: Sampling temperature. Training computes log-probabilities at the same temperature.
        max_num_seqs: Maximum number of answers that a rank generates at a time.
        rewards: Rewards that score the answers.
        environment: Environment that replies to each turn of an answer; its class also scores the answer. null: an
            answer has one turn.
        max_mismatch: Largest allowed difference between the log-probabilities of a token in generation and in training,
            in nats. The run stops at a larger one. null: by precision: 1e-6 for fp64, 0.1 for fp32, 1 for narrower
            ones, mixtures of experts and quantized weights, 2 for a generation server; no bound for answers by older
            weights.
        max_mean_mismatch: Largest allowed mean of this difference over the tokens of a step, in nats. null: by
            precision: 1e-8 for fp64, 1e-3 for fp32, 0.1 for narrower ones and quantized weights, 0.2 for a generation
            server, 1 for answers by older weights.
        exact: Use the operations of generation in training, so that both compute the same log-probabilities: on CPUs
            bit for bit. The run stops if they differ. Training takes longer.
    """

    FACTORY: ClassVar[str] = "jingu.align.policy_learning:POLICY_LEARNING"
    PHASES: ClassVar[tuple[Literal["generation", "update"], ...]] = ("generation", "update")

    type: str
    prompts: PathText = "prompts.jsonl"
    template: str = "auto"
    prompts_per_step: Positive = 16
    answers_per_prompt: Positive = 8
    updates_per_step: Positive = 1
    max_new_tokens: Positive = 256
    temperature: AboveZero = 1.0
    max_num_seqs: Positive = 64
    rewards: list[Reward] = []
    environment: EnvironmentSettings | None = None
    max_mismatch: AboveZero | None = None
    max_mean_mismatch: AboveZero | None = None
    exact: bool = False

    @property
    def rows_per_update(self) -> int:
        """Number of answers in one optimizer step."""
        return max(self.prompts_per_step // self.updates_per_step, 1) * self.answers_per_prompt


class PolicySettings(RolloutSettings):
    """Settings of every task with a policy-gradient loss.

    Attributes:
        loss: How the token losses are normalized: grpo: mean over answers of the mean over their tokens; dapo: mean
            over all tokens; dr_grpo: sum over all tokens, divided by the number of answers times `max_new_tokens`.
        ratio: Importance ratio of the new to the old policy: token: of each token's probability; sequence: the
            geometric mean of these ratios over the answer (GSPO, Zheng et al., 2025).
        objective: clip: the clipped surrogate objective of PPO; cispo: log-probabilities weighted by the clipped ratio
            (MiniMax, 2025); gmpo: the geometric mean of the clipped ratios of an answer's tokens (Zhao et al., 2025,
            who clip at 0.4 on both sides).
        clip_low: The ratio is clipped below 1 - clip_low, which must be above 0 (with cispo, 0 is no bound); with gmpo
            its logarithm below -clip_low.
        clip_high: The ratio is clipped above 1 + clip_high; with gmpo its logarithm above clip_high.
        importance_cap: Upper bound of the weights that correct for the difference between generation and training
            (truncated importance sampling, Yao et al., 2025); null: no correction. With `asynchronous` the default is
            2.
        asynchronous: How answers are generated while training goes on.
    """

    loss: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    ratio: Literal["token", "sequence"] = "token"
    objective: Literal["clip", "cispo", "gmpo"] = "clip"
    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.28
    importance_cap: AboveZero | None = None
    asynchronous: Asynchronous = SynchronousSettings()

    @model_validator(mode="before")
    @classmethod
    def _correct_staleness(cls, values: Any) -> Any:
        """Set the default of `importance_cap` for asynchronous generation."""
        asynchronous = values.get("asynchronous") if isinstance(values, dict) else None
        if isinstance(asynchronous, dict) and asynchronous.get("type") != "none":
            return {"importance_cap": 2.0, **values}
        return values

    @property
    def staleness(self) -> int:
        """Age, in steps, of the weights that generate answers; 0 for synchronous generation."""
        return 0 if self.generation_source is None else self.generation_source.staleness

    @property
    def generation_source(self) -> GenerationProcessesSettings | GenerationServerSettings | None:
        """The source of asynchronous rollouts; None if generation is synchronous."""
        return None if isinstance(self.asynchronous, SynchronousSettings) else self.asynchronous

    def models(self, initial: str | None) -> tuple[AuxiliaryModel, ...]:
        """Return the copies of the trained model that processes beside the run generate with."""
        source = self.generation_source
        copies = range(source.processes if isinstance(source, GenerationProcessesSettings) else 0)
        return tuple(AuxiliaryModel(f"generation process {number + 1}", None, "whole") for number in copies)

    @property
    def penalty(self) -> KlSettings | None:
        """The KL penalty, if there is one."""
        return None


class DistillationSettings(PolicySettings):
    """On-policy distillation: a teacher judges each token of the model's own answers. The advantage of a token is log
    π_teacher - log π. Its gradient is that of the reverse KL divergence of the next token (Gu et al., 2024; Agarwal et
    al., 2024). `beta` compares whole distributions instead of sampled tokens.

    Attributes:
        teacher: The teacher, with the same tokenizer: a run, a checkpoint, or a Hugging Face folder.
        beta: Compute the generalized Jensen-Shannon divergence over the vocabulary (Agarwal et al., 2024): 0: forward
            KL divergence; 1: reverse KL divergence; 0.5: halfway between them. null: the policy-gradient loss on
            sampled tokens.
    """

    type: Literal["distill"] = "distill"
    teacher: PathText = "runs/teacher"
    beta: Fraction | None = None

    def models(self, initial: str | None) -> tuple[AuxiliaryModel, ...]:
        return (AuxiliaryModel("teacher", self.teacher, "frozen"), *super().models(initial))


class RewardedSettings(PolicySettings):
    """Settings of tasks that learn from rewards.

    Attributes:
        kl: KL penalty.
        overlong_tokens: Soft overlong penalty (DAPO): over the last `overlong_tokens` tokens before `max_new_tokens`,
            the reward of an answer falls linearly by 1; at most `max_new_tokens`; 0: no penalty.
    """

    kl: Kl = NoKlSettings()
    overlong_tokens: NonNegative = 0

    @property
    def penalty(self) -> KlSettings | None:
        return self.kl if isinstance(self.kl, KlSettings) else None

    def models(self, initial: str | None) -> tuple[AuxiliaryModel, ...]:
        models = []
        if self.penalty is not None:
            models.append(AuxiliaryModel("reference", self.penalty.reference or initial, "frozen"))
        models += self.critics(initial)
        paths = [reward.model for reward in self.rewards if isinstance(reward, ModelReward)]
        for number, path in enumerate(paths, start=1):
            name = "reward model" + f" {number}" * (len(paths) > 1)
            models.append(AuxiliaryModel(name, path, "whole", has_score_head=True))
        return (*models, *super().models(initial))

    def critics(self, initial: str | None) -> list[AuxiliaryModel]:
        """Return the separate critic in a list, if the task has one."""
        return []


class PpoSettings(RewardedSettings):
    """Proximal policy optimization (PPO, Schulman et al., 2017) with a critic. At each token of an answer, the critic
    predicts the reward that the answer will get. Defaults are those of TRL's PPOTrainer, except for one update per
    step.

    Attributes:
        loss: How the token losses are normalized: dapo: mean over all tokens.
        answers_per_prompt: Answers to each prompt.
        clip_high: The ratio is clipped above 1 + clip_high.
        kl: KL penalty.
        critic: Model that predicts the rewards.
        value_clip: Clip the critic's predictions to this distance from those before the first update of the step; null:
            no clipping.
        discount: Discount factor γ per token.
        gae_lambda: λ of generalized advantage estimation (Schulman et al., 2016): 0: temporal differences of the
            critic's predictions; 1: rewards minus predictions.
        whiten: Whether to normalize the advantages over all tokens of a step to mean 0 and standard deviation 1.
    """

    type: Literal["ppo"] = "ppo"
    loss: Literal["dapo"] = "dapo"
    answers_per_prompt: Positive = 1
    clip_high: Coefficient = 0.2
    kl: Kl = KlSettings(estimator="k1", beta=0.05)
    critic: Critic = SeparateCriticSettings()
    value_clip: AboveZero | None = 0.2
    discount: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    whiten: bool = True

    def critics(self, initial: str | None) -> list[AuxiliaryModel]:
        if isinstance(self.critic, SharedCriticSettings):
            return []
        return [AuxiliaryModel("critic", self.critic.model or initial, "trained", has_score_head=True)]


class AdvantageEntry(NamedTuple):
    """How rewards become advantages.

    Attributes:
        function: `module:name` of a function of the settings and `StepRewards` (`jingu.align.advantages`).
        needs_greedy: whether it compares with a greedy answer to each prompt.
        is_per_token: whether it returns the advantage of each token rather than of each answer.
    """

    function: str
    needs_greedy: bool = False
    is_per_token: bool = False


ADVANTAGES = Registry(
    "advantages",
    {
        "group": AdvantageEntry("jingu.align.advantages:group"),
        "rloo": AdvantageEntry("jingu.align.advantages:leave_one_out"),
        "gdpo": AdvantageEntry("jingu.align.advantages:separate"),
        "reinforce++": AdvantageEntry("jingu.align.advantages:reinforce", is_per_token=True),
        "remax": AdvantageEntry("jingu.align.advantages:greedy", needs_greedy=True),
        "best": AdvantageEntry("jingu.align.advantages:best"),
    },
    expect_type(AdvantageEntry),
)
"""The advantages by the names of `task.advantage`."""

AdvantageName = Annotated[str, names_of(ADVANTAGES)]


class GrpoSettings(RewardedSettings):
    """Group relative policy optimization (GRPO, Shao et al., 2024) and its variants: the rewards of several answers to
    one prompt are compared with each other. The loss has the defaults of DAPO (Yu et al., 2025), without a KL penalty.

    Attributes:
        answers_per_prompt: Answers to each prompt, at least 2, because their rewards are compared.
        advantage: group: reward minus the mean of the group (all answers to the prompt). rloo: reward minus the mean of
            the other answers (Ahmadian et al., 2024). gdpo: each reward is normalized within the group by itself, then
            their weighted sum over the step, so that a reward of small range counts as much as others (Liu et al.,
            2026). reinforce++: the return of each token, normalized over all tokens
            of the step (Hu, 2025). remax: reward minus that of the greedy answer (Li et al., 2023). best: 1 for the
            best answer to a prompt if there is a worse one, and 0 for all others: rejection sampling (RAFT, Dong et
            al., 2023).
        scale: group: divide advantages by the standard deviation of the group; none: do not divide. The latter is Dr.
            GRPO (Liu et al., 2025).
        max_resampling: Maximum number of attempts to replace groups whose rewards are all equal by answers to other
            prompts (dynamic sampling, DAPO).
    """

    type: Literal["grpo"] = "grpo"
    answers_per_prompt: Annotated[int, Field(ge=2)] = 8
    advantage: AdvantageName = "group"
    scale: Literal["group", "none"] = "group"
    max_resampling: NonNegative = 0

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage needs a greedy answer to each prompt."""
        return ADVANTAGES[self.advantage].needs_greedy
