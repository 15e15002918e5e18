"""The reference model, and its log-probabilities of answers: computed once, and stored with the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.answers import AnswerBatch, AnswerScorer
from jingu.checkpoint.resume import complete_steps
from jingu.config.batch_plan import MAX_AUTO_TOKENS
from jingu.config.sections.pairs import DpoSettings
from jingu.config.sections.tasks import KtoSettings
from jingu.data.batch import Batch
from jingu.data.permutation import Int64Array
from jingu.data.preference_data import PreferenceDataset
from jingu.errors import JinguError, pluralize
from jingu.formats.models import open_model
from jingu.formats.run_inputs import record_model
from jingu.formats.stored_model import StoredModel
from jingu.parallel.layout import Layout
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import data_rank, num_data_ranks
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.zero import eval_mode
from jingu.runtime.checksums import NO_RECORDS, Records, digest_records, parse_records
from jingu.runtime.device import force_eager
from jingu.runtime.files import create_folder_atomically, write_text_atomically
from jingu.runtime.log import log_info
from jingu.runtime.ranks import gather_from_all
from jingu.text.tokenizer import Tokenizer
from jingu.training.batch_transforms import to_device
from jingu.training.precision import choose_precision
from jingu.training.run import Run
from jingu.training.session import training_layout
from jingu.training.step import sum_over_ranks

RECORD = "reference.json"
_FILE = "log_probs.safetensors"
# Changes when other answers are mismatched, so that stored log-probabilities of the previous ones are not used.
_MISMATCH_VERSION = 2


@dataclass(frozen=True)
class References:
    """Log-probabilities of the stored answers under the reference model.

    Attributes:
        tables: [stored rows, 2] by data set: columns for the chosen and the rejected answer. With labeled answers
            (KTO), the second column is for the mismatched answer, which belongs to a row with another prompt.
        has_labels: whether answers are labeled.
    """

    tables: dict[Path, Tensor]
    has_labels: bool = False

    def attach(
        self, batch: Batch, datasets: Sequence[PreferenceDataset], rows: Int64Array, *, is_mismatched: bool = False
    ) -> AnswerBatch:
        """Add the log-probabilities of its answers to a batch; 0 for data sets without a table.

        Args:
            datasets: the data set of each row.
            rows: the index of each row in its data set.
            is_mismatched: whether the batch has the mismatched answers.
        """
        assert batch.documents is not None
        # Answers 2n and 2n + 1 are those of stored row n.
        num_answers = 2 * (max(int(batch.documents.max()), 0) // 2 + 1)
        reference_BK = torch.zeros(len(batch.tokens), num_answers, dtype=torch.float64)
        for index, (dataset, row) in enumerate(zip(datasets, rows.tolist(), strict=True)):
            table = self.tables.get(_split_path(dataset))
            if table is not None:
                values_N2 = table[dataset.row_documents(row)]
                if self.has_labels:
                    # A row has one answer, whose index is 0 or 1 by its label: fill both columns with its value.
                    values_N2 = values_N2[:, [int(is_mismatched)]].expand(-1, 2)
                values_K = values_N2.flatten()
                reference_BK[index, : len(values_K)] = values_K
        return AnswerBatch(**vars(batch), reference=reference_BK)


def _split_path(dataset: PreferenceDataset) -> Path:
    return dataset.dataset.path / dataset.dataset.split


def load_references(run: Run, mesh: DeviceMesh, scorer: AnswerScorer, path: str | None) -> References:
    """Return the log-probabilities of all answers of the run's data, and compute those that are not stored yet.

    The first start of a run records the fingerprint of the reference model in the run's folder. Later starts need only
    the stored log-probabilities, not the model, and cannot silently use another model.

    Args:
        path: the reference model; None takes the model that the run starts from.

    Raises:
        JinguError: the reference model cannot be opened, or has another vocabulary.
    """
    source = str(path or run.config.initialize.from_)
    record = run.folder / RECORD
    fingerprint = None
    files: Records = NO_RECORDS
    if record.is_file():
        fingerprint = json.loads(record.read_text(encoding="utf-8"))["fingerprint"]
    stored_model = None
    if fingerprint is None:
        stored_model = open_model(Path(source))
        fingerprint, files = fingerprint_model(stored_model, run)
    datasets = [dataset for dataset in run.source.sources if isinstance(dataset, PreferenceDataset)]
    datasets += [rows.supervised_rows for rows in run.validation if isinstance(rows.supervised_rows, PreferenceDataset)]
    task = run.config.task
    has_labels = isinstance(task, KtoSettings)
    tail_weight = task.tail_weight if isinstance(task, DpoSettings) else 1.0
    folders = {_split_path(dataset): _folder(dataset, fingerprint, has_labels, tail_weight) for dataset in datasets}
    missing = [dataset for dataset in datasets if not (folders[_split_path(dataset)] / _FILE).is_file()]
    if missing:
        stored_model = stored_model or open_model(Path(source))
        _check_model(stored_model, run, fingerprint)
        computed_tables = compute_tables(run, mesh, scorer, stored_model, missing, is_initial=path is None)
        if torch.distributed.get_rank() == 0:
            for dataset, table in zip(missing, computed_tables, strict=True):
                with create_folder_atomically(folders[_split_path(dataset)]) as partial:
                    save_file({"log_probs": table}, partial / _FILE)
        # A barrier: no rank may read a folder before it exists.
        sum_over_ranks(torch.zeros((), device=mesh.device_type))
    if torch.distributed.get_rank() == 0 and not record.is_file():
        _write_record(record, source, fingerprint, files)
    tables = {split: load_file(folder / _FILE)["log_probs"] for split, folder in folders.items()}
    return References(tables, has_labels)


def load_reference_model(run: Run, mesh: DeviceMesh, path: str | None, where: str) -> tuple[ParallelModel, str]:
    """Return the reference model or the teacher, sharded like the policy, and its fingerprint. Every rank calls this.

    The first start of a run records the fingerprint in the run's folder.

    Args:
        path: the model; None takes the model that the run starts from.
        where: the setting that names it, for errors.

    Raises:
        JinguError: there is no such model, it has another vocabulary, or it has changed since the run started.
    """
    path = path or run.config.initialize.from_
    if path is None:
        what = "a run that starts from random weights has no reference model."
        raise JinguError(what, where=where, fix="Set it, or initialize.from.")
    stored_model = open_model(Path(path))
    check_vocabulary(stored_model, run, where)
    fingerprint, files = fingerprint_model(stored_model, run)
    _pin_reference(run, path, fingerprint, files, where)
    precision = choose_precision(run.config.precision, torch.device(mesh.device_type))
    layout = training_layout(run.config, compile=False)
    reference = materialize(stored_model.spec, mesh, layout, precision, stored_model.read)
    reference.requires_grad_(False)
    return reference, fingerprint


def _write_record(record: Path, path: str, fingerprint: str, files: Records) -> None:
    """Write what a run knows of its reference: its path, its fingerprint, and the checksums of its files."""
    content = {"model": path, "fingerprint": fingerprint, "files": [file.to_json() for file in files.values()]}
    write_text_atomically(record, json.dumps(content))


def _pin_reference(run: Run, path: str, fingerprint: str, files: Records, where: str) -> None:
    """Record the fingerprint of the reference, or compare it with the recorded one once the run has a checkpoint.

    A path may lead to another model after a while, such as the newest checkpoint of a run that goes on.
    """
    record = run.folder / RECORD
    expected_fingerprint = fingerprint
    if record.is_file() and complete_steps(run.checkpoints):
        expected_fingerprint = json.loads(record.read_text(encoding="utf-8"))["fingerprint"]
    # The folder of the run may be on the first rank's machine alone.
    if gather_from_all(expected_fingerprint)[0] != fingerprint:
        raise JinguError(
            f"{path} is not the model with which the run started: its files, or the run's precision, have changed.",
            where=where,
            fix=f"Restore it, or name a copy of it; or, to go on with this one, delete {record}.",
        )
    if torch.distributed.get_rank() == 0 and not (record.is_file() and complete_steps(run.checkpoints)):
        _write_record(record, path, fingerprint, files)


def fingerprint_model(model: StoredModel, run: Run) -> tuple[str, Records]:
    """Return a hash of all that log-probabilities depend on except the data: spec, weights, precision, quantization.

    Also return the records of the model's files, by which files that do not change need not be read again.
    """
    record = run.folder / RECORD
    known_records: Records = NO_RECORDS
    if record.is_file():
        known_records = parse_records(json.loads(record.read_text(encoding="utf-8")).get("files"))
    records = record_model(model, known_records)
    spec = f"{model.spec.to_json()} {run.config.precision.type} {run.spec.quantization}"
    digest = xxhash.xxh3_128_hexdigest(f"{spec} {digest_records(records)}".encode())
    return digest, {file.path: file for file in records}


def _folder(dataset: PreferenceDataset, fingerprint: str, has_labels: bool, tail_weight: float = 1.0) -> Path:
    """Return the folder of the log-probabilities of a split; its name has a hash of the model and the data.

    Args:
        has_labels: whether answers are labeled, so that those of mismatched answers are stored too.
        tail_weight: weight of tokens beyond the common length of a pair.
    """
    split = dataset.dataset.split
    entry = dataset.dataset.manifest.split(split)
    checksums = " ".join(shard.bin_xxh3 for shard in (*entry.shards, *entry.sidecars))
    version = f" {_MISMATCH_VERSION}" if has_labels else ""
    if tail_weight != 1.0:
        version += f" tails {tail_weight}"
    key = xxhash.xxh3_64_hexdigest(f"{fingerprint} {checksums}{version}".encode())
    return dataset.dataset.path / f"reference-{split}-{key}"


def check_vocabulary(model: StoredModel, run: Run, where: str) -> None:
    """Raise JinguError if the vocabulary of a model differs from that of the run in its size or in a token.

    Either tokenizer may lack tokens that the other has, such as special ones. A model without a tokenizer passes.

    Args:
        where: the setting that names the model.
    """
    if model.spec.vocab_size != run.spec.vocab_size:
        raise JinguError(
            f"the model has a vocabulary of {model.spec.vocab_size:,} entries, and the run's model one of "
            f"{run.spec.vocab_size:,}.",
            where=where,
            fix="Choose a model with the run's tokenizer.",
        )
    if model.tokenizer_folder is None:
        return
    ids = run.tokenizer.vocab()
    pieces = {token_id: piece for piece, token_id in ids.items()}
    other_ids = Tokenizer.load(model.tokenizer_folder).vocab()
    conflicts = sum(
        ids.get(piece, token_id) != token_id or pieces.get(token_id, piece) != piece
        for piece, token_id in other_ids.items()
    )
    if conflicts:
        raise JinguError(
            f"{conflicts:,} of the {len(other_ids):,} tokens of the model have other ids in the run's tokenizer.",
            where=where,
            fix="Choose a model with the run's tokenizer.",
        )


def _check_model(model: StoredModel, run: Run, fingerprint: str) -> None:
    """Raise JinguError for a model with another fingerprint or vocabulary."""
    check_vocabulary(model, run, "task.reference")
    if fingerprint_model(model, run)[0] != fingerprint:
        raise JinguError(
            "the reference model has changed since the run started, and its stored log-probabilities are gone.",
            where=model.where,
            fix="Restore the model, or the folders reference-* of the data set, or start a new run (name=...).",
        )


def compute_tables(
    run: Run,
    mesh: DeviceMesh,
    scorer: AnswerScorer,
    reference: StoredModel,
    datasets: Sequence[PreferenceDataset],
    *,
    is_initial: bool,
) -> list[Tensor]:
    """Return the log-probabilities [stored rows, 2] of the answers of each data set under a model, on every rank.

    The model is sharded like the run's own model, and freed before that is built.

    Args:
        is_initial: whether the model is the one that the run starts from.
    """
    config = run.config
    device = torch.device(mesh.device_type)
    spec = reference.spec
    if is_initial:
        # The run's base model without adapters, quantized as in the run.
        spec = run.spec.model_copy(update={"adapter": None, "frozen_parameters": ()})
    precision = choose_precision(config.precision, device)
    model = materialize(spec, mesh, Layout(config.parallel), precision, reference.read)
    count = max(1, MAX_AUTO_TOKENS // config.batch.sequence_length)
    if config.batch.micro_batch_size != "auto":
        count = config.batch.micro_batch_size
    # Several ranks compute the same rows; only one of them fills the table, since tables are summed over all ranks.
    fills = all(mesh.get_local_rank(axis) == 0 for axis in ("pipeline", "context", "tensor"))
    has_labels = isinstance(config.task, KtoSettings)
    tables = []
    for dataset in datasets:
        log_info(f"Computing log-probabilities of {pluralize(len(dataset.row_ends), 'row')} under {reference.where}.")
        num_rows = len(dataset.row_ends)
        table = torch.zeros(len(dataset.dataset.document_lengths()), 2, dtype=torch.float64, device=device)
        with eval_mode(model), force_eager():
            # Every rank takes part in every forward pass, since each gathers sharded parameters.
            for start in range(0, num_rows, count * num_data_ranks(mesh)):
                first = start + data_rank(mesh) * count
                rows = np.minimum(np.arange(first, first + count), num_rows - 1)
                batches = [dataset.read(rows).to_batch()]
                if has_labels:
                    batches.append(dataset.read_mismatched(rows).to_batch())
                for column, batch in enumerate(batches):
                    answers = References({}).attach(run.source.trim(batch), [dataset] * count, rows)
                    policy_BK = scorer.score(model, to_answer_device(answers, device)).policy.to(table.dtype)
                    for index in range(min(count, num_rows - first) if fills else 0):
                        documents = dataset.row_documents(int(rows[index]))
                        values_N2 = policy_BK[index, : 2 * len(documents)].view(-1, 2)
                        if has_labels:
                            # A row has one answer; the value of the other index is 0.
                            table[documents, column] = values_N2.sum(1)
                        else:
                            table[documents] = values_N2
        tables.append(sum_over_ranks(table).cpu())
    return tables


def to_answer_device(batch: AnswerBatch, device: torch.device) -> AnswerBatch:
    """Copy a batch of answers to the device."""
    moved_batch = to_device(batch, device)
    assert isinstance(moved_batch, AnswerBatch)
    return moved_batch
