"""Data: text for causal and masked language models, conversations, sentence pairs for translation, and images.

`open_data` gives numbered micro-batches; each is a pure function of the seed and its number, whatever was asked for
before. Read stream.py for that contract, then text.py, pairs.py or images.py.
"""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryDirectory

from stretto.config import DataConfig
from stretto.data.images import ImageData, read_image
from stretto.data.instruct import InstructData
from stretto.data.pairs import PairData, open_pair_data
from stretto.data.stream import Data
from stretto.data.text import TextData
from stretto.data.tokenizer import Store, Tokenizer, keep_tokenizer, load_tokenizer
from stretto.errors import ConfigError, DataError
from stretto.files import make_folder, remove_stale_drafts

__all__ = [
    "Data",
    "PairData",
    "Tokenizer",
    "keep_tokenizer",
    "load_tokenizer",
    "open_data",
    "prepare_data",
    "read_image",
]


def open_data(cfg: DataConfig, *, seed: int, folder: Path, image_size: int = 0, fill_cache: bool = True) -> Data:
    """Opens what the recipe's [data] names.

    `folder` gets tokenizer.json, and the token files too unless `cfg.cache` names another place for them. A
    configuration that came with a run may name any place: without `fill_cache` it is only read. Only images need
    `image_size`.
    """
    if cfg.own:
        raise DataError(f"data.own = {cfg.own!r}: these data were given in Python, and only Python can open them again")
    try:
        return _open(cfg, seed, folder, image_size, fill_cache)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # it is not the data's fault
        raise DataError(f"the data of data.train = {cfg.train!r} cannot be opened: {error}") from error


def prepare_data(cfg: DataConfig, seed: int) -> str:
    """Tokenises what the recipe's [data] names, once, into its cache, and says how much it is."""
    if cfg.task not in ("causal", "masked", "translation"):
        raise ConfigError(f"data.task = {cfg.task!r}: there is nothing to tokenise beforehand")
    if not cfg.cache:
        raise ConfigError('data.cache = "": name the folder where token files are to be kept, for the run too')
    with TemporaryDirectory() as folder:  # what a run would keep of the data besides
        return open_data(cfg, seed=seed, folder=Path(folder)).describe()


def _open(cfg: DataConfig, seed: int, folder: Path, image_size: int, fill_cache: bool) -> Data:
    if cfg.task == "images":
        return ImageData(cfg, seed, image_size)
    cache = Path(cfg.cache) if cfg.cache else folder
    store = Store(cache) if fill_cache else Store(folder, read_only=cache)
    make_folder("data.cache", store.folder)
    for place in {folder, store.folder}:
        remove_stale_drafts(place)
    if cfg.task == "translation":
        return open_pair_data(cfg, seed, folder, store)
    if cfg.task == "instruct":
        return InstructData(cfg, seed, folder, store)
    return TextData(cfg, seed, folder, store)
