"""The names of torch that are not public and that fastdp uses: this torch has them, and a torch without is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastdp
from fastdp.distributed import private_names, sharded
from fastdp.errors import ParameterError

from .ranks import free_port


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_this_torch_has_them_and_one_without_is_refused(one_process, monkeypatch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    state = private_names.state_of(model)
    group = private_names.groups_of(state)[0]
    private_names.check_names(state, group)
    assert len(private_names.hooks_of(model, state)) == 2
    assert private_names.store_of_world().add("a name", 1) == 1
    options = dict(lr=0.1, noise_multiplier=1.0, expected_batch_size=2)
    optimizer = fastdp.DPSGD(model, **options)
    assert private_names.whole_of(group.fsdp_params[0]).shape == (2, 3)
    model(torch.ones(2, 3)).sum(1).mean().backward()
    optimizer.step()
    optimizer.detach()
    monkeypatch.setattr(private_names, "OF_GROUP", ("a_name_that_moved",))
    with pytest.raises(ParameterError, match="a_name_that_moved"):
        fastdp.DPSGD(model, **options)
    monkeypatch.undo()
    assert sharded.is_sharded(model)
