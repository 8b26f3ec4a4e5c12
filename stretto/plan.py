"""What a recipe needs before it runs: the account of its memory (memory.py), and that of other choices of what to keep.

Nothing here imports torch: a plan answers at once, also on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from stretto.config import KEEPING, KERNELS, Config
from stretto.dial import Choice, Needs, decide, follow, read_options
from stretto.errors import ConfigError
from stretto.estimate import find_estimate
from stretto.memory import Account, Attention, Keep, Load, Way

BYTES_VOCAB, CLASSES = 320, 1000  # of the tokenizer "bytes", rounded up as a run does; and where nobody says
LONG, SHORT, SHORT_WIDE = 1024, 128, 64  # tokens between which kernels change (stretto/attention.py)
LADDER = {
    "everything": Keep(),
    "norms from outputs": Keep(norms="output"),
    "+ MLP product, not activation": Keep("output", "product"),
    "+ queries, keys, values again": Keep("output", "product", "input"),
    "+ MLP product again": Keep("output", "input", "input"),
    "inputs of blocks": Keep(block="input"),
}
FILLED = (
    0.9  # of a GPU's memory that tensors can take: the rest is the context, libraries, and what lies between tensors
)


def find_needs(config: Config, size: int = 0, parts: int = 1, shards: int = 1, has_fp8: bool = True) -> Needs:
    """What decides over the bytes of a step in one process. A micro-batch holds `size`, or what the recipe says; the
    process has one of `parts` of it, and weights are split over `shards`. `has_fp8`: the GPU has 8-bit products."""
    load = find_load(config, -(-(size or find_size(config)[1]) // parts))
    split = prod(config.parallel.axes().values())
    load = replace(load, tokens=-(-load.tokens // split), labels=-(-load.labels // split))
    return Needs(config.model, load, replace(find_way(config, has_fp8), shards=shards))


def find_choice(config: Config, needs: Needs, card: int = 0) -> Choice:
    """What blocks keep by the recipe, on a GPU with so many bytes."""
    section = config.techniques.find_keeping()
    if section is not None and section.memory.endswith("%") and not card:
        raise ConfigError(
            f"{KEEPING}.memory = {section.memory!r} is a share of a GPU's memory: say by --gpu-memory how much that is"
        )
    try:
        return decide(needs, read_options(section, card), config.data.layout == "padded")
    except ValueError as error:
        raise ConfigError(f"{KEEPING}: {error}") from error


def uses_gpu(config: Config) -> bool:
    """Whether the run is for a GPU; a plan takes it that one will be there."""
    return config.run.device != "cpu"


def find_precision(config: Config) -> str:
    """That of the run, with auto resolved."""
    if config.train.precision != "auto":
        return config.train.precision
    return "bf16" if uses_gpu(config) else "fp32"


def find_way(config: Config, has_fp8: bool = True) -> Way:
    gpu, precision = uses_gpu(config), find_precision(config)
    kernels = config.techniques.find_kernels(gpu)
    weights = "fp32" if kernels is None else kernels.find_weights(gpu, precision)
    moments = "fp32" if kernels is None else kernels.moments
    narrow = find_estimate(config).narrow
    can = kernels is not None and precision == "bf16" and (narrow == "all" or (gpu and has_fp8))
    return Way(
        4 if precision == "fp32" else 2, weights, moments, config.train.micro_batches, averages=config.train.ema > 0,
        narrow=narrow if can else "",
    )  # fmt: skip


def find_attention(config: Config, length: int) -> Attention:
    """Which kernel attends inside sequences of up to so many tokens, by the rules of stretto/attention.py."""
    cfg, data = config.model, config.data
    if find_way(config).element != 2 or data.layout == "padded":
        return "dense"
    window, dense = 0 < cfg.window < length, data.join_documents or data.task == "images"
    short = length <= (SHORT if cfg.width // cfg.heads <= 64 else SHORT_WIDE)
    if not window and (short or (not dense and (cfg.attention_dropout or length <= LONG))):
        return "own"
    return "variable" if (window or not dense) and not cfg.attention_dropout else "dense"


def find_load(config: Config, size: int) -> Load:
    """What a micro-batch of `size` sequences, images or (translation) tokens of the longer side brings. A batch of
    pairs is taken to be full on both sides, which is more than most are."""
    cfg, data = config.model, config.data
    if data.task == "images":
        length = (cfg.image_size // cfg.patch) ** 2 + 1
        return Load(size * length, size, attention=find_attention(config, length))
    attention = find_attention(config, data.seq_len)
    if data.task == "translation":
        return Load(size, size, size, 2 * data.seq_len, attention)
    if data.task == "classification":  # all texts are taken to be as long as they may be
        return Load(size * data.seq_len, size, longest=data.seq_len, attention=attention)
    labels = max(round(data.mask_share * data.seq_len), 1) if data.task == "masked" else data.seq_len
    return Load(size * data.seq_len, size * labels, longest=data.seq_len, attention=attention)


def complete_sizes(config: Config) -> tuple[Config, list[str]]:
    """Fills in what only the data would tell, and says what was assumed."""
    model, data, notes = config.model, config.data, list[str]()
    if data.task in ("images", "classification") and model.classes == 0:
        model = replace(model, classes=CLASSES)
        notes.append(f"model.classes = 0, from the data: {CLASSES} are assumed")
    if model.kind != "vit" and model.vocab == 0:
        sizes = {"bytes": BYTES_VOCAB, "bpe": -(-data.vocab // 64) * 64}
        if data.tokenizer not in sizes:
            raise ConfigError(
                f"model.vocab = 0, and data.tokenizer = {data.tokenizer!r} is not read here: set model.vocab"
            )
        model = replace(model, vocab=sizes[data.tokenizer])
        notes.append(
            f"model.vocab = 0, from the data: {model.vocab:,} is assumed, as data.tokenizer = {data.tokenizer!r} has"
        )
    return replace(config, model=model), notes


def find_size(config: Config) -> tuple[str, int]:
    """The key and the value of what a micro-batch holds."""
    key = "max_tokens" if config.data.task == "translation" else "batch_size"
    return key, getattr(config.data, key)


def find_largest(config: Config, choice: Choice, limit: int) -> int:
    """The largest micro-batch whose peak is within the limit; 0: none is."""

    def fits(size: int) -> bool:
        return find_needs(config, size).predict(choice).peak <= limit

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def list_parts(account: Account) -> dict[str, int]:
    """The bytes of an account by role."""
    state = {"weights": account.weights, "gradients": account.gradients, "moments": account.moments}
    state |= {"average of weights": account.average} if account.average else {}
    state |= {"weights in 8 bits": account.narrow} if account.narrow else {}
    kept = {f"kept: {role}": size for role, size in account.activations.items()}
    return state | kept | {"kept: head": account.head.kept, "head, forward pass": account.head.forward}


def for_device(config: Config, gpu: bool) -> Config:
    """The recipe for a run whose device is known."""
    return replace(config, run=replace(config.run, device="cuda" if gpu else "cpu"))


def predict_for(config: Config, card: int) -> dict[str, int]:
    """The account of a run on a GPU with so many bytes, or on a CPU, for its report: of weights and optimizer alone
    where blocks are plain ones, since what these keep is not known."""
    config = for_device(config, card > 0)
    needs = find_needs(config)
    account = needs.predict(find_choice(config, needs, card))
    parts = list_parts(account) | {"peak": account.peak}
    if config.techniques.find_kernels(uses_gpu(config)) is None:
        return {name: parts[name] for name in ("weights", "gradients", "moments")}
    return parts


def advise_on_memory(config: Config, card: int, world: int) -> str:
    """What to set when memory was full: the largest micro-batch that fits by the account, where there is one."""
    config = for_device(config, card > 0)
    if not card or world > 1 or config.techniques.find_kernels(True) is None:
        return ""
    try:
        config, _ = complete_sizes(config)
        (key, size), choice = find_size(config), find_choice(config, find_needs(config), card)
    except ConfigError:
        return ""
    largest = min(find_largest(config, choice, round(FILLED * card)), size - 1)
    if not largest:
        return "By the account of `stretto plan --memory`, no micro-batch fits: split the weights, or keep less"
    return f"By the account of `stretto plan --memory`, data.{key} = {largest:,} fits"


def explain_memory(config: Config, limit: int = 0) -> Iterator[str]:
    """The lines of `stretto plan --memory`; `limit` is the memory of a GPU in bytes, 0 where nobody has said."""
    config, notes = complete_sizes(config)
    if config.techniques.find_kernels(uses_gpu(config)) is None:
        raise ConfigError(f"{KERNELS} is off, and only what its blocks keep is known: set {KERNELS}=true")
    parallel, alone = config.parallel, replace(config.parallel, data="replicate", pipeline=1)
    left_out = [key for key, value in vars(parallel).items() if value != getattr(alone, key)]
    notes += [f"this is the account of a process that has all weights: parallel.{key} is left out" for key in left_out]
    config = replace(config, parallel=alone)
    (key, size), needs, way = find_size(config), find_needs(config), find_way(config)
    choice = find_choice(config, needs, limit)
    account = needs.predict(choice)
    kinds = f"weights {way.weights}, moments {way.moments}, {8 * way.element}-bit activations"
    yield f"{config.model.kind}, data.{key} = {size:,}: {kinds}"
    yield from (*notes, "")
    rows = list_parts(account) | {f"at the {time}": there for time, there in account.times.items()}
    yield from (f"{name:38}{there:>20,} B{there / 2**30:>9.2f} GiB" for name, there in rows.items())
    yield f"{f'peak, at the {account.peak_at}':60}{account.peak / 2**30:>9.2f} GiB"
    yield ""
    title = f"largest data.{key} in {limit / 2**30:.1f} GiB" if limit else ""
    yield f"{'what blocks keep':38}{'kept':>9}    {'peak':>9}      {title}".rstrip()
    ladder = {name: follow(config.model, keep) for name, keep in LADDER.items()}
    for name, one in ({"as the recipe says": choice} | ladder).items():
        there = needs.predict(one)
        largest = f"{find_largest(config, one, limit):>10,}" if limit else ""
        kept = sum(there.activations.values())
        yield f"{name:38}{kept / 2**30:>9.2f} GiB{there.peak / 2**30:>9.2f} GiB  {largest}".rstrip()
