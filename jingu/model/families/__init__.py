"""The families jingu knows, by name."""

from jingu.model.families.family import Family
from jingu.model.families.gpt2 import GPT2
from jingu.model.families.llama import LLAMA

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, LLAMA)}

__all__ = ["FAMILIES", "Family"]
