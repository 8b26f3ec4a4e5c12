"""How a function of ours becomes an operation of torch's, and a short way to it.

`torch.library.custom_op` lets others see it: a compiler has one node, fake tensors have its shapes, `opcheck` tests it.
But a call by that way goes through torch's dispatcher and back to Python several times, which takes the host longer
than the GPU takes for many of our kernels. So where nobody looks on, an `Op` calls the function for the device itself,
inside an autograd.Function of the same formulas where a gradient is wanted.

What torch.compile keeps on disk has the formulas of our gradients inside, but its key has only the names of our ops:
after an upgrade, a compiled model would go on with the old ones. So the text of this package is made part of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Body = Callable[..., Any]


def hash_sources(folder: Path) -> str:
    """Of all Python files in it."""
    texts = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


torch.compiler.config.cache_key_tag += f"stretto {hash_sources(Path(__file__).parent)}"


def define(name: str, device: str | None = None, tags: Sequence[torch.Tag] = ()) -> Callable[[Body], Op]:
    """Makes a function an op: on this device, or on all."""
    return lambda body: Op(name, body, device, tags)


class Op:
    """The methods are those of what torch.library.custom_op returns."""

    def __init__(self, name: str, body: Body, device: str | None, tags: Sequence[torch.Tag]) -> None:
        full = f"stretto::{name}"
        self.definition = torch.library.custom_op(full, body, mutates_args=(), device_types=device, tags=tags)
        self.overload: Any = getattr(torch.ops.stretto, name).default  # what the others see
        self.bodies = {device: body}
        self.function: Any = None

    def register_kernel(self, device: str) -> Callable[[Body], Body]:
        def register(body: Body) -> Body:
            self.bodies[device] = body
            self.definition.register_kernel(device)(body)
            return body

        return register

    def register_fake(self, shapes: Body) -> Body:
        self.definition.register_fake(shapes)
        return shapes

    def register_autograd(self, backward: Body, *, setup_context: Callable[..., None]) -> None:
        self.definition.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *args: Any) -> Any:
            output = self.find_body(args)(*args)
            setup_context(ctx, args, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.function = type(self.overload.name(), (torch.autograd.Function,), methods)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*args)
        body = None if is_watched() else self.find_body(args)
        if body is None:
            return self.overload(*args)
        if self.function is None or not torch.is_grad_enabled():
            return body(*args)
        if any(isinstance(arg, list) for arg in args):  # whose gradients an autograd.Function would not see
            return self.overload(*args)
        return self.function.apply(*args)

    def find_body(self, args: Sequence[Any]) -> Any:
        """The function for these tensors; None if torch has to look for one."""
        for arg in args:
            first = arg[0] if isinstance(arg, list) and arg else arg
            if isinstance(first, Tensor):
                return self.bodies.get(first.device.type) or self.bodies.get(None)
        return None


def is_watched() -> bool:
    """Whether operations are traced, counted or transformed: by a mode, or by torch.func."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None
