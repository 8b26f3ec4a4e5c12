"""The matrix products of linear layers: the one place in ops/ where a matrix is multiplied by a weight.

A linear layer has three products, one forward and two backward, of 2 T O C FLOPs each:

    forward   y       = x weight^T + bias       multiply, multiply_into
    dx        dx      = dout weight             compute_dx, add_dx
    dweight   dweight = dout^T x                compute_dweight, add_dweight
                                                compute_gradients: dx and dweight side by side
                                                compute_some_gradients: those whose factor is given
    weights   one matrix of several weights     join_rows, and split_rows for its gradient
    8 bits    the same, of scaled factors       multiply_scaled
    all       the products of one layer         Product, for a layer that multiplies in a way of its own: find_product

Shapes: x and dx [T, C], weight and dweight [O, C], bias [O], y and dout [T, O]. Everything else between two products
is element by element, and is done by the kernels of the other files.

Precision: both factors have one dtype (language.product_dtype: that of an enclosing autocast, or that of x). Products
of 16-bit numbers are exact in fp32 and are added up in fp32; the sum, with the bias, is rounded once to the dtype of
the factors. fp32 and fp64 factors are multiplied and added up in their own dtype. Only add_dweight has a wider result:
it adds to an fp32 sum of several products, which is rounded later, once.

Side by side: dx and dweight do not need each other. With few tokens neither fills a GPU (512 tokens and a width of 1024
make 32 tiles of 128 x 128, for 132 processors), so in a CUDA graph the two become two branches: dweight is recorded on
a stream of its own, which begins after all earlier work and which all later work waits for. Products of many tokens run
one after the other, and so do those that the host launches: few tokens wait for the host, which a second stream costs
more calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.activation import Activation, run_activate, run_activate_backward

FEW = 2048  # tokens, up to which dx and dweight run side by side
Kept = tuple[Tensor, ...]  # a factor as later products read it


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x weight^T + bias. The bias may have any dtype."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def multiply_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Writes x weight^T + bias, the bias in the dtype of x, to `out`, which may be a part of a wider matrix."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def compute_dx(dout: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the gradient of the layer's input, dout weight, which is written to `out` if that is given."""
    return torch.mm(dout, weight, out=out)


def add_dx(dx: Tensor, dout: Tensor, weight: Tensor) -> None:
    """Adds dout weight to `dx`, for an input that several weights have in common."""
    dx.addmm_(dout, weight)


def compute_dweight(dout: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of the weight, dout^T x."""
    return torch.mm(dout.t(), x)


def add_dweight(total: Tensor, dout: Tensor, x: Tensor, beta: float) -> None:
    """Makes `total` beta * total + dout^T x, where the total may be wider than the factors. cuBLAS reads 16-bit factors
    and adds to an fp32 matrix; a CPU has no such routine."""
    if dout.dtype == total.dtype:
        total.addmm_(dout.t(), x, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, dout.t(), x, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(dout.t().to(total.dtype), x.to(total.dtype), beta=beta)


def count_flops(rows: int, *weights: Tensor) -> int:
    """Returns the FLOPs of one product of so many rows with each weight, forward or backward."""
    return 2 * rows * sum(weight.numel() for weight in weights)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def compute_gradients(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns dx and dweight of one layer, recorded side by side where there are few tokens."""
    # Both are allocated on the current stream: the allocator gives memory of a stream to that stream only.
    dx, dweight = dout.new_empty(x.shape), dout.new_empty(weight.shape)
    if dout.is_cuda and dout.shape[0] <= FEW and torch.cuda.is_current_stream_capturing():
        here, side = torch.cuda.current_stream(dout.device), _side_stream(dout.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.mm(dout.t(), x, out=dweight)
        torch.mm(dout, weight, out=dx)
        here.wait_stream(side)
    else:
        torch.mm(dout.t(), x, out=dweight)
        torch.mm(dout, weight, out=dx)
    return dx, dweight


def compute_some_gradients(dout: Tensor, x: Tensor | None, weight: Tensor | None) -> tuple[Any, Any]:
    """Returns dx, which needs the weight, and dweight, which needs x; None in place of a gradient whose factor is
    None."""
    if x is None or weight is None:
        return None if weight is None else compute_dx(dout, weight), None if x is None else compute_dweight(dout, x)
    return compute_gradients(dout, x, weight)


def multiply_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str, dtype: torch.dtype,
    bias: Tensor | None = None, square: bool = False,
) -> Tensor:  # fmt: skip
    """Returns (scale_a a) (scale_b b)^T + bias in `dtype`, for 8-bit a [M, K] and b [N, K] with scales by a recipe of
    fp8.py; `square`: the blocks of b are squares. Partial sums are promoted to fp32 on a GPU. The definition, on a CPU,
    multiplies what the factors stand for, in fp32, as torch's own operation does there."""
    if not a.is_cuda:
        if recipe == "block128":
            scale_a = _spread(scale_a.t(), 1, a.shape)
            scale_b = _spread(*(scale_b, 128) if square else (scale_b.t(), 1), b.shape)
        out = scale_a.new_empty(len(a), len(b))  # given, it also keeps autocast from rounding the factors
        torch.mm(a.float() * scale_a, (b.float() * scale_b).t(), out=out)
        return (out if bias is None else out + bias.float()).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if recipe != "block128":
        options: dict[str, Any] = {"bias": bias, "out_dtype": dtype, "use_fast_accum": False}
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), **options)
    # cuBLAS reads the scales of squares in rows of a multiple of 4, and those of blocks for a multiple of 4 rows.
    rows, kinds = a.shape[0], (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    if rows % 4:
        a, scale_a = F.pad(a.view(torch.uint8), (0, 0, 0, -rows % 4)).view(a.dtype), F.pad(scale_a, (0, -rows % 4))
    scale_b = F.pad(scale_b, (0, -scale_b.shape[1] % 4)) if square else scale_b
    out = F.scaled_mm(a, b.t(), scale_a.t(), kinds[0], scale_b.t(), kinds[square], bias=bias, output_dtype=dtype)
    return out.narrow(0, 0, rows)


def _spread(scale: Tensor, rows: int, shape: Sequence[int]) -> Tensor:
    """The scales of blocks of `rows` x 128 for each element of a matrix of this shape."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


class Product:
    """How one layer multiplies. A layer that is given such an object asks it for all of its products, and keeps for
    the backward pass what the object says. This one multiplies as the functions above do; others override all of it."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Kept]:
        """Returns x weight^T + bias, and what dweight needs of x."""
        return multiply(x, weight.to(x.dtype), bias), self.keep(x)

    def multiply_activated(
        self, pre: Tensor, activation: Activation, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        """Returns the same for x = act(pre). A product of its own need not make x as it is."""
        return self.multiply(run_activate(pre, activation), weight, bias)

    def keep(self, x: Tensor) -> Kept:
        """Returns what dweight needs of x, as `multiply` does."""
        return (x,)

    def take(self, dout: Tensor) -> Kept:
        """Returns what dx and dweight need of the gradient of the layer's output."""
        return (dout,)

    def take_loss(self, logits: Tensor, labels: Tensor, smoothing: float, ignore: int) -> tuple[Tensor, Kept] | None:
        """Returns the losses of rows (cross_entropy.py), and the same of the gradient of their sum, for an output that
        is logits. None: the caller has to compute them."""
        return None

    def take_merged(
        self, parts: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None, sums: torch.dtype | None
    ) -> tuple[Kept, Tensor] | None:
        """Returns the same for an output that was split into heads, given the gradients of its parts, and the sums for
        its bias: arguments and sums are those of heads.py. None: the caller has to merge them."""
        return None

    def take_activated(
        self, dh: Tensor, kept: Tensor, activation: Activation, after: Product | None, want_dbias: bool
    ) -> tuple[Kept, Kept, Tensor]:
        """Returns the same for an output that went through an activation, given the gradient of act(output), which is a
        temporary, and the output, `kept`. Also what the product `after` it, if that is given, keeps of act(output); and
        the gradient of the activation's bias, if it is wanted."""
        if activation.kind == "relu":  # its backward pass reads h
            kept = h = run_activate(kept, activation)
            dpre, _, dbias = run_activate_backward(dh, kept, activation, False, want_dbias)
        else:
            dpre, h, dbias = run_activate_backward(dh, kept, activation, after is not None, want_dbias)
        return self.take(dpre), () if after is None else after.keep(h), dbias

    def compute_dx(self, taken: Kept, weight: Tensor) -> Tensor:
        return compute_dx(taken[0], weight.to(taken[0].dtype))

    def compute_dweight(self, taken: Kept, kept: Kept) -> Tensor:
        return compute_dweight(taken[0], kept[0])

    def compute_gradients(
        self, dout: Tensor, kept: Kept | None, weight: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns dx, which needs the weight, and dweight, which needs what was kept of x."""
        return self.compute_taken(self.take(dout), kept, weight)

    def compute_taken(
        self, taken: Kept, kept: Kept | None, weight: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the same for a gradient that was taken."""
        dx = None if weight is None else self.compute_dx(taken, weight)
        return dx, None if kept is None else self.compute_dweight(taken, kept)


def find_product(layer: Any) -> Product | None:
    """How a layer, a module that may have been given a `product`, multiplies while it is trained; None: in the dtype of
    its input, as it always does otherwise."""
    return getattr(layer, "product", None) if layer.training else None


def join_rows(parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Returns the rows of all parameters in one tensor of this dtype, or of that of the first, made by one copy; the
    parameter itself where there is one only, which has the dtype."""
    first = parameters[0]
    dtype = first.dtype if dtype is None else dtype
    if len(parameters) == 1:
        return first.to(dtype)
    # Only with `out` are rows cast while they are copied. A concatenation of cast parameters would need two copies.
    rows = sum([parameter.shape[0] for parameter in parameters])  # `len` of a tensor takes three times as long
    out = first.new_empty(rows, *first.shape[1:], dtype=dtype)
    return torch.cat(tuple(parameters), out=out)


def split_rows(
    gradient: Tensor | None, rows: Sequence[int], dtypes: Sequence[torch.dtype], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients, in their dtypes, of parameters that were joined, None for those that are not needed. They
    are views of the joint gradient where all of it is needed in its own dtype, which keeps no byte too many; otherwise
    they are copies, so that nothing keeps rows alive that nobody needs."""
    if gradient is None:
        return [None] * len(dtypes)
    if len(rows) == 1:  # as in most layers: to cut off nothing takes the host a while, too
        return [gradient.to(dtypes[0]) if needed[0] else None]
    some = zip(gradient.split(list(rows)), dtypes, needed, strict=True)
    return [part.to(dtype, copy=not all(needed)) if need else None for part, dtype, need in some]
