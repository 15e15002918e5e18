"""Sources of asynchronous rollouts: processes on this machine, or a server with OpenAI's protocol."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors.torch import load_file

from jingu.align.json_client import JsonClient, parse_reply
from jingu.align.prompt_set import Prompt
from jingu.align.reward_list import Worker
from jingu.align.rollouts import Generator, Sample, merge_parts
from jingu.config.sections.policies import GenerationProcessesSettings, GenerationServerSettings
from jingu.data.permutation import random_uint64
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.peft_export import write_adapters
from jingu.formats.stored_model import StoredModel
from jingu.runtime.ranks import count_ranks
from jingu.training.run import Run

_WHERE = "task.asynchronous"


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
    own = device.index or 0
    free = range(count_ranks(None)[1], torch.accelerator.device_count())
    return [f"{device.type}:{free[index % len(free)] if free else own}" for index in range(count)]


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
            ids, logprobs = tuple(answer["token_ids"]), tuple(answer["logprobs"]["token_logprobs"])
            if len(ids) != len(logprobs) or not ids:
                raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probabilities")
            finish_reason = "end" if ids[-1] in prompts.eos_token_ids else "stop"
            if answer["finish_reason"] == "length":
                finish_reason = "length"
            return Sample(
                prompt.text, prompt.row, choice, prompt.ids, ids, logprobs, str(answer["text"]), finish_reason
            )

        return self._client.post(f"{self._url}/completions", body, read, "answer with token ids and log-probabilities")

    def close(self) -> None:
        self._unload()


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
