"""The process that writes checkpoints while training goes on: `python -m jingu.checkpoint.writer_process DESCRIPTOR`.

It shares the memory of the descriptor with the training process, which copies its tensors there and then requests a
checkpoint by a line of JSON on standard input. Each request is answered by a line of JSON on standard output. When the
training process ends, for whatever reason, so does this one: two writers never work for one run.

It imports neither torch nor anything of the process group, and does all its work in one thread at a low priority.
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

from jingu.checkpoint.manifest import Manifest
from jingu.checkpoint.remote import checkpoint_path
from jingu.checkpoint.retention import Retention, after_save, before_save
from jingu.checkpoint.save_folder import (
    GetBytes,
    create_partial,
    delete_folder,
    describe_cause,
    finish_save,
    partial_path,
    wait_for_parts,
    write_failure_note,
    write_part,
)

# At this priority training gets about ten times as much of a core that both want.
NICENESS = 10


def main() -> None:
    """Answer requests until training ends."""
    # These signals are meant for training, which decides what is saved before it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    setup = requests.get()
    plan = Manifest.model_validate(setup["plan"])
    memory = memoryview(b"")
    if setup["bytes"]:
        memory = memoryview(mmap.mmap(int(sys.argv[1]), setup["bytes"]))
    while True:
        answer = _save(requests.get(), plan, lambda piece: memory[slice(*piece.bytes)], setup["rank"])
        print(json.dumps(answer), flush=True)


def _listen(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue requests; end the process, also in the middle of a save, when training closes the pipe."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def _save(request: dict[str, Any], plan: Manifest, get_bytes: GetBytes, rank: int) -> dict[str, Any]:
    """Write this rank's part; on rank 0 also wait for the others', complete the checkpoint and delete older ones."""
    folder = checkpoint_path(request["folder"])
    partial = partial_path(folder)
    own_problem = None
    try:
        try:
            if rank == 0:
                before_save(folder)
            create_partial(folder, first=rank == 0)
            write_part(partial, plan, get_bytes, rank, direct=True)
        except Exception as error:
            own_problem = describe_cause(error)
            if rank:
                write_failure_note(partial, rank, error)
                raise
        if rank == 0:
            # Also if its own part failed: what the others write must be deleted.
            wait_for_parts(folder, plan.ranks, own_problem)
            finish_save(folder, request["state"], plan.ranks)
    except Exception as error:
        if rank == 0:
            delete_folder(partial)
        return {"folder": str(folder), "problem": describe_cause(error)}
    problem = None
    if rank == 0:
        problem = after_save(folder, Retention(**request["retention"]), request["copy_to"])
    return {"folder": str(folder), "problem": problem}


if __name__ == "__main__":
    main()
