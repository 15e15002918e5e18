"""`jingu doctor`: check this machine, and under `jingu launch` all nodes and the network between them."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import yaml

from jingu.errors import JinguError
from jingu.launch.hosts import FAILING_NODES, write_failing_nodes
from jingu.launch.node_checks import CHECK_SECONDS, KERNEL, SLOW_SHARE, Figures, run_checks
from jingu.launch.probe import Failure, ProbeListener, Target, choose_targets, find_culprits, probe
from jingu.runtime.exit_codes import EXIT_LOST, EXIT_MISTAKE
from jingu.runtime.files import write_text_atomically
from jingu.runtime.peer_watch import Verdict, local_address

if TYPE_CHECKING:
    from jingu.config.schema import RunConfig
    from jingu.runtime.ranks import Board

# Time for the checks of the slowest node.
_WAIT_SECONDS = 2.5 * CHECK_SECONDS
# A disk below this share of the usual rate fails. Disks vary more than computation.
_SLOW_DISK = 0.1


def doctor(folder: Path | None = None, machine: Path | None = None, file: Path | None = None) -> int:
    """Check this machine, or all nodes if this is a rank of a launched command, and print a table.

    Args:
        folder: folder for runs, which all nodes must share.
        machine: file to write the figures of this machine to, for `jingu plan --on`.
        file: configuration of a run, to measure collectives along the axes of its mesh.

    Returns:
        0 if all checks pass, else 2 (69 on ranks of other nodes); `failing_nodes.txt` then lists the failing nodes.

    Raises:
        JinguError: a node could not be measured.
    """
    from jingu.config.load import load_config
    from jingu.runtime.ranks import Board, is_first_on_node, is_launched

    folder = folder or Path("runs")
    config = load_config(file, []) if file is not None else None
    host = socket.gethostname()
    # 1. Each node checks itself, before the ranks form a process group.
    results = run_checks(folder) if is_first_on_node() else []
    if not is_launched():
        return _conclude({host: results}, {}, machine)
    # 2. All results are known to the first rank before the network is used: whatever happens there, they are printed.
    board = Board()
    board.post("results", [host, results])
    by_host: dict[str, list[Figures]] = {}
    hosts = []
    for name, node_results in board.read("results", _WAIT_SECONDS).values():
        hosts.append(name)
        by_host.setdefault(name, []).extend(node_results)
    if len(hosts) < board.world:
        what = f"{board.world - len(hosts)} of {board.world} ranks did not answer in {_WAIT_SECONDS:.0f} s"
        _add_failure(by_host[host], "ranks", what)
        return _conclude(by_host, {}, machine) if board.rank == 0 else EXIT_LOST
    # 3. Check whether nodes can connect, and then what they exchange.
    failing = probe_nodes(board, host, hosts)
    network: dict[str, list[Figures]] = {}
    figures: Figures = {}

    def give_up(verdict: Verdict) -> None:
        """Conclude, and exit at once: the network check waits for ranks that are lost."""
        for rank in verdict.ranks:
            _add_failure(by_host[hosts[rank]], "network", verdict.sentence.rstrip("."))
        if board.rank == 0:
            _conclude(by_host, {}, machine)
        sys.stdout.flush()
        os._exit(EXIT_LOST if board.rank else EXIT_MISTAKE)

    if not failing:
        network, figures, failing = _check_network(board, host, hosts, folder, config, machine, give_up)
    for name in by_host:
        by_host[name] += network.get(name, [])
        if name in failing:
            _add_failure(by_host[name], "network", failing[name])
    compare_nodes(by_host)
    if board.rank == 0:
        return _conclude(by_host, figures, machine)
    return EXIT_MISTAKE if host in failing else EXIT_LOST * any_failed(by_host)


def probe_nodes(board: Board, host: str, hosts: list[str]) -> dict[str, str]:
    """Let all nodes connect to each other. Returns the nodes that explain failures, with a sentence for each.

    Args:
        board: the values of all ranks; each rank calls this.
        hosts: host of each rank.
    """
    from jingu.runtime.ranks import master_address

    leaders = [hosts.index(name) for name in dict.fromkeys(hosts)]
    listener = ProbeListener() if board.rank in leaders else None
    master = master_address()[0]
    address = local_address(master) if board.rank else master
    board.post("target", Target(host, address, listener.port if listener else 0))
    nodes = [Target(*target) for rank, target in board.read("target", _WAIT_SECONDS).items() if rank in leaders]
    failures = probe(choose_targets(leaders.index(board.rank), nodes)) if listener and len(nodes) > 1 else {}
    board.post("failures", failures)
    everywhere = board.read("failures", _WAIT_SECONDS)
    if listener:
        listener.close()
    return find_culprits(
        {
            (hosts[rank], target): Failure(*failure)
            for rank, own_failures in everywhere.items()
            for target, failure in own_failures.items()
        }
    )


def _check_network(
    board: Board,
    host: str,
    hosts: list[str],
    folder: Path,
    config: RunConfig | None,
    machine: Path | None,
    give_up: Callable[[Verdict], None],
) -> tuple[dict[str, list[Figures]], Figures, dict[str, str]]:
    """Measure the network between the nodes.

    Returns:
        The results of each node, figures for the machine file, and the nodes at fault with a sentence for each: those
        whose rank has failed for a reason of its own, not those that have lost a connection because of it.
    """
    from jingu.launch.network import check_network
    from jingu.launch.rank_speed import measure_rank_speed
    from jingu.runtime.ranks import is_lost_connection, join_process_group

    network: dict[str, list[Figures]] = {}
    figures: Figures = {}
    failure: str | None = None
    is_consequence = False
    try:
        with join_process_group("auto", None, give_up) as ranks:
            network, figures = check_network(ranks, folder, config)
            if machine is not None and ranks.device.type == "cpu":
                figures |= measure_rank_speed(ranks)
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        failure = lines[0].rstrip(".")
        is_consequence = isinstance(error, SystemExit) or is_lost_connection(error)
    board.post("failure", [failure, is_consequence])
    everywhere = board.read("failure", CHECK_SECONDS)
    causes = {hosts[rank]: text for rank, (text, follows) in everywhere.items() if text is not None and not follows}
    missing = {
        hosts[rank]: "its rank ended without an error message" for rank in range(board.world) if rank not in everywhere
    }
    victims = {hosts[rank]: f"it cannot exchange data ({text})" for rank, (text, _) in everywhere.items() if text}
    return network, figures, causes or missing or victims


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
    for key, share in (("matmul_tflops", SLOW_SHARE), ("memory_gbs", SLOW_SHARE), ("disk_gbs", _SLOW_DISK)):
        rates = _machine_rates(by_host, key)
        for host, rate in rates.items():
            if rate < share * median(rates.values()):
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
