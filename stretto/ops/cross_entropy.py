"""Label-smoothed cross entropy, fused with the output layer that makes its logits.

Per row, with logits z [V], label t and smoothing s:

    top = max z,   log_total = log sum exp(z - top)
    loss = log_total - (1 - s) (z_t - top) - s mean(z - top),     0 where the label is `ignore`
    dz_k = softmax(z)_k - s / V - (1 - s) [k = t]

This is torch's convention: mass s is spread over all V classes. The maximum is subtracted before anything is summed, so
logits of 1e4 cost no precision. The maths is fp32 (fp64 for fp64 logits); losses are fp32, gradients have the dtype of
the logits.

`linear_cross_entropy` takes x [T, C] and a weight [V, C], and never holds the logits [T, V]. It walks over the tokens
in chunks:

    logits = x @ weight.T + bias             into a buffer that all chunks share
    losses; dlogits over the logits          one kernel; row by row, once to sum, once to write
    dx = dlogits @ weight,   dweight += dlogits.T @ x,   dbias += sum of dlogits

The gradients are computed here, for a loss gradient of 1, because the logits would otherwise be multiplied out again
in the backward pass, which only scales them. Gradients that are not needed are skipped; without autograd only losses
are computed. The products run in the dtype of x; dweight and dbias are summed in fp32, and rounded to the parameter's
dtype once, by the scaling. Saved: dx [T, C], and in fp32 dweight [V, C] and dbias [V].

Bytes of the kernel for bf16: a row is read (2 V), read again and written (2 V). The second reading should find the row
in the L2 cache: it goes backwards, beginning with what was read last, and a long row gets a program of 32 warps, of
which at most two fit a multiprocessor: at V = 50304 the rows in flight on 132 multiprocessors are 26 MB.

Large chunks keep the products efficient (dweight's inner dimension is the chunk) and touch the fp32 sum of dweight less
often: it is read and written once per chunk. On an H200 that takes 219 / rows of the time of the three products: 3%
with CHUNK_ROWS, by the rates of its memory and its products. The buffer of logits is often what decides the peak of a
step: a caller that needs the memory gives fewer rows as `chunk`, 2 V bytes each in bf16, and pays by that formula. The
chunks change nothing but the order in which loss, dweight and dbias are summed, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.ops.language import cdiv, jit, next_power_of_2, product_dtype, runs_kernels, tl, wide, wide_dtype
from stretto.ops.op import Op
from stretto.ops.products import Product, add_dweight, compute_dx, count_flops, multiply_into

LOG2_E = tl.constexpr(1.4426950408889634) if tl else None
CHUNK_ROWS, CHUNK_BYTES = 8192, 2**31  # the most rows of logits in a chunk, and their most bytes


def rows_ref(logits: Tensor, labels: Tensor, smoothing: float, ignore: int, gradient: bool) -> Tensor:
    """Returns the losses [T]. With `gradient` the logits become their gradient."""
    z = wide(logits)
    z = z - z.amax(1, keepdim=True)
    log_total = z.exp().sum(1, keepdim=True).log()
    kept = (labels != ignore)[:, None]
    index = labels[:, None].where(kept, 0)
    losses = log_total - (1 - smoothing) * z.gather(1, index) - smoothing * z.mean(1, keepdim=True)
    if gradient:
        dz = (z - log_total).exp() - smoothing / z.shape[1]
        logits.copy_(dz.scatter_add(1, index, torch.full_like(log_total, smoothing - 1)).where(kept, 0))
    return losses.where(kept, 0)[:, 0]


@jit
def _online(z, top, total):
    """Updates maximum and sum of exponentials of each lane by one more row of z [lanes, 8]. Lanes are combined only
    after the last block: the loop has no barrier in it, and rescales once for eight columns."""
    higher = tl.maximum(top, tl.max(z, 1))
    e = tl.exp2((z - higher[:, None]) * LOG2_E)
    return higher, total * tl.exp2((top - higher) * LOG2_E) + tl.sum(e, 1)


@jit
def gradient_of(z, col, cols, label, top, log_total, smoothing, SMOOTH: tl.constexpr):
    dz = tl.exp2((z - top) * LOG2_E - log_total * LOG2_E)  # softmax
    if SMOOTH:
        dz -= smoothing / cols
    return tl.where(col == label.to(tl.int32), dz - (1 - smoothing), dz)


@jit
def _cross_entropy_kernel(
    z_ptr, label_ptr, loss_ptr,
    shape_ptr,  # [rows, 2], or None: the top and log_total of each row
    cols, z_stride, smoothing, ignore,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = 8 * LANES
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    label = tl.load(label_ptr + row)
    lane = 8 * tl.arange(0, LANES)[:, None] + tl.arange(0, 8)[None, :]
    if label == ignore:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, cols, BLOCK):
                zero = tl.zeros([LANES, 8], z_ptr.dtype.element_ty)
                tl.store(z_ptr + start + lane, zero, mask=start + lane < cols)
        return

    exists = (label >= 0) & (label < cols)
    target = tl.load(z_ptr + label, mask=exists, other=0.0).to(tl.float32)
    # Full blocks need no mask: loads of 16 bytes even where the number of columns is odd. The rest is one block more.
    full = cols // BLOCK * BLOCK
    in_rest = full + lane < cols
    first = tl.load(z_ptr).to(tl.float32)
    top = tl.full([LANES], -1e38, tl.float32)  # finite: a lane that sees no column, or -inf, stays free of NaN
    total = tl.zeros([LANES], tl.float32)
    sum_from_first = tl.zeros([LANES], tl.float32)  # of z - z[0], for the mean: exact where logits share an offset
    for start in tl.range(0, full, BLOCK, num_stages=3):  # two blocks ahead, as few programs hide the latency
        z = tl.load(z_ptr + start + lane).to(tl.float32)
        top, total = _online(z, top, total)
        if SMOOTH:
            sum_from_first += tl.sum(z - first, 1)
    if full < cols:
        z = tl.load(z_ptr + full + lane, mask=in_rest, other=float("-inf")).to(tl.float32)
        top, total = _online(z, top, total)
        if SMOOTH:
            sum_from_first += tl.sum(tl.where(in_rest, z - first, 0.0), 1)
    row_top = tl.max(top, 0)
    log_total = tl.log(tl.sum(total * tl.exp2((top - row_top) * LOG2_E), 0))
    # A label that does not exist makes loss and gradient NaN: the gradient norm shows it.
    log_total = tl.where(exists, log_total, float("nan"))

    if shape_ptr is not None:
        tl.store(shape_ptr + 2 * row, row_top)
        tl.store(shape_ptr + 2 * row + 1, log_total)
    loss = log_total - (1 - smoothing) * (target - row_top)
    if SMOOTH:
        loss -= smoothing * (tl.sum(sum_from_first, 0) / cols - (row_top - first))
    tl.store(loss_ptr + row, loss)

    if GRADIENT:
        if full < cols:
            z = tl.load(z_ptr + full + lane, mask=in_rest, other=0.0).to(tl.float32)
            dz = gradient_of(z, full + lane, cols, label, row_top, log_total, smoothing, SMOOTH)
            tl.store(z_ptr + full + lane, dz.to(z_ptr.dtype.element_ty), mask=in_rest)
        for start in range(0, full, BLOCK):
            col = full - BLOCK - start + lane
            z = tl.load(z_ptr + col).to(tl.float32)
            dz = gradient_of(z, col, cols, label, row_top, log_total, smoothing, SMOOTH)
            tl.store(z_ptr + col, dz.to(z_ptr.dtype.element_ty))


def launch_rows(
    logits: Tensor, labels: Tensor, smoothing: float, ignore: int, gradient: bool, shape: Tensor | None = None
) -> Tensor:
    """Computes rows_ref by one program per row. The logits have a column stride of 1. `shape` [T, 2] gets the maximum
    of each row and the logarithm of its sum, but for rows that are ignored."""
    rows, cols = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    # A lane has 8 columns, 16 bytes of bf16. A short row is one block; a long row gets 32 warps, so that no more than
    # two programs share a multiprocessor, one summing while the other writes, and few rows are in flight.
    warps = 32 if cols > 2**15 else min(max(next_power_of_2(cols) // 256, 1), 16)
    if rows:
        _cross_entropy_kernel[(rows,)](
            logits, labels.contiguous(), losses, shape, cols, logits.stride(0), smoothing, ignore,
            SMOOTH=smoothing != 0.0, GRADIENT=gradient, LANES=32 * warps, num_warps=warps,
        )  # fmt: skip
    return losses


def check_labels(labels: Tensor, classes: int, ignore: int) -> None:
    if not labels.is_cuda:  # where a check costs no synchronisation
        wrong = labels[(labels != ignore) & ((labels < 0) | (labels >= classes))]
        if len(wrong):
            raise ValueError(f"label {int(wrong[0])} is not one of {classes} classes, and {ignore} is what is ignored")


def _run_rows(logits: Tensor, labels: Tensor, smoothing: float, ignore: int, gradient: bool) -> Tensor:
    check_labels(labels, logits.shape[1], ignore)
    return (launch_rows if _has_kernel(logits) else rows_ref)(logits, labels, smoothing, ignore, gradient)


def _has_kernel(logits: Tensor) -> bool:
    return runs_kernels(logits) and logits.dtype != torch.float64


def chunk_rows(tokens: int, row_bytes: int, chunk: int = 0) -> int:
    """Returns the rows of logits in a chunk: a multiple of 128, about the same in each chunk, and at most `chunk`, or
    within both limits if that is 0; at least 128."""
    most = max((chunk or min(CHUNK_BYTES // row_bytes, CHUNK_ROWS)) // 128 * 128, 128)
    chunks = max(cdiv(tokens, most), 1)
    return max(cdiv(cdiv(tokens, chunks), 128), 1) * 128


def new_results(x: Tensor, weight: Tensor, needed: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The memory of loss and dbias, which are zero, and of dx and dweight; gradients that are not needed are empty."""
    need_x, need_weight, need_bias = needed
    dtype = wide_dtype(x.dtype)
    dx, dweight = x.new_empty(x.shape if need_x else 0), x.new_empty(weight.shape if need_weight else 0, dtype=dtype)
    return x.new_zeros((), dtype=dtype), dx, dweight, x.new_zeros(weight.shape[0] if need_bias else 0, dtype=dtype)


def run_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, ignore: int,
    chunk: int, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns loss, dx, dweight and dbias for a loss gradient of 1. All products go into memory that is there already,
    which also keeps autocast from rounding them. `needed`: the gradients of x, weight and bias."""
    (tokens, _), classes, (need_x, need_weight, need_bias) = x.shape, weight.shape[0], needed
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    loss, dx, dweight, dbias = new_results(x, weight, needed)
    stride = cdiv(classes, 64) * 64  # aligned rows: for the kernel's loads, and for products with an odd vocabulary
    rows = chunk_rows(tokens, stride * x.element_size(), chunk)
    buffer = x.new_empty(min(rows, tokens), stride)
    if not x.is_cuda:  # a CPU's matrix unit (oneDNN on AMX) reads what lies between rows, and 0 times NaN is NaN
        buffer[:, classes:] = 0
    buffer = buffer[:, :classes]
    for start in range(0, max(tokens, 1), rows):  # no tokens at all: one empty chunk, which makes dweight zero
        part = slice(start, start + rows)
        logits = buffer[: tokens - start]
        multiply_into(logits, x[part], weight, bias)
        loss += _run_rows(logits, labels[part], smoothing, ignore, any(needed)).sum()
        dlogits = logits
        if need_x:
            compute_dx(dlogits, weight, out=dx[part])
        if need_weight:
            add_dweight(dweight, dlogits, x[part], beta=1.0 if start else 0.0)
        if need_bias:
            dbias += dlogits.sum(0, dtype=dbias.dtype)
    return loss, dx, dweight, dbias


def _count(x: Tensor, weight: Tensor, needed: list[bool]) -> int:
    """Forward and backward, which are one."""
    need_x, need_weight, _ = needed
    return (1 + need_x + need_weight) * count_flops(len(x), weight)


_linear_cross_entropy = Op("linear_cross_entropy", run_chunks, fake=new_results, flops=_count)


@jit
def _scale_kernel(x_ptr, by_ptr, y_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, (x * tl.load(by_ptr)).to(y_ptr.dtype.element_ty), mask=i < size)


def _scale(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns gradient * by, rounded to dtype once, in one pass; torch's own kernel for two dtypes does not vectorise.
    A scalar tensor would be rounded to the gradient's dtype before the product; with a vector of one element the
    product is as precise as that vector."""
    scaled, size = torch.empty_like(gradient, dtype=dtype), gradient.numel()
    if not _has_kernel(gradient):
        return torch.mul(gradient, by.view(1), out=scaled)
    if size:
        _scale_kernel[(cdiv(size, 4096),)](gradient, by, scaled, size, BLOCK=4096, num_warps=8)
    return scaled


_scale_gradient = Op("scale_gradient", _scale, fake=lambda gradient, dtype: torch.empty_like(gradient, dtype=dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, *_, needed = inputs
    ctx.dtypes = [t.dtype if need else None for t, need in zip((x, weight, bias), needed, strict=True)]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else the gradients of the gradients would be made, as zeros of their size


@_linear_cross_entropy.gradient(_save)
def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    scaled = (
        None if dtype is None or dloss is None else _scale_gradient(gradient, dloss, dtype)
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )
    return (*scaled, *[None] * 5)


class _LinearCrossEntropyBy(torch.autograd.Function):
    """The same by a product of its own, which makes new logits for each chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, ignore: int,
        chunk: int, needed: list[bool], product: Product,
    ) -> Tensor:  # fmt: skip
        need_x, need_weight, need_bias = needed
        loss, dx, dweight, dbias = new_results(x, weight, needed)
        dweight.zero_()
        rows = chunk_rows(x.shape[0], weight.shape[0] * x.element_size(), chunk)
        for start in range(0, x.shape[0], rows):
            part = slice(start, start + rows)
            logits, kept = product.multiply(x[part], weight, bias)
            made = None
            if any(needed) and not need_bias:
                check_labels(labels[part], weight.shape[0], ignore)
                made = product.take_loss(logits, labels[part], smoothing, ignore)
            if made is None:
                losses = _run_rows(logits, labels[part], smoothing, ignore, any(needed))
                made = losses, product.take(logits) if need_x or need_weight else ()
            losses, taken = made
            loss += losses.sum()
            if need_x:
                dx[part] = product.compute_dx(taken, weight)
            if need_weight:
                dweight += product.compute_dweight(taken, kept)
            if need_bias:
                dbias += logits.sum(0, dtype=dbias.dtype)
        _save(ctx, (x, weight, bias, needed), (loss, dx, dweight, dbias))
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, dloss), None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float = 0.0, ignore: int = -100,
    *, chunk: int = 0, product: Product | None = None,
) -> Tensor:  # fmt: skip
    """The summed cross entropy of the logits x @ weight.T + bias against labels [T], a scalar of at least fp32, for
    x [T, C], weight [V, C] and bias [V], without the logits [T, V]. The product is taken in the dtype of x (under
    autocast, in its dtype); weight and bias keep theirs. `chunk`: the most rows of logits that exist at a time, a
    multiple of 128 or rounded down to one, and at least 128; 0 takes CHUNK_ROWS, within CHUNK_BYTES. `product` says
    how to multiply, if not in that dtype."""
    matrices = x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1]
    if not matrices or labels.shape != x.shape[:1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            "linear_cross_entropy takes x [T, C], weight [V, C], bias [V] or None and labels [T], not "
            + ", ".join("None" if t is None else str(list(t.shape)) for t in (x, weight, bias, labels))
        )
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"label smoothing is in [0, 1), not {smoothing}")
    if chunk < 0:
        raise ValueError(f"a chunk has 0 (chosen here) or more rows, not {chunk}")
    if weight.shape[0] < 1:
        raise ValueError("cross entropy needs at least one class")
    x = x.to(product_dtype(x))
    recorded = torch.is_grad_enabled()
    needed = [t is not None and recorded and t.requires_grad for t in (x, weight, bias)]
    parts = (x, weight, bias, labels, smoothing, ignore, chunk, needed)
    return _linear_cross_entropy(*parts)[0] if product is None else _LinearCrossEntropyBy.apply(*parts, product)
