"""Models that keep matrices in the forms of other tools compute what the dequantized ones do, from the stored bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.formats.huggingface import open_hf
from jingu.formats.safetensors import read_header
from jingu.formats.stored_model import StoredModel, load_model, stored_matrices
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import Decoder
from jingu.model.inputs import Inputs
from jingu.model.quantize import keep_stored
from jingu.model.quantized_weight import StoredWeight
from tests.formats.test_packed_forms import change, generator, quantize_folder, save_llama

TOKENS = torch.arange(3, 27).view(2, 12)
FORMS = ("gptq", "awq", "fp8", "nf4", "mxfp4", "fused gptq", "experts nf4", "latent fp8")
CPU = torch.device("cpu")


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator())


def save_form(form: str, folder: Path) -> Path:
    """A tiny model of two layers whose blocks have random matrices in a form."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 128}
    if form == "mxfp4":
        config: Any = transformers.GptOssConfig(**sizes, num_local_experts=4, head_dim=16, num_experts_per_tok=2)
        transformers.GptOssForCausalLM(config).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = random_bytes(experts, outputs, inputs // 32, 16)
            tensors[f"{name}_scales"] = random_bytes(experts, outputs, inputs // 32) % 4 + 118
        change(folder, tensors, {"quant_method": "mxfp4"})
    elif form in ("gptq", "awq"):
        quantize_folder(save_llama(folder), form)
    elif form == "fused gptq":
        config = transformers.Phi3Config(**sizes, pad_token_id=0, max_position_embeddings=64)
        transformers.Phi3ForCausalLM(config).save_pretrained(folder)
        quantize_folder(folder, "gptq")
    else:
        if form == "latent fp8":
            heads = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
            heads |= {"v_head_dim": 16, "num_key_value_heads": 4}
            experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
            experts |= {"first_k_dense_replace": 1, "moe_intermediate_size": 32, "topk_group": 1}
            config = transformers.DeepseekV2Config(**{**sizes, **heads, **experts})
            transformers.DeepseekV2ForCausalLM(config).save_pretrained(folder)
        else:
            save_llama(folder, "qwen3_moe" if form == "experts nf4" else "llama")
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            matrix = tensors.pop(name)
            if form.endswith("fp8"):
                tensors[name] = (matrix * 1000).to(torch.float8_e4m3fn)
                grid = [-(-size // 16) for size in matrix.shape]
                tensors[f"{name}_scale_inv"] = torch.rand(grid, generator=generator()) / 1000
            else:
                packed, state = bnb.quantize_4bit(matrix.bfloat16(), compress_statistics=True, quant_type="nf4")
                tensors[name] = packed
                tensors |= {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
        fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        change(folder, tensors, fp8 if form.endswith("fp8") else {"quant_method": "bitsandbytes"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place, made = tmp_path_factory.mktemp("forms"), set[str]()

    def get(form: str) -> Path:
        folder = place / form
        if form not in made:
            save_form(form, folder)
            made.add(form)
        return folder

    return get


def keep(stored: StoredModel) -> Callable[[Decoder], object]:
    return lambda model: keep_stored(model, stored_matrices(stored, CPU, "here"))


def weights(model: nn.Module) -> list[StoredWeight]:
    return [module for module in model.modules() if isinstance(module, StoredWeight)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_those_of_the_dequantized_matrices(
    form: str, dtype: torch.dtype, folders: Callable[[str], Path]
) -> None:
    stored = open_hf(folders(form))
    models = load_model(stored, dtype), load_model(stored, dtype, prepare=keep(stored))
    with torch.no_grad():
        dequantized, packed = (model.logits(model(TOKENS)) for model in models)
    assert torch.equal(packed, dequantized)
    # Latent attention: four in each layer, one feed-forward, a shared one and the experts.
    matrices = {"mxfp4": 2 * 3, "latent fp8": 2 * 4 + 3 * 3}.get(form, 2 * 7)
    assert not weights(models[0]) and len(weights(models[1])) == matrices


@pytest.mark.parametrize("form", FORMS)
def test_the_model_in_memory_has_the_bytes_of_its_files(form: str, folders: Callable[[str], Path]) -> None:
    folder = folders(form)
    stored = open_hf(folder)
    model = load_model(stored, torch.float32, prepare=keep(stored))
    parts = {part.data_ptr(): part.nbytes for weight in weights(model) for part in weight.parts()}
    places = read_header(folder / "model.safetensors").values()
    plain = sum(place.bytes for place in places if place.dtype == torch.float32 and len(place.shape) > 0)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    # GPTQ's zero biases are not read, and scales in fp32 are counted in both.
    scales = sum(
        part.nbytes
        for part in {part.data_ptr(): part for weight in weights(model) for part in weight.parts()}.values()
        if part.dtype == torch.float32 and part.dim() > 0
    )
    assert parameters == plain - scales
    zero_biases = sum(place.bytes for place in places if place.dtype == torch.float16 and len(place.shape) == 1)
    assert sum(parts.values()) + parameters == sum(place.bytes for place in places) - zero_biases


@pytest.mark.parametrize("form", ["experts nf4", "mxfp4"])
def test_some_experts_have_only_their_bytes_in_memory(form: str, folders: Callable[[str], Path]) -> None:
    stored = open_hf(folders(form))
    experts = [weight for weight in weights(load_model(stored, torch.float32, prepare=keep(stored))) if weight.experts]
    assert experts
    for weight in experts:
        assert weight.experts is not None
        half = weight.experts(range(1, 3))
        assert half.shape == (2, *weight.shape[1:])
        assert torch.equal(half.whole(), weight.whole()[1:3]) and torch.equal(half.whole(1), weight.whole(2))
        sizes = [sum(part.nbytes for part in each.parts()) for each in (half, weight)]
        # Descriptions of single matrices differ in length.
        assert sizes[0] == pytest.approx(sizes[1] * 2 / weight.shape[0], rel=0.02)


def test_latent_attention_reads_the_parts_of_its_matrix(folders: Callable[[str], Path]) -> None:
    stored = open_hf(folders("latent fp8"))
    models: list[Any] = [load_model(stored, torch.bfloat16), load_model(stored, torch.bfloat16, prepare=keep(stored))]
    plain, packed = (model.blocks[1].attention.split_kv_weight(torch.bfloat16) for model in models)
    assert all(torch.equal(*pair) for pair in zip(plain, packed, strict=True))


def adapted(stored: StoredModel, dtype: torch.dtype, *, packed: bool) -> Decoder:
    """The model with random LoRA adapters."""
    spec = stored.spec.model_copy(update={"adapter": Lora(rank=3, alpha=6.0, target_modules=("blocks.*",))})

    def read(name: str) -> Tensor:
        if ".lora_" not in name:
            return stored.read(name)
        shape = shapes[name]
        return torch.randn(shape, generator=generator(len(name) + sum(shape))) / 10

    from jingu.model.decoder import parameter_shapes

    shapes = parameter_shapes(spec)
    source = StoredModel(spec, read, None, stored.where)
    prepare = keep(stored) if packed else lambda model: None
    return load_model(source, dtype, prepare=prepare).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_adapters_equal_those_on_the_dequantized_base(
    form: str, dtype: torch.dtype, folders: Callable[[str], Path]
) -> None:
    stored = open_hf(folders(form))
    gradients = []
    for packed in (False, True):
        model = adapted(stored, dtype, packed=packed)
        hidden = model(Inputs(TOKENS))
        model.logits(hidden).float().log_softmax(-1)[..., 7].sum().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if ".lora_" in name})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) >= 2 * 2 * 7
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.any(), name
        assert torch.equal(gradients[1][name], gradient), name


def test_models_without_quantized_matrices_are_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "plain")
    with pytest.raises(JinguError, match="no quantized matrices to keep as they are stored"):
        keep(open_hf(folder))(nn.Module())  # type: ignore[arg-type]
