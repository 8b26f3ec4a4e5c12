"""Label-smoothed cross entropy, alone and fused with the output projection that makes its logits.

Per row, with logits z [V], label t and smoothing s:

    top = max z,   log_total = log sum exp(z - top),   lse = top + log_total
    loss = log_total - (1 - s) (z_t - top) - s mean(z - top) + z_loss lse^2,     0 where the label is `ignore`
    dz_k = softmax(z)_k (1 + 2 z_loss lse) - s / V - (1 - s) [k = t]

This is torch's convention: mass s is spread over all V classes. fairseq spreads it over the V - 1 wrong ones, which is
torch's with s V / (V - 1). The maximum is subtracted before anything is summed, so logits of 1e4 cost no precision.
The maths is fp32 (fp64 for fp64 logits); losses are fp32, gradients have the dtype of the logits.

`cross_entropy` takes logits [T, V] and saves them, with (top, log_total) of each row, for the backward pass; no other
[T, V] matrix exists but the gradient. Bytes for bf16: 2 V a row forward, 4 V backward.

`linear_cross_entropy` takes x [T, C] and a weight [V, C], and never holds [T, V]. It walks over the tokens in chunks:

    logits = x @ weight.T + bias             into a buffer that all chunks share
    losses; dlogits over the logits          one kernel; row by row, once to sum, once to write
    dx = dlogits @ weight,   dweight += dlogits.T @ x,   dbias += sum of dlogits

The gradients are computed here, for a loss gradient of 1, because the logits would otherwise be multiplied out again
in the backward pass, which only scales them. What needs no gradient is skipped; without autograd only losses are
computed. The matmuls run in the dtype of x; dweight and dbias are summed in fp32, and rounded to the parameter's dtype
once, by the scaling. Saved: dx [T, C], and in fp32 dweight [V, C] and dbias [V].

Bytes of the kernel for bf16: a row is read (2 V), read again and written (2 V). The second reading should find the row
in the L2 cache: it goes backwards, beginning with what was read last, and a long row gets a program of 32 warps, of
which at most two fit a multiprocessor: at V = 50304 the rows in flight on 132 multiprocessors are 26 MB.

Large chunks keep the matmuls efficient (dweight's inner dimension is the chunk) and touch the fp32 sum of dweight less
often: it is read and written once per chunk. On an H200 that takes 219 / rows of the time of the three matmuls: 3% with
CHUNK_ROWS, by the rates of its memory and its matmuls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.language import INTERPRET, cdiv, jit, next_power_of_2, product_dtype, tl, wide, wide_dtype
from stretto.ops.op import define

LOG2_E = tl.constexpr(1.4426950408889634) if tl else None
CHUNK_ROWS, CHUNK_BYTES = 8192, 2**31  # of logits
CONVENTIONS = ("torch", "fairseq")


def cross_entropy_ref(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    convention: str = "torch",
    ignore: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """Both conventions as they are published."""
    kept, classes = labels != ignore, logits.shape[1]
    z, labels = wide(logits[kept]), labels[kept]
    lse = z.logsumexp(1)
    if convention == "fairseq":
        each = smoothing / max(classes - 1, 1)
        nll, smooth = lse - z.gather(1, labels[:, None])[:, 0], (lse[:, None] - z).sum(1)
        loss = ((1 - smoothing - each) * nll + each * smooth).sum()
    else:
        loss = F.cross_entropy(z, labels, reduction="sum", label_smoothing=smoothing)
    return loss + z_loss * lse.square().sum()


def linear_cross_entropy_ref(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *terms: Any) -> Tensor:
    logits = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return cross_entropy_ref(logits, labels, *terms)


def rows_ref(
    logits: Tensor, labels: Tensor, smoothing: float, ignore: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses [T], and (top, log_total) of each row, [T, 2]. With `gradient` the logits become their gradient."""
    z = wide(logits)
    top = z.amax(1)
    z = z - top[:, None]
    log_total = z.exp().sum(1).log()
    kept = labels != ignore
    target = z.gather(1, labels.where(kept, 0)[:, None])[:, 0]
    losses = log_total - (1 - smoothing) * target - smoothing * z.mean(1) + z_loss * (top + log_total).square()
    stats = torch.stack([top, log_total], 1)
    if gradient:
        logits.copy_(gradient_ref(logits, labels, stats, smoothing, ignore, z_loss))
    return losses.where(kept, 0), stats


def gradient_ref(logits: Tensor, labels: Tensor, stats: Tensor, smoothing: float, ignore: int, z_loss: float) -> Tensor:
    """dz of the formula above, in the dtype of stats."""
    top, log_total = stats[:, :1], stats[:, 1:]
    kept = (labels != ignore)[:, None]
    softmax = (logits.to(stats.dtype) - top - log_total).exp()
    dz = softmax * (1 + 2 * z_loss * (top + log_total)) - smoothing / logits.shape[1]
    index = labels[:, None].where(kept, 0)
    return dz.scatter_add(1, index, torch.full_like(top, smoothing - 1)).where(kept, 0)


@jit
def _online(z, top, total):
    """Maximum and sum of exponentials of each lane, which has seen one more row of z [lanes, 8]. Lanes meet only after
    the last block: the loop has no barrier in it, and rescales once for eight columns."""
    higher = tl.maximum(top, tl.max(z, 1))
    e = tl.exp2((z - higher[:, None]) * LOG2_E)
    return higher, total * tl.exp2((top - higher) * LOG2_E) + tl.sum(e, 1)


@jit
def _gradient(z, col, cols, label, top, log_total, smoothing, z_loss, SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr):
    dz = tl.exp2((z - top) * LOG2_E - log_total * LOG2_E)  # softmax
    if Z_LOSS:
        dz *= 1 + 2 * z_loss * (top + log_total)
    if SMOOTH:
        dz -= smoothing / cols
    return tl.where(col == label.to(tl.int32), dz - (1 - smoothing), dz)


@jit
def _cross_entropy_kernel(
    z_ptr,
    label_ptr,
    loss_ptr,
    stats_ptr,
    cols,
    z_stride,
    smoothing,
    ignore,
    z_loss,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    GRADIENT: tl.constexpr,
    LANES: tl.constexpr,
):
    BLOCK: tl.constexpr = 8 * LANES
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    label = tl.load(label_ptr + row)
    lane = 8 * tl.arange(0, LANES)[:, None] + tl.arange(0, 8)[None, :]
    if label == ignore:
        tl.store(loss_ptr + row, 0.0)
        tl.store(stats_ptr + 2 * row, 0.0)
        tl.store(stats_ptr + 2 * row + 1, 0.0)
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
    # A label that does not exist makes loss and gradient NaN, for whoever watches the gradient norm.
    log_total = tl.where(exists, log_total, float("nan"))

    lse = row_top + log_total
    loss = log_total - (1 - smoothing) * (target - row_top)
    if Z_LOSS:
        loss += z_loss * lse * lse
    if SMOOTH:
        loss -= smoothing * (tl.sum(sum_from_first, 0) / cols - (row_top - first))
    tl.store(loss_ptr + row, loss)
    tl.store(stats_ptr + 2 * row, row_top)
    tl.store(stats_ptr + 2 * row + 1, log_total)

    if GRADIENT:
        if full < cols:
            z = tl.load(z_ptr + full + lane, mask=in_rest, other=0.0).to(tl.float32)
            dz = _gradient(z, full + lane, cols, label, row_top, log_total, smoothing, z_loss, SMOOTH, Z_LOSS)
            tl.store(z_ptr + full + lane, dz.to(z_ptr.dtype.element_ty), mask=in_rest)
        for start in range(0, full, BLOCK):
            col = full - BLOCK - start + lane
            z = tl.load(z_ptr + col).to(tl.float32)
            dz = _gradient(z, col, cols, label, row_top, log_total, smoothing, z_loss, SMOOTH, Z_LOSS)
            tl.store(z_ptr + col, dz.to(z_ptr.dtype.element_ty))


@jit
def _cross_entropy_backward_kernel(
    dloss_ptr,
    z_ptr,
    label_ptr,
    stats_ptr,
    dz_ptr,
    cols,
    z_stride,
    smoothing,
    ignore,
    z_loss,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    kept = label != ignore
    top = tl.load(stats_ptr + 2 * row)
    log_total = tl.load(stats_ptr + 2 * row + 1)
    z = tl.load(z_ptr + row * z_stride + col, mask=(col < cols) & kept, other=0.0).to(tl.float32)
    dz = _gradient(z, col, cols, label, top, log_total, smoothing, z_loss, SMOOTH, Z_LOSS) * tl.load(dloss_ptr)
    dz = tl.where(kept, dz, 0.0)
    tl.store(dz_ptr + row * cols + col, dz.to(dz_ptr.dtype.element_ty), mask=col < cols)


def _num_warps(cols: int) -> int:
    """With 8 columns a lane, 16 bytes of bf16: a short row is one block; a long one gets 32 warps, so that no more than
    two programs share a multiprocessor, one summing while the other writes, and few rows are in flight."""
    return 32 if cols > 2**15 else min(max(next_power_of_2(cols) // 256, 1), 16)


def launch_rows(
    logits: Tensor, labels: Tensor, smoothing: float, ignore: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """rows_ref by one program per row. With `gradient` the logits must have a column stride of 1."""
    rows, cols = logits.shape
    if logits.stride(1) != 1:
        assert not gradient, "a copy would receive the gradient"
        logits = logits.contiguous()
    losses = logits.new_empty(rows, dtype=torch.float32)
    stats = logits.new_empty(rows, 2, dtype=torch.float32)
    if rows:
        warps = _num_warps(cols)
        _cross_entropy_kernel[(rows,)](
            logits,
            labels.contiguous(),
            losses,
            stats,
            cols,
            logits.stride(0),
            smoothing,
            ignore,
            z_loss,
            SMOOTH=smoothing != 0.0,
            Z_LOSS=z_loss != 0.0,
            GRADIENT=gradient,
            LANES=32 * warps,
            num_warps=warps,
        )
    return losses, stats


def launch_backward(
    dloss: Tensor, logits: Tensor, labels: Tensor, stats: Tensor, smoothing: float, ignore: int, z_loss: float
) -> Tensor:
    rows, cols = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    dlogits = logits.new_empty(rows, cols)
    if rows:
        warps = min(_num_warps(cols), 8)
        grid = (rows, cdiv(cols, 256 * warps))
        _cross_entropy_backward_kernel[grid](
            dloss,
            logits,
            labels.contiguous(),
            stats,
            dlogits,
            cols,
            logits.stride(0),
            smoothing,
            ignore,
            z_loss,
            SMOOTH=smoothing != 0.0,
            Z_LOSS=z_loss != 0.0,
            BLOCK=256 * warps,
            num_warps=warps,
        )
    return dlogits


def _rows(
    logits: Tensor, labels: Tensor, smoothing: float, ignore: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    if not labels.is_cuda:  # where looking costs no synchronisation
        classes = logits.shape[1]
        wrong = labels[(labels != ignore) & ((labels < 0) | (labels >= classes))]
        if len(wrong):
            raise ValueError(f"label {int(wrong[0])} is not one of {classes} classes, and {ignore} is what is ignored")
    function = launch_rows if _has_kernel(logits) else rows_ref
    return function(logits, labels, smoothing, ignore, z_loss, gradient)


def _has_kernel(logits: Tensor) -> bool:
    return (logits.is_cuda or INTERPRET) and logits.dtype != torch.float64


@define("cross_entropy")
def _cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float, ignore: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    losses, stats = _rows(logits, labels, smoothing, ignore, z_loss, gradient=False)
    return losses.sum(), stats


@_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor, smoothing: float, ignore: int, z_loss: float) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty(logits.shape[0], 2, dtype=dtype)


@define("cross_entropy_backward")
def _cross_entropy_backward(
    dloss: Tensor, logits: Tensor, labels: Tensor, stats: Tensor, smoothing: float, ignore: int, z_loss: float
) -> Tensor:
    if _has_kernel(logits):
        return launch_backward(dloss, logits, labels, stats, smoothing, ignore, z_loss)
    dlogits = dloss * gradient_ref(logits, labels, stats, smoothing, ignore, z_loss)
    return dlogits.to(logits.dtype, memory_format=torch.contiguous_format)


@_cross_entropy_backward.register_fake
def _(
    dloss: Tensor, logits: Tensor, labels: Tensor, stats: Tensor, smoothing: float, ignore: int, z_loss: float
) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, *ctx.terms = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.terms), None, None, None, None


_cross_entropy.register_autograd(_backward, setup_context=_save)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    convention: str = "torch",
    ignore: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """The summed loss of logits [T, V] against labels [T]: a scalar, at least fp32. `convention` says where the mass
    of the smoothing goes: "torch" to all classes, "fairseq" to the wrong ones."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy takes logits [T, V] and labels [T], not {list(logits.shape)} and {list(labels.shape)}"
        )
    smoothing = _torch_smoothing(smoothing, convention, logits.shape[1])
    loss: Tensor = _cross_entropy(logits, labels, smoothing, ignore, z_loss)[0]
    return loss


def chunk_rows(tokens: int, row_bytes: int) -> int:
    """Rows of logits in a chunk: within both limits, a multiple of 128, in chunks of about the same size."""
    most = max(min(CHUNK_BYTES // row_bytes, CHUNK_ROWS) // 128 * 128, 128)
    chunks = max(cdiv(tokens, most), 1)
    return max(cdiv(cdiv(tokens, chunks), 128), 1) * 128


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """total = beta * total + a @ b, in place, for a sum of higher precision than the factors. cuBLAS reads 16-bit
    factors and adds to an fp32 matrix; a CPU has no such routine."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def run_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    ignore: int,
    z_loss: float,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, dx, dweight and dbias for a loss gradient of 1; those not needed are empty. All products go into memory
    that is there already, which also keeps autocast from rounding them."""
    tokens, classes, dtype = x.shape[0], weight.shape[0], wide_dtype(x.dtype)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    loss = x.new_zeros((), dtype=dtype)
    dx = x.new_empty(x.shape if need_x else 0)
    dweight = x.new_empty(weight.shape if need_weight else 0, dtype=dtype)
    dbias = x.new_zeros(classes if need_bias else 0, dtype=dtype)

    stride = cdiv(classes, 64) * 64  # aligned rows: for the kernel's loads, and for matmuls with an odd vocabulary
    rows = chunk_rows(tokens, stride * x.element_size())
    buffer = x.new_empty(min(rows, tokens), stride)[:, :classes]
    for start in range(0, max(tokens, 1), rows):  # no tokens at all: one empty chunk, which makes dweight zero
        part = slice(start, start + rows)
        logits = buffer[: tokens - start]
        if bias is None:
            torch.mm(x[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[part], weight.t(), out=logits)
        losses, _ = _rows(logits, labels[part], smoothing, ignore, z_loss, need_x or need_weight or need_bias)
        loss += losses.sum()
        dlogits = logits
        if need_x:
            torch.mm(dlogits, weight, out=dx[part])
        if need_weight:
            add_product(dweight, dlogits.t(), x[part], beta=1.0 if start else 0.0)
        if need_bias:
            dbias += dlogits.sum(0, dtype=dtype)
    return loss, dx, dweight, dbias


_linear_cross_entropy = define("linear_cross_entropy")(run_chunks)


@_linear_cross_entropy.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    ignore: int,
    z_loss: float,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = wide_dtype(x.dtype)
    return (
        x.new_empty((), dtype=dtype),
        x.new_empty(x.shape if need_x else 0),
        x.new_empty(weight.shape if need_weight else 0, dtype=dtype),
        x.new_empty(weight.shape[0] if need_bias else 0, dtype=dtype),
    )


@jit
def _scale_kernel(x_ptr, by_ptr, y_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, (x * tl.load(by_ptr)).to(y_ptr.dtype.element_ty), mask=i < size)


def launch_scale(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    scaled, size = torch.empty_like(gradient, dtype=dtype), gradient.numel()
    if size:
        _scale_kernel[(cdiv(size, 4096),)](gradient, by, scaled, size, BLOCK=4096, num_warps=8)
    return scaled


@define("scale_gradient")
def _scale_gradient(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * by, rounded to dtype once, in one pass; torch's own kernel for two dtypes does not vectorise. A scalar
    tensor would be rounded to the gradient's dtype before the product; a vector of one element makes the product as
    precise as itself."""
    if _has_kernel(gradient):
        return launch_scale(gradient, by, dtype)
    return torch.mul(gradient, by.view(1), out=torch.empty_like(gradient, dtype=dtype))


@_scale_gradient.register_fake
def _(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, *_, need_x, need_weight, need_bias = inputs
    ctx.dtypes = [
        None if tensor is None or not needed else tensor.dtype
        for tensor, needed in ((x, need_x), (weight, need_weight), (bias, need_bias))
    ]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else the gradients of the gradients would be made, as zeros of their size


def _linear_backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    scaled = (
        None if dtype is None or dloss is None else _scale_gradient(gradient, dloss, dtype)
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )
    return (*scaled, *[None] * 7)


_linear_cross_entropy.register_autograd(_linear_backward, setup_context=_save_linear)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float = 0.0,
    convention: str = "torch",
    ignore: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """cross_entropy of x @ weight.T + bias for x [T, C], weight [V, C], bias [V], without the logits [T, V]. The
    product is taken in the dtype of x (under autocast, in its dtype); weight and bias keep theirs."""
    matrices = x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1]
    if not matrices or labels.shape != x.shape[:1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            "linear_cross_entropy takes x [T, C], weight [V, C], bias [V] or None and labels [T], not "
            + ", ".join("None" if t is None else str(list(t.shape)) for t in (x, weight, bias, labels))
        )
    smoothing = _torch_smoothing(smoothing, convention, weight.shape[0])
    x = x.to(product_dtype(x))
    recorded = torch.is_grad_enabled()
    need_x, need_weight, need_bias = (t is not None and recorded and t.requires_grad for t in (x, weight, bias))
    loss: Tensor = _linear_cross_entropy(
        x, weight, bias, labels, smoothing, ignore, z_loss, need_x, need_weight, need_bias
    )[0]
    return loss


def _torch_smoothing(smoothing: float, convention: str, classes: int) -> float:
    """The smoothing that means in torch's convention what this one means in `convention`."""
    if convention not in CONVENTIONS:
        raise ValueError(f"label smoothing has the conventions {' and '.join(CONVENTIONS)}, not {convention!r}")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"label smoothing is in [0, 1), not {smoothing}")
    if classes < 1:
        raise ValueError("cross entropy needs at least one class")
    return smoothing * classes / max(classes - 1, 1) if convention == "fairseq" else smoothing
