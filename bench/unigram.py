"""CPU seconds to train a Unigram tokenizer on real text: the manual of Perl (Debian's package perl-doc), 8.8 MB.

The argument names another folder with `.pod` or `.txt` files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def run(folder: str = "/usr/share/perl/*/pod") -> str:
    """Return the table: CPU seconds and peak memory of `jingu tokenizer train`, including its child processes."""
    place_of_text = next(Path("/").glob(folder.lstrip("/")), Path(folder))
    files = [str(path) for path in sorted(place_of_text.rglob("*")) if path.suffix in (".pod", ".txt")]
    size = sum(Path(path).stat().st_size for path in files)
    rows = ["| entries | text, MB | CPU s | of it, system | peak memory, MiB |", "|---|---|---|---|---|"]
    for entries in (8_000, 32_000):
        with tempfile.TemporaryDirectory() as place:
            config = Path(place, "run.yaml")
            config.write_text(
                f"tokenizer: {{path: {place}/tokenizer, type: unigram, vocab_size: {entries}}}\n"
                f"data: {{input: {files}, path: {place}/data}}\n"
            )
            words = [sys.executable, "-m", "jingu", "tokenizer", "train", str(config)]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(words)} failed on {folder}; without perl-doc, name a folder of text.")
        total = usage.ru_utime + usage.ru_stime
        rows.append(
            f"| {entries:,} | {size / 1e6:.1f} | {total:.1f} | {usage.ru_stime:.1f} | {usage.ru_maxrss / 1024:.0f} |"
        )
    return "\n".join(rows)
