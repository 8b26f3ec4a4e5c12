"""Timing, and the accounts of where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto.bench.measure
from stretto.bench.batches import draw_batches
from stretto.bench.contest import make_recipe
from stretto.bench.measure import (
    Contestant,
    Kernel,
    Work,
    categorise,
    find_floor,
    measure,
    measure_ceilings,
    summarise,
    time_passes,
    warm_up,
)
from stretto.bench.peers import build_accelerated, build_peer
from stretto.bench.worker import build_ours, count_work
from stretto.bench.workloads import WORKLOADS, fit_to_device
from stretto.config import build_config
from stretto.errors import ConfigError, NonFiniteError
from stretto.runtime import Runtime

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(...)", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>(...)", "gemm"),
        ("triton_tem_fused_mm_3", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention::AttentionBackward)", "attention"),
        ("triton_tem_fused_flex_attention_backward_7", "attention"),
        ("_attn_fwd", "attention"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>(...)", "optimizer"),
        ("void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float>", "optimizer"),
        ("_adamw_kernel", "optimizer"),
        ("_squares_kernel", "optimizer"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_transpose_view_3", "rest"),
        ("triton_per_fused__to_copy_addmm_native_layer_norm_backward_12", "rest"),
        ("triton_red_fused__log_softmax_nll_loss_forward_5", "rest"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "rest"),
        ("Memcpy DtoD (Device -> Device)", "rest"),
        ("_add_norm_forward", "rest"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart_by_name(name: str, category: str) -> None:
    assert categorise(name) == category


def test_the_accounts_add_up() -> None:
    """Two steps of 1 ms: the second product overlaps the attention kernel by 100 us, on another stream."""
    kernels = [
        Kernel("nvjet_a", 0, 400),
        Kernel("flash_fwd", 500, 800),
        Kernel("nvjet_a", 700, 1100),
        Kernel("_adamw", 1200, 1300),
        Kernel("gelu", 1300, 1500),
    ]
    accounts = summarise(kernels, num_steps=2, step_ms=1.0)
    expected = {"gemm": 0.4, "attention": 0.15, "optimizer": 0.05, "rest": 0.1, "idle": 1.0 - 0.65}
    assert accounts["breakdown_ms"] == pytest.approx(expected)
    top = accounts["kernels"]
    assert [kernel["name"] for kernel in top] == ["nvjet_a", "flash_fwd", "gelu", "_adamw"]
    assert top[0] == {"name": "nvjet_a", "category": "gemm", "ms": pytest.approx(0.4), "calls": 1.0}
    many = [Kernel(f"kernel {i}", i, i + 1 + i / 100) for i in range(60)]
    names = [kernel["name"] for kernel in summarise(many, 1, 1.0)["kernels"]]
    assert names == [f"kernel {i}" for i in range(59, 19, -1)]


class Sleeper:
    """Steps that take time on a clock of their own: the first ones as long as `slow_s` says, as if they compiled, then
    0.02 s."""

    def __init__(self, *slow_s: float) -> None:
        self.slow_s, self.seen, self.now = slow_s, list[int](), 0.0

    def be_the_clock(self, monkeypatch: pytest.MonkeyPatch, others: Callable[[], float] = lambda: 0.0) -> None:
        clock = SimpleNamespace(perf_counter=lambda: self.now + others())
        monkeypatch.setattr(stretto.bench.measure, "time", clock)

    def step(self, i: int) -> Tensor:
        done = len(self.seen)
        self.now += self.slow_s[done] if done < len(self.slow_s) else 0.02
        self.seen.append(i)
        return torch.tensor(8.0 + done)


def test_warm_up_ends_when_passes_no_longer_get_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper(0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05)
    sleeper.be_the_clock(monkeypatch)
    assert warm_up(Contestant(sleeper.step, []), 2, CPU) == 8.0  # the loss of the first step
    assert len(sleeper.seen) >= 12  # four slow passes, then two that agree
    assert sleeper.seen == list(range(len(sleeper.seen)))


def test_every_pass_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper(0.2, 0.2)
    sleeper.be_the_clock(monkeypatch)
    seconds, loss = time_passes(Contestant(sleeper.step, []), 2, 3, CPU)
    assert seconds == pytest.approx([0.4, 0.04, 0.04])
    assert loss == 13.0 and sleeper.seen == list(range(6))


def test_numbers_follow_from_the_time_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.zeros(1000), torch.zeros(24, dtype=torch.bfloat16)]
    sleeper = Sleeper()
    sleeper.be_the_clock(monkeypatch, others=time.perf_counter)  # the rates of this machine are measured too
    numbers = measure(Contestant(sleeper.step, parameters), Work(2, 500, 4e9), 3, CPU, torch.float32)
    step_s = numbers["step_ms"] / 1e3
    assert len(numbers["step_ms_by_pass"]) == 2  # three steps are rounded up to two passes
    assert step_s > 0.02 and numbers["tokens_per_s"] == pytest.approx(500 / 2 / step_s)
    assert numbers["parameters"] == 1024 and numbers["flops_per_step"] == 2e9 and numbers["mfu"] is None
    assert numbers["first_loss"] == 8.0 and numbers["last_loss"] == 7.0 + len(sleeper.seen)
    floor_s = 2e9 / (numbers["matmul_tflops"] * 1e12) + 7 * 4048 / (numbers["copy_tb_per_s"] * 1e12)
    assert numbers["floor_ms"] == pytest.approx(1e3 * floor_s)
    assert numbers["floor_share"] == pytest.approx(floor_s / step_s)


def test_a_loss_that_is_not_finite_has_no_time() -> None:
    with pytest.raises(NonFiniteError):
        measure(Contestant(lambda i: torch.tensor(float("inf")), []), Work(2, 1, 1.0), 2, CPU, torch.float32)


def test_ceilings_are_of_a_possible_size() -> None:
    flops_per_s, bytes_per_s = measure_ceilings(CPU, torch.float32)
    assert 1e8 < flops_per_s < 1e14 and 1e8 < bytes_per_s < 1e12
    assert find_floor(Work(1, 1, 1e12), [], 1.0, CPU, torch.float32)["floor_ms"] > 10


def test_peers_with_another_number_of_parameters_are_refused() -> None:
    workload = fit_to_device(WORKLOADS["transformer_big_mt_512"], "cpu")
    config = build_config(make_recipe(workload, "hf eager") | {"model": workload.model | {"head_bias": True}})
    with pytest.raises(ConfigError, match="parameters"):  # their bias of the logits is not trained
        build_peer(config, {}, [], "eager", CPU, torch.float32)


@pytest.mark.parametrize("name", ["stretto plain", "stretto hf", "hf eager"])
def test_bf16_weights(name: str) -> None:
    """Parameters and moments are bf16, and steps lower the loss."""
    workload = fit_to_device(WORKLOADS["llama1b_4x4096"], "cpu")
    changes: dict[str, Any] = {"train": {"precision": "bf16"}, "optim": {"lr": 3e-3}}
    if name == "stretto hf":
        changes["techniques"] = {"fused": {"weights": "bf16", "moments": "bf16"}}
    config = build_config(make_recipe(workload, name) | changes)
    draws = draw_batches(workload, config.model)[:1]
    if name == "hf eager":
        contestant = build_peer(config, {}, draws, "eager", CPU, torch.bfloat16)
    elif name == "stretto hf":
        contestant = build_accelerated(config, {}, draws, CPU)
    else:
        contestant = build_ours(config, draws, Runtime(CPU), torch.bfloat16)
        assert torch.get_default_dtype() == torch.float32
    assert {p.dtype for p in contestant.parameters} == {torch.bfloat16}
    losses = [float(contestant.step(i)) for i in range(8)]
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # ln 512
    assert losses[-1] < losses[0] - 0.1
    assert count_work(config, draws, Runtime(CPU)).tokens == 4 * 64


def test_work_is_that_of_the_blocks_that_are_not_left_out() -> None:
    workload = fit_to_device(WORKLOADS["gpt2_small_1x1024"], "cpu")
    recipe = make_recipe(workload, "stretto") | {"model": workload.model | {"layers": 4}}
    plain = build_config(recipe)
    drop = {"schedule": "constant", "theta": 0.5, "index": "text"}  # 1.25 blocks are left out of 4
    dropping = build_config(recipe | {"techniques": {"layer_drop": drop}})
    draws = draw_batches(workload, plain.model)
    whole, left = (count_work(config, draws, Runtime(CPU)) for config in (plain, dropping))
    shallow = count_work(build_config(recipe | {"model": recipe["model"] | {"layers": 3}}), draws, Runtime(CPU))
    block = whole.flops - shallow.flops
    assert left.tokens == whole.tokens and whole.flops - left.flops == pytest.approx(1.25 * block, rel=0.15)


@pytest.mark.parametrize(("weights", "dtype"), [("fp32", torch.float32), ("split", torch.bfloat16)])
def test_the_accelerated_one_keeps_its_weights_as_asked(weights: str, dtype: torch.dtype) -> None:
    workload = fit_to_device(WORKLOADS["gpt2_small_1x1024"], "cpu")
    changes = {"techniques": {"fused": {"weights": weights}}, "train": {"precision": "bf16"}}
    config = build_config(make_recipe(workload, "stretto hf") | changes)
    assert {p.dtype for p in build_accelerated(config, {}, [], CPU).parameters} == {dtype}


@pytest.mark.gpu
def test_a_gpu_is_accounted_for() -> None:
    device = torch.device("cuda")
    weight = torch.nn.Parameter(torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) / 64)
    q = torch.randn(8, 16, 1024, 64, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step(i: int) -> Tensor:
        x = torch.nn.functional.scaled_dot_product_attention(q, q, q).view(-1, 4096) @ weight
        loss = x.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    flops = 2 * (2 * 2048 * 4096**2) + 4 * 8 * 16 * 1024**2 * 64
    numbers = measure(Contestant(step, [weight]), Work(2, 4096, 2.0 * flops), 20, device, torch.bfloat16)
    parts = numbers["breakdown_ms"]
    assert all(parts[name] > 0 for name in ("gemm", "attention", "optimizer", "rest"))
    assert sum(parts.values()) == pytest.approx(numbers["step_ms"], rel=0.2)
    assert numbers["kernels"][0]["ms"] <= numbers["step_ms"] and numbers["memory_gib"] > 0.1
    assert 0 < numbers["floor_share"] < 1
