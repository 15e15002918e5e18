"""Writing adapters in the format of peft, which `jingu.formats.peft` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.formats.huggingface import write_json
from jingu.formats.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, PROMPT_KEY, TOKEN_ROWS
from jingu.formats.peft_experts import EXPERT_PAIRS, join_expert_adapters
from jingu.formats.stored_model import Shapes, StoredModel, read_lora_pair
from jingu.model.adapter_specs import DeepPrompt, Ia3, Lora, SoftPrompt
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES, equivalent_spec, map_tensors
from jingu.model.families.name_map import TRANSPOSE, TensorMapping
from jingu.model.prompt_tuning import DeepPromptLayer, SoftPromptLayer
from jingu.model.spec import ModelSpec
from jingu.model.trainable import is_trained
from jingu.runtime.files import create_folder_atomically
from jingu.runtime.hub import hub_name_of
from jingu.text.tokenizer_files import copy_tokenizer

# Ends of the keys of matrix A, whose first dim is the rank: of a linear layer [R, I], and of an embedding [R, V].
_A_KEYS = ("lora_A.weight", "lora_embedding_A")
# Ends of the names of parameters that hold the matrices of all experts.
_PARAMETERS = (".experts.gate_up_proj", ".experts.down_proj")
_USE_THE_RUN = "Use the run itself: every command accepts it."

# jingu's modules whose weights one matrix of Hugging Face contains, in order, and the number of outputs of each.
Modules = Mapping[str, int]


def write_adapters(adapters: StoredModel, base: StoredModel, base_path: Path, to: Path) -> None:
    """Write adapters as a peft folder, for the exported base model, with the tokenizer and generation config.

    Args:
        base_path: path of the base model, which the config names.
        to: a new or empty folder.

    Raises:
        JinguError: peft does not support these adapters.
    """
    adapter = adapters.spec.adapter
    assert adapter is not None
    if isinstance(adapter, Lora | Ia3):
        config, tensors = _convert_weights(adapters, base, adapter)
        # peft's class for SEQ_2_SEQ_LM needs something that transformers 5 removed. These adapters need no task.
        encoder_decoder_task = None
    else:
        config, tensors = _convert_prompt(adapters, adapter)
        encoder_decoder_task = "SEQ_2_SEQ_LM"
    config |= {
        "task_type": "CAUSAL_LM" if base.spec.num_encoder_layers is None else encoder_decoder_task,
        **_describe_base(base_path),
        "inference_mode": True,
    }
    with create_folder_atomically(to) as folder:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, config)
        if adapters.tokenizer_folder is not None:
            copy_tokenizer(adapters.tokenizer_folder, folder, adapters.chat_templates)
        if adapters.generation_config is not None:
            write_json(folder / "generation_config.json", adapters.generation_config)


def _describe_base(path: Path) -> dict[str, Any]:
    """Return the keys of peft's config that name the base model: of one on a hub, its name and commit."""
    name = hub_name_of(path)
    if name is None:
        return {"base_model_name_or_path": str(path)}
    return {"base_model_name_or_path": name.repository, "revision": name.revision}


def _convert_weights(
    adapters: StoredModel, base: StoredModel, adapter: Lora | Ia3
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return peft's config and tensors for LoRA or IA3."""
    shapes = parameter_shapes(adapters.spec)
    tensors: dict[str, Tensor] = {}
    _check_experts(adapters, base, adapter)
    _check_mixers(adapters, base)
    saved_modules = _add_saved_modules(adapters, base, tensors) if isinstance(adapter, Lora) else []
    # The rank of each of Hugging Face's modules. That of a fused matrix is the sum of the ranks of its parts.
    ranks: dict[str, int] = {}
    feedforward_modules: list[str] = []
    is_conv = False
    # Use the names of the exported base model.
    by_parameter = {module for _, modules, _ in _expert_parameters(base.spec) for module in modules}
    for mapping, modules in _matrices(equivalent_spec(base.spec)):
        if not by_parameter.isdisjoint(modules) or not any(
            f"{module}.{leaf}" in shapes for module in modules for leaf in ("lora_a", "ia3_in", "ia3_out")
        ):
            continue
        module = mapping.hf_name.removesuffix(".weight")
        is_conv = is_conv or mapping.transform is TRANSPOSE
        if isinstance(adapter, Lora):
            leaves = _convert_lora(adapters, base, shapes, mapping, modules)
        else:
            leaves = _convert_ia3(adapters, shapes, mapping, modules)
        ranks[module] = next((len(tensor) for leaf, tensor in leaves.items() if leaf in _A_KEYS), 0)
        tensors |= {f"{PREFIX}{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
        if f"{next(iter(modules))}.ia3_in" in shapes:
            feedforward_modules.append(module)
    further_ranks, targets = _add_experts(adapters, base, shapes, tensors)
    ranks |= further_ranks
    # Newer releases of peft, where all experts are one tensor, search for the last part of their former names.
    plain = [name for name in ranks if name not in further_ranks]
    names = sorted({name.rpartition(".")[2] if ".experts." in name else name for name in plain})
    config: dict[str, Any] = {"target_modules": names, "fan_in_fan_out": is_conv}
    if isinstance(adapter, Ia3):
        return {**config, "peft_type": "IA3", "feedforward_modules": feedforward_modules}, tensors
    # Increase alpha with the rank, so that all modules have the same scale.
    other_ranks = {name: rank for name, rank in ranks.items() if rank != adapter.rank}
    lora_config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": other_ranks,
        "alpha_pattern": {
            name: adapter.scale * (rank**0.5 if adapter.use_rslora else rank) for name, rank in other_ranks.items()
        },
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "lora_bias": adapter.lora_bias,
        "bias": "none",
    }
    if saved_modules:
        lora_config["modules_to_save"] = saved_modules
    if targets:
        lora_config["target_parameters"] = targets
    if adapter.trainable_token_indices:
        embedding = _embedding_name(base.spec)
        tensors[f"{PREFIX}{embedding}.{TOKEN_ROWS}"] = adapters.read("embedding.token_rows")
        lora_config["trainable_token_indices"] = {embedding: list(adapter.trainable_token_indices)}
    return config | lora_config, tensors


def _expert_parameters(spec: ModelSpec) -> Iterator[tuple[str, list[str], bool]]:
    """Yield transformers' parameters of all experts of a layer that peft adapts by their own names.

    These are in the family's files, or peft does not read adapters of single experts. Each comes with jingu's modules
    that it holds, and whether their outputs come in turns.
    """
    for mapping in map_tensors(spec):
        modules = [name.removesuffix(".weight") for name in mapping.jingu_shapes]
        if mapping.transform.of_experts and mapping.hf_name.endswith(_PARAMETERS):
            yield mapping.hf_name, modules, mapping.transform in EXPERT_PAIRS
        elif mapping.expert == 0 and not FAMILIES[spec.family].has_peft_experts:
            prefix, _, part = modules[0].rpartition(".")
            place = mapping.hf_name.partition(".experts.")[0] + ".experts"
            if part == "gate":
                yield f"{place}.gate_up_proj", [modules[0], f"{prefix}.up"], False
            elif part == "up" and spec.experts is not None and not spec.experts.gated:
                yield f"{place}.up_proj", modules, False
            elif part == "down":
                yield f"{place}.down_proj", modules, False


def _add_experts(
    adapters: StoredModel, base: StoredModel, shapes: Shapes, tensors: dict[str, Tensor]
) -> tuple[dict[str, int], list[str]]:
    """Add the adapters of all experts at once; return their ranks by the names of the parameters, and the names that
    peft's config lists."""
    ranks: dict[str, int] = {}
    for name, modules, in_pairs in _expert_parameters(base.spec):
        adapted = [module for module in modules if f"{module}.lora_a" in shapes]
        if adapted and adapted != modules:
            what = f"{name} has adapters for only some of {', '.join(modules)}"
            raise JinguError(f"{what}, which peft adapts together.", where=adapters.where, fix=_USE_THE_RUN)
        if not adapted:
            continue
        adapter = adapters.spec.adapter
        assert isinstance(adapter, Lora)
        pairs = []
        for module in modules:
            experts = range(shapes[f"{module}.lora_a"][0])
            both = [read_lora_pair(adapters, base, module, expert) for expert in experts]
            pairs.append((torch.stack([a for a, _ in both]), torch.stack([b for _, b in both]) / adapter.scale))
        rank = sum(a.shape[1] for a, _ in pairs)
        swaps = FAMILIES[base.spec.family].swaps_expert_adapters
        a, b = join_expert_adapters(pairs, rank, in_pairs=in_pairs, swaps=swaps)
        # peft wraps the module once for each parameter; the wrapper of the second one is outside.
        place, _, parameter = name.rpartition(".")
        down = f"{modules[0].rpartition('.')[0]}.down.lora_a"
        inner = ".base_layer" if parameter != "down_proj" and down in shapes else ""
        tensors |= {f"{PREFIX}{place}{inner}.lora_A.weight": a, f"{PREFIX}{place}{inner}.lora_B.weight": b}
        ranks[name] = rank
    return ranks, sorted({name.split(".", 3)[-1] for name in ranks})


def _check_experts(adapters: StoredModel, base: StoredModel, adapter: Lora | Ia3) -> None:
    """Raise JinguError if peft would load the adapters of a mixture of experts as something else, often silently.

    transformers 5 has the experts of a layer in two tensors: gates with ups, and downs. In some families, peft (0.21)
    takes targets of LoRA whose names end as those of single experts for experts.
    """
    spec = base.spec
    if spec.experts is None:
        return
    shapes = parameter_shapes(adapters.spec)
    adapted: list[tuple[str, str, bool]] = []
    expert_leaves = set()
    by_parameter = {module for _, modules, _ in _expert_parameters(spec) for module in modules}
    for mapping in map_tensors(spec):
        name = mapping.hf_name.removesuffix(".weight")
        modules = [parameter.rpartition(".")[0] for parameter in mapping.jingu_shapes]
        is_expert = any(len(shapes[parameter]) == 3 for parameter in mapping.jingu_shapes)
        if is_expert and isinstance(adapter, Lora) and modules[0] in by_parameter:
            continue  # `_add_experts` writes these
        if is_expert:
            expert_leaves.add(name.rpartition(".")[2])
        adapted += [
            (name, module, is_expert)
            for module in modules
            if any(f"{module}.{leaf}" in shapes for leaf in ("lora_a", "ia3_in", "ia3_out"))
        ]
    experts = {module for _, module, is_expert in adapted if is_expert}
    converts = FAMILIES[spec.family].has_peft_experts and isinstance(adapter, Lora)
    confused = [name for name, _, is_expert in adapted if not is_expert and name.rpartition(".")[2] in expert_leaves]
    every_part = {"gate", "up", "down"} if spec.experts.gated else {"up", "down"}
    problem = None
    if experts and not converts:
        problem = "the experts of this architecture"
    elif confused and converts:
        problem = f"{confused[0]}, whose name ends as those of experts"
    elif isinstance(adapter, Lora) and any(adapter.of_module(module).rank != adapter.rank for module in experts):
        problem = "experts whose rank differs from that of other modules"
    elif {module.rpartition(".")[2] for module in experts} not in (set(), {"down"}, every_part):
        problem = "some of an expert's matrices, unless it is down alone"
    if problem is not None:
        what = f"peft cannot load an adapter of {problem}."
        raise JinguError(what, where=adapters.where, fix=f"{_USE_THE_RUN} `jingu tune merge` writes a model.")


def _check_mixers(adapters: StoredModel, base: StoredModel) -> None:
    """Raise JinguError if peft refuses the adapter of a mixer's output, as it does in some families."""
    refused = FAMILIES[base.spec.family].peft_refused
    shapes = parameter_shapes(adapters.spec)
    for mapping in map_tensors(base.spec) if refused else ():
        module = mapping.hf_name.removesuffix(".weight")
        adapted = any(f"{name.removesuffix('weight')}lora_a" in shapes for name in mapping.jingu_shapes)
        if adapted and module.endswith(refused):
            what = f"peft refuses adapters of {module} in models of the type {base.spec.family}."
            fix = f"{_USE_THE_RUN} `jingu tune merge` writes a model."
            raise JinguError(what, where=adapters.where, fix=fix)


def _add_saved_modules(adapters: StoredModel, base: StoredModel, tensors: dict[str, Tensor]) -> list[str]:
    """Add the weights of fully trained modules (`modules_to_save`) to `tensors`, and return the modules' names.

    Raises:
        JinguError: a module is an expert, which peft does not support.
    """
    spec = equivalent_spec(base.spec)
    names = parameter_shapes(base.spec)
    is_saved = {name for name in names if is_trained(name, adapters.spec)}
    if "embedding.weight" in is_saved and spec.tie_word_embeddings:
        # peft stores a copy for each of two tied modules.
        spec = spec.model_copy(update={"tie_word_embeddings": False})
        is_saved.add("head.weight")
    modules = []
    for mapping in map_tensors(spec):
        if is_saved.isdisjoint(mapping.jingu_shapes):
            continue
        if mapping.expert is not None:
            raise JinguError(
                f"peft has no whole matrices of experts, such as {mapping.hf_name}.",
                where=adapters.where,
                fix=_USE_THE_RUN,
            )
        parts = []
        for name in mapping.jingu_shapes:
            source = adapters if name in is_saved else base
            parts.append(source.read(name if name in names else "embedding.weight"))
        # Copy the tensor: tied ones would share memory, which safetensors refuses.
        tensors[f"{PREFIX}{mapping.hf_name}"] = mapping.to_hf(parts).clone()
        modules.append(mapping.hf_name.rpartition(".")[0])
    return sorted(set(modules))


def _embedding_name(spec: ModelSpec) -> str:
    """Return Hugging Face's name of the embedding module."""
    name = next(mapping.hf_name for mapping in map_tensors(spec) if "embedding.weight" in mapping.jingu_shapes)
    return name.removesuffix(".weight")


def _matrices(spec: ModelSpec) -> Iterator[tuple[TensorMapping, Modules]]:
    """Yield Hugging Face's weight matrices, each with the modules of jingu whose weights it contains."""
    for mapping in map_tensors(spec):
        if mapping.hf_name.endswith(".weight") and len(mapping.shape) > 1:
            yield mapping, {name.removesuffix(".weight"): shape[0] for name, shape in mapping.jingu_shapes.items()}


def _convert_lora(
    adapters: StoredModel, base: StoredModel, shapes: Shapes, mapping: TensorMapping, modules: Modules
) -> dict[str, Tensor]:
    """Return peft's LoRA tensors for one matrix of Hugging Face, by the end of their keys.

    Their scale is that of `adapter.scale`; where the scale of a module differs, B includes the ratio. A fused matrix
    gets the matrices A of its parts stacked, [R, I] with the sum of their ranks, and B as a block-diagonal matrix.
    """
    adapter = adapters.spec.adapter
    assert isinstance(adapter, Lora)
    adapted_modules = [module for module in modules if f"{module}.lora_a" in shapes]
    pairs = {module: read_lora_pair(adapters, base, module, mapping.expert) for module in adapted_modules}
    a = [pairs[module][0] for module in adapted_modules]
    b = {module: pairs[module][1] / adapter.scale for module in adapted_modules}
    example = next(iter(b.values()))
    if adapted_modules == ["embedding"]:
        return {_A_KEYS[1]: b["embedding"].t(), "lora_embedding_B": a[0].t()}
    # The rows of a part without an adapter are zero.
    blocks = [b[module] if module in b else example.new_zeros(rows, 0) for module, rows in modules.items()]
    tensors = {
        "lora_A.weight": torch.cat(a),
        "lora_B.weight": _rows_to_hf(mapping, torch.block_diag(*blocks)),
    }
    if adapter.lora_bias:
        biases = []
        for module, rows in modules.items():
            scale = adapter.of_module(module).scale / adapter.scale
            biases.append(
                scale * adapters.read(f"{module}.lora_bias") if module in adapted_modules else example.new_zeros(rows)
            )
        tensors["lora_B.bias"] = _rows_to_hf(mapping, torch.cat(biases))
    if f"{adapted_modules[0]}.lora_m" in shapes:
        # DoRA: the magnitudes of a part without an adapter are the norms of its weight's rows, which change nothing.
        magnitudes = []
        for module in modules:
            if module in adapted_modules:
                magnitudes.append(adapters.read(f"{module}.lora_m"))
            else:
                weight = base.read(f"{module}.weight").to(example.dtype)
                magnitudes.append(weight.square().sum(1).sqrt())
        tensors["lora_magnitude_vector"] = _rows_to_hf(mapping, torch.cat(magnitudes))
    return tensors


def _convert_ia3(adapters: StoredModel, shapes: Shapes, mapping: TensorMapping, modules: Modules) -> dict[str, Tensor]:
    """Return peft's IA3 tensor for one matrix of Hugging Face: factors of its inputs [1, I] or outputs [O, 1]."""
    input_factors = f"{next(iter(modules))}.ia3_in"
    if input_factors in shapes:
        return {"ia3_l": adapters.read(input_factors).unsqueeze(0)}
    scales_by_module = {
        module: adapters.read(f"{module}.ia3_out") for module in modules if f"{module}.ia3_out" in shapes
    }
    example = next(iter(scales_by_module.values()))
    factors = [
        scales_by_module[module] if module in scales_by_module else example.new_ones(rows)
        for module, rows in modules.items()
    ]
    return {"ia3_l": _rows_to_hf(mapping, torch.cat(factors)).unsqueeze(1)}


def _rows_to_hf(mapping: TensorMapping, rows: Tensor) -> Tensor:
    """Reorder the rows of a tensor, one per output of a matrix, from jingu's order to Hugging Face's.

    A transposed matrix has the same order in both.
    """
    return rows if mapping.transform is TRANSPOSE else mapping.transform.to_hf(rows, mapping.spec)


def _convert_prompt(
    adapters: StoredModel, adapter: SoftPrompt | DeepPrompt
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return peft's config and tensor for prompt tuning, P-tuning or prefix tuning."""
    spec = adapters.spec
    config: dict[str, Any] = {
        "num_virtual_tokens": adapter.num_virtual_tokens,
        "num_layers": spec.num_layers,
        "num_attention_heads": spec.attention.num_heads,
        "token_dim": spec.hidden_size,
        "num_transformer_submodules": 1,
    }
    if isinstance(adapter, DeepPrompt):
        prefix = _convert_prefix(adapters, adapter)
        sizes = {(part.num_kv_heads, part.head_dim) for part in (layer.attention for layer in spec.layers)}
        if len(sizes) > 1:
            what = "peft has no prefixes for layers with different key-value heads."
            raise JinguError(what, where=adapters.where, fix=_USE_THE_RUN)
        heads, head_dim = sizes.pop()
        config |= {
            "peft_type": "PREFIX_TUNING",
            "num_layers": prefix.shape[1] // (2 * heads * head_dim),
            "num_attention_heads": heads,
            "token_dim": heads * head_dim,
            "num_transformer_submodules": 1 if spec.num_encoder_layers is None else 2,
        }
        return config, {PROMPT_KEY: prefix}
    if adapter.after_input:
        raise JinguError("peft has no prompts after a text.", where=adapters.where, fix=_USE_THE_RUN)
    name = "prompt" if spec.num_encoder_layers is None else "encoder.prompt"
    layer = SoftPromptLayer(adapter, spec)
    _load_parameters(layer, name, adapters)
    if adapter.encoder == "none":
        config |= {"peft_type": "PROMPT_TUNING"}
    else:
        config |= {"peft_type": "P_TUNING", "encoder_hidden_size": adapter.encoder_hidden_size}
    return config, {PROMPT_KEY: layer.vectors().detach()}


def _convert_prefix(adapters: StoredModel, adapter: DeepPrompt) -> Tensor:
    """Return the keys and values of all layers side by side, [virtual tokens, 2 × layers × KV heads × head dim].

    Encoder-decoders have twice as many columns: peft also stores keys and values of the cross-attention, which are
    zeros here.

    Raises:
        JinguError: the encoder has prompts in its blocks.
    """
    spec = adapters.spec
    if spec.prompts[1]:
        raise JinguError("peft has no prompts in the blocks of an encoder.", where=adapters.where, fix=_USE_THE_RUN)
    parts: list[Tensor] = []
    for number in range(spec.num_layers):
        layer = DeepPromptLayer(adapter, spec, spec.layer(number))
        _load_parameters(layer, f"blocks.{number}.attention.prompt", adapters)
        keys_and_values = [x.flatten(1).detach() for x in layer.keys_and_values()]
        parts += keys_and_values
        if spec.num_encoder_layers is not None:
            # Every second pair is for cross-attention, and is not used.
            parts += [torch.zeros_like(x) for x in keys_and_values]
    return torch.cat(parts, 1)


def _load_parameters(module: nn.Module, prefix: str, adapters: StoredModel) -> None:
    for name, parameter in module.named_parameters():
        parameter.data = adapters.read(f"{prefix}.{name}")
