"""Resuming from a checkpoint: bitwise in the same layout, to nine digits in another one, and when it is refused."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.data.build import build
from jingu.errors import JinguError
from jingu.runtime.ranks import join_process_group
from jingu.runtime.signals import StopRequest
from jingu.training import loop as loop_module
from jingu.training.commands import train, train_on_rank
from jingu.training.commands import train as train_any_task
from jingu.training.run import ResumeOptions

TIMES = ("time", "seconds", "tokens_per_second", "peak_share", "memory_bytes")
SETTINGS = {
    "train.log_every": 3,
    "checkpoint.every": 5,
    "evaluation.every": 5,
    "evaluation.sample_prompts": ["def "],
    "evaluation.max_new_tokens": 4,
    "evaluation.num_sequences": 3,
}


@pytest.fixture(autouse=True)
def quick(peak: None) -> None:
    """No run here measures the machine."""


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics without what depends on when the run was started and how fast it was."""
    compared = [row for row in rows if row["type"] not in ("start", "plan")]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in compared]


def assert_equal_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def train_until(config: RunConfig, step: int) -> int:
    """Train until the loop has begun step `step` (from 1), where a stop is asked for."""
    request, original = StopRequest(), loop_module.train_step

    def watched(*arguments: Any, **keywords: Any) -> Any:
        if keywords["step"] == step - 1:
            request.signal = signal.SIGTERM
        return original(*arguments, **keywords)

    loop_module.train_step = watched
    try:
        with join_process_group("cpu", 1) as ranks:
            return train_on_rank(config, ranks, request)
    finally:
        loop_module.train_step = original


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("lion", marks=pytest.mark.slow)])
def test_a_run_stopped_anywhere_equals_the_undisturbed_one(optimizer, tiny_run, done):
    """Weights and metrics to the last bit: stopped within a logging interval, at an evaluation, right at the start."""
    whole = tiny_run({**SETTINGS, "optimizer": {"type": optimizer, "lr": 1e-3}, "precision.type": "fp32"}, name="whole")
    assert train(whole) == 0
    parts = whole.model_copy(update={"name": "parts"})
    assert [train_until(parts, step) for step in (1, 7, 10, 11)] == [75] * 4
    assert train(parts) == 0
    assert_equal_tensors(done(whole).tensors(), done(parts).tensors())
    assert untimed(done(parts).lines()) == untimed(done(whole).lines())
    assert done(parts).column("resumed_from", "start") == [None, 1, 7, 10, 11]
    assert done(parts).column("step", "evaluation") == [5, 10, 15, 20]
    seconds = done(parts).column("seconds")
    assert seconds == sorted(seconds)


def test_lines_of_repeated_steps_are_dropped(tiny_run, done):
    """As after a crash: the newest checkpoint is older than the last lines, and the very last is torn."""
    config = tiny_run(SETTINGS)
    assert train(config) == 0
    whole = untimed(done(config).lines())
    for step in (15, 20):
        shutil.rmtree(done(config).folder / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    with pytest.raises(AssertionError):
        done(config).checkpoint()
    assert train(config) == 0  # nothing is kept, so it starts over
    assert untimed(done(config).lines()) == whole
    shutil.rmtree(done(config).folder / "checkpoints/step-00000020")
    with (done(config).folder / "metrics.jsonl").open("ab") as file:
        file.write('{"type": "sample", "step": 20, "text": "种'.encode()[:-1])
    assert train(config) == 0
    assert untimed(done(config).lines()) == whole
    assert done(config).column("resumed_from", "start") == [None, 15]


def test_a_complete_run_is_unchanged(tiny_run, done, capsys):
    config = tiny_run({"train.steps": 3})
    assert train(config) == 0
    lines, tensors = done(config).lines(), done(config).tensors()
    capsys.readouterr()
    assert train(config) == 0
    assert "The run is complete already, with 3 steps.\n" in capsys.readouterr().err
    assert done(config).lines() == lines
    assert_equal_tensors(done(config).tensors(), tensors)


@pytest.mark.slow
def test_saved_on_two_ranks_resumed_on_one_and_on_four(tiny_run, train_on, done, ranks):
    undisturbed = tiny_run(name="undisturbed")
    train_on(1, undisturbed)
    losses = done(undisturbed).column("loss")
    begun = tiny_run({"checkpoint.every": 8, "parallel.zero_stage": 2}, name="begun")
    assert ranks.run(stopped_at, 2, begun, 9) == [130, 130]
    for world, zero in ((1, 1), (2, 2), (4, 3), (4, 0)):
        config = tiny_run({"parallel.zero_stage": zero}, name=f"on-{world}-{zero}")
        shutil.copytree(done(begun).folder, done(config).folder)
        train_on(world, config)
        assert done(config).column("resumed_from", "start")[-1] == done(begun).column("step")[-1]
        assert done(config).column("step") == list(range(1, 21))
        assert done(config).column("loss") == pytest.approx(losses, rel=1e-9)


def stopped_at(rank: int, world: int, config: RunConfig, step: int) -> int:
    """Only the last rank is asked to stop, and all of them do, one step later."""
    from jingu.runtime.ranks import RankInfo

    request, original = StopRequest(), loop_module.train_step

    def watched(*arguments: Any, **keywords: Any) -> Any:
        if keywords["step"] == step - 1 and rank == world - 1:
            request.signal = signal.SIGINT
        return original(*arguments, **keywords)

    loop_module.train_step = watched
    try:
        return train_on_rank(config, RankInfo(rank, world, torch.device("cpu")), request)
    finally:
        loop_module.train_step = original


def test_the_same_layout_on_two_ranks_resumes_bitwise(tiny_run, train_on, done, ranks):
    whole = tiny_run({"precision.type": "fp32", "parallel.zero_stage": 2}, name="whole")
    train_on(2, whole)
    parts = whole.model_copy(update={"name": "parts"})
    assert ranks.run(stopped_at, 2, parts, 7) == [130, 130]
    assert done(parts).column("step")[-1] == 8
    train_on(2, parts)
    assert_equal_tensors(done(whole).tensors(), done(parts).tensors())
    assert untimed(done(parts).lines()) == untimed(done(whole).lines())


# Checkpoints that are not good


def damage(checkpoint: Path) -> None:
    """Flip a bit in the middle of the weights."""
    file = next(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped(tiny_run, done, capsys):
    config = tiny_run({"checkpoint.every": 5, "train.steps": 15})
    assert train(config) == 0
    tensors, lines = done(config).tensors(), untimed(done(config).lines())
    damage(done(config).checkpoint())
    capsys.readouterr()
    assert train(config) == 0
    said = capsys.readouterr().err
    assert "Skipping step-00000015: shard-00000-of-00001.safetensors: the bytes of tensor " in said
    assert "do not match their checksum.\nResuming from step 10.\n" in said
    assert_equal_tensors(done(config).tensors(), tensors)
    assert untimed(done(config).lines()) == lines


def test_a_run_does_not_start_over_if_all_checkpoints_are_damaged(tiny_run, done):
    config = tiny_run({"checkpoint.every": 5, "train.steps": 10})
    assert train(config) == 0
    folder = done(config).folder
    before = (folder / "metrics.jsonl").read_bytes()
    for checkpoint in (folder / "checkpoints").iterdir():
        damage(checkpoint)
    with pytest.raises(JinguError) as raised:
        train(config)
    assert str(raised.value) == (
        f"{folder}/checkpoints: the run has checkpoints, and none of them is valid. Restore one from a copy, or delete "
        "the folder to start the run over."
    )
    assert (folder / "metrics.jsonl").read_bytes() == before


# Another run


def mistake(config: RunConfig) -> str:
    """Return the error, after checking that nothing in the run's folder has changed."""
    folder = Path(config.runs_dir) / config.name

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = content()
    with pytest.raises(JinguError) as raised:
        train(config)
    assert content() == before
    return str(raised.value)


def test_another_configuration_is_refused(tiny_run, done):
    config = tiny_run({"train.steps": 2, "schedule.warmup": 2})
    assert train(config) == 0
    for changes, words, keys in (
        ({"optimizer.lr": 0.02}, "optimizer.lr: 0.01 → 0.02", ["optimizer.lr"]),
        ({"optimizer.lr": 0.02, "seed": 6}, "seed: 5 → 6; optimizer.lr: 0.01 → 0.02", ["seed", "optimizer.lr"]),
        ({"train.steps": 3}, "train.steps: 2 → 3", ["train.steps"]),
    ):
        assert mistake(tiny_run({"train.steps": 2, "schedule.warmup": 2, **changes})) == (
            f"{done(config).folder}: this run was started with another configuration: {words}. To resume it would "
            "mix two runs. Choose another name (name=...), delete the folder to start over, or, if the change is "
            f"intended, resume with {' '.join(f'--allow {key}' for key in keys)}."
        )
    # No checkpoint can follow these.
    for changes in ({"model.num_layers": 3, "seed": 6}, {"precision.type": "fp32"}):
        refusal = mistake(tiny_run({"train.steps": 2, "schedule.warmup": 2, **changes}))
        assert refusal.endswith("Choose another name (name=...), or delete the folder to start over.")


def test_allowed_changes_pass_and_are_logged(tiny_run, done, capsys):
    config = tiny_run({"train.steps": 4, "checkpoint.every": 2})
    assert train_until(config, 2) == 75
    changed = tiny_run({"train.steps": 6, "checkpoint.every": 2, "optimizer.lr": 0.02, "seed": 6, "train.log_every": 2})
    assert "resume with --allow seed --allow optimizer.lr --allow train.steps." in mistake(changed)
    with pytest.raises(JinguError, match=r"--allow: optimizer\.lrr is not a setting\. Did you mean optimizer\.lr\?"):
        train(changed, resume_options=ResumeOptions(["optimizer.lrr"]))
    with pytest.raises(JinguError, match=r"resume with --allow optimizer\.lr --allow train\.steps"):
        train(changed, resume_options=ResumeOptions(["seed"]))
    capsys.readouterr()
    assert train(changed, resume_options=ResumeOptions(["seed", "optimizer", "train.steps"])) == 0
    told = "seed: 5 → 6; optimizer.lr: 0.01 → 0.02; train.steps: 4 → 6; train.log_every: 1 → 2"
    assert f"Changed since the run was last started: {told}.\n" in capsys.readouterr().err
    assert done(changed).column("step") == [1, 2, 4, 6]
    assert train(changed) == 0


def test_a_fresh_optimizer_resumes_with_the_weights(tiny_run, done, capsys):
    """The new optimizer may be of another type, for which the state of the checkpoint does not fit."""
    config = tiny_run({"train.steps": 4, "schedule": {"type": "constant", "warmup": 0}})
    assert train_until(config, 2) == 75
    weights = {name: tensor for name, tensor in done(config).tensors().items() if name.startswith("model/")}
    lion = tiny_run(
        {"train.steps": 4, "schedule": {"type": "constant", "warmup": 0}, "optimizer": {"type": "lion", "lr": 1e-30}}
    )
    with pytest.raises(JinguError, match="this checkpoint is of another model or optimizer"):
        train(lion, resume_options=ResumeOptions(["optimizer"]))
    assert train(lion, resume_options=ResumeOptions(["optimizer"], fresh_optimizer=True)) == 0
    assert "Resuming from step 2 with a fresh optimizer.\n" in capsys.readouterr().err
    tensors = done(lion).tensors()
    assert not any("exp_avg_sq" in name for name in tensors)
    for name, weight in weights.items():
        torch.testing.assert_close(tensors[name], weight, rtol=1e-12, atol=1e-12)


def test_a_repeated_fresh_optimizer_option_applies_once(tiny_run, done, capsys):
    """A restart with the option keeps the new optimizer; after a start without it, the option applies again."""

    def go(until: int, fresh: bool = True) -> str:
        config = tiny_run({"train.steps": until, **constant}, name="run")
        train(config, resume_options=ResumeOptions(fresh_optimizer=fresh))
        return capsys.readouterr().err

    def counter() -> float:
        return float(done(tiny_run(name="run")).tensors()["optimizer/step/norm.weight"].sum())

    constant = {"schedule": {"type": "constant", "warmup": 0}}
    go(2, fresh=False)
    assert "Resuming from step 2 with a fresh optimizer." in go(4)
    assert counter() == 2
    said = go(6)
    assert "Resuming from step 4.\nThe optimizer was reset at step 2;" in said
    assert counter() == 4
    assert "fresh optimizer" not in go(7, fresh=False) and counter() == 5
    assert "Resuming from step 7 with a fresh optimizer." in go(8)
    assert counter() == 1


def test_a_new_run_starts_from_the_weights_of_another(tiny_run, done):
    first = tiny_run({"train.steps": 2}, name="first")
    assert train(first) == 0
    second = tiny_run({"train.steps": 1, "optimizer.lr": 1e-30}, name="second")
    assert train_any_task(second, weights_only_from=str(done(first).folder)) == 0
    theirs, ours = done(first).tensors(), done(second).tensors()
    for name in theirs:
        if name.startswith("model/"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)


def test_harmless_changes_pass(tiny_run, done, tmp_path, library):
    config = tiny_run({"train.steps": 2, "schedule": {"type": "constant", "warmup": 2}})
    assert train(config) == 0
    shutil.copytree(library.tokenizer, tmp_path / "moved")
    changed = tiny_run(
        {
            "train.steps": 4,
            "schedule": {"type": "constant", "warmup": 2},
            "tokenizer.path": str(tmp_path / "moved"),
            "tokenizer.vocab_size": 389,
            "batch.micro_batch_size": 4,
            "train.log_every": 2,
            "train.activation_checkpointing.type": "full",
            "parallel.zero_stage": 3,
            "evaluation.every": 1,
            "checkpoint.keep_last": 1,
        }
    )
    assert train(changed) == 0
    assert done(changed).column("step") == [1, 2, 4]
    assert (done(changed).folder / "config.yaml").read_text(encoding="utf-8") == dump_yaml(changed)
    assert [path.name for path in (done(changed).folder / "checkpoints").iterdir()] == ["step-00000004"]
    # Fewer steps than are done: nothing is left to do.
    fewer = changed.model_copy(update={"train": config.train})
    assert train(fewer) == 0


def test_a_changed_data_set_is_refused(tiny_run, done, tmp_path, library):
    own = {"data.path": str(tmp_path / "data"), "train.steps": 2}
    shutil.copytree(library.data, tmp_path / "data")
    assert train(tiny_run(own)) == 0
    shutil.rmtree(tmp_path / "data")
    text = tmp_path / "text"
    shutil.copytree(library.text, text)
    (text / "heapq.py").write_text("another = 1\n" * 2000)
    build(tiny_run({**own, "data.input": str(text)}))
    assert mistake(tiny_run(own)) == (
        f"{done(tiny_run(own)).folder}: the run was trained until step 2 on another data set than the one in "
        f"{tmp_path}/data. Restore that data set, start a new run (name=...), or resume on this one with --allow data."
    )


def test_never_resume_is_refused_before_anything_is_written(tiny_run, done):
    config = tiny_run({"train.steps": 2})
    assert train(config) == 0
    assert mistake(tiny_run({"train.steps": 2, "checkpoint.resume": "never"})) == (
        f"{done(config).folder}: the run has a checkpoint at step 2, and checkpoint.resume is never. Set "
        "checkpoint.resume=auto to resume from it, or choose another name (name=...)."
    )


def test_a_run_without_a_checkpoint_takes_the_new_tokenizer(tiny_run, done, tmp_path, library):
    """Stopped before its first checkpoint, the run's copy of the tokenizer follows the one it then trains with."""
    config = tiny_run({"train.steps": 1})
    stale = done(config).folder / "tokenizer"
    shutil.copytree(library.tokenizer, stale)
    content = (stale / "tokenizer.json").read_text(encoding="utf-8")
    (stale / "tokenizer.json").write_text(content.replace("<|endoftext|>", "<|end|>"), encoding="utf-8")
    assert train(config) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (stale / name).read_bytes() == (library.tokenizer / name).read_bytes()
