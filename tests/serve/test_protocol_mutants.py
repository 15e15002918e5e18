"""Mutants of the protocols' tables and counts: a field that an adapter forgets, or a wrong count, is noticed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from jingu.serve import anthropic_messages, ollama, openai, openai_responses, tgi
from tests.mutants import mutated
from tests.serve import test_fields
from tests.serve.conftest import Serve
from tests.serve.test_fields import Observer, observer  # noqa: F401

Check = Callable[[Observer], None]


def field(name: str, of: str) -> Check:
    return lambda server: test_fields.test_a_carried_field_changes_the_answer_or_is_refused(server, name, of)


def option(of: str) -> Check:
    return lambda server: test_fields.test_options_of_ollama_change_the_answer(server, "/api/chat", of)


def parameter(of: str) -> Check:
    return lambda server: test_fields.test_parameters_of_text_generation_inference_change_the_answer(server, of)


def check_counts(server: Observer) -> None:
    """All protocols count the same tokens of the same conversation, also when its prompt is cached."""
    message = {"role": "user", "content": "The same long question, which fills blocks of the cache. " * 3}
    body = {"model": "tiny", "messages": [message]}
    server.answer("/v1/chat/completions", {**body, "max_tokens": 2})
    usage = server.server.call("/v1/chat/completions", {**body, "max_tokens": 2})[1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    messages = server.server.call("/v1/messages", {**body, "max_tokens": 2})[1]["usage"]
    assert messages["cache_read_input_tokens"] == cached
    assert messages["input_tokens"] == usage["prompt_tokens"] - cached
    assert messages["output_tokens"] == usage["completion_tokens"]
    responses = server.server.call("/v1/responses", {"model": "tiny", "input": message["content"]})[1]["usage"]
    assert (responses["input_tokens"], responses["input_tokens_details"]["cached_tokens"]) == (
        usage["prompt_tokens"],
        cached,
    )
    local = server.server.call("/api/chat", {**body, "stream": False, "options": {"num_predict": 2}})[1]
    assert (local["prompt_eval_count"], local["eval_count"]) == (usage["prompt_tokens"], usage["completion_tokens"])


MUTANTS: list[tuple[ModuleType, str, str, Check]] = [
    (ollama, '"presence_penalty", "seed", "stop"', '"seed", "stop"', option("presence_penalty")),
    (ollama, 'fields["repetition_penalty"] = self.repeat_penalty', "pass", option("repeat_penalty")),
    (
        ollama,
        "self.num_predict if self.num_predict is not None",
        "None if self.num_predict is not None",
        option("num_predict"),
    ),
    (ollama, "enable_thinking=self.think if", "enable_thinking=None if", field("ollama chat", "think")),
    (ollama, "logprobs=self.logprobs or None", "logprobs=None", field("ollama chat", "top_logprobs")),
    (anthropic_messages, "stop=body.stop_sequences,", "", field("messages", "stop_sequences")),
    (anthropic_messages, "reasoning_effort=config.effort,", "", field("messages", "output_config")),
    (anthropic_messages, "top_p=body.top_p,", "", field("messages", "top_p")),
    (anthropic_messages, "stats.prompt_tokens - stats.cached_tokens", "stats.prompt_tokens", check_counts),
    (openai_responses, "max_tokens=self.max_output_tokens,", "", field("responses", "max_output_tokens")),
    (openai_responses, "stop=self.stop,", "", field("responses", "stop")),
    (openai_responses, "tool_choice=self._tool_choice(),", "", field("responses", "tool_choice")),
    (openai_responses, '{"cached_tokens": stats.cached_tokens}', '{"cached_tokens": 0}', check_counts),
    (openai, "ignore_eos=bool(body.ignore_eos),", "", field("completions", "ignore_eos")),
    (openai, "min_tokens=body.min_tokens or 0,", "", field("chat", "min_tokens")),
    (openai, "stop_token_ids=tuple(body.stop_token_ids or ()),", "", field("messages", "stop_token_ids")),
    (openai, '"total_tokens": stats.prompt_tokens + stats', '"total_tokens": stats', check_counts),
    (tgi, "constraint=parameters.grammar.constraint() if parameters.grammar else None,", "", parameter("grammar")),
    (tgi, "stop=tuple(parameters.stop or ()),", "", parameter("stop")),
]


@pytest.fixture(scope="module")
def computing(serve: Serve) -> Observer:
    """A server whose engine computes, and has a prefix cache."""
    return Observer(serve())


def test_counts_are_equal(computing: Observer) -> None:
    check_counts(computing)


@pytest.mark.slow
def test_every_mutant_is_noticed(observer: Observer, computing: Observer) -> None:  # noqa: F811
    for check in dict.fromkeys(mutant[3] for mutant in MUTANTS):
        check(computing if check is check_counts else observer)
    survivors = []
    for module, old, new, check in MUTANTS:
        with mutated(module, old, new):
            try:
                check(computing if check is check_counts else observer)
            except AssertionError:
                continue
            survivors.append((module.__name__, old))
    assert survivors == []
