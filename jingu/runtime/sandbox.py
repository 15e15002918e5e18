"""Run untrusted Python code in a sandbox, and judge it from outside.

A program runs in Linux namespaces of its own, with a root that holds only Python, without rights, and behind a filter
of system calls (`sandbox_server`). It cannot start processes, so the limits of one process hold for all that it does.
It is judged by tests in another sandbox that call its functions (`sandbox_guest`), or by its output.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jingu.runtime.python_tests import PythonTests

_SERVER = Path(__file__).with_name("sandbox_server.py")
# Seconds that a sandbox may take to start, in addition to the limit of the program.
_START_SECONDS = 30.0
# Bytes that are read of a program's output.
_MAX_OUTPUT = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: wall-clock time, and also CPU time.
        memory_bytes: size of the address space.
        disk_bytes: size of the scratch folder, which is in memory, and of each file.
        open_files: number of files that are open at the same time.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 16 * 2**20
    open_files: int = 64


class SandboxError(Exception):
    """This machine does not allow a program to be isolated."""


class Sandbox:
    """Starts isolated programs. Its server ends with `close`, or when this object is garbage-collected.

    Raises:
        SandboxError: a program cannot be isolated on this machine.
    """

    def __init__(self) -> None:
        try:
            code, calls = compile_filter()
        except OSError as error:
            raise SandboxError(f"{error}; install libseccomp, 2.5 or newer") from error
        self._requests, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with child_socket:
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", str(_SERVER), str(child_socket.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # With a fixed seed, sets have the same order in every run.
                env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(child_socket.fileno(),),
                start_new_session=True,
            )
        self.close = weakref.finalize(self, _end_server, process, self._requests)
        self._requests.settimeout(_START_SECONDS)
        try:
            self._requests.send(json.dumps({"filter": code.hex(), "calls": calls}).encode())
            reply = self._requests.recv(1 << 12).decode(errors="replace")
        except OSError as error:
            reply = f"the first process ended: {error}"
        if reply != "ready":
            self.close()
            raise SandboxError(reply or "the first process ended")
        self._requests.settimeout(None)

    def start(self, guest: str, descriptors: Sequence[int], limits: Limits) -> None:
        """Start a program.

        Args:
            guest: what it does, a name in `sandbox_guest.GUESTS`.
            descriptors: its lifeline, a pipe whose other end must stay open; its status pipe, which it closes after
                writing "ready"; and what the guest needs.
        """
        message = json.dumps({"guest": guest, **asdict(limits)}).encode()
        try:
            with self._lock:
                socket.send_fds(self._requests, [message], list(descriptors))
        except OSError as error:
            raise SandboxError(f"its server ended ({error})") from error


def _end_server(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    process.kill()
    process.wait()


def passes_tests(sandbox: Sandbox, code: str, tests: PythonTests, limits: Limits) -> bool:
    """Return whether code passes tests.

    Tests run in another sandbox, so the code sees only the arguments of its functions; see `PythonTests.is_weak` for
    those that cannot.
    """
    if tests.is_weak:
        return passes_statements(sandbox, code, tests.code, limits)
    with _Run(sandbox, limits) as run:
        arguments, arguments_end = run.pipe()
        values, values_end = run.pipe()
        verdict, verdict_end = run.pipe()
        run.start("answer", {"code": code}, arguments, values_end)
        run.start("tests", tests.describe(), values, arguments_end, verdict_end)
        run.begin()
        return run.read(verdict, 1) == b"1"


def passes_statements(sandbox: Sandbox, code: str, statements: str, limits: Limits) -> bool:
    """Return whether statements that run after code, in its process and with its variables, raise no exception.

    The code can inspect and change the statements, and pretend that they ended; use `passes_tests` where possible.
    """
    with _Run(sandbox, limits) as run:
        messages, messages_end = run.pipe()
        replies, replies_end = run.pipe()
        run.start("statements", {"code": code}, messages, replies_end)
        run.begin()
        if run.read_message(replies) != ["ready"]:
            return False
        key = secrets.token_hex(16)
        run.write(messages_end, _frame({"code": statements, "key": key}))
        return bool(run.read_message(replies) == key)


def passes_output(sandbox: Sandbox, code: str, stdin: str, stdout: str, limits: Limits) -> bool:
    """Return whether a program that reads an input ends normally and prints an output, up to white space at the end
    of lines and of the output."""
    with _Run(sandbox, limits) as run:
        stdin_end, source = run.pipe()
        output, output_end = run.pipe()
        end, end_end = run.pipe()
        run.start("main", {"code": code}, stdin_end, output_end, end_end)
        run.begin()
        # The program may print before it has read its whole input.
        writer = threading.Thread(target=run.send, args=(source, stdin.encode(errors="replace")))
        writer.start()
        text = run.read(output, _MAX_OUTPUT)
        is_complete = text is not None and run.read(end, 1) == b"1"
        run.deadline = 0.0
        writer.join()
        return is_complete and _lines((text or b"").decode(errors="replace")) == _lines(stdout)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data


class _Run:
    """Programs that run together, and their pipes; all end with the context."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._open: set[int] = set()
        self._sources: list[tuple[int, int, bytes]] = []
        self.deadline = 0.0

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._close(*self._open)

    def pipe(self) -> tuple[int, int]:
        """Return the reading and the writing end of a new pipe."""
        ends = os.pipe()
        self._open |= set(ends)
        return ends

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
            self._open.discard(descriptor)

    def start(self, guest: str, source: object, *descriptors: int) -> None:
        """Start a program with its source, which is sent as JSON, and with descriptors, which are closed here."""
        lifeline_end, _ = self.pipe()
        status, status_end = self.pipe()
        source_end, source_pipe = self.pipe()
        ends = (lifeline_end, status_end, source_end, *descriptors)
        self._sandbox.start(guest, ends, self._limits)
        self._close(*ends)
        self._sources.append((status, source_pipe, json.dumps(source).encode()))

    def begin(self) -> None:
        """Wait until all programs are isolated, and send their sources; their time begins.

        Raises:
            SandboxError: one could not be isolated.
        """
        self.deadline = time.monotonic() + _START_SECONDS
        for status, _, _ in self._sources:
            reply = self.read(status, 1 << 12)
            if reply != b"ready":
                raise SandboxError((reply or b"a program did not start").decode(errors="replace"))
        self.deadline = time.monotonic() + self._limits.seconds
        for _, pipe, source in self._sources:
            self.send(pipe, source)

    def _wait(self, descriptor: int, event: int) -> bool:
        """Wait until a pipe is ready; return whether it is before the deadline."""
        poller = select.poll()
        poller.register(descriptor, event)
        return bool(poller.poll(max(0.0, self.deadline - time.monotonic()) * 1000))

    def read(self, descriptor: int, size: int) -> bytes | None:
        """Return what a pipe has when all its writers ended; None at the deadline, or if it is more than `size`."""
        data = b""
        while self._wait(descriptor, select.POLLIN):
            part = os.read(descriptor, 1 << 16)
            if not part:
                return data
            data += part
            if len(data) > size:
                return None
        return None

    def read_message(self, descriptor: int) -> Any:
        """Return the next message of a guest; None if there is none before the deadline."""
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            part = os.read(descriptor, 64) if len(data) < 256 and self._wait(descriptor, select.POLLIN) else b""
            if not part:
                return None
            data += part
        try:
            return json.loads(data[4:])
        except ValueError:
            return None

    def write(self, descriptor: int, data: bytes) -> None:
        """Write to a pipe until the deadline, or until its reader ends."""
        os.set_blocking(descriptor, False)
        with suppress(BrokenPipeError):
            while data and self._wait(descriptor, select.POLLOUT):
                data = data[os.write(descriptor, data) :]

    def send(self, descriptor: int, data: bytes) -> None:
        """Write to a pipe as `write` does, and close it."""
        self.write(descriptor, data)
        self._close(descriptor)


# The filter of system calls of the sandbox: a list of what a program may call, compiled by libseccomp.

# What Python and NumPy need. Anything else does not exist for the program (ENOSYS): new processes and programs, mounts,
# namespaces, memory outside of the address space (memfd, System V, splice), other processes, keys, BPF, io_uring.
_CALLS = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2 dup3
open openat openat2 creat stat fstat lstat newfstatat fstatat64 statx statfs fstatfs access faccessat faccessat2
getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat
symlink symlinkat readlink readlinkat chmod fchmod fchmodat umask truncate ftruncate fallocate fadvise64 fsync
fdatasync flock utime utimes utimensat futimesat fcntl sendfile pipe pipe2 socketpair sendto recvfrom sendmsg recvmsg
shutdown getsockopt setsockopt getsockname getpeername select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl
epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 mmap munmap mremap mprotect madvise mincore msync brk
futex set_robust_list get_robust_list set_tid_address rseq membarrier arch_prctl restart_syscall exit exit_group
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause kill tkill tgkill
alarm getitimer setitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage
getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid getpgrp getsid setsid setpgid
capget uname sysinfo getcpu getrandom getrlimit sched_yield sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min wait4 waitid
"""
# Calls with arguments: (name, ((argument, mask, value), ...)). <sched.h>, <sys/ioctl.h>, <linux/prctl.h>, <fcntl.h>
_TERMINAL_REQUESTS = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
_CALLS_WITH_ARGUMENTS = (
    *(("ioctl", ((1, 0xFFFFFFFF, request),)) for request in _TERMINAL_REQUESTS),
    ("prctl", ((0, 0xFFFFFFFF, 15),)),  # PR_SET_NAME
    ("prctl", ((0, 0xFFFFFFFF, 16),)),  # PR_GET_NAME
    ("prlimit64", ((0, 0xFFFFFFFF, 0),)),  # of the process itself
)
# CLONE_VM, CLONE_THREAD, and the flags of new namespaces (time, mount, cgroup, UTS, IPC, user, PID, network).
_THREAD = (0x00010100 | 0x7E020080, 0x00010100)
_ALLOW, _NOTIFY, _ENOSYS = 0x7FFF0000, 0x7FC00000, 0x00050000 | 38
_MASKED_EQUAL = 7


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp` of <seccomp.h>."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    ]


def compile_filter() -> tuple[bytes, dict[str, int]]:
    """Return the filter as a BPF program, and the numbers of the system calls that set up a sandbox.

    The filter asks a supervisor (SECCOMP_RET_USER_NOTIF) about new threads.

    Raises:
        OSError: there is no libseccomp, or it is older than 2.5.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ENOSYS)))

    def resolve(name: str) -> int:
        return int(library.seccomp_syscall_resolve_name(name.encode()))

    def add(action: int, name: str, *comparisons: tuple[int, int, int]) -> None:
        number = resolve(name)
        if number < 0:
            return  # this architecture lacks it
        array = (_Comparison * len(comparisons))(
            *(_Comparison(argument, _MASKED_EQUAL, mask, value) for argument, mask, value in comparisons)
        )
        if library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(comparisons), array) < 0:
            raise OSError(f"libseccomp refuses the rule for {name}")

    try:
        for name in _CALLS.split():
            add(_ALLOW, name)
        for name, comparisons in _CALLS_WITH_ARGUMENTS:
            add(_ALLOW, name, *comparisons)
        add(_NOTIFY, "clone", (0, *_THREAD))
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as source:
            error_code = library.seccomp_export_bpf(context, writer)
            os.close(writer)
            program = source.read()
        if error_code or not program:
            raise OSError("libseccomp exports no filter")
    finally:
        library.seccomp_release(context)
    return program, {name: resolve(name) for name in ("seccomp", "mount_setattr")}
