"""Inputs of a stranger: what they hold, which command opens them, and how that may end."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file

from stretto.config import load_config
from stretto.convert.names import to_theirs
from stretto.data.images import FORMATS
from tests.faults.audited import PLANTED

LIMIT_S, LIMIT_MB = 5.0, 200.0  # of processor time, which others on the machine do not change; and beyond what is there
REFUSED = (3, 4, 5)
DEEP = "[" * 100_000


@dataclass(frozen=True)
class Case:
    name: str
    argv: list[str]
    codes: tuple[int, ...] = REFUSED
    writable: tuple[Path, ...] = ()
    unreadable: tuple[Path, ...] = ()
    sabotage: str = ""
    says: str = ""  # words of the message


@dataclass(frozen=True)
class Places:
    """Where the files of a test are."""

    root: Path
    run: Path  # trained on text
    image_run: Path
    count: list[int] = field(default_factory=lambda: [0])

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def new(self, name: str = "x") -> Path:
        """A path that was not there."""
        self.count[0] += 1
        folder = self.root / f"{self.count[0]:04d}"
        folder.mkdir()
        return folder / name


class Server:
    """The audited process (audited.py)."""

    def __init__(self, root: Path, process: subprocess.Popen[str]) -> None:
        self.root, self._process = root, process
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin, process.stdout

    def ask(self, case: Case) -> dict[str, Any]:
        request = {
            "argv": case.argv, "root": str(self.root), "sabotage": case.sabotage, "output": str(self.root / "output"),
            "writable": [*map(str, case.writable), str(self.root / "temporary")],
            "unreadable": [*map(str, case.unreadable), str(self.root / "outside")],
        }  # fmt: skip
        self._in.write(json.dumps(request) + "\n")
        self._in.flush()
        answer: dict[str, Any] = json.loads(self._out.readline())
        return answer


def find_faults(case: Case, result: dict[str, Any]) -> list[str]:
    """What is wrong with how a case ended."""
    faults = [f"forbidden: {event}" for event in result["events"]]
    if result["code"] not in case.codes:
        faults.append(f"exit code {result['code']}")
    if "Traceback" in result["output"]:
        faults.append("a traceback")
    if case.says not in result["output"]:
        faults.append(f"it does not say {case.says!r}")
    if result["seconds"] > LIMIT_S:
        faults.append(f"{result['seconds']:.1f} s")
    if result["extra_mb"] > LIMIT_MB:
        faults.append(f"{result['extra_mb']:.0f} MB")
    return [f"{case.name}: {fault}: {result['output'][-400:]}" for fault in faults]


class _Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark} # {PLANTED}",)


def make_pickle(places: Places, protocol: int = 4) -> bytes:
    return pickle.dumps(_Payload(places.outside / "pwned"), protocol)


def make_torch_file(places: Places) -> bytes:
    """What torch.save writes: a zip file with a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("archive/data.pkl", make_pickle(places))
        packed.writestr("archive/version", "3")
    return file.getvalue()


def list_programs(places: Places) -> dict[str, bytes]:
    """Pickles, in all their forms, and other things that run."""
    return {
        **{f"pickle {protocol}": make_pickle(places, protocol) for protocol in range(6)},
        "torch": make_torch_file(places),
        "python": f"import os\nos.system('touch {places.outside}/pwned')  # {PLANTED}\n\xff".encode("latin-1"),
    }


def on_text(places: Places, data: Path | str, *sets: str, recipe: str = "text") -> list[str]:
    values = [f"run.dir={places.new('run')}", f"data.train={data}", *sets]
    return ["train", str(places.root / f"{recipe}.toml"), *(part for value in values for part in ("--set", value))]


def on_images(places: Places, data: Path | str, *sets: str) -> list[str]:
    return on_text(places, data, *sets, recipe="images")


def resume(run: Path) -> list[str]:
    return ["train", str(run / "config.toml"), "--set", f"run.dir={run}", "--set", "train.steps=6", "--resume"]


def commands_on(run: Path, places: Places) -> dict[str, list[str]]:
    return {
        "resume": resume(run),
        "eval": ["eval", str(run)],
        "generate": ["generate", str(run), "--prompt", "a"],
        "export": ["export", str(run), str(places.new("hf"))],
        "report": ["report", str(run)],
    }


def find_run(argv: list[str]) -> tuple[Path, ...]:
    """Where a command may write: the run folder, and what it exports to."""
    named = [part.partition("=")[2] for part in argv if part.startswith(("run.dir=", "data.cache="))]
    if argv[0] != "train":
        named = argv[1:3] if argv[0] == "export" else argv[1:2]
    return tuple(path for name in named for path in (Path(name), Path(name).parent))


def on_data(name: str, argv: list[str], codes: tuple[int, ...] = (4,), says: str = "") -> Case:
    return Case(name, argv, codes, find_run(argv), says=says)


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def make_image_folder(places: Places, name: str, content: bytes) -> Path:
    """Two classes of real images, and one file of any content among them, which is read with the others."""
    folder = places.new("images")
    for kind in ("a", "b"):
        write(folder / kind / "0.png", make_image("PNG"))
    write(folder / "a" / name, content)
    return folder


def make_image(kind: str, size: tuple[int, int] = (16, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("1" if kind in ("XBM", "MSP") else "RGB", size).save(file, format=kind)
    return file.getvalue()


def make_arrays(places: Places, **members: bytes) -> Path:
    path = places.new("x.npz")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(f"{name}.npy", content)
    return path


def make_array(header: str, content: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def describe_array(dtype: str, shape: str) -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"


def make_model_folder(places: Places) -> Path:
    """A GPT-2 of the sizes of the trained run, with its weights."""
    folder = places.new("hf")
    folder.mkdir()
    cfg = load_config(places.run / "config.toml").model
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": cfg.layers, "n_embd": cfg.width,
        "n_head": cfg.heads, "n_positions": cfg.max_len, "vocab_size": cfg.vocab, "activation_function": "gelu_new",
    }  # fmt: skip
    write(folder / "config.json", json.dumps(config))
    step = sorted((places.run / "checkpoints").iterdir())[-1]
    weights = load_file(step / "model.safetensors")
    save_file(to_theirs("GPT2LMHeadModel", cfg, weights), folder / "model.safetensors")
    write(folder / "tokenizer.json", '{"stretto": "bytes"}')
    return folder


def on_model(name: str, places: Places, spoil: Callable[[Path], Any], codes: tuple[int, ...] = REFUSED) -> Case:
    folder = make_model_folder(places)
    spoil(folder)
    argv = on_text(places, places.root / "text", f"model.init={folder}", recipe="init")
    return Case(name, argv, codes, find_run(argv))


def change_config(**values: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        write(folder / "config.json", json.dumps(config | values))

    return change


def put(name: str, content: bytes | str) -> Callable[[Path], Any]:
    return lambda folder: write(folder / name, content)


def put_index(content: Any) -> Callable[[Path], Any]:
    """Takes the weights away, and leaves an index that names others."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        text = content if isinstance(content, str) else json.dumps(content)
        write(folder / "model.safetensors.index.json", text)

    return change


def put_pipe(name: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def put_device(name: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return change


def put_sparse(name: str, size: int) -> Callable[[Path], Any]:
    """A file of zeros that takes no room on the disk."""

    def change(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return change


def list_headers() -> dict[str, bytes]:
    """Beginnings of .safetensors files that lie."""

    def pack(tree: Any, size: int = 8) -> bytes:
        text = (tree if isinstance(tree, str) else json.dumps(tree)).encode()
        return struct.pack("<Q", len(text)) + text + bytes(size)

    def tensor(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    return {
        "200 MB": struct.pack("<Q", 200_000_000) + b"{}",
        "2^63": struct.pack("<Q", 2**63) + b"{}",
        "2^64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
        "no header": struct.pack("<Q", 0),
        "nothing": b"",
        "seven bytes": b"1234567",
        "overlap": pack({"a": tensor([2], 0, 8), "b": tensor([1], 4, 8)}),
        "hole": pack({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, 12),
        "shape overflow": pack({"a": tensor([2**62, 2**62], 0, 8)}),
        "shape too large": pack({"a": tensor([10**9], 0, 8)}),
        "negative shape": pack({"a": tensor([-1], 0, 8)}),
        "beyond the end": pack({"a": tensor([1000], 0, 4000)}),
        "backwards": pack({"a": tensor([2], 8, 0)}),
        "unknown type": pack({"a": tensor([2], 0, 8, "PICKLE")}),
        "no JSON": pack("not JSON"),
        "too deep": pack(DEEP),
        "a list": pack([1, 2]),
        "same name twice": pack(
            '{"a":' + json.dumps(tensor([2], 0, 8)) + ',"a":' + json.dumps(tensor([1], 0, 4)) + "}"
        ),
    }


def copy_run(places: Places, run: Path | None = None) -> Path:
    return Path(shutil.copytree(run or places.run, places.new("run")))


def seal(step: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with a seal that fits: whoever writes one can do that."""
    manifest.pop("seal", None)
    made = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    write(step / "manifest.json", json.dumps(manifest | {"seal": made}, indent=1))


def spoil_checkpoints(run: Path, change: Callable[[Path, dict[str, Any]], Any]) -> Path:
    """Changes every checkpoint, so that there is none to fall back to, and seals it again."""
    for step in (run / "checkpoints").iterdir():
        manifest = json.loads((step / "manifest.json").read_text())
        changed = change(step, manifest)
        if changed is not False:
            seal(step, manifest)
    return run


def replace_file(name: str, content: bytes, sealed: bool) -> Callable[[Path, dict[str, Any]], Any]:
    def change(step: Path, manifest: dict[str, Any]) -> bool:
        write(step / name, content)
        if sealed and name in manifest["files"]:
            manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return sealed and name != "manifest.json"

    return change


def change_manifest(**values: Any) -> Callable[[Path, dict[str, Any]], Any]:
    return lambda step, manifest: manifest.update(values)


def change_entry(name: str, entry: Any) -> Callable[[Path, dict[str, Any]], Any]:
    return lambda step, manifest: manifest["files"].update({name: entry})


def on_run(name: str, places: Places, run: Path, command: str = "resume", codes: tuple[int, ...] = REFUSED) -> Case:
    argv = commands_on(run, places)[command]
    return Case(name, argv, codes, find_run(argv))


def list_pickles(places: Places) -> Iterator[Case]:
    """X1: pickles and programs in the place of data."""
    for kind, content in list_programs(places).items():
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            yield on_model(f"{kind} as {name}", places, put(name, content))
        yield on_data(f"{kind} as .npz", on_images(places, write(places.new("x.npz"), content)))
        yield on_data(f"{kind} as .png", on_images(places, make_image_folder(places, "x.png", content)))
        if kind not in ("pickle 0", "pickle 1"):  # which are text: a model may learn it
            yield on_data(f"{kind} as text", on_text(places, write(places.new("x.txt"), content)))
        yield on_data(f"{kind} as .gz", on_text(places, write(places.new("x.txt.gz"), content)))
        yield on_data(f"{kind} as tokenizer", on_text(places, places.root / "text",
                      f"data.tokenizer={write(places.new('t.json'), content)}"))  # fmt: skip
        run = copy_run(places)
        write(run / "config.toml", content)
        yield on_run(f"{kind} as config.toml", places, run, "eval")
    program, evil = make_pickle(places), f"import os\nos.system('touch {places.outside}/pwned')  # {PLANTED}\n"
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        for sealed in (False, True):
            for command in ("resume", "eval", "generate", "export", "report"):
                run = spoil_checkpoints(copy_run(places), replace_file(name, program, sealed))
                codes = REFUSED if name != "optimizer.safetensors" or not sealed else (0, *REFUSED)
                if codes == REFUSED or command == "resume":
                    yield on_run(f"pickle as {name}, {'sealed' if sealed else 'plain'}", places, run, command, codes)
    for name in ("labels.json", "data/tokenizer.json"):
        for command in ("eval", "generate", "report"):
            run = copy_run(places)
            write(run / name, program)
            yield on_run(f"pickle as {name}", places, run, command)
    run = copy_run(places)
    for path in (run / "data").glob("*.tokens"):
        write(path, program)
    yield on_run("pickle as tokens", places, run)
    yield on_model("weights as a pickle", places, lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"))
    yield on_model("index of pickles", places, put_index({"weight_map": {"wte": "pytorch_model.bin"}}))
    planted = {"AutoConfig": f"{PLANTED}.C", "AutoModelForCausalLM": f"{PLANTED}.M"}

    def plant(folder: Path) -> None:
        change_config(auto_map=planted, trust_remote_code=True, custom_pipelines=planted)(folder)
        write(folder / f"{PLANTED}.py", evil)
        write(folder / "tokenizer_config.json", json.dumps({"auto_map": planted, "tokenizer_class": f"{PLANTED}.T"}))

    yield on_model("auto_map", places, plant, codes=(0,))
    yield on_model("auto_map of another type", places, lambda f: (plant(f), change_config(model_type=PLANTED)(f)))
    for member, objects in (("images", {"images"}), ("labels", {"labels"}), ("names", {"names"})):
        arrays: dict[str, Any] = {
            "images": np.zeros((8, 4, 4), np.uint8),
            "labels": np.arange(8) % 2,
            "names": ["a", "b"],
        }
        path = places.new("x.npz")
        arrays |= {name: np.array([_Payload(places.outside / "pwned")] * 8, object) for name in objects}
        np.savez(path, **arrays)
        yield on_data(f"objects as {member}", on_images(places, path), says="pickle")
    call = f"__import__('os').system('touch {places.outside}/pwned')"
    code = f"{{'descr': {call}, 'fortran_order': False, 'shape': (1,), }}"
    yield on_data(
        "header with code", on_images(places, make_arrays(places, images=make_array(code), labels=make_array(code)))
    )
    yield on_data("array that is a pickle", on_images(places, make_arrays(places, images=program, labels=program)))
    yield on_data(
        "folder of pickles", on_text(places, write(places.new("d/x.pkl"), program).parent, "data.suffix=.pkl")
    )


def list_data_sets(places: Places) -> Iterator[Case]:
    """X1: data sets with scripts and pickles, for the `datasets` library."""
    evil = f"import os\nos.system('touch {places.outside}/pwned')  # {PLANTED}\n"
    sets: dict[str, dict[str, str | bytes]] = {
        "script": {"x/x.py": evil},
        "script and data": {"x/x.py": evil, "x/notes.bin": "none"},
        "pickles": {"x/train.pkl": make_pickle(places)},
        "pickled frame": {"x/train.pickle": make_pickle(places)},
        "torch file": {"x/train.pt": make_torch_file(places)},
    }
    for name, files in sets.items():
        folder = places.new("d") / "x"
        for path, content in files.items():
            write(folder.parent / path, content)
        argv = on_text(places, f"hf:{folder}")
        yield Case(f"data set: {name}", argv, (4,), find_run(argv))


def list_manifests(places: Places) -> Iterator[Case]:
    """X2: manifests, indices and headers that lead elsewhere, or promise too much."""
    secret = write(places.outside / "secret.safetensors", next(places.run.rglob("model.safetensors")).read_bytes())
    entry = {"size": secret.stat().st_size, "sha256": hashlib.sha256(secret.read_bytes()).hexdigest()}
    names = ["../" * 8 + str(secret).lstrip("/"), str(secret), "..", "", "\0", "a/b"]
    for name in names:

        def rename(step: Path, manifest: dict[str, Any], name: str = name) -> None:
            manifest["files"][name] = manifest["files"].pop("model.safetensors", entry)
            (step / "model.safetensors").unlink()

        yield on_run(f"manifest names {name!r}", places, spoil_checkpoints(copy_run(places), rename))
    odd: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
        "negative size": change_entry("model.safetensors", entry | {"size": -1}),
        "huge size": change_entry("model.safetensors", entry | {"size": 10**30}),
        "size in words": change_entry("model.safetensors", entry | {"size": "many"}),
        "no hash": change_entry("model.safetensors", {"size": 1}),
        "a list for an entry": change_entry("model.safetensors", [1]),
        "files as a number": change_manifest(files=10**9),
        "files as a list": change_manifest(files=["model.safetensors"]),
        "no files": change_manifest(files={}),
        "100,000 files": lambda step, m: m.update(files={f"f{i}": entry for i in range(100_000)}),
        "negative step": change_manifest(step=-1),
        "step in words": change_manifest(step="four"),
        "huge step": change_manifest(step=10**30),
        "step with parts": change_manifest(step=1.5),
        "format of the future": lambda step, m: (m.update(format=10**9, files={})),
    }  # fmt: skip
    for name, change in odd.items():
        for command in ("resume", "eval"):
            yield on_run(f"manifest: {name}", places, spoil_checkpoints(copy_run(places), change), command)
    digits, twice = '{"step": ' + "1" * 5000 + "}", '{"files": {}, "files": 1}'
    for name, text in {"too deep": DEEP, "digits": digits, "twice": twice, "not UTF-8": "\udcff"}.items():
        content = text.encode(errors="surrogateescape")
        run = spoil_checkpoints(copy_run(places), replace_file("manifest.json", content, sealed=False))
        yield on_run(f"manifest: {name}", places, run)
    for kind, header in list_headers().items():
        for file in ("model.safetensors", "optimizer.safetensors"):
            run = spoil_checkpoints(copy_run(places), replace_file(file, header, sealed=True))
            yield on_run(f"header of {file}: {kind}", places, run)
        yield on_model(f"header of a folder: {kind}", places, put("model.safetensors", header))
    for text in (DEEP, '{"step": "x"}', "[]", "5", '{"step": 4, "best_step": "../../x"}', '{"best_step": 1e400}'):
        run = spoil_checkpoints(copy_run(places), replace_file("state.json", text.encode(), sealed=True))
        yield on_run(f"state: {text[:40]}", places, run, "eval")
    for named in [
        "../outside/secret.safetensors",
        str(secret),
        "..",
        ".",
        "",
        "a/../part.safetensors",
        "\0",
        5,
        None,
        ["x"],
    ]:
        yield on_model(f"index names {named!r}", places, put_index({"weight_map": {"wte": named}}))
    for index in (DEEP, "[]", "5", '{"weight_map": []}', '{"weight_map": 5}', "{}", '{"weight_map": {}}', "\udcff"):
        yield on_model(f"index {index[:20]}", places, put_index(index.encode(errors="replace").decode()))


def list_sizes(places: Places) -> Iterator[Case]:
    """Sizes that are only numbers, until memory is taken for them."""
    sizes = {"n_layer": 10**9, "n_embd": 10**9, "vocab_size": 10**12, "n_positions": 10**12, "n_inner": 10**12}
    for name, value in (sizes | {"n_head": 0}).items():
        yield on_model(f"{name} = {value}", places, change_config(**{name: value}), codes=(3,))
    for odd in ("many", [1], {"a": 1}, -1, 0, 1.5, True, None, 10**400):
        yield on_model(f"n_layer = {str(odd)[:20]}", places, change_config(n_layer=odd), codes=(3,))
    for text in (DEEP, "[]", "5", '{"n_layer": ' + "1" * 5000 + "}", "", '{"model_type": ["gpt2"]}'):
        yield on_model(f"config.json is {text[:20]}", places, put("config.json", text), codes=(3,))
    for key, value in {
        "model.layers": 20_000, "model.width": 2**40, "model.mlp_width": 2**50, "model.vocab": 2**50,
        "model.heads": 2**62, "model.token_types": 2**50, "data.batch_size": 10**12,
        "train.micro_batches": 10**12, "data.vocab": 10**12,
    }.items():  # fmt: skip
        sets = [f"{key}={value}", "model.width=256"] if key == "model.layers" else [f"{key}={value}"]
        yield on_data(f"{key} = {value}", on_text(places, places.root / "text", *sets), (3,), says=key)
    for key, value in {
        "model.image_size": 2**30,
        "model.patch": 2**20,
        "model.classes": 2**50,
        "data.batch_size": 10**12,
    }.items():
        sets = [f"{key}={value}"] + (["model.image_size=1048576"] if key == "model.patch" else [])
        yield on_data(f"images: {key} = {value}", on_images(places, places.root / "images.npz", *sets), (3,))
    images = {"images": make_array(describe_array("|u1", "(2, 4, 4)"), bytes(32))}
    label = make_array(describe_array("<i8", "(2,)"), struct.pack("<qq", 0, 10**9))
    yield on_data("label of 10^9", on_images(places, make_arrays(places, **images, labels=label)), says="label")
    for shape in ("(1000000000000,)", "(-1,)", f"({2**62}, {2**62})", "(1000, 1000, 1000, 1000)"):
        bad = make_array(describe_array("|u1", shape), bytes(32))
        yield on_data(f"images of shape {shape}", on_images(places, make_arrays(places, images=bad, labels=label)))
    bomb = gzip.compress(bytes(1000) * 1000, 9)
    stream = write(places.new("bomb.txt.gz"), bomb * 1200)
    yield on_data("1.2 GB in a .gz", on_text(places, stream), says="unpacks")
    yield on_data("1.2 GB in a folder", on_text(places, stream.parent), says="unpacks")
    yield on_data("1.2 GB as images", on_images(places, stream))
    for trees in (DEEP, "[]", "5", "{}", '{"model": 5}', '{"model": {"vocab": 5}}'):
        path = write(places.new("t.json"), trees)
        yield on_data(f"tokenizer {trees[:20]}", on_text(places, places.root / "text", f"data.tokenizer={path}"))
    for kind, tree in list_tokenizers().items():
        path = write(places.new("t.json"), json.dumps(tree))
        yield on_data(f"tokenizer: {kind}", on_text(places, places.root / "text", f"data.tokenizer={path}"))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        yield on_model(f"{name} is a pipe", places, put_pipe(name))
        yield on_model(f"{name} is a device", places, put_device(name))
        yield on_model(f"{name} has 2 TB", places, put_sparse(name, 2 * 10**12))


def list_tokenizers() -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {"a": 0, "<eos>": 1, "<pad>": 2}, "merges": []}
    token = {
        "content": "<x>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    split = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    return {
        "id 4e9": {"model": model | {"vocab": {"a": 4_000_000_000, "<eos>": 1}}},
        "added id 4e9": {"model": model, "added_tokens": [token | {"id": 4_000_000_000}]},
        "negative id": {"model": model | {"vocab": {"a": -1}}},
        "id with parts": {"model": model | {"vocab": {"a": 0.5}}},
        "no tokens": {"model": model | {"vocab": {}}},
        "unknown model": {"model": model | {"type": PLANTED}},
        "merges of nothing": {"model": model | {"merges": [["x", "y"]]}},
        "unknown token is missing": {"model": {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "?"}},
        "broken expression": {"model": model, "pre_tokenizer": split},
        "no end token": {"model": model | {"vocab": {"a": 0}}},
    }


def list_disguises(places: Places) -> Iterator[Case]:
    """X6: every format that Pillow knows, and others, under each suffix that is allowed."""
    Image.init()
    foreign = sorted(set(Image.SAVE) - set(FORMATS.values()) - {"JPEG2000", "MPO"})
    contents = {kind: content for kind in foreign if (content := _try_image(kind))}
    contents |= list_other_formats()
    for number, (kind, content) in enumerate(contents.items()):
        for turn in range(2):
            suffix = list(FORMATS)[(4 * turn + number) % len(FORMATS)]
            folder = make_image_folder(places, f"x{suffix}", content)
            yield on_data(f"{kind} as {suffix}", on_images(places, folder), says=f"x{suffix}")
        path = write(places.new("x.png"), content)
        argv = ["generate", str(places.image_run), "--input", str(path)]
        yield Case(f"{kind} in generate", argv, (4,), (places.image_run,))
        if kind not in ("SVG", "PDF text", "shell", "HTML"):
            yield on_data(f"{kind} as text", on_text(places, write(places.new("x.txt"), b"\xff" + content)))
        yield on_data(f"{kind} as .gz", on_text(places, write(places.new("x.txt.gz"), content)))
        yield on_data(f"{kind} as .npz", on_images(places, write(places.new("x.npz"), content)))
    for kind, content in list_bombs().items():
        yield on_data(
            f"{kind} of absurd size", on_images(places, make_image_folder(places, "x.png", content)), says="x.png"
        )


def _try_image(kind: str) -> bytes:
    try:
        return make_image(kind)
    except Exception:  # a library for it is missing, or it cannot be written without more options
        return b""


def list_other_formats() -> dict[str, bytes]:
    return {
        "EPS program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(anything)\n%%EOF\n",
        "PSD": b"8BPS\x00\x01" + bytes(6) + struct.pack(">HIIHH", 3, 10, 10, 8, 3) + bytes(64),
        "FITS": b"SIMPLE  =                    T".ljust(80)
        + b"BITPIX  =                    8".ljust(80)
        + b"END".ljust(2720),
        "WMF": b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(64),
        "EMF": b"\x01\x00\x00\x00" + bytes(36) + b" EMF" + bytes(64),
        "XCF": b"gimp xcf file\0" + bytes(64),
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        "HTML": b"<html><script>alert(1)</script></html>",
        "PDF text": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\n",
        "shell": b"#!/bin/sh\ntouch pwned\n",
        "program": b"\x7fELF\x02\x01\x01" + bytes(64),
        "zip": b"PK\x03\x04" + bytes(64),
        "SQLite": b"SQLite format 3\0" + bytes(64),
        "Parquet": b"PAR1" + bytes(64) + b"PAR1",
        "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(64),
        "tar": b"x.py".ljust(257, b"\0") + b"ustar\x0000" + bytes(248),
        "bzip2": b"BZh91AY&SY" + bytes(64),
        "xz": b"\xfd7zXZ\0" + bytes(64),
    }


def list_bombs() -> dict[str, bytes]:
    """Small files that say they are very large images."""
    side = 60_000

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    bitmap = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 1, 1, 0, 0)
    gif = (
        b"GIF89a"
        + struct.pack("<HHBBB", side, side, 0x80, 0, 0)
        + bytes(6)
        + b","
        + struct.pack("<HHHHB", 0, 0, side, side, 0)
    )
    return {
        "PNG": png,
        "BMP": bitmap + bytes(64),
        "PPM": b"P6 60000 60000 255\n" + bytes(64),
        "GIF": gif + b"\x02\x02\x4c\x01\x00;",
        "10,000 x 10,000": make_image("PNG", (10_000, 10_000)),
    }


def list_links(places: Places) -> Iterator[Case]:
    """X6, X5: links, pipes and sockets in a run folder and among data."""
    precious = write(places.outside / "precious", "precious\n")
    for name in (
        "lock",
        "config.toml",
        "labels.json",
        "events.jsonl",
        "report.html",
        "exit.json",
        "tensorboard",
        "data",
        "checkpoints",
    ):
        for command in ("resume", "report"):
            run = copy_run(places)
            shutil.rmtree(run / name, ignore_errors=True)
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(precious)
            argv = commands_on(run, places)[command]
            if command == "resume" and name == "config.toml":
                argv[1] = str(places.run / "config.toml")
            yield Case(f"link as {name}", argv, (5,), find_run(argv), says=f"{name} is a link")
    newest = f"checkpoints/{max(path.name for path in (places.run / 'checkpoints').iterdir())}"
    for name in (
        "config.toml",
        "labels.json",
        "data/tokenizer.json",
        f"{newest}/manifest.json",
    ):
        run = copy_run(places)
        (run / name).unlink()
        os.mkfifo(run / name)
        yield on_run(f"pipe as {name}", places, run, "generate")
    for maker in (
        os.mkfifo,
        make_socket,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/tty"),
    ):
        text, images = places.new("d"), make_image_folder(places, "y.png", make_image("PNG"))
        write(text / "a.txt", "a" * 500)
        maker(text / "x.txt")
        maker(images / "a" / "x.png")
        arrays, packed = places.new("x.npz"), places.new("x.txt.gz")
        maker(arrays)
        maker(packed)
        yield on_data("pipe among texts", on_text(places, text), says="x.txt")
        yield on_data("pipe among images", on_images(places, images), says="x.png")
        yield on_data("pipe as arrays", on_images(places, arrays))
        yield on_data("pipe as text", on_text(places, packed))
    for path in ("/dev/zero", "/dev/tty", "x" * 300, "/" + "x/" * 3000, "/proc/self/mem"):
        yield on_data(f"data.train={path[:20]}", on_text(places, path))
        yield on_data(f"images={path[:20]}", on_images(places, path))
    file = write(places.new("cache"), "a file")
    yield on_data(
        "data.cache is a file", on_text(places, places.root / "text", f"data.cache={file}"), (3,), says="data.cache"
    )
    yield on_data("run.dir is a file", on_text(places, places.root / "text", f"run.dir={file}"), (3,), says="run.dir")


def make_socket(path: Path) -> None:
    """A socket, whose path may be too long for its name."""
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def list_healthy(places: Places) -> Iterator[Case]:
    """What must go on working under the hook: else its silence would mean nothing."""
    for command in ("resume", "eval", "generate", "report"):
        yield on_run(f"healthy {command}", places, copy_run(places), command, codes=(0,))
    yield on_data("healthy text", on_text(places, places.root / "text"), (0,))
    yield on_data("healthy images", on_images(places, places.root / "images.npz"), (0,))
    yield on_data("healthy folder", on_images(places, make_image_folder(places, "x.jpg", make_image("JPEG"))), (0,))
    yield on_model("healthy folder of a model", places, lambda folder: None, codes=(0,))


RECIPE = """
[run]
device = "cpu"
[data]
seq_len = 16
batch_size = 4
held_out = 0.3
suffix = ".txt"
[optim]
warmup = 0
[train]
steps = 2
log_every = 1
eval_batches = 1
"""
TEXT = "[model]\nlayers = 1\nwidth = 16\nheads = 2\nmax_len = 32\n"
IMAGES = 'kind = "vit"\nlayers = 1\nwidth = 16\nheads = 2\nimage_size = 16\npatch = 4\n'


def write_recipes(root: Path) -> None:
    """The recipes that all cases begin with."""
    write(root / "init.toml", RECIPE)
    write(root / "text.toml", RECIPE + TEXT)
    write(root / "images.toml", RECIPE.replace("[data]", '[data]\ntask = "images"') + "[model]\n" + IMAGES)
