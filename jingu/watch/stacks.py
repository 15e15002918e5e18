"""The stacks of a rank's threads, as faulthandler dumps them, and the thread that the others wait for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Files in which a thread waits for another one, or has nothing to do.
_WAITING = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py")
# Threads of jingu that only wait for a signal or for time.
_SERVICES = (
    "/jingu/watch/activity.py",
    "/jingu/runtime/signals.py",
    "/jingu/runtime/spinning.py",
    "/selectors.py",
    "/tqdm/_monitor.py",
)
# Where the code is whose threads deliver what a phase waits for.
_PROVIDERS = {"data": "/jingu/data/", "save": "/jingu/checkpoint/", "rollout": "/jingu/align/"}
# A person is looking at the process.
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/debugpy/")


def read_stacks(text: str) -> dict[str, list[str]]:
    """Return the stack of each thread from the newest dump, the innermost function first, as `path:line function`.

    Args:
        text: faulthandler's dumps, one after another; each has all threads.

    Returns:
        Stacks by the identifier of the thread in hexadecimal.
    """
    stacks: dict[str, list[str]] = {}
    frames: list[str] = []
    for line in text.splitlines():
        heading = re.match(r"(?:Current t|T)hread 0x([0-9a-f]+)", line)
        if heading is not None:
            if heading[1] in stacks:  # the next dump
                stacks = {}
            frames = stacks[heading[1]] = []
            continue
        match = re.match(r'  File "(.*)", line (\d+) in (.*)', line)
        if match is not None:
            frames.append(f"{match[1]}:{match[2]} {match[3]}")
    return stacks


def find_blocked_stack(stacks: Mapping[str, Sequence[str]], main: str, phase: str) -> list[str]:
    """Return the stack that explains what a rank does: of its main thread, or of the thread that this one waits for.

    Args:
        main: identifier of the main thread.
        phase: the phase of the rank, which says what the main thread waits for.
    """
    main_stack = list(stacks.get(main, ()))
    if not main_stack or not _is_in(main_stack[0], _WAITING):
        return main_stack
    other_stacks = [
        list(stack)
        for thread, stack in stacks.items()
        if thread != main
        and stack
        and not _is_in(stack[0], _WAITING)
        and not any(_is_in(frame, _SERVICES) for frame in stack)
    ]
    provider = _PROVIDERS.get(phase, "/jingu/")
    other_stacks.sort(key=lambda stack: not any(provider in frame for frame in stack))
    return other_stacks[0] if other_stacks else main_stack


def is_debugged(stack: Sequence[str]) -> bool:
    """Return whether a person looks at the process with a debugger."""
    return any(_is_in(frame, _DEBUGGERS) for frame in stack)


def describe_place(stack: Sequence[str]) -> str:
    """Return the innermost function, and the one of jingu or of the user that has called it in a library."""
    if not stack:
        return ""
    text = f" in {_shorten(stack[0])}"
    place = next((frame for frame in stack if "/lib/python" not in frame and not frame.startswith("<")), stack[0])
    return text if place == stack[0] else f"{text}, called in {_shorten(place)}"


def _is_in(frame: str, files: Sequence[str]) -> bool:
    path = frame.rpartition(":")[0]
    return any(name in path if name.endswith("/") else path.endswith(name) for name in files)


def _shorten(frame: str) -> str:
    """Return a frame with the last three parts of its path."""
    path, _, place = frame.rpartition(":")
    return f"{'/'.join(path.split('/')[-3:])}:{place}"
