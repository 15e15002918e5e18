"""What exports say of a model beside its weights: configs, generation settings, tokenizer files and chat templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import jingu
from jingu.cli import main
from jingu.config.schema import RunConfig
from jingu.formats.description import describe_run
from jingu.formats.models import open_initial, open_model
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.tune.prepare import prepare
from tests.conftest import MakeRun
from tests.formats.tiny_configs import MOE, SIZES

FAMILIES: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=[2, 0], pretraining_tp=2, use_cache=False),
    "mistral": transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=None, pad_token_id=3),
    "qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=2, attention_dropout=0.1, bos_token_id=None),
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**SIZES, **MOE, num_local_experts=4, output_router_logits=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **MOE, num_experts=4, moe_intermediate_size=8),
    "glm": transformers.GlmConfig(**SIZES, num_key_value_heads=2, head_dim=8, pad_token_id=5, eos_token_id=[1, 4]),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, embd_pdrop=0.2),
    "bloom": transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2, slow_but_exact=True),
    "t5": transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    ),
}


def read_jsons(folder: Path) -> dict[str, Any]:
    """Return the contents of the JSON files of a folder, by name."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}))


def export(model: Path, to: Path) -> Path:
    assert main(["export", str(model), "--to", str(to)]) == 0
    return to


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<|endoftext|>", "<|pad|>", "<|eot|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
    text = "user assistant system USER: BOT: say red blue green it is " * 3
    train_tokenizer(iter([text]), 300, special).save(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_keeps_all_its_metadata(family: str, tokenizer: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    config = FAMILIES[family]
    automatic = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    model = automatic.from_config(config)
    model.generation_config.update(temperature=0.6, do_sample=True, suppress_tokens=[5], renormalize_logits=True)
    model.save_pretrained(source)
    # Harmless keys that other tools write.
    change(source / "config.json", _name_or_path="org/name", unsloth_version="2025.1", task_specific_params={"a": 1})
    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)
    tokens.add_tokens(["<tool>"], special_tokens=False)
    tokens.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    tokens.save_pretrained(source)
    change(source / "special_tokens_map.json", additional_special_tokens=["<|eot|>"])
    (source / "tokenizer.model").write_bytes(b"not read, as there is a tokenizer.json")
    to = export(source, tmp_path / "to")
    assert read_jsons(to) == read_jsons(source)
    for path in source.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            name = path.relative_to(source)
            assert (to / name).is_file(), name
            assert path.suffix == ".json" or (to / name).read_bytes() == path.read_bytes(), name
    assert (to / "additional_chat_templates" / "rag.jinja").read_text() == "{{ documents }}"


def test_files_of_older_releases_are_kept(tokenizer: Path, tmp_path: Path) -> None:
    """`torch_dtype`, no generation config, GPT-2's vocabulary in two files, templates in the tokenizer's config."""
    source = tmp_path / "source"
    transformers.GPT2LMHeadModel(FAMILIES["gpt2"]).save_pretrained(source)
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    vocab = {**{chr(97 + n): n for n in range(26)}, "ab": 26}
    (source / "vocab.json").write_text(json.dumps(vocab))
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    (source / "added_tokens.json").write_text(json.dumps({"<end>": 27}))
    template = {"chat_template": [{"name": "default", "template": "{{ 1 }}"}, {"name": "rag", "template": "{{ 2 }}"}]}
    change(source / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token="<end>", **template)
    to = export(source, tmp_path / "to")
    assert json.loads((to / "config.json").read_text()) == config
    assert not (to / "generation_config.json").exists()
    for name in ("vocab.json", "merges.txt", "added_tokens.json"):
        assert (to / name).read_bytes() == (source / name).read_bytes()
    before, after = (Tokenizer.load(folder) for folder in (source, to))
    assert after.encode("abba") == before.encode("abba")
    assert after.chat_templates == before.chat_templates == {"default": "{{ 1 }}", "rag": "{{ 2 }}"}
    assert after.special_names["eos_token"] == "<end>"


def test_only_what_changed_is_written_anew(tokenizer: Path, tmp_path: Path) -> None:
    """A dtype, an untied head, more blocks and a larger vocabulary."""
    source = tmp_path / "source"
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"])
    model.save_pretrained(source)
    shutil.copytree(tokenizer, source, dirs_exist_ok=True)
    before = json.loads((source / "config.json").read_text())
    assert main(["export", str(source), "--to", str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == {**before, "dtype": "bfloat16"}

    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    to = export(source, tmp_path / "untied")
    assert json.loads((to / "config.json").read_text()) == {**before, "tie_word_embeddings": False}

    sizes = ["--num-layers", "4", "--vocab-size", "80"]
    assert main(["model", "grow", str(source), "--to", str(tmp_path / "large"), *sizes]) == 0
    large = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    assert (large.config.num_hidden_layers, large.config.vocab_size, len(large.config.layer_types)) == (4, 80, 4)


# Runs

QUESTIONS = {"say red": "red it is", "say blue": "blue it is", "say green": "green it is"}
BASE_TEMPLATE = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'BOT: ' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}BOT: {% endif %}"
)
SETTINGS = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "suppress_tokens": [9], "pad_token_id": 1}


@pytest.fixture
def base(tokenizer: Path, tmp_path: Path) -> Path:
    """A folder with a chat template, two EOS tokens and generation settings of its own."""
    folder = tmp_path / "base"
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    vocab_size = Tokenizer.load(tokenizer).vocab_size
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": vocab_size}, bos_token_id=0, eos_token_id=[2, 0])
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.update(**SETTINGS)
    model.save_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)
    tokens.chat_template = {"default": BASE_TEMPLATE, "tool_use": "{{ tools }}"}
    tokens.save_pretrained(folder)
    return folder


@pytest.fixture
def tuned(base: Path, tiny_run: MakeRun, train_on: Callable[..., None], tmp_path: Path) -> Callable[..., Path]:
    """Train a run on the questions; changes go by dotted keys."""
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in QUESTIONS.items()
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def tune(name: str, **changes: Any) -> Path:
        config: RunConfig = tiny_run(
            {
                "tokenizer": {"path": str(base)},
                "data": {"input": str(rows), "path": str(tmp_path / f"data-{name}"), "validation_fraction": 0.0},
                "data.objective": {"type": "supervised", "template": "chatml", "packing": "padded"},
                "data.num_workers": 1,
                "model": {},
                "initialize": {"from": str(base)},
                "batch": {"sequence_length": 64, "global_batch_size": 3},
                "optimizer.lr": 5e-3,
                "schedule": {"type": "constant", "warmup": 0},
                "train.steps": 60,
                "precision.type": "fp32",
                **{key.replace("__", "."): value for key, value in changes.items()},
            },
            name=name,
        )
        prepare(config)
        train_on(1, config)
        return Path(config.runs_dir) / name

    return tune


def answer_of_jingu(model: Path, question: str) -> str:
    return jingu.load(str(model), precision="fp32").chat(question, max_tokens=24, temperature=0.0)


def answer_of_transformers(model: Any, folder: Path, question: str) -> str:
    """Return the greedy answer to a question, without special tokens."""
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    inputs = tokens.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert len(ids) < 24
    return str(tokens.decode(ids, skip_special_tokens=True))


def describe(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "generation_config.json").read_text())


def end_id(folder: Path) -> int:
    return Tokenizer.load(folder).special_tokens["<|im_end|>"]


def test_a_tuned_model_stops_alike_before_and_after_its_export(tuned: Callable[..., Path], base: Path) -> None:
    """Also if its base is gone; the base's other settings are kept."""
    before = read_jsons(base)
    run = tuned("full")
    shutil.rmtree(base)
    to = export(run, run.parent / "out")
    eos = [2, 0, end_id(run / "tokenizer")]
    assert describe(to) == {**before["generation_config.json"], "eos_token_id": eos}
    assert json.loads((to / "config.json").read_text()) == {**before["config.json"], "eos_token_id": eos}
    # The template for tools was not trained.
    tokens = transformers.AutoTokenizer.from_pretrained(to)
    assert tokens.chat_template == (run / "tokenizer" / "chat_template.jinja").read_text()
    assert "im_start" in tokens.chat_template and not (to / "additional_chat_templates").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(to)
    for question, answer in QUESTIONS.items():
        answers = [answer_of_jingu(run, question), answer_of_jingu(to, question)]
        assert [*answers, answer_of_transformers(model, to, question)] == [answer] * 3
    # A run from the exported folder, which trains on text, keeps all of it.
    again = export(to, run.parent / "again")
    assert read_jsons(again).keys() == read_jsons(to).keys()
    assert all(read_jsons(again)[name] == content for name, content in read_jsons(to).items())


def test_a_chain_of_runs_with_adapters_keeps_the_template(
    tuned: Callable[..., Path], base: Path, tiny_run: MakeRun, train_on: Callable[..., None], tmp_path: Path
) -> None:
    """Tuning by LoRA with a template in a file, its adapter export and merged model, and a run that starts from it."""
    from peft import AutoPeftModelForCausalLM

    template = tmp_path / "own.jinja"
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:\n{% endif %}"
    )
    template.write_text(text)
    saved = ["embed_tokens", "lm_head"]
    lora = {"type": "lora", "rank": 8, "target_modules": "all-linear", "modules_to_save": saved}
    run = tuned("adapter", tune=lora, data__objective__template=str(template), train__steps=80)
    template.write_text("something else")
    eos = [2, 0, Tokenizer.load(base).special_tokens["<|end|>"]]
    assert main(["tune", "export", str(run), "--to", str(tmp_path / "peft")]) == 0
    assert main(["tune", "merge", str(tmp_path / "peft"), "--to", str(tmp_path / "from-peft")]) == 0
    assert main(["tune", "merge", str(run), "--to", str(tmp_path / "merged")]) == 0
    for folder in (tmp_path / name for name in ("peft", "from-peft", "merged")):
        assert describe(folder)["eos_token_id"] == eos
        assert {key: describe(folder)[key] for key in SETTINGS} == SETTINGS
        assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == text
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    model.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path / "peft")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for question, answer in QUESTIONS.items():
        assert answer_of_transformers(model, tmp_path / "peft", question) == answer
        assert answer_of_transformers(merged, tmp_path / "merged", question) == answer
        assert [answer_of_jingu(tmp_path / name, question) for name in ("peft", "merged")] == [answer] * 2
        assert answer_of_jingu(run, question) == answer

    # A run on text, and one on preferences with another template. Both use the base's tokenizer.
    data = {"data": {**tiny_run().model_dump()["data"], "path": str(tmp_path / "text")}}
    plain = {"tokenizer": {"path": str(base)}, "model": {}, "initialize": {"from": str(run)}, "train.steps": 1}
    config = tiny_run({**plain, **data}, name="text")
    from jingu.data.build import build

    build(config)
    train_on(1, config)
    to = export(Path(config.runs_dir) / "text", tmp_path / "text-out")
    assert describe(to)["eos_token_id"] == eos
    assert transformers.AutoTokenizer.from_pretrained(to).chat_template == text
    assert {key: describe(to)[key] for key in SETTINGS} == SETTINGS


def test_runs_on_preferences_and_rewards_describe_their_template(base: Path, tiny_run: MakeRun, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(base)
    end = tokenizer.special_tokens["<|im_end|>"]
    plain = {"tokenizer": {"path": str(base)}, "model": {}, "initialize": {"from": str(base)}}
    for changes in (
        {"task": {"type": "dpo"}, "data.objective": {"type": "preference", "template": "chatml"}},
        {"task": {"type": "grpo", "template": "chatml", "rewards": [{"type": "length"}]}},
    ):
        config = tiny_run({**plain, **changes})
        description = describe_run(config, tokenizer, open_model(base).spec, open_initial(config))
        assert description.generation_config is not None and description.chat_templates is not None
        assert description.generation_config["eos_token_id"] == [2, 0, end]
        assert "im_start" in description.chat_templates["default"]
    # The tokenizer's own templates stay, with that for tools. Its answers end with no token.
    config = tiny_run({**plain, "data.objective": {"type": "supervised", "template": "auto"}})
    description = describe_run(config, tokenizer, open_model(base).spec, open_initial(config))
    assert description.chat_templates is None
    assert description.generation_config == open_model(base).generation_config


def test_a_template_of_the_tokenizer_becomes_the_default(base: Path, tiny_run: MakeRun) -> None:
    file = base / "additional_chat_templates" / "rag.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    tokenizer = Tokenizer.load(base)
    config = tiny_run(
        {
            "tokenizer": {"path": str(base)},
            "initialize": {"from": str(base)},
            "model": {},
            "data.objective": {"type": "supervised", "template": "rag"},
        }
    )
    description = describe_run(config, tokenizer, open_model(base).spec, open_initial(config))
    assert description.chat_templates == {"default": file.read_text(), "rag": file.read_text()}
    assert description.config["eos_token_id"] == [2, 0, tokenizer.special_tokens["<|end|>"]]
