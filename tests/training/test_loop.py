"""The loop against one written by hand around the same model: torch's loss, clipping and AdamW on whole batches."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from jingu.checkpoint.commands import verify
from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.config.sections.parallel import ParallelSettings
from jingu.data.build import build
from jingu.data.dataset import TokenDataset
from jingu.errors import JinguError
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.weight_init import init_weights
from jingu.report.commands import write_report
from jingu.runtime.device import is_out_of_memory
from jingu.training import loop, pretraining, session
from jingu.training.run import Run, open_run
from jingu.training.schedule import learning_rate

STEPS = 7
DIVERGING = {"optimizer.lr": 1e300, "train.max_grad_norm": None, "schedule.warmup": 0}


def bare_loop(run: Run) -> tuple[Decoder, list[float], list[float]]:
    """The trained model, and loss and gradient norm of each step."""
    config = run.config
    model = Decoder(run.spec).double()
    init_weights(model, run.spec, config.seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        batch = run.source.batch(step, 0, config.batch.global_batch_size)
        logits = model.logits(model(batch.tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.schedule, config.optimizer.lr, step, STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, norms


@pytest.mark.parametrize("family", [{}, {"model.family": "gpt2", "model.num_kv_heads": None}], ids=["llama", "gpt2"])
def test_equals_a_bare_loop(family, tiny_run, train_on, done):
    changes = {**family, "train.steps": STEPS, "evaluation.every": 100, "evaluation.num_sequences": "all"}
    config = tiny_run(changes)
    train_on(1, config)
    run = open_run(config)
    model, losses, norms = bare_loop(run)
    assert done(config).column("loss") == pytest.approx(losses, rel=1e-10)
    assert done(config).column("grad_norm") == pytest.approx(norms, rel=1e-10)
    assert max(norms) > 1.0
    tensors = done(config).tensors()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(tensors[f"model/{name}"], parameter.detach(), rtol=1e-9, atol=1e-12)
    (measured,) = done(config).lines("evaluation")
    assert measured["step"] == STEPS
    for name, value in held_out(model, run, run.validation[0].dataset).items():
        assert measured[name] == pytest.approx(value, rel=1e-10), name


def held_out(model: Decoder, run: Run, text: TokenDataset) -> dict[str, Any]:
    """Each held-out token predicted once, window by window, each after the token before it."""
    ids = [run.tokenizer.eos_token_id, *text.gather(torch.tensor([0]).numpy(), text.tokens)[0].tolist()]
    length, total = run.config.batch.sequence_length, 0.0
    for start in range(0, len(ids) - 1, length):
        window = torch.tensor(ids[start : start + length + 1])
        with torch.no_grad():
            logits = model.logits(model(window[None, :-1]))
        total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
    size = sum(shard.text_bytes for shard in text.manifest.validation.shards)
    tokens = len(ids) - 1
    return {"loss": total / tokens, "bits_per_byte": total / math.log(2) / size, "tokens": tokens, "bytes": size}


def test_every_source_of_a_mixture_is_evaluated(tiny_run, train_on, done, library, tmp_path):
    """The mean is weighted by the shares of the run, 3 to 1, whatever the sizes of the splits."""
    sources = [{"path": str(library.data), "weight": 3.0}]
    sources.append({"path": str(tmp_path / "other"), "input": str(library.text / "shlex.py"), "weight": 1.0})
    sources[1]["validation_fraction"] = 0.5
    data = {"data.input": [], "data.path": "data", "data.sources": sources, "data.documents": "line"}
    changes = {**data, "train.steps": 2, "evaluation.every": 2, "evaluation.num_sequences": "all"}
    config = tiny_run(changes)
    build(config)
    train_on(1, config)
    run = open_run(config)
    tensors = done(config).tensors()
    model = Decoder(run.spec).double()
    model.load_state_dict({name: tensors[f"model/{name}"] for name in parameter_shapes(run.spec)})
    assert [(rows.name, rows.share) for rows in run.validation] == [("data", 0.75), ("other", 0.25)]
    manifest = run.validation[1].dataset.manifest
    assert manifest.validation.tokens > 0.3 * manifest.train.tokens  # its own fraction, not data.validation_fraction
    expected = {rows.name: held_out(model, run, rows.dataset) for rows in run.validation}
    (line,) = done(config).lines("evaluation")
    for metric in ("loss", "bits_per_byte"):
        values = {name: result[metric] for name, result in expected.items()}
        for name, value in values.items():
            assert line[f"{metric}/{name}"] == pytest.approx(value, rel=1e-10)
        assert line[metric] == pytest.approx(0.75 * values["data"] + 0.25 * values["other"], rel=1e-10)
    assert line["tokens"] == sum(result["tokens"] for result in expected.values())


def test_the_sequences_of_an_evaluation_are_divided_by_the_shares(tiny_run, train_on, done, library, tmp_path):
    sources = [{"path": str(library.data), "weight": 3.0}, {"path": str(tmp_path / "copy"), "weight": 1.0}]
    shutil.copytree(library.data, tmp_path / "copy")
    data = {"data.input": [], "data.path": "data", "data.sources": sources}
    config = tiny_run({**data, "train.steps": 1, "evaluation.every": 1, "evaluation.num_sequences": 8})
    train_on(1, config)
    (line,) = done(config).lines("evaluation")
    assert line["tokens"] == 8 * 33 and {"loss/data", "loss/copy"} <= line.keys()


def test_a_logged_loss_is_the_mean_since_the_last_line(tiny_run, train_on, done):
    each, some = (tiny_run({"train.steps": 7, "train.log_every": every}, name=str(every)) for every in (1, 3))
    train_on(1, each, some)
    losses = done(each).column("loss")
    means = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]]
    assert done(some).column("step") == [3, 6, 7]
    assert done(some).column("loss") == pytest.approx(means, rel=1e-12)
    assert done(some).column("grad_norm") == [done(each).column("grad_norm")[step - 1] for step in (3, 6, 7)]
    assert done(some).column("tokens") == [3 * 8 * 33, 6 * 8 * 33, 7 * 8 * 33]


def test_the_lines_of_the_metrics_file(tiny_run, train_on, done):
    evaluation = {"evaluation.every": 1, "evaluation.sample_prompts": ["def "], "evaluation.max_new_tokens": 3}
    config = tiny_run({"train.steps": 2, **evaluation})
    train_on(1, config)
    kinds = [line["type"] for line in done(config).lines()]
    assert kinds == ["start", "train", "evaluation", "sample", "train", "evaluation", "sample"]
    (start,) = done(config).lines("start")
    expected = {"step": 0, "ranks": 1, "device": "cpu", "precision": "fp64", "compile": False, "resumed_from": None}
    assert {key: start[key] for key in expected} == expected
    stored = done(config).tensors()
    parameters = sum(tensor.numel() for name, tensor in stored.items() if name.startswith("model/"))
    assert (start["parameters"], start["tokens_per_step"]) == (parameters, 8 * 33)
    assert all(line["memory_bytes"] > 0 and line["tokens_per_second"] > 0 for line in done(config).lines("train"))


def test_a_non_finite_loss_is_logged(tiny_run, train_on, done, capsys):
    """Where the user wants training to continue, and to end with the weights as they are."""
    changes = {"train.on_divergence": "continue", "checkpoint.every": 1, "checkpoint.keep_last": 1}
    config = tiny_run({"train.steps": 6, **DIVERGING, **changes})
    train_on(1, config)
    assert done(config).column("loss")[-1] == "nan"
    said = capsys.readouterr().err
    assert "WARNING: The loss or its gradient is not finite since step 2. A lower optimizer.lr may help.\n" in said
    assert "Complete: 6 steps, the loss is not finite. The checkpoint is " in said
    # The last one before that stays, whatever the retention.
    assert [path.name for path in sorted((done(config).folder / "checkpoints").iterdir())] == [
        "step-00000001", "step-00000006",
    ]  # fmt: skip
    with pytest.raises(JinguError, match=r"1 of 2 checkpoints is damaged: step-00000006"):
        verify(done(config).folder)
    assert "NaN or infinity" in capsys.readouterr().out


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_diverges_stops_with_an_error_and_a_finite_checkpoint(world, tiny_run, done, train_on, capsys):
    changes = {"checkpoint.every": 1, "checkpoint.keep_last": 1, "parallel.zero_stage": 0}
    config = tiny_run({"train.steps": 20, "train.log_every": 1, **DIVERGING, **changes})
    with pytest.raises(
        (JinguError, AssertionError), match="the run has diverged: its loss or gradient is not finite since step 2"
    ):
        train_on(world, config)
    run = done(config)
    assert run.column("step") == [1, 2, 3, 4]
    assert [path.name for path in sorted((run.folder / "checkpoints").iterdir())] == ["step-00000001"]
    assert [(line["step"], line["action"]) for line in run.lines("divergence")] == [(4, "stop")]
    if world == 1:
        assert "Complete" not in capsys.readouterr().err
        assert main(["train", str(written(run, config))]) == 2
        assert "train.on_divergence=rollback" in capsys.readouterr().err
        verify(run.folder)


def written(run: Any, config: Any) -> Path:
    file: Path = run.folder / "again.yaml"
    file.write_text(dump_yaml(config))
    return file


def test_a_run_that_diverges_goes_back_and_lowers_the_rate(tiny_run, done, train_on, monkeypatch, capsys):
    """The loss of steps 4 and on is infinite while the rate is the full one."""
    step = loop.train_step

    def planted(model: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        result = step(model, optimizer, *arguments, **keywords)
        is_high = optimizer.param_groups[0]["lr"] > 0.3 * config.optimizer.lr
        return replace(result, loss=result.loss * (math.inf if is_high and keywords["step"] >= 3 else 1.0))

    monkeypatch.setattr(loop, "train_step", planted)
    changes = {"train.on_divergence": "rollback", "checkpoint.every": 2, "schedule": {"type": "constant", "warmup": 0}}
    config = tiny_run({"train.steps": 9, "train.log_every": 1, **changes})
    train_on(1, config)
    run = done(config)
    assert run.column("step") == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8, 9]
    assert run.column("lr") == [config.optimizer.lr * scale for scale in [1] * 6 + [0.5] * 4 + [0.25] * 7]
    lines = run.lines("divergence")
    assert [(line["step"], line["diverged_step"], line["lr_scale"]) for line in lines] == [(2, 6, 0.5), (2, 6, 0.25)]
    assert "Training goes back to step 2, at 0.25 times the learning rate." in capsys.readouterr().err
    # Steps that are repeated see the same batches with the same weights.
    losses = run.column("loss")
    assert losses[6] == losses[2] == losses[10]


def test_a_run_without_checkpoint_cannot_go_back(tiny_run, train_on):
    config = tiny_run({"train.steps": 20, **DIVERGING, "train.on_divergence": "rollback"})
    with pytest.raises(JinguError, match="the run has diverged"):
        train_on(1, config)


def test_a_loss_that_rises_far_above_its_past_is_logged(tiny_run, train_on, done, monkeypatch, capsys):
    values, step = iter([3.0, 2.0, 1.5, 1.6, 1.4, 5.0, 6.0, 1.4, 1.3, 1.4]), loop.train_step
    monkeypatch.setattr(
        loop, "train_step", lambda *a, **k: replace(step(*a, **k), loss=torch.tensor(next(values)).double())
    )
    config = tiny_run({"train.steps": 10, "train.log_every": 1})
    train_on(1, config)
    said = [line for line in capsys.readouterr().err.splitlines() if "far above its past" in line]
    assert len(said) == 1 and said[0].startswith("WARNING: The loss has risen far above its past: 6.000 at step 7,")
    assert [(line["step"], line["action"]) for line in done(config).lines("divergence")] == [(7, "none")]


def test_a_non_finite_loss_is_logged_once(tiny_run, train_on, monkeypatch, capsys):
    """And once more when it is finite again."""
    values, step = iter([1.0, math.nan, math.inf, 1.2, 1.1, math.nan]), loop.train_step
    monkeypatch.setattr(
        loop, "train_step", lambda *a, **k: replace(step(*a, **k), loss=torch.tensor(next(values)).double())
    )
    changes = {"train.on_divergence": "continue", "evaluation.every": 0}
    train_on(1, tiny_run({"train.steps": 6, "train.log_every": 1, **changes}))
    told = [line for line in capsys.readouterr().err.splitlines() if "The loss" in line]
    assert [line.removeprefix("WARNING: ").partition(" A lower")[0] for line in told] == [
        "The loss or its gradient is not finite since step 2.", "The loss is finite again at step 4.",
        "The loss or its gradient is not finite since step 6.",
    ]  # fmt: skip


def test_a_run_may_have_a_chinese_name(tiny_run, train_on, done):
    config = tiny_run({"train.steps": 1}, name="实验-1")
    train_on(1, config)
    assert done(config).folder.name == "实验-1"
    write_report(done(config).folder)
    assert "<h1>实验-1</h1>" in (done(config).folder / "report.html").read_text(encoding="utf-8")
    verify(done(config).folder)


@pytest.mark.parametrize("sequences", [2, "all"])
def test_a_long_evaluation_is_announced(sequences, tiny_run, train_on, monkeypatch, capsys):
    said: list[str] = []
    measure = pretraining.evaluate
    monkeypatch.setattr(
        pretraining, "evaluate", lambda *a, **k: said.append(capsys.readouterr().err) or measure(*a, **k)
    )
    changes = {"train.steps": 1, "evaluation.every": 1, "evaluation.num_sequences": sequences}
    train_on(1, tiny_run({**changes, "evaluation.num_sequences_at_end": sequences}))
    (before,) = said
    assert ("Evaluating on the whole validation split, " in before) == (sequences == "all")


def test_the_end_of_a_run_is_logged(tiny_run, done, capsys, peak):
    from jingu.training.commands import train

    config = tiny_run({"train.steps": 2, "evaluation.every": 2, "evaluation.num_sequences": 2})
    assert train(config) == 0
    loss, bits = (done(config).column(name, "evaluation")[-1] for name in ("loss", "bits_per_byte"))
    said = capsys.readouterr().err
    assert ", 39.3k parameters, " in said and " 528 in all (" in said
    checkpoint = done(config).checkpoint()
    assert (
        f"Complete: 2 steps, validation loss {loss:.4f}, bits per byte {bits:.4f}. The checkpoint is {checkpoint}.\n"
        in said
    )


def test_the_share_of_the_peak_is_at_most_one():
    from jingu.training.throughput import ThroughputMeter

    meter = ThroughputMeter(2.0, iter([10.0, 30.0, 30.0]).__next__)
    assert [meter.peak_share(rate) for rate in (2.5, 10.0, 7.5, 30.0, 15.0)] == [0.5, 2 / 3, 0.5, 1.0, 0.5]


def test_a_model_larger_than_memory_is_refused_before_allocation(tiny_run, train_on, done, monkeypatch):
    """Weights, gradients and two moments in fp64, and a counter of steps for each parameter."""
    config = tiny_run({"train.steps": 1})
    numbers = sum(shape.numel() for shape in parameter_shapes(open_run(config).spec).values())
    monkeypatch.setattr(session, "total_memory", lambda device: 4 * 8 * numbers - 1)
    with pytest.raises(JinguError, match=r"^model: weights, gradients and optimizer state of one rank take "):
        train_on(1, config)
    monkeypatch.setattr(session, "total_memory", lambda device: 4 * 8 * numbers + 1000)
    train_on(1, config)
    assert done(config).column("step") == [1]


@pytest.mark.parametrize(
    ("device_type", "compile", "words"),
    [
        ("cpu", True, "needs CUDA, and the run computes on cpu. Leave it out"),
        ("cuda", False, "nothing is compiled. Set train.compile to true"),
    ],
)
def test_asynchronous_tensor_parallelism_is_refused_where_nothing_does_it(device_type, compile, words):
    settings = ParallelSettings(tensor=2, async_tensor_parallel=True)
    with pytest.raises(JinguError, match=f"^parallel.async_tensor_parallel: .*{words}"):
        session.check_async_tensor_parallel(settings, device_type, compile=compile)


def test_out_of_memory_is_told_apart_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_progress_shows_what_the_task_names() -> None:
    metrics = {"loss": 0.0, "reward": 0.5123, "rewards/truth": 0.25, "length": 12.34, "entropy": 1.0}
    names = ("reward", "rewards/truth", "kl", "length")
    assert loop._format_headline(names, metrics) == "reward 0.512, truth 0.250, length 12.3"
    assert loop._format_headline(("loss",), metrics) == "loss 0.000"
