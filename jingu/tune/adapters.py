"""`jingu tune export | merge | unmerge`: adapters as a folder of peft, and models that they are merged into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from jingu.checkpoint.hub import open_model, open_run_apart, with_adapters
from jingu.checkpoint.peft import CONFIG, find_adapters, read_adapters, write_adapters
from jingu.checkpoint.verbs import write_model
from jingu.errors import JinguError
from jingu.model.adapters import LEAVES, unmerged
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import Ia3, Lora
from jingu.runtime.device import PRECISIONS


def export(run: Path, to: Path) -> None:
    """Write the adapters of a run as peft loads them.

    Raises:
        JinguError: the run trains no adapters, or none that peft has.
    """
    own, base, where = open_run_apart(run)
    write_adapters(own, base, where, to)
    print(f"Wrote {to}: adapters, which peft loads onto {where} as exported.")


def merge(model: Path, to: Path, base: Path | None = None, dtype: str = "auto") -> None:
    """Write a model with its adapters merged into its matrices, as a Hugging Face folder.

    Args:
        model: a run that trained adapters; or, with `base`, a folder that peft wrote.
        base: the model that such adapters are for.
        dtype: of the weights; auto: that of the base, which rounds the sums to it.

    Raises:
        JinguError: there are none, they do not fit, or (prompts) no weights do what they do.
    """
    if base is not None:
        under = open_model(base)
        opened = with_adapters(read_adapters(model, under), under)
    elif (model / CONFIG).is_file():
        opened = open_model(model)
    else:
        own, under, _ = open_run_apart(model)
        opened = with_adapters(own, under)
    write_model(opened, to, dtype, False)


def unmerge(model: Path, to: Path, adapters: Path, dtype: str = "auto") -> None:
    """Write what adapters were merged into, exactly as it was.

    Args:
        model: what `merge` wrote.
        adapters: those that were merged: of a run, or a folder of peft.
        dtype: that the base had; auto: that of the model.

    Raises:
        JinguError: the sums were rounded too much to tell what they were made of.
    """
    opened = open_model(model)
    own = find_adapters(adapters, opened)
    adapter, kind, held = own.spec.adapter, PRECISIONS.get(dtype, opened.dtype), parameter_shapes(own.spec)
    assert adapter is not None

    def read(name: str) -> Tensor:
        value, (module, _, leaf) = opened.read(name), name.rpartition(".")
        parts = {part: own.read(f"{module}.{part}") for part in LEAVES if f"{module}.{part}" in held}
        if not parts or not isinstance(adapter, Lora | Ia3):
            return value
        found = None if "lora_m" in parts else unmerged(value, leaf, parts, adapter, kind)
        if found is None:
            raise JinguError(
                f"{name} no longer tells what it was before the adapters were merged.",
                where=model,
                fix="Merge into a wider dtype (`jingu tune merge --dtype fp32`), and give here the one that the base "
                "had (--dtype bf16); magnitudes cannot be undone.",
            )
        return found

    write_model(replace(opened, read=read), to, dtype, False)
