"""Whether memory is enough at all, asked before any is taken.

Sizes in a recipe, in the config.json of a model or in a data file are only numbers, and a mistaken or hostile one would
fill memory until the system ends the process, or build a model for hours. What is counted here is less than what a run
really takes, so nothing is refused that could fit: a plan (plan.py) has the real account.

Nothing here imports torch: a refusal comes at once.
"""

from __future__ import annotations

from dataclasses import asdict

from stretto.config import Config, ModelConfig
from stretto.errors import ConfigError
from stretto.hardware import find_machine_memory
from stretto.memory import FP32, GRADIENT_BYTES, MOMENT_BYTES, WEIGHT_BYTES, block_bytes, count_block_parameters
from stretto.plan import find_load, find_way, for_device

OBJECTS = 50_000  # bytes of the Python objects that a block is, at least
ID_BYTES = 8


def require_room(config: Config, processes: int, gpu: int) -> None:
    """Raises a `ConfigError` if training cannot fit. The GPU has `gpu` bytes; 0: there is none. Processes are taken to
    share everything evenly, as well as they ever could."""
    config = for_device(config, gpu > 0)
    way = find_way(config)
    each = WEIGHT_BYTES[way.weights] + GRADIENT_BYTES[way.weights] + MOMENT_BYTES[way.moments]
    each += FP32 if way.averages else 0
    _require_model(config.model, each, processes, gpu)
    for what, size in count_batch(config, way.element).items():
        _require(size // processes, what, gpu)


def require_room_for_weights(cfg: ModelConfig, gpu: int = 0) -> None:
    """Raises a `ConfigError` if the weights of a model, which is not trained, cannot fit."""
    _require_model(cfg, FP32, 1, gpu)


def count_parts(cfg: ModelConfig) -> dict[str, int]:
    """Counts the parameters that each key, or several together, bring at least."""
    both, width = cfg.kind == "encoder-decoder", f"model.width = {cfg.width:,}"
    blocks = cfg.layers * sum(count_block_parameters(cfg))
    blocks += (cfg.decoder_layers or cfg.layers) * sum(count_block_parameters(cfg, cross=True)) if both else 0
    layers = [f"model.layers = {cfg.layers:,}"]
    layers += [f"model.decoder_layers = {cfg.decoder_layers:,}"] if cfg.decoder_layers else []
    layers += [f"model.mlp_width = {cfg.mlp_width:,}"] if cfg.mlp_width else []
    parts = {", ".join([*layers, width]): blocks}
    if cfg.kind == "vit":
        patches = (cfg.image_size // cfg.patch) ** 2
        parts[f"model.image_size = {cfg.image_size:,}, model.patch = {cfg.patch:,}"] = patches * cfg.width
        parts[f"model.patch = {cfg.patch:,}, {width}"] = cfg.channels * cfg.patch**2 * cfg.width
    else:
        parts[f"model.vocab = {cfg.vocab:,}, {width}"] = cfg.vocab * cfg.width
        parts[f"model.token_types = {cfg.token_types:,}, {width}"] = cfg.token_types * cfg.width
        table = cfg.max_len * cfg.width if cfg.positions == "learned" else 0
        parts[f"model.max_len = {cfg.max_len:,}, {width}"] = table
    parts[f"model.classes = {cfg.classes:,}, {width}"] = cfg.classes * cfg.width
    return parts


def count_batch(config: Config, element: int) -> dict[str, int]:
    """Counts the bytes of what comes into the first block for one micro-batch, or on a CPU of all that plain blocks
    keep of it; and of the ids or pixels of all those of a step, which wait together. Batches of pairs are as large as
    the data allow, whatever the recipe says."""
    cfg, data, images = config.model, config.data, config.data.task == "images"
    size, number = f"data.batch_size = {data.batch_size:,}", f"train.micro_batches = {config.train.micro_batches:,}"
    tokens = (cfg.image_size // cfg.patch) ** 2 + 1 if images else data.seq_len
    sample = cfg.channels * cfg.image_size**2 * FP32 if images else tokens * ID_BYTES
    if data.task == "translation":
        return {number: config.train.micro_batches * ID_BYTES}
    length = f"model.image_size = {cfg.image_size:,}" if images else f"data.seq_len = {data.seq_len:,}"
    return {
        f"{size}, {length}": data.batch_size * max(tokens * cfg.width * element, sample, count_kept(config, element)),
        f"{number}, {size}, {length}": config.train.micro_batches * data.batch_size * sample,
    }


def count_kept(config: Config, element: int) -> int:
    """Counts the bytes that a CPU keeps of one sample for the backward pass: a system whose memory is full ends the
    process without a word. 0 where it may be less: with techniques, compiled, in a model of somebody's own, or of
    samples that need not be full. A GPU's memory has an error of its own."""
    cfg, full = config.model, config.data.task in ("causal", "masked", "images")
    techniques = [value for value in asdict(config.techniques).values() if value not in (None, "auto")]
    if config.run.device != "cpu" or techniques or config.train.compile or cfg.own or not full:
        return 0
    load = find_load(config, 1)
    return load.tokens * cfg.layers * sum(block_bytes(cfg, element=element).values()) + load.labels * cfg.vocab * FP32


def _require_model(cfg: ModelConfig, each: int, processes: int, gpu: int) -> None:
    """Names the largest part if all of them do not fit together."""
    blocks = cfg.layers + (cfg.decoder_layers if cfg.kind == "encoder-decoder" else 0)
    _require(blocks * OBJECTS, f"model.layers = {cfg.layers:,}, model.decoder_layers = {cfg.decoder_layers:,}", 0)
    parts = count_parts(cfg)
    _require(sum(parts.values()) * each // processes, max(parts, key=lambda name: parts[name]), gpu)


def _require(size: int, what: str, gpu: int) -> None:
    room = gpu or find_machine_memory()
    if size > room:
        raise ConfigError(
            f"{what}: this needs {size / 2**30:,.1f} GiB at least, but the {'GPU' if gpu else 'machine'} has"
            f" {room / 2**30:,.1f} GiB: make it smaller"
        )
