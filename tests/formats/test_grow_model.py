"""`jingu model grow`: transformers loads the folders, their logits equal the original, and runs start from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.formats.export import export_hf
from jingu.formats.models import open_model
from jingu.formats.stored_model import StoredModel, load_model
from jingu.model.decoder import Decoder
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

TEXTS = ["the weather in the north is cold and the weather in the south is warm\n" * 9]
CHINESE = ["北方的天气很冷，南方的天气很暖。\n" * 9]
TOKENS = torch.randint(0, 280, (2, 13), generator=torch.Generator().manual_seed(1))


def model_in(folder: Path, tokenizer: Tokenizer, family: str = "llama", **settings: Any) -> Path:
    sizes = {"hidden_size": 24, "num_heads": 3, "num_layers": 2, "intermediate_size": 20, "initializer_range": 0.2}
    spec = spec_from_settings(ModelSettings(family=family, **{**sizes, **settings}), tokenizer.vocab_size, 32)
    model = Decoder(spec)
    init_weights(model, spec, 3)
    tokenizer.save(folder.with_name("tokenizer"))
    read = model.state_dict().__getitem__
    source = StoredModel(
        spec,
        read,
        None,
        folder,
        config={"bos_token_id": 0, "eos_token_id": [0, 1]},
        generation_config={"eos_token_id": [0, 1], "temperature": 0.5},
    )
    export_hf(spec, read, folder.with_name("tokenizer"), folder, source=source)
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return model_in(tmp_path / "old", train_tokenizer(iter(TEXTS), 280, ["<end>", "<turn>"]))


def grown(old: Path, *options: str) -> Path:
    to = old.with_name("grown")
    assert main(["model", "grow", str(old), "--to", str(to), *options]) == 0
    return to


def logits(folder: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    model = load_model(open_model(folder), dtype)
    with torch.no_grad():
        return model.logits(model(TOKENS))


def apart(new: Tensor, old: Tensor) -> float:
    return float((new - old).norm() / old.norm())


GROWTHS = {
    "deeper": ["--num-layers", "5", "--depth-rule", "stacked"],
    "wider": ["--hidden-size", "48"],
    "experts": ["--experts", "4"],
    "all": ["--vocab-size", "301", "--num-layers", "3", "--hidden-size", "72", "--noise", "0.01", "--experts", "3"],
}


@pytest.mark.parametrize("options", GROWTHS.values(), ids=GROWTHS)
def test_transformers_loads_the_grown_model_with_equal_logits(options: list[str], old: Path) -> None:
    to = grown(old, *options)
    noisy = "--noise" in options  # of experts, where it is not made up for
    assert apart(logits(to)[..., :280], logits(old)) < (0.1 if noisy else 1e-6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    with torch.no_grad():
        assert apart(theirs(TOKENS).logits, logits(to, torch.float32)) < 1e-5


def test_parameter_counts_are_printed(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = grown(old, "--experts", "4", "--active", "1")
    output = capsys.readouterr().out.splitlines()
    before, after = (sum(p.numel() for p in Decoder(open_model(path).spec).parameters()) for path in (old, to))
    assert after == before + 2 * (3 * 3 * 24 * 20 + 4 * 24)
    assert output[-1] == f"It has {after:,} parameters ({before + 2 * 4 * 24:,} active); {old} has {before:,}."


def test_another_tokenizer_keeps_the_embeddings_of_known_tokens(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Known tokens are matched by text, not id; new ones are composed of parts; EOS may have another name."""
    new = train_tokenizer(iter(TEXTS + CHINESE), 300, ["<user>", "<eos>", "<turn>"])
    new._config["eos_token"] = "<eos>"
    folder = old.with_name("new")
    new.save(folder)
    new = Tokenizer.load(folder)
    to = grown(old, "--tokenizer", str(folder), "--vocab-size", "303")
    before, after = open_model(old), open_model(to)
    known, pieces = Tokenizer.load(before.tokenizer()).vocab(), new.vocab()
    for name in ("embedding.weight", "head.weight"):
        there, here = before.read(name), after.read(name)
        assert here.shape == (303, 24)
        for piece, id_ in pieces.items():
            if piece in known:
                assert torch.equal(here[id_], there[known[piece]])
        assert torch.equal(here[pieces["<eos>"]], there[known["<end>"]])
        sky = "å¤©"  # 天 in the byte alphabet
        assert sky not in known
        assert torch.allclose(here[pieces[sky]], there[[known[letter] for letter in sky]].mean(0), atol=1e-6)
        for row in (pieces["<user>"], 300, 302):
            assert torch.allclose(here[row], there.mean(0), atol=1e-6)
    assert Tokenizer.load(after.tokenizer()).fingerprint() == new.fingerprint()
    config = json.loads((to / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [1, 2])
    assert json.loads((to / "generation_config.json").read_text()) == {"eos_token_id": [1, 2], "temperature": 0.5}
    text = "the weather in the north"
    ids = [[tokenizer.encode(text)] for tokenizer in (Tokenizer.load(old), new)]
    assert len(set(new.encode(text)) - {pieces[piece] for piece in known if piece in pieces}) == 0
    assert ids[0] != ids[1]
    remaining = sum(piece in known for piece in pieces) + 1
    assert f"{remaining:,} of 300 tokens keep their rows" in capsys.readouterr().out


MISTAKES = [
    (
        [],
        "OLD: no option says how the model should grow. Give --tokenizer, --vocab-size, --num-layers, --hidden-size ",
    ),
    (["--vocab-size", "280"], "--vocab-size: the model has 280 rows already. Give more than 280."),
    (["--tokenizer", "TOKENIZER", "--vocab-size", "9"], "--vocab-size: the tokenizer has 280 tokens. Give as many or"),
    (["--num-layers", "2"], "--num-layers: the model has 2 blocks already. Give more than 2."),
    (
        ["--hidden-size", "25"],
        "--hidden-size: the hidden size 24 grows by repetition, and 25 is not a multiple of it. Give 48, 72",
    ),
    (["--experts", "1"], "model.experts: a token cannot use 2 of 1 experts. Choose at most 1 active experts."),
    (["--num-layers", "3", "--to", "OLD"], "OLD: there is an earlier export here already, and it is not overwritten."),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES, ids=[words[:24] for _, words in MISTAKES])
def test_errors_leave_no_files(options: list[str], words: str, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"OLD": str(old), "TOKENIZER": str(old.with_name("tokenizer"))}
    command = ["model", "grow", str(old), "--to", str(old.with_name("grown"))]
    assert main(command + [places.get(word, word) for word in options]) == 2
    output = capsys.readouterr().err.replace(str(old), "OLD")
    assert output.startswith(f"jingu: {words}"), output
    assert not old.with_name("grown").exists()
