"""Settings of the tokenizer and of the data: sources, order, objective."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, model_validator

from jingu.config.sections.base import Fraction, NonNegative, PathText, Positive, Settings, default_type


class TokenizerSettings(Settings):
    """The tokenizer of the run: its folder, and how `jingu tokenizer train` trains it.

    Attributes:
        path: Folder with tokenizer.json, a SentencePiece model, tiktoken ranks, or vocab.json and merges.txt.
        type: Algorithm that trains the tokenizer: byte-level BPE, Unigram or WordPiece.
        base: Tokenizer to which `jingu tokenizer extend` adds entries until it has `vocab_size` of them.
        vocab_size: Number of entries, special tokens included (byte-level BPE needs 256 plus the special tokens).
        special_tokens: Tokens that are never split; the first one ends every document.
        sample_bytes: Train on about this many bytes of the corpus, sampled evenly from its documents.
    """

    path: PathText = "tokenizer"
    type: Literal["bpe", "unigram", "wordpiece"] = "bpe"
    base: PathText | None = None
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    special_tokens: list[str] = ["<|endoftext|>"]
    sample_bytes: Positive = 100_000_000


class FullOrderSettings(Settings):
    """Shuffle all sequences of an epoch."""

    type: Literal["full"] = "full"


class BlockOrderSettings(Settings):
    """For slow storage: read large blocks in random order, and shuffle the sequences of a few blocks at a time.

    Attributes:
        block_tokens: Number of consecutive tokens in a block.
        open_blocks: Number of blocks whose sequences are shuffled together.
    """

    type: Literal["blocks"] = "blocks"
    block_tokens: Positive = 16_777_216
    open_blocks: Positive = 16


Order = Annotated[FullOrderSettings | BlockOrderSettings, Discriminator("type"), default_type("full")]


class SourceSettings(Settings):
    """One of several corpora that a run mixes.

    Attributes:
        path: Folder of the source's built data set. The last part of the path names the source.
        input: Files from which `jingu data build` builds the data set, as in `data.input`; an empty list: the data set
            is already built.
        weight: Share of the samples, relative to the weights of the other sources.
        validation_fraction: Fraction of the source's documents to use for validation; null: `data.validation_fraction`.
        max_epochs: Maximum number of passes over the source. After them, the other sources share its weight. null: no
            limit.
    """

    path: PathText = "data"
    input: list[PathText] | PathText = []
    weight: Annotated[float, Field(ge=0)] = 1.0
    max_epochs: Annotated[float, Field(gt=0)] | None = None
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None


class StageSettings(Settings):
    """Source weights that apply from a given step on.

    Attributes:
        start_step: First step (from 0) with these weights.
        weights: One weight for each of `data.sources`, in their order; 0 excludes a source.
    """

    start_step: NonNegative = 0
    weights: list[Annotated[float, Field(ge=0)]] = []


class DropSettings(Settings):
    """Documents that are excluded from a given step on. A run can return to an earlier checkpoint and continue without
    them.

    Attributes:
        file: File that lists the documents, one per line, as `jingu data preview` prints them (data/train-00003:1207).
        start_step: First step (from 0) without these documents.
    """

    file: PathText | None = None
    start_step: NonNegative = 0


class CausalSettings(Settings):
    """Predict each token from the tokens before it; for decoders."""

    type: Literal["causal"] = "causal"


class SpanCorruptionSettings(Settings):
    """Remove spans from the encoder's input; the decoder predicts them (Raffel et al., 2020). For encoder-decoders.
    Every batch.sequence_length tokens of text become one encoder input and one target.

    Attributes:
        noise_density: Fraction of the tokens to remove.
        mean_span_length: Mean length of a removed span, in tokens.
        num_sentinels: Number of special tokens (`<extra_id_0>` and so on) that mark removed spans; `jingu tokenizer
            train` adds them.
    """

    type: Literal["span_corruption"] = "span_corruption"
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    mean_span_length: Annotated[float, Field(ge=1)] = 3.0
    num_sentinels: Positive = 100


class SplitPointSettings(Settings):
    """Split each sequence in two at a random point. The prefix gets a random fraction of its tokens.

    Attributes:
        min_prefix: Smallest fraction of the tokens in the prefix.
        max_prefix: Largest fraction of the tokens in the prefix.
    """

    min_prefix: Fraction = 0.25
    max_prefix: Fraction = 0.75


class PrefixLmSettings(SplitPointSettings):
    """Attend to the prefix of each sequence in both directions, and predict the rest (prefix LM, Raffel et al., 2020).
    With data.document_mask, each document has a prefix of its own. For decoders. Generation from the run also attends
    to prompts in both directions; an exported folder cannot express this."""

    type: Literal["prefix_lm"] = "prefix_lm"


class ContinuationSettings(SplitPointSettings):
    """The encoder reads the prefix of each sequence, and the decoder predicts the rest. Both are padded to their
    maximum length; if min_prefix and max_prefix are equal, there is no padding."""

    type: Literal["continuation"] = "continuation"


class TargetFilesSettings(Settings):
    """Data sets in CPM-2's format for encoder-decoders, in which spans are already removed. data.path is the prefix of
    the file names (PATH_context.bin and so on), and batch.sequence_length is the length of the encoder's input.

    Attributes:
        target_length: Length of the decoder's input, in tokens; longer targets are truncated.
        first_sentinel: First of the ids that stand for removed spans in the files; null: the vocabulary size of the
            tokenizer.
        sentinel: Name of the tokenizer's sentinel tokens, with N in place of the number.
    """

    type: Literal["target_files"] = "target_files"
    target_length: Positive = 256
    first_sentinel: NonNegative | None = None
    sentinel: str = "<extra_id_N>"


class FillInTheMiddleSettings(Settings):
    """Reorder some documents as prefix, suffix, middle, so that a decoder learns to fill in the middle (Bavarian et
    al., 2022).

    Attributes:
        rate: Fraction of the documents to reorder.
        prefix_token: Special token before the prefix; the tokenizer must have it (tokenizer.special_tokens).
        suffix_token: Special token before the suffix.
        middle_token: Special token before the middle.
    """

    type: Literal["fill_in_the_middle"] = "fill_in_the_middle"
    rate: Fraction = 0.5
    prefix_token: str = "<|fim_prefix|>"
    suffix_token: str = "<|fim_suffix|>"
    middle_token: str = "<|fim_middle|>"


class RowSettings(Settings):
    """Settings of data that consists of conversations, or of prompts and answers.

    Attributes:
        template: Chat template: the tokenizer's own (auto), chatml, qwen, llama2, llama3, alpaca, bloomz-plain, or a
            Jinja file.
        columns: Names of the fields in the rows, by the names that jingu uses, such as {instruction: question}; an
            empty name leaves out a field.
        parse_special_tokens: Whether special tokens in the text of a row act as special tokens; otherwise they are
            plain text.
        packing: packed: each sequence holds as many rows as fit, masked from each other; padded: one row per sequence;
            group_by_length: one row per sequence, and the rows of a step have similar lengths. With one row per
            sequence, a micro-batch is as long as its longest row (not in a pipeline).
    """

    # The jingu command that builds such a data set.
    BUILD_COMMAND: ClassVar[str] = ""

    type: str
    template: str = "auto"
    columns: dict[str, str] = {}
    parse_special_tokens: bool = False
    packing: Literal["packed", "group_by_length", "padded"] = "packed"


class SupervisedSettings(RowSettings):
    """Train on the answers of instruction data. `jingu tune prepare` builds sequences of batch.sequence_length tokens
    from it. If the model has an encoder, the encoder reads the prompts, up to the first answer.

    Attributes:
        loss_on: Tokens to train on: all assistant answers, only the last one, or all tokens. A row may weight the loss
            of its answers.
        turns: Texts in which the answers of a conversation are trained: whole: one text, of the whole conversation;
            each: a text for each trained answer, which ends with it, as the model sees it at that moment; auto: whole,
            unless the template renders answers or what precedes them differently once other turns follow.
        train_empty_reasoning: Whether to train on the empty block of reasoning that some templates write before an
            answer without reasoning.
        overflow: What to do with a row that is longer than a sequence: truncate it, drop it, or split it between turns.
    """

    BUILD_COMMAND: ClassVar[str] = "tune prepare"

    type: Literal["supervised"] = "supervised"
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    turns: Literal["auto", "whole", "each"] = "auto"
    train_empty_reasoning: bool = False
    overflow: Literal["truncate", "drop", "split"] = "truncate"

    @model_validator(mode="after")
    def _check_turns(self) -> SupervisedSettings:
        if self.loss_on == "all" and self.turns == "each":
            raise ValueError(
                "turns=each trains one answer of each text, and loss_on=all trains all of it; leave one out"
            )
        return self


class PreferenceSettings(RowSettings):
    """Compare answers to the same prompt, for the tasks reward, dpo, simpo, orpo, cpo and kto. `jingu align prepare`
    builds the data set. The two answers of a pair share a sequence: each has half of batch.sequence_length, including
    the prompt.

    Attributes:
        rows: pairs: a chosen and a rejected answer; labels: single answers that are labeled desirable or not (for the
            task kto).
        overflow: What to do with a row that is longer than a sequence: drop it, or truncate its answers.
        packing: padded: one row per sequence, so the batch size is the number of pairs (or labeled answers);
            group_by_length: one row per sequence, and the rows of a step have similar lengths; packed: as many rows as
            fit.
    """

    BUILD_COMMAND: ClassVar[str] = "align prepare"

    type: Literal["preference"] = "preference"
    rows: Literal["pairs", "labels"] = "pairs"
    overflow: Literal["drop", "truncate"] = "drop"
    packing: Literal["packed", "group_by_length", "padded"] = "padded"


Objective = Annotated[
    CausalSettings
    | ContinuationSettings
    | FillInTheMiddleSettings
    | PreferenceSettings
    | PrefixLmSettings
    | SpanCorruptionSettings
    | SupervisedSettings
    | TargetFilesSettings,
    Discriminator("type"),
    default_type("causal"),
]


ENCODER_OBJECTIVES = ContinuationSettings, SpanCorruptionSettings, TargetFilesSettings
"""Objectives that produce the inputs of an encoder."""


class DataSettings(Settings):
    """The corpus, and the data set that `jingu data build` builds from it.

    Attributes:
        input: The corpus: files (text, .jsonl, .json, .parquet; also .gz, .xz, .zst), folders, glob patterns or URLs;
            or the file of a mixture of tasks (.yaml).
        path: Folder of the built data set.
        suffixes: Extensions of the files to read from a folder; a .jsonl file has one document per line, any other file
            is one document.
        text_field: Field of a .jsonl line or a table's row that holds the text. A path such as
            `meta.paragraphs[*].text` reaches nested fields; the texts of a list are joined by newlines.
        validation_fraction: Fraction of the documents to use for validation instead of training, chosen by a hash of
            their text.
        invalid_utf8: What to do with a document that is not valid UTF-8: stop, replace the invalid bytes, or skip the
            document.
        documents: What counts as one document in a text file: the file, a line, or a block between blank lines.
        escaped_newlines: Whether `<n>` in a text file stands for a newline.
        max_document_bytes: Maximum size of a document in bytes. A longer document raises an error before memory runs
            out.
        add_bos_token: Whether to begin each document with the tokenizer's BOS token, if it adds one (`<s>` of Llama;
            most add none).
        on_error: What to do about an error in the corpus: stop, or skip the document and list it in skipped.txt.
        num_workers: Number of processes that build the data set; auto: one per core.
        duplicates: What to do with exact copies of a document (found by a hash of the text): keep them, or drop them.
        shard_tokens: Start a new shard after about this many tokens.
        reader: How to read shards: memory-mapped, piece by piece, or through a block cache; infer: depending on their
            file system.
        local_cache: Folder on a fast local disk. Shards are copied there while training begins, and read from there
            once they are verified.
        sources: Several corpora in place of `input` and `path`, mixed by their weights.
        stages: Source weights by step, replacing the weights of the sources; each stage lasts until the next one
            begins.
        temperature: With temperature T, multiply each weight by the source's number of tokens ^ (1/T); null: use the
            weights as they are.
        packing: concat: concatenate documents and cut the text into sequences; best_fit: fill sequences with whole
            documents, and pad.
        document_mask: Whether attention is limited to each document, and positions restart with it.
    """

    input: list[PathText] | PathText = []
    path: PathText = "data"
    suffixes: list[str] = [".txt", ".jsonl"]
    text_field: str = "text"
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    invalid_utf8: Literal["refuse", "replace", "skip"] = "refuse"
    documents: Literal["file", "line", "block"] = "file"
    escaped_newlines: bool = False
    max_document_bytes: Positive = 100_000_000
    add_bos_token: bool = True
    on_error: Literal["stop", "skip"] = "stop"
    num_workers: Positive | Literal["auto"] = "auto"
    duplicates: Literal["keep", "drop"] = "keep"
    shard_tokens: Positive = 500_000_000
    reader: Literal["mmap", "lazy", "cached", "infer"] = "mmap"
    local_cache: PathText | None = None
    sources: list[SourceSettings] = []
    stages: list[StageSettings] = []
    temperature: Annotated[float, Field(gt=0)] | None = None
    order: Order = FullOrderSettings()
    packing: Literal["concat", "best_fit"] = "concat"
    document_mask: bool = False
    drop: DropSettings = DropSettings()
    objective: Objective = CausalSettings()

    @property
    def separates_documents(self) -> bool:
        """Whether attention is limited to each document or row."""
        return self.document_mask or isinstance(self.objective, RowSettings)

    @property
    def has_single_row_sequences(self) -> bool:
        """Whether each sequence is one row of instruction data, or one pair of answers."""
        return isinstance(self.objective, RowSettings) and self.objective.packing != "packed"

    @property
    def all_sources(self) -> list[SourceSettings]:
        """The sources; `input` and `path` are a short form for a single one."""
        return self.sources or [SourceSettings(path=self.path, input=self.input)]

    def for_source(self, source: SourceSettings) -> DataSettings:
        """Return these settings with one source as the only one."""
        update: dict[str, Any] = {"path": source.path, "input": source.input, "sources": []}
        if source.validation_fraction is not None:
            update["validation_fraction"] = source.validation_fraction
        return self.model_copy(update=update)
