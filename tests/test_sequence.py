"""How sequences are cut, who sees what, and what is refused: all that needs no second process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.attention import attend
from stretto.batch import IGNORE, Batch, Counts, Layout, Sequences, dense_layout
from stretto.config import Config, ModelConfig, ParallelConfig
from stretto.data.packing import pack
from stretto.errors import ConfigError
from stretto.mesh import Mesh, build_mesh
from stretto.model import Decoder, build_model
from stretto.parallel.gather import Gather
from stretto.parallel.layouts import Cut, cut, split
from stretto.parallel.partial import HOPPER, Scores, attend_part, backward_part, merge
from stretto.parallel.sequence import Segment, SequenceParallel, Splitter, choose
from stretto.runtime import Runtime
from stretto.techniques import open_techniques
from stretto.techniques.technique import Context
from stretto.train import describe_context
from tests.models import materialise
from tests.runs import MakeConfig

CPU, LAYOUTS = torch.device("cpu"), ("contiguous", "zigzag", "documents")
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Place:
    """What a splitter asks of a process group."""

    number: int
    of: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.of


@dataclass(frozen=True)
class Grid:
    """What a technique asks of the mesh of processes."""

    group: Place

    def get_group(self, name: str) -> Place:
        assert name == "sequence"
        return self.group


def make_mesh(sequence: int, world: int) -> Mesh:
    """Seen by the first process, without any other."""
    return Mesh(0, world, (("sequence", sequence),), Grid(Place(0, sequence)))  # type: ignore[arg-type]


def make_layout(lengths: list[int], dense: bool) -> Layout:
    if dense:
        return dense_layout(len(lengths), lengths[0])
    return pack(np.zeros(sum(lengths)), np.array(lengths), max(lengths), num_sequences=len(lengths) + 2).layout


def make_splitter(part: int, parts: int, model: ModelConfig, **options: Any) -> Splitter:
    cfg = ParallelConfig(sequence=parts, **({"sequence_method": "gather"} | options))
    return Splitter(cfg, model, Place(part, parts))  # type: ignore[arg-type]


def join(x: Tensor, of: Cut) -> Tensor:
    """What all processes have, one after the other, [parts * size, ...], to [T, ...]: undoes `split`."""
    return x[torch.from_numpy(of.row)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 9), st.sampled_from(LAYOUTS), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_cut_is_undone_exactly(lengths: list[int], parts: int, name: str, dense: bool) -> None:
    lengths = lengths[:1] * len(lengths) if dense else lengths
    total = sum(lengths)
    of = cut(make_layout(lengths, dense), total, parts, name)
    x = torch.randn(total, 3, generator=torch.Generator().manual_seed(0))
    pieces = [split(x, of, part, fill=torch.nan) for part in range(parts)]
    assert torch.equal(join(torch.cat(pieces), of), x)
    loads = [len(of.tokens(part)) for part in range(parts)]
    assert sum(loads) == total and max(loads) == of.size and max(loads) - min(loads) <= 2
    assert all((np.diff(of.tokens(part)) > 0).all() for part in range(parts))


def test_layouts_are_what_they_say() -> None:
    owners = {name: cut(make_layout([8], False), 8, 2, name).owner.tolist() for name in LAYOUTS}
    assert owners["contiguous"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert owners["zigzag"] == owners["documents"] == [0, 0, 1, 1, 1, 1, 0, 0]
    two = make_layout([8, 8], False)
    assert cut(two, 16, 2, "contiguous").owner.tolist() == [0] * 8 + [1] * 8  # the batch is cut, wherever texts end
    assert cut(two, 16, 2, "documents").owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0] * 2
    assert cut(make_layout([8, 8], True), 16, 2, "contiguous").owner.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_of_a_causal_mask_are_shared_out(name: str) -> None:
    """In thousandths of a fair share. A process with one run has up to twice as much to do as it should."""
    parts, length = 8, 1600
    layout = make_layout([length], False)
    of = cut(layout, length, parts, name)
    pairs = [int((of.tokens(part) + 1).sum()) for part in range(parts)]
    worst = round(1000 * max(pairs) * parts / sum(pairs))
    assert worst == (1874 if name == "contiguous" else 1000)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, causal: bool, window: int) -> Tensor:
    """Computes attention by one big mask over all tokens, unlike everything it is compared with."""
    number = torch.bucketize(torch.arange(len(q)), layout.offsets, right=True)
    at = torch.arange(len(q))
    ahead = at - at[:, None]
    visible = number == number[:, None]
    if causal:
        visible &= ahead <= 0
    if window:
        visible &= ahead > -window
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def draw(layout: Layout, size: int) -> list[Tensor]:
    """Queries of four heads, keys and values of two, and a gradient."""
    total, random = int(layout.offsets[-1]), torch.Generator().manual_seed(0)
    return [torch.randn(total, heads, size, dtype=torch.float64, generator=random) for heads in (4, 2, 2, 4)]


def with_gradients(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def by_parts(
    given: list[Tensor], layout: Layout, parts: int, name: str, causal: bool, window: int, device: str = "cpu"
) -> list[Tensor]:
    """As `with_gradients`, by all processes one after the other; what would travel between them is simply there."""
    q, k, v, dout = given
    of, kv = cut(layout, len(q), parts, name), torch.stack([k, v], 1)
    everyones = torch.cat([split(kv, of, part, 0.0) for part in range(parts)])
    outs, dqs, dkv = [], [], torch.zeros_like(everyones, dtype=torch.promote_types(q.dtype, torch.float32))
    ids = torch.zeros(len(q), dtype=torch.int64)
    batch = Batch(ids, Counts(len(q), len(q), len(q), 1), (0,), inputs=Sequences(ids, ids, layout))
    model = ModelConfig(kind="decoder" if causal else "encoder", window=window)
    for part in range(parts):
        mine = make_splitter(part, parts, model, sequence_layout=name)(batch).to(torch.device(device)).inputs
        assert mine is not None and isinstance(mine.layout.segment, Segment)
        way, scores = mine.layout.segment.own, Scores(q.shape[2] ** -0.5)
        assert isinstance(way, Gather)
        queries, here, grad = split(q, of, part, 0.0), split(kv, of, part, 0.0), split(dout, of, part, 0.0)
        out, lse = attend_part(queries, everyones, way.others, scores)
        if way.own is not None:
            out, lse = merge(*attend_part(queries, here, way.own, scores), out, lse)
        dq, found = backward_part(grad, queries, everyones, out, lse, way.others, scores)
        dkv += found
        if way.own is not None:
            more, found = backward_part(grad, queries, here, out, lse, way.own, scores)
            dq = dq + more
            dkv[part * of.size : (part + 1) * of.size] += found
        outs.append(out)
        dqs.append(dq)
    return [join(torch.cat(outs), of), join(torch.cat(dqs), of), *join(dkv, of).unbind(1)]


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 6)])
def test_parts_of_attention_are_the_whole(parts: int, causal: bool, window: int) -> None:
    cases: list[tuple[list[int], bool]] = [([32, 32], True), ([33, 1, 20, 2], False)]
    for (lengths, dense), name in product(cases, LAYOUTS):
        layout = make_layout(lengths, dense)
        given = draw(layout, size=8)
        wanted = with_gradients(partial(whole_attention, layout=layout, causal=causal, window=window), *given)
        found = by_parts(given, layout, parts, name, causal, window)
        torch.testing.assert_close(found, wanted, atol=1e-14, rtol=0)


class Names(TorchDispatchMode):
    """Collects the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 100)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_attention_in_bf16(
    name: str, causal: bool, window: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near to fp64 as attention in one piece is, up to a factor. By cuDNN where shapes stay the same and are large,
    else by FlashAttention."""
    monkeypatch.setattr("stretto.parallel.partial.LARGE", 1 if large else 2**22)
    for parts, (lengths, dense) in product((2, 4), [([512, 512], True), ([700, 1, 300, 23], False)]):
        layout = make_layout(lengths, dense)
        given = draw(layout, size=64)
        wanted = with_gradients(partial(whole_attention, layout=layout, causal=causal, window=window), *given)
        half = [t.to("cuda", torch.bfloat16) for t in given]
        there = replace(layout, offsets=layout.offsets.cuda())
        one = partial(attend, q_layout=there, k_layout=there, causal=causal, dropout=0.0, window=window)
        alone = with_gradients(one, *half)
        with Names() as names:
            found = by_parts(half, layout, parts, name, causal, window, device="cuda")
        new = torch.cuda.get_device_capability() >= HOPPER
        kernel = "cudnn" if new and dense and large and not window else "flash"
        assert {n for n in names.seen if "attention" in n} == {
            f"_{kernel}_attention_{way}.default" for way in ("forward", "backward")
        }
        for mine, its, exact in zip(found, alone, wanted, strict=True):
            errors = [float((t.double().cpu() - exact).norm()) for t in (mine, its)]
            assert errors[0] <= 2 * errors[1]


def test_a_split_batch_has_labels_of_the_whole_text_and_counts_that_add_up() -> None:
    lengths = [9, 4, 6]
    ids = torch.arange(100, 119)
    inputs = pack(ids.numpy(), np.array(lengths), 9, num_sequences=4)
    labels = ids.roll(-1).index_fill(0, torch.tensor(lengths).cumsum(0) - 1, IGNORE)
    batch = Batch(labels, Counts(tokens=19, slots=19, labels=16, pairs=133), (3, 1), inputs=inputs)
    parts = [make_splitter(part, 2, ModelConfig())(batch) for part in range(2)]
    for part in parts:
        assert part.inputs is not None and part.samples == (3, 1) and len(part.inputs.ids) == 10
        real = part.labels != IGNORE
        assert torch.equal(part.labels[real], part.inputs.ids[real] + 1)
        assert part.inputs.layout.max_len == 9  # of the whole: a table of positions is as long
    for key, total in {"tokens": 19, "labels": 16, "pairs": 133, "slots": 20}.items():
        assert sum(getattr(part.counts, key) for part in parts) == total


def test_masked_labels_go_with_their_tokens() -> None:
    ids = torch.arange(100, 108)
    inputs = Sequences(ids, torch.arange(8), dense_layout(1, 8))
    at = torch.tensor([0, 1, 5])
    batch = Batch(ids[at] + 50, Counts(tokens=8, slots=8, labels=3, pairs=64), (0,), inputs=inputs, label_at=at)
    cfg, options = ModelConfig(kind="encoder"), {"sequence_layout": "contiguous"}
    first, second = (make_splitter(part, 2, cfg, **options)(batch) for part in range(2))
    for part, wanted in ((first, [150, 151]), (second, [155])):
        assert part.inputs is not None and part.label_at is not None
        assert part.labels.tolist() == wanted == (part.inputs.ids[part.label_at] + 50).tolist()
    none = make_splitter(3, 4, cfg, **options)(batch)
    assert none.labels.tolist() == [IGNORE] and none.counts.labels == 0


@pytest.mark.parametrize("dense", [True, False])
def test_a_window_slides(dense: bool) -> None:
    layout, random = make_layout([12, 12] if dense else [12, 3, 9], dense), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(24, n, 8, dtype=torch.float64, generator=random) for n in (4, 2, 2))
    for window in (1, 5, 30):
        out = attend(q, k, v, layout, layout, causal=True, dropout=0.0, window=window)
        torch.testing.assert_close(out, whole_attention(q, k, v, layout, True, window), atol=1e-14, rtol=0)


def test_a_model_with_a_window_generates_what_it_was_trained_for() -> None:
    cfg = ModelConfig(layers=2, width=32, heads=4, vocab=64, max_len=32, window=4)
    model = build_model(cfg)
    assert isinstance(model, Decoder)
    materialise(model, cfg, 0, "cpu")
    model.eval()
    ids = torch.randint(0, 64, (1, 10), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[0], Counts(10, 10, 10, 100), (0,), Sequences(ids[0], torch.arange(10), dense_layout(1, 10)))
    with torch.no_grad():
        wanted, cache = model.logits(batch), model.start()
        found = [model.decode(ids[:, :6], cache), *(model.decode(ids[:, i : i + 1], cache) for i in range(6, 10))]
    torch.testing.assert_close(torch.cat(found), wanted[5:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__sequence": 0}, "parallel.sequence = 0 must be positive"),
        ({"parallel__data": "hybrid"}, "set parallel.sequence, or use 'shard'"),
        ({"model__window": 4, "model__kind": "encoder", "data__task": "masked"}, "model.window is for a decoder"),
    ],
)
def test_values_that_mean_nothing_are_refused(make_config: MakeConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__sequence": 16}, "of data.seq_len = 16 are left to a process: lower parallel.sequence"),
        ({"parallel__sequence": 2, "data__layout": "padded"}, "set data.layout to 'packed'"),
        ({"parallel__sequence": 2, "data__task": "images", "model__kind": "vit"}, "an image is a short sequence"),
        (
            {"parallel__sequence": 4, "parallel__sequence_method": "ulysses", "model__kv_heads": 2},
            "4 processes cannot share 2: make parallel.sequence a divisor",
        ),
        (
            {"parallel__sequence": 2, "parallel__sequence_method": "ulysses", "model__attention_dropout": 0.1},
            "set model.attention_dropout to 0",
        ),
        ({"parallel__sequence": 2, "parallel__sequence_method": "ring", "model__window": 4}, "use 'gather'"),
        ({"parallel__sequence": 2, "parallel__sequence_heads": 3}, "does not divide the model's 4 key/value heads"),
        (
            {"parallel__sequence": 2, "techniques__layer_drop": {"gate": "sample"}},
            "techniques.layer_drop: gate = 'sample' would need other sequences for each block.*: set it to 'batch'",
        ),
        (
            {"parallel__sequence": 2, "techniques__standardize": {"axis": "layer"}},
            "techniques.standardize: axis = 'layer' needs statistics over tokens of other processes: set it to 'token'",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(make_config: MakeConfig, changes: dict[str, Any], message: str) -> None:
    config: Config = make_config(**changes)
    size = config.parallel.sequence
    context = describe_context(config, Runtime(CPU, 0, size), make_mesh(size, size))
    with pytest.raises(ConfigError, match=message) as error:
        open_techniques(config, context)
    assert "techniques." in message or str(error.value).startswith("parallel.sequence: ")


def test_the_method_is_chosen_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(width=1024, heads=16, vocab=64)
    auto = ParallelConfig(sequence=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    near, reason = choose(auto, model, 2**19 - 5, 16)
    assert near.sequence_method == "gather" and "on NVLink" in reason
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    far, reason = choose(auto, model, 2**13, 16)
    assert far.sequence_method == "ulysses" and "on network" in reason and "gather would take" in reason
    technique = SequenceParallel(auto, Context(model, CPU, "fp32", make_mesh(8, 16), seq_len=2**13))
    assert technique.cfg == far and f"(ulysses, zigzag): {reason}" in technique.describe()
    dropping, reason = choose(auto, replace(model, attention_dropout=0.1), 2**13, 16)
    assert dropping.sequence_method != "ulysses" and "ulysses cannot: it drops no" in reason
    asked = ParallelConfig(sequence=8, sequence_method="ring")
    assert choose(asked, model, 2**13, 16) == (asked, "")


def test_too_few_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"parallel.sequence = 4 needs a multiple of 4 processes, and there are 6"):
        build_mesh(ParallelConfig(sequence=4), CPU, 0, 6)
    with pytest.raises(ConfigError, match=r"there is 1: start them by `stretto launch -n 2"):
        build_mesh(ParallelConfig(sequence=2), CPU, 0, 1)
    monkeypatch.setattr("stretto.mesh.init_device_mesh", lambda *args, **options: (args, options))
    meshes = [build_mesh(ParallelConfig(sequence=2), CPU, rank, 4) for rank in range(4)]
    assert meshes[0].grid == (("cpu", (2, 2)), {"mesh_dim_names": ("data", "sequence")})
    assert [(mesh.data_rank, mesh.data_world) for mesh in meshes] == [(0, 2), (0, 2), (1, 2), (1, 2)]
