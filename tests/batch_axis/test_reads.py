"""Numbers over the batch that Python reads: a warning, unless verified; what they do is found by verify."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn as nn

import fastdp
from fastdp.errors import BatchReadWarning, VerificationError

from ..cases import Net, P, square

B, T, D = 3, 4, 6


def harmless(m, x, mask):
    """A mask without effect is left out."""
    h = m.a(x)
    return m.b(h if mask.all() else h * mask[..., None])


def harmful(m, x, mask):
    """Whether any sample is padded changes all of them."""
    h = m.a(x)
    return m.b(h if mask.all() else h * m.w)


def longest(m, x, mask):
    """Positions counted from the end of the longest sample."""
    most = mask.sum(1).max()
    steps = torch.arange(most)
    padded = torch.nn.functional.pad(steps, (0, T - len(steps)))
    return m.b(m.a(x) * padded[None, :, None])


def checked(m, x, mask):
    """An assertion of torch."""
    torch._check_tensor_all(mask.sum() > 0, lambda: "nothing to see")
    return m.b(m.a(x))


def of_a_sample(m, x, mask):
    """What is read of one sample for itself."""
    return torch.stack([m.b(m.a(one)) if keep.all() else m.a(one) for one, keep in zip(x, mask, strict=True)])


def mask_of(*lengths):
    return (torch.arange(T) < torch.tensor(lengths)[:, None]).double()


def model_of(forward):
    torch.manual_seed(0)
    return Net(forward, a=nn.Linear(D, D), b=nn.Linear(D, D), w=P(D)).double()


def batch_of(*lengths):
    return torch.randn(len(lengths), T, D, dtype=torch.double), mask_of(*lengths).bool()


def warned(model, batch):
    engine = fastdp.PerSampleGradients(model)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                square(model, batch).mean().backward()
    finally:
        engine.detach()
    return [str(w.message) for w in found if issubclass(w.category, BatchReadWarning)]


@pytest.mark.parametrize("forward", [harmless, harmful, longest])
def test_one_warning_names_function_and_line(forward):
    (message,) = warned(model_of(forward), batch_of(4, 2, 3))
    operation = "max()" if forward is longest else "all()"
    assert operation in message and "in module 'Net'" in message and "test_reads.py, line" in message, message


@pytest.mark.parametrize("forward", [checked, of_a_sample])
def test_no_warning(forward):
    assert warned(model_of(forward), batch_of(4, 2, 3)) == []


def test_a_comparison_of_all_samples():
    assert len(warned(model_of(lambda m, x, mask: m.a(x) if torch.equal(x, x) else x), batch_of(4, 2, 3))) == 1


def test_a_sample_alone_reads_nothing_of_others():
    assert warned(model_of(harmful), batch_of(2)) == []


def total(words):
    return int((words > 0).sum())


def mean(words):
    return float(words.abs().mean())


@pytest.mark.parametrize(
    ("read", "before", "scaled", "warns"),
    [(read, before, lambda loss, n, x: loss / n, True) for read in (total, mean) for before in (True, False)]
    + [(lambda w: float(total(w)), True, lambda loss, n, x: n and loss * (1 / 7) / n, True),
       (total, False, lambda loss, n, x: loss / (n + 1), True),
       (total, True, lambda loss, n, x: loss / (n + 1e-6), True),
       (total, True, lambda loss, n, x: loss / 7, False), (total, True, lambda loss, n, x: loss / len(x), False),
       (lambda w: int((w.abs().sum(1) >= 0).sum()), True, lambda loss, n, x: loss / len(x), False),
       (lambda w: int((w > 0).sum().clamp(max=7)), True, lambda loss, n, x: loss / 7, False)],
)  # fmt: skip
def test_a_loss_over_a_number_that_was_read_of_its_batch(read, before, scaled, warns):
    """Whole numbers may be others by chance: those that follow what was read, batch by batch, are not."""
    torch.manual_seed(0)
    model, words = nn.Linear(4, 2), torch.randn(60, 4)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, loss_reduction="sum")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for (x,) in fastdp.poisson_loader(torch.utils.data.TensorDataset(words), sample_rate=0.2, seed=1):
            number = read(x) if before else None
            loss = model(x).square().sum()
            scaled(loss, read(x) if number is None else number, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.detach()
    told = [str(w.message) for w in found if issubclass(w.category, BatchReadWarning)]
    assert bool(told) == warns and all("computed with that number" in text for text in told)


def test_verified_reads_are_not_warned_of():
    model = model_of(harmless)
    assert fastdp.verify(model, square, batch_of(4, 2, 3)).ok
    assert warned(model, batch_of(4, 4, 2)) == []
    other = model_of(harmless)
    assert fastdp.verify(other, square, batch_of(4, 4, 4)).ok  # nothing padded: that shows nothing
    assert len(warned(other, batch_of(4, 4, 2))) == 1


def test_verify_names_what_was_read():
    with pytest.raises(VerificationError, match=r"test_reads.py, line \d+, being False: all\(\) in module 'Net'"):
        fastdp.verify(model_of(harmful), square, batch_of(4, 2, 3))
