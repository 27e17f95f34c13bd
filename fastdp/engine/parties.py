"""What a pass of capture, the forward that enters it and the backward that follows it know of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..layouts.reads import Reads
from ..layouts.sizes import Sizes
from ..uses.planner import Planner
from .checkpointing import Enters
from .hook_watch import Owner
from .layout_cache import Memo

if TYPE_CHECKING:
    from ..uses.use import Use
    from .capture import Pass


class Watcher(Protocol):
    """Sees what the calls of a pass are, where a compiled graph is interpreted (`fastdp.engine.compile_watch`)."""

    def captured(self, data: tuple[Tensor, ...]) -> None:
        """A call of data and parameters is captured."""

    def asked(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A call whose layouts may depend on more than on those of its arguments."""


class Backward(Protocol):
    """What a pass tells the backward that follows it (`fastdp.engine.backward.Backward`)."""

    last_use_of: dict[int, str]
    uses_of: dict[int, list[tuple[int, int]]]

    def begin_record(self, forward_pass: Pass, path: str) -> bool:
        """A captured call's backward begins. Returns whether its uses count."""

    def record(self, use: Use) -> None:
        """Keep a use until the end of backward."""


class Forward(Enters, Protocol):
    """What a pass and the module hooks need of the forward's side (`fastdp.engine.forward.Forward`)."""

    model: nn.Module
    owner: Owner  # stands for the engine, in the moments of its batches
    token: Tensor
    token_node: Any  # where autograd would add up the token's gradient
    memo: Memo
    reads: Reads
    sizes: Sizes

    @property
    def planner(self) -> Planner:
        """Chooses the routes of uses."""

    @property
    def backward(self) -> Backward:
        """The backward that follows."""

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module's forward begins."""

    def active(self) -> Pass | None:
        """The pass that is on."""

    def depth(self) -> int:
        """How many modules' forwards are on."""

    def leave(self, path: str, module: nn.Module, out: Any) -> Any:
        """A module's forward ends; what to put in place of its result, or None."""
