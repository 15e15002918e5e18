"""`jingu model grow`: write a larger model, from which a run can start, as a Hugging Face folder."""

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
    """How a model grows: vocabulary, then depth, width and experts. `jingu/model/expand.py` describes the rules.

    None leaves a dimension as it is.

    Attributes:
        tokenizer: folder of the new model's tokenizer. Tokens of the old tokenizer keep their embedding rows; a new
            token starts as the mean of the rows of its parts.
        vocab_size: rows of the embedding; None: those of the new tokenizer if there is one, else of the old model.
        num_layers: number of blocks.
        depth_rule: where the new blocks are inserted.
        whole_copies: whether new blocks start as full copies of others; otherwise they start as identity functions.
        hidden_size: hidden size, a multiple of the old one.
        experts: experts per block.
        active: experts per token.
        noise: standard deviation of the noise added to copies, relative to that of the copied weights.
        seed: seed of the noise and of the routers of new experts.
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
    """Write a larger model that is computed from the weights of `model`, in any format that `open_model` reads.

    Args:
        to: a new or empty folder.
        dtype, check: as for `convert`.

    Raises:
        JinguError: `growth` changes nothing, a rule does not fit the model, or as for `convert`.
    """
    stored_model = open_model(model)
    grows = (growth.tokenizer, growth.vocab_size, growth.num_layers, growth.hidden_size, growth.experts)
    if all(value is None for value in grows):
        raise JinguError(
            "no option says how the model should grow.",
            where=model,
            fix="Give --tokenizer, --vocab-size, --num-layers, --hidden-size or --experts.",
        )
    # Each step only wraps the read function of the previous one. `write_model` then computes tensor by tensor.
    larger = LazyModel(stored_model.spec, stored_model.read)
    if growth.tokenizer is not None or growth.vocab_size is not None:
        stored_model, larger = _grow_vocab(stored_model, growth.tokenizer, growth.vocab_size)
    if growth.num_layers is not None:
        larger = expand_depth(larger, growth.num_layers, growth.depth_rule, zeroed=not growth.whole_copies)
    if growth.hidden_size is not None:
        larger = expand_width(larger, growth.hidden_size, growth.noise, growth.seed)
    if growth.experts is not None:
        larger = upcycle_to_experts(larger, growth.experts, growth.active, growth.noise, growth.seed)
    write_model(replace(stored_model, spec=larger.spec, read=larger.read), to, dtype, check)
    extend_provenance(to, [], model)
    before, after = (count_parameters(spec, parameter_shapes(spec)) for spec in (stored_model.spec, larger.spec))
    print(f"It has {after.total:,} parameters ({after.active:,} active); {model} has {before.total:,}.")


def _grow_vocab(source: StoredModel, folder: Path | None, rows: int | None) -> tuple[StoredModel, LazyModel]:
    """Return the model with its new tokenizer and special token ids, and its weights for the new vocabulary.

    Args:
        folder: the new tokenizer; None: only rows are added.
        rows: rows of the new embedding; None: as many as the tokenizer has ids.
    """
    old_rows = source.spec.vocab_size
    if folder is None:
        assert rows is not None
        if rows <= old_rows:
            raise JinguError(
                f"the model has {old_rows:,} rows already.", where="--vocab-size", fix=f"Give more than {old_rows:,}."
            )
        # For each new row, the old rows whose mean it is; an empty list stands for all old rows.
        old_rows_of: list[list[int]] = [[row] for row in range(old_rows)] + [[]] * (rows - old_rows)
        return source, replace_vocab(LazyModel(source.spec, source.read), old_rows_of)
    new = Tokenizer.load(folder)
    old = Tokenizer.load(source.tokenizer())
    if rows is not None and rows < new.vocab_size:
        raise JinguError(
            f"the tokenizer has {new.vocab_size:,} tokens.", where="--vocab-size", fix="Give as many or more."
        )
    old_rows_of = map_vocab(new, old)
    old_rows_of += [[]] * ((rows or 0) - len(old_rows_of))
    new_tokens = new.vocab()
    new_ids = {old_id: new_tokens[token] for token, old_id in old.vocab().items() if token in new_tokens}
    new_ids[old.eos_token_id] = new.eos_token_id
    generation_config = source.generation_config
    source = replace(
        source,
        tokenizer_folder=folder,
        config=_translate_ids(source.config, new_ids),
        generation_config=None if generation_config is None else _translate_ids(generation_config, new_ids),
        chat_templates=None,
    )
    num_copied = sum(len(ids) == 1 for ids in old_rows_of)
    print(f"{num_copied:,} of {new.vocab_size:,} tokens keep their rows; the others start as means.")
    return source, replace_vocab(LazyModel(source.spec, source.read), old_rows_of)


def _translate_ids(settings: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Translate the token ids in settings to the new tokenizer. Ids of tokens that it lacks are left out.

    Args:
        settings: a config or a generation config; keys that are no token ids are copied.
        new_ids: new id by old id.
    """
    result = {}
    for key, value in settings.items():
        if not key.endswith(("_token_id", "suppress_tokens")) or value is None:
            result[key] = value
        elif isinstance(value, list):
            ids = [new_ids[token_id] for token_id in value if token_id in new_ids]
            result |= {key: ids} if ids else {}
        elif value in new_ids:
            result[key] = new_ids[value]
    return result
