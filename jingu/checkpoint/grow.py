"""`jingu model grow`: a larger model, written as a folder that a run begins from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jingu.checkpoint.hub import OpenModel, open_model
from jingu.checkpoint.verbs import write_model
from jingu.errors import JinguError
from jingu.model.count import count_parameters
from jingu.model.decoder import parameter_shapes
from jingu.model.grow import DepthRule, Model, deeper, wider, with_experts, with_vocabulary
from jingu.text.pieces import sources
from jingu.text.tokenizer import Tokenizer


def grow(
    model: Path,
    to: Path,
    tokenizer: Path | None = None,
    vocabulary: int | None = None,
    layers: int | None = None,
    depth_rule: DepthRule = "interleaved",
    whole_copies: bool = False,
    width: int | None = None,
    experts: int | None = None,
    active: int = 2,
    noise: float = 0.0,
    seed: int = 0,
    dtype: str = "auto",
    check: bool = False,
) -> None:
    """Write a larger model than `model` (a run, a step of one, a Hugging Face folder, a GGUF file), of its weights.

    What is asked for is done in this order: vocabulary, depth, width, experts. `jingu/model/grow.py` has the rules.

    Args:
        tokenizer: folder of the new model's tokenizer; a piece that the old one knows keeps its row, others begin as
            the mean of their parts' rows.
        vocabulary: rows of the embedding; None: as many as the new tokenizer has, or the old model.
        layers: blocks; `depth_rule` says where the new ones stand, `whole_copies` that they speak from the start.
        width: a multiple of the old one.
        experts: a block; each token passes `active` of them.
        noise: of copies, as a share of the standard deviation of what is copied.

    Raises:
        JinguError: nothing is asked for, a rule does not fit the model, or what `convert` raises.
    """
    opened = open_model(model)
    if tokenizer is None and vocabulary is None and layers is None and width is None and experts is None:
        raise JinguError(
            "nothing says how the model should grow.",
            where=model,
            fix="Give --tokenizer, --vocabulary, --layers, --width or --experts.",
        )
    grown = Model(opened.spec, opened.read)
    if tokenizer is not None or vocabulary is not None:
        opened, grown = _with_vocabulary(opened, tokenizer, vocabulary)
    if layers is not None:
        grown = deeper(grown, layers, depth_rule, zeroed=not whole_copies)
    if width is not None:
        grown = wider(grown, width, noise, seed)
    if experts is not None:
        grown = with_experts(grown, experts, active, noise, seed)
    write_model(replace(opened, spec=grown.spec, read=grown.read), to, dtype, check)
    before, after = (count_parameters(spec, parameter_shapes(spec)) for spec in (opened.spec, grown.spec))
    print(f"It has {after.total:,} parameters ({after.active:,} active) for the {before.total:,} of {model}.")


def _with_vocabulary(opened: OpenModel, folder: Path | None, rows: int | None) -> tuple[OpenModel, Model]:
    """The model with another vocabulary; and the old one, with the new tokenizer and the ids that it needs."""
    old_rows = opened.spec.vocabulary
    if folder is None:
        assert rows is not None
        if rows <= old_rows:
            raise JinguError(
                f"the model has {old_rows:,} rows already.", where="--vocabulary", fix=f"Give more than {old_rows:,}."
            )
        means: list[list[int]] = [[row] for row in range(old_rows)] + [[]] * (rows - old_rows)
        return opened, with_vocabulary(Model(opened.spec, opened.read), means)
    new, old = Tokenizer.load(folder), Tokenizer.load(opened.tokenizer())
    if rows is not None and rows < new.vocabulary:
        raise JinguError(
            f"the tokenizer has {new.vocabulary:,} entries.", where="--vocabulary", fix="Give as many or more."
        )
    found = sources(new, old)
    found += [[]] * ((rows or 0) - len(found))
    pieces = new.pieces()
    moved = {id_: pieces[piece] for piece, id_ in old.pieces().items() if piece in pieces} | {old.end_id: new.end_id}
    opened = replace(
        opened,
        tokenizer_folder=folder,
        special_ids=_moved(opened.special_ids, moved),
        generation=None if opened.generation is None else _moved(opened.generation, moved),
    )
    kept = sum(len(ids) == 1 for ids in found)
    print(f"{kept:,} of {new.vocabulary:,} pieces keep their rows; the others begin as means.")
    return opened, with_vocabulary(Model(opened.spec, opened.read), found)


def _moved(settings: Mapping[str, Any], ids: Mapping[int, int]) -> dict[str, Any]:
    """Settings whose token ids are those of the new tokenizer; what it has not is left out."""
    changed = dict(settings)
    for key, value in settings.items():
        if key.endswith("_token_id"):
            found = [ids[each] for each in (value if isinstance(value, list) else [value]) if each in ids]
            changed[key] = (found if isinstance(value, list) else found[0]) if found else None
    return {key: value for key, value in changed.items() if value is not None}
