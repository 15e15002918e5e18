"""A process that generates answers during training. It reads and writes one JSON object per line.

A request names a file of weights to load, or asks for a share of the answers of a step. The reply is {},
{"answers": [[PLACE, SAMPLE], ...]} or {"error": "..."}.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from jingu.align.environment import Environments
from jingu.align.prompt_set import load_prompts
from jingu.align.rollouts import Generator
from jingu.config.schema import RunConfig
from jingu.config.sections.policies import PolicySettings
from jingu.errors import JinguError
from jingu.infer.inference_model import InferenceModel
from jingu.model.spec import ModelSpec
from jingu.runtime.device import device_module, retain_freed_memory
from jingu.runtime.json_lines import answer_requests, read_requests
from jingu.text.tokenizer import Tokenizer
from jingu.training.initialize import keep_base
from jingu.training.precision import choose_precision


class GenerationWorker:
    """Generates with the newest weights.

    Args:
        setup: configuration of the run, specification of its model, device and CPU threads.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        config = RunConfig.model_validate_json(json.dumps(setup["config"]))
        settings = config.task
        assert isinstance(settings, PolicySettings)
        self._spec = ModelSpec.model_validate_json(json.dumps(setup["spec"]))
        self._device = torch.device(setup["device"])
        torch.set_num_threads(setup["threads"])
        if self._device.type == "cpu":
            retain_freed_memory()
        else:
            device_module(self._device).set_device(self._device)
        tokenizer = Tokenizer.load(Path(config.tokenizer.path))
        environments = None if settings.environment is None else Environments(settings.environment)
        tools = environments.tools if environments is not None else ()
        prompts = load_prompts(settings, tokenizer, config.batch.sequence_length, config.initialize.from_, tools)
        precision = choose_precision(config.precision, self._device)
        base = keep_base(config, self._spec, self._device)
        self._generator = Generator(prompts, settings, tokenizer, precision, config.seed, environments, base)
        self._weights = ExitStack()
        self._model: InferenceModel | None = None

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Load weights, after freeing the previous ones."""
        self._model = None
        self._weights.close()
        tensors = load_file(path, device=str(self._device))
        copy = self._generator.copy_of(self._spec, tensors.__getitem__, self._device.type)
        self._model = self._weights.enter_context(copy)

    @torch.no_grad()
    def generate(self, step: int, share: tuple[int, int], greedy: bool) -> dict[str, Any]:
        """Return a share of the answers of a step: sampled ones, or one greedy answer to each prompt."""
        assert self._model is not None
        prompts = self._generator.select(step)
        return {"answers": self._generator.generate_share(self._model, prompts, share, step, greedy=greedy)}


def main() -> None:
    """Serve requests until standard input is closed, which also aborts a running generation."""
    worker: GenerationWorker | None = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal worker
        worker = worker or GenerationWorker(request["setup"])
        if "weights" in request:
            worker.load(request["weights"])
            return {}
        return worker.generate(request["step"], tuple(request["share"]), request["greedy"])

    answer_requests(read_requests(), answer, JinguError)


if __name__ == "__main__":
    main()
