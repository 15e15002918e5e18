"""Fine-tuning: LoRA beside transformers, peft and accelerate; packing beside padding; preparing rows.

Each side runs in a process of its own. The model has the shape of SmolLM2-135M. `python -m bench.tune FILE` takes real
instruction rows, such as alpaca_en_demo.json of the package llamafactory; without it, rows of such lengths are made up.
`tiny` for a look at whether it runs.

The padded loader is the usual one: rows as they come, in random order, and a batch as long as its longest (to the next
eighth of a sequence, as code is compiled for each length). Both sides of that table compute in the same way.
"""

from __future__ import annotations

import json
import random
import subprocess
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

THREADS, BATCH, RANK = 2, 8, 16
SEQUENCE = {"jingu": 256, "peft": 256, "packed": 512, "padded": 512}
"""Of each side. Of Alpaca's rows a third is longer than 256 tokens, and a fortieth than 512."""
SMOLLM2 = {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "feed_forward": 1536}
TINY = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "feed_forward": 96}
VOCABULARY = 49152
WORDS = "the heap is a list of items in order and we return its smallest one"
ROWS, TINY_ROWS = 100_000, 2_000


@dataclass(frozen=True)
class Measured:
    tokens: float
    """Tokens a second, padding included."""
    trained: float
    """Trained tokens a second."""
    padding: float
    """Share of the places that hold no token."""
    peak_bytes: int


def real_rows(file: str | None) -> list[dict[str, str]]:
    """Instruction rows; made up, they have the lengths of real ones (about 15 words asked, 8 to 180 answered)."""
    if file is not None:
        found: list[dict[str, str]] = json.loads(Path(file).read_text(encoding="utf-8"))
        return found
    chance, words = random.Random(0), WORDS.split()

    def text(size: int) -> str:
        return " ".join(chance.choices(words, k=size))

    return [{"instruction": text(15), "output": text(int(chance.lognormvariate(4.0, 0.8)) + 8)} for _ in range(1000)]


@contextmanager
def prepared(rows: list[dict[str, str]], size: dict[str, int], steps: int, length: int, **more: Any) -> Iterator[Any]:
    """A run over rows, in a folder of its own; its tokenizer is trained on them."""
    from jingu.config.load import load_config
    from jingu.text.training import train_tokenizer
    from jingu.tune.prepare import prepare

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        texts = (" ".join(row.values()) for row in rows[:1000])
        train_tokenizer(texts, 8192, special).save(place / "tokenizer")
        settings: dict[str, Any] = {
            "runs": str(place / "runs"),
            "tokenizer": {"path": str(place / "tokenizer")},
            "data.input": str(place / "rows.jsonl"),
            "data.path": str(place / "data"),
            "data.objective": {"type": "supervised", "template": "chatml"},
            "model": {"family": "llama", **size, "vocabulary": VOCABULARY, "tied_embeddings": True},
            "batch": {"sequence_length": length, "global_size": BATCH},
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


def measure(side: str, size: dict[str, int], steps: int, rows: list[dict[str, str]]) -> Measured:
    """One side, in this process: steps after two of warm-up with each length of a batch."""
    import torch

    from jingu.runtime.device import peak_memory
    from jingu.train.run import open_run

    torch.set_num_threads(THREADS)
    objective = {"type": "supervised", "template": "chatml", "sequences": "packed" if side == "packed" else "padded"}
    with prepared(rows, size, steps, SEQUENCE[side], **{"data.objective": objective}) as config:
        source = open_run(config).source
        batches = [source.batch(step, 0, BATCH) for step in range(steps)]
        step = _peft(size) if side == "peft" else _jingu(size, config)
        for batch in 2 * list({batch.tokens.shape: batch for batch in batches}.values()):
            step(batch)
        began = time.perf_counter()
        for batch in batches:
            step(batch)
        took = time.perf_counter() - began
        tokens, trained, used = (
            sum(count(batch) for batch in batches)
            for count in (
                lambda batch: batch.tokens.numel(),
                lambda batch: int((batch.labels >= 0).sum()),
                lambda batch: int((batch.documents >= 0).sum()),
            )
        )
        return Measured(tokens / took, trained / took, 1 - used / tokens, peak_memory(torch.device("cpu")))


def _jingu(size: dict[str, int], config: Any) -> Callable[[Any], None]:
    """What `jingu train` does in a step with LoRA, on one rank."""
    import torch

    from jingu.config.batch import BatchPlan
    from jingu.config.sections.model import ModelSettings
    from jingu.model.build import spec_from_settings
    from jingu.model.spec import Lora
    from jingu.parallel.mesh import axis_sizes, build_mesh
    from jingu.runtime.device import has_compiler
    from jingu.runtime.ranks import joined
    from jingu.train import session
    from jingu.train.precision import choose_precision
    from jingu.train.step import train_step
    from jingu.train.task import Pretraining

    length = config.batch.sequence_length
    group = joined("cpu", THREADS)
    ranks = group.__enter__()
    model_settings = ModelSettings(family="llama", **size, tied_embeddings=True)
    targets = ("blocks.*.attention.*", "blocks.*.feed_forward.*")
    adapter = Lora(rank=RANK, alpha=2.0 * RANK, targets=targets, rank_stabilised=False)
    spec = spec_from_settings(model_settings, VOCABULARY, length).model_copy(update={"adapter": adapter})
    mesh = build_mesh(axis_sizes(config.parallel, 1, spec), ranks.device)
    compiles = has_compiler(ranks.device)

    opened: Any = SimpleNamespace(spec=spec, config=config, folder=Path(config.runs))
    model, optimizer = session._build(opened, mesh, ranks, choose_precision(config.precision, ranks.device), compiles)
    current: list[Any] = []
    source: Any = SimpleNamespace(batch=lambda step, first, count: current[0])
    task = Pretraining(source, None, spec, mesh, config, compiles=compiles)
    plan = BatchPlan(BATCH, BATCH, 1, BATCH * length)

    def step(batch: Any) -> None:
        current[:] = [batch]
        result = train_step(model, optimizer, task, plan, step=0, zero=1, clip_norm=1.0)
        result.loss.item()

    step.group = group  # type: ignore[attr-defined]  # keeps the process group alive
    torch.manual_seed(0)
    return step


def _peft(size: dict[str, int]) -> Callable[[Any], None]:
    """The same step as its users write it: accelerate's bf16 autocast around the model's own loss."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size["width"],
        intermediate_size=size["feed_forward"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        max_position_embeddings=SEQUENCE["peft"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    adapted = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = get_peft_model(LlamaForCausalLM(config), adapted)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))

    def step(batch: Any) -> None:
        # Its labels are shifted inside the model: those of a place are the token there.
        labels = torch.cat([torch.full_like(batch.labels[:, :1], -100), batch.labels[:, :-1]], 1)
        loss = model(input_ids=batch.tokens, attention_mask=(batch.documents >= 0).long(), labels=labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def in_child(side: str, tiny: bool, steps: int, rows: str | None) -> Measured:
    """Measure one side in a process of its own."""
    command = [sys.executable, "-m", "bench.tune", side, "tiny" if tiny else "whole", str(steps), rows or ""]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def preparation(count: int, rows: list[dict[str, str]]) -> list[str]:
    """Rows a second of one process; and where the tokenizer's results are at hand (of rows but for a number)."""
    from jingu.text.readers import Tally
    from jingu.text.tokenizer import Tokenizer
    from jingu.tune.prepare import encoder, makers

    plain, kept = Tokenizer.encode_spans, list[Any]()

    def remembering(*arguments: Any, **keywords: Any) -> Any:
        found = plain(*arguments, **keywords)
        if len(kept) < len(rows):
            kept.append(found)
        return found

    with prepared(rows[:50], TINY, 1, 256) as config:
        file = Path(config.data.input[0] if isinstance(config.data.input, list) else config.data.input)
        with file.open("w", encoding="utf-8") as stream:
            for number in range(count):
                row = rows[number % len(rows)]
                stream.write(json.dumps({**row, "instruction": f"{number} {row['instruction']}"}) + "\n")
        (maker,) = makers(config.model_copy(update={"data": config.data.model_copy(update={"workers": 1})}))

        def rate(tokenize: Callable[..., Any]) -> float:
            Tokenizer.encode_spans = tokenize  # type: ignore[method-assign]
            try:
                began = time.process_time()
                encode, units, _ = encoder(config, maker)
                made = sum(len(part.hashes) for unit in units for part in encode(unit, Tally()))
                return made / (time.process_time() - began)
            finally:
                Tokenizer.encode_spans = plain  # type: ignore[method-assign]

        whole = rate(remembering)
        again = cycle(kept)
        return [f"| {count:,} rows by one process | {whole:,.0f} | {rate(lambda *_, **__: next(again)):,.0f} |"]


def run(tiny: bool = False, rows: str | None = None) -> str:
    """The tables, as Markdown."""
    sides = {side: in_child(side, tiny, 2 if tiny else 10, rows) for side in SEQUENCE}

    lines = ["| LoRA, rank 16, 8 × 256 (must: 1.5) | tokens/s | × peft | peak memory, MiB |", "|---|---|---|---|"]
    for side, name in (("jingu", "jingu, the same batches"), ("peft", "transformers + peft + accelerate, bf16")):
        found, share = sides[side], sides[side].tokens / sides["peft"].tokens
        lines.append(f"| {name} | {found.tokens:,.0f} | {share:.2f} | {found.peak_bytes / 2**20:,.0f} |")
    lines += [
        "",
        "| batches of 8 × 512 (must: under 3%, 1.5) | padding | trained tokens/s | × padded |",
        "|---|---|---|---|",
    ]
    for side, name in (("packed", "packed"), ("padded", "padded to the longest of 8 rows")):
        found, share = sides[side], sides[side].trained / sides["padded"].trained
        lines.append(f"| {name} | {found.padding:.1%} | {found.trained:,.0f} | {share:.2f} |")
    lines += [
        "",
        "| preparing (must: 20,000 without the tokenizer) | rows/s | without the tokenizer |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *preparation(TINY_ROWS if tiny else ROWS, real_rows(rows))])


if __name__ == "__main__":
    if len(sys.argv) == 5:
        side, size, steps, rows = sys.argv[1:]
        found = measure(side, TINY if size == "tiny" else SMOLLM2, int(steps), real_rows(rows or None))
        print(json.dumps(asdict(found)))
    else:
        print(run("tiny" in sys.argv[1:], next((word for word in sys.argv[1:] if word != "tiny"), None)))
