"""Settings of rewards, which score the answers of a model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jingu.config.sections.base import Description, NonNegative, PathText, Positive, Settings, registry_of, variants_of

Seconds = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


class RewardBase(Settings):
    """Settings of every reward.

    Attributes:
        name: Name of the reward in metrics and files; null: the name of the function, or else the type.
        weight: Factor on the values of this reward in the sum of all rewards.
        audit: Whether to measure this reward only, and never train on it. An audit shows whether training exploits the
            other rewards.
        timeout: Seconds that the reward may take for the answers of a step (a verifier: for one answer; a server: for
            one request, until the end of its reply).
        on_error: What to do if the reward fails during a run, or returns a number that is not finite: stop, after a
            checkpoint, or skip the answers that it could not score.
        required: Whether an answer that this reward does not score (None) is left out of training; false: the other
            rewards are summed without it.
    """

    # What computes the reward, as module:name: a `RewardScorer`, or the `Verifier` of a verifier. None: jingu's tables
    # `SCORERS` and `VERIFIERS` have it. Settings do not import it.
    IMPLEMENTATION: ClassVar[str | None] = None

    type: str
    name: Text | None = None
    weight: float = 1.0
    audit: bool = False
    timeout: Seconds = 60.0
    on_error: Literal["stop", "skip"] = "stop"
    required: bool = True

    @property
    def expected_column(self) -> str | None:
        """Column of the row that an answer is compared with, if there is one."""
        return None


class PythonReward(RewardBase):
    """A Python function. It receives lists as keyword arguments: `prompts`, `completions`, `completion_ids`,
    `completion_mask`, `messages` and each column of the rows. It returns a list of numbers, with None for an answer
    that cannot be scored. It may be async.

    Attributes:
        function: The function: `module:function` or `file.py:function`.
    """

    type: Literal["python"] = "python"
    function: Annotated[str, Field(pattern=r"^.+:\w+$"), Description("module:function or file.py:function")] = (
        "rewards.py:reward"
    )


class VerifierBase(RewardBase):
    """Settings of rewards that compare an answer with a column of its row, and return 1 or 0.

    Attributes:
        column: Column of the row that holds the expected answer.
        timeout: Seconds per answer; an answer that takes longer gets 0.
    """

    column: Text = "answer"
    timeout: Seconds = 5.0

    @property
    def expected_column(self) -> str | None:
        return self.column


class SlowVerifierBase(VerifierBase):
    """Settings of verifiers that may take long.

    Attributes:
        timeout: Seconds of CPU time per answer; an answer that takes longer gets 0. After four such answers of a
            step, the limit of the others is a fifth.
    """

    timeout: Seconds = 1.0


class ExactReward(VerifierBase):
    """The whole answer equals the expected text, or one of a list of texts, apart from whitespace around it."""

    type: Literal["exact"] = "exact"


class NumberReward(VerifierBase):
    """The final number of the answer equals the expected number. A marked answer counts: `\\boxed{...}`, `<answer>`, a
    line `#### ...`, or "the answer is ..."; else the last number. 3/2, 1 1/2, 50% (0.5), 2^3, 1,000, 5 000 and 2e-3
    are one number each."""

    type: Literal["number"] = "number"


class MathReward(SlowVerifierBase):
    """The final formula of the answer is equivalent to the expected one, which is LaTeX with or without dollar signs, a
    choice such as B, or a word (needs the math-verify package)."""

    type: Literal["math"] = "math"


class RegexReward(SlowVerifierBase):
    """A regular expression matches the answer from its beginning to its end.

    Attributes:
        pattern: The regular expression; null: the row's column holds it.
    """

    type: Literal["regex"] = "regex"
    pattern: Text | None = None

    @property
    def expected_column(self) -> str | None:
        return self.column if self.pattern is None else None


class JsonSchemaReward(SlowVerifierBase):
    """The answer is JSON that matches a JSON schema (needs the jsonschema-rs package). NaN, Infinity and objects with
    the same key twice are not JSON.

    Attributes:
        column: Column of the row that holds the schema.
    """

    type: Literal["json_schema"] = "json_schema"
    column: Text = "schema"


class PythonTestsReward(VerifierBase):
    """The answer's Python code passes tests. The code is that of the fenced blocks of Python in the answer, or else the
    whole answer. It runs in a sandbox, apart from the tests: it sees the arguments of its functions alone.

    Attributes:
        column: Column of the row that holds the tests: statements, a list of statements, or a list of
            `{"input": ..., "output": ...}`, the standard input and output of a program.
        memory_mb: Memory limit of a program, in MiB.
    """

    type: Literal["python_tests"] = "python_tests"
    column: Text = "tests"
    memory_mb: Positive = 512


class LengthReward(RewardBase):
    """1 if the length of the answer is within the limits; otherwise 1 minus the distance to the nearer limit relative
    to that limit, but at least 0. Only the model's own tokens count, not the replies of tools or an environment.

    Attributes:
        min_tokens: Minimum number of tokens.
        max_tokens: Maximum number of tokens.
    """

    type: Literal["length"] = "length"
    min_tokens: NonNegative = 0
    max_tokens: Positive = 10**9

    @model_validator(mode="after")
    def _check_limits(self) -> LengthReward:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self


class ServerBase(RewardBase):
    """Settings of rewards that a server computes.

    Attributes:
        url: URL of the server.
        api_key_file: File with the API key, which is sent as a bearer token; null: no key.
        retries: Number of retries after a failed request.
    """

    url: Annotated[str, Field(pattern=r"^https?://"), Description("an address such as http://localhost:8000")] = (
        "http://localhost:8000"
    )
    api_key_file: PathText | None = None
    retries: NonNegative = 2


class HttpReward(ServerBase):
    """A server that scores answers: POST {"prompts": [...], "completions": [...], "messages": [...], COLUMN: [...]}
    returns {"scores": [...]}, a number or null for each answer."""

    type: Literal["http"] = "http"


class JudgeReward(ServerBase):
    """A language model that grades each answer, behind a server with OpenAI's protocol (`url` ends in /v1). The reward
    is the number that its reply consists of, or that has a line of its own, such as "Score: 7"; "7/10" is 7 if the
    highest grade is 10. An answer without such a grade is not scored.

    Attributes:
        model: Name of the model.
        template: The question to the judge. {prompt}, {completion}, {messages} (the whole conversation) and names of
            columns in braces are replaced by their values.
        concurrency: Maximum number of concurrent requests.
        min_grade: Lowest grade. A reply with another number leaves the answer unscored.
        max_grade: Highest grade.
    """

    type: Literal["judge"] = "judge"
    model: Text = "default"
    template: Text = (
        "Grade the answer to the question from 0 (useless) to 10 (perfect). Reply with the number alone.\n\n"
        "Question:\n{prompt}\n\nAnswer:\n{completion}"
    )
    concurrency: Positive = 8
    min_grade: float = 0.0
    max_grade: float = 10.0

    @model_validator(mode="after")
    def _check_grades(self) -> JudgeReward:
        if self.min_grade >= self.max_grade:
            raise ValueError(f"min_grade {self.min_grade:g} is not below max_grade {self.max_grade:g}")
        return self


class ModelReward(RewardBase):
    """A reward model, trained by `task.type: reward`.

    Attributes:
        model: The reward model's run, or a checkpoint of it.
    """

    type: Literal["model"] = "model"
    model: PathText = "runs/reward"


REWARDS = registry_of("rewards", RewardBase)
"""The rewards by the names of their `type:`."""

Reward = Annotated[RewardBase, variants_of(REWARDS)]
