"""The model families that jingu supports, by name."""

from jingu.model.families import bloom, chatglm3, cpm2, gpt2, llama, t5
from jingu.model.families.family import Family

_FAMILIES = (
    *(llama.BAICHUAN2, bloom.BLOOM, chatglm3.CHATGLM3, cpm2.CPM2, chatglm3.GLM, gpt2.GPT2, llama.LLAMA),
    *(llama.MISTRAL, llama.MIXTRAL, t5.MT5, llama.QWEN2, llama.QWEN3, llama.QWEN3_MOE, t5.T5),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}

__all__ = ["FAMILIES", "Family"]
