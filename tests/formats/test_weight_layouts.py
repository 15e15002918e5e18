"""Weight files with other names, with a tied head stored, or beside each other: what transformers reads is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jingu.errors import JinguError
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from tests.formats.tiny_configs import MOE, SIZES

TOKENS = torch.arange(3, 15)[None]
CONFIGS: dict[str, Callable[..., transformers.PreTrainedConfig]] = {
    "llama": lambda **more: transformers.LlamaConfig(**SIZES, **more),
    "mistral": lambda **more: transformers.MistralConfig(**SIZES, num_key_value_heads=2, **more),
    "qwen2": lambda **more: transformers.Qwen2Config(**SIZES, num_key_value_heads=2, **more),
    "qwen3": lambda **more: transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, **more),
    "mixtral": lambda **more: transformers.MixtralConfig(**SIZES, **MOE, num_local_experts=3, **more),
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(
        **SIZES, **MOE, num_experts=3, moe_intermediate_size=8, **more
    ),
    "glm": lambda **more: transformers.GlmConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, **more
    ),
    "gpt2": lambda **more: transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, **more
    ),
    "bloom": lambda **more: transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2, **more),
}
EMBEDDINGS = {"gpt2": "transformer.wte.weight", "bloom": "transformer.word_embeddings.weight"}
HEAD = "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def embedding(family: str) -> str:
    return EMBEDDINGS.get(family, "model.embed_tokens.weight")


def base(family: str) -> str:
    return "transformer." if family in EMBEDDINGS else "model."


def rename(tensors: Tensors, change: Callable[[str], str]) -> Tensors:
    return {change(name): tensor for name, tensor in tensors.items()}


# Changes of the tensors of a family's tied model.
LAYOUTS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "without the base prefix": lambda tensors, family: rename(tensors, lambda name: name.removeprefix(base(family))),
    "the base prefix twice": lambda tensors, family: rename(tensors, lambda name: base(family) + name),
    "only the head": lambda tensors, family: rename(tensors, lambda name: HEAD if name == embedding(family) else name),
    "only the head, without the prefix": lambda tensors, family: rename(
        tensors, lambda name: HEAD if name == embedding(family) else name.removeprefix(base(family))
    ),
    "an equal head": lambda tensors, family: {**tensors, HEAD: tensors[embedding(family)].clone()},
    "another head": lambda tensors, family: {**tensors, HEAD: 2 * tensors[embedding(family)] + 1},
    "another head with a prefix": lambda tensors, family: {
        **tensors,
        base(family) + HEAD: 2 * tensors[embedding(family)] + 1,
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a model of a family once."""
    place = tmp_path_factory.mktemp("saved")

    def save(family: str, tie: bool) -> Path:
        folder = place / f"{family}-{tie}"
        if not folder.is_dir():
            torch.manual_seed(0)
            config = CONFIGS[family](tie_word_embeddings=tie)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return save


def write(source: Path, to: Path, tensors: Tensors) -> Path:
    to.mkdir()
    shutil.copy(source / "config.json", to)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors", {"format": "pt"}
    )
    return to


def logits_of_transformers(folder: Path) -> torch.Tensor:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def logits(folder: Path) -> torch.Tensor:
    model = load_model(open_hf(folder), torch.float32)
    with torch.no_grad():
        return model.logits(model(TOKENS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_loads_exactly_is_loaded(
    family: str, layout: str, saved: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(family, tie=True)
    folder = write(source, tmp_path / "new", LAYOUTS[layout](load_file(source / "model.safetensors"), family))
    torch.testing.assert_close(logits(folder), logits_of_transformers(folder), rtol=1e-4, atol=1e-5)
    differs = layout.startswith("another")
    assert open_hf(folder).spec.tie_word_embeddings is not differs
    assert ("they are not tied" in caplog.text) is differs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("module.", "inside DistributedDataParallel or DeepSpeed"),
        ("_orig_mod.", "inside torch.compile"),
        ("base_model.model.", "inside peft .*merge_and_unload"),
        ("_fsdp_wrapped_module.", "inside FSDP"),
        ("text_model.", "the names of the tensors begin with text_model., which"),
    ],
)
def test_names_in_wrappers_are_refused_with_their_cause(
    family: str, prefix: str, words: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    """transformers would start from random weights."""
    source = saved(family, tie=False)
    tensors = load_file(source / "model.safetensors")
    folder = write(source, tmp_path / "new", rename(tensors, lambda name: prefix + name))
    with pytest.raises(JinguError, match=words):
        open_hf(folder)
    if prefix == "text_model.":
        return
    # Wrappers can also be in the middle of a name.
    inside = rename(tensors, lambda name: name.replace(".0.", f".0.{prefix}"))
    with pytest.raises(JinguError, match=words):
        open_hf(write(source, tmp_path / "inside", inside))


def test_a_tensor_that_is_stored_twice_is_refused(saved: Callable[..., Path], tmp_path: Path) -> None:
    source = saved("llama", tie=False)
    tensors = load_file(source / "model.safetensors")
    folder = write(source, tmp_path / "new", {**tensors, "norm.weight": tensors["model.norm.weight"] + 1})
    with pytest.raises(JinguError, match=r"model\.norm\.weight is stored twice, as .*norm\.weight"):
        open_hf(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_models_without_a_head(family: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    """What LlamaModel.save_pretrained writes; AutoModelForCausalLM adds the tied head."""
    transformers.AutoModel.from_pretrained(saved(family, tie=True)).save_pretrained(tmp_path / "body")
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    assert config["architectures"][0].endswith("Model")
    result = logits(tmp_path / "body")
    torch.testing.assert_close(result, logits_of_transformers(tmp_path / "body"), rtol=1e-4, atol=1e-5)
    transformers.AutoModel.from_pretrained(saved(family, tie=False)).save_pretrained(tmp_path / "untied")
    with pytest.raises(JinguError, match=r"missing: lm_head\.weight\."):
        open_hf(tmp_path / "untied")


# Several files


def add_shards(folder: Path, tensors: Tensors, name: str = "model.safetensors.index.json") -> None:
    """Write tensors as two shards with an index."""
    names = sorted(tensors)
    table = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({key: tensors[key].contiguous() for key in part}, folder / file, {"format": "pt"})
        table |= dict.fromkeys(part, file)
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))


def test_of_several_sources_that_of_transformers_is_read(
    saved: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved("llama", tie=False)
    tensors = load_file(source / "model.safetensors")
    other = {name: tensor * 1.5 for name, tensor in tensors.items()}
    # 1. A single file, an index of other weights, and pickles.
    folder = write(source, tmp_path / "both", tensors)
    add_shards(folder, other)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    save_file(other, folder / "model.fp16.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(folder), logits_of_transformers(folder), rtol=1e-4, atol=1e-5)
    assert "has both model.safetensors and an index" in caplog.text
    # 2. Only the index.
    (folder / "model.safetensors").unlink()
    caplog.clear()
    torch.testing.assert_close(logits(folder), logits_of_transformers(folder), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(folder), logits(write(source, tmp_path / "other", other)))
    # 3. A single file that has an index, and another that the config names.
    folder = write(source, tmp_path / "indexed", tensors)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = logits(folder)
    assert not caplog.text
    save_file(other, folder / "chosen.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "chosen.safetensors"}))
    torch.testing.assert_close(logits(folder), logits_of_transformers(folder), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(folder), expected)
    # 4. Only a variant.
    folder = write(source, tmp_path / "variant", tensors)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with pytest.raises(JinguError, match=r"only model\.fp16\.safetensors.*rename it to model\.safetensors"):
        open_hf(folder)


def test_adapters_beside_a_whole_model_belong_to_it(saved: Callable[..., Path], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from jingu.formats.models import open_model

    folder = shutil.copytree(saved("llama", tie=False), tmp_path / "model")
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, base_model_name_or_path="elsewhere")
    get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "org/elsewhere"}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model = load_model(open_model(folder), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(TOKENS)), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(theirs(TOKENS).logits, logits(folder))
