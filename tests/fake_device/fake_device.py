"""A fake device: a device named `fakedevice`, whose tensors are tensors of the host behind a wrapper.

PyTorch takes it for an accelerator: autograd, optimizers, attention, FSDP2 and collectives run on it, and their numbers
are those of the CPU. As on a real device, an operation on a tensor of the device and one of the host raises an error,
and whatever lets the host wait for the device is recorded with the line that did it: `.item()`, `.tolist()`, `.cpu()`,
`nonzero`, boolean indices, and copies in either direction that are not `non_blocking`.

The device exists as long as the process, so that it belongs into a process of its own.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fakedevice"
ROOT = str(Path(__file__).parents[2]) + "/"
# Operations whose result's shape or value the host has to know.
WAITING = (
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "unique_consecutive", "_unique2"),
    *("unique_dim", "repeat_interleave"),
)


class HostTensorError(RuntimeError):
    """An operation got a tensor of the device and one of the host."""


class Waits:
    """What let the host wait for the device: pairs of an operation and the line of jingu that called it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.thread: int | None = None
        self.is_capturing = False

    def add(self, operation: str) -> None:
        # Threads beside the one that is watched may wait.
        if self.thread == threading.get_ident():
            self.lines.append((operation, calling_line()))


WAITS = Waits()


@contextmanager
def watch() -> Iterator[list[tuple[str, str]]]:
    """Yield a list of what lets this thread wait for the device within the block."""
    WAITS.lines = []
    WAITS.thread = threading.get_ident()
    try:
        yield WAITS.lines
    finally:
        WAITS.thread = None


@contextmanager
def capture() -> Iterator[None]:
    """Let any copy between host and device within the block raise an error, as it would not be part of a graph."""
    WAITS.is_capturing = True
    try:
        yield
    finally:
        WAITS.is_capturing = False


def calling_line() -> str:
    """Return the innermost line of this project on the stack, such as `jingu/infer/engine.py:12: x.item()`."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(ROOT) and "fake_device/fake_device.py" not in frame.filename:
            return f"{frame.filename.removeprefix(ROOT)}:{frame.lineno}: {frame.line}"
    return "outside of the project"


class FakeDeviceTensor(Tensor):
    """A tensor of the device. `raw` has its values."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> FakeDeviceTensor:
        layout: dict[str, Any] = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        tensor: FakeDeviceTensor = Tensor._make_wrapper_subclass(cls, raw.shape, device=f"{NAME}:0", **layout)
        tensor.raw = raw
        return tensor

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FakeDeviceTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the host's tensors behind those of the device."""
    name = operation._schema.name.partition("::")[2]
    if WAITS.is_capturing and (name in WAITING or (name == "_to_copy" and kwargs.get("device") == torch.device("cpu"))):
        raise HostTensorError(f"{name} cannot be captured, at {calling_line()}")
    if name == "copy_":
        return _copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    if name == "_foreach_copy_":
        for target, source in zip(args[0], args[1], strict=True):
            _copy(target, source, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        return None
    if name == "_fused_sdp_choice":
        return 0  # products and a softmax: the fused kernels are those of real devices
    tensors = [leaf for leaf in _leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Tensor)]
    device_tensors = [tensor for tensor in tensors if isinstance(tensor, FakeDeviceTensor)]
    device = kwargs.get("device")
    to_device = bool(device_tensors) if device is None else torch.device(device).type == NAME
    if name == "_to_copy":
        if not to_device and not kwargs.get("non_blocking"):
            WAITS.add("copy to the host")
    elif any(not isinstance(tensor, FakeDeviceTensor) and tensor.dim() for tensor in tensors):
        raise HostTensorError(f"{name} got a tensor of the device and one of the host, at {calling_line()}")
    if name in WAITING and not kwargs.get("output_size"):
        WAITS.add(name)
    if name in ("index", "index_put_", "_index_put_impl_") and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    ):
        WAITS.add(f"{name} by booleans")
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    result = operation(*_map(_unwrap, args), **{key: _map(_unwrap, value) for key, value in kwargs.items()})
    resized = [tensor for tensor in device_tensors if tensor.shape != tensor.raw.shape]
    assert not resized, f"{name} has resized a tensor, which the fake device cannot"
    # What an operation returns of its arguments, it returns as it got it.
    wrappers = {id(tensor.raw): tensor for tensor in device_tensors}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or not to_device:
            return value
        return wrappers[id(value)] if id(value) in wrappers else FakeDeviceTensor(value)

    return _map(wrap, result)


# PyTorch's own functions for trees take a large part of the time of a small step.
def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_map(function, item) for item in value])
    return function(value)


def _unwrap(value: Any) -> Any:
    return value.raw if isinstance(value, FakeDeviceTensor) else value


def _copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    if isinstance(target, FakeDeviceTensor) != isinstance(source, FakeDeviceTensor):
        operation = "copy to the device" if isinstance(target, FakeDeviceTensor) else "copy to the host"
        if WAITS.is_capturing:
            raise HostTensorError(f"{operation} cannot be captured, at {calling_line()}")
        if not non_blocking:
            WAITS.add(operation)
    _unwrap(target).copy_(_unwrap(source))
    return target


class Stream:
    """A stream, on which everything has happened already. It is also an event."""

    device = torch.device("cpu")
    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _stream: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def record_event(self, _event: Any = None) -> Stream:
        return self

    def record(self, _stream: Any = None) -> None: ...

    def wait(self, _stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        WAITS.add("synchronize")

    def query(self) -> bool:
        return True


class FakeDeviceModule(_DummyBackendModule):
    """What torch.cuda is for CUDA."""

    Event = Stream
    Stream = Stream

    def stream(self, _stream: Any) -> Any:
        return nullcontext()

    def current_stream(self, _device: Any = None) -> Stream:
        return Stream()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def current_device(self) -> int:
        return 0

    def set_device(self, _device: Any) -> None: ...

    def synchronize(self, _device: Any = None) -> None:
        WAITS.add("synchronize")

    def get_rng_state(self, _device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, _state: Tensor, _device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return False

    def get_device_name(self, _device: Any = None) -> str:
        return "Fake Device"

    def get_device_properties(self, _device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**30)

    def max_memory_allocated(self, _device: Any = None) -> int:
        return 0


_LIBRARY: list[torch.library.Library] = []


def install() -> None:
    """Make this process know the device. A second call does nothing."""
    if _LIBRARY:
        return
    _setup_privateuseone_for_python_backend(NAME, FakeDeviceModule())
    library = torch.library.Library("aten", "IMPL")
    _LIBRARY.append(library)

    def empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return FakeDeviceTensor(torch.empty(size, dtype=dtype, device="cpu"))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
        return FakeDeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _copy(target, source, non_blocking)

    def create(factory: Any) -> Any:
        def on_device(*args: Any, dtype: Any = None, **_: Any) -> Tensor:
            return FakeDeviceTensor(factory(*args, dtype=dtype, device="cpu"))

        return on_device

    # These would create an empty tensor and resize it.
    aten = torch.ops.aten
    for factory in (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m):
        library.impl(factory, create(factory), "PrivateUse1")
    # All else reaches `__torch_dispatch__`.
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    # A wrapper cannot be a tensor of inference mode.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else nullcontext()  # type: ignore[misc,assignment]
    # There is no memory to pin, nor to give back between uses.
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    # Collectives are those of the host.
    backend_of = torch.distributed.ProcessGroup._get_backend
    torch.distributed.ProcessGroup._get_backend = lambda group, _device: backend_of(group, torch.device("cpu"))
    _fsdp_param.free_storage = lambda _tensor: None
    _fsdp_param.alloc_storage = lambda _tensor: None
