"""The run as a folder: what must be true before the first step, and what is written before it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from jingu.config.compare import harmful_differences
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.data.dataset import TokenDataset, check_tokenizer, open_dataset
from jingu.errors import JinguError
from jingu.model.build import spec_from_settings
from jingu.model.spec import ModelSpec
from jingu.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """Everything the loop reads, opened and checked. Opening writes nothing."""

    config: RunConfig
    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    train: TokenDataset
    held_out: TokenDataset | None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def open_run(config: RunConfig) -> Run:
    """Open tokenizer and data set, build the spec, and check that they fit each other and the run's folder.

    Raises:
        JinguError: something is missing, or two things do not belong together.
    """
    folder = Path(config.runs) / config.name
    _check_folder(folder, config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    train = open_dataset(Path(config.data.path), "train")
    check_tokenizer(train, tokenizer)
    spec = spec_from_settings(config.model, tokenizer.vocabulary, config.batch.sequence_length)
    held_out = None
    if config.evaluation.every and config.data.held_out:
        held_out = open_dataset(Path(config.data.path), "held_out")
    return Run(config, folder, spec, tokenizer, train, held_out)


def _check_folder(folder: Path, config: RunConfig) -> None:
    stored = folder / "config.yaml"
    if not stored.exists():
        return
    differences = harmful_differences(load_config(stored, []), config)
    if differences:
        raise JinguError(
            f"this run was started with another configuration: {'; '.join(differences)}.",
            where=folder,
            fix="Going on would mix two runs. Choose another name (name=...), or delete the folder to start over.",
        )


def write_run(run: Run) -> None:
    """Make the run's folder and write what belongs to the whole run: configuration, spec, tokenizer."""
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    replace_text(run.folder / "config.yaml", dump_yaml(run.config))
    replace_text(run.folder / "model.json", run.spec.model_dump_json(indent=2) + "\n")
    tokenizer = run.folder / "tokenizer"
    if not tokenizer.exists():
        partial = run.folder / ".tokenizer.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(run.config.tokenizer.path, partial)
        partial.replace(tokenizer)


def replace_text(path: Path, text: str) -> None:
    """Write a file under its final name only when it is whole."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
