"""Several processes training one model, on torch.distributed alone."""

from __future__ import annotations

from stretto.parallel.data import gradient_sync, replicate, shard
from stretto.parallel.sequence import Splitter, build_mesh, check_processes, choose

__all__ = ["Splitter", "build_mesh", "check_processes", "choose", "gradient_sync", "replicate", "shard"]
