"""A device that is not one, in two copies, "stub:0" and "stub:1": its tensors lie in the host's memory and its
functions run on the CPU, but torch keeps them apart as it would a GPU's. What the engine makes on a wrong device fails.

    python -m tests.second_device FOLDER     builds it there, runs every case and prints a line of JSON for each

It changes the whole process (torch then has an accelerator), so tests run it in a process of its own.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils import cpp_extension

import fastdp

from . import cases, second_device_calls, second_device_experts
from .second_device_graphed import (
    GRAPHED,
    check_beside,
    check_capture,
    check_graphed,
    check_graphed_labels,
    check_graphed_loop,
    scaled,
    shifted,
)
from .second_device_ranks import check_ranks
from .second_device_syncs import check_by_place, check_late, check_seen, check_waits, library_cases
from .truth import norms_of, truth

SOURCE = Path(__file__).with_suffix(".cpp")
NO_SUCH_FUNCTION = ("_thnn_fused", "_copy_from_and_resize")  # of recurrent cells, and of in-place writes by a mask


def register(folder: str) -> None:
    """Build the device and make it known to torch."""
    made = cpp_extension.load("second_device", [str(SOURCE)], extra_cflags=["-O0", "-g0"], build_directory=folder)

    class Entered:
        def __init__(self, device: Any) -> None:
            self.index = device if isinstance(device, int) else torch.device(device).index or 0

        def __enter__(self) -> None:
            self.before = made.current_device()
            made.set_device(self.index)

        def __exit__(self, *_: Any) -> None:
            made.set_device(self.before)

    class Event:
        """Comes when somebody waits for it, or asks a third time: of a device that is behind."""

        def __init__(self, enable_timing: bool = False) -> None:
            self.timed = enable_timing

        def record(self, stream: Any = None) -> None:
            functions.events.append((functions.current_stream() if stream is None else stream).device_index)
            self.asked, self.at = 0, time.perf_counter()

        def query(self) -> bool:
            made.refuse_capture("a query of an event")
            self.asked += 1
            if self.asked > 2:
                made.arrive()
            return self.asked > 2

        def synchronize(self) -> None:
            made.refuse_capture("a wait for an event")
            self.asked = 2
            made.arrive()

        def elapsed_time(self, end: Any) -> float:
            assert self.timed and end.timed and end.asked >= 2, "both must be timed, and have come"
            return 1e3 * (end.at - self.at)

    def synchronize(device: Any = None) -> None:
        made.refuse_capture("synchronize()")
        made.arrive()

    @contextlib.contextmanager
    def capturing() -> Iterator[None]:
        """As within a graph's capture: whatever the host would wait for is refused."""
        made.set_captures(True)
        try:
            yield
        finally:
            made.set_captures(False)

    def index_of(device: Any = None) -> int:
        return made.current_device() if device is None else Entered(device).index

    functions = types.ModuleType("torch.stub")
    functions.__dict__.update(
        is_available=lambda: True, device_count=made.device_count, current_device=made.current_device,
        _is_in_bad_fork=lambda: False, synchronize=synchronize, _initialized=True,
        manual_seed_all=lambda seed: [each.manual_seed(seed) for each in functions.default_generators],
        default_generators=[made.generator(index) for index in range(made.device_count())],
        get_rng_state=lambda device=None: functions.default_generators[index_of(device)].get_state(),
        set_rng_state=lambda state, device=None: functions.default_generators[index_of(device)].set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16], device=Entered, Stream=torch.Stream,
        current_stream=lambda device=None: torch.Stream(
            stream_id=made.stream(index_of(device)), device_index=index_of(device), device_type=20
        ),
        recorded_streams=made.recorded_streams, take_waits=made.take_waits, is_current_stream_capturing=made.captures,
        capturing=capturing, Event=Event, events=[],
    )  # fmt: skip
    torch.utils.rename_privateuse1_backend("stub")
    torch._register_device_module("stub", functions)
    torch.utils.generate_methods_for_privateuse1_backend()


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value


# ---------------------------------------------------------------------- one case, all on the second device


def check_case(name: str) -> None:
    model, batch, losses = cases.build(name)
    exact = truth(model, batch, losses)
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    model, batch = model.to("stub:1"), moved(batch, "stub:1")
    if len({id(p) for p in model.parameters()}) != len(set(names)):
        raise Unsupported("moving it to such a device unties its parameters")
    try:
        losses(copy.deepcopy(model), batch).mean().backward()
    except (RuntimeError, NotImplementedError) as problem:
        if any(function in str(problem) for function in NO_SUCH_FUNCTION):
            raise Unsupported(str(problem)) from problem
        raise
    engine = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    assert engine.norms().device == torch.device("stub:1")
    norms = engine.norms().cpu().double()
    torch.testing.assert_close(norms, norms_of(exact), rtol=1e-4, atol=1e-6)
    factors = torch.linspace(0.2, 1.0, len(norms))
    factors[0] = 0
    for key, total in engine.clipped_sum(factors.to("stub:1")).items():
        wanted = torch.einsum("b,b...->...", factors.double(), exact[key])
        assert total.device == torch.device("stub:1")
        error = (total.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
        assert error < 1e-4, (key, float(error))


def check_case_waits(name: str) -> None:
    make = library_cases().get(name, lambda: cases.build(name))
    model, batch, losses = make()
    try:
        check_waits(name, model.to("stub:1"), moved(batch, "stub:1"), losses, "stub:1")
    except (RuntimeError, NotImplementedError) as problem:
        if any(function in str(problem) for function in NO_SUCH_FUNCTION):
            raise Unsupported(str(problem)) from problem
        raise


class Unsupported(Exception):
    """The device itself cannot run this."""


# ---------------------------------------------------------------------- models over several devices


class Spread(nn.Module):
    """An embedding and a layer on one device, the rest on another, as a device map lays a model out."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.devices = (first, second)
        self.words, self.inner = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self.words.to(first), self.inner.to(first)
        self.norm.to(second), self.head.to(second)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8).to(second))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.inner(self.words(ids.to(self.devices[0]))).tanh().to(self.devices[1])
        return self.head(self.norm(hidden) * self.scale).mean(1)


PLACES = [("stub:0", "stub:1"), ("stub:1", "stub:0"), ("cpu", "stub:1"), ("stub:0", "cpu")]


def trained(first: str, second: str, make: Callable[..., Any], **options: Any) -> dict[str, Tensor]:
    model = Spread(first, second)
    optimizer = make(model, lr=0.1, max_grad_norm=0.05, expected_batch_size=6, **options)
    torch.manual_seed(1)
    for _ in range(3):
        ids, labels = torch.randint(0, 11, (6, 4)), torch.randint(0, 5, (6,))
        F.cross_entropy(model(ids), labels.to(second)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        p.device == q.device for p, q in zip(model.parameters(), Spread(first, second).parameters(), strict=True)
    )
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def check_spread(first: str, second: str, make: str, **options: Any) -> None:
    """Three private steps are those of the model on the CPU."""
    kind = getattr(fastdp, make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seeded noise says that it voids the guarantee
        want, found = trained("cpu", "cpu", kind, **options), trained(first, second, kind, **options)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


def check_verify() -> None:
    """The check of a model on two devices, whose gradients meet on one."""

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1].to("stub:1"), reduction="none")

    ids, labels = torch.randint(0, 11, (6, 4)), torch.randint(0, 5, (6,))
    assert fastdp.verify(Spread("stub:0", "stub:1"), losses, (ids, labels)).ok


def check_recorded() -> None:
    try:
        fastdp.DPSGD(Spread("stub:0", "cpu"), lr=0.1, noise_multiplier=0.0, expected_batch_size=6, graphed=True)
    except fastdp.errors.GraphError as refused:
        assert "one device alone" in str(refused)
    else:
        raise AssertionError("steps of two devices are recorded")


def check_dispatched() -> None:
    """accelerate's device map: the norms are those of the model on the CPU."""
    try:
        import accelerate
    except ImportError as why:
        raise Unsupported(str(why)) from why
    found = []
    for places in (None, {"0": "stub:0", "1": "stub:0", "2": "stub:1"}):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        x = torch.randn(6, 8)
        if places is not None:
            model = accelerate.dispatch_model(model, places, main_device="stub:0")
            assert {str(p.device) for p in model.parameters()} == {"stub:0", "stub:1"}
        engine = fastdp.PerSampleGradients(model)
        model(x.to("cpu" if places is None else "stub:0")).square().sum(1).mean().backward()
        found.append(engine.norms().cpu())
    torch.testing.assert_close(*found)


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in cases.CASES:
        yield name, lambda name=name: check_case(name)
    yield "waits are seen", lambda: check_seen("stub:1")
    yield "a doubt that is settled behind its step", lambda: check_late("stub:1")
    yield "rows by place, settled behind the step", lambda: check_by_place("stub:1")
    for name in (*cases.CASES, *library_cases()):
        yield f"waits of {name}", lambda name=name: check_case_waits(name)
    yield from second_device_experts.checks("stub:1", moved)
    for name in GRAPHED:
        yield f"graphed {name}", lambda name=name: check_graphed(name, "stub:1")
        yield f"graphed loop {name}", lambda name=name: check_graphed_loop(name, "stub:1")
    yield "graphed loop labels=", lambda: check_graphed_labels("stub:1")
    yield from second_device_calls.checks("stub:1")
    yield "noise under capture", lambda: check_capture("stub:1")
    for loss_fn in (scaled, shifted):
        yield f"numbers beside, {loss_fn.__name__}", lambda loss_fn=loss_fn: check_beside(loss_fn, "stub:1")
    yield "verify of a model on two devices", check_verify
    yield "recorded steps of a model on two devices", check_recorded
    yield "a device map", check_dispatched
    yield "steps of several processes", check_ranks
    for first, second in PLACES:
        for make, options in (
            ("DPSGD", {"noise_multiplier": 0.0}),
            ("DPAdamW", {"noise_multiplier": 0.7, "seed": 3}),
            ("DPSGD", {"noise_multiplier": 0.0, "style": "layerwise", "clipping": "global"}),
        ):
            name = f"{make} {' '.join(map(str, options.values()))} on {first} and {second}"
            yield name, lambda f=first, s=second, m=make, o=options: check_spread(f, s, m, **o)


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    register(folder)
    for name, check in checks():
        try:
            check()
            problem, kind = "", "passed"
        except Unsupported as why:
            problem, kind = str(why), "unsupported"
        except Exception as error:  # noqa: BLE001  (reported, one line a check)
            here = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename][-1]
            problem, kind = f"{type(error).__name__}: {error} ({Path(here.filename).name}:{here.lineno})", "failed"
        print(json.dumps({"check": name, "kind": kind, "problem": problem[:300]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
