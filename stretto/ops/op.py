"""Operations of torch made of functions of this package, and a short way to call them.

`torch.library.custom_op` shows an operation to torch: a compiler has one node, fake tensors have its shapes, `opcheck`
tests it. But a call of a custom op goes through torch's dispatcher and back to Python several times, which takes the
host longer than the GPU takes for many of these kernels. So where nothing traces or transforms the call, an `Op` calls
the function for the device itself, inside an autograd.Function of the same formulas where a gradient is wanted.

torch.compile keeps compiled code on disk. That code contains the formulas of the gradients, but its key contains only
the names of the ops: after an upgrade, a compiled model would go on with the old formulas. So a hash of the text of
this package is part of the key.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stretto.ops.language import INTERPRET

Body = Callable[..., Any]
# Every operation of every layer asks, and each dot takes the host a while.
is_compiling = torch.compiler.is_compiling
_count_modes, _find_transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def hash_sources(folder: Path) -> str:
    """A hash of all Python files in the folder."""
    texts = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


torch.compiler.config.cache_key_tag += f"stretto {hash_sources(Path(__file__).parent)}"


class Op:
    """An operation of torch, and the functions that do its work, by type of device.

    With a `kernel`, the body is the op on a CPU (in Triton's interpreter the kernel runs there too) and the kernel the
    op on a GPU; without one, the body is the op on every device.

    The arguments of the op are the parameters of `body`; if the first one is a NamedTuple, the fields of that tuple
    stand in its place, and the kernel takes such a tuple too. `fake` makes empty results: its parameters without
    default are the arguments that shapes and dtypes depend on, found by their names. `flops`, for an op with products,
    counts their FLOPs as torch counts its own, for FlopCounterMode; its arguments are found likewise."""

    def __init__(
        self,
        name: str,
        body: Body,
        kernel: Body | None = None,
        *,
        fake: Body,
        flops: Callable[..., int] | None = None,
        tags: Sequence[torch.Tag] = (),
    ) -> None:
        schema, names, arguments = infer_schema(body)
        bodies = {"cpu": kernel if kernel and INTERPRET else body, "cuda": kernel or body}
        self.bodies = bodies if arguments is None else {k: pack_arguments(f, arguments) for k, f in bodies.items()}
        self.functions: dict[str, Any] = {}  # the bodies as autograd.Functions, if the op has gradients
        self.has_lists = "Tensor[]" in schema
        options: dict[str, Any] = {"mutates_args": (), "device_types": "cpu" if kernel else None, "schema": schema}
        self.definition = torch.library.custom_op(f"stretto::{name}", self.bodies["cpu"], tags=tags, **options)
        if kernel:
            self.definition.register_kernel("cuda")(self.bodies["cuda"])
        packet: Any = getattr(torch.ops.stretto, name)
        self.overload = packet.default  # the op as torch sees it
        self.definition.register_fake(pick_arguments(fake, names))
        if flops:
            counted = pick_arguments(flops, names)
            register_flop_formula(packet, get_raw=True)(lambda *args, out_val: counted(*args))

    def gradient(self, save: Callable[..., None]) -> Callable[[Body], Body]:
        """Decorates the function that computes the gradients, from what `save` kept after the forward pass."""

        def make_function(body: Body, backward: Body) -> Any:
            def forward(ctx: Any, *args: Any) -> Any:
                output = body(*args)
                save(ctx, args, output)
                return output

            methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
            return type(self.overload.name(), (torch.autograd.Function,), methods)

        def register(backward: Body) -> Body:
            self.definition.register_autograd(backward, setup_context=save)
            self.functions = {device: make_function(body, backward) for device, body in self.bodies.items()}
            return backward

        return register

    def __call__(self, *args: Any) -> Any:
        if is_compiling() or is_watched():
            return self.overload(*args)
        first = args[0]
        device = first.device.type if isinstance(first, Tensor) else find_device(args)
        if device not in self.bodies:
            return self.overload(*args)
        if not self.functions or not torch.is_grad_enabled():
            return self.bodies[device](*args)
        if self.has_lists:  # an autograd.Function does not see the tensors of a list
            return self.overload(*args)
        return self.functions[device].apply(*args)


def infer_schema(body: Body) -> tuple[str, list[str], Any]:
    """The schema of an op with this body, the names of its arguments, and the NamedTuple that it takes, or None."""

    def prototype() -> None: ...

    types, kind = get_type_hints(body), inspect.Parameter.POSITIONAL_OR_KEYWORD
    result, name, first = types.pop("return"), *next(iter(types.items()))
    arguments = first if hasattr(first, "_fields") else None
    if arguments is not None:
        types = get_type_hints(types.pop(name)) | types
    parameters = [inspect.Parameter(name, kind, annotation=type) for name, type in types.items()]
    signature = inspect.Signature(parameters, return_annotation=result)
    prototype.__signature__ = signature  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=()), list(types), arguments


def pack_arguments(function: Body, arguments: Any) -> Body:
    """The function of a NamedTuple and more as a function of the fields of the tuple and more."""
    new, count = tuple.__new__, len(arguments._fields)  # `new` takes a third of the time of `_make`, which counts
    return lambda *args: function(new(arguments, args[:count]), *args[count:])


def pick_arguments(function: Body, names: Sequence[str]) -> Body:
    """The function of those arguments that its parameters without default name, as a function of all of them."""
    parameters = inspect.signature(function).parameters.values()
    places = [names.index(parameter.name) for parameter in parameters if parameter.default is parameter.empty]
    return lambda *args: function(*(args[i] for i in places))


def fill_in(gradients: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the arguments, of which an op returned those that are needed; None in place of the others."""
    given = iter(gradients)
    return [next(given) if need else None for need in needed]


def find_device(args: Sequence[Any]) -> str:
    """The type of device of the first tensor."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device.type
        if isinstance(arg, list) and arg and isinstance(arg[0], Tensor):
            return arg[0].device.type
    return ""


def is_watched() -> bool:
    """Whether operations are traced, counted or transformed: by a mode, or by torch.func."""
    return _count_modes() > 0 or _find_transform() is not None
