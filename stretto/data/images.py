"""Image classification: folders with one folder per class, or one .npz with arrays `images` and `labels`.

Pixels reach the model as float32 [N, 3, image_size, image_size] between -1 and 1. Folders are decoded when a batch
needs them, on all cores; an .npz lies in memory as bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.batch import Batch, Counts
from stretto.config import DataConfig
from stretto.data.augment import Look, View, draw_views, erase, mix_pairs
from stretto.data.documents import describe_left_out
from stretto.data.rand_augment import draw_operations
from stretto.data.splits import divide, number_labels
from stretto.data.stream import Data, EpochOrder, Int64s, batch_positions
from stretto.errors import DataError
from stretto.files import open_regular
from stretto.hardware import find_machine_memory
from stretto.values import read_policy

if TYPE_CHECKING:
    import PIL.Image

# What Pillow calls each kind of file. It goes by content, not by name, and by default knows many more: it would hand
# EPS to Ghostscript, which runs what is in it.
FORMATS = {
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP", ".gif": "GIF", ".tif": "TIFF",
    ".tiff": "TIFF", ".ppm": "PPM",
}  # fmt: skip
SUFFIXES = tuple(FORMATS)
MOST_PIXELS = 89_478_485  # of an image, where Pillow begins to warn: a small file can unpack to any number of them
MOST_CLASSES = 1 << 20  # where labels are numbers, and names are made for all up to the largest
_IDENTIFIED, _AT_LEAST = 1 << 30, 1 << 12  # bytes by which all images are identified, and each of them

Looks = Sequence[Look]
WHOLE = Look()


@dataclass(frozen=True)
class Images:
    names: tuple[str, ...]  # of the classes
    labels: Int64s  # [number of images], places in `names`
    fingerprint: str
    # Samples, image size, and how each is to be seen -> float32 [N, 3, size, size] from -1 to 1.
    read: Callable[[list[int], int, Looks], Tensor]
    left_out: Set[str] = frozenset()  # files that are not images by their names


def open_folder(key: str, folder: Path) -> Images:
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    inside = [sorted(p for p in path.rglob("*") if not p.is_dir()) for path in classes]
    found = [[p for p in some if p.suffix.lower() in SUFFIXES] for some in inside]
    left_out = {str(p) for some in inside for p in some} - {str(p) for some in found for p in some}
    labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in found]).astype(np.int64)
    paths = [path for some in found for path in some]
    if not paths:
        raise DataError(
            f"{key} = {str(folder)!r}: no images in it; it should have one folder of them per class"
            + describe_left_out(left_out, "images")
        )
    threads = ThreadPoolExecutor(thread_name_prefix="decode")
    fingerprint = _identify(folder, paths, threads)

    def read(samples: list[int], image_size: int, looks: Looks) -> Tensor:
        """Reads files by many threads, which Pillow lets work at the same time; without torch, whose operators would
        each start threads of their own."""
        pixels = torch.empty(len(samples), 3, image_size, image_size)
        for _ in threads.map(_read_into, pixels.numpy(), [paths[i] for i in samples], looks):
            pass  # but raise what went wrong
        return pixels

    return Images(tuple(path.name for path in classes), labels, fingerprint, read, left_out)


def _identify(folder: Path, paths: list[Path], threads: ThreadPoolExecutor) -> str:
    """Returns what changes with the images: all of their bytes where these are few, else as many of each."""
    most = max(_IDENTIFIED // len(paths), _AT_LEAST)

    def look(path: Path) -> tuple[str, int, str]:
        try:
            with open_regular(path) as file:
                begin, size = file.read(most), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"cannot read the image {path}: {error.strerror}") from error
        return path.relative_to(folder).as_posix(), size, hashlib.sha256(begin).hexdigest()

    return hashlib.sha256(repr(list(threads.map(look, paths))).encode()).hexdigest()


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Reads an .npz, after what it says of its sizes: a small one can unpack to any number of bytes."""
    with open_regular(path) as file, zipfile.ZipFile(file) as packed:
        members = {member.filename.removesuffix(".npy"): member for member in packed.infolist()}
        chosen = [members[name] for name in ("images", "labels", "names") if name in members]
        total = sum(member.file_size for member in chosen)
        if total > find_machine_memory():
            raise ValueError(f"it unpacks to {total:,} bytes, more than the memory of this machine")
        for member in chosen:
            with packed.open(member) as head:
                _check_header(member.filename, head, member.file_size)
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in ("images", "labels", "names") if name in members}


def _check_header(name: str, file: IO[bytes], size: int) -> None:
    """Compares what an array says of its shape with its bytes: numpy takes the memory first, and reads then."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"{name} has format {version}, which is not known here")
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects as a pickle, which could run any code")
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{name} has shape {list(shape)}, but only {size:,} bytes")


def open_arrays(key: str, path: Path) -> Images:
    try:
        arrays = _read_arrays(path)
        images, labels, named = arrays["images"], arrays["labels"], arrays.get("names")
    except Exception as error:  # of the many kinds that zip files and arrays have
        raise DataError(f"{key}: {path} is not an .npz with arrays `images` and `labels`: {error}") from error
    images, labels = _check_images(f"{key}: {path}", images), _check_labels(f"{key}: {path}", labels, len(images))
    num_classes = int(labels.max()) + 1
    if num_classes > MOST_CLASSES:
        raise DataError(
            f"{key}: {path} has the label {num_classes - 1:,}; there can be {MOST_CLASSES:,} classes at most"
        )
    names = tuple(map(str, range(num_classes) if named is None else named))
    if len(names) < num_classes:
        raise DataError(f"{key}: {path} has labels up to {num_classes - 1} but only {len(names)} `names`")

    def read(samples: list[int], image_size: int, looks: Looks) -> Tensor:
        pixels = torch.from_numpy(images[samples]).permute(0, 3, 1, 2).float()
        if any(look.view for look in looks):
            parts = [_resize(_cut(image, look.view), image_size) for image, look in zip(pixels, looks, strict=True)]
            pixels = torch.cat(parts)
        else:
            pixels = _resize(pixels, image_size)
        if any(look.operations for look in looks):
            colours = pixels.expand(-1, 3, -1, -1)
            pixels = torch.stack([_edit(image, look) for image, look in zip(colours, looks, strict=True)])
        _normalise(pixels)
        return pixels.expand(-1, 3, -1, -1).contiguous()  # grey becomes three equal channels

    return Images(names, labels, hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest(), read)


def _resize(pixels: Tensor, image_size: int) -> Tensor:
    size = (image_size, image_size)
    if pixels.shape[2:] == size:
        return pixels
    return F.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 255)


def _cut(image: Tensor, view: View | None) -> Tensor:
    """Returns what is to be seen of an image [C, H, W], as a batch of one."""
    if view is None:
        return image[None]
    left, top, right, bottom = view.find_box(image.shape[2], image.shape[1])
    part = image[None, :, top:bottom, left:right]
    return part.flip(3) if view.flipped else part


def _edit(image: Tensor, look: Look) -> Tensor:
    """Returns an image [3, H, W] with values from 0 to 255 after its operations, for which it is rounded to bytes."""
    if not look.operations:
        return image
    from PIL import Image

    edited = look.edit(Image.fromarray(image.round().byte().permute(1, 2, 0).numpy()))
    return torch.from_numpy(np.array(edited)).permute(2, 0, 1).float()


def _check_images(where: str, images: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise DataError(
            f"{where}: `images` must be uint8 of shape [N, H, W], [N, H, W, 1] or [N, H, W, 3],"
            f" not {images.dtype} of shape {list(images.shape)}"
        )
    return images


def _check_labels(where: str, labels: npt.NDArray[Any], count: int) -> Int64s:
    if labels.shape != (count,) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DataError(f"{where}: `labels` must be {count} whole numbers from 0 on, one per image")
    return labels.astype(np.int64)


def read_image(path: Path, image_size: int) -> Tensor:
    """Reads an image file as the model sees it: float32 [3, image_size, image_size]."""
    pixels = torch.empty(3, image_size, image_size)
    _read_into(pixels.numpy(), path)
    return pixels


def _read_into(pixels: npt.NDArray[np.float32], path: Path, look: Look = WHOLE) -> None:
    """Fills `pixels` [3, height, width] with an image file, or what is to be seen of it, at that size."""
    from PIL import Image

    (_, height, width), view = pixels.shape, look.view
    try:
        with open_regular(path) as file, Image.open(file, formats=sorted(set(FORMATS.values()))) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"it has {image.width:,} x {image.height:,} pixels, more than {MOST_PIXELS:,}")
            box = None if view is None else view.find_box(image.width, image.height)
            resized = _as_rgb(path, image).resize((width, height), Image.Resampling.BICUBIC, box)
    except DataError:
        raise
    except Exception as error:  # Pillow's readers raise anything, if only a byte is wrong
        raise DataError(f"cannot read the image {path}: {error}") from error
    if view is not None and view.flipped:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels[:] = np.asarray(look.edit(resized)).transpose(2, 0, 1)
    _normalise(pixels)


def _as_rgb(path: Path, image: PIL.Image.Image) -> PIL.Image.Image:
    """Converts to RGB. Pillow's own conversion would cut 16 bits off at 255, and drop what is transparent."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"{path} has pixels of 32 bits, whose range is not known: save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _normalise(pixels: Tensor | npt.NDArray[Any]) -> None:
    """Maps values from 0 to 255 to values from -1 to 1, in place."""
    pixels /= 255
    pixels -= 0.5
    pixels /= 0.5


def _open_images(key: str, source: str) -> Images:
    path = Path(source)
    if path.is_dir():
        return open_folder(key, path)
    if path.is_file():
        return open_arrays(key, path)
    raise DataError(f"{key} = {source!r}: there is no such folder or .npz file")


class ImageData(Data):
    def __init__(self, cfg: DataConfig, seed: int, image_size: int) -> None:
        assert image_size > 0, "images need a size"
        self._cfg, self._image_size, self._seed, self._policy = cfg, image_size, seed, read_policy(cfg.aa)
        self._train = self._held_out = _open_images("data.train", cfg.train)
        self.labels, self.fingerprint = self._train.names, self._train.fingerprint
        if cfg.eval:
            self._held_out = _open_images("data.eval", cfg.eval)
            self.number_classes(self.labels)
        num_eval = len(self._held_out.labels) if cfg.eval else 0
        self._train_samples, self._eval_samples = divide(seed, len(self._train.labels), num_eval, cfg.held_out)
        self.num_train = len(self._train_samples)
        self.num_eval_batches = -(-len(self._eval_samples) // cfg.batch_size)
        self._order = EpochOrder(seed, self.num_train)

    def number_classes(self, names: tuple[str, ...]) -> None:
        """Numbers the classes of the evaluation data as these are, which must be among them."""
        found = self._held_out
        self._held_out = replace(found, names=names, labels=number_labels(found.names, names)[found.labels])

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        positions = batch_positions(index, self._cfg.batch_size, part, parts)
        if not self._cfg.mixes:
            return self._see(positions)
        pairs = range(positions.start // 2 * 2, -(-positions.stop // 2) * 2)
        return mix_pairs(self._see(pairs), pairs.start, positions, self._cfg, self._seed)

    def _see(self, positions: range) -> Batch:
        """The images at these positions of the stream as training sees them, each by itself."""
        cfg, seed, samples = self._cfg, self._seed, self._train_samples[self._order.samples(positions)]
        views: Sequence[View | None] = [None] * len(positions)
        if cfg.augment:
            epochs = [position // self.num_train for position in positions]
            views = draw_views(seed, epochs, samples.tolist(), len(self._train.labels), cfg.crop_scale)
        operations = [draw_operations(self._policy, seed, position) for position in positions]
        batch = self._batch(self._train, samples, list(map(Look, views, operations)))
        if cfg.reprob and batch.pixels is not None:
            erase(batch.pixels.numpy(), cfg, seed, positions)
        return batch

    def eval_batch(self, index: int) -> Batch:
        positions = batch_positions(index, self._cfg.batch_size)
        return self._batch(self._held_out, self._eval_samples[positions.start : positions.stop])

    def describe(self) -> str:
        return (
            f"{self._cfg.train}: {self.num_train:,} images of {len(self.labels)} classes; "
            f"evaluation: {len(self._eval_samples):,} images"
            + describe_left_out(self._train.left_out | self._held_out.left_out, "images")
        )

    def _batch(self, images: Images, samples: Int64s, looks: Looks | None = None) -> Batch:
        count, chosen = len(samples), samples.tolist()
        pixels = images.read(chosen, self._image_size, looks or [WHOLE] * count)
        labels = torch.from_numpy(images.labels[samples])
        return Batch(labels, Counts(count, count, count, pairs=0), tuple(chosen), pixels=pixels)
