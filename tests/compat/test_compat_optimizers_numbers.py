"""Numbers of the optimizers of fastdp.compat.opacus: 16 bits, adaptive norms, noise by backward, process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fastdp.compat import opacus as ours
from fastdp.compat.opacus import grad_sample, optimizers

from ..truth import truth
from .test_compat_optimizers import X, Y, backward, check, clipped_sum, losses, pair, plain

# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("look", [False, True])
def test_a_sample_that_is_not_finite_contributes_nothing(mode, look):
    model, optimizer = pair(mode)
    expected = clipped_sum(model._module, rows=[0, 1, 3, 4, 5])
    broken = X.clone()
    broken[2] = float("nan")
    F.cross_entropy(model(broken), Y).backward()
    if look and mode == "hooks":
        assert len(optimizer.grad_samples) == 4
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_sixteen_bit_models_are_summed_in_float32(mode):
    model, optimizer = pair(mode, model=plain(torch.bfloat16), noise=1e-6)
    F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
    optimizer.step()
    for p in optimizer.params:
        assert (p.summed_grad.dtype, p.grad.dtype) == (torch.float32, torch.bfloat16)
    total = torch.cat([p.summed_grad.flatten() for p in optimizer.params])
    assert torch.allclose(torch.cat([p.grad.float().flatten() for p in optimizer.params]) * 6, total, rtol=0.02)


def test_adaptive_norms_follow_the_quantile_over_all_parts_of_a_batch():
    model = grad_sample.GradSampleModule(plain())
    optimizer = optimizers.AdaClipDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=0.0, target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.5, max_clipbound=10.0, min_clipbound=1e-3, unclipped_num_std=1e-6,
        max_grad_norm=10.0, expected_batch_size=6,
    )  # fmt: skip
    for _ in range(40):
        for rows, skip in ((slice(0, 2), True), (slice(2, 6), False)):
            optimizer.signal_skip_step(skip)
            optimizer.zero_grad()
            backward(model, rows)
            optimizer.step()
        assert optimizer.sample_size == 6
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in truth(model._module, (X, Y), losses).values()]).norm(dim=0)
    assert norms.sort().values[2] * 0.9 < optimizer.max_grad_norm < norms.sort().values[4]
    optimizer.zero_grad()
    bound = optimizer.max_grad_norm
    F.cross_entropy(model(X[:0]), Y[:0]).backward()
    optimizer.step()  # an empty batch counts like one whose samples are half above the norm and half below
    assert optimizer.max_grad_norm == pytest.approx(bound, rel=1e-5)
    with pytest.raises(ValueError, match="expected_batch_size"):
        optimizers.AdaClipDPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=0.0, target_unclipped_quantile=0.5,
            clipbound_learning_rate=0.5, max_clipbound=10.0, min_clipbound=1e-3, unclipped_num_std=1e-6,
            max_grad_norm=10.0, expected_batch_size=None, loss_reduction="sum",
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_noise_is_of_the_largest_norm_among_the_backwards_of_a_step(mode):
    model, optimizer = pair(
        mode, noise=3.0, max_grad_norm=2.0, model=nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 3))
    )
    if mode == "ghost":
        backward(model)
        optimizer.max_grad_norm = 0.001
    else:
        optimizer.signal_skip_step(True)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.001
    backward(model)
    optimizer.step()
    scale = 6 * optimizer.accumulated_iterations
    noise = torch.cat([(p.grad * scale - p.summed_grad).flatten() for p in optimizer.params])
    assert float(noise.std()) == pytest.approx(6.0, rel=0.03)


def test_clipping_norms_of_layers_set_the_noise_whatever_max_grad_norm_becomes():
    """Schedulers change max_grad_norm, which clips nothing in this mode."""
    model = grad_sample.GradSampleModule(nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 3)))
    optimizer = optimizers.DPPerLayerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=3.0, max_grad_norm=[1.0] * 4,
        expected_batch_size=6,
    )  # fmt: skip
    optimizer.max_grad_norm = 1e-3
    backward(model)
    optimizer.step()
    noise = torch.cat([(p.grad * 6 - p.summed_grad).flatten() for p in optimizer.params])
    assert float(noise.std()) == pytest.approx(6.0, rel=0.03)


def test_a_part_of_a_batch_is_taken_once():
    """Without zero_grad() what the part before it left would be added again, at twice the clipping norm."""
    model, optimizer = pair()
    optimizer.signal_skip_step(True)
    backward(model, slice(0, 2))
    optimizer.step()
    backward(model, slice(2, 6))
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.step()


# ------------------------------------------------------------------ process groups


def test_optimizers_of_process_groups(tmp_path):
    inside = torch.optim.SGD(plain().parameters(), lr=0.1)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 6}
    kinds = [optimizers.get_optimizer_class("flat", True, m) for m in ("hooks", "ghost")]
    for kind in kinds:
        with pytest.raises(ValueError, match="process group"):
            kind(inside, **options)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert [(o := kind(inside, **options)).rank + o.world_size for kind in kinds] == [1, 1]
        ours.distributed.DifferentiallyPrivateDistributedDataParallel(plain())
        with pytest.raises(ValueError, match="ghost_fsdp"):
            optimizers.FSDPOptimizerFastGradientClipping(inside, **options)
    finally:
        dist.destroy_process_group()


def test_noise_does_not_repeat_between_parameters():
    model, optimizer = pair(model=nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 3)), noise=1.0)
    backward(model)
    optimizer.step()
    noise = [(p.grad * 6 - p.summed_grad).flatten()[:900] for p in optimizer.params if p.numel() >= 900]
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.15
