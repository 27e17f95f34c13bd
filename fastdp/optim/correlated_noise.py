"""Noise that is correlated from step to step (`noise=` of the optimizers): where its blocks begin, and what they cost.

The strategies are those of `fastdp.mechanisms`. At step t of a block the clipped sums get s times row t of the
strategy's matrix D times independent normals; those of earlier steps are drawn again. Steps of a block are consecutive
steps of the loader: only so do two steps of one record lie as far apart as the loader promises. Where they are not, or
what the sum is noised by changes, another block begins, independent of all before. The accountant adds up blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from ..accounting import warn_of_delta
from ..accounting.budget import Budget
from ..accounting.participation import Block, Participation, block_of
from ..accounting.runs import count_steps
from ..batch_axis.current_batch import PhysicalBatch
from ..distributed.fingerprints import mark
from ..engine.gradients import Gradients
from ..errors import AccountingError, StepError
from .fused_update import Release
from .option_checks import expected_of, refuse_second_step
from .private_step import PrivateStep

_LOADERS = (
    "fastdp.mechanisms has the loaders for it: fixed_order_loader, cyclic_poisson_loader and balls_in_bins_loader"
)


_DRAWN = (
    "load_noise_state: normals of this key were drawn for steps that the loaded state does not hold, as this optimizer "
    "or the ledger file knows. Drawn again in another block, they would take the noise off these steps. Load the last "
    "state, or leave load_noise_state out: correlated noise then begins anew, with a new key."
)


class Strategy(Protocol):
    """What this needs of a strategy of `fastdp.mechanisms`."""

    @property
    def mark(self) -> str:
        """The strategy and its settings."""

    def noise_row(self, step: int) -> tuple[float, list[tuple[int, float]]]:
        """The weight of the normal of a step of a block, and (steps back, weight) of earlier ones."""

    def check(self, participation: Participation) -> None:
        """Raises AccountingError if batches of this kind cannot be accounted for."""

    def epsilon(self, blocks: Iterable[Block], delta: float, accountant: str = "prv") -> float:
        """That all blocks have spent."""

    def facts(self, blocks: Iterable[Block], epsilon: float, delta: float, accountant: str) -> dict[str, Any]:
        """What a privacy card tells of all blocks, whose epsilon at delta this is."""

    def noise_multiplier(
        self, *, target_epsilon: float, delta: float, steps: int, participation: Participation, accountant: str = "prv"
    ) -> float:
        """The smallest one that spends at most target_epsilon in so many steps."""


@dataclasses.dataclass
class _Running:
    """The block that goes on."""

    place: tuple[str, int, int]  # of its last step: what the loader draws by, its pass and its step
    drawn: tuple[str, int]  # a mark of the generator's key, and the number of the block's first draw
    noised: tuple[float, float]  # noise multiplier and sensitivity
    offsets: Mapping[str, int] | None  # of the parameters; None: not known, of a run that was resumed


class Blocks:
    """The blocks of a run."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.all = strategy, dict[str, Block]()
        self._fits: Participation | None = None
        self.running: _Running | None = None
        self._drawn = dict[str, int]()  # by a mark of the key: how many of its normals this process has drawn
        self.behind = False  # more steps than the running block's were made of its normals, and are not to be had
        self.records = 0.0  # of the dataset, as far as the loader tells

    @property
    def name(self) -> str:
        """What another run must have alike to go on from this one's state."""
        return f"correlated noise, {self.strategy.mark}"

    def check(self, promise: Participation) -> None:
        """Raises AccountingError if steps under this promise cannot be accounted for in this run."""
        if promise == self._fits:
            return
        self.strategy.check(promise)
        kinds = {promise.kind, *(block.participation.kind for block in self.all.values())}
        if {"cyclic Poisson", "balls in bins"} <= kinds:
            raise AccountingError(
                "there is no accounting for cyclic Poisson samples and balls in bins in one run: stay with one loader, "
                "or make a new optimizer and add up both epsilons"
            )
        self._fits = promise

    @property
    def last(self) -> Block:
        """The block that began last."""
        return next(reversed(self.all.values()))

    def step_of(self, now: _Running, number: int, promise: Participation) -> int:
        """The step of its block that is next, 0 where another block must begin. number: of the draw."""
        old = self.running
        if old is None or (old.drawn[0], old.noised) != (now.drawn[0], now.noised):
            return 0
        if self.last.participation != promise:
            return 0
        if None not in (old.offsets, now.offsets) and old.offsets != now.offsets:
            return 0
        follows = (now.place[2] - old.place[2] - 1) % promise.period == 0
        if promise.kind == "separated":  # another pass within a cycle has another deal
            follows = follows and (now.place[1] == old.place[1] or now.place[2] % promise.period == 0)
        return self.last.steps if follows and not self.behind and number == old.drawn[1] + self.last.steps else 0

    def problem_of(self, key: bytes, number: int, loaded: bool) -> str:
        """What is wrong with drawing this normal next, in a block of its own. loaded: the key was."""
        key_mark = mark("noise", key)
        if number < self._drawn.get(key_mark, 0):
            return _DRAWN
        if self.running is None or self.running.drawn[0] != key_mark:
            return ""
        return _DRAWN if (loaded and self.behind) or number < self.running.drawn[1] + self.last.steps else ""

    def block(self, now: _Running, step: int, promise: Participation, run: str) -> Block:
        """The block as it is with this step of it. run: of its name, which is the same on all ranks that share it."""
        if step:
            return self.last._replace(steps=step + 1)
        return Block(mark(run, now.drawn, now.place), now.noised[0], 1, promise, now.place[2] % promise.period)

    def count(self, now: _Running, block: Block) -> None:
        """A step was made, and the block is this one now."""
        if block.name in self.all:
            assert self.running is not None
            now.drawn = self.running.drawn
        key, first = now.drawn
        self._drawn[key] = max(self._drawn.get(key, 0), first + block.steps)
        self.all[block.name], self.running, self.behind = block, now, False

    def facts(self, epsilon: float, delta: float, accountant: str) -> dict[str, Any]:
        """Return what the privacy card tells."""
        return self.strategy.facts(self.all.values(), epsilon, delta, accountant)

    def add(self, others: Iterable[Block]) -> None:
        """Count these, too. Of a block that is known, the larger number of steps counts, and it goes on no more."""
        for block in others:
            known = self.all.get(block.name)
            if known is None or known.steps < block.steps:
                self.all[block.name] = block if known is None else known._replace(steps=block.steps)
                self.behind = self.running is not None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds. The running block goes on only if the noise does (`load_noise_state`)."""
        running = None if self.running is None else [list(self.running.place), list(self.running.drawn)]
        return {
            "name": self.name,
            "blocks": [(*block[:3], tuple(block.participation), block.first) for block in self.all.values()],
            "running": running and [*running, list(self.running.noised)],  # type: ignore[union-attr]
        }

    def read(self, state: dict[str, Any]) -> Callable[[], object]:
        """Read a `state`; the result takes it up. Blocks that it does not hold stay counted."""
        found = {block.name: block for block in (block_of(*said) for said in state["blocks"])}
        running = None
        if state.get("running"):
            place, drawn, noised = state["running"]
            running = _Running(
                (str(place[0]), int(place[1]), int(place[2])), (str(drawn[0]), int(drawn[1])),
                (float(noised[0]), float(noised[1])), None,
            )  # fmt: skip

        def take_up() -> None:
            more = {
                name: found.get(name, own)._replace(steps=own.steps)
                for name, own in self.all.items()
                if own.steps > getattr(found.get(name), "steps", 0)
            }
            others = {name: block for name, block in more.items() if name not in found}
            self.all = {**others, **found, **more}  # the running one is the last
            self.running, self.behind = running if found else None, bool(more)

        return take_up


_RUNS: weakref.WeakSet[CorrelatedStep] = weakref.WeakSet()


class CorrelatedStep(PrivateStep):
    """The privacy state of a run with correlated noise."""

    mechanism: Blocks

    def __init__(self, model: nn.Module, params: Any, *, noise: Strategy, **options: Any) -> None:
        check_strategy(noise)
        if options.get("sample_rate") is not None:
            raise AccountingError(f"sample_rate= with noise=: the loader says who is in a batch. {_LOADERS}")
        self.mechanism, self._in_file = Blocks(noise), options.get("ledger") is not None
        self._now: tuple[_Running, Block] | None = None  # of the step that is made
        _RUNS.add(self)
        super().__init__(model, params, **options)
        written = [block for name, block in self.ledger.blocks if name == self.mechanism.name]
        if count_steps(self.ledger.written) > sum(block.steps for block in written):
            self.close()
            raise AccountingError(
                f"the ledger holds steps with other noise than {self.mechanism.name}, and no one epsilon is of all: "
                "give this run a file of its own, and add up both epsilons"
            )
        self.mechanism.add(written)

    def _of_loader(  # type: ignore[override]
        self, current: PhysicalBatch, stepped: tuple[int, int], rate: float | None, expected: float | None
    ) -> tuple[None, float]:
        """No sample rate, and the expected batch size; one step a batch. As `option_checks.of_loader`."""
        refuse_second_step(current, stepped)
        return None, expected_of(current, expected)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "noise": self.mechanism.name}

    def _check_batch(self, gradients: Gradients) -> None:
        self._promise_of(self.loader_batch.batch())
        super()._check_batch(gradients)

    def _promise_of(self, current: PhysicalBatch | None) -> Participation:
        if current is not None and current.participation is not None and current.people is None:
            self.mechanism.check(current.participation)
            if self._in_file and current.participation.kind == "balls in bins":
                raise StepError(
                    "ledger= with balls in bins: epsilon depends on whether blocks are of one secret draw, which the "
                    "file does not tell. Leave it out, or take another loader"
                )
            return current.participation
        begin = f"{self.mechanism.name} is accounted for by how far apart the steps of one record are, "
        if current is None:
            of_no_loop = self.loader_batch.of_no_loop()
            raise StepError(f"{begin}and no batch of a loader that says so is in hand. {_LOADERS}{of_no_loop}")
        if current.participation is None:
            raise StepError(f"{begin}and a poisson_loader draws each step from all records. {_LOADERS}")
        raise StepError(f"{begin}and a person's records may be in several batches of a cycle: group_by is refused")

    def ready(self) -> bool:
        current = self.loader_batch.current()
        promise = self._promise_of(current)
        assert current is not None
        self.mechanism.records = max(
            self.mechanism.records, current.expected_batch_size * promise.period / promise.rate
        )
        return super().ready()

    def release(self) -> Release:
        promise = self._promise_of(self.loader_batch.current())
        noised = (self.noise_multiplier, self.clipping.sensitivity)
        now = _Running(self._loader_position, (mark("noise", self.noise.key), self.noise.step), noised, None)
        offsets = self.engine.offsets()
        now.offsets = {name: offsets[name] for name in self.engine.named_parameters()}
        step = self.mechanism.step_of(now, self.noise.step, promise)
        block = self.mechanism.block(now, step, promise, self.ledger.name)
        self._refuse_beyond_budget(block)
        if promise.kind == "cyclic Poisson" and any(map(self.ledger.draws.holds, self._drawn)):
            self.discard()
            raise StepError(
                "a step was made on this very sample before, and samples drawn anew are what is accounted for: make a "
                "new loader without seed=, or go on with the old one from where it is"
            )
        loaded = self.noise.loaded_at == self.noise.step
        if not step and (problem := self.mechanism.problem_of(self.noise.key, self.noise.step, loaded)):
            self.discard()
            raise StepError(problem)
        own, earlier = self.mechanism.strategy.noise_row(step)
        self.ledger.block = self.mechanism.name, block
        release = super().release()
        if step == 0 and self.mechanism.running is not None and noised != self.mechanism.running.noised:
            self._warn_once(
                "the noise multiplier or the clipping norm has changed, so correlated noise has begun anew: what was "
                "drawn before no longer cancels. Change them seldom",
                "noise begun anew",
            )
        self._now = now, block
        draws = [(self.noise.step - lag, weight / own) for lag, weight in earlier]
        return release._replace(std=self.noise_std * own, earlier=draws)

    def _refuse_beyond_budget(self, block: Block) -> None:
        budget = self.ledger.budget
        if not isinstance(budget, BlocksBudget):
            return
        blocks = [*(each for name, each in self.mechanism.all.items() if name != block.name), block]
        if not budget.covers(blocks, lambda found: self._spent(found, budget.delta) <= budget.target_epsilon):
            self.discard()
            raise StepError(
                f"the budget is spent: a step more would exceed epsilon {budget.target_epsilon:g} at delta "
                f"{budget.delta:g} ({budget.steps} steps were planned). No step was made. Stop here, or make a new "
                "optimizer, whose epsilon adds to this one's"
            )

    def blocks_after(self, steps: int, promise: Participation, place: int) -> list[Block]:
        """Return the blocks after so many more steps in a row. place: in its pass, of the first of them."""
        old = None if self.mechanism.behind else self.mechanism.running
        noised = (self.noise_multiplier, self.clipping.sensitivity)
        if old is not None and (old.drawn[0], old.noised) == (mark("noise", self.noise.key), noised):
            *before, last = self.mechanism.all.values()
            if last.participation == promise and (place - old.place[2] - 1) % promise.period == 0:
                return [*before, last._replace(steps=last.steps + steps)]
        new = Block("", self.noise_multiplier, steps, promise, place % promise.period)
        return [*self.mechanism.all.values(), new]

    def _spent(self, blocks: Sequence[Block], delta: float) -> float:
        return self.mechanism.strategy.epsilon(blocks, delta, self.accountant)

    def _warn_once(self, text: str, kind: str) -> None:
        if kind != "repeated":  # a deal of balls in bins is the same in each pass, and accounted for as such
            super()._warn_once(text, kind)

    def finish(self) -> None:
        """The noised step was made: count it, in its block."""
        if self._now is not None:
            self.mechanism.count(*self._now)
            self._now = None
        super().finish()

    def epsilon(self, delta: float | None, sample_rate: float | None = None) -> float:
        if sample_rate is not None:
            raise AccountingError(f"sample_rate= with noise=: the loader says who is in a batch. {_LOADERS}")
        blocks = self.mechanism
        delta = self.ledger.default_delta(blocks.records or None, 1.0) if delta is None else delta
        warn_of_delta(delta, blocks.records or None, stacklevel=4)
        if sum(run[2] for run in self.ledger.spent) > sum(block.steps for block in blocks.all.values()):
            raise AccountingError("the history holds steps of which it is not known what block of noise they are of")
        self.ledger.asked = delta, None
        others = [
            run for run in _RUNS if run is not self and run.ledger.begun and run.loader_batch.follows(self.loader_batch)
        ]
        if others:
            warnings.warn(
                f"{len(others)} other private optimizer(s) have stepped on batches of the same loader, and each is "
                "counted by itself. If more than this one's weights are kept, shown or chosen by, what holds is the "
                "sum of their epsilons, at the sum of their deltas",
                stacklevel=4,
            )
        return self._spent(list(blocks.all.values()), delta)


def check_strategy(noise: Any) -> None:
    """Raises TypeError unless this is a strategy of `fastdp.mechanisms`: what others' rows are, no accountant knows."""
    if isinstance(noise, type) or not all(callable(getattr(noise, name, None)) for name in ("noise_row", "epsilon")):
        raise TypeError(f"noise= takes a strategy of fastdp.mechanisms, as Bisr(bands=4), not {noise!r}")
    if not type(noise).__module__.startswith("fastdp."):
        raise TypeError(
            f"noise= takes a strategy of fastdp.mechanisms, not {type(noise).__name__}: give one of your own as a "
            "matrix, fastdp.mechanisms.Matrix(strategy.rows(steps of the run))"
        )


class BlocksBudget(Budget):
    """What a run of correlated noise may spend. The step itself looks at it, as the kind of a step says too little."""

    def __init__(self, target_epsilon: float, delta: float, accountant: str, block: Block) -> None:
        super().__init__(target_epsilon, delta, accountant, (block.noise_multiplier, None, 0.0), block.steps)
        self._within: list[Block] = [block]  # blocks that keep the budget

    def covers(self, blocks: Sequence[Block], fits: Callable[[Sequence[Block]], bool]) -> bool:
        """Whether these keep the budget. fits: tells it of any blocks, slowly: it is asked for many steps at once."""
        *before, last = blocks
        *known, most = self._within
        if (before, last.steps <= most.steps, last[1:2], last[3:]) == (known, True, most[1:2], most[3:]):
            return True
        if not fits(blocks):
            return False
        more = last.steps
        while more:
            with contextlib.suppress(StepError):  # a matrix has no more steps
                if fits([*before, last._replace(steps=last.steps + more)]):
                    break
            more //= 2
        self._within = [*before, last._replace(steps=last.steps + more)]
        return True

    def check(self, history: Any, kind: Any) -> None:
        """Nothing: `CorrelatedStep.release` does it."""

    def for_the_rest(self, history: Any, noise_multiplier: float) -> tuple[float, str]:
        """The noise stays: what was planned is of one block."""
        return noise_multiplier, "the loaded run has another plan: its noise stays, and steps end where the budget does"
