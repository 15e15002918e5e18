"""The search for evaluation rows in a corpus: MB/s per core, and the size of a table of 10^7 n-grams.

The corpora, in JSON Lines, are the source of Python's standard library, repeated twelve times, and random Chinese text
of about that size.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def measure_cpu(function: Callable[[], object]) -> float:
    """Return the CPU time of a call in seconds."""
    start = time.process_time()
    function()
    return time.process_time() - start


def run() -> str:
    """Return the table as Markdown."""
    from jingu.config.sections.data import DataSettings
    from jingu.evaluate.contamination import plan_scan, scan
    from jingu.evaluate.near_copies import NearCopyTable
    from jingu.evaluate.ngrams import NgramTable

    random = np.random.default_rng(0)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    english = [file.read_text(encoding="utf-8") for file in library] * 12
    common = [chr(code) for code in range(0x4E00, 0x5A00)]
    chinese = ["".join(random.choice(common, 20_000)) + "。" for _ in range(len(english) // 3)]
    lines = ["| measure | result | target |", "|---|---|---|"]
    hashes = np.unique(random.integers(0, 2**64, 10_000_000, dtype=np.uint64))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        table = NgramTable(hashes, (13,))
        # 10,000 questions of 30 words of the English texts, one in ten of them as it stands there.
        words = " ".join(english[:200]).split()
        groups = [words[at : at + 30] for at in range(0, 300_000, 30)]
        rows = [[" ".join(random.permutation(group) if at % 10 else group)] for at, group in enumerate(groups)]
        near_table = NearCopyTable.build(rows)
        size = (table.hashes.nbytes + table.filter.nbytes) / 1e6
        lines.append(f"| table of 10^7 n-grams | {size:.0f} MB | 200 MB |")
        for name, texts in {"English": english, "Chinese": chinese}.items():
            data = folder / f"{name}.jsonl"
            data.write_text(
                "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8"
            )
            megabytes = sum(len(text.encode()) for text in texts) / 1e6
            settings = DataSettings()
            units, _ = plan_scan([str(data)], settings, None)
            tables = table, near_table
            seconds = measure_cpu(lambda: scan(tables, units, settings, (folder / "work", name), 1))  # noqa: B023
            speed = megabytes / seconds
            lines.append(f"| {name}, {megabytes:.0f} MB of text in JSON Lines | {speed:.0f} MB/s a core | 20 MB/s |")
    return "\n".join(lines)
