"""Names that configuration keys and fields of the model spec had in older versions.

They are migrated only in files that jingu stored itself: the `config.yaml` and `model.json` of a run, the manifest of a
checkpoint or a data set, the record of a tokenizer. In a file that a user wrote, an old key is an error that names the
new key (`jingu.config.explain`). No old name is in use again, so migrating a new file changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Names = dict[str, dict[str, str]]
"""New names by old names, for each section; sections go by their old dotted paths."""


def _parse(table: dict[str, str]) -> Names:
    return {section: dict(pair.split("=") for pair in pairs.split()) for section, pairs in table.items()}


# `section[type]` holds names of one type of a section.
_CONFIG: Names = _parse(
    {
        "": "runs=runs_dir",
        "tokenizer": "vocabulary=vocab_size",
        "data": "held_out=validation_fraction largest_document=max_document_bytes"
        " beginning=add_bos_token workers=num_workers reading=reader local=local_cache"
        " within_documents=document_mask",
        "data.sources": "most_epochs=max_epochs",
        "data.stages": "from_step=start_step",
        "data.drop": "from_step=start_step",
        "data.objective": "shortest=min_prefix longest=max_prefix mean_length=mean_span_length"
        " sentinels=num_sentinels train_on=loss_on longer=overflow sequences=packing"
        " obey_special=parse_special_tokens",
        "data.objective[span_corruption]": "rate=noise_density",
        "model": "layers=num_layers encoder_layers=num_encoder_layers width=hidden_size heads=num_heads"
        " kv_heads=num_kv_heads head_size=head_dim feed_forward=intermediate_size"
        " vocabulary=vocab_size context=max_position_embeddings"
        " tied_embeddings=tie_word_embeddings rope_base=rope_theta norm_epsilon=norm_eps"
        " initial_std=initializer_range",
        "model.experts": "number=num_experts active=num_experts_per_token shared=shared_intermediate_size"
        " shared_gated=shared_expert_gate capacity=capacity_factor balance=aux_loss_coef"
        " balance_over=aux_loss_scope z=z_loss_coef",
        "tune": "last=num_trainable_layers start=initial_adapter base=quantization"
        " rank_stabilised=use_rslora dora=use_dora targets=target_modules"
        " length=num_virtual_tokens initial_text=init_text hidden=encoder_hidden_size",
        "batch": "global_size=global_batch_size micro_size=micro_batch_size",
        "optimizer": "groups=param_groups moments=state_dtype epsilon=eps power=decay_rate"
        " clip=clip_threshold floor=min_weight_rms",
        "optimizer.groups": "rate=lr_multiplier",
        "schedule": "minimum=min_lr",
        "train": "clip_norm=max_grad_norm z_loss=z_loss_coef noise=neftune_alpha",
        "precision": "initial_scale=initial_loss_scale window=loss_scale_window minimum_scale=min_loss_scale",
        "parallel": "zero=zero_stage context_by=context_method schedule=pipeline_schedule parts=layers_per_stage",
        "evaluation": "sequences=num_sequences sequences_at_end=num_sequences_at_end prompts=sample_prompts"
        " prompt_tokens=max_new_tokens",
        "checkpoint": "minutes=every_minutes background=async_save keep=keep_last best_by=best_metric"
        " address=url memory=in_memory grace=grace_seconds",
    }
)
CONFIG_VALUES: Names = {
    "data.packing": {"cut": "concat"},
    "data.objective.type": {"prefix": "prefix_lm"},
    "data.objective.train_on": {"answers": "assistant", "last_answer": "last_assistant"},
    "data.objective.longer": {"cut": "truncate"},
    "data.objective.sequences": {"by_length": "group_by_length"},
    "schedule.type": {"noam": "inverse_sqrt", "warmup-stable-decay": "wsd"},
    "parallel.context_by": {"heads": "ulysses"},
}
"""New values by old values, for each setting; settings go by their old dotted paths."""
_SPEC: Names = _parse(
    {
        "": "vocabulary=vocab_size width=hidden_size layers=num_layers"
        " encoder_layers=num_encoder_layers context=max_position_embeddings"
        " tied_embeddings=tie_word_embeddings normalised_head=normalize_lm_head"
        " scaled_head=scale_lm_head initial_std=initializer_range base=quantization"
        " frozen=frozen_parameters",
        "attention": "heads=num_heads kv_heads=num_kv_heads head_size=head_dim scaled=scale_scores"
        " window=sliding_window",
        "feed_forward": "number=num_experts active=num_experts_per_token size=intermediate_size"
        " shared=shared_intermediate_size shared_gated=shared_expert_gate"
        " capacity=capacity_factor balance=aux_loss_coef balance_over=aux_loss_scope"
        " z=z_loss_coef",
        "feed_forward.router": "normalised=norm_topk_prob",
        "norm": "epsilon=eps",
        "position": "base=theta share=partial_rotary_factor buckets=num_buckets",
        "position.scaling": "original_context=original_max_position_embeddings",
        "adapter": "targets=target_modules rank_stabilised=use_rslora magnitudes=use_dora"
        " tokens=num_virtual_tokens hidden=encoder_hidden_size behind=after_input",
    }
)
_DATA_MANIFEST: Names = {
    "": {"vocabulary": "vocab_size", "end_id": "eos_token_id", "held_out": "validation"},
    "train": {"beside": "sidecars"},
    "held_out": {"beside": "sidecars"},
    "settings": {**_CONFIG["data"], "beginning": "bos_ids"},
    "settings.objective": _CONFIG["data.objective"],
}
_DATA_VALUES: Names = {path.replace("data.", "settings.", 1): values for path, values in CONFIG_VALUES.items()}


def migrate_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a stored `config.yaml` with today's names."""
    return _migrate(tree, _CONFIG, CONFIG_VALUES)


def migrate_spec(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a stored model spec with today's names."""
    return _migrate(tree, _SPEC)


def migrate_data_manifest(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a data set with today's names."""
    return _migrate(tree, _DATA_MANIFEST, _DATA_VALUES)


def migrate_tokenizer_record(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a trained tokenizer with today's names."""
    return _migrate(tree, {"": _CONFIG["tokenizer"]})


def renamed_key(path: tuple[str, ...]) -> str | None:
    """Return the new dotted key of an old one; None for a key that was not renamed."""
    new = [_CONFIG.get(".".join(path[:depth]), {}).get(key, key) for depth, key in enumerate(path)]
    return ".".join(new) if new[-1] != path[-1] else None


def _migrate(
    tree: dict[str, Any], keys: Names, values: Mapping[str, dict[str, str]] = {}, path: str = ""
) -> dict[str, Any]:
    """Rename keys and values of a tree. `path` is its dotted path in old names."""
    names = keys.get(path, {}) | keys.get(f"{path}[{tree.get('type')}]", {})
    migrated = {}
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            value = _migrate(value, keys, values, inner)
        elif isinstance(value, list):
            value = [_migrate(item, keys, values, inner) if isinstance(item, dict) else item for item in value]
        elif isinstance(value, str):
            value = values.get(inner, {}).get(value, value)
        migrated[names.get(key, key)] = value
    return migrated
