"""Tokenizers: round trips, special tokens, files, fingerprints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import load_tokenizer
from stretto.data.tokenizer import (
    SPECIALS,
    ByteTokenizer,
    Store,
    Tokenizer,
    _cut_words,
    choose_tokenizer,
    keep_tokenizer,
    train_bpe,
)
from stretto.errors import DataError

TEXTS = ["the cat sat on the mat; the cat sat.\n", "naïve café, 北京 and \t tabs\n\n", "def f(x):\n    return x\n"] * 5
BPE = train_bpe(TEXTS, 300)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(text=st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.size for i in ids)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_special_tokens(tokenizer: Tokenizer) -> None:
    roles = [tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.mask]
    assert len(set(roles)) == 4
    assert tokenizer.special_ids == set(roles)
    assert (
        tokenizer.decode([tokenizer.bos, *tokenizer.encode("cat"), tokenizer.mask, tokenizer.eos, tokenizer.pad])
        == "cat"
    )
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode(" ".join(SPECIALS))), "text must not become special tokens"
    assert tokenizer.decode(tokenizer.encode("a<eos>b")) == "a<eos>b"


def test_ids_of_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.mask, tokenizer.size) == (256, 257, 258, 259, 260)
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_ids_that_only_a_rounded_up_model_has_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("cat"), tokenizer.size + 3]) == "cat"


def test_bpe_compresses_and_is_deterministic() -> None:
    assert BPE.size == 300
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 1.5
    assert train_bpe(iter(TEXTS), 300).fingerprint == BPE.fingerprint
    assert train_bpe(TEXTS, 299).fingerprint != BPE.fingerprint


def test_bpe_needs_room_for_the_bytes() -> None:
    with pytest.raises(DataError, match=r"data\.vocab = 200"):
        train_bpe(TEXTS, 200)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
    assert loaded.eos == tokenizer.eos


def foreign(path: Path, *specials: str) -> Path:
    """A tokenizer.json as others publish them: other names, and padding and truncation switched on."""
    tree = json.loads(BPE.to_json())
    tree["added_tokens"] = [
        {"id": 1000 + i, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, name in enumerate(specials)
    ]
    vocab = tree["model"]["vocab"]
    tree["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in SPECIALS} | {
        name: 1000 + i for i, name in enumerate(specials)
    }
    tree["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(tree))
    return path


def test_foreign_names(tmp_path: Path) -> None:
    bert = load_tokenizer(foreign(tmp_path / "bert.json", "[PAD]", "[CLS]", "[SEP]", "[MASK]"))
    assert (bert.pad, bert.bos, bert.eos, bert.mask) == (1000, 1001, 1002, 1003)
    assert bert.size == 1004
    assert bert.decode(bert.encode(TEXTS[0])) == TEXTS[0], "its truncation must not apply"
    gpt2 = load_tokenizer(foreign(tmp_path / "gpt2.json", "<|endoftext|>"))
    assert gpt2.pad == gpt2.bos == gpt2.eos == 1000
    with pytest.raises(DataError, match=r"gpt2\.json has no mask token .*\[MASK\]"):
        _ = gpt2.mask


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"stretto": "words"}', "[" * 100_000], ids=lambda text: text[:9])
def test_not_a_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.tokenizer\.json|nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"data\.tokenizer = 'bpee'"):
        choose_tokenizer("bpee", 300, TEXTS, "x", Store(tmp_path))


def test_trained_once(tmp_path: Path) -> None:
    first = choose_tokenizer("bpe", 300, TEXTS, "texts", Store(tmp_path))
    again = choose_tokenizer("bpe", 300, ["never read"], "texts", Store(tmp_path))
    other = choose_tokenizer("bpe", 300, ["something else"], "else", Store(tmp_path))
    assert first.fingerprint == again.fingerprint == BPE.fingerprint != other.fingerprint


def test_a_run_folder_keeps_its_tokenizer(tmp_path: Path) -> None:
    keep_tokenizer(BPE, tmp_path)
    keep_tokenizer(BPE, tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.json belongs to another tokenizer"):
        keep_tokenizer(ByteTokenizer(), tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == BPE.fingerprint


def test_pieces_that_are_special_never_come_from_text(tmp_path: Path) -> None:
    import tokenizers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -2.0) for letter in "abps<>/d")]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    inner.add_special_tokens(["<pad>", "</s>", "<unk>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos not in tokenizer.encode("a</s>b<pad>") and tokenizer.pad not in tokenizer.encode("<pad>")
    assert tokenizer.decode(tokenizer.encode("ab")).replace(" ", "") == "ab"
    assert 2 in tokenizer.encode("Z"), "what is unknown stays unknown"


def test_words_without_an_end_are_cut() -> None:
    """The library's time grows with the square of a word's length, and no signal is heard meanwhile."""
    text = "a few words, and " + "x" * 5000 + " one more"
    (cut,) = _cut_words([text])
    assert cut.replace("\n", "") == text and max(map(len, cut.split())) == 1024
    assert list(_cut_words(["x" * 1024, "two words"])) == ["x" * 1024, "two words"]
