"""A torch optimizer with private steps: what it adds to its class, and what it refuses in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..accounting import History
from ..accounting.card import PrivacyCard
from ..accounting.runs import finite
from ..data import loop_checks
from ..distributed.world import refuse_several
from ..engine import loss_tracking
from ..errors import ParameterError, StepError
from . import checkpoint, distributed_step, fused_update
from .clipping import ClippingFunction
from .drawn_noise import checked
from .option_checks import FIXED, check_parameters, refuse_assignment, refuse_written_grads
from .plain_update import makes_state, unhooked, updated
from .private_step import PrivateStep
from .public_batches import PublicBatches
from .spent import card_of, warn_of_doubts

if TYPE_CHECKING:
    from .graphed_shapes import GraphedShapes
    from .graphed_step import GraphedStep


class PrivateOptimizer(torch.optim.Optimizer):
    """The interface that private optimizers add to torch's; see `privatize` for the arguments.

    `step` only accumulates until the last physical batch (of `fastdp.poisson_loader`) of a logical batch; `zero_grad`
    keeps what was accumulated.
    """

    _privacy: PrivateStep
    _public: PublicBatches | None = None  # once `public()` was called
    _step_supports_amp_scaling = True  # makes a GradScaler come to step(), which refuses it

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Add noise to the clipped sum and update the parameters.

        Args:
            closure: a function that is called once before the update, with gradients enabled, and returns the loss.

        Returns:
            The result of the closure, or None.

        Raises:
            StepError: if the order of forward, backward and step has no private meaning, or a GradScaler took part.
            ParameterError: if parameters of the model were replaced since the optimizer was made.
        """
        with loss_tracking.swept():
            privacy = self._attached()
            if makes_state(self, privacy.busy):
                return unhooked(base_of(self).step)(self)
            with privacy.world.deciding():  # of several processes, none makes a step that another refuses
                return self._step(privacy, closure)

    def _step(self, privacy: PrivateStep, closure: Callable[[], Any] | None) -> Any:
        self._refuse_scaler(privacy)
        loop_checks.refuse_division()
        loss, early = None, privacy.pending()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            loss_tracking.sweep()
            if early and len(privacy.pending()) > len(early) and privacy.pending()[0] == early[0]:
                raise StepError(loop_checks.BEFORE_CLOSURE)
        source = self._public or privacy
        kind = fused_update.kind_of(base := base_of(self))
        with torch.no_grad():
            with privacy.engine.steady():
                if not privacy.busy:  # a backward through what stands in the parameters' place is not seen
                    check_parameters(self._params(), privacy.engine)
                refuse_written_grads(privacy.engine, privacy.busy)
                self._stepped = source.ready()
                if not self._stepped:
                    return loss
                check_parameters(self._params(), privacy.engine)
                privacy.replica.rule = distributed_step.rule_of(privacy.world, base, self)
                release = checked(source.release(), privacy)
            try:
                if kind is not None and updated(kind, self, release):
                    return loss
                for parameter in self._params():
                    parameter.grad = release.gradient(parameter)
                with torch.enable_grad():
                    unhooked(base.step)(self)
            finally:  # the noise is drawn: it counts, and must not be drawn again, even where the update fails
                privacy.finish()
        return loss

    def _refuse_scaler(self, privacy: PrivateStep) -> None:
        """A GradScaler leaves its scale on optimizers that say that they support it."""
        marks = [self.__dict__.pop(name, self) is not self for name in ("grad_scale", "found_inf")]
        if any(marks):
            privacy.zero_grad()
            raise StepError(loop_checks.SCALED)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used. `set_to_none` has no effect: gradients become None."""
        with loss_tracking.swept():
            privacy = self._privacy_or_none()
            if privacy is not None and not (privacy.busy and checkpoint.torch_is_at(checkpoint.MAKER)):
                privacy.zero_grad()
            super().zero_grad(set_to_none=True)  # zeros would look like a gradient of autograd

    def _attached(self) -> PrivateStep:
        privacy = self._privacy_or_none()
        if privacy is None or privacy.detached:
            raise StepError(loop_checks.gone("" if privacy is None else privacy.replaced_by))
        if privacy.deferred_setup is not None:
            privacy.deferred_setup.look()
        return privacy

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _accounted(self) -> PrivateStep:
        """The privacy state of the run, also after `detach`."""
        return self._privacy_or_none() or self._attached()

    def _privacy_or_none(self) -> PrivateStep | None:
        """None while the optimizer is made. Also that of an optimizer which this one passes unknown names on to."""
        return getattr(self, "_privacy", None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and self._privacy_or_none() is not None:
            refuse_assignment(type(self).__name__, name)
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParameterError(
            "a private optimizer is tied to its model and cannot be copied or pickled: copy the model, make a new "
            "optimizer for it, and load state_dict()"
        )

    # ------------------------------------------------------------------ privacy

    def public(self) -> AbstractContextManager[None]:
        """Train on public batches within it: nothing is captured, clipped, noised or counted; gradients go to `.grad`.

        An ordinary optimizer may step on them within. If none does, and no `zero_grad` drops them, the next `step` adds
        them to the private gradient as they are. Raises StepError within a forward, and in several processes.
        """
        privacy = self._attached()
        refuse_several(privacy.world, "optimizer.public()", "train on public batches before or after")
        privacy.replica.refuse_parts("optimizer.public()")
        if self._public is None:
            self._public = PublicBatches(privacy)
        return self._public.within()

    @property
    def norms(self) -> Any:  # a Tensor, or dict[str, Tensor]: the clipping style, which no type checker knows, says
        """Per-sample gradient norms of the last backward, in float32: [B] if flat, else {group: [B]}.

        Raises StepError before the first backward."""
        kept = self._privacy_or_none()
        norms = (kept if kept and kept.detached and kept.norms is not None else self._attached()).norms
        if norms is None:
            raise StepError("no norms yet: call loss.backward() first")
        return norms

    @property
    def stepped(self) -> bool:
        """Whether the last `step` completed its logical batch and added noise. Step schedulers only then."""
        return bool(getattr(self, "_stepped", False))

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise over the sensitivity. It may change between steps."""
        return self._attached().noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._attached().noise_multiplier = finite(value)

    @property
    def max_grad_norm(self) -> float:
        """The clipping norm of the whole gradient: R, or sqrt(sum R^2) for custom groups."""
        clipping = self._attached().clipping
        return clipping.max_grad_norm if isinstance(clipping.style, str) else clipping.sensitivity

    @property
    def expected_batch_size(self) -> float | None:
        """The number of samples by which a mean loss's noisy sum is divided; None if it is not known yet."""
        return self._attached().expected_batch_size

    @property
    def nonfinite_samples(self) -> int:
        """The number of samples left out so far because their gradient was NaN or infinite."""
        return self._attached().nonfinite_samples

    @property
    def history(self) -> History:
        """The noised steps of this run as runs of (noise multiplier, sample rate, steps).

        A fourth number, if there is one, is the probability that a step's sample was cut to a largest size.

        It begins with that of a state that was loaded, and of an optimizer of the same model that this one replaced;
        steps of a ledger= file that no loaded state holds are in `epsilon` alone.
        """
        return list(self._accounted().ledger.history)

    def epsilon(self, delta: float | None = None, *, sample_rate: float | None = None) -> float:
        """Compute epsilon at delta for the steps so far, by the accountant.

        The epsilon holds for the addition or removal of one `unit`. If records are grouped, that is a person with all
        records of that person. The method warns if a seed voids the guarantee, if `fastdp.verify` never ran on the
        model, and of other doubts about the run.

        Args:
            delta: in (0, 1), well below 1 / (number of samples). None: that of the budget (`target_epsilon`), or
                1 / (10 n), rounded down, for the n samples that the sample rate and the expected batch size tell of.
            sample_rate: the probability that a record was in a batch, in (0, 1], for steps on batches of which nobody
                has told it (an ordinary DataLoader). The accountants assume Poisson sampling at this rate.

        Raises:
            AccountingError: if the sample rate or delta is not known, or the rate is another one, or the accountant has
                no epsilon.
        """
        privacy = self._accounted()
        warn_of_doubts(privacy)
        return privacy.epsilon(delta, sample_rate)

    def privacy_card(self, delta: float | None = None, *, sample_rate: float | None = None) -> PrivacyCard:
        """Return what is guaranteed about the weights so far, what is not, and how to compute it again.

        It prints as Markdown, and has `json()`, `html()` and `save(path)`. The arguments and errors are those of
        `epsilon`, whose warnings stand in it.
        """
        return card_of(self, self._accounted(), delta, sample_rate)

    def set_clipping(
        self,
        clipping: ClippingFunction | None = None,
        max_grad_norm: float | None = None,
        *,
        style: str | Sequence[Any] | None = None,
        gamma: float | None = None,
    ) -> None:
        """Change the clipping between steps (mix-up training). Arguments that are None keep their value.

        The accounting does not change, because the noise follows the new sensitivity. Arguments: those of `privatize`.
        Raises ClippingError or ValueError if they are invalid, and StepError between a backward and its step.
        """
        self._attached().set_clipping(clipping, max_grad_norm, style, gamma)

    def group_by(self, keys: Any) -> None:
        """Set which person each record of the coming batch belongs to.

        The records of one person are clipped as one sample, with the sum of their gradients. Call this method for every
        batch, before the forward; all records of a person must be in one batch. `sample_rate` and `expected_batch_size`
        then refer to persons. Omit it if a loader supplies the keys (`fastdp.poisson_loader(group_by=)`).

        Args:
            keys: a number or string for each record. None: samples are records again.
        """
        self._attached().engine.group_by(keys)

    @property
    def unit(self) -> str:
        """What a sample is, and what epsilon protects: "record", or "group" (all records of a person)."""
        return "group" if self._accounted().unit.grouped else "record"

    def noise_state(self) -> dict[str, Any]:
        """Return {"key", "step", "stream"}, which determine the noise of the coming steps: a run can resume exactly.

        Anyone who has the key can remove the noise from every released step. Keep it as secret as the data, apart from
        the model's checkpoints, and delete it when the run is over.
        """
        return self._attached().noise.state()

    def load_noise_state(self, state: dict[str, Any]) -> None:
        """Draw the noise of the run from which the state comes, starting at the step of the state.

        Only to repeat the same steps on the same data: the same noise on two different sums reveals their difference,
        and a step raises StepError if this process has drawn its noise for another sum. Raises StepError if it is of
        another moment than the `state_dict()` that was loaded.
        """
        checkpoint.load_noise(self._attached(), state)

    def explain(self, profile: bool = False) -> str:
        """Return the plan of the last backward as text.

        Each use of a parameter has a line with its shape, route, units of work, bytes, and predicted milliseconds.

        Args:
            profile: also show the measured milliseconds (on a device, from the next backward on).
        """
        return self._attached().explain(profile)

    @overload
    def graphed(
        self, loss_fn: Callable[..., Tensor], example_batch: Sequence[Any], sizes: Iterable[int] | None = None, *,
        verify_every: int = 0, compile: bool = False,
    ) -> GraphedStep: ...  # fmt: skip

    @overload
    def graphed(
        self, loss_fn: Callable[..., Tensor], example_batch: None = None, sizes: Iterable[int] | None = None, *,
        verify_every: int = 0, compile: bool = False,
    ) -> GraphedShapes: ...  # fmt: skip

    def graphed(
        self, loss_fn: Callable[..., Tensor], example_batch: Sequence[Any] | None = None,
        sizes: Iterable[int] | None = None, *, verify_every: int = 0, compile: bool = False,
    ) -> GraphedStep | GraphedShapes:  # fmt: skip
        """Record the forward, loss and backward of a batch, to be replayed without Python.

        On the CPU, or on one CUDA device, where each size becomes a CUDA graph if it can. What is released does not
        change: norms, clipping, noise and ledger of a replayed step are those of every step, and without randomness in
        the forward so are its numbers. Physical batches of a `poisson_loader` add up as ever.

        Args:
            loss_fn: `loss_fn(model, *batch) -> losses [B]`, the loss of each sample. It must not depend on anything
                that changes beside the batch and the parameters.
            example_batch: what the loss function takes after the model; tensors with samples in the first dimension.
                None: each shape of a batch is recorded when it is met for the second time, up to eight shapes (texts
                that are padded to their own longest, to a multiple of 64, say).
            sizes: the batch sizes to record (default: that of the example). A batch is padded to the next size, and
                nothing of the padding is read; batches larger than all of them go through Python.
            verify_every: compare every so many replays with Python's step on the same batch; 0 for never.
            compile: let Inductor (torch.compile's) fuse what is replayed, which takes it half a minute for each size.
                Results are equal within rounding, which is checked on the recorded batches. Where Inductor fails, a
                warning says why, and the step is replayed without it.

        Returns:
            `step(*batch) -> loss`: forward, backward, `step` and `zero_grad` in one call. `step.backward(*batch)` is
            forward and backward alone.

        Raises:
            GraphError: if the step cannot be replayed, with the reason.
        """
        from .graphed_shapes import GraphedShapes
        from .graphed_step import GraphedStep  # imports torch's compiler, which takes seconds

        privacy = self._attached()
        refuse_several(privacy.world, "optimizer.graphed", "make the step by backward() and step()")
        privacy.replica.refuse_parts("optimizer.graphed")
        if example_batch is not None:
            return GraphedStep(self, privacy, loss_fn, example_batch, sizes, verify_every, (), compile)
        kept = None if sizes is None else tuple(sizes)

        def record(batch: Sequence[Any], fixed: frozenset[int]) -> GraphedStep:
            return GraphedStep(self, privacy, loss_fn, batch, kept, verify_every, fixed, compile)

        return GraphedShapes(self, privacy, loss_fn, record)

    def detach(self) -> None:
        """Remove the engine from the model, which is then unchanged except for the trained weights."""
        privacy = self._privacy_or_none()
        if privacy is not None and not privacy.detached:
            privacy.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train these parameters of the model too. Flat and layerwise clipping include them from now on.

        Raises ParameterError if they are not parameters of the model.
        """
        privacy = self._privacy_or_none()
        if privacy is None or privacy.detached:
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        new = [params] if isinstance(params, Tensor) else list(params)
        privacy.retrack([*self._params(), *new])
        super().add_param_group({**param_group, "params": new})

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, with the accountant's history and the clipping under "fastdp".

        The secret key of the noise is not included.
        """
        found = super().state_dict()
        privacy = self._privacy_or_none()
        if privacy is not None:
            found["fastdp"] = checkpoint.state_of(privacy)
            checkpoint.embed_record(found)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`, noise multiplier and clipping included, or nothing of it where that raises.

        Warns if the state comes from an optimizer without privacy.
        """
        checkpoint.load(self, self._attached(), base_of(self), super().load_state_dict, state_dict)


def base_of(optimizer: PrivateOptimizer) -> Any:
    """The class of the optimizer without privacy."""
    classes = type(optimizer).__mro__
    return classes[classes.index(PrivateOptimizer) + 1]
