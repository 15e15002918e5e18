"""`jingu train --auto-layout`: the layout is chosen once, stored, kept by a resumed run, and changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jingu.cli import main
from jingu.config.load import dump_yaml, load_stored_config
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.training import commands
from jingu.training.commands import choose_layout, train


def stored_config(config: RunConfig) -> RunConfig:
    return load_stored_config(Path(config.runs_dir) / config.name / "config.yaml")


def test_two_ranks_take_a_layout_and_compute_what_one_does(tiny_run, train_on, done, capsys):
    changes = {"train.steps": 3, "parallel.zero_stage": 3}
    one, many = tiny_run(changes, name="one"), tiny_run(changes, name="many")
    train_on(1, one)
    with_layout = choose_layout(many, 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Layout: 2 ") and "; next is " in line and "times its estimated step." in line
    train_on(2, with_layout)
    assert done(many).column("loss") == pytest.approx(done(one).column("loss"), rel=1e-9)
    assert stored_config(many).parallel == with_layout.parallel


def test_a_resumed_run_keeps_its_layout(tiny_run, done, monkeypatch, capsys):
    config = tiny_run({"train.steps": 2, "schedule": {"type": "constant", "warmup": 0}}, name="a")
    # The run starts in the second best layout, which no search would take again.
    search = commands.search_run

    def second_best(*arguments):
        result = search(*arguments)
        del result.best[0]
        return result

    with monkeypatch.context() as patch:
        patch.setattr(commands, "search_run", second_best)
        assert train(config, auto_layout=True) == 0
    first = stored_config(config)
    best = choose_layout(config.model_copy(update={"name": "b"}), 1)
    assert (first.batch, first.train, first.parallel) != (best.batch, best.train, best.parallel)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})})
    assert train(longer, auto_layout=True) == 0
    assert "because the run has started before." in capsys.readouterr().err
    second = stored_config(config)
    assert (second.parallel, second.batch) == (first.parallel, first.batch)
    assert second.train.activation_checkpointing == first.train.activation_checkpointing
    assert len(done(config).column("loss")) == 4
    # Another number of ranks needs another layout.
    assert choose_layout(longer, 2).parallel != first.parallel
    assert "the stored layout does not suit 2 ranks" in capsys.readouterr().err


def test_ranks_start_with_the_layout(tiny_run, monkeypatch):
    starts: list[str] = []

    def launch(processes: int, words: Sequence[str], **_: object) -> int:
        assert processes == 2 and "--auto-layout" not in words
        starts.append(Path(words[1]).read_text(encoding="utf-8"))
        return 0

    monkeypatch.setattr(commands, "launch_local_ranks", launch)
    config = tiny_run({"train.steps": 2})
    assert train(config, 2, auto_layout=True) == 0
    assert starts == [dump_yaml(choose_layout(config, 2))]


def test_the_number_of_ranks_is_the_launcher_s(tiny_run, monkeypatch, capsys):
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parallel = choose_layout(tiny_run(), None).parallel
    axes = (parallel.replicate, parallel.shard, parallel.tensor, parallel.context, parallel.pipeline)
    product = 1
    for size in axes:
        assert size != "auto"
        product *= size
    assert product == 4
    # The first rank alone prints the line.
    assert capsys.readouterr().err == ""


def test_no_layout_fits(tiny_run, tmp_path, monkeypatch, capsys):
    with pytest.raises(JinguError, match=r"no layout of 1,009 ranks fits on this machine\. .*8 sequences over 1,009 "):
        choose_layout(tiny_run(), 1009)
    # Too little memory.
    monkeypatch.setattr("jingu.runtime.device.total_memory", lambda _: 2**10)
    message = r"every layout exceeds a rank's memory, this one by [1-9]\S* [kMGT]?B or more: "
    with pytest.raises(JinguError, match=message):
        choose_layout(tiny_run(), 2)
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(tiny_run()), encoding="utf-8")
    assert main(["train", str(file), "--processes", "2", "--auto-layout"]) == 2
    assert "jingu: --auto-layout: no layout of 2 ranks fits" in capsys.readouterr().err
