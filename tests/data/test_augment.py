"""What training sees of images: random parts, operations, holes and other images, the same for the same seed, image and
epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from stretto.config import DataConfig, build_config
from stretto.data import Data
from stretto.data.augment import Blend, View, draw_blend, draw_views, erase
from stretto.errors import ConfigError
from tests.data.corpora import Opener, same

COUNT, SIZE = 12, 16
EVERYTHING: dict[str, Any] = {
    "augment": True, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.5, "recount": 2, "mixup": 0.8, "cutmix": 1.0,
}  # fmt: skip


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
    plain, augmented = opened(**settings), opened(**EVERYTHING, **settings)
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


def seen_by_position(data: Data, batches: int, parts: int = 1) -> list[tuple[Tensor, int, int, float]]:
    """Pixels, both labels and the share of the own one, of each image that these batches hold, in their order."""
    found: list[tuple[Tensor, int, int, float]] = []
    for index in range(batches):
        for part in range(parts):
            batch = data.train_batch(index, part, parts)
            assert batch.pixels is not None and batch.mix is not None
            assert len(batch.samples) == batch.counts.labels == len(batch.labels)
            values = (batch.labels.tolist(), batch.mix.labels.tolist(), batch.mix.shares.tolist())
            found += zip(batch.pixels, *values, strict=True)
    return found


def test_mixed_images_do_not_depend_on_batches_parts_and_what_was_read_before(source: str, opened: Opener) -> None:
    settings = {"task": "images", "train": source, "eval": source, "image_size": SIZE, **EVERYTHING}
    whole = seen_by_position(opened(batch_size=4, **settings), 9)  # three epochs
    for batch_size, parts in ((3, 1), (3, 3), (9, 4), (1, 1), (36, 8)):
        other = seen_by_position(opened(batch_size=batch_size, **settings), 36 // batch_size, parts)
        assert len(other) == 36 and all(torch.equal(one[0], two[0]) for one, two in zip(whole, other, strict=True))
        assert [one[1:] for one in whole] == [two[1:] for two in other]
    data = opened(batch_size=4, **settings)
    assert same(data.train_batch(7), opened(batch_size=4, **settings).train_batch(7))
    other = seen_by_position(opened(batch_size=4, seed=1, **settings), 9)
    assert not any(torch.equal(one[0], two[0]) for one, two in zip(whole, other, strict=True))
    assert not any(torch.equal(one[0], two[0]) for one, two in zip(whole, whole[12:], strict=False)), "other epochs"


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_an_image_is_mixed_with_the_other_one_of_its_pair(source: str, opened: Opener, way: str) -> None:
    settings = {"task": "images", "train": source, "eval": source, "image_size": SIZE, "batch_size": 36}
    settings |= {"augment": True, "aa": "rand-inc1", "reprob": 0.5}
    plain, batch = opened(**settings).train_batch(0), opened(**settings, **{way: 1.0}).train_batch(0)
    assert plain.mix is None and plain.pixels is not None and batch.pixels is not None and batch.mix is not None
    assert plain.samples == batch.samples and torch.equal(plain.labels, batch.labels)
    pairs = [number ^ 1 for number in range(36)]
    assert torch.equal(batch.mix.labels, plain.labels[pairs])
    assert len(set(batch.mix.shares.tolist())) > 18, "both of a pair have their own"
    for mixed, own, other, share in zip(batch.pixels, plain.pixels, plain.pixels[pairs], batch.mix.shares, strict=True):
        if way == "mixup":
            torch.testing.assert_close(mixed, share * own + (1 - share) * other)
        else:
            taken = (mixed == other).all(0) & ~(mixed == own).all(0)
            rows, columns = (taken.any(dim).nonzero() for dim in (1, 0))
            box = torch.zeros_like(taken)
            if len(rows):
                box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
            assert torch.equal(mixed, torch.where(box, other, own))


def test_the_labels_of_cut_images_weigh_as_much_as_their_areas() -> None:
    """Where the square ends at a border, too: then more is left than was drawn, which is one half in the mean."""
    cfg, size = DataConfig(cutmix=1.0), 20
    own, other = torch.zeros(3, size, size), torch.ones(3, size, size)
    shares = []
    for position in range(2000):
        blend = draw_blend(cfg, 0, position, size)
        assert blend.box is not None
        shares.append(1 - float(blend.apply(own, other).mean()))
        assert blend.share == pytest.approx(shares[-1], abs=1e-6)
    assert own.max() == 0, "what is cut into is a copy"
    assert min(shares) >= 0.0 and max(shares) <= 1.0 and np.mean(shares) > 0.55


def test_how_often_images_are_mixed_and_how() -> None:
    def count(**settings: Any) -> tuple[float, float, float]:
        blends = [draw_blend(DataConfig(**settings), 5, position, 32) for position in range(4000)]
        cut = sum(blend.box is not None for blend in blends)
        untouched = sum(blend == Blend(1.0) for blend in blends)
        return cut / 4000, (4000 - cut - untouched) / 4000, untouched / 4000

    assert count(mixup=0.8) == (0.0, 1.0, 0.0) and count(cutmix=1.0) == (1.0, 0.0, 0.0)
    assert count(mixup=0.8, cutmix=1.0) == pytest.approx((0.5, 0.5, 0.0), abs=0.03)
    assert count(mixup=0.8, cutmix=1.0, mixup_switch_prob=0.2) == pytest.approx((0.2, 0.8, 0.0), abs=0.03)
    assert count(mixup=0.8, cutmix=1.0, mixup_prob=0.6) == pytest.approx((0.3, 0.3, 0.4), abs=0.03)
    shares = [draw_blend(DataConfig(mixup=0.8), 5, position, 32).share for position in range(4000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.8 + 1)), abs=0.01), "that of the beta distribution"


def test_parts_are_erased() -> None:
    images, size = np.full((2000, 3, 30, 40), 9.0, np.float32), 30 * 40
    erase(images, DataConfig(reprob=0.25), 1, range(2000))
    gone = images != 9.0
    assert (gone == gone[:, :1]).all(), "of all channels"
    areas = gone[:, 0].sum((1, 2))
    assert (areas > 0).mean() == pytest.approx(0.25, abs=0.03)
    assert 0.015 * size < areas[areas > 0].min() and areas.max() < 0.35 * size
    assert areas[areas > 0].mean() / size == pytest.approx(0.17, abs=0.02)
    for mask in gone[areas > 0][:, 0]:
        rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
        assert mask.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1), "one rectangle"
        assert 0.25 < (rows[-1] - rows[0] + 1) / (columns[-1] - columns[0] + 1) < 4
    noise = images[gone]
    assert (noise.mean(), noise.std()) == pytest.approx((0.0, 1.0), abs=0.02)
    some = np.full((100, 3, 30, 40), 9.0, np.float32)
    erase(some, DataConfig(reprob=0.25), 1, range(1900, 2000))
    assert np.array_equal(some, images[1900:]), "by the place in the stream"


@pytest.mark.parametrize(("mode", "most"), [("const", 1), ("rand", 1), ("const", 5)])
def test_what_stands_for_what_is_erased(mode: str, most: int) -> None:
    images = np.full((400, 3, 30, 40), 9.0, np.float32)
    erase(images, DataConfig(reprob=1.0, remode=mode, recount=most), 0, range(400))  # type: ignore[arg-type]
    shares = (images[:, 0] != 9.0).mean((1, 2))
    assert shares.min() > 0.0 and shares.max() < 0.35, "several parts are smaller"
    colours = [{tuple(pixel) for pixel in image.reshape(3, -1).T} - {(9.0, 9.0, 9.0)} for image in images]
    assert all(len(some) == 1 for some in colours)
    assert (len(set().union(*colours)) == 1) == (mode == "const")
    assert mode == "rand" or set().union(*colours) == {(0.0, 0.0, 0.0)}


def test_operations_work_on_grey_and_coloured_arrays_as_on_files(tmp_path: Path, opened: Opener) -> None:
    """Of the model's size, so nothing is scaled."""
    images = np.random.default_rng(0).integers(0, 256, (COUNT, SIZE, SIZE, 3), np.uint8)
    for kind, pixels in (("colour", images), ("grey", images[..., :1])):
        for i, image in enumerate(pixels):
            folder = tmp_path / kind / "a"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.squeeze()).save(folder / f"{i:02}.png")
        np.savez(tmp_path / f"{kind}.npz", images=pixels, labels=np.zeros(COUNT, int))
        settings = {"task": "images", "image_size": SIZE, "batch_size": COUNT, "aa": "rand-n5-m8-inc1"}
        sources = [str(tmp_path / kind), str(tmp_path / f"{kind}.npz")]
        one, two = (opened(train=path, eval=path, **settings).train_batch(0) for path in sources)
        assert one.pixels is not None and two.pixels is not None
        torch.testing.assert_close(one.pixels, two.pixels)
        plain = opened(train=sources[1], eval=sources[1], **(settings | {"aa": ""})).train_batch(0)
        assert plain.pixels is not None and not torch.equal(plain.pixels, two.pixels)


@pytest.mark.parametrize("key", ["augment", "aa", "reprob", "mixup", "cutmix"])
def test_only_images_are_augmented(key: str) -> None:
    value = {"augment": True, "aa": "rand"}.get(key, 0.5)
    with pytest.raises(ConfigError, match=rf"data\.{key} is for images that Stretto reads"):
        build_config({"data": {key: value}})
    images: dict[str, Any] = {"data": {"task": "images", key: value}, "model": {"kind": "vit"}}
    assert getattr(build_config(images).data, key) == value
    images["data"]["own"] = "mine.Data"
    with pytest.raises(ConfigError, match=rf"data\.{key} is for images that Stretto reads"):
        build_config(images)


def test_a_model_of_ones_own_has_one_label() -> None:
    images: dict[str, Any] = {"data": {"task": "images", "mixup": 0.8}, "model": {"kind": "vit", "own": "mine.Model"}}
    with pytest.raises(ConfigError, match=r"data\.mixup and data\.cutmix give an image two labels"):
        build_config(images)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mixup", -1.0, "must not be negative"),
        ("cutmix", -0.1, "must not be negative"),
        ("reprob", 1.5, "is a probability"),
        ("mixup_prob", -0.5, "is a probability"),
        ("mixup_switch_prob", 2.0, "is a probability"),
        ("recount", 0, "from 1 to 100"),
        ("remode", "black", "must be one of"),
    ],
)
def test_wrong_values_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}.*{message}"):
        build_config({"data": {"task": "images", key: value}, "model": {"kind": "vit"}})
