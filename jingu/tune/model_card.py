"""The model card of an export: README.md with what a run says of its model, in the format of Hugging Face's hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from jingu.checkpoint.resume import run_config
from jingu.config.schema import RunConfig
from jingu.evaluate.result_files import RESULT_SUFFIX
from jingu.formats.provenance import Record, read_provenance
from jingu.runtime.files import read_json
from jingu.runtime.hub import local_path, parse_name
from jingu.version import __version__

CARD_NAME = "README.md"
_FIX = "Evaluate the task again, or delete the file."


def write_card(model: Path, folder: Path, name: str) -> str:
    """Return the text of a model card.

    Args:
        model: the run (or a step of it) that trained the model, or any other model.
        folder: the export.
        name: title of the card.
    """
    run = next((path for path in (model, model.absolute().parent.parent) if (path / "model.json").is_file()), None)
    config = None if run is None else run_config(run)
    record = read_provenance(model)
    sections = [
        f"# {name}",
        _describe_training(config, record),
        _describe_data(record),
        "" if run is None else _describe_scores(run / "evaluations"),
        _describe_template(folder),
        _describe_use(name, folder),
        f"Written by [jingu](https://github.com/jingu-llm/jingu) {__version__}.",
    ]
    header = yaml.safe_dump(_header(config, record, folder), sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _header(config: RunConfig | None, record: Record | None, folder: Path) -> dict[str, Any]:
    """Return the metadata of the card, which the hub indexes."""
    base = _base_name(record)
    header: dict[str, Any] = {"library_name": "peft" if (folder / "adapter_config.json").is_file() else "transformers"}
    if base is not None and (hub_name := parse_name(base)) is not None:
        header["base_model"] = hub_name.repository
    header["license"] = _license(base)
    header["tags"] = ["jingu", *([] if config is None else [config.task.type])]
    names = [name for path in _data_inputs(config) if (name := parse_name(path)) is not None]
    if names:
        header["datasets"] = sorted({name.repository for name in names})
    return header


def _data_inputs(config: RunConfig | None) -> list[str]:
    inputs: list[str] = []
    for source in [] if config is None else config.data.all_sources:
        inputs += [source.input] if isinstance(source.input, str) else source.input
    return inputs


def _base_name(record: Record | None) -> str | None:
    """Return the path or name of the model that training started from; None if it started from random weights."""
    return None if record is None or record["initial"] is None else str(record["initial"]["model"])


def _license(base: str | None) -> str:
    """Return the license that the base's own card names; `other` if it is unknown."""
    card = None if base is None else local_path(base) / CARD_NAME
    if card is None or not card.is_file():
        return "other"
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", maxsplit=2)
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 else None
    except yaml.YAMLError:
        header = None
    return str(header.get("license", "other")) if isinstance(header, dict) else "other"


def _describe_training(config: RunConfig | None, record: Record | None) -> str:
    if config is None:
        return ""
    base = _base_name(record)
    rows = [
        ("task", config.task.type),
        ("initial model", f"`{base}`" if base is not None else "random weights"),
        ("tuning", config.tune.type),
        ("steps", f"{config.train.steps:,}"),
        ("sequences per step", f"{config.batch.global_batch_size:,}"),
        ("sequence length", f"{config.batch.sequence_length:,}"),
        ("optimizer", f"{config.optimizer.type}, learning rate {config.optimizer.lr:g}"),
        ("precision", config.precision.type),
        ("seed", str(config.seed)),
    ]
    lines = ["## Training", "", "| setting | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)])


def _describe_data(record: Record | None) -> str:
    """Return a list of the data sets of the model and of all its ancestors."""
    lines: list[str] = []
    while record is not None:
        for data in record["data"]:
            lines.append(f"- `{data.get('path', 'unknown')}`")
        record = None if record["initial"] is None else record["initial"]["record"]
    return "\n".join(["## Data", "", *dict.fromkeys(lines)]) if lines else ""


def _describe_scores(folder: Path) -> str:
    """Return a table of the results of `jingu evaluate`, each with its 95% interval."""
    rows = []
    for file in sorted(folder.glob(f"*{RESULT_SUFFIX}")):
        content = read_json(file, _FIX)
        if "model" not in content:
            continue  # another file of results, such as the spread of a metric
        precision = content["model"].get("precision", "unknown")
        for key, metric in content["results"].items():
            low, high = metric.get("interval_low"), metric.get("interval_high")
            interval = "unknown" if low is None or high is None else f"{low:.4f} to {high:.4f}"
            name = key.removesuffix(",none")
            rows.append(f"| {content['task']} | {name} | {metric['value']:.4f} | {interval} | {precision} |")
    header = ["## Evaluation", "", "| task | metric | value | 95% interval | precision |", "|---|---|---|---|---|"]
    return "\n".join([*header, *rows]) if rows else ""


def _describe_template(folder: Path) -> str:
    if not (folder / "chat_template.jinja").is_file():
        return ""
    return "## Chat\n\nThe model was trained with the chat template in `chat_template.jinja`; transformers applies it."


def _describe_use(name: str, folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
        ]
    else:
        lines = ["from transformers import pipeline", f'generate = pipeline("text-generation", model="{name}")']
    code = "\n\n".join(lines)
    return f"## Use\n\n```python\n{code}\n```\n\n```sh\njingu chat {name}\n```"
