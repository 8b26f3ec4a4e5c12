"""Stretto trains Transformers faster on the GPUs you have.

    from stretto import load_config
    from stretto.train import train

    train(load_config("recipe.toml", ["train.steps=100"]))

or makes a Hugging Face model faster that you train yourself:

    model = stretto.accelerate(model)

Importing this package imports neither torch nor anything else that takes time.
"""

from typing import TYPE_CHECKING, Any

from stretto.config import Config, load_config
from stretto.version import __version__

if TYPE_CHECKING:
    from stretto.hf import accelerate, restore

__all__ = ["Config", "__version__", "accelerate", "load_config", "restore"]


def __getattr__(name: str) -> Any:
    """What works on Hugging Face models comes with torch and transformers, when it is asked for."""
    if name in ("accelerate", "restore"):
        import stretto.hf

        return getattr(stretto.hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
