"""Images from folders and arrays."""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stretto.data import Data, read_image
from stretto.data.images import SUFFIXES
from stretto.errors import DataError
from tests.data.corpora import Opener

RED, GREY = (255, 0, 0), 128


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four red images of class "cat" and six grey ones of class "dog"; one of these is not an RGB file."""
    root = tmp_path / "animals"
    for name, count in (("dog", 6), ("cat", 4)):
        (root / name).mkdir(parents=True)
        for i in range(count):
            image = Image.new("RGB", (10, 6), RED) if name == "cat" else Image.new("L", (8, 8), GREY)
            image.save(root / name / f"{i}.png")
    (root / "dog" / "notes.txt").write_text("not an image")
    (root / ".hidden").mkdir()
    return root


def open_images(opened: Opener, train: Path, **settings: Any) -> Data:
    settings = {"batch_size": 4, "image_size": 8, "held_out": 0.3} | settings
    return opened(task="images", train=str(train), **settings)


def test_folders(opened: Opener, folder: Path) -> None:
    data = open_images(opened, folder)
    assert data.labels == ("cat", "dog")
    assert data.tokenizer is None
    assert data.num_train == 7
    assert data.num_eval_batches == 1
    batch = data.train_batch(0)
    assert batch.pixels is not None
    assert batch.pixels.shape == (4, 3, 8, 8)
    assert batch.pixels.dtype == torch.float32
    assert batch.pixels.is_contiguous()
    cat, dog = torch.tensor([1.0, -1.0, -1.0]), torch.full((3,), 128 / 255 * 2 - 1)
    for sample, label, pixels in zip(batch.samples, batch.labels.tolist(), batch.pixels, strict=True):
        assert label == int(sample >= 4)
        torch.testing.assert_close(pixels, (dog if label else cat)[:, None, None].expand(3, 8, 8))
    assert (batch.counts.tokens, batch.counts.slots, batch.counts.labels, batch.counts.pairs) == (4, 4, 4, 0)


def test_training_and_evaluation_share_nothing(opened: Opener, folder: Path) -> None:
    data = open_images(opened, folder)
    train = {sample for i in range(2) for sample in data.train_batch(i).samples}
    held_out = set(data.eval_batch(0).samples)
    assert train.isdisjoint(held_out)
    assert train | held_out == set(range(10))


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("shape", [(12, 8, 8), (12, 8, 8, 1), (12, 8, 8, 3)])
def test_arrays(opened: Opener, tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    path = save(tmp_path / "a.npz", images=images, labels=np.arange(12) % 3, names=np.array(["x", "y", "z"]))
    data = open_images(opened, path)
    assert data.labels == ("x", "y", "z")
    batch = data.train_batch(0)
    expected = torch.from_numpy(images[list(batch.samples)]).view(4, 8, 8, -1).expand(4, 8, 8, 3).permute(0, 3, 1, 2)
    assert batch.pixels is not None
    torch.testing.assert_close(batch.pixels, expected / 127.5 - 1)
    assert batch.pixels.is_contiguous()
    assert batch.labels.tolist() == [sample % 3 for sample in batch.samples]


def test_arrays_of_another_size_are_resized(opened: Opener, tmp_path: Path) -> None:
    images = np.zeros((4, 16, 16), np.uint8)
    images[:, :, 8:] = 255
    data = open_images(opened, save(tmp_path / "a.npz", images=images, labels=np.zeros(4, int)))
    pixels = data.train_batch(0).pixels
    assert pixels is not None
    assert pixels.shape == (4, 3, 8, 8)
    assert pixels.min() == -1
    assert pixels.max() == 1
    assert (pixels[..., :3] < -0.9).all()
    assert (pixels[..., 5:] > 0.9).all()


def test_evaluation_set_is_numbered_as_the_training_set(opened: Opener, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "eval" / "dog").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "eval" / "dog" / "x.png")
    data = open_images(opened, folder, eval=str(tmp_path / "eval"))
    assert data.num_train == 10
    assert data.eval_batch(0).labels.tolist() == [1]
    (tmp_path / "eval" / "emu").mkdir()
    with pytest.raises(DataError, match=r"data\.eval has labels that data\.train has not: emu"):
        open_images(opened, folder, eval=str(tmp_path / "eval"))


def test_an_evaluation_set_that_is_sorted_by_class_is_mixed(opened: Opener, tmp_path: Path) -> None:
    """Evaluations during training read the first batches alone."""
    labels = np.repeat(np.arange(3), 30)
    np.savez(tmp_path / "x.npz", images=np.zeros((90, 4, 4), np.uint8), labels=labels)
    data = open_images(opened, tmp_path / "x.npz", eval=str(tmp_path / "x.npz"), batch_size=10)
    batches = [data.eval_batch(i) for i in range(data.num_eval_batches)]
    assert set(batches[0].labels.tolist()) == {0, 1, 2}
    assert sorted(sum((batch.samples for batch in batches), ())) == list(range(90))


def test_read_image(folder: Path) -> None:
    pixels = read_image(folder / "cat" / "0.png", 16)
    torch.testing.assert_close(pixels, torch.tensor([1.0, -1.0, -1.0])[:, None, None].expand(3, 16, 16))
    with pytest.raises(DataError, match=r"cannot read the image .*notes\.txt"):
        read_image(folder / "dog" / "notes.txt", 16)


def test_threads_put_each_image_in_its_place(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    for i in range(50):
        size = (10 + 37 * i % 50, 12)  # some take longer than others
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8)).save(
            tmp_path / f"only/{i:02d}.png"
        )
    batch = open_images(opened, tmp_path, batch_size=40, held_out=0.1).train_batch(0)
    expected = torch.stack([read_image(tmp_path / f"only/{sample:02d}.png", 8) for sample in batch.samples])
    assert batch.pixels is not None
    assert torch.equal(batch.pixels, expected)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(anything)\n%%EOF\n"


def test_an_image_file_cannot_start_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands EPS to Ghostscript, whatever the file is called."""
    started, program, path = tmp_path / "started", tmp_path / "bin" / "gs", tmp_path / "x.png"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    path.write_bytes(EPS)
    with pytest.raises(DataError, match=r"cannot read the image .*x\.png"):
        read_image(path, 8)
    assert not started.exists()
    with suppress(OSError), Image.open(path) as image:  # the control: Pillow alone
        image.load()
    assert started.exists()


@pytest.mark.parametrize("kind", ["PCX", "TGA", "SGI", "ICO", "DDS"])
def test_other_formats_are_refused_whatever_their_name(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (16, 16), RED).save(tmp_path / "x.png", format=kind)
    with pytest.raises(DataError, match=r"cannot read the image .*x\.png"):
        read_image(tmp_path / "x.png", 8)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_that_is_promised_is_read(tmp_path: Path, suffix: str) -> None:
    Image.new("RGB", (16, 16), RED).save(tmp_path / f"x{suffix}")
    pixels = read_image(tmp_path / f"x{suffix}", 8)
    torch.testing.assert_close(pixels[:, 4, 4], torch.tensor([1.0, -1.0, -1.0]), atol=0.02, rtol=0)


def test_damaged_image(opened: Opener, folder: Path) -> None:
    for path in (folder / "cat").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    data = open_images(opened, folder)
    with pytest.raises(DataError, match=r"cannot read the image .*cat"):
        [data.train_batch(i) for i in range(3)]


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"images": np.zeros((2, 4, 4), np.uint8)}, "labels"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}, "uint8"),
        ({"images": np.zeros((2, 4, 4, 2), np.uint8), "labels": np.zeros(2, int)}, "shape"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)}, "2 whole numbers"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, -1])}, "from 0 on"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, 1]), "names": np.array(["a"])}, "only 1"),
        ({"images": np.array([{}, {}]), "labels": np.zeros(2, int)}, "pickle"),
    ],
)
def test_unusable_arrays(opened: Opener, tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=rf"data\.train: .*bad\.npz.*{reason}"):
        open_images(opened, save(tmp_path / "bad.npz", **arrays))


def test_not_an_array_file(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_text("hello")
    with pytest.raises(DataError, match=r"bad\.npz is not an \.npz"):
        open_images(opened, tmp_path / "bad.npz")
    with pytest.raises(DataError, match=r"data\.train = '.*nothing'"):
        open_images(opened, tmp_path / "nothing")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"data\.train = '.*none': no images"):
        open_images(opened, tmp_path / "none")


def test_deep_pixels_are_scaled_and_transparency_is_white(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "8.png")
    Image.fromarray(ramp.astype(np.uint16) * 257).save(tmp_path / "16.png")
    torch.testing.assert_close(read_image(tmp_path / "16.png", 8), read_image(tmp_path / "8.png", 8))
    glyph = np.zeros((8, 8, 4), np.uint8)
    glyph[2:4, 2:4, 3] = 255  # black on nothing
    Image.fromarray(glyph).save(tmp_path / "glyph.png")
    pixels = read_image(tmp_path / "glyph.png", 8)
    assert (pixels[:, 2:4, 2:4] == -1).all() and (pixels == 1).sum() == 3 * 60
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(DataError, match=r"f\.tiff has pixels of 32 bits"):
        read_image(tmp_path / "f.tiff", 8)


def test_images_are_known_by_their_content_and_not_by_their_place(opened: Opener, folder: Path, tmp_path: Path) -> None:
    before = open_images(opened, folder).fingerprint
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    os.utime(copy / "cat" / "0.png", (1, 1))
    assert open_images(opened, copy).fingerprint == before
    content = bytearray((copy / "cat" / "0.png").read_bytes())
    content[-20] ^= 1
    (copy / "cat" / "0.png").write_bytes(content)
    assert open_images(opened, copy).fingerprint != before, "one bit, and the same size"


def test_all_images_of_a_large_set_are_looked_at(opened: Opener, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many bytes, the first ones of each image count."""
    monkeypatch.setattr("stretto.data.images._IDENTIFIED", 1)
    before, path = open_images(opened, folder).fingerprint, folder / "dog" / "3.png"
    Image.new("L", (8, 8), GREY + 1).save(path)
    assert open_images(opened, folder).fingerprint != before


def test_files_that_are_not_images_are_named(opened: Opener, folder: Path) -> None:
    assert "not images, and left out: 1 file" in open_images(opened, folder).describe()
    assert "notes.txt" in open_images(opened, folder).describe()


@pytest.mark.parametrize("size", [(20_000, 20_000), (1, 100_000_000)])
def test_absurd_sizes_are_refused_before_they_are_unpacked(tmp_path: Path, size: tuple[int, int]) -> None:
    width, height = size
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 1, 1, 0, 0)
    (tmp_path / "x.bmp").write_bytes(header + bytes(64))
    with pytest.raises(DataError, match=r"cannot read the image .*x\.bmp.*pixels"):
        read_image(tmp_path / "x.bmp", 8)
