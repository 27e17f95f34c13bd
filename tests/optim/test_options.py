"""The arguments of optimizers are explicit and the same everywhere; wrong names are refused with what was meant."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fastdp
from fastdp.errors import ClippingError, ParameterError
from fastdp.mechanisms import DPFTRL
from fastdp.optim.adaptive_clipping import OPTIONS, AdaptiveStep
from fastdp.optim.budget_options import OF_BUDGET
from fastdp.optim.option_checks import FIXED
from fastdp.optim.private_step import PrivateStep

from ..runs import model_of, steps

pytestmark = pytest.mark.slow  # `make test-all` runs it

CLASSES = {
    fastdp.DPSGD: torch.optim.SGD, fastdp.DPAdam: torch.optim.Adam, fastdp.DPAdamW: torch.optim.AdamW,
    fastdp.DPRMSprop: torch.optim.RMSprop, DPFTRL: torch.optim.SGD,
}  # fmt: skip
each = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def keywords(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if parameter.kind is parameter.KEYWORD_ONLY}


@each
def test_the_options_of_every_class_are_explicit_and_those_of_privatize(kind):
    """Names, order, defaults and types: what one says of an option, all say."""
    private, mine = keywords(fastdp.privatize), keywords(kind)
    if kind is DPFTRL:  # without a budget
        assert not {*OF_BUDGET} & {*mine}
        private = {name: p for name, p in private.items() if name not in (*OF_BUDGET, "noise")}
        private["noise_multiplier"] = keywords(PrivateStep.__init__)["noise_multiplier"]
    known = {name: mine[name] for name in private}
    assert list(known) == [name for name in mine if name in private]
    for name, parameter in private.items():
        refused = kind is DPFTRL and name in ("sample_rate", "ledger", *OPTIONS)
        expected = parameter.replace(annotation="None") if refused else parameter
        assert known[name] == expected


def test_the_options_of_privatize_are_those_that_there_are():
    found = keywords(fastdp.privatize)
    budget = [found.pop(name) for name in ("noise_multiplier", *OF_BUDGET)]
    assert all(p.default is None for p in budget)
    assert found.pop("norms").default == "exact" and found.pop("augmentations").default == 1
    adaptive = {name: found.pop(name) for name in OPTIONS}
    assert found.pop("noise").default is None
    inner = keywords(PrivateStep.__init__)
    assert inner.pop("noise_multiplier").default is inspect.Parameter.empty and found == inner
    assert {*adaptive} <= {*keywords(AdaptiveStep.__init__)} and all(p.default is None for p in adaptive.values())


@each
def test_the_other_options_are_those_of_torch(kind):
    theirs = dict(inspect.signature(CLASSES[kind]).parameters)
    mine = {name: p for name, p in inspect.signature(kind).parameters.items() if name not in keywords(fastdp.privatize)}
    added = {"model", *(["variance_reduction"] if kind is DPFTRL else [])}
    assert set(mine) == set(theirs) | added
    assert {name: mine[name].default for name in theirs if name != "params"} == {
        name: p.default for name, p in theirs.items() if name != "params"
    }
    assert all(p.annotation is not p.empty for p in inspect.signature(kind).parameters.values())
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in inspect.signature(kind).parameters.values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("max_grad_nrom", "did you mean 'max_grad_norm'"),
        ("Noise_Multiplyer", "did you mean 'noise_multiplier'"),
        ("l2_norm_clip", "it is called max_grad_norm here"),
        ("noise_mult", "it is called noise_multiplier here"),
        ("learning_rate", "it is called lr here"),
        ("target_delta", "it is called delta here"),
        ("epsilon", "target_epsilon= is the budget, and eps= the term in the denominator"),
        ("momentum", r"an option of torch.optim.SGD and torch.optim.RMSprop only"),
        ("max_physical_batch_size", "poisson_loader"),
        ("data_loader", "PrivacyEngine"),
        ("xyzzy", r"help\(DPAdamW\)"),
    ],
)
def test_a_wrong_name_is_refused_with_what_was_meant(wrong, said):
    model = model_of()
    with pytest.raises(TypeError, match=f"DPAdamW got an argument that it does not have: '{wrong}': .*{said}"):
        fastdp.DPAdamW(model, lr=0.1, noise_multiplier=1.0, **{wrong: 1.0})
    fastdp.DPAdamW(model, noise_multiplier=1.0).detach()  # nothing is left on the model


def test_options_that_are_assigned_say_how_they_change():
    """Nothing that looks like a change of the mechanism passes without one."""
    optimizer = fastdp.DPSGD(model_of(0), lr=0.1, noise_multiplier=1.0, max_grad_norm=2.0, expected_batch_size=4)
    assert FIXED <= {*keywords(fastdp.privatize)} and "noise_multiplier" not in FIXED
    for name in FIXED:
        with pytest.raises(AttributeError, match=rf"^{name} cannot be assigned.*[ .](set_clipping|DPSGD)\(.*{name}="):
            setattr(optimizer, name, None)
    optimizer.noise_multiplier, optimizer.own = 3.0, 1
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (3.0, 2.0)
    optimizer.set_clipping(max_grad_norm=0.5)
    assert optimizer.max_grad_norm == 0.5


def test_privatize_says_so_too():
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="'max_norm': it is called max_grad_norm here; 'clippping': did you mean"):
        fastdp.privatize(plain, model, noise_multiplier=1.0, max_norm=1.0, clippping="local")
    with pytest.raises(TypeError, match=r"'lr': it is an option of the torch optimizer.*SGD\(params, lr=\)"):
        fastdp.privatize(plain, model, noise_multiplier=1.0, lr=1.0)
    with pytest.raises(TypeError, match="noise_multiplier"):
        fastdp.privatize(plain, model)
    assert type(plain) is torch.optim.SGD


def test_a_style_that_is_given_as_clipping():
    with pytest.raises(ClippingError, match="not 'per_layer'; style= says what is clipped together"):
        fastdp.DPSGD(model_of(), noise_multiplier=1.0, clipping="per_layer")


@each
def test_what_is_missing_or_given_in_another_way(kind):
    model = model_of()
    missing = "missing a required.* argument: 'noise_multiplier'" if kind is DPFTRL else "give noise_multiplier=, or"
    with pytest.raises(TypeError, match=missing):
        kind(model, lr=0.1)
    if kind is DPFTRL:
        with pytest.raises(TypeError, match="'target_epsilon': .*tree_noise_multiplier"):
            kind(model, lr=0.1, target_epsilon=3.0)
    with pytest.raises(TypeError, match="missing a required.* argument: 'model'"):
        kind(lr=0.1, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="too many positional arguments"):
        kind(model, 0.1, 0.9, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="multiple values for argument 'lr'"):
        kind(model, 0.1, lr=0.1, noise_multiplier=1.0)
    with pytest.raises(ParameterError, match="the first argument is the model"):
        kind(model.parameters(), lr=0.1)
    made = kind(model=model, lr=None, noise_multiplier=1.0)  # by name; None is torch's default, as ever
    assert made.param_groups[0]["lr"] == inspect.signature(CLASSES[kind]).parameters["lr"].default
    made.detach()


class Clipped(fastdp.DPAdamW):
    """With an option of its own."""

    def __init__(self, model, lr=None, *, patience=3, **options):
        self.patience = patience
        super().__init__(model, lr, **options)


class OwnAdamW(torch.optim.AdamW):
    def __init__(self, params, lr=0.5, beta3=0.9, weight_decay=0.25):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.beta3 = beta3


class DPOwnAdamW(fastdp.DPAdamW, OwnAdamW):
    """A private optimizer of the user's own optimizer, which has other options and defaults than torch's."""


def test_subclasses_with_options_of_their_own():
    model = model_of()
    made = Clipped(model, 0.1, patience=7, noise_multiplier=1.0, betas=(0.5, 0.6), expected_batch_size=6)
    assert made.patience == 7 and made.param_groups[0]["betas"] == (0.5, 0.6)
    steps(made, model, 1)
    made.detach()
    with pytest.raises(TypeError, match="Clipped got an argument that it does not have: 'patiense'"):
        Clipped(model, 0.1, patiense=7, noise_multiplier=1.0)
    own = DPOwnAdamW(model, beta3=0.1, noise_multiplier=1.0)
    assert (own.beta3, own.param_groups[0]["lr"], own.param_groups[0]["weight_decay"]) == (0.1, 0.5, 0.25)
    own.detach()
    own = DPOwnAdamW(model, weight_decay=0.01, noise_multiplier=1.0)  # torch's default is not the class's
    assert own.param_groups[0]["weight_decay"] == 0.01


@pytest.mark.parametrize(
    "options, match",
    [
        ({"rows_per_sample": 0}, "rows_per_sample must be at least 1"),
        ({"rows_per_sample": 2.5}, "rows_per_sample must be a whole number"),
        ({"rows_per_sample": None}, "rows_per_sample must be a whole number"),
        ({"batch_size": 0}, "batch_size must be at least 1"),  # nothing would be trained
        ({"batch_size": "6"}, "batch_size must be a whole number"),
        ({"batch_size": 2, "rows_per_sample": 2}, "Give only one of them"),
    ],
)
def test_numbers_of_samples_and_rows_that_there_cannot_be(options, match):
    model = torch.nn.Linear(3, 2)
    for make in (
        lambda: fastdp.DPSGD(model, noise_multiplier=1.0, **options),
        lambda: fastdp.privatize(torch.optim.SGD(model.parameters()), model, noise_multiplier=1.0, **options),
        lambda: fastdp.PerSampleGradients(model, **options),
    ):
        with pytest.raises(ValueError, match=match):
            make()
    fastdp.DPSGD(model, noise_multiplier=1.0)  # nothing is left on the model
