"""Run Python code that nobody has read: without network, on a read-only file system, with limits.

The code runs in a process of its own in new Linux namespaces (user, mount, network, IPC, processes). It sees the file
system read-only but for a small scratch folder in memory, reaches no network and no other process, and cannot start
processes: a seccomp filter refuses every kind of fork, so the limits of one process are those of the whole program.

This file is also the program that the new process runs first, which then replaces itself by the code. It imports the
standard library alone.
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

# <linux/sched.h>: user, mount, network, IPC and process namespaces.
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000
_CLONE_THREAD = 0x00010000
# By machine: its audit number, the system calls clone3, unshare and clone, and those that only fork (<asm/unistd.h>).
_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 435, 272, 56, (57, 58)),
    "aarch64": (0xC00000B7, 435, 97, 220, ()),
}
_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SETUP_FAILED = 97
# How long the sandbox itself may take to start.
_START_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: of wall-clock time, and of processor time.
        memory_bytes: of address space.
        disk_bytes: of the scratch folder, which is in memory.
        open_files: at a time.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 16 * 2**20
    open_files: int = 64


class SandboxError(Exception):
    """This machine does not allow what isolates a program."""


def run_python(program: str, limits: Limits) -> bool:
    """Run a program; return whether it reached its end without an exception and within its limits.

    Raises:
        SandboxError: the program cannot be isolated on this machine.
    """
    reader, writer = os.pipe()
    # A program that leaves early, such as by sys.exit(0), does not write this.
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


# What follows runs in the new process.


def _enter(limits: Limits, program: bytes) -> None:
    """Isolate this process, and replace it by the program."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    # 1. New namespaces. The user keeps files of its own, and gets no rights.
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(_NEW_NAMESPACES), "new namespaces")
    for name, line in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        Path("/proc/self", name).write_text(line)

    # 2. The first process of the new process namespace runs the program. This one waits for it until an alarm ends
    # both: no signal ends the first process of a namespace from within.
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

    # 4. Limits, and no further processes.
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

    # 5. The program's own messages are of no use to anyone.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.execv(sys.executable, [sys.executable, "-I", "program.py"])


def _scratch_folder() -> str:
    """Return where the scratch folder goes: /tmp, unless that would hide Python itself.

    Raises:
        OSError: Python lies below every candidate.
    """
    python = [Path(path).absolute() for path in (sys.executable, sys.prefix, sys.base_prefix)]
    for folder in ("/tmp", "/mnt", "/media", "/srv"):
        if Path(folder).is_dir() and not any(path.is_relative_to(folder) for path in python):
            return folder
    raise OSError("there is no folder for scratch files that does not contain Python")


def _fork_filter() -> bytes:
    """Return a seccomp filter (BPF, <linux/filter.h>) that refuses to start processes and namespaces, but no threads.

    Raises:
        OSError: the machine's system calls are unknown here.
    """
    if platform.machine() not in _SYSTEM_CALLS:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    audit, clone3, unshare, clone, forks = _SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, has_bits, result = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x0005000B, 0x00050026  # EAGAIN, ENOSYS
    # (operation, instructions to skip if true, if false, operand)
    rules = [(load, 0, 0, 4), (equal, 1, 0, audit), (result, 0, 0, kill)]
    rules += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (result, 0, 0, kill)]
    for number, answer in ((clone3, unknown), (unshare, refuse), *((fork, refuse) for fork in forks)):
        rules += [(equal, 0, 1, number), (result, 0, 0, answer)]
    # clone starts a thread or a process, as the low half of its first argument says.
    rules += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 1, 0, _CLONE_THREAD), (result, 0, 0, refuse)]
    rules += [(result, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


if __name__ == "__main__":
    try:
        _enter(Limits(**json.loads(sys.argv[1])), sys.stdin.buffer.read())
    except OSError as failure:
        print(failure, file=sys.stderr)
        os._exit(_SETUP_FAILED)
