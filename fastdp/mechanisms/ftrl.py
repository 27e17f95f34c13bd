"""DP-FTRL: SGD whose noise is that of tree aggregation, so that it needs no sampling.

Let s_t be the sum of the first t clipped gradients with the noise of a tree (`tree`). DP-FTRL with momentum gamma is

    v_t = gamma v_(t-1) + s_t,    theta_t = theta_0 - lr v_t.

Differences of both sides are SGD with heavy-ball momentum whose gradient is s_t - s_(t-1): the clipped gradient, and
what the tree's noise changes by. So `DPFTRL` is torch.optim.SGD with such gradients. A tree lasts one pass over the
loader. The next one begins with noise of its own, and what the last one left stays in theta.

Source: Kairouz et al. 2021, Practical and private (deep) learning without sampling or shuffling (arXiv 2103.00039).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..accounting import epsilon_of, warn_of_delta
from ..accounting.card import of_gaussian, recompute
from ..accounting.used_draws import IN_ORDER
from ..batch_axis.current_batch import PhysicalBatch
from ..distributed.world import refuse_several
from ..engine.gradients import Gradients
from ..errors import AccountingError, StepError
from ..ops.clip import GAMMA
from ..optim.clipping import ClippingFunction
from ..optim.fused_update import Release
from ..optim.optimizers import _Constructed
from ..optim.option_checks import refuse_second_step
from ..optim.private_step import PrivateStep
from ..utils.keyword_arguments import declared
from .correlated_card import IN_ONE_ORDER, NEIGHBOURS
from .participation import Tree, nodes_over, runs_of
from .tree import TreeNoise

_NEEDS = "DP-FTRL needs a fixed order of the records, which fastdp.mechanisms.ftrl_loader gives: "


def _of_fixed_order(
    current: PhysicalBatch, stepped: tuple[int, int], rate: float | None, expected: float | None
) -> tuple[None, float]:
    """No sample rate, and the batch size, which must be the loader's; one step a batch. As `checks.of_loader`."""
    refuse_second_step(current, stepped)
    if expected is not None and expected != current.expected_batch_size:
        raise StepError(
            f"expected_batch_size={expected} was given, but the loader's batches are of "
            f"{current.expected_batch_size:g} records: leave it out, the loader tells it"
        )
    return None, current.expected_batch_size


class TreePrivacy(PrivateStep):
    """The privacy state of DP-FTRL."""

    _of_loader = staticmethod(_of_fixed_order)
    reads_later = False  # a tree's node adds up sums of several steps
    noise: TreeNoise

    def __init__(self, model: nn.Module, params: Any, **options: Any) -> None:
        if options.get("sample_rate") is not None:
            raise AccountingError(
                "sample_rate= with DP-FTRL: nothing is sampled, so there is no amplification to account for. Leave it "
                "out, or train with DPSGD and fastdp.poisson_loader"
            )
        if options.get("ledger") is not None:
            raise StepError(
                "ledger= with DP-FTRL: the file does not hold at which place of a pass a step was made, of which "
                "epsilon depends. Save state_dict() as often as needed"
            )
        super().__init__(model, params, **options)
        try:
            refuse_several(self.world, "DPFTRL", "train in one process, or with DPSGD and fastdp.poisson_loader")
        except StepError:
            self.detach()
            raise
        self.noise = TreeNoise(options.get("seed"))
        self.mechanism = Trees()

    def _check_batch(self, gradients: Gradients) -> None:
        self._check_order(self.loader_batch.batch())
        super()._check_batch(gradients)

    def _check_order(self, current: PhysicalBatch | None) -> None:
        trees: Trees = self.mechanism
        if current is None:
            raise StepError(f"{_NEEDS}no batch of it is in hand, so which records the step is of is not known")
        promise = current.participation
        if promise is None:
            raise StepError(
                f"{_NEEDS}a poisson_loader samples anew at each step, so a record is in one tree many times. Take "
                "DPSGD for it"
            )
        if promise.kind != "fixed order":
            raise StepError(
                f"{_NEEDS}this loader's promise is another ({promise.kind}). Take DPSGD with noise= for it, or leave "
                "out shuffle_within="
            )
        if trees.order and current.place[0] != trees.order:
            raise StepError(
                f"{_NEEDS}this run began with another order, batch size or number of records. A record would be at "
                "another step of a pass than before, and how often it took part would not be known"
            )
        trees.steps, trees.records = promise.period, promise.period * current.expected_batch_size

    def ready(self) -> bool:
        self._check_order(self.loader_batch.current())
        return super().ready()

    def release(self) -> Release:
        trees: Trees = self.mechanism
        now = (self.noise_multiplier, self.clipping.sensitivity)
        if not self.noise.leaves or trees.next != self._loader_position:  # not the next step of the present tree
            self.noise.end()
            trees.noise, trees.next = now, None
        elif now != trees.noise:  # also if their product stays: a longer gradient under the noise of nodes drawn before
            self.discard()
            raise StepError(
                f"noise multiplier and sensitivity were {trees.noise[0]:g} and {trees.noise[1]:g} at the beginning of "
                f"this pass and are {now[0]:g} and {now[1]:g} now: all nodes of a tree have the same noise, and all of "
                "its gradients the same bound. Change them between passes"
            )
        try:
            release = super().release()
            self.noise.add_tree_(release.sums, release.offsets, self.noise_std)
        except BaseException:
            self.noise.end()  # nothing was released; what was drawn is not drawn again
            self.noise.step += 1
            trees.next = None
            self.discard()
            raise
        return release._replace(std=0.0)  # it is in the sums

    def finish(self) -> None:
        self.mechanism.count(self._loader_position)
        super().finish()

    def epsilon(self, delta: float | None, sample_rate: float | None = None) -> float:
        if sample_rate is not None:
            raise AccountingError("sample_rate= with DP-FTRL: nothing is sampled, so leave it out")
        trees: Trees = self.mechanism
        delta = self.ledger.default_delta(trees.records or None, 1.0) if delta is None else delta
        warn_of_delta(delta, trees.records or None, stacklevel=4)
        if sum(run[2] for run in self.ledger.spent) > sum(tree.steps for tree in trees.all.values()):
            raise AccountingError("the history holds steps of which it is not known what tree they are of")
        self.ledger.asked = delta, None
        return epsilon_of(runs_of(trees.all.values()), delta, self.accountant)

    def retrack(self, params: list[Tensor]) -> None:
        trees: Trees = self.mechanism
        if self.noise.leaves and not trees.over:
            raise StepError("parameters cannot be added within a pass, since the noise of a tree is of the same ones")
        super().retrack(params)


class Trees:
    """The trees of a run."""

    name = "DP-FTRL (tree aggregation)"

    def __init__(self) -> None:
        self.all: dict[str, Tree] = {}
        self.order = ""  # the mark of the loader's order
        self.next: tuple[str, int, int] | None = None  # the place of the batch with which the present tree goes on
        self.steps, self.records = 0, 0.0  # in a pass
        self.noise = (0.0, 0.0)  # noise multiplier and sensitivity of the present tree

    @property
    def over(self) -> bool:
        """Whether the last step ended its pass."""
        return self.next is not None and self.next[2] >= self.steps

    def count(self, place: tuple[str, int, int]) -> None:
        """A step was made there."""
        order, number, step = place
        if self.next == place:
            name, tree = self.all.popitem()
            self.all[name] = tree._replace(steps=tree.steps + 1)
        else:
            name = secrets.token_hex(8)
            self.all[name] = Tree(name, self.noise[0], step, 1)
        self.order, self.next = order, (order, number, step + 1)

    def facts(self, epsilon: float, delta: float, accountant: str) -> dict[str, Any]:
        """Return what the privacy card tells."""
        runs = runs_of(self.all.values())
        cost = sum(nodes / sigma**2 if sigma else math.inf for sigma, _, nodes, *_ in runs)
        right, found = of_gaussian(math.sqrt(cost))
        return {
            "accountant": f"{accountant.upper()}, of Gaussian mechanisms: the nodes over a record's steps",
            "sampling": f"none: {IN_ONE_ORDER.format(period=self.steps)}", "neighbours": NEIGHBOURS,
            "right_guesses": right, "true_positives": found, "mechanism": "tree aggregation",
            "blocks": [
                {**tree._asdict(), "sensitivity": math.sqrt(nodes_over(tree.steps))} for tree in self.all.values()
            ],
            "recompute": recompute(runs, delta, accountant),
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: no noise, so that a run which loads it begins a tree."""
        return {
            "name": self.name,
            "trees": [tuple(tree) for tree in self.all.values()],
            "order": self.order.removeprefix(IN_ORDER),
        }

    def read(self, state: dict[str, Any]) -> Callable[[], object]:
        """Read a `state`; the result takes it up. Trees that it does not hold stay counted."""
        found = {
            str(tree[0]): Tree(str(tree[0]), float(tree[1]), int(tree[2]), int(tree[3])) for tree in state["trees"]
        }
        order = f"{IN_ORDER}{state['order']}" if state["order"] else ""
        if any(
            tree.steps < 1 or tree.first < 0 or not 0 <= tree.noise_multiplier < math.inf for tree in found.values()
        ):
            raise ValueError("a tree without steps, or with a noise multiplier that is none")
        if self.order and order and self.order != order:
            raise StepError("the state is of a run with another order of the records than this optimizer's")

        def take_up() -> None:
            mine = {name: tree for name, tree in self.all.items() if tree.steps > getattr(found.get(name), "steps", 0)}
            self.all, self.order, self.next = {**found, **mine}, order or self.order, None

        return take_up


class DPFTRL(_Constructed, torch.optim.SGD):
    """SGD with the noise of tree aggregation (DP-FTRL), for loaders that do not sample.

    The batches come from `ftrl_loader`. Every pass over it is one tree, and so is the rest of a pass that a new process
    resumes from a checkpoint, or that follows an error: as batches are the same in every pass, which of them took part
    how often stays known. `epsilon` is that of a record of the batch that took part the most, where the record's place
    stays empty (see `participation`). Clipping, per-sample norms, physical batches and checkpoints are those of DPSGD,
    and so are the other keyword arguments.

    Args:
        model: the model to train. Its parameters that require grad are trained.
        lr: the learning rate.
        params: tensors or parameter groups to train instead, as for torch's optimizers.
        variance_reduction: whether to reduce the variance of prefix sums by almost one half (Honaker 2015), at no cost
            in privacy. This keeps up to log2(steps of a pass) + 1 tensors of each parameter's size.
        noise_multiplier: sigma, of a node of the tree.
        sample_rate: refused, as nothing is sampled.
        ledger: refused, as the file does not hold at which place of a pass a step was made.

    Raises:
        AccountingError: if sample_rate= is given. There is no amplification by sampling.
        TypeError: if noise_multiplier is missing, or an option is unknown.
        StepError: if ledger= is given, or several processes train together.

    At the step, StepError refuses batches that come from another loader, an order or a batch size that is not the run's
    first, and a noise multiplier or clipping norm that changes within a pass.
    """

    _kept_by = TreePrivacy
    _privacy: TreePrivacy

    @declared
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        params: Iterable[Any] | None = None,
        variance_reduction: bool = True,
        noise_multiplier: float,
        max_grad_norm: float = 1.0,
        expected_batch_size: float | None = None,
        clipping: ClippingFunction = "local",
        style: str | Sequence[Any] = "flat",
        loss_reduction: str = "mean",
        sample_rate: None = None,
        accountant: str = "prv",
        gamma: float = GAMMA,
        target_quantile: None = None,
        quantile_rate: None = None,
        count_noise: None = None,
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        augmentations: int = 1,
        memory_budget: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        mesh: Any = None,
        ledger: None = None,
        graphed: bool = False,
        norms: str = "exact",
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None: ...

    def _make(self, model: nn.Module, lr: Any = None, params: Any = None, **options: Any) -> None:
        reduced = bool(options.pop("variance_reduction", True))
        super()._make(model, lr, params, **options)
        self._privacy.noise.reduced = reduced

    @property
    def trees(self) -> list[Tree]:
        """The trees so far, from which epsilon is computed."""
        return list(self._accounted().mechanism.all.values())

    def group_by(self, keys: Any) -> None:
        """Raises StepError: records of one person may be in several batches of a tree."""
        raise StepError("group_by with DP-FTRL: a person's records may be in several batches, and a tree counts one")

    def noise_state(self) -> dict[str, Any]:
        """Raises StepError: a run that resumes begins a tree with noise of its own."""
        raise StepError("DPFTRL hands out no noise_state(): a run that loads state_dict() begins a new tree")

    def load_noise_state(self, state: dict[str, Any]) -> None:
        """Raises StepError, as `noise_state` does."""
        self.noise_state()

    def graphed(self, *arguments: Any, **options: Any) -> Any:
        """Raises StepError: a replayed step is not supported."""
        raise StepError("optimizer.graphed does not replay steps of DPFTRL: make the step by backward() and step()")
