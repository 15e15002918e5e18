"""Every tuning method: what is trained, peft's files in both directions, merging, layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.resume import step_folder
from jingu.config.schema import RunConfig
from jingu.data.objective import batch_function
from jingu.errors import JinguError
from jingu.formats.export import convert
from jingu.formats.models import open_adapter_run, open_model
from jingu.formats.peft import read_adapters
from jingu.formats.stored_model import StoredModel, apply_adapters, load_model
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import build_model, parameter_shapes
from jingu.model.inputs import Inputs
from jingu.model.trainable import is_adapter
from jingu.text.tokenizer import Tokenizer
from jingu.training.batch_transforms import model_inputs, prepend_virtual_tokens
from jingu.training.run import open_run
from jingu.tune.adapter_commands import export, merge, unmerge
from tests.conftest import Done, Library, peak_unmeasured, tiny

TOKENS = torch.arange(5, 29).view(2, 12)
Train = Callable[..., None]
Read = Callable[[RunConfig], Done]

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "rank": 3, "alpha": 6.0},
    "dora": {"type": "lora", "rank": 3, "use_dora": True, "use_rslora": True},
    "ia3": {"type": "ia3"},
    "prompt": {"type": "prompt", "num_virtual_tokens": 5, "init_text": "def f(x): return"},
    "p_tuning_mlp": {"type": "p_tuning", "num_virtual_tokens": 5, "encoder_hidden_size": 24},
    "p_tuning_lstm": {"type": "p_tuning", "num_virtual_tokens": 5, "encoder": "lstm", "encoder_hidden_size": 24},
    "prefix": {"type": "prefix", "num_virtual_tokens": 5, "encoder_hidden_size": 24},
    "p_tuning_v2": {"type": "p_tuning_v2", "num_virtual_tokens": 5},
}
LEAVES = {
    "lora": {"lora_a", "lora_b"},
    "dora": {"lora_a", "lora_b", "lora_m"},
    "ia3": {"ia3_in", "ia3_out"},
}
SPANS = {"type": "span_corruption", "noise_density": 0.25, "mean_span_length": 2.5, "num_sentinels": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"model.family": "gpt2", "model.num_kv_heads": None},
    "bloom": {"model.family": "bloom", "model.num_kv_heads": None, "model.intermediate_size": None},
    "qwen3": {"model.family": "qwen3"},
    "mixtral": {"model.family": "mixtral", "model.intermediate_size": 24, "model.experts.num_experts": 4},
    "t5": {
        "model.family": "t5",
        "model.num_kv_heads": None,
        "model.num_encoder_layers": 2,
        "model.head_dim": 9,
        "data.objective": SPANS,
    },
}
RATES = {
    ("llama", "lora"): 4e-3,
    ("mixtral", "lora"): 1e-2,
    ("llama", "prompt"): 3e-3,
    ("t5", "prompt"): 0.3,
    ("gpt2", "ia3"): 0.3,
    ("gpt2", "p_tuning_v2"): 0.1,
}
"""Learning rates for vectors with unusual initial values."""
OTHERS = {
    "gpt2": ("dora", "ia3", "p_tuning_v2"),
    "bloom": ("dora", "ia3", "prefix"),
    "qwen3": ("p_tuning_v2",),
    "mixtral": ("lora",),
    "t5": ("lora", "ia3", "prompt", "prefix", "p_tuning_v2"),
}
FAST = {("gpt2", "ia3"), ("t5", "prompt")}
PAIRS = [
    *(("llama", method) for method in METHODS),
    *(
        pytest.param(family, method, marks=() if (family, method) in FAST else pytest.mark.slow)
        for family, methods in OTHERS.items()
        for method in methods
    ),
]


@pytest.fixture(scope="module")
def texts(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Train a tokenizer with sentinel tokens."""
    from jingu.data.build import build
    from jingu.text.tokenizer_commands import train

    place = tmp_path_factory.mktemp("texts")
    result = Library(library.text, place / "tokenizer", place / "data")
    config = tiny(result, place, {"data.objective": SPANS, "tokenizer.vocab_size": 397})
    train(config)
    build(config)
    return result


def adapted(family: str, method: str, runs: Path, texts: Library, changes: dict[str, Any] | None = None) -> RunConfig:
    """Return the configuration of a run of a method, starting from `runs/FAMILY`."""
    saved = {"data.objective": SPANS} if family == "t5" else {}
    plain = {
        "model": {},
        "model.max_position_embeddings": None,
        "initialize": {"from": str(runs / family)},
        "tune": {**METHODS.get(method, {})},
    }
    rate = RATES.get((family, method), 3e-2)
    settings = {
        **saved,
        **plain,
        "train.steps": 12,
        "optimizer.lr": rate,
        "checkpoint": {"every": 1, "keep_last": 12, "async_save": False},
    }
    settings |= changes or {}
    return tiny(texts, runs, {**settings, "name": f"{family}-{method}"})


@pytest.fixture(scope="module")
def runs(texts: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of each family, with room for a prompt in its context."""
    from jingu.training.commands import train

    place = tmp_path_factory.mktemp("methods")
    with peak_unmeasured():
        for family, changes in FAMILIES.items():
            train(
                tiny(texts, place, {**changes, "model.max_position_embeddings": 64, "train.steps": 12, "name": family})
            )
    return place


def prepared(stored: StoredModel, dtype: torch.dtype = torch.float32) -> tuple[Any, Inputs]:
    """Return a model and its inputs: text after its prompt."""
    model, spec = load_model(stored, dtype), stored.spec
    value = torch.tensor([spec.prompted(row) for row in TOKENS.tolist()])
    if spec.num_encoder_layers is None:
        return model, Inputs(value)
    source = torch.tensor([spec.prompted(row, encoder=True) for row in TOKENS.flip(1).tolist()])
    return model, Inputs(value, source=Inputs(source))


@torch.no_grad()
def logits(stored: StoredModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits of the text without its prompt."""
    model, inputs = prepared(stored, dtype)
    result: torch.Tensor = model.logits(model(inputs))
    return result[:, -TOKENS.shape[1] :]


@torch.no_grad()
def mean_loss(stored: StoredModel, config: RunConfig) -> float:
    """Return the mean loss over the batches that a run was trained on."""
    run, model = open_run(config), load_model(stored, torch.float64)
    losses = []
    for step in range(config.train.steps):
        batch = prepend_virtual_tokens(batch_function(run.source, run.objective)(step, 0, 8), stored.spec)
        scores = model.logits(model(model_inputs(batch))).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(scores, batch.labels.flatten()).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def theirs(model: Any, encodes: bool) -> torch.Tensor:
    value = {"input_ids": TOKENS.flip(1), "decoder_input_ids": TOKENS} if encodes else {"input_ids": TOKENS}
    result: torch.Tensor = model.eval()(**value).logits
    return result[:, -TOKENS.shape[1] :]


def their_base(folder: Path, encodes: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return (AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM).from_pretrained(folder)


def beside(run: Path) -> StoredModel:
    """Return a run's base with unmerged adapters."""
    own, base, _ = open_adapter_run(run)
    return StoredModel(own.spec, lambda name: (own if is_adapter(name) else base).read(name), None, run)


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_methods_learn_and_exchange_files_with_peft(
    family: str, method: str, runs: Path, texts: Library, train_on: Train, done: Read, tmp_path: Path, monkeypatch: Any
) -> None:
    from peft import PeftModel
    from transformers import T5ForConditionalGeneration

    encodes = family == "t5"
    if encodes and method not in LEAVES:  # a method that peft looks for, and that releases after 5.20 have no more
        monkeypatch.setattr(
            T5ForConditionalGeneration, "_prepare_encoder_decoder_kwargs_for_generation", None, raising=False
        )
    deep = {"tune.in_encoder": False} if encodes and method in ("prefix", "p_tuning_v2") else {}
    config = adapted(family, method, runs, texts, deep)
    train_on(1, config)
    run = runs / config.name
    steps = [step_folder(run / "checkpoints", step) for step in (1, 12)]
    before, after = (mean_loss(beside(step), config) for step in steps)
    assert after < before - 3e-4
    weights = [name.removeprefix("model/") for name in done(config).tensors() if name.startswith("model/")]
    assert weights and all(map(is_adapter, weights))
    if method in LEAVES:
        assert {name.rpartition(".")[2] for name in weights} == LEAVES[method]

    apart = logits(beside(run))
    assert (apart - logits(open_model(runs / family))).abs().max() > 1e-3
    torch.testing.assert_close(logits(open_model(run)), apart, rtol=1e-5, atol=1e-5)
    convert(runs / family, tmp_path / "hf", "fp32")
    export(run, tmp_path / "adapter")
    model = PeftModel.from_pretrained(their_base(tmp_path / "hf", encodes), tmp_path / "adapter")
    torch.testing.assert_close(theirs(model, encodes), apart, rtol=1e-4, atol=1e-4)

    model.save_pretrained(tmp_path / "again")
    base = open_model(tmp_path / "hf")
    # Experts, which this release of peft writes stacked, are read as releases before it wrote them.
    again = tmp_path / ("adapter" if family == "mixtral" else "again")
    loaded_tensors = apply_adapters(read_adapters(again, base), base)
    torch.testing.assert_close(logits(loaded_tensors), apart, rtol=1e-4, atol=1e-4)
    if method in LEAVES:
        merge(run, tmp_path / "merged")
        torch.testing.assert_close(logits(open_model(tmp_path / "merged")), apart, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(JinguError, match="which cannot be merged into weights"):
            merge(run, tmp_path / "merged")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_only_trained_parameters_have_gradients(
    family: str, method: str, runs: Path, texts: Library, tmp_path: Path
) -> None:
    spec = open_run(adapted(family, method, runs, texts, {"runs_dir": str(tmp_path)})).spec
    torch.manual_seed(0)
    model = build_model(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    stored = StoredModel(spec, dict(model.named_parameters()).__getitem__, None, runs)
    _, inputs = prepared(stored)
    model.logits(model(inputs)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == is_adapter(name), name
        assert parameter.grad is None or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_methods_with_activation_checkpointing_and_disk_offload(
    family: str, method: str, runs: Path, texts: Library, train_on: Train, done: Read, tmp_path: Path
) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    (place / family).symlink_to(runs / family)
    changes = {"train.steps": 4, "checkpoint.every": 2, "tune.dropout": 0.2} if method == "lora" else {"train.steps": 4}
    config = adapted(family, method, place, texts, changes)
    train_on(1, config)
    response = done(config)
    losses, tensors = response.column("loss"), response.tensors()
    for step in (3, 4):
        shutil.rmtree(step_folder(response.folder / "checkpoints", step), ignore_errors=True)
    again = {"train.activation_checkpointing.type": "full", "parallel.offload.type": "disk"}
    train_on(1, adapted(family, method, place, texts, {**changes, **again}))
    assert done(config).column("loss") == losses
    result = done(config).tensors()
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(result[name], tensor), name


@pytest.mark.parametrize(("family", "method"), [("llama", "prompt"), ("bloom", "prefix"), ("t5", "p_tuning_v2")])
def test_generation_with_a_trained_prompt(
    family: str, method: str, runs: Path, texts: Library, train_on: Train, tmp_path: Path
) -> None:
    """The engine with its KV cache equals repeated forward passes without."""
    place = tmp_path / "runs"
    place.mkdir()
    (place / family).symlink_to(runs / family)
    prompts = {"evaluation": {"every": 4, "sample_prompts": ["def heappop"], "max_new_tokens": 6}}
    config = adapted(family, method, place, texts, {**prompts, "train.steps": 4})
    train_on(1, config)
    stored = open_model(place / config.name)
    tokenizer, model, spec = Tokenizer.load(stored.tokenizer()), load_model(stored, torch.float64), stored.spec
    loaded_tensors = tokenizer.encode("def heappop", parse_special_tokens=family == "t5")
    ids = loaded_tensors
    source = None
    if family == "t5":
        ids = [tokenizer.decoder_start_token_id]
        source = Inputs(torch.tensor([spec.prompted([*loaded_tensors, tokenizer.eos_token_id], encoder=True)]))
    for _ in range(6):
        with torch.no_grad():
            scores = model.logits(model(Inputs(torch.tensor([spec.prompted(ids)]), source=source)))[0, -1]
        ids = [*ids, int(scores.argmax())]
    written = ids[1:] if family == "t5" else ids[len(loaded_tensors) :]
    ends = written.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in written else None
    engine = Engine(load(place / config.name, "fp64"))
    [text] = engine.generate([Request(engine.model.encode("def heappop"), SamplingParams(), 6)])
    assert text == tokenizer.decode(written[:ends], keep_special_tokens=family == "t5")
    again = Request(engine.model.encode("def heappop"), SamplingParams(repetition_penalty=1.2, logit_bias={9: 1.0}), 3)
    assert engine.generate([again, again])[0] == engine.generate([again])[0]
    assert Done(place / config.name).lines("sample")


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_unmerging_is_exact_or_refused(
    method: str, runs: Path, texts: Library, train_on: Train, tmp_path: Path
) -> None:
    config = adapted("llama", method, runs, texts, {"runs_dir": str(tmp_path)})
    train_on(1, config)
    export(tmp_path / config.name, tmp_path / "adapter")
    convert(runs / "llama", tmp_path / "base", "bf16")
    for dtype in ("fp32", "bf16"):
        merge(tmp_path / "adapter", tmp_path / dtype, tmp_path / "base", dtype)
    unmerge(tmp_path / "fp32", tmp_path / "back", tmp_path / config.name, "bf16")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    with pytest.raises(JinguError, match="cannot be restored"):
        unmerge(tmp_path / "bf16", tmp_path / "other", tmp_path / "adapter")


def test_prompts_start_from_text_or_another_adapter(
    runs: Path, texts: Library, train_on: Train, tmp_path: Path
) -> None:
    """A learning rate near zero leaves the adapters at their initial values."""
    still = {"train.steps": 1, "optimizer.lr": 1e-30}
    config = adapted("llama", "prompt", runs, texts, {"runs_dir": str(tmp_path), **still})
    train_on(1, config)
    ids = Tokenizer.load(texts.tokenizer).encode("def f(x): return")
    rows = open_model(runs / "llama").read("embedding.weight")[torch.tensor([*ids, *ids])[:5]]
    torch.testing.assert_close(open_model(tmp_path / config.name).read("prompt.embedding.weight"), rows)
    for method in ("p_tuning_mlp", "dora"):
        first = adapted("llama", method, runs, texts, {"runs_dir": str(tmp_path), "train.steps": 3})
        changes = {"runs_dir": str(tmp_path / "second"), "tune.initial_adapter": str(tmp_path / first.name), **still}
        second = adapted("llama", method, runs, texts, changes)
        train_on(1, first, second)
        one, two = (open_adapter_run(Path(config.runs_dir) / config.name)[0] for config in (first, second))
        for name in filter(is_adapter, parameter_shapes(one.spec)):
            torch.testing.assert_close(two.read(name), one.read(name), rtol=1e-12, atol=1e-12)
    export(tmp_path / "llama-dora", tmp_path / "adapter")
    changes = {"runs_dir": str(tmp_path / "third"), "tune.initial_adapter": str(tmp_path / "adapter"), **still}
    third = adapted("llama", "dora", runs, texts, changes)
    train_on(1, third)
    torch.testing.assert_close(
        logits(beside(tmp_path / "third" / third.name)), logits(beside(tmp_path / "llama-dora")), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(JinguError, match="of another kind, or for other modules"):
        train_on(1, adapted("llama", "lora", runs, texts, {**changes, "runs_dir": str(tmp_path / "fourth")}))


def test_training_the_last_layers(runs: Path, texts: Library, train_on: Train, done: Read) -> None:
    """Train the last block without its norms, also in a pipeline whose first stage trains nothing."""
    tune = {"type": "full", "num_trainable_layers": 1, "freeze": ["*norm.weight"]}
    changes = {"tune": tune, "optimizer.lr": 1e-2, "train.steps": 3}
    config = adapted("llama", "full", runs, texts, changes)
    train_on(1, config)
    base, tensors = open_model(runs / "llama"), done(config).tensors()
    trained = {
        name for name in parameter_shapes(base.spec) if not torch.equal(base.read(name), tensors[f"model/{name}"])
    }
    expected = {name for name in parameter_shapes(base.spec) if name.startswith(("blocks.1.", "head"))}
    assert trained == {name for name in expected if "norm" not in name}
    assert {name.removeprefix("optimizer/exp_avg/") for name in tensors if "/exp_avg/" in name} == trained
    assert open_model(runs / config.name).spec == base.spec
    piped = adapted("llama", "piped", runs, texts, {**changes, "parallel.pipeline": 2})
    train_on(2, piped)
    assert done(piped).column("loss") == pytest.approx(done(config).column("loss"), rel=1e-9)
    for wrong, message in (
        ({"freeze": ["embeding.*"]}, "no parameter of the model matches embeding"),
        ({"num_trainable_layers": 3}, "the model has 2 blocks, not 3"),
        ({"freeze": ["*"]}, "all parameters of the model are frozen"),
    ):
        with pytest.raises(JinguError, match=message):
            open_run(adapted("llama", "wrong", runs, texts, {"tune": {"type": "full", **wrong}}))


def test_errors(runs: Path, texts: Library) -> None:
    for method, changes, message in (
        ("prompt", {"tune.position": "back"}, "whose prompt must stand before the text"),
        (
            "prompt",
            {"tune.num_virtual_tokens": 32},
            "32 virtual tokens and sequences of 33 are more than the model's context",
        ),
        ("ia3", {"tune.target_modules": ["*.gate_proj"]}, r"no matrix of the model has a name like \*\.gate_proj"),
        ("lora", {"initialize": {}}, "the run starts from random weights"),
    ):
        with pytest.raises(JinguError, match=message):
            open_run(adapted("llama", method, runs, texts, {**changes, "runs_dir": str(runs / "wrong")}))


@pytest.mark.slow
def test_tuning_a_transformers_folder_on_four_stages(
    texts: Library, train_on: Train, done: Read, tmp_path: Path
) -> None:
    """Train all weights of a folder that transformers wrote; a pipeline of four ranks equals one process."""
    from transformers import AutoModelForCausalLM

    train_on(1, tiny(texts, tmp_path, {"name": "base", "model.num_layers": 4, "train.steps": 2}))
    convert(tmp_path / "base", tmp_path / "first", "fp32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "hf")
    plain = {"model": {}, "initialize": {"from": str(tmp_path / "hf")}, "train.steps": 4}
    alone = tiny(texts, tmp_path, {**plain, "name": "alone"})
    staged = tiny(texts, tmp_path, {**plain, "name": "staged", "parallel.pipeline": 4})
    train_on(1, alone)
    train_on(4, staged)
    assert done(staged).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-9)
    convert(tmp_path / "staged", tmp_path / "tuned", "fp32")
    result = theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"), encodes=False)
    torch.testing.assert_close(result, logits(open_model(tmp_path / "alone")), rtol=1e-4, atol=1e-4)
    before = theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), encodes=False)
    assert (result - before).abs().max() > 1e-3
