"""`jingu tune export | merge`: adapters as a folder of peft, and models that they are merged into."""

from __future__ import annotations

from pathlib import Path

from jingu.checkpoint.hub import open_model, open_run_apart, with_adapters
from jingu.checkpoint.peft import read_adapters, write_adapters
from jingu.checkpoint.verbs import write_model


def export(run: Path, to: Path) -> None:
    """Write the adapters of a run as peft loads them.

    Raises:
        JinguError: the run trains no adapters, or none that peft has.
    """
    own, base, where = open_run_apart(run)
    write_adapters(own, base, where, to)
    print(f"Wrote {to}: adapters, which peft loads onto {where} as exported.")


def merge(model: Path, to: Path, base: Path | None = None) -> None:
    """Write a model with its adapters merged into its matrices, as a Hugging Face folder.

    Args:
        model: a run that trained adapters; or, with `base`, a folder that peft wrote.
        base: the model that such adapters are for.

    Raises:
        JinguError: there are none, they do not fit, or (prompts) no weights do what they do.
    """
    if base is None:
        opened = open_model(model)
    else:
        under = open_model(base)
        opened = with_adapters(read_adapters(model, under), under)
    write_model(opened, to, "auto", False)
