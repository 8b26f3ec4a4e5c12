"""The kernel is the reference bit for bit, in every way of keeping weights; the roundings are what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stretto.ops import adamw as family
from stretto.ops.adamw import ALIGN, Control, Launch, Place, Rule, Workspace, adamw_ref, join, round_ref, split
from stretto.ops.dropout import hash_ref
from stretto.optim import FlatAdamW
from tests.ops.checks import DEVICE, RUNS_KERNELS, rand

kernels = pytest.mark.skipif(not RUNS_KERNELS, reason="runs the kernel: needs TRITON_INTERPRET=1 or a GPU")
LENGTHS = [family.CHUNK + 6000, family.CHUNK + 7, 0, 1, 16, family.CHUNK, 4001]  # chunks and blocks, full and not
RULE = Rule(0.9, 0.999, 1e-8)
WAYS = {  # parameter, gradient, moments, whether there are lower halves
    "fp32": (torch.float32, torch.float32, torch.float32, False),
    "split": (torch.bfloat16, torch.bfloat16, torch.float32, True),
    "split, fp32 gradients": (torch.bfloat16, torch.float32, torch.float32, True),
    "split, bf16 moments": (torch.bfloat16, torch.bfloat16, torch.bfloat16, True),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
    "fp32, bf16 moments": (torch.float32, torch.float32, torch.bfloat16, False),
}


def misaligned(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    return torch.cat([x[:1], x])[1:]


class Case:
    """Parameters of the lengths above in the middle of training; every other one lies at an odd address."""

    def __init__(self, way: str, lengths: Sequence[int] = LENGTHS) -> None:
        param_type, grad_type, moment_type, halves = WAYS[way]
        self.places, end = [], 0
        for number, length in enumerate(lengths):
            self.places.append(Place(number, number % 2, end, length, first=1000 * number))
            end += -(-length // ALIGN) * ALIGN
        values = [split(rand(length, seed=number, scale=0.02).cpu()) for number, length in enumerate(lengths)]
        self.params = [high.to(DEVICE, param_type) for high, _ in values]
        self.grads = [rand(length, dtype=grad_type, seed=50 + number) for number, length in enumerate(lengths)]
        for number in range(1, len(lengths), 2):
            self.params[number] = misaligned(self.params[number])
            self.grads[number] = misaligned(self.grads[number])
        generator = torch.Generator().manual_seed(3)
        low = torch.randint(-(2**15), 2**15, (end,), generator=generator, dtype=torch.int16).to(DEVICE)
        self.state = Workspace(
            exp_avg=rand(end, dtype=moment_type, seed=91, scale=0.1),
            exp_avg_sq=rand(end, dtype=moment_type, seed=92, scale=0.1).square(),
            low=low if halves else None,
            steps=torch.arange(3.0, 3.0 + len(lengths), device=DEVICE),
            rates=torch.tensor([[1e-3, 0.1], [2e-3, 0.0]], device=DEVICE),
            keys=torch.tensor([[77, 3 + number] for number in range(len(lengths))], device=DEVICE),
        )
        betas = torch.tensor([RULE.beta1, RULE.beta2], dtype=torch.float64, device=DEVICE)
        self.control = Control(
            applied=torch.tensor(True, device=DEVICE),
            corrections=1 - betas ** self.state.steps[:, None],
            norm=torch.tensor(29.7, device=DEVICE),
            limit=3.1,
            scale=torch.tensor(3.0, device=DEVICE),
        )

    def results(self) -> list[Tensor]:
        flats = [self.state.exp_avg, self.state.exp_avg_sq, self.state.low]
        return [*self.params, *(flat for flat in flats if flat is not None)]

    def launch(self) -> Launch:
        launch = Launch(self.places, self.params[0].dtype, self.grads[0].dtype, torch.device(DEVICE))
        launch.aim(self.params, self.grads, self.params)
        return launch


def update(case: Case) -> list[Tensor]:
    case.launch().update(case.state, case.control, RULE)
    return case.results()


def update_ref(case: Case) -> list[Tensor]:
    for param, grad, place in zip(case.params, case.grads, case.places, strict=True):
        adamw_ref(param, param, grad, place, case.state, case.control, RULE)
    return case.results()


def assert_bits(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@kernels
@pytest.mark.parametrize("way", WAYS)
def test_kernel_is_the_reference_bit_for_bit(way: str) -> None:
    assert_bits(update(Case(way)), update_ref(Case(way)))


def drop_the_last_element(case: Case) -> None:
    case.places = [replace(place, length=max(place.length - 1, 0)) for place in case.places]


def do_not_clip(case: Case) -> None:
    case.control = replace(case.control, limit=math.inf)


def draw_other_bits(case: Case) -> None:
    case.places = [replace(place, first=place.first + 1) for place in case.places]


def exchange_state(case: Case) -> None:
    one, two, *rest = case.places
    case.places = [replace(one, offset=two.offset), replace(two, offset=one.offset), *rest]


@kernels
@pytest.mark.parametrize("plant", [drop_the_last_element, do_not_clip, draw_other_bits, exchange_state])
def test_planted_bugs_are_seen(plant: Callable[[Case], None]) -> None:
    right, wrong = Case("bf16", [5000, 7000]), Case("bf16", [5000, 7000])
    plant(wrong)
    with pytest.raises(AssertionError):
        assert_bits(update(wrong), update_ref(right))
    assert_bits(update(Case("bf16", [5000, 7000])), right.results())


@pytest.mark.parametrize("way", ["fp32", "split", "bf16"])
def test_an_update_that_is_not_applied_touches_nothing(way: str) -> None:
    case = Case(way)
    case.control = replace(case.control, applied=torch.tensor(False, device=DEVICE))
    assert_bits(update(case), Case(way).results())


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("way", ["fp32", "split", "bf16"])
def test_new_weights_go_where_they_are_told(way: str, applied: bool) -> None:
    case, known = Case(way), Case(way)
    known.control = case.control = replace(case.control, applied=torch.tensor(applied, device=DEVICE))
    outs, before = [torch.full_like(p, 7.0) for p in case.params], [p.clone() for p in case.params]
    launch = case.launch()
    launch.aim(case.params, case.grads, outs)
    launch.update(case.state, case.control, RULE)
    assert_bits(case.params, before)
    case.params = outs
    assert_bits(case.results(), update_ref(known))


@pytest.mark.parametrize("way", ["fp32", "bf16"])
def test_a_parameter_without_gradient_is_passed_over(way: str) -> None:
    case, whole = Case(way), Case(way)
    launch = case.launch()
    launch.aim(case.params, [None if number == 1 else grad for number, grad in enumerate(case.grads)], case.params)
    squares = launch.sum_squares()
    launch.update(case.state, case.control, RULE)
    untouched = Case(way)
    update(whole)
    for place in case.places:
        wanted = untouched if place.number == 1 else whole
        assert torch.equal(case.params[place.number], wanted.params[place.number])
        assert torch.equal(place.of(case.state.exp_avg), place.of(wanted.state.exp_avg))
    exact = sum(float(grad.double().square().sum()) for number, grad in enumerate(case.grads) if number != 1)
    assert float(squares) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares(dtype: torch.dtype) -> None:
    case = Case("fp32" if dtype == torch.float32 else "bf16")
    exact = sum(float(grad.double().square().sum()) for grad in case.grads)
    first, again = (case.launch().sum_squares() for _ in range(2))
    assert float(first) == pytest.approx(exact, rel=1e-6) and torch.equal(first, again)
    case.grads[1][-1] = torch.inf
    assert not case.launch().sum_squares().isfinite()


def test_a_process_without_elements_updates_nothing() -> None:
    case = Case("fp32", [0, 0])
    update(case)
    assert float(case.launch().sum_squares()) == 0.0


@pytest.mark.parametrize("weights", ["fp32", "split", "bf16"])
def test_autograd_hears_of_an_update(weights: str) -> None:
    """Once: of a weight by itself, of parts of one buffer, and not of one without a gradient, which stays as it was."""
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    buffer = rand(64, dtype=dtype, seed=1)
    values = [
        rand(4, 4, dtype=dtype),
        *(part.view(4, 4).data for part in buffer[:32].split(16)),
        rand(4, 4, dtype=dtype),
    ]
    params = [torch.nn.Parameter(value) for value in values]
    optimizer = FlatAdamW(params, weights=weights)
    x = rand(2, 4, dtype=dtype).requires_grad_()
    for used in ([0, 1, 2, 3], [0, 1, 2], [0, 1, 2]):
        early = [(x @ p).sum() for p in params]  # for the gradient of x they need the weights as they are now
        before = [(p._version, p.detach().clone()) for p in params]
        torch.stack([params[number].float().square().sum() for number in used]).sum().backward()
        optimizer.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        for number, (p, (version, old)) in enumerate(zip(params, before, strict=True)):
            assert (p._version, torch.equal(p, old)) == ((version + 1, False) if number in used else (version, True))
            if number in used:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    early[number].backward()
            else:
                early[number].backward()
        optimizer.zero_grad()


def test_halves_are_the_whole() -> None:
    """All exponents, both signs, ties, the largest number, infinities, NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).int()
    ties = (bits[:1000] & -0x10000) | 0x8000
    special = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.finfo(torch.float32).max, 1e-45, torch.nan])
    weight = torch.cat([bits.view(torch.float32), ties.view(torch.float32), special])
    high, low = split(weight)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    whole, number = join(high, low), ~weight.isnan()
    assert torch.equal(whole[number].view(torch.int32), weight[number].view(torch.int32))
    assert whole[~number].isnan().all() and high[~number].isnan().all(), "NaN must not hide in a finite half"
    tie = (weight.view(torch.int32) & 0xFFFF) == 0x8000
    assert tie.sum() > 900 and torch.equal(high[number & ~tie], weight[number & ~tie].bfloat16())
    with pytest.raises(AssertionError):  # the control: halves of another weight
        assert torch.equal(join(high, low.roll(1))[number], weight[number])


def random_bits(rows: int, cols: int) -> Tensor:
    key = torch.tensor([5, 9])
    return hash_ref(key, torch.arange(rows)[:, None], torch.arange(cols)[None])


def test_random_rounding_is_right_on_average() -> None:
    """Against the bounds and the mean, over 65,536 roundings of each of 8 numbers; five standard deviations."""
    x = torch.tensor([1.0, 1.001, -1.0029, 3.1415927, -1e-30, 0.1, 65000.0, 1e-40])
    rounded = round_ref(x.repeat(65536), random_bits(65536, 8).flatten()).view(-1, 8).double()
    below, above = rounded.min(0).values, rounded.max(0).values
    unit = above - below
    assert torch.equal(unit[0], torch.tensor(0.0, dtype=torch.float64)), "what bf16 can hold stays"
    assert (unit[1:] > 0).all() and (below <= x.double()).all() and (x.double() <= above).all()
    assert torch.equal(below[1:].float().bfloat16().view(torch.int16) + x[1:].sign().short(),
                       above[1:].float().bfloat16().view(torch.int16)), "neighbours"  # fmt: skip
    share = (x.double() - below) / unit.clamp(min=1e-300)
    deviation = unit * (share * (1 - share) / 65536).sqrt()
    assert ((rounded.mean(0) - x.double()).abs() <= 5 * deviation + 1e-7 * unit).all()
    nan = torch.full((400,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # the one of a GPU
    assert round_ref(nan, random_bits(1, 400).flatten()).isnan().all()
    infinite = torch.tensor([torch.inf, -torch.inf]).repeat(200)
    assert torch.equal(round_ref(infinite, random_bits(1, 400).flatten()), infinite.bfloat16())


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """One parameter and its state beyond 2^31 elements: the last chunk and a half, against the reference."""
    length, tail = 2**31 + family.CHUNK + 8, family.CHUNK * 3 // 2
    case = Case("bf16", [1])
    flat = {key: torch.zeros(length + 8, dtype=torch.bfloat16, device=DEVICE) for key in ("exp_avg", "exp_avg_sq")}
    case.state = replace(case.state, **flat)
    case.places = [Place(0, 0, 0, length, 0)]
    case.params = [torch.zeros(length, dtype=torch.bfloat16, device=DEVICE)]
    case.grads = [torch.zeros(length, dtype=torch.bfloat16, device=DEVICE)]
    case.params[0][-tail:], case.grads[0][-tail:] = rand(tail, seed=1), rand(tail, seed=2)
    small = Case("bf16", [tail])
    small.state = replace(small.state, **{key: torch.zeros_like(value[:tail]) for key, value in flat.items()})
    small.params, small.grads = [case.params[0][-tail:].clone()], [case.grads[0][-tail:].clone()]
    small.places = [Place(0, 0, 0, tail, length - tail)]
    update_ref(small)
    update(case)
    assert torch.equal(case.params[0][-tail:], small.params[0])
    assert torch.equal(case.state.exp_avg[length - tail : length], small.state.exp_avg)
    exact = small.grads[0].double().square().sum().item()
    assert case.launch().sum_squares().item() == pytest.approx(exact, rel=1e-6)
