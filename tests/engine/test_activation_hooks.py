"""Hooks on the gradients of activations: they may look; one that changes a gradient is refused."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import FastDPError, SampleMixingError, StepError

BATCH = 6
Attach = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(nn.Module):
    """Two layers; `within` is called with the activation between them, in the forward."""

    def __init__(self, within: Attach | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.within = nn.Linear(5, 7), nn.Linear(7, 3), within
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.within is not None:
            self.within(self, hidden)
        self.kept = hidden
        return self.second(hidden)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def backward(build: Callable[[], nn.Module], after: Attach | None, x: Tensor, y: Tensor) -> Any:
    """The engine of a model, after a backward of a sum of squares."""
    engine = fastdp.PerSampleGradients(model := build(), loss_reduction="sum")
    out = model(x)
    if after is not None:
        after(model, out)
    (out - y).square().sum().backward()
    return engine


def check_right(build: Callable[[], nn.Module], after: Attach | None = None) -> None:
    """The gradients are those of each sample alone, hooks and all."""
    x, y = torch.randn(BATCH, 5), torch.randn(BATCH, 3)
    engine = backward(build, after, x, y)
    norms, found = engine.norms(), engine.materialize()
    for i in range(BATCH):
        plain = build()
        out = plain(x[i : i + 1])
        if after is not None:
            after(plain, out)
        (out - y[i : i + 1]).square().sum().backward()
        grads = {name: p.grad for name, p in plain.named_parameters()}
        assert float(norms[i]) == pytest.approx(float(sum(g.square().sum() for g in grads.values()) ** 0.5), rel=1e-4)
        for name, grad in grads.items():
            torch.testing.assert_close(found[name][i], grad, rtol=1e-4, atol=1e-5)


def check_refused(build: Callable[[], nn.Module], after: Attach | None = None, words: str = "hook") -> None:
    with pytest.raises(SampleMixingError, match=words):
        backward(build, after, 3 * torch.randn(BATCH, 5), 3 * torch.randn(BATCH, 3)).norms()


def on_tensor(hook: Callable[[Tensor], Any]) -> Attach:
    return lambda model, tensor: tensor.register_hook(hook)


def in_place(change: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        change(grad)

    return hook


CHANGING: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g / g.norm(),
    "scaled": lambda g: g * 0.5,
    "the same, for now": lambda g: g.clamp(-1e3, 1e3),
    "roll": lambda g: g.roll(1, 0),
    "zeros": lambda g: torch.zeros_like(g),
    "in place": in_place(lambda g: g.div_(g.norm())),
    "through a view": in_place(lambda g: g.t().div_(g.norm())),
    "through detach": in_place(lambda g: g.detach().div_(g.norm())),
    "through data": in_place(lambda g: g.data.div_(g.norm())),
    "numpy": in_place(lambda g: g.numpy().__imul__(2.0)),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("where", ["within", "output", "kept", "checkpointed"])
def test_changing_is_refused(name: str, where: str) -> None:
    check_refused(*placed(on_tensor(CHANGING[name]), where))


def placed(attach: Attach, where: str) -> tuple[Callable[[], nn.Module], Attach | None]:
    if where == "within":
        return lambda: Net(attach), None
    if where == "checkpointed":
        return lambda: Checkpointed(attach), None
    return Net, attach if where == "output" else lambda model, out: attach(model, model.kept)


def reversed_data(h: Tensor) -> None:
    h.data.copy_(h.data.flip(0))


@pytest.mark.parametrize(
    "act",
    [
        reversed_data,
        lambda h: h.grad_fn.register_prehook(lambda g: g),
        lambda h: h.register_hook(lambda g: g / g.norm()),
    ],
    ids=["writes to data", "hooks a node", "hooks a tensor"],
)
def test_a_hook_that_acts_on_the_backward_under_way_is_refused(act: Callable[[Any], Any]) -> None:
    def after(model: Any, out: Tensor) -> None:
        out.register_hook(lambda g: act(model.kept))

    with pytest.raises(StepError, match="a hook on the gradient of a tensor.* (writes to data|takes nodes)"):
        backward(Net, after, torch.randn(BATCH, 5), torch.randn(BATCH, 3))


def test_the_remedy_that_the_error_names_is_exact() -> None:
    class Halved(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            return self.second(h.detach() + 0.5 * (h - h.detach()))

    check_right(Halved)


def test_hooks_on_the_loss_are_refused_if_they_change_it() -> None:
    model = Net()
    fastdp.PerSampleGradients(model)
    loss = model(torch.randn(BATCH, 5)).square().sum(1).mean()
    loss.register_hook(lambda g: g * float(loss.detach()))
    with pytest.raises(SampleMixingError, match="the loss: a hook"):
        loss.backward()


def test_hooks_of_a_model_without_an_engine_may_do_as_they_like() -> None:
    """Though a batch of another model is followed meanwhile."""
    private, other = Net(), nn.Linear(5, 3)
    engine = fastdp.PerSampleGradients(private)
    x = torch.randn(BATCH, 5)
    loss = private(x).square().sum(1).mean()
    out = other(x)
    out.register_hook(lambda g: g * 0)
    out.sum().backward()
    assert other.weight.grad is not None and not other.weight.grad.any()
    loss.backward()
    assert engine.norms().shape == (BATCH,)


def test_several_gradients_together_may_be_looked_at_only() -> None:
    graph = torch.autograd.graph
    seen: list[int] = []
    check_right(lambda: Net(lambda _, h: graph.register_multi_grad_hook([h], lambda grads: seen.append(len(grads)))))
    assert seen
    scale = in_place(lambda grads: grads[0].div_(grads[0].norm()))
    check_refused(lambda: Net(lambda _, h: graph.register_multi_grad_hook([h], scale)))


# --------------------------------------------------------------------------- hooks on modules


def by_norm(module: nn.Module, *grads: Any) -> Any:
    """A module's hook that changes the gradients it is given first: of inputs, or of outputs before the backward."""
    return tuple(None if g is None else g / g.norm() for g in grads[0])


def looking(module: nn.Module, *grads: Any) -> None:
    """A module's hook."""


def hooked(register: str, hook: Callable[..., Any], layer: str = "second") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        getattr(model.get_submodule(layer), register)(hook)
        return model

    return build


@pytest.mark.parametrize("layer", ["second", "", "first"])
@pytest.mark.parametrize(
    "kind", ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]
)
def test_module_hooks(layer: str, kind: str) -> None:
    check_right(hooked(kind, looking, layer))
    if layer == "second" or kind == "register_full_backward_pre_hook":  # (else the inputs want no gradient)
        check_refused(hooked(kind, by_norm, layer), words="a module")


def test_hooks_on_every_module() -> None:
    for hook, check in ((looking, check_right), (by_norm, check_refused)):
        handle = register_module_full_backward_hook(hook)
        try:
            check(Net)
        finally:
            handle.remove()


# --------------------------------------------------------------------------- hooks on nodes


def nodes(model: nn.Module, tensor: Tensor) -> list[Any]:
    return [tensor.grad_fn, tensor.grad_fn.next_functions[-1][0] if tensor.grad_fn.next_functions else tensor.grad_fn]


@pytest.mark.parametrize("where", ["within", "output", "kept"])
@pytest.mark.parametrize("inner", [0, 1])
def test_hooks_on_nodes_may_only_look(where: str, inner: int) -> None:
    def only_looking(model: nn.Module, tensor: Tensor) -> None:
        node = nodes(model, tensor)[inner]
        node.register_hook(lambda grad_in, grad_out: None)
        node.register_prehook(lambda grad_out: None)

    def before(model: nn.Module, tensor: Tensor) -> None:
        nodes(model, tensor)[inner].register_prehook(lambda grad_out: by_norm(model, grad_out))

    def after(model: nn.Module, tensor: Tensor) -> None:
        nodes(model, tensor)[0].register_hook(lambda grad_in, grad_out: by_norm(model, grad_in))

    check_right(*placed(only_looking, where))
    check_refused(*placed(before, where), words="a node")
    if where == "within":
        check_refused(*placed(after, where), words="a node")


def test_nodes_of_a_backward_that_was_not_seen_to_begin() -> None:
    model = Net(lambda _, h: h.grad_fn.register_prehook(lambda grads: None))
    fastdp.PerSampleGradients(model)
    loss = model(torch.randn(BATCH, 5)).square().sum(1).mean()
    found: list[Any] = []

    def run() -> None:
        with pytest.raises(StepError, match="grad_fn") as refused:
            loss.backward()
        found.append(refused)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found


# --------------------------------------------------------------------------- what else stands between


def test_looking_for_a_later_use() -> None:
    """As class activation maps do: gradients are kept by hooks, and retained."""
    kept: list[Tensor] = []
    check_right(lambda: Net(lambda _, h: (h.register_hook(kept.append), h.retain_grad())))
    assert len(kept) > BATCH and kept[0].numpy().shape[1] == 7


def test_saved_tensors_must_come_back_as_they_were() -> None:
    def under(hooks: Callable[[], Any]) -> Callable[[], nn.Module]:
        class Saving(Net):
            def forward(self, x: Tensor) -> Tensor:
                with hooks():
                    return super().forward(x)

        return Saving

    graph = torch.autograd.graph
    check_right(under(graph.save_on_cpu))
    check_right(under(lambda: graph.saved_tensors_hooks(lambda t: t.clone().mT.contiguous().mT, lambda t: t)))
    for pack in (lambda t: t / t.norm(), lambda t: t.flip(0)):
        check_refused(
            under(lambda pack=pack: graph.saved_tensors_hooks(pack, lambda t: t)), words="saved_tensors_hooks"
        )


def test_hooks_are_not_left_in_copies() -> None:
    model = Net()
    handle = model.second.register_full_backward_hook(looking)
    engine = fastdp.PerSampleGradients(model)
    model(torch.randn(BATCH, 5)).square().sum(1).mean().backward()
    model.kept = None
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(other.second._backward_hooks.values()) == [looking]
    handle.remove()
    engine.detach()
    assert not model.second._backward_hooks


def test_a_refused_backward_leaves_nothing_to_step_on() -> None:
    model = Net(on_tensor(CHANGING["norm"]))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        model(torch.randn(BATCH, 5)).square().sum(1).mean().backward()
    with pytest.raises(FastDPError):
        engine.norms()
    model.within = None
    model(torch.randn(BATCH, 5)).square().sum(1).mean().backward()
    assert engine.norms().shape == (BATCH,)
