"""Rollouts: answers that the inference engine generates during training, from the training weights.

An answer depends only on the weights, the seed, the step, the row of its prompt and its number among the answers to
it; not on batching, the number of ranks or restarts. A run that is killed during a rollout therefore generates the same
rollout again after a restart, and nothing of it needs to be saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from jingu.align.environment import Environments, Reply, encode_reply, reply_messages, reply_text
from jingu.align.prompt_set import Prompt, PromptSet
from jingu.chat.messages import JsonObject
from jingu.config.sections.policies import RolloutSettings
from jingu.data.permutation import random_uint64
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.prepack import prepack_weights
from jingu.infer.request import Request, Token
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder
from jingu.model.layers import Embedding
from jingu.model.quantized_weight import TensorReader
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import local_tensor
from jingu.parallel.zero import eval_mode
from jingu.runtime.files import write_text_atomically
from jingu.runtime.ranks import gather_from_all
from jingu.text.tokenizer import Tokenizer
from jingu.training.task import StepNotStartedError


@dataclass(frozen=True)
class Sample:
    """One answer of a rollout.

    Attributes:
        prompt: text of the prompt, or the content of its last message.
        row: row of the prompt in its file, from 0.
        choice: index of the answer among those to this prompt.
        ids: token ids of the answer, including its end token and the replies of an environment.
        logprobs: log-probability of each of the model's own tokens, under the distribution that it was sampled from.
        finish_reason: "end" for an end token, "stop" for a stop text, "length" for an answer that was cut off.
        rewards: values by the name of the reward.
        reward: weighted sum, after shaping and the KL penalty; None if the answer could not be scored.
        advantages: advantage of each of the model's own tokens.
        replies: ranges [start, end) of `ids` that an environment wrote.
        turns: the messages of an answer with several turns; the model's own have `own`.
        completion: what is judged: the last turn of the model without its tool calls; None: the text, of one turn.
        late: names of the rewards whose timeout the answer exceeded.
    """

    prompt: str
    row: int
    choice: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantages: tuple[float, ...] = ()
    replies: tuple[tuple[int, int], ...] = ()
    turns: tuple[JsonObject, ...] = ()
    completion: str | None = None
    late: tuple[str, ...] = ()

    @property
    def own(self) -> list[int]:
        """Indices in `ids` of the model's own tokens."""
        return [place for place in range(len(self.ids)) if not any(start <= place < end for start, end in self.replies)]


def own_turn(text: str) -> JsonObject:
    """Return a turn of the model as a message of the conversation that rewards see."""
    return {"role": "assistant", "content": text, "own": True}


def describe_answer(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    """Return an answer as rewards see it: its texts, ids and messages, and the columns of its row."""
    own_positions = set(sample.own)
    return {
        **prompt.columns,
        "prompt": prompt.text,
        "prompt_ids": sample.prompt_ids,
        "completion": sample.text if sample.completion is None else sample.completion,
        "completion_ids": sample.ids,
        "completion_mask": [int(place in own_positions) for place in range(len(sample.ids))],
        "messages": [*prompt.conversation, *(sample.turns or (own_turn(sample.text),))],
    }


# Name of an environment's score among the rewards.
ENVIRONMENT = "environment"
# What to do about answers that fail, as with logits that are not finite.
_ERROR_FIX = "Lower optimizer.lr, or use more precision."
# Builds a sample from its JSON values.
read_sample = TypeAdapter(Sample).validate_python


@dataclass(frozen=True)
class Generator:
    """Generates the answers of a run.

    Attributes:
        precision: dtypes of the model in training.
        prepare: changes a copy of the model before it has weights.
    """

    prompts: PromptSet
    settings: RolloutSettings
    tokenizer: Tokenizer
    precision: Precision
    seed: int
    environments: Environments | None = None
    prepare: Callable[[Decoder], object] = lambda model: None

    def select(self, step: int) -> list[Prompt]:
        """Return the prompts of a step."""
        count = self.settings.prompts_per_step
        return self.prompts.select(self.seed, step * count, count)

    @contextmanager
    def model_of(self, model: ParallelModel) -> Iterator[InferenceModel]:
        """Yield the model for generation.

        On one rank it shares the storage of the training weights. On several ranks, each rank gathers a whole copy and
        generates its share of the answers. On CPUs, matrices are copied into the layout of the kernels for few rows,
        unless the model has adapters, uses FP8, or must compute exactly as in training. All copies are freed at the
        end.
        """
        with eval_mode(model):
            if dist.get_world_size() == 1 and not self._prepacks(model.spec, model.sharding.mesh.device_type):
                yield self._inference_model(model, model.spec)
                return
            reader = whole_reader(model, self.precision)
            with self.copy_of(model.spec, reader, model.sharding.mesh.device_type) as copy:
                yield copy

    @contextmanager
    def copy_of(self, spec: ModelSpec, read: TensorReader, device_type: str) -> Iterator[InferenceModel]:
        """Yield a whole model for generation with the parameters that `read` returns, and free it at the end."""
        whole_model = _build_whole(spec, self.precision, read, self.prepare)
        for stage in whole_model.stages if self._prepacks(spec, device_type) else ():
            prepack_weights(stage, dtype=self.precision.compute, huge_pages=False)
        yield self._inference_model(whole_model, spec)
        # Modules are in reference cycles: without this, the copy would stay until the garbage collector runs.
        for module in list(whole_model.modules()):
            vars(module).clear()

    def _prepacks(self, spec: ModelSpec, device_type: str) -> bool:
        """Return whether matrices are copied into the layout of the kernels for few rows."""
        # Adapter layers and FP8 matmuls need the matrix in its ordinary layout.
        is_plain = spec.adapter is None and self.precision.scaling is None and not self.settings.exact
        return is_plain and device_type == "cpu"

    def _inference_model(self, model: ParallelModel, spec: ModelSpec) -> InferenceModel:
        return InferenceModel(model, spec, self.tokenizer, eos_token_ids=self.prompts.eos_token_ids)

    def generate(
        self, model: InferenceModel, prompts: Sequence[Prompt], step: int, resampling: int = 0, *, greedy: bool = False
    ) -> list[Sample]:
        """Return the answers to prompts, in the order of the prompts. Every rank calls this with all prompts.

        Args:
            resampling: number of the attempt to replace prompts of the step.
            greedy: return one answer to each prompt, decoded greedily.

        Raises:
            StepNotStartedError: on any rank, the model's logits are not finite, or an environment failed.
        """
        share = dist.get_rank(), dist.get_world_size()
        try:
            outcome: dict[str, Any] = {
                "part": self.generate_share(model, prompts, share, step, resampling, greedy=greedy)
            }
        except JinguError as error:
            # Send the error to the other ranks, which wait for the answers of this one: all ranks must raise it.
            outcome = describe_error(error)
        outcomes = gather_from_all(outcome)
        for outcome in outcomes:
            raise_error(outcome)
        return merge_parts([outcome["part"] for outcome in outcomes])

    def generate_share(
        self,
        model: InferenceModel,
        prompts: Sequence[Prompt],
        share: tuple[int, int],
        step: int,
        resampling: int = 0,
        *,
        greedy: bool = False,
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return the answers to a share of the prompts, each with the index of its prompt, as JSON values.

        Args:
            share: (index, count): this share and the number of shares.
        """
        settings = self.settings
        rank, world = share
        engine = Engine(model, EngineSettings(max_num_seqs=settings.max_num_seqs))
        places = range(rank, len(prompts), world)
        requests = []
        for place in places:
            # The seed includes the place, so that a prompt that occurs twice in a step gets different answers.
            key = int(random_uint64("rollout", 1, self.seed, step, resampling, prompts[place].row, place)[0])
            request = Request(
                prompts[place].ids,
                SamplingParams(temperature=0.0 if greedy else settings.temperature, seed=key),
                settings.max_new_tokens,
                self.prompts.stop,
                logprobs=0,
                scaled_logprobs=not greedy,
                n=1 if greedy else settings.answers_per_prompt,
            )
            requests.append(request)
        answers = _generate(engine, requests, [prompts[place] for place in places])
        samples = {
            (place, choice): sample
            for place, choices in zip(places, answers, strict=True)
            for choice, sample in choices.items()
        }
        if self.environments is not None:
            prompt_of = {key: prompts[key[0]] for key in samples}
            seeds = {key: (step, resampling, *key) for key in samples}
            samples = self._converse(engine, self.environments, samples, prompt_of, seeds)
        return [(place, asdict(sample)) for (place, _), sample in samples.items()]

    def _converse(
        self,
        engine: Engine,
        environments: Environments,
        samples: dict[tuple[int, int], Sample],
        prompts: Mapping[tuple[int, int], Prompt],
        seeds: Mapping[tuple[int, int], tuple[int, ...]],
    ) -> dict[tuple[int, int], Sample]:
        """Return the samples with further turns, and with the environment's score.

        Args:
            samples: the first turns, by place of the prompt and choice.
            seeds: seed values of each sample, used together with the seed of the run and the turn.
        """
        settings = self.settings
        assert settings.environment is not None
        keys = list(samples)
        owners = {number: prompts[key] for number, key in enumerate(keys)}
        environments.begin(owners)
        turns = {number: samples[key].text for number, key in enumerate(keys)}
        for turn in range(1, settings.environment.max_turns + 1):
            # 1. Get the replies to all last turns. An answer that was cut off gets none.
            replies = environments.reply(turns, owners)
            requests: dict[int, Request] = {}
            reply_ids: dict[int, tuple[int, ...]] = {}
            messages: dict[int, Reply] = {}
            for number, reply in replies.items():
                sample, prompt = samples[keys[number]], owners[number]
                if reply is None or sample.finish_reason != "end" or turn == settings.environment.max_turns:
                    continue
                ids = encode_reply(*reply, self.prompts, self.tokenizer)
                room = settings.max_new_tokens - len(sample.ids) - len(ids)
                if room < 1:
                    samples[keys[number]] = replace(sample, finish_reason="length")
                    continue
                # 2. Request another turn, which continues all ids so far.
                seed = int(random_uint64("turn", 1, self.seed, *seeds[keys[number]], turn)[0])
                sampling = SamplingParams(temperature=settings.temperature, seed=seed)
                context = (*prompt.ids, *sample.ids, *ids)
                requests[number] = Request(context, sampling, room, self.prompts.stop, logprobs=0, scaled_logprobs=True)
                reply_ids[number], messages[number] = ids, reply[1]
            # 3. Generate all turns together, and append each to its sample.
            answers = _generate(engine, list(requests.values()), [owners[number] for number in requests])
            turns = {}
            for number, choices in zip(requests, answers, strict=True):
                new = choices[0]
                samples[keys[number]] = _append(samples[keys[number]], reply_ids[number], messages[number], new)
                turns[number] = new.text
            if not turns:
                break
        for key, sample in samples.items():
            last = sample.turns[-1]["content"] if sample.turns else sample.text
            samples[key] = replace(sample, completion=environments.without_calls(last, sample.finish_reason))
        if not environments.has_score:
            return samples
        scores = environments.score(list(range(len(keys))))
        return {key: replace(samples[key], rewards={ENVIRONMENT: scores[number]}) for number, key in enumerate(keys)}


def merge_parts(parts: Iterable[Iterable[tuple[int, dict[str, Any]]]]) -> list[Sample]:
    """Return the answers of all shares, in the order of their prompts."""
    merged_items = sorted(chain(*parts), key=lambda item: (item[0], item[1]["choice"]))
    return [read_sample(values) for _, values in merged_items]


def _append(sample: Sample, reply_ids: tuple[int, ...], reply: Reply, new: Sample) -> Sample:
    """Return a sample with a reply and another turn."""
    start = len(sample.ids)
    return replace(
        sample,
        ids=(*sample.ids, *reply_ids, *new.ids),
        logprobs=(*sample.logprobs, *new.logprobs),
        text=f"{sample.text}{reply_text(reply)}{new.text}",
        finish_reason=new.finish_reason,
        replies=(*sample.replies, (start, start + len(reply_ids))),
        turns=(*(sample.turns or (own_turn(sample.text),)), *reply_messages(reply), own_turn(new.text)),
    )


def _generate(engine: Engine, requests: Sequence[Request], prompts: Sequence[Prompt]) -> list[dict[int, Sample]]:
    """Return the samples of each request, by choice.

    Args:
        prompts: the prompt of each request.
    """
    results = []
    for events, prompt in zip(engine.run(requests, _ERROR_FIX), prompts, strict=True):
        tokens: dict[int, list[Token]] = {}
        samples = {}
        for event in events:
            choice_tokens = tokens.setdefault(event.choice, [])
            if event.token is not None:
                choice_tokens.append(event.token)
            if event.finish_reason is not None:
                samples[event.choice] = Sample(
                    prompt.text,
                    prompt.row,
                    event.choice,
                    prompt.ids,
                    tuple(token.id for token in choice_tokens),
                    tuple(token.logprob or 0.0 for token in choice_tokens),
                    "".join(token.text for token in choice_tokens),
                    event.finish_reason,
                )
        results.append(samples)
    return results


def whole_reader(model: ParallelModel, precision: Precision) -> TensorReader:
    """Return a function that gathers a parameter by name; an unsharded one is returned without a copy.

    All ranks call the function together.
    """
    shards = dict(model.named_parameters())
    mesh = model.sharding.mesh
    group = mesh.get_group("pipeline")

    def read(name: str) -> Tensor:
        part = model.sharding.parts[name]
        if name in shards:
            whole_tensor = part.whole(local_tensor(shards[name]).to(mesh.device_type))
        else:
            whole_tensor = torch.zeros(part.shape, dtype=precision.masters, device=mesh.device_type)
        if dist.get_world_size(group) > 1:
            # One pipeline stage has the values and the others have zeros: their sum is the parameter.
            dist.all_reduce(whole_tensor, group=group)
        return whole_tensor

    return read


def _build_whole(
    spec: ModelSpec, precision: Precision, read: TensorReader, prepare: Callable[[Decoder], object]
) -> ParallelModel:
    """Return an unsharded model of this process, with the parameters that `read` returns."""
    whole_model = materialize(spec, None, Layout(), precision, read, prepare=prepare)
    for module in whole_model.modules():
        if isinstance(module, Embedding):
            module.compute = precision.compute
    return whole_model.eval()


def describe_error(error: JinguError) -> dict[str, Any]:
    """Return an error as JSON values, to send it to other ranks."""
    return {"error": (error.what, str(error.where), error.fix)}


def raise_error(value: dict[str, Any]) -> None:
    """Raise the error in a value from another rank, if there is one."""
    if "error" in value:
        what, where, fix = value["error"]
        raise StepNotStartedError(what, where=where, fix=fix)


def write_rollout(folder: Path, step: int, samples: Iterable[Sample], **common: Any) -> None:
    """Write the samples of a step as JSON Lines, each line with the `common` values."""
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({**common, **asdict(sample)}, ensure_ascii=False) for sample in samples)
    write_text_atomically(folder / f"step_{step}.jsonl", "".join(f"{line}\n" for line in lines))
