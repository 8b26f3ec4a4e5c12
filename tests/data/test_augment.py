"""What training sees of images: random parts, the same for the same seed, image and epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stretto.config import build_config
from stretto.data.augment import View, draw_views
from stretto.errors import ConfigError
from tests.data.corpora import Opener, same

COUNT, SIZE = 12, 16


@pytest.fixture(params=["arrays", "folder"])
def source(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Images of 24 x 32 pixels, brighter from left to right (and, less so, from top to bottom)."""
    ramp = np.add.outer(np.arange(24), 6 * np.arange(32)).astype(np.uint8)
    images = np.stack([ramp + i for i in range(COUNT)])
    if request.param == "arrays":
        np.savez(tmp_path / "x.npz", images=images, labels=np.arange(COUNT) % 2)
        return str(tmp_path / "x.npz")
    for i, image in enumerate(images):
        (tmp_path / "images" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "images" / str(i % 2) / f"{i:02}.png")
    return str(tmp_path / "images")


def test_parts_depend_on_seed_image_and_epoch_alone(source: str, opened: Opener) -> None:
    settings = {"task": "images", "train": source, "eval": source, "image_size": SIZE}
    data = opened(augment=True, batch_size=4, **settings)
    batches = [data.train_batch(i) for i in range(6)]  # two epochs
    again = opened(augment=True, batch_size=4, **settings)
    assert all(same(again.train_batch(i), batches[i]) for i in (5, 2, 0))
    parts = [data.train_batch(4, part, 2) for part in range(2)]
    halves, whole = [part.pixels for part in parts if part.pixels is not None], batches[4].pixels
    assert whole is not None and torch.equal(torch.cat(halves), whole)
    other = opened(augment=True, batch_size=3, **settings)
    seen = [
        {sample: pixels for batch in some for sample, pixels in zip(batch.samples, batch.pixels, strict=True)}  # type: ignore[arg-type]
        for some in (batches[:3], batches[3:], [other.train_batch(i) for i in range(4)])
    ]
    assert all(torch.equal(seen[0][i], seen[2][i]) for i in range(COUNT)), "whatever the batch is"
    assert sum(torch.equal(seen[0][i], seen[1][i]) for i in range(COUNT)) == 0, "another epoch"
    assert sum(torch.equal(a, b) for a, b in zip(seen[0].values(), list(seen[0].values())[1:], strict=False)) == 0
    mirrored = [bool(pixels[0, :, 0].mean() > pixels[0, :, -1].mean()) for some in seen for pixels in some.values()]
    assert 0 < sum(mirrored) < len(mirrored)


def test_evaluation_and_training_without_it_see_whole_images(source: str, opened: Opener) -> None:
    settings = {"task": "images", "train": source, "eval": source, "image_size": SIZE, "batch_size": 4}
    plain, augmented = opened(**settings), opened(augment=True, **settings)
    assert all(same(plain.eval_batch(i), augmented.eval_batch(i)) for i in range(3))
    assert not same(plain.train_batch(0), augmented.train_batch(0))


def test_a_view_of_everything_changes_nothing() -> None:
    assert View(1.0, 0.0, 0.3, 0.3, False).find_box(40, 40) == (0, 0, 40, 40)


def test_parts_are_inside_and_as_large_as_asked() -> None:
    views, shares = draw_views(3, [0] * 2000, range(2000), 2000, 0.25), []
    for view in views:
        left, top, right, bottom = view.find_box(300, 200)
        assert 0 <= left < right <= 300 and 0 <= top < bottom <= 200
        shares.append((right - left) * (bottom - top) / 60_000)
    assert min(shares) > 0.24 and np.mean(shares) == pytest.approx(0.6, abs=0.05)
    assert np.mean([view.flipped for view in views]) == pytest.approx(0.5, abs=0.05)


def test_a_scale_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"data\.crop_scale must be above 0"):
        build_config({"data": {"crop_scale": 0.0}})
