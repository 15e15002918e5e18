"""Every way of tuning a part of a model or beside it: what is trained, peft's files both ways, merging, layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.hub import OpenModel, load_model, open_model, open_run_apart, with_adapters
from jingu.checkpoint.peft import read_adapters
from jingu.checkpoint.resume import step_folder
from jingu.checkpoint.verbs import convert
from jingu.config.schema import RunConfig
from jingu.data.objective import batches
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.load import load
from jingu.infer.request import Request
from jingu.infer.sampling import Sampling
from jingu.model.adapters import is_adapter
from jingu.model.decoder import make_model, parameter_shapes
from jingu.text.tokenizer import Tokenizer
from jingu.train.run import open_run
from jingu.train.task import prompted
from jingu.tune.adapters import export, merge, unmerge
from tests.conftest import Done, Library, peak_unmeasured, tiny

TOKENS = torch.arange(5, 29).view(2, 12)
Train = Callable[..., None]
Read = Callable[[RunConfig], Done]

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "rank": 3, "alpha": 6.0},
    "dora": {"type": "lora", "rank": 3, "dora": True, "rank_stabilised": True},
    "ia3": {"type": "ia3"},
    "prompt": {"type": "prompt", "length": 5, "initial_text": "def f(x): return"},
    "p_tuning_mlp": {"type": "p_tuning", "length": 5, "hidden": 24},
    "p_tuning_lstm": {"type": "p_tuning", "length": 5, "encoder": "lstm", "hidden": 24},
    "prefix": {"type": "prefix", "length": 5, "hidden": 24},
    "p_tuning_v2": {"type": "p_tuning_v2", "length": 5},
}
LEAVES = {
    "lora": {"lora_a", "lora_b"},
    "dora": {"lora_a", "lora_b", "lora_m"},
    "ia3": {"ia3_in", "ia3_out"},
}
SPANS = {"type": "span_corruption", "rate": 0.25, "mean_length": 2.5, "sentinels": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"model.family": "gpt2", "model.kv_heads": None},
    "bloom": {"model.family": "bloom", "model.kv_heads": None, "model.feed_forward": None},
    "qwen3": {"model.family": "qwen3"},
    "mixtral": {"model.family": "mixtral", "model.feed_forward": 24, "model.experts.number": 4},
    "t5": {
        "model.family": "t5",
        "model.kv_heads": None,
        "model.encoder_layers": 2,
        "model.head_size": 9,
        "data.objective": SPANS,
    },
}
RATES = {
    ("llama", "lora"): 4e-3,
    ("llama", "prompt"): 3e-3,
    ("t5", "prompt"): 0.3,
    ("gpt2", "ia3"): 0.3,
    ("gpt2", "p_tuning_v2"): 0.1,
}
"""Other than the usual one, for vectors that begin much smaller or larger."""
OTHERS = {
    "gpt2": ("dora", "ia3", "p_tuning_v2"),
    "bloom": ("dora", "ia3", "prefix"),
    "qwen3": ("p_tuning_v2",),
    "mixtral": ("lora",),
    "t5": ("lora", "ia3", "prompt", "prefix", "p_tuning_v2"),
}
FAST = {("bloom", "dora"), ("gpt2", "ia3"), ("t5", "prompt")}
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
    """With sentinels among the pieces."""
    from jingu.data.build import build
    from jingu.text.verbs import train

    place = tmp_path_factory.mktemp("texts")
    found = Library(library.text, place / "tokenizer", place / "data")
    config = tiny(found, place, {"data.objective": SPANS, "tokenizer.vocabulary": 397})
    train(config)
    build(config)
    return found


def adapted(family: str, method: str, runs: Path, texts: Library, changes: dict[str, Any] | None = None) -> RunConfig:
    """A run of a method, beginning with `runs/FAMILY`."""
    kept = {"data.objective": SPANS} if family == "t5" else {}
    plain = {
        "model": {},
        "model.context": None,
        "initialize": {"from": str(runs / family)},
        "tune": {**METHODS.get(method, {})},
    }
    rate = RATES.get((family, method), 3e-2)
    settings = {**kept, **plain, "train.steps": 12, "optimizer.lr": rate, "checkpoint": {"every": 1, "keep": 12}}
    settings |= changes or {}
    return tiny(texts, runs, {**settings, "name": f"{family}-{method}"})


@pytest.fixture(scope="module")
def runs(texts: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each family, with room for a prompt in its context."""
    from jingu.train.verbs import train

    place = tmp_path_factory.mktemp("methods")
    with peak_unmeasured():
        for family, changes in FAMILIES.items():
            train(tiny(texts, place, {**changes, "model.context": 64, "train.steps": 12, "name": family}))
    return place


def prepared(opened: OpenModel, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and what it is given: text behind its prompt."""
    model, spec = load_model(opened, dtype), opened.spec
    given = torch.tensor([spec.prompted(row) for row in TOKENS.tolist()])
    if spec.encoder_layers is None:
        return model, {"tokens_BT": given}
    source = torch.tensor([spec.prompted(row, encoder=True) for row in TOKENS.flip(1).tolist()])
    return model, {"tokens_BT": given, "source_BS": source}


@torch.no_grad()
def logits(opened: OpenModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of the text alone."""
    model, given = prepared(opened, dtype)
    found: torch.Tensor = model.logits(model(**given))
    return found[:, -TOKENS.shape[1] :]


@torch.no_grad()
def mean_loss(opened: OpenModel, config: RunConfig) -> float:
    """Over the batches that a run was trained on."""
    run, model = open_run(config), load_model(opened, torch.float64)
    losses = []
    for step in range(config.train.steps):
        batch = prompted(batches(run.source, run.objective)(step, 0, 8), opened.spec)
        source = {} if batch.source is None else {"source_BS": batch.source.tokens}
        scores = model.logits(model(batch.tokens, batch.positions, batch.documents, **source)).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(scores, batch.labels.flatten()).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def theirs(model: Any, encodes: bool) -> torch.Tensor:
    given = {"input_ids": TOKENS.flip(1), "decoder_input_ids": TOKENS} if encodes else {"input_ids": TOKENS}
    found: torch.Tensor = model.eval()(**given).logits
    return found[:, -TOKENS.shape[1] :]


def their_base(folder: Path, encodes: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return (AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM).from_pretrained(folder)


def beside(run: Path) -> OpenModel:
    """A run's adapters and its base, unmerged."""
    own, base, _ = open_run_apart(run)
    return OpenModel(own.spec, lambda name: (own if is_adapter(name) else base).read(name), None, run)


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_a_method_learns_and_peft_reads_and_writes_its_files(
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
    loaded = PeftModel.from_pretrained(their_base(tmp_path / "hf", encodes), tmp_path / "adapter")
    torch.testing.assert_close(theirs(loaded, encodes), apart, rtol=1e-4, atol=1e-4)

    loaded.save_pretrained(tmp_path / "again")
    base = open_model(tmp_path / "hf")
    # Experts, which this release of peft writes stacked, are read as releases before it wrote them.
    again = tmp_path / ("adapter" if family == "mixtral" else "again")
    read = with_adapters(read_adapters(again, base), base)
    torch.testing.assert_close(logits(read), apart, rtol=1e-4, atol=1e-4)
    if method in LEAVES:
        merge(run, tmp_path / "merged")
        torch.testing.assert_close(logits(open_model(tmp_path / "merged")), apart, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(JinguError, match="which no weights can stand for"):
            merge(run, tmp_path / "merged")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_gradients_are_where_they_should_be(
    family: str, method: str, runs: Path, texts: Library, tmp_path: Path
) -> None:
    spec = open_run(adapted(family, method, runs, texts, {"runs": str(tmp_path)})).spec
    torch.manual_seed(0)
    model = make_model(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    opened = OpenModel(spec, dict(model.named_parameters()).__getitem__, None, runs)
    _, given = prepared(opened)
    model.logits(model(**given)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == is_adapter(name), name
        assert parameter.grad is None or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_method_goes_on_with_blocks_computed_again_and_its_state_on_disk(
    family: str, method: str, runs: Path, texts: Library, train_on: Train, done: Read, tmp_path: Path
) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    (place / family).symlink_to(runs / family)
    changes = {"train.steps": 4, "checkpoint.every": 2, "tune.dropout": 0.2} if method == "lora" else {"train.steps": 4}
    config = adapted(family, method, place, texts, changes)
    train_on(1, config)
    whole = done(config)
    losses, tensors = whole.column("loss"), whole.tensors()
    for step in (3, 4):
        shutil.rmtree(step_folder(whole.folder / "checkpoints", step), ignore_errors=True)
    again = {"train.activation_checkpointing.type": "full", "parallel.offload.type": "disk"}
    train_on(1, adapted(family, method, place, texts, {**changes, **again}))
    assert done(config).column("loss") == losses
    found = done(config).tensors()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("family", "method"), [("llama", "prompt"), ("bloom", "prefix"), ("t5", "p_tuning_v2")])
def test_a_run_with_a_prompt_writes_on(
    family: str, method: str, runs: Path, texts: Library, train_on: Train, tmp_path: Path
) -> None:
    """What the engine says, with its cache, is what one forward pass after another says without."""
    place = tmp_path / "runs"
    place.mkdir()
    (place / family).symlink_to(runs / family)
    prompts = {"evaluation": {"every": 4, "prompts": ["def heappop"], "prompt_tokens": 6}}
    config = adapted(family, method, place, texts, {**prompts, "train.steps": 4})
    train_on(1, config)
    opened = open_model(place / config.name)
    tokenizer, model, spec = Tokenizer.load(opened.tokenizer()), load_model(opened, torch.float64), opened.spec
    read = tokenizer.encode("def heappop", special=family == "t5")
    ids, more = read, {}
    if family == "t5":
        ids = [tokenizer.start_id]
        more = {"source_BS": torch.tensor([spec.prompted([*read, tokenizer.end_id], encoder=True)])}
    for _ in range(6):
        with torch.no_grad():
            scores = model.logits(model(torch.tensor([spec.prompted(ids)]), **more))[0, -1]
        ids = [*ids, int(scores.argmax())]
    written = ids[1:] if family == "t5" else ids[len(read) :]
    ends = written.index(tokenizer.end_id) if tokenizer.end_id in written else None
    engine = Engine(load(place / config.name, "fp64"))
    [text] = engine.run([Request(engine.loaded.encode("def heappop"), Sampling(), 6)])
    assert text == tokenizer.decode(written[:ends], special=family == "t5")
    again = Request(engine.loaded.encode("def heappop"), Sampling(repetition_penalty=1.2, logit_bias={9: 1.0}), 3)
    assert engine.run([again, again])[0] == engine.run([again])[0]
    assert Done(place / config.name).lines("sample")


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_a_merged_model_is_unmerged_exactly_where_the_numbers_tell(
    method: str, runs: Path, texts: Library, train_on: Train, tmp_path: Path
) -> None:
    config = adapted("llama", method, runs, texts, {"runs": str(tmp_path)})
    train_on(1, config)
    export(tmp_path / config.name, tmp_path / "adapter")
    convert(runs / "llama", tmp_path / "base", "bf16")
    for dtype in ("fp32", "bf16"):
        merge(tmp_path / "adapter", tmp_path / dtype, tmp_path / "base", dtype)
    unmerge(tmp_path / "fp32", tmp_path / "back", tmp_path / config.name, "bf16")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    with pytest.raises(JinguError, match="no longer tells what it was"):
        unmerge(tmp_path / "bf16", tmp_path / "other", tmp_path / "adapter")


def test_a_prompt_begins_with_a_text_or_with_another_task(
    runs: Path, texts: Library, train_on: Train, tmp_path: Path
) -> None:
    """A rate of nearly zero leaves the adapters where they begin."""
    still = {"train.steps": 1, "optimizer.lr": 1e-30}
    config = adapted("llama", "prompt", runs, texts, {"runs": str(tmp_path), **still})
    train_on(1, config)
    ids = Tokenizer.load(texts.tokenizer).encode("def f(x): return")
    rows = open_model(runs / "llama").read("embedding.weight")[torch.tensor([*ids, *ids])[:5]]
    torch.testing.assert_close(open_model(tmp_path / config.name).read("prompt.embedding.weight"), rows)
    for method in ("p_tuning_mlp", "dora"):
        first = adapted("llama", method, runs, texts, {"runs": str(tmp_path), "train.steps": 3})
        changes = {"runs": str(tmp_path / "second"), "tune.start": str(tmp_path / first.name), **still}
        second = adapted("llama", method, runs, texts, changes)
        train_on(1, first, second)
        one, two = (open_run_apart(Path(config.runs) / config.name)[0] for config in (first, second))
        for name in filter(is_adapter, parameter_shapes(one.spec)):
            torch.testing.assert_close(two.read(name), one.read(name), rtol=1e-12, atol=1e-12)
    export(tmp_path / "llama-dora", tmp_path / "adapter")
    changes = {"runs": str(tmp_path / "third"), "tune.start": str(tmp_path / "adapter"), **still}
    third = adapted("llama", "dora", runs, texts, changes)
    train_on(1, third)
    torch.testing.assert_close(
        logits(beside(tmp_path / "third" / third.name)), logits(beside(tmp_path / "llama-dora")), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(JinguError, match="of another kind or size"):
        train_on(1, adapted("llama", "lora", runs, texts, {**changes, "runs": str(tmp_path / "fourth")}))


def test_a_part_of_the_weights_is_trained(runs: Path, texts: Library, train_on: Train, done: Read) -> None:
    """The last block, but for its norms; in a pipeline whose first stage trains nothing it is the same."""
    tune = {"type": "full", "last": 1, "freeze": ["*norm.weight"]}
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
    for wrong, words in (
        ({"freeze": ["embeding.*"]}, "no weight of the model has a name like embeding"),
        ({"last": 3}, "the model has 2 blocks, not 3"),
        ({"freeze": ["*"]}, "nothing of the model is left"),
    ):
        with pytest.raises(JinguError, match=words):
            open_run(adapted("llama", "wrong", runs, texts, {"tune": {"type": "full", **wrong}}))


def test_mistakes(runs: Path, texts: Library) -> None:
    for method, changes, words in (
        ("prompt", {"tune.position": "back"}, "it can only stand in front"),
        ("prompt", {"tune.length": 32}, "a prompt of 32 tokens and sequences of 33 are more than the model's context"),
        ("ia3", {"tune.targets": ["*.gate_proj"]}, r"no matrix of the model has a name like \*\.gate_proj"),
        ("lora", {"initialize": {}}, "there is no model to begin with"),
    ):
        with pytest.raises(JinguError, match=words):
            open_run(adapted("llama", method, runs, texts, {**changes, "runs": str(runs / "wrong")}))


@pytest.mark.slow
def test_a_folder_of_transformers_is_tuned_on_four_stages_and_goes_back(
    texts: Library, train_on: Train, done: Read, tmp_path: Path
) -> None:
    """All weights, from a folder that transformers wrote; a pipeline of four ranks is the run of one process."""
    from transformers import AutoModelForCausalLM

    train_on(1, tiny(texts, tmp_path, {"name": "base", "model.layers": 4, "train.steps": 2}))
    convert(tmp_path / "base", tmp_path / "first", "fp32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "hf")
    plain = {"model": {}, "initialize": {"from": str(tmp_path / "hf")}, "train.steps": 4}
    alone = tiny(texts, tmp_path, {**plain, "name": "alone"})
    staged = tiny(texts, tmp_path, {**plain, "name": "staged", "parallel.pipeline": 4})
    train_on(1, alone)
    train_on(4, staged)
    assert done(staged).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-9)
    convert(tmp_path / "staged", tmp_path / "tuned", "fp32")
    found = theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"), encodes=False)
    torch.testing.assert_close(found, logits(open_model(tmp_path / "alone")), rtol=1e-4, atol=1e-4)
    before = theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), encodes=False)
    assert (found - before).abs().max() > 1e-3
