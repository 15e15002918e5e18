"""Steps recorded as CUDA graphs: launched whole, and not operation by operation, which takes longer than the GPU does
for few tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


@dataclass(frozen=True)
class _Graph:
    inputs: list[Tensor]
    replay: Callable[[], object]
    result: Tensor


class Graphs:
    """Those of one engine, the `most` that were recorded last. A step is recorded when its shape comes for the second
    time: with one client that is a graph for each span of the cache.

    Args:
        record: runs a function whose tensors will stay where they are, and gives what runs it again, and its result.
    """

    def __init__(self, record: Record | None = None, most: int = 32) -> None:
        self._record, self._most = record or _Recorder(), most
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph] = {}

    def run(self, shape: Hashable, inputs: Sequence[Tensor], step: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """What `step` makes of its inputs, good until the next call.

        Args:
            shape: steps of one shape differ in nothing but what is in their inputs.
        """
        graph = self._graphs.get(shape)
        if graph is None and shape not in self._seen:
            self._seen.add(shape)
            return step(inputs)
        if graph is None:
            if len(self._graphs) == self._most:
                del self._graphs[next(iter(self._graphs))]
            own = [each.clone() for each in inputs]
            graph = self._graphs[shape] = _Graph(own, *self._record(lambda: step(own)))
        for held, given in zip(graph.inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        graph.replay()
        return graph.result


class _Recorder:
    """By CUDA; all graphs take their memory from one pool, as no two run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # what is made once is made outside of the graph
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return graph.replay, result
