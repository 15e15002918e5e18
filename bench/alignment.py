"""Alignment compared with TRL: training steps of DPO on a random Llama, and of GRPO with its rollouts on SmolLM2-135M.

Each side runs in its own process, with the same weights, rows and batch, on one thread. Times are CPU times, which
other programs hardly influence. TRL runs without activation checkpointing, its fastest setting. With bf16 (measured
only on CPUs with bf16 units), both sides keep master weights in fp32.

*DPO.* Both sides compute the log-probabilities of the reference model before training. This counts for memory, but not
for time.

*GRPO.* Hardly any answer ends before the maximum length, so both sides sample and train the same number of tokens.
Prompts have 30 tokens, or 250 (a question with instructions and a template), or 500 (a question with examples).
`jingu serve` answers the same prompts with the same number of tokens, for comparison with generation in training, which
includes prepacking the weights and computing rewards.

Argument `tiny` is a quick check with a random Llama; `grpo` leaves DPO out.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.children import measure_in_child
from bench.llama import llama_config
from bench.smollm2 import find_smollm2

THREADS, VOCABULARY = 1, 8192
LAYERS, WIDTH, HEADS, FEED_FORWARD = 6, 384, 6, 1024
PAIRS, LENGTH = 4, 512
"""Pairs per step of DPO, and the sequence length of jingu's rows. A row has room for both answers of a pair."""
ANSWERS, NEW_TOKENS = 8, 64
"""Answers per prompt in GRPO, and tokens per answer."""
PROMPT_LENGTHS = {"short": 30, "long": 250, "few-shot": 500}
"""Tokens per prompt in GRPO."""
PROMPTS = {"short": 2, "long": 2, "few-shot": 1}
"""Prompts per step of GRPO. With two prompts of 500 tokens, TRL needs more than 24 GB."""
WARMUP = 1
PRECISIONS = ("fp32", "bf16")
END = "<|endoftext|>"
MODELS = {"dpo": "model", "short": "smollm2", "long": "smollm2", "few-shot": "smollm2"}
"""Folder of the model for each task. Tasks are DPO, and GRPO with each length of prompts."""


@dataclass(frozen=True)
class Measurement:
    """Figures of one side."""

    seconds: float
    """Median CPU seconds per step."""
    peak_bytes: int
    generation: float = 0.0
    """GRPO: median CPU seconds of generation per step."""
    bookkeeping: float = 0.0
    """GRPO: median CPU seconds between generation and update per step: rewards, advantages, records."""


Figures = dict[tuple[str, str, str], Measurement]
"""Measurements by task, precision and side."""


def reward(completions: list[str], **_others: Any) -> list[float]:
    """Return the number of vowels of each answer. Both sides use this reward."""
    return [float(sum(text.count(vowel) for vowel in "aeiou")) for text in completions]


def prepare(folder: Path, layers: int, has_smollm2: bool) -> None:
    """Write a tokenizer, a random Llama, SmolLM2, pairs and prompts to `folder`. The text is Python's standard library.

    Args:
        layers: blocks of the random Llama.
        has_smollm2: False: use a copy of the random Llama instead of SmolLM2.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    from jingu.formats.export import convert
    from jingu.text.tokenizer_training import train_tokenizer

    # Tokenizer and models.
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text(encoding="utf-8") for file in sorted(library.glob("*.py"))]
    train_tokenizer(iter(texts), VOCABULARY, [END]).save(folder / "model")

    torch.manual_seed(0)
    size = {"num_layers": layers, "hidden_size": WIDTH, "num_heads": HEADS, "intermediate_size": FEED_FORWARD}
    config = llama_config(size, VOCABULARY, 1024, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    if has_smollm2:
        convert(find_smollm2(folder), folder / "smollm2")
    else:
        shutil.copytree(folder / "model", folder / "smollm2")

    rng = random.Random(0)
    whole = "".join(texts)

    def text(size: int) -> str:
        start = rng.randrange(len(whole) - size)
        return whole[start : start + size]

    # Pairs: about 30 tokens per prompt, and 20 to 180 per answer. Then prompts of exact lengths.
    pairs = [
        {"prompt": text(100), **{name: text(rng.randrange(60, 600)) for name in ("chosen", "rejected")}}
        for _ in range(200)
    ]
    files = {"pairs": pairs}
    tokenizer = Tokenizer.from_file(str(folder / "smollm2" / "tokenizer.json"))
    for name, size in PROMPT_LENGTHS.items():
        ids = [tokenizer.encode(text(8 * size)).ids[:size] for _ in range(200)]
        files[name] = [{"prompt": prompt} for prompt in tokenizer.decode_batch(ids)]
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class StepTimer:
    """Collects the CPU times of steps, and of functions that are called in them.

    Attributes:
        ends: CPU time of the process at the end of each step.
        inside: CPU seconds of each call of a wrapped function, by its name.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.inside: dict[str, list[float]] = {}

    def end_step(self) -> None:
        self.ends.append(time.process_time())

    def wrap(self, place: Any, name: str) -> None:
        """Replace attribute `name` of `place`, a function, by one that also records its CPU time."""
        function: Callable[..., Any] = getattr(place, name)
        seconds = self.inside.setdefault(name, [])

        def measure(*arguments: Any, **keywords: Any) -> Any:
            started = time.process_time()
            result = function(*arguments, **keywords)
            seconds.append(time.process_time() - started)
            return result

        setattr(place, name, measure)

    def seconds(self) -> float:
        """Return the median CPU seconds from the end of one step to the end of the next, without warm-up steps."""
        starts = self.ends[WARMUP - 1 :]
        return median(end - start for start, end in pairwise(starts))


def _settings(task: str, precision: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return the configuration of a run of jingu: first the common settings, then those of the task."""
    model = folder / MODELS[task]
    settings: dict[str, Any] = {
        "runs_dir": str(folder / f"runs-{precision}"),
        "tokenizer": {"path": str(model)},
        "initialize": {"from": str(model)},
        "train": {"steps": steps, "log_every": 1},
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "optimizer": {"type": "adamw", "lr": 1e-6},
        "precision": {"type": precision},
        "device": {"type": "cpu", "threads": THREADS},
    }
    if task == "dpo":
        settings |= {
            "task": {"type": "dpo"},
            "batch": {"sequence_length": LENGTH, "global_batch_size": PAIRS, "micro_batch_size": PAIRS},
            "data.input": str(folder / "pairs.jsonl"),
            "data.path": str(folder / "pairs"),
            "data.objective": {"type": "preference", "template": "chatml", "overflow": "drop"},
        }
    else:
        settings |= {
            "task": {
                "type": "grpo",
                "prompts": str(folder / f"{task}.jsonl"),
                "prompts_per_step": PROMPTS[task],
                "answers_per_prompt": ANSWERS,
                "max_new_tokens": NEW_TOKENS,
                "rewards": [{"type": "python", "function": "bench.alignment:reward"}],
            },
            # The maximum length. The text of a prompt may be tokenized again to a few more tokens.
            "batch": {
                "sequence_length": PROMPT_LENGTHS[task] + NEW_TOKENS + 10,
                "micro_batch_size": PROMPTS[task] * ANSWERS,
            },
        }
    return settings


def measure_jingu(task: str, precision: str, folder: Path, steps: int) -> Measurement:
    """Measure `jingu train` in this process."""
    import torch

    from jingu.align.commands import prepare as prepare_rows
    from jingu.config.load import load_config
    from jingu.runtime.device import peak_memory
    from jingu.training import loop
    from jingu.training.commands import train

    settings = _settings(task, precision, folder, steps)
    file = folder / f"{task}-{precision}.yaml"
    file.write_text(f"name: {task}\n", encoding="utf-8")
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    config = load_config(file, words)
    if task == "dpo":
        prepare_rows(config)

    # Measure steps and functions by wrapping them, and train.
    timer = StepTimer()
    train_step = loop.train_step

    def step_and_note(*arguments: Any, **keywords: Any) -> Any:
        result = train_step(*arguments, **keywords)
        result.loss.item()
        timer.end_step()
        return result

    loop.train_step = step_and_note
    wrap_rollouts(timer)
    train(config)
    peak = peak_memory(torch.device("cpu"))
    if task == "dpo":
        return Measurement(timer.seconds(), peak)
    # `begin_step` contains `_generate`, which contains the rewards. Without generation it is bookkeeping.
    begin, generate, rewards = (timer.inside[name][WARMUP:] for name in ("begin_step", "_generate", "add_rewards"))
    generation = [total - part for total, part in zip(generate, rewards, strict=True)]
    bookkeeping = [total - part for total, part in zip(begin, generation, strict=True)]
    return Measurement(timer.seconds(), peak, median(generation), median(bookkeeping))


def wrap_rollouts(timer: StepTimer) -> None:
    """Let `timer` measure the parts of a step of GRPO before its update: all of them, the answers, their rewards."""
    from jingu.align import policy_learning

    timer.wrap(policy_learning.PolicyLearning, "begin_step")
    timer.wrap(policy_learning.PolicyLearning, "_generate")
    timer.wrap(policy_learning, "add_rewards")


def measure_trl(task: str, precision: str, folder: Path, steps: int) -> Measurement:
    """Measure TRL's trainer in this process."""
    import torch
    from datasets import load_dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    from jingu.runtime.device import peak_memory

    # Model, tokenizer and rows.
    torch.set_num_threads(THREADS)
    model = LlamaForCausalLM.from_pretrained(folder / MODELS[task], dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / MODELS[task] / "tokenizer.json"), eos_token=END, pad_token=END
    )
    timer = StepTimer()

    class Callback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_end(self, *_arguments: Any, **_keywords: Any) -> None:
            timer.end_step()

    common: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": precision == "bf16",
        "gradient_checkpointing": False,
        "learning_rate": 1e-6,
        "max_steps": steps,
        "logging_steps": 1,
    }
    kind = "pairs" if task == "dpo" else task
    rows = load_dataset("json", data_files=str(folder / f"{kind}.jsonl"), cache_dir=str(folder / "cache"))["train"]
    # The trainer of the task.
    if task == "dpo":
        dpo = DPOConfig(per_device_train_batch_size=PAIRS, precompute_ref_log_probs=True, **common)
        trainer = DPOTrainer(
            model=model, args=dpo, processing_class=tokenizer, train_dataset=rows, callbacks=[Callback()]
        )
    else:
        grpo = GRPOConfig(
            per_device_train_batch_size=PROMPTS[task] * ANSWERS,
            num_generations=ANSWERS,
            max_completion_length=NEW_TOKENS,
            **common,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=grpo,
            processing_class=tokenizer,
            train_dataset=rows,
            callbacks=[Callback()],
        )
        timer.wrap(trainer, "_generate_single_turn")
    trainer.train()
    peak = peak_memory(torch.device("cpu"))
    if task == "dpo":
        return Measurement(timer.seconds(), peak)
    return Measurement(timer.seconds(), peak, median(timer.inside["_generate_single_turn"][WARMUP:]))


def measure_server(task: str, precision: str, folder: Path, rounds: int) -> float:
    """Return the median CPU seconds in which `jingu serve` answers the prompts of a step; each round has new ones."""
    model = str(folder / MODELS[task])
    command = [sys.executable, "-m", "jingu", "serve", model, "--port", "0", "--precision", precision]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command += ["--threads", str(THREADS)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    prompts = [
        json.loads(line)["prompt"] for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    ]

    def ask(prompt: str) -> None:
        body = {"model": "tgi", "prompt": prompt, "max_tokens": NEW_TOKENS, "n": ANSWERS, "temperature": 1.0}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps({**body, "ignore_eos": True}).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == NEW_TOKENS * ANSWERS

    # Send the prompts of a step together, and measure the CPU time of the server's process.
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        seconds = []
        number = PROMPTS[task]
        with ThreadPoolExecutor(number) as pool:
            for first in range(0, number * rounds, number):
                before = sum(psutil.Process(server.pid).cpu_times()[:2])
                list(pool.map(ask, prompts[first : first + number]))
                seconds.append(sum(psutil.Process(server.pid).cpu_times()[:2]) - before)
        return median(seconds[WARMUP:])
    finally:
        server.terminate()
        server.wait(60)


def measure_side(side: str, task: str, precision: str, folder: Path, steps: int) -> Measurement:
    """Measure one side in a child process."""
    figures = measure_in_child("alignment", side, task, precision, folder, steps)
    print(side, task, precision, json.dumps(figures), file=sys.stderr, flush=True)
    return Measurement(**figures)


def run(argument: str = "") -> str:
    """Return the tables as Markdown."""
    import torch

    from jingu.runtime.device import has_fast_bf16

    precisions = PRECISIONS if has_fast_bf16(torch.device("cpu")) else PRECISIONS[:1]
    is_tiny = argument.startswith("tiny")
    steps = WARMUP + (1 if is_tiny else 3)
    tasks = [*PROMPT_LENGTHS] if argument == "grpo" else [*MODELS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, 1 if is_tiny else LAYERS, has_smollm2=not is_tiny)
        figures: Figures = {
            (task, precision, side): measure_side(side, task, precision, folder, steps)
            for task in tasks
            for precision in precisions
            for side in ("jingu", "trl")
        }
        servers = {
            (task, precision): measure_server(task, precision, folder, steps)
            for task in tasks
            for precision in precisions
            if task != "dpo"
        }
    lines = [] if "dpo" not in tasks else [*_dpo_table(figures), ""]
    return "\n".join([*lines, *_grpo_table(figures), "", *_server_table(figures, servers)])


def _dpo_table(figures: Figures) -> list[str]:
    """Return the lines of the table of DPO."""
    lines = [
        f"| DPO, {PAIRS} pairs (targets: 1.5 × TRL, less memory) | pairs per CPU second | × TRL | peak memory, MiB |",
        "|---|---|---|---|",
    ]
    for (task, precision, side), one in figures.items():
        if task == "dpo":
            ratio = figures[task, precision, "trl"].seconds / one.seconds
            memory = one.peak_bytes / 2**20
            lines.append(f"| {side} {precision} | {PAIRS / one.seconds:.2f} | {ratio:.2f} | {memory:,.0f} |")
    return lines


def _grpo_table(figures: Figures) -> list[str]:
    """Return the lines of the table of GRPO."""
    lines = [
        f"| GRPO, {ANSWERS} answers of {NEW_TOKENS} tokens to a prompt (targets: 3 × TRL, half its memory, bookkeeping"
        " at most 5%) | CPU s/step | × TRL | generation, s | update, s | bookkeeping | peak memory, MiB | of TRL's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, precision, side), one in figures.items():
        if task == "dpo":
            continue
        theirs = figures[task, precision, "trl"]
        rest = one.seconds - one.generation - one.bookkeeping
        # The bookkeeping of TRL is not measured separately; it is part of `rest`.
        share = f"{one.bookkeeping / one.seconds:.1%}" if side == "jingu" else ""
        lines.append(
            f"| {_describe_prompts(task)}: {side} {precision} | {one.seconds:.2f} | {theirs.seconds / one.seconds:.2f}"
            f" | {one.generation:.2f} | {rest:.2f} | {share} | {one.peak_bytes / 2**20:,.0f}"
            f" | {one.peak_bytes / theirs.peak_bytes:.2f} |"
        )
    return lines


def _server_table(figures: Figures, servers: dict[tuple[str, str], float]) -> list[str]:
    """Return the lines of the table that compares generation in training with `jingu serve`."""
    lines = [
        "| generation (target: 0.9 of the server's rate) | in training, CPU s/step | `jingu serve`, CPU s | ratio |",
        "|---|---|---|---|",
    ]
    for (task, precision), seconds in servers.items():
        one = figures[task, precision, "jingu"]
        whole = one.generation + one.bookkeeping
        cells = (f"{_describe_prompts(task)}, {precision}", f"{whole:.2f}", f"{seconds:.2f}", f"{seconds / whole:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _describe_prompts(task: str) -> str:
    return f"{PROMPTS[task]} × {PROMPT_LENGTHS[task]} tokens of prompts"


def main() -> None:
    """Measure one side as a child process, or print the tables."""
    if len(sys.argv) == 6:
        side, task, precision, folder, steps = sys.argv[1:]
        measure = measure_jingu if side == "jingu" else measure_trl
        print(json.dumps(asdict(measure(task, precision, Path(folder), int(steps)))))
        return
    print(run(*sys.argv[1:2]))


if __name__ == "__main__":
    main()
