"""Gemma 4's layers that share keys and values: recomputation, files, caches, plans and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import pool_bytes
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.families import FAMILIES
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.plan.serving import cache_bytes
from jingu.runtime.ranks import join_process_group
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity import test_components as components
from tests.parity.fp64 import randomize
from tests.parity.state_configs import STATE_CONFIGS

NAME = "gemma4_text-shared"
OWN, SHARING = range(3), range(3, 6)


def shared_spec() -> ModelSpec:
    return FAMILIES["gemma4_text"].spec_from_hf(STATE_CONFIGS[NAME]().to_dict())


def write(folder: Path) -> Any:
    """Write transformers' model with random parameters to a folder, and return it."""
    torch.manual_seed(5)
    config = STATE_CONFIGS[NAME]()
    model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = randomize(model, torch.float32, 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with join_process_group("cpu", 1) as ranks:
        yield build_mesh(resolve_axis_sizes(ParallelSettings(), 1, shared_spec()), ranks.device)


def test_layers_share_with_the_last_layer_of_their_kind() -> None:
    spec = shared_spec()
    assert [spec.kv_source(number) for number in range(6)] == [0, 1, 2, 1, 2, 1]


def test_recomputation_leaves_the_gradients_of_shared_keys(mesh: DeviceMesh) -> None:
    """Those of the layers that have them are sums over the layers that share them."""
    spec, gradients = shared_spec(), []
    tokens = components.sample()
    for mode in ({}, {"type": "selective"}, {"type": "full"}, {"type": "full", "every": 2}):
        layout = Layout(ParallelSettings(), ActivationCheckpointingSettings(**mode), compile=False)
        model = materialize(spec, mesh, layout, Precision.uniform(torch.float64), 3)
        model(tokens).square().sum().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    for others in gradients[1:]:
        assert others.keys() == gradients[0].keys()
        for name, gradient in gradients[0].items():
            assert torch.equal(others[name], gradient), name


def test_files_may_contain_keys_and_values_that_no_layer_uses(tmp_path: Path) -> None:
    """Google's files do, and those of transformers do not."""
    theirs = write(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    for layer in SHARING:
        prefix = f"model.layers.{layer}.self_attn."
        assert not any(name.startswith(f"{prefix}k") for name in tensors)
        for part in ("k_proj", "v_proj"):
            tensors[f"{prefix}{part}.weight"] = torch.randn(28 if layer % 2 else 44, 48)
        tensors[f"{prefix}k_norm.weight"] = torch.randn(14)
    save_file(tensors, path, {"format": "pt"})
    ids = components.sample()
    stored = open_hf(tmp_path / "theirs")
    wide = load_model(stored, torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(wide.logits(wide(ids)).float(), theirs(ids).logits, rtol=0, atol=1e-4)
    # Those of other layers are not ignored.
    tensors["model.layers.0.self_attn.k_bias.weight"] = torch.randn(14)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(JinguError, match=r"unexpected: model\.layers\.0\.self_attn\.k_bias"):
        open_hf(tmp_path / "theirs")


def test_the_decoder_of_a_composite_model(tmp_path: Path) -> None:
    text = write(tmp_path / "text")
    config = transformers.Gemma4Config(text_config=text.config.to_dict(), vision_config=None, audio_config=None)
    whole = transformers.Gemma4ForConditionalGeneration._from_config(config, dtype=torch.float32)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    plain, stored = open_hf(tmp_path / "text"), open_hf(tmp_path / "whole")
    assert stored.spec == plain.spec
    for name in load_model(plain, torch.float32).state_dict():
        assert torch.equal(stored.read(name), plain.read(name)), name


def test_shared_layers_take_no_cache(tmp_path: Path) -> None:
    """The bytes of the engine's blocks, and those that plans count, are those of the layers with keys and values."""
    write(tmp_path / "model")
    stored = open_hf(tmp_path / "model")
    spec = stored.spec
    tokenizer = train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"])
    model = InferenceModel(load_model(stored, torch.float32), spec, tokenizer)
    engine = Engine(model, EngineSettings(max_num_seqs=2, block_size=4))
    engine.submit(Request(tuple(range(1, 30)), SamplingParams(), 9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    layers = [engine._runner.cache.layer(number) for number in range(6)]
    assert [layer.store is not None for layer in layers] == [True] * 3 + [False] * 3
    # Two heads of 14 or 22 numbers, padded to whole vectors of 16.
    sizes = {True: 2 * 2 * 16 * 4 * 4, False: 2 * 2 * 32 * 4 * 4}
    blocks = [sizes[number % 2 == 0] for number in OWN]
    assert pool_bytes(spec, 4, 4) == [blocks[1], blocks[0] + blocks[2]]
    # A window of 7 tokens, and all of 90.
    assert cache_bytes(spec, 90) == 2 * 2 * 2 * (7 * 14 * 2 + 90 * 22)


def test_shared_keys_are_refused_where_they_are_not() -> None:
    spec = shared_spec()
    with pytest.raises(JinguError, match=r"share keys and values.*are not divided into stages"):
        resolve_axis_sizes(ParallelSettings(pipeline=2), 2, spec)
    alone = {"layer_pattern": ("sliding_attention_shared",), "num_layers": 1}
    with pytest.raises(JinguError, match="layer 0 shares keys and values, and no layer before it"):
        replace_fields(spec, **alone)
