"""Tiny models of every class that transformers exports, and batches for them. Nothing is downloaded.

A configuration is its class's own default with every size made small by what its name means (`shrink`); a few families
need a word more (`OVERRIDES`). Weights are random and far from what initialisation gives: norms have an outlier
channel, biases are not zero, and every value is representable in bf16. What a model reads is drawn from the signature
of its `forward`; `find_form` tries the few shapes that images and sound come in until the model takes one.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

VOCAB, CLASSES, WIDTH, HEADS, INNER, POSITIONS = 99, 5, 32, 4, 48, 64
ROWS, LENGTH, TARGETS = 3, 9, 7
GRID = 4  # patches of an image, in each direction
PADDING, OTHER_PADDING = 1, 5
FIRST_TOKEN, LAST_TOKEN = 10, 60  # words; special tokens lie around them
IGNORE = -100
Batch = dict[str, Any]


# Which classes there are


def model_classes() -> dict[str, str]:
    """Every class of a model that can be called, and its family: the folder it is in."""
    found: dict[str, str] = {}
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        family = path.parent.name
        if family in ("auto", "timm_wrapper", "timm_backbone"):
            continue
        try:
            module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        except ImportError:
            continue  # it needs a package that is not here
        for name in getattr(module, "__all__", ()):
            kind = getattr(module, name, None)
            if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and not name.endswith("PreTrainedModel"):
                found[name] = family
    return found


def find_class(name: str, family: str) -> type[PreTrainedModel]:
    folder = Path(transformers.__file__).parent / "models" / family
    for path in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        if name in getattr(module, "__all__", ()):
            return getattr(module, name)
    raise LookupError(f"transformers has no {name} in models/{family}")


# Tiny configurations


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def at_most(size: int) -> Callable[[Any], Any]:
    return lambda value: [min(v, size) for v in value] if _is_list(value) else min(value, size)


def always(size: Any) -> Callable[[Any], Any]:
    return lambda value: [size] * len(value) if _is_list(value) else size


def by_stage(*sizes: int, one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Lists of a value for each stage grow where the original does; `one` is for what is not a list."""

    def choose(value: Any) -> Any:
        if not _is_list(value):
            return one(value)
        grows = len(set(map(str, value))) > 1
        return [sizes[min(i, len(sizes) - 1)] if grows else sizes[0] for i in range(len(value))]

    return choose


def _convolutions(value: Any) -> Any:
    """Two in front of a model of sound, instead of seven: their widths, kernels or strides, by their size."""
    return value if not _is_list(value) else [16, 16] if value[0] > 20 else [3, 3] if value[0] > 5 else [2, 2]


SIZES: list[tuple[Callable[[Any], Any], str]] = [  # what becomes of a size, and names; the first that fits decides
    (lambda value: value, "chunk_size_feed_forward"),
    (at_most(6), "chunk_size attention_chunk_size sliding_window sliding_window_size local_attention attention_window"),
    (lambda value: [1], "deepstack_visual_indexes fullatt_block_indexes global_attn_indexes full_attn_idxs"),
    (lambda value: [2, 1, 1], "mrope_section"),
    (at_most(2), "num_feat_extract_layers num_conv_layers"),
    (_convolutions, "conv_dim conv_kernel conv_stride"),
    (always(8), "num_conv_pos_embeddings"),
    (always(2), "num_conv_pos_embedding_groups"),
    (at_most(1), "num_nextn_predict_layers first_k_dense_replace num_adapter_layers"),
    (always(1), "depths layers_per_stage stage_num_blocks"),
    (by_stage(1, one=at_most(2)), "layers *_layers blocks *_blocks n_layer depth *_depth"),
    (at_most(2), "num_key_value_heads num_kv_heads n_kv_head* num_key_value_groups *_num_key_value_heads"),
    (at_most(2), "num_global_key_value_heads"),
    (always(4), "mamba_n_heads mamba_num_heads linear_num_*_heads"),
    (by_stage(2, 4, 8, 16, one=at_most(HEADS)), "head heads *_head *_heads"),
    (at_most(16), "q_lora_rank kv_lora_rank o_lora_rank"),
    (at_most(4), "rotary_dim"),
    (at_most(8), "*head_dim *dim_head *head_size d_kv d_head *_d_head kv_channels"),
    (at_most(8), "*d_state *state_size"),
    (by_stage(16, 32, 64, 128, one=always(128)), "*hidden_sizes embed_dims dims num_channels_list channels"),
    (by_stage(16, 32, 64, 128, one=at_most(WIDTH)), "embed_dim"),
    (
        always(INNER),
        "*intermediate_size *intermediate_sizes *ffn_dim *ffn_hidden_size *mlp_dim *mlp_hidden_size n_inner",
    ),
    (always(INNER), "d_ff d_inner dim_ff *dim_feedforward *intermediate_dim feed_forward_size intermediate_size_mlp"),
    (always(INNER), "*feed_forward_hidden_size *feedforward_dim *ff_dim *ffn_size"),
    (at_most(WIDTH), "*hidden_size *d_model *n_embd *embed_dim *embedding_size *hidden_dim *embedding_dim *width"),
    (at_most(WIDTH), "*proj_dim *proj_size *projection_dim *projection_size *d_embed *feature_size *hidden_features"),
    (at_most(WIDTH), "*hidden_channels *output_channels conv_dim"),
    (
        at_most(16),
        "num_mel_bins num_mel_features n_mels input_feat_per_channel feature_projection_input_dim feature_dim",
    ),
    (at_most(WIDTH), "dim *_dim"),
    (at_most(64), "*codebook_size"),
    (at_most(VOCAB), "num_embeddings *vocab_size"),
    (at_most(8), "relative_attention_num_buckets position_buckets"),
    (at_most(10), "relative_attention_max_distance max_relative_position* max_bucket_distance"),
    (at_most(1024), "max_2d_position_embeddings max_xpath_* max_tree_*"),
    (at_most(32), "max_source_positions max_target_positions max_audio_* max_speech_positions"),
    (at_most(POSITIONS), "*max_position_embeddings *n_positions *n_ctx *max_seq_len *max_sequence_length *max_length"),
    (at_most(POSITIONS), "*seq_length *context_length *max_text_len"),
    (always(32), "*image_size input_size crop_size img_size"),
    (at_most(8), "*patch_size"),
    (lambda value: 32 if not _is_list(value) and value >= 64 else at_most(4)(value), "window_size"),  # pixels, patches
    (at_most(4), "num_experts num_local_experts num_routed_experts n_routed_experts n_experts moe_num_experts"),
    (at_most(2), "num_experts_per_tok* moe_k moe_topk top_k num_selected_experts moe_top_k router_top_k index_topk"),
    (always(1), "n_group topk_group num_expert_group"),
    (at_most(1), "n_shared_experts num_shared_experts"),
    (at_most(WIDTH // 2), "num_pos_feats"),
    (at_most(8), "num_queries num_object_queries num_query_tokens num_latents num_proposals num_denoising"),
    (at_most(4), "num_frames"),
    (at_most(2), "num_codebooks n_codebooks"),
    (always(4), "image_seq_length mm_tokens_per_image image_token_num"),
    (always(16), "num_position_embeddings"),
]
RANDOM = re.compile("dropout|drop_rate|pdrop|drop_prob|drop_path|layerdrop|jitter|mask_time_prob|mask_feature_prob")
KINDS = re.compile("layer_types|layers_block_type|block_types?|attention_types|no_rope_layers")  # of layers
TOKEN = re.compile("(token_id_list|token_index|_token|_ids?)$")
NOT_SIZES = {"model_type", "transformers_version", "architectures", "id2label", "label2id", "num_labels", "dtype"}
NOT_SIZES |= {"out_features", "out_indices", "stage_names"}  # the defaults of fewer stages

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
OVERRIDES: dict[str, dict[str, Any]] = {  # by the name of a configuration's class
    "BambaConfig": MAMBA,
    "Dots1Config": {"n_routed_experts": 4},
    "EsmConfig": {"pad_token_id": PADDING, "mask_token_id": 4},
    "FalconH1Config": MAMBA | {"mamba_d_ssm": 64},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "GraniteMoeHybridConfig": MAMBA,
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LiltConfig": {"hidden_size": 48},
    "MPNetConfig": {"relative_attention_num_buckets": 32},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "MobileBertConfig": {"true_hidden_size": 32, "embedding_size": 32, "intra_bottleneck_size": 32},
    "XLNetConfig": {"d_head": 8},
    "XmodConfig": {"default_language": "en_XX"},
}
DETECTORS = ("Detr", "ConditionalDetr", "DeformableDetr", "TableTransformer", "DabDetr")
FILLED = {"head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS, "vocab_size": VOCAB}  # where the default is None


def overrides(kind: Any) -> dict[str, Any]:
    name = kind.__name__
    if name.removesuffix("Config") not in DETECTORS:
        return OVERRIDES.get(name, {})
    stages = ["stage2", "stage3", "stage4"] if "Deformable" in name else ["stage4"]
    backbone: dict[str, Any] = {
        "embedding_size": 8,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1] * 4,
        "layer_type": "basic",
    }
    made = {"backbone_config": transformers.ResNetConfig(**backbone, out_features=stages), "backbone": None}
    return made | {"use_timm_backbone": False, "use_pretrained_backbone": False}


def shrink(name: str, value: Any) -> Any:
    """A value of a configuration, small."""
    if isinstance(value, bool) or value is None:
        return value
    if RANDOM.search(name) and isinstance(value, int | float):
        return type(value)(0)
    if isinstance(value, dict) and name.startswith("rope_"):
        return {inner: shrink(inner, v) for inner, v in value.items()}
    if KINDS.search(name) and isinstance(value, list) and len(value) > 2:
        return value[-2:]  # the last two of a pattern differ where any do
    numbers = value if _is_list(value) else [value]
    if not numbers or not all(type(number) is int for number in numbers):
        return value
    become = _rule(name)
    return value if become is None else become(value)


@cache
def _rule(name: str) -> Callable[[Any], Any] | None:
    return next((become for become, names in SIZES if any(fnmatchcase(name, word) for word in names.split())), None)


def tiny_config(
    kind: Any, classes: int = CLASSES, given: dict[str, Any] | None = None, tokens: dict[int, int] | None = None
) -> Any:
    """The class's default, or what a model around it has `given` for it, made small. `tokens` are the ids that have
    been moved into the small vocabulary."""
    tokens = {} if tokens is None else tokens
    default = kind(**(given or {}))
    values, known = default.to_dict(), _arguments(kind)
    made: dict[str, Any] = {}
    for name in [name for name in values if name not in NOT_SIZES]:
        inner: Any = getattr(default, name, None)
        if hasattr(inner, "to_dict"):
            own = {k: v for k, v in inner.to_dict().items() if k not in ("model_type", "transformers_version")}
            made[name] = tiny_config(type(inner), CLASSES, own, tokens)
        elif name in known:
            is_token = TOKEN.search(name)
            made[name] = _move_token(values[name], tokens) if is_token else shrink(name, values[name])
    _complete(kind, made, values)
    made |= overrides(kind)
    if "num_labels" in known or not any(hasattr(value, "to_dict") for value in made.values()):
        made["num_labels"] = classes
    config = kind(**made)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 2
    return config


def _complete(kind: Any, made: dict[str, Any], values: dict[str, Any]) -> None:
    """What depends on other values, or is not given by default."""
    if "vocab_size" in made and made.get("pad_token_id", 0) is None:
        made["pad_token_id"] = PADDING
    if "apply_spec_augment" in made:
        made["apply_spec_augment"] = False
    if isinstance(made.get("rope_parameters"), dict) and _mentions(kind, "mrope_section"):
        made["rope_parameters"] = made["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    made |= {name: size for name, size in FILLED.items() if name in made and made[name] is None}
    for name in [name for name in made if name.endswith("num_key_value_heads")]:
        of_queries = name.replace("key_value", "attention")
        if values[name] == values.get(of_queries):  # as many as of queries
            made[name] = made[of_queries]


def _arguments(kind: Any) -> set[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        names |= set(getattr(base, "__dataclass_fields__", {})) | set(vars(base).get("__annotations__", {}))
        if "__init__" in vars(base):
            names |= set(inspect.signature(base.__init__).parameters)
    return names


@cache
def _mentions(kind: Any, word: str) -> bool:
    """Whether the models of a configuration do."""
    folder = Path(inspect.getfile(kind)).parent
    return any(word in path.read_text() for path in folder.glob("modeling_*.py"))


def _move_token(value: Any, tokens: dict[int, int]) -> Any:
    """Ids beyond the small vocabulary become ids at its end: the same one everywhere."""
    if _is_list(value):
        return [_move_token(v, tokens) for v in value]
    if type(value) is not int or value < FIRST_TOKEN:
        return value
    return tokens.setdefault(value, VOCAB - 1 - len(tokens))


# Tiny models

LARGEST = 20_000_000  # parameters


def build(name: str, family: str, outliers: bool = True) -> PreTrainedModel:
    """In fp32 and training mode, without anything random."""
    kind = find_class(name, family)
    config = tiny_config(kind.config_class, 2 if "QuestionAnswering" in name else CLASSES)
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(config).parameters())
    except Exception:  # some models do arithmetic while they are built, which the meta device cannot
        size = 0
    if size > LARGEST:
        raise ValueError(f"its tiny form has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config)
    scatter(model, outliers)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.float().train()


def narrow(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """As from_pretrained gives a model in this precision: some modules stay in fp32."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    model.to(dtype)  # type: ignore[arg-type]  # transformers wraps torch's method
    for name, module in model.named_modules():
        if kept & set(name.split(".")):
            module.float()
    return model


@torch.no_grad()
def scatter(model: nn.Module, outliers: bool = True) -> None:
    """Weights in values that bf16 holds: as far from their first values as training takes them, or near to those. What
    a wrong exchange does to a part of a model shows in the one or in the other."""
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        if not outliers:
            parameter.add_(0.05 * noise)
        elif parameter.ndim < 2:
            is_scale = float(parameter.mean()) > 0.5
            parameter.add_(0.1 * noise)
            if name.endswith("weight") and parameter.numel() > 3:  # of a norm: x w, or x (1 + w)
                parameter[3] = 5.0 if is_scale else 7.0
        else:
            parameter.add_(noise * 0.5 / parameter[0].numel() ** 0.5)
        parameter.copy_(parameter.bfloat16())


# Batches


@dataclass(frozen=True)
class Draw:
    """What a batch is like."""

    lengths: tuple[int, ...] = (9, 3, 6)
    side: str = "right"  # where padding is
    padding: int | None = None  # its id; None: that of the configuration
    mask: bool = True
    labels: str = "drawn"  # or none, or ignored, or everywhere, also on padding
    options: tuple[tuple[str, Any], ...] = ()


PLAIN = Draw()


@dataclass(frozen=True)
class Form:
    """How a model wants its inputs."""

    pixels: tuple[int, ...] | None = None  # their shape behind the rows
    grid: bool = False  # whether they are patches of GRID x GRID, those of all rows one after the other
    patches: bool = False  # whether they are such patches in rows, with a mask
    image_tokens: int = 0  # in each row
    sound: tuple[int, ...] | None = None
    text: bool = True
    labels: str | None = None
    decoder: bool = False
    mask: bool = True
    uncached: bool = True  # whether it may be told to keep no cache


def signature(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(type(model).forward).parameters)


def label_kind(model: nn.Module) -> str | None:
    """What labels are: classes of tokens or of rows, words of the vocabulary at all tokens or at some (masked), spans,
    choices, or whole samples."""
    name, names = type(model).__name__, signature(model)
    if "start_positions" in names and "QuestionAnswering" in name:
        return "spans"
    if "labels_input_ids" in names:
        return "samples"
    if "labels" not in names or re.search(r"Detection|Segmentation|DepthEst|CTC|MaskedImage|RegionTo", name):
        return None
    if re.search(r"(Sequence|Image|Audio|Video)Classification|NextSentence|TextClass", name):
        return "pairs" if "NextSentence" in name else "rows"
    if "MultipleChoice" in name:
        return "choices"
    if "TokenClassification" in name:
        return "tokens"
    if name.endswith("ForPreTraining") and "Electra" in name:
        return "binary"
    if "MaskedLM" in name or name.endswith("ForPreTraining"):
        return "masked"
    return "words" if "input_ids" in names or "decoder_input_ids" in names else None


def forms(model: nn.Module) -> Iterator[Form]:
    """From the richest to the poorest."""
    names = signature(model)
    text = "input_ids" in names
    start = Form(text=text, labels=label_kind(model), decoder="decoder_input_ids" in names)
    pictures: list[Form] = []
    if {"image_grid_thw", "grid_thw"} & set(names):
        merge = _find(model.config, "spatial_merge_size") or 1
        pictures.append(replace(start, grid=True, image_tokens=GRID**2 // merge**2 if text else 0))
        if pictures[0].image_tokens and merge > 1:
            pictures.append(replace(start, grid=True, image_tokens=GRID**2))
    if "spatial_shapes" in names:
        pictures.append(replace(start, patches=True))
    if "pixel_values" in names or ("pixel_values_videos" in names and not text):
        pictures += [replace(start, pixels=shape) for shape in _image_shapes(model)]
    if {"input_values", "input_features"} & set(names):
        pictures += [replace(start, sound=shape) for shape in _sound_shapes(model)]
    for form in [*pictures, *([start] if text or not pictures else [])]:
        yield form
        yield replace(form, uncached=False)
        if form.labels:
            yield replace(form, labels=None)
        if not form.text or form.sound:
            yield replace(form, labels=None, mask=False)


def _find(config: Any, name: str) -> Any:
    """A value of a configuration, or of one inside it."""
    found = getattr(config, name, None)
    if found is not None and not hasattr(found, "to_dict"):
        return found
    for inner in vars(config).values():
        if hasattr(inner, "to_dict") and (found := _find(inner, name)) is not None:
            return found
    return None


def _image_shapes(model: Any) -> list[tuple[int, ...]]:
    config = model.config
    size = _find(config, "image_size") or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _find(config, "num_channels") or 3
    channels = channels if isinstance(channels, int) else 3
    frames = _find(config, "num_frames") or 2
    image = (channels, height, width)
    return [image, (frames, *image), (1, *image), (channels, 64, 64)]


BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")


def _sound_shapes(model: Any) -> list[tuple[int, ...]]:
    bins = next((n for n in (_find(model.config, k) for k in BINS) if n), 16)
    longest = _find(model.config, "max_source_positions") or 32
    if "input_values" in signature(model):
        return [(400,), (64, bins), (1, 400), (1600,)]
    return [(bins, 2 * longest), (64, bins), (bins, 64), (2 * longest, bins)]


def draw_batch(model: Any, form: Form, draw: Draw = PLAIN, seed: int = 0) -> Batch:
    """Numbers are drawn in values that bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    real = _real_tokens(form, draw)
    batch = _draw_text(model, form, draw, real, generator) if form.text else {}
    batch |= _draw_pixels(model, form, generator) | _draw_sound(model, form, draw, generator)
    if form.decoder:
        batch |= _draw_decoder(model, form, draw, generator)
    if draw.labels != "none" and form.labels is not None:
        batch |= _draw_labels(model, form, draw, batch, real, generator)
    if form.labels == "choices":
        own = [name for name in ("input_ids", "attention_mask", "bbox") if name in batch]
        batch |= {name: torch.stack([batch[name], batch[name].roll(1, 0)], 1) for name in own}
    if takes_cache(model, form):
        batch["use_cache"] = False
    numbers = {k: v.bfloat16().float() for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return batch | numbers | dict(draw.options)


def takes_cache(model: Any, form: Form) -> bool:
    names = signature(model)
    passed_on = "kwargs" in names and form.text and _find(model.config, "use_cache") is not None
    return form.uncached and ("use_cache" in names or passed_on)


def _real_tokens(form: Form, draw: Draw) -> Tensor:
    """bool [N, S], without padding. Image tokens stand where no padding is."""
    real = torch.arange(max(draw.lengths)) < torch.tensor(draw.lengths)[:, None]
    images = torch.ones(ROWS, form.image_tokens, dtype=torch.bool)
    return torch.cat([images, real], 1) if draw.side == "right" else torch.cat([real.flip(1), images], 1)


def _draw_text(model: Any, form: Form, draw: Draw, real: Tensor, generator: torch.Generator) -> Batch:
    names, config = signature(model), model.config
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, real.shape, generator=generator)
    images = slice(0, form.image_tokens) if draw.side == "right" else slice(real.shape[1] - form.image_tokens, None)
    ids[:, images] = _image_token(model)
    if getattr(config, "is_encoder_decoder", False) and "QuestionAnswering" not in type(model).__name__:
        _end_rows(ids, real, _find(config, "eos_token_id"))
    padding = _find(config, "pad_token_id") if draw.padding is None else draw.padding
    padding = PADDING if not isinstance(padding, int) or padding < 0 else padding
    batch: Batch = {"input_ids": ids.where(real, torch.tensor(padding)) if draw.mask else ids}
    if draw.mask and "attention_mask" in names:
        batch["attention_mask"] = real.long()
    if "bbox" in names:
        corner = torch.randint(0, 500, (*real.shape, 2), generator=generator)
        batch["bbox"] = torch.cat([corner, corner + 100], -1)
    if form.image_tokens and "mm_token_type_ids" in names:
        batch["mm_token_type_ids"] = (ids == _image_token(model)).int()
    return batch


def _draw_sound(model: Any, form: Form, draw: Draw, generator: torch.Generator) -> Batch:
    if form.sound is None:
        return {}
    names = signature(model)
    name = "input_values" if "input_values" in names else "input_features"
    batch: Batch = {name: torch.randn(ROWS, *form.sound, generator=generator)}
    if draw.mask and form.mask and not form.text and "attention_mask" in names:
        steps = form.sound[0]
        batch["attention_mask"] = (torch.arange(steps) < torch.tensor([[1.0], [0.6], [0.8]]) * steps).long()
    return batch


def _draw_pixels(model: Any, form: Form, generator: torch.Generator) -> Batch:
    names = signature(model)
    if form.grid or form.patches:
        channels = next((n for n in (_find(model.config, k) for k in ("in_channels", "num_channels")) if n), 3)
        patch, frames = _find(model.config, "patch_size"), (_find(model.config, "temporal_patch_size") or 1)
        width = channels * patch**2 * (frames if form.grid else 1)
        pixels = torch.randn(ROWS, GRID**2, width, generator=generator)
        if form.patches:
            masks = ("pixel_attention_mask",) if form.text else ("pixel_attention_mask", "attention_mask")
            made = {name: torch.ones(ROWS, GRID**2).long() for name in masks if name in names}
            return made | {"pixel_values": pixels, "spatial_shapes": torch.tensor([[GRID, GRID]] * ROWS)}
        pixel_name = "pixel_values" if "pixel_values" in names else "hidden_states"
        grid_name = "image_grid_thw" if "image_grid_thw" in names else "grid_thw"
        return {pixel_name: pixels.flatten(0, 1), grid_name: torch.tensor([[1, GRID, GRID]] * ROWS)}
    if form.pixels is not None:
        pixel_name = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
        return {pixel_name: torch.randn(ROWS, *form.pixels, generator=generator)}
    return {}


def _end_rows(ids: Tensor, real: Tensor, eos: Any) -> None:
    """Classes of pairs are read at the end-of-sequence token: one a row."""
    eos = eos[0] if isinstance(eos, list) else eos
    if isinstance(eos, int) and 0 <= eos < VOCAB:
        last = real.long() * torch.arange(1, real.shape[1] + 1)
        ids[torch.arange(len(ids)), last.argmax(1)] = eos


def _image_token(model: Any) -> int:
    for name in ("image_token_id", "image_token_index", "media_token_id"):
        found = _find(model.config, name)
        if isinstance(found, int):
            return found
    return VOCAB - 1


def _draw_decoder(model: Any, form: Form, draw: Draw, generator: torch.Generator) -> Batch:
    """Its mask, and its ids where labels do not make them."""
    if form.labels in ("rows", "spans", "masked", "tokens"):
        return {}  # the encoder's ids
    batch: Batch = {}
    if form.labels != "words" or draw.labels == "none":
        batch["decoder_input_ids"] = torch.randint(FIRST_TOKEN, LAST_TOKEN, (ROWS, TARGETS), generator=generator)
    if draw.mask and draw.side == "right" and "decoder_attention_mask" in signature(model):
        batch["decoder_attention_mask"] = _real_targets(draw).long()
    return batch


def _real_targets(draw: Draw) -> Tensor:
    lengths = torch.tensor([5, 7, 2] if draw.mask else [TARGETS] * ROWS)
    return torch.arange(TARGETS) < lengths[:, None]


def _draw_labels(
    model: Any, form: Form, draw: Draw, batch: Batch, real: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    ignored, rows = draw.labels == "ignored", torch.arange(ROWS)
    if form.labels in ("rows", "pairs", "choices"):
        drawn = rows % (_classes(model) if form.labels == "rows" else 2)
        return {"labels": torch.full((ROWS,), IGNORE) if ignored else drawn}
    if form.labels == "spans":
        first = torch.full((ROWS,), 10_000) if ignored else real.long().argmax(1)  # beyond a row they are ignored
        return {"start_positions": first + 1, "end_positions": first + 2}
    if form.labels == "samples":
        ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, real.shape, generator=generator)
        made = {f"{kind}_input_ids": ids for kind in ("labels", "attack")}
        return made | {f"{kind}_attention_mask": real.long() for kind in ("labels", "attack") if draw.mask}
    real = _real_targets(draw) if form.decoder and form.labels == "words" else real
    low, high = {"tokens": (0, _classes(model)), "binary": (0, 2)}.get(str(form.labels), (FIRST_TOKEN, LAST_TOKEN))
    labels = torch.randint(low, high, real.shape, generator=generator)
    keep = torch.ones_like(real) if draw.labels == "everywhere" or form.labels == "binary" else real.clone()
    if form.labels == "masked":
        keep &= torch.rand(real.shape, generator=generator) < 0.5
    elif form.labels == "words" and draw.side == "left" and not form.decoder:
        keep[:, 1:] &= real[:, :-1]  # the first real token is not predicted from padding
    if form.image_tokens and not form.decoder:
        keep &= batch["input_ids"] != _image_token(model)
    keep &= not ignored or form.labels == "binary"
    sentences = {name: rows % 2 for name in SENTENCES if name in signature(model)}
    return {"labels": labels.where(keep, torch.tensor(IGNORE))} | sentences


SENTENCES = ("next_sentence_label", "sentence_order_label")


def _classes(model: Any) -> int:
    found = getattr(model.config, "num_labels", None)
    return found if isinstance(found, int) and found > 0 else CLASSES


class NotTried(Exception):
    """The untouched model does not build, or takes none of the inputs that are drawn here."""


def find_form(model: PreTrainedModel) -> Form:
    """The first in which the model runs, in eval mode."""
    problems: list[str] = []
    training = model.training
    model.eval()
    try:
        for form in forms(model):
            for _ in range(2):
                try:
                    with torch.no_grad():
                        model(**draw_batch(model, form))
                    return form
                except Exception as error:
                    problems.append(f"{type(error).__name__}: {error}"[:200])
                    wanted = _missing_image_tokens(str(error), form)
                    if not wanted:
                        break
                    form = replace(form, image_tokens=wanted)
    finally:
        model.train(training)
    raise NotTried("it takes none of the inputs that are drawn: " + problems[0] if problems else "no inputs")


def _missing_image_tokens(message: str, form: Form) -> int:
    """How many image tokens a row must have, from the error of a model that counts them."""
    if form.image_tokens or not re.search(r"[Ii]mage", message):
        return 0
    numbers = [int(n) for n in re.findall(r"\d+", message)]
    most = max(numbers, default=0)
    for count in (most // ROWS, most // (ROWS * WIDTH)):
        if 0 < count <= 64 and most % ROWS == 0:
            return count
    return 0
