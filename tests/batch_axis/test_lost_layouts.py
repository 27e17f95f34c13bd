"""Data that torch hands on out of sight: other tensors over its memory, numpy, Python numbers. Refused, or followed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import BatchReadWarning, FastDPError, UncapturedUseError

from ..cases import Net
from ..removal import Between, of_rows

B, D = 5, 4
Function = Callable[[Any, Tensor], Tensor]


def less_mean(t: Tensor) -> Tensor:
    return t - t.mean(0)


def written(write: Callable[[Tensor], Any]) -> Function:
    """y = a clone, which is written to out of sight."""

    def function(m: Any, h: Tensor) -> Tensor:
        y = h.clone()
        write(y)
        return y

    return function


def other(make: Callable[[Tensor], Tensor]) -> Function:
    """Another tensor of the same numbers, by which samples are mixed."""
    return lambda m, h: h + 3 * less_mean(make(h.detach()))


def filled(fill: Callable[[Tensor, Tensor], Any]) -> Function:
    """A constant that is filled with data, by which samples are mixed."""

    def function(m: Any, h: Tensor) -> Tensor:
        z = torch.zeros(h.shape)
        fill(z, h.detach())
        return h + 3 * less_mean(z)

    return function


def from_state(h: Tensor) -> Tensor:
    z = torch.empty(0)
    z.__setstate__((h.untyped_storage(), 0, h.shape, h.stride()))
    return z


def attention(m: Any, h: Tensor) -> Tensor:
    keys = nn.Parameter(h.detach())
    return torch.softmax(h @ keys.T, -1) @ keys


def numpy_in_place(y: Tensor) -> None:
    numbers = y.detach().numpy()
    numbers -= numbers.mean(0)


def complex_pair(m: Any, h: Tensor) -> Tensor:
    pair = torch.view_as_real(torch.complex(h, h))
    pair.data.sub_(pair.data.mean(0))
    return pair[..., 0]


def out_argument(m: Any, h: Tensor) -> Tensor:
    y = h.clone()
    torch.sub(h.detach(), h.detach().mean(0), out=y.detach())
    return y


def frozen_written(m: Any, h: Tensor) -> Tensor:
    m.frozen.data[0] = h.detach().mean(0)
    return h * m.frozen[0]


def weight_written(m: Any, h: Tensor) -> Tensor:
    m.a.weight.data[0] = h.detach().mean(0)
    return F.linear(h, m.a.weight)


def weight_exchanged(m: Any, h: Tensor) -> Tensor:
    m.a.weight.data = h.detach()[:D]
    return F.linear(h, m.a.weight)


def derived_written(m: Any, h: Tensor) -> Tensor:
    weight = m.a.weight * 1
    weight.data.copy_(h.detach()[:D])
    return F.linear(h, weight)


@torch.library.custom_op("fastdp_tests::write", mutates_args=("out",))
def write(out: Tensor, x: Tensor) -> None:
    """Writes into an argument and returns nothing."""
    out.copy_(x - x.mean(0))


def by_operator(m: Any, h: Tensor) -> Tensor:
    z = torch.zeros(h.shape)
    write(z, h.detach())
    return h + 3 * z


LOST: dict[str, Function] = {
    "data": written(lambda y: y.data.sub_(y.data.mean(0))),
    "detach": written(lambda y: y.detach().sub_(y.detach().mean(0))),
    "a row of data": written(lambda y: y.data[0].add_(y.data[1])),
    "a column of data": written(lambda y: y.data.T[0].sub_(y.data.mean(0)[0])),
    "data, by index": written(lambda y: y.data.__setitem__(0, y.data[1])),
    "data of a view": written(lambda y: y[:2].data.copy_(y[1:3].data.clone())),
    "data exchanged": written(lambda y: setattr(y, "data", y.detach().flip(0))),
    "an operator of aten": written(lambda y: torch.ops.aten.sub_.Tensor(y.detach(), y.detach().mean(0))),
    "a function of lists": written(
        lambda y: torch._foreach_sub_([y.detach()], [y.mean(0, True).detach().expand(y.shape)])
    ),
    "numbers of rows": written(lambda y: y.detach().map_(y.detach().flip(0), lambda a, b: a - b)),
    "a storage": written(lambda y: y.untyped_storage().copy_(less_mean(y.detach()).untyped_storage())),
    "numpy in place": written(numpy_in_place),
    "dlpack in place": written(lambda y: (lambda z: z.sub_(z.mean(0)))(torch.from_dlpack(y.detach()))),
    "out=": out_argument,
    "a pair": complex_pair,
    "set_": other(lambda h: torch.zeros(0).set_(h)),
    "set_ of a storage": other(lambda h: torch.zeros(0).set_(h.untyped_storage(), 0, h.shape)),
    "set_ of data": lambda m, h: (lambda y: h + y.set_(h.detach().flip(0)))(h.detach().clone()),
    "Parameter": other(nn.Parameter),
    "Parameter of a clone": other(lambda h: nn.Parameter(h.clone(), requires_grad=False)),
    "attention over a Parameter": attention,
    "_make_subclass": other(lambda h: torch.Tensor._make_subclass(torch.Tensor, h)),
    "from_dlpack": other(torch.from_dlpack),
    "to_dlpack": other(lambda h: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h))),
    "from_numpy": other(lambda h: torch.from_numpy(h.numpy())),
    "as_tensor": other(lambda h: torch.as_tensor(h.numpy())),
    "a copy of numpy": other(lambda h: torch.from_numpy(h.numpy().copy())),
    "numpy's arithmetic": other(lambda h: torch.tensor(h.numpy() * 2)),
    "tolist": other(lambda h: torch.tensor(h.tolist())),
    "whole numbers": other(lambda h: torch.tensor((h > 0).long().tolist()).float()),
    "single numbers": other(lambda h: torch.tensor([[float(v) for v in row] for row in h])),
    "__setstate__": other(from_state),
    "filled by data": filled(lambda z, h: z.data.copy_(h)),
    "filled by data and index": filled(lambda z, h: z.data.__setitem__(slice(None), h)),
    "filled by storage": filled(lambda z, h: z.untyped_storage().copy_(h.contiguous().untyped_storage())),
    "a buffer's data": lambda m, h: (m.kept.data[: len(h)].copy_(h.detach()), h + 3 * less_mean(m.kept[: len(h)]))[1],
    "a frozen weight's data": frozen_written,
    "a weight's data": weight_written,
    "a weight exchanged": weight_exchanged,
    "a derived weight's data": derived_written,
    "an operator of one's own": by_operator,
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.filterwarnings("ignore::fastdp.errors.BatchReadWarning")
def test_what_is_lost_is_found_and_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Between(LOST[name])
    for _ in range(2):  # known calls are found as well
        with pytest.raises(FastDPError):
            of_rows(model, torch.randn(B, D))


RIGHT: dict[str, Function] = {
    "data, element by element": written(lambda y: y.data.relu_()),
    "detach, element by element": written(lambda y: y.detach().mul_(2)),
    "data within samples": written(lambda y: y.data.sub_(y.data.mean(1, keepdim=True))),
    "data exchanged": written(lambda y: setattr(y, "data", y.data * 2)),
    "a constant filled": lambda m, h: (lambda z: (z.data.copy_(h.detach()), h + z)[1])(torch.zeros(h.shape)),
    "copies": lambda m, h: h + copy.copy(h.detach()) + copy.deepcopy(h.detach()),
    "a frozen weight's data": lambda m, h: h + m.frozen.data[0] + m.frozen.detach()[1],
    "a table of numpy": lambda m, h: h + torch.from_numpy(m.frozen.numpy().copy())[0],
    "lengths": lambda m, h: h * torch.tensor((h > 0).long().tolist()).float(),
    "dropout": written(lambda y: F.dropout(y, 0.0, inplace=True)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_stays_with_its_sample_goes_on(name: str) -> None:
    torch.manual_seed(0)
    model = Between(RIGHT[name])
    assert of_rows(model, torch.randn(B, D)) < 1.0001
    assert of_rows(model, torch.randn(B, D)) < 1.0001


def test_a_parameter_that_data_was_written_to_is_named() -> None:
    with pytest.raises(UncapturedUseError, match=r"'a.weight'.*memory data"):
        of_rows(Between(weight_written), torch.randn(B, D))


def test_logging_by_numpy_is_warned_of_and_exact() -> None:
    log: list[float] = []

    def function(m: Any, h: Tensor) -> Tensor:
        log.append(float(h.detach().numpy().sum()))
        return h.mul_(1.5)  # in sight

    with pytest.warns(BatchReadWarning, match="numpy"):
        assert of_rows(Between(function), torch.randn(B, D)) < 1.0001


def test_inputs_that_share_memory_are_themselves() -> None:
    """A batch and a table cut out of one tensor: the table is a constant, and so are its views."""

    model = Net(lambda m, x, table: m.a(x) + table[0] * table.mean(0), a=nn.Linear(D, D))
    whole = torch.randn(B + 2, D)
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):
        model(whole[:B], whole[B:]).square().sum(1).mean().backward()
    assert engine.norms().shape == (B,)


def test_saved_tensors_load_as_weights_only_and_without_fastdp() -> None:
    model = nn.Linear(3, 2)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    x = torch.randn(4, 3)
    out = model(x)
    with torch.no_grad():
        features = model.eval()(x)
    file = io.BytesIO()
    torch.save({"x": x, "out": out.detach(), "features": features, "ones": torch.ones(4, 2)}, file)
    optimizer.detach()
    assert b"fastdp." not in file.getvalue() and b"cfastdp" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["features"], features)
    optimizer = fastdp.DPSGD(
        model.train(), lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=4
    )
    for _ in range(2):  # an ordinary input and target again
        kept = model(loaded["x"])
        F.mse_loss(kept, loaded["out"]).backward()
        optimizer.step()
        assert loaded["features"].add(1).shape == kept.shape  # (a kept output has what comes after followed)
    optimizer.detach()
