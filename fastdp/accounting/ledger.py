"""The noised steps of a run: how many there were, with which noise, and which optimizer has made each of them."""

from __future__ import annotations

import copy
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..distributed.fingerprints import place_of_noise
from ..errors import AccountingError, StepError
from . import History, check_options, default_delta, epsilon_of
from . import Run as Entry
from .budget import Budget
from .participation import Block
from .runs import (
    UNSAID,
    Run,
    Runs,
    beyond,
    checked_run,
    count_steps,
    entry,
    lengthen,
    merged,
    sampled_at,
    steps_in,
    unsaid,
    without,
)
from .used_draws import Place, UsedDraws

_DRAWN = (
    "load_noise_state: the ledger file holds a step that was made with this very noise, after the state was saved. "
    "Drawn again, it would take the noise off both steps, unless their sums are the same, which the file cannot tell. "
    "No step was made: make a new optimizer, and load state_dict() alone, so that fresh noise is drawn"
)


class Ledger:
    """Every noised step: runs of (noise multiplier, sample rate, steps)."""

    made_by_all = 0  # steps of all optimizers of this process so far
    all: ClassVar[weakref.WeakSet[Ledger]] = weakref.WeakSet()  # those of this process

    def __init__(self) -> None:
        self.name, self._made = secrets.token_hex(8), 0  # of the optimizer, and the steps it has made so far
        self._runs: Runs = []  # of the history
        self._lost: Runs = []  # steps that were made, and are in no history that was loaded since
        self._parameters: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._beside: weakref.WeakSet[_Place] = weakref.WeakSet()  # of those that others may have trained
        self.budget: Budget | None = None  # in place of a noise multiplier
        self._file: Any = None  # of `ledger_file`
        self.written: Runs = []  # what the file held when it was opened
        self.blocks: list[tuple[str, Block]] = []  # of them, those of correlated noise, with the strategy's name
        self.block: tuple[str, Block] | None = None  # of correlated noise, with the step that is about to be made
        self.by_seed = False  # whether the noise of a step came from a seed
        self.draws = UsedDraws()  # of loaders, that steps of the history were made on
        self.asked: tuple[float, float | None] | None = None  # of epsilon, at last: delta, and the sample rate
        Ledger.all.add(self)

    def register(self, parameters: Iterable[Tensor], model: nn.Module) -> None:
        """The steps are of these parameters of a model, whose other ones are released with them."""
        for each in model.parameters():
            self._beside.add(_place_of(each))
        for parameter in parameters:
            place = _place_of(parameter)
            self._parameters.add(place)
            if self._runs:
                place.ledgers.setdefault(self.name, self)

    def begin(self, history: History) -> None:
        """These steps were made before, whoever made them; of this optimizer there is none yet."""
        self._runs = unsaid(history)
        self._note()

    def write_to(self, file: Any) -> None:
        """Steps are written to this file ahead, and what it holds is counted."""
        self._file = file
        self.count(file.runs, list(file.blocks.values()))
        self.draws.take_up(file.draws)

    def count(self, runs: Runs, blocks: list[tuple[str, Block]]) -> None:
        """These steps were made before, in these blocks. Those that a loaded history holds count once."""
        self.written, self._lost, self.blocks = runs, list(runs), blocks

    def write_ahead(
        self, noise_multiplier: float, sample_rate: float | None, truncation: float, drawn: Sequence[Place] = (),
        noise: Any = None,
    ) -> None:  # fmt: skip
        """A step is about to be made. Raises StepError if it must not be: the budget is spent, the file is full, or it
        holds a step with the noise that is drawn next.
        """
        if self.budget is not None:
            kind = noise_multiplier, sample_rate, truncation
            self.budget.check(self.draws.accounted(self.spent), kind)
            if any(map(self.draws.holds, drawn)):  # one release more of a batch, which costs more than a step does
                after = copy.deepcopy(self.draws)
                for place in drawn:
                    after.add(place, kind)
                self.budget.check_whole(after.accounted([*self.spent, entry(kind, 1)]), kind)
        if self._file is not None:
            self._refuse_blocks()
            next_noise: Any = None if noise is None else place_of_noise(noise)
            if next_noise in self._file.drawn:
                raise StepError(_DRAWN)
            run = Run(self.name, self._made, noise_multiplier, sample_rate, 1, truncation)
            self._file.add(run, self.block, next_noise, drawn)

    def _refuse_blocks(self) -> None:
        """Raises AccountingError if steps with correlated noise would be taken for others."""
        if self.blocks and self.block is None:
            raise AccountingError(
                f"the ledger holds steps with {self.blocks[0][0]}, and no one epsilon is of all: give this run a file "
                "of its own, and add up both epsilons"
            )

    def default_delta(self, expected: float | None, rate: float | None) -> float:
        """At which epsilon is told, if no delta is given: by the expected batch size over the sample rate.

        Raises AccountingError if it is not known.
        """
        if self.budget is not None:
            return self.budget.delta
        check_options(0.0, expected, rate, 0.0)
        if not expected or not rate:
            raise AccountingError(
                "give epsilon() or privacy_card() a delta, such as 1 / (10 n): the number n of samples is not known"
            )
        return default_delta(round(expected / rate))

    def write_begun(self) -> None:
        """What was spent so far is written, too: no checkpoint may hold it. Raises StepError if it cannot be."""
        if self._file is not None:
            for run in without([*self._runs, *self._lost], self._file.runs):
                self._file.add(run)

    @property
    def in_file(self) -> bool:
        """Whether steps are written ahead."""
        return self._file is not None

    def close(self) -> None:
        """Nothing is written any more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, history: History, lost: History, makers: Any = None) -> tuple[list[str], Callable[[], None]]:
        """What to warn of, and what goes on from this history. Steps so far that it does not hold stay counted.

        makers: what `makers` gave of both; None: who made them is not known. Raises ValueError and the like if they are
        none, or of other steps.
        """
        runs, gone = unsaid(history), unsaid(lost, -steps_in(lost))
        if makers is not None:
            said, said_lost = ([checked_run(*run) for run in found] for found in makers)
            if (merged(said), merged(said_lost)) != (merged(runs), merged(gone)):
                raise ValueError("'makers' is of other steps than 'history' and 'lost': one of them was changed")
            runs, gone = said, said_lost
        known = [*runs, *gone]
        left, after = without(self._runs, known), without(self.written, known)
        if makers is None:  # the history of an older version: what it has in common with one's own is the same
            left = unsaid(beyond(self.history, history), self._made)
        all_lost, texts = [*gone, *without(self._lost, known), *left], []
        if after:
            texts.append(
                f"{count_steps(after)} noised step(s) of the ledger file are not in the history of the loaded state. "
                "They were made after it was saved, perhaps, before a run was stopped. epsilon() counts them; if they "
                "are made again, that counts again."
            )
        if left:
            texts.append(
                f"{count_steps(left)} noised step(s) that this optimizer has made are not in the "
                "history of the state that it loads. They were made with the data all the same, so epsilon() goes on "
                "counting them. To count the state's steps alone load it into a new optimizer: right only if nothing "
                "of the others was kept, shown or chosen by."
            )

        def take_up() -> None:
            self._lost, self._runs = all_lost, runs
            self.written = [] if after else self.written
            self._note()

        return texts, take_up

    @property
    def makers(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """Which optimizer made each step of the history, and of those that are lost to it."""
        return [tuple(run) for run in self._runs], [tuple(run) for run in self._lost]

    @property
    def begun(self) -> bool:
        """Whether the history has a step."""
        return bool(self._runs)

    @property
    def history(self) -> History:
        """The runs of the steps so far, those of a history that was loaded included."""
        return merged(self._runs)

    @property
    def lost(self) -> History:
        """The runs of steps that were made, and are in no history that was loaded since."""
        return merged(self._lost)

    @property
    def spent(self) -> History:
        """The runs of all steps that were made."""
        return merged([*self._lost, *self._runs])

    @property
    def _others(self) -> dict[str, Ledger]:
        """The ledgers with steps on the model's parameters, by name."""
        places = {*self._parameters, *self._beside}
        return {name: other for place in places for name, other in place.ledgers.items()}

    @property
    def elsewhere(self) -> int:
        """Steps of other optimizers on the model's parameters, which the history does not hold."""
        others = self._others
        begun = [(each, each._unsaid) for each in (self, *others.values())]
        known, count = [*self._runs, *self._lost], 0
        for other in others.values():
            # what a history has taken up without a word of who made it, it holds
            if other is self or any(b and each is not other and not beyond(other.history, b) for each, b in begun):
                continue
            more = without([*other._runs, *other._lost], known)
            known, count = [*known, *more], count + count_steps(more)
        return count

    @property
    def _unsaid(self) -> History:
        """The steps of the history of which nobody said who made them."""
        return merged([run for run in self._runs if run.maker == UNSAID])

    def warn(self, stacklevel: int = 3) -> None:
        """Say what epsilon is not of."""
        if elsewhere := self.elsewhere:
            every = (self, *self._others.values())
            lost = any(each._lost or each.block for each in every)
            of_both = "or accounting.epsilon_of([*first.history, *second.history], delta)"
            remedy = "which holds the steps of a ledger file, and blocks of noise, too" if lost else of_both
            warnings.warn(
                f"{elsewhere} noised step(s) were made on this model's parameters by another private optimizer, "
                "and epsilon is of the steps of this one only. Where the data were the same, add them: load "
                f"that optimizer's state_dict(), {remedy}.",
                stacklevel=stacklevel,
            )

    def _warn_of_beside(self, epsilon: float, accountant: str, stacklevel: int) -> None:
        """Say what epsilon is together with other optimizers of this process that step on batches of the same loader,
        if it is that of this one alone."""
        known, others, history = [*self._runs, *self._lost], list[Ledger](), list[Entry](self.spent)
        for other in Ledger.all if (marks := self.draws.marks) else ():
            more = without([*other._runs, *other._lost], known) if other is not self else []
            if more and marks & other.draws.marks:
                known, others, history = [*known, *more], [*others, other], [*history, *merged(more)]
        if others and self.asked is not None:
            delta, rate = self.asked
            all_of_them = self.draws.with_others(other.draws for other in others)
            joint = epsilon_of(sampled_at(all_of_them.accounted(history), rate), delta, accountant)
            warnings.warn(
                f"{len(others)} other private optimizer(s) have stepped on batches of the same poisson_loader. fastdp "
                f"counts each by itself: epsilon is {epsilon:.3g} of this one alone, and {joint:.3g} of all together, "
                "which is what holds if more than this one's weights are kept, shown or chosen by.",
                stacklevel=stacklevel,
            )

    def add(
        self, noise_multiplier: float, sample_rate: float | None, truncation: float = 0.0, drawn: Sequence[Place] = ()
    ) -> list[Place]:
        """A step was made, on these draws. Returns those among them that had a step before."""
        if not self._runs:
            self._note()
            if self.written:
                warnings.warn(
                    f"the ledger file holds {count_steps(self.written)} noised step(s) from before, and no state was "
                    "loaded: epsilon() counts them with those of this run",
                    stacklevel=5,
                )
        run = Run(self.name, self._made, noise_multiplier, sample_rate, 1, truncation)
        lengthen(self._runs, run)
        self._made += 1
        Ledger.made_by_all += 1
        return [place for place in drawn if self.draws.add(place, run.kind)]

    def epsilon(self, delta: float, accountant: str = "prv", sample_rate: float | None = None) -> float:
        """epsilon at delta of all steps so far; 0 before the first, inf after a step without noise.

        sample_rate: of the steps whose rate is not known.

        Raises AccountingError where a step's sample rate is not known, or delta is not in (0, 1).
        """
        self._refuse_blocks()
        self.asked = delta, sample_rate
        found = epsilon_of(sampled_at(self.draws.accounted(self.spent), sample_rate), delta, accountant)
        self._warn_of_beside(found, accountant, stacklevel=6)
        return found

    def _note(self) -> None:
        """There are steps from now on."""
        for place in self._parameters:
            place.ledgers.setdefault(self.name, self)


class _Place:
    """The ledgers with steps on a parameter, by name: they stay as long as the parameter does."""

    def __init__(self) -> None:
        self.ledgers: dict[str, Ledger] = {}


_TRAINED = WeakIdKeyDictionary()  # {parameter: _Place}


def _place_of(parameter: Tensor) -> _Place:
    place: _Place | None = _TRAINED.get(parameter)
    if place is None:
        place = _TRAINED[parameter] = _Place()
    return place
