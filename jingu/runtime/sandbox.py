"""Run untrusted Python code: without network, on a read-only file system, with limits.

The code runs in a new process with its own Linux namespaces (user, mount, network, IPC, PID). The file system is
read-only except for a small scratch folder in memory. The code cannot reach the network or other processes. It cannot
start processes either: a seccomp filter refuses every kind of fork, so the limits of one process hold for the whole
program.

This file is also the first program of the new process: it isolates the process, and then replaces itself by the
untrusted program (exec). So it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import secrets
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

# <linux/sched.h>: flags of user, mount, network, IPC and PID namespaces.
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000
_CLONE_THREAD = 0x00010000
# By machine: its audit number (<linux/audit.h>), the numbers of the system calls clone3, unshare and clone, and the
# numbers of those that only fork (<asm/unistd.h>).
_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 435, 272, 56, (57, 58)),
    "aarch64": (0xC00000B7, 435, 97, 220, ()),
}
_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
# Exit code of the new process if it could not be isolated.
_SETUP_FAILED = 97
# Seconds that the sandbox may take to start, in addition to the limit of the program.
_START_SECONDS = 5.0


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


def run_python(program: str, limits: Limits) -> bool:
    """Run a program in a sandbox; return whether it reached its end without an exception and within its limits.

    Args:
        program: Python source code. Its output is discarded.

    Raises:
        SandboxError: the program cannot be isolated on this machine.
    """
    reader, writer = os.pipe()
    # The last line of the program writes this token. A program that exits early, such as by sys.exit(0), does not.
    token = secrets.token_hex(16)
    program += f"\n\nimport os\nos.write({writer}, b'{token}')\n"
    errors = b""
    with os.fdopen(reader, "rb") as results:
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
            pass_fds=(writer,),
        )
        os.close(writer)
        with process:
            try:
                _, errors = process.communicate(program.encode(), timeout=limits.seconds + _START_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == _SETUP_FAILED:
            raise SandboxError(errors.decode(errors="replace").strip())
        return process.returncode == 0 and results.read(64) == token.encode()


# The following functions run in the new process.


def _enter(limits: Limits, program: bytes) -> None:
    """Isolate this process, and replace it by the program. Raises OSError if a step of the isolation fails."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    # 1. New namespaces. The user is mapped to an unprivileged user and gets no rights.
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(_NEW_NAMESPACES), "new namespaces")
    for name, line in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        Path("/proc/self", name).write_text(line)

    # 2. A child becomes the first process of the new PID namespace, and runs the program. This process waits for it. An
    # alarm ends this process, and with it the child; it must be here, because a signal from within a namespace does
    # not end the first process of that namespace.
    child = os.fork()
    if child:
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "signal of the parent's death")

    # 3. A read-only file system (mount_setattr, recursive), with a scratch folder in memory.
    attributes = struct.pack("QQQQ", 1, 0, 0, 0)  # MOUNT_ATTR_RDONLY
    check(libc.syscall(_MOUNT_SETATTR, -1, b"/", 0x8000, attributes, len(attributes)), "read-only file system")
    scratch = _scratch_folder()
    check(libc.mount(b"none", scratch.encode(), b"tmpfs", 0, f"size={limits.disk_bytes}".encode()), "scratch folder")
    os.chdir(scratch)
    Path("program.py").write_bytes(program)

    # 4. Resource limits, and a filter that refuses further processes.
    seconds = max(1, round(limits.seconds))
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    instructions = _fork_filter()
    code = ctypes.create_string_buffer(instructions)
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    check(libc.prctl(_PR_SET_SECCOMP, 2, header), "filter of system calls")

    # 5. Discard the program's messages, and run it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.execv(sys.executable, [sys.executable, "-I", "program.py"])


def _scratch_folder() -> str:
    """Return where to mount the scratch folder: /tmp, unless the mount would hide Python itself.

    Raises:
        OSError: Python lies below every candidate.
    """
    python = [Path(path).absolute() for path in (sys.executable, sys.prefix, sys.base_prefix)]
    for folder in ("/tmp", "/mnt", "/media", "/srv"):
        if Path(folder).is_dir() and not any(path.is_relative_to(folder) for path in python):
            return folder
    raise OSError("there is no folder for scratch files that does not contain Python")


def _fork_filter() -> bytes:
    """Return a seccomp filter (BPF, <linux/filter.h>) that refuses new processes and namespaces, but allows threads.

    Raises:
        OSError: `_SYSTEM_CALLS` does not have this machine.
    """
    if platform.machine() not in _SYSTEM_CALLS:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    audit, clone3, unshare, clone, forks = _SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, has_bits, result = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x0005000B, 0x00050026  # EAGAIN, ENOSYS
    # (operation, instructions to skip if true, if false, operand). First kill a process that makes system calls of
    # another architecture, or of x32 (bit 30).
    rules = [(load, 0, 0, 4), (equal, 1, 0, audit), (result, 0, 0, kill)]
    rules += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (result, 0, 0, kill)]
    for number, answer in ((clone3, unknown), (unshare, refuse), *((fork, refuse) for fork in forks)):
        rules += [(equal, 0, 1, number), (result, 0, 0, answer)]
    # clone starts a thread if its first argument (the low half) has CLONE_THREAD, else a process.
    rules += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 1, 0, _CLONE_THREAD), (result, 0, 0, refuse)]
    rules += [(result, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


if __name__ == "__main__":
    try:
        _enter(Limits(**json.loads(sys.argv[1])), sys.stdin.buffer.read())
    except OSError as failure:
        print(failure, file=sys.stderr)
        os._exit(_SETUP_FAILED)
