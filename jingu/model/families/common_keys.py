"""Keys of published configs that say what their class or the family implies, in the words of the models' own code.

transformers ignores most of them. A value that contradicts the spec means a model that would be computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jingu.model.components import RotaryPositions
from jingu.model.families.family import HFConfig, unsupported_option
from jingu.model.feed_forward_specs import Experts, TopKRouter
from jingu.model.spec import ModelSpec

# Returns whether a value agrees with a spec, and what is expected.
_Check = Callable[[ModelSpec, Any], tuple[bool, str]]


def check_common_keys(config: HFConfig, spec: ModelSpec) -> None:
    """Raise JinguError if a key of a config contradicts the spec that its other keys describe."""
    if spec.num_encoder_layers is not None:
        return
    for key, check in _CHECKS.items():
        value = config.get(key)
        if value is not None:
            agrees, expected = check(spec, value)
            if not agrees:
                raise unsupported_option(key, value, f"expected {expected}")


def _router(spec: ModelSpec) -> TopKRouter | None:
    routers = [layer.feed_forward.router for layer in spec.layers if isinstance(layer.feed_forward, Experts)]
    return next((router for router in routers if isinstance(router, TopKRouter)), None)


def _scores(spec: ModelSpec, value: Any) -> tuple[bool, str]:
    router = _router(spec)
    # dots.llm1 names the method of selection.
    return router is None or value in (router.scores, "noaux_tc"), "" if router is None else router.scores


def _uses_sigmoid(spec: ModelSpec, value: Any) -> tuple[bool, str]:
    router = _router(spec)
    is_sigmoid = router is not None and router.scores == "sigmoid"
    return router is None or bool(value) == is_sigmoid, str(is_sigmoid)


def _normalizes(spec: ModelSpec, value: Any) -> tuple[bool, str]:
    router = _router(spec)
    return router is None or bool(value) == router.norm_topk_prob, "" if router is None else str(router.norm_topk_prob)


def _expert_layers(spec: ModelSpec, value: Any) -> tuple[bool, str]:
    """Check which layers have experts: every so many, or a flag for each."""
    flags = [int(isinstance(layer.feed_forward, Experts)) for layer in spec.layers]
    if isinstance(value, list):
        return value == flags, f"{flags}"
    return value == 1, "1"


def _windows(spec: ModelSpec, value: Any) -> tuple[bool, str]:
    flags = [int(layer.attention.reach is not None) for layer in spec.layers]
    return value == flags, f"{flags}"


def _window_base(spec: ModelSpec, value: Any) -> tuple[bool, str]:
    positions = [layer.position for layer in spec.layers if layer.attention.reach is not None]
    bases = {position.theta for position in positions if isinstance(position, RotaryPositions)}
    return not bases or bases == {float(value)}, ", ".join(map(str, sorted(bases)))


_CHECKS: dict[str, _Check] = {
    "is_causal": lambda spec, value: (bool(value), "True"),
    "scoring_func": _scores,
    "score_func": _scores,
    "moe_router_use_sigmoid": _uses_sigmoid,
    "route_norm": _normalizes,
    "moe_layer_freq": _expert_layers,
    "hybrid_layer_pattern": _windows,
    "swa_rope_theta": _window_base,
}
