"""Stretto trains Transformers faster on the GPUs you have."""

__version__ = "0.1.0"
