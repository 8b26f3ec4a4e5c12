"""Every option there is. A recipe is a TOML file with these sections; `--set section.key=value` overrides one key.

Sections are frozen dataclasses; each field's comment documents it. `load_config` refuses unknown keys and wrong
types with one error that names the key and the nearest valid one. Only the standard library is imported here, so
that reading a recipe is instant and can never run code.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stretto.convert.families import CHOICES, read_model
from stretto.errors import ConfigError
from stretto.estimate import Dropped, Kept, Narrow, Normless, Own
from stretto.files import read_text
from stretto.presets import PRESETS
from stretto.values import MOST_BYTES, MOST_TOKENS, check_range, parse, read_bytes, read_policy, show

LOGGERS = ("wandb", "mlflow")


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/run"  # the run folder: config, events, checkpoints, report
    seed: int = 0  # the only source of randomness: initial weights, data order, masking, dropout
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    deterministic: bool = False  # only deterministic kernels: slower, bit-equal from run to run on a GPU too
    timeout_s: float = 600.0  # no process waits longer than this for another one that gives no sign of life

    def __post_init__(self) -> None:
        _require_positive("run", self, "timeout_s")


@dataclass(frozen=True)
class DataConfig:
    # What is learned; model.kind has to fit. instruct: answers, in conversations; classification: labels of texts.
    task: Literal["causal", "masked", "instruct", "translation", "classification", "images"] = "causal"
    # Text: a file, a folder, a pattern such as "data/*.jsonl", "python-stdlib", or "hf:NAME[/CONFIG]" for a Hugging
    # Face data set. Of .jsonl, .csv and .parquet files, each row is a document.
    # Translation: the common start of the two files ("data/train" for data/train.en.gz and data/train.de.gz).
    # Images: a folder with one folder per class, or an .npz with arrays `images` and `labels`.
    train: str = "python-stdlib"
    eval: str = ""  # the same forms; empty: the last `held_out` share of `train`
    test: str = ""  # translation: what `stretto eval` measures BLEU on; empty: the evaluation data
    held_out: float = 0.02  # share of `train` that is kept for evaluation, where `eval` is empty
    suffix: str = ".py,.txt,.md"  # which files of a folder are read; where it has none of these, its tables
    column: str = "text"  # the text of a row
    label: str = "label"  # classification: the label of a row
    streaming: bool = False  # hf: read rows as they arrive, each time they are needed; no copy is kept on the disk
    languages: tuple[str, ...] = ()  # translation: ("en", "de") means from en to de
    tokenizer: str = "bytes"  # "bytes", "bpe" (trained on the training data), or the path of a tokenizer.json
    vocab: int = 8192  # size of a "bpe" tokenizer
    cache: str = ""  # where token files are kept; empty: in the run folder. Name a folder to share it between runs
    seq_len: int = 256  # text: tokens per window; translation: longest sentence, the rest is dropped
    # Of a micro-batch, which all processes share (see train.micro_batches): sequences of text, or images.
    batch_size: int = 32
    max_tokens: int = 4096  # translation: of a micro-batch, instead of batch_size: tokens on the longer side
    # Text: True lets attention cross document ends (as GPT-2 was trained): every sequence is then seq_len long and
    # dense kernels apply. False keeps documents apart.
    join_documents: bool = False
    layout: Literal["packed", "padded"] = "packed"  # padded wastes work; it is there to compare with
    mask_share: float = 0.15  # masked: share of positions to predict
    augment: bool = False  # images: training sees a random part of each image, mirrored half of the time
    crop_scale: float = 0.08  # augment: the least share of the area that such a part has
    # Images: RandAugment, by timm's name for it, such as "rand-m9-mstd0.5-inc1"; empty: there is none. docs/data.md has
    # the values of DeiT for this and for what follows.
    aa: str = ""
    reprob: float = 0.0  # images: how often parts of one are erased
    remode: Literal["const", "rand", "pixel"] = "pixel"  # reprob: what is there then: grey, a random colour, or noise
    recount: int = 1  # reprob: the most parts of an image that are erased
    mixup: float = 0.0  # images: alpha of Mixup, which makes means of two images and of their labels; 0: there is none
    cutmix: float = 0.0  # images: alpha of CutMix, which puts a part of one image into another one; 0: there is none
    mixup_prob: float = 1.0  # mixup, cutmix: how often an image is mixed at all
    mixup_switch_prob: float = 0.5  # mixup and cutmix: how often an image is mixed by the latter
    own: str = ""  # set by stretto.train(data=...) in Python: the class of the data, which no recipe can open again

    def __post_init__(self) -> None:
        _require_positive("data", self, "vocab", "seq_len", "batch_size", "max_tokens")
        _require(self.vocab <= MOST_TOKENS, f"data.vocab = {self.vocab:,} is more than {MOST_TOKENS:,}")
        _require(0.0 < self.crop_scale <= 1.0, "data.crop_scale must be above 0, and at most 1")
        _require(1 <= self.recount <= 100, "data.recount must be from 1 to 100")
        _require_not_negative("data", self, "mixup", "cutmix")
        for key in ("reprob", "mixup_prob", "mixup_switch_prob"):
            _require(0.0 <= getattr(self, key) <= 1.0, f"data.{key} is a probability: it must be from 0 to 1")
        read_policy(self.aa)
        for key in ("held_out", "mask_share"):
            _require(0.0 < getattr(self, key) < 1.0, f"data.{key} must be between 0 and 1")

    @property
    def mixes(self) -> bool:
        """Whether images of training have two labels."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rotary positions for texts longer than those it began with; keys and names as in config.json. What
    counts is how often a pair of channels turns over the length of such a text."""

    factor: float = 8.0  # by which pairs that turn at most low_freq_factor times are slowed down
    low_freq_factor: float = 1.0  # number of turns, see `factor`
    high_freq_factor: float = 4.0  # pairs that turn at least so often stay as they are; others are in between
    original_max_position_embeddings: int = 8192  # length in tokens of the texts it began with

    def __post_init__(self) -> None:
        _require_positive("model.rope_scaling", self, "factor", "low_freq_factor", "original_max_position_embeddings")
        _require(
            self.high_freq_factor > self.low_freq_factor,
            "model.rope_scaling.high_freq_factor must be larger than low_freq_factor",
        )


@dataclass(frozen=True)
class ModelConfig:
    preset: str = ""  # a name from PRESETS; the other keys of this section then override it
    # A Hugging Face folder to start from: its weights, its sizes, and its tokenizer unless data.tokenizer is given.
    init: str = ""
    kind: Literal["decoder", "encoder", "encoder-decoder", "vit"] = "decoder"  # as GPT, BERT, Marian, ViT
    layers: int = 4  # number of blocks, of the encoder or of the only stack
    decoder_layers: int = 0  # encoder-decoder only; 0: as many as `layers`
    width: int = 256  # channels of a token
    heads: int = 4  # of attention; they divide the width
    kv_heads: int = 0  # grouped KV heads; 0: as many as heads
    mlp_width: int = 0  # inside of the MLP; 0: four times the width
    vocab: int = 0  # 0: what the tokenizer has, rounded up to a multiple of 64
    max_len: int = 1024  # size of the position table, and the longest text that is generated
    window: int = 0  # decoder: number of tokens that a token sees, itself and those right before it; 0: all before it
    # none: what `stretto export --fold` makes of a model that was trained to need none; others may not train without.
    norm: Literal["layernorm", "rmsnorm", "none"] = "layernorm"
    norm_order: Literal["pre", "post"] = "pre"  # norms in front of each branch, or behind the sum with it
    norm_eps: float = 1e-5  # added to the variance
    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu"] = "gelu_tanh"  # of the MLP; swiglu has a gate
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"  # how a token knows its place
    rope_theta: float = 10000.0  # rotary: the base of the frequencies
    rope_scaling: RopeScaling | None = None  # rotary: Llama 3.1's scaling for texts longer than those it began with
    bias: bool = True  # of linear layers and LayerNorms
    tied: bool = True  # the output layer shares the token embedding
    embed_scale: bool = False  # multiply token embeddings by sqrt(width)
    embed_norm: bool = False  # a norm behind the embeddings
    # Encoder-decoder only: one table of positions and one embed_norm for both sides. Tokens always share one table.
    embed_shared: bool = True
    # A bias of the output layer, of an encoder-decoder or a decoder without norms (a masked language model has one).
    head_bias: bool = False
    token_types: int = 0  # segment embeddings, as BERT has
    dropout: float = 0.0  # on embeddings and on each residual branch
    attention_dropout: float = 0.0  # on the probabilities of attention
    activation_dropout: float = 0.0  # behind the activation of the MLP
    label_smoothing: float = 0.0  # training only; torch's convention (the mass is spread over the whole vocabulary)
    classes: int = 0  # of data.task = "images" or "classification"; 0: as many as the data have
    image_size: int = 224  # vit: height and width in pixels, to which images are scaled
    patch: int = 16  # vit: height and width in pixels of what becomes a token
    channels: int = 3  # vit: of an image
    own: str = ""  # set by stretto.train(model=...) in Python: the class of the model; other keys do not describe it

    def __post_init__(self) -> None:
        _require_positive("model", self, "layers", "width", "heads", "max_len", "patch", "image_size", "channels")
        _require_positive("model", self, "norm_eps", "rope_theta")
        _require_not_negative(
            "model", self, "decoder_layers", "kv_heads", "mlp_width", "vocab", "window", "token_types", "classes"
        )
        _require(
            self.width % self.heads == 0, f"model.width = {self.width} is not a multiple of model.heads = {self.heads}"
        )
        _require(
            self.heads % (self.kv_heads or self.heads) == 0,
            f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}",
        )
        _require(
            self.positions != "sinusoidal" or self.width % 2 == 0, "model.positions = 'sinusoidal' needs an even width"
        )
        _require(
            self.positions != "rotary" or self.width // self.heads % 2 == 0,
            "model.positions = 'rotary' needs an even head size (model.width / model.heads)",
        )
        _require(
            self.positions == "rotary" or self.rope_scaling is None,
            f"[model.rope_scaling] is for model.positions = 'rotary', not {self.positions!r}",
        )
        _require(
            self.kind == "decoder" or self.window == 0,
            f"model.window is for a decoder, not for model.kind = {self.kind!r}",
        )
        _require(
            self.kind == "encoder-decoder" or self.embed_shared,
            f"model.embed_shared = false is for an encoder-decoder, not for model.kind = {self.kind!r}",
        )
        _require(
            self.kind == "encoder-decoder" or (self.kind == "decoder" and self.norm == "none") or not self.head_bias,
            f"model.head_bias is for an encoder-decoder, not for model.kind = {self.kind!r}",
        )
        for key in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            _require(0.0 <= getattr(self, key) < 1.0, f"model.{key} must be in [0, 1)")
        _require(
            self.kind != "vit" or self.image_size % self.patch == 0,
            f"model.image_size = {self.image_size} is not a multiple of model.patch = {self.patch}",
        )


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-3  # the highest, reached after warm-up
    min_lr: float = 0.1  # cosine, linear and wsd end at this share of lr
    # Of the rate, after warm-up. wsd: it stays at lr, and falls in a straight line over the last `decay` of the run.
    schedule: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    warmup: int = 100  # steps of linear warm-up
    decay: float = 0.1  # wsd: share of all steps over which the rate falls
    weight_decay: float = 0.1  # on matrices and tables; never on biases and norms
    beta1: float = 0.9  # AdamW: decay of the mean of gradients
    beta2: float = 0.95  # AdamW: decay of the mean of their squares
    eps: float = 1e-8  # AdamW: added to the root of that mean
    clip: float = 1.0  # global gradient norm; 0: no clipping

    def __post_init__(self) -> None:
        _require_positive("optim", self, "lr", "eps")
        _require_not_negative("optim", self, "warmup", "weight_decay", "clip")
        _require(0.0 <= self.min_lr <= 1.0, "optim.min_lr is a share of optim.lr: it must be between 0 and 1")
        _require(0.0 < self.decay <= 1.0, f"optim.decay = {self.decay} is a share of train.steps: above 0, at most 1")
        for key in ("beta1", "beta2"):
            _require(0.0 <= getattr(self, key) < 1.0, f"optim.{key} must be in [0, 1)")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000  # updates of the weights
    epochs: float = 0.0  # passes over the training data, from which `steps` follows at the start; 0: `steps` says it
    # Micro-batches per step, over all processes: the batch of a step is the same on any number of them. They take whole
    # micro-batches where these can be dealt out evenly, else each takes its part of the samples of some.
    micro_batches: int = 1
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 on a GPU, fp32 on a CPU
    compile: bool = False  # torch.compile
    # CUDA graphs: steps are recorded and replayed, which takes the host out of small ones. auto: where they can be used
    # and the host is what a step waits for; the log says what was chosen, and why.
    graphs: Literal["auto", "on", "off"] = "auto"
    # The decay of a running mean of the weights, such as 0.999, which is evaluated and used in their place; 0: there is
    # none. Early in a run it is lower: docs/training.md.
    ema: float = 0.0
    log_every: int = 10  # steps between two lines of the log
    eval_every: int = 0  # steps between two evaluations; 0: only at the end
    eval_batches: int = 20  # micro-batches per evaluation; 0: all there are
    patience: int = 0  # evaluations in a row without a lower loss, after which the run ends; 0: it never ends by that
    # What to do about a loss or gradient that is not finite. Its update is never applied, either way.
    non_finite: Literal["stop", "skip"] = "stop"
    # What to do about a gradient whose norm, before clipping, is a spike: at least four times the usual one of the last
    # hundred updates, and far beyond their noise. log: it is counted, said and applied. skip: it is not applied, and
    # the fourth in a row stops the run. Pipelines with old gradients (parallel.schedule) know no spikes.
    spikes: Literal["log", "skip"] = "log"
    # Steps between two comparisons of the weights of processes that have the same ones, as at every save; 0: only then.
    compare_every: int = 500
    sample: str = ""  # decoder: what the sample in the report begins with; empty: what evaluation data begin with

    def __post_init__(self) -> None:
        _require_positive("train", self, "steps", "micro_batches", "log_every")
        _require_not_negative("train", self, "epochs", "eval_every", "eval_batches", "patience", "compare_every")
        _require(0.0 <= self.ema < 1.0, f"train.ema = {self.ema} is a decay: it must be in [0, 1)")
        _require(
            self.patience == 0 or self.eval_every > 0,
            f"train.patience = {self.patience} counts evaluations, and there is none before the end: set"
            " train.eval_every",
        )


@dataclass(frozen=True)
class FusedConfig(Own):
    # How the optimizer keeps weights. split: bf16 weights plus the 16 bits that fp32 would add, exact in 2 bytes less
    # than fp32 and a bf16 copy. bf16: those bits are dropped, and updates are rounded at random, right on average.
    # auto: split on a GPU in bf16, else fp32.
    weights: Literal["auto", "fp32", "split", "bf16"] = "auto"
    moments: Literal["fp32", "bf16"] = "fp32"  # of AdamW

    def find_weights(self, gpu: bool, precision: str) -> Literal["fp32", "split", "bf16"]:
        """How weights are kept, with auto resolved."""
        if self.weights != "auto":
            return self.weights
        return "split" if gpu and precision == "bf16" else "fp32"


@dataclass(frozen=True)
class LeanConfig(Kept):
    # The memory that training may take, such as "16GiB", or a share of the GPU's, such as "80%": what is kept for the
    # backward pass is then chosen block by block, as much as fits, and `mlp`, `qkv` and `blocks` are not asked.
    memory: str = ""
    # What is kept for the backward pass; what follows from it is computed again there, with the same bits.
    norms: Literal["input", "output"] = "output"  # output: kept anyway; gradients of a norm's scale are rounded once
    mlp: Literal["activation", "product", "input"] = "product"  # product: the first one, before the activation
    qkv: Literal["product", "input"] = "product"  # input: queries, keys and values are multiplied again
    blocks: int = 0  # number of blocks, the first ones of each stack, of which nothing but their input is kept
    # What an activation keeps where the two products around it are separate modules of a Hugging Face model, such as
    # BERT's, and `mlp` is not "activation": its input; a byte for each element, from which its slope is known to 2.5e-3
    # (code8); or a bit and its output, which the second product keeps anyway, and its slope to 1.5e-2 (bit). An MLP of
    # Stretto's own models is one module and keeps less than any of these.
    activations: Literal["input", "code8", "bit"] = "code8"

    def __post_init__(self) -> None:
        _require_not_negative("techniques.lean", self, "blocks")
        size, share = self.memory, self.memory.removesuffix("%")
        try:
            right = read_bytes(size) > 0 if share == size else 0.0 < float(share) <= 100.0
        except ValueError:
            right = not size
        _require(
            right,
            f"techniques.lean.memory = {size!r} must be a size, such as '16GiB', or a share of the GPU's memory, such"
            " as '80%': more than nothing, and at most all of it",
        )

    def read_memory(self, card: int) -> int:
        """The bytes that `memory` allows, of a GPU with so many; 0: it sets no limit."""
        if self.memory.endswith("%"):
            return int(float(self.memory[:-1]) / 100 * card)
        return read_bytes(self.memory) if self.memory else 0


@dataclass(frozen=True)
class Fp8Config(Narrow):
    # How many numbers share a scale: those of a tensor, those of a row along what is added up, or 128 of a row (and
    # 128 x 128 of a weight).
    recipe: Literal["tensor", "row", "block128"] = "tensor"
    # Which linear layers of blocks. auto: those that gain by it on this GPU, by a rule from their shapes, but for the
    # first and the last block of a stack; none without such a GPU. all: every one, on any device.
    sites: Literal["auto", "all"] = "auto"
    head: bool = False  # the output layer of a language model, too


@dataclass(frozen=True)
class LayerDropConfig(Dropped):
    theta: float = 0.5  # how often the last block works where the schedule is lowest; the first one always does
    # decay: all blocks work at first, then fewer and fewer. raptr: few at first, all of them at the end.
    schedule: Literal["decay", "raptr", "constant"] = "decay"
    gamma: float = 0.0  # of the decay, per step; 0: 100 / train.steps
    # Of L blocks number l, counted from 1, is left out in proportion to (l - 1) / L (algorithm) or l / L (text).
    index: Literal["algorithm", "text"] = "algorithm"
    gate: Literal["batch", "sample"] = "batch"  # a block is left out for a whole step, or for some sequences of a batch
    # batch: with systematic the number of blocks left out varies by at most one; bernoulli decides for each by itself.
    sampling: Literal["systematic", "bernoulli"] = "systematic"
    # What makes up for it, 1 / p, multiplies each branch or the block. auto: each branch, and Hugging Face's layers as
    # a whole.
    scale: Literal["auto", "branch", "update"] = "auto"

    def __post_init__(self) -> None:
        _require(0.0 < self.theta <= 1.0, f"techniques.layer_drop.theta = {self.theta} must be above 0, and at most 1")
        _require_not_negative("techniques.layer_drop", self, "gamma")


@dataclass(frozen=True)
class StandardizeConfig(Normless):
    # Of the loss, a mean over the former norms and over channels; the sum of the paper has this over their number.
    weight: float = 1.0
    warmup: int = 100  # steps over which the weight grows from 0; make it that of the learning rate
    final: float = 1.0  # the share of the weight that is left at the end, reached in a straight line
    axis: Literal["token", "channel", "layer"] = "token"  # of what mean and variance are taken
    affine: bool = True  # a learned scale (and shift, where the norm has one) stands where the norm stood; else nothing
    # Distance in tokens between those that statistics are taken of. Odd, so that in sequences of even length no
    # position is left out.
    stride: int = 7
    depth_init: bool = True  # residual branches begin smaller by the square root of their number

    def __post_init__(self) -> None:
        _require_not_negative("techniques.standardize", self, "weight", "warmup")
        _require_positive("techniques.standardize", self, "stride")
        _require(0.0 <= self.final <= 1.0, "techniques.standardize.final is a share: it must be between 0 and 1")


@dataclass(frozen=True)
class TechniquesConfig:
    """One subsection per technique, in the order in which they are applied. A technique is off unless its subsection
    is there, as in [techniques.layer_drop]."""

    standardize: StandardizeConfig | None = None  # affines and a loss instead of norms: docs/standardize.md
    fused: FusedConfig | Literal["auto"] | None = "auto"  # Stretto's own kernels; auto: on a GPU
    lean: LeanConfig | None = None  # less is kept for the backward pass: docs/lean.md
    fp8: Fp8Config | None = None  # products of linear layers in 8 bits: docs/fp8.md
    layer_drop: LayerDropConfig | None = None  # blocks are left out by a schedule: docs/layer-drop.md

    def find_kernels(self, gpu: bool) -> FusedConfig | None:
        """The options of our own kernels, with auto resolved; None: they are off."""
        if self.fused != "auto":
            return self.fused
        return FusedConfig() if gpu else None

    def find_keeping(self) -> LeanConfig | None:
        """The options of what is kept for the backward pass; None: all that kernels need."""
        return self.lean


@dataclass(frozen=True)
class ParallelConfig:
    # How several processes share the work: each a whole copy of the model, or its weights split over them (FSDP2).
    # hybrid: split over the processes of one sequence, and a whole copy for each group of them.
    data: Literal["replicate", "shard", "hybrid"] = "replicate"
    # How many processes share each sequence: with attention to far more tokens than one GPU can hold. The rest of the
    # processes share the batch: 8 of them and sequence = 4 make two groups.
    sequence: int = 1
    # How their tokens attend to each other: all get the keys and values of all (gather), each gets some heads of all
    # tokens (ulysses), or keys and values go around (ring). auto: what should be fastest; the log says why. See
    # docs/sequence.md.
    sequence_method: Literal["auto", "gather", "ulysses", "ring"] = "auto"
    # Who gets which tokens: one run of them, an early and a late run, or those of each document of a packed batch.
    sequence_layout: Literal["contiguous", "zigzag", "documents"] = "zigzag"
    # gather: keep what was gathered for the backward pass; false: gather it again then, which takes less memory.
    sequence_keep: bool = True
    sequence_heads: int = 0  # gather: number of key/value heads at a time, which takes less memory; 0: all at once

    # How many processes share the layers of the model, each some of them: for models that one GPU cannot hold, and for
    # links too slow to exchange gradients. See docs/pipeline.md.
    pipeline: int = 1
    # In which order they work. 1f1b is exact and waits at the end of each update. 2bw never waits: gradients are one
    # update old. In pipelined and in ouroboros, the paper's order, which waits, those of a part of the model are as
    # many updates old as there are parts behind it.
    schedule: Literal["1f1b", "2bw", "pipelined", "ouroboros"] = "1f1b"
    # ring: the first and the last part of the model are in one process, so that an embedding which is also the output
    # matrix is there once. auto: ring for such models.
    placement: Literal["auto", "linear", "ring"] = "auto"
    cuts: tuple[int, ...] = ()  # the first block of every part but the first; none: parts of equal work
    sync_steps: int = 0  # updates at the beginning that are made by 1f1b, before gradients may be old
    predict: bool = False  # passes use weights that are moved ahead by as many updates as their gradients will be old
    late_lr: float = 0.0  # the learning rate of a part is divided by (1 + the age of its gradients) to this power
    # How a tied embedding takes the gradients of its two uses where these are of different age: both, or their mean,
    # as the paper has it.
    tied_gradient: Literal["sum", "mean"] = "sum"

    def axes(self) -> dict[str, int]:
        """The sizes of what processes share besides the batch (mesh.py)."""
        return {"pipeline": self.pipeline, "sequence": self.sequence}

    def find_repeated(self) -> tuple[str, ...]:
        """The axes along which processes work on the same tokens."""
        return ("pipeline",)

    def __post_init__(self) -> None:
        _require_positive("parallel", self, "sequence", "pipeline")
        _require_not_negative("parallel", self, "sequence_heads", "sync_steps", "late_lr")
        _require(
            self.data != "hybrid" or self.sequence > 1,
            "parallel.data = 'hybrid' splits weights over the processes of a sequence: set parallel.sequence, or use"
            " 'shard'",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0  # steps; 0: only at the end and when stopped
    # How many of the newest that verify to keep, besides the best. With 1 two stay, since files go bad on disks; with
    # 0 none is ever written, and nothing resumes.
    keep: int = 2

    def __post_init__(self) -> None:
        _require_not_negative("checkpoint", self, "every", "keep")


@dataclass(frozen=True)
class ReportConfig:
    # After the run: updates of short runs with all techniques, and without each in turn, which say what it contributed:
    # time, memory and loss. 0: there are none; `stretto train --ablate` makes it 20.
    ablate: int = 0
    # Who else gets the numbers, by libraries that are installed for it: "wandb", "mlflow". docs/report.md
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_not_negative("report", self, "ablate")
        for name in self.loggers:
            _require(name in LOGGERS, f"report.loggers: {name!r} must be one of {', '.join(LOGGERS)}")


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    techniques: TechniquesConfig = field(default_factory=TechniquesConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self) -> None:
        kinds = {"masked": "encoder", "translation": "encoder-decoder", "classification": "encoder", "images": "vit"}
        want = kinds.get(self.data.task, "decoder")
        _require(
            self.model.kind == want,
            f"data.task = {self.data.task!r} needs model.kind = {want!r}, not {self.model.kind!r}",
        )
        _require(
            self.data.task != "translation" or len(self.data.languages) == 2,
            'data.task = "translation" needs data.languages, such as ["en", "de"]',
        )
        _require(
            self.model.kind == "vit" or self.model.positions == "rotary" or self.data.seq_len <= self.model.max_len,
            f"data.seq_len = {self.data.seq_len} is longer than model.max_len = {self.model.max_len}",
        )
        _require(
            self.train.spikes == "log" or self.parallel.pipeline == 1 or self.parallel.schedule == "1f1b",
            "train.spikes = 'skip' needs the norm of all gradients, for which parallel.schedule ="
            f" {self.parallel.schedule!r} does not wait: set it to '1f1b', or train.spikes to 'log'",
        )
        _require(
            self.train.ema == 0.0 or self.parallel.pipeline == 1,
            "train.ema follows whole updates, and the processes of a pipeline make theirs one part of the model after"
            " the other: set parallel.pipeline to 1, or train.ema to 0",
        )
        _require(
            self.data.task != "images" or self.model.channels == 3, "model.channels must be 3: images are read as RGB"
        )
        for key in ("augment", "aa", "reprob", "mixup", "cutmix"):
            _require(
                not getattr(self.data, key) or (self.data.task == "images" and not self.data.own),
                f"data.{key} is for images that Stretto reads: leave it out, or set data.task to 'images'",
            )
        _require(
            not self.data.mixes or not self.model.own,
            "data.mixup and data.cutmix give an image two labels, and a model of your own computes its loss by itself:"
            " leave them out",
        )
        _require(
            self.data.task != "masked" or self.model.classes == 0,
            "model.classes on an encoder is for data.task = 'classification', not 'masked'",
        )


KERNELS, KEEPING = "techniques.fused", "techniques.lean"  # keys: our own kernels, and what is kept for their backward


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a recipe and applies `section.key=value` overrides."""
    path = Path(path)
    try:
        tree = parse(read_text(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return build_config(apply_overrides(tree, overrides))


def build_config(tree: Mapping[str, Any]) -> Config:
    """The nested mapping of a recipe to a checked Config."""
    sections = get_type_hints(Config)
    for name, section in tree.items():
        if name not in sections:
            raise ConfigError(f"unknown section [{name}]{_nearest(name, sections)}")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} must be a section: write [{name}] and its keys below")
    tree = _read_former(tree)
    data, init = tree.get("data", {}), tree.get("model", {}).get("init")
    if isinstance(init, str) and init and data.get("task") != "images":
        tree = {**tree, "data": {"tokenizer": init, **data}}
    return Config(**{name: _build_section(name, sections[name], tree.get(name, {})) for name in sections})


def _read_former(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recipe, or the configuration of a run, of a version in which `fused` had a key that `lean` has the work of."""
    chosen = tree.get("techniques", {})
    if not isinstance(chosen.get("fused"), Mapping) or "recompute" not in chosen["fused"]:
        return tree
    fused = {key: value for key, value in chosen["fused"].items() if key != "recompute"}
    again = {"lean": {"norms": "input"}} if chosen["fused"]["recompute"] is True else {}
    return {**tree, "techniques": {**again, **chosen, "fused": fused}}


def build_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The [model] section by itself."""
    section: ModelConfig = _build_section("model", ModelConfig, values)
    return section


def dump_config(config: Config) -> str:
    """The resolved configuration as TOML; loading it gives an equal Config."""
    return "\n".join(line for name, section in asdict(config).items() for line in _dump_section(name, section))


def _dump_section(name: str, section: dict[str, Any]) -> list[str]:
    lines = [f"[{name}]"]
    lines += [f"{key} = {to_toml(value)}" for key, value in section.items() if not isinstance(value, dict)]
    inner = [_dump_section(f"{name}.{key}", value) for key, value in section.items() if isinstance(value, dict)]
    return [*lines, "", *(line for part in inner for line in part)]


def _build_section(name: str, section: type[Any], values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(section)
    known = {item.name: hints[item.name] for item in fields(section)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {name}.{key}{_nearest(key, known)}")
    preset = values.get("preset")
    if name == "model" and preset:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(f"model.preset = {show(preset)} is not a preset{_nearest(show(preset), PRESETS)}")
        values = PRESETS[preset] | dict(values)
    # The config.toml of a run says everything, sizes of texts as well as of images, and needs no folder any more.
    said_all = {"layers", "vocab", "token_types", "image_size"} <= values.keys()
    if name == "model" and values.get("init") and not said_all:
        values = _start_from(_convert("model.init", str, values["init"]), values)
    return section(**{key: _convert(f"{name}.{key}", known[key], value) for key, value in values.items()})


def _start_from(init: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of the folder, and what the recipe may choose besides."""
    found = read_model(Path(init))
    # Another number of classes means another head; without a table, texts may be longer than those it was trained on.
    free = {*CHOICES, "classes"} | ({"max_len"} if found.get("positions") != "learned" else set())
    left_open = {key for key in ("vocab", "kv_heads", "mlp_width", "decoder_layers") if said.get(key) == 0}
    for key in sorted(found.keys() & said.keys() - free - left_open):
        if found[key] != said[key]:
            preset = PRESETS.get(said.get("preset", ""), {})
            source = f"model.preset = {said['preset']!r}" if preset.get(key) == said[key] else "the recipe"
            raise ConfigError(
                f"model.init = {init!r} has model.{key} = {found[key]!r}, but {source} says {said[key]!r}:"
                " leave out one of them"
            )
    if found["kind"] == "encoder":
        found.pop("classes", None)  # a text classifier's; its encoder is what training can start from
    return found | {key: value for key, value in said.items() if key not in found or key in free}


def _convert(key: str, kind: Any, value: Any) -> Any:
    shown = f"{key} = {show(value)}"
    if get_origin(kind) in (UnionType, Union):  # an optional subsection; true means: with its defaults
        section: Any = next(part for part in get_args(kind) if is_dataclass(part))
        words = [word for each in get_args(kind) if get_origin(each) is Literal for word in get_args(each)]
        if value is None or isinstance(value, section) or value in words:
            return value
        if isinstance(value, Mapping):
            return _build_section(key, section, value)
        if not isinstance(value, bool):
            ways = ", ".join(["true", "false", *map(repr, words)])
            raise ConfigError(f"{shown} must be {ways} or a subsection: write [{key}] and keys below")
        return section() if value else None
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise ConfigError(f"{shown} must be one of {', '.join(map(repr, choices))}")
        return value
    if get_origin(kind) is tuple:
        item_kind = get_args(kind)[0]
        if not isinstance(value, (list, tuple)) or not all(type(item) is item_kind for item in value):
            items = {str: "strings", int: "whole numbers"}[item_kind]
            raise ConfigError(f"{shown} must be a list of {items}")
        return tuple(check_range(key, item) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(check_range(key, value))
    if type(value) is not kind:  # `bool` is an `int` to isinstance; a recipe that says `steps = true` is wrong
        raise ConfigError(f"{shown} must be of type {kind.__name__}, not {type(value).__name__}")
    return check_range(key, value)


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Changes the tree of a recipe: first the folder to start from, before which sizes and the tokenizer give way."""
    for override in sorted(overrides, key=lambda override: override.partition("=")[0].strip() != "model.init"):
        _apply(tree, override)
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not (equals and sections and key and all(sections)):
        raise ConfigError(f"--set {show(override)}: write section.key=value, for example train.steps=100")
    try:
        value = parse(f"value = {text}")["value"]
    except ValueError:
        value = text  # an unquoted string, which shells make hard to quote
    target: Any = tree
    for depth, section in enumerate(sections, 1):
        if target.get(section) is True:  # it is on, with its defaults
            target[section] = {}
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            here = ".".join(sections[:depth])
            raise ConfigError(f"{here} must be a section: write [{here}] and its keys below")
    target[key] = value
    if [*sections, key] == ["model", "init"] and value:
        for other in target.keys() - {"init", "kind", "classes", *CHOICES}:
            del target[other]
        if isinstance(tree.get("data"), dict):
            tree["data"].pop("tokenizer", None)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none yet'}"


def to_toml(value: Any) -> str:
    if value is None:  # a subsection that is off; TOML has no null
        return "false"
    if isinstance(value, float):
        return repr(value)
    # TOML reads JSON's strings, integers, booleans and arrays, but neither surrogate pairs nor a bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _require_positive(name: str, section: Any, *keys: str) -> None:
    for key in keys:
        _require(getattr(section, key) > 0, f"{name}.{key} = {getattr(section, key)} must be positive")


def _require_not_negative(name: str, section: Any, *keys: str) -> None:
    for key in keys:
        _require(getattr(section, key) >= 0, f"{name}.{key} = {getattr(section, key)} must not be negative")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
