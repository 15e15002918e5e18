"""`jingu doctor`: check this machine, and under `jingu launch` all nodes and the network between them."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from statistics import median

import yaml

from jingu.errors import JinguError
from jingu.launch.hosts import FAILING_NODES, write_failing_nodes
from jingu.launch.node_checks import KERNEL, SLOW_SHARE, Figures, run_checks
from jingu.runtime.files import write_text_atomically


def doctor(folder: Path | None = None, machine: Path | None = None, file: Path | None = None) -> int:
    """Check this machine, or all nodes if this is a rank of a launched command, and print a table.

    Args:
        folder: folder for runs, which all nodes must share.
        machine: file to write the figures of this machine to, for `jingu plan --on`.
        file: configuration of a run, to measure collectives along the axes of its mesh.

    Returns:
        0 if all checks pass, else 2; `failing_nodes.txt` then lists the failing nodes.

    Raises:
        JinguError: the nodes cannot exchange data, or a node could not be measured.
    """
    from jingu.config.load import load_config
    from jingu.runtime.ranks import gather_from_all, is_first_on_node, is_launched, join_process_group

    folder = folder or Path("runs")
    config = load_config(file, []) if file is not None else None
    host = socket.gethostname()
    # 1. Each node checks itself, before the ranks form a process group.
    results = run_checks(folder) if is_first_on_node() else []
    if not is_launched():
        return _conclude({host: results}, {}, machine)
    # 2. Check the network between the nodes.
    from jingu.launch.network import check_network
    from jingu.launch.rank_speed import measure_rank_speed

    with join_process_group("auto", None) as ranks:
        everywhere = gather_from_all([host, results])
        try:
            network, figures = check_network(ranks, folder, config)
        except RuntimeError as error:
            _print_table({host: results})
            what = f"the nodes cannot exchange data ({str(error).splitlines()[0].rstrip('.')})."
            raise JinguError(what, where=host, fix="Check the network between them, and its firewalls.") from error
        if machine is not None and ranks.device.type == "cpu":
            figures |= measure_rank_speed(ranks)
        by_host = {name: [*results, *network[name]] for name, results in everywhere if results}
        compare_nodes(by_host)
        return _conclude(by_host, figures, machine) if ranks.is_first else int(any_failed(by_host)) * 2


def any_failed(by_host: dict[str, list[Figures]]) -> bool:
    """Return whether a check of any node has failed."""
    return any(not result["passed"] for results in by_host.values() for result in results)


def _conclude(by_host: dict[str, list[Figures]], network: Figures, machine: Path | None) -> int:
    """Print the table, write the list of failing nodes and the machine file, and return the exit code."""
    failing = [host for host, results in by_host.items() if any_failed({host: results})]
    _print_table(by_host)
    write_failing_nodes(failing)
    if failing:
        print(f"{len(failing)} of {len(by_host)} nodes fail; their names are in {FAILING_NODES}.")
    if machine is not None:
        # The slowest node determines the speed of a run.
        rows = [_merge_figures(results) for results in by_host.values()]
        if any("matmul_tflops" not in row or "disk_gbs" not in row for row in rows):
            raise JinguError("a node could not be measured.", where=machine, fix="See the table.")
        slowest = min(rows, key=lambda row: float(row["matmul_tflops"])) | network
        slowest["disk_gbs"] = min(row["disk_gbs"] for row in rows)
        slowest.pop(KERNEL, None)
        write_text_atomically(machine, yaml.safe_dump(slowest, sort_keys=False))
        print(f"Wrote {machine}; `jingu plan RUN.yaml --on {machine}` uses it.")
    return 2 if failing else 0


def _print_table(by_host: dict[str, list[Figures]]) -> None:
    width = max(len(host) for host in by_host)
    checks = max(len(result["check"]) for results in by_host.values() for result in results)
    for host, results in by_host.items():
        for result in results:
            state = "ok" if result["passed"] else "FAILS"
            print(f"{host:<{width}}  {state:<6} {result['check']:<{checks}} {result['text']}")


def compare_nodes(by_host: dict[str, list[Figures]]) -> None:
    """Add a failing result to nodes whose versions or devices differ from those of most nodes, or are slow."""
    versions = {host: _text_of(results, "versions") for host, results in by_host.items()}
    # The text before the first comma has the number and name of the devices.
    devices = {host: _text_of(results, "devices").partition(",")[0] for host, results in by_host.items()}
    for check, texts in (("same versions", versions), ("same devices", devices)):
        usual, _ = Counter(texts.values()).most_common(1)[0]
        for host, text in texts.items():
            if text != usual:
                _add_failure(by_host[host], check, f"most nodes have {usual}")
    for key in ("matmul_tflops", "memory_gbs"):
        rates = _machine_rates(by_host, key)
        for host, rate in rates.items():
            if rate < SLOW_SHARE * median(rates.values()):
                text = f"{key} is {rate:,.2f}, and {median(rates.values()):,.2f} on other nodes"
                _add_failure(by_host[host], "speed", text)


def _machine_rates(by_host: dict[str, list[Figures]], key: str) -> dict[str, float]:
    """Return a rate of each node. Containers on the same machine slow each other down, so all get their best rate."""
    rows = {host: _merge_figures(results) for host, results in by_host.items()}
    machines = {host: row.get(KERNEL) or host for host, row in rows.items() if key in row}
    best: dict[str, float] = {}
    for host, machine in machines.items():
        best[machine] = max(rows[host][key], best.get(machine, 0.0))
    return {host: best[machine] for host, machine in machines.items()}


def _merge_figures(results: list[Figures]) -> Figures:
    return {key: value for result in results for key, value in result["figures"].items()}


def _text_of(results: list[Figures], check: str) -> str:
    return next((result["text"] for result in results if result["check"] == check and result["passed"]), "")


def _add_failure(results: list[Figures], check: str, text: str) -> None:
    results.append({"check": check, "passed": False, "text": text, "figures": {}})
