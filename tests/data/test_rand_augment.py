"""The operations of RandAugment do what Pillow says that they do, by timm's magnitudes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageFilter

from stretto.config import build_config
from stretto.data.rand_augment import NAMES, Operation, draw_operations
from stretto.errors import ConfigError
from stretto.values import read_policy

Pixels = npt.NDArray[Any]
SIZE = 41
MOVED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
ENHANCED = ("Color", "Contrast", "Brightness", "Sharpness")
RANDOM = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def apply(name: str, level: float, pixels: Pixels = RANDOM, sign: int = 1, increasing: bool = True) -> Pixels:
    """As whole numbers, from which others can be subtracted."""
    return np.asarray(Operation(name, level, sign, increasing).apply(Image.fromarray(pixels))).astype(int)


def grey_of(pixels: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(pixels).convert("L")).astype(float)[..., None]


def dot(row: int, column: int) -> Pixels:
    pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
    pixels[row - 1 : row + 2, column - 1 : column + 2] = 255
    return pixels


def place(pixels: Pixels) -> tuple[float, float]:
    """The centre of what is bright: row, column."""
    rows, columns = np.nonzero(pixels[..., 0] > 200)
    return float(rows.mean()), float(columns.mean())


@pytest.mark.parametrize("name", sorted({*NAMES} - {"AutoContrast", "Equalize", "Invert", "Posterize"}))
def test_magnitude_0_changes_nothing(name: str) -> None:
    assert np.array_equal(apply(name, 0.0), RANDOM)
    assert not np.array_equal(apply(name, 0.5), RANDOM)


def test_values_are_changed_one_by_one() -> None:
    x = RANDOM.astype(int)
    assert np.array_equal(apply("Invert", 0.3), 255 - x)
    assert np.array_equal(apply("Solarize", 0.25), np.where(x < 192, x, 255 - x))
    assert np.array_equal(apply("Solarize", 0.25, increasing=False), np.where(x < 64, x, 255 - x))
    assert np.array_equal(apply("SolarizeAdd", 0.5), np.where(x < 128, np.minimum(x + 55, 255), x))
    assert np.array_equal(apply("Posterize", 0.5), x & 0b11000000)
    assert np.array_equal(apply("Posterize", 0.25, increasing=False), x & 0b10000000)
    assert np.array_equal(apply("Posterize", 0.0), x & 0b11110000), "four bits are the most that it keeps"
    assert not apply("Posterize", 1.0).any()


def test_the_range_of_values_is_used() -> None:
    dull = (RANDOM // 4 + 90).astype(np.uint8)
    wide = apply("AutoContrast", 0.0, dull)
    assert wide.min() == 0 and wide.max() >= 254
    assert np.array_equal(
        np.argsort(np.unique(dull)), np.argsort([wide[dull == value][0] for value in np.unique(dull)])
    )
    skewed = (RANDOM.astype(float) ** 2 / 255).astype(np.uint8)
    even = np.bincount(apply("Equalize", 0.0, skewed)[..., 0].ravel(), minlength=256).reshape(8, 32).sum(1)
    assert even.max() < 2 * even.min() < np.bincount(skewed[..., 0].ravel(), minlength=256).reshape(8, 32).sum(1).max()


@pytest.mark.parametrize(
    ("level", "sign", "increasing", "factor"), [(1.0, 1, True, 1.9), (1.0, -1, True, 0.1), (0.5, 1, True, 1.45),
                                                 (1.0, 1, False, 1.9), (0.0, 1, False, 0.1), (0.5, -1, False, 1.0)],
)  # fmt: skip
@pytest.mark.parametrize("name", ENHANCED)
def test_enhanced_images_are_between_or_beyond_two(
    name: str, level: float, sign: int, increasing: bool, factor: float
) -> None:
    smooth = np.asarray(Image.fromarray(RANDOM).filter(ImageFilter.SMOOTH)).astype(float)
    without = {
        "Color": grey_of(RANDOM), "Contrast": np.round(grey_of(RANDOM).mean()), "Brightness": 0.0, "Sharpness": smooth,
    }[name]  # fmt: skip
    wanted = np.clip(without + factor * (RANDOM - without), 0, 255)
    assert np.abs(apply(name, level, RANDOM, sign, increasing) - wanted).max() <= 1.0


def test_images_are_moved() -> None:
    """Turned to the left by 30 degrees, shifted by 0.45 of the size, sheared by 0.3."""
    middle = SIZE // 2
    up, right = 15 * np.sin(np.radians(30)), 15 * np.cos(np.radians(30))
    wanted = {
        "Rotate": (dot(middle, middle + 15), (middle - up, middle + right)),
        "TranslateX": (dot(10, 30), (10, 30 - 0.45 * SIZE)),
        "TranslateY": (dot(30, 10), (30 - 0.45 * SIZE, 10)),
        "ShearX": (dot(30, 30), (30, 30 - 0.3 * 30)),
        "ShearY": (dot(30, 30), (30 - 0.3 * 30, 30)),
    }
    assert tuple(sorted(wanted)) == tuple(sorted(MOVED))
    for name, (image, where) in wanted.items():
        moved = apply(name, 1.0, image)
        assert place(moved) == pytest.approx(where, abs=0.6), name
        corners = {tuple(moved[row, column]) for row in (0, -1) for column in (0, -1)}
        assert (128, 128, 128) in corners, f"{name}: nothing is grey"
        there, back = apply(name, 0.5, image), apply(name, 0.5, image, sign=-1)
        assert np.add(place(there), place(back)) == pytest.approx(np.multiply(2, place(image)), abs=4.5), name
        assert not np.array_equal(there, back)


def test_operations_are_drawn_evenly() -> None:
    policy = read_policy("rand-m9-mstd0.5-inc1")
    drawn = [draw_operations(policy, 3, position) for position in range(6000)]
    every = [operation for some in drawn for operation in some]
    numbers, names = Counter(map(len, drawn)), Counter(operation.name for operation in every)
    assert [numbers[i] / 6000 for i in range(4)] == pytest.approx([0.25, 0.5, 0.25, 0.0], abs=0.03)
    assert [names[name] / 6000 for name in NAMES] == pytest.approx([1 / 15] * 15, abs=0.015)
    levels = np.array([operation.level for operation in every])
    assert levels.max() == 1.0 and np.median(levels) == pytest.approx(0.9, abs=0.01)
    assert levels[levels < 1].std() == pytest.approx(0.05, abs=0.01)
    assert np.mean([operation.sign for operation in every]) == pytest.approx(0.0, abs=0.05)
    assert all(operation.increasing for operation in every)
    assert drawn[5] == draw_operations(policy, 3, 5) and drawn != [draw_operations(policy, 4, i) for i in range(6000)]
    (one,) = {operation.level for i in range(50) for operation in draw_operations(read_policy("rand-m7-n15"), 0, i)}
    assert one == 0.7 and draw_operations(read_policy(""), 0, 0) == ()
    assert not draw_operations(read_policy("rand-n0"), 0, 0)


def test_policies_are_read_as_timm_reads_them() -> None:
    assert read_policy("rand-m9-mstd0.5-inc1") == {"m": 9.0, "n": 2.0, "mstd": 0.5, "inc": 1.0}
    assert read_policy("rand") == {"m": 10.0, "n": 2.0, "mstd": 0.0, "inc": 0.0}
    assert read_policy("rand-inc0-n3-m7.5") == {"m": 7.5, "n": 3.0, "mstd": 0.0, "inc": 0.0}


@pytest.mark.parametrize(
    "aa",
    ["v0", "original", "augmix-m5", "rand-w0", "rand-m11", "rand-m", "rand-n2.5", "rand-m9-m8", "rand-", "rand-n99"],
)
def test_other_policies_are_refused(aa: str) -> None:
    with pytest.raises(ConfigError, match=f"data.aa = '{aa}' must be a RandAugment of timm's, such as"):
        build_config({"data": {"task": "images", "aa": aa}, "model": {"kind": "vit"}})
