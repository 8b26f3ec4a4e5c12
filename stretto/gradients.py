"""Where gradients live between backward pass and update, and how processes come to their sum. One object owns both:

    Gradients  as autograd makes them, in one process
    Averaged   DistributedDataParallel averages them while the backward pass runs
    Sharded    FSDP2 leaves each process its part of the average
    Static     they stay in place from step to step, and one message sums them when the backward passes are done: so
               the passes can be recorded as CUDA graphs, and several of them can be added up inside of graphs
    Present    only some parameters have one in a step, the same in all processes; those are gathered and summed

An update wants the sum over processes: the loss is multiplied by `copies`, by which an average divides.

The sum brings what is not finite in one process to all of them. What goes wrong after it, in one process, is found in
the norm: where processes have all gradients, they agree on the largest of their norms. That takes one number. Where
each has a part of them, the norm is made of all parts, and is one number everywhere without that.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

ALIGN = 16  # elements: each gradient begins at a multiple, so that vector loads apply


class Gradients:
    copies = 1  # what the average over processes divides the sum by
    stay = False  # gradients are in the same memory in every step

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # what a training step calls

    def sync(self, last: bool) -> AbstractContextManager[object]:
        """Around a backward pass. Gradients travel between processes once a step, with its last micro-batch."""
        return nullcontext()

    def attach(self) -> None:
        """Before each backward pass, and before an update: somebody may have set gradients to None meanwhile."""

    def settle(self) -> None:
        """After each backward pass."""

    def finish(self) -> None:
        """After the last backward pass of a step: from here on every process has the sum."""

    def agree(self, norm: Tensor) -> Tensor:
        """The norm of all gradients by which every process decides, from that which this one has found."""
        return norm

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def release(self) -> None:
        """Gives back memory that is kept from step to step."""

    def has_strays(self) -> bool:
        """Whether there are gradients that have no place, where others have one."""
        return False


class Averaged(Gradients):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True))
        self.copies = dist.get_world_size()

    def sync(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, DistributedDataParallel)
        return nullcontext() if last else self.model.no_sync()

    def agree(self, norm: Tensor) -> Tensor:
        return take_largest(norm)


class Sharded(Gradients):
    def __init__(self, model: nn.Module, gaps: bool = False) -> None:
        super().__init__(model)
        self.copies = dist.get_world_size()
        places = {place for p in model.parameters() if isinstance(p, DTensor) for place in p.placements}
        self.repeats = any(not place.is_shard() for place in places)  # several processes have the same part
        if gaps:  # torch can leave a block out of a pass that is added up only if the block has been gathered before
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    module.reshard()

    def sync(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def agree(self, norm: Tensor) -> Tensor:
        return take_largest(norm) if self.repeats else norm


class Static(Gradients):
    """Parts of one flat tensor for each dtype, which backward passes add into."""

    stay = True

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter] | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """`parameters`: of those that are trained, these only. `group`: the processes to sum over; None: all."""
        super().__init__(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
        self.group = group
        self.flats: list[Tensor] = []
        self.places: list[tuple[nn.Parameter, Tensor]] = []
        self.unplaced: list[nn.Parameter] = []

    def attach(self) -> None:
        for p, place in self.places:
            p.grad = place

    def settle(self) -> None:
        """What the very first backward pass has made moves into place. Parameters without a gradient then never get a
        place: what later passes give them goes with the update. Other processes would not hear of it."""
        if not self.flats:
            self.gather()
        elif self.has_strays() and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            names = {id(p): name for name, p in self.model.named_parameters()}
            first = next(names[id(p)] for p in self.unplaced if p.grad is not None)
            raise ValueError(
                f"{first} has a gradient now, and had none in the first batch, so that processes do not add it up:"
                " begin with a batch that uses all that is trained, or freeze it"
            )

    def has_strays(self) -> bool:
        return any(p.grad is not None for p in self.unplaced)

    def gather(self) -> None:
        grads: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        self.unplaced = [p for p in self.parameters if p.grad is None]
        for p in self.parameters:
            if p.grad is not None:
                grads[p.grad.dtype].append((p, p.grad))
        for members in grads.values():
            sizes = [-(-grad.numel() // ALIGN) * ALIGN for _, grad in members]
            flat = members[0][1].new_zeros(sum(sizes))
            for (p, grad), end, size in zip(members, accumulate(sizes), sizes, strict=True):
                place = flat[end - size :][: grad.numel()].view(grad.shape)
                p.grad = place.copy_(grad)
                self.places.append((p, place))
            self.flats.append(flat)

    def finish(self) -> None:
        self.sum()
        if dist.is_initialized():
            self.share_doubts()

    def sum(self) -> None:
        if dist.is_initialized():
            for flat in self.flats:
                dist.all_reduce(flat, group=self.group)

    def share_doubts(self) -> None:
        """The norm is found in a graph, where no message can be sent. So if a gradient of any process is not finite
        now, one number of every process becomes NaN before. It takes a pass over them, which is short where graphs are
        worth it. Else minus zero is added, which changes no bit."""
        most = torch.stack([torch.linalg.vector_norm(flat, torch.inf, dtype=torch.float32) for flat in self.flats])
        doubt = -(most - most).sum()
        dist.all_reduce(doubt, group=self.group)
        self.flats[0][:1] += doubt

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        for flat in self.flats:
            flat.zero_()
        for p in self.unplaced if self.flats else self.parameters:
            p.grad = None

    def release(self) -> None:
        for p in self.parameters:
            p.grad = None
        self.flats, self.places = [], []


class Present(Static):
    """Gradients stay where autograd has made them until the step is over."""

    def settle(self) -> None:
        """Nothing moves: the next step may use other parameters."""

    def finish(self) -> None:
        self.gather()
        self.sum()

    def agree(self, norm: Tensor) -> Tensor:
        return take_largest(norm, self.group)

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        self.release()


def take_largest(norm: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The largest norm that a process of the group has; infinite if one is not finite."""
    if dist.get_world_size(group) == 1:
        return norm
    largest = norm.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def choose_gradients(model: nn.Module, sharded: bool, gaps: bool, num_passes: int = 0) -> Gradients:
    """`gaps`: steps leave parameters without a gradient. `num_passes`: backward passes of an update, over all
    processes, that may be recorded; 0: none is."""
    if sharded:
        return Sharded(model, gaps)
    if num_passes > 1:
        return Static(model)
    if num_passes == 1 or not dist.is_initialized():
        return Gradients(model)
    return Present(model) if gaps and dist.get_world_size() > 1 else Averaged(model)
