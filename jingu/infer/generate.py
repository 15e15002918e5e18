"""`jingu generate`: generate the continuation of a prompt in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from jingu.config.sections.parallel import DeviceType
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.infer.cuda_graphs import CudaGraphRunner
from jingu.infer.distributed import distributed_engine, inference_ranks
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings, StepEngine
from jingu.infer.inference_model import InferenceModel, Precision, check_language_model, load, use_byte_kernels
from jingu.infer.kv_cache import block_bytes
from jingu.infer.model_runner import compile_blocks
from jingu.infer.request import FinishReason, Request, max_new_tokens
from jingu.infer.sampling import SamplingOptions, sampling_params
from jingu.runtime.device import find_device_type, has_compiler, has_fast_bf16, parse_size, total_memory
from jingu.runtime.exit_codes import EXIT_INTERRUPTED
from jingu.runtime.ranks import RankInfo
from jingu.runtime.signals import defer_interrupt

KV_CACHE_OPTION = "--kv-cache"


# Stands for a draft model: the model's own layer of multi-token prediction.
OWN_PREDICTIONS = Path("mtp")


@dataclass(frozen=True)
class InferenceOptions:
    """Options of inference that commands have in common.

    Attributes:
        precision: auto computes in bf16 if the device has hardware for it, else in fp32; see also `use_int4_blocks`.
        resident_experts: how much of a model's experts is in memory (25%, 3GB); None keeps all of them.
        kv_cache: size of the KV cache (25% of the memory, 4GB); None: see `EngineSettings.kv_cache_bytes`.
        pipeline: pipeline stages over the launched ranks; the ranks of a stage use tensor parallelism.
        draft_model: a smaller model with the same tokenizer, which proposes draft tokens; `mtp`: the model's own layer
            of multi-token prediction does. They do not change outputs.
        num_speculative_tokens: draft tokens in a step; None: see `EngineSettings`. Without a draft model they are
            looked up in the text so far.
        cuda_graphs: whether to capture decoding steps as CUDA graphs.
        compile: whether to compile the model's blocks.
        threads: CPU threads of this process; None: PyTorch's default, one for each core.
    """

    precision: Precision = "auto"
    device: DeviceType = "auto"
    resident_experts: str | None = None
    kv_cache: str | None = None
    pipeline: int = 1
    draft_model: Path | None = None
    num_speculative_tokens: int | None = None
    cuda_graphs: bool = False
    compile: bool = False
    threads: int | None = None

    def load(
        self,
        model: Path,
        ranks: RankInfo | None = None,
        adapters: Mapping[str, Path] | None = None,
        runtime_adapters: bool = False,
        allow_rewards: bool = False,
    ) -> InferenceModel:
        """Load a model; see `jingu.infer.inference_model.load`. Only `allow_rewards` permits a reward model."""
        # Check options and models before the model is loaded, which takes long.
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        place = torch.device(find_device_type(self.device))
        if self.cuda_graphs and place.type != "cuda":
            raise JinguError("this option needs a model on CUDA.", where="--cuda-graphs", fix="Leave it out.")
        if self.cuda_graphs and self.precision == "stored":
            what = "matrices in their stored form are dequantized in each step, which CUDA graphs cannot capture."
            raise JinguError(what, where="--cuda-graphs", fix="Leave it out, or choose another --precision.")
        if self.compile and place.type == "cpu":
            raise JinguError("this option needs a model on a GPU.", where="--compile", fix="Leave it out.")
        if self.compile and not has_compiler(place):
            what = "there is no compiler here: Triton is needed, and g++ or clang++."
            raise JinguError(what, where="--compile", fix="Install them, or leave it out.")
        self._kv_cache_bytes(place)
        if not allow_rewards:
            check_language_model(model)
        if self.draft_model not in (None, OWN_PREDICTIONS):
            check_language_model(self.draft_model)
        inference_model = load(
            model,
            self.precision,
            self.device,
            adapters,
            self.resident_experts,
            ranks,
            self.pipeline,
            runtime_adapters,
        )
        if ranks is None or ranks.is_first:
            self._warn_of_slow_matmuls(inference_model, place)
        return compile_blocks(inference_model) if self.compile else inference_model

    def _kv_cache_bytes(self, device: torch.device) -> int | None:
        """Return the size of the KV cache in bytes; None if no option sets it."""
        if self.kv_cache is None:
            return None
        total = total_memory(device)
        size = parse_size(self.kv_cache, total, KV_CACHE_OPTION)
        if size > total:
            what = f"{self.kv_cache} is more than the memory, which has {total:,} bytes."
            raise JinguError(what, where=KV_CACHE_OPTION, fix="Give less, or a share such as 25%.")
        return size

    def _warn_of_slow_matmuls(self, model: InferenceModel, device: torch.device) -> None:
        """Warn if the precision is slower than the default on this CPU."""
        if self.precision not in ("bf16", "int8", "int4") or device.type != "cpu" or has_fast_bf16(device):
            return
        if self.precision == "bf16":
            drawback = "is several times slower than fp32"
        elif model.world_size == 1 and use_byte_kernels(model.spec, device):
            drawback = (
                "is faster than the default (fp32) for a single request, and slower for prompts and many requests"
            )
        else:
            drawback = "is slower than the default (fp32) for prompts and for several requests at once"
        print(f"--precision {self.precision} saves memory. On this CPU it {drawback}.", file=sys.stderr)

    def use_int4_blocks(self, model: Path) -> InferenceOptions:
        """Return options for commands that compute few tokens at a time.

        On a CPU without hardware for bf16, they select int4 for GGUF files that have 4-bit blocks, unless a precision
        is set: a single stream is then 1.6 times as fast as in fp32.
        """
        device = torch.device(find_device_type(self.device))
        is_slow = device.type == "cpu" and not has_fast_bf16(device)
        # Only a GGUF model is a file; all other models are folders.
        if self.precision != "auto" or not is_slow or not model.is_file() or not open_model(model).has_int4_blocks:
            return self
        print(f"{model} is computed with its own blocks of 4 bits, as with --precision int4.", file=sys.stderr)
        return replace(self, precision="int4")

    def make_engine(
        self,
        model: InferenceModel,
        max_num_seqs: int = 64,
        kv_cache_tokens: int | None = None,
        max_prefill_seconds: float | None = None,
    ) -> Engine:
        """Load the draft model, if there is one, and return an engine for a model.

        Args:
            kv_cache_tokens: capacity of the KV cache in tokens, unless the options have a size.
            max_prefill_seconds: see `EngineSettings`. A model on several ranks has no such limit.
        """
        use_predictions = self.draft_model == OWN_PREDICTIONS
        draft_model = None
        if self.draft_model is not None and not use_predictions:
            draft_model = load(self.draft_model, self.precision, self.device)
        graphs = CudaGraphRunner() if self.cuda_graphs else None
        kv_cache_bytes = self._kv_cache_bytes(model.parameter.device)
        if kv_cache_bytes is None and kv_cache_tokens is not None:
            kv_cache_bytes = kv_cache_tokens * block_bytes(model.spec, 1, model.parameter.itemsize)
        settings = EngineSettings(
            max_num_seqs,
            kv_cache_bytes=kv_cache_bytes,
            max_prefill_seconds=max_prefill_seconds if model.world_size == 1 else None,
            num_speculative_tokens=self.num_speculative_tokens,
            use_predictions=use_predictions,
        )
        return Engine(model, settings, draft_model, graphs)


# All options at their defaults.
DEFAULT_INFERENCE = InferenceOptions()


def generate(
    model: Path,
    prompt: str,
    sampling: SamplingOptions,
    inference: InferenceOptions = DEFAULT_INFERENCE,
    max_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> int:
    """Print the prompt and its continuation as it is generated (an encoder-decoder's answer only); then, to stderr, the
    speed.

    Args:
        model: a run, a step of a run, a Hugging Face folder or a GGUF file.
        prompt: the text to continue; an empty one begins a new document.
        max_tokens: maximum number of new tokens; None: 128, or fewer if the model's context has no room for them.
        num_beams: beams of a beam search, whose best hypothesis is printed at the end; 1 disables it.
        length_penalty: exponent of a hypothesis's length, by which its log-probability is divided.

    Returns:
        The exit code; 130 after Ctrl-C.

    Raises:
        JinguError: the model, the prompt or an option cannot be used.
    """
    with inference_ranks(inference.device) as ranks:
        if ranks is None:
            inference = inference.use_int4_blocks(model)
        inference_model = inference.load(model, ranks)
        ids = inference_model.encode(prompt)
        if max_tokens is None:
            max_tokens = max(1, min(128, max_new_tokens(inference_model.spec, len(ids))))
        # Beam search ignores the sampling parameters that the model recommends.
        params = sampling_params(sampling, {} if num_beams > 1 else inference_model.default_sampling)
        request = Request(
            ids, params, max_tokens, tuple(stop or ()), num_beams=num_beams, length_penalty=length_penalty
        )
        with distributed_engine(inference.make_engine(inference_model), ranks) as engine:
            if engine is None:
                return 0
            result = print_stream(engine, request, prompt if inference_model.spec.num_encoder_layers is None else "")
            print(result.speed, file=sys.stderr)
            stats = engine.stats()
            if stats.draft_tokens:
                print(f"{stats.accepted_tokens} of {stats.draft_tokens} draft tokens were accepted", file=sys.stderr)
            if stats.experts is not None:
                print(stats.experts, file=sys.stderr)
            return EXIT_INTERRUPTED if result.finish == "cancelled" else 0


class GenerationResult(NamedTuple):
    """Text, number of tokens and duration of a generation."""

    text: str
    tokens: int
    seconds: float
    finish: FinishReason | None

    @property
    def speed(self) -> str:
        """The number of tokens and the tokens per second, as text."""
        return f"{self.tokens} tokens, {self.tokens / self.seconds:.1f} a second"


def print_stream(
    engine: StepEngine, request: Request, before: str = "", layout: Callable[[str | None], str] | None = None
) -> GenerationResult:
    """Print an answer as it is generated, and a newline. Ctrl-C cancels the request. Raise JinguError if the engine
    reports an error.

    Args:
        before: text to print before the answer.
        layout: formats a piece of the answer; called with None at the end. None prints the pieces as they are.
    """
    text = ""
    tokens = 0
    finish: FinishReason | None = None
    error = None
    with defer_interrupt() as interrupted:
        request_id = engine.submit(request)
        start = time.perf_counter()
        sys.stdout.write(before)
        while engine.busy:
            if interrupted():
                engine.cancel(request_id)
            for event in engine.step():
                finish = event.finish_reason or finish
                error = event.error or error
                if event.token is not None:
                    tokens += 1
                    text += event.token.text
                    sys.stdout.write(layout(event.token.text) if layout else event.token.text)
            sys.stdout.flush()
        print(layout(None) if layout else "", flush=True)
        if error is not None:
            raise JinguError(f"{error}.", fix="Try --precision fp32; if that is no better, the weights are damaged.")
        return GenerationResult(text, tokens, time.perf_counter() - start, finish)
