"""The cache of latent attention: as many numbers a token as its formula says."""

from __future__ import annotations

import pytest

from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.kv_cache import pool_bytes, stored_numbers
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.families import FAMILIES
from jingu.plan.serving import cache_bytes
from jingu.text.tokenizer import Tokenizer
from tests.infer.test_batches import model_of


@pytest.mark.parametrize(("family", "preset"), [("deepseek_v3", "deepseek-v3"), ("deepseek_v2", "deepseek-v2-lite")])
def test_deepseek_caches_576_numbers_a_token(family: str, preset: str) -> None:
    spec = FAMILIES[family].presets[preset]
    assert {stored_numbers(layer) for layer in spec.layers} == {512 + 64}
    assert pool_bytes(spec, 16, 2) == [16 * 2 * 576 * spec.num_layers]
    # On several GPUs each has all of them.
    assert cache_bytes(spec, 1000, gpus=8) == 2 * 576 * 1000 * spec.num_layers


def test_the_engine_stores_nothing_more(tokenizer: Tokenizer) -> None:
    model = model_of("latent", tokenizer)
    engine = Engine(model, EngineSettings(max_num_seqs=2, block_size=16))
    engine.run([Request((5, 6, 7), SamplingParams(), 3, ignore_eos=True)])
    latent = model.spec.attention.latent
    assert latent is not None
    for layer in engine._runner.cache.layers:
        assert layer.store is not None
        assert layer.store.shape[1:] == (16, 1, 1, latent.rank + latent.rotary_dim)
