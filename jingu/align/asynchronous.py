"""Asynchronous rollouts: answers generated during training, by weights that are a fixed number of steps old.

The rollout of step n always comes from the weights of step max(n - k, 0), where k is the staleness, regardless of which
weights happen to be ready. A run with generation processes is therefore as reproducible as a synchronous one.
Rollouts generated ahead are saved in the checkpoint, because the weights that generated them no longer exist then.

The loss is the decoupled objective of Hilton et al. (2022): its ratios compare with the log-probabilities under the
weights at the beginning of the step, and truncated importance sampling (Yao et al., 2025) corrects for the difference
between these and the log-probabilities of the sampler.
"""

from __future__ import annotations

import math
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from shutil import rmtree
from typing import IO, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save

from jingu.align.json_client import JsonClient, parse_reply
from jingu.align.prompt_set import Prompt
from jingu.align.rollouts import Generator, Sample, describe_error, merge_parts, raise_error, read_sample, whole_reader
from jingu.align.worker import Worker
from jingu.config.sections.policies import (
    GenerationProcessesSettings,
    GenerationServerSettings,
    GrpoSettings,
    PolicySettings,
)
from jingu.data.permutation import random_uint64
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.peft_export import write_adapters
from jingu.formats.stored_model import StoredModel
from jingu.model.decoder import parameter_shapes
from jingu.model.trainable import is_trained
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.zero import eval_mode
from jingu.runtime.futures import fulfill
from jingu.runtime.ranks import count_ranks, gather_from_all, wait_until_all_done
from jingu.training.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """The answers of a step.

    Attributes:
        step: the step that trains on them, from 0.
        weights_step: the number of training steps of the weights that generated them.
        greedy: one greedy answer to each prompt, for ReMax; otherwise empty.
    """

    step: int
    weights_step: int
    samples: list[Sample]
    greedy: list[Sample] = field(default_factory=list)


class GenerationSource(Protocol):
    """Generates with the trainer's weights. Only the first rank has one, and calls it from a separate thread."""

    def update(self, weights: str, step: int) -> None:
        """Load the weights of a step for all generation from now on.

        Args:
            weights: path of a safetensors file.

        Raises:
            JinguError: the weights cannot be loaded.
        """

    def generate(self, step: int, *, greedy: bool = False) -> list[Sample]:
        """Return the answers to the prompts of a step, or one greedy answer to each. Raises JinguError."""

    def close(self) -> None:
        """Stop its processes or release its adapter, after the last rollout."""


class AsynchronousRollouts:
    """Rollouts that a source generates ahead. Every rank has one, and all ranks call its methods together.

    Args:
        device: the first rank's device.
    """

    def __init__(self, run: Run, generator: Generator, device: torch.device) -> None:
        settings = run.config.task
        assert isinstance(settings, PolicySettings)
        self._run = run
        self._precision = generator.precision
        self._has_greedy = isinstance(settings, GrpoSettings) and settings.needs_greedy
        self._staleness = settings.staleness
        source = settings.generation_source
        # A server has already loaded the base model.
        self._sends_adapters = isinstance(source, GenerationServerSettings)
        self._source: GenerationSource | None = None
        if dist.get_rank() == 0 and isinstance(source, GenerationServerSettings):
            self._source = GenerationServer(run, source, generator)
        elif dist.get_rank() == 0 and isinstance(source, GenerationProcessesSettings):
            self._source = GenerationProcesses(run, source, device)
        self._jobs = _JobQueue()
        # Rollouts by step. While one is being generated, the first rank has its future, and the others have None.
        self._in_flight: dict[int, Rollout | Future[Rollout] | None] = {}

    def take(self, model: ParallelModel, step: int) -> Rollout:
        """Return the rollout of a step, after starting the generation of later ones with the current weights.

        Raises:
            StepNotStartedError: the rollout could not be generated.
        """
        last = self._run.config.train.steps - 1
        steps = [number for number in range(step, step + self._staleness + 1) if number <= last]
        steps = [number for number in steps if number not in self._in_flight]
        if steps:
            self._start(model, step, steps)
        value = self._outcome(step)
        raise_error(value)
        del self._in_flight[step]
        if step == last and self._source is not None:
            self._source.close()
        return _read_rollout(value)

    def state(self) -> Any:
        """Wait for all rollouts in flight and return them as JSON, without those that failed."""
        outcomes = {step: self._outcome(step) for step in sorted(self._in_flight)}
        rollouts = {step: value for step, value in outcomes.items() if "error" not in value}
        self._in_flight |= {step: _read_rollout(value) for step, value in rollouts.items()}
        return list(rollouts.values())

    def load_state(self, state: Any) -> None:
        """Replace the rollouts in flight by those of a checkpoint; None for a checkpoint without any."""
        self._jobs.cancel()
        rollouts = [_read_rollout(value) for value in state or []]
        self._in_flight = {rollout.step: rollout for rollout in rollouts}

    def _start(self, model: ParallelModel, weights_step: int, steps: list[int]) -> None:
        """Start generating the rollouts of these steps with the model's current weights."""
        file = self._write_weights(model)
        if self._source is None or file is None:
            self._in_flight |= dict.fromkeys(steps)
            return
        update = self._jobs.submit(partial(_update, self._source, file, weights_step))
        for step in steps:
            self._in_flight[step] = self._jobs.submit(partial(self._generate, update, step, weights_step))

    def _generate(self, update: Future[None], step: int, weights_step: int) -> Rollout:
        """Return the rollout of a step, generated after a weight update has finished."""
        assert self._source is not None
        update.result()
        samples = self._source.generate(step)
        greedy = self._source.generate(step, greedy=True) if self._has_greedy else []
        return Rollout(step, weights_step, samples, greedy)

    def _outcome(self, step: int) -> dict[str, Any]:
        """Wait for the rollout of a step, and return it or its error as JSON on every rank."""
        rollout = self._in_flight[step]
        if isinstance(rollout, Rollout):
            return asdict(rollout)
        # Generation may take longer than the timeout of a collective, so poll until all ranks are done.
        wait_until_all_done(lambda seconds: rollout is None or rollout in wait([rollout], seconds).done)
        value: dict[str, Any] = {}
        if rollout is not None:
            try:
                value = asdict(rollout.result())
            except JinguError as error:
                value = describe_error(error)
        return dict(gather_from_all(value)[0])

    def _write_weights(self, model: ParallelModel) -> IO[bytes] | None:
        """Gather the weights into a file on the first rank; return None on the others. Every rank calls this."""
        names = [
            name for name in parameter_shapes(model.spec) if not self._sends_adapters or is_trained(name, model.spec)
        ]
        tensors = {}
        with eval_mode(model):
            read = whole_reader(model, self._precision)
            for name in names:
                weight = read(name)
                if self._source is not None:
                    tensors[name] = weight.cpu().contiguous()
        if self._source is None:
            return None
        file = _open_memory_file()
        file.write(save(tensors))
        file.flush()
        return file


class _JobQueue:
    """Calls functions one after another in a daemon thread.

    Weights therefore change only between rollouts, and rollouts are generated in the order of their steps.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._futures: list[Future[Any]] = []
        threading.Thread(target=_run_jobs, args=(self._jobs,), daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function, and return a future of its result."""
        future: Future[T] = Future()
        self._futures = [*(pending_future for pending_future in self._futures if not pending_future.done()), future]
        self._jobs.put(partial(fulfill, future, function))
        return future

    def cancel(self) -> None:
        """Cancel the functions that have not started."""
        for future in self._futures:
            future.cancel()


def _run_jobs(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


def _update(source: GenerationSource, file: IO[bytes], step: int) -> None:
    """Load the weights in a file into the source, and free the file."""
    with file:
        source.update(_path_of(file), step)


def _read_rollout(value: dict[str, Any]) -> Rollout:
    samples = [[read_sample(sample) for sample in value[name]] for name in ("samples", "greedy")]
    return Rollout(value["step"], value["weights_step"], *samples)


def _open_memory_file() -> IO[bytes]:
    """Return a file in main memory, freed when it is closed or this process ends."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("weights"), "wb")
    return tempfile.NamedTemporaryFile()


def _path_of(file: IO[bytes]) -> str:
    """Return a path through which other processes on this machine can open a file."""
    return file.name if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.fileno()}"


# Sources of asynchronous rollouts: processes on this machine, or a server with OpenAI's protocol.

_WHERE = "task.asynchronous"
# Log-probabilities are at most 0, apart from rounding.
_MAX_LOGPROB = 1e-4


class GenerationProcesses:
    """Processes on this machine, each with a whole copy of the model; see `jingu.align.generation_worker`."""

    def __init__(self, run: Run, settings: GenerationProcessesSettings, device: torch.device) -> None:
        self._settings = settings
        config, spec = run.config.model_dump(mode="json"), run.spec.model_dump(mode="json")
        threads = settings.threads or torch.get_num_threads()
        self._setups = [
            {"config": config, "spec": spec, "device": name, "threads": threads}
            for name in _choose_devices(device, settings.processes)
        ]
        self._workers = [Worker("jingu.align.generation_worker") for _ in self._setups]
        self._executor = ThreadPoolExecutor(len(self._workers))

    def update(self, weights: str, step: int) -> None:
        self._ask_all([{"setup": setup, "weights": weights} for setup in self._setups])

    def generate(self, step: int, *, greedy: bool = False) -> list[Sample]:
        count = len(self._workers)
        requests = [{"step": step, "share": (index, count), "greedy": greedy} for index in range(count)]
        return merge_parts(reply["answers"] for reply in self._ask_all(requests))

    def _ask_all(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the reply of each process to its request."""
        return list(self._executor.map(self._ask, self._workers, requests))

    def _ask(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        timeout = self._settings.timeout
        try:
            reply = worker.exchange(request, timeout)
        except TimeoutError:
            what = f"a process did not generate the answers of a step within {timeout:g} seconds."
            raise JinguError(what, where=_WHERE, fix="Start more processes, or raise timeout.") from None
        if "error" in reply:
            what = f"a generation process failed: {reply['error']}."
            raise JinguError(what, where=_WHERE, fix="The run resumes from its checkpoint.")
        return reply

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _choose_devices(device: torch.device, count: int) -> list[str]:
    """Return the devices of processes: GPUs that no rank of this machine uses, else the GPU of the first rank."""
    if device.type == "cpu":
        return ["cpu"] * count
    own_index = device.index or 0
    free = range(count_ranks(None)[1], torch.accelerator.device_count())
    return [f"{device.type}:{free[index % len(free)] if free else own_index}" for index in range(count)]


class GenerationServer:
    """A server that loads the run's adapter, under a new name after each step, and generates with it.

    Prompts and answers travel as token ids, so no text is tokenized a second time.
    """

    def __init__(self, run: Run, settings: GenerationServerSettings, generator: Generator) -> None:
        self._settings = settings
        self._generator = generator
        self._run = run
        self._client = JsonClient(_WHERE, settings.timeout, settings.retries, settings.api_key_file)
        # A random part in the name: the server may still hold adapters of an earlier start of the run.
        self._prefix = f"{run.config.name}-{secrets.token_hex(3)}-step"
        self._adapter: tuple[str, Path] | None = None
        self._executor = ThreadPoolExecutor(settings.concurrency)
        self._url = settings.url.rstrip("/")

    def update(self, weights: str, step: int) -> None:
        name = f"{self._prefix}-{step}"
        folder = (self._run.folder / "generation" / name).absolute()
        _write_adapter(self._run, weights, folder)
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            self._client.post(f"{self._url}/load_lora_adapter", body, bytes, "place to the adapter")
        except JinguError as error:
            what = (
                f"the server does not have the weights of step {step}, and its answers would be too old: {error.what}"
            )
            fix = (
                "Start it so that it loads adapters: `jingu serve MODEL --runtime-adapters`, or vLLM with "
                "--enable-lora and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
            )
            raise JinguError(what, where=_WHERE, fix=fix) from error
        self._unload()
        self._adapter = name, folder

    def _unload(self) -> None:
        """Unload the last adapter from the server. A failure is harmless: the server keeps the adapter for longer."""
        if self._adapter is not None:
            name, folder = self._adapter
            with suppress(JinguError):
                client = JsonClient(_WHERE, self._settings.timeout, 0, self._settings.api_key_file)
                client.post(f"{self._url}/unload_lora_adapter", {"lora_name": name}, bytes, "reply")
            rmtree(folder, ignore_errors=True)

    def generate(self, step: int, *, greedy: bool = False) -> list[Sample]:
        prompts = self._generator.select(step)
        count = 1 if greedy else self._generator.settings.answers_per_prompt
        places = [(place, choice) for place in range(len(prompts)) for choice in range(count)]

        def ask(place: int, choice: int) -> Sample:
            key = random_uint64("server", 1, self._generator.seed, step, prompts[place].row, place, choice)
            return self._ask(prompts[place], choice, int(key[0]) >> 33, greedy)

        return list(self._executor.map(ask, *zip(*places, strict=True)))

    def _ask(self, prompt: Prompt, choice: int, seed: int, greedy: bool) -> Sample:
        """Return an answer."""
        assert self._adapter is not None
        adapter = self._adapter[0]
        prompts = self._generator.prompts
        body = {
            "model": adapter,
            "prompt": prompt.ids,
            "max_tokens": self._generator.settings.max_new_tokens,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stop": prompts.stop,
            "stop_token_ids": prompts.eos_token_ids,
            # Override the sampling parameters that the model's generation_config recommends.
            "temperature": 0.0 if greedy else 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }

        def read(content: bytes) -> Sample:
            reply = parse_reply(content)
            if reply["model"] != adapter:
                raise ValueError(f"the answer has the weights of {reply['model']}, not of {adapter}")
            answer = reply["choices"][0]
            ids, logprobs, finish_reason = check_answer(
                answer,
                self._run.spec.vocab_size,
                self._generator.settings.max_new_tokens,
                prompts.eos_token_ids,
                has_stop=bool(prompts.stop),
            )
            return Sample(prompt.text, prompt.row, choice, prompt.ids, ids, logprobs, answer["text"], finish_reason)

        return self._client.post(f"{self._url}/completions", body, read, "answer with token ids and log-probabilities")

    def close(self) -> None:
        self._unload()


def check_answer(
    answer: dict[str, Any], vocab_size: int, max_tokens: int, eos_token_ids: Sequence[int], *, has_stop: bool
) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    """Return the ids, log-probabilities and reason of the end of a server's answer.

    Args:
        eos_token_ids: ids that end an answer.
        has_stop: whether a text may end an answer.

    Raises:
        ValueError: they cannot be an answer to the request.
    """
    ids, logprobs = answer["token_ids"], answer["logprobs"]["token_logprobs"]
    reason = answer["finish_reason"]
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs) or not ids:
        raise ValueError(f"token ids {str(ids)[:40]} and log-probabilities {str(logprobs)[:40]}, not one for each")
    if not isinstance(answer["text"], str):
        raise ValueError(f"the text is {answer['text']!r}")
    if len(ids) > max_tokens:
        raise ValueError(f"{len(ids)} tokens, more than max_tokens {max_tokens}")
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(f"the token id {token_id!r} is not in the vocabulary of {vocab_size}")
    for value in logprobs:
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value <= _MAX_LOGPROB:
            raise ValueError(f"{value!r} is not the log-probability of a token")
    if any(token_id in eos_token_ids for token_id in ids[:-1]):
        raise ValueError("it goes on after its end token")
    ends = ids[-1] in eos_token_ids
    if reason not in ("stop", "length"):
        raise ValueError(f"the finish reason is {reason!r}, neither stop nor length")
    if reason == "length" and len(ids) < max_tokens:
        raise ValueError(f"it was cut off after {len(ids)} of {max_tokens} tokens; is the server's context too short?")
    if reason == "stop" and not ends and not has_stop:
        raise ValueError("it stopped without an end token")
    return tuple(ids), tuple(map(float, logprobs)), "end" if ends else reason


def _write_adapter(run: Run, weights: str, folder: Path) -> None:
    """Write the adapter in a safetensors file as a folder in peft's format."""
    path = run.config.initialize.from_
    assert path is not None
    tensors = load_file(weights)
    rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    base = open_model(Path(path))
    adapters = StoredModel(run.spec, lambda name, expert=None: tensors[name], None, run.folder)
    write_adapters(adapters, base, Path(path), folder)
