"""Which parameters of a model are trained: all, those that a pattern names, or those of its adapters."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from jingu.model.adapter_specs import Lora
from jingu.model.spec import ModelSpec

# Names of an adapter's parameters, beside the `weight` of its module: the matrices A and B of LoRA, the bias of B, the
# row norms of DoRA, the factors of inputs and of outputs of IA³, and trained rows of the embedding.
ADAPTER_PARAMETERS = ("lora_a", "lora_b", "lora_bias", "lora_m", "ia3_in", "ia3_out", "token_rows")
# A parameter belongs to an adapter if one of these is a part of its name.
_OWN = frozenset({*ADAPTER_PARAMETERS, "prompt"})


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns (fnmatch)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return not _OWN.isdisjoint(name.split("."))


def is_trained(name: str, spec: ModelSpec) -> bool:
    """Return whether a parameter of a model is trained. With adapters, other parameters are frozen by default."""
    adapter = spec.adapter
    if name.startswith("mtp.") and not spec.mtp_loss_weight:
        return False
    if adapter is None:
        return not matches_any(name, spec.frozen_parameters)
    saved = adapter.modules_to_save if isinstance(adapter, Lora) else ()
    # A score head has no pretrained weights, so it is trained together with adapters of any kind.
    return is_adapter(name) or name == "score.weight" or matches_any(name.rpartition(".")[0], saved)
