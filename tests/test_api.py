"""The Python interface: its guide runs as written, and what it returns equals what the commands print."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jingu
from jingu.data.dataset import open_dataset
from jingu.errors import JinguError
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.training.commands import train as train_command
from tests.conftest import Library, MakeRun

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "python.md"


@pytest.fixture
def model(tiny_run: MakeRun) -> jingu.Model:
    config = tiny_run({"train.steps": 2, "model.max_position_embeddings": 64})
    train_command(config)
    return jingu.load(Path(config.runs_dir) / config.name, precision="fp64", device="cpu", template="chatml")


def test_guide_runs_as_written(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for file in library.text.iterdir():
        (folder / file.with_suffix(".txt").name).write_bytes(file.read_bytes())
    namespace: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(GUIDE), "exec"), namespace)
    assert namespace["run"] == Path("runs/other")
    assert len(namespace["several"]) == 2
    assert len(namespace["first"]) == 512
    assert (tmp_path / "exported" / "config.json").is_file()


def test_export_writes_what_its_name_and_dtype_say(tiny_run: MakeRun, tmp_path: Path) -> None:
    config = tiny_run({"train.steps": 1, "model.hidden_size": 64, "model.intermediate_size": 64})
    train_command(config)
    run = Path(config.runs_dir) / config.name
    file = jingu.export(run, tmp_path / "model.gguf", dtype="q8_0")
    assert file.read_bytes()[:4] == b"GGUF"
    for name, dtype in (("a", "q8_0"), ("b", "eight"), ("c.gguf", "fp8")):
        with pytest.raises(JinguError, match="dtype"):
            jingu.export(run, tmp_path / name, dtype=dtype)
        assert not (tmp_path / name).exists()


def test_guide_names_every_export() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name in set(jingu.__all__) - {"Model", "__version__"}:
        assert f"jingu.{name}" in text, name
        assert hasattr(jingu, name)


def test_importing_is_quick_and_lazy() -> None:
    code = textwrap.dedent("""
        import sys, jingu
        assert not {"torch", "numpy", "pydantic"} & set(sys.modules)
        import jingu.training.loop
        assert jingu.train.__module__ == "jingu.api"  # not the package `jingu.training`
        assert jingu.load.__module__ == "jingu.api"
    """)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_typed_marker_is_part_of_the_package() -> None:
    assert (Path(jingu.__file__).parent / "py.typed").is_file()


def test_a_batch_gives_the_same_texts_as_single_prompts(model: jingu.Model) -> None:
    prompts = ["def ", "import os", ""]
    assert model.generate(prompts, max_tokens=8) == [model.generate(prompt, max_tokens=8) for prompt in prompts]


def test_sampling_parameters_reach_the_engine(model: jingu.Model) -> None:
    texts = {model.generate("def ", max_tokens=8, temperature=1.0, seed=seed) for seed in range(4)}
    assert len(texts) > 1
    with pytest.raises(JinguError, match="temperature"):
        model.generate("def ", temperature=-1.0)
    with pytest.raises(JinguError, match="exceed the model's context of 64"):
        model.generate("def ", max_tokens=1000)


def test_sampling_defaults_of_the_model(model: jingu.Model) -> None:
    """What a model's generation_config.json recommends, except for what a call says otherwise."""
    recommending = copy(model)
    recommending.inference_model = replace(model.inference_model, default_sampling={"temperature": 1.5, "top_k": 9})
    overrides: Any = {"temperature": 1.5, "top_k": 9, "seed": 2}
    texts = [model.generate("def ", max_tokens=8, **overrides), model.chat("a", max_tokens=8, **overrides)]
    assert [recommending.generate("def ", max_tokens=8, seed=2), recommending.chat("a", max_tokens=8, seed=2)] == texts
    assert recommending.generate("def ", max_tokens=8, temperature=0.0) == model.generate("def ", max_tokens=8)


def test_chat_encodes_with_the_template(model: jingu.Model) -> None:
    assert model.chat_format is not None
    assert model.chat("a", max_tokens=4) == model.chat([{"role": "user", "content": "a"}], max_tokens=4)
    with pytest.raises(JinguError, match="messages"):
        model.chat([{"rule": "user"}])
    model.chat_format = None
    with pytest.raises(JinguError, match="no chat template"):
        model.chat("a")


def test_scores_are_the_log_probabilities_of_the_model(model: jingu.Model) -> None:
    text = model.generate("def ", max_tokens=4)
    ids = model.inference_model.tokenizer.encode("def ")
    requests = [Request(tuple(ids), SamplingParams(), 4, logprobs=0)]
    number = model.engine.submit(requests[0])
    events = []
    while model.engine.busy:
        events += [event for event in model.engine.step() if event.request_id == number and event.token]
    targets = [event.token.id for event in events if event.token]
    (score,) = model.score("def ", [targets])
    assert score.is_greedy
    assert score.logprob == pytest.approx(sum(event.token.logprob or 0.0 for event in events if event.token))
    first, second = model.score("def ", ["x = 1", "while"])
    assert first.logprob == model.score("def ", ["x = 1"])[0].logprob != second.logprob
    assert text == "".join(event.token.text for event in events if event.token)


def test_embeddings_have_length_1(model: jingu.Model) -> None:
    vectors = model.embed(["def ", "import os"])
    assert vectors.shape == (2, 32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)
    assert np.allclose(model.embed(["import os"])[0], vectors[1])
    assert model.embed([]).shape == (0, 32)


def test_dataset_is_a_sequence_of_documents(library: Library) -> None:
    dataset = jingu.Dataset(library.data)
    tokens = open_dataset(library.data, "train")
    assert len(dataset) == tokens.manifest.train.documents
    assert sum(len(ids) for ids in dataset) == dataset.num_tokens == tokens.tokens
    assert np.array_equal(np.concatenate(dataset[:]), dataset.tokens())
    assert (dataset[-1] == dataset.document(len(dataset) - 1)).all()
    assert all(ids[-1] == dataset.eos_token_id for ids in dataset)
    assert dataset.source(0).endswith(".py")
    assert len(dataset.tokens(dataset.num_tokens - 3, 10)) == 3
    with pytest.raises(IndexError):
        dataset.document(len(dataset))


def test_a_run_that_fails_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JinguError, match=r"model\.width is not a setting\. Did you mean model\.hidden_size"):
        jingu.train({"model": {"width": 3}})
    with pytest.raises(JinguError, match="there is no such file"):
        jingu.train("missing.yaml")
    monkeypatch.setattr("jingu.training.commands.train", lambda config, processes: 130)
    with pytest.raises(KeyboardInterrupt):
        jingu.train({})
    monkeypatch.setattr("jingu.training.commands.train", lambda config, processes: 75)
    with pytest.raises(JinguError, match="exit code 75"):
        jingu.train({})
