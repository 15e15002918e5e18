"""`jingu generate`: a model continues a prompt in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.infer.cuda_graphs import CudaGraphRunner
from jingu.infer.distributed import distributed_engine, inference_ranks
from jingu.infer.engine import BaseEngine, Engine, EngineSettings
from jingu.infer.inference_model import Device, InferenceModel, Precision, load, resolve_device
from jingu.infer.model_runner import compile_blocks
from jingu.infer.request import FinishReason, Request, max_new_tokens
from jingu.infer.sampling import SamplingParams
from jingu.runtime.device import has_compiler
from jingu.runtime.ranks import RankInfo
from jingu.runtime.signals import EXIT_INTERRUPTED, defer_interrupt


@dataclass(frozen=True)
class InferenceOptions:
    """How a model computes, as verbs are asked for it.

    Attributes:
        precision: auto computes in bf16 where the device has units for it, else in fp32.
        resident_experts: how much of a mixture's experts is in memory (25%, 3GB); None: all.
        pipeline: stages that ranks, where a launcher has started several, divide the model's blocks into; the ranks of
            a stage share its matrices.
        draft_model: a smaller model with the same tokenizer, that proposes the next tokens; the output
            stays the same.
        num_speculative_tokens: tokens that are guessed in a step; without a draft, from what is there already.
        cuda_graphs: whether steps of one token a text are recorded, and launched whole.
        compile: whether blocks are compiled.
    """

    precision: Precision = "auto"
    device: Device = "auto"
    resident_experts: str | None = None
    pipeline: int = 1
    draft_model: Path | None = None
    num_speculative_tokens: int | None = None
    cuda_graphs: bool = False
    compile: bool = False

    def load(
        self, model: Path, ranks: RankInfo | None = None, adapters: Mapping[str, Path] | None = None
    ) -> InferenceModel:
        """The model, as `jingu.infer.inference_model.load`."""
        place = torch.device(resolve_device(self.device))
        for enabled, where in ((self.cuda_graphs, "--cuda-graphs"), (self.compile, "--compile")):
            if enabled and place.type != "cuda":
                raise JinguError("it is for models on CUDA.", where=where, fix="Leave it out.")
        if self.compile and not has_compiler(place):
            what = "there is no compiler here: Triton is needed, and g++ or clang++."
            raise JinguError(what, where="--compile", fix="Install them, or leave it out.")
        if self.draft_model is not None:
            open_model(self.draft_model)  # what is wrong with it is told first: loading takes its time
        inference_model = load(
            model, self.precision, self.device, adapters, self.resident_experts, ranks, self.pipeline
        )
        return compile_blocks(inference_model) if self.compile else inference_model

    def make_engine(self, model: InferenceModel, max_batch: int = 64) -> Engine:
        """Its engine, with the draft."""
        small = None if self.draft_model is None else load(self.draft_model, self.precision, self.device)
        graphs = CudaGraphRunner() if self.cuda_graphs else None
        return Engine(
            model,
            EngineSettings(max_num_seqs=max_batch, num_speculative_tokens=self.num_speculative_tokens),
            small,
            graphs,
        )


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
        compute: as of `InferenceOptions`.

    Returns:
        The exit code; 130 where Ctrl-C ended it.

    Raises:
        JinguError: what is wrong with the model, the prompt or the settings.
    """
    sampling = SamplingParams(temperature, top_k, 1.0 if top_p is None else top_p, repetition_penalty, seed, min_p)
    how = InferenceOptions(**compute)
    with inference_ranks(how.device) as ranks:
        inference_model = how.load(model, ranks)
        ids = inference_model.encode(prompt)
        if max_tokens is None:
            max_tokens = max(1, min(128, max_new_tokens(inference_model.spec, len(ids))))
        request = Request(ids, sampling, max_tokens, tuple(stop or ()), num_beams=beams, length_penalty=length_penalty)
        with distributed_engine(how.make_engine(inference_model), ranks) as engine:
            if engine is None:
                return 0
            written = print_stream(engine, request, prompt if inference_model.spec.num_encoder_layers is None else "")
            print(written.speed, file=sys.stderr)
            stats = engine.stats()
            if stats.draft_tokens:
                print(f"{stats.accepted_tokens} of {stats.draft_tokens} guesses were right", file=sys.stderr)
            if stats.experts is not None:
                print(stats.experts, file=sys.stderr)
            return EXIT_INTERRUPTED if written.finish == "cancelled" else 0


class GenerationResult(NamedTuple):
    """An answer that was printed."""

    text: str
    tokens: int
    seconds: float
    finish: FinishReason | None

    @property
    def speed(self) -> str:
        """In words."""
        return f"{self.tokens} tokens, {self.tokens / self.seconds:.1f} a second"


def print_stream(engine: BaseEngine, request: Request, before: str = "") -> GenerationResult:
    """Print a text, an answer as it grows, and a new line. Ctrl-C ends it. Raises JinguError where the engine does."""
    pieces: list[str] = []
    tokens, finish, broken = 0, None, None
    with defer_interrupt() as interrupted:
        number, start = engine.submit(request), time.perf_counter()
        sys.stdout.write(before)
        while engine.busy:
            if interrupted():
                engine.cancel(number)
            for event in engine.step():
                finish, broken = event.finish_reason or finish, event.error
                if event.token is not None:
                    tokens += 1
                    pieces.append(event.token.text)
                    sys.stdout.write(event.token.text)
            sys.stdout.flush()
        print(flush=True)
        if broken is not None:
            raise JinguError(f"{broken}.", fix="Try --precision fp32; if that is no better, the weights are damaged.")
        return GenerationResult("".join(pieces), tokens, time.perf_counter() - start, finish)
