"""What runs in the program process of a sandbox: an answer, or the tests of an answer in another sandbox.

Tests call the functions of an answer through a pair of pipes. Only values cross them: numbers, texts, bytes,
collections and arrays as data of exactly these types, and everything else as a `Remote`, a reference to an object of
the other side. So tests compare values in a process that the answer cannot inspect, and the answer sees arguments
alone.

It imports only the standard library (and NumPy if a program does): it runs without jingu.
"""

from __future__ import annotations

import builtins
import collections
import collections.abc
import datetime
import decimal
import fractions
import importlib
import itertools
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

Json = Any
# Bytes of a message, and levels of a value.
_MAX_BYTES = 1 << 25
_MAX_DEPTH = 100
_END = object()  # of an iterator
_MUTABLE = (list, dict, set, bytearray, collections.deque)

# Modules whose names tests may take from the imports of an answer; they have no access to the process.
MODULES = frozenset(
    """
    array base64 bisect calendar cmath collections copy dataclasses datetime decimal enum fractions functools hashlib
    heapq itertools json math numbers numpy operator random re statistics string struct textwrap time typing
    """.split()  # noqa: SIM905
)


# Values as JSON: a list of a tag and the content.


def _float(value: float) -> str:
    return value.hex()


# Tag, type, to JSON, from JSON. The first type of which a value is an instance applies: subclasses become their base.
_SCALARS: tuple[tuple[str, type, Callable[[Any], Json], Callable[[Any], Any]], ...] = (
    ("bool", bool, bool, bool),
    ("int", int, lambda value: hex(int.__int__(value)), lambda text: int(text, 16)),
    ("float", float, lambda value: _float(float.__float__(value)), float.fromhex),
    (
        "complex",
        complex,
        lambda value: [_float(value.real), _float(value.imag)],
        lambda p: complex(*map(float.fromhex, p)),
    ),
    ("str", str, lambda value: str.__str__(value), str),
    ("bytes", bytes, lambda value: bytes.hex(value), bytes.fromhex),
    ("bytearray", bytearray, lambda value: bytearray.hex(value), bytearray.fromhex),
    ("Decimal", decimal.Decimal, lambda value: decimal.Decimal.__str__(value), decimal.Decimal),
    ("Fraction", fractions.Fraction, lambda value: f"{value.numerator:d}/{value.denominator:d}", fractions.Fraction),
    ("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    ("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    ("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    (
        "timedelta",
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    ("range", range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
)
_COLLECTIONS: tuple[tuple[str, type, Callable[[Any], Any]], ...] = (
    ("list", list, list.__iter__),
    ("tuple", tuple, tuple.__iter__),
    ("set", set, set.__iter__),
    ("frozenset", frozenset, frozenset.__iter__),
    ("deque", collections.deque, collections.deque.__iter__),
)
_FROM_JSON = {tag: read for tag, _, _, read in _SCALARS}
_BUILD = {tag: kind for tag, kind, _ in _COLLECTIONS}
_SINGLETONS = {"None": None, "Ellipsis": Ellipsis, "NotImplemented": NotImplemented}


def encode(value: Any, reference: Callable[[Any], Json], depth: int = 0) -> Json:
    """Return a value as JSON; `reference` encodes what is no data."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"values have at most {_MAX_DEPTH} levels")
    for tag, constant in _SINGLETONS.items():
        if value is constant:
            return [tag, None]
    for tag, kind, write, _ in _SCALARS:
        if isinstance(value, kind):
            return [tag, write(value)]
    for tag, kind, items in _COLLECTIONS:
        if isinstance(value, kind):
            return [tag, [encode(item, reference, depth + 1) for item in items(value)]]
    if isinstance(value, dict):
        pairs = [[encode(part, reference, depth + 1) for part in pair] for pair in dict.items(value)]
        return ["dict", pairs]
    array = _encode_array(value)
    return reference(value) if array is None else array


def _encode_array(value: Any) -> Json:
    """Return an array or a scalar of NumPy as JSON, and None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.kind not in "biufcSU":
        return None
    if isinstance(value, numpy.generic):
        return encode(value.item(), lambda _: None)
    return ["array", [value.dtype.str, list(value.shape), value.tobytes().hex()]]


def decode(content: Json, dereference: Callable[[str, Json], Any]) -> Any:
    """Return the value of JSON that `encode` wrote; `dereference` returns that of a reference.

    Raises:
        ValueError, TypeError, ...: it is something else.
    """
    tag, data = content
    if tag in _SINGLETONS:
        return _SINGLETONS[tag]
    if tag in _FROM_JSON:
        return _FROM_JSON[tag](data)
    if tag in _BUILD:
        return _BUILD[tag]([decode(item, dereference) for item in data])
    if tag == "dict":
        return {decode(key, dereference): decode(value, dereference) for key, value in data}
    if tag == "array":
        import numpy

        kind = numpy.dtype(str(data[0]))
        if kind.kind not in "biufcSU":
            raise ValueError(f"no array of {kind}")
        return numpy.frombuffer(bytes.fromhex(data[2]), kind).reshape([int(size) for size in data[1]]).copy()
    return dereference(tag, data)


# Two sides that call each other


def _is_class_instance(value: Any, kind: Any) -> bool:
    return isinstance(value, kind)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _next(iterator: Any) -> Any:
    return next(iterator, _END)


# What tests may do with an object of the answer. An operand that is data could be the expected value, so operators are
# applied between objects of the answer only.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": lambda value, name: getattr(value, name),
    "setattr": setattr,
    "isinstance": _is_class_instance,
    "next": _next,
    "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None),
    **{name: vars(builtins)[name] for name in ("iter", "len", "str", "repr", "bool", "hash")},
    **{name: vars(operator)[name] for name in ("getitem", "setitem", "delitem")},
}
_BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
_OPERATIONS |= {name: vars(operator)[name] for name in _BINARY}


class Remote:
    """An object of the other side."""

    _peer: Peer
    _number: int

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.request("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.request("getattr", self, name)

    def __next__(self) -> Any:
        value = self._peer.request("next", self)
        if value is _END:
            raise StopIteration
        return value

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(self._peer.request("isinstance", value, self))

    def __exit__(self, *_: Any) -> None:
        self._peer.request("exit", self)


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._peer.request(name, self, *args)


def _compare(name: str) -> Callable[[Remote, Any], Any]:
    def apply(self: Remote, operand: Any) -> Any:
        return self._peer.request(name, self, operand) if isinstance(operand, Remote) else NotImplemented

    return apply


for _name in ("iter", "len", "str", "repr", "bool", "hash", "getitem", "setitem", "delitem", "setattr", "enter"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in _BINARY:
    setattr(Remote, f"__{_name.strip('_')}__", _compare(_name))


class Peer:
    """One side of the connection.

    Args:
        incoming, outgoing: descriptors of the pipes.
        is_open: whether the other side may do everything with the objects that it knows; else it may call them.
    """

    def __init__(self, incoming: int, outgoing: int, is_open: bool) -> None:
        self._pipes = incoming, outgoing
        self._is_open = is_open
        self._operations = _OPERATIONS if is_open else {"call": _call}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # of objects, by their id
        self._remotes: dict[int, Remote] = {}
        self.exceptions: dict[str, type[BaseException]] = {}  # classes of the other side, by their name

    def send(self, message: Json) -> None:
        """Send a message."""
        data = json.dumps(message).encode()
        if len(data) > _MAX_BYTES:
            raise ValueError("a value is too large")
        data = len(data).to_bytes(4, "big") + data
        while data:
            data = data[os.write(self._pipes[1], data) :]

    def receive(self) -> Json:
        """Wait for the next message. End the process if the other side ended or sent no message."""
        try:
            size = int.from_bytes(self._read(4), "big")
            return json.loads(self._read(size)) if size <= _MAX_BYTES else self.fail()
        except (OSError, ValueError, RecursionError, MemoryError):
            self.fail()

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._pipes[0], min(size, 1 << 16)) or self.fail()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def fail(self) -> NoReturn:
        """End the process, so that tests cannot take a broken connection for an exception of the answer."""
        os._exit(1)

    def encode(self, value: Any) -> Json:
        """Return a value as JSON, objects as references."""
        return encode(value, self._reference)

    def _reference(self, value: Any) -> Json:
        if value is _END:
            return ["end", None]
        if isinstance(value, Remote):
            return ["yours", value._number]
        name = value.__name__ if isinstance(value, (type, types.BuiltinFunctionType)) else ""
        if value is vars(builtins).get(name, _END):
            return ["builtin", name]
        if not self._is_open and isinstance(value, collections.abc.Iterator):
            return ["iterator", [self.encode(item) for item in itertools.islice(value, _MAX_BYTES)]]
        if not self._is_open and not callable(value):
            raise TypeError(f"an object of {type(value).__name__} cannot be passed")
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return ["mine", number]

    def decode(self, content: Json) -> Any:
        """Return the value of JSON. End the process if it is invalid."""
        try:
            return decode(content, self._dereference)
        except Exception:
            self.fail()

    def _dereference(self, tag: str, data: Json) -> Any:
        if tag == "yours":
            return self._objects[int(data)]
        if tag == "mine":
            return self._remotes.setdefault(int(data), Remote(self, int(data)))
        if tag == "end":
            return _END
        if tag == "builtin":
            value = vars(builtins)[data]
            # Only an answer receives functions by their name.
            return value if self._is_open or isinstance(value, type) else object()
        if tag == "iterator":
            return iter([self.decode(item) for item in data])
        raise ValueError(f"no value {tag}")

    def request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Let the other side perform an operation; return its value, or raise its exception."""
        parts = [self.encode(argument) for argument in args]
        self.send([operation, parts, {name: self.encode(value) for name, value in kwargs.items()}])
        while True:
            message = self.receive()
            try:
                if message[0] == "value":
                    return self._accept(message[1], message[2], args)
                error = self._exception(message[1]) if message[0] == "error" else None
            except Exception:
                self.fail()
            if isinstance(error, StopIteration):
                # It would end a loop over `map` before its first comparison.
                raise RuntimeError("StopIteration outside of an iterator")
            if error is not None:
                raise error
            self.perform(message)

    def _accept(self, result: Json, changes: Json, args: Sequence[Any]) -> Any:
        """Return the value of a reply, and change the arguments as the other side did."""
        for index, change in changes:
            new = self.decode(change)
            if not isinstance(args[index], _MUTABLE) or type(args[index]) is not type(new):
                raise ValueError("an argument that cannot change")
            _replace(args[index], new)
        # An argument that is returned is the same object.
        return args[result[1]] if result[0] == "argument" else self.decode(result)

    def perform(self, message: Json) -> None:
        """Perform an operation for the other side, and send its value with the arguments that it changed."""
        name, args, kwargs = message
        values = [self.decode(argument) for argument in args]
        keywords = {key: self.decode(value) for key, value in kwargs.items()}
        try:
            result = self._operations[name](*values, **keywords)
            changes = []
            for index, (value, before) in enumerate(zip(values, args, strict=True)):
                if isinstance(value, _MUTABLE):
                    after = self.encode(value)
                    changes += [[index, after]] if after != before else []
            same = [index for index, value in enumerate(values) if value is result and isinstance(value, _MUTABLE)]
            reply = ["value", ["argument", same[0]] if same else self.encode(result), changes]
        except BaseException as error:
            reply = ["error", self._describe(error)]
        self.send(reply)

    def _describe(self, error: BaseException) -> Json:
        """Return an exception as JSON: the names of its classes, its arguments, and a reference."""
        names = [kind.__name__ for kind in type(error).__mro__]
        try:
            args = [self.encode(argument) for argument in error.args]
        except Exception:
            args = []
        return [names, args]

    def _exception(self, content: Json) -> BaseException:
        names, args = content
        values = [self.decode(argument) for argument in args]
        for kind in (self.exceptions.get(name) or vars(builtins).get(name) for name in names):
            if kind is not None and _is_exception(kind):
                try:
                    return kind(*values)
                except TypeError:  # such as UnicodeDecodeError, which needs certain arguments
                    return ValueError(*values)
        return Exception(*values)

    def define_exception(self, names: Sequence[str]) -> type[BaseException]:
        """Return a class for an exception class of the other side, given the names of it and of its base classes."""
        base: type = next(kind for name in names if _is_exception(kind := vars(builtins).get(name)))
        return self.exceptions.setdefault(names[0], type(names[0], (base,), {}))


def _replace(value: Any, new: Any) -> None:
    """Give a collection the items of another one."""
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(new)
    else:
        value.extend(new)


def _is_exception(value: Any) -> TypeGuard[type[BaseException]]:
    return isinstance(value, type) and issubclass(value, BaseException)


# The guests


def _read_source(descriptor: int) -> Json:
    with open(descriptor, "rb") as file:
        return json.loads(file.read())


def _run_module(code: str, name: str) -> dict[str, Any]:
    """Run code as a module, and return its variables."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    file = Path.cwd() / "program.py"
    file.write_text(code, encoding="utf-8", errors="surrogatepass")
    exec(compile(code, str(file), "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _origin(value: Any) -> str:
    """Return where an imported object comes from: "math", or "math:isclose"; "" for an object of the answer.

    That of an exception class is ":" and the names of its classes.
    """
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and value.__module__ in MODULES:
        return f"{value.__module__}:{value.__qualname__}"
    return ":" + " ".join(kind.__name__ for kind in value.__mro__) if _is_exception(value) else ""


def run_answer(descriptors: list[int]) -> None:
    """Run an answer's code, and then what tests ask for."""
    source, incoming, outgoing = descriptors
    peer = Peer(incoming, outgoing, is_open=True)
    variables = _run_module(_read_source(source)["code"], "answer")
    names = peer.receive()
    known_names = [name for name in names if name in variables]
    peer.send([[name, _origin(variables[name]), peer.encode(variables[name])] for name in known_names])
    while True:
        peer.perform(peer.receive())


def run_tests(descriptors: list[int]) -> None:
    """Run tests with the functions of an answer in another sandbox; report it if they end without an exception."""
    source, incoming, outgoing, verdict = descriptors
    tests = _read_source(source)
    peer = Peer(incoming, outgoing, is_open=False)
    peer.send(tests["names"])
    variables: dict[str, Any] = {"__name__": "tests"}
    for name, origin, content in peer.receive():
        if name in tests["names"]:
            value = _import_value(origin, name in tests["called"])
            if origin.startswith(":"):
                value = peer.define_exception(origin[1:].split())
            variables[name] = value or peer.decode(content)
    for name in tests["modules"]:
        variables[name] = importlib.import_module(name)
    exec(compile(tests["code"], "tests.py", "exec", dont_inherit=True), variables)
    os.write(verdict, b"1")


def _import_value(origin: str, is_called: bool) -> Any:
    """Return what an answer imported from one of `MODULES`, and None for anything else."""
    module, _, name = origin.partition(":")
    if module not in MODULES or (is_called and not name) or "." in name or name.startswith("_"):
        return None
    value = importlib.import_module(module)
    return vars(value).get(name) if name else value


def run_statements(descriptors: list[int]) -> None:
    """Run an answer's code, then receive statements and run them with its variables; send their key at the end."""
    source, incoming, outgoing = descriptors
    peer = Peer(incoming, outgoing, is_open=False)
    variables = _run_module(_read_source(source)["code"], "__main__")
    peer.send(["ready"])
    statements = peer.receive()
    exec(compile(statements["code"], "tests.py", "exec", dont_inherit=True), variables)
    peer.send(statements["key"])


def run_main(descriptors: list[int]) -> None:
    """Run a program with an input; its standard output goes to a pipe, and after its end one byte to another."""
    source, stdin, stdout, end = descriptors
    code = _read_source(source)["code"]
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.closerange(3, end)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    try:
        _run_module(code, "__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    sys.stdout.flush()
    os.write(end, b"1")


GUESTS: dict[str, Callable[[list[int]], None]] = {
    "answer": run_answer,
    "tests": run_tests,
    "statements": run_statements,
    "main": run_main,
}
