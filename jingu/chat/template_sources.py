"""Where chat templates come from: the tokenizer, this package, or a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from jingu.chat.templates import ChatTemplate
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

_TEMPLATES = files("jingu.chat").joinpath("jinja")
NAMED_TEMPLATES = {
    file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
    for file in sorted(_TEMPLATES.iterdir(), key=lambda file: file.name)
    if file.name.endswith(".jinja")
}
# BLOOMZ was trained on the bare texts.
NAMED_TEMPLATES["bloomz-plain"] = NAMED_TEMPLATES["plain"]


def load_template(
    name: str,
    tokenizer: Tokenizer,
    *,
    parse_special_tokens: bool = False,
    train_empty_reasoning: bool = False,
    where: str = "data.objective.template",
) -> ChatTemplate:
    """Load a chat template.

    Args:
        name: `auto` for the tokenizer's default template; the name of another template of the tokenizer; a name in
            `NAMED_TEMPLATES`; or a file.
        parse_special_tokens: as for `ChatTemplate`.
        train_empty_reasoning: as for `ChatTemplate`.
        where: the setting that contains the name, for error messages.

    Raises:
        JinguError: there is no such template, or it is not valid Jinja.
    """
    label = name
    tools_source = None
    if name == "auto":
        if tokenizer.chat_template is None:
            raise JinguError(
                "the tokenizer has no chat template.",
                where=where,
                fix=f"Name one: {', '.join(NAMED_TEMPLATES)}, or a file.",
            )
        source = tokenizer.chat_template
        tools_source = tokenizer.chat_templates.get("tool_use")
        label = "of the tokenizer"
    elif name in tokenizer.chat_templates:
        source = tokenizer.chat_templates[name]
    elif name in NAMED_TEMPLATES:
        source = NAMED_TEMPLATES[name]
    else:
        try:
            source = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise JinguError(
                f"there is no chat template {name}.",
                where=where,
                fix=f"Use auto (the tokenizer's own), {', '.join(NAMED_TEMPLATES)}, or a file.",
            ) from error
    return ChatTemplate(
        source,
        tokenizer,
        label,
        tools_source=tools_source,
        parse_special_tokens=parse_special_tokens,
        train_empty_reasoning=train_empty_reasoning,
    )
