"""Accelerate lays models in parts on accelerators alone: here it does so on the CPU, by gloo.

`python -m torch.distributed.run ... tests/distributed/fsdp_on_cpu.py PROGRAM ...` runs a program so.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any


def allow() -> None:
    """From now on an Accelerator with a plugin of FSDP takes the processes of a CPU for those of a GPU each."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def made(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    if plain.__name__ != "made":
        AcceleratorState.__init__ = made


if __name__ == "__main__":
    allow()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(__import__("pathlib").Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    from accelerate.state import AcceleratorState

    assert AcceleratorState._shared_state.get("fsdp_plugin") is not None, "no model was laid in parts"
