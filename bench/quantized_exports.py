"""Quantized exports for GPUs: size, and the loss in bits per byte, for SmolLM2-135M in bf16.

Argument `tiny` is a quick check with a random Llama.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
from pathlib import Path

from bench.children import run_jingu
from bench.serve import build_tiny_model
from bench.smollm2 import find_smollm2
from jingu.errors import JinguError
from jingu.formats.export import convert
from jingu.formats.quantized_forms import FORMS

# Characters of text whose likelihood is measured.
TEXT_CHARS = 40_000
TASK = """task: text
dataset_path: json
dataset_kwargs: {data_files: {test: text.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


def bits_per_byte(model: Path, folder: Path) -> float:
    """Return the bits per byte of a text about Python, computed in fp32."""
    (folder / "text.yaml").write_text(TASK, encoding="utf-8")
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(encoding="utf-8")[:TEXT_CHARS]
    parts = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts), encoding="utf-8")
    output = folder / "results" / model.name
    words = [str(model), "text.yaml", "--precision", "fp32", "--output", str(output)]
    run_jingu(folder, "evaluate", *words)
    (result,) = json.loads((output / "text.json").read_text(encoding="utf-8"))["results"].values()
    return float(result["value"])


def run(argument: str = "") -> str:
    """Return the table as Markdown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(build_tiny_model(folder)) if argument == "tiny" else find_smollm2(folder)
        plain = folder / "bf16"
        convert(source, plain, "bf16")
        size = _folder_bytes(plain)
        before = bits_per_byte(plain, folder)
        lines = [
            "| `--dtype` | size, MB | of bf16 | bits per byte |",
            "|---|---|---|---|",
            f"| bf16 | {size / 1e6:.0f} | 1.00 | {before:.4f} |",
        ]
        for form in FORMS:
            try:
                convert(plain, folder / form, form)
            except JinguError as error:
                lines.append(f"| {form} | {error.what} | | |")
                continue
            num_bytes = _folder_bytes(folder / form)
            after = bits_per_byte(folder / form, folder)
            cells = (f"{num_bytes / 1e6:.0f}", f"{num_bytes / size:.2f}")
            lines.append(f"| {form} | {' | '.join(cells)} | {after:.4f} ({after - before:+.4f}) |")
    return "\n".join(lines)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    import sys

    print(run(*sys.argv[1:]))
