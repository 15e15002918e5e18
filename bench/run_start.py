"""The start of a run over a large corpus: seconds until it knows that nothing has changed since the data were built.

The corpus is 100 sparse files of 1 GB, which take no space on the disk. Their checksum is that of all their bytes, read
once from one of them, as all are equal. A byte that is written afterwards has to be noticed.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

FILES, SIZE = 100, 1_000_000_000
TINY_FILES, TINY_SIZE = 10, 100_000


def run(size: str = "") -> str:
    """Return the table: wall-clock and CPU time of the comparison at the start of a run."""
    from jingu.config.schema import RunConfig
    from jingu.data.build import build
    from jingu.errors import JinguError
    from jingu.runtime import checksums
    from jingu.text.corpus import find_files
    from jingu.text.identity import identify_documents
    from jingu.text.tokenizer import Tokenizer
    from jingu.text.tokenizer_commands import train
    from jingu.training.input_checks import check_data

    count, num_bytes = (TINY_FILES, TINY_SIZE) if size == "tiny" else (FILES, SIZE)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "text").mkdir()
        files = [place / "text" / f"part-{number:03d}.txt" for number in range(count)]
        for number, file in enumerate(files):
            file.write_text(f"Text of file {number}. " * 9)
        data = {"input": str(place / "text"), "path": str(place / "data"), "num_workers": 1}
        config = RunConfig.model_validate({"tokenizer": {"path": str(place / "tok"), "vocab_size": 300}, "data": data})
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train(config)
            build(config)
        # 1. Let the data set be one of the large files.
        for file in files:
            with file.open("wb") as stream:
                stream.truncate(num_bytes)
        time.sleep(2.5)  # records of files that have just changed are not trusted
        first = checksums.record_file(files[0])
        known = {}
        for file in files:
            size_and_stamp = checksums._stat(str(file))
            known[str(file)] = replace(first, path=str(file), stamp=size_and_stamp[1])
        tokenizer = Tokenizer.load(place / "tok")
        identity = identify_documents(config.data, tokenizer, find_files(config.data), known)
        identity.save_inputs(place / "data")
        manifest = json.loads((place / "data" / "manifest.json").read_text())
        manifest["settings"] |= identity.settings
        (place / "data" / "manifest.json").write_text(json.dumps(manifest))
        # 2. Compare, as every start of a run does.
        times, cpu_times = [], []
        for _ in range(9):
            started, cpu_started = time.perf_counter(), time.process_time()
            check_data(config, tokenizer, {})
            times.append(time.perf_counter() - started)
            cpu_times.append(time.process_time() - cpu_started)
        # 3. A change is noticed.
        with files[-1].open("r+b") as stream:
            stream.seek(num_bytes // 2)
            stream.write(b"x")
        try:
            check_data(config, tokenizer, {})
        except JinguError:
            pass
        else:
            raise SystemExit("A changed byte was not noticed.")
    return "\n".join(
        [
            "| corpus | comparison, s | CPU time, s |",
            "|---|---|---|",
            f"| {count} files of {num_bytes / 1e9:g} GB | {median(times):.4f} | {median(cpu_times):.4f} |",
        ]
    )
