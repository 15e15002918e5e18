"""`jingu evaluate` from the command line, as its guide says, and the comparison of two models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats

from jingu.cli import main
from jingu.evaluate.evaluation import measure_spread
from jingu.evaluate.task_file import CATALOGUE
from jingu.formats.export import convert
from jingu.training.commands import train
from tests.conftest import MakeRun

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "evaluation.md"
CITIES = {"Norway": ["Oslo", "Bergen"], "Japan": ["Kyoto", "Tokyo"], "Kenya": ["Nairobi", "Mombasa"]}


@pytest.fixture
def models(tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models, trained for one step each, and the data of the guide's task."""
    for name, seed in (("MODEL", 1), ("OTHER", 2)):
        settings = {"name": name, "seed": seed, "train.steps": 1, "model.max_position_embeddings": 512}
        config = tiny_run(settings)
        train(config)
        convert(Path(config.runs_dir) / config.name, tmp_path / name)
    rows = [
        json.dumps({"country": country, "cities": cities, "answer": number % 2})
        for number, (country, cities) in enumerate(CITIES.items())
    ]
    for split in ("train", "test"):
        (tmp_path / f"capitals-{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    # A corpus with a document of a task.
    first = (CATALOGUE / "data" / "hellaswag_100.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "leak.txt").write_text(first, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_guide_runs_as_written(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    (task,) = re.findall(r"```yaml\n# (\S+)\n(.*?)```", guide, re.DOTALL)
    (models / task[0]).write_text(task[1], encoding="utf-8")
    commands = re.findall(r"^jingu (.*)$", guide, re.MULTILINE)
    assert len(commands) == 10
    outputs = []
    for command in commands:
        assert main(command.split()) == 0
        outputs.append(capsys.readouterr().out)
    basics, listed, limited, _, spread, _, compared, report, searched, clean = outputs
    assert re.search(r"^hellaswag_100 +0 +100 +acc +fp32 +0\.\d{4} +0\.0\d{3} +0\.\d+ to 0\.\d+$", basics, re.MULTILINE)
    assert re.search(r"^gsm8k_text_100 .* bits_per_byte ", basics, re.MULTILINE)
    assert re.search(r"^truthfulqa_100 +multiple_choice +en +closed_book_qa +Apache-2\.0 ", listed, re.MULTILINE)
    assert re.search(r"^ocnli +multiple_choice +zh +nli +see the data set +CLUE, ", listed, re.MULTILINE)
    assert re.search(r"^mmlu +group +57 tasks$", listed, re.MULTILINE)
    assert re.search(r"^hellaswag_100 +0 +20 +acc ", limited, re.MULTILINE)
    assert re.search(r"^other +capitals +acc +3 .* McNemar ", compared, re.MULTILINE)
    assert re.search(r"^hellaswag_100 +acc_norm +4 +0\.\d{4} +0\.\d{4} ", spread, re.MULTILINE)
    assert "Wrote evaluations/MODEL/report.html" in report
    assert "was not searched for it" in spread
    assert re.search(r"^hellaswag_100 +100 +1 +0 +", searched, re.MULTILINE)
    assert re.search(r"^hellaswag_100 +acc +clean +19 ", clean, re.MULTILINE)
    # The difference, its error and its p-values by hand, from the samples of both.
    values = []
    for name in ("MODEL", "other"):
        lines = (models / "evaluations" / name / "capitals.samples.jsonl").read_text(encoding="utf-8").splitlines()
        values.append(np.array([json.loads(line)["metrics"]["acc,none"] for line in lines]))
    differences = values[1] - values[0]
    better = int((differences > 0).sum())
    changed = int((differences != 0).sum())
    p = scipy.stats.binomtest(better, changed).pvalue if changed else 1.0
    words = next(line.split()[1:] for line in compared.splitlines() if re.match("other +capitals +acc ", line))
    mean = f"{differences.mean():+.4f}"
    assert words[2:6] == ["3", "fp32", mean, f"{scipy.stats.sem(differences):.4f}"]
    assert words[7:9] == ["McNemar", f"{p:.3g}"]
    # What was printed about several templates or shots, and about training data, is stored too.
    spread_file = models / "evaluations" / "MODEL" / "hellaswag_100.spread.json"
    stored = json.loads(spread_file.read_text(encoding="utf-8"))["results"]["acc_norm,none"]
    shown = [f"{stored[key]:.4f}" for key in ("mean", "standard_deviation", "lowest", "highest")]
    assert re.search(rf"^hellaswag_100 +acc_norm +4 +{' +'.join(shown)} +fp32$", spread, re.MULTILINE)
    variants = [f"hellaswag_100@{template}:{shots}" for shots in (0, 2) for template in ("default", "options")]
    assert list(stored["values"]) == variants
    assert stored["mean"] == pytest.approx(np.mean(list(stored["values"].values())))
    variant = json.loads((models / "evaluations" / "MODEL" / "hellaswag_100@default:2.json").read_text("utf-8"))
    assert f"hellaswag_100@options:2: {variant['evidence']}" in spread and "not proved" in variant["evidence"]
    # Results with their hashes, and a prompt with its two shots.
    result = json.loads((models / "evaluations" / "MODEL" / "capitals.json").read_text(encoding="utf-8"))
    other = json.loads((models / "evaluations" / "other" / "capitals.json").read_text(encoding="utf-8"))
    assert result["hashes"] == other["hashes"] and result["model"]["fingerprint"] != other["model"]["fingerprint"]
    assert result["num_fewshot"] == 2 and result["results"]["acc,none"]["size"] == 3
    samples = (models / "evaluations" / "MODEL" / "capitals.samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(samples[0])["pairs"][0][0].count("The capital of ") == 3


def test_results_of_a_run_lie_in_the_run(tiny_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run({"train.steps": 1, "model.max_position_embeddings": 512})
    train(config)
    run = Path(config.runs_dir) / config.name
    assert main(["evaluate", str(run), "hellaswag_100", "--limit", "2"]) == 0
    assert main(["evaluate", str(run / "checkpoints" / "step-00000001"), "hellaswag_100", "--limit", "2"]) == 0
    assert (run / "evaluations" / "hellaswag_100.json").is_file()
    # As in the harness, a group has no standard error if a task has a single document.
    group = run / "pair.yaml"
    tasks = "task: [hellaswag_100, truthfulqa_100]"
    group.write_text(f"group: pair\n{tasks}\naggregate_metric_list: [{{metric: acc}}]\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["evaluate", str(run), str(group), "--limit", "1"]) == 0
    assert re.search(r"^pair +2 +acc +fp32 +[\d.]+ +N/A +N/A$", capsys.readouterr().out, re.MULTILINE)
    assert main(["evaluate", str(run), "hellaswag_10"]) == 2
    assert main(["evaluate", "compare", str(run), str(run)]) == 2
    errors = capsys.readouterr().err
    assert "there is no task hellaswag_10. Did you mean hellaswag_100?" in errors
    assert "the folders have no results in common" in errors


def test_the_spread_of_values_that_are_not_numbers_is_no_number() -> None:
    results: dict[str, Any] = {
        f"task@{shots}": SimpleNamespace(metrics={"acc": SimpleNamespace(value=value)}, precision="fp32")
        for shots, value in enumerate((0.5, np.nan))
    }
    assert np.isnan(measure_spread(results)["task"]["acc"].standard_deviation)
