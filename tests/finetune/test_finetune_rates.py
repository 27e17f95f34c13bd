"""What is not pre-trained learns at a rate of its own: a new head."""

from __future__ import annotations

import pytest
from torch import nn

from fastdp.finetune import training
from fastdp.finetune.job import FinetuneError
from fastdp.finetune.models import new_parameters
from fastdp.grad_sample import cost_model

from .finetune_runs import STEPS, job_of, model_of, plan_of


def distances(folder, **changes):
    """How far each trained parameter went."""
    model, start = model_of(), dict(model_of().named_parameters())
    assert training.run(job_of(folder, model=model, weight_decay=0.0, **changes)).steps == STEPS
    return {
        name: float((p - start[name]).detach().abs().max()) for name, p in model.named_parameters() if p.requires_grad
    }


def test_new_parameters_alone_move_at_their_rate(tmp_path):
    new = ("head.weight", "head.bias")
    moved = distances(tmp_path / "a", new=new, lr=0.0, new_lr=0.01)
    assert {name for name, far in moved.items() if far > 0} == set(new)
    plain = distances(tmp_path / "b", lr=0.01)
    assert all(far > 0 for far in plain.values())
    both = distances(tmp_path / "c", new=new, lr=0.01, new_lr=0.01)
    assert both == plain  # one rate: one group, the same run


def test_a_resumed_run_keeps_both_rates(tmp_path):
    options = {"new": ("head.weight",), "new_lr": 0.2}
    whole, model = distances(tmp_path / "a", **options), model_of()

    class Stop(Exception):
        pass

    def log(kind, values):
        if kind == "step" and values["step"] == 6:
            raise Stop

    with pytest.raises(Stop):
        training.run(job_of(tmp_path / "b", weight_decay=0.0, log=log, **options))
    start = dict(model_of().named_parameters())
    training.run(job_of(tmp_path / "b", model=model, weight_decay=0.0, **options), resume=True)
    assert {
        n: float((p - start[n]).detach().abs().max()) for n, p in model.named_parameters() if p.requires_grad
    } == whole


def test_names_behind_adapters():
    peft = pytest.importorskip("peft")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"model_type": "net"}
            self.query, self.classifier = nn.Linear(4, 4), nn.Linear(4, 2)

    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    found = new_parameters(peft.get_peft_model(Net(), config), {"classifier.weight", "classifier.bias"})
    assert len(found) == 2 and all("classifier.modules_to_save" in name for name in found)
    assert new_parameters(Net(), {"classifier.bias"}) == {"classifier.bias"}


def test_a_rate_below_zero_is_refused():
    with pytest.raises(FinetuneError, match="new_lr"):
        plan_of(new_lr=-1.0)


def test_the_routes_of_a_run_bind_no_later_one(tmp_path):
    training.run(job_of(tmp_path))
    assert not cost_model._KEPT
