"""The families jingu knows, by name."""

from jingu.model.families.baichuan2 import BAICHUAN2
from jingu.model.families.bloom import BLOOM
from jingu.model.families.chatglm3 import CHATGLM3
from jingu.model.families.cpm2 import CPM2
from jingu.model.families.family import Family
from jingu.model.families.gpt2 import GPT2
from jingu.model.families.llama import LLAMA
from jingu.model.families.mistral import MISTRAL
from jingu.model.families.mixtral import MIXTRAL, QWEN3_MOE
from jingu.model.families.mt5 import MT5
from jingu.model.families.qwen2 import QWEN2
from jingu.model.families.qwen3 import QWEN3
from jingu.model.families.t5 import T5

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (BAICHUAN2, BLOOM, CHATGLM3, CPM2, GPT2, LLAMA, MISTRAL, MIXTRAL, MT5, QWEN2, QWEN3, QWEN3_MOE, T5)
}

__all__ = ["FAMILIES", "Family"]
