"""The process that writes checkpoints while training goes on: `python -m jingu.checkpoint.writer DESCRIPTOR`.

It shares the memory behind the descriptor with the training process, which copies its tensors there and then asks, by
a line of JSON on the standard input, for a checkpoint. Each request is answered by a line of JSON. Where the training
process ends, however it does, so does this one: two writers never work for one run.

It imports neither torch nor anything of the process group, gives way to training (it is nice), and has one thread that
works.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import sys
import threading
from typing import Any

from jingu.checkpoint.files import (
    Data,
    begin,
    cause_of,
    finish_save,
    leave_note,
    partial_name,
    remove,
    wait_for_parts,
    write_part,
)
from jingu.checkpoint.manifest import Manifest
from jingu.checkpoint.remote import place
from jingu.checkpoint.resume import Keep, after_save, before_save

NICENESS = 10
"""Where both work, training gets about ten times the processor time."""


def main() -> None:
    """Answer requests until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for training, which decides what is saved before the end
    os.nice(NICENESS)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    begun = requests.get()
    rank, plan = begun["rank"], Manifest.model_validate(begun["plan"])
    memory = memoryview(mmap.mmap(int(sys.argv[1]), begun["bytes"])) if begun["bytes"] else memoryview(b"")
    while True:
        print(json.dumps(_answer(requests.get(), plan, lambda piece: memory[slice(*piece.bytes)], rank)), flush=True)


def _listen(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def _answer(request: dict[str, Any], plan: Manifest, data: Data, rank: int) -> dict[str, Any]:
    """Write a checkpoint; the first rank also waits for the others' parts, and clears away what is not kept."""
    folder, ranks = place(request["folder"]), plan.ranks
    partial, own = partial_name(folder), None
    try:
        try:
            if rank == 0:
                before_save(folder)
            begin(folder, first=rank == 0)
            write_part(partial, plan, data, rank, direct=True)
        except Exception as error:
            own = cause_of(error)
            if rank:
                leave_note(partial, rank, error)
                raise
        if rank == 0:
            wait_for_parts(folder, ranks, own)
            finish_save(folder, request["state"], ranks)
    except Exception as error:
        if rank == 0:
            remove(partial)
        return {"folder": str(folder), "problem": cause_of(error)}
    problem = None if rank else after_save(folder, Keep(**request["keep"]), request["copy_to"])
    return {"folder": str(folder), "problem": problem}


if __name__ == "__main__":
    main()
