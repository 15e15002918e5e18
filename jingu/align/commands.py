"""`jingu align`, and `jingu train` for every task."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jingu.align.preference_rows import PREFERENCES
from jingu.config.load import load_stages
from jingu.config.schema import RunConfig
from jingu.config.sections.data import PreferenceSettings, SupervisedSettings
from jingu.config.sections.policies import RolloutSettings
from jingu.errors import JinguError, join_words
from jingu.evaluate.task_mixture import build
from jingu.runtime.hub import is_available
from jingu.runtime.ranks import run_first
from jingu.text.tokenizer_commands import train as train_tokenizer
from jingu.training.commands import train
from jingu.tune.prepare import prepare as prepare_rows
from jingu.tune.preview import preview as preview_rows

# The packages below do not import jingu.align: its row kinds are passed to them here.
prepare = partial(prepare_rows, kind=PREFERENCES)
preview = partial(preview_rows, kind=PREFERENCES)


def align(file: Path, first: str | None = None, processes: int | None = None) -> int:
    """Run the stages of a file one after another: train missing tokenizers, build data sets, and train.

    Every stage is an ordinary run, on the ranks of a launcher if there is one. Running the command again skips complete
    stages and resumes the one that was stopped.

    Args:
        first: name of the stage to begin with; None: the first one.
        processes: number of ranks on this machine.

    Returns:
        The exit code of the last stage that ran.

    Raises:
        JinguError: the file has mistakes, or a stage cannot start.
    """
    configs = load_stages(file)
    names = [config.name for config in configs]
    if first is not None and first not in names:
        raise JinguError(f"there is no stage {first}.", where="--from", fix=f"The stages are {join_words(names)}.")
    for config in configs[0 if first is None else names.index(first) :]:
        run_first(partial(_prepare_stage, config))
        code = train(config, processes)
        if code:
            return code
    return 0


def _prepare_stage(config: RunConfig) -> None:
    """Train the stage's tokenizer and build its data sets if they do not exist yet."""
    print(f"align: stage {config.name}, task {config.task.type}", flush=True)
    if not is_available(config.tokenizer.path):
        train_tokenizer(config)
    build_data(config)


def build_data(config: RunConfig) -> None:
    """Build the data sets that a run's objective needs, unless they exist already."""
    if isinstance(config.task, RolloutSettings):
        return  # prompts are read directly from their file
    if isinstance(config.data.objective, SupervisedSettings):
        prepare_rows(config)
    elif isinstance(config.data.objective, PreferenceSettings):
        prepare(config)
    else:
        build(config)
