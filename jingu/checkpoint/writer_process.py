"""The process that writes checkpoints during training: `python -m jingu.checkpoint.writer_process DESCRIPTOR`.

It shares the memory of the descriptor with the training process, which copies its tensors there and then requests a
checkpoint by a line of JSON on standard input. The answer to each request is a line of JSON on standard output. When
the training process ends, for whatever reason, this process ends too, so that a run never has two writers.

It imports neither torch nor the process group, and does all its work in one thread at a low priority.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from typing import Any

from jingu.checkpoint import save_folder
from jingu.checkpoint.manifest import Manifest
from jingu.checkpoint.remote import checkpoint_path
from jingu.checkpoint.retention import Retention, after_save, before_save
from jingu.checkpoint.save_folder import GetBytes
from jingu.runtime.json_lines import read_requests

# At this priority, training gets about ten times as much time of a core that both use.
NICENESS = 10


def main() -> None:
    """Answer requests until training ends."""
    # These signals are for the training process, which decides what to save before it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    requests = read_requests()
    setup = next(requests)
    plan = Manifest.model_validate(setup["plan"])
    memory = memoryview(b"")
    if setup["bytes"]:
        memory = memoryview(mmap.mmap(int(sys.argv[1]), setup["bytes"]))
    for request in requests:
        problem = _save(request, plan, lambda piece: memory[slice(*piece.bytes)], setup["rank"])
        print(json.dumps(problem), flush=True)


def _save(request: dict[str, Any], plan: Manifest, get_bytes: GetBytes, rank: int) -> str | None:
    """Write this rank's part; on rank 0 also wait for the other parts, complete the checkpoint and delete older ones.

    Returns:
        Why the save failed; None if it succeeded.
    """
    folder = checkpoint_path(request["folder"])
    partial = save_folder.partial_path(folder)
    try:
        if rank == 0:
            before_save(folder)
        save_folder.create_partial(folder, first=rank == 0)
        save_folder.write_part(partial, plan, get_bytes, rank, direct=True)
        if rank == 0:
            save_folder.wait_for_parts(folder, plan.ranks)
            save_folder.finish_save(folder, request["state"], plan.ranks)
    except Exception as error:
        if rank:
            save_folder.write_failure_note(partial, rank, error)
        else:
            # Files that other ranks still write are deleted before the next save.
            save_folder.delete_folder(partial)
        return save_folder.describe_cause(error)
    return after_save(folder, Retention(**request["retention"]), request["copy_to"]) if rank == 0 else None


if __name__ == "__main__":
    main()
