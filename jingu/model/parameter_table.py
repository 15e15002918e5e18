"""Names, shapes, sharding styles and initial values of a model's parameters, computed without building its modules.

`jingu plan` needs no more of a model, and importing PyTorch to build one would take seconds. The rows of each part are
in `jingu.model.parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from jingu.model.parts import model_rows
from jingu.model.sharding_table import ShardingStyle
from jingu.model.spec import Lora, ModelSpec

# Names of an adapter's parameters, beside the `weight` of its module: the matrices A and B of LoRA, the bias of B, the
# row norms of DoRA, the factors of inputs and of outputs of IA³, and trained rows of the embedding.
ADAPTER_PARAMETERS = ("lora_a", "lora_b", "lora_bias", "lora_m", "ia3_in", "ia3_out", "token_rows")
# A parameter belongs to an adapter if one of these is a part of its name.
_OWN = frozenset({*ADAPTER_PARAMETERS, "prompt"})


class Entry(NamedTuple):
    """A parameter: its shape, how it can be sharded (None: not at all), and its initial value.

    Attributes:
        initial: initial value of all elements; None: they are normally distributed with `std`.
        is_trained: whether it is ever trained.
    """

    shape: tuple[int, ...]
    style: ShardingStyle | None = None
    initial: float | None = None
    std: float = 0.0
    is_trained: bool = True


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns (fnmatch)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return not _OWN.isdisjoint(name.split("."))


def is_trained(name: str, spec: ModelSpec) -> bool:
    """Return whether a parameter of a model is trained. With adapters, other parameters are frozen by default."""
    adapter = spec.adapter
    if adapter is None:
        return not matches_any(name, spec.frozen_parameters)
    saved = adapter.modules_to_save if isinstance(adapter, Lora) else ()
    # A score head has no pretrained weights, so it is trained together with adapters of any kind.
    return is_adapter(name) or name == "score.weight" or matches_any(name.rpartition(".")[0], saved)


def has_table(spec: ModelSpec) -> bool:
    """Return whether `parameter_table` supports the spec: it does not with adapters or quantization."""
    return spec.adapter is None and spec.quantization is None


@lru_cache(maxsize=16)
def parameter_table(spec: ModelSpec) -> Mapping[str, Entry]:
    """Return the parameters by name, in module order, of a model without its adapters and quantization."""
    table = {}
    for name, row in model_rows(spec):
        std = spec.initializer_range if row.std is None else row.std
        table[f"{name}.weight"] = Entry(row.shape, row.style, row.initial, std, row.is_trained)
        if row.bias:
            table[f"{name}.bias"] = Entry((row.shape[0],), row.style, 0.0, is_trained=row.is_trained)
    return table


@lru_cache(maxsize=16)
def parameter_sizes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return names and shapes of a model's parameters in module order, as if none were quantized."""
    if has_table(spec.model_copy(update={"quantization": None})):
        return {name: entry.shape for name, entry in parameter_table(spec).items()}
    # The table does not contain adapters, so build the modules on the meta device.
    from jingu.model.decoder import parameter_shapes

    return parameter_shapes(spec)
