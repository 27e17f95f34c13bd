"""The noised steps of a run: how many there were, with which noise, and which optimizer has made each of them."""

from __future__ import annotations

import operator
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import AccountingError
from . import History, check_options, epsilon_of, truncation_in
from . import Run as Entry
from .used_draws import Place, UsedDraws

_UNSAID = ""  # the maker of steps of a history that does not tell who made them


class Run(NamedTuple):
    """Steps in a row of one optimizer, with the same settings: its steps `first`, `first` + 1, ..."""

    maker: str
    first: int
    noise_multiplier: float
    sample_rate: float | None
    steps: int
    truncation: float = 0.0

    @property
    def kind(self) -> tuple[float, float | None, float]:
        """What the steps have in common."""
        return self.noise_multiplier, self.sample_rate, self.truncation


Runs = list[Run]


class File(Protocol):
    """Where steps are written ahead; see `ledger_file`."""

    runs: Runs

    def add(self, run: Run) -> None: ...

    def close(self) -> object: ...


class Ledger:
    """Every noised step: runs of (noise multiplier, sample rate, steps)."""

    made_by_all = 0  # steps of all optimizers of this process so far
    all: ClassVar[weakref.WeakSet[Ledger]] = weakref.WeakSet()  # those of this process

    def __init__(self) -> None:
        self._name, self._made = secrets.token_hex(8), 0  # of the optimizer, and the steps it has made so far
        self._runs: Runs = []  # of the history
        self._lost: Runs = []  # steps that were made, and are in no history that was loaded since
        self._parameters: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._beside: weakref.WeakSet[_Place] = weakref.WeakSet()  # of those that others may have trained
        self._file: File | None = None
        self.written: Runs = []  # what the file held when it was opened
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
                place.ledgers.setdefault(self._name, self)

    def begin(self, history: History) -> None:
        """These steps were made before, whoever made them; of this optimizer there is none yet."""
        self._runs = _unsaid(history)
        self._note()

    def write_to(self, file: File) -> None:
        """Steps are written to this file ahead, and what it holds is counted."""
        self._file = file
        self.count(file.runs)

    def count(self, runs: Runs) -> None:
        """These steps were made before. Those that a loaded history holds count once."""
        self.written, self._lost = runs, list(runs)

    def write_ahead(self, noise_multiplier: float, sample_rate: float | None, truncation: float) -> None:
        """A step is about to be made. Raises StepError if it cannot be written: then it must not be."""
        if self._file is not None:
            self._file.add(Run(self._name, self._made, noise_multiplier, sample_rate, 1, truncation))

    def write_begun(self) -> None:
        """What was spent so far is written, too: no checkpoint may hold it. Raises StepError if it cannot be."""
        if self._file is not None:
            for run in _without([*self._runs, *self._lost], self._file.runs):
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
        runs, gone = _unsaid(history), _unsaid(lost, -steps_in(lost))
        if makers is not None:
            said, said_lost = ([_checked(*run) for run in found] for found in makers)
            if (_merged(said), _merged(said_lost)) != (_merged(runs), _merged(gone)):
                raise ValueError("'makers' is of other steps than 'history' and 'lost': one of them was changed")
            runs, gone = said, said_lost
        known = [*runs, *gone]
        left, after = _without(self._runs, known), _without(self.written, known)
        if makers is None:  # the history of an older version: what it has in common with one's own is the same
            left = _unsaid(beyond(self.history, history), self._made)
        all_lost, texts = [*gone, *_without(self._lost, known), *left], []
        if after:
            texts.append(
                f"{_count(after)} noised step(s) of the ledger file are not in the history of the loaded state. "
                "They were made after it was saved, perhaps, before a run was stopped. epsilon() counts them; if they "
                "are made again, that counts again."
            )
        if left:
            texts.append(
                f"{_count(left)} noised step(s) that this optimizer has made are not in the "
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
        return _merged(self._runs)

    @property
    def lost(self) -> History:
        """The runs of steps that were made, and are in no history that was loaded since."""
        return _merged(self._lost)

    @property
    def spent(self) -> History:
        """The runs of all steps that were made."""
        return [*self.lost, *self.history]

    @property
    def elsewhere(self) -> int:
        """Steps of other optimizers on the model's parameters, which the history does not hold."""
        places = {*self._parameters, *self._beside}
        others = {name: other for place in places for name, other in place.ledgers.items()}
        begun = [(each, each._unsaid) for each in (self, *others.values())]
        known, count = [*self._runs, *self._lost], 0
        for other in others.values():
            # what a history has taken up without a word of who made it, it holds
            if other is self or any(b and each is not other and not beyond(other.history, b) for each, b in begun):
                continue
            more = _without([*other._runs, *other._lost], known)
            known, count = [*known, *more], count + _count(more)
        return count

    @property
    def _unsaid(self) -> History:
        """The steps of the history of which nobody said who made them."""
        return _merged([run for run in self._runs if run.maker == _UNSAID])

    def warn(self, stacklevel: int = 3) -> None:
        """Say what epsilon is not of."""
        if elsewhere := self.elsewhere:
            warnings.warn(
                f"{elsewhere} noised step(s) were made on this model's parameters by another private optimizer, "
                "and epsilon is of the steps of this one only. Where the data were the same, add them: load "
                "that optimizer's state_dict(), or accounting.epsilon_of([*first.history, *second.history], delta).",
                stacklevel=stacklevel,
            )

    def _warn_of_beside(self, epsilon: float, accountant: str, stacklevel: int) -> None:
        """Say what epsilon is together with other optimizers of this process that step on batches of the same loader,
        if it is that of this one alone."""
        known, others, history = [*self._runs, *self._lost], list[Ledger](), list[Entry](self.spent)
        for other in Ledger.all if (marks := self.draws.marks) else ():
            more = _without([*other._runs, *other._lost], known) if other is not self else []
            if more and marks & other.draws.marks:
                known, others, history = [*known, *more], [*others, other], [*history, *_merged(more)]
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

    @property
    def steps(self) -> int:
        return steps_in(self.history)

    def add(
        self, noise_multiplier: float, sample_rate: float | None, truncation: float = 0.0, drawn: Sequence[Place] = ()
    ) -> list[Place]:
        """A step was made, on these draws. Returns those among them that had a step before."""
        if not self._runs:
            self._note()
            if self.written:
                warnings.warn(
                    f"the ledger file holds {_count(self.written)} noised step(s) from before, and no state was "
                    "loaded: epsilon() counts them with those of this run",
                    stacklevel=5,
                )
        run = Run(self._name, self._made, noise_multiplier, sample_rate, 1, truncation)
        lengthen(self._runs, run)
        self._made += 1
        Ledger.made_by_all += 1
        return [place for place in drawn if self.draws.add(place, run.kind)]

    def epsilon(self, delta: float, accountant: str = "prv", sample_rate: float | None = None) -> float:
        """epsilon at delta of all steps so far; 0 before the first, inf after a step without noise.

        sample_rate: of the steps whose rate is not known.

        Raises AccountingError where a step's sample rate is not known, or delta is not in (0, 1).
        """
        self.asked = delta, sample_rate
        found = epsilon_of(sampled_at(self.draws.accounted(self.spent), sample_rate), delta, accountant)
        self._warn_of_beside(found, accountant, stacklevel=6)
        return found

    def _note(self) -> None:
        """There are steps from now on."""
        for place in self._parameters:
            place.ledgers.setdefault(self._name, self)


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


def beyond(history: History, known: History) -> History:
    """The runs of a history after what it has in common with the beginning of another."""
    for place, run in enumerate(history):
        same, steps = place < len(known) and kind_of(known[place]) == kind_of(run), run[2]
        if not same or known[place][2] != steps:
            rest = steps - min(steps, known[place][2]) if same else steps
            return [entry(kind_of(run), rest)] * (rest > 0) + history[place + 1 :]
    return []


def kind_of(run: Entry) -> tuple[float, float | None, float]:
    """What the steps of a run in a history have in common: noise multiplier, sample rate, truncation."""
    return run[0], run[1], truncation_in(run)


def entry(kind: tuple[float, float | None, float], steps: int) -> Entry:
    """So many steps of a kind, as a history has them."""
    sigma, rate, truncation = kind
    return (sigma, rate, steps, truncation) if truncation else (sigma, rate, steps)


def sampled_at(history: History, sample_rate: float | None) -> History:
    """The history, with a sample rate where none is known. Raises AccountingError where all are known, and others."""
    if sample_rate is None:
        return history
    check_options(0.0, None, sample_rate, 0.0)
    known = [run[1] for run in history if run[1] is not None]
    others = sorted({rate for rate in known if abs(rate - sample_rate) > 1e-9})
    if others and len(known) == len(history):
        raise AccountingError(
            f"sample_rate={sample_rate:g} was given, and steps were sampled at {', '.join(f'{r:g}' for r in others)}: "
            "leave it out, the rate of all steps is known"
        )
    return [entry((run[0], sample_rate if run[1] is None else run[1], truncation_in(run)), run[2]) for run in history]


def steps_in(history: History) -> int:
    """The steps of a history."""
    return sum(run[2] for run in history)


def _unsaid(history: History, first: int = 0) -> Runs:
    """The runs of a history that does not say who made them."""
    found = []
    for run in history:
        found.append(Run(_UNSAID, first, run[0], run[1], run[2], truncation_in(run)))
        first += run[2]
    return found


def _count(runs: Iterable[Run]) -> int:
    return sum(run.steps for run in runs)


def lengthen(runs: Runs, run: Run) -> None:
    """Append steps to runs: to the last one, if they go on from it."""
    last = runs[-1] if runs else None
    if last is not None and (last.maker, last.first + last.steps, last.kind) == (run.maker, run.first, run.kind):
        runs[-1] = last._replace(steps=last.steps + run.steps)
    else:
        runs.append(run)


def _merged(runs: Iterable[Run]) -> History:
    """The history that these runs are."""
    found: History = []
    for run in runs:
        if found and kind_of(found[-1]) == run.kind:
            found[-1] = entry(run.kind, found[-1][2] + run.steps)
        else:
            found.append(entry(run.kind, run.steps))
    return found


def _without(runs: Runs, known: Runs) -> Runs:
    """The steps of these runs that are not among the known ones."""
    met: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for run in known:
        met.setdefault((run.maker, run.kind), []).append((run.first, run.first + run.steps))
    found = []
    for run in runs:
        place, end = run.first, run.first + run.steps
        for begin, until in sorted(met.get((run.maker, run.kind), ())):
            if until <= place or begin >= end:
                continue
            if begin > place:
                found.append(run._replace(first=place, steps=begin - place))
            place = until
        if place < end:
            found.append(run._replace(first=place, steps=end - place))
    return found


def finite(noise_multiplier: float) -> float:
    """The noise multiplier. Raises ValueError unless it is 0 or larger, and finite."""
    if not 0 <= noise_multiplier < float("inf"):
        raise ValueError(f"noise_multiplier must be 0 or larger and finite, not {noise_multiplier!r}")
    return float(noise_multiplier)


def whole(count: Any) -> int:
    """A number of things. Raises TypeError or ValueError unless it is 0, 1, 2, ..."""
    number = operator.index(count)
    if number < 0:
        raise ValueError(f"{number} is no number of steps or samples")
    return number


def _checked(maker: Any, first: Any, *run: Any) -> Run:
    """A run that a state has. Raises TypeError or ValueError if it is none."""
    if not isinstance(maker, str):
        raise TypeError(f"{maker!r} is no maker of steps")
    run_of(*run)
    return Run(maker, operator.index(first), *run)


def run_of(sigma: Any, rate: Any, steps: Any, truncation: Any = 0.0) -> Entry:
    """A run of equal steps in a saved history. Raises ValueError if no steps can have been so."""
    run = entry((finite(float(sigma)), None if rate is None else float(rate), float(truncation)), whole(steps))
    if not (run[1] is None or 0 < run[1] <= 1) or not 0 <= truncation <= 1:
        raise ValueError(f"{run[2]} steps at a sample rate of {run[1]}, with a truncation of {truncation}")
    return run
