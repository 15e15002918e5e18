"""The planner against published runs, and against formulas of papers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from bench.__main__ import main
from bench.planning import calibrated, fit_without, memory_error, predict_fit, run, time_errors
from bench.planning_rows import FOLDER, Case, gpt, read_cases, read_rows, workload
from jingu.errors import JinguError
from jingu.plan.memory import fullest_stage
from jingu.plan.software import Software
from jingu.plan.workload import num_parameters


def cases_of(table: str) -> list[Case]:
    return [case for case in read_cases(FOLDER) if case.table == table]


@pytest.mark.parametrize(
    ("table", "rows"), [("zero bubble", 6), ("OneFlow, V100", 6), ("torchtitan", 7), ("BigScience", 14)]
)
def test_memory_is_what_was_measured(table: str, rows: int) -> None:
    """Pipelines of 8 to 32 A100s (Qi et al., 2023), all axes on V100s, ZeRO beside tensor parallelism on H100s, and
    ZeRO 1 of DeepSpeed beside pipelines and tensor parallelism on A100s."""
    errors = [error for case in cases_of(table) if (error := memory_error(case)) is not None]
    assert len(errors) == rows
    assert fmean(map(abs, errors)) < 0.06
    assert max(map(abs, errors)) < 0.13


def test_steps_that_ran_out_of_memory_are_not_said_to_fit() -> None:
    """Llama 7B with ZeRO 3 and with a pipeline, at all lengths that its authors tried."""
    cases = cases_of("gdGPT")
    refused = [case for case in cases if not predict_fit(case)]
    assert len(cases) == 30 and sum(case.fits is False for case in cases) == 9
    assert all(case in refused for case in cases if case.fits is False)
    # Steps that ran are refused near the limit only, for the margin of memory.
    assert len(refused) <= 9 + 4


def test_any_file_with_the_columns_of_a_table_is_judged(tmp_path: Path) -> None:
    """A part of a table under another name; and a file whose columns are those of none."""
    lines = (FOLDER / "zero_bubble.csv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "rows.csv").write_text("\n".join(lines[:4]), encoding="utf-8")
    table = run(str(tmp_path / "rows.csv")).splitlines()
    assert [line.split("|")[1].strip() for line in table if "|" in line] == ["rows", "---", "zero bubble"]
    (tmp_path / "rows.csv").write_text("layers,seconds\n1,2\n", encoding="utf-8")
    with pytest.raises(JinguError, match="no known table"):
        run(str(tmp_path / "rows.csv"))


# Hidden size, layers and parameters in billions of the models of Table 1.
ZERO_MODELS = {"7.5B": (4096, 36, 7.5), "128B": (12288, 70, 128), "1T": (25600, 127, 1000)}
# Weights and gradients in fp16, master weights and moments in fp32. Sharded weights lie beside their masters.
ZERO = Software(gradient_bytes=2.0, reduce_bytes=2.0)
ZERO_STAGES = {"os": (1, ZERO), "osg": (2, ZERO), "osgp": (3, replace(ZERO, weight_bytes=6.0, copies_weights=False))}


@pytest.mark.parametrize("row", read_rows(FOLDER / "zero_table1.csv"), ids=lambda row: f"{row['dp']} ranks")
def test_model_states_are_those_of_zero(row: dict[str, str]) -> None:
    """Rajbhandari et al., 2020, Table 1, to its last digit: gigabytes of a rank, by stage, of 16 bytes a parameter."""
    ranks = int(row["dp"])
    for name, printed in list(row.items())[1:]:
        model, _, stage = name.partition("_")
        hidden, layers, billions = ZERO_MODELS[model]
        # The vocabulary makes up for what blocks of this size leave.
        spec = gpt(layers, hidden, 32, 1024, 1024, tie_word_embeddings=True)
        vocab = 1024 + round((billions * 1e9 - num_parameters(spec)) / hidden)
        spec = gpt(layers, hidden, 32, 1024, vocab, tie_word_embeddings=True)
        # A single rank divides nothing, whatever the stage.
        zero_stage, software = ZERO_STAGES[stage if ranks > 1 else "osgp"]
        work = workload(spec, {"shard": ranks}, 1, 2 * ranks, software, zero_stage=zero_stage)
        device = fullest_stage(work)[1].device
        parts = ("weights", "compute weights", "gradients", "optimizer state")
        total = sum(device.get(part, 0.0) for part in parts) / 1e9
        unit = 10.0 ** -len(printed.partition(".")[2])
        assert total == pytest.approx(float(printed), rel=2e-3, abs=unit), name


# Largest mean error of a table whose training system was not fitted, and after a calibration on 20 of its rows.
LIMITS = {
    "vTrain, several nodes": (0.09, 0.09),
    "vTrain, one node": (0.09, 0.08),
    "Megatron SC'21": (0.05, 0.05),
    "Korthikanti 2022": (0.06, 0.06),
    "llm-foundry, A100": (0.07, 0.07),
    "llm-foundry, H100": (0.07, 0.07),
    "BigScience": (0.05, 0.05),
    "MT-NLG": (0.10, 0.05),
    "zero bubble": (0.03, 0.03),
    "torchtitan": (0.10, 0.08),
    "mixtures, B200, GB200, GB300": (0.12, 0.12),
}


@pytest.mark.slow
@pytest.mark.parametrize("table", LIMITS)
def test_rows_that_were_not_fitted_are_predicted(table: str) -> None:
    cases = cases_of(table)
    efficiency = fit_without(cases[0].system)
    unseen, after = LIMITS[table]
    assert fmean(map(abs, time_errors(cases, efficiency))) < unseen
    assert fmean(map(abs, calibrated(cases, efficiency))) < after


ROW = {"software": "megatron-core", "machine": "H100", "model": "llama-3-8b", "seq": "8192", "mbs": "1", "dp": "8"}


def write_row(folder: Path, changes: dict[str, str]) -> Path:
    row = ROW | {"gbs": "128", "iter_s": "12"} | changes
    path = folder / "rows.csv"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iter_s": "fast"}, "row 1: iter_s: it is fast, and should be a positive number"),
        ({"iter_s": "-1"}, "row 1: iter_s: it is -1"),
        ({"mem_gib": "nan"}, "row 1: mem_gib: it is nan"),
        ({"iter_s": ""}, "row 1: nothing was measured"),
        ({"fits": "maybe"}, "row 1: fits: it is maybe"),
        ({"gbs": "127"}, "row 1: 127 sequences a step are no multiple of 1 on each of 8"),
        ({"tp": "2.5"}, "row 1: tp: it is 2.5, and should be an integer"),
        ({"dp": "0"}, "row 1: dp: it is 0"),
        ({"model": ""}, "row 1: layers: it is empty"),
        ({"model": "llama-9"}, "row 1: .*llama-9"),
        ({"software": "megatron"}, "row 1: .*no training system megatron"),
        ({"recompute": "some"}, "row 1: type: Input should be 'none', 'selective' or 'full'"),
        ({"schedule": "dual"}, "row 1: pipeline_schedule: Input should be 'gpipe'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(JinguError, match=message):
        read_cases(write_row(tmp_path, changes))


@pytest.mark.parametrize("cells", ["10", "1,2,3"])
def test_a_row_has_as_many_cells_as_columns(tmp_path: Path, cells: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"iter_ms,mem_mib,dp\n{cells}\n" if cells == "10" else f"software,machine\n{cells}\n")
    with pytest.raises(JinguError, match="row 1: it has more or fewer cells"):
        read_cases(path)


def test_a_column_that_is_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = read_cases(write_row(tmp_path, {"recomputation": "full"}))
    assert case.seconds == 12
    assert "columns that are not read: recomputation" in capsys.readouterr().err


def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", f"planning={write_row(tmp_path, {'dp': '0'})}"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("planning: ")
