"""RandAugment (Cubuk et al., 2019): on each image some operations, all equally likely, of one magnitude.

The operations, and what a magnitude is to each of them, are timm's, and so is the name for all of this in data.aa:
"rand-m9-mstd0.5-inc1" draws n = 2 operations for an image, does each of them half of the time, and draws its magnitude
from a normal distribution around 9 with deviation 0.5, within 0 and 10. With inc1 a larger magnitude is further from
the image as it was; without, Posterize and Solarize do less then, and 5 leaves colours as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stretto.data.stream import Purpose, random_stream
from stretto.values import POLICY

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = POLICY["m"][1]  # magnitude
SOMETIMES = 0.5  # how often an operation that was drawn is done
GREY = (128, 128, 128)  # where an image that was moved leaves nothing
NAMES = (
    "AutoContrast", "Equalize", "Invert", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast", "Brightness",
    "Sharpness", "Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY",
)  # fmt: skip


class Operation(NamedTuple):
    name: str
    level: float  # from 0 to 1, the share of the largest magnitude
    sign: int = 1  # 1 or -1: which way, of those that go two ways
    increasing: bool = True

    def apply(self, image: Image) -> Image:
        """Returns what it makes of an RGB image."""
        from PIL import ImageEnhance, ImageOps

        match self.name:
            case "AutoContrast":
                return ImageOps.autocontrast(image)
            case "Equalize":
                return ImageOps.equalize(image)
            case "Invert":
                return ImageOps.invert(image)
            case "Posterize":
                bits = int(self.level * 4)  # Pillow's own keeps one at least
                kept = (0xFF00 >> (4 - bits if self.increasing else bits)) & 0xFF
                return image.point([value & kept for value in range(256)] * 3)
            case "Solarize":
                least = int(self.level * 256)
                return ImageOps.solarize(image, 256 - least if self.increasing else least)
            case "SolarizeAdd":
                more = int(self.level * 110)
                return image.point([min(value + more, 255) if value < 128 else value for value in range(256)] * 3)
            case "Color" | "Contrast" | "Brightness" | "Sharpness":
                step = 1 + self.sign * self.level * 0.9
                factor = max(step, 0.1) if self.increasing else self.level * 1.8 + 0.1
                return getattr(ImageEnhance, self.name)(image).enhance(factor)
        return self.move(image)

    def move(self, image: Image) -> Image:
        from PIL.Image import Resampling, Transform

        level = self.sign * self.level
        if self.name == "Rotate":
            return image.rotate(level * 30, Resampling.BICUBIC, fillcolor=GREY)
        across, down = {  # where each pixel comes from: x and y as sums of (x, y, 1)
            "ShearX": ((1, level * 0.3, 0), (0, 1, 0)),
            "ShearY": ((1, 0, 0), (level * 0.3, 1, 0)),
            "TranslateX": ((1, 0, level * 0.45 * image.width), (0, 1, 0)),
            "TranslateY": ((1, 0, 0), (0, 1, level * 0.45 * image.height)),
        }[self.name]
        return image.transform(image.size, Transform.AFFINE, across + down, Resampling.BICUBIC, fillcolor=GREY)


def draw_operations(policy: dict[str, float], seed: int, position: int) -> tuple[Operation, ...]:
    """Draws what is done to the image at this position of the stream; nothing by an empty policy."""
    if not policy:
        return ()
    stream = random_stream(seed, Purpose.OPERATIONS, position)
    drawn = []
    for _ in range(int(policy["n"])):
        name, (happens, side), noise = NAMES[stream.integers(len(NAMES))], stream.random(2), stream.standard_normal()
        magnitude = np.clip(policy["m"] + policy["mstd"] * noise, 0, LARGEST)
        if happens < SOMETIMES:
            drawn.append(Operation(name, float(magnitude / LARGEST), 1 if side < 0.5 else -1, bool(policy["inc"])))
    return tuple(drawn)
