"""Adapters of `jingu tune`: write them as a peft folder, merge them into a model, and undo this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from jingu.errors import JinguError
from jingu.formats.export import write_model
from jingu.formats.gguf_adapter import write_gguf_adapters
from jingu.formats.models import load_adapters, open_adapter_run, open_model, read_peft_adapters
from jingu.formats.peft import ADAPTER_CONFIG, base_model_path
from jingu.formats.peft_export import write_adapters
from jingu.formats.provenance import copy_provenance
from jingu.formats.run_inputs import write_base_record
from jingu.formats.stored_model import apply_adapters
from jingu.model.adapter_layers import RESIDUAL_INITS, unmerge_adapter
from jingu.model.adapter_specs import Ia3, Lora
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import ModelSpec
from jingu.model.trainable import ADAPTER_PARAMETERS, is_trained
from jingu.runtime.device import DTYPES

# Parameters of adapters that replace values of the base model, and these values.
_REPLACED_VALUES = {"lora_m": "the norms of its rows (use_dora)", "token_rows": "rows of it (trainable_token_indices)"}


def export(run: Path, to: Path) -> None:
    """Write the adapters of a run as a folder that peft loads, or as a GGUF file for llama.cpp.

    Args:
        run: the run that trained the adapters, or a checkpoint of it; for a GGUF file also a peft folder.
        to: the new folder, or a .gguf file.

    Raises:
        JinguError: the run trains no adapters, or peft or llama.cpp has no such adapters.
    """
    if (run / ADAPTER_CONFIG).is_file() and to.suffix == ".gguf":
        base_path = base_model_path(run)
        base = open_model(base_path)
        adapters = load_adapters(run, base)
    else:
        adapters, base, base_path = open_adapter_run(run)
    if to.suffix == ".gguf":
        write_gguf_adapters(adapters, base, base_path, to)
        print(f"Wrote {to}: adapters, which llama.cpp puts beside the GGUF file of {base_path}.")
        return
    write_adapters(adapters, base, base_path, to)
    write_base_record(to, base, base_path)
    copy_provenance(run, to)
    print(f"Wrote {to}: adapters, which peft loads onto {base_path} as exported.")


def merge(model: Path, to: Path, base: Path | None = None, dtype: str = "auto") -> None:
    """Write a model with its adapters merged into its matrices, as a Hugging Face folder.

    Args:
        model: a run that trained adapters, or a peft folder.
        to: the new folder.
        base: the model to merge the adapters into; None: the one that they were trained for.
        dtype: dtype of the merged weights; auto: that of the base model.

    Raises:
        JinguError: there are no adapters, they do not fit the base, or they cannot be merged (prompt tuning).
    """
    if base is not None:
        base_model = open_model(base)
        is_peft = (model / ADAPTER_CONFIG).is_file()
        adapters = read_peft_adapters(model, base_model) if is_peft else load_adapters(model, base_model)
        merged_model = apply_adapters(adapters, base_model)
    elif (model / ADAPTER_CONFIG).is_file():
        merged_model = open_model(model)
    else:
        adapters, base_model, _ = open_adapter_run(model)
        merged_model = apply_adapters(adapters, base_model)
    write_model(merged_model, to, dtype, False)
    copy_provenance(model, to, base)


def unmerge(model: Path, to: Path, adapters: Path, dtype: str = "auto") -> None:
    """Restore the base model, bit for bit, from a merged model and its adapters.

    Args:
        model: the folder that `merge` wrote.
        to: the new folder.
        adapters: the merged adapters: a run, or a peft folder.
        dtype: dtype of the base model; auto: that of the merged model.

    Raises:
        JinguError: the base cannot be restored, because merging rounded it too much or replaced some of its values.
    """
    merged_model = open_model(model)
    adapter_model = load_adapters(adapters, merged_model, is_merged=True)
    adapter = adapter_model.spec.adapter
    assert adapter is not None
    adapter_names = parameter_shapes(adapter_model.spec)
    _require_restorable(adapter_names, adapter_model.spec, adapters)
    base_dtype = DTYPES.get(dtype, merged_model.dtype)

    def read(name: str) -> Tensor:
        """Return a parameter of the base model; one without an adapter is that of the merged model."""
        # 1. The merged value, and the adapter's tensors for its module.
        value = merged_model.read(name)
        module, _, leaf = name.rpartition(".")
        parts = {
            part: adapter_model.read(f"{module}.{part}")
            for part in ADAPTER_PARAMETERS
            if f"{module}.{part}" in adapter_names
        }
        # 2. Parameters without an adapter are unchanged.
        if not parts or not isinstance(adapter, Lora | Ia3):
            return value
        # 3. Undo the adapter.
        restored_weight = unmerge_adapter(value, leaf, parts, adapter.of_module(module), base_dtype)
        if restored_weight is None:
            raise JinguError(
                f"{name} cannot be restored: merging has rounded it too much.",
                where=model,
                fix="Merge into a wider dtype (`jingu tune merge --dtype fp32`), and pass the dtype of the base here "
                "(--dtype bf16).",
            )
        return restored_weight

    write_model(replace(merged_model, read=read), to, dtype, False)


def _require_restorable(names: Iterable[str], spec: ModelSpec, adapters: Path) -> None:
    """Raise JinguError if merging replaces values of the base model, which are lost then.

    Args:
        names: names of all parameters of the model with the adapters.
        spec: the spec of that model.
        adapters: where the adapters are.
    """
    adapter = spec.adapter
    problem = ""
    if isinstance(adapter, Lora) and (adapter.lora_bias or adapter.init_lora_weights in RESIDUAL_INITS):
        problem = "adapters with biases, and those that began as a part of the matrices, cannot be unmerged."
    for name in names:
        module, _, leaf = name.rpartition(".")
        if leaf in _REPLACED_VALUES:
            problem = f"{module} cannot be restored: merging replaced {_REPLACED_VALUES[leaf]}."
        elif leaf not in ADAPTER_PARAMETERS and is_trained(name, spec):
            problem = f"{name} was trained whole, and cannot be restored."
    if problem:
        raise JinguError(problem, where=adapters, fix="Use the base model itself.")
