"""Decoders that transformers stores inside a composite model, and experts that it stores in one tensor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from jingu.cli import main
from jingu.errors import JinguError
from jingu.formats.models import open_model, read_spec
from jingu.formats.stored_model import load_model
from jingu.model.inputs import Inputs
from jingu.text.tokenizer_training import train_tokenizer

TEXT = {
    "vocab_size": 300,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "head_dim": 10,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
}


def llava(text: transformers.PreTrainedConfig) -> Any:
    vision = transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision))


def mistral3(text: transformers.PreTrainedConfig) -> Any:
    vision = transformers.PixtralVisionConfig(**VISION, head_dim=8)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    return transformers.Mistral3ForConditionalGeneration(config)


def aya(text: transformers.PreTrainedConfig) -> Any:
    config = transformers.AyaVisionConfig(text_config=text, vision_config=transformers.SiglipVisionConfig(**VISION))
    return transformers.AyaVisionForConditionalGeneration(config)


def gemma3(**settings: Any) -> Any:
    """Windows shorter than the text, and scaled positions in the layers without."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0},
    }
    kinds = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    text = transformers.Gemma3TextConfig(**TEXT, **kinds, rope_parameters=rope, query_pre_attn_scalar=20, **settings)
    vision = transformers.SiglipVisionConfig(**VISION)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def ministral3() -> Any:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
    return mistral3(transformers.Ministral3Config(**TEXT, rope_parameters={**rope, "rope_theta": 50.0}))


MODELS = {
    "gemma3": gemma3,
    "mistral3-ministral3": ministral3,
    "llava-llama": lambda: llava(transformers.LlamaConfig(**TEXT)),
    "llava-qwen2": lambda: llava(transformers.Qwen2Config(**{**TEXT, "head_dim": 8}, tie_word_embeddings=True)),
    "mistral3": lambda: mistral3(transformers.MistralConfig(**TEXT, sliding_window=None)),
    "aya-qwen3": lambda: aya(transformers.Qwen3Config(**TEXT)),
}


def save(model: Any, folder: Path, **options: Any) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, **options)
    train_tokenizer(iter(["some text " * 50]), 300, ["<|endoftext|>"]).save(folder)
    return folder


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    decoder = load_model(open_model(folder), torch.float32)
    with torch.inference_mode():
        return decoder.logits(decoder(Inputs(ids)))


@pytest.mark.parametrize("is_original_format", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_of_a_composite_model(
    name: str, is_original_format: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    folder = save(model, tmp_path / "model", save_original_format=is_original_format)
    ids = torch.arange(40)[None] * 7 % 300
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    with caplog.at_level(logging.INFO, "jingu"):
        torch.testing.assert_close(logits_of(folder, ids), expected, rtol=1e-5, atol=1e-5)
    assert "only the decoder is read, without multi_modal_projector, vision_tower" in caplog.text
    spec = open_model(folder).spec
    assert read_spec(folder) == spec and spec.num_layers == 3
    # The export is a model of text, which transformers loads without the parts that were left out.
    assert main(["export", str(folder), "--to", str(tmp_path / "export")]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.inference_mode():
        torch.testing.assert_close(exported(ids).logits, expected, rtol=1e-5, atol=1e-5)


SCALED: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "gemma3": (lambda: gemma3(final_logit_softcapping=2.0), lambda logits: 2 * (logits / 2).tanh()),
    "cohere2": (
        lambda: aya(transformers.Cohere2Config(**{**TEXT, "head_dim": 8}, logit_scale=0.3)),
        lambda logits: 0.3 * logits,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_logits_are_those_of_the_model_of_text(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers applies scale and cap in its models of text, and ignores them in composite models."""
    build, scaled = SCALED[name]
    model = build().eval()
    folder = save(model, tmp_path / "model")
    ids = torch.arange(40)[None] * 7 % 300
    with torch.inference_mode():
        expected = scaled(model(input_ids=ids).logits)
    torch.testing.assert_close(logits_of(folder, ids), expected, rtol=1e-5, atol=1e-5)
    assert "as in the model of text alone" in caplog.text
    assert main(["export", str(folder), "--to", str(tmp_path / "export")]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.inference_mode():
        torch.testing.assert_close(exported(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_composite_model_with_another_decoder_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["SomethingForConditionalGeneration"], "text_config": {"model_type": "something_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(JinguError, match="does not read the decoder of SomethingForConditionalGeneration"):
        open_model(tmp_path)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_in_one_tensor(kind: str, tmp_path: Path) -> None:
    sizes = {"num_local_experts": 5} if kind == "Mixtral" else {"num_experts": 5, "moe_intermediate_size": 12}
    config = getattr(transformers, f"{kind}Config")(**TEXT, **sizes, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    folder = save(model, tmp_path / "fused", save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(folder / "model.safetensors"))
    other = save(model, tmp_path / "separate")
    model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(folder).eval()
    ids = torch.arange(40)[None] * 7 % 300
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(folder, ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    assert open_model(folder).spec == open_model(other).spec
