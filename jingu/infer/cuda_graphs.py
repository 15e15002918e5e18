"""Capture and replay of decoding steps as CUDA graphs. Launching the kernels of a step one by one takes longer than the
GPU needs to compute a few tokens."""

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
    """The CUDA graphs of one engine, at most `most`; the oldest one is dropped first. A step is captured the second
    time that its shape occurs. With a single client there is a graph for each KV span.

    Args:
        record: captures a function, which must always use the same tensors, and returns a replay function and the
            result tensor; None captures with CUDA.
    """

    def __init__(self, record: CaptureFunction | None = None, most: int = 32) -> None:
        self._record, self._most = record or _Recorder(), most
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph] = {}

    def run(self, shape: Hashable, inputs: Sequence[Tensor], step: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the result of `step` for these inputs. The tensor is valid until the next call.

        Args:
            shape: key of the graph: steps with the same key differ only in the content of their inputs.
        """
        # 1. Run a new shape without a graph: it may never come back.
        graph = self._graphs.get(shape)
        if graph is None and shape not in self._seen:
            self._seen.add(shape)
            return step(inputs)
        # 2. Capture a shape that occurs for the second time, on input buffers of its own.
        if graph is None:
            if len(self._graphs) == self._most:
                del self._graphs[next(iter(self._graphs))]
            static_inputs = [tensor.clone() for tensor in inputs]
            graph = self._graphs[shape] = _Graph(static_inputs, *self._record(lambda: step(static_inputs)))
        # 3. Copy the inputs into the graph's buffers and replay it.
        for graph_input, step_input in zip(graph.inputs, inputs, strict=True):
            graph_input.copy_(step_input, non_blocking=True)
        graph.replay()
        return graph.result


class _Recorder:
    """Captures CUDA graphs. All graphs share one memory pool, as no two of them run at the same time."""

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
