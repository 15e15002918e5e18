"""The tree of settings. One YAML file is one run; every section is a frozen model that refuses unknown keys.

The docstring under a field is its documentation: it reaches `jingu config schema`, and so editors.
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expanduser
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Words:
    """What a value must be, in words for people; beside constraints that only a program reads with ease."""

    text: str


def _whole(value: object) -> object:
    """Python holds `True == 1 == 1.0`; a choice among whole numbers does not."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("whole", "a whole number")
    return value


Place = Annotated[str, Field(min_length=1), AfterValidator(expanduser), Words("the name of a file or folder")]
"""A file or folder, relative to where the command is run; a leading ~ is the home folder."""


class Settings(BaseModel):
    """A section of the file: frozen, strict about types, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


def _type_or(default: str) -> BeforeValidator:
    """Give a section that has no `type:` the default one."""
    return BeforeValidator(lambda value: {"type": default, **value} if isinstance(value, dict) else value)


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


Order = Annotated[FullOrderSettings | BlockOrderSettings, Discriminator("type"), _type_or("full")]


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
    """Special tokens (<extra_id_0> and so on) that mark the spans of a text; `jingu tokenizer train` adds them."""


class CutSettings(Settings):
    """A sequence is cut in two at a random place, between two shares of its tokens."""

    shortest: Fraction = 0.25
    """Share of the tokens that the shortest beginning has."""
    longest: Fraction = 0.75
    """Share of the tokens that the longest beginning has."""


class PrefixSettings(CutSettings):
    """The beginning of each sequence is seen whole, in both directions, and the rest is predicted (prefix-LM, Raffel et
    al., 2020); of each document with data.within_documents. For decoders; generation reads prompts causally."""

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
    _type_or("causal"),
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
    """Whether each document begins with what the tokenizer would have texts begin with (<s> of Llama; mostly none)."""
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
    def corpora(self) -> list[SourceSettings]:
        """The sources; `input` and `path` are the short form of one."""
        return self.sources or [SourceSettings(path=self.path, input=self.input)]

    def of(self, source: SourceSettings) -> DataSettings:
        """The settings of one source alone."""
        return self.model_copy(update={"path": source.path, "input": source.input, "sources": []})


class ExpertsSettings(Settings):
    """A mixture of experts, for families that have one; null: the family's habit."""

    number: Positive | None = None
    """Experts a block; the feed-forward's size is that of one."""
    active: Positive | None = None
    """Experts a token passes."""
    router: Literal["top_k", "balanced", "random_projection"] | None = None
    """Who chooses: the most probable, an even assignment while training (BASE), or a frozen random projection."""
    shared: Positive | None = None
    """Inner size of a further feed-forward that every token passes."""
    shared_gated: bool | None = None
    """Whether the shared feed-forward is weighted by a gate of its own."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """Choices an expert takes of a training sequence, as a multiple of an even share; the rest is dropped."""
    balance: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss."""
    balance_over: Literal["layer", "model"] | None = None
    """Whether each layer is to be balanced, or the mean of all (as transformers does)."""
    z: Annotated[float, Field(ge=0)] | None = None
    """Weight of the router's z loss."""


class ModelSettings(Settings):
    """A model to train from scratch: a family or a preset, and the dimensions in which it differs from it."""

    family: str | None = None
    """Model family; `jingu model list` shows them; null: the preset's, or llama."""
    preset: str | None = None
    """A published model, such as `llama-2-7b`; every setting that is given besides takes its value's place."""
    layers: Positive | None = None
    """Number of blocks; null: the preset's, or 6."""
    encoder_layers: Positive | None = None
    """Number of blocks of the encoder, for families that have one; null: the preset's, or as many as layers."""
    width: Positive | None = None
    """Size of the hidden state; null: the preset's, or 384."""
    heads: Positive | None = None
    """Attention (query) heads; null: the preset's, or 6."""
    kv_heads: Positive | None = None
    """Key and value heads; null: the preset's, or as many as heads."""
    head_size: Positive | None = None
    """Size of a head; null: the preset's, or width / heads."""
    feed_forward: Positive | None = None
    """Inner size of the feed-forward; null: the preset's, or the family's rule."""
    experts: ExpertsSettings = ExpertsSettings()
    vocabulary: Positive | Literal["auto"] = "auto"
    """Rows of the embedding; auto: the preset's, or the tokenizer's size where that is larger or there is none."""
    context: Positive | None = None
    """Longest sequence the model is made for; null: the preset's, or the batch's sequence length."""
    tied_embeddings: bool | None = None
    """Whether the head shares the embedding's weights; null: the preset's, or the family's habit."""
    rope_base: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary frequencies; null: the preset's, or the family's."""
    norm_epsilon: Annotated[float, Field(gt=0)] | None = None
    """Added to the variance in norms; null: the preset's, or the family's."""
    initial_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""


class InitializeSettings(Settings):
    """Where the first weights come from."""

    from_: Place | None = Field(default=None, alias="from")
    """A model whose weights a new run begins with, and whose dimensions hold where `model` gives none; null: random."""


class FullSettings(Settings):
    """The model's own weights are trained: all of them, or a part; all of them are saved."""

    type: Literal["full"] = "full"
    freeze: list[str] = []
    """Patterns of names of weights that stay as they are, such as `embedding.*` or `blocks.0.*`."""
    last: Positive | None = None
    """Train only so many last blocks, and the norm and head after them; null: all blocks."""


class AdapterBase(Settings):
    """What every kind of adapters has: these alone are trained, and saved."""

    type: str
    start: Place | None = None
    """A run, or a folder of peft, with whose adapters these begin: those of another task, say."""


class LoraSettings(AdapterBase):
    """Adapters of low rank beside chosen matrices (Hu et al., 2022)."""

    type: Literal["lora"] = "lora"
    rank: Positive = 8
    """Inner size of an adapter."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """What an adapter gives is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / √rank instead (Kalajdzievski, 2023)."""
    dora: bool = False
    """Also train the length of each row of the sum of matrix and adapter (Liu et al., 2024)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is zero, others in each step."""
    targets: list[str] = ["*attention.*", "*.feed_forward.*"]
    """Patterns of names of the matrices that get one, such as `blocks.*.attention.q`."""


class Ia3Settings(AdapterBase):
    """Factors of what chosen matrices give; of a feed-forward's `down`, of what it gets (Liu et al., 2022)."""

    type: Literal["ia3"] = "ia3"
    targets: list[str] = ["*attention.k", "*attention.v", "*.feed_forward.down"]
    """Patterns of names of the matrices."""


class PromptSettings(AdapterBase):
    """Prompt tuning: vectors in the place of tokens, before the text or what an encoder reads (Lester et al., 2021)."""

    type: Literal["prompt"] = "prompt"
    length: Positive = 20
    """Tokens of the prompt."""
    initial_text: str | None = None
    """Text whose tokens' vectors they begin with, repeated or cut to the length; null: tokens drawn by the seed."""
    position: Literal["front", "back"] = "front"
    """Before what is read, or (an encoder's) behind it."""


class PTuningSettings(AdapterBase):
    """P-tuning: a prompt whose vectors a small network makes while it is trained (Liu et al., 2021)."""

    type: Literal["p_tuning"] = "p_tuning"
    length: Positive = 20
    """Tokens of the prompt."""
    encoder: Literal["mlp", "lstm"] = "mlp"
    """The network: three layers, or two of an LSTM in both directions and two after them."""
    hidden: Positive | None = None
    """Its width; null: the model's."""
    initial_text: str | None = None
    """As of `type: prompt`, for what the network is given."""
    position: Literal["front", "back"] = "front"
    """Before what is read, or (an encoder's) behind it."""


class PrefixTuningSettings(AdapterBase):
    """Prefix tuning: keys and values before the text in each block, made by a small network (Li and Liang, 2021)."""

    type: Literal["prefix"] = "prefix"
    length: Positive = 20
    """Tokens of the prefix."""
    hidden: Positive = 512
    """Inner width of the network, of which each block has its own."""
    in_encoder: bool = True
    """Whether the blocks of an encoder have prefixes, too."""


class PTuningV2Settings(AdapterBase):
    """P-tuning v2: keys and values before the text in each block, trained themselves (Liu et al., 2022)."""

    type: Literal["p_tuning_v2"] = "p_tuning_v2"
    length: Positive = 20
    """Tokens of the prompt."""
    in_encoder: bool = True
    """Whether the blocks of an encoder have them, too."""


Tune = Annotated[
    FullSettings
    | LoraSettings
    | Ia3Settings
    | PromptSettings
    | PTuningSettings
    | PrefixTuningSettings
    | PTuningV2Settings,
    Discriminator("type"),
    _type_or("full"),
]


class BatchSettings(Settings):
    """What one optimizer step sees. The rest (accumulation, tokens a step) is derived."""

    sequence_length: Positive = 512
    """Tokens a sequence."""
    global_size: Positive = 32
    """Sequences an optimizer step, over all ranks."""
    micro_size: Positive | Literal["auto"] = "auto"
    """Sequences a forward pass on one rank; auto: the largest divisor that keeps to 8,192 tokens."""


class GroupSettings(Settings):
    """Parameters that are trained otherwise than the rest."""

    match: Annotated[str, Field(min_length=1)] = "*"
    """Pattern of their names, such as `embedding.*` or `blocks.0.*`; of the groups one is in, the last counts."""
    rate: Annotated[float, Field(ge=0)] = 1.0
    """Their learning rate, as a multiple of the schedule's."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their decay; null: the optimizer's."""


class OptimizerBase(Settings):
    """What every optimizer has."""

    type: str
    groups: list[GroupSettings] = []
    """Parameters that have another rate or decay."""


class AdamWSettings(OptimizerBase):
    """AdamW (Loshchilov and Hutter, 2019)."""

    type: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay a unit of learning rate; never on norms and biases."""


class LionSettings(OptimizerBase):
    """Lion (Chen et al., 2023): the sign of an interpolated momentum."""

    type: Literal["lion"] = "lion"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate; about a tenth of AdamW's."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the momentum in the update's direction."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 1.0
    """Decoupled decay a unit of learning rate; never on norms and biases."""


class AdafactorSettings(OptimizerBase):
    """Adafactor (Shazeer and Stern, 2018): of a matrix's second moment only its rows and columns are kept, and steps
    are relative to the size of the weights."""

    type: Literal["adafactor"] = "adafactor"
    lr: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate, relative to the weights; a step never goes further than 1 / √step."""
    power: Annotated[float, Field(gt=0)] = 0.8
    """Step t gives the second moment a share of t ^ -power."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Root mean square above which an update is scaled down."""
    floor: Annotated[float, Field(gt=0)] = 1e-3
    """Least root mean square that weights are taken to have."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay a unit of learning rate; never on norms and biases."""


class MuonSettings(OptimizerBase):
    """Muon (Jordan, 2024): the momentum of a block's matrices made orthogonal; AdamW for all other parameters."""

    type: Literal["muon"] = "muon"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of both; Muon's steps are of the size of AdamW's (Liu et al., 2025)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum, which is Nesterov's."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay a unit of learning rate; never on norms and biases."""


Optimizer = Annotated[
    AdamWSettings | LionSettings | AdafactorSettings | MuonSettings, Discriminator("type"), _type_or("adamw")
]


def in_steps(length: int | float, steps: int) -> int:
    """A length given in steps (a whole number) or as a fraction of the run, in steps."""
    return length if isinstance(length, int) else round(length * steps)


class ScheduleBase(Settings):
    """Warm-up and floor, common to every schedule."""

    type: str
    warmup: NotNegative | Fraction = 0.02
    """Linear warm-up: steps (a whole number) or a fraction of the run (with a decimal point)."""
    minimum: Annotated[float, Field(ge=0)] = 0.0
    """The rate never falls below this, once warmed up."""


class ConstantSettings(ScheduleBase):
    """The peak rate to the end."""

    type: Literal["constant"] = "constant"


class LinearSettings(ScheduleBase):
    """A straight line from the peak to the minimum at the last step."""

    type: Literal["linear"] = "linear"


class CosineSettings(ScheduleBase):
    """Half a cosine from the peak to the minimum at the last step."""

    type: Literal["cosine"] = "cosine"


class NoamSettings(ScheduleBase):
    """Inverse square root of the step (Vaswani et al., 2017), reaching the peak at the end of warm-up."""

    type: Literal["noam"] = "noam"


class ExponentialSettings(ScheduleBase):
    """The rate is multiplied by `decay` over the run, evenly step by step."""

    type: Literal["exponential"] = "exponential"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the peak rate left at the last step."""


class WarmupStableDecaySettings(ScheduleBase):
    """Warm up, stay, then fall in a straight line over the last part (Hu et al., 2024)."""

    type: Literal["warmup-stable-decay"] = "warmup-stable-decay"
    decay: NotNegative | Fraction = 0.2
    """Length of the fall: steps (a whole number) or a fraction of the run (with a decimal point)."""


Schedule = Annotated[
    ConstantSettings | LinearSettings | CosineSettings | NoamSettings | ExponentialSettings | WarmupStableDecaySettings,
    Discriminator("type"),
    _type_or("cosine"),
]


class ActivationCheckpointingSettings(Settings):
    """What the backward pass finds of a block's activations, and what it computes again."""

    type: Literal["none", "selective", "full"] = "none"
    """Kept: all; what products, attention and exchanges between ranks gave; or only the block's input."""
    every: Positive = 1
    """Only every so many-th block computes again; the others keep all."""


class TrainSettings(Settings):
    """How the loop runs."""

    steps: Positive = 1000
    """Optimizer steps of the run."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; null: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each target that is spread evenly over the vocabulary; evaluations leave it out."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared logarithm of the softmax's sum, such as 1e-4; evaluations leave it out."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """Size of the noise on embedded tokens (NEFTune's α, such as 5), for decoders."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the blocks; auto: where a compiler is present and the run is long enough to earn it."""
    activation_checkpointing: ActivationCheckpointingSettings = ActivationCheckpointingSettings()
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's folder (needs the tensorboard package)."""


class PrecisionBase(Settings):
    """Number formats, common to every precision."""

    type: str
    reduce: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Format in which gradients are added up over micro-batches and ranks; auto: that of the master weights."""


class PrecisionSettings(PrecisionBase):
    """bf16 computes in bf16 over fp32 master weights; auto: bf16 where the device has units for it, else fp32."""

    type: Literal["auto", "fp32", "bf16", "fp64"] = "auto"


class FP16Settings(PrecisionBase):
    """fp16 over fp32 master weights. The loss is scaled, so that gradients stay within what fp16 can hold."""

    type: Literal["fp16"] = "fp16"
    initial_scale: Annotated[float, Field(gt=0)] = 65536.0
    """Factor on the mean loss at first."""
    window: Positive = 1000
    """Steps without overflow after which the scale is doubled."""
    hysteresis: Positive = 2
    """Overflows within a window from which on the scale is halved; a step that overflows is skipped either way."""
    minimum_scale: Annotated[float, Field(gt=0)] = 1.0
    """The scale never falls below this."""


Precision = Annotated[PrecisionSettings | FP16Settings, Discriminator("type"), _type_or("auto")]


class NoOffloadSettings(Settings):
    """Everything stays on the device that computes."""

    type: Literal["none"] = "none"


class HostOffloadSettings(Settings):
    """Master weights, gradients and optimizer state in main memory; the device has what it computes with."""

    type: Literal["host"] = "host"


class DiskOffloadSettings(Settings):
    """As `host`, with master weights and optimizer state in a file, of which memory holds what there is room for."""

    type: Literal["disk"] = "disk"
    path: Place | None = None
    """Folder on a local disk; null: the folder `offload` of the run."""


Offload = Annotated[
    NoOffloadSettings | HostOffloadSettings | DiskOffloadSettings, Discriminator("type"), _type_or("none")
]


class ParallelSettings(Settings):
    """The layout over ranks, whose number is the product of replicate, shard, context, tensor and pipeline."""

    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)] = 1
    """What is sharded over data-parallel ranks: nothing, optimizer state, also gradients, also parameters."""
    replicate: Positive | Literal["auto"] = "auto"
    """Groups of ranks with rows of their own that each hold the whole model; auto: 1, with ZeRO 0 all that is left."""
    shard: Positive | Literal["auto"] = "auto"
    """Ranks with rows of their own that share one copy of the model (ZeRO 1 to 3); auto: all that is left."""
    tensor: Positive | Literal["auto"] = 1
    """Ranks that share the heads, inner dims and vocabulary of each block; auto: all that is left."""
    context: Positive | Literal["auto"] = 1
    """Ranks that share the tokens of each row; auto: all that is left."""
    context_by: Literal["heads", "ring"] = "heads"
    """How attention sees all tokens of a row: for it, ranks exchange tokens for heads, whose number must divide; or
    keys and values go around in a ring, whatever the number of heads."""
    pipeline: Positive | Literal["auto"] = 1
    """Ranks that share the blocks, each of them a stage or more; auto: all that is left."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    """Order of a pipeline's work: all forward, then all backward; in turns; in turns with several stages a rank; that
    with backward passes split to fill the gaps; that with two stages a rank, there and back."""
    stages_per_rank: Positive | Literal["auto"] = "auto"
    """Stages of a pipeline that a rank has (interleaved and zero_bubble); auto: 2, with gpipe and 1f1b 1."""
    parts: list[Positive] | None = None
    """Number of blocks of each stage of a pipeline, in order; null: even by their cost, embedding and head counted."""
    offload: Offload = NoOffloadSettings()
    expert: Positive | Literal["auto"] = 1
    """Ranks, of those of shard × context, that share a mixture's experts; auto: as many as can."""


class DeviceSettings(Settings):
    """Where the run computes."""

    type: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a card, else CPU."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads a rank; auto: the cores divided by the local ranks."""


class EvaluationSettings(Settings):
    """Measuring on held-out text."""

    every: NotNegative = 100
    """Steps between evaluations (also at the end); 0: none."""
    sequences: Positive | Literal["all"] = 64
    """Held-out sequences an evaluation reads; all: every one."""
    sequences_at_end: Positive | Literal["all"] | None = None
    """Held-out sequences the evaluation at the run's end reads; null: as many as the others."""
    prompts: list[str] = []
    """Texts continued at each evaluation, to see how the model writes."""
    prompt_tokens: Positive = 48
    """Tokens generated for a prompt."""


class CheckpointSettings(Settings):
    """Saving, and finding the way back."""

    every: NotNegative = 200
    """Steps between checkpoints (also at the end); 0: only at the end."""
    minutes: Annotated[float, Field(ge=0)] = 0.0
    """Also save when the last checkpoint is so many minutes old; 0: steps alone decide."""
    background: bool = True
    """Write from a copy in main memory while training goes on; false, or with offload to disk: training waits."""
    when_busy: Literal["wait", "skip"] = "wait"
    """When a save is due while the one before is still being written: wait for that, or save no checkpoint."""
    keep: Positive = 2
    """Newest checkpoints kept; older ones are deleted."""
    keep_every: NotNegative = 0
    """Checkpoints whose step is a multiple of this are kept for good; 0: none."""
    keep_best: NotNegative = 0
    """So many checkpoints are kept whose last evaluation was best; 0: none."""
    best_by: Literal["loss", "bits_per_byte"] = "loss"
    """What of an evaluation decides which is best; lower is better."""
    address: Annotated[str, Field(min_length=1)] | None = None
    """Address (s3://bucket/runs, any of fsspec's) where the checkpoints lie in place of the run's own folder."""
    copy_to: Annotated[str, Field(min_length=1)] | None = None
    """Address that fsspec knows (s3://bucket/runs, or a folder) where each checkpoint is copied once it is here."""
    grace: Positive = 120
    """Seconds that saving may take when the run is asked to stop; then it leaves with the last checkpoint before."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest complete checkpoint of the run; never: refuse if there is one."""


class RunConfig(Settings):
    """A run: everything that `jingu` needs to go from raw text to a trained model."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200),
        Words("up to 200 letters, digits, dots, dashes and underscores, beginning with a letter or digit"),
    ] = "run"
    """Name of the run; it lives in RUNS/NAME."""
    runs: Place = "runs"
    """Folder that holds the runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Words("a whole number (from 0 to 2^63 - 1)")] = 0
    """Seed of the initial weights and of the order of the data."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    initialize: InitializeSettings = InitializeSettings()
    tune: Tune = FullSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: Optimizer = AdamWSettings()
    schedule: Schedule = CosineSettings()
    train: TrainSettings = TrainSettings()
    precision: Precision = PrecisionSettings()
    parallel: ParallelSettings = ParallelSettings()
    device: DeviceSettings = DeviceSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
