"""`jingu data build`: convert a corpus to shards of token ids.

The corpus is divided into units of work, which depend on the corpus alone and are written in its order. The result
therefore does not depend on the number of workers, on interruptions or on the number of jobs that share the work.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, RowSettings
from jingu.data.dataset_manifest import CORPUS_FILES_NAME, MANIFEST_NAME, DatasetManifest, check_files, print_summary
from jingu.data.indexed_dataset import best_dtype
from jingu.data.shard_writer import EncodedDocuments, UnitEncoder, UnitFile, encode_unit, hash_document, write_splits
from jingu.data.task_pool import Executor, map_tasks
from jingu.errors import JinguError, pluralize
from jingu.runtime.files import create_folder_atomically, write_error, write_text_atomically
from jingu.runtime.gpus import num_usable_cores
from jingu.text.corpus import find_files, plan_units, validate_sources
from jingu.text.document_reader import CorpusDocument, ReadCounts, Span, read_documents
from jingu.text.identity import Identity, identify_documents, load_inputs
from jingu.text.tokenizer import Tokenizer

# A worker passes documents on as soon as it has this many ids: only a longer document takes more memory.
MAX_BUFFERED_IDS = 1 << 22
PROGRESS_NAME = "progress.json"
UNITS_NAME = "units"
SKIPPED_NAME = "skipped.txt"
# Hashes of documents that must be for validation and for training, for any validation fraction.
MIN_HASH = 1
MAX_HASH = 2**64 - 1
# A build that fails after this time keeps its finished units, so that the next one can resume.
RESUMABLE_AFTER_SECONDS = 10.0


# Replaces a mixture of tasks in the settings of a corpus with its rendered texts. Returns the settings to use and the
# mixture's provenance, or the same settings and None if there is no mixture.
Render = Callable[[DataSettings], tuple[DataSettings, dict[str, Any] | None]]


@dataclass(frozen=True)
class BuildJob:
    """A data set to build in `data.path`, and what determines its content."""

    data: DataSettings
    tokenizer: Tokenizer
    identity: Identity
    encode: UnitEncoder
    units: Sequence[Any]
    # Bytes of each unit.
    sizes: Sequence[int]
    # Number of processes on this machine.
    workers: int
    # Names of the corpus files, if sidecars refer to them by index.
    files: tuple[str, ...] = ()
    executor: Executor = "processes"

    @property
    def path(self) -> Path:
        return Path(self.data.path)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the manifest stores."""
        return self.identity.settings


def build(
    config: RunConfig,
    part: tuple[int, int] | None = None,
    on_error: str | None = None,
    executor: Executor = "processes",
    render: Render = lambda data: (data, None),
) -> None:
    """Build the data set of each source of the run in its `path`, unless the same one is already there.

    Args:
        part: (i, n) encodes the i-th of n parts (from 1). Each part is a job; the last one to finish joins all parts.
        on_error: overrides `data.on_error`.
        executor: processes of this machine, or tasks on a Ray cluster.
        render: replaces a mixture file in `data.input` with texts; see `Render`.
    """
    if isinstance(config.data.objective, RowSettings):
        raise JinguError(
            f"this command does not build {config.data.objective.type} data.",
            where="data.objective",
            fix=f"Run `jingu {config.data.objective.BUILD_COMMAND}`.",
        )
    data = config.data if on_error is None else config.data.model_copy(update={"on_error": on_error})
    sources = validate_sources(data)
    for source in sources:
        # Of several sources, one without `input` is a data set that exists already.
        if source.input or len(sources) == 1:
            corpus, mixture = render(data.for_source(source))
            build_source(corpus, Path(config.tokenizer.path), part, executor, mixture)


def build_source(
    data: DataSettings,
    tokenizer_path: Path,
    part: tuple[int, int] | None,
    executor: Executor = "processes",
    mixture: dict[str, Any] | None = None,
) -> None:
    """Build one data set, or a part of it.

    Args:
        mixture: provenance of the mixture of tasks that the texts come from; None if there is none.
    """
    tokenizer = Tokenizer.load(tokenizer_path)
    files = find_files(data)
    path = Path(data.path)
    if part is None or (path / MANIFEST_NAME).is_file():
        identity = identify_documents(data, tokenizer, files, load_inputs(path), mixture)
    else:
        # The first part reads the whole corpus for its checksums; the others find them here.
        units_folder = _parts_folder(path)
        units_folder.mkdir(parents=True, exist_ok=True)
        with _acquire_lock(units_folder):
            identity = identify_documents(data, tokenizer, files, load_inputs(path, units_folder), mixture)
            identity.save_inputs(units_folder)
    if is_already_built(path, identity):
        return
    units = plan_units(files)
    # If the corpus is a single text, its last lines are for validation.
    is_single_text = len(files) == 1 and files[0].kind == "text" and data.documents == "file"
    max_workers = num_usable_cores() if data.num_workers == "auto" else data.num_workers
    job = BuildJob(
        data,
        tokenizer,
        identity,
        partial(_encode_documents, tokenizer_path.absolute(), tokenizer.identity(), data, is_single_text),
        units,
        sizes=[sum(span.end - span.start for span in unit) for unit in units],
        workers=min(max_workers, max(len(units), 1)),
        files=tuple(file.path for file in files),
        executor=executor,
    )
    start = time.monotonic()
    try:
        result = run_build(job) if part is None else _build_part(job, *part)
    except OSError as error:
        # Only of a part: otherwise create_folder_atomically has turned it into a JinguError.
        raise write_error(error, job.path, "run the command again (it resumes)") from error
    if result is not None:
        builder = "a Ray cluster" if executor == "ray" else pluralize(job.workers, "process")
        print(f"data: built in {data.path} in {time.monotonic() - start:.1f} s by {builder}.")
        print_summary(result[0])


def is_already_built(path: Path, identity: Identity) -> bool:
    """Return whether `path` contains the data set of this identity, and print its summary if so.

    Raises:
        JinguError: `path` contains another data set, or an incomplete one.
    """
    manifest = DatasetManifest.load(path)
    if manifest is None:
        return False
    fix = "Delete the folder to build it again, or set data.path to another folder."
    identity.refuse_changes(manifest.settings, "the data set here was built", path, fix)
    check_files(path, manifest.train, manifest.validation)
    print(f"data: already built in {path}.")
    print_summary(manifest)
    return True


def run_build(job: BuildJob) -> tuple[DatasetManifest, ReadCounts]:
    """Build a data set, and return its manifest and the counts of documents.

    Resumes from the units that an earlier process encoded with the same settings.
    """
    with create_folder_atomically(job.path, PROGRESS_NAME) as folder:
        progress = folder / PROGRESS_NAME
        units = folder / UNITS_NAME
        # Units that were encoded with other settings cannot be used.
        if progress.is_file() and json.loads(progress.read_text(encoding="utf-8")) != job.settings:
            progress.unlink()
            shutil.rmtree(units, ignore_errors=True)
        units.mkdir(exist_ok=True)
        start = time.monotonic()
        for _ in _encode_units(job, units, range(len(job.units))):
            # With a progress file, create_folder_atomically keeps the folder when the build fails.
            if time.monotonic() - start >= RESUMABLE_AFTER_SECONDS and not progress.is_file():
                write_text_atomically(progress, json.dumps(job.settings))
        # Delete unfinished shards of a killed process.
        for path in {*folder.iterdir()} - {progress, units}:
            path.unlink()
        result = _write_dataset(job, units, folder)
        shutil.rmtree(units)
        progress.unlink(missing_ok=True)
    return result


def _build_part(job: BuildJob, number: int, parts: int) -> tuple[DatasetManifest, ReadCounts] | None:
    """Encode one of the parts, and join all parts if this one finished last."""
    units = _parts_folder(job.path)
    units.mkdir(parents=True, exist_ok=True)
    progress = units / PROGRESS_NAME
    with _acquire_lock(units):
        if progress.is_file():
            settings = json.loads(progress.read_text(encoding="utf-8"))
            fix = "Delete the folder, and build all parts again."
            job.identity.refuse_changes(settings, "other parts here were built", units, fix)
        else:
            write_text_atomically(progress, json.dumps(job.settings))
    count = len(job.units)
    for _ in _encode_units(job, units, range(count * (number - 1) // parts, count * number // parts)):
        pass
    try:
        return _join_parts(job, units, number, parts)
    except FileNotFoundError:
        # Another job joined the parts and deleted their folder before this one could lock it.
        if not is_already_built(job.path, job.identity):
            raise
        return None


def _parts_folder(path: Path) -> Path:
    """Return the folder of the parts of a data set that several jobs build."""
    return path.with_name(f"{path.name}.parts")


def _join_parts(job: BuildJob, units: Path, number: int, parts: int) -> tuple[DatasetManifest, ReadCounts] | None:
    """Write the data set if all units are encoded."""
    # Two jobs can finish at the same time.
    with _acquire_lock(units):
        if is_already_built(job.path, job.identity):
            return None
        count = len(job.units)
        missing = sum(not UnitFile.path(units, index).is_file() for index in range(count))
        if missing:
            print(f"data: part {number} of {parts} is encoded; {missing:,} of {count:,} units of work remain.")
            return None
        with create_folder_atomically(job.path) as folder:
            result = _write_dataset(job, units, folder)
        shutil.rmtree(units)
    return result


@contextmanager
def _acquire_lock(folder: Path) -> Iterator[None]:
    """Acquire the lock of the folder, waiting for other jobs."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _encode_units(job: BuildJob, folder: Path, numbers: range) -> Iterator[None]:
    """Encode the units that `folder` lacks, with a progress bar, and yield after each of them."""
    missing = [number for number in numbers if not UnitFile.path(folder, number).is_file()]
    if len(missing) < len(numbers):
        num_done = len(numbers) - len(missing)
        print(f"data: resuming in {job.path} after {num_done:,} of {len(numbers):,} units of work.")
    tasks = [(number, job.units[number]) for number in missing]
    results = map_tasks(partial(encode_unit, folder, job.encode), tasks, job.workers, job.executor)
    total = sum(job.sizes[number] for number in numbers)
    remaining = sum(job.sizes[number] for number in missing)
    bar = tqdm(total=total, initial=total - remaining, unit="B", unit_scale=True, desc="data", disable=None)
    with bar, closing(results):
        for number, _ in zip(missing, results, strict=True):
            bar.update(job.sizes[number])
            yield


def _write_dataset(job: BuildJob, units: Path, folder: Path) -> tuple[DatasetManifest, ReadCounts]:
    """Write all files of the data set into `folder`. Raises JinguError if the corpus has changed meanwhile."""
    job.identity.check_inputs()
    unit_files = [UnitFile(UnitFile.path(units, number)) for number in range(len(job.units))]
    dtype = best_dtype(job.tokenizer.vocab_size)
    train, validation, counts = write_splits(unit_files, folder, dtype, job.data)
    manifest = DatasetManifest(
        tokenizer=job.tokenizer.fingerprint(),
        vocab_size=job.tokenizer.vocab_size,
        eos_token_id=job.tokenizer.eos_token_id,
        dtype=dtype,
        settings=job.settings,
        train=train,
        validation=validation,
        empty=counts.empty,
        invalid=counts.invalid,
        replaced=counts.replaced,
        skipped=len(counts.skipped),
        duplicates=counts.copies if job.data.duplicates == "drop" else 0,
    )
    if counts.skipped:
        (folder / SKIPPED_NAME).write_bytes(
            "".join(f"{line}\n" for line in counts.skipped).encode(errors="backslashreplace")
        )
    if job.files:
        (folder / CORPUS_FILES_NAME).write_text(json.dumps(job.files), encoding="utf-8")
    job.identity.save_inputs(folder)
    manifest.save(folder)
    return manifest, counts


@lru_cache(maxsize=1)
def _load_worker_tokenizer(path: Path, identity: str) -> Tokenizer:
    """Return this process's tokenizer; it is loaded for the first unit and cached."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.identity() != identity:
        raise JinguError("the tokenizer changed during the build.", where=path, fix="Run the build again.")
    return tokenizer


def _encode_documents(
    path: Path, identity: str, data: DataSettings, is_single_text: bool, unit: tuple[Span, ...], counts: ReadCounts
) -> Iterator[EncodedDocuments]:
    """Encode the documents of a unit with the tokenizer in `path`, about `MAX_BUFFERED_IDS` ids at a time."""
    tokenizer = _load_worker_tokenizer(path, identity)
    dtype = np.dtype(best_dtype(tokenizer.vocab_size))
    bos = np.array(tokenizer.prompt_prefix_ids if data.add_bos_token else [], dtype)
    eos = np.array([tokenizer.eos_token_id], dtype)
    batch: list[tuple[CorpusDocument, npt.NDArray[Any]]] = []
    buffered_ids = 0
    documents = read_documents(unit, data, counts)
    if is_single_text and data.validation_fraction:
        documents = (part for document in documents for part in _divide_text(document, data.validation_fraction))
    for document in documents:
        # A long document is encoded in parts.
        ids = np.concatenate([bos, *tokenizer.encode_parts(document.text, dtype), eos])
        batch.append((document, ids))
        buffered_ids += len(ids)
        if buffered_ids >= MAX_BUFFERED_IDS:
            yield _pack_documents(batch)
            batch = []
            buffered_ids = 0
    if batch:
        yield _pack_documents(batch)


def _divide_text(document: CorpusDocument, validation_fraction: float) -> list[CorpusDocument]:
    """Return the beginning of a text for training, and its last lines for validation."""
    text = document.text
    target = int(len(text) * (1 - validation_fraction))
    # Cut at the beginning of a line near the target, so that the training part has at least half of its target size.
    cut = text.rfind("\n", max(target // 2, 2 * target - len(text)), target) + 1 or target
    if not 0 < cut < len(text):
        return [document]
    size = len(text[:cut].encode())
    beginning = replace(document, text=text[:cut], bytes=size, hash=MAX_HASH)
    end = replace(document, text=text[cut:], bytes=document.bytes - size, position=size, hash=MIN_HASH)
    return [beginning, end]


def _pack_documents(batch: list[tuple[CorpusDocument, npt.NDArray[Any]]]) -> EncodedDocuments:
    """Return documents and their ids as arrays."""
    return EncodedDocuments(
        ids=np.concatenate([ids for _, ids in batch]),
        lengths=np.array([len(ids) for _, ids in batch]),
        text_bytes=np.array([document.bytes for document, _ in batch]),
        hashes=np.array([document.hash or hash_document(document.text.encode()) for document, _ in batch], np.uint64),
        sidecar=np.array([(document.file.number, document.position) for document, _ in batch]),
    )
