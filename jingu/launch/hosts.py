"""The nodes of a run: hostfiles in DeepSpeed's syntax, and which of their slots to use."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jingu.errors import JinguError, join_words
from jingu.runtime.files import read_text, write_text_atomically

# `jingu doctor`, or its launcher, writes the names of failing nodes to this file.
FAILING_NODES = Path("failing_nodes.txt")


@dataclass(frozen=True)
class Node:
    """A machine of a run.

    Attributes:
        host: its name or address, as ssh knows it.
        slots: indices of the GPUs to use, one rank each; without GPUs only their number counts.
    """

    host: str
    slots: tuple[int, ...]


def read_hostfile(path: Path) -> list[Node]:
    """Read lines such as `node1 slots=8`. Raises JinguError for an invalid line."""
    nodes: dict[str, Node] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=([1-9]\d{0,4})", text)
        where = f"{path}:{number}"
        if match is None:
            raise JinguError(f"the line {text!r} is no host.", where=where, fix="Write it as `node1 slots=8`.")
        if match[1] in nodes:
            raise JinguError(f"{match[1]} is listed twice.", where=where, fix="Add its slots together.")
        nodes[match[1]] = Node(match[1], tuple(range(int(match[2]))))
    if not nodes:
        raise JinguError("the file lists no host.", where=path, fix="Write a line for each, such as `node1 slots=8`.")
    return list(nodes.values())


@dataclass(frozen=True)
class NodeSelection:
    """A selection of nodes of a hostfile and of their slots.

    Attributes:
        include: what to use; for example, `node1:0,2@node2` is slots 0 and 2 of node1 and all of node2. None: all.
        exclude: what to leave out, in the same syntax.
    """

    hostfile: Path
    include: str | None = None
    exclude: str | None = None

    def nodes(self) -> list[Node]:
        """Return the selected nodes with their selected slots.

        Raises:
            JinguError: both are set, a host or slot does not exist, or nothing remains.
        """
        if self.include is not None and self.exclude is not None:
            raise JinguError("--include and --exclude cannot be combined.", fix="Use one of them.")
        nodes = read_hostfile(self.hostfile)
        if self.include is not None:
            return _read_selection(self.include, nodes, "--include")
        excluded_nodes = _read_selection(self.exclude, nodes, "--exclude") if self.exclude is not None else []
        slots = {node.host: node.slots for node in excluded_nodes}
        remaining = []
        for node in nodes:
            free_slots = tuple(slot for slot in node.slots if slot not in slots.get(node.host, ()))
            if free_slots:
                remaining.append(replace(node, slots=free_slots))
        if not remaining:
            raise JinguError("no slot remains.", where=f"--exclude {self.exclude}", fix="Exclude fewer.")
        return remaining


def _read_selection(text: str, nodes: Sequence[Node], option: str) -> list[Node]:
    """Return the selected nodes in the order of the text. The slots of a host that occurs repeatedly are merged.

    Args:
        option: the option that has the text, for messages.
    """
    by_host = {node.host: node for node in nodes}
    slots: dict[str, set[int]] = {}
    for part in text.split("@"):
        # An IPv6 address has colons of its own; with slots it may stand in brackets.
        address = part.strip("[]")
        host, colon, numbers = (address, "", "") if address in by_host else part.rpartition(":")
        host = host.strip("[]") if colon or host else numbers
        if host not in by_host:
            fix = f"It lists {join_words(list(by_host), 'and')}."
            raise JinguError(f"{host or 'a host without a name'} is not in the hostfile.", where=option, fix=fix)
        words = numbers.split(",") if colon else [str(slot) for slot in by_host[host].slots]
        unknown = next((word for word in words if word not in map(str, by_host[host].slots)), None)
        if unknown is not None:
            what = f"{host} has no slot {unknown}: it has {len(by_host[host].slots)}, counted from 0."
            raise JinguError(what, where=option)
        slots.setdefault(host, set()).update(map(int, words))
    return [Node(host, tuple(sorted(host_slots))) for host, host_slots in slots.items()]


def write_failing_nodes(hosts: Sequence[str]) -> None:
    """Write the file with the names of failing nodes, or remove it if there are none; print them if that fails."""
    try:
        if hosts:
            write_text_atomically(FAILING_NODES, "".join(f"{host}\n" for host in hosts))
        else:
            FAILING_NODES.unlink(missing_ok=True)
    except OSError as error:
        names = f" The failing nodes are {join_words(hosts, 'and')}." if hosts else ""
        print(f"jingu: {FAILING_NODES} cannot be written ({error.strerror}).{names}", file=sys.stderr)


def read_environment(path: Path) -> dict[str, str]:
    """Read a file of lines NAME=VALUE, such as `.deepspeed_env`."""
    variables = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            fix = "Write it as NAME=VALUE."
            raise JinguError(f"the line {line.strip()!r} sets no variable.", where=f"{path}:{number}", fix=fix)
        variables[name] = value
    return variables
