"""`python -m bench [NAME[=ARGUMENT] ...]`: run benchmarks and update docs/benchmarks.md.

NAME=tiny runs a small version, if the benchmark has one, and does not update the page. The benchmarks are:
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from jingu.errors import JinguError

# Headings of the page, by module.
TITLES = {
    "infer": "Generation with SmolLM2-135M, prompts of 100 tokens, 2 threads",
    "startup": "Startup time",
    "train_step": "Training step of a 17M Llama (6 × 384, vocabulary 16,384), sequence 512, batch 4, 2 threads",
    "loop": "Training loop compared with a bare loop around the same model (17M Llama, fp32, not compiled)",
    "convert": "Import and export compared with cp: a Hugging Face folder of half a gigabyte (target: 0.5; memory: 2)",
    "planning": "Planner compared with published runs: errors of step time and memory, each training system without"
    " its own rows (targets: 9% vTrain over several nodes, 8% on one, 7% llm-foundry, 10% torchtitan; memory 5%)",
    "planning_terms": "Planner without each term of time and of memory: mean errors on published runs, those of time"
    " with constants fitted to 20 rows of every table",
    "plan_runs": "Runs on four CPU ranks, planned before they start (targets: median error 10% after doctor, 5%"
    " after 20 steps of calibration)",
    "pipeline_bubble": "Pipeline bubble (target: 1f1b at most 1.05, schedules with split backward passes half of it)",
    "offload": "Master weights and optimizer state on disk compared with memory"
    " (a Llama of 12 × 1024, 512 tokens per step)",
    "recurrences": "Recurrences and attention at 2,048 to 16,384 tokens (target: time per token does not grow)",
    "hybrid": "A hybrid stack compared with a plain one of as many parameters: bits per byte after 600 steps on"
    " Python's standard library (4 × 128, 8 × 256 tokens per step)",
    "hybrid_speed": "Whole models with the delta rule compared with attention (8 × 256, equal active FLOPs, fp32;"
    " targets: training 0.6 at 2,048 tokens, decoding 2)",
    "moe": "Mixture of experts (8 of 512, 2 per token, hidden size 384) compared with a dense layer of 1024,"
    " 8 × 512 tokens",
    "latent": "Generation with latent attention compared with grouped queries of as many active FLOPs (8 × 512, fp32,"
    " after 512 tokens; CPU time on one thread)",
    "experts": "Expert offloading: a quarter of the experts of SmolLM2 with 8 experts (1.3 GB, 2 per token) resident,"
    " bf16",
    "quantization": "8-bit and 4-bit quantization compared with the default: SmolLM2-135M, one stream, CPU time",
    "quantized_exports": "Quantized exports for GPUs: SmolLM2-135M, in the layout of compressed-tensors",
    "gguf": "Writing GGUF files compared with `cp` of the written file: 470M parameters (targets: 0.5 in 16 bits, 0.25"
    " in q8_0; memory under 2)",
    "packed_forms": "Reading quantized matrices (4096 × 4096) compared with `cp` of the packed file, CPU time"
    " (target: at least 0.5), and memory relative to a dequantized matrix (target: under 2)",
    "precision": "Losses in bf16 and fp16 compared with fp32: 200 steps of a real run"
    " (4 × 192, 8 × 256 tokens per step)",
    "data": "Data: opening at any size, batches from a warm page cache, building compared with `datasets.map`",
    "run_start": "The start of a run whose corpus of 100 GB is unchanged (target: at most 2 s)",
    "unigram": "Training a Unigram tokenizer on the manual of Perl, CPU time",
    "verifiers": "The `math` reward of a step whose answers are partly bombs, CPU time",
    "contamination": "Contamination: the search for 10^7 n-grams in a corpus, CPU time",
    "serve": "Server (SmolLM2-135M): time to first token with 16 streams, time outside the model, 2 threads",
    "serve_storm": "Server (SmolLM2-135M, fp32) under a storm: streams that are cut, prompts of 2 MB, slow readers",
    "long_prompt": "Server (SmolLM2-135M, fp32): a prompt of 3,000 tokens beside 32 streams, CPU time on one thread, s",
    "tune": "Fine-tuning a Llama of SmolLM2-135M's shape on instruction rows, 2 threads",
    "evaluate": "Evaluation of SmolLM2-135M compared with lm-evaluation-harness at its best batch size,"
    " CPU time on one thread",
    "harness_tasks": "Parity with lm-evaluation-harness on its packaged task files, with generated rows (target: 95%)",
    "busy": "Training the quickstart's model beside programs that keep the cores busy: tokens/s, and their share of"
    " the rate without such programs, 2 threads",
    "watch_overhead": "Watching a run of four CPU ranks (2 × 128, 8 × 128 tokens per step): CPU time (must be at most"
    " 0.5%)",
    "hangs": "Hangs planted into runs with `train.hang_timeout=10`: seconds until the right rank is named (target: 15)",
    "alignment": "Alignment compared with TRL 1.16: DPO on a random Llama of 6 × 384, GRPO on SmolLM2-135M; CPU time on"
    " one thread",
    "reward_curve": "Sorting five digits from rewards: the reward of each step of GRPO beside that of TRL",
    "checkpoint": "Checkpoints of a model with 300 MB of state (26M Llama with AdamW, fp32), 2 threads",
}
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

`make bench` runs all benchmarks and writes this page; `python -m bench NAME` runs one of them. Ratios come from one run
on one machine, with both sides measured in turn. Absolute figures depend on the machine named above each table.
"""


def run_benchmark(name: str, argument: str = "") -> str:
    """Run one benchmark and return its section of the page."""
    module = importlib.import_module(f"bench.{name}")
    table = module.run(argument) if argument else module.run()
    from bench.machine import describe_machine

    return f"\n## {TITLES[name]}\n\n`python -m bench {name}` · {describe_machine()}\n\n{table}\n"


def replace_section(page: str, name: str, section: str) -> str:
    """Return the page with the section of a benchmark replaced, or appended if there is none."""
    pattern = re.compile(rf"\n## {re.escape(TITLES[name])}\n.*?(?=\n## |\Z)", re.DOTALL)
    if pattern.search(page):
        return pattern.sub(lambda _match: section, page)
    return page + section


def main() -> None:
    """Run the benchmarks named on the command line, or all of them, and update the page."""
    if sys.argv[1:2] == ["cuda"]:
        importlib.import_module("bench.cuda").main(sys.argv[2:])
        return
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__, *(f"  {name:15}  {title}" for name, title in TITLES.items()), sep="\n")
        return
    arguments = dict(word.partition("=")[::2] for word in sys.argv[1:]) or dict.fromkeys(TITLES, "")
    unknown = [name for name in arguments if name not in TITLES]
    if unknown:
        sys.exit(f"There is no benchmark {unknown[0]}. The benchmarks are {', '.join(TITLES)}.")
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else HEAD
    for name, argument in arguments.items():
        try:
            section = run_benchmark(name, argument)
        except JinguError as error:
            print(f"{name}: {error}", file=sys.stderr)
            sys.exit(2)
        print(section, flush=True)
        # A part of the work, or the rows of another file, are not those of the page.
        if argument != "tiny" and not (argument and Path(argument).exists()):
            page = replace_section(page, name, section)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
