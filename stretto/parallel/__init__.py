"""Several processes training one model, on torch.distributed alone."""

from __future__ import annotations

from stretto.parallel.data import gradient_sync, replicate, shard

__all__ = ["gradient_sync", "replicate", "shard"]
