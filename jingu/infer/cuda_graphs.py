"""Steps captured as CUDA graphs: launched as a whole. Launching operation by operation takes longer than the GPU needs
for a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CaptureFunction = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


@dataclass(frozen=True)
class _Graph:
    inputs: list[Tensor]
    replay: Callable[[], object]
    result: Tensor


class CudaGraphRunner:
    """The graphs of one engine, at most `most`. A step is captured when its shape comes for the second time: with one
    client that is a graph for each span of the KV cache.

    Args:
        record: captures a function whose tensors stay where they are; returns a replay function, and the result.
    """

    def __init__(self, record: CaptureFunction | None = None, most: int = 32) -> None:
        self._record, self._most = record or _Recorder(), most
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph] = {}

    def run(self, shape: Hashable, inputs: Sequence[Tensor], step: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return what `step` computes from its inputs; valid until the next call.

        Args:
            shape: steps of one shape differ only in the content of their inputs.
        """
        graph = self._graphs.get(shape)
        if graph is None and shape not in self._seen:
            self._seen.add(shape)
            return step(inputs)
        if graph is None:
            if len(self._graphs) == self._most:
                del self._graphs[next(iter(self._graphs))]
            own = [tensor.clone() for tensor in inputs]
            graph = self._graphs[shape] = _Graph(own, *self._record(lambda: step(own)))
        for graph_input, step_input in zip(graph.inputs, inputs, strict=True):
            graph_input.copy_(step_input, non_blocking=True)
        graph.replay()
        return graph.result


class _Recorder:
    """Captures with CUDA. All graphs share one memory pool, as no two run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # warm up: lazy initialization must not be captured
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return graph.replay, result
