"""Several adapters on one base: rows with different adapters equal what peft computes for each alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.formats import models
from jingu.formats.export import export_hf
from jingu.formats.models import open_model
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer_training import train_tokenizer
from tests.infer.answers import answer_together

CONFIGS: dict[str, dict[str, Any]] = {
    "small": {"r": 3, "target_modules": ["q_proj", "down_proj"]},
    "large": {"r": 5, "lora_alpha": 11, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["q_proj"]},
}
PROMPTS = [(7, 8, 9, 10), (40, 41), (99,) * 30, (7, 8, 9, 11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny base model, `base`, and adapters in the format of peft."""
    place = tmp_path_factory.mktemp("adapters")
    train_tokenizer(iter(["some text"]), 270, ["<|endoftext|>"]).save(place / "tokenizer")
    settings = ModelSettings(
        hidden_size=24, num_heads=4, num_kv_heads=2, num_layers=2, intermediate_size=42, initializer_range=0.3
    )
    spec = spec_from_settings(settings, 270, 64)
    model = Decoder(spec)
    init_weights(model, spec, 3)
    export_hf(spec, model.state_dict().__getitem__, place / "tokenizer", place / "base")
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(place / "base"), LoraConfig(**config))
        for key, parameter in theirs.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.4)
        theirs.save_pretrained(str(place / name))
    return place


@pytest.fixture(scope="module")
def loaded(folder: Path) -> InferenceModel:
    return load(folder / "base", "fp32", "cpu", {name: folder / name for name in ("small", "large")})


def make_request(prompt: tuple[int, ...], adapter: str | None) -> Request:
    return Request(prompt, SamplingParams(), 12, logprobs=0, adapter=adapter, ignore_eos=True)


def test_rows_of_a_batch_use_different_adapters(folder: Path, loaded: InferenceModel) -> None:
    requests = [make_request(prompt, name) for prompt in PROMPTS for name in (None, "small", "large")]
    result = answer_together(Engine(loaded), requests)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    theirs: dict[str | None, Any] = {None: base.eval()}
    for name in ("small", "large"):
        theirs[name] = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / name)
    for request, (ids, logprobs) in zip(requests, result, strict=True):
        whole = torch.tensor([[*request.prompt, *ids]])
        with torch.no_grad():
            scores = (
                theirs[request.adapter].eval()(input_ids=whole).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
            )
        assert scores.argmax(-1).tolist() == ids
        torch.testing.assert_close(scores.max(-1).values, torch.tensor(logprobs), rtol=1e-4, atol=1e-4)
    texts = {tuple(ids) for ids, _ in result[:3]}
    assert len(texts) == 3  # they do make a difference


def test_answers_do_not_depend_on_other_adapters_in_the_batch(loaded: InferenceModel) -> None:
    requests = [make_request(prompt, name) for prompt in PROMPTS for name in ("small", None, "large")]
    together = answer_together(Engine(loaded), requests)
    assert together == [answer_together(Engine(loaded), [request])[0] for request in requests]
    assert together == answer_together(Engine(loaded, EngineSettings(max_num_seqs=3, prefill_chunk_size=7)), requests)


def test_unsupported_adapters_are_refused(folder: Path, loaded: InferenceModel, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"no adapter other.*small, large"):
        Engine(loaded).submit(make_request((1,), "other"))
    with pytest.raises(JinguError, match=r"only LoRA of plain matrices.*tune merge"):
        load(folder / "base", "fp32", "cpu", {"dora": folder / "dora"})
    with pytest.raises(JinguError):
        load(folder / "base", "fp32", "cpu", {"none": tmp_path})
    with pytest.raises(JinguError, match=r"nowhere: there is no such folder of adapters\. Give a run"):
        load(folder / "base", "fp32", "cpu", {"none": tmp_path / "nowhere"})
    assert loaded.adapters.names == ("small", "large")


def test_adapters_of_a_shallower_model_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its matrices would fit into the model."""
    base = open_model(folder / "base")
    own = replace(base, spec=base.spec.model_copy(update={"num_layers": 1}))
    monkeypatch.setattr(models, "_open_run", lambda path: (own, path))
    monkeypatch.setattr(models, "_check_has_adapters", lambda *_: None)
    with pytest.raises(JinguError, match=r"for a model of 1 block, and this one has 2\. Choose another base"):
        models.load_adapters(tmp_path, base)
