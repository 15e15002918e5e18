"""The command line: a table of verbs, each a function elsewhere that is imported when it is asked for."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from jingu import __version__
from jingu.errors import JinguError, either
from jingu.verb import Verb, number, one_of, option, parse, part, path, place, several, switch, whole


def _path_or_address(text: str) -> Any:
    from jingu.checkpoint import remote

    return remote.place(text) if "://" in text else path(text)


def _checkpoints(name: str, metavar: str, words: str) -> tuple[str, dict[str, Any]]:
    return name, {"metavar": metavar, "type": _path_or_address, "help": words}


_from_0 = number(lambda value: 0 <= value < math.inf, "0 or more")
_above_0 = number(lambda value: 0 < value < math.inf, "above 0")
_share = number(lambda value: 0 < value <= 1, "above 0, at most 1")
_MODEL = place("model", "MODEL", "a run, a step of it, a Hugging Face folder, a GGUF file or smollm2")
_CHECKPOINTS = _checkpoints("path", "PATH", "a run, a step of it, or an address of either")
_PROCESSES = option("--processes", "N", whole(1), "ranks on this machine (1 where not given)")
_PIPELINE = option("--pipeline", "N", whole(1), "stages that ranks divide the blocks into; those of one share it", 1)
_SAMPLING = (
    option("--top-k", "K", whole(1), "choose among the K likeliest tokens"),
    option("--top-p", "P", _share, "choose among the likeliest that have this probability together"),
    option("--min-p", "P", _from_0, "choose among those at least this share as likely as the likeliest", 0.0),
    option("--repetition-penalty", "R", _above_0, "above 1, tokens there already are less likely", 1.0),
    option("--seed", "N", whole(0), "seed of the choice", 0),
)
_PRECISION = one_of("auto", "fp32", "bf16", "fp64", "int8", "int4")
_COMPUTE = (
    option(
        "--precision",
        "TYPE",
        _PRECISION,
        "fp32, bf16 or fp64; int8 or int4 rounds the matrices to so many bits",
        "auto",
    ),
    option("--device", "TYPE", one_of("auto", "cpu", "cuda"), "compute on cpu or cuda", "auto"),
    option("--experts-resident", "SIZE", str, "so much of a mixture's experts in memory, such as 25%% or 3GB (all)"),
    option("--draft", "MODEL", path, "a smaller model that guesses the tokens to follow"),
    option("--guesses", "N", whole(0), "tokens to guess in a step (4 with --draft, else 0)"),
    switch("--cuda-graphs", "on cuda, record steps and launch them whole"),
    switch("--compile", "on cuda, compile the model's blocks"),
)
_HOST = "127.0.0.1"
_TO = option("--to", "FOLDER", path, "the folder to write", required=True)
_DTYPE = option("--dtype", "TYPE", one_of("auto", "fp32", "bf16", "fp16"), "fp32, bf16, fp16; auto: as stored", "auto")
_CONVERT = (_MODEL, _TO, _DTYPE, switch("--check", "refuse weights that hold NaN or infinity"))

VERBS = {
    "tokenizer train": Verb("train a tokenizer on the corpus", "text.verbs:train", run_file=True),
    "tokenizer extend": Verb("add entries learned from the corpus to a tokenizer", "text.verbs:extend", run_file=True),
    "tokenizer inspect": Verb("show a tokenizer, and how it splits a line", "text.verbs:inspect").taking(
        place("folder", "FOLDER", "the folder of the tokenizer"),
        option("--text", "TEXT", str, "a line to split"),
        option("--file", "FILE", path, "a file to measure bytes per token on"),
    ),
    "data build": Verb("make the data set of the corpus", "data.build:build", run_file=True).taking(
        option("--part", "I/N", part, "build the I-th of N parts, each by a job; the last joins them"),
        option("--on-error", "WHAT", one_of("stop", "skip"), "stop at a mistake in the corpus, or skip the document"),
        option("--executor", "WHAT", one_of("processes", "ray"), "processes here, or ray: a Ray cluster", "processes"),
    ),
    "data inspect": Verb("show a data set, and check it", "data.verbs:inspect").taking(
        place("path", "FOLDER", "the folder of the data set"),
        option("--document", "N", whole(0), "show this document of the training split, from 0"),
        option("--tokenizer", "FOLDER", path, "with which to show its text"),
    ),
    "data preview": Verb(
        "show what a step of a run is trained on, and how often each source is used",
        "data.verbs:preview",
        run_file=True,
    ).taking(
        option("--step", "N", whole(0), "the step, from 0", 0),
        option("--rows", "N", whole(0), "rows of its batch to show", 4),
    ),
    "tune prepare": Verb("make the data set of instruction rows", "tune.prepare:prepare", run_file=True),
    "tune preview": Verb("show which tokens of the rows will be trained", "tune.preview:preview", run_file=True).taking(
        option("--rows", "N", whole(0), "rows to show", 3),
        option("--html", "FILE", path, "write them there, as a page", dest="to"),
    ),
    "tune export": Verb("write the adapters of a run as peft loads them", "tune.adapters:export").taking(
        place("run", "RUN", "a run that trained adapters, or a step of it"), _TO
    ),
    "tune merge": Verb(
        "write a model with its adapters merged, as a Hugging Face folder", "tune.adapters:merge"
    ).taking(
        place("model", "RUN", "a run that trained adapters; or, with --base, a folder of peft"),
        _TO,
        option("--base", "MODEL", path, "the model that peft's adapters are for"),
        _DTYPE,
    ),
    "tune unmerge": Verb("write a model as it was before adapters were merged into it", "tune.adapters:unmerge").taking(
        place("model", "MODEL", "the merged model"),
        _TO,
        option("--adapters", "RUN", path, "their run, or a folder of peft", required=True),
        _DTYPE,
    ),
    "train": Verb("train a model, or go on training it", "train.verbs:train", run_file=True).taking(
        _PROCESSES,
        option("--devices", "CARDS", str, "CUDA cards, a rank each: 0,2,4, or ^1,3 for all but those"),
        option("--trace", "FOLDER", path, "write fingerprints there of what each module gives in the first step"),
        several("--allow", "KEY", "go on though this setting has changed"),
        switch("--fresh-optimizer", "go on with the weights, and a new optimizer"),
        option("--weights-only-from", "MODEL", str, "begin a new run with these weights (initialize.from)"),
    ),
    "verify": Verb(
        "prove that two layouts compute the same, or name what differs first", "train.verify:verify", run_file=True
    ).taking(
        ("--against", {"metavar": "key=value", "nargs": "+", "help": "settings of the other layout (one process)"}),
        option("--all", "N", whole(2), "every layout of N ranks instead", dest="all_of"),
        option("--processes", "N", whole(1), "ranks of the other layout (as few as it takes)"),
        option("--steps", "N", whole(1), "optimizer steps to compare", 3),
        option("--precision", "TYPE", one_of("fp64", "fp32", "bf16", "fp16"), "fp64, fp32, bf16 or fp16", "fp64"),
    ),
    "generate": Verb("continue a text", "infer.verbs:generate", on_ranks=True).taking(
        _MODEL,
        ("prompt", {"metavar": "PROMPT", "help": "the text to continue"}),
        option("--max-tokens", "N", whole(1), "tokens to write at most (128, or what there is room for)"),
        option("--temperature", "T", _from_0, "0 takes the likeliest token each time", 0.0),
        *_SAMPLING,
        several("--stop", "TEXT", "stop at this text"),
        option("--beams", "N", whole(1), "hypotheses of a beam search, of which the best is written; 1: none", 1),
        option("--length-penalty", "P", _from_0, "above 0, longer hypotheses of a beam search are preferred", 1.0),
        *_COMPUTE,
        _PIPELINE,
    ),
    "chat": Verb("talk with a model in the terminal", "serve.terminal:chat").taking(
        _MODEL,
        option("--system", "TEXT", str, "the system prompt"),
        option("--template", "NAME", str, "how a conversation is written (the model's own): chatml …, or a file"),
        option("--max-tokens", "N", whole(1), "tokens of an answer at most", 1024),
        option("--temperature", "T", _from_0, "0 takes the likeliest token each time", 0.7),
        *_SAMPLING,
        *_COMPUTE,
    ),
    "serve": Verb(
        "answer over HTTP, as text-generation-inference and OpenAI do", "serve.verbs:serve", on_ranks=True
    ).taking(
        _MODEL,
        option("--host", "ADDRESS", str, "listen on it; all but this machine's own are reached from elsewhere", _HOST),
        option("--port", "N", whole(0, 65_535), "listen on it; 0 takes a free one", 8000),
        option("--name", "NAME", str, "by which clients ask for the model (its own)"),
        several("--adapter", "NAME=PATH", "adapters beside it, by a name of their own"),
        option("--template", "NAME", str, "for conversations: a name, or a file (the tokenizer's own)"),
        several("--api-key", "KEY", "ask clients for it"),
        option("--api-key-file", "FILE", path, "the same, a key a line"),
        option("--max-batch", "N", whole(1), "texts to generate at a time", 64),
        option("--queue", "N", whole(1), "requests to take before the next is told to come later", 128),
        option("--timeout", "S", _above_0, "seconds that a request may take", 600.0),
        option("--grace", "S", _from_0, "seconds to finish what is under way when asked to stop", 30.0),
        several("--allow-host", "NAME", "another name by which it may be called"),
        several("--cors", "ORIGIN", "pages from there may call it"),
        option("--pooling", "HOW", one_of("mean", "last"), "embeddings of the mean, or of the last token", "mean"),
        switch("--log-prompts", "write prompts into the log, too"),
        *_COMPUTE,
        _PIPELINE,
    ),
    "model list": Verb("show the families and the presets", "checkpoint.models:list_models"),
    "model inspect": Verb("show what a model is, and what it lacks", "checkpoint.models:inspect").taking(
        _MODEL, switch("--json", "as JSON, for programs", dest="as_json")
    ),
    "model grow": Verb("write a larger model that begins with this one's weights", "checkpoint.grow:grow").taking(
        *_CONVERT,
        option("--tokenizer", "FOLDER", path, "its tokenizer; pieces that the old one knows keep their rows"),
        option("--vocabulary", "N", whole(1), "rows of the embedding; new ones are the mean of the old"),
        option("--layers", "N", whole(1), "blocks; new ones are copies that are silent at first"),
        option(
            "--depth-rule",
            "RULE",
            one_of("interleaved", "stacked"),
            "copies stand behind their own block, or stacked behind all",
            "interleaved",
        ),
        switch("--whole-copies", "copies of blocks speak from the start"),
        option("--width", "N", whole(1), "a multiple of the width; heads and feed-forward are repeated, too"),
        option("--experts", "N", whole(1), "experts a block, each a copy of the feed-forward"),
        option("--active", "K", whole(1), "experts a token passes", 2),
        option("--noise", "S", _from_0, "noise of copies, relative to what is copied", 0.0),
        option("--seed", "N", whole(0), "seed of the noise and the routers", 0),
    ),
    "import": Verb("take in a model: a Hugging Face folder or a GGUF file", "checkpoint.verbs:convert").taking(
        *_CONVERT
    ),
    "export": Verb("write a model as a Hugging Face folder", "checkpoint.verbs:convert").taking(*_CONVERT),
    "report": Verb("write a run's report, one HTML file", "report.verbs:report").taking(
        place("run", "RUN", "the folder of the run"),
        option("--to", "FILE", path, "the file to write (RUN/report.html)"),
    ),
    "config show": Verb(
        "print every setting of a run, and what follows from them", "train.show:show", run_file=True
    ).taking(_PROCESSES),
    "config from-deepspeed": Verb(
        "print the run's file that a DeepSpeed configuration amounts to", "config.deepspeed:from_deepspeed"
    ).taking(
        place("file", "DS_CONFIG.json", "DeepSpeed's configuration"),
        option("--processes", "N", whole(1), "data-parallel ranks, where the batch sizes do not tell"),
    ),
    "config schema": Verb("print the JSON Schema of a run's file, for editors", "config.verbs:schema"),
    "checkpoint list": Verb("list the checkpoints of a run", "checkpoint.verbs:list_checkpoints").taking(_CHECKPOINTS),
    "checkpoint verify": Verb("read checkpoints and check every byte", "checkpoint.verbs:verify").taking(_CHECKPOINTS),
    "checkpoint prune": Verb("delete the checkpoints of a run that need not stay", "checkpoint.verbs:prune").taking(
        _checkpoints("run", "RUN", "a run, or its address"),
        option("--keep", "N", whole(1), "so many newest good ones stay", 1),
        option("--keep-every", "N", whole(0), "those whose step is a multiple of this stay, too", 0),
        option("--keep-best", "N", whole(0), "so many with the lowest held-out loss stay, too", 0),
        switch("--damaged", "also delete those that do not verify"),
    ),
    "checkpoint export": Verb(
        "write the model of a checkpoint as a Hugging Face folder", "checkpoint.verbs:convert"
    ).taking(*_CONVERT),
    "checkpoint diff": Verb("tell in what two checkpoints differ", "checkpoint.verbs:diff").taking(
        _checkpoints("first", "FIRST", "a checkpoint, or a run for its newest one, or an address of either"),
        _checkpoints("second", "SECOND", "another"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns 0, what the verb returned, 2 for a mistake the user can mend, 130 when interrupted."""
    if os.getpid() == 1:  # in a container, where the system ignores for it what it does not handle itself
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except JinguError as error:
        print(_paragraph("\n".join([f"jingu: {error}", *getattr(error, "__notes__", [])])), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\njingu: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Else Python complains as it ends.
        return 141


def _reader_left() -> bool:
    """Whether no one reads our output any more, as in `jingu ... | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return bool(poll.poll(0))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(list(VERBS)))
        return 0
    if words[0] == "--version":
        print(f"jingu {__version__}")
        return 0
    name, rest = _find(words)
    if name not in VERBS:
        print(_overview([each for each in VERBS if each.startswith(f"{name} ")]))
        return 0
    entry = VERBS[name]
    options = parse(name, entry, rest)
    if options is None:
        return 0
    if entry.on_ranks and (processes := options.pop("processes") or 1) > 1:
        from jingu.runtime.local import start_local_ranks
        from jingu.runtime.ranks import under_launcher

        if not under_launcher():
            advice = "Start it again; with more --processes each of them holds less of the model."
            return start_local_ranks(processes, words, advice=advice)
    if not entry.run_file:
        return entry.function()(**options) or 0
    from jingu.config.load import load_config

    config = load_config(options.pop("file"), options.pop("overrides"))
    return entry.function()(config, **options) or 0


def _find(words: list[str]) -> tuple[str, list[str]]:
    """The verb that the first words name, and the rest; or the name of a group whose help is asked for."""
    first = words[0]
    if first in VERBS:
        return first, words[1:]
    members = [name.split()[1] for name in VERBS if name.startswith(f"{first} ")]
    if not members:
        if first.endswith((".yaml", ".yml")):
            raise JinguError("the verb is missing.", fix=f"Did you mean `jingu train {first}`?")
        if first.startswith("-"):
            raise JinguError(f"there is no option {first}.", fix="The first word is a verb; `jingu --help` lists them.")
        raise _no_verb(words, list(VERBS))
    if len(words) == 1:
        raise JinguError(f"{first} takes one more word: {either(members)}.")
    if words[1] in ("-h", "--help"):
        return first, []
    if words[1] not in members:
        raise _no_verb([f"{first} {words[1]}"], [f"{first} {member}" for member in members])
    return f"{first} {words[1]}", words[2:]


def _no_verb(words: list[str], choices: list[str]) -> JinguError:
    """The nearest of `choices` to the first word or two, or else the verb that ends in the first (`build`)."""
    near = [get_close_matches(name, choices, n=1) for name in (" ".join(words[:2]), words[0])]
    ends = [name for name in VERBS if name.endswith(f" {words[0]}")]
    guess = next((found[0] for found in [*near, ends] if found), None)
    fix = f"Did you mean `jingu {guess}`?" if guess else "`jingu --help` lists them."
    return JinguError(f"there is no verb {words[0]}.", fix=fix)


def _overview(names: list[str]) -> str:
    width = max(map(len, names))
    lines = "\n".join(f"  {name:<{width}}  {VERBS[name].help}" for name in names)
    return (
        "From raw text to a served language model with one tool, one file and one training loop.\n\n"
        f"{lines}\n\n"
        "`jingu VERB --help` tells what a verb takes. A run is one YAML file; words like\n"
        "optimizer.lr=3e-4 after it change single settings."
    )


def _paragraph(text: str) -> str:
    """Text wrapped to the terminal; as it is where stderr is none."""
    if not sys.stderr.isatty():
        return text
    width = max(40, os.get_terminal_size(sys.stderr.fileno()).columns)
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
