"""What is known of whole numbers on a device without asking for them: tensors on "meta" cannot be asked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.batch_axis.calls import Call
from fastdp.batch_axis.generations import Generation, set_generation
from fastdp.batch_axis.host_values import at, both_known, known, note_known, numbered, on_host
from fastdp.batch_axis.index_kinds import permutes
from fastdp.batch_axis.layout import Layout, tag
from fastdp.batch_axis.propagate import layouts_of

T = torch.Tensor
META = torch.device("meta")


def seen(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A call as a pass sees it."""
    out = func(*args, **kwargs)
    note_known(func, getattr(func, "__name__", ""), args, kwargs, out)
    return out


def ranges(device: Any) -> tuple[Tensor, Tensor]:
    rows, columns = seen(torch.arange, 3, device=device), seen(torch.arange, 5, device=device)
    return rows[:, None, None, None], seen(T.add, columns, 0)[None, None, None, :]


def taken(func: Any, source: Tensor, layout: Layout, index: Any) -> Layout | None:
    tag(source, layout)
    ((_, found),) = layouts_of(Call(func, (source, index), {}, 3, out=source[index]))
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mask_looked_up_by_ranges(device):
    """As transformers looks up the padding of a batch: sample b's row for query and key."""
    found = taken(T.__getitem__, torch.ones(3, 5, dtype=torch.bool, device=device), Layout(3), ranges(device))
    assert found == Layout(3)


@pytest.mark.parametrize("index,alone", [([2, 0, 1], -1), ([1, 1], 1)])
def test_rows_in_another_order(index, alone):
    """Ranges that are cut are known too; where the rows are in no regular order, so are their owners."""
    whole = seen(torch.arange, 3, device=META)
    rows = seen(T.remainder, seen(T.add, whole, 2), 3) if alone < 0 else seen(T.__add__, seen(T.mul, whole[:2], 0), 1)
    assert on_host(rows).tolist() == index
    found = taken(T.__getitem__, torch.ones(3, 5, device=META), Layout(3), (rows,))
    assert found is not None and found.alone == alone
    if alone < 0:
        assert found.owner.device == META and on_host(found.owner).tolist() == index


def test_there_and_back():
    """Rows sorted by their expert, two for each token, and put back: every row is its token's again, whatever the
    order was."""
    tokens, chosen = Layout(3, inner=2), torch.zeros(12, device=META, dtype=torch.long)
    tag(chosen, Layout(3, inner=4))
    values, order = torch.sort(chosen)
    tags = layouts_of(Call(torch.sort, (chosen,), {}, 3, out=(values, order)))
    by_expert = tags[1][1]
    tag(order, by_expert)
    token = seen(T.__floordiv__, order, 2)
    tag(token, by_expert)
    rows = torch.zeros(6, 7, device=META)
    sorted_rows = taken(T.__getitem__, rows, tokens, token)
    assert not sorted_rows.mixed and sorted_rows.order is by_expert.order
    assert both_known(sorted_rows.owner, by_expert.owner) is not None
    back = torch.argsort(order)
    ((_, of_back),) = layouts_of(Call(torch.argsort, (order,), {}, 3, out=back))
    tag(back, of_back)
    assert permutes(back, 12)
    found = taken(T.__getitem__, torch.zeros(12, 7, device=META), sorted_rows, back)
    assert (found.mixed, found.owner, found.inner) == ("", None, 4)


def test_an_order_undone_by_what_is_no_inverse_of_it():
    """One order undone by another's inverse, or by a descending sort, is not known."""
    plain = Layout(3, inner=2)
    first, second = (torch.argsort(torch.zeros(6, device=META)) for _ in range(2))
    for order in (first, second):
        source = torch.zeros(6, device=META)
        tag(source, plain)
        ((_, found),) = layouts_of(Call(torch.argsort, (source,), {}, 3, out=order))
        tag(order, found)
    owner = at(plain.owners(META), first)
    assert known(owner) is not None and both_known(owner, at(plain.owners(META), second)) is None
    inverse = torch.argsort(second)
    layouts_of(Call(torch.argsort, (second,), {}, 3, out=inverse))
    assert known(inverse).undoes is known(second).order
    assert known(at(owner, inverse)) is None
    falling = torch.argsort(second, descending=True)
    with pytest.raises(RuntimeError, match="meta"):  # asked
        layouts_of(Call(torch.argsort, (second,), {"descending": True}, 3, out=falling))
    assert known(falling) is None


def test_what_ends_it():
    """A write, memory given away, another batch, a copy."""

    def fresh() -> Tensor:
        return seen(torch.arange, 4, device=META)

    assert on_host(fresh()).tolist() == [0, 1, 2, 3]
    written = fresh()
    view = written[1:]
    assert on_host(view).tolist() == [1, 2, 3]
    written.add_(1)
    assert known(written) is None and known(view) is None
    given = fresh()
    seen(T.data.__get__, given)
    note_known(T.data.__get__, "data", (given,), {}, given.data)
    assert known(given) is None and known(given[1:]) is None
    copied = fresh()
    copied = copy.deepcopy(copied)
    assert known(copied) is None
    before = fresh()
    try:
        set_generation(Generation())
        assert known(before) is None and known(fresh()) is not None
    finally:
        set_generation(None)
    with torch.inference_mode():
        assert known(fresh()) is None


def test_what_is_made_of_more_than_sizes_is_not_known():
    count = torch.zeros((), dtype=torch.long, device=META)
    whole = seen(torch.arange, 4, device=META)
    assert known(seen(T.add, whole, count)) is None
    assert known(seen(T.add, whole, 1, alpha=2)) is None
    assert known(seen(torch.arange, 4.0, device=META)) is None
    assert known(whole[torch.zeros(4, dtype=torch.long, device=META)]) is None
    assert known(torch.arange(4)) is None, "the CPU is asked"
    assert known(numbered(4, META)).numbers().tolist() == [0, 1, 2, 3]


def test_layouts_with_rows_in_any_order_compare() -> None:
    one, same = (Layout(3, owner=torch.tensor([0, 2, 1])) for _ in range(2))
    assert one == same and not one != same
    assert one != Layout(3, owner=torch.tensor([0, 1, 2])) and one != Layout(3) and Layout(3) != one and one != 3
