"""The keyword arguments of private optimizers: names that nothing takes are refused, with the one that was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import ParameterError
from .formatting import nearest

F = TypeVar("F", bound=Callable[..., Any])

_TARGET = (
    "noise_multiplier=fastdp.noise_multiplier_for(target_epsilon=, delta=, sample_rate=, steps=) trains to a target, "
    "and optimizer.epsilon(delta) says what was spent"
)
_TREE_TARGET = (
    "noise_multiplier=fastdp.mechanisms.tree_noise_multiplier(target_epsilon=, delta=, steps_per_epoch=, epochs=) "
    "trains to a target, and optimizer.epsilon(delta) says what was spent"
)
_PHYSICAL = "fastdp.poisson_loader(max_physical_batch_size=) cuts batches that do not fit into memory"
_OPACUS = (
    "fastdp.compat.opacus.PrivacyEngine has Opacus's arguments; here the model comes first, and the data go to "
    "fastdp.poisson_loader"
)
_RATE = "give sample_rate=, which is batch / records, or train with fastdp.poisson_loader, which tells it"
_SECURE = "the noise is keyed by the operating system: leave it out (seed= makes it repeatable, for experiments)"
_SPREAD = "noise_multiplier= is the standard deviation of the noise on the sum over the sensitivity (max_grad_norm)"

# What other libraries call an option that means the same, by what it is called here.
_SAME = {
    "max_grad_norm": (
        "l2_norm_clip", "norm_clip", "clip_norm", "l2_clip", "clip", "max_norm", "clipping_norm", "clipping_threshold",
        "max_per_sample_grad_norm", "per_sample_max_grad_norm", "per_example_max_grad_norm", "max_gradient_norm",
        "grad_norm", "gradient_clip_val", "c", "r",
    ),
    "noise_multiplier": ("noise_mult", "sigma", "dp_sigma", "z"),
    "lr": ("learning_rate", "eta", "step_size"),
    "weight_decay": ("wd", "l2", "l2_penalty"),
    "betas": ("beta", "beta1", "beta2", "beta_1", "beta_2", "adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon", "adam_eps"),
    "expected_batch_size": ("lot_size", "logical_batch_size"),
    "clipping": ("clipping_fn", "clipping_function", "clip_function"),
    "style": ("clipping_style", "group_clipping"),
    "loss_reduction": ("reduction",),
    "accountant": ("accounting_mode", "accountant_type"),
    "sample_rate": ("sampling_rate", "sampling_probability", "q"),
    "rows_per_sample": ("augmentations",),
    "target_epsilon": ("target_eps", "eps_target", "budget"),
    "delta": ("target_delta",),
    "steps": ("num_steps", "max_steps", "total_steps"),
    "epochs": ("num_epochs", "num_train_epochs", "max_epochs"),
    "loader": ("dataloader", "train_loader"),
    "augmentations": ("augmult", "augmentation_multiplicity", "views"),
}  # fmt: skip
# What is no option here, and what to do instead.
_INSTEAD = {
    _TARGET: ("target_epsilon", "target_eps", "target_delta", "delta", "epsilon", "epochs", "steps", "num_steps"),
    _PHYSICAL: (
        "num_microbatches", "microbatches", "microbatch_size", "max_physical_batch_size", "virtual_batch_size",
        "n_accumulation_steps", "accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches",
    ),
    _OPACUS: ("module", "data_loader", "optimizer", "criterion", "grad_sample_mode", "wrap_model", "clipping_mode"),
    _RATE: ("num_examples", "dataset_size", "sample_size", "records", "num_samples"),
    _SECURE: ("secure_mode", "secure_rng", "secure", "generator", "noise_generator"),
    _SPREAD: ("noise_std", "noise_scale", "noise"),
    "fastdp.poisson_loader draws Poisson samples": ("poisson_sampling", "poisson"),
    "fastdp.poisson_loader(group_by=), or optimizer.group_by(keys) before each batch": ("group_by", "user_ids"),
}  # fmt: skip
_NAMED = {other: name for name, others in _SAME.items() for other in others}
_ADVISED = {name: advice for advice, names in _INSTEAD.items() for name in names}


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, a method or a class, by name, without `self`."""
    found = dict(inspect.signature(function).parameters)
    found.pop("self", None)
    return found


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for names that an optimizer does not take, with what was meant.

    Args:
        owner: what was called.
        given: the names of the keyword arguments.
        known: the names that there are.
    """
    unknown = [name for name in given if name not in known]
    if unknown:
        what = "; ".join(f"{name!r}: {_meant(owner, name, known)}" for name in unknown)
        many = "arguments" if len(unknown) > 1 else "an argument"
        raise TypeError(f"{owner} got {many} that it does not have: {what}")


def _meant(owner: str, name: str, known: Collection[str]) -> str:
    plain = name.lower()
    if name == "epsilon" and "target_epsilon" in known:
        return "target_epsilon= is the budget" + (", and eps= the term in the denominator" if "eps" in known else "")
    if (same := _NAMED.get(plain)) in known:
        return f"it is called {same} here"
    if owner == "PrivacyArguments":  # loader and optimizer are the trainer's
        return nearest(name, sorted(known)).removeprefix("; ") or "is it one of TrainingArguments?"
    if plain in _ADVISED:
        return _TREE_TARGET if owner == "DPFTRL" and _ADVISED[plain] == _TARGET else _ADVISED[plain]
    of_torch = _of_torch(same or plain)
    if of_torch and owner == "privatize":
        return f"it is an option of the torch optimizer, which is made before: {of_torch[0]}(params, {same or plain}=)"
    if of_torch:
        return f"it is an option of {' and '.join(of_torch)} only"
    found = nearest(name, sorted(known)).removeprefix("; ")
    return found or f"help({owner}) lists what there is"


def _of_torch(name: str) -> list[str]:
    """The optimizers of torch, of those that fastdp has a class for, which take an option of this name."""
    kinds: tuple[type, ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
    return [f"torch.optim.{kind.__name__}" for kind in kinds if name in parameters_of(kind)]


def declared(method: F) -> F:
    """An `__init__(self, model, lr, *, ...)` that declares what there is: what was given goes to `self._make`.

    Only what was given is handed on, so that the class of torch beside it has defaults of its own. Its arguments are
    taken, too, where it has more than torch's (a class made of a private optimizer and the user's own).
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def init(self: Any, *args: Any, **options: Any) -> None:
        owner, base = type(self).__name__, self._base_parameters()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in base.values()):
            refuse_unknown(owner, options, {*signature.parameters, *base})
        others = {name: options.pop(name) for name in [*options] if name not in signature.parameters}
        model = args[0] if args else options.get("model")
        if model is not None and not isinstance(model, nn.Module):
            raise ParameterError(
                f"the first argument is the model (an nn.Module), not {type(model).__name__}; to train a part of it "
                "freeze the rest, or give params= (tensors or parameter groups)"
            )
        try:
            given = signature.bind(self, *args, **options).arguments
        except TypeError as problem:
            raise TypeError(f"{owner}(model, lr, *, noise_multiplier=, ...): {problem}") from None
        given.pop("self")
        self._make(**given, **others)

    return init  # type: ignore[return-value]


def named(function: F) -> F:
    """A function (or a class's __init__) whose unknown keyword arguments are refused with what was meant."""
    known, owner = parameters_of(function), function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        refuse_unknown(owner, options, known)
        return function(*args, **options)

    return call  # type: ignore[return-value]
