"""The names of torch that are not public and that fastdp uses: this torch has them, and a torch without is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import fastdp
from fastdp.distributed import private_names, sharded
from fastdp.errors import ParameterError

from .ranks import free_port

ROOM = Path(fastdp.__file__).parent / "distributed"
OF_DISTRIBUTED = ("_fsdp", "_lazy_init", "_unsharded_param", "_orig_size", "_all_gather_comm", "_local_tensor",
                  "_fully_shard", "_get_module_fsdp_state", "_get_sequence_number_for_group",
                  "_get_default_store")  # fmt: skip


def test_they_are_in_one_file():
    """Attributes of fully_shard's objects are read in `sharded.py`, by names that `private_names.py` lists."""
    listed = {*private_names.OF_STATE, *private_names.OF_GROUP, *private_names.OF_PARAMETER, *private_names.OF_MESH}
    for path in (ROOM.parent).rglob("*.py"):
        if path.name == "private_names.py" or "kernels" in path.parts:
            continue
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        found = {name for name in used if name.startswith(OF_DISTRIBUTED)}
        assert found <= (listed if path.name == "sharded.py" else set()), (path, found - listed)


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
