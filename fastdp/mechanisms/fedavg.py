"""DP-FedAvg: federated averaging that protects clients, whatever they do in their local training.

In a round, each client is drawn with probability q, independently. A drawn client k starts from the global weights w
and returns weights w_k. With u_k = w_k - w over all trained parameters together, n clients in all, and noise N(0, 1),

    average = (sum over k of min(1, R / |u_k|) u_k + sigma R N) / (q n),    w <- w + lr average.

The sum moves by at most R when a client comes or goes, so a round is one Poisson-sampled Gaussian mechanism whose
records are clients. The divisor is the expected number of clients, since the number drawn is private.

Source: McMahan et al. 2018 (arXiv 1710.06963), its estimator of fixed denominator; server optimizers, Reddi et al. 2021
(arXiv 2003.00295); the proximal term, Li et al. 2020 (FedProx, arXiv 1812.06127).
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..accounting import History, check_accountant, check_options, default_delta, delta_problem
from ..accounting.ledger import Ledger
from ..accounting.runs import finite, run_of, whole
from ..data.sampler import PoissonSampler
from ..distributed.world import dealing_world, refuse_several
from ..errors import ParameterError, StepError
from ..ops import bounds
from ..ops.common import sum_type
from ..ops.noise import Noise
from ..optim.moment_checks import check_moments
from ..optim.optimizer_replacement import _former_of
from ..optim.private_optimizer import PrivateOptimizer
from .rounds import REMEDY, Round, changed_buffers, check_model, check_optimizer, has_statistics, trained

_NAME = "DP-FedAvg (updates of clients)"


class DPFedAvg:
    """Federated averaging with client-level differential privacy.

    `epsilon` is of clients: it covers the addition or removal of one client with all of its data, however many records
    and local steps it has. It covers the global model after each round, and nothing else: local models, their losses,
    who was drawn and how many must stay with the server. Clients trust the server, which sees their updates.

    Args:
        model: the global model. Its parameters that require grad are trained; frozen parameters and buffers stay as
            they are. Norms with running statistics (BatchNorm) must be in eval mode, where they stay in local copies.
        noise_multiplier: sigma. The noise on the sum of updates has the standard deviation sigma * max_update_norm.
        max_update_norm: R, the largest norm of a client's whole update.
        clients: the number of clients. They are called 0, 1, ..., clients - 1.
        sample_rate: the probability that a client is drawn, in (0, 1]. Give either this or expected_clients.
        expected_clients: sample_rate * clients.
        lr: the server's learning rate, if no optimizer is given; 1 by default.
        optimizer: an ordinary torch optimizer of the trained parameters, as the server's. Its gradient is the negative
            average: SGD with momentum makes FedAvgM, Adam FedAdam.
        accountant: "prv", "rdp" or "gdp".
        seed: makes draws of clients and noise repeatable, for experiments only: it voids the guarantee.

    Raises:
        ParameterError: if the model has no trained parameter, running statistics that train, or a complex or lazy
            parameter, or the optimizer's parameters are not the model's.
        StepError: if a private optimizer trains the model, or several processes train together.
        AccountingError: if sample_rate or the accountant is invalid.
        ValueError: if another number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        noise_multiplier: float,
        max_update_norm: float,
        clients: int,
        sample_rate: float | None = None,
        expected_clients: float | None = None,
        lr: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        accountant: str = "prv",
        seed: int | None = None,
    ) -> None:
        if whole(clients) < 1:
            raise ValueError(f"clients must be at least 1, not {clients}")
        if (sample_rate is None) == (expected_clients is None):
            raise ValueError("give either sample_rate= or expected_clients=")
        if expected_clients is not None and not 0 < expected_clients <= clients:
            raise ValueError(
                f"expected_clients must lie in (0, {clients}], the number of clients, not {expected_clients}"
            )
        if optimizer is not None and lr is not None:
            raise ValueError("lr= with optimizer=: the learning rate is the optimizer's, so leave lr= out")
        rate = sample_rate if expected_clients is None else expected_clients / clients
        check_options(noise_multiplier, None, rate, 0.0)
        assert rate is not None
        self.model = model
        self.noise_multiplier, self.max_update_norm = finite(noise_multiplier), _bound(max_update_norm)
        self.accountant = check_accountant(accountant)
        refuse_several(dealing_world(), "DPFedAvg", "run it in one, and hand the updates of others to receive()")
        if _former_of(model)[0] is not None or isinstance(optimizer, PrivateOptimizer):
            raise StepError(
                "a private optimizer of fastdp has the global model, and DPFedAvg steps it with noise of its own: call "
                "its detach() first, and give an ordinary torch optimizer as optimizer=. A private optimizer of the "
                "local copies is fine."
            )
        check_model(model)
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0 if lr is None else lr)
        self.optimizer = optimizer
        check_optimizer(optimizer, model)
        self.nonfinite_clients = 0  # updates dropped so far because they were not finite: not private
        self._noise, self._ledger = Noise(seed), Ledger()
        self._ledger.register(trained(model).values(), model)
        self._sampler = PoissonSampler(operator.index(clients), float(rate), 1, None, seed)
        self._drawn: dict[int, None] | None = None  # of this round
        self._round: Round | None = None
        self._open: int | None = None  # the client whose block runs
        self._warned = False

    @property
    def clients(self) -> int:
        """The number of clients."""
        return self._sampler.size

    @property
    def sample_rate(self) -> float:
        """The probability that a client is drawn for a round."""
        return self._sampler.sample_rate

    @property
    def expected_clients(self) -> float:
        """The expected number of clients in a round, by which the sum of updates is divided."""
        return self.sample_rate * self.clients

    @property
    def history(self) -> History:
        """The rounds so far, in runs of (noise multiplier, sample rate, rounds)."""
        return self._ledger.spent

    def sample(self) -> list[int]:
        """Return the clients of this round, each drawn with probability `sample_rate`. Until `step` they are the same.

        There may be none: `step` then makes a round of noise alone, which counts like any other.
        """
        if self._drawn is None:
            self._sampler.passes = self._noise.step
            self._drawn = dict.fromkeys(*self._sampler)
            self._begun()  # from here on the global model stays as it is
        return list(self._drawn)

    @contextlib.contextmanager
    def client(self, client: int) -> Iterator[nn.Module]:
        """A block in which a client of the round trains a copy of the global model, with autograd and any optimizer.

        The copy is in train mode. As the block ends, its update is clipped and joins the sum. A block that raises an
        error leaves no update, and the client may have another one.

        Raises:
            StepError: if the client is not of this round or has given its update, a block runs within another, or the
                global model was changed since the round began; its weights are then put back.
            ParameterError: if the copy's parameters are no longer those of the global model.
        """
        self._open = self._admit(client)
        try:
            local = copy.deepcopy(self.model).train()
            for module in local.modules():
                if has_statistics(module):
                    module.eval()  # as in the global model: a constant map
            yield local
            self._warn_of_buffers(local)
            self._add(self._open, dict(local.named_parameters()))
        except BaseException:
            if self._round is not None:
                self._round.put_back()
            raise
        finally:
            self._open = None

    def receive(self, client: int, weights: Mapping[str, Tensor]) -> None:
        """Take the weights that a client has trained elsewhere, from the global model of this round.

        Args:
            client: as of `client`, in whose place this is.
            weights: its `state_dict()`, or its trained parameters by name.

        Raises StepError and ParameterError as `client` does.
        """
        self._add(self._admit(client), weights)

    def discard(self) -> None:
        """Drop the updates of this round; the global model has the weights of its beginning.

        The clients stay the same, and may give their updates again.
        """
        self._refuse_open("discard()")
        if self._round is not None:
            self._round.put_back()
        self._round = None

    @torch.no_grad()
    def step(self) -> None:
        """End the round: add noise to the clipped updates' sum, apply the average to the global model, and count it.

        Raises StepError within a client's block, or if the global model was changed since the round began; its weights
        are then put back.
        """
        self._refuse_open("step()")
        now = self._begun()
        sigma, parameters, offset = finite(self.noise_multiplier), trained(self.model), 0
        std = sigma * now.bound * (1 + bounds.of_sums(self.expected_clients))
        for total in now.sums.values():
            self._noise.add_scaled_(total, std, -1 / self.expected_clients, offset)
            offset += total.numel()
        self._noise.step += 1
        self._ledger.add(sigma, self.sample_rate)  # before the update: if that fails, part of it may be there
        self._round = self._drawn = None
        self.optimizer.zero_grad()  # of frozen parameters, too: nothing but the private average is a gradient
        for name, total in now.sums.items():
            parameters[name].grad = total.to(parameters[name])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def proximal(self, local: nn.Module, mu: float) -> Tensor:
        """Return FedProx's term of a client's loss, mu / 2 |w_local - w|^2 over the copy's trained parameters."""
        if not 0 <= mu < math.inf:
            raise ValueError(f"mu must be 0 or larger and finite, not {mu!r}")
        mine, terms = dict(self.model.named_parameters()), list[Tensor]()
        for name, p in local.named_parameters():
            if p.requires_grad:
                if name not in mine:
                    raise ParameterError(f"the global model has no parameter {name!r}: give a copy that client() made")
                terms.append((p.to(sum_type(p)) - mine[name].detach().to(p.device, sum_type(p))).square().sum())
        return mu / 2 * torch.stack(terms).sum()

    def epsilon(self, delta: float) -> float:
        """Compute epsilon at delta of the rounds so far, for the addition or removal of one client.

        Args:
            delta: in (0, 1), well below 1 / clients. A warning says so if it is not.

        Raises AccountingError if delta is invalid, or the accountant has no epsilon.
        """
        if not self._noise.secure:
            warnings.warn(
                "the noise and the draws of clients come from seed=, which is for experiments: whoever knows it can "
                "take the noise off. The epsilon holds for a run without seed=.",
                stacklevel=2,
            )
        if delta < 1 and (problem := delta_problem(delta, self.clients, "client")):
            warnings.warn(f"{problem}. Ask for epsilon at {default_delta(self.clients):g} or less", stacklevel=2)
        self._ledger.warn()
        return self._ledger.epsilon(delta, self.accountant)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the history, the server optimizer's state and, under a seed, the place of noise and draws.

        The model's weights are not in it, and neither are secret keys: a run that resumes draws anew. Raises StepError
        within a round that has updates.
        """
        self._refuse_busy("state_dict()")
        return {
            "mechanism": _NAME, "history": [tuple(run) for run in self._ledger.history],
            "lost": [tuple(run) for run in self._ledger.lost], "makers": self._ledger.makers,
            "noise_step": self._noise.step, "seed": self._noise.seed, "noise_multiplier": self.noise_multiplier,
            "max_update_norm": self.max_update_norm, "nonfinite_clients": self.nonfinite_clients,
            "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`, whose noise multiplier and norm hold. Rounds that it lacks stay counted.

        Clients and sample rate stay those of this object. Raises StepError within a round that has updates, or if this
        is no state of a DPFedAvg with such a server optimizer; then nothing was loaded.
        """
        self._refuse_busy("load_state_dict()")
        try:
            if state["mechanism"] != _NAME:
                raise ValueError(f"its mechanism is {state['mechanism']!r}")
            history, lost = ([run_of(*run) for run in runs] for runs in (state["history"], state["lost"]))
            sigma, bound = finite(state["noise_multiplier"]), _bound(state["max_update_norm"])
            place, dropped, seed = whole(state["noise_step"]), whole(state["nonfinite_clients"]), state["seed"]
            said, take_up = self._ledger.read(history, lost, state["makers"])
            check_moments(type(self.optimizer), self.optimizer.param_groups, state["optimizer"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
            raise StepError(f"this is no state of a DPFedAvg, or of another version: {problem!r}") from None
        for text in said:
            warnings.warn(text, stacklevel=2)
        take_up()
        self.noise_multiplier, self.max_update_norm, self.nonfinite_clients = sigma, bound, dropped
        if seed is not None and seed == self._noise.seed:
            self._noise.step = place  # else the key is another, of which no noise may be drawn twice
        self._round = self._drawn = None

    # ------------------------------------------------------------------ the round

    def _begun(self) -> Round:
        """The round, whose weights are as they were when its clients were drawn."""
        if self._round is None:
            check_optimizer(self.optimizer, self.model)
            self._ledger.register(trained(self.model).values(), self.model)
            self._round = Round(self.model, _bound(self.max_update_norm))
        else:
            self._round.check()
        return self._round

    def _admit(self, client: int) -> int:
        if self._open is not None:
            raise StepError(
                f"client {client} within the block of client {self._open}: end that block first. Clients that train at "
                "the same time hand their weights to receive()"
            )
        number = operator.index(client)
        if number not in (self._drawn or self.sample()):
            raise StepError(f"client {number} was not drawn for this round: take the clients of sample()")
        if number in self._begun().taken:
            raise StepError(
                f"client {number} has given its update in this round, and two would move the sum by 2 R: train on all "
                f"of its data in one block, or {REMEDY}"
            )
        return number

    def _add(self, client: int, weights: Mapping[str, Tensor]) -> None:
        assert self._round is not None  # of `_admit`
        self._round.check()
        self.nonfinite_clients += not self._round.add(client, weights)

    def _warn_of_buffers(self, local: nn.Module) -> None:
        if not self._warned and (changed := changed_buffers(local, self.model)):
            self._warned = True
            warnings.warn(
                f"local training changes buffers ({', '.join(changed[:3])}), which are not averaged: the global model "
                "keeps those that it has. If they matter, take modules without them",
                stacklevel=4,
            )

    def _refuse_open(self, what: str) -> None:
        if self._open is not None:
            raise StepError(f"{what} within the block of client {self._open}: end the block first")

    def _refuse_busy(self, what: str) -> None:
        self._refuse_open(what)
        if self._round is not None and self._round.taken:
            raise StepError(f"{what} within a round, whose updates a state does not hold: {REMEDY}")


def _bound(norm: float) -> float:
    if not 0 < norm < math.inf:
        raise ValueError(f"max_update_norm must be positive and finite, not {norm!r}")
    return float(norm)
