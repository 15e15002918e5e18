"""Settings of rewards: what scores the answers of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Description, NonNegative, PathText, Positive, Settings

Seconds = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


class RewardBase(Settings):
    """Settings of every reward.

    Attributes:
        name: Name in metrics and files; null: that of the function, or the type.
        weight: Factor on its values in the sum of all rewards.
        audit: Only measure it, and never train on it: what training does not see shows whether it deceives itself.
        timeout: Seconds that it may take for the answers of a step (a verifier: for one answer).
        on_error: What to do if it fails during a run, or returns no finite number: stop, after saving, or skip what it
            should have scored.
    """

    type: str
    name: Text | None = None
    weight: float = 1.0
    audit: bool = False
    timeout: Seconds = 60.0
    on_error: Literal["stop", "skip"] = "stop"


class PythonReward(RewardBase):
    """A Python function. It receives lists as keywords, `prompts`, `completions`, `completion_ids` and each column of
    the rows, and returns a list of numbers; None: not scorable. It may be async.

    Attributes:
        function: `module:function` or `file.py:function`.
    """

    type: Literal["python"] = "python"
    function: Annotated[str, Field(pattern=r"^.+:\w+$"), Description("module:function or file.py:function")] = (
        "rewards.py:reward"
    )


class VerifierBase(RewardBase):
    """Settings of rewards that compare an answer with a column of its row, and give 1 or 0.

    Attributes:
        column: Column of the row with what is expected.
        timeout: Seconds for one answer; then it is 0.
    """

    column: Text = "answer"
    timeout: Seconds = 5.0


class ExactReward(VerifierBase):
    """The whole answer, without spaces around it, is the expected text."""

    type: Literal["exact"] = "exact"


class NumberReward(VerifierBase):
    """The last number of the answer is the expected number."""

    type: Literal["number"] = "number"


class MathReward(VerifierBase):
    """The answer's formula is equivalent to the expected one (needs the math-verify package)."""

    type: Literal["math"] = "math"


class RegexReward(VerifierBase):
    """A regular expression matches the answer from its beginning to its end.

    Attributes:
        pattern: The expression; null: that of the column.
    """

    type: Literal["regex"] = "regex"
    pattern: Text | None = None


class JsonSchemaReward(VerifierBase):
    """The answer is JSON that matches a JSON schema (needs the jsonschema-rs package).

    Attributes:
        column: Column of the row with the schema.
    """

    type: Literal["json_schema"] = "json_schema"
    column: Text = "schema"


class PythonTestsReward(VerifierBase):
    """The answer's Python code passes tests: statements that follow it. Code of the last fenced block counts, or else
    the whole answer. It runs in a sandbox: Linux namespaces without network and with limits.

    Attributes:
        column: Column of the row with the tests.
        memory_mb: Megabytes of memory of a program.
    """

    type: Literal["python_tests"] = "python_tests"
    column: Text = "tests"
    memory_mb: Positive = 512


class LengthReward(RewardBase):
    """1 for an answer of a length within limits, less by the excess relative to the nearer limit, at least 0.

    Attributes:
        min_tokens: The fewest tokens.
        max_tokens: The most tokens.
    """

    type: Literal["length"] = "length"
    min_tokens: NonNegative = 0
    max_tokens: Positive = 10**9


class ServerBase(RewardBase):
    """Settings of rewards that a server computes.

    Attributes:
        url: Address of the server.
        api_key_file: File with the key that is sent as a bearer token; null: none.
        retries: Further attempts after a failure.
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
    """A language model that judges each answer, behind OpenAI's protocol (its url ends in /v1). The last number in its
    reply counts.

    Attributes:
        model: Name of the model.
        template: Question to the judge, with {prompt}, {completion} and names of columns in braces.
        concurrency: Requests at a time.
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
        model: Its run, or a checkpoint of it.
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
