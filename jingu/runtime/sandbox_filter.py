"""The filter of system calls of the sandbox: a list of what a program may call, compiled by libseccomp."""

from __future__ import annotations

import ctypes
import os

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
