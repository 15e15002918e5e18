"""`jingu generate`: a model continues a prompt in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jingu.checkpoint.hub import open_model
from jingu.errors import JinguError
from jingu.infer.engine import Engine, EngineSettings
from jingu.infer.forward import compiled
from jingu.infer.graphs import Graphs
from jingu.infer.load import Device, Loaded, Precision, device_of, load
from jingu.infer.lockstep import Driven, in_lockstep, ranks_of
from jingu.infer.request import Finish, Request, room_after
from jingu.infer.sampling import Sampling
from jingu.runtime.device import has_compiler
from jingu.runtime.ranks import Ranks
from jingu.runtime.signals import STOPPED, interruptible


@dataclass(frozen=True)
class Compute:
    """How a model computes, as verbs are asked for it.

    Attributes:
        precision: auto computes in bf16 where the device has units for it, else in fp32.
        experts_resident: how much of a mixture's experts is in memory (25%, 3GB); None: all.
        pipeline: stages that ranks, where a launcher has started several, divide the model's blocks into; the ranks of
            a stage share its matrices.
        draft: a smaller model with the same tokenizer, that guesses the tokens to follow; the answer stays the same.
        guesses: tokens that are guessed in a step; without a draft, from what is there already.
        cuda_graphs: whether steps of one token a text are recorded, and launched whole.
        compile: whether blocks are compiled.
    """

    precision: Precision = "auto"
    device: Device = "auto"
    experts_resident: str | None = None
    pipeline: int = 1
    draft: Path | None = None
    guesses: int | None = None
    cuda_graphs: bool = False
    compile: bool = False

    def load(self, model: Path, ranks: Ranks | None = None, adapters: Mapping[str, Path] | None = None) -> Loaded:
        """The model, as `jingu.infer.load.load`."""
        place = torch.device(device_of(self.device))
        for wanted, where in ((self.cuda_graphs, "--cuda-graphs"), (self.compile, "--compile")):
            if wanted and place.type != "cuda":
                raise JinguError("it is for models on CUDA.", where=where, fix="Leave it out.")
        if self.compile and not has_compiler(place):
            what = "there is no compiler here: Triton is needed, and g++ or clang++."
            raise JinguError(what, where="--compile", fix="Install them, or leave it out.")
        if self.draft is not None:
            open_model(self.draft)  # what is wrong with it is told first: loading takes its time
        made = load(model, self.precision, self.device, adapters, self.experts_resident, ranks, self.pipeline)
        return compiled(made) if self.compile else made

    def engine(self, loaded: Loaded, max_batch: int = 64) -> Engine:
        """Its engine, with the draft."""
        small = None if self.draft is None else load(self.draft, self.precision, self.device)
        graphs = Graphs() if self.cuda_graphs else None
        return Engine(loaded, EngineSettings(max_batch=max_batch, guesses=self.guesses), small, graphs)


def generate(
    model: Path,
    prompt: str,
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] | None = None,
    beams: int = 1,
    length_penalty: float = 1.0,
    **compute: Any,
) -> int:
    """Print the prompt and its continuation (with an encoder, its answer) as it grows; then, to stderr, the speed.

    Args:
        model: a run, a step of a run, a Hugging Face folder or a GGUF file.
        prompt: empty to begin a new document.
        max_tokens: most tokens to generate; None: 128, or what the model's context has room for.
        beams: hypotheses of a beam search, whose best one is printed when all have ended; 1: none.
        length_penalty: power of the length that divides a hypothesis's log-probability.
        compute: as of `Compute`.

    Returns:
        The exit code; 130 where Ctrl-C ended it.

    Raises:
        JinguError: what is wrong with the model, the prompt or the settings.
    """
    sampling = Sampling(temperature, top_k, 1.0 if top_p is None else top_p, repetition_penalty, seed, min_p)
    how = Compute(**compute)
    with ranks_of(how.device) as ranks:
        made = how.load(model, ranks)
        ids = made.encode(prompt)
        if max_tokens is None:
            max_tokens = max(1, min(128, room_after(made.spec, len(ids))))
        request = Request(ids, sampling, max_tokens, tuple(stop or ()), beams=beams, length_penalty=length_penalty)
        with in_lockstep(how.engine(made), ranks) as engine:
            if engine is None:
                return 0
            written = write(engine, request, prompt if made.spec.encoder_layers is None else "")
            print(written.speed, file=sys.stderr)
            stats = engine.stats()
            if stats.guessed_tokens:
                print(f"{stats.right_guesses} of {stats.guessed_tokens} guesses were right", file=sys.stderr)
            if stats.experts is not None:
                print(stats.experts, file=sys.stderr)
            return STOPPED if written.finish == "cancelled" else 0


class Written(NamedTuple):
    """An answer that was printed."""

    text: str
    tokens: int
    seconds: float
    finish: Finish | None

    @property
    def speed(self) -> str:
        """In words."""
        return f"{self.tokens} tokens, {self.tokens / self.seconds:.1f} a second"


def write(engine: Driven, request: Request, before: str = "") -> Written:
    """Print a text, an answer as it grows, and a new line. Ctrl-C ends it. Raises JinguError where the engine does."""
    pieces: list[str] = []
    tokens, finish, broken = 0, None, None
    with interruptible() as interrupted:
        number, start = engine.submit(request), time.perf_counter()
        sys.stdout.write(before)
        while engine.busy:
            if interrupted():
                engine.cancel(number)
            for event in engine.step():
                finish, broken = event.finish or finish, event.error
                if event.token is not None:
                    tokens += 1
                    pieces.append(event.token.text)
                    sys.stdout.write(event.token.text)
            sys.stdout.flush()
        print(flush=True)
        if broken is not None:
            raise JinguError(f"{broken}.", fix="Try --precision fp32; if that is no better, the weights are damaged.")
        return Written("".join(pieces), tokens, time.perf_counter() - start, finish)
