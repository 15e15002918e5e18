"""The numbers of nodes with which a run can continue (`--min-nodes`): those that divide its batch and its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import yaml

from jingu.errors import JinguError, join_words
from jingu.launch.hosts import Node
from jingu.launch.start import Start


class NodeCounts:
    """Chooses the nodes of a run among those that can be reached.

    Args:
        nodes: all nodes, in the order of the hostfile.
        min_nodes: the least number of nodes.
        explain: returns the error of a run on so many ranks; None if it can train.
    """

    def __init__(self, nodes: Sequence[Node], min_nodes: int, explain: Callable[[int], JinguError | None]) -> None:
        self._nodes = nodes
        self._min_nodes = min_nodes
        self._explain = explain
        self._errors: dict[int, JinguError | None] = {}

    def error(self, nodes: Sequence[Node]) -> JinguError | None:
        """Return why the run cannot train on all ranks of these nodes; None if it can."""
        ranks = sum(len(node.slots) for node in nodes)
        if ranks not in self._errors:
            self._errors[ranks] = self._explain(ranks)
        return self._errors[ranks]

    def choose(self, reachable: Sequence[Node]) -> list[Node]:
        """Return the largest number of reachable nodes with which the run can train; empty if there is none."""
        counts = range(len(reachable), self._min_nodes - 1, -1)
        return next((list(reachable[:count]) for count in counts if self.error(reachable[:count]) is None), [])

    def check(self) -> None:
        """Refuse a run that no loss of nodes can leave with a number of nodes that works.

        Raises:
            JinguError: the run cannot train on all nodes, or on no smaller number that `--min-nodes` allows.
        """
        error = self.error(self._nodes)
        if error is not None:
            raise error
        counts = range(self._min_nodes, len(self._nodes))
        if counts and not any(self.error(self._nodes[:count]) is None for count in counts):
            reason = self.error(self._nodes[: self._min_nodes])
            works = [count for count in range(1, self._min_nodes) if self.error(self._nodes[:count]) is None]
            numbers = join_words([str(count) for count in works])
            fix = f"Take --min-nodes {numbers}, or another batch." if works else "Leave out --min-nodes."
            what = f"with fewer than {len(self._nodes)} nodes the run could not go on ({reason})."
            raise JinguError(what, where=f"--min-nodes {self._min_nodes}", fix=fix)


def explain_ranks(start: Start) -> Callable[[int], JinguError | None]:
    """Return a function that returns why a command cannot run on a number of ranks; None if it can."""
    if start.words[0] != "train" or start.config is None:
        return lambda _: None
    # Slow to import.
    from jingu.config.load import config_from_tree
    from jingu.parallel.stages import plan_layout
    from jingu.training.plan_commands import resolve_spec
    from jingu.training.task import find_task_factory

    config = config_from_tree(yaml.safe_load(start.config))
    spec, _ = resolve_spec(config)
    rows = find_task_factory(config.task).rows_per_group(config)

    def explain(ranks: int) -> JinguError | None:
        try:
            plan_layout(config, ranks, spec, rows)
        except JinguError as error:
            return error
        return None

    return explain
