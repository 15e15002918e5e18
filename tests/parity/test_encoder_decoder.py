"""Encoder-decoders against transformers' T5 and mT5: logits, loss, gradients, greedy text; both ways through files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.model.attention import relative_buckets
from jingu.model.components import RelativeBias
from jingu.model.decoder import Decoder, build_model, parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.families.name_map import expand_rules, read_parameter
from jingu.model.feed_forward_specs import Experts, RandomProjectionRouter
from jingu.model.inputs import Inputs
from jingu.model.spec import replace_fields
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity.fp64 import fp64_in_place_of_fp32, randomize

# More source than the exact buckets hold, more than the largest distance: every kind of bucket is met.
SOURCE, TARGET = 41, 37


class Described:
    """CPM-2, which transformers does not carry, written down from its paper (arXiv 2106.10715) and the names and
    arithmetic of the code published with it: weights by those names, and a plain function of them and the tokens.

    Of the mixture: one expert a token, that with the largest score of a matrix that is never trained.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        self.config = SimpleNamespace(**config, to_dict=lambda: config)
        self.weights = {
            name: (0.2 * torch.randn(shape)).to(dtype).requires_grad_("centroids" not in name)
            for name, shape in cpm2_shapes(config).items()
        }

    def __call__(self, input_ids: Tensor, decoder_input_ids: Tensor, **_: Any) -> Any:
        c, w = self.config, self.weights
        states = self.stack("encoder", w["word_embeds.weight"][input_ids], c.num_layers, None)
        states = self.stack("decoder", w["word_embeds.weight"][decoder_input_ids], c.num_decoder_layers, states)
        return SimpleNamespace(logits=states @ w["lm_head.weight"].T)

    def stack(self, side: str, x: Tensor, layers: int, states: Tensor | None) -> Tensor:
        c, w = self.config, self.weights
        table = w[f"{side}.blocks.0.self_attn.self_attn.relative_attention_bias.weight"]
        bias = torch.stack(
            [
                torch.stack([table[bucket(key - query, side == "decoder", len(table))] for key in range(x.shape[1])])
                for query in range(x.shape[1])
            ]
        ).permute(2, 0, 1)
        if side == "decoder":
            bias = bias.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        for number in range(layers):
            p = f"{side}.blocks.{number}."
            q, k, v = (
                rms(x, w[p + "self_attn.layer_norm.weight"]) @ w[p + "self_attn.self_attn.project.weight"].T
            ).chunk(3, -1)
            x = x + self.attended(q, k, v, bias) @ w[p + "self_attn.self_attn.dense.weight"].T
            if states is not None:
                q = rms(x, w[p + "cross_attn.layer_norm.weight"]) @ w[p + "cross_attn.cross_attn.project_q.weight"].T
                k, v = (states @ w[p + "cross_attn.cross_attn.project_kv.weight"].T).chunk(2, -1)
                x = x + self.attended(q, k, v, None) @ w[p + "cross_attn.cross_attn.dense.weight"].T
            h = rms(x, w[p + "ff.layer_norm.weight"])
            x = x + (self.dense(h, p + "ff.") if c.experts is None else self.mixed(h, p + "ff."))
        return rms(x, w[f"{side}.final_layernorm.weight"])

    def dense(self, h: Tensor, p: str) -> Tensor:
        wi_0, wi_1, wo = (self.weights[f"{p}dense_relu_dense.{name}.weight"] for name in ("wi_0", "wi_1", "wo"))
        gate = h @ wi_0.T
        gate = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        return (gate * (h @ wi_1.T)) @ wo.T

    def mixed(self, h: Tensor, p: str) -> Tensor:
        chosen = (h @ self.weights[p + "expert_centroids"].T).argmax(-1)
        experts = [self.dense(h, f"{p}expert_network.{n}.") for n in range(self.config.experts["num_experts"])]
        return torch.stack(experts, -1).gather(-1, chosen[..., None, None].expand(*h.shape, 1)).squeeze(-1)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.config.num_heads, -1)) for part in (q, k, v))
        scores = torch.einsum("bthk,bshk->bhts", q, k)
        probabilities = (scores if bias is None else scores + bias).softmax(-1)
        return torch.einsum("bhts,bshk->bthk", probabilities, v).flatten(2)

    def named_parameters(self) -> Any:
        return self.weights.items()

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def generate(self, input_ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        tokens = torch.zeros((1, 1), dtype=torch.long)
        for _ in range(max_new_tokens):
            tokens = torch.cat((tokens, self(input_ids, tokens).logits[:, -1:].argmax(-1)), dim=1)
        return tokens


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def bucket(ahead: int, causal: bool, number: int) -> int:
    """T5's rule, in the words of its paper: exact distances first, then ranges that grow to 128."""
    number = number if causal else number // 2
    first = number if ahead > 0 and not causal else 0
    far = max(-ahead, 0) if causal else abs(ahead)
    exact = number // 2
    if far < exact:
        return first + far
    return first + min(number - 1, exact + int(log(far / exact) / log(128 / exact) * (number - exact) + 1e-9))


def cpm2_config(**settings: Any) -> dict[str, Any]:
    sizes = {"d_model": 36, "d_kv": 10, "d_ff": 22, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 2}
    return {"architectures": ["EncDecModel"], "vocab_size": 263, **sizes, "experts": None, **settings}


def cpm2_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, size = c["d_model"], c["num_heads"] * c["d_kv"], c["d_ff"]
    attention: dict[str, tuple[int, ...]] = {
        "self_attn.layer_norm": (width,),
        "self_attn.self_attn.project": (3 * inner, width),
        "self_attn.self_attn.dense": (width, inner),
        "ff.layer_norm": (width,),
    }
    cross: dict[str, tuple[int, ...]] = {
        "cross_attn.layer_norm": (width,),
        "cross_attn.cross_attn.project_q": (inner, width),
        "cross_attn.cross_attn.project_kv": (2 * inner, width),
        "cross_attn.cross_attn.dense": (width, inner),
    }
    matrices = {"wi_0": (size, width), "wi_1": (size, width), "wo": (width, size)}
    experts = c["experts"]
    places = ["ff."] if experts is None else [f"ff.expert_network.{n}." for n in range(experts["num_experts"])]
    feed_forward = {f"{place}dense_relu_dense.{name}": shape for place in places for name, shape in matrices.items()}
    shapes: dict[str, tuple[int, ...]] = {"word_embeds.weight": (263, width), "lm_head.weight": (263, width)}
    for side, layers in (("encoder", c["num_layers"]), ("decoder", c["num_decoder_layers"])):
        shapes[f"{side}.final_layernorm.weight"] = (width,)
        shapes[f"{side}.blocks.0.self_attn.self_attn.relative_attention_bias.weight"] = (32, c["num_heads"])
        for n in range(layers):
            parts = {**attention, **feed_forward, **(cross if side == "decoder" else {})}
            shapes |= {f"{side}.blocks.{n}.{part}.weight": shape for part, shape in parts.items()}
            if experts is not None:
                shapes[f"{side}.blocks.{n}.ff.expert_centroids"] = (experts["num_experts"], width)
    return shapes


@dataclass(frozen=True)
class Case:
    name: str
    config: Any
    tied: bool

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"] if isinstance(self.config, dict) else self.config.vocab_size)


def t5_case(name: str, kind: Any = T5Config, *, tied: bool = True, **settings: Any) -> Case:
    base = {
        "vocab_size": 317,
        "d_model": 42,
        "d_kv": 10,
        "d_ff": 66,
        "num_layers": 2,
        "num_heads": 3,
        "dropout_rate": 0.0,
        "n_positions": 64,
        "initializer_factor": 0.2,
        "decoder_start_token_id": 0,
    }
    return Case(name, kind(**{**base, "tie_word_embeddings": tied, **settings}), tied)


EXPERTS = Experts(
    num_experts=5,
    num_experts_per_token=1,
    intermediate_size=22,
    activation="gelu_tanh",
    router=RandomProjectionRouter(),
)
CASES = [
    t5_case("t5-3-heads"),
    t5_case("t5-v1.1-odd-vocabulary", tied=False, feed_forward_proj="gated-gelu", vocab_size=301),
    t5_case("t5-deep-decoder-5-heads", num_decoder_layers=3, num_heads=5, d_kv=7, layer_norm_epsilon=1e-3),
    t5_case(
        "t5-one-layer-12-buckets", num_layers=1, relative_attention_num_buckets=12, relative_attention_max_distance=20
    ),
    t5_case("t5-gated-silu-tied", feed_forward_proj="gated-silu", num_heads=1),
    t5_case("mt5-6-heads", MT5Config, tied=False, num_heads=6),
]
DESCRIBED = [
    Case("cpm2", cpm2_config(), False),
    Case("cpm2-mixture", cpm2_config(experts=EXPERTS.model_dump(), num_decoder_layers=3), False),
]
EACH = pytest.mark.parametrize("case", CASES + DESCRIBED, ids=lambda case: case.name)
THEIRS = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def reference(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """The reference's model with every parameter random, norms too. transformers 5 ties every head at first."""
    torch.manual_seed(len(case.name))
    if isinstance(case.config, dict):
        return Described(case.config, dtype)
    kind = MT5ForConditionalGeneration if isinstance(case.config, MT5Config) else T5ForConditionalGeneration
    model = kind._from_config(case.config, attn_implementation="sdpa")
    if not case.tied:
        model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    return randomize(model, dtype, 0.2, share=0.0)


@pytest.fixture
def computing_in(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers computes T5's norms in fp32 whatever the model's dtype."""
    exact = fp64_in_place_of_fp32(monkeypatch, "t5", "mt5") if dtype == torch.float64 else nullcontext()
    with exact:
        yield


def converted(model: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    """jingu's model with the reference's weights, through config and name map."""
    config = model.config.to_dict()
    name = "EncDecModel" if isinstance(model, Described) else type(model).__name__
    family = next(f for f in FAMILIES.values() if name in f.architectures)
    spec = family.spec_from_hf(config)
    ours, theirs, shapes = build_model(spec).to(dtype), model.state_dict(), parameter_shapes(spec)
    mapped = expand_rules(family.rules, spec, shapes)
    state: dict[str, Tensor] = {}
    for parameter in shapes:
        holders = [entry for entry in mapped if parameter in entry.jingu_shapes]
        state |= read_parameter(parameter, holders, theirs.__getitem__)
    ours.load_state_dict(state)
    return ours.eval()


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def sampled(case: Case, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(case.vocabulary, (rows, n), generator=generator) for n in (SOURCE, TARGET))
    return source, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@EACH
@pytest.mark.usefixtures("computing_in")
def test_logits_loss_and_gradients_equal(case: Case, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    theirs = reference(case, dtype)
    ours = converted(theirs, dtype)
    source, target = sampled(case)
    expected = theirs(input_ids=source, decoder_input_ids=target[:, :-1]).logits
    logits = ours.logits(ours(Inputs(target[:, :-1], source=Inputs(source))))
    assert logits.dtype == dtype
    assert relative(logits, expected) < limit

    losses = [nn.functional.cross_entropy(x.flatten(0, 1), target[:, 1:].flatten()) for x in (logits, expected)]
    assert relative(losses[0], losses[1]) < limit
    for loss in losses:
        loss.backward()
    named = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    held, spec = dict(ours.named_parameters()), ours.spec
    compared = set()
    for entry in expand_rules(FAMILIES[spec.family].rules, spec, parameter_shapes(spec)):
        pieces = [held[name].grad for name in entry.jingu_shapes]
        if entry.hf_name in named:
            gradient = entry.to_hf([piece for piece in pieces if piece is not None])
            difference = float((gradient - named[entry.hf_name].grad).norm())
            # An expert that no token chose has no gradient.
            assert difference <= limit * float(named[entry.hf_name].grad.norm()), entry.hf_name
            compared.add(entry.hf_name)
        else:
            assert pieces == [None], entry.hf_name  # a router that stays as it was drawn
    assert compared == set(named)


def test_padded_sources_equal_transformers() -> None:
    """Rows of different lengths; and a row of two documents is those two rows."""
    case = CASES[0]
    theirs = reference(case)
    ours = converted(theirs)
    source, target = sampled(case)
    documents = torch.zeros_like(source)
    documents[0, 29:] = -1
    expected = theirs(input_ids=source, attention_mask=(documents >= 0).long(), decoder_input_ids=target).logits
    with torch.no_grad():
        logits = ours.logits(ours(Inputs(target, source=Inputs(source, documents=documents))))
        assert relative(logits, expected) < 1e-5
        packed = ours.logits(
            ours(
                Inputs(
                    torch.cat([target[0], target[1]])[None],
                    documents=torch.tensor([[3] * TARGET + [4] * TARGET]),
                    source=Inputs(
                        torch.cat([source[0, :29], source[1]])[None],
                        documents=torch.tensor([[3] * 29 + [4] * SOURCE]),
                    ),
                )
            )
        )
    assert relative(packed[0, :TARGET], expected[0]) < 1e-5 and relative(packed[0, TARGET:], expected[1]) < 1e-5


def test_padding_of_the_target_leaves_no_nan() -> None:
    """A target that is padded further than its source sees nothing of it."""
    ours = converted(reference(CASES[0]))
    source, target = sampled(CASES[0])
    documents = torch.zeros_like(target)
    documents[:, 30:] = -1
    states = ours(Inputs(target, documents=documents, source=Inputs(source, documents=torch.zeros_like(source))))
    states[:, :30].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in ours.named_parameters())


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["def greet(name):\n    return f'hello {name}'\n", "for i in range(10):\n    print(i)\n", "数据流 🙂 café"]
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(texts), 290, ["<|endoftext|>", "<pad>"]).save(folder)
    return folder


@EACH
def test_cached_generation_equals_uncached_and_the_reference(
    case: Case, tokenizer_folder: Path, answer: Callable[..., Any]
) -> None:
    theirs = reference(case)
    ours = converted(theirs)
    tokenizer = Tokenizer.load(tokenizer_folder)
    prompt = sampled(case, rows=1)[0][0].tolist()
    source = torch.tensor([[*prompt, tokenizer.eos_token_id]])
    # Its cache has as many layers as the encoder, whatever the decoder has.
    wanted = {
        "use_cache": False,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }
    expected = theirs.generate(source, max_new_tokens=20, **wanted)[0, 1:].tolist()
    cached = [token.id for token in answer(ours, tokenizer, prompt, 20, ignore_eos=True, start_id=0)]
    ids = [0]
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(ours.logits(ours(Inputs(torch.tensor([ids]), source=Inputs(source))))[0, -1].argmax()))
    assert cached == ids[1:] == expected


@pytest.mark.parametrize("case", [CASES[2], DESCRIBED[1]], ids=lambda case: case.name)
def test_cache_in_uneven_pieces_equals_one_forward(
    case: Case, monkeypatch: pytest.MonkeyPatch, in_steps: Callable[..., Tensor]
) -> None:
    """And the source is read once, however many pieces follow."""
    ours = converted(reference(case, torch.float64), torch.float64)
    source, target = (ids[:1] for ids in sampled(case))
    read = []
    run = type(ours.encoder).run
    monkeypatch.setattr(
        type(ours.encoder), "run", lambda self, *rest, **more: read.append(self.causal) or run(self, *rest, **more)
    )
    with torch.no_grad():
        whole = ours.logits(ours(Inputs(target, source=Inputs(source))))
        read.clear()
        assert relative(in_steps(ours, target[0], [4, 1, 25, 7], source), whole[0]) < 1e-12
    assert read == [False, True, True, True, True]


@EACH
def test_what_is_exported_is_opened_to_the_last_bit_and_by_transformers(
    case: Case, tokenizer_folder: Path, tmp_path: Path, answer: Callable[..., Any]
) -> None:
    ours, tokenizer = converted(reference(case)), Tokenizer.load(tokenizer_folder)
    state = ours.state_dict()
    family = export_hf(ours.spec, state.__getitem__, tokenizer_folder, tmp_path / "out", shard_bytes=40_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    opened = open_hf(tmp_path / "out")
    # CPM-2 without experts is written as T5.
    assert family.name == {"cpm2": "t5"}.get(case.name, ours.spec.family)
    assert opened.spec == replace_fields(ours.spec, family=family.name)
    assert opened.decoder_start_token_id == tokenizer.decoder_start_token_id and opened.eos_token_ids == (
        tokenizer.eos_token_id,
    )
    back = load_model(opened, torch.float32).state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    if family.equivalent:
        return

    model, notes = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    source, target = sampled(case)
    with torch.no_grad():
        logits = model.eval()(input_ids=source, decoder_input_ids=target).logits
        assert relative(ours.logits(ours(Inputs(target, source=Inputs(source)))), logits) < 1e-5

    if case in DESCRIBED:  # its vocabulary is smaller than the tokenizer's
        return
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert written["decoder_start_token_id"] == written["pad_token_id"] == tokenizer.decoder_start_token_id
        assert written["eos_token_id"] == tokenizer.eos_token_id
    prompt = tokenizer.encode("def greet(name):\n")
    ids = torch.tensor([[*prompt, tokenizer.eos_token_id]])
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, use_cache=False)[0, 1:]
    tokens = answer(ours, tokenizer, prompt, 16)
    assert [token.id for token in tokens] == expected.tolist()


@THEIRS
def test_what_transformers_saves_is_opened(case: Case, tmp_path: Path) -> None:
    """Its release 5 writes that every head is tied, also of those that are not."""
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    opened = open_hf(tmp_path / "theirs")
    assert opened.decoder_start_token_id == 0
    ours = load_model(opened, torch.float32)
    source, target = sampled(case)
    with torch.no_grad():
        expected = theirs(input_ids=source, decoder_input_ids=target).logits
        assert relative(ours.logits(ours(Inputs(target, source=Inputs(source)))), expected) < 1e-5


@pytest.mark.parametrize(("buckets", "largest"), [(32, 128), (12, 20), (31, 97), (5, 3), (64, 1000)])
def test_buckets_equal(buckets: int, largest: int) -> None:
    ahead = torch.arange(-2000, 2000)
    for causal in (False, True):
        theirs = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(
            ahead, not causal, buckets, largest
        )
        ours = relative_buckets(RelativeBias(num_buckets=buckets, max_distance=largest), -ahead, causal=causal)
        assert torch.equal(ours, theirs)


def test_what_hugging_face_cannot_say_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    spec = replace_fields(FAMILIES["t5"].template, feed_forward=EXPERTS, vocab_size=300)
    with pytest.raises(JinguError, match="cannot express this model's feed_forward"):
        export_hf(spec, lambda name: torch.empty(0), tokenizer_folder, tmp_path / "out")
    with pytest.raises(JinguError, match="cannot express this model's scale_lm_head"):
        export_hf(
            replace_fields(spec, feed_forward=FAMILIES["t5"].template.feed_forward, scale_lm_head=False),
            lambda name: torch.empty(0),
            tokenizer_folder,
            tmp_path / "out",
        )
