"""Chat templates: ids and trained tokens as in transformers, rendered text, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.chat.messages import ConversationError, Message, Row
from jingu.chat.template_sources import NAMED_TEMPLATES, load_template
from jingu.chat.templates import ChatTemplate
from jingu.chat.tokenization import LossOn, tokenize_row
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.tune.row_formats import parse_row

TEXTS = ["user assistant system\nThe quick brown fox.\n" * 9, "春眠不觉晓，处处闻啼鸟。\n" * 9]
SPECIAL = [
    *("</s>", "<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]
UNMARKED = {
    name: source.replace("{% generation %}", "")
    .replace("{%- generation %}", "")
    .replace("{% endgeneration %}", "")
    .replace("{%- endgeneration %}", "")
    for name, source in NAMED_TEMPLATES.items()
}
CHAT = [
    Message("system", "Be brief."),
    Message("user", "春眠？"),
    Message("assistant", "不觉晓。"),
    Message("user", "The fox"),
    Message("assistant", "quick brown"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    row = train_tokenizer(iter(TEXTS), 340, SPECIAL)
    return Tokenizer(row.content, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def theirs(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def trained_text(tokenizer: Tokenizer, name: str, row: Row, train_on: LossOn = "assistant") -> list[str]:
    """Return the text of each run of trained tokens."""
    result = tokenize_row(row, load_template(name, tokenizer), tokenizer, train_on)
    stretches: list[list[int]] = [[]]
    for id_, weight in zip(result.ids, result.weights, strict=True):
        if weight:
            stretches[-1].append(id_)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(ids, keep_special_tokens=True) for ids in stretches if ids]


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
@given(
    # To transformers, special tokens in messages are special tokens.
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"]), min_size=1).map(
            lambda text: text.replace("|", "")
        ),
        min_size=4,
        max_size=4,
    )
)
def test_ids_and_mask_equal_those_of_transformers(
    name: str, texts: list[str], tokenizer: Tokenizer, theirs: Any
) -> None:
    # Their mask leaves out the later bytes of a last character; a full stop has one.
    contents = [f"{text.strip()}." for text in texts]
    roles = ["user", "assistant", "user", "assistant"]
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    result = theirs.apply_chat_template(
        chat, chat_template=NAMED_TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
    )
    row = Row("messages", tuple(Message(item["role"], item["content"]) for item in chat))
    tokenized = tokenize_row(row, load_template(name, tokenizer), tokenizer, "assistant")
    assert tokenized.ids == result["input_ids"]
    assert (tokenized.weights > 0).tolist() == [bool(item) for item in result["assistant_masks"]]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("chatml", "不觉晓。<|im_end|>", "quick brown<|im_end|>"),
        ("qwen", "不觉晓。<|im_end|>", "quick brown<|im_end|>"),
        ("llama2", " 不觉晓。 </s>", " quick brown </s>"),
        ("llama3", "不觉晓。<|eot_id|>", "quick brown<|eot_id|>"),
        ("alpaca", "不觉晓。</s>", "quick brown</s>"),
        ("plain", "不觉晓。</s>", "quick brown</s>"),
    ],
)
def test_answers_and_their_end_tokens_are_trained(name: str, first: str, second: str, tokenizer: Tokenizer) -> None:
    row = Row("messages", tuple(CHAT))
    assert trained_text(tokenizer, name, row) == [first, second]
    assert trained_text(tokenizer, name, row, "last_assistant") == [second]
    unweighted = Row("messages", (*CHAT[:2], Message("assistant", "不觉晓。", weight=0.0), *CHAT[3:]))
    assert trained_text(tokenizer, name, unweighted) == [second]
    (everything,) = trained_text(tokenizer, name, row, "all")
    assert "Be brief." in everything and second in everything


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_answers_are_located_without_generation_tags(name: str, tokenizer: Tokenizer) -> None:
    row = Row("messages", tuple(CHAT))
    marked = ChatTemplate(NAMED_TEMPLATES[name], tokenizer, "a").render(row.messages, row.tools)
    assert ChatTemplate(UNMARKED[name], tokenizer, "b").render(row.messages, row.tools) == marked


def test_rendered_text(tokenizer: Tokenizer) -> None:
    row = parse_row({"type": "ref_qa", "reference": "春", "rounds": [["ask", "谁？"], ["ans", "孟"]]})
    assert load_template("chatml", tokenizer).render(row.messages, row.tools).text == (
        "<|im_start|>user\n春\n\n谁？<|im_end|>\n<|im_start|>assistant\n孟<|im_end|>\n"
    )
    assert load_template("plain", tokenizer).render(row.messages, row.tools).text == "春\n\n谁？\n孟</s>"
    assert load_template("llama2", tokenizer).render(tuple(CHAT[:3])).text == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n春眠？ [/INST] 不觉晓。 </s>"
    )
    assert load_template("alpaca", tokenizer).render(tuple(CHAT[:3])).text == (
        "Be brief.\n\n### Instruction:\n春眠？\n\n### Response:\n不觉晓。</s>"
    )
    assert load_template("llama3", tokenizer).render_prompt(tuple(CHAT[1:2])).text == (
        "<s><|start_header_id|>user<|end_header_id|>\n\n春眠？<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("content", ["quick brown", "", "<", "end", "im_end|>", "s", "a\n  b", "好 </s> "])
@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_the_last_message_is_continued(name: str, content: str, tokenizer: Tokenizer) -> None:
    """The text is the prompt of an answer and the content, even if the end token contains that content."""
    template = load_template(name, tokenizer)
    messages = (*CHAT[:4], Message("assistant", content))
    header = template.render_prompt(messages[:-1]).text + (" " if name == "llama2" else "")
    expected = header + (content.rstrip() if name in ("llama2", "llama3") else content)
    prompt = template.render_prompt(messages, continue_final=True)
    assert prompt.text == expected
    assert [prompt.text[slice(*span)] for span in prompt.mentions] == (["</s>"] if "</s>" in content else [])


def test_the_last_content_of_a_template_that_repeats_it_is_continued(tokenizer: Tokenizer) -> None:
    source = "{{ messages[-1].content }}/{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}"
    template = ChatTemplate(source, tokenizer, "a")
    assert template.render_prompt(tuple(CHAT[3:]), continue_final=True).text == (
        "quick brown/user:The fox;assistant:quick brown"
    )


def test_a_message_that_the_template_does_not_write_is_not_continued(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}", tokenizer, "of one message")
    with pytest.raises(ConversationError, match="of one message does not write the message to continue"):
        template.render_prompt(tuple(CHAT[1:3]), continue_final=True)


def test_tool_calls(tokenizer: Tokenizer) -> None:
    row = parse_row(
        {
            "type": "conver_has_api",
            "tools": [{"name": "weather"}],
            "rounds": [
                ["ask", "天气？"],
                ["api", {"name": "weather", "arguments": {"城": "北京"}}, "3"],
                ["ans", "三度"],
            ],
        }
    )
    assert (
        '<tools>\n{"name": "weather"}\n</tools>'
        in load_template("qwen", tokenizer).render(row.messages, row.tools).text
    )
    assert trained_text(tokenizer, "qwen", row) == [
        '<tool_call>\n{"name": "weather", "arguments": {"城": "北京"}}\n</tool_call><|im_end|>',
        "三度<|im_end|>",
    ]
    named = NAMED_TEMPLATES["qwen"]
    for source in (
        NAMED_TEMPLATES["chatml"],
        named.replace("tools %}", "false %}"),
        named.replace("message.tool_calls or", ""),
    ):
        with pytest.raises(ConversationError, match="does not support tools"):
            ChatTemplate(source, tokenizer, "leaves out tools, or calls").render(row.messages, row.tools)


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_special_tokens_in_messages_are_text(name: str, tokenizer: Tokenizer) -> None:
    text = "a <|im_end|><|im_start|>system\n</s>好"
    row = Row("messages", (Message("user", text), Message("assistant", f"{text}!")))
    template = load_template(name, tokenizer)
    rendered, result = template.render(row.messages, row.tools), tokenize_row(row, template, tokenizer, "assistant")
    assert tokenizer.decode(result.ids, keep_special_tokens=True) == rendered.text
    assert rendered.text.count(text) == 2 and rendered.text[slice(*rendered.answers[0])].startswith(f"{text}!")
    special = tokenizer.special_tokens
    expected = {"chatml": ["<|im_start|>", "<|im_end|>"] * 2, "plain": ["</s>"]}[name]
    assert [id_ for id_ in result.ids if id_ in special.values()] == [special[item] for item in expected]
    answer = [id_ for id_, weight in zip(result.ids, result.weights, strict=True) if weight]
    assert answer[:-1] == tokenizer.encode(f"{text}!")
    obeyed = tokenize_row(row, load_template(name, tokenizer, parse_special_tokens=True), tokenizer, "assistant")
    assert sum(id_ in special.values() for id_ in obeyed.ids) == len(expected) + 6


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["春", "a b", " ", "\n", *SPECIAL]), min_size=1, max_size=4).map("".join),
        min_size=6,
        max_size=6,
    )
)
def test_mentioned_special_tokens_do_not_move_the_answers(name: str, texts: list[str], tokenizer: Tokenizer) -> None:
    """The trained ids are those of the answers and their end tokens, whatever is mentioned."""
    messages = [f"x{text}x" for text in texts]
    row = Row("messages", tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(messages)))
    ending = {"chatml": "<|im_end|>", "qwen": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name, "</s>")
    before = after = " " if name == "llama2" else ""
    template = load_template(name, tokenizer)
    result = tokenize_row(row, template, tokenizer, "assistant")
    assert tokenizer.decode(result.ids, keep_special_tokens=True) == template.render(row.messages, row.tools).text
    assert trained_text(tokenizer, name, row) == [f"{before}{text}{after}{ending}" for text in messages[1::2]]


def test_plain_text_rows(tokenizer: Tokenizer) -> None:
    result = tokenize_row(parse_row({"prompt": "春眠", "completion": "不觉晓"}), None, tokenizer, "assistant")
    assert tokenizer.decode(result.ids, keep_special_tokens=True) == "春眠不觉晓</s>"
    # The first token is part of both texts, so it belongs to the completion.
    assert result.ids == [*tokenizer.encode("春眠不觉晓"), tokenizer.eos_token_id]
    assert result.weights.tolist() == [100] * len(result.ids)
    apart = tokenize_row(parse_row({"prompt": "春", "completion": "\n1"}), None, tokenizer, "assistant")
    assert apart.weights.tolist() == [0] * len(tokenizer.encode("春")) + [100] * (len(tokenizer.encode("\n1")) + 1)
    assert tokenize_row(parse_row({"text": "春"}), None, tokenizer, "assistant").weights.all()


TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
# Templates in which no prefix of the conversation need render as a prefix of the text.
LOCATED = {
    "the number of messages": f"{{{{ messages | length }}}}{{% for m in messages %}}{TURN}{{% endfor %}}",
    # As Command-R7B: the header of an answer is always written at the end.
    "a header at the end": f"{{% for m in messages %}}{TURN}{{% endfor %}}<|im_start|>assistant\n",
    "no generation prompt": f"{{% for m in messages %}}{TURN}{{% endfor %}}",
    "an alias of a slice": f"{{% set rest = messages[:] %}}{{% for m in rest[0:] %}}{TURN}{{% endfor %}}",
    "a namespace": f"{{% set ns = namespace(all=messages) %}}{{% for m in ns.all %}}{TURN}{{% endfor %}}",
    "filters": f"{{% for m in messages | selectattr('content') | list %}}{TURN}{{% endfor %}}",
    "twice reversed": f"{{% for m in (messages | reverse | list)[::-1] %}}{TURN}{{% endfor %}}",
    "a filtered loop": f"{{% for m in messages if m.role != 'tool' %}}{TURN}{{% endfor %}}",
    "earlier loops": f"{{% for m in messages %}} {{% endfor %}}{{% for m in messages %}}{TURN}{{% endfor %}}",
    "a macro": f"{{% macro turn(m) %}}{TURN}{{% endmacro %}}{{% for m in messages %}}{{{{ turn(m) }}}}{{% endfor %}}",
    "a loop in a macro": (
        f"{{% macro all() %}}{{% for m in messages %}}{TURN}{{% endfor %}}{{% endmacro %}}{{{{ all() }}}}"
    ),
    "a captured loop": f"{{% set text %}}{{% for m in messages %}}{TURN}{{% endfor %}}{{% endset %}}{{{{ text }}}}",
    "an index": f"{{% for i in range(messages | length) %}}{TURN.replace('m.', 'messages[i].')}{{% endfor %}}",
    "an index of the loop": f"{{% for _ in messages %}}{TURN.replace('m.', 'messages[loop.index0].')}{{% endfor %}}",
    "an index and a look back": (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}{% set before = messages[i - 1].content %}"
        f"{TURN}{{% endfor %}}"
    ),
    "groups": f"{{% for group in messages | batch(2) %}}{{% for m in group %}}{TURN}{{% endfor %}}{{% endfor %}}",
    "a message outside of loops": (
        f"{TURN.replace('m.', 'messages[0].')}{{% for m in messages[1:] %}}{TURN}{{% endfor %}}"
    ),
    "an end after the loop": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% if not loop.last %}<|im_end|>\n"
        "{% endif %}{% endfor %}<|im_end|>"
    ),
    "a loop over the rest inside": (
        f"{{% for m in messages %}}{{% for later in messages[loop.index:] %}}{{% if later.role == 'x' %}}!{{% endif %}}"
        f"{{% endfor %}}{TURN}{{% endfor %}}"
    ),
}


@pytest.mark.parametrize("name", LOCATED)
def test_answers_are_traced(name: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(LOCATED[name], tokenizer, "a")
    rendered = template.render(tuple(CHAT))
    texts = [rendered.text[slice(*span)] for span in rendered.answers]
    assert texts == ["不觉晓。<|im_end|>", "quick brown<|im_end|>"]
    assert rendered.text[: rendered.answers[1][0]].endswith("<|im_start|>assistant\n")


UNTRACED = {
    # Only lists of parts are rendered.
    "does not write this user message": (
        "{% for m in messages %}{{ m.role }}:{% if m.content is not string %}{{ m.content }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "writes several messages at once in line 2": (
        "{% for pair in messages | batch(2) %}\n{% for i in range(1) %}{{ pair[0].content + pair[1].content }}"
        "{% endfor %}\n{% endfor %}"
    ),
    "writes an answer in 2 places .the last one in line 3.": (
        "{% for m in messages %}{{ m.content }}{% endfor %}\n---\n{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "its header is not known .line 1.": (
        "{{ 'u:' + messages[0].content + ' a:' }}{{ 'x' + messages[1].content + '</s>' }}"
        "{{ messages[-3].content if messages | length > 2 }}{{ messages[9].content if messages[1].content == 'jxqzw' }}"
    ),
    "processes the text of a loop over messages .line 2.": (
        "{% set text %}\n{% for m in messages %}{{ m.content }}{% endfor %}\n{% endset %}{{ text | upper | length }}"
        "{{ text }}"
    ),
}


@pytest.mark.parametrize("reason", UNTRACED)
def test_answers_that_cannot_be_traced_are_refused(reason: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(UNTRACED[reason], tokenizer, "a")
    with pytest.raises(ConversationError, match=reason):
        template.render((Message("user", "The fox"), Message("assistant", "quick brown")))


def test_an_answer_after_a_tool_result_without_generation_prompt_begins_after_the_header(tokenizer: Tokenizer) -> None:
    """As in Gemma 4: the header after a tool's result comes with the answer."""
    source = f"{{% for m in messages %}}{TURN}{{% endfor %}}"
    source += "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    template = ChatTemplate(
        source.replace("m.content +", "m.content + (m.tool_calls or '') | string +"), tokenizer, "a"
    )
    call = Message("assistant", "", ({"name": "weather", "arguments": {}},))
    messages = (Message("user", "a"), call, Message("tool", "3"), Message("assistant", "three"))
    rendered = template.render(messages)
    assert rendered.text[slice(*rendered.answers[1])] == "three<|im_end|>"


LLAMA_31 = """{{- bos_token }}{%- set date = strftime_now("%d %b %Y") %}{{- date }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
# As DeepSeek's: arguments are concatenated, and must be text.
TEXT_ARGUMENTS = (
    "{% for m in messages %}<|im_start|>{{ m.role + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.id + ' ' + call.function.name + '\n' + ARGUMENTS }}{% endfor %}"
    "{{ m.tool_call_id or '' }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    "source",
    [
        LLAMA_31,
        TEXT_ARGUMENTS.replace("ARGUMENTS", "call.function.arguments"),
        TEXT_ARGUMENTS.replace("ARGUMENTS", "(call.function.arguments | string)"),
    ],
)
def test_tool_rows_equal_those_of_transformers(source: str, tokenizer: Tokenizer, theirs: Any) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "天气？"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3°", "tool_call_id": "call00001", "name": "weather"},
        {"role": "assistant", "content": "三度"},
    ]
    row = parse_row({"messages": messages})
    rendered = ChatTemplate(source, tokenizer, "a").render(row.messages)
    if source != LLAMA_31:
        call["function"] |= {"arguments": '{"city": "北京"}'}
    assert rendered.text == theirs.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert len(rendered.answers) == 2 and "weather" in rendered.text[slice(*rendered.answers[0])]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_is_rendered_or_refused(key: str, tokenizer: Tokenizer) -> None:
    row = parse_row(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "quick", "reasoning_content": "brown"},
            ]
        }
    )
    source = NAMED_TEMPLATES["chatml"].replace(
        "generation %}{{", f"generation %}}{{{{ '<think>' + message.{key} + '</think>' +", 1
    )
    rendered = ChatTemplate(source, tokenizer, "a").render(row.messages)
    assert rendered.text[slice(*rendered.answers[0])] == "<think>brown</think>quick<|im_end|>"
    with pytest.raises(ConversationError, match="does not support reasoning"):
        load_template("chatml", tokenizer).render(row.messages)


def test_named_templates_of_a_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = {
        "default": NAMED_TEMPLATES["chatml"],
        "tool_use": NAMED_TEMPLATES["qwen"],
        "rag": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    templates = [{"name": name, "template": source} for name, source in named.items()]
    of_config = Tokenizer(tokenizer.content, {**tokenizer._config, "chat_template": templates})
    folder = tmp_path / "tokenizer"
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(named["default"], encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(named[name], encoding="utf-8")
    for of in (of_config, Tokenizer.load(folder)):
        own = load_template("auto", of)
        assert own.render(tuple(CHAT)) == load_template("chatml", of).render(tuple(CHAT))
        assert "<tools>" in own.render(tuple(CHAT), ({"name": "weather"},)).text
        assert load_template("rag", of).render_prompt(tuple(CHAT)).text.startswith("5Be brief.")


def test_errors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match="has no chat template"):
        load_template("auto", tokenizer)
    with pytest.raises(JinguError, match="no chat template chatlm"):
        load_template("chatlm", tokenizer)
    with pytest.raises(JinguError, match="not valid Jinja"):
        ChatTemplate("{% for %}", tokenizer, "a")
    for source, reason in [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages.x.y }}", "no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ]:
        with pytest.raises(ConversationError, match=reason):
            ChatTemplate(source, tokenizer, "a").render(tuple(CHAT))
    own = tmp_path / "own"
    tokenizer.save(own)
    (own / "chat_template.jinja").write_text(NAMED_TEMPLATES["plain"], encoding="utf-8")
    assert load_template("auto", Tokenizer.load(own)).render(tuple(CHAT)).text.endswith("quick brown</s>")
