"""fastdp.compat.opacus.PrivacyEngine against Opacus itself: the same weights, sums, history, errors and warnings."""

from __future__ import annotations

import gc
import io
import warnings

import opacus
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastdp
from fastdp.compat import opacus as ours

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 1e-4,
}


def model_of(groupnorm=True):
    torch.manual_seed(0)
    norm = [nn.GroupNorm(2, 4)] if groupnorm else []
    return nn.Sequential(nn.Conv2d(1, 4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(),
                         nn.Linear(8, 3))  # fmt: skip


def loader_of(size=40, batch_size=8, **options):
    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(size, 1, 8, 8, generator=draw), torch.randint(0, 3, (size,), generator=draw))
    return DataLoader(data, batch_size=batch_size, **options)


def private(lib, *, mode="hooks", clipping="flat", noise=0.0, bound=0.3, engine=None, optimizer=None, **options):
    """(engine, model, optimizer, criterion, loader)"""
    model = options.pop("module", None) or model_of(groupnorm=mode != "ew")
    if clipping == "per_layer":
        bound = [bound * (1 + i / 4) for i in range(len(list(model.parameters())))]
    extra = ADAPTIVE if clipping == "adaptive" else {}
    engine = engine or lib.PrivacyEngine()
    options.setdefault("data_loader", loader_of())
    made = engine.make_private(
        module=model, optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        noise_multiplier=noise, max_grad_norm=bound, grad_sample_mode=mode, clipping=clipping, **options, **extra,
    )  # fmt: skip
    if len(made) == 4:
        return engine, *made
    return engine, made[0], made[1], nn.CrossEntropyLoss(), made[2]


def train(run, batches):
    _, model, optimizer, criterion, _ = run
    for x, y in batches:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def worst(a, b):
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


# ------------------------------------------------------------------ the same training

MODES = [("hooks", c) for c in ("flat", "per_layer", "adaptive")] + [(m, "flat") for m in ("functorch", "ew", "ghost")]


@pytest.mark.parametrize(("mode", "clipping"), MODES)
def test_the_same_weights_sums_and_history(mode, clipping):
    theirs, mine = (private(lib, mode=mode, clipping=clipping) for lib in (opacus, ours))
    batches = [batch for _ in range(2) for batch in mine[-1]]  # of our loader: of any size
    assert len({len(x) for x, _ in batches}) > 1
    if clipping == "adaptive":  # Opacus takes shares of the batch's own size, which is private: here it is the expected
        batches = [batch for _ in range(2) for batch in loader_of()]
    for run in (mine, theirs):
        train(run, batches)
    assert worst(theirs[1].parameters(), mine[1].parameters()) < 2e-6
    assert worst([p.summed_grad for p in theirs[2].params], [p.summed_grad for p in mine[2].params]) < 2e-5
    assert worst([p.grad for p in theirs[2].params], [p.grad for p in mine[2].params]) < 2e-5
    assert theirs[0].accountant.history == mine[0].accountant.history == [(0.0, 0.2, 10)]
    if clipping == "adaptive":
        assert float(theirs[2].max_grad_norm) == pytest.approx(mine[2].max_grad_norm, rel=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_same_under_a_sum_and_with_the_module_as_it_is(mode, reduction):
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    runs = []
    for lib in (opacus, ours):
        model = model_of()
        run = private(lib, mode=mode, module=model, wrap_model=False, loss_reduction=reduction, criterion=criterion,
                      poisson_sampling=False)  # fmt: skip
        assert not isinstance(run[1], nn.Module) and run[1]._module is model
        train((run[0], model, run[2], run[3] if mode == "ghost" else criterion, None), loader_of())
        run[1].cleanup()
        assert not hasattr(model[0].weight, "grad_sample") and not model[0]._forward_hooks
        runs.append(model)
    assert worst(runs[0].parameters(), runs[1].parameters()) < 2e-5


def test_epsilon_is_the_same_and_the_target_is_met():
    spent = []
    for lib in (opacus, ours):
        model, engine = model_of(), lib.PrivacyEngine(accountant="rdp")
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader_of(),
            target_epsilon=4.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0,
        )  # fmt: skip
        for _ in range(3 * len(loader)):
            optimizer.step_hook(_Step(optimizer.noise_multiplier))
        spent.append(engine.get_epsilon(1e-3))
    assert spent[0] == pytest.approx(spent[1], abs=1e-6) and 3.9 < spent[1] <= 4.0


class _Step:
    accumulated_iterations = 1

    def __init__(self, noise_multiplier):
        self.noise_multiplier = noise_multiplier


@pytest.mark.parametrize("ignored", [False, True])
def test_the_losses_of_tokens_are_averaged_in_their_own_sample(ignored):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    ids = torch.randint(0, 9, (4, 7))
    targets = ids.clone()
    if ignored:
        targets[0, 1:] = -100
    data = DataLoader(TensorDataset(ids, targets), batch_size=4)
    _, model, _, criterion, _ = private(ours, mode="ghost", module=model, data_loader=data, poisson_sampling=False)
    out = model(ids)
    loss = criterion(out.flatten(0, 1), targets.flatten(), shape=out.shape)
    each = torch.stack([F.cross_entropy(o, t) for o, t in zip(out, targets, strict=True)])
    assert loss.item() == pytest.approx(each.mean().item(), rel=1e-6)


# ------------------------------------------------------------------ sizes and rates


@pytest.mark.parametrize(("size", "batch"), [(49, 1), (40, 8), (100, 34), (93, 1), (64, 64)])
def test_rate_and_expected_batch_size_are_what_is_used(size, batch):
    engine, _, optimizer, _, loader = private(ours, data_loader=loader_of(size, batch), noise=1.0)
    steps = -(-size // batch)
    assert loader.sample_rate == 1 / steps and len(loader) == steps
    assert optimizer.expected_batch_size == size // steps and isinstance(optimizer.expected_batch_size, int)
    optimizer.step_hook(_Step(1.0))
    assert engine.accountant.history == [(1.0, 1 / steps, 1)]


def test_a_batch_sampler_that_tells_no_rate_is_warned_of():
    class TwoPasses:
        def __len__(self):
            return 10

        def __iter__(self):
            yield from ([*range(8)] for _ in range(10))

    batches = TwoPasses()
    data = DataLoader(loader_of(40).dataset, batch_sampler=batches)
    with pytest.warns(fastdp.errors.SampleRateWarning, match="TwoPasses has no attribute sample_rate"):
        private(ours, data_loader=data, poisson_sampling=False)
    batches.sample_rate = 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastdp.errors.SampleRateWarning)
        _, _, optimizer, *_ = private(ours, data_loader=data, poisson_sampling=False)
    assert optimizer.expected_batch_size == 8


# ------------------------------------------------------------------ noise


def weights_after(noise_generator=None, seed=None, secure=False):
    run = private(ours, noise=1.0, poisson_sampling=False, noise_generator=noise_generator,
                  data_loader=loader_of(shuffle=True), engine=ours.PrivacyEngine(secure_mode=secure))  # fmt: skip
    if seed is not None:
        torch.manual_seed(seed)
    train(run, loader_of())
    return torch.nn.utils.parameters_to_vector(run[1].parameters()).detach()


def test_a_seed_or_a_generator_repeats_the_noise():
    assert torch.equal(weights_after(seed=1), weights_after(seed=1))
    assert not torch.equal(weights_after(seed=1), weights_after(seed=2))
    same = [weights_after(torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(weights_after(seed=1, secure=True), weights_after(seed=1, secure=True))


@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_the_promised_deviation_and_is_new_every_step(secure):
    torch.manual_seed(0)
    model = nn.Linear(200, 100)
    data = DataLoader(TensorDataset(torch.zeros(8, 200), torch.zeros(8, dtype=torch.long)), batch_size=8, shuffle=True)
    run = private(ours, module=model, data_loader=data, noise=2.0, bound=0.5, poisson_sampling=False,
                  engine=ours.PrivacyEngine(secure_mode=secure))  # fmt: skip
    draws = []
    for _ in range(2):
        train(run, data)
        draws.append(model.weight.grad.flatten().clone() * 8)  # zero gradients there
    assert all(abs(float(d.std()) - 1.0) < 0.03 and abs(float(d.mean())) < 0.03 for d in draws)
    assert abs(float(torch.corrcoef(torch.stack(draws))[0, 1])) < 0.03


@pytest.mark.parametrize("secure", [False, True])
def test_what_is_released_lies_on_a_grid_with_the_sum(secure):
    data = DataLoader(loader_of().dataset, batch_size=8, shuffle=True)
    run = private(ours, data_loader=data, noise=2.0, bound=0.5, poisson_sampling=False,
                  engine=ours.PrivacyEngine(secure_mode=secure))  # fmt: skip
    train(run, [next(iter(data))])
    for p in run[1].parameters():
        units = p.grad.double() * 8 * 64  # noise of 1 on the sum of 8
        assert torch.equal(units, units.round()) and units.abs().max() > 32


def test_secure_mode_samples_poisson_and_needs_no_other_package():
    engine = ours.PrivacyEngine(secure_mode=True)
    loader = private(ours, engine=engine, data_loader=loader_of(400, 40))[-1]
    torch.manual_seed(0)
    sizes = [len(x) for _ in range(20) for x, _ in loader]
    torch.manual_seed(0)
    again = [len(x) for _ in range(20) for x, _ in loader]
    assert sizes != again and abs(sum(sizes) / len(sizes) - 40) < 2.5 and min(sizes) < 35 and max(sizes) > 45
    with pytest.raises(ValueError, match="secure mode"):
        private(ours, engine=engine, noise_generator=torch.Generator())


# ------------------------------------------------------------------ errors and warnings


def outcome(run):
    """The class of the error that a function ends with, or None."""
    try:
        run()
    except Exception as error:  # noqa: BLE001  (which one is the question)
        return type(error)
    return None


def norms_of_layers(lib):
    model = model_of()
    lib.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader_of(),
        noise_multiplier=1.0, max_grad_norm=[1.0], clipping="per_layer",
    )  # fmt: skip


OTHER = nn.Linear(2, 2)
REFUSED = {
    "other parameters": lambda lib: private(lib, optimizer=torch.optim.SGD(OTHER.parameters(), lr=0.1)),
    "batch norm": lambda lib: private(lib, module=nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))),
    "unknown mode": lambda lib: private(lib, mode="magic"),
    "unknown clipping": lambda lib: private(lib, clipping="magic"),
    "ghost per layer": lambda lib: private(lib, mode="ghost", clipping="per_layer"),
    "reduction": lambda lib: private(lib, mode="ghost", criterion=nn.CrossEntropyLoss(reduction="sum")),
    "norms of layers": norms_of_layers,
    "accountant": lambda lib: lib.PrivacyEngine(accountant="magic"),
    "hooks twice": lambda lib: [private(lib, module=m, wrap_model=False) for m in [model_of()] * 2],
    "wrapped for another mode": lambda lib: private(lib, mode="ghost", module=private(lib)[1]),
    "expected batch size": lambda lib: lib.optimizers.DPOptimizer(
        torch.optim.SGD(OTHER.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_is_refused(name):
    theirs, mine = (outcome(lambda lib=lib: REFUSED[name](lib)) for lib in (opacus, ours))
    assert theirs is not None and issubclass(mine, theirs)


def test_a_refusal_leaves_the_module_as_it_was():
    model = model_of()
    with pytest.raises(ValueError, match="Unsupported combination"):
        private(ours, module=model, mode="ghost", clipping="per_layer")
    private(ours, module=model)
    assert fastdp.PrivacyEngine is ours.PrivacyEngine


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_tp"])
def test_sharded_modes_refuse_a_whole_model_by_name(mode):
    with pytest.raises((NotImplementedError, ValueError), match=mode):
        private(ours, mode=mode, wrap_model=mode == "ghost_fsdp")


def test_warnings_are_those_of_opacus():
    for lib in (opacus, ours):
        with pytest.warns(UserWarning, match="Secure RNG turned off"):
            engine = lib.PrivacyEngine(accountant="rdp")
        private(lib, engine=engine)
        with pytest.warns(UserWarning, match="detected new dataset object"):
            private(lib, engine=engine, data_loader=loader_of())
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        model = model_of()
        with pytest.warns(UserWarning, match="non-zero privacy budget"):
            engine.make_private_with_epsilon(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader_of(),
                target_epsilon=9.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0,
            )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.PrivacyEngine(secure_mode=True)


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(("saver", "loader"), [(opacus, ours), (ours, opacus)])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_checkpoints_are_read_by_either(saver, loader, mode):
    first = private(saver, mode=mode, noise=1.0)
    train(first, loader_of())
    file = io.BytesIO()
    first[0].save_checkpoint(path=file, module=first[1], optimizer=first[2], checkpoint_dict={"epoch": 3})
    file.seek(0)
    second = private(loader, mode=mode, noise=1.0)
    rest = second[0].load_checkpoint(path=file, module=second[1], optimizer=second[2])
    assert rest["epoch"] == 3 and worst(first[1].parameters(), second[1].parameters()) == 0
    assert second[0].accountant.history == first[0].accountant.history
    states = [[s["momentum_buffer"] for s in run[2].state.values()] for run in (first, second)]
    assert worst(*states) == 0
    file.seek(0)
    with pytest.warns(UserWarning, match="items but optimizer is not"):
        second[0].load_checkpoint(path=file, module=second[1])


def test_a_second_private_optimizer_of_a_module_is_warned_about_while_the_first_lives():
    run = private(ours)
    second = torch.optim.SGD(run[1].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="another private optimizer.*understated"):
        made = private(ours, module=run[1], optimizer=second)
    del run, made, second
    module = private(ours)[1]
    gc.collect()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this module has another")
        private(ours, module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
