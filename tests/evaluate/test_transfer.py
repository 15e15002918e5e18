"""Prompts tuned on one task and tried on others: a table with errors, the same numbers as evaluations one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from jingu.cli import main
from jingu.evaluate.statistics import holm
from tests.conftest import Library, MakeRun
from tests.evaluate.test_held_out import run_on, write_mixture, write_task

PROMPT = {"type": "prompt", "num_virtual_tokens": 3}


def read_values(file: Path) -> np.ndarray:
    lines = file.read_text(encoding="utf-8").splitlines()
    return np.array([json.loads(line)["metrics"]["brier_score,none"] for line in lines])


def test_table_of_prompts_and_tasks(
    tiny_run: MakeRun, library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for name in ("birds", "stones"):
        write_task(tmp_path, name)
        with (tmp_path / f"{name}.yaml").open("a", encoding="utf-8") as file:
            file.write("metric_list: [{metric: brier_score}, {metric: acc}]\n")
    run_on(tiny_run, write_mixture(tmp_path, "birds", held_out=()), "MODEL")
    for name in ("birds", "stones"):
        mixture = write_mixture(tmp_path, name, held_out=())
        run_on(tiny_run, mixture, name, runs / "MODEL", tune=PROMPT, optimizer__lr=1.0)
    capsys.readouterr()

    # 1. The table, and the same numbers from evaluations one by one.
    arguments = ["--include", str(tmp_path), "--precision", "fp32"]
    output = tmp_path / "transfer"
    command = ["evaluate", "transfer", str(runs / "birds"), str(runs / "stones"), "--tasks", "birds", "stones"]
    assert main([*command, *arguments, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    cells: list[dict[str, Any]] = json.loads((output / "transfer.json").read_text(encoding="utf-8"))
    assert [(cell["source"], cell["target"]) for cell in cells] == [
        (source, target) for source in ("MODEL", "birds", "stones") for target in ("birds", "stones")
    ]
    assert [cell["is_own"] for cell in cells] == [False, False, True, False, False, True]
    for source in ("birds", "stones"):
        one = tmp_path / "one" / source
        assert main(["evaluate", str(runs / source), "birds", "stones", *arguments, "--output", str(one)]) == 0
        for target in ("birds", "stones"):
            file = f"{target}.samples.jsonl"
            assert (one / file).read_bytes() == (output / source / file).read_bytes()
    # 2. Differences from the model without a prompt, by scipy.
    p_values = []
    for cell in cells[2:]:
        first, second = (
            read_values(output / name / f"{cell['target']}.samples.jsonl") for name in ("MODEL", cell["source"])
        )
        assert (first != second).all()
        assert cell["result"]["value"] == pytest.approx(second.mean())
        assert cell["difference"]["stderr"] == pytest.approx(scipy.stats.sem(second - first))
        assert cell["difference"]["p"] == pytest.approx(scipy.stats.ttest_rel(first, second).pvalue)
        p_values.append(cell["difference"]["p"])
    assert [cell["p_holm"] for cell in cells[2:]] == pytest.approx(holm(p_values))
    # 3. What is printed.
    assert re.search(r"^prompt of +birds brier_score +stones brier_score", out, re.MULTILINE)
    value, stderr = cells[2]["result"]["value"], cells[2]["result"]["stderr"]
    assert re.search(rf"^birds +{value:.4f} ± {stderr:.4f}\* +\d\.\d+ ± \d\.\d+ *$", out, re.MULTILINE)
    assert "* tuned on this task" in out and "Differences from MODEL without a prompt" in out

    # 4. Runs that cannot be compared.
    assert main(["evaluate", "transfer", str(runs / "MODEL"), "--tasks", "birds", *arguments]) == 2
    run_on(tiny_run, tmp_path / "mixture.yaml", "SECOND")
    run_on(tiny_run, tmp_path / "mixture.yaml", "other", runs / "SECOND", tune=PROMPT)
    assert main(["evaluate", "transfer", str(runs / "birds"), str(runs / "other"), "--tasks", "birds"]) == 2
    assert main(["evaluate", "transfer", str(runs / "birds"), str(runs / "birds"), "--tasks", "birds"]) == 2
    errors = capsys.readouterr().err
    assert "this run trained no adapters" in errors and "these runs started from different models" in errors
    assert "two of the models have the same name" in errors
