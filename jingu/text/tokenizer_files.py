"""The files of a tokenizer's folder: which there are, and how they are copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import find_tokenizer_file

TEMPLATE = "chat_template.jinja"
FURTHER_TEMPLATES = "additional_chat_templates"
_CONFIG = "tokenizer_config.json"
# Every file that `Tokenizer.load` reads.
_PATTERNS = (
    *("tokenizer.json", _CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("*.model", "*.model.v*", "*.tiktoken", TEMPLATE, f"{FURTHER_TEMPLATES}/*.jinja"),
)


def copy_tokenizer(source: Path, folder: Path, chat_templates: Mapping[str, str] | None = None) -> None:
    """Copy a tokenizer's files unchanged. A tokenizer in another format is also converted to tokenizer.json.

    Args:
        source: the folder of the tokenizer, or its file.
        chat_templates: texts by name that replace the tokenizer's own templates; None: keep these.

    Raises:
        JinguError: the tokenizer is missing or damaged.
    """
    file = find_tokenizer_file(source)
    origin = source if file is None else file.parent
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted({path for pattern in _PATTERNS for path in origin.glob(pattern) if path.is_file()}):
        copy = folder / path.relative_to(origin)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    is_converted = not (folder / "tokenizer.json").is_file()
    # A model's folder may lack the configuration: transformers then chooses the class by the model's config.
    is_alone = not (folder / _CONFIG).is_file() and not (origin / "config.json").is_file()
    if is_converted or is_alone:
        Tokenizer.load(source).save(folder)
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8")) if (folder / _CONFIG).is_file() else {}
    before = dict(config)
    if config.pop("auto_map", None):
        # It names a class whose code is not copied. A standard class loads tokenizer.json, which is complete.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if is_converted and (folder / TEMPLATE).is_file():
        config.pop("chat_template", None)
    if chat_templates is not None and dict(chat_templates) != Tokenizer.load(source).chat_templates:
        config.pop("chat_template", None)
        _write_templates(folder, chat_templates)
    if config != before:
        text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
        (folder / _CONFIG).write_text(text, encoding="utf-8")


def _write_templates(folder: Path, chat_templates: Mapping[str, str]) -> None:
    """Replace the files of a folder's chat templates, as transformers 5 writes them."""
    shutil.rmtree(folder / FURTHER_TEMPLATES, ignore_errors=True)
    (folder / TEMPLATE).unlink(missing_ok=True)
    for name, text in chat_templates.items():
        path = folder / TEMPLATE if name == "default" else folder / FURTHER_TEMPLATES / f"{name}.jinja"
        # A name is part of a path.
        if path.parent in (folder, folder / FURTHER_TEMPLATES):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
