"""`jingu model grow`: a larger model, written as a folder that a run begins from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jingu.errors import JinguError
from jingu.formats.export import write_model
from jingu.formats.models import open_model
from jingu.formats.provenance import extend_provenance
from jingu.formats.stored_model import StoredModel
from jingu.model.count import count_parameters
from jingu.model.decoder import parameter_shapes
from jingu.model.expand import DepthRule, LazyModel, expand_depth, expand_width, replace_vocab, upcycle_to_experts
from jingu.text.tokenizer import Tokenizer
from jingu.text.vocab_mapping import map_vocab


@dataclass(frozen=True)
class GrowthOptions:
    """How a model grows, in this order: vocabulary, depth, width, experts. `jingu/model/expand.py` has the rules.

    Attributes:
        tokenizer: folder of the new model's tokenizer. The row of a token that the old one has is copied; others start
            as the mean of the rows of their parts.
        vocab_size: rows of the embedding; None: as many as the new tokenizer has, or the old model.
        num_layers: number of blocks; `depth_rule` says where the new ones go. They start as identity functions, or with
            `whole_copies` as full copies.
        hidden_size: hidden size, a multiple of the old one.
        experts: experts per block, of which each token uses `active`.
        noise: standard deviation of the noise on copies, relative to that of what is copied.
    """

    tokenizer: Path | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    depth_rule: DepthRule = "interleaved"
    whole_copies: bool = False
    hidden_size: int | None = None
    experts: int | None = None
    active: int = 2
    noise: float = 0.0
    seed: int = 0


def grow_model(model: Path, to: Path, growth: GrowthOptions, dtype: str = "auto", check: bool = False) -> None:
    """Write a larger model than `model` (a run, a step of one, a Hugging Face folder, a GGUF file), from its weights.

    Raises:
        JinguError: nothing is to grow, a rule does not fit the model, or as `convert`.
    """
    stored = open_model(model)
    grows = (growth.tokenizer, growth.vocab_size, growth.num_layers, growth.hidden_size, growth.experts)
    if all(value is None for value in grows):
        raise JinguError(
            "no option says how the model should grow.",
            where=model,
            fix="Give --tokenizer, --vocab-size, --num-layers, --hidden-size or --experts.",
        )
    # Nothing is computed here: each step wraps the reader of the one before.
    larger = LazyModel(stored.spec, stored.read)
    if growth.tokenizer is not None or growth.vocab_size is not None:
        stored, larger = _grow_vocab(stored, growth.tokenizer, growth.vocab_size)
    if growth.num_layers is not None:
        larger = expand_depth(larger, growth.num_layers, growth.depth_rule, zeroed=not growth.whole_copies)
    if growth.hidden_size is not None:
        larger = expand_width(larger, growth.hidden_size, growth.noise, growth.seed)
    if growth.experts is not None:
        larger = upcycle_to_experts(larger, growth.experts, growth.active, growth.noise, growth.seed)
    write_model(replace(stored, spec=larger.spec, read=larger.read), to, dtype, check)
    extend_provenance(to, [], model)
    before, after = (count_parameters(spec, parameter_shapes(spec)) for spec in (stored.spec, larger.spec))
    print(f"It has {after.total:,} parameters ({after.active:,} active); {model} has {before.total:,}.")


def _grow_vocab(stored: StoredModel, folder: Path | None, rows: int | None) -> tuple[StoredModel, LazyModel]:
    """Return the model with the new tokenizer and its special token ids, and its weights for another vocabulary."""
    old_rows = stored.spec.vocab_size
    if folder is None:
        assert rows is not None
        if rows <= old_rows:
            raise JinguError(
                f"the model has {old_rows:,} rows already.", where="--vocab-size", fix=f"Give more than {old_rows:,}."
            )
        # For each new row the old rows of which it is the mean; none: of all.
        old_rows_of: list[list[int]] = [[row] for row in range(old_rows)] + [[]] * (rows - old_rows)
        return stored, replace_vocab(LazyModel(stored.spec, stored.read), old_rows_of)
    new = Tokenizer.load(folder)
    old = Tokenizer.load(stored.tokenizer())
    if rows is not None and rows < new.vocab_size:
        raise JinguError(
            f"the tokenizer has {new.vocab_size:,} tokens.", where="--vocab-size", fix="Give as many or more."
        )
    old_rows_of = map_vocab(new, old)
    old_rows_of += [[]] * ((rows or 0) - len(old_rows_of))
    new_tokens = new.vocab()
    new_ids = {old_id: new_tokens[token] for token, old_id in old.vocab().items() if token in new_tokens}
    new_ids[old.eos_token_id] = new.eos_token_id
    generation_config = stored.generation_config
    stored = replace(
        stored,
        tokenizer_folder=folder,
        special_token_ids=_translate_ids(stored.special_token_ids, new_ids),
        generation_config=None if generation_config is None else _translate_ids(generation_config, new_ids),
    )
    copied = sum(len(ids) == 1 for ids in old_rows_of)
    print(f"{copied:,} of {new.vocab_size:,} tokens keep their rows; the others start as means.")
    return stored, replace_vocab(LazyModel(stored.spec, stored.read), old_rows_of)


def _translate_ids(settings: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Return settings with the new tokenizer's token ids; ids of tokens that it does not have are left out."""
    translated = {}
    for key, value in settings.items():
        if not key.endswith("_token_id"):
            translated[key] = value
        elif isinstance(value, list):
            ids = [new_ids[token_id] for token_id in value if token_id in new_ids]
            translated[key] = ids or None
        else:
            translated[key] = new_ids.get(value)
    return {key: value for key, value in translated.items() if value is not None}
