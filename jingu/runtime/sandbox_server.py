"""The process that starts sandboxes: it isolates itself, and then forks an isolated Python process per request.

Each level can only end the levels below it:

    server      its own user, mount, PID, network, IPC, UTS and cgroup namespaces, and a root that holds Python alone
      init      again its own namespaces, `/tmp` and `/proc`; ends with the lifeline pipe, or with its program
        program without any right, behind the filter of system calls; runs untrusted code

It runs without jingu's environment, so it imports only the standard library and `sandbox_guest`.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# What most programs import; here it is imported once for all.
_COMMON_MODULES = "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools math"
_COMMON_MODULES += " operator random re statistics string typing"
# <linux/sched.h>
_CLONE_NEWUSER = 0x10000000
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
# <sys/mount.h>
_NOSUID, _NODEV, _NOEXEC, _RDONLY, _BIND, _REC, _PRIVATE = 2, 4, 8, 1, 4096, 16384, 1 << 18
_DETACH = 2
_AT_RECURSIVE = 0x8000
# <linux/prctl.h>, <linux/seccomp.h>
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_FILTER_MODE, _NEW_LISTENER = 1, 8
_NOTIFICATION_RECEIVE, _NOTIFICATION_SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
# Threads that a program may start during its life; their stacks in the kernel count towards no other limit.
_MAX_THREADS = 256
# Files of /tmp, whose names are outside of its size.
_MAX_FILES = 4096
_PROC = (_RDONLY | _NOSUID | _NODEV | _NOEXEC, "subset=pid")
# Where the old root is while the new one is built.
_OLD = "/.old"
_DEVICES = ("null", "zero", "random", "urandom")

LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Raise OSError if a call of the C library failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system."""
    texts = [text.encode() for text in (source, target, kind)]
    check(LIBC.mount(*texts, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def bind(call: int, source: str, target: str, attributes: int) -> None:
    """Show a file or a folder of the old root, with all mounts below it, under another path.

    Args:
        call: number of the system call mount_setattr.
        attributes: of the mounts: MOUNT_ATTR_*, which equal MS_RDONLY, MS_NOSUID ...
    """
    mount(f"{_OLD}{source}", target, "", _BIND | _REC)
    restrict(call, target, attributes, _AT_RECURSIVE)


def restrict(call: int, path: str, attributes: int, flags: int = 0) -> None:
    """Add attributes to a mount."""
    structure = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = LIBC.syscall(call, -1, path.encode(), flags, structure, ctypes.c_size_t(len(structure)))
    check(result, f"read-only {path}")


# The server


def python_folders() -> list[str]:
    """Return the folders that Python needs: the standard library, installed packages, and shared libraries."""
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    folders = [library, *site.getsitepackages(), f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    folders += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"]
    return sorted({folder for folder in folders if Path(folder).is_dir()})


def build_root(call: int) -> str:
    """Replace the root by one in memory that holds `python_folders` and four devices; return the scratch folder."""
    folders = python_folders()
    mount("none", "/", "", _REC | _PRIVATE)
    place = next(path for path in ("/tmp", "/mnt", "/media", "/srv", "/var") if Path(path).is_dir())
    mount("none", place, "tmpfs", _NOSUID, "size=1m,mode=755")
    os.chdir(place)
    scratch = "/scratch" if any(folder.startswith("/tmp/") for folder in folders) else "/tmp"
    for name in ("proc", "dev", "etc", scratch[1:], _OLD[1:]):
        Path(name).mkdir()
    check(LIBC.pivot_root(b".", _OLD[1:].encode()), "new root")
    os.chdir("/")
    with suppress(OSError):  # some containers mask parts of /proc, and then Linux refuses another one
        mount("proc", "/proc", "proc", *_PROC)
    for folder in folders:
        if Path(f"{_OLD}{folder}").is_symlink():
            if not os.path.lexists(folder):
                Path(folder).parent.mkdir(parents=True, exist_ok=True)
                Path(folder).symlink_to(os.readlink(f"{_OLD}{folder}"))  # noqa: PTH115
            continue
        Path(folder).mkdir(parents=True, exist_ok=True)
        bind(call, _resolve(folder), folder, _RDONLY | _NOSUID | _NODEV)
    files = {f"/dev/{device}": _RDONLY | _NOSUID | _NOEXEC for device in _DEVICES}
    if Path(f"{_OLD}/etc/ld.so.cache").is_file():
        files["/etc/ld.so.cache"] = _RDONLY | _NOSUID | _NODEV
    for path, attributes in files.items():
        Path(path).touch()
        bind(call, path, path, attributes)
    check(LIBC.umount2(_OLD.encode(), _DETACH), "old root")
    Path(_OLD).rmdir()
    restrict(call, "/", _RDONLY | _NOSUID | _NODEV)
    return scratch


def _resolve(path: str) -> str:
    """Return a path of the old root without symbolic links, which would lead into the new one."""
    real: list[str] = []
    parts = path.split("/")[::-1]
    while parts:
        part = parts.pop()
        name = "/".join([_OLD, *real, part])
        if part == "..":
            real = real[:-1]
        elif part not in ("", ".") and os.path.islink(name):  # noqa: PTH114
            link = os.readlink(name)  # noqa: PTH115
            real = [] if link.startswith("/") else real
            parts += link.split("/")[::-1]
        elif part not in ("", "."):
            real.append(part)
    return "/" + "/".join(real)


def isolate(requests: socket.socket, call: int) -> None:
    """Continue in a child with its own namespaces and root; this process only waits for it."""
    user, group = os.getuid(), os.getgid()
    check(LIBC.unshare(_CLONE_NEWUSER | _NEW_NAMESPACES), "new namespaces")
    for name, line in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        Path("/proc/self", name).write_text(line)
    child = os.fork()
    if child:
        requests.close()
        os.waitpid(child, 0)
        os._exit(0)
    check(LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "signal of the parent's death")
    os.environ["HOME"] = os.environ["TMPDIR"] = build_root(call)


def serve(requests: socket.socket, settings: dict[str, Any]) -> None:
    """Start a sandbox for each message: a JSON object with its descriptors, until the other side closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children need no wait
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 8)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            start_init(settings, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


# Init


def start_init(settings: dict[str, Any], request: dict[str, Any], descriptors: list[int]) -> None:
    """Fork the first process of new namespaces, and end this one.

    Args:
        descriptors: the lifeline, the status pipe, and those of the program.
    """
    lifeline, status, *other_descriptors = descriptors
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        check(LIBC.unshare(_NEW_NAMESPACES), "new namespaces")
        if os.fork() == 0:
            run_init(settings, request, lifeline, status, other_descriptors)
    except BaseException as error:
        report_failure(status, error)
    os._exit(0)


def report_failure(status: int, error: BaseException) -> None:
    """Tell the other side why the sandbox did not start."""
    with suppress(OSError):
        os.write(status, f"{type(error).__name__}: {error}".encode())
    os._exit(1)


def run_init(settings: dict[str, Any], request: dict[str, Any], lifeline: int, status: int, files: list[int]) -> None:
    """Start the program, and wait until it ends or the lifeline closes. The end of this process ends all others."""
    check(LIBC.prctl(_PR_SET_DUMPABLE, 0), "no core dumps")
    mount(
        "none",
        os.environ["TMPDIR"],
        "tmpfs",
        _NOSUID | _NODEV,
        f"size={request['disk_bytes']},nr_inodes={_MAX_FILES},mode=1777",
    )
    with suppress(OSError):
        mount("proc", "/proc", "proc", *_PROC)
    parent_end, child_end = socket.socketpair()
    program = os.fork()
    if program == 0:
        parent_end.close()
        os.close(lifeline)
        run_program(settings, request, child_end, status, files)
    for descriptor in (status, *files):
        os.close(descriptor)
    child_end.close()
    _, listeners, _, _ = socket.recv_fds(parent_end, 1, 1)
    parent_end.close()
    # The program waits for the end of the connection; its code has not started yet.
    supervise(lifeline, os.pidfd_open(program), listeners)
    os._exit(0)


def supervise(lifeline: int, program: int, listeners: list[int]) -> None:
    """Return once the program ended or the other side closed the lifeline; allow `_MAX_THREADS` new threads."""
    poller = select.poll()
    for descriptor in (lifeline, program, *listeners):
        poller.register(descriptor, select.POLLIN)
    threads = 0
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if lifeline in ready or program in ready or not listeners:
            return
        # struct seccomp_notif begins with an id of 8 bytes; struct seccomp_notif_resp: id, value, error, flags.
        notification = array.array("B", bytes(80))
        try:
            fcntl.ioctl(listeners[0], _NOTIFICATION_RECEIVE, notification)
            threads += 1
            answer = (0, _CONTINUE) if threads <= _MAX_THREADS else (-11, 0)  # EAGAIN
            fcntl.ioctl(listeners[0], _NOTIFICATION_SEND, bytes(notification[:8]) + struct.pack("qiI", 0, *answer))
        except OSError:
            continue  # the thread was interrupted meanwhile


# The program


def run_program(
    settings: dict[str, Any], request: dict[str, Any], init: socket.socket, status: int, files: list[int]
) -> None:
    """Give up all rights, and run the guest."""
    try:
        init, status, *files = _only_descriptors(init, status, files)
        os.chdir(os.environ["TMPDIR"])
        structure = struct.pack("Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3, no capability
        check(LIBC.capset(*structure), "no capabilities")
        check(LIBC.prctl(_PR_SET_DUMPABLE, 0), "no core dumps")
        check(LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        instructions = bytes.fromhex(settings["filter"])
        code = ctypes.create_string_buffer(instructions)
        header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
        number = settings["calls"]["seccomp"]
        listener = check(LIBC.syscall(number, _FILTER_MODE, _NEW_LISTENER, header), "filter of system calls")
        socket.send_fds(init, [b"."], [listener])
        os.close(listener)
        init.recv(1)
        init.close()
        # Only now: a low limit of open files also limits those that all processes of the user are sending.
        limit_resources(request)
        os.write(status, b"ready")
        os.close(status)
    except BaseException as error:
        report_failure(status, error)
    try:
        settings["guests"][request["guest"]](files)
    finally:
        os._exit(0)


def _only_descriptors(init: socket.socket, status: int, files: list[int]) -> tuple[Any, ...]:
    """Move the descriptors to 3, 4 ..., and close all others."""
    first = 64
    new_descriptors = [
        os.dup2(descriptor, first + index) for index, descriptor in enumerate((init.fileno(), status, *files))
    ]
    init.detach()
    os.closerange(3, first)
    low = [os.dup2(descriptor, 3 + index) for index, descriptor in enumerate(new_descriptors)]
    os.closerange(3 + len(low), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return (socket.socket(fileno=low[0]), *low[1:])


def limit_resources(request: dict[str, Any]) -> None:
    """Set the limits of the only process of a sandbox."""
    for kind, limit in (
        (resource.RLIMIT_CPU, max(1, round(request["seconds"]))),
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["disk_bytes"]),
        (resource.RLIMIT_NOFILE, request["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Isolate this process, say "ready" or what failed, and serve."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(requests.recv(1 << 16))
    try:
        for name in _COMMON_MODULES.split():
            __import__(name)
        sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120
        settings["guests"] = importlib.import_module("sandbox_guest").GUESTS
        del sys.path[0]
        sys.argv = [""]
        isolate(requests, settings["calls"]["mount_setattr"])
        sys.path[:] = [path for path in sys.path if Path(path).exists()]
    except BaseException as error:
        requests.send(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    gc.freeze()  # copies of this process share its memory
    requests.send(b"ready")
    with suppress(OSError):
        serve(requests, settings)
    os._exit(0)


if __name__ == "__main__":
    main()
