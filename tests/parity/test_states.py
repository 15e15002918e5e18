"""Models whose layers keep a state: composite folders, layers of multi-token prediction, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import cache_reaches, pool_bytes
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder, build_model
from jingu.model.families import FAMILIES
from jingu.model.inputs import Inputs
from jingu.model.parts import state_bytes
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import init_weights
from jingu.plan.serving import cache_bytes
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.infer.test_batches import MIXERS, model_of
from tests.parity import test_components as components
from tests.parity.fp64 import randomize
from tests.parity.state_configs import STATE_CONFIGS
from tests.parity.test_tabled_families import check_rounding


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"]).save(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def qwen(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Write a tiny Qwen3.5 with random parameters; return it and its tensors."""
    torch.manual_seed(6)
    config = STATE_CONFIGS["qwen3_5_text"]()
    model = transformers.Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = randomize(model, torch.float32, 0.1)
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def test_a_layer_of_multi_token_prediction_is_read_and_kept(tokenizer_folder: Path, tmp_path: Path) -> None:
    theirs, tensors = qwen(tmp_path / "theirs")
    config = theirs.config
    last = config.num_hidden_layers - 1
    # transformers has no class of it: one of its layers between norms and a projection.
    layer = randomize(Qwen3_5DecoderLayer(config, last), torch.float32, 0.1)
    norms = {name: randomize(Qwen3_5RMSNorm(48), torch.float32, 0.1) for name in ("embedding", "hidden", "last")}
    projection = torch.nn.Linear(96, 48, bias=False)
    further = {f"mtp.layers.0.{key}": value for key, value in layer.state_dict().items()}
    further |= {f"mtp.pre_fc_norm_{name}.weight": norms[name].weight.data for name in ("embedding", "hidden")}
    further |= {"mtp.norm.weight": norms["last"].weight.data, "mtp.fc.weight": projection.weight.data}
    save_file({**tensors, **further}, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    stored = open_hf(tmp_path / "theirs")
    assert stored.spec.mtp_layers == 1
    ours = load_model(stored, torch.float32).eval()
    ids = components.sample()
    with torch.no_grad():
        body = theirs.model(ids, output_hidden_states=True)
        embedded = theirs.model.embed_tokens(ids.roll(-1, 1))
        joined = torch.cat((norms["embedding"](embedded), norms["hidden"](body.last_hidden_state)), -1)
        length = ids.shape[1]
        positions = torch.arange(length)[None]
        rotary = theirs.model.rotary_emb(joined, positions)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        hidden = layer(projection(joined), position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        expected = norms["last"](hidden)
        assert ours.embedding is not None
        context = ours.prediction_context(Inputs(ids), ours(Inputs(ids)))
        result = ours.mtp[0](ours(Inputs(ids)), ours.embedding(ids.roll(-1, 1)), context)
        wide = load_model(stored, torch.float64)
        assert wide.embedding is not None
        context = wide.prediction_context(Inputs(ids), wide(Inputs(ids)))
        exact = wide.mtp[0](wide(Inputs(ids)), wide.embedding(ids.roll(-1, 1)), context)
    check_rounding(result, expected, exact)
    export_hf(stored.spec, stored.read, tokenizer_folder, tmp_path / "ours")
    exported = load_file(tmp_path / "ours" / "model.safetensors")
    for key, tensor in further.items():
        assert torch.equal(exported[key], tensor), key


def test_a_composite_folder(tmp_path: Path) -> None:
    """The decoder of Qwen3.5 below a model with vision, whose tensors are left out."""
    theirs, tensors = qwen(tmp_path / "text")
    stored = open_hf(tmp_path / "text")
    folder = tmp_path / "composite"
    folder.mkdir()
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": config}
    rope = {**config["rope_parameters"], "mrope_section": [2, 1, 0], "mrope_interleaved": True}
    config["rope_parameters"] = rope
    (folder / "config.json").write_text(json.dumps(outer))
    moved = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
    save_file({**moved, "model.visual.patch.weight": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    again = open_hf(folder)
    assert again.spec == stored.spec
    ids = components.sample()
    with torch.no_grad():
        model, wide = load_model(again, torch.float32).eval(), load_model(again, torch.float64).eval()
        check_rounding(model.logits(model(ids)), theirs(ids).logits, wide.logits(wide(ids)))


@pytest.mark.parametrize("kind", MIXERS)
def test_a_state_takes_the_bytes_of_its_formula(kind: str, tokenizer: Tokenizer) -> None:
    model = model_of(kind, tokenizer)
    engine = Engine(model, EngineSettings(max_num_seqs=2))
    engine.submit(Request(tuple(range(1, 90)), SamplingParams(), 30, ignore_eos=True))
    for _ in range(9):
        engine.step()
    (sequence,) = engine._scheduler.running
    layers = model.spec.layers
    assert sequence.table.states.keys() == {0, 2}
    for number, state in sequence.table.states.items():
        parts = [part for part in state if part is not None]
        assert sum(part.nbytes for part in parts) == state_bytes(model.spec, layers[number], 4)
        # A state does not keep those of other sequences, or of a whole step.
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    used = engine.stats()
    blocks = used.used_blocks * pool_bytes(model.spec, engine._pools[0].block_size, 4)[0]
    # The state of the sequence, and that of the prompt's first 64 tokens, for other sequences.
    assert used.used_bytes - blocks == 2 * sum(state_bytes(model.spec, layer, 4) for layer in layers)
    # Blocks and plans count attention once, in the only layer that has it.
    plain = replace_fields(model.spec, layer_kinds={}, layer_pattern=(), num_layers=1)
    assert pool_bytes(model.spec, 16, 4) == pool_bytes(plain, 16, 4)
    states = sum(state_bytes(model.spec, layer, 2.0) for layer in layers)
    assert cache_bytes(model.spec, 100) == cache_bytes(plain, 100) + states


@pytest.mark.parametrize("kind", MIXERS)
def test_a_model_without_attention(kind: str, tokenizer: Tokenizer) -> None:
    """It has no keys and values; prompts and answers need no memory but the states."""
    spec = replace_fields(model_of(kind, tokenizer).spec, layer_kinds={}, layer_pattern=(), mixer=mixer(kind))
    assert cache_reaches(spec) == [None] and pool_bytes(spec, 16, 4) == [0]
    assert ModelSpec.from_json(spec.to_json()) == spec


def mixer(kind: str) -> dict[str, Any]:
    return {"type": kind, **MIXERS[kind]}


@pytest.mark.parametrize("kind", MIXERS)
def test_scores_and_beams_equal_the_uncached_forward(kind: str, tokenizer: Tokenizer) -> None:
    """Sequences that fork share the state of their context, which is longer than a chunk."""
    model = model_of(kind, tokenizer)
    context = tuple(range(1, 81))
    continuations = [(7, 9, 200), (11,), (7, 9, 201, 3)]
    for settings in (EngineSettings(), EngineSettings(prefill_chunk_size=5, block_size=8)):
        engine = Engine(model, settings)
        for score, ids in zip(engine.score(context, continuations), continuations, strict=True):
            assert score.token_logprobs == pytest.approx(logprobs(model, context, ids), abs=1e-4)
        request = Request(context, SamplingParams(), 6, ignore_eos=True, num_beams=3, n=3)
        [events] = engine.run([request])
        beams = [tuple(event.token.id for event in events if event.choice == n and event.token) for n in range(3)]
        sums = [sum(logprobs(model, context, beam)) for beam in beams]
        assert len(set(beams)) == 3 and sums == sorted(sums, reverse=True)
        [greedy] = engine.run([Request(context, SamplingParams(), 6, ignore_eos=True)])
        assert sums[0] >= sum(logprobs(model, context, [e.token.id for e in greedy if e.token])) - 1e-4


def logprobs(model: InferenceModel, context: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token after a context."""
    decoder = cast(Decoder, model.module)
    with torch.no_grad():
        table_TV = decoder.logits(decoder(torch.tensor([[*context, *ids]])))[0].log_softmax(-1)
    first = len(context) - 1
    return [float(table_TV[first + place, id_]) for place, id_ in enumerate(ids)]


def test_a_model_without_attention_has_blocks_for_its_sequences_only(tokenizer: Tokenizer) -> None:
    """Blocks need no memory, so a size of the KV cache says nothing about their number."""
    spec = FAMILIES["mamba2"].spec_from_hf({**STATE_CONFIGS["mamba2"]().to_dict(), "max_position_embeddings": 320})
    model = build_model(spec)
    init_weights(model, spec, 3)
    inference_model = InferenceModel(model.eval(), spec, tokenizer)
    for size in (1, 1 << 40):
        engine = Engine(inference_model, EngineSettings(max_num_seqs=2, block_size=16, kv_cache_bytes=size))
        assert engine.stats().total_blocks == 2 * 320 // 16
        (events,) = engine.run([Request((1, 2, 3), SamplingParams(), 5, ignore_eos=True)])
        assert len(events) == 5


def test_states_that_take_too_much_memory_are_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gated_delta", tokenizer)
    per_sequence = sum(state_bytes(model.spec, layer, 4) for layer in model.spec.layers)
    # A quarter of the memory is for sequences, and half of that for states: those of sequences and of prefixes.
    monkeypatch.setattr("jingu.infer.engine_interface.total_memory", lambda device: int(8 * 10.5 * per_sequence))
    with pytest.raises(JinguError, match="at most 5, since states"):
        Engine(model, EngineSettings(max_num_seqs=6))
    assert Engine(model, EngineSettings(max_num_seqs=5)).stats().total_bytes > 10 * per_sequence


def test_drafts_and_lookahead_are_refused(tokenizer: Tokenizer) -> None:
    model = model_of("short_conv", tokenizer)
    with pytest.raises(JinguError, match="cannot return to a token before rejected ones"):
        Engine(model, EngineSettings(), draft_model=model)
    with pytest.raises(ValueError, match="cannot attend in both directions"):
        model.module(Inputs(torch.tensor([[1, 2]]), prefix_lengths=torch.tensor([[1, 0]])))


def test_a_window_has_blocks_for_a_whole_chunk_of_a_prompt(tokenizer: Tokenizer) -> None:
    """Models with states compute whole chunks of a prompt, also beyond the tokens of a step."""
    spec = FAMILIES["lfm3"].spec_from_hf(STATE_CONFIGS["lfm3"]().to_dict())
    model = build_model(spec)
    init_weights(model, spec, 3)
    engine = Engine(
        InferenceModel(model.eval(), spec, tokenizer),
        EngineSettings(max_num_seqs=2, block_size=4, prefill_chunk_size=5),
    )
    for length in (50, 40):
        engine.submit(Request(tuple(range(1, length)), SamplingParams(temperature=0.0), 6, ignore_eos=True))
    tokens = [event.token for _ in range(20) for event in engine.step() if event.token]
    assert len(tokens) == 12
