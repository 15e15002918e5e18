"""Environments: answers of several turns. After each turn of the model, a class of the user's replies or ends it.

Ids are only ever appended: nothing that the model generated or read is tokenized a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jingu.align.prompt_set import Prompt, PromptSet
from jingu.align.reward_list import START_SECONDS, Worker
from jingu.chat.messages import Message
from jingu.config.sections.policies import EnvironmentSettings
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer


class Environments:
    """The environments of the answers of a step, each an object of the user's class, in a process of their own.

    Its methods are `begin(row)` with the columns of the prompt's row and the prompt, `step(answer)`, which returns a
    text that the model reads or None for the end, and `score()`, which returns the reward of the whole answer.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._worker = Worker()
        # Import it now rather than after the first answers.
        self._call("begin", {}, START_SECONDS)

    def begin(self, prompts: Mapping[int, Prompt]) -> None:
        """Start an environment for each answer, in the place of those before."""
        rows = {key: {**prompt.columns, "prompt": prompt.text} for key, prompt in prompts.items()}
        self._call("begin", rows, self._settings.timeout)

    def step(self, answers: Mapping[int, str]) -> dict[int, str | None]:
        """Return the replies to the last turns of answers; None: the answer has ended."""
        return self._call("step", answers, self._settings.timeout)

    def score(self, keys: list[int]) -> dict[int, float]:
        """Return the rewards of answers."""
        return self._call("score", dict.fromkeys(keys), self._settings.timeout)

    def _call(self, method: str, arguments: Mapping[int, Any], timeout: float) -> dict[int, Any]:
        where = "task.environment"
        request = {"environment": self._settings.path, "method": method, "arguments": list(arguments.items())}
        try:
            reply = self._worker.exchange(request, timeout)
        except TimeoutError:
            what = f"{method} did not return within {timeout:g} seconds."
            raise JinguError(what, where=where, fix="Make it faster, or raise task.environment.timeout.") from None
        if "error" in reply:
            raise JinguError(f"{reply['error']}.", where=where, fix=f"Correct {self._settings.path}.")
        return dict(reply["values"])


def encode_reply(text: str, prompt: Prompt, prompts: PromptSet, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids between a turn of the model, with the token that ends it, and its next turn.

    After a prompt of messages the reply is a message of the user, as the template writes it; after a text it is text.
    """
    if prompt.messages is None:
        return tuple(tokenizer.encode(text))
    chat_format = prompts.chat_format
    assert chat_format is not None and chat_format.eos_token_ids
    # What the template writes after any answer: what follows its end token.
    start = (Message("user", "question"),)
    end_id = chat_format.eos_token_ids[0]
    num_before = chat_format.encode_prompt(start).count(end_id)
    ids = chat_format.encode_prompt((*start, Message("assistant", "answer"), Message("user", text)))
    ends = [place for place, token_id in enumerate(ids) if token_id == end_id]
    return ids[ends[num_before] + 1 :]
