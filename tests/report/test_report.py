"""The report's file: whole, self-contained, safe, and true to metrics.jsonl."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jingu.errors import JinguError
from jingu.report.commands import write_report
from jingu.report.page import render_page
from jingu.report.record import RunRecord, _add_row, read_run

Rows = list[dict[str, Any]]
MakeRun = Callable[..., Path]
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Holds that tags nest, and gathers what the tests ask about."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> repeats an attribute"
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)


def checked(text: str) -> Checker:
    """Parse the page; it must be well formed, fetch nothing, and carry one script: its own."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.tags.count("script") == 1
    fetching = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}
    assert not [entry for entry in checker.attributes if entry[1] in fetching]
    assert not [name for _, name, _ in checker.attributes if name.startswith("on")]
    assert not {"link", "iframe", "object", "embed", "img", "base", "form"} & set(checker.tags)
    assert "@import" not in text and "url(" not in text
    described = [
        value or "" for _, name, value in checker.attributes if name in ("aria-labelledby", "aria-describedby")
    ]
    assert {part for value in described for part in value.split()} <= set(checker.ids)
    return checker


def written(run: Path) -> tuple[str, str]:
    """The page's source, and the text a reader sees."""
    write_report(run, None)
    text = (run / "report.html").read_text(encoding="utf-8")
    return text, "".join(checked(text).text)


def test_a_realistic_run_shows_its_own_values(
    make_run: MakeRun, realistic: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    source, seen = written(make_run(realistic))
    assert "report.html" in capsys.readouterr().out
    train = [row for row in realistic if row["type"] == "train"]
    last = [row for row in realistic if row["type"] == "evaluation"][-1]
    bits = f"{last['bits_per_byte']:.4g}"
    assert (
        f"4.21M-parameter llama, 1,200 steps, 9.83M tokens in 3 min 59 s on 1 rank (cpu, fp32): {bits} bits per byte"
    ) in seen
    tiles = re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", source)
    assert dict(tiles) == {
        "Final loss": f"{train[-1]['loss']:.4g}",
        "Bits per byte": bits,
        "Tokens per second": f"{median(row['tokens_per_second'] for row in train) / 1000:.3g}k",
        "Share of peak": f"{median(row['peak_share'] for row in train):.0%}",
        "Peak memory": f"{max(row['memory_bytes'] for row in train) / 2**30:.4g} GiB",
        "Training time": "3 min 59 s",
    }
    for name in ("Loss", "Bits per byte", "Learning rate", "Gradient norm", "Throughput", "Memory"):
        assert f"<b>{name}</b>" in source
    assert source.count('class="resume"') == 6 and "resumed from step 600" in seen
    assert "gzip -9 1.882" in seen and "xz -9 1.665" in seen and "this model" in seen
    assert "optimizer:\n  type: adamw" in seen and '"family": "llama"' in seen
    assert "Thin dotted lines" in seen


def test_a_mixture_of_experts_shows_its_loads(make_run: MakeRun, realistic: Rows) -> None:
    dense, _ = written(make_run(realistic, name="dense"))
    assert "Loads of experts" not in dense
    loads = {"max_expert_load": 2.5, "min_expert_load": 0.125, "dropped": 0.0, "max_correction": 0.0625}
    rows = [row | loads if row["type"] == "train" else row for row in realistic]
    source, _ = written(make_run(rows, name="experts"))
    for title in ("Loads of experts", "Corrections of routers"):
        assert f"<b>{title}</b>" in source
    assert "Dropped choices" not in source  # none was dropped
    rows[-5] = rows[-5] | {"dropped": 0.25, "type": "train"}
    source, _ = written(make_run(rows, name="capacity"))
    assert "<b>Dropped choices</b>" in source


def test_a_run_that_counts_no_bytes_shows_none(make_run: MakeRun, realistic: Rows) -> None:
    """As of removed spans, whose bytes say nothing of a text."""
    nothing = {"bits_per_byte": None, "bytes": None}
    rows = [row | nothing if row["type"] == "evaluation" else row for row in realistic if row["type"] != "baseline"]
    source, seen = written(make_run(rows))
    assert "<dt>Bits per byte" not in source and "<b>Bits per byte" not in source and "on 1 rank (cpu, fp32)." in seen
    assert f"validation {rows[-3]['loss']:.4g}" in seen


def test_what_hovering_shows_is_what_was_logged(make_run: MakeRun, realistic: Rows) -> None:
    source, _ = written(make_run(realistic))
    data = [json.loads(value or "") for _, name, value in checked(source).attributes if name == "data-chart"]
    training, held_out = data[0]["series"]
    logged = {row["step"]: row["loss"] for row in realistic if row["type"] == "train"}
    assert {step: text for step, text, _ in training} == {step: f"{loss:.4g}" for step, loss in logged.items()}
    logged = {row["step"]: row["loss"] for row in realistic if row["type"] == "evaluation"}
    assert {step: text for step, text, _ in held_out} == {step: f"{loss:.4g}" for step, loss in logged.items()}


def test_samples_are_a_progression_with_their_whitespace(make_run: MakeRun, realistic: Rows) -> None:
    source, seen = written(make_run(realistic))
    at = [seen.index(f"step {step}def ") for step in ("100", "300", "500", "1,000", "1,200")]
    assert at == sorted(at)
    assert "        if size < 0:\n            raise ValueError" in seen
    assert '<span class="prompt">def </span>' in source
    assert "6 of 12 evaluations shown" in seen


HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='x' ]]>&amp;<!--"


def test_untrusted_text_stays_text(make_run: MakeRun, realistic: Rows) -> None:
    rows = [dict(row) for row in realistic]
    rows[0] |= {"device": HOSTILE, "precision": HOSTILE, "time": HOSTILE}
    rows.append({"type": "baseline", "name": HOSTILE, "bits_per_byte": 2.5})
    rows.append({"type": "sample", "step": 1200, "prompt": HOSTILE, "text": HOSTILE + "\ud800\x00\x1b[2J"})
    run = make_run([*rows[:1], *[row for row in rows[1:] if row["type"] != "start"]])
    (run / "config.yaml").write_text(f"name: {HOSTILE}\n", encoding="utf-8")
    (run / "model.json").write_text(json.dumps({"family": HOSTILE}), encoding="utf-8")
    source, seen = written(run)
    assert source.count("<script") == 1 and "<img" not in source
    assert HOSTILE + HOSTILE + "�␀␛[2J" in seen


def test_only_the_page_s_own_script_may_run(make_run: MakeRun, realistic: Rows) -> None:
    source, _ = written(make_run(realistic))
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='\"", source)


def test_a_torn_last_line_is_left_out_and_said(make_run: MakeRun, realistic: Rows) -> None:
    whole = [row for row in realistic if row.get("step") != 1200]
    _, seen = written(make_run(whole, tail='{"type":"train","step":1200,"loss":1.2'))
    assert "The last line of metrics.jsonl is torn" in seen and "could not be read" not in seen
    assert "1,190 steps" in seen


def test_damaged_lines_are_counted_and_named(make_run: MakeRun) -> None:
    tail = 'not json\n[1]\n\n\xff{}\n{"type":"train","step":20,"loss":2.5}\n{"type":"later","step":3}\n'
    _, seen = written(make_run([{"type": "train", "step": 10, "loss": 3.5}], tail=tail))
    assert "3 lines of metrics.jsonl could not be read and are left out: 2, 3, 5." in seen
    assert "20 steps" in seen and "torn" not in seen


@pytest.mark.parametrize("rows", [[], [{"type": "start", "step": 0, "ranks": 1, "parameters": 1000}]])
def test_before_the_first_step_the_page_says_so(make_run: MakeRun, rows: Rows) -> None:
    _, seen = written(make_run(rows))
    assert "no step has been logged yet" in seen


def test_plan_and_actual_are_compared_by_term(make_run: MakeRun, realistic: Rows) -> None:
    line = {"type": "plan", "actual_seconds": 0.2}
    planned = {"matmuls": 0.1, "attention": 0.01, "bubble": 0.0}
    early = line | {"step": 10, "planned": planned, "actual": {}, "planned_seconds": 0.11}
    source, _ = written(make_run([*realistic, early], name="early"))
    assert _table(source, "plan") == [
        ["matmuls", "100", "–", ""],
        ["attention", "10", "–", ""],
        ["step", "110", "200", "+45%"],
    ]
    actual = {"matmuls": 0.09, "launch": 0.11}
    source, seen = written(make_run([*realistic, early, early | {"step": 1200, "actual": actual}]))
    assert _table(source, "plan") == [
        ["matmuls", "100", "90", "-5%"],
        ["attention", "10", "0", "-5%"],
        ["launch", "0", "110", "+55%"],
        ["step", "110", "200", "+45%"],
    ]
    assert source.count("<td><b>") == 2
    assert "Memory of all tensors" not in seen


def test_plan_and_actual_memory_are_compared_by_part_in_like_units(make_run: MakeRun, realistic: Rows) -> None:
    memory = {
        "planned_memory": {"weights": 2.0**30, "optimizer state": 2.0**31, "gradients and activations": 2.0**30},
        "actual_memory": {"weights": 2.0**30, "optimizer state": 2.0**31, "gradients and activations": 5 * 2.0**30},
        "planned_memory_bytes": 2.0**32,
        "actual_memory_bytes": 2.0**33,
    }
    line = {"type": "plan", "step": 10, "actual_seconds": 0.2, "planned_seconds": 0.2, "planned": {}, "actual": {}}
    source, seen = written(make_run([*realistic, line | memory]))
    rows = re.search(r'aria-label="Memory".*?<tbody>(.*?)</tbody>', source, re.DOTALL)
    assert rows is not None
    cells = [re.sub("<[^>]+>", " ", row).split() for row in rows[1].split("</tr>") if row.strip()]
    assert cells == [
        ["weights", "1", "1", "+0%"],
        ["optimizer", "state", "2", "2", "+0%"],
        ["gradients", "and", "activations", "1", "5", "+50%"],
        ["peak", "4", "8", "+50%"],
    ]
    assert "at its peak in one step, GiB." in seen


def test_evaluations_that_read_different_amounts_do_not_compare(make_run: MakeRun, realistic: Rows) -> None:
    source, seen = written(make_run(realistic))
    assert "read the same amount" not in seen and "validation, " not in seen.split("Loss")[1]
    last = [row for row in realistic if row["type"] == "evaluation"][-1]
    last |= {"tokens": 2_300_000, "bits_per_byte": 1.6}
    run = make_run(realistic, name="whole")
    source, seen = written(run)
    assert (
        "Evaluations did not all read the same amount of validation text; only those that did are comparable." in seen
    )
    assert "validation, 120k tokens" in seen and "validation, 2.3M tokens" in seen
    assert "<dt>Bits per byte</dt><dd>1.6</dd><dd>of 2.3M tokens</dd>" in source
    _, sampled, whole = _charts(source)[0]["series"]
    assert [step for step, *_ in whole] == [1200] and len(sampled) == 11
    with (run / "metrics.jsonl").open("a") as file:  # another like the last, and worse
        file.write(json.dumps(last | {"step": 1300, "bits_per_byte": 1.7}) + "\n")
    assert "<dd>1.7</dd><dd>best 1.6, step 1,200</dd>" in written(run)[0]


@pytest.mark.parametrize("evaluated", [(370,), (130, 370, 890), tuple(range(30, 1200, 30))])
def test_the_table_of_figures_has_the_evaluations(
    make_run: MakeRun, realistic: Rows, evaluated: tuple[int, ...]
) -> None:
    rows = [row for row in realistic if row["type"] == "train"]
    rows += [{"type": "evaluation", "step": step, "loss": 2 + step / 1e4, "tokens": 900} for step in evaluated]
    source, _ = written(make_run(rows))
    table = {row[0]: row[5] for row in _table(source)}
    assert {"10", "1,200"} <= set(table) and len(table) <= 22
    shown = {step: loss for step, loss in table.items() if loss != "–"}
    assert shown == {f"{step:,}": f"{2 + step / 1e4:.4g}" for step in evaluated if f"{step:,}" in shown}
    assert len(shown) == min(20, len(evaluated))


def _table(source: str, section: str = "figures") -> list[list[str]]:
    body = source.split(f'id="{section}"')[1].split('<table class="figures">')[1].split("</table>")[0]
    return [re.findall(r"<t[hd][^>]*>(?:<b>)?([^<]*)<", row) for row in body.split("<tr>")[2:]]


def test_every_source_has_a_curve_and_stages_are_marked(make_run: MakeRun, realistic: Rows) -> None:
    _, seen = written(make_run(realistic))
    assert "by source" not in seen and "stage" not in seen
    rows = [dict(row) for row in realistic]
    rows[0]["stages"] = [0, 400, 800, 9000]
    rows = [row for row in rows if row["type"] != "start" or row["step"] == 0]
    for row in rows:
        if row["type"] == "evaluation":
            row |= {f"loss/{name}": row["loss"] + number / 10 for number, name in enumerate(("代码", "web<b>", "c"))}
    source, seen = written(make_run(rows, name="mixed"))
    assert "Validation loss by source" in seen and "web<b>" in seen and "代码" in seen
    data = next(chart for chart in _charts(source) if len(chart["series"]) == 3)
    logged = [row for row in rows if row["type"] == "evaluation"]
    for number, points in enumerate(data["series"]):
        assert [text for _, text, _ in points] == [f"{row['loss'] + number / 10:.4g}" for row in logged]
    assert "a stage of the data began at steps 400, 800, 9,000." in seen
    assert source.count('class="stage"') == 2 * source.count("<figure data-chart")


def test_divergence_has_a_headline(make_run: MakeRun, realistic: Rows) -> None:
    _, seen = written(make_run(realistic))
    assert "diverged" not in seen
    rows = [row for row in realistic if row["type"] == "train"]
    rows[-1] = rows[-1] | {"loss": "nan"}
    rows.append({"type": "divergence", "step": 900, "action": "rollback", "diverged_step": 1013, "lr_scale": 0.5})
    rows.append({"type": "divergence", "step": 1100, "action": "none", "loss": 4.5, "lowest_loss": 2.25})
    rows.append({"type": "divergence", "step": 1200, "action": "stop"})
    _, seen = written(make_run(rows, name="diverged"))
    assert "This run has diverged: its last loss is not finite." in seen
    assert "Step 1,013: the loss was not finite. Training went back to step 900, at 0.5 times the learning rate" in seen
    assert "Step 1,100: the loss rose far above its past, from about 2.25 to 4.5." in seen
    assert "Step 1,200: the loss was not finite, and training stopped." in seen


def test_a_single_step(make_run: MakeRun) -> None:
    source, seen = written(make_run([{"type": "train", "step": 1, "loss": 8.25, "lr": 1e-5}]))
    assert "model.json" in seen and "1 step" in seen and "8.25" in seen
    assert source.count("<circle") == 2
    assert "No values yet." in seen


@pytest.mark.parametrize("bad", ["nan", "inf", None, float("nan")])
def test_values_that_are_not_finite_leave_gaps(make_run: MakeRun, bad: object) -> None:
    rows: Rows = [{"type": "train", "step": step, "loss": 9.0 - step / 10, "grad_norm": 1.0} for step in range(1, 30)]
    rows[9]["loss"] = rows[28]["loss"] = bad
    source, seen = written(make_run(rows))
    assert "2 values are not finite (step 10, 29)" in seen
    assert re.findall(r"<dt>Final loss</dt><dd>([^<]+)", source) == ["–"]


def test_steps_taken_again_show_their_later_values(make_run: MakeRun) -> None:
    rows: Rows = [{"type": "train", "step": step, "loss": 5.0} for step in (10, 20, 30)]
    rows += [{"type": "start", "step": 10}] + [{"type": "train", "step": step, "loss": 4.0} for step in (20, 30)]
    record = read_run(make_run(rows))
    assert {step: row["loss"] for step, row in record.train.items()} == {10: 5.0, 20: 4.0, 30: 4.0}


def test_a_long_run_stays_a_small_page_with_its_peak(make_run: MakeRun, realistic: Rows) -> None:
    template = next(row for row in realistic if row["type"] == "train")
    lines = [json.dumps(template | {"step": step, "loss": 3.0 + step % 7 / 10}) for step in range(1, 30_001)]
    lines[24_320] = json.dumps(template | {"step": 24_321, "loss": 77.5})
    samples = [
        {"type": "sample", "step": step, "prompt": f"prompt {step % 40}", "text": "x" * 9000} for step in range(400)
    ]
    source, seen = written(make_run(samples, tail="\n".join(lines) + "\n"))
    assert len(source.encode()) < 1_000_000
    assert '[24321,"77.5",' in html.unescape(source)
    assert "28 further prompts not shown" in seen
    assert max(len(data["series"][0]) for data in _charts(source)) <= 1002


def _charts(source: str) -> list[Any]:
    return [json.loads(value or "") for _, name, value in checked(source).attributes if name == "data-chart"]


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just([1])
values |= st.dictionaries(st.text(max_size=6), values, max_size=3)
names = st.sampled_from(
    [
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "seconds",
        "bits_per_byte",
        "memory_bytes",
        "ranks",
        "text",
        "planned",
        "actual",
        "planned_seconds",
        "actual_seconds",
    ]
)
kinds = st.sampled_from(["divergence", "start", "train", "evaluation", "sample", "baseline", "plan"])
any_row = st.builds(
    lambda kind, step, rest: {**rest, "type": kind, "step": step},
    kinds,
    st.integers(0, 10**18) | st.none(),
    st.dictionaries(names, values, max_size=6),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(any_row, max_size=12))
def test_whatever_the_lines_hold_the_page_is_whole(rows: Rows) -> None:
    record = RunRecord(name="any")
    for row in rows:
        _add_row(row, record)
    checked(render_page(record)).text.index("any")


def test_missing_runs_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"there is no run here.*jingu train"):
        write_report(tmp_path / "nowhere", None)
    with pytest.raises(JinguError, match=r"holds no metrics\.jsonl.*train it first"):
        write_report(tmp_path, None)
    assert not list(tmp_path.iterdir())


def test_missing_neighbours_are_said(make_run: MakeRun, realistic: Rows) -> None:
    run = make_run(realistic)
    (run / "config.yaml").unlink()
    (run / "model.json").write_text("{torn", encoding="utf-8")
    _, seen = written(run)
    assert "config.yaml is missing or cannot be read." in seen
    assert "4.21M-parameter model, 1,200 steps" in seen


def test_the_file_is_whole_or_absent(
    make_run: MakeRun, realistic: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(realistic)
    with pytest.raises(JinguError, match=r"is a folder, not a file"):
        write_report(run, tmp_path)
    place = tmp_path / "new" / "page.html"
    write_report(run, place)
    before = place.read_bytes()
    write_report(run, place)
    assert place.read_bytes() == before, "the same run gives the same bytes"

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JinguError, match=r"cannot be written \(No space left on device\)"):
        write_report(run, place)
    assert place.read_bytes() == before
    assert [path.name for path in place.parent.iterdir()] == ["page.html"]
