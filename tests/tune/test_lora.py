"""Adapters: only they are trained and saved, in every layout, and peft and jingu read each other's files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.resume import step_folder
from jingu.config.schema import RunConfig
from jingu.config.sections.tune import LoraSettings
from jingu.errors import JinguError
from jingu.formats.export import convert
from jingu.formats.models import open_adapter_run, open_model
from jingu.formats.peft import read_adapters
from jingu.formats.stored_model import StoredModel, apply_adapters, load_model, residual_base
from jingu.formatting import format_rounded
from jingu.infer.multi_lora import read_lora_adapter
from jingu.model.decoder import build_model, parameter_shapes
from jingu.model.trainable import is_trained
from jingu.parallel import materialize
from jingu.training.run import Run, open_run
from jingu.tune.adapter_commands import export, merge, unmerge
from tests.conftest import Done, MakeRun

TOKENS = torch.arange(5, 29).view(2, 12)
Train = Callable[..., None]
Read = Callable[[RunConfig], Done]


@pytest.fixture
def base(tiny_run: MakeRun, train_on: Train) -> Path:
    """Train a run of 10 steps."""
    config = tiny_run({"train.steps": 10}, name="base")
    train_on(1, config)
    return Path(config.runs_dir) / "base"


@pytest.fixture
def adapted(tiny_run: MakeRun, base: Path) -> MakeRun:
    """Return a function that configures a run with adapters on `base`."""

    def make(changes: dict[str, Any] | None = None, name: str = "adapted") -> RunConfig:
        tune = {
            "type": "lora",
            "rank": 3,
            "alpha": 6.0,
            "target_modules": ["blocks.*.attention.*", "*.feed_forward.down"],
        }
        plain = {"model": {}, "initialize": {"from": str(base)}, "tune": tune, "train.steps": 8, "optimizer.lr": 4e-3}
        return tiny_run({**plain, **(changes or {})}, name=name)

    return make


def logits(stored: StoredModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_model(stored, dtype)
    with torch.no_grad():
        return model.logits(model(TOKENS))


def mean_loss(stored: StoredModel, run: Run) -> float:
    """Return the mean loss over the batches that the run was trained on."""
    model = load_model(stored, torch.float64)
    losses = []
    for step in range(run.config.train.steps):
        batch = run.source.batch(step, 0, 8)
        with torch.no_grad():
            scores = model.logits(model(batch.tokens)).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(scores, batch.labels.flatten()).item())
    return sum(losses) / len(losses)


def unmerged(run: Path) -> torch.Tensor:
    """Return logits of the base with unmerged adapters."""
    apart, base, _ = open_adapter_run(run)
    frozen = residual_base(base, apart.spec)
    model = build_model(apart.spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((apart if is_trained(name, apart.spec) else frozen).read(name))
        return model.eval().logits(model(TOKENS))


@pytest.mark.parametrize(
    "layouts",
    [
        [{"parallel.zero_stage": 3}, {"parallel.tensor": 2}, {"parallel.pipeline": 2}],
        pytest.param([{"parallel.zero_stage": zero} for zero in range(3)], marks=pytest.mark.slow),
    ],
)
def test_only_adapters_are_trained_and_saved_in_every_layout(
    layouts: list[dict[str, Any]], adapted: MakeRun, base: Path, train_on: Train, done: Read
) -> None:
    config = adapted()
    train_on(1, config)
    alone = done(config)
    losses, weights = alone.column("loss"), alone.tensors()
    run = open_run(config)
    before, after = (mean_loss(open_model(path), run) for path in (base, alone.folder))
    assert after < before - 0.005
    assert {name.rpartition(".")[2] for name in weights if name.startswith("model/")} == {"lora_a", "lora_b"}
    assert sum(name.startswith("model/") for name in weights) == 2 * 2 * 5
    assert len([name for name in weights if name.startswith("optimizer/exp_avg/")]) == 2 * 2 * 5
    for number, layout in enumerate(layouts):
        other = adapted(layout, name=f"layout-{number}")
        train_on(2, other)
        many = done(other)
        assert many.column("loss") == pytest.approx(losses, rel=1e-9), layout
        assert many.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-9), layout
        result = many.tensors()
        for name, tensor in weights.items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{layout} {name}")


def test_a_run_resumes(adapted: MakeRun, train_on: Train, done: Read, capsys: pytest.CaptureFixture[str]) -> None:
    config = adapted({"checkpoint.every": 4})
    train_on(1, config)
    response = done(config)
    losses, weights = response.column("loss"), response.tensors()
    numbers = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("model/"))
    assert f" parameters ({format_rounded(numbers)} of them trained), 1 rank " in capsys.readouterr().err
    shutil.rmtree(step_folder(response.folder / "checkpoints", 8))
    train_on(1, config)
    assert done(config).column("loss") == pytest.approx(losses, rel=1e-12)
    result = done(config).tensors()
    for name, tensor in weights.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-12, atol=0)


def peft_logits(base: Path, run: Path, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Export a base model to `folder`/hf, adapters to `folder`/adapter; return peft's logits without and with them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    convert(base, folder / "hf", "fp32")
    export(run, folder / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    with torch.no_grad():
        before = model(TOKENS).logits
        return before, PeftModel.from_pretrained(model, folder / "adapter").eval()(TOKENS).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tune.use_rslora": True},
        {"tune.rank_pattern": {"down_proj": 5, "*.attention.q": 2}, "tune.alpha_pattern": {"1.self_attn.q_proj": 2.5}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_peft_loads_exported_adapters(
    changes: dict[str, Any], adapted: MakeRun, base: Path, train_on: Train, tmp_path: Path
) -> None:
    config = adapted(changes)
    train_on(1, config)
    run = Path(config.runs_dir) / "adapted"
    before, result = peft_logits(base, run, tmp_path)
    apart = unmerged(run)
    assert (apart - before).abs().max() > 0.001
    torch.testing.assert_close(result, apart, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(open_model(run)), apart, rtol=1e-5, atol=1e-5)
    merge(run, tmp_path / "merged")
    torch.testing.assert_close(logits(open_model(tmp_path / "merged")), apart, rtol=1e-5, atol=1e-5)


MORE = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 2}},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "saved modules": {"target_modules": ["q_proj"], "modules_to_save": ["embedding", "head", "norm"]},
    "saved tied embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"trainable_token_indices": [30, 7]},
    "tokens of both": {"trainable_token_indices": [30, 7]},
    "biases": {"lora_bias": True, "alpha_pattern": {"q_proj": 2.5}},
    "pissa": {"init_lora_weights": "pissa"},
    "olora and dora": {"init_lora_weights": "olora", "use_dora": True, "rank_pattern": {"q_proj": 5}},
    "eva": {"init_lora_weights": "eva"},
}


FAST = ("embedding", "saved tied embedding", "biases", "pissa")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FAST)) for case in MORE])
def test_peft_loads_what_is_trained_beside_lora(
    case: str, base: Path, adapted: MakeRun, tiny_run: MakeRun, train_on: Train, tmp_path: Path
) -> None:
    """peft, the run, the exported folder read back and the merged model compute the same, far from the base model."""
    if case in ("saved tied embedding", "tokens of both"):
        base_config = tiny_run({"train.steps": 2, "model.tie_word_embeddings": True}, name="tied")
        train_on(1, base_config)
        base = Path(base_config.runs_dir) / "tied"
    settings = {f"tune.{key}": value for key, value in MORE[case].items()}
    config = adapted({**settings, "initialize": {"from": str(base)}, "train.steps": 4, "optimizer.lr": 0.02})
    train_on(1, config)
    run = Path(config.runs_dir) / "adapted"
    before, expected = peft_logits(base, run, tmp_path)
    assert (expected - before).abs().max() > 0.01
    result = logits(open_model(run))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(unmerged(run), expected, rtol=1e-4, atol=1e-4)
    under = open_model(tmp_path / "hf")
    again = apply_adapters(read_adapters(tmp_path / "adapter", under), under)
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)
    merge(run, tmp_path / "merged")
    torch.testing.assert_close(logits(open_model(tmp_path / "merged")), result, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", *(pytest.param(init, marks=pytest.mark.slow) for init in ("olora", "eva"))])
def test_an_initialization_keeps_the_function_of_the_model(
    init: str, adapted: MakeRun, train_on: Train, done: Read
) -> None:
    """The first loss is that of the base model, the later ones are not those of the default, and a run resumes."""
    config = adapted({"train.steps": 4, "checkpoint.every": 2})
    other = adapted({"train.steps": 4, "checkpoint.every": 2, "tune.init_lora_weights": init}, name=init)
    train_on(1, config)
    train_on(1, other)
    expected, losses = done(config).column("loss"), done(other).column("loss")
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert abs(losses[-1] - expected[-1]) > 1e-5
    shutil.rmtree(step_folder(done(other).folder / "checkpoints", 4))
    train_on(1, other)
    assert done(other).column("loss") == pytest.approx(losses, rel=1e-12)


def test_eva_begins_with_the_principal_inputs(adapted: MakeRun, train_on: Train, base: Path) -> None:
    """Against one SVD of all inputs that scikit-learn computes; ranks do not change it."""
    from sklearn.decomposition import TruncatedSVD

    config = adapted({"tune.init_lora_weights": "eva", "tune.rank": 6, "train.steps": 1, "optimizer.lr": 1e-9})
    train_on(1, config)
    run = open_run(config)
    model = load_model(open_model(base), torch.float64)
    inputs: list[torch.Tensor] = []
    layer = model.get_submodule("blocks.1.attention.v")
    layer.register_forward_pre_hook(lambda _module, arguments: inputs.append(arguments[0].flatten(0, -2)))
    with torch.no_grad():
        model(run.source.batch(0, 0, 8).tokens)
    expected = TruncatedSVD(6, algorithm="arpack").fit(torch.cat(inputs).numpy()).components_
    result = open_adapter_run(Path(config.runs_dir) / "adapted")[0].read("blocks.1.attention.v.lora_a").double()
    # The same directions, up to their signs.
    agreement = (result @ torch.tensor(expected.copy()).T).abs()
    torch.testing.assert_close(agreement, torch.eye(6, dtype=torch.float64), rtol=0, atol=0.02)


def test_what_can_stand_beside_a_base_model(adapted: MakeRun, base: Path, train_on: Train) -> None:
    """PiSSA adds what it took from the matrices with a negative sign; what changes other parameters is refused."""
    config = adapted({"tune.init_lora_weights": "pissa", "train.steps": 2})
    train_on(1, config)
    run = Path(config.runs_dir) / "adapted"
    under, merged = open_model(base), open_model(run)
    for module, (a, b) in read_lora_adapter(run, under).items():
        name = f"{module}.weight"
        torch.testing.assert_close(under.read(name) + b @ a, merged.read(name), rtol=1e-5, atol=1e-6)
    lost: list[tuple[str, Any, str]] = [
        ("modules_to_save", ["norm"], "was trained whole"),
        ("trainable_token_indices", [3], r"merging replaced rows of it \(trainable_token_indices\)"),
        ("use_dora", True, r"merging replaced the norms of its rows \(use_dora\)"),
        ("lora_bias", True, "cannot be unmerged"),
    ]
    for key, value, reason in lost:
        config = adapted({f"tune.{key}": value, "train.steps": 1}, name="other")
        train_on(1, config)
        other = Path(config.runs_dir) / "other"
        with pytest.raises(JinguError, match=r"only LoRA of plain matrices can stand beside a model.*tune merge"):
            read_lora_adapter(other, under)
        merge(other, base.parent / "merged", dtype="fp32")
        with pytest.raises(JinguError, match=reason):
            unmerge(base.parent / "merged", base.parent / "restored", other)
        shutil.rmtree(other)
        shutil.rmtree(base.parent / "merged")


@pytest.mark.slow
def test_loftq_begins_with_what_quantization_loses(adapted: MakeRun, train_on: Train, base: Path) -> None:
    """The quantized model and its adapter are nearer to the base model than the quantized one alone."""
    expected = logits(open_model(base))
    distances = []
    for init in ("default", "loftq"):
        changes = {"tune.quantization": "int4", "tune.rank": 8, "tune.init_lora_weights": init}
        config = adapted({**changes, "train.steps": 1, "optimizer.lr": 1e-9, "precision.type": "fp32"}, name=init)
        train_on(1, config)
        distances.append((logits(open_model(Path(config.runs_dir) / init)) - expected).norm())
    assert distances[1] < 0.8 * distances[0]


def test_lora_plus_is_a_learning_rate_of_the_second_matrices(adapted: MakeRun, train_on: Train, done: Read) -> None:
    """peft's optimizer puts the same matrices into the group with the higher rate."""
    plain, plus = (adapted({"train.steps": 1, "tune.lora_plus_ratio": ratio}, name=f"r{ratio}") for ratio in (1, 16))
    for config in (plain, plus):
        train_on(1, config)
    plus_tensors = done(plus).tensors()
    for name, tensor in done(plain).tensors().items():
        if name.startswith("model/") and name.endswith("lora_b"):
            torch.testing.assert_close(plus_tensors[name], 16 * tensor, rtol=1e-9, atol=0)
        elif name.startswith("model/"):
            assert torch.equal(plus_tensors[name], tensor)


def test_peft_s_adapters_are_loaded(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    convert(base, tmp_path / "hf", "fp32")
    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    reference = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), settings).eval()
    reference.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = reference(TOKENS).logits
    under = open_model(tmp_path / "hf")
    result = apply_adapters(read_adapters(tmp_path / "adapter", under), under)
    torch.testing.assert_close(logits(result), expected, rtol=1e-4, atol=1e-4)


def test_the_base_is_stored_in_the_compute_dtype(
    adapted: MakeRun, train_on: Train, done: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 it takes half the memory and gives the same results, also sharded."""
    config = adapted({"precision.type": "bf16", "train.steps": 3})
    saved: dict[str, torch.dtype] = {}
    narrow = materialize._narrow_frozen

    def seen(model: torch.nn.Module, dtype: torch.dtype) -> None:
        narrow(model, dtype)
        saved.update({name: parameter.dtype for name, parameter in model.named_parameters()})

    monkeypatch.setattr(materialize, "_narrow_frozen", seen)
    train_on(1, config)
    losses = done(config).column("loss")
    assert saved["blocks.0.attention.q.weight"] == saved["embedding.weight"] == torch.bfloat16
    assert saved["blocks.0.attention.q.lora_a"] == saved["blocks.0.attention_norm.weight"] == torch.float32
    monkeypatch.setattr(materialize, "_narrow_frozen", lambda *_: None)
    wide = adapted({"precision.type": "bf16", "train.steps": 3}, name="wide")
    train_on(1, wide)
    assert done(wide).column("loss") == losses
    monkeypatch.undo()
    sharded = adapted({"precision.type": "bf16", "train.steps": 3, "parallel.zero_stage": 3}, name="sharded")
    train_on(2, sharded)
    assert done(sharded).column("loss") == pytest.approx(losses, rel=1e-3)


def test_spellings_of_peft(adapted: MakeRun) -> None:
    """A text in place of a list, a regular expression, and names of the head."""

    def targets(value: Any, **more: Any) -> set[str]:
        run = open_run(adapted({"tune": {"type": "lora", "target_modules": value, **more}}))
        return {name.rpartition(".")[0] for name in parameter_shapes(run.spec) if name.endswith(".lora_a")}

    assert targets("all-linear") == targets(["all-linear"]) == targets(["*attention.*", "*.feed_forward.*"])
    assert targets("q_proj") == {"blocks.0.attention.q", "blocks.1.attention.q"}
    assert targets(r".*layers\.1\.self_attn\.(q|v)_proj") == {"blocks.1.attention.q", "blocks.1.attention.v"}
    assert targets(r".*down_proj", rank_pattern={"down_proj": 2}) == targets(["down_proj"])
    assert "head" in targets(["lm_head", "q_proj"])
    settings = adapted({"tune": {"type": "lora", "modules_to_save": "lm_head"}}).tune
    assert isinstance(settings, LoraSettings) and settings.modules_to_save == ["lm_head"]


def test_the_head_of_a_tied_model_is_named_as_the_cause(tiny_run: MakeRun, train_on: Train) -> None:
    config = tiny_run({"train.steps": 1, "model.tie_word_embeddings": True}, name="tied")
    train_on(1, config)
    start = {"model": {}, "initialize": {"from": str(Path(config.runs_dir) / "tied")}}
    for tune, words in (
        ({"type": "lora", "modules_to_save": ["embed_tokens", "lm_head"]}, "head has no module: the head is tied to"),
        ({"type": "lora", "modules_to_save": "*head"}, r"\*head has no module: the head is tied to the embedding"),
        ({"type": "lora", "target_modules": ["q_proj", "lm_head"]}, r"the head is tied.*modules_to_save=\[embedding\]"),
        ({"type": "full", "freeze": ["head.*"]}, r"no parameter of the model matches head\.\*: the head is tied"),
    ):
        with pytest.raises(JinguError, match=words):
            open_run(tiny_run({**start, "tune": tune}, name="next"))
    open_run(tiny_run({**start, "tune": {"type": "lora", "modules_to_save": ["embed_tokens"]}}, name="next"))


def test_errors(adapted: MakeRun, tiny_run: MakeRun, base: Path, train_on: Train, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"no matrix of the model has a name like \*query"):
        train_on(1, adapted({"tune.target_modules": ["*query"]}))
    with pytest.raises(JinguError, match=r"rank_pattern: no matrix with an adapter has a name like .*gate"):
        train_on(1, adapted({"tune.rank_pattern": {"gate_proj": 4}}))
    for changes, words in (
        ({"tune.target_modules": ["embedding"], "tune.use_dora": True}, "embedding and head support only LoRA"),
        ({"tune.target_modules": ["embedding"], "tune.trainable_token_indices": [1]}, "an embedding without LoRA"),
        ({"tune.trainable_token_indices": [99999]}, "trained tokens must be distinct ids below"),
        ({"tune": {"type": "ia3", "target_modules": ["head"]}}, "embedding and head support only LoRA"),
        ({"tune.modules_to_save": ["lm_hat"]}, "modules_to_save: lm_hat matches no module of the model"),
        ({"tune.modules_to_save": ["down_proj"]}, "matches modules that have an adapter"),
        ({"tune.modules_to_save": ["gate_proj"], "tune.quantization": "int8"}, "of the blocks, which are quantized"),
        ({"tune.init_lora_weights": "loftq"}, "nothing is quantized.*tune.quantization"),
    ):
        with pytest.raises(JinguError, match=words):
            train_on(1, adapted(changes))
    with pytest.raises(JinguError, match="the run starts from random weights"):
        train_on(1, tiny_run({"tune": {"type": "lora"}}, name="none"))
    with pytest.raises(JinguError, match="trained no adapters"):
        export(base, tmp_path / "adapter")
    with pytest.raises(JinguError, match=r"trained no adapters\. `jingu export` writes its model"):
        merge(base, tmp_path / "merged")
    with pytest.raises(JinguError, match="this run trained no adapters"):
        merge(base, tmp_path / "merged", base)
