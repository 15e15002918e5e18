"""Load a model together with its chat format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jingu.chat.chat_format import ChatFormat, find_chat_format
from jingu.formats.models import open_model
from jingu.infer.inference_model import InferenceModel
from jingu.text.tokenizer import Tokenizer


def load_chat_model(
    load: Callable[[], InferenceModel], path: Path, template: str | None = None
) -> tuple[InferenceModel, ChatFormat | None]:
    """Load a model that ends its answers as its chat template does, and return it with its chat format.

    Args:
        load: loads the model.
        path: the model's folder or file.
        template: name or file of a chat template; None: the model's own.

    Raises:
        JinguError: there is no such template. This is checked before the model is loaded, which takes long.
    """
    if template is not None:
        find_chat_format(path, Tokenizer.load(open_model(path).tokenizer()), template)
    model = load()
    chat_format = find_chat_format(path, model.tokenizer, template)
    if chat_format is None:
        return model, None
    # Without duplicates, in order.
    end_ids = dict.fromkeys((*model.eos_token_ids, *chat_format.eos_token_ids))
    return replace(model, eos_token_ids=tuple(end_ids)), chat_format
