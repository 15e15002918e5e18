"""jingu as a model of lm-evaluation-harness: importing this module registers `--model jingu`.

`python -m jingu.evaluate.harness_model run --model jingu --model_args pretrained=MODEL ...` runs the harness with it.
MODEL is anything that jingu reads; `precision` (fp32) and `device` (auto) are further arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from jingu.chat.messages import ConversationError, Message
from jingu.chat.template_sources import load_template
from jingu.chat.templates import ChatTemplate
from jingu.config.sections.parallel import DeviceType
from jingu.evaluate.scoring import AnswerCache, Scorer, generation_request
from jingu.evaluate.task_file import TaskSettings
from jingu.infer.engine import Engine
from jingu.infer.inference_model import Precision, load


@register_model("jingu")
class JinguLM(LM):  # type: ignore[misc]  # the harness has no type annotations
    """A model that runs on jingu's engine. It needs no batch size: the engine packs tokens of many requests.

    Args:
        pretrained: a run, a step of a run, a Hugging Face folder or a GGUF file.
        batch_size, max_batch_size: ignored; the harness passes them to every model.
    """

    def __init__(
        self,
        pretrained: str,
        precision: Precision = "fp32",
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        # The harness may pass a device with an index, such as cuda:0. Without a choice of the user it passes that on
        # machines without a GPU too.
        place = cast(DeviceType, "auto" if device is None else device.partition(":")[0])
        place = "auto" if place == "cuda" and not torch.cuda.is_available() else place
        model = load(Path(pretrained), precision, place)
        self._scorer = Scorer(Engine(model), AnswerCache(None))
        self._tokenizer = model.tokenizer
        self._where = pretrained

    # The harness calls these with --apply_chat_template.

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness stores prompts."""
        return self._where.replace("/", "__")

    @cached_property
    def _template(self) -> ChatTemplate:
        return load_template("auto", self._tokenizer, where=self._where)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the name of the model's chat template, for the results."""
        return self._template.where if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as a prompt. As with transformers, a template that refuses system messages gets none.

        Args:
            add_generation_prompt: False: the model continues the last message.
        """
        messages = tuple(Message(each["role"], each["content"]) for each in chat_history)  # type: ignore[arg-type]
        try:
            return self._template.render_prompt(messages, continue_final=not add_generation_prompt).text
        except ConversationError:
            others = tuple(message for message in messages if message.role != "system")
            return self._template.render_prompt(others, continue_final=not add_generation_prompt).text

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-probability, and whether greedy decoding gives it."""
        answers = self._scorer.score([request.args for request in requests])
        return [(answer.logprob, answer.is_greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each text."""
        return [answer.logprob for answer in self._scorer.score_texts([request.args[0] for request in requests])]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the generated text of each context, with the generation settings of its request."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        # Requests with the same arguments share batches.
        for numbers in groups.values():
            settings = TaskSettings(task="lm-eval", generation_kwargs=requests[numbers[0]].args[1])
            contexts = [requests[number].args[0] for number in numbers]
            for number, (answer,) in zip(
                numbers, self._scorer.generate(contexts, generation_request(settings)), strict=True
            ):
                texts[number] = answer.text
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
