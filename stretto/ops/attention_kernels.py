"""The kernels of attention.py, which has their formulas and decides which of them run.

Tiles are [queries, keys], or [keys, queries] where keys and values get their gradients. `scale` includes log2(e), since
exp2 is what the hardware computes. `first` and `second` are the words of dropout of a tile's queries.
"""

from __future__ import annotations

from stretto.ops.dropout import mix, row_words
from stretto.ops.language import jit, tl


@jit
def _survival(first, second, start, lane, P: tl.constexpr):
    """The factors of drop() for keys `start` (a multiple of 16) + `lane` and rows with these words, which broadcast. A
    factor rather than a choice: the compiler would choose among values that it has already packed."""
    THRESHOLD: tl.constexpr = int(P * 65536) * 65536
    word = mix((((start + (lane & ~8)).to(tl.uint32) * 0x9E3779B1) ^ first) + second)
    survives = (word << (16 - (lane & 8) * 2).to(tl.uint32)) >= THRESHOLD  # an upper half is compared where it is
    return tl.where(survives, 1 / (1 - P), 0.0)


@jit
def _load_words(words_ptr, place, tokens, H: tl.constexpr, mask):
    """The words at `place` of [2, H, T]."""
    first = tl.load(words_ptr + place, mask=mask, other=0).to(tl.uint32, bitcast=True)
    second = tl.load(words_ptr + tl.cast(tokens, tl.int64) * H + place, mask=mask, other=0)
    return first, second.to(tl.uint32, bitcast=True)


@jit
def _draw_words(words_ptr, key_ptr, token, head, tokens, H: tl.constexpr, mask):
    first, second = row_words(key_ptr, token * H + head)
    place = tl.cast(head, tl.int64) * tokens + token
    tl.store(words_ptr + place, first.to(tl.int32, bitcast=True), mask=mask)
    tl.store(words_ptr + tl.cast(tokens, tl.int64) * H + place, second.to(tl.int32, bitcast=True), mask=mask)
    return first, second


@jit
def _bounds(offsets_ptr, sequence):
    """Returns where a sequence begins, and its length."""
    begin = tl.load(offsets_ptr + sequence)
    return begin, tl.load(offsets_ptr + sequence + 1) - begin


@jit
def _find_tile(offsets_ptr, tile, sequences, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr):
    """Returns the sequence that a tile belongs to, and the tile's number there, which may be one beyond its end."""
    i = tl.arange(0, SEQUENCES)
    first = tl.load(offsets_ptr + i, mask=i < sequences, other=0) // BLOCK + i
    sequence = tl.sum(((first <= tile) & (i < sequences)).to(tl.int32), 0) - 1
    return sequence, tile - tl.load(offsets_ptr + sequence) // BLOCK - sequence


@jit
def _place(start, length, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns the places in a sequence of the elements [ROWS, BLOCK_D] from row `start` on, and which of them exist."""
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (row < length - start) & (col < D) if BLOCK_D != D else row < length - start
    return tl.cast(start, tl.int64) * stride + row * stride + col, mask


@jit
def _load_tile(ptr, start, length, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a sequence that begins at `ptr`; 0 beyond its end."""
    place, mask = _place(start, length, stride, D, ROWS, BLOCK_D)
    return tl.load(ptr + place, mask=mask, other=0.0)


@jit
def _store_tile(ptr, tile, start, length, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    place, mask = _place(start, length, stride, D, ROWS, BLOCK_D)
    tl.store(ptr + place, tile.to(ptr.dtype.element_ty), mask=mask)


@jit
def _bias_rows(row, width):
    """Returns where in the table [4, width] of a head the bias of a query for key 0 is; attention.py: align_bias."""
    before = width // 2 - row
    shift = -before & 3
    return tl.multiple_of((3 - shift) * width + before + shift, 4)


@jit
def short_attention_kernel(
    q_ptr, k_ptr, v_ptr,
    out_ptr,  # [T, H, D], contiguous
    lse_ptr, words_ptr,  # [H, T] and [2, H, T]; no words without dropout
    key_ptr, q_offsets_ptr, k_offsets_ptr,
    tokens, scale,  # T, and the factor of scores, times log2(e)
    q_stride, k_stride, v_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    D: tl.constexpr, CAUSAL: tl.constexpr, P: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program
    SINGLE: tl.constexpr,  # a program has one head, and one tile of queries: the compiler drops the loop
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,  # queries; all keys of a sequence; channels
):  # fmt: skip
    """A program computes some heads of one sequence."""
    sequence = tl.program_id(0) // (H // HEADS)
    head = tl.program_id(0) % (H // HEADS) * HEADS
    q_begin, q_len = _bounds(q_offsets_ptr, sequence)
    k_begin, k_len = _bounds(k_offsets_ptr, sequence)
    q_ptr += q_begin.to(tl.int64) * q_stride
    k_ptr += k_begin.to(tl.int64) * k_stride
    v_ptr += k_begin.to(tl.int64) * v_stride
    out_ptr += q_begin.to(tl.int64) * H * D
    tiles = tl.cdiv(q_len, BLOCK_M)
    for i in range(1 if SINGLE else HEADS * tiles):
        start = 0 if SINGLE else i % tiles * BLOCK_M
        at = head if SINGLE else head + i // tiles
        row, col = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        q = _load_tile(q_ptr + at * D, start, q_len, q_stride, D, BLOCK_M, BLOCK_D)
        k = _load_tile(k_ptr + at // GROUP * D, 0, k_len, k_stride, D, BLOCK_N, BLOCK_D)
        v = _load_tile(v_ptr + at // GROUP * D, 0, k_len, v_stride, D, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        col = col[None, :]
        visible = (col < k_len) & (col <= row[:, None]) if CAUSAL else col < k_len
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.max(scores, 1) * scale
        # -inf less -inf, for a query without keys, would be NaN
        p = tl.exp2(scores * scale - tl.where(highest > float("-inf"), highest, 0.0)[:, None])
        total = tl.sum(p, 1)
        if P > 0:
            first, second = _draw_words(words_ptr, key_ptr, q_begin + row, at, tokens, H, row < q_len)
            p *= _survival(first[:, None], second[:, None], 0, col, P)
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = tl.where(total > 0, total, 1.0)
        out *= (1 / total)[:, None]
        _store_tile(out_ptr + at * D, out, start, q_len, H * D, D, BLOCK_M, BLOCK_D)
        lse = (highest + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + tl.cast(at, tl.int64) * tokens + q_begin + row, lse, mask=row < q_len)


@jit
def short_attention_backward_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, words_ptr,
    dq_ptr, dk_ptr, dv_ptr,  # gradients are contiguous
    q_offsets_ptr, k_offsets_ptr, tokens, scale, dout_stride, q_stride, k_stride, v_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, P: tl.constexpr,
    SINGLE: tl.constexpr,  # the queries are one tile, and GROUP is 1
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program computes one key head of one sequence, and the query heads that share it. Tiles are [keys, queries]:
    then P and dS are the left operands of the products for dv and dk as they are, and only dS is turned, for dq."""
    K: tl.constexpr = H // GROUP
    sequence = tl.program_id(0) // K
    kv_head = tl.program_id(0) % K
    q_begin, q_len = _bounds(q_offsets_ptr, sequence)
    k_begin, k_len = _bounds(k_offsets_ptr, sequence)
    dout_ptr += q_begin.to(tl.int64) * dout_stride
    q_ptr += q_begin.to(tl.int64) * q_stride
    dq_ptr += q_begin.to(tl.int64) * H * D
    k = _load_tile(k_ptr + k_begin.to(tl.int64) * k_stride + kv_head * D, 0, k_len, k_stride, D, BLOCK_N, BLOCK_D)
    v = _load_tile(v_ptr + k_begin.to(tl.int64) * v_stride + kv_head * D, 0, k_len, v_stride, D, BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    col = tl.arange(0, BLOCK_N)[:, None]
    # SINGLE: loops of one step, which the compiler drops, and no sums that live through them: half of the registers
    begin = 0 if SINGLE else kv_head * GROUP
    for i in range(begin, begin + GROUP):
        head = kv_head if SINGLE else i
        for start in range(0, 1 if SINGLE else q_len, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            q = _load_tile(q_ptr + head * D, start, q_len, q_stride, D, BLOCK_M, BLOCK_D)
            dout = _load_tile(dout_ptr + head * D, start, q_len, dout_stride, D, BLOCK_M, BLOCK_D)
            per_query = tl.cast(head, tl.int64) * tokens + q_begin + row
            lse = tl.load(lse_ptr + per_query, mask=row < q_len, other=0.0)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
            visible = (col < k_len) & (col <= row[None, :]) if CAUSAL else col < k_len
            p = tl.exp2(tl.where(visible, scores * scale - (lse * 1.4426950408889634)[None, :], float("-inf")))
            if P > 0:
                first, second = _load_words(words_ptr, per_query, tokens, H, row < q_len)
                survival = _survival(first[None, :], second[None, :], 0, col, P)
                dp *= survival
                dv = tl.dot((p * survival).to(dout.dtype), dout, dv, input_precision="ieee")
            else:
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            delta = tl.sum(p * dp, 0)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            dq = tl.dot(tl.trans(ds), k, input_precision="ieee") * (scale * 0.6931471805599453)
            _store_tile(dq_ptr + head * D, dq, start, q_len, H * D, D, BLOCK_M, BLOCK_D)
    at = (k_begin.to(tl.int64) * K + kv_head) * D
    _store_tile(dk_ptr + at, dk * (scale * 0.6931471805599453), 0, k_len, K * D, D, BLOCK_N, BLOCK_D)
    _store_tile(dv_ptr + at, dv, 0, k_len, K * D, D, BLOCK_N, BLOCK_D)


@jit
def long_attention_kernel(
    q_ptr, k_ptr, v_ptr,
    bias_ptr,  # [H, 4, width], see align_bias in attention.py
    out_ptr, lse_ptr, words_ptr, key_ptr, q_offsets_ptr, k_offsets_ptr, tokens, scale, q_stride, k_stride, v_stride,
    width, sequences,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A program computes a tile of queries of one head of one sequence."""
    head = tl.program_id(0) % H
    sequence, number = _find_tile(q_offsets_ptr, tl.program_id(0) // H, sequences, BLOCK_M, SEQUENCES)
    q_begin, q_len = _bounds(q_offsets_ptr, sequence)
    start = (tl.cdiv(q_len, BLOCK_M) - 1 - number) * BLOCK_M  # causal: tiles with most to do begin first
    if start >= 0:
        k_begin, k_len = _bounds(k_offsets_ptr, sequence)
        k_ptr += k_begin.to(tl.int64) * k_stride + head // GROUP * D
        v_ptr += k_begin.to(tl.int64) * v_stride + head // GROUP * D
        if bias_ptr is not None:
            bias_ptr += head * 4 * width
        row = start + tl.arange(0, BLOCK_M)
        first, second = row, row
        if P > 0:
            first, second = _draw_words(words_ptr, key_ptr, q_begin + row, head, tokens, H, row < q_len)
        q = _load_tile(q_ptr + q_begin.to(tl.int64) * q_stride + head * D, start, q_len, q_stride, D, BLOCK_M, BLOCK_D)
        end = tl.minimum(k_len, start + BLOCK_M) if CAUSAL else k_len
        whole = (tl.minimum(k_len, start + 1) if CAUSAL else k_len) // BLOCK_N * BLOCK_N
        out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for MASKED in tl.static_range(2):  # first the keys that every query sees
            lane = tl.arange(0, BLOCK_N)
            for first_key in range(whole if MASKED else 0, end if MASKED else whole, BLOCK_N):
                col = (first_key + lane)[None, :]
                k = _load_tile(k_ptr, first_key, k_len, k_stride, D, BLOCK_N, BLOCK_D)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                if bias_ptr is not None:
                    scores = scores * scale + tl.load(bias_ptr + _bias_rows(row, width)[:, None] + col)
                if MASKED:
                    visible = (col < k_len) & (col <= row[:, None]) if CAUSAL else col < k_len
                    scores = tl.where(visible, scores, float("-inf"))
                if bias_ptr is not None:
                    higher = tl.maximum(highest, tl.max(scores, 1))
                    p = tl.exp2(scores - higher[:, None])
                else:
                    higher = tl.maximum(highest, tl.max(scores, 1) * scale)  # finite: every query sees the first key
                    p = tl.exp2(scores * scale - higher[:, None])
                shrink = tl.exp2(highest - higher)
                total = total * shrink + tl.sum(p, 1)
                highest = higher
                if P > 0:
                    p *= _survival(first[:, None], second[:, None], first_key, lane[None, :], P)
                v = _load_tile(v_ptr, first_key, k_len, v_stride, D, BLOCK_N, BLOCK_D)
                out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        total = tl.where(total > 0, total, 1.0)
        out *= (1 / total)[:, None]
        _store_tile(out_ptr + (q_begin.to(tl.int64) * H + head) * D, out, start, q_len, H * D, D, BLOCK_M, BLOCK_D)
        lse = (highest + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + tl.cast(head, tl.int64) * tokens + q_begin + row, lse, mask=row < q_len)


@jit
def _dscores(
    q, dout, k, v, bias_ptr, row, start, lane, lse2, delta, first, second, k_len, scale, width,
    CAUSAL: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns dS of a tile [queries, keys] whose keys are `start` + `lane`; lse2 is in units of log2."""
    col = (start + lane)[None, :]
    exponent = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse2[:, None]
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    if bias_ptr is not None:
        exponent += tl.load(bias_ptr + _bias_rows(row, width)[:, None] + col)
    if MASKED:
        visible = (col < k_len) & (col <= row[:, None]) if CAUSAL else col < k_len
        exponent = tl.where(visible, exponent, float("-inf"))
    if P > 0:
        dp *= _survival(first[:, None], second[:, None], start, lane[None, :], P)
    return tl.exp2(exponent) * (dp - delta[:, None])


@jit
def long_attention_dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, words_ptr,
    delta_ptr,  # [H, T], written here
    dq_ptr, q_offsets_ptr, k_offsets_ptr, tokens, scale, dout_stride, q_stride, k_stride, v_stride,
    width, sequences, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A program computes dq for a tile of queries of one head of one sequence."""
    head = tl.program_id(0) % H
    sequence, number = _find_tile(q_offsets_ptr, tl.program_id(0) // H, sequences, BLOCK_M, SEQUENCES)
    q_begin, q_len = _bounds(q_offsets_ptr, sequence)
    start = (tl.cdiv(q_len, BLOCK_M) - 1 - number) * BLOCK_M
    if start >= 0:
        k_begin, k_len = _bounds(k_offsets_ptr, sequence)
        at = (q_begin.to(tl.int64) * H + head) * D  # in contiguous tensors
        k_ptr += k_begin.to(tl.int64) * k_stride + head // GROUP * D
        v_ptr += k_begin.to(tl.int64) * v_stride + head // GROUP * D
        if bias_ptr is not None:
            bias_ptr += head * 4 * width
        row = start + tl.arange(0, BLOCK_M)
        per_query = tl.cast(head, tl.int64) * tokens + q_begin + row
        first, second = row, row
        if P > 0:
            first, second = _load_words(words_ptr, per_query, tokens, H, row < q_len)
        dout_ptr += q_begin.to(tl.int64) * dout_stride + head * D
        dout = _load_tile(dout_ptr, start, q_len, dout_stride, D, BLOCK_M, BLOCK_D)
        out = _load_tile(out_ptr + at, start, q_len, H * D, D, BLOCK_M, BLOCK_D)
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(delta_ptr + per_query, delta, mask=row < q_len)
        lse2 = tl.load(lse_ptr + per_query, mask=row < q_len, other=0.0) * 1.4426950408889634
        q = _load_tile(q_ptr + q_begin.to(tl.int64) * q_stride + head * D, start, q_len, q_stride, D, BLOCK_M, BLOCK_D)
        end = tl.minimum(k_len, start + BLOCK_M) if CAUSAL else k_len
        whole = (tl.minimum(k_len, start + 1) if CAUSAL else k_len) // BLOCK_N * BLOCK_N
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for MASKED in tl.static_range(2):  # first the keys that every query sees
            lane = tl.arange(0, BLOCK_N)
            for first_key in range(whole if MASKED else 0, end if MASKED else whole, BLOCK_N):
                k = _load_tile(k_ptr, first_key, k_len, k_stride, D, BLOCK_N, BLOCK_D)
                v = _load_tile(v_ptr, first_key, k_len, v_stride, D, BLOCK_N, BLOCK_D)
                ds = _dscores(
                    q, dout, k, v, bias_ptr, row, first_key, lane, lse2, delta, first, second, k_len, scale, width,
                    CAUSAL, P, MASKED,
                )  # fmt: skip
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        _store_tile(dq_ptr + at, dq * (scale * 0.6931471805599453), start, q_len, H * D, D, BLOCK_M, BLOCK_D)


@jit
def long_attention_dkv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, lse_ptr, words_ptr, delta_ptr, dk_ptr, dv_ptr, q_offsets_ptr,
    k_offsets_ptr, tokens, scale, dout_stride, q_stride, k_stride, v_stride, width, sequences,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A program computes dk and dv for a tile of keys of one key head of one sequence. Tiles are [keys, queries]."""
    K: tl.constexpr = H // GROUP
    kv_head = tl.program_id(0) % K
    sequence, number = _find_tile(k_offsets_ptr, tl.program_id(0) // K, sequences, BLOCK_N, SEQUENCES)
    k_begin, k_len = _bounds(k_offsets_ptr, sequence)
    start = number * BLOCK_N  # causal: the first keys have most to do, and begin first
    if start < k_len:
        q_begin, q_len = _bounds(q_offsets_ptr, sequence)
        q_ptr += q_begin.to(tl.int64) * q_stride
        dout_ptr += q_begin.to(tl.int64) * dout_stride
        k_ptr += k_begin.to(tl.int64) * k_stride + kv_head * D
        v_ptr += k_begin.to(tl.int64) * v_stride + kv_head * D
        k = _load_tile(k_ptr, start, k_len, k_stride, D, BLOCK_N, BLOCK_D)
        v = _load_tile(v_ptr, start, k_len, v_stride, D, BLOCK_N, BLOCK_D)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            per_query = tl.cast(head, tl.int64) * tokens + q_begin
            words_head = words_ptr + per_query if P > 0 else words_ptr
            bias_head = bias_ptr + head * 4 * width if bias_ptr is not None else bias_ptr
            whole = start * 0
            if CAUSAL:
                whole = tl.minimum((start + BLOCK_N + BLOCK_M - 2) // BLOCK_M * BLOCK_M, q_len)
            # Keys beyond the end of the sequence need no mask: their gradients are not stored. Queries beyond it have
            # dout = 0 and delta = 0, and add nothing.
            for MASKED in tl.static_range(1 if CAUSAL else 0, -1, -1):  # last the queries that see all of these keys
                begin = start // BLOCK_M * BLOCK_M if MASKED else whole
                lane = tl.arange(0, BLOCK_N)[:, None]
                for first_query in range(begin, whole if MASKED else q_len, BLOCK_M):
                    row = first_query + tl.arange(0, BLOCK_M)
                    q = _load_tile(q_ptr + head * D, first_query, q_len, q_stride, D, BLOCK_M, BLOCK_D)
                    dout = _load_tile(dout_ptr + head * D, first_query, q_len, dout_stride, D, BLOCK_M, BLOCK_D)
                    lse2 = tl.load(lse_ptr + per_query + row, mask=row < q_len, other=0.0) * 1.4426950408889634
                    delta = tl.load(delta_ptr + per_query + row, mask=row < q_len, other=0.0)
                    exponent = tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse2[None, :]
                    dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
                    if bias_ptr is not None:
                        exponent += tl.load(bias_head + _bias_rows(row, width)[None, :] + start + lane)
                    if MASKED:
                        exponent = tl.where(start + lane <= row[None, :], exponent, float("-inf"))
                    p = tl.exp2(exponent)
                    if P > 0:
                        first, second = _load_words(words_head, row, tokens, H, row < q_len)
                        survival = _survival(first[None, :], second[None, :], start, lane, P)
                        dp *= survival
                        dv = tl.dot((p * survival).to(dout.dtype), dout, dv, input_precision="ieee")
                    else:
                        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
                    dk = tl.dot((p * (dp - delta[None, :])).to(q.dtype), q, dk, input_precision="ieee")
        at = (k_begin.to(tl.int64) * K + kv_head) * D
        _store_tile(dk_ptr + at, dk * (scale * 0.6931471805599453), start, k_len, K * D, D, BLOCK_N, BLOCK_D)
        _store_tile(dv_ptr + at, dv, start, k_len, K * D, D, BLOCK_N, BLOCK_D)


@jit
def attention_dbias_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, lse_ptr, words_ptr, delta_ptr,
    sums_ptr,  # [programs, BLOCK, BLOCK]
    q_offsets_ptr, k_offsets_ptr, tokens, scale, dout_stride, q_stride, k_stride, v_stride, width, sequences,
    last,  # the tiles of queries before the last one of the longest sequence
    SHARES: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program follows one diagonal of tiles of one head through a share of the sequences."""
    share = tl.program_id(0) % SHARES
    head = tl.program_id(0) // SHARES % H
    diagonal = tl.program_id(0) // SHARES // H - last  # number of the tile of keys, less that of queries
    bias_ptr += head * 4 * width
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for sequence in range(share, sequences, SHARES):
        q_begin, q_len = _bounds(q_offsets_ptr, sequence)
        k_begin, k_len = _bounds(k_offsets_ptr, sequence)
        q_at = q_ptr + q_begin.to(tl.int64) * q_stride + head * D
        dout_at = dout_ptr + q_begin.to(tl.int64) * dout_stride + head * D
        k_at = k_ptr + k_begin.to(tl.int64) * k_stride + head // GROUP * D
        v_at = v_ptr + k_begin.to(tl.int64) * v_stride + head // GROUP * D
        for start in range(tl.maximum(-diagonal, 0) * BLOCK, tl.minimum(q_len, k_len - diagonal * BLOCK), BLOCK):
            row, key = start + lane, start + diagonal * BLOCK
            per_query = tl.cast(head, tl.int64) * tokens + q_begin + row
            first, second = row, row
            if P > 0:
                first, second = _load_words(words_ptr, per_query, tokens, H, row < q_len)
            lse2 = tl.load(lse_ptr + per_query, mask=row < q_len, other=0.0) * 1.4426950408889634
            delta = tl.load(delta_ptr + per_query, mask=row < q_len, other=0.0)
            q = _load_tile(q_at, start, q_len, q_stride, D, BLOCK, BLOCK_D)
            dout = _load_tile(dout_at, start, q_len, dout_stride, D, BLOCK, BLOCK_D)
            k = _load_tile(k_at, key, k_len, k_stride, D, BLOCK, BLOCK_D)
            v = _load_tile(v_at, key, k_len, v_stride, D, BLOCK, BLOCK_D)
            total += _dscores(
                q, dout, k, v, bias_ptr, row, key, lane, lse2, delta, first, second, k_len, scale, width,
                CAUSAL, P, True,
            )  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK * BLOCK + lane[:, None] * BLOCK + lane[None, :]
    tl.store(sums_ptr + at, total)
