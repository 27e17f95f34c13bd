"""fastdp.compat.opacus.layers: equal to torch's own layers, with torch's state dicts."""

from __future__ import annotations

import opacus.layers as theirs
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import fastdp
from fastdp.compat.opacus import layers

PAIRS = [(nn.LSTM, layers.DPLSTM), (nn.GRU, layers.DPGRU), (nn.RNN, layers.DPRNN)]


@pytest.mark.parametrize("plain, private", PAIRS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_equal_torchs(plain, private, bidirectional):
    options = {"num_layers": 2, "bidirectional": bidirectional, "batch_first": True}
    want, found = plain(3, 5, **options), private(3, 5, **options)
    found.load_state_dict(want.state_dict())
    x = torch.randn(4, 6, 3)
    torch.testing.assert_close(found(x)[0], want(x)[0])
    packed = pack_sequence([x[0], x[1, :4], x[2, :2]])
    torch.testing.assert_close(found(packed)[0].data, want(packed)[0].data)
    other = getattr(theirs, private.__name__)(3, 5, **options)
    assert sorted(other.state_dict()) == sorted(found.state_dict())  # in another order
    other.load_state_dict(found.state_dict())
    torch.testing.assert_close(other(x)[0], found(x)[0])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_equals_torchs(heads, batch_first):
    want = nn.MultiheadAttention(8, heads, batch_first=batch_first)
    found = layers.DPMultiheadAttention(8, heads, batch_first=batch_first)
    state = want.state_dict()
    found.load_state_dict(state)
    assert "in_proj_weight" in state  # not emptied
    x = torch.randn(3, 5, 8)
    length = 5 if batch_first else 3
    mask = torch.ones(length, length).triu(1).bool()
    for options in ({}, {"attn_mask": mask}):
        for a, b in zip(found(x, x, x, **options), want(x, x, x, **options), strict=True):
            torch.testing.assert_close(a, b)
    assert found.batch_first == batch_first
    assert isinstance(found, theirs.DPMultiheadAttention)


class _First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x, x, x) if isinstance(self.layer, layers.DPMultiheadAttention) else self.layer(x)
        return self.head(out[0].mean(1))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.DPLSTM(8, 8, 2, batch_first=True, bidirectional=False),
        lambda: layers.DPGRU(8, 8, batch_first=True),
        lambda: layers.DPRNN(8, 8, batch_first=True),
        lambda: layers.DPMultiheadAttention(8, 2, batch_first=True, add_bias_kv=True),
        lambda: theirs.DPLSTM(8, 8, batch_first=True),
    ],
)
def test_exact_under_the_engine(layer):
    torch.manual_seed(0)
    batch = (torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0]))
    loss = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])
    assert fastdp.verify(_First(layer()), loss, batch).ok


def test_what_opacus_s_recurrent_layers_do_otherwise():
    """Its dropout falls on the recurrent state and the last output; its packed states are float32."""
    layer = layers.DPLSTM(3, 64, num_layers=2, dropout=0.5)
    assert (layer(torch.randn(5, 2, 3))[0] != 0).all()
    packed = pack_sequence([torch.randn(3, 2).double(), torch.randn(1, 2).double()])
    assert layers.DPGRU(2, 4).double()(packed)[1].dtype == torch.float64
    assert layers.DPLSTM(3, 5, proj_size=2)(torch.randn(4, 1, 3))[0].shape == (4, 1, 2)
    for kind in (layers.DPGRU, layers.DPRNN):
        with pytest.raises(NotImplementedError, match="proj_size"):
            kind(3, 5, proj_size=2)
