"""Hugging Face folders: what is refused, with which message, and what is accepted."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file

from jingu.checkpoint.resume import step_folder
from jingu.checkpoint.store import save
from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import replace_fields
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer


def made_model(family: str = "llama", **changes: Any) -> Decoder:
    settings = {"family": family, "hidden_size": 12, "num_heads": 3, "num_layers": 2, "vocab_size": 301, **changes}
    spec = spec_from_settings(ModelSettings(**settings), 257, 16)
    model = Decoder(spec)
    init_weights(model, spec, 3)
    return model


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(["some text"]), 257, ["<|endoftext|>"]).save(folder)
    return folder


@pytest.fixture
def exported(tokenizer_path: Path, tmp_path: Path) -> Path:
    return export(made_model(), tokenizer_path, tmp_path / "out")


def export(model: Decoder, tokenizer: Path, to: Path, **options: Any) -> Path:
    export_hf(model.spec, model.state_dict().__getitem__, tokenizer, to, **options)
    return to


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def refusal(folder: Path) -> str:
    with pytest.raises(JinguError) as error:
        open_hf(folder)
    return str(error.value).replace(str(folder), "DIR")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["LlamaForCausalML"]},
        "DIR/config.json: jingu does not support the architecture LlamaForCausalML. `jingu model list` shows",
    ),
    (
        {"architectures": ["Xyz"]},
        "DIR/config.json: jingu does not support the architecture Xyz. `jingu model list` shows the families",
    ),
    (
        {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "model_type": "own"},
        "DIR/config.json: the model asks to run Python code that came with it (auto_map). jingu never runs such "
        "code. Use a release of the model for an architecture built into transformers.",
    ),
    (
        {"rope_parameters": "absent", "rope_scaling": {"type": "longrope", "factor": 2.0}},
        "DIR/config.json: this does not describe a model (scaling.longrope.short_factor: field required; "
        "scaling.longrope.long_factor: field required). Restore the original file.",
    ),
    (
        {"rope_parameters": "absent", "rope_scaling": {"type": "longer", "factor": 2.0}},
        "DIR/config.json: the model sets rope_scaling to 'longer', which is not supported (known are linear, "
        "dynamic, yarn, llama3, longrope). Without this option its numbers would be wrong, so it is not loaded.",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 50.0}}},
        "DIR/config.json: the model sets rope_parameters to {'full_attention': {'rope_theta': 50.0}}, which is not "
        "supported (expected the same for all layers).",
    ),
    (
        {"hidden_act": "mish"},
        "DIR/config.json: the model sets hidden_act to 'mish', which is not supported (known are silu, swish, gelu, "
        "gelu_new, gelu_pytorch_tanh, relu, relu2, xielu). Without this option its numbers would be wrong, so it is "
        "not loaded.",
    ),
    (
        {"quantization_config": {"bits": 4}},
        "DIR/config.json: the weights are quantized in a form that jingu does not read: quant_method 'None'. Use a "
        "release of the model in floating point, or in one of the forms gptq, awq, fp8,",
    ),
    (
        {"hidden_size": "absent"},
        "DIR/config.json: the model's config lacks 'hidden_size'. Restore the original file.",
    ),
]


@pytest.mark.parametrize(
    ("changes", "words"), CONFIGS, ids=[next(iter(changes)) + str(n) for n, (changes, _) in enumerate(CONFIGS)]
)
def test_configs_that_are_refused(exported: Path, changes: dict[str, Any], words: str) -> None:
    change_config(exported, **changes)
    assert refusal(exported).startswith(words)


def store_fp8(folder: Path, quantize: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Replace the matrices of the blocks in a folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors.update(quantize(name, tensors.pop(name)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_blocks_in_fp8_are_read_as_by_transformers(exported: Path) -> None:
    """As DeepSeek-V3 and Qwen3-FP8 are stored."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [4, 6]}
    quantizer = SimpleNamespace(quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(4, 6)))
    store_fp8(exported, lambda name, weight: Fp8Quantize(quantizer).convert({name: weight}))
    assert load_file(exported / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    change_config(exported, quantization_config=config)
    dequantized = transformers.FineGrainedFP8Config(weight_block_size=(4, 6), dequantize=True)
    options: dict[str, Any] = {"dtype": torch.float32, "quantization_config": dequantized}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, **options)
    tokens_BT = torch.arange(3, 15)[None]
    mine = load_model(open_hf(exported), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(mine.logits(mine(tokens_BT)), theirs(tokens_BT).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_matrices_in_fp8_of_compressed_tensors(strategy: str, exported: Path) -> None:
    plain = load_file(exported / "model.safetensors")
    change_config(exported, quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"})
    if strategy == "block":
        # The last blocks of rows and columns are cut.
        change_config(exported, quantization_config={"quant_method": "fp8", "weight_block_size": [5, 7]})

    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax()[None]) / 448
        if strategy == "block":
            grid = (-(-weight.shape[0] // 5), -(-weight.shape[1] // 7))
            scale = torch.arange(1, 1 + grid[0] * grid[1]).view(grid) / 1000
            rows, columns = (torch.arange(size) // number for size, number in zip(weight.shape, (5, 7), strict=True))
            weight8 = (weight / scale[rows][:, columns]).to(torch.float8_e4m3fn)
            plain[name] = weight8.float() * scale[rows][:, columns]
        else:
            weight8 = (weight / scale).to(torch.float8_e4m3fn)
            plain[name] = weight8.float() * scale
        suffix = "_scale_inv" if strategy == "block" else "_scale"
        return {name: weight8, f"{name}{suffix}": scale, name.replace("weight", "input_scale"): torch.ones(1)}

    copy = shutil.copytree(exported, exported.parent / "plain")
    change_config(copy, quantization_config="absent")
    store_fp8(exported, quantize)
    save_file(plain, copy / "model.safetensors", {"format": "pt"})
    result, expected = open_hf(exported), open_hf(copy)
    for name in parameter_shapes(expected.spec):
        assert torch.equal(result.read(name), expected.read(name)), name


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": "absent"},
        {"rope_theta": "absent"},
        {"rope_theta": "absent", "rope_parameters": "absent", "rope_scaling": "absent"},
        {"architectures": "absent"},
        {"head_dim": "absent", "num_key_value_heads": "absent"},
    ],
    ids=str,
)
def test_configs_of_older_and_newer_releases(exported: Path, changes: dict[str, Any]) -> None:
    spec = open_hf(exported).spec
    change_config(exported, **changes)
    assert open_hf(exported).spec == spec


def test_all_wrong_tensors_are_named_at_once(exported: Path) -> None:
    path = exported / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.extra"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(300, 12)
    save_file(tensors, path)
    assert refusal(exported) == (
        "DIR: the weights are not those that the model's config describes: missing: "
        "model.layers.1.mlp.up_proj.weight, model.norm.weight; unexpected: model.extra; of the wrong shape: "
        "lm_head.weight (has [300, 12], should have [301, 12]). Use the config and the weights of the same model."
    )


@pytest.mark.parametrize("keep", [0, 5, 100, -1], ids=["empty", "in-length", "in-header", "last-byte"])
def test_truncated_weights(exported: Path, keep: int) -> None:
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    words = refusal(exported)
    assert words.startswith("DIR/model.safetensors: the weight file is damaged or cut short (")
    assert words.endswith("). Fetch the file again.")


def test_missing_shards_are_named(tokenizer_path: Path, tmp_path: Path) -> None:
    folder = export(made_model(), tokenizer_path, tmp_path / "out", shard_bytes=10_000)
    shards = sorted(item.name for item in folder.glob("model-*"))
    assert len(shards) > 3
    for name in shards[1:3]:
        (folder / name).unlink()
    assert refusal(folder) == f"DIR: weight files are missing: {shards[1]}, {shards[2]}. Fetch these files."


def test_shard_outside_the_folder_is_not_opened(exported: Path) -> None:
    table = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(table))
    (exported / "model.safetensors").unlink()
    assert "weight files are missing: ../outside.safetensors." in refusal(exported)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_a_fix(exported: Path, name: str) -> None:
    (exported / "model.safetensors").rename(exported / name)
    assert refusal(exported) == (
        f"DIR: the weights are pickled ({name}). jingu does not read pickles, which can run code. Use the model's "
        "safetensors files; or, if you trust the source, load the model with transformers and save it with "
        "save_pretrained, which writes safetensors."
    )


def test_no_weights_no_config_no_folder(exported: Path) -> None:
    (exported / "model.safetensors").unlink()
    assert refusal(exported).startswith("DIR: there are no weights here")
    (exported / "config.json").write_text("{")
    assert refusal(exported).startswith("DIR/config.json: the file is damaged")
    (exported / "config.json").unlink()
    assert refusal(exported).startswith("DIR: this is no model: it has neither config.json nor model.json.")
    with pytest.raises(JinguError, match="there is no such model folder"):
        open_model(exported / "nothing")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "this does not describe a model"),
        (
            {"hidden_size": "x"},
            "this does not describe a model (hidden_size is 'x', and should be a whole number of at least 1). Restore",
        ),
        ({"num_attention_heads": 0}, "this does not describe a model (attention.num_heads is 0, and should be a"),
        ({"num_hidden_layers": -2}, "this does not describe a model (num_layers is -2, and should be a whole"),
        ({"num_hidden_layers": 1.5}, "this does not describe a model (num_layers is 1.5: input should be a valid int"),
        ({"vocab_size": -2}, "this does not describe a model (vocab_size is -2: input should be greater than"),
        ({"rope_scaling": 5}, "this does not describe a model (rope_scaling is 5, and should be an object)"),
        ({"hidden_act": ["silu"]}, "this does not describe a model (unhashable type: 'list')"),
        (
            {"quantization_config": "fp8"},
            "this does not describe a model (quantization_config is 'fp8', and should be an object)",
        ),
    ],
)
def test_wrong_configs_are_errors_wherever_they_are_read(
    exported: Path, changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = exported / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert refusal(exported).startswith(f"DIR/config.json: {words}")
    assert main(["plan", str(exported), "--on", "h100"]) == 2
    assert f"{path}: " in capsys.readouterr().err


def test_errors_of_a_family_name_the_config() -> None:
    """Not the setting of a run's file that sets the same dimension."""
    config = FAMILIES["llama"].hf_config(made_model().spec)
    for changes, words in (
        ({"num_key_value_heads": 2}, r"^config\.json: 3 attention heads cannot share 2 key-value heads"),
        ({"quantization_config": "fp8"}, r"^config\.json: .*quantization_config is 'fp8', and should be an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"^config\.json: .*scaling\.linear\.factor: field required"),
    ):
        with pytest.raises(JinguError, match=words):
            FAMILIES["llama"].spec_from_hf({**config, **changes})


def test_quantized_weights_are_refused(exported: Path) -> None:
    path = exported / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path)
    opened = open_hf(exported)
    with pytest.raises(JinguError, match=r"model\.norm\.weight is stored as torch\.int8: the weights are quantized"):
        load_model(opened, torch.float32)


def test_checkpoints_without_the_base_prefix_and_with_buffers(tokenizer_path: Path, tmp_path: Path) -> None:
    """Like the first GPT-2 files: no `transformer.` prefix, masks among the weights; some also have the tied head."""
    model = made_model("gpt2")
    folder = export(model, tokenizer_path, tmp_path / "out")
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, path)
    back = load_model(open_hf(folder), torch.float32).state_dict()
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_of_the_export(tokenizer_path: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model = made_model("gpt2")
    opened = open_hf(export(model, tokenizer_path, tmp_path / "out", dtype=dtype))
    for name, value in model.state_dict().items():
        assert torch.equal(opened.read(name), value.to(dtype))


@pytest.mark.parametrize(
    ("file", "kind"), [("config.json", "an earlier export"), ("notes.txt", "something")], ids=["export", "other"]
)
def test_a_target_that_is_not_empty_is_not_touched(tokenizer_path: Path, tmp_path: Path, file: str, kind: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).write_text("{}")
    with pytest.raises(JinguError) as error:
        export(made_model(), tokenizer_path, tmp_path / "out")
    assert str(error.value) == (
        f"{tmp_path / 'out'}: there is {kind} here already, and it is not overwritten. Delete it first, or choose "
        "another folder."
    )
    assert [item.name for item in (tmp_path / "out").iterdir()] == [file]


def test_a_failed_export_leaves_nothing(tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_model()
    state = model.state_dict()

    def read(name: str) -> torch.Tensor:
        if name == "norm.weight":
            raise OSError(28, "No space left on device")
        return state[name]

    with pytest.raises(JinguError, match="the disk is full"):
        export_hf(model.spec, read, tokenizer_path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Conversions


def converted(source: Path, to: Path, *options: str) -> Path:
    assert main(["import", str(source), "--to", str(to), *options]) == 0
    return to


def test_generation_config_and_template_are_kept(exported: Path, tmp_path: Path) -> None:
    """Special tokens, generation settings and chat template are kept, and weights bitwise in their dtype."""
    change_config(exported, bos_token_id=7, eos_token_id=[8, 9], pad_token_id="absent")
    settings = {"eos_token_id": [8, 9, 10], "temperature": 0.6, "do_sample": True}
    (exported / "generation_config.json").write_text(json.dumps(settings))
    (exported / "chat_template.jinja").write_text("{{ messages }}")
    once = converted(exported, tmp_path / "once", "--dtype", "bf16")
    twice = converted(once, tmp_path / "twice")
    for folder in (once, twice):
        config = json.loads((folder / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (7, [8, 9])
        assert "pad_token_id" not in config
        assert json.loads((folder / "generation_config.json").read_text()) == settings
        assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
        assert open_hf(folder).eos_token_ids == (8, 9, 10)
    for name, theirs in load_file(twice / "model.safetensors").items():
        assert torch.equal(theirs, load_file(exported / "model.safetensors")[name].bfloat16())


def test_a_folder_with_only_a_sentencepiece_model(exported: Path, tmp_path: Path) -> None:
    """The imported tokenizer.json gives the same ids, and prompts start with the BOS token, as Llama's do."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text and more of it"] * 9),
        model_writer=out,
        vocab_size=275,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (exported / "tokenizer.json").unlink()
    (exported / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (exported / "tokenizer.model").write_bytes(out.getvalue())
    to = converted(exported, tmp_path / "to")
    theirs = transformers.AutoTokenizer.from_pretrained(to)
    reference = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    assert theirs("some 文 text")["input_ids"] == [reference.bos_id(), *reference.encode("some 文 text")]
    assert Tokenizer.load(to).encode("some 文 text") == reference.encode("some 文 text")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shards_and_tied_heads_are_restored_bitwise(family: str, tokenizer_path: Path, tmp_path: Path) -> None:
    model = made_model(family, tie_word_embeddings=True)
    sharded = export(model, tokenizer_path, tmp_path / "sharded", shard_bytes=10_000)
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    whole = converted(sharded, tmp_path / "whole")
    again = export(model, tokenizer_path, tmp_path / "again")
    assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert not any("lm_head" in name for name in load_file(whole / "model.safetensors"))
    assert json.loads((whole / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_check_names_broken_weights(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path, to = exported / "model.safetensors", tmp_path / "to"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = -torch.inf
    tensors["lm_head.weight"][0, 0] = 70000.0
    save_file(tensors, path)
    broken = "model.layers.1.mlp.up_proj.weight, model.norm.weight"
    for dtype, names in (
        ("fp32", f"2 of the weights contain NaN or infinity in float32: {broken}."),
        ("fp16", f"{broken}, lm_head.weight."),
    ):
        assert main(["import", str(exported), "--to", str(to), "--check", "--dtype", dtype]) == 2
        assert names in capsys.readouterr().err
        assert not to.exists()
    converted(exported, to)
    # Without the check they are written, with a warning.
    assert f"{to}: 2 of the weights contain NaN or infinity in float32: {broken}." in caplog.text


def test_memory_of_a_conversion(tokenizer_path: Path, tmp_path: Path) -> None:
    """A conversion needs less than twice the largest tensor of a model with many; measured in its own process."""
    sizes = ModelSettings(family="llama", hidden_size=512, num_heads=8, num_layers=24, vocab_size=12000)
    spec, source, largest = spec_from_settings(sizes, 257, 16), tmp_path / "source", 4 * 12000 * 512
    shapes = parameter_shapes(spec)
    export_hf(spec, lambda name: torch.full(shapes[name], 0.5), tokenizer_path, source)
    assert (source / "model.safetensors").stat().st_size > 10 * largest
    small = export(made_model(), tokenizer_path, tmp_path / "small")
    script = f"""if True:
        from pathlib import Path
        from jingu.formats.export import convert
        # What the interpreter and its libraries take is there before; a first, small conversion brings it in.
        def peak():
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        convert(Path({str(small)!r}), Path({str(tmp_path / "a")!r}))
        before = peak()
        convert(Path({str(source)!r}), Path({str(tmp_path / "b")!r}), "bf16", True)
        print((peak() - before) / {largest})
    """
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert 0.5 < float(done.stdout.split()[-1]) < 2


def test_shapes_that_the_architecture_does_not_support_are_refused(tokenizer_path: Path, tmp_path: Path) -> None:
    model = made_model("gpt2")
    grouped = replace_fields(model.spec, attention=model.spec.attention.model_copy(update={"num_kv_heads": 1}))
    with pytest.raises(JinguError, match="GPT2LMHeadModel cannot express this model's attention"):
        export_hf(grouped, model.state_dict().__getitem__, tokenizer_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_are_written_one_at_a_time(tokenizer_path: Path, tmp_path: Path) -> None:
    """Writing asks for each parameter once, in the order of the file."""
    model = made_model()
    state, requested_names = model.state_dict(), []

    def read(name: str) -> torch.Tensor:
        requested_names.append(name)
        return state[name]

    export_hf(model.spec, read, tokenizer_path, tmp_path / "out")
    assert requested_names == list(parameter_shapes(model.spec))


def test_runs_and_steps_are_opened(tokenizer_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "name"
    model = made_model()
    (run / "checkpoints").mkdir(parents=True)
    (run / "model.json").write_text(model.spec.to_json())
    with pytest.raises(JinguError, match="there is no complete checkpoint here"):
        open_model(run)
    for step in (5, 10):
        state = {f"model/{name}": value + step for name, value in model.state_dict().items()}
        save(step_folder(run / "checkpoints", step), {**state, "optimizer/count": torch.zeros(3)}, {"step": step})
    for path, step in ((run, 10), (step_folder(run / "checkpoints", 5), 5)):
        opened = open_model(path)
        assert opened.spec == model.spec
        assert opened.tokenizer_folder is None
        back = load_model(opened, torch.float64).state_dict()
        assert all(torch.equal(back[name], (value + step).double()) for name, value in model.state_dict().items())
    (run / "tokenizer").symlink_to(tokenizer_path)
    assert open_model(run).tokenizer_folder == run / "tokenizer"

    (run / "model.json").write_text(replace_fields(model.spec, num_layers=3).to_json())
    with pytest.raises(
        JinguError, match=r"missing: blocks\.2\.attention_norm\.weight, .*blocks\.2\.feed_forward\.down"
    ):
        open_model(run)
    (run / "model.json").unlink()
    with pytest.raises(JinguError, match="outside of its run"):
        open_model(step_folder(run / "checkpoints", 5))


def mapped_file(address: int) -> str:
    """Return the file that is mapped at an address of this process, or an empty string."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *rest = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return rest[4] if len(rest) == 5 else ""
    return ""


def test_weights_in_the_requested_dtype_are_not_copied(exported: Path) -> None:
    model = load_model(open_hf(exported), torch.float32)
    assert {mapped_file(weight.data_ptr()) for weight in model.parameters()} == {str(exported / "model.safetensors")}
    before = (exported / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.embedding.weight.zero_()  # a copy from here on
    assert (exported / "model.safetensors").read_bytes() == before
    other = load_model(open_hf(exported), torch.float64)
    assert {mapped_file(weight.data_ptr()) for weight in other.parameters()} <= {"", "[heap]"}
    assert other.embedding.weight.abs().sum() > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_transformers_can_train_every_exported_embedding(family: str, tokenizer_path: Path, tmp_path: Path) -> None:
    """It never trains the row of the padding token, which must not be the end token."""
    model = made_model(family)
    export_hf(model.spec, model.state_dict().__getitem__, tokenizer_path, tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    end = Tokenizer.load(tokenizer_path).eos_token_id
    tokens = torch.tensor([[end, 3, end, 4]])
    states = exported.base_model(tokens).last_hidden_state
    states.square().sum().backward()
    assert (exported.get_input_embeddings().weight.grad[end] != 0).any()


def test_exports_name_no_code_that_is_not_in_them(tokenizer_path: Path, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    Tokenizer.load(tokenizer_path).save(source)
    file = source / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    model = made_model("baichuan2")
    export_hf(model.spec, model.state_dict().__getitem__, source, tmp_path / "out")
    assert not any("auto_map" in path.read_text() for path in (tmp_path / "out").glob("*.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("some text").input_ids == Tokenizer.load(tokenizer_path).encode("some text")
    assert json.loads(file.read_text())["auto_map"] == own["auto_map"]
