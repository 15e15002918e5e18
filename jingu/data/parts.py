"""A data set built in parts by jobs of their own, and joined by the last of them."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

from jingu.data.manifest import FILES, Manifest, Split, SplitName
from jingu.data.writing import SKIPPED
from jingu.errors import JinguError
from jingu.runtime.files import new_folder


def part_folder(path: Path, number: int, parts: int) -> Path:
    """Where part `number` (from 1) of a data set lies until all are joined."""
    return path.with_name(f"{path.name}.parts") / f"{number:05d}-of-{parts:05d}"


def join_parts(path: Path, parts: int, settings: dict[str, Any]) -> Manifest | None:
    """Join the parts where all are built, in their order; None where some are not. Their shards stay as they are.

    Raises JinguError where parts were built with other settings.
    """
    folders = [part_folder(path, number, parts) for number in range(1, parts + 1)]
    lock = os.open(folders[0].parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one joins; another that waited finds it done
        if (done := Manifest.load(path)) is not None:
            return done
        built = [Manifest.load(folder) for folder in folders if folder.is_dir()]
        manifests = [manifest for manifest in built if manifest is not None]
        if len(manifests) < parts:
            print(f"data: {len(manifests)} of {parts} parts are built.")
            return None
        if wrong := [
            folder for folder, manifest in zip(folders, manifests, strict=True) if manifest.settings != settings
        ]:
            what = "this part was built with other settings, or of other files."
            raise JinguError(what, where=wrong[0], fix="Delete it, and build it again.")
        with new_folder(path) as place:
            joined = manifests[0].model_copy(
                update={
                    "train": _joined(place, folders, manifests, "train"),
                    "held_out": _joined(place, folders, manifests, "held_out"),
                    **{
                        name: sum(getattr(manifest, name) for manifest in manifests)
                        for name in ("empty", "invalid", "replaced", "skipped", "duplicates")
                    },
                }
            )
            lists = [folder / SKIPPED for folder in folders if (folder / SKIPPED).is_file()]
            if lists:
                (place / SKIPPED).write_text("".join(file.read_text("utf-8") for file in lists), encoding="utf-8")
            shutil.copy(folders[0] / FILES, place)
            joined.save(place)
        shutil.rmtree(folders[0].parent)
        print(f"data: {parts} parts joined in {path}.")
        return joined
    finally:
        os.close(lock)


def _joined(place: Path, folders: list[Path], manifests: list[Manifest], name: SplitName) -> Split:
    """One side of all parts; its files are linked, not copied."""
    joined = Split()
    for folder, manifest in zip(folders, manifests, strict=True):
        split = manifest.split(name)
        for shard, beside in zip(split.shards, split.beside, strict=True):
            number = f"{len(joined.shards):05d}"
            for to, old in ((joined.shards, shard), (joined.beside, beside)):
                new = f"{old.name.rpartition('-')[0]}-{number}"
                for kind in (".bin", ".idx"):
                    (place / f"{new}{kind}").hardlink_to(folder / f"{old.name}{kind}")
                to.append(old.model_copy(update={"name": new}))
    return joined
