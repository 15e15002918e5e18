"""The folder of a run: its lock, and the files that are written when the run starts."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jingu.config.load import dump_yaml
from jingu.config.sections import tune
from jingu.errors import JinguError
from jingu.formats.description import write_description
from jingu.formats.models import update_description
from jingu.formats.provenance import extend_provenance
from jingu.formats.run_inputs import RunInputs
from jingu.runtime import files
from jingu.runtime.files import create_folder_atomically, write_text_atomically
from jingu.runtime.hub import pinned_name
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_files import copy_tokenizer
from jingu.training.input_checks import record_inputs
from jingu.training.run import Run


@contextmanager
def lock_run(run: Run) -> Iterator[None]:
    """Create the run's folder, and keep other processes from training the same run within the block.

    Raises:
        JinguError: the folder cannot be created, or another process trains the run.
    """
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(run.checkpoints, Path):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_write_error(error, run.folder) from error
    fix = "Wait for it, stop it, or choose another name (name=...)."
    owner = run.folder / ".trained-by"
    name = "another process"
    with suppress(OSError):
        name = owner.read_text(encoding="utf-8") or name
    with files.lock_folder(run.folder, f"{name} is training this run now.", fix):
        with suppress(OSError):  # the file serves only the message above
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        try:
            yield
        finally:
            with suppress(OSError):
                owner.unlink(missing_ok=True)


def record_run_inputs(run: Run) -> RunInputs:
    """Return the contents of what a run reads beside its data sets. Raises JinguError if a file cannot be read."""
    return record_inputs(run.config, run.folder, run.tokenizer)


def write_run_files(run: Run, inputs: RunInputs) -> None:
    """Write configuration, spec, tokenizer, chat template, and records of what the run reads into the run's folder.

    Args:
        inputs: what the run reads beside its data sets.

    Raises:
        JinguError: the folder cannot be written.
    """
    try:
        write_text_atomically(run.folder / "config.yaml", dump_yaml(run.config))
        write_text_atomically(run.folder / "model.json", run.spec.to_json())
        settings = run.config.tune
        adapter = None if isinstance(settings, tune.FullSettings) else settings.initial_adapter
        start = [None if path is None else Path(pinned_name(path)) for path in (run.config.initialize.from_, adapter)]
        extend_provenance(run.folder, run.data_records, *start)
        _write_description(run)
        inputs.save(run.folder)
    except OSError as error:
        raise run_write_error(error, run.folder) from error


def _write_description(run: Run) -> None:
    """Write the tokenizer, with the chat templates that the run trains with, and what the initial model's files say.

    Files that are there already and need no change stay as they are.
    """
    description = update_description(run.folder, run.config, run.tokenizer, run.spec)
    write_description(run.folder, description)
    folder = run.folder / "tokenizer"
    templates = run.tokenizer.chat_templates if description.chat_templates is None else description.chat_templates
    if folder.exists():
        previous = Tokenizer.load(folder)
        if previous.fingerprint() == run.tokenizer.fingerprint() and previous.chat_templates == templates:
            return
    with create_folder_atomically(folder) as partial:
        copy_tokenizer(Path(run.config.tokenizer.path), partial, templates)
        shutil.rmtree(folder, ignore_errors=True)


def run_write_error(error: OSError, where: Path) -> JinguError:
    """Return the error for a file of the run that cannot be written.

    Args:
        where: path that the error names, unless `error` has one.
    """
    return files.write_error(error, Path(error.filename or where), "choose another folder for runs (runs_dir=...)")
