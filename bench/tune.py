"""Fine-tuning: LoRA compared with transformers, peft and accelerate; packing compared with padding; preparing rows.

Each side runs in its own process. The model has the shape of SmolLM2-135M. `python -m bench.tune FILE` uses real
instruction rows, such as alpaca_en_demo.json of the package llamafactory; otherwise rows of similar lengths are
generated. `tiny` is a quick check, and `preparing` only prepares rows.

Padding works as usual: rows are in random order, and each batch is padded to its longest row (rounded up to a multiple
of an eighth of the sequence length, because blocks are compiled for each length). Apart from packing and padding, both
sides of that table compute in the same way.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.children import measure_in_child
from bench.llama import llama_config
from bench.train_step import step_on_batch

THREADS, BATCH, RANK = 2, 8, 16
SEQUENCE = {"jingu": 256, "peft": 256, "packed": 512, "padded": 512}
"""Sequence length of each side. A third of Alpaca's rows are longer than 256 tokens, a fortieth longer than 512."""
SMOLLM2 = {"num_layers": 30, "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536}
TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 96}
VOCABULARY = 49152
WORDS = "the heap is a list of items in order and we return its smallest one"
ROWS, TINY_ROWS = 100_000, 2_000


@dataclass(frozen=True)
class Measurement:
    """Figures of one side."""

    tokens: float
    """Tokens/s, including padding."""
    trained: float
    """Trained tokens/s."""
    padding: float
    """Share of positions of the batches that are padding."""
    peak_bytes: int


def load_rows(file: str | None) -> list[dict[str, str]]:
    """Return the instruction rows of a file, or random rows with the lengths of real ones.

    Random rows have about 15 words of instruction and 8 to 180 of output.
    """
    if file is not None:
        rows: list[dict[str, str]] = json.loads(Path(file).read_text(encoding="utf-8"))
        return rows
    rng = random.Random(0)
    words = WORDS.split()

    def text(size: int) -> str:
        return " ".join(rng.choices(words, k=size))

    return [{"instruction": text(15), "output": text(int(rng.lognormvariate(4.0, 0.8)) + 8)} for _ in range(1000)]


@contextmanager
def prepare_run(
    rows: list[dict[str, str]], size: dict[str, int], steps: int, length: int, **more: Any
) -> Iterator[Any]:
    """Prepare a run on rows in a temporary folder, with a tokenizer trained on them, and yield its configuration."""
    from jingu.config.load import load_config
    from jingu.text.tokenizer_training import train_tokenizer
    from jingu.tune.prepare import prepare

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        texts = (" ".join(row.values()) for row in rows[:1000])
        train_tokenizer(texts, 8192, special).save(place / "tokenizer")
        settings: dict[str, Any] = {
            "runs_dir": str(place / "runs"),
            "tokenizer": {"path": str(place / "tokenizer")},
            "data.input": str(place / "rows.jsonl"),
            "data.path": str(place / "data"),
            "data.objective": {"type": "supervised", "template": "chatml"},
            "model": {"family": "llama", **size, "vocab_size": VOCABULARY, "tie_word_embeddings": True},
            "batch": {"sequence_length": length, "global_batch_size": BATCH},
            "train.steps": steps,
            "evaluation.every": 0,
            "precision": "{type: bf16}",
            **more,
        }
        (place / "run.yaml").write_text("name: bench\n", encoding="utf-8")
        words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
        config = load_config(place / "run.yaml", words)
        prepare(config)
        yield config


def measure(side: str, size: dict[str, int], steps: int, rows: list[dict[str, str]]) -> Measurement:
    """Measure one side in this process, after two warm-up steps for each sequence length of the batches."""
    import torch

    from jingu.runtime.device import peak_memory
    from jingu.training.run import open_run

    torch.set_num_threads(THREADS)
    objective = {"type": "supervised", "template": "chatml", "packing": "packed" if side == "packed" else "padded"}
    with prepare_run(rows, size, steps, SEQUENCE[side], **{"data.objective": objective}) as config:
        source = open_run(config).source
        batches = [source.batch(step, 0, BATCH) for step in range(steps)]
        step = _peft(size) if side == "peft" else _jingu(size, config)
        for batch in 2 * list({batch.tokens.shape: batch for batch in batches}.values()):
            step(batch)
        started = time.perf_counter()
        for batch in batches:
            step(batch)
        seconds = time.perf_counter() - started
        positions = sum(batch.tokens.numel() for batch in batches)
        trained = sum(int((batch.labels >= 0).sum()) for batch in batches)
        tokens = sum(int((batch.documents >= 0).sum()) for batch in batches)
        peak = peak_memory(torch.device("cpu"))
        return Measurement(positions / seconds, trained / seconds, 1 - tokens / positions, peak)


def _jingu(size: dict[str, int], config: Any) -> Callable[[Any], None]:
    """Return a function that runs a LoRA training step as `jingu train` does, on one rank."""
    import torch

    from jingu.config.sections.model import ModelSettings
    from jingu.model.adapter_specs import Lora
    from jingu.model.resolve import spec_from_settings
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.runtime.device import has_compiler
    from jingu.runtime.ranks import join_process_group
    from jingu.training.precision import choose_precision
    from jingu.training.session import build_model_and_optimizer

    # The process group, which has one rank, the spec and the mesh.
    length = config.batch.sequence_length
    group = join_process_group("cpu", THREADS)
    ranks = group.__enter__()
    model_settings = ModelSettings(family="llama", **size, tie_word_embeddings=True)
    targets = ("blocks.*.attention.*", "blocks.*.feed_forward.*")
    adapter = Lora(rank=RANK, alpha=2.0 * RANK, target_modules=targets, use_rslora=False)
    spec = spec_from_settings(model_settings, VOCABULARY, length).model_copy(update={"adapter": adapter})
    mesh = build_mesh(resolve_axis_sizes(config.parallel, 1, spec), ranks.device)
    compiles = has_compiler(ranks.device)

    # The model and its optimizer, as `jingu train` builds them for a run.
    run: Any = SimpleNamespace(spec=spec, config=config, folder=Path(config.runs_dir))
    model, optimizer = build_model_and_optimizer(
        run, mesh, choose_precision(config.precision, ranks.device), compile=compiles
    )
    step: Any = step_on_batch(model, optimizer, spec, mesh, config, compiles)
    step.group = group  # keeps the process group alive
    torch.manual_seed(0)
    return step


def _peft(size: dict[str, int]) -> Callable[[Any], None]:
    """Return the same step with peft: accelerate's bf16 autocast around the model's own loss."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    config = llama_config(size, VOCABULARY, SEQUENCE["peft"], tie_word_embeddings=True, use_cache=False)
    adapted = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = get_peft_model(LlamaForCausalLM(config), adapted)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))

    def step(batch: Any) -> None:
        # transformers shifts labels inside the model.
        labels = torch.cat([torch.full_like(batch.labels[:, :1], -100), batch.labels[:, :-1]], 1)
        loss = model(input_ids=batch.tokens, attention_mask=(batch.documents >= 0).long(), labels=labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def to_conversation(row: dict[str, str]) -> dict[str, Any]:
    """Return an instruction row as a conversation."""
    turns = zip(("user", "assistant"), (row["instruction"], row["output"]), strict=True)
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def measure_preparation(count: int, rows: list[dict[str, str]], template: str = "chatml") -> str:
    """Return a row of the table: the rows/s of one process, with the tokenizer and with cached tokenizer results; and
    the time that the identity of the data set takes.

    Args:
        template: `chatml`; or the name of a template of the package trl, which becomes the tokenizer's own. The rows
            are then conversations.
    """
    import trl

    from jingu.text.corpus import find_files
    from jingu.text.document_reader import ReadCounts
    from jingu.text.identity import identify_rows
    from jingu.text.tokenizer import Tokenizer
    from jingu.text.tokenizer_files import TEMPLATE
    from jingu.tune.prepare import plan_encoding, row_tokenizers

    encode_spans = Tokenizer.encode_spans
    cache: list[Any] = []

    def encode_and_cache(*arguments: Any, **keywords: Any) -> Any:
        result = encode_spans(*arguments, **keywords)
        if len(cache) < len(rows):
            cache.append(result)
        return result

    with prepare_run(rows[:50], TINY, 1, 256) as config:
        if template != "chatml":
            source = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
            (Path(config.tokenizer.path) / TEMPLATE).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
            objective = config.data.objective.model_copy(update={"template": "auto"})
            config = config.model_copy(update={"data": config.data.model_copy(update={"objective": objective})})
        file = Path(config.data.input[0] if isinstance(config.data.input, list) else config.data.input)
        # Rows differ in a number, so that a cache of texts has no effect.
        with file.open("w", encoding="utf-8") as stream:
            for number in range(count):
                row = rows[number % len(rows)]
                row = {**row, "instruction": f"{number} {row['instruction']}"}
                stream.write(json.dumps(row if template == "chatml" else to_conversation(row)) + "\n")
        one_process = config.data.model_copy(update={"num_workers": 1})
        (row_tokenizer,) = row_tokenizers(config.model_copy(update={"data": one_process}))

        def rate(tokenize: Callable[..., Any]) -> float:
            Tokenizer.encode_spans = tokenize  # type: ignore[method-assign]
            try:
                started = time.process_time()
                encode, units, _ = plan_encoding(config, row_tokenizer)
                encoded = sum(len(part.hashes) for unit in units for part in encode(unit, ReadCounts()))
                return encoded / (time.process_time() - started)
            finally:
                Tokenizer.encode_spans = encode_spans  # type: ignore[method-assign]

        total = rate(encode_and_cache)
        results = cycle(cache)
        without_tokenizer = rate(lambda *_, **__: next(results))
        started = time.process_time()
        identify_rows(config.data, row_tokenizer.tokenizer, find_files(config.data), {}, (template,), 256)
        identity = (time.process_time() - started) * total / count
        return f"| {count:,} rows, {template} | {total:,.0f} | {without_tokenizer:,.0f} | {identity:.2%} |"


def run(tiny: bool = False, rows: str | None = None) -> str:
    """Return the tables as Markdown."""
    words = ("tiny" if tiny else "full", 2 if tiny else 10, rows or "")
    sides = {side: Measurement(**measure_in_child("tune", side, *words)) for side in SEQUENCE}
    rates = {side: figures.tokens / sides["peft"].tokens for side, figures in sides.items()}
    trained = {side: figures.trained / sides["padded"].trained for side, figures in sides.items()}

    def lora_row(side: str, name: str) -> str:
        figures = sides[side]
        return f"| {name} | {figures.tokens:,.0f} | {rates[side]:.2f} | {figures.peak_bytes / 2**20:,.0f} |"

    def packing_row(side: str, name: str) -> str:
        figures = sides[side]
        return f"| {name} | {figures.padding:.1%} | {figures.trained:,.0f} | {trained[side]:.2f} |"

    lines = [
        "| LoRA, rank 16, 8 × 256 (target: 1.5) | tokens/s | × peft | peak memory, MiB |",
        "|---|---|---|---|",
        lora_row("jingu", "jingu, the same batches"),
        lora_row("peft", "transformers + peft + accelerate, bf16"),
        "",
        "| batches of 8 × 512 (target: below 3%, 1.5) | padding | trained tokens/s | × padded |",
        "|---|---|---|---|",
        packing_row("packed", "packed"),
        packing_row("padded", "padded to the longest of 8 rows"),
        "",
    ]
    return "\n".join([*lines, run_preparation(tiny, rows)])


def run_preparation(tiny: bool = False, rows: str | None = None) -> str:
    """Return the table of preparing rows in one process as Markdown."""
    count = TINY_ROWS if tiny else ROWS
    lines = [
        "| preparing rows, one process (targets: 20,000; 5%) | rows/s | without the tokenizer | time of the identity |",
        "|---|---|---|---|",
    ]
    lines += [measure_preparation(count, load_rows(rows), template) for template in ("chatml", "qwen2_5", "qwen3")]
    return "\n".join(lines)


def main() -> None:
    """Measure one side as a child process, or print the tables."""
    if len(sys.argv) == 5:
        side, size, steps, rows = sys.argv[1:]
        figures = measure(side, TINY if size == "tiny" else SMOLLM2, int(steps), load_rows(rows or None))
        print(json.dumps(asdict(figures)))
        return
    files = [word for word in sys.argv[1:] if word not in ("tiny", "preparing")]
    measure_all = run_preparation if "preparing" in sys.argv[1:] else run
    print(measure_all("tiny" in sys.argv[1:], files[0] if files else None))


if __name__ == "__main__":
    main()
