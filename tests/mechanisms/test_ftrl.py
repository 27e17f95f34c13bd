"""DP-FTRL against the algorithm by hand in float64: noise of prefix sums, steps, restarts, checkpoints, refusals."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fastdp
from fastdp.errors import AccountingError, StepError
from fastdp.mechanisms import DPFTRL, ftrl_loader, variance_of
from fastdp.mechanisms.tree import TreeNoise

N, BATCH = 24, 4


def data(n: int = N) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=draw, dtype=torch.float64)
    return list(zip(x, x.sum(1, keepdim=True).sin(), strict=True))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def made(model: nn.Module, **options) -> DPFTRL:
    return DPFTRL(model, **{"lr": 0.1, "noise_multiplier": 0.7, "max_grad_norm": 0.5, "seed": 5, **options})


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum(1)


def train(optimizer: DPFTRL, model: nn.Module, loader, steps: int = 10**9) -> None:
    for step, (x, y) in enumerate(loader, 1):
        losses(model, x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == steps:
            break


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, bound: float, kind: str = "local") -> list[Tensor]:
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for loss in losses(model, x, y):
        gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
        norm = float(torch.cat([g.flatten() for g in gradient]).norm())
        factor = min(1.0, bound / norm) if kind == "local" else float(norm <= bound)
        for t, g in zip(total, gradient, strict=True):
            t += factor * g
    return total


class ByHand:
    """Prefix noise as Honaker's estimate, written over whole trees: all nodes drawn, none updated on the way."""

    def __init__(self, model: nn.Module, std: float, reduced: bool) -> None:
        self.source, self.std, self.reduced = TreeNoise(5), std, reduced
        self.shapes, self.offsets, place = [p.shape for p in model.parameters()], [], 0
        for shape in self.shapes:
            self.offsets.append(place)
            place += shape.numel()

    def own(self, end: int, height: int) -> list[Tensor]:
        return [
            self.source._draw(torch.zeros(s, dtype=torch.float64), self.std, end, height, o)
            for s, o in zip(self.shapes, self.offsets, strict=True)
        ]

    def node(self, first: int, low: int, height: int) -> list[Tensor]:
        """Of the leaves low + 1 .. low + 2^height."""
        end = first + low + 2**height
        if not self.reduced:
            return self.own(end, 0)
        mine = self.own(end, height)
        if height == 0:
            return mine
        halves = [self.node(first, low, height - 1), self.node(first, low + 2 ** (height - 1), height - 1)]
        below = 2 * 2 ** (height - 1) / (2**height - 1)  # the variance of the sum of the halves
        weight = below / (1 + below)
        return [weight * m + (1 - weight) * (a + b) for m, a, b in zip(mine, *halves, strict=True)]

    def prefix(self, first: int, leaves: int) -> list[Tensor]:
        total = [torch.zeros(s, dtype=torch.float64) for s in self.shapes]
        low = 0
        for height in reversed(range(leaves.bit_length())):
            if leaves >> height & 1:
                total = [t + n for t, n in zip(total, self.node(first, low, height), strict=True)]
                low += 2**height
        return total


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_the_algorithm_in_float64(reduced: bool, momentum: float) -> None:
    """theta_t = theta_0 - lr v_t, v_t = gamma v_(t-1) + s_t, over two trees; s_t by whole prefix sums."""
    model, epochs = network(), 2
    start, hand = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = made(model, momentum=momentum, variance_reduction=reduced)
    loader = ftrl_loader(data(), batch_size=BATCH)
    for _ in range(epochs):
        train(optimizer, model, loader)
    noise = ByHand(model, 0.7 * 0.5, reduced)
    sums = [torch.zeros_like(p) for p in hand.parameters()]
    past = [torch.zeros_like(p) for p in hand.parameters()]  # the noise of trees that are over
    v = [torch.zeros_like(p) for p in hand.parameters()]
    records = data()
    for epoch in range(epochs):
        for t in range(N // BATCH):
            x, y = (torch.stack(part) for part in zip(*records[t * BATCH : (t + 1) * BATCH], strict=True))
            for total, now in zip(sums, clipped_sum(hand, x, y, 0.5), strict=True):
                total += now
            drawn = noise.prefix(epoch * N // BATCH, t + 1)
            with torch.no_grad():
                for place, (p, p0) in enumerate(zip(hand.parameters(), start.parameters(), strict=True)):
                    s = (sums[place] + past[place] + drawn[place]) / BATCH
                    v[place] = momentum * v[place] + s
                    p.copy_(p0 - 0.1 * v[place])
        past = [a + b for a, b in zip(past, drawn, strict=True)]
    for mine, other in zip(model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)  # factors are float32
    assert [(tree.first, tree.steps) for tree in optimizer.trees] == [(0, 6), (0, 6)]


@pytest.mark.parametrize("reduced", [True, False])
def test_the_noise_of_prefix_sums_has_the_variance_of_theory(reduced: bool) -> None:
    """Variances over 20,000 elements, and the noise of a step taken alone of a tree of 13."""
    source, count = TreeNoise(3, reduced), 20_000
    prefix = torch.zeros(count, dtype=torch.float64)
    for t in range(1, 14):
        step = torch.zeros(count, dtype=torch.float64)
        source.add_tree_({0: step}, {0: 0}, 2.0)
        source.step += 1
        prefix += step
        ratio = float(prefix.square().mean()) / 4 / variance_of(t, reduced)
        assert abs(ratio - 1) < 5 * (2 / count) ** 0.5, (t, ratio)
    assert variance_of(13, reduced) == pytest.approx(8 / 15 + 4 / 7 + 1 if reduced else 3)


def test_the_noise_of_a_tree_is_for_what_rounding_adds_to_the_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    stds: list[float] = []
    monkeypatch.setattr(TreeNoise, "add_tree_", lambda noise, sums, offsets, std: stds.append(std))
    train(made(model := network()), model, ftrl_loader(data(), batch_size=12))
    assert stds == pytest.approx([0.35 * (1 + 2.0**-20 * 12 - 4e-6)] * 2, rel=1e-12)


@pytest.mark.parametrize("reduced", [True, False])
def test_a_sums_low_bits_do_not_stand_bare_beside_a_grid(reduced: bool) -> None:
    """The sum is not rounded, so its noise must not be: else what is left of a 64th of the noise would be the sum's."""
    source = TreeNoise(3, reduced)
    for _ in range(4):
        step = torch.full((20_000,), 0.01)
        source.add_tree_({0: step}, {0: 0}, 2.0)
        source.step += 1
        rest = step.double() * 32 % 1  # of units of 2 / 64
        assert abs(float(rest.std()) - 12**-0.5) < 0.01


# ---------------------------------------------------------------------- refusals


def test_wrong_loaders_are_refused_by_name() -> None:
    model = network()
    optimizer = made(model)
    with pytest.raises(StepError, match="poisson_loader samples anew"):
        train(optimizer, model, fastdp.poisson_loader(data(), expected_batch_size=BATCH, seed=0))
    with pytest.raises(StepError, match="no batch of it is in hand"):
        train(optimizer, model, torch.utils.data.DataLoader(data(), batch_size=BATCH))
    with pytest.raises(StepError, match="RandomSampler.*order=torch.randperm"):
        ftrl_loader(torch.utils.data.DataLoader(data(), batch_size=BATCH, shuffle=True))
    train(optimizer, model, ftrl_loader(data(), batch_size=BATCH))
    for other in (
        ftrl_loader(data(), batch_size=2 * BATCH),
        ftrl_loader(data(), batch_size=BATCH, order=list(reversed(range(N)))),
    ):
        with pytest.raises(StepError, match="another order, batch size"):
            train(optimizer, model, other)
    assert [tree.steps for tree in optimizer.trees] == [6]


class Stream(torch.utils.data.IterableDataset):
    """Yields the records of `data` in their order."""

    def __init__(self, records: int = N) -> None:
        self.records = records

    def __iter__(self):
        return iter(data(self.records))


class Sized(Stream):
    def __len__(self) -> int:
        return self.records


@pytest.mark.parametrize("given", [Sized(), DataLoader(Sized(), batch_size=BATCH), Stream()])
def test_a_stream_of_a_known_size_trains_as_a_list_does(given) -> None:
    """Two passes, the first left after two steps and taken up by another loader; the weights and epsilon are those of
    the records in a list."""
    found = []
    for source, known in ((data(), {}), (given, {} if hasattr(given, "__len__") else {"records": N})):
        model = network()
        optimizer, loader = made(model), ftrl_loader(source, batch_size=BATCH, max_physical_batch_size=3, **known)
        train(optimizer, model, loader, steps=4)  # of two physical batches each
        again = ftrl_loader(source, batch_size=BATCH, max_physical_batch_size=3, **known)
        again.load_state_dict(loader.state_dict())
        train(optimizer, model, again)
        train(optimizer, model, again)
        found.append((torch.nn.utils.parameters_to_vector(model.parameters()).detach(), optimizer.epsilon(1e-3)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_verify_reads_the_beginning_of_a_stream_once() -> None:
    begun = []

    class Watched(Stream):
        def __iter__(self):
            begun.append(1)
            return super().__iter__()

    loader = ftrl_loader(Watched(), records=N, batch_size=BATCH)
    assert "exact" in str(fastdp.verify(network(), lambda m, batch: losses(m, *batch).mean(), loader))
    assert len(begun) == 1


def test_streams_that_cannot_be_read_are_refused() -> None:
    for source, options, words in (
        (Stream(), {}, "give records="),
        (Stream(), {"records": 0}, "at least 1"),
        (torch.utils.data.ChainDataset([Stream()]), {}, "give records="),
        (Stream(), {"records": 2.5}, "records=2.5: give records="),
        (Stream(), {"records": N, "order": range(N)}, "its own order"),
        (DataLoader(Sized(), num_workers=1), {}, "num_workers="),
        (data(), {"records": N}, "give a part of the numbers as order="),
    ):
        with pytest.raises(ValueError, match=words):
            ftrl_loader(source, **{"batch_size": BATCH, **options})
    model = network()
    optimizer = made(model)
    with pytest.raises(StepError, match=f"no record {N}, and should have {2 * N}"):
        train(optimizer, model, ftrl_loader(Stream(), records=2 * N, batch_size=BATCH))
    assert sum(tree.steps for tree in optimizer.trees) == N // BATCH  # those that were made are counted


def test_dpsgd_refuses_a_fixed_order() -> None:
    model = network()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    with pytest.raises(StepError, match="fixed order"):
        train(optimizer, model, ftrl_loader(data(), batch_size=BATCH))
    assert not optimizer.history


def test_wrong_orders_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="record 2 is in the order twice"):
        ftrl_loader(data(), batch_size=2, order=[0, 2, 1, 2])
    twice = torch.utils.data.Subset(data(), [5, 6, 5, 7])
    for part in (twice, torch.utils.data.Subset(twice, [2, 0])):
        with pytest.raises(ValueError, match="holds a record twice"):
            ftrl_loader(part, batch_size=2)
    assert len(ftrl_loader(twice, batch_size=1, order=[1, 2])) == 2
    with pytest.raises(ValueError, match="has records 0 to 23"):
        ftrl_loader(data(), batch_size=2, order=[0, 24])
    with pytest.raises(ValueError, match="batch_size must be"):
        ftrl_loader(data())
    with pytest.raises(ValueError, match="more than the 24"):
        ftrl_loader(data(), batch_size=25)
    with pytest.raises(ValueError, match="the order is order="):
        ftrl_loader(data(), batch_size=4, shuffle=True)
    with pytest.warns(UserWarning, match="4 record"):
        assert len(ftrl_loader(data(), batch_size=5)) == 4
    with pytest.raises(AccountingError, match="no amplification"):
        _ = ftrl_loader(data(), batch_size=4).sample_rate


def test_what_has_no_meaning_in_a_tree_is_refused() -> None:
    model = network()
    with pytest.raises(AccountingError, match="no amplification"):
        made(model, sample_rate=0.1)
    with pytest.raises(StepError, match="ledger="):
        made(model, ledger="steps")
    optimizer = made(model)
    for refused in (
        lambda: optimizer.group_by([0, 1]),
        lambda: optimizer.noise_state(),
        lambda: optimizer.load_noise_state({}),
        lambda: optimizer.graphed(losses),
    ):
        with pytest.raises(StepError):
            refused()
    loader = ftrl_loader(data(), batch_size=BATCH)
    train(optimizer, model, loader, steps=2)
    loader.load_state_dict({"pass": 0, "step": 2})
    for noise, bound in ((5.0, 0.5), (0.35, 1.0)):  # the second with noise of the same size, for longer gradients
        optimizer.noise_multiplier = noise
        optimizer.set_clipping(max_grad_norm=bound)
        with pytest.raises(StepError, match="between passes"):
            train(optimizer, model, loader)
        loader.load_state_dict({"pass": 0, "step": 2})
    optimizer.noise_multiplier = 0.7
    optimizer.set_clipping(max_grad_norm=0.5)
    train(optimizer, model, loader, steps=1)
    model[0].weight.requires_grad_(False)
    loader.load_state_dict({"pass": 0, "step": 3})
    with pytest.raises(StepError, match="other parameters"):
        train(optimizer, model, loader)


def test_the_page_runs(capsys):
    """docs/mechanisms.md's examples, and the epsilon of DP-FTRL's is what it says."""
    text = (Path(__file__).parents[2] / "docs/mechanisms.md").read_text(encoding="utf-8")
    adaptive, tree = re.findall(r"```python\n(.*?)```", text, re.S)[:2]
    exec(compile(adaptive, "mechanisms.md", "exec"), {})
    assert 0 < float(capsys.readouterr().out) < 10
    exec(compile(tree, "mechanisms.md", "exec"), {})
    assert 7.5 < float(capsys.readouterr().out) <= 8
