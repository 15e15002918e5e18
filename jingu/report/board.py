"""`jingu watch` and `jingu runs`: show runs while they train, on the terminal, in a browser, and for Prometheus."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import yaml

from jingu.errors import JinguError, pluralize
from jingu.formatting import format_duration, format_number, format_rounded, memory_unit, show_control_characters
from jingu.report.page import render_page
from jingu.report.record import Row, RunRecord, get_number, read_run
from jingu.watch.pace import Window, read_windows
from jingu.watch.watchdog import STRAGGLERS

_REFRESH_SECONDS = 2.0
# The time left is estimated from this many of the last logged steps.
_RATE_LINES = 50
_BAR_WIDTH = 40
_SAMPLE_CHARS = 300


def watch_run(run: Path, web: int | None = None, once: bool = False) -> None:
    """Show a run until Ctrl-C: on the terminal, or as a page and as metrics for Prometheus.

    Args:
        web: port on the loopback address for the page and the metrics; 0: any free port; None: show the run on the
            terminal.
        once: show the run once and return.

    Raises:
        JinguError: there is no such run, or the port is in use.
    """
    read_run(run)
    if web is not None:
        _serve(run, web)
    while True:
        text = render_board(run)
        # On a terminal, move the cursor to the first line and clear the screen.
        print(f"\033[H\033[J{text}" if sys.stdout.isatty() else text, flush=True)
        if once:
            return
        time.sleep(_REFRESH_SECONDS)


def render_board(run: Path) -> str:
    """Return the board as text: progress, losses, rates, memory, the last two samples and the watchdog's verdict."""
    record = read_run(run)
    lines = describe_progress(run, record)
    for (_, prompt), row in islice(reversed(record.samples.items()), 2):
        text = show_control_characters(f"{prompt}{row.get('text', '')}")
        lines += ["", text[:_SAMPLE_CHARS]]
    return "\n".join([*lines, *describe_faults(run)])


def describe_progress(run: Path, record: RunRecord) -> list[str]:
    """Return lines about the progress of a run, its losses, rates and memory, its plan, and its ranks."""
    step, steps = _progress(record)
    last = record.train.get(step, {})
    time_left = format_duration(_seconds_left(record))
    bar_length = round(_BAR_WIDTH * step / steps)
    state = describe_state(run, record)
    lines = [
        f"{record.name}: {state}, step {step:,} of {steps:,}, {time_left} left",
        f"[{'█' * bar_length}{'·' * (_BAR_WIDTH - bar_length)}] {step / steps:.0%}",
        f"loss {format_number(get_number(last, 'loss'))} · lr {format_number(get_number(last, 'lr'))} · "
        f"gradient norm {format_number(get_number(last, 'grad_norm'))}",
        f"{format_rounded(get_number(last, 'tokens_per_second'))} tokens/s · "
        f"{get_number(last, 'peak_share'):.0%} of peak · {_format_memory(get_number(last, 'memory_bytes'))} per rank",
    ]
    lines += [_describe_plan(record.plan)] if record.plan else []
    windows = _windows(run) if state == "training" else []
    lines += [_describe_ranks(windows)] if windows else []
    if record.evaluations:
        evaluation = record.evaluations[max(record.evaluations)]
        lines.append(f"validation loss {format_number(get_number(evaluation, 'loss'))}")
    return lines


def describe_faults(run: Path) -> list[str]:
    """Return lines with the last verdict of the watchdog and the last stragglers."""
    verdicts = sorted(run.glob("log/jingu-watch-*/verdict.txt"), key=lambda path: path.stat().st_mtime)
    lines = ["", verdicts[-1].read_text(encoding="utf-8")] if verdicts else []
    stragglers = run / "log" / STRAGGLERS
    if stragglers.exists():
        lines += ["", *stragglers.read_text(encoding="utf-8").splitlines()[-3:]]
    return lines


def _format_memory(size: float) -> str:
    unit, name = memory_unit(size)
    return f"{size / unit:,.1f} {name}"


def _describe_plan(plan: Row) -> str:
    """Return the actual and the planned time of a step, and memory of tensors if it was measured, as a line."""
    seconds = [format_number(get_number(plan, f"{side}_seconds")) for side in ("actual", "planned")]
    line = f"step {seconds[0]} s (planned {seconds[1]} s)"
    if not plan.get("actual_memory"):
        return line
    memory = [_format_memory(get_number(plan, f"{side}_memory_bytes")) for side in ("actual", "planned")]
    return f"{line} · tensors {memory[0]} (planned {memory[1]})"


def _windows(run: Path) -> list[Window]:
    """Return the last measurements of the ranks by the watchdogs of all nodes."""
    folders = sorted(run.glob("log/jingu-watch-*"), key=lambda path: path.stat().st_mtime)
    return read_windows(folders[-1]) if folders else []


def _describe_ranks(windows: Sequence[Window]) -> str:
    """Return a line on how the ranks spend a step, as the range from the lowest to the highest rank."""
    paces = [pace for window in windows for pace in window.paces]
    parts = []
    for field, text in (("compute", "computing {} s"), ("data", "waiting for data {} s"), ("clock", "clock {} MHz")):
        values = [getattr(pace, field) for pace in paces]
        bounds = dict.fromkeys(map(format_number, (min(values), max(values))))
        if max(values) > 0:
            parts.append(text.format(" to ".join(bounds)))
    ranks, nodes = pluralize(len(paces), "rank"), pluralize(len(windows), "node")
    return f"{ranks} on {nodes}, step of {format_number(paces[0].step)} s: {' · '.join(parts)}"


def list_runs(folder: Path) -> None:
    """Print a table of the runs in a folder. Raises JinguError if it has none."""
    paths = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    if not paths:
        raise JinguError("there is no run here.", where=folder, fix="Give the folder that holds runs, such as runs.")
    width = max(len(path.name) for path in paths)
    print(f"{'run':<{width}}  {'state':<9} {'step':>15} {'loss':>8} {'validation':>10} {'tokens/s':>9}")
    for path in paths:
        record = read_run(path)
        step, steps = _progress(record)
        last = record.train.get(step, {})
        evaluation = record.evaluations[max(record.evaluations)] if record.evaluations else {}
        losses = [format_number(get_number(row, "loss")) for row in (last, evaluation)]
        rate = format_rounded(get_number(last, "tokens_per_second"))
        state = describe_state(path, record)
        print(f"{path.name:<{width}}  {state:<9} {f'{step:,}/{steps:,}':>15} {losses[0]:>8} {losses[1]:>10} {rate:>9}")


def describe_state(run: Path, record: RunRecord) -> str:
    """Return the state of a run: complete, training, diverged or stopped."""
    step, steps = _progress(record)
    if step >= steps:
        return "complete"
    descriptor = os.open(run, os.O_RDONLY)
    try:
        # A run holds a lock on its folder while it trains.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "training"
    finally:
        os.close(descriptor)
    return "diverged" if record.has_diverged else "stopped"


def _progress(record: RunRecord) -> tuple[int, int]:
    """Return the last logged step, and the number of steps of the run (at least 1)."""
    step = max(record.train, default=0)
    try:
        steps = yaml.safe_load(record.config)["train"]["steps"]
    except (yaml.YAMLError, KeyError, TypeError):
        steps = step
    return step, max(1, steps)


def _seconds_left(record: RunRecord) -> float:
    """Return the estimated seconds until the end, from the time of the last logged steps; NaN if there are too few."""
    rows: list[Row] = [record.train[step] for step in sorted(record.train)[-_RATE_LINES:]]
    step, steps = _progress(record)
    if len(rows) < 2:
        return math.nan
    seconds = get_number(rows[-1], "seconds") - get_number(rows[0], "seconds")
    return (steps - step) * seconds / max(1, rows[-1]["step"] - rows[0]["step"])


def format_metrics(record: RunRecord) -> str:
    """Return the numbers of the last logged step and the last evaluation in the text format of Prometheus."""
    step, steps = _progress(record)
    values = {"steps": steps, "seconds_left": _seconds_left(record)} | record.train.get(step, {})
    evaluation = record.evaluations[max(record.evaluations)] if record.evaluations else {}
    values |= {f"validation_{key}": value for key, value in evaluation.items()}
    label = json.dumps(record.name)
    numbers = {key: get_number(values, key) for key in values if key.isidentifier()}
    return "".join(f"jingu_{key}{{run={label}}} {value}\n" for key, value in numbers.items() if not math.isnan(value))


def make_server(run: Path, port: int) -> ThreadingHTTPServer:
    """Return a read-only server on the loopback address, with the current report at `/` and metrics at `/metrics`.

    Raises:
        JinguError: the port is in use.
    """

    def render(record: RunRecord) -> str:
        """Return the report of the run with its current state on top."""
        return render_page(record, "\n".join(describe_progress(run, record) + describe_faults(run)))

    # By path: the content type, and the function that renders the run. The Refresh header reloads the page.
    routes: dict[str, tuple[str, Callable[[RunRecord], str]]] = {
        "/": ("text/html; charset=utf-8", render),
        "/metrics": ("text/plain; version=0.0.4", format_metrics),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Accept only our own host names: with DNS rebinding, a website could otherwise read the run.
            host = self.headers.get("Host", "").rpartition(":")[0]
            if self.path not in routes or host not in ("127.0.0.1", "localhost"):
                self.send_error(404)
                return
            kind, show = routes[self.path]
            body = show(read_run(run)).encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Refresh", "10")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise JinguError(
            f"port {port} cannot be used ({error.strerror}).", where="--web", fix="Choose another."
        ) from None


def _serve(run: Path, port: int) -> None:
    with make_server(run, port) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        print(f"{run} at {address}, for Prometheus at {address}/metrics; Ctrl-C ends it.", flush=True)
        server.serve_forever()
