"""Images that training sees differently each time, in this order:

    views       a random part of each, at the model's size, or its mirror image
    operations  RandAugment (rand_augment.py)
    erasing     some parts become grey, a colour or noise
    blends      Mixup and CutMix: something of another image, and of its label

What is drawn for an image depends on the seed, its number and the epoch alone; or on its position in the stream, which
says as much. As elsewhere (Inception, timm), a view has a share of the area between data.crop_scale and 1, and a ratio
of width to height between 3/4 and 4/3. All else follows timm, but for whom an image is mixed with: the images at
positions 2k and 2k + 1 of the stream are mixed with each other, each in its own way, however the stream is divided
into batches, and these into parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.batch import Batch, Counts, Mix
from stretto.config import DataConfig
from stretto.data.rand_augment import Operation
from stretto.data.stream import Purpose, random_rows, random_stream

if TYPE_CHECKING:
    from PIL.Image import Image

_RATIO = math.log(4 / 3)  # the largest ratio of width to height, or of height to width
_DRAWS = 5  # numbers for an image
_ERASED = 0.02, 1 / 3  # the least and the largest share of the area that is erased
_ERASED_RATIO = math.log(1 / 0.3)  # as _RATIO
_TRIES = 10  # to draw a part that fits into the image


class View(NamedTuple):
    """What training sees of an image; numbers from 0 to 1, of which crops of any image are made."""

    area: float  # share of the image's, before it has to fit into it
    ratio: float  # logarithm of width over height
    left: float  # of the room that is left at both sides
    top: float
    flipped: bool

    def find_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The part of an image of this size: left, top, right, bottom in pixels."""
        size, stretch = math.sqrt(self.area * width * height), math.exp(self.ratio / 2)
        across, down = (max(min(round(size * by), most), 1) for by, most in ((stretch, width), (1 / stretch, height)))
        left, top = round(self.left * (width - across)), round(self.top * (height - down))
        return left, top, left + across, top + down


class Look(NamedTuple):
    """What is done to an image while it is read."""

    view: View | None = None  # None: all of it is seen
    operations: tuple[Operation, ...] = ()

    def edit(self, image: Image) -> Image:
        for operation in self.operations:
            image = operation.apply(image)
        return image


class Blend(NamedTuple):
    """What is left of an image when another one is mixed into it."""

    share: float  # of its label; and of each of its pixels, if there is no box
    box: tuple[slice, slice] | None = None  # rows and columns that are the other image's

    def apply(self, own: Tensor, other: Tensor) -> Tensor:
        """Mixes images [C, H, W]."""
        if self.box is None:
            return self.share * own + (1 - self.share) * other
        mixed = own.clone()
        mixed[:, *self.box] = other[:, *self.box]
        return mixed


def draw_views(seed: int, epochs: Sequence[int], samples: Sequence[int], num_samples: int, scale: float) -> list[View]:
    """Draws how each of these samples is seen in its epoch."""
    views = []
    for epoch, sample in zip(epochs, samples, strict=True):
        ((draws,),) = random_rows(seed, Purpose.AUGMENT, epoch * num_samples + sample, (1, 1, _DRAWS)).tolist()
        area, ratio, left, top, flip = draws
        views.append(View(scale + (1 - scale) * area, (2 * ratio - 1) * _RATIO, left, top, flip < 0.5))
    return views


def erase(pixels: npt.NDArray[np.float32], cfg: DataConfig, seed: int, positions: range) -> None:
    """Erases parts of images [N, C, H, W] with mean 0 and about deviation 1, in place: those at these positions."""
    for image, position in zip(pixels, positions, strict=True):
        stream = random_stream(seed, Purpose.ERASE, position)
        if stream.random() >= cfg.reprob:
            continue
        count = int(stream.integers(1, cfg.recount + 1))
        for _ in range(count):
            part = image[:, *_draw_part(stream, count, *image.shape[1:])]
            shape = part.shape if cfg.remode == "pixel" else (len(part), 1, 1)
            part[:] = 0 if cfg.remode == "const" else stream.standard_normal(shape, np.float32)


def _draw_part(stream: np.random.Generator, count: int, height: int, width: int) -> tuple[slice, slice]:
    """Draws rows and columns of one of `count` parts; none if no part fits."""
    for _ in range(_TRIES):
        area = stream.uniform(*_ERASED) * height * width / count
        stretch = math.exp(stream.uniform(-_ERASED_RATIO, _ERASED_RATIO) / 2)
        down, across = round(math.sqrt(area) * stretch), round(math.sqrt(area) / stretch)
        if down < height and across < width:
            top, left = stream.integers((height - down + 1, width - across + 1))
            return slice(top, top + down), slice(left, left + across)
    return slice(0), slice(0)


def draw_blend(cfg: DataConfig, seed: int, position: int, size: int) -> Blend:
    """Draws how the image at this position, of `size` pixels in height and width, is mixed."""
    stream = random_stream(seed, Purpose.MIX, position)
    happens, switches = stream.random(2)
    if happens >= cfg.mixup_prob:
        return Blend(1.0)
    cuts = cfg.cutmix > 0 and (cfg.mixup == 0 or switches < cfg.mixup_switch_prob)
    alpha = cfg.cutmix if cuts else cfg.mixup
    share = stream.beta(alpha, alpha)
    if not cuts:
        return Blend(share)
    half = int(size * math.sqrt(1 - share)) // 2
    rows, columns = (slice(max(at - half, 0), min(at + half, size)) for at in stream.integers(size, size=2).tolist())
    cut = (rows.stop - rows.start) * (columns.stop - columns.start)  # less than was drawn where it ends at a border
    return Blend(1 - cut / size**2, (rows, columns))


def mix_pairs(batch: Batch, first: int, wanted: range, cfg: DataConfig, seed: int) -> Batch:
    """Returns the images at the wanted positions, each mixed with the other one of its pair. The batch has whole pairs,
    from position `first` on."""
    pixels = batch.pixels
    assert pixels is not None and first % 2 == 0
    own = [position - first for position in wanted]
    others = [place ^ 1 for place in own]
    blends = [draw_blend(cfg, seed, position, pixels.shape[-1]) for position in wanted]
    mixed = [blend.apply(pixels[i], pixels[j]) for blend, i, j in zip(blends, own, others, strict=True)]
    return Batch(
        batch.labels[own],
        Counts(len(own), len(own), len(own), pairs=0),
        tuple(batch.samples[i] for i in own),
        pixels=torch.stack(mixed),
        mix=Mix(batch.labels[others], torch.tensor([blend.share for blend in blends])),
    )
