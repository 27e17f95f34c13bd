"""GRAD_SAMPLERS and NORM_SAMPLERS hold what Opacus registers, and these functions, called on their own, are right."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("opacus")
from fastdp.compat.opacus.grad_sample.conv import convolution2d_backward_as_a_convolution
from opacus.grad_sample import GradSampleModule as Theirs
from opacus.grad_sample import GradSampleModuleFastGradientClipping as TheirGhost
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import RNNLinear

from fastdp.compat.opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

N = 3
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear of tokens": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "rnn linear": (lambda: RNNLinear(4, 3), (4,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (4, 7)),
    "conv1d same": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (4, 7, 8)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, groups=2), (2, 4, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "layer norm": (lambda: nn.LayerNorm((5, 4)), (3, 5, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), (4,)),
    "rms norm": (lambda: nn.RMSNorm(4), (5, 4)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (4, 6)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(4, affine=True), (4, 2, 2, 2)),
    "sequence bias": (lambda: SequenceBias(4, batch_first=True), (5, 4)),
}


def truth(layer: nn.Module, samples: list[tuple[Tensor, ...]], backprops: Tensor) -> dict[str, Tensor]:
    """Each sample alone, by .grad of the sum of its output and its gradient."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in layer.named_parameters()}
    for n, inputs in enumerate(samples):
        layer.zero_grad()
        (layer(*inputs) * backprops[n : n + 1]).sum().backward()
        for name, p in layer.named_parameters():
            rows[name].append(p.grad.clone())
    layer.zero_grad()
    return {name: torch.stack(found) for name, found in rows.items()}


def compare(layer: nn.Module, activations: list[Tensor], samples: list[tuple[Tensor, ...]], out: Tensor) -> None:
    backprops = torch.randn(out.shape)
    wanted = truth(layer, samples, backprops)
    found = GradSampleModule.GRAD_SAMPLERS[type(layer)](layer, activations, backprops)
    assert set(found) == set(layer.parameters()) and all(p.grad is None for p in layer.parameters())
    for name, p in layer.named_parameters():
        assert torch.allclose(found[p], wanted[name], rtol=1e-4, atol=1e-5), name
    if (norms := GradSampleModuleFastGradientClipping.NORM_SAMPLERS.get(type(layer))) is not None:
        for p, norm in norms(layer, activations, backprops).items():
            assert torch.allclose(norm, found[p].flatten(1).norm(dim=1), rtol=1e-4)


def test_all_layers_of_opacus_are_there():
    assert set(GradSampleModule.GRAD_SAMPLERS) >= set(Theirs.GRAD_SAMPLERS)
    assert set(GradSampleModuleFastGradientClipping.GRAD_SAMPLERS) >= set(TheirGhost.GRAD_SAMPLERS)
    assert set(GradSampleModuleFastGradientClipping.NORM_SAMPLERS) >= set(TheirGhost.NORM_SAMPLERS)
    tested = {type(make()) for make, _ in LAYERS.values()} | {nn.Embedding, nn.EmbeddingBag}
    assert tested == set(Theirs.GRAD_SAMPLERS)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_s_gradients_are_those_of_each_sample_alone(name: str):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(N, *shape)
    before = [b.clone() for b in layer.buffers()]
    with torch.no_grad():
        out = layer(x)
    for b, value in zip(layer.buffers(), before, strict=True):
        b.copy_(value)
    activations = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x]
    compare(layer.eval() if before else layer, activations, [(x[n : n + 1],) for n in range(N)], out)
    layer.train()
    GradSampleModule.GRAD_SAMPLERS[type(layer)](layer, activations, torch.ones_like(out))
    assert all(torch.equal(b, value) for b, value in zip(layer.buffers(), before, strict=True))


def test_tables():
    torch.manual_seed(0)
    ids = torch.tensor([[1, 1, 4], [0, 2, 1], [4, 4, 4]])
    table = nn.Embedding(5, 3, padding_idx=0)
    compare(table, [ids], [(ids[n : n + 1],) for n in range(N)], table(ids))
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(5, 3, mode=mode)
        flat, offsets, bags = ids.flatten(), torch.tensor([0, 2, 7]), [(0, 2), (2, 7), (7, 9)]
        samples = [(flat[low:high], torch.tensor([0])) for low, high in bags]
        compare(bag, [flat, offsets], samples, bag(flat, offsets))
        compare(bag, [ids], [(ids[n : n + 1],) for n in range(N)], bag(ids))
    last = nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=True)
    ends = torch.tensor([0, 2, 7, 9])
    compare(last, [flat, ends], [(flat[a:b], torch.tensor([0, b - a])) for a, b in bags], last(flat, ends))


def test_batch_second_frozen_empty_and_sixteen_bits():
    torch.manual_seed(0)
    bias = SequenceBias(4)
    g = torch.randn(N, 6, 4)
    (found,) = GradSampleModule.GRAD_SAMPLERS[SequenceBias](bias, [torch.randn(N, 5, 4)], g).values()
    assert torch.equal(found, g[:, -1])
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    sampler = GradSampleModule.GRAD_SAMPLERS[nn.Linear]
    assert list(sampler(layer, [torch.randn(2, 4)], torch.randn(2, 3))) == [layer.weight]
    assert sampler(layer, [torch.randn(0, 4)], torch.randn(0, 3))[layer.weight].shape == (0, 3, 4)
    x, g = torch.randn(2, 4).bfloat16(), torch.randn(2, 3).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rows = sampler(layer, [x], g)[layer.weight]
    assert torch.allclose(rows, torch.einsum("ni,nj->nij", g.float(), x.float()))


def test_what_opacus_does_in_its_own_test_of_convolutions():
    """It puts another function there and back; the engine warns of one that is not the library's, and calls neither."""
    before = GradSampleModule.GRAD_SAMPLERS[nn.Conv2d]
    x = torch.randn(N, 2, 5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradSampleModule(nn.Conv2d(2, 3, 3))
    try:
        GradSampleModule.GRAD_SAMPLERS[nn.Conv2d] = convolution2d_backward_as_a_convolution
        with pytest.warns(UserWarning, match="registered by register_grad_sampler for Conv2d are not called"):
            model = GradSampleModule(nn.Conv2d(2, 3, 3))
        model(x).square().mean((1, 2, 3)).mean().backward()
        assert model._module.weight.grad_sample.shape == (N, 3, 2, 3, 3)
    finally:
        GradSampleModule.GRAD_SAMPLERS[nn.Conv2d] = before


def test_a_layer_with_an_engine_is_left_alone():
    model = GradSampleModule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    model(torch.randn(N, 4)).square().sum(1).mean().backward()
    layer = model._module[0]
    waiting = layer.weight.grad_sample.clone()
    GradSampleModule.GRAD_SAMPLERS[nn.Linear](layer, [torch.randn(N, 4)], torch.randn(N, 4))
    assert torch.equal(layer.weight.grad_sample, waiting)
