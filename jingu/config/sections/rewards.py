"""Settings of rewards, which score the answers of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Description, NonNegative, PathText, Positive, Settings

Seconds = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


class RewardBase(Settings):
    """Settings of every reward.

    Attributes:
        name: Name of the reward in metrics and files; null: the name of the function, or else the type.
        weight: Factor on the values of this reward in the sum of all rewards.
        audit: Whether to measure this reward only, and never train on it. An audit shows whether training exploits the
            other rewards.
        timeout: Seconds that the reward may take for the answers of a step (a verifier: for one answer).
        on_error: What to do if the reward fails during a run, or returns a number that is not finite: stop, after a
            checkpoint, or skip the answers that it could not score.
    """

    type: str
    name: Text | None = None
    weight: float = 1.0
    audit: bool = False
    timeout: Seconds = 60.0
    on_error: Literal["stop", "skip"] = "stop"


class PythonReward(RewardBase):
    """A Python function. It receives lists as keyword arguments: `prompts`, `completions`, `completion_ids` and each
    column of the rows. It returns a list of numbers, with None for an answer that cannot be scored. It may be async.

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


class ExactReward(VerifierBase):
    """The whole answer equals the expected text, apart from whitespace around it."""

    type: Literal["exact"] = "exact"


class NumberReward(VerifierBase):
    """The last number in the answer equals the expected number."""

    type: Literal["number"] = "number"


class MathReward(VerifierBase):
    """The formula in the answer is equivalent to the expected one (needs the math-verify package)."""

    type: Literal["math"] = "math"


class RegexReward(VerifierBase):
    """A regular expression matches the answer from its beginning to its end.

    Attributes:
        pattern: The regular expression; null: the row's column holds it.
    """

    type: Literal["regex"] = "regex"
    pattern: Text | None = None


class JsonSchemaReward(VerifierBase):
    """The answer is JSON that matches a JSON schema (needs the jsonschema-rs package).

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
    to that limit, but at least 0.

    Attributes:
        min_tokens: Minimum number of tokens.
        max_tokens: Maximum number of tokens.
    """

    type: Literal["length"] = "length"
    min_tokens: NonNegative = 0
    max_tokens: Positive = 10**9


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
    """A server that scores answers: POST {"prompts": [...], "completions": [...], COLUMN: [...]} returns
    {"scores": [...]}."""

    type: Literal["http"] = "http"


class JudgeReward(ServerBase):
    """A language model that grades each answer, behind a server with OpenAI's protocol (`url` ends in /v1). The last
    number in its reply is the reward.

    Attributes:
        model: Name of the model.
        template: The question to the judge. {prompt}, {completion} and names of columns in braces are replaced by their
            values.
        concurrency: Maximum number of concurrent requests.
    """

    type: Literal["judge"] = "judge"
    model: Text = "default"
    template: Text = (
        "Grade the answer to the question from 0 (useless) to 10 (perfect). Reply with the number alone.\n\n"
        "Question:\n{prompt}\n\nAnswer:\n{completion}"
    )
    concurrency: Positive = 8


class ModelReward(RewardBase):
    """A reward model, trained by `task.type: reward`.

    Attributes:
        model: The reward model's run, or a checkpoint of it.
    """

    type: Literal["model"] = "model"
    model: PathText = "runs/reward"


Reward = Annotated[
    PythonReward
    | ExactReward
    | NumberReward
    | MathReward
    | RegexReward
    | JsonSchemaReward
    | PythonTestsReward
    | LengthReward
    | HttpReward
    | JudgeReward
    | ModelReward,
    Discriminator("type"),
]
