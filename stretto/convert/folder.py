"""Hugging Face folders: config.json, safetensors and a tokenizer.

Reading needs no `transformers` and runs nothing that is in the folder: pickled weights are refused, and files are
opened by names that cannot lead out of it. Writing goes through the configuration classes of `transformers`, so that
what they expect stays their business.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.capacity import require_room_for_weights
from stretto.config import ModelConfig, build_model_config
from stretto.convert.families import choose_family, name_architecture, read_family, read_model, write_model, write_rope
from stretto.convert.names import Match, match, to_ours, to_theirs
from stretto.data import Tokenizer
from stretto.data.chat import Chat
from stretto.data.tokenizer import NUM_BYTES, SPECIALS, ByteTokenizer
from stretto.errors import CheckpointError, ConfigError, DataError
from stretto.files import open_regular, read_text, require_empty
from stretto.model import AddingNorm, Model, build_model
from stretto.values import show
from stretto.weights import Write, initialise, put, take

if TYPE_CHECKING:
    import tokenizers

WEIGHTS = "model.safetensors"
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad"}
# Text and special tokens as training joins them, where {bos} and {eos} stand for these tokens.
_AROUND = {
    "decoder": ("{bos} $A", "{bos} $A $B"),
    "encoder": ("{bos} $A {eos}", "{bos} $A {eos} $B:1 {eos}:1"),
    "encoder-decoder": ("$A {eos}", "$A $B {eos}"),
}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "mask_token": "mask"}
_MOST_BYTES = 1 << 27  # of an index
_SHIFTED = 1 << 20  # numbers that a table may have besides ours
_UNKNOWN = ("<unk>", "[UNK]", "<|unk|>")


class Tensors:
    """The tensors of a folder, in one file or several, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            files: list[Any] = [_open_tensors(path) for path in _find_files(folder)]
            self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the weights in {folder}: {error}") from error

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        value: Tensor = self._files[name].get_tensor(name)
        if not value.is_floating_point():
            raise CheckpointError(f"{self._folder}: {name} is {value.dtype}; quantised weights cannot be trained")
        return value.float()


def _open_tensors(path: Path) -> Any:
    """Opens a file of tensors. Its library checks all that the header says before it reads any tensor, but would wait
    for a pipe for ever."""
    open_regular(path).close()
    return safe_open(path, framework="pt")


def _is_inside(name: Any) -> bool:
    """Says whether this is the name of a file in a folder, and of nothing outside of it."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and "\0" not in name


def _find_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / f"{WEIGHTS}.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(read_text(index, _MOST_BYTES))["weight_map"].values()))
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not an index of weights: {error!r}") from error
        outside = [name for name in names if not _is_inside(name)]
        if outside:
            raise CheckpointError(f"{index} names {show(outside[0])}, which is not a file of this folder")
        return [folder / name for name in names]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise CheckpointError(
            f"{folder} has its weights as a pickle ({pickled[0]}), and reading one can run any code. If you trust it,"
            " load it with transformers and save it again with save_pretrained, which writes model.safetensors"
        )
    raise CheckpointError(f"{folder} has no {WEIGHTS}")


def load_weights(folder: Path, model: nn.Module, cfg: ModelConfig, write: Write = put) -> list[str]:
    """Writes the folder's weights into a model of the folder's sizes, and says what it did. A head that is not there,
    or is for another number of classes, keeps the values it has."""
    parameters = dict(model.named_parameters())
    try:
        tensors = Tensors(folder)
        found = match(name_architecture(read_family(folder)[0], cfg.classes), parameters, tensors.names)
        _compare_sizes(parameters, found, tensors)
        new = [name for name in parameters if name in found.missing or _is_other_head(name, parameters, found, tensors)]
        for name, parameter in parameters.items():
            if name not in new:
                write(parameter, to_ours(found, name, parameter.shape, tensors.read))
    except CheckpointError as error:
        raise CheckpointError(f"model.init = {str(folder)!r}: {error}") from error
    return [
        f"weights from {folder}",
        *([f"not in it, so new: {', '.join(new)}"] if new else []),
        *([f"in it, but not used: {', '.join(found.unused)}"] if found.unused else []),
        *(_compare_pixels(folder) if cfg.kind == "vit" else []),
    ]


def _is_other_head(name: str, parameters: Mapping[str, Tensor], found: Match, tensors: Tensors) -> bool:
    stored = tensors.shape(found.stored[found.places[name][0]])
    return name.startswith("head.") and stored.numel() != parameters[name].numel()


def _compare_sizes(parameters: Mapping[str, Tensor], found: Match, tensors: Tensors) -> None:
    """Refuses tensors that are much larger than what they are for, before they are read; `to_ours` compares shapes."""
    for name, parts in found.places.items():
        size, shape = sum(tensors.shape(found.stored[part]).numel() for part in parts), parameters[name].shape
        if not name.startswith("head.") and size > 2 * shape.numel() + _SHIFTED:
            raise CheckpointError(
                f"{parts[0]} has {size:,} numbers, but {name} is {list(shape)}: config.json is not its own"
            )


def load_model(folder: Path) -> Model:
    """The folder's model as one of ours, on the CPU and in evaluation mode."""
    cfg = build_model_config(read_model(folder))
    require_room_for_weights(cfg)
    model = build_model(cfg).to_empty(device="cpu").eval()
    initialise(model, cfg, 0, put)
    load_weights(folder, model, cfg)
    return model


def write_folder(
    target: Path, model: Model, tokenizer: Tokenizer | None, labels: Sequence[str] = (), chat: Chat | None = None
) -> None:
    """Publishes a model as a folder that `from_pretrained` loads; only those for images have no tokenizer."""
    require_empty(target)
    if any(isinstance(module, AddingNorm) for module in model.modules()):
        raise ConfigError(
            "this model was trained without norms, which every Hugging Face model has:"
            " add --fold, which writes a folder for stretto eval and stretto generate"
        )
    config = build_config(model.cfg, tokenizer, labels)
    draft = target.with_name(f".new-{target.name}-{uuid.uuid4().hex}")
    try:
        draft.mkdir(parents=True)
        config.save_pretrained(draft)
        if config.model_type == "llama":  # transformers 5 has written rope_parameters, where 4 does not look
            written = json.loads((draft / "config.json").read_text(encoding="utf-8"))
            _write_json(draft / "config.json", written | write_rope(asdict(model.cfg)))
        weights = to_theirs(config.architectures[0], model.cfg, {k: take(v) for k, v in model.state_dict().items()})
        save_file(weights, draft / WEIGHTS, metadata={"format": "pt"})
        if model.cfg.kind in ("decoder", "encoder-decoder"):
            tokens = {key: getattr(config, key) for key in (*_TOKENS, "decoder_start_token_id") if hasattr(config, key)}
            if chat is not None and tokenizer is not None:
                tokens["eos_token_id"] = sorted(chat.find_ends(tokenizer))
            _transformers().GenerationConfig(max_length=model.cfg.max_len, **tokens).save_pretrained(draft)
        if tokenizer is not None:
            write_tokenizer(draft, tokenizer, model.cfg, chat or Chat())
        if model.cfg.kind == "vit":
            _write_json(draft / "preprocessor_config.json", _describe_pixels(model.cfg))
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def build_config(cfg: ModelConfig, tokenizer: Tokenizer | None, labels: Sequence[str] = ()) -> Any:
    """The configuration of `transformers` for this model; a `ConfigError` says why there is none."""
    kind = choose_family(asdict(cfg))
    options = write_model(kind, asdict(cfg))
    if tokenizer is not None:
        options |= {key: find_token(tokenizer, role) for key, role in _TOKENS.items()}
    if cfg.kind == "encoder-decoder":  # decoding begins with bos, and ends when the model says so
        options |= {"decoder_start_token_id": options["bos_token_id"], "forced_eos_token_id": None}
    if cfg.classes:
        names = dict(enumerate([*labels, *map(str, range(len(labels), cfg.classes))]))  # a head may have more classes
        options |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    config = _transformers().CONFIG_MAPPING[kind](**options)
    config.architectures = [name_architecture(kind, cfg.classes)]
    return config


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _describe_pixels(cfg: ModelConfig) -> dict[str, Any]:
    """What data/images.py does to an image, in the words of an image processor."""
    half, bicubic = [0.5] * cfg.channels, 3
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True, "size": {"height": cfg.image_size, "width": cfg.image_size}, "resample": bicubic,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": half, "image_std": half,
        "do_convert_rgb": True,
    }  # fmt: skip


def _compare_pixels(folder: Path) -> list[str]:
    """A line for the log if the model was trained on pixels that were normalised in another way than ours."""
    try:
        theirs = json.loads(read_text(folder / "preprocessor_config.json", _MOST_BYTES))
        scales = {*theirs.get("image_mean", []), *theirs.get("image_std", [])}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return []  # nothing is known
    if scales - {0.5}:
        return [f"it was trained on pixels normalised with {sorted(scales)}; here mean and deviation are 0.5"]
    return []


def _transformers() -> Any:
    try:
        return import_module("transformers")  # only here: it is large, and training needs none of it
    except ImportError as error:
        raise ConfigError(
            "writing a Hugging Face folder needs transformers: pip install 'transformers>=5.15'"
        ) from error


def write_tokenizer(folder: Path, tokenizer: Tokenizer, cfg: ModelConfig, chat: Chat) -> None:
    """Writes a tokenizer as `AutoTokenizer` wants it: tokenizer.json, and what its special tokens are for. It gives the
    ids that ours does, with the special tokens around them that the model has been trained with. One difference is
    wanted: the text of a special token ("[MASK]" in a prompt) becomes that token, where a corpus may not have any."""
    inner = to_library(tokenizer)
    ids = {key: find_token(tokenizer, role) for key, role in _ROLES.items()}
    ids["unk_token"] = next((i for i in map(inner.token_to_id, _UNKNOWN) if i is not None), None)
    names = {key: str(inner.id_to_token(i)) for key, i in ids.items() if i is not None}
    if cfg.kind == "encoder":
        names |= {"cls_token": names["bos_token"], "sep_token": names["eos_token"]}
    if inner.post_processor is None:  # one from elsewhere knows itself what to add
        inner.post_processor = _surround(cfg.kind, inner, names["bos_token"], names["eos_token"])
    reads = ["input_ids", "attention_mask", *(["token_type_ids"] if cfg.token_types else [])]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # all is in tokenizer.json; transformers 4 and 5 know this name
        "model_max_length": cfg.max_len,
        "model_input_names": reads,
        "clean_up_tokenization_spaces": False,
    }
    if chat.template:
        names, settings = {**names, **chat.names}, settings | {"chat_template": chat.template}
    (folder / "tokenizer.json").write_text(inner.to_str(pretty=True), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", settings | names)
    _write_json(folder / "special_tokens_map.json", names)


def to_library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer of the `tokenizers` library with the same ids."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    if not isinstance(tokenizer, ByteTokenizer):
        return Inner.from_str(tokenizer.to_json())
    # Byte-level BPE without merges: each byte is one visible character, and no two ever become one token.
    inner = Inner(models.BPE({letter: byte for byte, letter in enumerate(_byte_letters())}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    return inner


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in the library: the visible ones for themselves, others from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(NUM_BYTES)]


def _surround(kind: str, inner: tokenizers.Tokenizer, bos: str, eos: str) -> Any:
    from tokenizers import processors

    single, pair = (text.format(bos=bos, eos=eos) for text in _AROUND[kind])
    specials = [(name, inner.token_to_id(name)) for name in dict.fromkeys((bos, eos))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)


def find_token(tokenizer: Tokenizer, role: str) -> int | None:
    """The id of the token with this role, if there is one."""
    try:
        return tokenizer.find_special(role)
    except DataError:
        return None
