"""Generation against slow, obvious searches."""

from __future__ import annotations

import gzip
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stretto
from stretto.batch import Batch, Counts, Sequences, dense_layout
from stretto.cli import app
from stretto.config import Config, ModelConfig, build_config
from stretto.data import Tokenizer
from stretto.errors import DataError
from stretto.generate import _choose, beam_search, fill, sample, translate
from stretto.model import EncoderDecoder, Model, build_model
from stretto.train import train
from stretto.trained import Trained
from tests.models import materialise

CPU = torch.device("cpu")


class Letters(Tokenizer):
    """Four letters and four special tokens: small enough to try every sentence."""

    size = 8
    special_ids = frozenset({4, 5, 6, 7})

    def find_special(self, role: str) -> int:
        return 4 + ("pad", "bos", "eos", "mask").index(role)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [["abcd".index(letter) for letter in text] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("abcd"[i] for i in ids)

    def to_json(self) -> str:
        return "{}"


def trained(kind: str, max_len: int, seed: int) -> Trained:
    cfg = ModelConfig(kind=kind, vocab=16, layers=2, width=16, heads=2, max_len=max_len)  # type: ignore[arg-type]
    model = build_model(cfg).eval()
    materialise(model, cfg, seed, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # sharp enough that searches differ
    return Trained(Config(), model, 0, Letters(), (), CPU)


def sequence(ids: list[int]) -> Sequences:
    return Sequences(torch.tensor(ids), torch.arange(len(ids)), dense_layout(1, len(ids)))


def log_probabilities(model: Model, ids: list[int], source: list[int] | None = None) -> torch.Tensor:
    """The log-probabilities of the next token after each prefix, without forbidden tokens."""
    batch = Batch(
        torch.tensor(ids), Counts(0, 0, 0, 0), (), sequence(ids), source=None if source is None else sequence(source)
    )
    logits = model.logits(batch).detach()
    logits[:, [4, 5, 7, *range(8, 16)]] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_wide_enough_finds_the_best_of_all_sentences(seed: int) -> None:
    run = trained("encoder-decoder", max_len=4, seed=seed)
    source = [*[0, 2, 1][: 1 + seed % 3], 6]
    scores: dict[tuple[int, ...], float] = {}
    for length in range(4):
        for letters in itertools.product(range(4), repeat=length):
            steps = log_probabilities(run.model, [5, *letters], source)
            chosen = [*letters, 6]
            scores[letters] = float(steps[range(len(chosen)), chosen].sum()) / len(chosen)
    best = max(scores, key=scores.__getitem__)
    assert tuple(beam_search(run, [source, [3, 6]], beam=100)[0]) == best


@pytest.mark.parametrize("seed", range(4))
def test_beam_one_is_greedy(seed: int) -> None:
    run = trained("encoder-decoder", max_len=12, seed=seed)
    sources = [[0, 1, 6], [2, 6], [3, 3, 1, 6]]
    for source, found in zip(sources, beam_search(run, sources, beam=1), strict=True):
        ids = [5]
        while len(ids) <= 12 and ids[-1] != 6:
            ids.append(int(log_probabilities(run.model, ids, source)[-1].argmax()))
        assert found == [i for i in ids[1:] if i != 6]


def test_translations_come_back_in_order_whatever_the_batches() -> None:
    run = trained("encoder-decoder", max_len=12, seed=1)
    sentences = ["abcd", "a", "dddd", "", "bc", "cab"]
    together, alone = translate(run, sentences, beam=2), [translate(run, [s], beam=2)[0] for s in sentences]
    assert together == alone == translate(run, sentences, beam=2, max_tokens=1)
    assert isinstance(run.model, EncoderDecoder) and len(set(together)) > 1


def test_sampling_at_temperature_0_takes_the_likeliest() -> None:
    run = trained("decoder", max_len=16, seed=3)
    ids = [5, 0, 1]
    while len(ids) < 16:
        ids.append(int(log_probabilities(run.model, ids)[-1].argmax()))
        if ids[-1] == 6:
            ids.pop()
            break
    assert sample(run, "ab", temperature=0) == sample(run, "ab", temperature=1e-39) == Letters().decode(ids[1:])


def test_sampling_follows_its_seed_and_the_distribution() -> None:
    run = trained("decoder", max_len=3, seed=3)
    assert sample(run, "a", seed=1) == sample(run, "a", seed=1)
    texts = [sample(run, "a", temperature=1.0, seed=seed) for seed in range(600)]
    expected = log_probabilities(run.model, [5, 0])[-1].exp()
    for i, letter in enumerate("abcd"):
        share = sum(text == f"a{letter}" for text in texts) / len(texts)
        assert share == pytest.approx(float(expected[i]), abs=0.07)


def test_top_p_draws_from_the_fewest_tokens_that_have_the_share() -> None:
    shares = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
    for top_p, expected in ((0.75, {1: 0.4 / 0.85, 3: 0.3 / 0.85, 4: 0.15 / 0.85}), (0.3, {1: 1.0}), (0.0, {1: 1.0})):
        draws = torch.Generator().manual_seed(0)
        found = Counter(int(_choose(shares.log(), 1.0, 5, top_p, draws)) for _ in range(1000))
        assert found.keys() == expected.keys()
        assert all(found[i] / 1000 == pytest.approx(share, abs=0.05) for i, share in expected.items())
    run = trained("decoder", max_len=16, seed=3)
    assert sample(run, "a", top_p=0.0, seed=4) == sample(run, "a", temperature=0)


def test_masks_are_filled_by_the_likeliest_tokens() -> None:
    run = trained("encoder", max_len=8, seed=5)
    ids, at = [5, 0, 7, 1, 7, 6], torch.tensor([2, 4])
    logits = run.model.logits(Batch(at, Counts(0, 0, 0, 0), (), sequence(ids), label_at=at)).detach()[:, :4]
    for text in ("a[MASK]b<mask>", "a [MASK]b<mask>"):
        found = fill(run, text, top=9)
        assert len(found) == 2
        for row, expected in zip(found, logits.softmax(-1), strict=True):
            assert [word for word, _ in row] == ["abcd"[i] for i in expected.argsort(descending=True)]
            assert [share for _, share in row] == pytest.approx(
                expected.sort(descending=True).values.tolist(), abs=1e-6
            )
    for text, words in (("ab", "nothing to fill"), ("abcdabc[MASK]", "at most 8")):
        with pytest.raises(DataError, match=words):
            fill(run, text)


def test_a_masked_language_model_finds_the_word_that_is_missing(tmp_path: Path) -> None:
    """By the command, with a tokenizer whose words begin with their space."""
    text = ["Paris is the capital of France, and Rome that of Italy."] * 40
    (tmp_path / "text").mkdir()
    for i, line in enumerate(text):
        (tmp_path / "text" / f"{i}.txt").write_text(line)
    tree = {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "data": {
            "task": "masked", "train": str(tmp_path / "text"), "tokenizer": "bpe", "vocab": 300, "seq_len": 15,
            "batch_size": 16, "held_out": 0.1,
        },
        "model": {"kind": "encoder", "layers": 2, "width": 32, "heads": 2, "max_len": 32},
        "optim": {"lr": 1e-2, "warmup": 10},
        "train": {"steps": 60, "log_every": 20, "eval_batches": 1},
    }  # fmt: skip
    folder = train(build_config(tree))
    for word in ("capital", "Italy", "Paris"):
        prompt = text[0].replace(word, "[MASK]")
        outcome = CliRunner().invoke(app, ["generate", str(folder), "--prompt", prompt, "--top-k", "3"])
        assert outcome.exit_code == 0, outcome.output
        ranked = re.findall(r"(\S+) ([\d.]+)%", outcome.output)
        assert len(ranked) == 3 and ranked[0][0] == word and float(ranked[0][1]) > 20
    masked = text[0].replace("capital", "<mask>")
    assert stretto.load(folder, device="cpu").fill(masked, top=1)[0][0][0] == " capital"


def test_a_prompt_that_is_too_long_says_so() -> None:
    with pytest.raises(DataError, match="at most 3"):
        sample(trained("decoder", max_len=4, seed=0), "abcda")


def test_an_input_that_is_not_there_is_named(tmp_path: Path) -> None:
    from stretto.generate import produce

    with pytest.raises(DataError, match=r"absent\.txt"):
        list(produce(trained("decoder", 8, 0), "", tmp_path / "absent.txt", 5, 0.0, 1, 1, 0))


def test_lines_are_split_as_in_training(tmp_path: Path) -> None:
    from stretto.generate import _read_lines

    text = "one\u2028still one\r\ntwo\x0cstill two\n\nfour\n"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig"))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "a.txt.gz"):
        assert _read_lines(tmp_path / name) == ["one\u2028still one", "two\x0cstill two", "", "four"]


def test_a_source_as_long_as_in_training_is_read_whole(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("encoder-decoder", max_len=8, seed=2)
    assert translate(run, ["abcdabc"], beam=1) == [Letters().decode(beam_search(run, [[0, 1, 2, 3, 0, 1, 2, 6]], 1)[0])]
    assert capsys.readouterr().err == ""
    translate(run, ["abcdabcd"], beam=1)
    assert "1 sentence(s) cut" in capsys.readouterr().err
