"""Memory of clipped sums used again: the same numbers, and never under the eyes of somebody else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.engine import buffers
from fastdp.engine.buffers import WORTH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(300, 128), nn.Linear(128, 200), nn.Linear(200, 300)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.table(ids))))


def setup(base: str = "DPAdamW", **options):
    torch.manual_seed(0)
    model = Model()
    options = {"lr": 0.01, "noise_multiplier": 0.5, "expected_batch_size": 4, "seed": 1, **options}
    return model, getattr(fastdp, base)(model, **options)


def backward(model: nn.Module, seed: int) -> None:
    ids = torch.randint(0, 300, (4, 6), generator=torch.Generator().manual_seed(seed))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none").view(4, 6).mean(1).mean().backward()


def addresses(model: nn.Module) -> list[int]:
    return [p.grad.data_ptr() for p in model.parameters() if p.numel() >= WORTH]


def test_the_same_numbers_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(reuse: bool) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            if not reuse:
                patch.setattr(buffers, "_alone", lambda: None)
            model, optimizer = setup()
            for seed in range(4):
                backward(model, seed)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


@pytest.mark.parametrize("base", ["DPAdamW", "DPRMSprop"])
def test_blocks_are_used_again(base: str) -> None:
    model, optimizer = setup(base)
    found = []
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
        found.append(addresses(model))
        optimizer.zero_grad()
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3


@pytest.mark.parametrize("base", ["DPAdamW", "DPRMSprop"])
@pytest.mark.parametrize("keep", ["itself", "a view", "the model's"])
def test_a_gradient_that_somebody_keeps_is_left_alone(base: str, keep: str) -> None:
    """What it would show otherwise is the next clipped sum, before the noise."""
    model, optimizer = setup(base)
    backward(model, 0)
    optimizer.step()
    kept = [p.grad if keep != "a view" else p.grad.view(-1)[3:] for p in model.parameters()]
    before = [g.clone() for g in kept]
    if keep != "the model's":
        optimizer.zero_grad()
    for seed in (1, 2):
        backward(model, seed)
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_a_kept_storage_object_counts_too() -> None:
    model, optimizer = setup()
    backward(model, 0)
    optimizer.step()
    kept = [p.grad.untyped_storage() for p in model.parameters()]
    before = [torch.tensor(list(storage)) for storage in kept]
    optimizer.zero_grad()
    backward(model, 1)
    assert all(torch.equal(torch.tensor(list(s)), b) for s, b in zip(kept, before, strict=True))


def test_this_torch_shows_who_shares_memory() -> None:
    assert buffers._alone() is not None


def test_accumulated_physical_batches_do_not_share_a_block() -> None:
    data = torch.utils.data.TensorDataset(torch.randint(0, 300, (40, 6)))
    sums = []
    for physical in (None, 3):
        torch.manual_seed(0)
        model = Model()
        optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=0.5)
        loader = fastdp.poisson_loader(data, expected_batch_size=8, max_physical_batch_size=physical, seed=2)
        for (ids,) in loader:
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape).mean(
                1
            ).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sums.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
