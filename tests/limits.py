"""How long tests wait, and ports that nobody else takes."""

from __future__ import annotations

import os
import random
import socket

# Seconds that a test waits for what must happen. Only a hang reaches it, so it suits the slowest machine.
PATIENCE = 1500.0

# Below the ports that the kernel hands out by itself (Linux: 32768 and above), and above the well-known ones.
_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """Return a port on which nobody listens, for a process that will.

    A port that the kernel chose could be handed out again, for a connection of another test, before the process
    listens on it: then one node fails to start, and the other waits for it in vain.
    """
    candidates = random.Random(os.urandom(8))
    while True:
        port = candidates.choice(_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
