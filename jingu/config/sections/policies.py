"""Settings of tasks that learn from rewards of answers that the model itself generates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, model_validator

from jingu.config.sections.base import (
    Description,
    Fraction,
    NonNegative,
    PathText,
    Positive,
    Settings,
    default_type,
)
from jingu.config.sections.rewards import Reward

Coefficient = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]


class NoKlSettings(Settings):
    """No pull towards a reference model."""

    type: Literal["none"] = "none"


class KlSettings(Settings):
    """KL divergence from a reference model, of which beta times is subtracted from the objective.

    Only two estimators have the gradient of this divergence: k1 = log π/π_ref in the reward, and k2 = (log π/π_ref)²/2
    in the loss (Tang and Munos, 2025).

    Attributes:
        estimator: k1, in the reward; k2, in the loss; no others, as k1 in the loss has no gradient on average, and k3
            that of another divergence.
        beta: Coefficient.
        reference: The reference model: a run, a checkpoint, or a Hugging Face folder; null: `initialize.from`.
    """

    type: Literal["kl"] = "kl"
    estimator: Literal["k1", "k2"] = "k2"
    beta: AboveZero = 0.001
    reference: PathText | None = None


Kl = Annotated[NoKlSettings | KlSettings, Discriminator("type"), default_type("kl")]


class SeparateCriticSettings(Settings):
    """A critic of its own: a model with a score head, which is trained in full and saved in the run's checkpoints.

    Attributes:
        model: What it starts from: a run of the task `reward`, or any model with the same tokenizer; null:
            `initialize.from`, or random weights.
        lr_multiplier: Factor on `optimizer.lr`. Optimizer and schedule are those of the run.
    """

    type: Literal["separate"] = "separate"
    model: PathText | None = None
    lr_multiplier: AboveZero = 1.0


class SharedCriticSettings(Settings):
    """A linear head on the states of the trained model, which learn to predict values too. It takes no memory.

    Attributes:
        weight: Coefficient of the loss of the values.
    """

    type: Literal["shared"] = "shared"
    weight: AboveZero = 0.1


Critic = Annotated[SeparateCriticSettings | SharedCriticSettings, Discriminator("type"), default_type("separate")]


class EnvironmentSettings(Settings):
    """An environment, which replies to each turn of an answer.

    Attributes:
        path: Its class, `module:class` or `file.py:class`, with the methods begin(row), step(answer), which returns a
            text or None for the end, and score(), which returns the reward. null: there are tools alone, and an answer
            ends with a turn that calls none.
        tools: Functions that the model may call, `module:function` or `file.py:function`, or names of methods of the
            class. Each needs a docstring, and types of its arguments.
        max_turns: The most turns of an answer.
        timeout: Seconds that a call may take for all answers of a rank.
    """

    path: PathText | None = None
    tools: list[str] = []
    max_turns: Positive = 4
    timeout: AboveZero = 60.0


class SynchronousSettings(Settings):
    """The ranks generate the answers of a step before they train on them."""

    type: Literal["none"] = "none"


class GenerationProcessesSettings(Settings):
    """Processes that generate beside training, on the machine of the first rank: on GPUs that no rank uses, or else on
    that of the first rank. They get the weights after each step.

    Attributes:
        staleness: Steps by which the weights that generate are older than those that are trained, always exactly so
            many (but in the first steps); 0: training waits for each rollout.
        processes: How many there are; each has a whole copy of the model.
        threads: CPU threads of each; null: as many as the first rank has.
        timeout: Seconds that the answers of a step may take.
    """

    type: Literal["processes"] = "processes"
    staleness: NonNegative = 1
    processes: Positive = 1
    threads: Positive | None = None
    timeout: AboveZero = 3600.0


class GenerationServerSettings(Settings):
    """A server that generates, with OpenAI's protocol, token ids and log-probabilities: `jingu serve`, or vLLM. It has
    the model that the run starts from, and loads the run's adapter after each step from the run's folder, which it must
    be able to read.

    Attributes:
        staleness: Steps by which the adapter that generates is older than the one that is trained, always exactly so
            many (but in the first steps); 0: training waits for each rollout.
        url: Address of the server, which ends in /v1.
        api_key_file: File with the key that is sent as a bearer token; null: none.
        timeout: Seconds that a request may take.
        retries: Further attempts after a failure.
        concurrency: Requests at a time, of one answer each.
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


class RolloutSettings(Settings):
    """Settings of every task that generates answers.

    Attributes:
        prompts: JSON Lines file of rows with `prompt` (a text or messages) and columns for the rewards.
        template: Name or file of the chat template of prompts that are messages; auto: the tokenizer's.
        prompts_per_step: Prompts of a step.
        answers_per_prompt: Answers to each.
        updates_per_step: Optimizer steps with the answers of a step, each with an equal part of the prompts.
        max_new_tokens: The most tokens of an answer, with the replies of an environment.
        temperature: Of sampling. The model is trained at the same temperature.
        max_num_seqs: Answers that a rank generates at a time.
        rewards: What scores the answers.
        environment: What replies to each turn of an answer, and scores it; null: an answer has one turn.
        max_mismatch: Largest difference between the log-probabilities of a token in generation and in training; beyond
            it the run stops.
        exact: Compute training in the operations of generation, so that the log-probabilities are equal to the last bit
            on CPUs, and stop if they are not; takes longer.
    """

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
    max_mismatch: AboveZero = 0.5
    exact: bool = False

    @property
    def rows_per_update(self) -> int:
        """Answers that an update is computed from."""
        return max(self.prompts_per_step // self.updates_per_step, 1) * self.answers_per_prompt


class PolicySettings(RolloutSettings):
    """Settings of every task with a policy-gradient loss.

    Attributes:
        loss: Normalization: grpo: mean over answers of means over tokens; dapo: mean over all tokens; dr_grpo: sum over
            answers and `max_new_tokens`.
        ratio: token: of the probabilities of a token; sequence: their geometric mean over the answer (GSPO, Zheng et
            al., 2025).
        objective: clip: clipped surrogate objective (PPO); cispo: clipped weights of log-probabilities (MiniMax, 2025).
        clip_low: The ratio counts down to 1 - clip_low.
        clip_high: The ratio counts up to 1 + clip_high.
        importance_cap: Truncate the weights that correct for differences between generation and training (Yao et al.,
            2025); null: no correction. With `asynchronous` it is 2 by default.
        asynchronous: What generates while training goes on.
    """

    loss: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    ratio: Literal["token", "sequence"] = "token"
    objective: Literal["clip", "cispo"] = "clip"
    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.28
    importance_cap: AboveZero | None = None
    asynchronous: Asynchronous = SynchronousSettings()

    @model_validator(mode="before")
    @classmethod
    def _correct_staleness(cls, values: Any) -> Any:
        """Set the default of `importance_cap` where old weights generate."""
        asynchronous = values.get("asynchronous") if isinstance(values, dict) else None
        if isinstance(asynchronous, dict) and asynchronous.get("type") != "none":
            return {"importance_cap": 2.0, **values}
        return values

    @property
    def staleness(self) -> int:
        """Steps by which the weights that generate are older than those that are trained."""
        return 0 if self.generation_source is None else self.generation_source.staleness

    @property
    def generation_source(self) -> GenerationProcessesSettings | GenerationServerSettings | None:
        """What generates beside training; None: nothing does."""
        return None if isinstance(self.asynchronous, SynchronousSettings) else self.asynchronous

    @property
    def penalty(self) -> KlSettings | None:
        """The pull towards a reference model, if there is one."""
        return None


class DistillationSettings(PolicySettings):
    """On-policy distillation: a teacher judges each token of the model's own answers. The advantage of a token is
    log π_teacher - log π, whose gradient is that of the reverse KL divergence of the next token (Gu et al., 2024;
    Agarwal et al., 2024). With `beta`, whole distributions are compared rather than sampled tokens.

    Attributes:
        teacher: The teacher, with the same tokenizer: a run, a checkpoint, or a Hugging Face folder.
        beta: Loss: the generalized Jensen-Shannon divergence over the vocabulary (Agarwal et al., 2024); 0: forward KL
            divergence; 1: reverse KL divergence; 0.5: between both; null: the policy-gradient loss on sampled tokens.
    """

    type: Literal["distill"] = "distill"
    teacher: PathText = "runs/teacher"
    beta: Fraction | None = None


class RewardedSettings(PolicySettings):
    """Settings of tasks that learn from rewards.

    Attributes:
        kl: Pull towards a reference model.
        overlong_tokens: From so many tokens before the limit the reward of an answer falls, to 1 less at the limit
            (DAPO); 0: never.
    """

    kl: Kl = NoKlSettings()
    overlong_tokens: NonNegative = 0

    @property
    def penalty(self) -> KlSettings | None:
        return self.kl if isinstance(self.kl, KlSettings) else None


class PpoSettings(RewardedSettings):
    """Proximal policy optimization (PPO, Schulman et al., 2017) with a critic, which predicts the reward that an answer
    will get from each of its tokens on. Defaults are those of TRL's PPOTrainer, but for one update per step.

    Attributes:
        loss: Normalization: dapo: mean over all tokens.
        answers_per_prompt: Answers to each prompt.
        clip_high: The ratio counts up to 1 + clip_high.
        kl: Pull towards a reference model.
        critic: What predicts the rewards.
        value_clip: A prediction learns only within this distance from what it was when the answers were generated;
            null: without a bound.
        discount: Factor on a reward for each token before it.
        gae_lambda: Generalized advantage estimation (Schulman et al., 2016): 0: differences of neighboring predictions;
            1: rewards minus predictions.
        whiten: Give the advantages of a step mean 0 and standard deviation 1.
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


class GrpoSettings(RewardedSettings):
    """Group relative policy optimization (GRPO, Shao et al., 2024) and its family: several answers to each prompt,
    whose rewards are compared with each other. Defaults are those of DAPO (Yu et al., 2025) for the loss, and no KL.

    Attributes:
        answers_per_prompt: Answers to each prompt, 2 or more: their rewards are compared.
        advantage: group: reward minus the mean of its prompt's answers. rloo: minus the mean of the others (Ahmadian et
            al., 2024). reinforce++: whitened over the batch (Hu, 2025). remax: minus the reward of the greedy answer
            (Li et al., 2023). best: 1 for the best answer to a prompt if there is a worse one, 0 for all others:
            rejection sampling (RAFT, Dong et al., 2023).
        scale: group: divide by the standard deviation of the group; none: as Dr. GRPO (Liu et al., 2025).
        max_resampling: How often groups in which all rewards are equal are replaced by other prompts (dynamic sampling,
            DAPO).
    """

    type: Literal["grpo"] = "grpo"
    answers_per_prompt: Annotated[int, Field(ge=2)] = 8
    advantage: Literal["group", "rloo", "reinforce++", "remax", "best"] = "group"
    scale: Literal["group", "none"] = "group"
    max_resampling: NonNegative = 0
