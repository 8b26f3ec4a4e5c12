"""The command `stretto`, which also says how many wrapped models there still are when the group of processes goes."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stretto.cli import main

destroy = dist.destroy_process_group


def count_and_destroy() -> None:
    alive = sum(isinstance(each, DistributedDataParallel) for each in gc.get_objects())
    print(f"models that hold the group: {alive}", flush=True)
    destroy()


if __name__ == "__main__":
    dist.destroy_process_group = count_and_destroy  # type: ignore[assignment]
    main()
