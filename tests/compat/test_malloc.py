"""glibc's `malloc_trim`, which returns freed memory to the operating system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jingu
from jingu.compat import malloc as malloc_compat

# Many small blocks on another thread, whose arena glibc does not shrink while a later block is in use.
PROGRAM = """
import ctypes, os, psutil, threading
import jingu.compat.malloc
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
process = psutil.Process()

def allocate():
    blocks = [library.malloc(4000) for _ in range(15_000)]
    for block in blocks[:-1]:
        library.free(block)

thread = threading.Thread(target=allocate)
thread.start()
thread.join()
before = process.memory_info().rss
assert jingu.compat.malloc.release_free_memory()
print(before - process.memory_info().rss)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is the C library of Linux")
def test_free_memory_goes_back_to_the_operating_system() -> None:
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(jingu.__file__).parents[1])
    assert int(result.stdout) > 30_000_000
    assert isinstance(malloc_compat.release_free_memory(), bool)
