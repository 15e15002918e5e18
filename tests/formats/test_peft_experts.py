"""LoRA of the matrices of all experts at once: peft's adapters read, and jingu's read by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from jingu.formats.huggingface import open_hf
from jingu.formats.peft import read_adapters
from jingu.formats.peft_export import write_adapters
from jingu.formats.stored_model import apply_adapters, load_model
from jingu.model.families import FAMILIES
from tests.parity import test_components as components
from tests.parity.test_tabled_families import written

FAMILIES_WITH_EXPERTS = ["glm4_moe", "gpt_oss", "llama4_text", "deepseek_v3"]


def randomize(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)


@pytest.mark.parametrize("name", FAMILIES_WITH_EXPERTS)
def test_adapters_of_all_experts(name: str, tmp_path: Path) -> None:
    base = written(name, tmp_path / "base")
    module = "feed_forward" if name == "llama4_text" else "mlp"
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj" if name != "deepseek_v3" else "q_b_proj"],
        target_parameters=[f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"],
    )
    theirs: Any = get_peft_model(base, config)
    randomize(theirs)
    ids = components.sample()
    with torch.no_grad():
        expected = theirs.eval()(ids).logits
    theirs.save_pretrained(tmp_path / "adapter")
    stored = open_hf(tmp_path / "base")
    adapters = read_adapters(tmp_path / "adapter", stored)
    with torch.no_grad():
        ours = load_model(apply_adapters(adapters, stored), torch.float32).eval()
        components.close(ours.logits(ours(ids)), expected)
    # And back.
    write_adapters(adapters, stored, tmp_path / "base", tmp_path / "again")
    architecture = getattr(transformers, FAMILIES[name].architectures[0])
    plain = architecture.from_pretrained(tmp_path / "base", attn_implementation="eager")
    again: Any = PeftModel.from_pretrained(plain, tmp_path / "again")
    with torch.no_grad():
        components.close(again.eval()(ids).logits, expected)
