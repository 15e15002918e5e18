"""`python -m bench cuda`: measure a GPU, even if it is available for only half an hour.

It runs from the source tree with the installed packages, without a network. Each part runs in a process of at most 8
minutes and writes a JSON file to the folder `--out`; the most informative parts come first. The same command continues
with the missing parts. All results, and the tracebacks of failures, are in `results.json` and `results.md` in that
folder. `--device cpu --small` runs everything on a machine without a GPU.

    python -m bench cuda [--device TYPE] [--small] [--out FOLDER] [--again] [PART ...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.card_parts import PARTS, ROOT, SECONDS, Place
from jingu.errors import JinguError
from jingu.runtime.device import find_device_type


def run_part(name: str, device_type: str, small: bool, out: Path) -> None:
    """Run one part in this process. Its file is written after each row, so that no measurement is lost."""
    from jingu.runtime.ranks import join_process_group

    place = Place(device_type, small)
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with join_process_group(place.device.type, None):  # type: ignore[arg-type]
        for row in PARTS[name](place):
            rows.append(row)
            _write_record(out, name, start, rows, complete=False)
    _write_record(out, name, start, rows, complete=True)


def _write_record(out: Path, name: str, start: float, rows: list[dict[str, Any]], complete: bool) -> None:
    record = {"part": name, "complete": complete, "seconds": time.perf_counter() - start, "rows": rows}
    draft = out / f"{name}.json.new"
    draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
    draft.replace(out / f"{name}.json")


def read_record(out: Path, name: str) -> dict[str, Any] | None:
    """Return the record of a part: its rows so far, and the problem that ended it; None: the part has not begun."""
    file, note = out / f"{name}.json", out / f"{name}.problem.txt"
    if not file.exists() and not note.exists():
        return None
    empty = {"part": name, "complete": False, "seconds": 0.0, "rows": []}
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else empty
    if note.exists():
        record["problem"] = note.read_text(encoding="utf-8")
    return record


def has_results(record: dict[str, Any] | None) -> bool:
    """Return whether a part is complete and has at least one row without a problem."""
    return record is not None and record["complete"] and not all("problem" in row for row in record["rows"])


def write_report(out: Path) -> None:
    """Write the results of all parts so far as JSON and as Markdown."""
    from bench.machine import describe_machine

    records = [record for name in PARTS if (record := read_record(out, name)) is not None]
    machine = describe_machine()
    (out / "results.json").write_text(json.dumps({"machine": machine, "parts": records}, indent=1), encoding="utf-8")
    pages = [f"# Measurements on a card\n\n{machine}\n"]
    for record in records:
        end = "" if record["complete"] else ", not complete"
        lines = [f"\n## {record['part']} ({record['seconds']:.0f} s{end})\n"]
        lines += _table(record["rows"])
        problems = [row["traceback"] for row in record["rows"] if "traceback" in row]
        problems += [record["problem"]] if "problem" in record else []
        lines += [f"\n```\n{problem.strip()}\n```" for problem in problems]
        pages.append("\n".join(lines) + "\n")
    (out / "results.md").write_text("".join(pages), encoding="utf-8")


def _table(rows: list[dict[str, Any]]) -> list[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "traceback"]
    if not keys:
        return []
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    return lines + [f"| {' | '.join(_cell(row.get(key, '')) for key in keys)} |" for row in rows]


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def run_process(command: list[str]) -> str | None:
    """Run a part in a new process; return its output if it failed or exceeded the time limit, else None.

    A part that exceeds the limit is killed together with its child processes.
    """
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return f"{output[-4000:]}\nnot done after {SECONDS} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return output[-20_000:] if process.returncode else None


def main(words: list[str]) -> None:
    """Run the parts whose results are missing, each in a new process, and update the report after each."""
    parser = argparse.ArgumentParser(
        "python -m bench cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="cuda, xpu, npu or cpu")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the kit")
    parser.add_argument("--out", type=Path, default=Path("build/cuda"))
    parser.add_argument("--again", action="store_true", help="run parts that have results, too")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args(words)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)}; the parts are {', '.join(PARTS)}")
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.in_process:
        run_part(options.parts[0], options.device, options.small, options.out)
        return
    # Report a missing device once, not in every part.
    try:
        find_device_type(options.device)
    except JinguError as error:
        sys.exit(str(error))
    for name in options.parts or PARTS:
        if has_results(read_record(options.out, name)) and not options.again:
            continue
        print(f"{name} ...", flush=True)
        command = [sys.executable, "-m", "bench", "cuda", "--in-process", name, "--out", str(options.out)]
        command += ["--device", options.device, *(["--small"] if options.small else [])]
        for file in (options.out / f"{name}.json", options.out / f"{name}.problem.txt"):
            file.unlink(missing_ok=True)
        problem = run_process(command)
        if problem is not None:
            # A file beside the part's JSON file, which stays incomplete, so the next call tries the part again.
            (options.out / f"{name}.problem.txt").write_text(problem, encoding="utf-8")
            last = problem.strip().splitlines()[-1:] or ["without words"]
            print(f"{name} failed: {last[0]}", flush=True)
        write_report(options.out)
    print(f"Results: {options.out / 'results.md'}")
