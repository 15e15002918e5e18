"""The Python interface: everything that `jingu` exports. Its names and parameters are stable.

`import jingu` is fast: PyTorch is imported only when one of these names is first used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from jingu.chat.chat_format import ChatFormat
from jingu.chat.messages import ConversationError
from jingu.chat.tokenization import encode_prompt_and_answer
from jingu.config.load import config_from_tree, load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import DeviceType
from jingu.data.array_reader import ReaderType
from jingu.data.dataset import open_dataset
from jingu.data.dataset_manifest import SplitName
from jingu.data.permutation import Int64Array
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel, Precision, check_language_model, load_chat_model
from jingu.infer.inference_model import load as load_inference_model
from jingu.infer.request import Request, Score
from jingu.infer.sampling import SamplingOptions, sampling_params
from jingu.runtime.exit_codes import EXIT_INTERRUPTED
from jingu.tune import publish
from jingu.tune.row_formats import parse_messages

Config = RunConfig
AnyPath = str | PathLike[str]
# A configuration, a mapping with its keys, or the path of a YAML file.
AnyConfig = Config | Mapping[str, Any] | AnyPath


class GenerateOptions(SamplingOptions, total=False):
    """The options of `Model.generate`, which documents them."""

    max_tokens: int | None
    stop: Sequence[str]
    adapter: str | None


def load(
    path: AnyPath,
    *,
    precision: Precision = "auto",
    device: DeviceType = "auto",
    adapters: Mapping[str, AnyPath] | None = None,
    template: str | None = None,
    max_num_seqs: int = 64,
) -> Model:
    """Load a model for inference.

    Args:
        path: a run, a checkpoint of a run, a Hugging Face folder, a GGUF file, or the name of a packaged model.
        precision: fp32, bf16 or fp64; int8, int4 or fp8 quantize the weights; auto: bf16 if the device has hardware for
            it, else fp32.
        device: cpu, cuda, xpu, npu or mps; auto: the machine's accelerator if there is one.
        adapters: LoRA adapters by name: runs that trained them, or peft folders. `generate` selects one by its name.
        template: name or file of a chat template; None: the model's own.
        max_num_seqs: maximum number of sequences that the engine generates at the same time.

    Raises:
        JinguError: the model, an adapter or the template cannot be loaded.
    """
    model_path = Path(path)
    check_language_model(model_path)
    adapter_paths = {name: Path(folder) for name, folder in (adapters or {}).items()}
    inference_model, chat_format = load_chat_model(
        lambda: load_inference_model(model_path, precision, device, adapter_paths), model_path, template
    )
    return Model(inference_model, chat_format, EngineSettings(max_num_seqs=max_num_seqs))


class Model:
    """A model for inference; `jingu.load` creates it. It is not thread-safe.

    Attributes:
        inference_model: the weights, the tokenizer and the special tokens.
        chat_format: the chat template; None: the model has none.
        engine: the inference engine; use it for features that these methods do not offer.
    """

    def __init__(
        self, inference_model: InferenceModel, chat_format: ChatFormat | None, settings: EngineSettings
    ) -> None:
        self.inference_model = inference_model
        self.chat_format = chat_format
        self.engine = Engine(inference_model, settings)

    @overload
    def generate(self, prompts: str, **options: Unpack[GenerateOptions]) -> str: ...

    @overload
    def generate(self, prompts: list[str], **options: Unpack[GenerateOptions]) -> list[str]: ...

    def generate(
        self,
        prompts: str | list[str],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> str | list[str]:
        """Continue a prompt, or several prompts in one batch.

        Args:
            prompts: a text, or a list of texts. In an encoder-decoder, the encoder reads them.
            max_tokens: maximum number of new tokens; None: 128, or fewer if the model's context is full before.
            stop: stop strings. The answer ends before the first of them.
            adapter: name of an adapter that was passed to `load`.
            sampling: sampling parameters. Defaults: the model's generation_config.json, or greedy decoding without one.

        Returns:
            The new text, without the prompt; for a list of prompts, a list of texts.

        Raises:
            JinguError: a prompt does not fit the model's context, or a sampling parameter is out of range.
        """
        params = sampling_params(sampling, self.inference_model.default_sampling)
        texts = [prompts] if isinstance(prompts, str) else prompts
        requests = []
        for text in texts:
            ids = self.inference_model.encode(text)
            limit = max_tokens or max(1, min(128, self.engine.max_new_tokens(len(ids))))
            requests.append(Request(ids, params, limit, tuple(stop), adapter=adapter))
        answers = self.engine.generate(requests)
        return answers[0] if isinstance(prompts, str) else answers

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 1024,
        tools: Sequence[Mapping[str, Any]] = (),
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """Answer a conversation with the model's chat template.

        Args:
            messages: the messages `{"role": ..., "content": ...}` in order, as in rows of instruction data, or one user
                message as a text. If the last one is the assistant's, the answer continues it.
            max_tokens: maximum number of new tokens, or fewer if the model's context is full before.
            tools: definitions of the tools that the model may call. The answer contains the calls as the model writes
                them.
            adapter: name of an adapter that was passed to `load`.
            sampling: sampling parameters. Defaults: the model's generation_config.json, or greedy decoding without one.

        Returns:
            The text of the assistant's answer.

        Raises:
            JinguError: the model has no chat template, the template rejects the conversation, the conversation is too
                long, or a sampling parameter is out of range.
        """
        if self.chat_format is None:
            raise JinguError(
                "the model has no chat template.",
                where=self.inference_model.name,
                fix="Name one with jingu.load(..., template=...), or use generate.",
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        try:
            turns = parse_messages(messages)
            continues = turns[-1].role == "assistant"
            definitions = tuple(dict(tool) for tool in tools)
            ids = self.chat_format.encode_prompt(turns, definitions, continue_final=continues)
        except (ConversationError, TypeError) as error:
            raise JinguError(f"{error}.", where="messages") from error
        limit = max(1, min(max_tokens, self.engine.max_new_tokens(len(ids))))
        params = sampling_params(sampling, self.inference_model.default_sampling)
        return self.engine.generate([Request(ids, params, limit, self.chat_format.stop, adapter=adapter)])[0]

    def score(
        self, context: str, continuations: Sequence[str | Sequence[int]], *, adapter: str | None = None
    ) -> list[Score]:
        """Return the log-probabilities of continuations of a context. The context is computed once for all of them.

        Args:
            context: the text before the continuations; in an encoder-decoder, the encoder reads it.
            continuations: texts, which are tokenized together with the context (in an encoder-decoder separately), or
                token ids. A token that is part of both belongs to the continuation.
            adapter: name of an adapter that was passed to `load`.

        Returns:
            For each continuation: `logprob` (the sum, in nats), `token_logprobs`, and `is_greedy` (whether greedy
            decoding would generate the continuation).

        Raises:
            JinguError: a continuation is empty, or does not fit the model's context.
        """
        model = self.inference_model
        # Continuations of the same context ids share its computation.
        groups: dict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = {}
        for number, target in enumerate(continuations):
            ids = model.encode(context)
            if not isinstance(target, str):
                after = target
            elif model.spec.num_encoder_layers is not None:
                after = model.tokenizer.encode(target)
            else:
                before, after = encode_prompt_and_answer(model.tokenizer, context, target)
                ids = (*model.prompt_prefix_ids, *before)
            groups.setdefault(ids, []).append((number, after))
        requests = [(ids, [after for _, after in group]) for ids, group in groups.items()]
        scores: dict[int, Score] = {}
        for group, values in zip(groups.values(), self.engine.score_many(requests, adapter), strict=True):
            scores |= {number: value for (number, _), value in zip(group, values, strict=True)}
        return [scores[number] for number in range(len(continuations))]

    def embed(self, texts: Sequence[str], *, pooling: Literal["mean", "last"] = "mean") -> npt.NDArray[np.float32]:
        """Return embeddings of texts: final hidden states, pooled and normalized to length 1.

        Args:
            texts: a list of texts.
            pooling: mean of all tokens, or the last token.

        Returns:
            [len(texts), hidden_size] array.

        Raises:
            JinguError: the model is not a decoder, or a text is empty or does not fit the model's context.
        """
        rows = self.engine.embed([self.inference_model.encode(text) for text in texts], pooling)
        return np.array(rows, dtype=np.float32).reshape(len(rows), self.inference_model.spec.hidden_size)


def train(config: AnyConfig, *overrides: str, processes: int | None = None) -> Path:
    """Train a run, or resume it, like `jingu train`.

    Args:
        config: the path of a YAML file, a mapping with the same keys, or a `Config`.
        overrides: settings to override, such as `"optimizer.lr=3e-4"`.
        processes: number of ranks on this machine. None or 1 trains in this process; more ranks are new processes.

    Returns:
        The folder of the run. `jingu.load` opens it.

    Raises:
        JinguError: the configuration is wrong, its tokenizer or data set is missing, or training failed.
        KeyboardInterrupt: Ctrl-C stopped the run. The run was saved, and the same call resumes it.
    """
    from jingu.training.commands import train as train_command

    run_config = _resolve_config(config, overrides)
    code = train_command(run_config, processes)
    run_folder = Path(run_config.runs_dir) / run_config.name
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise JinguError(f"training stopped with exit code {code}.", where=run_folder, fix="Its log has the reason.")
    return run_folder


def train_tokenizer(config: AnyConfig, *overrides: str) -> Path:
    """Train the tokenizer of a run, like `jingu tokenizer train`, and return its folder."""
    from jingu.text.tokenizer_commands import train as train_command

    run_config = _resolve_config(config, overrides)
    train_command(run_config)
    return Path(run_config.tokenizer.path)


def build_dataset(config: AnyConfig, *overrides: str) -> list[Path]:
    """Build the data sets of a run, and return their folders.

    The same as `jingu data build`; for instruction data (objective `supervised`) `jingu tune prepare`; for preference
    data (objective `preference`) `jingu align prepare`.
    """
    from jingu.align.commands import build_data

    run_config = _resolve_config(config, overrides)
    build_data(run_config)
    return [Path(source.path) for source in run_config.data.all_sources]


def export(model: AnyPath, to: AnyPath, dtype: str = "auto") -> Path:
    """Write a model as a Hugging Face folder or a GGUF file, like `jingu export`, and return its path.

    Args:
        model: any model that `jingu.load` opens.
        to: the folder to write, which must not exist, or a .gguf file.
        dtype: a type of `jingu export --dtype`, such as bf16; auto: the dtype of most of the stored weights.

    Raises:
        JinguError: the model cannot be read, there is no such dtype, or `to` cannot be written.
    """
    path = Path(to)
    publish.export(Path(model), path, dtype)
    return path


class Dataset(Sequence[Int64Array]):
    """One split of a built data set, as a sequence of documents (arrays of token ids).

    Files are memory-mapped by default, so opening a data set is fast.

    Args:
        path: the data set's folder (`data.path`), or the prefix of Megatron's .bin and .idx files.
        split: train or validation.
        reader: how files are read; see the setting `data.reader`.

    Raises:
        JinguError: there is no such data set, it has no such split, or a file is damaged.
    """

    def __init__(self, path: AnyPath, split: SplitName = "train", reader: ReaderType = "mmap") -> None:
        self._dataset = open_dataset(Path(path), split, reader)
        # Number of the first document of each shard, then the total number of documents.
        self._first_documents = np.cumsum([0, *(len(shard) for shard in self._dataset.readers)])

    def __len__(self) -> int:
        """Return the number of documents."""
        return int(self._first_documents[-1])

    @overload
    def __getitem__(self, index: int) -> Int64Array: ...

    @overload
    def __getitem__(self, index: slice) -> list[Int64Array]: ...

    def __getitem__(self, index: int | slice) -> Int64Array | list[Int64Array]:
        """Return the token ids of a document; negative indices and slices work as with a list."""
        if isinstance(index, slice):
            return [self.document(number) for number in range(*index.indices(len(self)))]
        return self.document(index)

    def __iter__(self) -> Iterator[Int64Array]:
        return (self.document(number) for number in range(len(self)))

    def document(self, index: int) -> Int64Array:
        """Return the token ids of a document, including its EOS token. A negative index counts from the end."""
        shard, number = self._locate(index)
        start, length = self._dataset.document_range(shard, number)
        return self._dataset.gather(np.array([start]), length)[0]

    def source(self, index: int) -> str:
        """Return the file of the corpus from which a document comes, and its position in the file; "" if unknown."""
        return self._dataset.document_origin(*self._locate(index))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including EOS tokens."""
        return self._dataset.tokens

    @property
    def eos_token_id(self) -> int:
        """Id of the token at the end of every document."""
        return self._dataset.eos_token_id

    def tokens(self, start: int = 0, length: int | None = None) -> Int64Array:
        """Return consecutive token ids, across documents; fewer than `length` at the end of the split.

        Args:
            start: position of the first token in the split.
            length: number of tokens; None: all up to the end of the split.
        """
        stop = self.num_tokens if length is None else min(start + length, self.num_tokens)
        return self._dataset.gather(np.array([start]), stop - start)[0]

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the shard of a document and its number in the shard. Raises IndexError if it does not exist."""
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        return shard, number - int(self._first_documents[shard])


def _resolve_config(config: AnyConfig, overrides: Sequence[str]) -> Config:
    if isinstance(config, Config):
        config = config.model_dump()
    if isinstance(config, Mapping):
        return config_from_tree(config, overrides)
    return load_config(Path(config), overrides)
