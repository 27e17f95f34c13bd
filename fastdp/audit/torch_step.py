"""Scripts of PyTorch as Trainables: from a model, an optimizer and a loss, or from a whole training loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..utils.random_generators import seed_generators
from .trainable import Array, AuditError, Batch, Lacking, Outcome, count, mapped, pick

_DROPOUT = {nn.modules.dropout._DropoutNd: "p", nn.RNNBase: "dropout", nn.MultiheadAttention: "dropout"}

_SETTINGS = ("max_grad_norm", "noise_multiplier", "expected_batch_size")


class TorchTrainable:
    """A Trainable of ordinary PyTorch: `zero_grad`, `loss(model(x), y).backward()`, `step` for each batch.

    Each model keeps one optimizer, which is made in its first run, and its state lasts over several runs. A model that
    hooks make private is made for the clipping norm and noise of its first run.

    Args:
        make_model: () -> nn.Module; called after torch.manual_seed(seed).
        make_optimizer: (model, *, clipping_norm, noise_multiplier, expected_batch_size, seed) -> the private optimizer
            (anything with step and zero_grad), or a pair (model to call, optimizer) if the model is wrapped.
        loss: (outputs, labels) -> scalar, as in the script.
        make_batch: (seed, size) -> (x, y), arrays or tensors of ordinary data.
        train: in place of make_optimizer, the script's loop: (model, batches of tensors, *, clipping_norm,
            noise_multiplier, seed) -> anything; it trains the model in place.
        accumulate: (optimizer, loss_value, last: bool) -> None: what the script does with each physical batch; it makes
            `run_parts`.
        loss_kind, optimizer, learning_rate, adam_eps, expected_batch_size, sample_rate: see `Trainable`.
        retune: (model, optimizer, *, clipping_norm, noise_multiplier, expected_batch_size, seed) -> the optimizer for
            the next steps, with its state kept (or None, if it was changed in place). fastdp's and Opacus's optimizers
            need none, nor does a loop of SGD.
        history, sample: see `Trainable`. history receives what make_optimizer returned, or the model with train=.
        dropout: whether to leave dropout on (default: off, because it is not noise of the mechanism).
        seeded: whether to call torch.manual_seed(seed) (and numpy's and random's) before a run, for noise from the
            global generators.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[..., Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        make_batch: Callable[[int, int], tuple[Any, Any]],
        train: Callable[..., Any] | None = None,
        accumulate: Callable[..., Any] | None = None,
        loss_kind: str | None = None,
        optimizer: str = "sgd",
        learning_rate: float | None = None,
        adam_eps: float | None = None,
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        history: Callable[[Any], Any] | None = None,
        sample: Callable[[int, int, int], Any] | None = None,
        retune: Callable[..., Any] | None = None,
        dropout: bool = False,
        seeded: bool = True,
    ) -> None:
        if (make_optimizer is None) == (train is None):
            raise AuditError("give either make_optimizer= (with loss=), or train=, the script's own loop")
        if loss is None:
            raise AuditError("give loss=: (outputs, labels) -> scalar")
        self.make_model, self.make_optimizer, self.loss, self.train = make_model, make_optimizer, loss, train
        self.accumulate, self.made_batch = accumulate, make_batch
        self.loss_kind, self.optimizer, self.learning_rate = loss_kind, optimizer, learning_rate
        self.adam_eps, self.expected_batch_size, self.sample_rate = adam_eps, expected_batch_size, sample_rate
        self.dropout, self.seeded, self.sample = dropout, seeded, sample
        self.parameter_names: list[tuple[str, int]] | None = None
        self._history, self._given_retune, self._share = history, retune, (0, 1)
        # absent where the script gives nothing for them: a test that needs one then says so
        self.history = None if history is None else self._counted
        self.run_parts = None if accumulate is None or train is not None else self._run_parts
        keeps_nothing = train is not None and optimizer == "adam"  # a loop makes its optimizer anew in each run
        self.retune = None if keeps_nothing and retune is None else self._retune

    def take_share(self, rank: int, ranks: int) -> None:
        """Of every batch, this process trains on its share only: several processes make a step together."""
        self._share = (rank, ranks)

    def _own(self, batch: Batch) -> Batch:
        rank, ranks = self._share
        return batch if ranks == 1 else pick(batch, slice(rank, None, ranks))

    # ------------------------------------------------------------------ the protocol

    def build(self, seed: int) -> Job:
        """Return the model for a seed, not yet private."""
        torch.manual_seed(seed)
        model = self.make_model()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise AuditError("make_model() gave a model without a trainable parameter")
        self.parameter_names = [(name, p.numel()) for name, p in trained]
        for module in model.modules():
            for kind, attribute in _DROPOUT.items():
                if isinstance(module, kind) and not self.dropout:
                    setattr(module, attribute, 0.0)
        return Job(model, [p for _, p in trained])

    def run(
        self, model: Job, batches: Sequence[Batch], *, clipping_norm: float, noise_multiplier: float, seed: int
    ) -> Outcome:
        """Train the model by the script's own step."""
        if batches:  # a loop of one's own need not bear no batches
            ready = [model.tensors(self._own(batch)) for batch in batches]
            self._train(model, ready, count(batches[0][1]), clipping_norm, noise_multiplier, seed)
        return self._outcome(model, batches)

    def trajectory(
        self, model: Job, batches: Sequence[Batch], *, clipping_norm: float, noise_multiplier: float, seed: int
    ) -> Array | None:
        """Return the parameters [steps, P] after every step, or None if a loop does not take batches in turn."""
        ready = Watched([model.tensors(self._own(batch)) for batch in batches], model)
        self._train(model, ready, count(batches[0][1]), clipping_norm, noise_multiplier, seed)
        ready.seen[len(ready)] = model.flat()
        whole = sorted(ready.seen) == list(range(len(ready) + 1))
        return np.stack([ready.seen[k + 1] for k in range(len(ready))]) if whole else None

    def _run_parts(
        self, model: Job, batches: Sequence[Sequence[Batch]], *, clipping_norm: float, noise_multiplier: float,
        seed: int,
    ) -> Outcome:  # fmt: skip
        """Train the model, each logical batch in physical ones."""
        ready = [[model.tensors(self._own(part)) for part in batch] for batch in batches]
        size = sum(count(y) for _, y in batches[0])
        self._train(model, ready, size, clipping_norm, noise_multiplier, seed, parts=True)
        return self._outcome(model, [part for parts in batches for part in parts])

    def make_batch(self, seed: int, size: int) -> Batch:
        """Return ordinary data as arrays."""
        x, y = self.made_batch(seed, size)
        return mapped(_array, x), mapped(_array, y)

    def predict(self, model: Job, x: Any) -> Array:
        """Return outputs in the model's training mode, as its loss sees them. Running statistics are restored."""
        with _undisturbed(model.model):
            found = model.model(model.tensors(x))
        if not isinstance(found, Tensor):
            raise AuditError(f"the model returns a {type(found).__name__}, not a tensor of outputs [B, ...]")
        return found.double().numpy(force=True)

    def loss_of(self, model: Job, batch: Batch) -> float:
        """Return the script's loss of a batch, in the model's training mode. Running statistics are restored."""
        x, y = model.tensors(batch)
        with _undisturbed(model.model):
            return float(self.loss(model.model(x), y))

    def state(self, model: Job) -> Array:
        """Return buffers and frozen weights, which are released with the others and have no noise."""
        trained = {id(p) for p in model.trained}
        frozen = (p for p in model.model.parameters() if id(p) not in trained)
        buffers = (b for name, b in model.model.named_buffers() if not name.endswith("num_batches_tracked"))
        return flattened([*frozen, *buffers])

    # ------------------------------------------------------------------ inside

    def _train(self, model: Job, ready: Sequence[Any], size: int, clipping_norm: float, noise_multiplier: float,
               seed: int, parts: bool = False) -> None:  # fmt: skip
        """ready: batches as tensors; with parts, lists of physical ones."""
        if self.seeded:
            seed_generators(seed)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # of hooks, of seeds: the audit runs a step hundreds of times
            if self.train is not None:
                self.train(
                    model.model, ready, clipping_norm=clipping_norm, noise_multiplier=noise_multiplier, seed=seed
                )
                return
            self._optimizer(model, size, clipping_norm, noise_multiplier, seed)
            for batch in ready:
                model.optimizer.zero_grad()
                if not parts:
                    self.loss(model.called(batch[0]), batch[1]).backward()
                    model.optimizer.step()
                for number, (x, y) in enumerate(batch if parts else ()):
                    self.accumulate(model.optimizer, self.loss(model.called(x), y), number == len(batch) - 1)  # type: ignore[misc]

    def _counted(self, model: Job) -> list[tuple[float, float | None, int]]:
        assert self._history is not None
        return [tuple(entry) for entry in self._history(model.optimizer if self.train is None else model.model)]

    def _optimizer(self, model: Job, size: float, clipping_norm: float, noise_multiplier: float, seed: int) -> None:
        if model.optimizer is not None:
            return
        assert self.make_optimizer is not None
        made = self.make_optimizer(
            model.model, clipping_norm=clipping_norm, noise_multiplier=noise_multiplier,
            expected_batch_size=self.expected_batch_size or max(size, 1), seed=seed,
        )  # fmt: skip
        model.called, model.optimizer = made if isinstance(made, tuple) else (model.model, made)

    def _retune(self, model: Job, *, clipping_norm: float, noise_multiplier: float, batch_size: int, seed: int) -> None:
        """Let the next steps have other settings, with the optimizer's state kept."""
        old, size = model.optimizer, self.expected_batch_size or max(batch_size, 1)
        if self._given_retune is not None:
            made = self._given_retune(
                model.model, old, clipping_norm=clipping_norm, noise_multiplier=noise_multiplier,
                expected_batch_size=size, seed=seed,
            )  # fmt: skip
            model.optimizer = old if made is None else made
        elif old is None:
            return  # a loop, or no step yet: the next run hands them over
        elif callable(getattr(old, "detach", None)):  # fastdp's
            state = dict(old.state)
            old.detach()
            model.optimizer = None
            self._optimizer(model, size, clipping_norm, noise_multiplier, seed)
            model.optimizer.state.update(state)
        elif all(hasattr(old, name) for name in _SETTINGS):  # Opacus's
            for name, value in zip(_SETTINGS, (clipping_norm, noise_multiplier, size), strict=True):
                setattr(old, name, value)
        else:
            raise Lacking(
                f"cannot change C, sigma and the batch size of a {type(old).__name__} after its first steps: give "
                "retune= to TorchTrainable"
            )

    def _outcome(self, model: Job, batches: Sequence[Batch]) -> Outcome:
        some = batches and count(batches[-1][1])  # a script need not call its model on no samples
        return Outcome(self.loss_of(model, batches[-1]) if some else float("nan"), model.flat())


class Job:
    """A model under audit and, once it has run, what trains it."""

    def __init__(self, model: nn.Module, trained: list[nn.Parameter]) -> None:
        self.model, self.trained = model, trained
        self.called: Any = model
        self.optimizer: Any = None
        first = trained[0]
        self.device = first.device
        self.dtype = first.dtype if first.dtype.is_floating_point else torch.get_default_dtype()

    def flat(self) -> Array:
        """The trained parameters [P]."""
        return flattened(self.trained)

    def tensors(self, part: Any) -> Any:
        """Inputs, labels or a batch as the model takes them: on its device, numbers in its precision."""
        return mapped(self._tensor, part)

    def _tensor(self, array: Any) -> Tensor:
        found = torch.from_numpy(np.array(array))
        return found.to(self.device, self.dtype if found.is_floating_point() else found.dtype)


class Watched(list[Any]):
    """Batches that note the model's parameters when one is taken: those after all steps before it."""

    def __init__(self, batches: Sequence[Any], model: Job) -> None:
        super().__init__(batches)
        self.model, self.seen = model, dict[int, Array]()

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            yield self[number]

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, int):
            self.seen[number % len(self)] = self.model.flat()
        return super().__getitem__(number)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Without gradients; afterwards the buffers are what they were."""
    kept = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        yield
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)


def flattened(tensors: Sequence[Any]) -> Array:
    """The numbers of tensors, in one array."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in tensors]  # of parts: gathered
    whole = [p if p.layout == torch.strided else p.to_dense() for p in whole]
    found = torch.cat([torch.zeros(0, dtype=torch.float64), *(p.detach().double().flatten().cpu() for p in whole)])
    return found.numpy()  # type: ignore[no-any-return]


def _array(part: Any) -> Array:
    return part.numpy(force=True) if isinstance(part, Tensor) else np.asarray(part)
