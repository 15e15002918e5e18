"""Pipelines of every schedule equal one process, in fp64, to nine digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.comparison import assert_same_evaluation_and_tensors

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model.family": "gpt2", "model.num_kv_heads": None},  # tied
    "llama": {"model.tie_word_embeddings": False},
    "bloom": {"model.family": "bloom", "model.num_kv_heads": None},  # tied
    "mixtral": {
        "model.family": "mixtral",
        "model.intermediate_size": 24,
        "model.experts.num_experts": 5,
        "model.experts.aux_loss_coef": 0.02,
        "model.experts.aux_loss_scope": "model",
        "model.experts.z_loss_coef": 0.01,
    },
}
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def plain(schedule: str, zero: int) -> dict[str, Any]:
    return {"pipeline_schedule": schedule, "zero_stage": min(zero, 2) if schedule in ("zero_bubble", "zbv") else zero}


@pytest.mark.parametrize(
    ("model", "world", "layouts"),
    [
        slow("gpt2", 2, [{"pipeline_schedule": schedule} for schedule in SCHEDULES]),
        ("mixtral", 4, [{"pipeline_schedule": "1f1b", "zero_stage": 3, "layers_per_stage": [3, 1]}, plain("zbv", 2)]),
        slow(
            "bloom", 4, [{**plain(name, 1), "pipeline": 4, "layers_per_stage": [1] * 4} for name in SCHEDULES[:2]]
        ),
        slow("gpt2", 4, [{"pipeline_schedule": "zero_bubble", "pipeline": 4, "stages_per_rank": 1}]),
        *(
            slow(model, 4, [plain(schedule, zero) for schedule in SCHEDULES])
            for model in MODELS
            for zero in range(4)
        ),
    ],
)  # fmt: skip
def test_every_schedule_equals_one_process(model, world, layouts, tiny_run, train_on, done):
    """Losses, gradient norms, weights, validation loss and samples of 3 steps of several micro-batches."""
    changes = {
        **MODELS[model],
        "model.num_layers": 4,
        "train.steps": 3,
        "evaluation.every": 3,
        "evaluation.num_sequences": 5,
    }
    changes |= {"evaluation.sample_prompts": ["def ", ""], "evaluation.max_new_tokens": 4}
    alone = tiny_run(changes, name="alone")
    train_on(1, alone)
    one = done(alone)
    columns = ["loss", "grad_norm", *(["balance_loss", "z_loss"] if model == "mixtral" else [])]
    weights = one.tensors()
    for number, layout in enumerate(layouts):
        settings = {f"parallel.{key}": value for key, value in {"pipeline": 2, **layout}.items()}
        micro = 1 if settings["parallel.pipeline"] == 4 else 2
        config = tiny_run({**changes, "batch.micro_batch_size": micro, **settings}, name=f"run-{number}")
        train_on(world, config)
        many = done(config)
        for name in columns:
            assert many.column(name) == pytest.approx(one.column(name), rel=1e-9), (layout, name)
        assert_same_evaluation_and_tensors(many, one, weights, layout)


def test_a_run_resumes_in_another_layout(tiny_run, train_on, done):
    """Two steps each as a pipeline, as another, and on one process, with activation checkpointing in the first two."""
    endless = {"schedule.type": "constant", "schedule.warmup": 2, "model.num_layers": 4, **MODELS["gpt2"]}
    alone = tiny_run({**endless, "train.steps": 6}, name="alone")
    train_on(1, alone)
    layouts = [
        {"parallel.pipeline": 2, "parallel.layers_per_stage": [3, 1], "train.activation_checkpointing.type": "full"},
        {"parallel.pipeline": 2, "parallel.pipeline_schedule": "zbv", "train.activation_checkpointing.type": "full"},
        {},
    ]
    for steps, world, layout in zip((2, 4, 6), (2, 4, 1), layouts, strict=True):
        config = tiny_run({**endless, "train.steps": steps, **layout}, name="moved")
        train_on(world, config)
    assert done(config).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-9)
    theirs = done(config).tensors()
    for name, tensor in done(alone).tensors().items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-7, atol=1e-10, msg=name)


def resaved(rank: int, world: int, config: Any, source: Path, target: Path) -> bool:
    """Load a checkpoint into this layout, and save it; returns whether copies of tied weights are equal to them."""
    from jingu.checkpoint import store
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.runtime.ranks import gather_from_all
    from jingu.training import checkpointing, session
    from jingu.training.precision import choose_precision
    from jingu.training.run import open_run

    run, device = open_run(config), torch.device("cpu")
    mesh = build_mesh(resolve_axis_sizes(config.parallel, world, run.spec), device)
    precision = choose_precision(config.precision, device)
    model, optimizer = session.build_model_and_optimizer(run, mesh, precision, compile=False)
    tensors = checkpointing.checkpoint_tensors(model, optimizer)
    store.load(source, tensors, whole=model.is_whole, gather=gather_from_all)
    store.save(target, tensors, {}, rank=rank, ranks=world, gather=gather_from_all)
    model.synchronize_tied_weights()
    stages = [dict(stage.named_parameters()) for stage in model.stages]
    weights = [parameters["embedding.weight"] for parameters in stages if "embedding.weight" in parameters]
    whole = store.CheckpointReader(source).read("model/embedding.weight")
    return all(torch.equal(weight, whole) for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "mixtral"])
def test_pipeline_checkpoints_are_bitwise_equal(model, tiny_run, train_on, done, ranks, tmp_path):
    from jingu.checkpoint import save_folder, store

    changes = {**MODELS[model], "model.num_layers": 4, "train.steps": 1}
    alone = tiny_run(changes, name="alone")
    train_on(1, alone)
    weights, there, back = done(alone).tensors(), tmp_path / "there", tmp_path / "back"
    layout = tiny_run({**changes, "parallel.pipeline": 2, "parallel.pipeline_schedule": "zbv"})
    assert ranks.run(resaved, 2, layout, done(alone).checkpoint(), there) == [True, True]
    ranks.run(resaved, 1, tiny_run(changes), there, back)
    for folder in (there, back):
        assert save_folder.tensor_names(folder) == sorted(weights)
        reader = store.CheckpointReader(folder)
        for name, tensor in weights.items():
            assert torch.equal(reader.read(name), tensor), name


@pytest.mark.slow
def test_eight_ranks_of_three_axes_train_save_resume_and_export(tiny_run, train_on, done, tmp_path):
    """2 stages × 2 tensor × 2 shard of the quickstart's model: the run of one process, stopped half-way, as a folder
    that transformers loads."""
    transformers = pytest.importorskip("transformers")
    from jingu.cli import main
    from jingu.config.load import load_config
    from jingu.formats.models import open_model
    from jingu.formats.stored_model import load_model

    quickstart = load_config(Path(__file__).parents[2] / "examples/quickstart.yaml", [])
    model = quickstart.model.model_dump(mode="json") | {"vocab_size": quickstart.tokenizer.vocab_size}
    endless = {
        "schedule.type": "constant",
        "schedule.warmup": 2,
        "batch.sequence_length": 64,
        **{f"model.{k}": v for k, v in model.items()},
    }
    alone = tiny_run({**endless, "train.steps": 4}, name="alone")
    train_on(1, alone)
    layout = {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.shard": 2, "parallel.zero_stage": 2}
    for steps in (2, 4):
        config = tiny_run({**endless, **layout, "train.steps": steps}, name="eight")
        train_on(8, config)
    one, eight = done(alone), done(config)
    assert [line["resumed_from"] for line in eight.lines("start")] == [None, 2]
    for name in ("loss", "grad_norm"):
        assert eight.column(name) == pytest.approx(one.column(name), rel=1e-9)
    weights = one.tensors()
    for name, tensor in eight.tensors().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-7, atol=1e-10, msg=name)
    assert main(["export", str(eight.folder), "--to", str(tmp_path / "folder"), "--dtype", "fp32"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    prompt = torch.arange(1, 40).unsqueeze(0)
    ours = load_model(open_model(one.folder), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(theirs(prompt).logits, ours.logits(ours(prompt)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_stages_follow_plain_ones(tiny_run, train_on, done):
    changes = {"model.num_layers": 4, "train.steps": 3, "precision.type": "fp32", "batch.micro_batch_size": 2}
    plain_run = tiny_run(changes, name="plain")
    train_on(1, plain_run)
    for schedule, compiles in (("1f1b", True), ("zbv", False)):  # a compiled block cannot split its backward pass
        layout = {"parallel.pipeline": 2, "parallel.pipeline_schedule": schedule, "train.compile": True}
        config = tiny_run({**changes, **layout}, name=schedule)
        train_on(2, config)
        assert done(config).lines("start")[0]["compile"] == compiles
        assert done(config).column("loss") == pytest.approx(done(plain_run).column("loss"), rel=1e-4)
