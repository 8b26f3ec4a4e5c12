"""Text to token ids and back.

`ByteTokenizer` needs no training: ids 0 to 255 are the bytes of UTF-8. `LibraryTokenizer` wraps the Hugging Face
`tokenizers` library, for a byte-level BPE trained here or a tokenizer.json from elsewhere. Both write a
tokenizer.json, so a run folder always says how to read and write its model's ids.

Four special tokens have a role: pad fills rows up, bos begins and eos ends each document, mask hides a token. The
text of a special token ("<eos>" in a corpus) is encoded as ordinary text, or left out, never as the special token.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stretto.errors import DataError
from stretto.files import read_text, write_text
from stretto.values import MOST_TOKENS

if TYPE_CHECKING:
    import tokenizers

Ids = npt.NDArray[Any]
SPECIALS = ("<pad>", "<bos>", "<eos>", "<mask>")
NUM_BYTES = 256
_MOST_BYTES = 1 << 29  # of a tokenizer.json

# What published tokenizers call each role, best first. One token may play several: GPT-2 has only <|endoftext|>,
# and the models without a bos (T5, Marian) begin with <pad>.
_EOS = ("<eos>", "</s>", "[SEP]", "<|end_of_text|>", "<|endoftext|>")
_NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", *_EOS),
    "bos": ("<bos>", "<s>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>", "<pad>"),
    "eos": _EOS,
    "mask": ("<mask>", "[MASK]"),
}
MASK = re.compile("|".join(map(re.escape, _NAMES["mask"])))  # where a prompt has one, whatever the tokenizer calls it

_ENDLESS_WORD = re.compile(r"(\S{1024})(?=\S)")


@dataclass(frozen=True)
class Store:
    """Where tokenizers and token files are kept: a folder to write to, and one that may have them already."""

    folder: Path
    read_only: Path | None = None

    def find(self, name: str) -> Path:
        """Returns the file of this name if there is one, else where it should be written."""
        own = self.folder / name
        if self.read_only is None or own.exists() or not (self.read_only / name).exists():
            return own
        return self.read_only / name


@dataclass(frozen=True)
class Special:
    """An attribute of a tokenizer: the id of the token with this role, looked up when someone asks for it."""

    role: str

    def __get__(self, tokenizer: Tokenizer, owner: type[Tokenizer]) -> int:
        return tokenizer.find_special(self.role)


class Tokenizer(ABC):
    size: int  # ids are 0 <= id < size
    special_ids: frozenset[int]  # of every special token, also those without a role
    special_texts: frozenset[str] = frozenset()  # what stands for them in a chat template
    spaces_lead = True  # a space belongs to the token of the word behind it, or to none
    pad, bos, eos, mask = Special("pad"), Special("bos"), Special("eos"), Special("mask")

    @abstractmethod
    def find_special(self, role: str) -> int:
        """Returns the id of the token with this role; a `DataError` if there is none."""

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens; bytes that are no UTF-8 become replacement characters."""

    @abstractmethod
    def to_json(self) -> str:
        """Returns what tokenizer.json holds."""

    def encode_marked(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Returns the ids of texts that are given in parts, by part. The text of a special token becomes that token."""
        return [self.encode_many(parts) for parts in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        return [np.asarray(ids, np.int64) for ids in self.encode_many(texts)]

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def save(self, path: Path) -> None:
        write_text(path, self.to_json())

    @cached_property
    def fingerprint(self) -> str:
        """Is equal for equal tokenizers: token files are filed under it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class ByteTokenizer(Tokenizer):
    spaces_lead = False
    size = NUM_BYTES + len(SPECIALS)
    special_ids = frozenset(range(NUM_BYTES, size))

    def find_special(self, role: str) -> int:
        return NUM_BYTES + SPECIALS.index(f"<{role}>")

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]  # without a Python number for each byte

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < NUM_BYTES).decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps({"stretto": "bytes"})


class LibraryTokenizer(Tokenizer):
    def __init__(self, inner: tokenizers.Tokenizer, name: str) -> None:
        self._inner = inner
        self._name = name
        self._json = inner.to_str()
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # the library's word for: treat their text as ordinary text
        self._vocab = inner.get_vocab()
        self.size = max(self._vocab.values()) + 1  # not the number of tokens: some vocabularies have holes
        special = {i: token.content for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self.special_ids, self.special_texts = frozenset(special), frozenset(special.values())
        # Models of whole pieces find special tokens in plain text all the same: these ids are taken out again.
        whole_pieces = json.loads(self._json)["model"].get("type") in ("Unigram", "WordLevel")
        unknown = {self._vocab.get(name) for name in ("<unk>", "[UNK]", "<|unk|>")}
        self._leaked = self.special_ids - unknown if whole_pieces else frozenset()

    def find_special(self, role: str) -> int:
        for name in _NAMES[role]:
            if name in self._vocab:
                return self._vocab[name]
        raise DataError(f"{self._name} has no {role} token (looked for {', '.join(_NAMES[role])}): add one to it")

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = [encoding.ids for encoding in self._encode(texts)]
        return [[i for i in ids if i not in self._leaked] for ids in encoded] if self._leaked else encoded

    def encode_marked(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        self._inner.encode_special_tokens = False
        try:
            wholes = self._encode(["".join(parts) for parts in texts])
            return [
                _divide(whole, parts) or [encoding.ids for encoding in self._encode(parts)]
                for whole, parts in zip(wholes, texts, strict=True)
            ]
        finally:
            self._inner.encode_special_tokens = True

    def _encode(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        try:
            return self._inner.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{self._name} cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> str:
        return self._json


def _divide(whole: tokenizers.Encoding, parts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of a text by its parts; none if a token lies across two of them."""
    begins, ends = [begin for begin, _ in whole.offsets], list(accumulate(map(len, parts)))
    places = [*(bisect_left(begins, end) for end in ends[:-1]), len(begins)]
    if any(place and whole.offsets[place - 1][1] > end for place, end in zip(places, ends, strict=True)):
        return []
    return [whole.ids[first:last] for first, last in pairwise([0, *places])]


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Trains a byte-level BPE: every text has an encoding, and decoding gives the text back exactly."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    smallest = NUM_BYTES + len(SPECIALS)
    if vocab < smallest:
        raise DataError(f"data.vocab = {vocab} is too small: the bytes and special tokens alone are {smallest}")
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_cut_words(texts), trainer)
    return LibraryTokenizer(inner, 'the "bpe" tokenizer')


def _cut_words(texts: Iterable[str]) -> Iterator[str]:
    """Cuts words that no language has, such as data in base64: the library takes time in the square of their length,
    and Python cannot interrupt it. Other words are left as they are."""
    for text in texts:
        yield _ENDLESS_WORD.sub(r"\1\n", text)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer.json of a folder (or that file itself)."""
    if path.is_dir():
        path = path / "tokenizer.json"
    import tokenizers

    try:
        text = read_text(path, _MOST_BYTES)
        tree = json.loads(text)
        if tree == {"stretto": "bytes"}:
            return ByteTokenizer()
        _check_ids(tree)
        return LibraryTokenizer(tokenizers.Tokenizer.from_str(text), str(path))
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{path} is not a tokenizer: {error}") from error


def _check_ids(tree: Any) -> None:
    """Raises a `ValueError` for ids that no vocabulary has: the library makes tables up to the largest, and ends the
    process where memory does not suffice."""
    vocab, added = tree["model"]["vocab"], tree.get("added_tokens") or []
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token["id"] for token in added)]
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < MOST_TOKENS]
    if wrong:
        raise ValueError(f"it has the id {wrong[0]!r}, which is not between 0 and {MOST_TOKENS:,}")


def choose_tokenizer(name: str, vocab: int, texts: Iterable[str], identity: str, store: Store) -> Tokenizer:
    """Opens what `data.tokenizer` names. A trained tokenizer is kept in `store` under the identity of its texts."""
    if name == "bytes":
        return ByteTokenizer()
    if name != "bpe":
        if not Path(name).exists():
            raise DataError(f'data.tokenizer = {name!r} is neither "bytes" nor "bpe" nor an existing tokenizer.json')
        if Path(name).is_dir() and not (Path(name) / "tokenizer.json").exists():
            raise DataError(
                f"data.tokenizer = {name!r} has no tokenizer.json: write one with save_pretrained of a fast tokenizer"
                " of transformers, or set data.tokenizer (by default it is model.init, where that is given)"
            )
        return load_tokenizer(Path(name))
    key = hashlib.sha256(f"{identity} {vocab}".encode()).hexdigest()[:16]
    path = store.find(f"bpe-{key}.json")
    if path.exists():
        return load_tokenizer(path)
    tokenizer = train_bpe(texts, vocab)
    tokenizer.save(path)
    return tokenizer


def keep_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Writes tokenizer.json, but never over another one: the weights in that folder would no longer fit."""
    path = folder / "tokenizer.json"
    if tokenizer is None:
        return
    if not path.exists():
        tokenizer.save(path)
    elif load_tokenizer(path).fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{path} belongs to another tokenizer than data.tokenizer or data.train give now: choose another run.dir"
        )
