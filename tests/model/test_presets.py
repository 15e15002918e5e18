"""Presets: as many parameters as were published, counted without making them; settings that take a value's place."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.model.components import AlibiPositions
from jingu.model.count import count_parameters
from jingu.model.decoder import build_model, parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec

# As the models' cards, papers or the sizes of their files (an index's total_size by the bytes of a number) tell: for
# Mixtral and Qwen3-MoE the cards of mistralai/Mixtral-8x7B-v0.1 and 8x22B-v0.1, Qwen/Qwen3-30B-A3B and
# 235B-A22B. Tied heads count once; of ChatGLM3's files, 32 more
# numbers are rotary tables. T5, its version 1.1 and mT5: the sizes that transformers counts in their published
# weights.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "gpt-j-6b": 6_050_882_784,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 179_522_565_120,
    "command-r-plus": 103_810_674_688,
    "command-a": 111_057_580_032,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "olmo-3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "command-r7b": 8_028_033_024,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "olmo-2-7b": 7_298_617_344,
    "glm-4-9b-0414": 9_400_279_040,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "ministral-8b": 8_019_808_256,
    "command-r": 34_980_831_232,
    "granite-3.1-8b": 8_170_848_256,
    "exaone-4.0-32b": 32_003_216_384,
    "seed-oss-36b": 36_151_104_512,
    "ernie-4.5-0.3b": 360_748_032,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "stablelm-3b-4e1t": 2_795_443_200,
    "apertus-8b": 8_053_338_176,
    "nanochat-d20": 560_988_160,
    "pythia-160m": 162_322_944,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "gpt-neox-20b": 20_554_567_680,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
    # Those of transformers' models of the published configs; of Gemma 4 without encoders, with the scales of layers.
    "lfm3-1.7b": 1_728_801_536,
    "olmo-hybrid-7b": 7_430_870_688,
    "gemma-4-e2b": 4_628_569_344 + 35,
    "gemma-4-26b-a4b": 25_233_141_760 + 30,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    # With the corrections of router scores.
    "deepseek-v3": 671_026_404_352 + 58 * 256,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3-5-moe": 41_873_153_344,
    "baichuan2-7b": 7_505_973_248,
    "baichuan2-13b": 13_896_668_160,
    "chatglm3-6b": 12_487_168_064 // 2 - 32,
    "glm-4-9b": 9_399_951_360,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
}
# arXiv 2106.10715, in billions; with 26,240 entries, and 32 experts in every block.
# The others are rounded as in the names and cards of the models.
ROUNDED = {
    "falcon-7b": 6.9,
    "falcon-11b": 11.1,
    "internlm3-8b": 8.8,
    "lfm2-8b-a1b": 8.3,
    "gemma-4-e4b": 7.5,  # 8 with its encoders
    "gemma-4-31b": 30.7,
    "gemma-4-12b": 12,
    "granite-4.0-h-micro": 3.2,
    "granite-4.0-h-tiny": 6.9,
    "granite-4.0-h-small": 32,
    "bamba-9b": 9.8,
    "falcon-h1-0.5b": 0.5,
    "falcon-h1-7b": 7.6,
    "falcon-h1-34b": 34,
    "nemotron-h-8b": 8.1,
    "nemotron-3-nano-30b-a3b": 31.6,
    "mamba2-130m": 0.1,
    "mamba2-2.7b": 2.7,
    "mamba-codestral-7b": 7.3,
    "qwen3-next-80b-a3b": 80,
    "qwen3.5-27b": 27,
    "qwen3.5-35b-a3b": 35,
    "qwen3.5-397b-a17b": 396,  # 397 with its vision encoder
    "cpm2-11b": 11,
    "cpm2-moe-198b": 198,
    "ministral-3-8b": 8.5,
    "hunyuan-7b": 7.5,
    "afm-4.5b": 4.6,
    "kimi-k2": 1026,
    "glm-4.5-air": 107,
    "glm-4.5": 353,
    "glm-4.7-flash": 30,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "minimax-m2": 229,
    "hunyuan-a13b": 80,
    "ernie-4.5-21b-a3b": 21.8,
    "granite-3.1-3b-a800m": 3.3,
    "llama-4-scout": 108,
    "mimo-v2-flash": 309,
    "dots.llm1": 143,
    "solar-open-100b": 103,
    "trinity-mini": 26,
}
# Families of which no preset is known well enough.
WITHOUT_PRESET = {"exaone_moe", "granitemoeshared", "hy_v3", "mistral4"}


def preset_spec(preset: str, **settings: Any) -> ModelSpec:
    return spec_from_settings(ModelSettings(preset=preset, **settings), vocabulary=300, context=64)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_as_many_parameters_as_published(preset: str) -> None:
    with torch.device("meta"):
        model = build_model(preset_spec(preset))
    assert sum(prod(parameter.shape) for parameter in model.parameters()) == PUBLISHED[preset]


# Layers, width, vocabulary; queries' and keys' sizes together; size and number of experts; how many of them a token
# meets; and the billions that the papers tell of them.
MIXTURES = {
    "mixtral-8x7b": (32, 4096, 32000, 4096, 1024, 14336, 8, 2, "12.9"),
    "mixtral-8x22b": (56, 6144, 32000, 6144, 1024, 16384, 8, 2, "39.2"),
    "qwen3-30b-a3b": (48, 2048, 151936, 4096, 512, 768, 128, 8, "3.4"),
    "qwen3-235b-a22b": (94, 4096, 151936, 8192, 512, 1536, 128, 8, "22.2"),
}


@pytest.mark.parametrize("preset", MIXTURES)
def test_total_and_active_parameters_follow_from_the_dimensions(preset: str) -> None:
    layers, width, vocabulary, queries, keys, size, number, active, billions = MIXTURES[preset]
    norms = 2 * width + (2 * 128 if preset.startswith("qwen3") else 0)
    shared = 2 * width * queries + 2 * width * keys + norms + number * width
    total, met = (layers * (shared + n * 3 * width * size) + 2 * vocabulary * width + width for n in (number, active))
    spec = preset_spec(preset)
    count = count_parameters(spec, parameter_shapes(spec))
    assert (count.total, count.active) == (total, met) == (PUBLISHED[preset], met)
    assert f"{met / 1e9:.1f}" == billions


def test_every_family_has_a_preset() -> None:
    assert {name for name, family in FAMILIES.items() if not family.presets} == WITHOUT_PRESET
    assert {*PUBLISHED, *ROUNDED} == {name for family in FAMILIES.values() for name in family.presets}


def test_presets_have_as_many_parameters_as_rounded_figures_say() -> None:
    for preset, billions in ROUNDED.items():
        digits = 0 if isinstance(billions, int) else 1
        count = sum(map(prod, parameter_shapes(preset_spec(preset)).values()))
        assert round(count / 1e9, digits) == billions


def test_presets_have_names_of_their_own() -> None:
    names = [name for family in FAMILIES.values() for name in family.presets]
    assert len(names) == len(set(names))
    assert all(spec.family == family.name for family in FAMILIES.values() for spec in family.presets.values())


def test_a_preset_alone_is_the_published_model() -> None:
    for name, spec in {name: spec for family in FAMILIES.values() for name, spec in family.presets.items()}.items():
        assert preset_spec(name) == spec


def test_given_settings_take_the_place_of_the_presets() -> None:
    spec = preset_spec(
        "llama-3.1-8b", num_layers=3, rope_theta=1e4, vocab_size=512, max_position_embeddings=128, norm_eps=1e-6
    )
    assert (spec.num_layers, spec.vocab_size, spec.max_position_embeddings, spec.norm.eps) == (3, 512, 128, 1e-6)
    assert spec.hidden_size == 4096 and spec.attention.num_kv_heads == 8
    published = FAMILIES["llama"].presets["llama-3.1-8b"].position
    assert spec.position == published.model_copy(update={"theta": 1e4})


def test_what_follows_from_a_dimension_follows_again() -> None:
    spec = preset_spec("baichuan2-13b", hidden_size=640, num_heads=4)
    assert (spec.attention.head_dim, spec.attention.num_kv_heads) == (160, 4)
    assert spec.feed_forward.intermediate_size == FAMILIES["baichuan2"].feed_forward_size(640)
    assert spec.position == AlibiPositions()


def test_a_larger_tokenizer_makes_a_larger_embedding() -> None:
    assert spec_from_settings(ModelSettings(preset="llama-7b"), vocabulary=32100, context=64).vocab_size == 32100


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"preset": "lama-2-7b"},
        "model.preset: there is no preset 'lama-2-7b'. The nearest are llama-2-7b, llama-2-70b, llama-7b; `jingu "
        "model list` shows all.",
    ),
    (
        {"preset": "gpt2-xl", "family": "llama"},
        "model.family: the preset 'gpt2-xl' is of the family 'gpt2', not 'llama'. Leave it out: the family is known.",
    ),
    (
        {"preset": "gpt2", "max_position_embeddings": 32},
        "model.max_position_embeddings: the model is made for 32 tokens, but the batch has sequences of 64. Raise "
        "model.max_position_embeddings to "
        "64 or more, or shorten batch.sequence_length.",
    ),
]


@pytest.mark.parametrize(("settings", "words"), MISTAKES, ids=["near", "family", "context"])
def test_mistaken_presets_are_told_in_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(JinguError) as error:
        preset_spec(**settings)
    assert str(error.value) == words
