"""The command line: a table of verbs, each a function elsewhere that is imported when it is asked for."""

from __future__ import annotations

import argparse
import math
import os
import pkgutil
import select
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from jingu import __version__
from jingu.errors import JinguError

Argument = tuple[str, dict[str, Any]]
"""A name and what argparse is told of it. A verb's function has a parameter of the same name."""


@dataclass(frozen=True)
class Verb:
    """One verb: a line of help, the function behind it as module:function, and what it takes."""

    help: str
    target: str
    arguments: tuple[Argument, ...] = ()
    run_file: bool = False
    """Whether it takes RUN.yaml and overrides; its function's first argument is then the configuration."""
    on_ranks: bool = False
    """Whether it takes --processes, which starts the same words as so many ranks that share the model."""

    def function(self) -> Callable[..., int | None]:
        """The function, imported."""
        found: Callable[..., int | None] = pkgutil.resolve_name(self.target)
        return found


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _checkpoints(text: str) -> Any:
    from jingu.checkpoint.remote import place

    return place(text) if "://" in text else _path(text)


def _join(words: Sequence[str], last: str) -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) < least:
            raise argparse.ArgumentTypeError(f"takes a whole number ({least} or more), not {text}.")
        return int(text)

    return convert


def _number(fits: Callable[[float], bool], words: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not fits(value):
            raise argparse.ArgumentTypeError(f"takes a number ({words}), not {text}.")
        return value

    return convert


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts) <= 99_999):
        raise argparse.ArgumentTypeError(f"takes a part of several, such as 3/8, not {text}.")
    return int(number), int(parts)


def _one_of(*choices: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"takes {_join(choices, 'or')}, not {text}.")
        return text

    return convert


def _place(name: str, metavar: str, words: str) -> Argument:
    return name, {"metavar": metavar, "type": _path, "help": words}


def _option(flag: str, metavar: str, convert: Callable[[str], Any], words: str, default: Any = None) -> Argument:
    shown = "" if default is None else f" ({default})"
    return flag, {"metavar": metavar, "type": convert, "help": words + shown, "default": default}


_from_0 = _number(lambda value: 0 <= value < math.inf, "0 or more")
_above_0 = _number(lambda value: 0 < value < math.inf, "above 0")
_share = _number(lambda value: 0 < value <= 1, "above 0, at most 1")
_MODEL = _place("model", "MODEL", "a run, a step of it, a Hugging Face folder, a GGUF file or smollm2")
_CHECKPOINTS: Argument = (
    "path",
    {"metavar": "PATH", "type": _checkpoints, "help": "a run, a step of it, or an address of either"},
)
_PROCESSES = _option("--processes", "N", _whole(1), "ranks on this machine (1 where not given)")
_SAMPLING: tuple[Argument, ...] = (
    _option("--top-k", "K", _whole(1), "choose among the K likeliest tokens"),
    _option("--top-p", "P", _share, "choose among the likeliest that have this probability together"),
    _option("--min-p", "P", _from_0, "choose among those at least this share as likely as the likeliest", 0.0),
    _option("--repetition-penalty", "R", _above_0, "above 1, tokens there already are less likely", 1.0),
    _option("--seed", "N", _whole(0), "seed of the choice", 0),
)
_COMPUTE = (
    _option(
        "--precision",
        "TYPE",
        _one_of("auto", "fp32", "bf16", "fp64", "int8", "int4"),
        "fp32, bf16 or fp64; int8 or int4 rounds the matrices to so many bits",
        "auto",
    ),
    _option("--device", "TYPE", _one_of("auto", "cpu", "cuda"), "compute on cpu or cuda", "auto"),
    _option("--experts-resident", "SIZE", str, "so much of a mixture's experts in memory, such as 25%% or 3GB (all)"),
)
_PIPELINE = _option("--pipeline", "N", _whole(1), "stages that ranks divide the blocks into; those of one share it", 1)
_SHARED = (_option("--processes", "N", _whole(1), "ranks on this machine that share the model (1 where not given)"),)
_TO: Argument = ("--to", {"metavar": "FOLDER", "type": _path, "help": "the folder to write", "required": True})
_DTYPE = _option("--dtype", "TYPE", _one_of("auto", "fp32", "bf16", "fp16"), "weights in this; auto: as stored", "auto")
_CONVERT: tuple[Argument, ...] = (
    _MODEL,
    _TO,
    _DTYPE,
    ("--check", {"action": "store_true", "help": "refuse weights that hold NaN or infinity"}),
)

VERBS = {
    "tokenizer train": Verb("train a tokenizer on the corpus", "jingu.text.verbs:train", run_file=True),
    "tokenizer extend": Verb(
        "add entries learned from the corpus to a tokenizer", "jingu.text.verbs:extend", run_file=True
    ),
    "tokenizer inspect": Verb(
        "show a tokenizer, and how it splits a line",
        "jingu.text.verbs:inspect",
        (
            _place("folder", "FOLDER", "the folder of the tokenizer"),
            _option("--text", "TEXT", str, "a line to split"),
            _option("--file", "FILE", _path, "a file to measure bytes per token on"),
        ),
    ),
    "data build": Verb(
        "make the data set of the corpus",
        "jingu.data.build:build",
        (
            _option("--part", "I/N", _part, "build the I-th of N parts, each by a job; the last joins them"),
            _option("--on-error", "WHAT", _one_of("stop", "skip"), "stop at a mistake in the corpus, or skip it"),
            _option("--executor", "WHAT", _one_of("processes", "ray"), "processes here, or a Ray cluster", "processes"),
        ),
        run_file=True,
    ),
    "data inspect": Verb(
        "show a data set, and check it",
        "jingu.data.verbs:inspect",
        (
            _place("path", "FOLDER", "the folder of the data set"),
            _option("--document", "N", _whole(0), "show this document of the training split, from 0"),
            _option("--tokenizer", "FOLDER", _path, "with which to show its text"),
        ),
    ),
    "data preview": Verb(
        "show what a step of a run is trained on, and how often each source is used",
        "jingu.data.verbs:preview",
        (
            _option("--step", "N", _whole(0), "the step, from 0", 0),
            _option("--rows", "N", _whole(0), "rows of its batch to show", 4),
        ),
        run_file=True,
    ),
    "tune prepare": Verb("make the data set of instruction rows", "jingu.tune.prepare:prepare", run_file=True),
    "tune preview": Verb(
        "show which tokens of the rows will be trained",
        "jingu.tune.preview:preview",
        (
            _option("--rows", "N", _whole(0), "rows to show", 3),
            ("--html", {"metavar": "FILE", "type": _path, "dest": "to", "help": "write them there, as a page"}),
        ),
        run_file=True,
    ),
    "tune export": Verb(
        "write the adapters of a run as peft loads them",
        "jingu.tune.adapters:export",
        (
            _place("run", "RUN", "a run that trained adapters, or a step of it"),
            _TO,
        ),
    ),
    "tune merge": Verb(
        "write a model with its adapters merged, as a Hugging Face folder",
        "jingu.tune.adapters:merge",
        (
            _place("model", "RUN", "a run that trained adapters; or, with --base, a folder of peft"),
            _TO,
            _option("--base", "MODEL", _path, "the model that peft's adapters are for"),
            _DTYPE,
        ),
    ),
    "tune unmerge": Verb(
        "write a model as it was before adapters were merged into it",
        "jingu.tune.adapters:unmerge",
        (
            _place("model", "MODEL", "the merged model"),
            _TO,
            (
                "--adapters",
                {"metavar": "RUN", "type": _path, "help": "their run, or a folder of peft", "required": True},
            ),
            _DTYPE,
        ),
    ),
    "train": Verb(
        "train a model, or go on training it",
        "jingu.train.verbs:train",
        (
            _PROCESSES,
            _option("--devices", "CARDS", str, "CUDA cards, a rank each: 0,2,4, or ^1,3 for all but those"),
            _option("--trace", "FOLDER", _path, "write fingerprints there of what each module gives in the first step"),
            ("--allow", {"metavar": "KEY", "action": "append", "help": "go on though this setting has changed"}),
            ("--fresh-optimizer", {"action": "store_true", "help": "go on with the weights, and a new optimizer"}),
            _option("--weights-only-from", "MODEL", str, "begin a new run with these weights (initialize.from)"),
        ),
        run_file=True,
    ),
    "verify": Verb(
        "prove that two layouts compute the same, or name what differs first",
        "jingu.train.verify:verify",
        (
            ("--against", {"metavar": "key=value", "nargs": "+", "help": "settings of the other layout (one process)"}),
            ("--all", {"metavar": "N", "type": _whole(2), "dest": "all_of", "help": "every layout of N ranks instead"}),
            _option("--processes", "N", _whole(1), "ranks of the other layout (as few as it takes)"),
            _option("--steps", "N", _whole(1), "optimizer steps to compare", 3),
            _option("--precision", "TYPE", _one_of("fp64", "fp32", "bf16", "fp16"), "compute in this", "fp64"),
        ),
        run_file=True,
    ),
    "generate": Verb(
        "continue a text",
        "jingu.infer.verbs:generate",
        (
            _MODEL,
            ("prompt", {"metavar": "PROMPT", "help": "the text to continue"}),
            _option("--max-tokens", "N", _whole(1), "tokens to write at most", 128),
            _option("--temperature", "T", _from_0, "0 takes the likeliest token each time", 0.0),
            *_SAMPLING,
            ("--stop", {"metavar": "TEXT", "action": "append", "help": "stop at this text; can be given again"}),
            *_COMPUTE,
            _PIPELINE,
        ),
        on_ranks=True,
    ),
    "chat": Verb(
        "talk with a model in the terminal",
        "jingu.serve.terminal:chat",
        (
            _MODEL,
            _option("--system", "TEXT", str, "the system prompt"),
            _option("--template", "NAME", str, "how a conversation is written (the model's own): chatml …, or a file"),
            _option("--max-tokens", "N", _whole(1), "tokens of an answer at most", 1024),
            _option("--temperature", "T", _from_0, "0 takes the likeliest token each time", 0.7),
            *_SAMPLING,
            *_COMPUTE,
        ),
    ),
    "serve": Verb(
        "answer over HTTP, as text-generation-inference and OpenAI do",
        "jingu.serve.verbs:serve",
        (
            _MODEL,
            _option(
                "--host",
                "ADDRESS",
                str,
                "listen on it; others than this machine's own are reached from elsewhere",
                "127.0.0.1",
            ),
            _option("--port", "N", _whole(0), "listen on it; 0 takes a free one", 8000),
            _option("--name", "NAME", str, "by which clients ask for the model (its own)"),
            (
                "--adapter",
                {"metavar": "NAME=PATH", "action": "append", "help": "adapters beside it, by a name of their own"},
            ),
            _option("--template", "NAME", str, "for conversations: a name, or a file (the tokenizer's own)"),
            ("--api-key", {"metavar": "KEY", "action": "append", "help": "ask clients for it; can be given again"}),
            _option("--api-key-file", "FILE", _path, "the same, a key a line"),
            _option("--max-batch", "N", _whole(1), "texts to generate at a time", 64),
            _option("--queue", "N", _whole(1), "requests to take before the next is told to come later", 128),
            _option("--timeout", "S", _above_0, "seconds that a request may take", 600.0),
            _option("--grace", "S", _from_0, "seconds to finish what is under way when asked to stop", 30.0),
            ("--allow-host", {"metavar": "NAME", "action": "append", "help": "another name by which it may be called"}),
            ("--cors", {"metavar": "ORIGIN", "action": "append", "help": "pages from there may call it"}),
            _option(
                "--pooling", "HOW", _one_of("mean", "last"), "embeddings of the mean, or of the last token", "mean"
            ),
            ("--log-prompts", {"action": "store_true", "help": "write prompts into the log, too"}),
            *_COMPUTE,
            _PIPELINE,
        ),
        on_ranks=True,
    ),
    "model list": Verb("show the families and the presets", "jingu.checkpoint.models:list_models"),
    "model inspect": Verb(
        "show what a model is, and what it lacks",
        "jingu.checkpoint.models:inspect",
        (_MODEL, ("--json", {"dest": "as_json", "action": "store_true", "help": "as JSON, for programs"})),
    ),
    "model grow": Verb(
        "write a larger model that begins with this one's weights",
        "jingu.checkpoint.grow:grow",
        (
            *_CONVERT,
            _option("--tokenizer", "FOLDER", _path, "its tokenizer; pieces that the old one knows keep their rows"),
            _option("--vocabulary", "N", _whole(1), "rows of the embedding; new ones are the mean of the old"),
            _option("--layers", "N", _whole(1), "blocks; new ones are copies that are silent at first"),
            _option("--depth-rule", "RULE", _one_of("interleaved", "stacked"), "where copies stand", "interleaved"),
            ("--whole-copies", {"action": "store_true", "help": "copies of blocks speak from the start"}),
            _option("--width", "N", _whole(1), "a multiple of the width; heads and feed-forward are repeated, too"),
            _option("--experts", "N", _whole(1), "experts a block, each a copy of the feed-forward"),
            _option("--active", "K", _whole(1), "experts a token passes", 2),
            _option("--noise", "S", _from_0, "noise of copies, relative to what is copied", 0.0),
            _option("--seed", "N", _whole(0), "seed of the noise and the routers", 0),
        ),
    ),
    "import": Verb("take in a model: a Hugging Face folder or a GGUF file", "jingu.checkpoint.verbs:convert", _CONVERT),
    "export": Verb("write a model as a Hugging Face folder", "jingu.checkpoint.verbs:convert", _CONVERT),
    "report": Verb(
        "write a run's report, one HTML file",
        "jingu.report.verbs:report",
        (
            _place("run", "RUN", "the folder of the run"),
            _option("--to", "FILE", _path, "the file to write (RUN/report.html)"),
        ),
    ),
    "config show": Verb(
        "print every setting of a run, and what follows from them", "jingu.parallel.verbs:show", (_PROCESSES,), True
    ),
    "config from-deepspeed": Verb(
        "print the run's file that a DeepSpeed configuration amounts to",
        "jingu.config.deepspeed:from_deepspeed",
        (
            _place("file", "DS_CONFIG.json", "DeepSpeed's configuration"),
            _option("--processes", "N", _whole(1), "data-parallel ranks, where the batch sizes do not tell"),
        ),
    ),
    "config schema": Verb("print the JSON Schema of a run's file, for editors", "jingu.config.verbs:schema"),
    "checkpoint list": Verb(
        "list the checkpoints of a run", "jingu.checkpoint.verbs:list_checkpoints", (_CHECKPOINTS,)
    ),
    "checkpoint verify": Verb(
        "read checkpoints and check every byte", "jingu.checkpoint.verbs:verify", (_CHECKPOINTS,)
    ),
    "checkpoint prune": Verb(
        "delete the checkpoints of a run that need not stay",
        "jingu.checkpoint.verbs:prune",
        (
            _place("run", "RUN", "the folder of the run"),
            _option("--keep", "N", _whole(1), "so many newest good ones stay", 1),
            _option("--keep-every", "N", _whole(0), "those whose step is a multiple of this stay, too", 0),
            _option("--keep-best", "N", _whole(0), "so many with the lowest held-out loss stay, too", 0),
            ("--damaged", {"action": "store_true", "help": "also delete those that do not verify"}),
        ),
    ),
    "checkpoint export": Verb(
        "write the model of a checkpoint as a Hugging Face folder", "jingu.checkpoint.verbs:convert", _CONVERT
    ),
    "checkpoint diff": Verb(
        "tell in what two checkpoints differ",
        "jingu.checkpoint.verbs:diff",
        (
            _place("first", "FIRST", "a checkpoint, or a run for its newest one"),
            _place("second", "SECOND", "another"),
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns 0, what the verb returned, 2 for a mistake the user can mend, 130 when interrupted."""
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
        print(_overview([verb for verb in VERBS if verb.startswith(f"{name} ")]))
        return 0
    verb = VERBS[name]
    options = _parse(name, verb, rest)
    if options is None:
        return 0
    if verb.on_ranks and (processes := options.pop("processes") or 1) > 1:
        from jingu.runtime.local import start_local_ranks
        from jingu.runtime.ranks import under_launcher

        if not under_launcher():
            return start_local_ranks(processes, words)
    if not verb.run_file:
        return verb.function()(**options) or 0
    from jingu.config.load import load_config

    config = load_config(options.pop("file"), options.pop("overrides"))
    return verb.function()(config, **options) or 0


def _find(words: list[str]) -> tuple[str, list[str]]:
    """The verb that the first words name, and the rest; or the name of a group whose help is asked for."""
    groups = {verb.split()[0] for verb in VERBS if " " in verb}
    first = words[0]
    if first in VERBS:
        return first, words[1:]
    if first in groups:
        members = [verb.split()[1] for verb in VERBS if verb.startswith(f"{first} ")]
        if len(words) == 1:
            raise JinguError(f"{first} takes one more word: {_join(members, 'or')}.")
        if words[1] in ("-h", "--help"):
            return first, []
        if words[1] in members:
            return f"{first} {words[1]}", words[2:]
        raise _no_verb([f"{first} {words[1]}"], [f"{first} {member}" for member in members])
    if first.endswith((".yaml", ".yml")):
        raise JinguError("the verb is missing.", fix=f"Did you mean `jingu train {first}`?")
    if first.startswith("-"):
        raise JinguError(f"there is no option {first}.", fix="The first word is a verb; `jingu --help` lists them.")
    raise _no_verb(words, list(VERBS))


def _no_verb(words: list[str], choices: list[str]) -> JinguError:
    """The nearest of `choices` to the first word or two, or else the verb that ends in the first (`build`)."""
    near = [get_close_matches(name, choices, n=1) for name in (" ".join(words[:2]), words[0])]
    ends = [verb for verb in VERBS if verb.endswith(f" {words[0]}")]
    guess = next((found[0] for found in [*near, ends] if found), None)
    fix = f"Did you mean `jingu {guess}`?" if guess else "`jingu --help` lists them."
    return JinguError(f"there is no verb {words[0]}.", fix=fix)


class _Parser(argparse.ArgumentParser):
    """argparse, with mistakes told as JinguError."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("argument ").removesuffix(".")
        if words.startswith("the following arguments are required: "):
            missing = words.removeprefix("the following arguments are required: ").split(", ")
            words = _join(missing, "and") + (" is missing" if len(missing) == 1 else " are missing")
        name, colon, reason = words.partition(": ")
        if reason == "expected one argument":
            words = f"{name} needs a value after it"
        elif colon and reason.startswith("takes "):
            words = f"{name} {reason}"
        raise JinguError(f"{words}.", fix=f"`{self.prog} --help` tells what it takes.")


def _parse(name: str, verb: Verb, words: list[str]) -> dict[str, Any] | None:
    """The arguments of a verb by the names of its function's parameters; None when its help was printed."""
    told = verb.help[0].upper() + verb.help[1:] + "."
    parser = _Parser(prog=f"jingu {name}", description=told, allow_abbrev=False, add_help=False)
    if verb.run_file:
        parser.add_argument("file", metavar="RUN.yaml", type=_path, help="the file of the run")
        text = "settings to change, such as optimizer.lr=3e-4"
        parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)
    for flag, known in (*verb.arguments, *(_SHARED if verb.on_ranks else ())):
        parser.add_argument(flag, **known)
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        parser.print_help()
        return None
    options, unknown = parser.parse_known_args(words)
    # argparse gives overrides that stand after an option as unknown.
    for word in unknown:
        if word.startswith("-") or not verb.run_file:
            raise _unknown(word, name, verb)
        options.overrides.append(word)
    del options.help
    return vars(options)


def _unknown(word: str, name: str, verb: Verb) -> JinguError:
    fix = f"`jingu {name} --help` tells what it takes."
    if not word.startswith("-"):
        return JinguError(f"there is a word too many: {word}.", fix=fix)
    flag, sign, value = word.partition("=")
    near = get_close_matches(flag, [known for known, _ in verb.arguments if known.startswith("-")], n=1)
    if near and not (verb.run_file and "." in flag):
        fix = f"Did you mean {near[0]}?"
    elif verb.run_file:
        fix = f"A setting is written without dashes: {flag.lstrip('-')}={value if sign else 'value'}."
    return JinguError(f"there is no option {flag}.", fix=fix)


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
