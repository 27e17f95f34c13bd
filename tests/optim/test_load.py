"""A state is loaded as a whole, or what raises leaves the optimizer as it was. What was spent stays counted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint import state_dict as torchs

import fastdp
from fastdp.errors import FastDPError, StepError

from ..runs import backward, data, model_of, steps

GIVEN = {"noise_multiplier": 1.0, "expected_batch_size": 6, "sample_rate": 0.1}
pytestmark = pytest.mark.filterwarnings("ignore::fastdp.errors.NotVerifiedWarning")


def groups(model, order="ab"):
    of = {"a": list(model[0].parameters()), "b": list(model[2].parameters())}
    of |= {"w": [model[0].weight], "r": [model[0].bias, *model[2].parameters()]}
    return [{"params": of[each], "lr": {"a": 0.1, "b": 0.2}.get(each, 0.3)} for each in order]


def optimizer_of(model, kind=fastdp.DPAdamW, order="ab", **options):
    return kind(model, lr=0.1, params=groups(model, order), **{**GIVEN, **options})


def trained(n, kind=fastdp.DPAdamW, **options):
    model = model_of()
    optimizer = optimizer_of(model, kind, **options)
    steps(optimizer, model, n)
    return model, optimizer


@pytest.fixture(scope="module")
def saved():
    return trained(3)[1].state_dict()


def record(**changes):
    return lambda state: state["fastdp"].update(changes)


def moment(name, value):
    return lambda state: state["state"][1].update({name: value})


def in_groups(text):
    def change(state):
        del state["fastdp"]
        for group in state["param_groups"]:
            group["fastdp"] = text

    return change


RUN = (1.0, 0.1, 3)
DAMAGES = {
    "no moments": lambda state: state.pop("state"),
    "no groups": lambda state: state.pop("param_groups"),
    "a group less": lambda state: state["param_groups"].pop(),
    "a parameter less": lambda state: state["param_groups"][0]["params"].pop(),
    "no lr": lambda state: state["param_groups"][1].pop("lr"),
    "moments of another shape": moment("exp_avg", torch.zeros(7)),
    "moments without one of them": lambda state: state["state"][1].pop("exp_avg_sq"),
    "no count of steps": lambda state: state["state"][1].pop("step"),
    "steps below 0": moment("step", torch.tensor(-3.0)),
    "moments that are none": lambda state: state["state"].update({1: None}),
    "a record that is none": lambda state: state.update(fastdp=None),
    "no history": lambda state: state["fastdp"].pop("history"),
    "endless steps": record(history=[(1.0, 0.1, float("inf"))]),
    "half a step": record(history=[(1.0, 0.1, 2.5)]),
    "makers of other steps": record(history=[(1.0, 0.1, 2)]),
    "makers that are none": record(makers=3),
    "makers by a list": record(makers=([([], 0, *RUN, 0.0)], [])),
    "samples below 0": record(dropped=-1),
    "endless samples": record(dropped=float("inf")),
    "grouped by a number": record(grouped=3),
    "batches that are none": record(missed=3),
    "another clipping": record(clipping="foo"),
    "a clipping norm below 0": record(max_grad_norm=-1.0),
    "noise below 0": record(noise_multiplier=-1.0),
    "noise that is no number": record(noise_multiplier=float("nan")),
    "a rate above 1": record(history=[(1.0, 1.5, 3)]),
    "another mechanism": record(mechanism={"name": "tree"}),
    "a cut record in the groups": in_groups("{"),
    "a list in the groups": in_groups([1]),
}


def looks(optimizer):
    privacy = optimizer._privacy
    return listed(copy.deepcopy((optimizer.state_dict(), privacy.noise.step, privacy.ledger.spent)))


def listed(of):
    """With lists in the place of tensors, to be compared."""
    if isinstance(of, torch.Tensor):
        return of.dtype, of.tolist()
    if isinstance(of, dict):
        return {key: listed(value) for key, value in of.items()}
    return [listed(value) for value in of] if isinstance(of, list | tuple) else of


@pytest.mark.parametrize("name", DAMAGES)
def test_a_load_that_fails_changes_nothing(name, saved):
    model, optimizer = trained(1)
    before, state = looks(optimizer), copy.deepcopy(saved)
    DAMAGES[name](state)
    with pytest.raises(FastDPError):
        optimizer.load_state_dict(state)
    assert looks(optimizer) == before
    steps(optimizer, model, 1)
    assert optimizer.history == [(1.0, 0.1, 2)]


@pytest.mark.parametrize("kind, other", [(fastdp.DPSGD, fastdp.DPAdamW), (fastdp.DPAdamW, fastdp.DPSGD)])
def test_a_state_of_another_kind_of_optimizer_is_refused(kind, other):
    options = {"momentum": 0.9} if kind is fastdp.DPSGD else {}
    state = trained(2, kind, **options)[1].state_dict()
    _, optimizer = trained(1, other)
    before = looks(optimizer)
    with pytest.raises(StepError, match="another kind of optimizer"):
        optimizer.load_state_dict(state)
    assert looks(optimizer) == before


# --------------------------------------------------------------------------- hooks


def test_a_hook_that_drops_the_record_does_not_lose_the_steps(saved):
    optimizer = optimizer_of(model_of())
    optimizer.register_load_state_dict_pre_hook(
        lambda _, given: {
            "state": given["state"],
            "param_groups": [{k: v for k, v in group.items() if k != "fastdp"} for group in given["param_groups"]],
        }
    )
    optimizer.load_state_dict(saved)
    assert optimizer.history == [RUN]


# --------------------------------------------------------------------------- an ordinary optimizer in between


def loaded_by_an_ordinary_one(saved):
    model = model_of()
    ordinary = torch.optim.AdamW(groups(model))
    ordinary.load_state_dict(copy.deepcopy(saved))
    return model, ordinary


def test_privatize_goes_on_from_the_history_that_the_optimizer_has_loaded(saved):
    model, ordinary = loaded_by_an_ordinary_one(saved)
    optimizer = fastdp.privatize(ordinary, model, **{**GIVEN, "noise_multiplier": 2.0}, max_grad_norm=3.0)
    assert optimizer.history == [RUN]
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (2.0, 3.0)  # what is given now
    steps(optimizer, model, 1)
    assert optimizer.history == [RUN, (2.0, 0.1, 1)]


def test_privatize_refuses_a_history_that_steps_without_privacy_have_followed(saved):
    model, ordinary = loaded_by_an_ordinary_one(saved)
    ordinary.state[model[0].weight]["step"] += 2  # as by a process without fastdp
    with pytest.raises(StepError, match="after 3 steps of the optimizer, and its moments are of 5"):
        fastdp.privatize(ordinary, model, **GIVEN)
    assert type(ordinary) is torch.optim.AdamW
    trained_on = fastdp.privatize(torch.optim.AdamW(groups(model)), model, **GIVEN)  # nothing was left on the model
    steps(trained_on, model, 1)


# --------------------------------------------------------------------------- between backward and step


def test_loading_between_backward_and_step_says_what_it_drops(saved):
    model = model_of()
    optimizer = optimizer_of(model)
    backward(model, data())
    with pytest.warns(UserWarning, match="between backward and step"):
        optimizer.load_state_dict(saved)
    with pytest.raises(StepError, match="without a backward"):
        optimizer.step()
    assert optimizer.history == [RUN]


@pytest.mark.parametrize("kind", [fastdp.DPSGD, fastdp.DPAdamW, fastdp.DPRMSprop])
def test_torchs_look_at_the_state_before_the_first_step_costs_no_batch(kind):
    model = model_of()
    optimizer = optimizer_of(model, kind)
    backward(model, data())
    state = torchs.get_optimizer_state_dict(model, optimizer)
    assert optimizer.history == [] and [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert "fastdp" in state["param_groups"][1]
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert optimizer.history == [(1.0, 0.1, 1)] and not torch.equal(model[0].weight, before)
    backward(model, data())
    optimizer.zero_grad()  # which drops
    with pytest.raises(StepError, match="without a backward"):
        optimizer.step()


# --------------------------------------------------------------------------- groups


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_loads_groups_in_any_order_and_refuses_others(whole):
    options = torchs.StateDictOptions(full_state_dict=whole)
    model, optimizer = trained(2)
    state = torchs.get_optimizer_state_dict(model, optimizer, options=options)
    for order in ("ab", "ba", "wr"):
        other = model_of()
        resumed = optimizer_of(other, order=order)
        given = copy.deepcopy(state)
        if order == "wr":
            with pytest.raises(StepError, match="other groups of parameters.*nothing for group 0 of its 2"):
                torchs.set_optimizer_state_dict(other, resumed, given, options=options)
            assert resumed.history == []
            continue
        torchs.set_optimizer_state_dict(other, resumed, given, options=options)
        assert resumed.history == [(1.0, 0.1, 2)]
        assert [group["lr"] for group in resumed.param_groups] == ([0.1, 0.2] if order == "ab" else [0.2, 0.1])
        assert not any("fastdp" in group for group in resumed.param_groups)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert listed(resumed.state[theirs]) == listed(optimizer.state[mine])


class Wrapper(torch.optim.Optimizer):
    """Of another optimizer, as timm's Lookahead: torch's own __init__, which makes the hooks, was not called."""

    def __init__(self, base):
        self.base, self.defaults, self.param_groups, self.state = base, base.defaults, base.param_groups, base.state

    def step(self, closure=None):
        self.base.step()


def test_an_optimizer_that_wraps_another_one_trains_and_loads():
    model = model_of()
    optimizer = fastdp.privatize(Wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), model, **GIVEN)
    steps(optimizer, model, 2)
    state = copy.deepcopy(optimizer.state_dict())
    steps(optimizer, model, 1)
    optimizer.load_state_dict(state)
    assert optimizer.history == [(1.0, 0.1, 2)]
