"""Lightning: physical batches, epsilon in the log, and a budget. The optimizer alone needs nothing from this module.

    loader = poisson_loader(data, expected_batch_size=256, max_physical_batch_size=32)
    trainer = Trainer(callbacks=[DPCallback(delta=1e-5, target_epsilon=3.0)])
    trainer.fit(module, stream(loader))

Both `lightning` and `pytorch_lightning` work; if both are installed, the one that was imported first is used.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from .accounting import epsilon_by
from .accounting.runs import kind_of
from .data.loader import share
from .distributed.frameworks import unwrap
from .distributed.world import World, told
from .errors import StepError
from .mechanisms import CycleLoader
from .optim.correlated_noise import BlocksBudget, CorrelatedStep
from .optim.optimizers import PrivateOptimizer
from .sampling import PoissonLoader, leave, new_pass, wait
from .utils.extras import install_command


def _callback_class() -> type:
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return __import__(name, fromlist=["Callback"]).Callback  # type: ignore[no-any-return]
        except ImportError:
            continue
    raise ImportError(f"fastdp.lightning needs Lightning: {install_command('lightning')}")


class _Stream:
    """See `stream`."""

    trains: World | None = None  # of the optimizer: Lightning fetches a batch before it tells a callback the loader

    def __init__(self, loader: PoissonLoader) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict  # Lightning keeps and calls
        self._fetched: deque[Callable[[], None]] = deque()
        self._pass = -1

    def __iter__(self) -> Iterator[Any]:
        self.leave()
        share(self.loader, self.trains)
        fetched = self._fetched = deque[Callable[[], None]]()
        mine = self._pass = new_pass()
        weakref.finalize(self, leave, mine)
        wait(mine, self.loader)
        for batch, begin in self.loader.ahead(mine):
            if batch is None:  # Lightning passes over it, and the callback would take the next one for it
                raise StepError(
                    "collate_fn returned None for a batch, and Lightning skips such a batch. Every sampled batch needs "
                    "a step, since skipping batches for what is in them is not Poisson sampling: return all samples, "
                    "and give one to be left out a loss of 0"
                )
            fetched.append(begin)
            yield batch

    def begin(self) -> None:
        """Training on the first of the fetched batches begins."""
        if not self._fetched:
            raise StepError(
                "training_step(dataloader_iter) fetches batches itself, and the callback cannot say which one is "
                "trained on: write training_step(batch, batch_idx)"
            )
        self._fetched.popleft()()

    def leave(self) -> None:
        """The pass is over."""
        leave(self._pass)


def stream(loader: PoissonLoader) -> _Stream:
    """Prepare a Poisson loader with physical batches for `Trainer.fit`. It needs `DPCallback`.

    The number of physical batches in an epoch is not known, so the stream has no length. Lightning then fetches one
    batch ahead, and the callback says which batch is being trained on. The trainer's checkpoints contain the state of
    the stream.

    Raises StepError if the loader is not a `fastdp.poisson_loader`.
    """
    if not isinstance(loader, PoissonLoader):
        raise StepError(f"stream takes a fastdp.poisson_loader, not {type(loader).__name__}")
    return _Stream(loader)


class DPCallback(_callback_class()):  # type: ignore[misc]
    """Logs "epsilon" and "noised_steps" at the end of each epoch, and stops before a budget is exceeded.

    It also refuses what Lightning would do to private gradients.

    Args:
        delta: the delta of the logged epsilon. None: epsilon is not logged.
        target_epsilon: training stops if one more step would spend more than this at delta.

    Raises:
        ValueError: if target_epsilon is given without delta.
        StepError: at the begin of training, if no optimizer is private, Lightning would clip or accumulate gradients,
            or look for a learning rate or batch size, physical batches come without `stream`, a stream comes with other
            loaders, or a DistributedSampler repeats records.
    """

    def __init__(self, delta: float | None = None, target_epsilon: float | None = None) -> None:
        super().__init__()
        if target_epsilon is not None and delta is None:
            raise ValueError("target_epsilon= needs delta=")
        self.delta, self.target_epsilon = delta, target_epsilon
        self._allowed: dict[int, tuple[Any, int]] = {}  # by optimizer: what it was asked of, and the answer
        self._budgets: dict[int, BlocksBudget] = {}  # of correlated noise

    # ------------------------------------------------------------------ hooks of Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        names = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
        if stage == "fit" and (finders := names & {"LearningRateFinder", "BatchSizeFinder"}):  # (a Tuner's, too)
            raise told(
                StepError(
                    f"{min(finders)} makes steps on the training data with this callback taken off, so that no budget "
                    "is kept, and what it finds is chosen by losses that epsilon does not cover. Leave it out: choose "
                    "the learning rate and the batch size beforehand, on other data"
                )
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _Stream.trains = next((optimizer._attached().world for optimizer in _private(trainer)), None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers, loaders = _private(trainer), _loaders(trainer)
        problem = ""
        if not optimizers:
            problem = "configure_optimizers returned no private optimizer (fastdp.DPAdamW, privatize)"
        elif trainer.gradient_clip_val:
            problem = (
                "gradient_clip_val= finds no gradients to clip: they are clipped sample by sample, and noised within "
                "step(). Leave it out and set max_grad_norm= of the optimizer"
            )
        elif trainer.accumulate_grad_batches != 1:
            problem = (
                "accumulate_grad_batches= divides the losses, and so every sample's norm. Leave it 1 and give "
                "poisson_loader max_physical_batch_size="
            )
        elif any(isinstance(each, PoissonLoader) and each.sampler.limit is not None for each in loaders):
            problem = (
                "the loader's length counts logical batches, so Lightning would end an epoch of physical ones too "
                "soon: give fit() fastdp.lightning.stream(loader)"
            )
        elif len(loaders) > 1 and any(isinstance(each, _Stream) for each in loaders):
            problem = (
                "a stream beside other loaders: Lightning joins their batches, and may begin the shorter ones again. "
                "Give fit() the stream alone"
            )
        elif any(_repeats(each) for each in loaders):
            problem = (
                "the DistributedSampler of the training's DataLoader repeats records so that every process has as "
                "many, and a record would count twice. Train with fastdp.poisson_loader, which gives each process its "
                "part (or let the number of records be a multiple of the number of processes)"
            )
        if problem:
            raise told(StepError(problem))  # all processes find it
        unwrap(pl_module)
        for optimizer in optimizers:
            if optimizer._attached().engine.left_out(optimizer._params()):  # as Lightning's BaseFinetuning resumes
                optimizer._attached().retrack(optimizer._params())
        for each in loaders:
            if isinstance(each, PoissonLoader):
                share(each, optimizers[0]._attached().world)
        self._spend(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for loader in _loaders(trainer):
            if isinstance(loader, _Stream):
                loader.begin()
        if self.target_epsilon is not None and trainer.should_stop and not self._left(trainer):
            raise StepError(
                f"the budget of epsilon {self.target_epsilon} is spent, and min_epochs or min_steps trains on: leave "
                "them out"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._spend(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for source in _sources(trainer):
            source.finish()
        self._leave(trainer)
        optimizers = _private(trainer)
        for number, optimizer in enumerate(optimizers):
            suffix = f"_{number}" if len(optimizers) > 1 else ""
            # all processes hold the same numbers; unless they are synchronized, Lightning warns
            several: dict[str, Any] = {"sync_dist": True, "reduce_fx": "max"} if trainer.world_size > 1 else {}
            several["batch_size"] = 1  # nothing is averaged; of training_step(dataloader_iter) Lightning cannot tell it
            pl_module.log(f"noised_steps{suffix}", float(sum(run[2] for run in optimizer.history)), **several)
            if self.delta is not None:
                pl_module.log(f"epsilon{suffix}", optimizer.epsilon(self.delta), prog_bar=True, **several)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave(trainer)
        _Stream.trains = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(trainer)
        _Stream.trains = None
        for privacy in [optimizer._accounted() for optimizer in _private(trainer)]:
            if isinstance(exception, Exception) and not privacy.detached:
                privacy.replica.raised(exception)  # others may wait for this process, of a model in parts

    def _leave(self, trainer: Any) -> None:
        for loader in _loaders(trainer):
            if isinstance(loader, _Stream):
                loader.leave()

    # ------------------------------------------------------------------ the budget

    def _spend(self, trainer: Any) -> None:
        if self.target_epsilon is not None and not self._left(trainer):
            trainer.should_stop = True

    def _left(self, trainer: Any) -> bool:
        """Whether every private optimizer may make one more step."""
        return all(self._may_step(optimizer, _sources(trainer)) for optimizer in _private(trainer))

    def _may_step(self, optimizer: PrivateOptimizer, sources: list[PoissonLoader]) -> bool:
        """The accountant computes how many steps the budget allows once per noise and rate, not at each step."""
        privacy = optimizer._attached()
        if isinstance(privacy, CorrelatedStep):
            return self._may_go_on(privacy, sources)
        # of several loaders, whichever costs most
        source = max(sources, key=lambda loader: loader.sample_rate, default=None)
        history = privacy.ledger.spent
        rate = privacy.sample_rate if source is None else source.sample_rate
        if rate is None:
            raise StepError("target_epsilon= needs the sample rate: train with fastdp.poisson_loader")
        kind, done = (privacy.noise_multiplier, rate, 0.0 if source is None else source.truncation), 0
        if history and kind_of(history[-1]) == kind:
            history, done = history[:-1], history[-1][2]
        key = (history, *kind)
        if self._allowed.get(id(optimizer), (None, 0))[0] != key:
            assert self.target_epsilon is not None and self.delta is not None
            sigma, _, cut = kind
            allowed = most_steps(history, sigma, rate, self.target_epsilon, self.delta, privacy.accountant, cut)
            self._allowed[id(optimizer)] = (key, allowed)
        return done < self._allowed[id(optimizer)][1]

    def _may_go_on(self, privacy: CorrelatedStep, sources: list[PoissonLoader]) -> bool:
        """The same with correlated noise, of which blocks are accounted for."""
        target, delta, loader = self.target_epsilon, self.delta, next(iter(sources), None)
        if not isinstance(loader, CycleLoader):
            raise StepError("target_epsilon= with noise= needs a loader of fastdp.mechanisms, as fixed_order_loader")
        assert target is not None and delta is not None
        blocks = privacy.blocks_after(1, loader.participation, loader.state_dict()["step"])
        budget = self._budgets.setdefault(
            id(privacy), BlocksBudget(target, delta, privacy.accountant, blocks[-1]._replace(steps=0))
        )
        spent = privacy.mechanism.strategy.epsilon
        with contextlib.suppress(StepError):  # a matrix has no more steps: the step itself will say it
            return budget.covers(blocks, lambda found: spent(found, delta, privacy.accountant) <= target)
        return True


def _private(trainer: Any) -> list[PrivateOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, PrivateOptimizer)]


def _loaders(trainer: Any) -> list[Any]:
    """Of the training: Lightning also takes lists and dictionaries of loaders."""
    waiting, found = [trainer.train_dataloader], []
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif each is not None:
            found.append(each)
    return found


def _sources(trainer: Any) -> list[PoissonLoader]:
    found = [each.loader if isinstance(each, _Stream) else each for each in _loaders(trainer)]
    return [each for each in found if isinstance(each, PoissonLoader)]


def _repeats(loader: Any) -> bool:
    """Whether some records are on two processes: Lightning puts such a sampler into the DataLoaders it is given."""
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    return isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset)  # type: ignore[arg-type]


def most_steps(
    history: list[Any], sigma: float, rate: float, target: float, delta: float, accountant: str, truncation: float = 0.0
) -> int:
    """Return how many steps of this noise multiplier and sample rate may follow the history, within the target epsilon.

    Args:
        history: the runs of (noise multiplier, sample rate, steps) so far.
        sigma: the noise multiplier.
        rate: the sample rate.
        target: the largest epsilon.
        delta: the delta of the guarantee.
        accountant: "prv", "rdp" or "gdp".
        truncation: the probability that a step's sample is cut to a largest size.
    """

    def fits(steps: int) -> bool:
        return epsilon_by([*history, (sigma, rate, steps, truncation)], delta, accountant) <= target

    low, high = 0, 1
    while high < 10**8 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
