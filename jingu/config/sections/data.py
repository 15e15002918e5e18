"""Settings of the tokenizer and of the data: sources, order, what a sample is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Fraction, NotNegative, Place, Positive, Settings, type_or


class TokenizerSettings(Settings):
    """The tokenizer of the run: where it lies, and how `jingu tokenizer train` makes it."""

    path: Place = "tokenizer"
    """Folder with tokenizer.json, or a sentencepiece model, tiktoken's ranks, or vocab.json and merges.txt."""
    type: Literal["bpe", "unigram", "wordpiece"] = "bpe"
    """How it is trained: by merging frequent pairs, by pruning unlikely pieces, or by merging for the longest match."""
    base: Place | None = None
    """Tokenizer that `jingu tokenizer extend` adds entries to, until there are `vocabulary` of them."""
    vocabulary: Annotated[int, Field(ge=257)] = 4096
    """Number of entries to train, special tokens included (byte-level BPE needs 256 and the specials)."""
    special_tokens: list[str] = ["<|endoftext|>"]
    """Tokens never split; the first one ends every document."""
    sample_bytes: Positive = 100_000_000
    """Train on about this many bytes of the corpus, spread evenly over its documents."""


class FullOrderSettings(Settings):
    """One order over all windows."""

    type: Literal["full"] = "full"


class BlockOrderSettings(Settings):
    """For slow storage: large blocks in random order, and the windows of a few open blocks mixed."""

    type: Literal["blocks"] = "blocks"
    block_tokens: Positive = 16_777_216
    """Tokens of a block, which lie next to each other."""
    open_blocks: Positive = 16
    """Blocks whose windows are mixed with each other."""


Order = Annotated[FullOrderSettings | BlockOrderSettings, Discriminator("type"), type_or("full")]


class SourceSettings(Settings):
    """One of several corpora that a run mixes."""

    path: Place = "data"
    """Folder of its built data set; its last part names the source."""
    input: list[Place] | Place = []
    """What `jingu data build` makes it of, as in `data.input`; an empty list: it is built already."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Its share of the samples, beside the weights of the others."""
    most_epochs: Annotated[float, Field(gt=0)] | None = None
    """Most times that its text is used; then the others share on. null: no limit."""


class StageSettings(Settings):
    """Other weights from a step on."""

    from_step: NotNegative = 0
    """The first step (from 0) with these weights."""
    weights: list[Annotated[float, Field(ge=0)]] = []
    """A weight for each of `data.sources`, in their order; 0 leaves one out."""


class DropSettings(Settings):
    """Documents to leave out from a step on; a run can go back to an earlier checkpoint and on without them."""

    file: Place | None = None
    """A list of documents, one a line, as `jingu data preview` prints them (data/train-00003:1207)."""
    from_step: NotNegative = 0
    """The first step (from 0) without them."""


class CausalSettings(Settings):
    """Each token is predicted from those before it; for decoders."""

    type: Literal["causal"] = "causal"


class SpanCorruptionSettings(Settings):
    """Spans are removed from what the encoder reads, and the decoder says what they were (Raffel et al., 2020); for
    models with an encoder. Each batch.sequence_length tokens of text make a source and a target."""

    type: Literal["span_corruption"] = "span_corruption"
    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that is removed."""
    mean_length: Annotated[float, Field(ge=1)] = 3.0
    """Mean length of a removed span, in tokens."""
    sentinels: Positive = 100
    """Special tokens (`<extra_id_0>` and so on) that mark the spans of a text; `jingu tokenizer train` adds them."""


class CutSettings(Settings):
    """A sequence is cut in two at a random place, between two shares of its tokens."""

    shortest: Fraction = 0.25
    """Share of the tokens that the shortest beginning has."""
    longest: Fraction = 0.75
    """Share of the tokens that the longest beginning has."""


class PrefixSettings(CutSettings):
    """The beginning of each sequence is seen whole, in both directions, and the rest is predicted (prefix-LM, Raffel et
    al., 2020); of each document with data.within_documents. For decoders; generation from the run sees prompts whole,
    too, and an exported folder does not say so."""

    type: Literal["prefix"] = "prefix"


class ContinuationSettings(CutSettings):
    """An encoder reads the beginning of each sequence, and the decoder writes the rest. Both are filled up to their
    longest; where shortest and longest are the same, there is nothing to fill."""

    type: Literal["continuation"] = "continuation"


class TargetFilesSettings(Settings):
    """The data sets are CPM-2's for encoder-decoders, from which spans are removed already: data.path begins the names
    of its files, PATH_context.bin and so on. batch.sequence_length is what the encoder reads."""

    type: Literal["target_files"] = "target_files"
    target_length: Positive = 256
    """Tokens of the decoder; longer targets are cut."""
    first_sentinel: NotNegative | None = None
    """The first id that stands for a removed span in the files; null: the number of the tokenizer's entries."""
    sentinel: str = "<extra_id_N>"
    """Names of the tokenizer's special tokens for removed spans, with N for the number."""


class FillInTheMiddleSettings(Settings):
    """A share of the documents is written as prefix, suffix, middle, so that a decoder learns to fill in (Bavarian et
    al., 2022)."""

    type: Literal["fill_in_the_middle"] = "fill_in_the_middle"
    rate: Fraction = 0.5
    """Share of the documents."""
    prefix_token: str = "<|fim_prefix|>"
    """Special token before the prefix; the tokenizer must have it (tokenizer.special_tokens)."""
    suffix_token: str = "<|fim_suffix|>"
    """Special token before the suffix."""
    middle_token: str = "<|fim_middle|>"
    """Special token before the middle."""


class SupervisedSettings(Settings):
    """Answers are predicted from what was asked; the corpus is rows of instruction data, which `jingu tune prepare`
    makes into packed sequences of batch.sequence_length."""

    type: Literal["supervised"] = "supervised"
    template: str = "auto"
    """How a conversation is written: the tokenizer's own template (auto), chatml, qwen, llama2, llama3, alpaca,
    bloomz-plain, or a file of Jinja."""
    train_on: Literal["answers", "last_answer", "all"] = "answers"
    """Which tokens are trained; an answer's weight (in its row) is a factor on its loss."""
    longer: Literal["cut", "drop", "split"] = "cut"
    """What to do with a row that is longer than a sequence: cut its end, leave it out, or divide it by rounds."""
    sequences: Literal["packed", "by_length", "padded"] = "packed"
    """What fills a sequence: as many rows as fit, apart from each other; or one row, with the rows of a step of similar
    length, or as it comes. Where it is one row, a micro-batch is as long as its longest (not in a pipeline)."""
    obey_special: bool = False
    """Whether special tokens written in a row's texts are such tokens; else they are plain text."""


Objective = Annotated[
    CausalSettings
    | ContinuationSettings
    | FillInTheMiddleSettings
    | PrefixSettings
    | SpanCorruptionSettings
    | SupervisedSettings
    | TargetFilesSettings,
    Discriminator("type"),
    type_or("causal"),
]


FOR_ENCODERS = ContinuationSettings, SpanCorruptionSettings, TargetFilesSettings
"""Objectives that give an encoder something to read."""


class DataSettings(Settings):
    """The corpus, and the data set that `jingu data build` makes of it."""

    input: list[Place] | Place = []
    """Files (text, .jsonl, .json, .parquet; also .gz, .xz, .zst), folders, patterns or addresses of the corpus."""
    path: Place = "data"
    """Folder of the built data set."""
    suffixes: list[str] = [".txt", ".jsonl"]
    """File endings taken from a folder; a .jsonl holds a document a line, any other file is one document."""
    text_field: str = "text"
    """Field of a .jsonl line that holds the document."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the documents kept out of training for evaluation, chosen by a hash of their text."""
    invalid_utf8: Literal["refuse", "replace", "skip"] = "refuse"
    """What to do with a document that is not UTF-8: stop, replace the bad bytes, or leave the document out."""
    documents: Literal["file", "line", "block"] = "file"
    """What is a document of a text file: all of it, each line, or each stretch between blank lines."""
    escaped_newlines: bool = False
    """Whether `<n>` in a text file stands for a newline."""
    largest_document: Positive = 100_000_000
    """Bytes; a longer document is a mistake, told before memory runs out."""
    beginning: bool = True
    """Whether a document begins with what the tokenizer would have texts begin with (`<s>` of Llama; mostly none)."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do about a mistake in the corpus: stop, or leave the document out, counted and listed in skipped.txt."""
    workers: Positive | Literal["auto"] = "auto"
    """Processes that build; auto: one a core."""
    duplicates: Literal["keep", "drop"] = "keep"
    """What to do with exact copies of a document (by a hash of its text): nothing, or leave them out."""
    shard_tokens: Positive = 500_000_000
    """A new shard begins after about this many tokens."""
    reading: Literal["mmap", "lazy", "cached", "infer"] = "mmap"
    """Shards are mapped into memory, read piece by piece, or by kept blocks; infer: as suits their file system."""
    local: Place | None = None
    """Folder on a fast local disk; shards are copied there while training begins, and read from there once verified."""
    sources: list[SourceSettings] = []
    """Several corpora in place of `input` and `path`, mixed by their weights."""
    stages: list[StageSettings] = []
    """Weights by step, in place of the sources' own, each stage until the next one begins."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """With T, each weight is multiplied by its source's tokens ^ (1/T); null: the weights as they are."""
    order: Order = FullOrderSettings()
    packing: Literal["cut", "best_fit"] = "cut"
    """Text as one row cut into sequences, or sequences of whole documents that fit them best, the rest left empty."""
    within_documents: bool = False
    """Whether attention stays inside each document, and positions begin anew with it."""
    drop: DropSettings = DropSettings()
    objective: Objective = CausalSettings()

    @property
    def keeps_apart(self) -> bool:
        """Whether attention stays inside each document, or row."""
        return self.within_documents or isinstance(self.objective, SupervisedSettings)

    @property
    def rows_alone(self) -> bool:
        """Whether each sequence is one row of supervised data."""
        return isinstance(self.objective, SupervisedSettings) and self.objective.sequences != "packed"

    @property
    def corpora(self) -> list[SourceSettings]:
        """The sources; `input` and `path` are the short form of one."""
        return self.sources or [SourceSettings(path=self.path, input=self.input)]

    def of(self, source: SourceSettings) -> DataSettings:
        """The settings of one source alone."""
        return self.model_copy(update={"path": source.path, "input": source.input, "sources": []})
