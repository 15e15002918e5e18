"""The model families that jingu supports, by name."""

from jingu.errors import JinguError
from jingu.model.families import bloom, chatglm3, cpm2, gpt2, llama, t5
from jingu.model.families.family import Family
from jingu.model.families.name_map import CONSTANT, ConstantTensor, TensorMapping, expand_rules
from jingu.model.families.tabled import tabled_families
from jingu.model.spec import ModelSpec, replace_fields
from jingu.plugins import Registry

_FAMILIES = (
    *(llama.BAICHUAN2, bloom.BLOOM, chatglm3.CHATGLM3, cpm2.CPM2, chatglm3.GLM, gpt2.GPT2, llama.LLAMA),
    *(llama.MISTRAL, llama.MIXTRAL, t5.MT5, llama.QWEN2, llama.QWEN3, llama.QWEN3_MOE, t5.T5),
    *tabled_families(),
)
_ARCHITECTURES = {name: family.name for family in _FAMILIES for name in family.architectures}


def _check_family(name: str, family: object) -> str | None:
    """Return what is wrong with the family of a plug-in; None if nothing is."""
    if not isinstance(family, Family):
        return "it is no Family"
    if family.name != name:
        return f"its name is {family.name}"
    own = next((each for each in family.architectures if each in _ARCHITECTURES), None)
    return None if own is None else f"the family {_ARCHITECTURES[own]} of jingu has the architecture {own}"


FAMILIES: Registry[Family] = Registry("families", {family.name: family for family in _FAMILIES}, _check_family)


def map_tensors(spec: ModelSpec) -> list[TensorMapping]:
    """Return the tensors of a model in Hugging Face's files, with jingu's parameters that each holds.

    Raises:
        LookupError: the family's names do not cover the model, so Hugging Face's files cannot represent it.
    """
    from jingu.model.decoder import parameter_shapes

    return expand_rules(FAMILIES[spec.family].rules, spec, parameter_shapes(spec))


def constant_tensors(spec: ModelSpec) -> list[ConstantTensor]:
    """Return the numbers that Hugging Face's files of a model contain as tensors."""
    return [
        ConstantTensor(name.replace("*", str(layer)), {}, CONSTANT, spec, None, value)
        for name, value in FAMILIES[spec.family].constant_tensors.items()
        for layer in range(spec.num_layers)
    ]


def equivalent_spec(spec: ModelSpec) -> ModelSpec:
    """Return the spec of an equal model in a family that transformers supports; otherwise the spec itself.

    If the original normalizes the head's weight, the weight must be normalized before it is used with this spec.
    """
    equivalent = FAMILIES[spec.family].equivalent
    if equivalent is None or (spec.normalize_lm_head and spec.tie_word_embeddings):
        return spec
    same = replace_fields(spec, family=equivalent, normalize_lm_head=False)
    try:
        FAMILIES[equivalent].hf_config(same)
    except JinguError:
        return spec
    return same


__all__ = ["FAMILIES", "Family", "constant_tensors", "equivalent_spec", "map_tensors"]
