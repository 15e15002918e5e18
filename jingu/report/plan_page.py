"""The HTML page of a plan: memory per rank, the pipeline's timeline, the roofline of the matmuls, and cost."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from jingu.errors import JinguError
from jingu.formatting import memory_unit
from jingu.plan.forecast import Forecast, print_forecast
from jingu.plan.layouts import describe_layout
from jingu.plan.memory import stage_memory
from jingu.plan.step_time import matmuls
from jingu.plan.timeline import Pass, Timeline, simulate_pipeline
from jingu.report.bars import BAR_LEFT, BAR_RIGHT, ROW, draw_bars
from jingu.report.charts import RIGHT, SIZES, Scale, log_ticks, round_ticks
from jingu.report.commands import write_page
from jingu.report.template import render_document, spread
from jingu.training.plan_commands import PlanQuery, forecast_for_page

# Maximum number of rows in a figure; a row is a rank of the pipeline.
MAX_ROWS = 16
# Maximum number of passes for which the timeline shows the numbers of micro-batches.
MAX_NUMBERED = 400


def write_plan(query: PlanQuery, html: Path, *, as_json: bool) -> int:
    """Write the page of a plan, and also print the plan.

    Args:
        html: file of the page.
        as_json: print all figures as a JSON object instead of tables.

    Returns:
        The exit code: 0, or 1 if the run does not fit into memory.

    Raises:
        JinguError: the plan cannot be made (`jingu/training/plan_commands.py:plan`), is not one of training, or the
            file cannot be written.
    """
    if query.mode not in (None, "search"):
        fix = "Leave out the other option, or --html."
        raise JinguError(
            "the page shows one plan of training, of the layout or with --search.", where="--html", fix=fix
        )
    outcome, clusters = forecast_for_page(query)
    target = Path(query.target)
    page = render_plan(target.parent.name if target.name == "config.json" else target.name, outcome, clusters)
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        print_forecast(outcome)
    # With --json, stdout holds only the object, so that a program can read it.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        write_page(html, page)
    return 0 if outcome.spare >= 0 else 1


def render_plan(title: str, outcome: Forecast, clusters: list[Forecast]) -> str:
    """Return the HTML page of a plan.

    Args:
        title: heading of the page.
        outcome: forecast of the run.
        clusters: forecasts of the run on different numbers of GPUs.
    """
    work = outcome.work
    unit, unit_name = memory_unit(outcome.memory.total)
    timeline = simulate_pipeline(work, outcome.machine) if work.sizes.pipeline > 1 else None
    return render_document(
        "plan.html",
        title=title,
        outcome=outcome,
        figures=outcome.to_json(),
        layout=describe_layout(work),
        unit=unit,
        unit_name=unit_name,
        memory=_draw_memory(outcome, unit, unit_name),
        num_bars=min(work.sizes.pipeline, MAX_ROWS),
        timeline=timeline,
        drawing=_draw_timeline(timeline, work.sizes.pipeline) if timeline else None,
        roofline=_draw_roofline(outcome),
        clusters=[(cluster, describe_layout(cluster.work)) for cluster in clusters],
        BAR_LEFT=BAR_LEFT,
        BAR_RIGHT=BAR_RIGHT,
        ROW=ROW,
        **SIZES,
    )


# Memory

# Parts of memory in the order of their colors: owned by the rank, gathered for computing, and temporary in a step.
_PARTS = (
    *("weights", "gradients", "optimizer state", "compute weights", "reduction"),
    *("activations", "recomputation", "loss", "backward", "stage buffers"),
)


def _draw_memory(outcome: Forecast, unit: float, unit_name: str) -> Markup:
    """Return a figure with a bar per rank of the pipeline; the ranks of other axes hold the same."""
    work = outcome.work
    rows = []
    for stage in spread(list(work.rank_stages), MAX_ROWS):
        device = stage_memory(work, stage).device
        name = f"rank {stage.rank}" if work.sizes.pipeline > 1 else "every rank"
        rows.append((name, {part: size / unit for part, size in device.items()}))
    other_parts = {part for _, device in rows for part in device}.difference(_PARTS)
    # Omit the limit if it is far larger than the bars, because its scale would make them invisible.
    usable = outcome.machine.usable_bytes
    limit = usable / unit if usable < 4 * outcome.memory.total else None
    colours = {part: min(colour, 10) for colour, part in enumerate([*_PARTS, *sorted(other_parts)])}
    return draw_bars("Memory of each rank", unit_name, colours, rows, limit)


# The pipeline's timeline


@dataclass(frozen=True)
class TimelineDrawing:
    """The passes of each rank of a pipeline as bars, in SVG units.

    Attributes:
        is_numbered: whether there are few enough passes to show the numbers of micro-batches.
        rows: for each rank its number, an SVG path per style of pass, the x and number of each micro-batch, and the
            share of the step in which the rank waits.
        ticks: x and seconds of each tick.
    """

    is_numbered: bool
    rows: list[tuple[int, dict[str, Markup], list[tuple[float, int]], float]]
    ticks: list[tuple[float, float]]

    @property
    def kinds(self) -> set[str]:
        """CSS classes of the passes that occur."""
        return {style for _, paths, _, _ in self.rows for style in paths}


def _draw_timeline(timeline: Timeline, ranks: int) -> TimelineDrawing:
    """Return the drawing of a timeline.

    Args:
        ranks: number of pipeline ranks, of which at most `MAX_ROWS` are drawn.
    """
    ticks = [tick for tick in round_ticks(0, timeline.seconds, 8) if tick <= timeline.seconds]
    scale = (BAR_RIGHT - BAR_LEFT) / timeline.seconds
    is_numbered = sum(map(len, timeline.ranks)) <= MAX_NUMBERED
    rows = []
    for row, rank in enumerate(spread(list(range(ranks)), MAX_ROWS)):
        paths: dict[str, list[str]] = {}
        numbers = []
        for item in timeline.ranks[rank]:
            left, right = BAR_LEFT + item.start * scale, BAR_LEFT + item.end * scale
            paths.setdefault(_pass_class(item, ranks), []).append(
                f"M{left:.1f} {row * ROW + 2}H{right:.1f}v{ROW - 4}H{left:.1f}z"
            )
            # A narrower bar has no room for a number.
            if is_numbered and right - left > 14:
                numbers.append((round((left + right) / 2, 1), item.batch))
        joined_paths = {name: Markup("".join(parts)) for name, parts in paths.items()}
        rows.append((rank, joined_paths, numbers, timeline.idle[rank]))
    return TimelineDrawing(is_numbered, rows, [(round(BAR_LEFT + tick * scale, 1), tick) for tick in ticks])


def _pass_class(item: Pass, ranks: int) -> str:
    """Return the CSS classes of a pass: its kind, and `later` (lighter) for the later stages of a rank."""
    return f"{item.kind} later" if item.stage >= ranks else item.kind


# The roofline


@dataclass(frozen=True)
class RooflineDrawing:
    """Matmuls by arithmetic intensity (FLOP per byte moved) and speed (TFLOP/s), in SVG units.

    Attributes:
        roof: SVG path of the highest possible speed.
        points: for each shape of matrix x, y, the shape, its TFLOP/s, and its share of the time of all matmuls.
        x_ticks: x and value of each tick of the intensity.
        y_ticks: y and value of each tick of the speed.
    """

    roof: str
    points: list[tuple[float, float, str, float, float]]
    x_ticks: list[tuple[float, float]]
    y_ticks: list[tuple[float, float]]


def _draw_roofline(outcome: Forecast) -> RooflineDrawing:
    """Return the roofline of the matmuls in the blocks and the head."""
    work, machine = outcome.work, outcome.machine
    parts = [*work.model.blocks, work.model.head]
    # Matmuls of the same shape are one point; their times add up.
    seconds: dict[str, float] = {}
    examples = {}
    for part in parts:
        for matmul in matmuls(part, work, machine):
            shape = " × ".join(f"{size:,}" for size in matmul.shape)
            seconds[shape] = seconds.get(shape, 0.0) + matmul.seconds
            examples[shape] = matmul
    peak, bandwidth = machine.matmul_tflops, machine.memory_gbs / 1000  # TFLOP/s, TB/s
    speeds = {shape: matmul.flops / matmul.seconds / 1e12 for shape, matmul in examples.items()}
    intensities = {shape: matmul.flops / matmul.num_bytes for shape, matmul in examples.items()}
    # Both axes are logarithmic. The x axis ends at powers of ten and includes the ridge of the roofline, where the
    # limit changes from memory bandwidth to compute.
    across = [*intensities.values(), peak / bandwidth]
    up = [*speeds.values(), peak]
    x_low, x_high = math.floor(math.log10(min(across) / 2)), math.ceil(math.log10(max(across) * 2))
    y_low, y_high = min(up) / 4, max(up) * 1.5
    scale = Scale(y_low, y_high, x_high - x_low, logarithmic=True)

    def x_of(intensity: float) -> float:
        return scale.x_of(math.log10(intensity) - x_low)

    first = max(10.0**x_low, y_low / bandwidth)
    roof = f"M{x_of(first)} {scale.y_of(first * bandwidth)}L{x_of(peak / bandwidth)} {scale.y_of(peak)}H{RIGHT}"
    total_seconds = sum(seconds.values())
    return RooflineDrawing(
        roof,
        [(x_of(intensities[s]), scale.y_of(speeds[s]), s, speeds[s], seconds[s] / total_seconds) for s in seconds],
        [(x_of(10.0**power), 10.0**power) for power in range(x_low, x_high + 1)],
        [(scale.y_of(tick), tick) for tick in log_ticks(y_low, y_high)],
    )
