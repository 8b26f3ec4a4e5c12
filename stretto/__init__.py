"""Stretto trains Transformers faster on the GPUs you have.

    from stretto import load_config
    from stretto.train import train

    train(load_config("recipe.toml", ["train.steps=100"]))

Importing this package imports neither torch nor anything else that takes time.
"""

from stretto.config import Config, load_config

__all__ = ["Config", "load_config"]
__version__ = "0.1.0"
