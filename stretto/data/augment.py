"""Images that training sees differently each time: a random part of each, at the model's size, or its mirror image.

What is drawn for an image depends on the seed, its number and the epoch alone. As elsewhere (Inception, timm), a part
has a share of the area between data.crop_scale and 1, and a ratio of width to height between 3/4 and 4/3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stretto.data.stream import Purpose, random_rows

_RATIO = math.log(4 / 3)  # the largest ratio of width to height, or of height to width
_DRAWS = 5  # numbers for an image


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


def draw_views(seed: int, epochs: Sequence[int], samples: Sequence[int], num_samples: int, scale: float) -> list[View]:
    """Draws how each of these samples is seen in its epoch."""
    views = []
    for epoch, sample in zip(epochs, samples, strict=True):
        ((draws,),) = random_rows(seed, Purpose.AUGMENT, epoch * num_samples + sample, (1, 1, _DRAWS)).tolist()
        area, ratio, left, top, flip = draws
        views.append(View(scale + (1 - scale) * area, (2 * ratio - 1) * _RATIO, left, top, flip < 0.5))
    return views
