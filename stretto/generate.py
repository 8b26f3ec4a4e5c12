"""What trained models produce: continuations, words for masks, translations, labels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from stretto.batch import Batch, Counts, Sequences, dense_layout
from stretto.batch import pack as move
from stretto.data import Data, Tokenizer, read_image
from stretto.data.images import SUFFIXES
from stretto.data.labelled import encode, make_batch
from stretto.data.opening import open_text
from stretto.data.packing import pad
from stretto.data.pairs import cut_batches
from stretto.data.tokenizer import MASK
from stretto.errors import DataError
from stretto.model import Decoder, Encoder, EncoderDecoder
from stretto.trained import Trained

PROMPT = 16  # tokens


@torch.no_grad()
def sample(
    trained: Trained, prompt: str, max_new: int = 400, temperature: float = 0.8, top_k: int = 40, seed: int = 0,
    top_p: float = 1.0,
) -> str:  # fmt: skip
    """Returns the prompt and what the language model writes after it; of a model that was trained to answer, the answer
    alone. Temperature 0 takes the likeliest token; else one of the `top_k` likeliest, and of these one of the fewest
    that together have the share `top_p`."""
    model, tokenizer = trained.model, _tokenizer(trained)
    assert isinstance(model, Decoder)
    chat, ends = trained.chat, frozenset({tokenizer.eos}) if trained.chat is None else trained.chat.find_ends(tokenizer)
    ids = [tokenizer.bos, *tokenizer.encode(prompt)] if chat is None else chat.encode_prompt(prompt, tokenizer)
    begin = 1 if chat is None else len(ids)
    room = model.cfg.max_len - len(ids)
    if room <= 0:
        raise DataError(f"the prompt has {len(ids)} tokens, the model reads at most {model.cfg.max_len - 1}")
    generator = torch.Generator(trained.device).manual_seed(seed)
    cache, new = model.start(), torch.tensor([ids], device=trained.device)
    forbidden = _forbidden(tokenizer, model.cfg.vocab, ends).to(trained.device)
    for _ in range(min(max_new, room)):
        logits = model.decode(new, cache)[0].float() + forbidden
        new = _choose(logits, temperature, top_k, top_p, generator).view(1, 1)
        if int(new) in ends:
            break
        ids.append(int(new))
    return tokenizer.decode(ids[begin:])


def find_prompt(data: Data, tokenizer: Tokenizer, max_len: int) -> str:
    """Returns the first words of the evaluation data: what a sample begins with, so that it fits what was learned."""
    if data.prompt:
        return tokenizer.decode(tokenizer.encode(data.prompt)[: max_len // 4]).rstrip("\ufffd")
    inputs = data.eval_batch(0).inputs
    ids = [] if inputs is None else inputs.ids[: min(PROMPT, max_len // 4)].tolist()
    return tokenizer.decode([i for i in ids if i not in tokenizer.special_ids]).rstrip("\ufffd")


def _choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    values, ids = logits.topk(min(top_k, len(logits)))
    shares = ((values - values[0]) / temperature).softmax(0)
    enough = shares.cumsum(0) - shares >= top_p  # those in front of it have the share
    enough[0] = False
    shares = shares.masked_fill(enough & (top_p < 1), 0.0)
    return ids[torch.multinomial(shares, 1, generator=generator)]


@torch.no_grad()
def fill(trained: Trained, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
    """Returns for each mask in the text the likeliest tokens with their probabilities."""
    model, tokenizer = trained.model, _tokenizer(trained)
    assert isinstance(model, Encoder)
    ids = _encode_masked(tokenizer, text)
    if len(ids) > model.cfg.max_len:
        raise DataError(f"the prompt has {len(ids)} tokens, the model reads at most {model.cfg.max_len}")
    tokens = torch.tensor(ids)
    at = (tokens == tokenizer.mask).nonzero()[:, 0]
    inputs = Sequences(tokens, torch.arange(len(ids)), dense_layout(1, len(ids)))
    batch = Batch(at, Counts(0, 0, 0, 0), (), inputs, at)
    logits = model.logits(batch.to(trained.device)).float().cpu() + _forbidden(tokenizer, model.cfg.vocab)
    return _find_likeliest(logits, top, lambda token: tokenizer.decode([token]))


def _encode_masked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a document with masks in it. A space in front of one belongs to the word that is hidden, where
    tokens of words begin with it."""
    first, *others = MASK.split(text)
    if not others:
        raise DataError(f"the prompt {text!r} has nothing to fill: write [MASK] where a word is missing")
    *pieces, last = [first, *others]
    ids = [tokenizer.bos]
    for piece in pieces:
        ids += [*tokenizer.encode(piece.rstrip() if tokenizer.spaces_lead else piece), tokenizer.mask]
    return [*ids, *tokenizer.encode(last), tokenizer.eos]


def translate(trained: Trained, sentences: Sequence[str], beam: int = 4, max_tokens: int = 8192) -> list[str]:
    """Translates, in batches of similar length. Beam 1 is greedy."""
    tokenizer = _tokenizer(trained)
    encoded, limit = [tokenizer.encode(sentence.strip()) for sentence in sentences], trained.model.cfg.max_len - 1
    if too_long := sum(len(ids) > limit for ids in encoded):
        print(f"stretto: {too_long} sentence(s) cut to model.max_len = {limit + 1} tokens", file=sys.stderr)
    encoded = [[*ids[:limit], tokenizer.eos] for ids in encoded]
    out, lengths = [""] * len(sentences), np.array([len(ids) for ids in encoded], np.int64)
    order = lengths.argsort(kind="stable")
    cuts = cut_batches(np.stack([lengths[order]] * 2), max_tokens // beam, padded=True)
    batches = [order[start:end].tolist() for start, end in pairwise(cuts) if start < end]
    for rows in track(batches, "translating", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        found = beam_search(trained, [encoded[i] for i in rows], beam)
        for i, ids in zip(rows, found, strict=True):
            out[i] = tokenizer.decode(ids)
    return out


@torch.no_grad()
def beam_search(trained: Trained, sources: list[list[int]], beam: int) -> list[list[int]]:
    """Finds for each source the hypothesis with the best log probability per token.

    Each step looks at the 2 * beam best continuations: at most beam of them end here, so beam are left to go on. A
    source is done when it has `beam` finished hypotheses or runs out of room.
    """
    model, tokenizer, device = trained.model, _tokenizer(trained), trained.device
    assert isinstance(model, EncoderDecoder)
    num, lengths = len(sources), np.array([len(source) for source in sources])
    padded = pad(np.concatenate(sources), lengths, int(lengths.max()), tokenizer.pad)
    cache = model.start(move(padded, device), copies=beam)
    limit = min(model.cfg.max_len, 2 * int(lengths.max()) + 10)
    forbidden = _forbidden(tokenizer, model.cfg.vocab, frozenset({tokenizer.eos})).to(device)

    score = torch.full((num, beam), -torch.inf, device=device)
    score[:, 0] = 0.0  # all beams begin alike: only one may be followed at first
    ids = torch.full((num, beam, 1), tokenizer.bos, device=device)
    best = torch.full((num,), -torch.inf, device=device)
    best_ids = torch.full((num, limit), tokenizer.eos, device=device)
    finished = torch.zeros(num, dtype=torch.long, device=device)
    for length in range(1, limit + 1):
        logits = model.decode(ids[:, :, -1].reshape(-1, 1), cache).float() + forbidden
        total = score[:, :, None] + logits.log_softmax(-1).view(num, beam, -1)
        top, flat = total.flatten(1).topk(2 * beam)
        parent, token = flat // logits.shape[1], flat % logits.shape[1]

        ends = (token == tokenizer.eos) & (top > -torch.inf) & (finished < beam)[:, None]
        ends[:, beam:] = False
        ending, at = torch.where(ends, top / length, -torch.inf).max(1)
        better = ending > best
        best = torch.where(better, ending, best)
        text = ids[torch.arange(num, device=device), parent.gather(1, at[:, None])[:, 0], 1:]
        best_ids[better] = tokenizer.eos
        best_ids[better, : length - 1] = text[better]
        finished += ends.sum(1)
        if bool((finished >= beam).all()):
            break

        score, keep = top.masked_fill(token == tokenizer.eos, -torch.inf).topk(beam)
        parent, token = parent.gather(1, keep), token.gather(1, keep)
        rows = (torch.arange(num, device=device)[:, None] * beam + parent).flatten()
        cache.select(rows)
        ids = torch.cat([ids.flatten(0, 1)[rows].view(num, beam, -1), token[:, :, None]], 2)
    # A source that never ended one gives its best unfinished hypothesis.
    open_ended = best == -torch.inf
    best_ids[open_ended, : ids.shape[2] - 1] = ids[open_ended, 0, 1:]
    return [row[: row.index(tokenizer.eos)] if tokenizer.eos in row else row for row in best_ids.tolist()]


@torch.no_grad()
def classify(trained: Trained, given: Sequence[str | Path], top: int) -> Iterator[list[tuple[str, float]]]:
    """Yields for each image file, or each text, the likeliest labels with their probabilities."""
    data, names = trained.config.data, trained.labels
    make = _batch_texts if data.task == "classification" else _batch_images
    for i in range(0, len(given), data.batch_size):
        batch = make(trained, list(map(str, given[i : i + data.batch_size])))
        logits = trained.model.logits(batch.to(trained.device)).float()[:, : len(names)]
        yield from _find_likeliest(logits, top, names.__getitem__)


def _find_likeliest(logits: Tensor, top: int, name: Callable[[int], str]) -> list[list[tuple[str, float]]]:
    """Returns for each row as many of its likeliest names as are asked for and can be, with their probabilities."""
    values, at = logits.softmax(-1).topk(min(top, int(logits[0].isfinite().sum())))
    rows = zip(at.tolist(), values.tolist(), strict=True)
    return [[(name(i), value) for i, value in zip(*row, strict=True)] for row in rows]


def _batch_images(trained: Trained, paths: list[str]) -> Batch:
    pixels = torch.stack([read_image(Path(path), trained.model.cfg.image_size) for path in paths])
    return Batch(torch.zeros(len(paths), dtype=torch.long), Counts(0, 0, 0, 0), (), pixels=pixels)


def _batch_texts(trained: Trained, texts: list[str]) -> Batch:
    tokenizer, number = _tokenizer(trained), len(texts)
    parts = encode(texts, tokenizer, trained.config.data.seq_len)
    return make_batch(parts, np.zeros(number, np.int64), tokenizer, range(number), padded=False)


def _forbidden(tokenizer: Tokenizer, vocab: int, ends: frozenset[int] = frozenset()) -> Tensor:
    """Returns [vocab]: minus infinity for special tokens but those ends and for ids beyond the tokenizer, else 0."""
    penalty = torch.zeros(vocab)
    penalty[tokenizer.size :] = -torch.inf
    penalty[sorted(tokenizer.special_ids - ends)] = -torch.inf
    return penalty


def _tokenizer(trained: Trained) -> Tokenizer:
    if trained.tokenizer is None:
        raise DataError("the data of this run had no tokenizer, so it reads and writes no text")
    return trained.tokenizer


def produce(
    trained: Trained, prompt: str, source: Path | None, max_new: int, temperature: float, top_k: int, beam: int,
    seed: int, top_p: float = 1.0,
) -> Iterator[str]:  # fmt: skip
    """Yields what `stretto generate` prints, for whatever kind of model the run has."""
    kind = trained.config.data.task
    if kind == "images":
        images = _list_images(source)
        for path, found in zip(images, classify(trained, images, top_k or 5), strict=True):
            yield f"{path.name}: {_rank(found)}"
        return
    lines = _read_lines(source) if source is not None else [prompt]
    if kind == "classification":
        yield from map(_rank, classify(trained, lines, top_k or 5))
    elif kind == "translation":
        yield from translate(trained, lines, beam)
    elif kind == "masked":
        yield from (_rank(words) for line in lines for words in fill(trained, line, top_k or 5))
    else:
        yield from (sample(trained, line, max_new, temperature, top_k or 40, seed, top_p) for line in lines)


def _rank(found: Sequence[tuple[str, float]]) -> str:
    """Says what was found; a token that shows nothing is quoted."""
    return ", ".join(f"{name.strip() or repr(name)} {share:.1%}" for name, share in found)


def _read_lines(path: Path) -> list[str]:
    with open_text(path) as file:
        return [line.rstrip("\r\n") for line in file]


def _list_images(path: Path | None) -> list[Path]:
    if path is None:
        raise DataError("name an image, or a folder of images, with --input")
    images = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not images:
        raise DataError(f"--input {path} has no images")
    return images
