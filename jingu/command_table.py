"""The table of commands: for each its arguments, and the function that runs it, by import path."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from jingu.command import (
    Argument,
    choice,
    command,
    converter,
    expand_path,
    flag,
    integer,
    number,
    option,
    path_argument,
    read_part,
    repeatable_option,
)


def _path_or_url(text: str) -> Any:
    from jingu.checkpoint import remote

    return remote.checkpoint_path(text) if "://" in text else expand_path(text)


def _checkpoints(name: str, metavar: str, help_text: str) -> Argument:
    return name, {"metavar": metavar, "type": _path_or_url, "help": help_text}


def _mode(name: str, mode: str, help_text: str) -> Argument:
    """Return an option that chooses what is planned."""
    return flag(name, help_text, action="store_const", const=mode, dest="mode")


_from_0 = number(lambda value: 0 <= value < math.inf, "0 or more")
_above_0 = number(lambda value: 0 < value < math.inf, "above 0")
_fraction = number(lambda value: 0 <= value <= 1, "from 0 to 1")
_probability = number(lambda value: 0 < value <= 1, "above 0, at most 1")
_PART = converter(read_part, lambda part: 1 <= part[0] <= part[1] <= 99_999, "a part of several, such as 3/8")
_MODEL = path_argument("model", "MODEL", "a run, a checkpoint of a run, a Hugging Face folder, a GGUF file, or smollm2")
_CHECKPOINTS = _checkpoints("path", "PATH", "a run, a checkpoint of a run, or a URL of either")
_PROCESSES = option("--processes", "N", integer(1), "number of ranks on this machine (default: 1)")
_PIPELINE = option("--pipeline", "N", integer(1), "pipeline stages; the ranks of a stage use tensor parallelism", 1)
# What is not given is as the model's generation_config.json recommends.
_SAMPLING = (
    option("--top-k", "K", integer(1), "sample from the K most probable tokens"),
    option("--top-p", "P", _probability, "sample from the most probable tokens that reach this cumulative probability"),
    option("--min-p", "P", _fraction, "minimum probability of a token, relative to the most probable one"),
    option("--repetition-penalty", "R", _above_0, "above 1, tokens that occurred before become less probable"),
    option("--seed", "N", integer(0), "random seed", 0),
)
_PRECISIONS = choice("auto", "fp32", "bf16", "fp64", "int8", "int4")
_COMPUTE = (
    option("--precision", "TYPE", _PRECISIONS, "fp32, bf16 or fp64; int8 or int4 for quantized weights", "auto"),
    option("--device", "TYPE", choice("auto", "cpu", "cuda", "xpu", "npu", "mps"), "cpu or an accelerator", "auto"),
    option("--resident-experts", "SIZE", str, "experts to keep in memory, such as 25%% or 3GB (default: all)"),
    option("--draft-model", "MODEL", expand_path, "smaller model for speculative decoding"),
    option("--num-speculative-tokens", "N", integer(0), "draft tokens in a step (4 with --draft-model, else 0)"),
    flag("--cuda-graphs", "record decoding steps as CUDA graphs"),
    flag("--compile", "compile the model's blocks (CUDA)"),
    option("--threads", "N", integer(1), "CPU threads of each process (default: one for each core)"),
)
_INCLUDE = repeatable_option("--include", "DIR", "folder with further task files")
_TASK_WORDS = {"metavar": "TASK", "nargs": "+", "help": "a task, group or tag, or a task's .yaml file"}
_TASK_OPTIONS = (
    option("--num-fewshot", "N", integer(0), "examples in each prompt (default: as many as the task says)"),
    option("--limit", "N", integer(1), "evaluate the first N documents of each task only"),
    _INCLUDE,
    repeatable_option("--trust", "FILE", "Python file that tasks may run"),
)
_HOST = "127.0.0.1"
_TO = option("--to", "FOLDER", expand_path, "folder to write", required=True)
_DTYPE = option("--dtype", "TYPE", choice("auto", "fp32", "bf16", "fp16"), "fp32, bf16, fp16; auto: as stored", "auto")
_WORDS = ("words", {"metavar": "COMMAND", "nargs": argparse.REMAINDER, "help": "such as train run.yaml"})
_ENVIRONMENT = option("--environment", "FILE", expand_path, "lines NAME=VALUE, variables for the ranks")
_RESTARTS = option("--max-restarts", "N", integer(0), "restarts of the ranks after a failure", 0)
_HOSTS = (
    option("--hostfile", "FILE", expand_path, "lines such as `node1 slots=8`", required=True),
    option("--include", "NODES", str, "only these nodes and slots, such as node1:0,2@node2"),
    option("--exclude", "NODES", str, "all but these nodes and slots"),
)
_NODES = (
    option("--nodes", "N", integer(1), "number of nodes", 1),
    option("--slots", "N", integer(1), "ranks of a node, a GPU each", 1),
)
_MANIFESTS = choice("trainjob", "jobset", "pytorchjob", "skypilot", "dstack")
_CONVERT = (_MODEL, _TO, _DTYPE, flag("--check", "reject weights that contain NaN or infinity"))

COMMANDS = {
    "tokenizer train": command("train a tokenizer on the corpus", "text.tokenizer_commands:train", run_file=True),
    "tokenizer extend": command(
        "add entries learned from the corpus to a tokenizer", "text.tokenizer_commands:extend", run_file=True
    ),
    "tokenizer inspect": command(
        "show a tokenizer, and how it splits a line",
        "text.tokenizer_commands:inspect",
        path_argument("folder", "FOLDER", "folder of the tokenizer"),
        option("--text", "TEXT", str, "line to split"),
        option("--file", "FILE", expand_path, "file on which to measure bytes per token"),
    ),
    "data build": command(
        "build the data set from the corpus",
        "evaluate.task_mixture:build",
        option("--part", "I/N", _PART, "build part I of N, each in a job of its own; the last one joins them"),
        option("--on-error", "WHAT", choice("stop", "skip"), "stop at an error in the corpus, or skip the document"),
        option("--executor", "WHAT", choice("processes", "ray"), "local processes, or a Ray cluster", "processes"),
        run_file=True,
    ),
    "data inspect": command(
        "show a data set, and check it",
        "data.inspection:inspect",
        path_argument("path", "FOLDER", "folder of the data set"),
        option("--document", "N", integer(0), "document of the training split to show, from 0"),
        option("--tokenizer", "FOLDER", expand_path, "tokenizer with which to decode it"),
    ),
    "data preview": command(
        "show the batch of a step, and how often each source is used",
        "data.inspection:preview",
        option("--step", "N", integer(0), "step, from 0", 0),
        option("--rows", "N", integer(0), "rows of the batch to show", 4),
        run_file=True,
    ),
    "tune prepare": command("build the data set from instruction rows", "tune.prepare:prepare", run_file=True),
    "tune preview": command(
        "show which tokens of the rows are trained",
        "tune.preview:preview",
        option("--rows", "N", integer(0), "rows to show", 3),
        option("--html", "FILE", expand_path, "write an HTML page instead", dest="to"),
        flag("--json", "print a JSON object for each row, and one for each corpus", dest="as_json"),
        run_file=True,
    ),
    "tune export": command(
        "write the adapter of a run in peft's format",
        "tune.adapter_commands:export",
        path_argument("run", "RUN", "a run that trained an adapter, or a checkpoint of it"),
        _TO,
    ),
    "tune merge": command(
        "merge an adapter into its model, and write it as a Hugging Face folder",
        "tune.adapter_commands:merge",
        path_argument("model", "RUN", "a run that trained an adapter, or with --base a peft folder"),
        _TO,
        option("--base", "MODEL", expand_path, "base model of the peft adapter"),
        _DTYPE,
    ),
    "tune unmerge": command(
        "write the base model from which a merged model was made",
        "tune.adapter_commands:unmerge",
        path_argument("model", "MODEL", "the merged model"),
        _TO,
        option("--adapters", "RUN", expand_path, "the adapter's run, or a peft folder", required=True),
        _DTYPE,
    ),
    "align": command(
        "run the stages of a file: instruction tuning, preferences, rewards",
        "align.commands:align",
        path_argument("file", "FILE.yaml", "a file with a list of stages"),
        option("--from", "STAGE", str, "stage to begin with (default: the first one)", dest="first"),
        _PROCESSES,
    ),
    "align prepare": command(
        "build the data set from rows of preference data", "align.commands:prepare", run_file=True
    ),
    "align preview": command(
        "show prompts and answers of the rows, token by token",
        "align.commands:preview",
        option("--rows", "N", integer(0), "rows to show", 3),
        option("--html", "FILE", expand_path, "write an HTML page instead", dest="to"),
        flag("--json", "print a JSON object for each row, and one for each corpus", dest="as_json"),
        run_file=True,
    ),
    "align score": command(
        "show the rewards of saved answers",
        "align.rollout_commands:score",
        option(
            "--answers", "FILE", expand_path, "rows of prompt, completion and columns (default: the newest rollout)"
        ),
        option("--to", "FILE", expand_path, "write the answers with their rewards"),
        flag("--best", "write the best answer to each prompt alone, as rows to tune on"),
        run_file=True,
    ),
    "align replay": command(
        "make a step of a run again, and compare its answers",
        "align.rollout_commands:replay",
        path_argument("run", "RUN", "a run that learns from rewards"),
        ("step", {"metavar": "STEP", "type": integer(1), "help": "number of the step"}),
    ),
    "train": command(
        "train a model, or resume training",
        "align.commands:train",
        _PROCESSES,
        option("--devices", "GPUS", str, "GPUs or NPUs to use, one a rank: 0,2,4, or ^1,3 for all but those"),
        option("--trace", "FOLDER", expand_path, "write fingerprints of every module's outputs in the first step"),
        repeatable_option("--allow", "KEY", "resume although this setting has changed"),
        flag("--fresh-optimizer", "resume with the weights of the checkpoint, and a new optimizer"),
        flag("--auto-layout", "choose the fastest layout that fits; a run that resumes keeps its own"),
        option("--weights-only-from", "MODEL", str, "initialize a new run with these weights (initialize.from)"),
        run_file=True,
    ),
    "sweep": command(
        "train a run for each combination of settings, and compare them",
        "launch.sweep:sweep",
        path_argument("file", "FILE.yaml", "configuration that the runs share"),
        ("overrides", {"metavar": "key=value", "nargs": "*", "help": "settings to override in all runs"}),
        repeatable_option(
            "--grid",
            "KEY=A,B",
            "a setting and its values, such as optimizer.lr=1e-3,3e-4; KEY=A:B is a range",
            required=True,
        ),
        option("--random", "N", integer(1), "train only N combinations, chosen at random"),
        option("--optuna", "N", integer(1), "train N runs whose settings Optuna chooses, each after the last"),
        option("--seed", "N", integer(0), "seed of these choices", 0),
        option("--part", "I/N", _PART, "train part I of N, each in a job of its own", (1, 1)),
        option("--processes", "N", integer(1), "number of ranks of each run (default: 1)"),
    ),
    "plan": command(
        "estimate memory, time and cost of a run; search for its best layout",
        "report.plan_page:plan",
        (
            "target",
            {"metavar": "TARGET", "help": "a run's file, a preset, a Hugging Face or DeepSpeed configuration"},
        ),
        ("overrides", {"metavar": "key=value", "nargs": "*", "help": "settings to override"}),
        option("--on", "MACHINE", str, "a machine: h100, a100-80, ...; a file such as machine.yaml; here", "here"),
        option("--nodes", "N", integer(1), "number of nodes", 1),
        option("--gpus", "N", integer(1), "ranks of a node (default: as many as the machine has cards)"),
        _mode("--search", "search", "compare all valid layouts, and say why others fail"),
        _mode("--gpus-needed", "clusters", "try 1, 2, 4, ... nodes: the smallest and the cheapest cluster"),
        option("--gpus-needed-within", "DAYS", _above_0, "of these, clusters that end the run in time", dest="mode"),
        _mode("--exact", "exact", "replay a step of the first rank: peak of its tensors, and its collectives"),
        _mode("--serve", "serve", "plan generation on --gpus cards (default: 1)"),
        option("--price", "AMOUNT", _above_0, "price of a card's hour"),
        flag("--json", "print a JSON object", dest="as_json"),
        option("--html", "FILE", expand_path, "write a page with pictures"),
    ),
    "launch ssh": command(
        "run a command on the machines of a hostfile",
        "launch.ssh:launch_ssh",
        *_HOSTS,
        _ENVIRONMENT,
        option("--ssh-options", "OPTIONS", str, "further options of ssh, such as '-i key -p 2222'", ""),
        _RESTARTS,
        option("--min-nodes", "N", integer(1), "nodes with which the run goes on when others are lost (default: all)"),
        _WORDS,
    ),
    "launch pdsh": command(
        "run a command on the machines of a hostfile, through pdsh",
        "launch.pdsh:launch_pdsh",
        *_HOSTS,
        _ENVIRONMENT,
        _RESTARTS,
        _WORDS,
    ),
    "launch slurm": command(
        "submit a command as a job of Slurm; within an allocation, run it",
        "launch.slurm:launch_slurm",
        *_NODES,
        option("--time", "LIMIT", str, "time limit of the job, such as 12:00:00"),
        repeatable_option("--sbatch", "NAME=VALUE", "another setting of the job, such as partition=gpu"),
        _ENVIRONMENT,
        option("--max-restarts", "N", integer(0), "how often the job is queued again after a failure", 0),
        flag("--write", "print the script, and submit nothing"),
        _WORDS,
    ),
    "launch kubernetes": command(
        "print or apply a manifest for Kubernetes, SkyPilot or dstack",
        "launch.manifests:write_manifest",
        option("--manifest", "KIND", _MANIFESTS, "trainjob, jobset, pytorchjob, skypilot or dstack", "trainjob"),
        option("--image", "IMAGE", str, "container image with jingu", "jingu"),
        *_NODES,
        _ENVIRONMENT,
        _RESTARTS,
        flag("--apply", "apply it with kubectl"),
        _WORDS,
    ),
    "doctor": command(
        "check this machine, or several with `jingu launch`",
        "launch.doctor:doctor",
        option("--folder", "DIR", expand_path, "folder of runs, shared by the nodes (default: runs)"),
        option("--machine", "FILE", expand_path, "write the figures of the machine, for `jingu plan --on FILE`"),
    ),
    "plan calibrate": command(
        "fit a machine's efficiency to runs that were made on it",
        "training.plan_calibrate:calibrate",
        ("runs", {"metavar": "RUN", "nargs": "+", "type": expand_path, "help": "folders of runs"}),
        option("--on", "MACHINE", str, "the machine of the runs: a name, a file, or here", required=True),
        option("--to", "FILE", expand_path, "machine file to write", required=True),
    ),
    "verify": command(
        "prove that two layouts compute the same, or show the first difference",
        "training.verify:verify",
        ("--against", {"metavar": "key=value", "nargs": "+", "help": "settings of the other layout (one process)"}),
        option("--all", "N", integer(2), "compare every layout of N ranks instead", dest="all_of"),
        option("--processes", "N", integer(1), "ranks of the other layout (default: as few as possible)"),
        option("--steps", "N", integer(1), "optimizer steps to compare", 3),
        option("--precision", "TYPE", choice("fp64", "fp32", "bf16", "fp16"), "fp64, fp32, bf16 or fp16", "fp64"),
        run_file=True,
    ),
    "generate": command(
        "continue a prompt",
        "infer.generate:generate",
        _MODEL,
        ("prompt", {"metavar": "PROMPT", "help": "text to continue"}),
        option("--max-tokens", "N", integer(1), "maximum number of new tokens (default: 128, or what fits)"),
        option("--temperature", "T", _from_0, "sampling temperature (default: the model's own, or 0: greedy decoding)"),
        *_SAMPLING,
        repeatable_option("--stop", "TEXT", "stop at this text"),
        option("--num-beams", "N", integer(1), "beams of a beam search, whose best hypothesis is printed; 1: none", 1),
        option("--length-penalty", "P", _from_0, "above 0, beam search prefers longer hypotheses", 1.0),
        *_COMPUTE,
        _PIPELINE,
        on_ranks=True,
    ),
    "chat": command(
        "chat with a model in the terminal",
        "serve.terminal:chat",
        _MODEL,
        option("--system", "TEXT", str, "system prompt"),
        option("--template", "NAME", str, "name or file of a chat template, such as chatml (default: the model's own)"),
        option("--max-tokens", "N", integer(1), "maximum number of tokens of an answer", 1024),
        option("--temperature", "T", _from_0, "sampling temperature (default: the model's own, or 0.7); 0: greedy"),
        *_SAMPLING,
        *_COMPUTE,
    ),
    "serve": command(
        "serve a model over HTTP, with OpenAI's and TGI's API",
        "serve.commands:serve",
        _MODEL,
        option("--host", "ADDRESS", str, "address to listen on; 0.0.0.0 is reachable from other machines", _HOST),
        option("--port", "N", integer(0, 65_535), "port to listen on; 0: any free port", 8000),
        option("--name", "NAME", str, "model name for clients (default: the model's own)"),
        repeatable_option("--adapter", "NAME=PATH", "adapter to serve besides the model, and its name"),
        flag("--runtime-adapters", "let clients load and unload adapters (/v1/load_lora_adapter)"),
        option("--template", "NAME", str, "name or file of a chat template (default: the tokenizer's own)"),
        repeatable_option("--api-key", "KEY", "require this key from clients"),
        option("--api-key-file", "FILE", expand_path, "file with one API key a line"),
        option("--max-num-seqs", "N", integer(1), "maximum number of sequences in a batch", 64),
        option("--max-concurrent-requests", "N", integer(1), "most unfinished requests; others are refused", 128),
        option("--timeout", "S", _above_0, "maximum time of a request, in seconds", 600.0),
        option("--grace", "S", _from_0, "seconds to finish running requests on shutdown", 30.0),
        repeatable_option("--allow-host", "NAME", "another host name under which clients reach the server"),
        repeatable_option("--cors", "ORIGIN", "allow requests from pages of this origin"),
        option("--pooling", "HOW", choice("mean", "last"), "embedding: mean of the tokens, or the last one", "mean"),
        flag("--log-prompts", "also log prompts"),
        *_COMPUTE,
        _PIPELINE,
        on_ranks=True,
    ),
    "evaluate": command(
        "evaluate a model on tasks",
        "evaluate.commands:evaluate",
        _MODEL,
        ("tasks", _TASK_WORDS),
        option("--output", "DIR", expand_path, "folder for results (default: evaluations, in the run or here)"),
        *_TASK_OPTIONS,
        *_COMPUTE,
        on_ranks=True,
    ),
    "evaluate transfer": command(
        "try prompts that were tuned on some tasks on others",
        "evaluate.transfer:transfer",
        ("runs", {"metavar": "RUN", "nargs": "+", "type": expand_path, "help": "a run that tuned a prompt of a model"}),
        ("--tasks", {**_TASK_WORDS, "required": True}),
        option("--output", "DIR", expand_path, "folder for results (default: evaluations/transfer)"),
        *_TASK_OPTIONS,
        *_COMPUTE,
        on_ranks=True,
    ),
    "evaluate list": command("list the tasks of the catalogue", "evaluate.commands:list_tasks", _INCLUDE),
    "evaluate compare": command(
        "compare results of models, or of lm-eval, document by document",
        "evaluate.comparison:compare",
        path_argument("first", "A", "folder with the results of a model"),
        ("others", {"metavar": "B", "nargs": "+", "type": expand_path, "help": "folders with other results"}),
    ),
    "evaluate contamination": command(
        "search training data for the documents of tasks",
        "evaluate.contamination:contamination",
        ("tasks", _TASK_WORDS),
        ("--data", {"metavar": "DATA", "nargs": "+", "required": True, "help": "files, folders, or built data sets"}),
        option("--tokenizer", "FOLDER", expand_path, "tokenizer of the built data sets"),
        option("--text-field", "FIELD", str, "field of JSON Lines and tables that holds the text", "text"),
        option("--ngram", "N", integer(1), "words of an n-gram; characters of Chinese", 13),
        option("--processes", "N", integer(1), "number of processes (default: one for each core)"),
        option("--output", "DIR", expand_path, "folder for progress and results", Path("contamination")),
        _INCLUDE,
    ),
    "evaluate clean": command(
        "show scores on all, clean and dirty documents",
        "evaluate.contamination:compare_clean",
        path_argument("results", "RESULTS", "folder with the results of a model"),
        path_argument("contamination", "CONTAMINATION", "folder with the results of a search for its tasks"),
    ),
    "evaluate judge": command(
        "let a model judge the answers of two others, in both orders",
        "evaluate.judging:judge",
        path_argument("first", "A", "folder with the results of a model"),
        path_argument("second", "B", "folder with the results of another one"),
        option("--by", "JUDGE", str, "the judge: a model, or a server's URL up to /v1", required=True),
        option("--name", "NAME", str, "name of the model on the server", ""),
        option("--output", "FILE", expand_path, "file for the verdicts (default: judged.json in B)"),
        *_COMPUTE,
    ),
    "model list": command("list model families and presets", "formats.model_commands:list_models"),
    "model inspect": command(
        "describe a model, and what it lacks",
        "formats.model_commands:inspect_model",
        _MODEL,
        flag("--json", "print JSON", dest="as_json"),
    ),
    "model grow": command(
        "write a larger model that is initialized with this one's weights",
        "formats.grow_model:grow_model",
        *_CONVERT,
        option("--tokenizer", "FOLDER", expand_path, "new tokenizer; entries that both have keep their embeddings"),
        option("--vocab-size", "N", integer(1), "vocabulary size; new embeddings are the mean of the old ones"),
        option("--num-layers", "N", integer(1), "number of blocks; the output projections of new ones start at zero"),
        option(
            "--depth-rule",
            "RULE",
            choice("interleaved", "stacked"),
            "place copies of blocks behind each block, or behind all blocks",
            "interleaved",
        ),
        flag("--whole-copies", "copy blocks with their output projections"),
        option("--hidden-size", "N", integer(1), "multiple of the hidden size; heads and feed-forward grow, too"),
        option("--experts", "N", integer(1), "experts in a block, each a copy of the feed-forward layer"),
        option("--active", "K", integer(1), "experts for each token", 2),
        option("--noise", "S", _from_0, "noise added to copies, relative to their standard deviation", 0.0),
        option("--seed", "N", integer(0), "seed of the noise and the routers", 0),
    ),
    "import": command(
        "write a Hugging Face folder or GGUF file as a Hugging Face folder", "formats.export:convert", *_CONVERT
    ),
    "export": command("write a model as a Hugging Face folder", "formats.export:convert", *_CONVERT),
    "report": command(
        "write the report of one or two runs, or of evaluation results, as HTML",
        "report.commands:write_report",
        path_argument("run", "RUN", "folder of the run, or of evaluation results"),
        option("--against", "DIR", expand_path, "another run, or other evaluation results, to compare with"),
        option("--to", "FILE", expand_path, "file to write (default: RUN/report.html; of two runs: comparison.html)"),
    ),
    "watch": command(
        "show a run while it trains",
        "report.board:watch_run",
        path_argument("run", "RUN", "folder of the run"),
        option("--web", "PORT", integer(0, 65_535), "serve a live page and Prometheus metrics on the loopback address"),
        flag("--once", "show it once"),
    ),
    "runs": command(
        "list the runs of a folder, with their state and losses",
        "report.board:list_runs",
        path_argument("folder", "FOLDER", "folder with runs, such as runs"),
    ),
    "config show": command(
        "print every setting of a run, and what follows from them",
        "training.plan_commands:show_config",
        _PROCESSES,
        run_file=True,
    ),
    "config from-deepspeed": command(
        "convert a DeepSpeed configuration to a run's file",
        "config.deepspeed:from_deepspeed",
        path_argument("file", "DS_CONFIG.json", "DeepSpeed's configuration"),
        option("--processes", "N", integer(1), "data-parallel ranks, if the batch sizes do not determine them"),
    ),
    "config schema": command("print the JSON Schema of a run's file, for editors", "config.commands:print_schema"),
    "checkpoint list": command("list the checkpoints of a run", "checkpoint.commands:list_checkpoints", _CHECKPOINTS),
    "checkpoint verify": command("verify every byte of checkpoints", "checkpoint.commands:verify", _CHECKPOINTS),
    "checkpoint prune": command(
        "delete old checkpoints of a run",
        "checkpoint.commands:prune",
        _checkpoints("run", "RUN", "a run, or its URL"),
        option("--keep", "N", integer(1), "number of newest intact checkpoints to keep", 1),
        option("--keep-every", "N", integer(0), "also keep those whose step is a multiple of this", 0),
        option("--keep-best", "N", integer(0), "also keep this many with the lowest validation loss", 0),
        flag("--damaged", "also delete those that are damaged"),
    ),
    "checkpoint export": command(
        "write the model of a checkpoint as a Hugging Face folder", "formats.export:convert", *_CONVERT
    ),
    "checkpoint diff": command(
        "compare two checkpoints",
        "checkpoint.commands:diff",
        _checkpoints("first", "FIRST", "a checkpoint, a run for its newest one, or a URL of either"),
        _checkpoints("second", "SECOND", "another"),
    ),
}
