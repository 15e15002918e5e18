"""What must hold for every family of transformers: gradients, batches, documents, generation, adapters, layouts, files.

The models are those of `test_tabled_families.CONFIGS`, and some of the families with a module of their own. A line that
is added there is proved here, too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf, spec_from_config
from jingu.formats.peft import read_adapters
from jingu.formats.peft_export import write_adapters
from jingu.formats.stored_model import StoredModel, apply_adapters, load_model
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.adapter_specs import Lora
from jingu.model.components import LongropeScaling
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.inputs import Inputs
from jingu.model.mixer_specs import StateSpace
from jingu.model.spec import ModelSpec
from jingu.model.weight_init import initial_tensor
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.training.loss import linear_cross_entropy
from tests.dist.test_layouts import check
from tests.parity import test_components as components
from tests.parity import test_layer_kinds as layer_kinds
from tests.parity.fp64 import fp64_in_place_of_fp32, randomize
from tests.parity.test_tabled_families import CONFIGS, check_rounding, rounds_widely
from tests.rank_pool import RankPool

LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 2.5, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "original_max_position_embeddings": 12}
BLOCKS = {"vocab_size": 317, "n_layer": 5, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
# Families that are not tables, and positions that depend on the length of a text, whose rows here are longer.
MORE: dict[str, Callable[[], Any]] = {
    "llama": lambda: components.config("Llama", attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "llama-dynamic": lambda: components.config("Llama", rope_parameters={**DYNAMIC, "rope_theta": 50.0, "factor": 2.5}),
    "mistral": lambda: components.config("Mistral", sliding_window=7, head_dim=20),
    "qwen2": lambda: layer_kinds.qwen2()[0],
    "qwen3": lambda: components.config("Qwen3", head_dim=22, tie_word_embeddings=True),
    "qwen3-windows": lambda: components.config("Qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "glm": lambda: components.config("Glm", head_dim=12),
    "gpt2": lambda: transformers.GPT2Config(n_embd=48, n_inner=50, n_positions=96, **BLOCKS, **NO_DROPOUT),
    "bloom": lambda: transformers.BloomConfig(hidden_size=48, seq_length=96, **BLOCKS),
    "mixtral": lambda: components.config("Mixtral", num_local_experts=5, sliding_window=7),
    "phi3-long": lambda: components.phi3(original=9)[0],
    "qwen3_moe": lambda: components.config("Qwen3Moe", **layer_kinds.EXPERTS, head_dim=22),
}
CASES = {**CONFIGS, **MORE}
# transformers has no class of these, or they have an encoder: `test_transformers.py` and `test_encoder_decoder.py`.
ELSEWHERE = {"baichuan2", "chatglm3", "cpm2", "internlm3", "t5", "mt5"}
LENGTHS = (41, 29, 3, 17)
LONGEST = 41
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Pair:
    """A model of transformers in fp32 with random parameters, and its folder."""

    name: str
    folder: Path
    theirs: Any
    stored: StoredModel

    @property
    def spec(self) -> ModelSpec:
        return self.stored.spec

    def ours(self, dtype: torch.dtype) -> Decoder:
        return load_model(self.stored, dtype)


def model_class(name: str) -> Any:
    """Return transformers' class of a case; AutoModelForCausalLM does not know all classes."""
    return getattr(transformers, FAMILIES[name.partition("-")[0]].architectures[0])


def build(name: str) -> Any:
    """Return transformers' model of a case."""
    return model_class(name)._from_config(CASES[name](), dtype=torch.get_default_dtype(), **layer_kinds.EAGER)


def read_by_transformers(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return transformers' model of a folder, and what it reports of the tensors."""
    dtype = torch.get_default_dtype()
    return model_class(name).from_pretrained(folder, output_loading_info=True, dtype=dtype, **layer_kinds.EAGER)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(len(request.param))
    theirs = randomize(build(request.param), torch.float32, 0.1)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return Pair(request.param, folder, theirs, open_hf(folder))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"]).save(folder)
    return folder


def texts() -> list[Tensor]:
    """Return sequences [T] of different lengths, the first of which is longer than every window."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(components.VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def labels_of(ids: Tensor) -> Tensor:
    """Return the next tokens, of which some are not trained."""
    labels = torch.cat([ids[1:], ids.new_tensor([-100])])
    labels[::5] = -100
    return labels


def loss_of(model: Decoder, inputs: Inputs, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all tokens."""
    softcap = model.spec.logit_softcap
    return model(inputs, loss=lambda states, head: linear_cross_entropy(states, head, labels, softcap=softcap))


def close(actual: Tensor, expected: Tensor, limit: float, what: object = "") -> None:
    difference = float((actual - expected).detach().abs().max() / expected.detach().std())
    assert difference < limit, (what, difference)


def same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """Compare by name, relative to each gradient. One that is zero but for rounding is compared with the largest."""
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        size = float(gradient.norm())
        difference = float((actual[name] - gradient).norm())
        assert difference <= limit * (size if size > 1e-6 * largest else largest), (name, difference, size, largest)


def gradients(model: Decoder) -> dict[str, Tensor]:
    """Return the gradients by name; those of experts that no token has chosen are zero. Corrections have none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def their_gradients(theirs: Any, name: str, folder: Path) -> dict[str, Tensor]:
    """Return the gradients of transformers' parameters by jingu's names: through files, as if they were weights."""
    holder = build(name).to(theirs.dtype)
    with torch.no_grad():
        for target, source in zip(holder.parameters(), theirs.parameters(), strict=True):
            target.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    holder.save_pretrained(folder)
    stored = open_hf(folder)
    # Corrections of router scores and scales of layers are buffers of transformers.
    buffers = ("correction.weight", ".scale.weight")
    names = [key for key in parameter_shapes(stored.spec) if not key.endswith(buffers)]
    return {key: stored.read(key).to(theirs.dtype) for key in names}


@contextlib.contextmanager
def exact(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers' model compute in fp64 throughout."""
    with exact_class(type(pair.theirs), monkeypatch):
        yield


@contextlib.contextmanager
def exact_class(model: type, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let models of a class of transformers compute in fp64 throughout."""
    # The folder of the modules is not always named as the model type.
    modules = model.__module__.split(".")[2]
    with monkeypatch.context() as patch, fp64_in_place_of_fp32(patch, modules) as replacement:
        patch.setattr(transformers.modeling_rope_utils, "torch", replacement)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        # Its constants have eight digits.
        gelu = partial(torch.nn.GELU, approximate="tanh")
        patch.setattr(transformers.models.bloom.modeling_bloom, "BloomGelu", gelu)
        yield


def test_every_family_has_a_case() -> None:
    assert {name.partition("-")[0] for name in CASES} == FAMILIES.keys() - ELSEWHERE


# The values of transformers' own classes are not those of a model.
NO_MODEL = {"granitemoeshared", "glm4_moe", "dots1", "deepseek_v2"}


@pytest.mark.parametrize("name", [name for name in CASES if "-" not in name and name not in NO_MODEL])
def test_an_empty_config_has_the_values_of_transformers(name: str) -> None:
    """If this fails, `sizes` and `defaults` of the family's table lack keys of the class, or have other values."""
    family = FAMILIES[name]
    theirs = type(CASES[name]())().to_dict()
    assert family.spec_from_hf(family.complete({}, is_part=True)) == read_complete(name, theirs)


def read_complete(name: str, config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a config that transformers wrote. Some classes have no key of the context length."""
    family = FAMILIES[name.partition("-")[0]]
    return family.spec_from_hf(family.complete(config, is_part=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_absent_key_has_the_value_of_transformers(name: str) -> None:
    """Sizes are required."""
    config = CASES[name]()
    keys = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    family = FAMILIES[name.partition("-")[0]]
    compared = 0
    for key in keys:
        others = {name: value for name, value in keys.items() if name != key}
        try:
            expected = read_complete(name, type(config)(**others).to_dict())
            spec = family.spec_from_hf(family.complete(others, is_part=False))
        except Exception:  # transformers' classes raise any
            continue
        assert spec == expected, key
        compared += 1
    assert compared > 10


# From published files: transformers 4 leaves out of nested configs what is equal to the defaults.
GEMMA_3_4B = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
LLAVA_1_5 = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
COMPOSITE = [
    ("Gemma3ForConditionalGeneration", transformers.Gemma3TextConfig, GEMMA_3_4B),
    ("LlavaForConditionalGeneration", transformers.LlamaConfig, LLAVA_1_5),
]


@pytest.mark.parametrize(("architecture", "kind", "text"), COMPOSITE, ids=[name for name, _, _ in COMPOSITE])
def test_the_short_config_of_a_composite_model(
    architecture: str, kind: Any, text: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    theirs = kind(**{key: value for key, value in text.items() if key != "model_type"})
    assert spec_from_config(path) == FAMILIES[text["model_type"]].spec_from_hf(theirs.to_dict())
    path.write_text(json.dumps({**text, "architectures": FAMILIES[text["model_type"]].architectures}))
    with pytest.raises(JinguError, match="the model's config lacks"):
        spec_from_config(path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_loss_and_gradients(pair: Pair, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    ids = torch.stack([texts()[0], texts()[0].flip(0)])
    labels = torch.stack([labels_of(row) for row in ids])

    def reference() -> tuple[Tensor, dict[str, Tensor]]:
        theirs = build(pair.name)
        theirs.load_state_dict(pair.theirs.state_dict())
        logits = theirs.to(dtype).eval()(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        return loss.detach(), their_gradients(theirs, pair.name, tmp_path / "gradients")

    rounded: dict[str, Tensor] = {}
    if dtype == torch.float32 and rounds_widely(pair.spec):
        # Gradients in transformers have larger errors of rounding: compare both with fp64.
        _, rounded = reference()
        dtype = torch.float64
    with contextlib.nullcontext() if dtype == torch.float32 else exact(pair, monkeypatch):
        expected_loss, expected = reference()
    if rounded:
        dtype = torch.float32
    ours = pair.ours(dtype).train()
    loss = loss_of(ours, Inputs(ids), labels)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected_loss), rel=limit)
    if not rounded:
        same_gradients(gradients(ours), expected, limit)
    if rounded:
        check_all_rounding(gradients(ours), rounded, expected)


def check_all_rounding(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Check every gradient; those of few elements together, since a few numbers may be near by luck."""
    few = {name for name, gradient in theirs.items() if gradient.numel() < 16}
    for name in theirs.keys() - few:
        check_rounding(ours[name], theirs[name], exact[name])
    if few:
        check_rounding(*(torch.cat([side[name].flatten() for name in sorted(few)]) for side in (ours, theirs, exact)))


def alone(model: Decoder, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits [T, V] of one sequence and the gradients of its loss."""
    model.zero_grad()
    loss_of(model, Inputs(ids[None]), labels_of(ids)[None]).backward()
    with torch.no_grad():
        return model.logits(model(ids[None]))[0], gradients(model)


def each_alone(model: Decoder) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the logits of each sequence by itself, and the sum of the gradients."""
    results = [alone(model, ids) for ids in texts()]
    names = results[0][1]
    return [logits for logits, _ in results], {
        name: torch.stack([g[name] for _, g in results]).sum(0) for name in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_sequences_together_equal_each_alone(pair: Pair, packed: bool) -> None:
    """As rows of one batch, padded to the longest; and as documents of one row."""
    model = pair.ours(torch.float64)
    expected, expected_gradients = each_alone(model)
    model.zero_grad()
    if packed:
        ids = torch.cat(texts())[None]
        labels = torch.cat([labels_of(row) for row in texts()])[None]
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        documents = torch.cat([torch.full((length,), number) for number, length in enumerate(LENGTHS)])[None]
        inputs = Inputs(ids, positions=positions, documents=documents)
    else:
        pad = torch.nn.utils.rnn.pad_sequence
        documents = pad([torch.zeros_like(row) for row in texts()], batch_first=True, padding_value=-1)
        inputs = Inputs(pad(texts(), batch_first=True), documents=documents)
        labels = pad([labels_of(row) for row in texts()], batch_first=True, padding_value=-100)
    loss_of(model, inputs, labels).backward()
    with torch.no_grad():
        logits = model.logits(model(inputs))
    parts = logits[0].split(LENGTHS) if packed else [row[:length] for row, length in zip(logits, LENGTHS, strict=True)]
    for number, (part, own) in enumerate(zip(parts, expected, strict=True)):
        close(part, own, 1e-10, number)
    same_gradients(gradients(model), expected_gradients, 1e-10)


def context_limit(spec: ModelSpec) -> int:
    """Return up to which length a cached text has the numbers of an uncached one: longrope changes its frequencies."""
    scalings = [getattr(layer.position, "scaling", None) for layer in spec.kinds]
    originals = [s.original_max_position_embeddings for s in scalings if isinstance(s, LongropeScaling)]
    return min(originals, default=spec.max_position_embeddings)


@pytest.mark.slow
def test_generation_in_a_batch_equals_one_by_one_uncached_and_transformers(pair: Pair, tokenizer: Path) -> None:
    """Past the window, in pieces of a few tokens, with requests of different lengths at once."""
    limit = context_limit(pair.spec)
    num_tokens = min(24, limit // 2)
    prompts = [tuple(ids[: limit - num_tokens - 1].tolist()) for ids in texts()]
    model = InferenceModel(pair.ours(torch.float32), pair.spec, Tokenizer.load(tokenizer))
    requests = [Request(prompt, GREEDY, num_tokens, ignore_eos=True) for prompt in prompts]
    settings = EngineSettings(max_num_seqs=3, block_size=4, prefill_chunk_size=5)
    together = generate(Engine(model, settings), requests)
    # With a cache, transformers ignores the limits of the steps of state spaces.
    has_limits = any(
        isinstance(layer.mixer, StateSpace) and layer.mixer.step_limits != (0.0, None) for layer in pair.spec.layers
    )
    for prompt, request, chosen in zip(prompts, requests, together, strict=True):
        assert generate(Engine(model), [request]) == [chosen]
        text = pair.theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=not has_limits,
        )
        assert text[0, len(prompt) :].tolist() == chosen
        with torch.no_grad():
            uncached = model.module.logits(model.module(text))[0].argmax(-1)
        assert uncached[len(prompt) - 1 : -1].tolist() == chosen


def generate(engine: Engine, requests: list[Request]) -> list[list[int]]:
    return [[event.token.id for event in events if event.token] for events in engine.run(requests)]


def adapter_targets(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return patterns of the modules to adapt: all; with experts also sets that peft reads in more families."""
    everything = (
        "*attention.*",
        *["*.mixer.*"] * spec.has_state,
        "*.feed_forward.*",
        "embedding",
        *["head"] * (not spec.tie_word_embeddings),
    )
    if spec.experts is None and not FAMILIES[spec.family].peft_refused:
        return {"all": everything}
    if spec.experts is None:
        inputs = "*.mixer.[!o]*"
        return {"all": everything, "all that peft adapts": tuple(p.replace("*.mixer.*", inputs) for p in everything)}
    experts = [name.removesuffix(".weight") for name, shape in parameter_shapes(spec).items() if len(shape) == 3]
    return {
        "all": everything,
        "attention and experts": ("*attention.*", *(name for name in experts if not name.endswith("bias"))),
        "queries and outputs": ("*.attention.q", "*.attention.output"),
    }


def train_adapter(pair: Pair, targets: tuple[str, ...], ids: Tensor) -> tuple[StoredModel, Tensor]:
    """Return an adapter after two steps, and the logits [1, T, V] with it."""
    spec = pair.spec.model_copy(update={"adapter": Lora(rank=3, alpha=6.0, target_modules=targets)})
    base_names = parameter_shapes(pair.spec)
    shapes = parameter_shapes(spec)

    def read(name: str, expert: int | None = None) -> Tensor:
        if name in base_names:
            return pair.stored.read(name, expert)
        return initial_tensor(name, shapes[name], spec, 3)

    model = load_model(StoredModel(spec, read, None, pair.folder), torch.float64).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.03)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, Inputs(ids), labels_of(ids[0])[None]).backward()
        optimizer.step()
    state = {name: value for name, value in model.state_dict().items() if name not in base_names}

    def read_state(name: str, expert: int | None = None) -> Tensor:
        return state[name] if expert is None else state[name][expert]

    with torch.no_grad():
        return StoredModel(spec, read_state, None, pair.folder), model.eval().logits(model(ids))


@pytest.mark.slow
def test_a_trained_adapter_in_peft_and_back(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of mixtures that peft does not read are refused when they are written."""
    from peft import PeftModel

    ids = texts()[0][None]
    with torch.no_grad():
        plain = pair.theirs(ids).logits
    written = []
    for name, targets in adapter_targets(pair.spec).items():
        adapters, expected = train_adapter(pair, targets, ids)
        folder = tmp_path / name
        try:
            write_adapters(adapters, pair.stored, pair.folder, folder)
        except JinguError as error:
            is_refused = "peft refuses adapters of" in error.what and FAMILIES[pair.spec.family].peft_refused
            assert is_refused or (pair.spec.experts is not None and "peft cannot load an adapter of" in error.what)
            continue
        written.append(name)
        with torch.no_grad(), exact(pair, monkeypatch):
            base = read_by_transformers(pair.name, pair.folder)[0]
            close(PeftModel.from_pretrained(base, folder).double().eval()(ids).logits, expected, 1e-9, name)
        with torch.no_grad():
            back = load_model(apply_adapters(read_adapters(folder, pair.stored), pair.stored), torch.float64)
            # The merged weights have the dtype of the files.
            close(back.logits(back(ids)), expected, 1e-5, name)
        assert float((expected - plain).abs().max()) > 0.01 * float(plain.std())
    assert {"all", "all that peft adapts", "queries and outputs"} & set(written)
    assert not FAMILIES[pair.spec.family].has_peft_experts or pair.spec.family == "afmoe" or len(written) > 1


@pytest.mark.slow
def test_layouts_equal_one_rank(pair: Pair, ranks: RankPool) -> None:
    """ZeRO 3 and a pipeline over two ranks; tensor and context parallelism over as many as divide the heads."""
    counts = [layer.attention.num_heads for layer in pair.spec.kinds if layer.has_attention]
    heads = min(counts or [layer.state_mixer.heads[1] for layer in pair.spec.kinds if layer.state_mixer])
    world = next(number for number in range(2, heads + 1) if heads % number == 0)
    # Layers that share keys and values, or have inputs of their own, are not divided into stages.
    has_stages = not pair.spec.has_shared_kv and pair.spec.per_layer_inputs is None
    layouts: list[dict[str, Any]] = [{"zero_stage": 3}, *[{"pipeline": 2}] * has_stages]
    check(ranks, pair.spec, 2, layouts, documents=True, weights=pair.folder)
    layouts = [{"tensor": world}]
    if not pair.spec.has_state:
        layouts += [{"context": world}, {"context": world, "context_method": "ring"}]
    check(ranks, pair.spec, world, layouts, weights=pair.folder)


@pytest.mark.slow
def test_export_restores_the_folder(pair: Pair, tokenizer: Path, tmp_path: Path) -> None:
    export_hf(pair.spec, pair.stored.read, tokenizer, tmp_path / "out")
    theirs, ours = stored_tensors(pair.folder), stored_tensors(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype, name
    model, notes = read_by_transformers(pair.name, tmp_path / "out")
    assert not any(notes[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = texts()[0][None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, pair.theirs(ids).logits)
    assert open_hf(tmp_path / "out").spec == pair.spec


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors
