"""ctc_loss: of each sample's sequence and its own targets a loss, in all reductions and forms of its input."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import SampleMixingError

N, T, D, C, S = 6, 12, 4, 5, 4
FRAMES = torch.tensor([12, 11, 12, 9, 10, 12])
COUNTS = torch.tensor([4, 2, 3, 4, 1, 3])


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(N, T, D, generator=generator, dtype=torch.float64) * 3
    return inputs.to(dtype), torch.randint(1, C, (N, S), generator=generator)


def log_probs(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).log_softmax(-1).transpose(0, 1)


def kept(targets: Tensor, counts: Tensor) -> Tensor:
    return torch.arange(S) < counts[:, None]


FORMS = {
    "padded": lambda t, f, n: (t, f, n),
    "in one row": lambda t, f, n: (torch.cat([row[:k] for row, k in zip(t, n.tolist(), strict=True)]), f, n),
    "by a mask": lambda t, f, n: (t[kept(t, n)], f, n),
    "by masked_select": lambda t, f, n: (t.masked_select(kept(t, n)), f, n),
    "lengths as numbers": lambda t, f, n: (t, tuple(f.tolist()), tuple(n.tolist())),
}
LOSSES = {
    "mean": lambda p, *given: F.ctc_loss(p, *given),
    "sum": lambda p, *given: F.ctc_loss(p, *given, reduction="sum"),
    "none": lambda p, *given: F.ctc_loss(p, *given, reduction="none").mean(),
    "without infinities": lambda p, *given: nn.CTCLoss(blank=0, zero_infinity=True)(p, *given),
}


def recognizer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(D, C)


def truth(loss) -> Tensor:
    """Norms of the gradients of one sample at a time, float64."""
    model, (x, targets) = recognizer().double(), data(torch.float64)
    norms = []
    for i in range(N):
        model.zero_grad()
        one = slice(i, i + 1)
        loss(log_probs(model, x[one]), targets[one], FRAMES[one], COUNTS[one]).backward()
        norms.append(sum(p.grad.square().sum() for p in model.parameters()) ** 0.5)
    return torch.stack([torch.as_tensor(norm) for norm in norms])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_each_sample_has_its_own_loss(form: str, name: str) -> None:
    loss, model, (x, targets) = LOSSES[name], recognizer(), data()
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum" if name == "sum" else "mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(log_probs(model, x), *FORMS[form](targets, FRAMES, COUNTS)).backward()
    found = engine.norms()
    engine.detach()
    torch.testing.assert_close(found.double(), truth(loss), rtol=1e-4, atol=1e-6)


COUPLED = {
    "targets of others": lambda p, t, f, n: F.ctc_loss(p, t.roll(1, 0), f, n),
    "targets of others in one row": lambda p, t, f, n: F.ctc_loss(p, t.flip(0)[kept(t, n)], f, n),
    "lengths of others": lambda p, t, f, n: F.ctc_loss(p, t, f.flip(0), n),
    "the longest": lambda p, t, f, n: F.ctc_loss(p, t, f.max().expand(len(f)), n),
    "lengths by place": lambda p, t, f, n: F.ctc_loss(p, t, torch.arange(7, 7 + len(f)), n),
    "samples for time": lambda p, t, f, n: F.ctc_loss(p.transpose(0, 1)[:, :N], t, torch.full((N,), N), n.clamp(max=1)),
    "divided by all lengths": lambda p, t, f, n: F.ctc_loss(p, t, f, n, reduction="sum") / n.sum(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_is_refused(name: str) -> None:
    model, (x, targets) = recognizer(), data()
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        COUPLED[name](log_probs(model, x), targets, FRAMES.clone(), COUNTS.clone()).backward()
    engine.detach()
