"""Stretto trains Transformers faster on the GPUs you have.

    import stretto

    result = stretto.train("demo", overrides={"train.steps": 100})  # or a TOML file, a Config, a tree
    print(result.best_loss, stretto.load(result).generate("def "))

or makes a Hugging Face model faster that you train yourself:

    model = stretto.accelerate(model)

docs/python.md shows both doors. Importing this package imports neither torch nor anything else that takes time.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stretto.config import Config, load_config
from stretto.errors import StrettoError
from stretto.version import __version__

if TYPE_CHECKING:
    from stretto import hf
    from stretto.api import Loaded, Result, load
    from stretto.given import Callback
    from stretto.hf import accelerate, restore

__all__ = [
    "Callback", "Config", "Loaded", "Result", "StrettoError", "__version__", "accelerate", "hf", "load", "load_config",
    "restore", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What needs torch, or transformers, comes when it is asked for."""
    match name:
        case "train":
            return import_module("stretto.train")
        case "hf":
            return import_module("stretto.hf")
        case "accelerate" | "restore":
            return getattr(import_module("stretto.hf"), name)
        case "load" | "Loaded" | "Result":
            return getattr(import_module("stretto.api"), name)
        case "Callback":
            return getattr(import_module("stretto.given"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Callable(ModuleType):
    """The module stretto/train.py as `stretto.train`: a module for those who import from it, and a function for those
    who call it."""

    def __call__(self, *arguments: Any, **options: Any) -> "Result":
        from stretto.api import train

        return train(*arguments, **options)


class _Package(ModuleType):
    """This package. Whoever first imports the module stretto.train, Python then makes that module the attribute `train`
    of its package: here it becomes callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train" and type(value) is ModuleType:
            value.__class__ = _Callable
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
if TYPE_CHECKING:
    train: _Callable
