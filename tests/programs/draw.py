"""Programs: drawn by seed or made of given pieces, their source, and the batches they run on."""

from __future__ import annotations

import copy
import linecache
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import everyday, losses, losses_coupled, right, unseen, wrong  # noqa: F401  (their pieces)
from .pieces import ARGUMENTS, COUPLED, EITHER, ESCAPES, PIECES, RIGHT, WRAPPERS, Piece, fill

Batch = dict[str, Tensor]
HEAD = "out = self.head(h)"
LABELS = (RIGHT, EITHER, COUPLED, ESCAPES)


@dataclass(frozen=True)
class Program:
    """The pieces of a program, and everything else that was drawn of it."""

    seed: int
    names: tuple[str, ...]  # first, body ("wrapper>piece" or "piece") ..., loss, and what comes before the model
    kind: str  # of the data: "vec" or "seq"
    sizes: dict[str, int]
    reduction: str
    inside: bool  # the loss
    double: bool
    scale: float
    optimizer: bool
    batches: tuple[int, ...]
    returns: str = ""  # what the outputs lie in: "", "dict" or "tuple"

    @property
    def pieces(self) -> list[Piece]:
        return [piece_of(name) for name in self.names]

    @property
    def label(self) -> str:
        labels = {ESCAPES if self._is_out_of_sight(name) else piece_of(name).label for name in self.names}
        loops = (" in h", "len(h)", "split(")
        if any(
            name.startswith("reentrant>") and any(word in piece_of(name).lines for word in loops) for name in self.names
        ):
            labels.add(EITHER)  # refused, as docs/limits.md says: a module per sample under reentrant checkpointing
        return next(label for label in (COUPLED, ESCAPES, EITHER, RIGHT) if label in labels)

    def _is_out_of_sight(self, name: str) -> bool:
        """Of a scripted function, over data that needs no gradient: nothing of torch's sees it (docs/limits.md)."""
        wrapper, _, last = f">{name}".rpartition(">")
        if last != "scripted function":
            return False
        before = self.names[: self.names.index(name)]
        inits = [piece_of(other).init for other in before]
        trained = any("nn." in init and "requires_grad_(False)" not in init for init in inits)
        return wrapper.strip(">") in ("no_grad", "detached") or not trained

    def of(self, place: str) -> list[str]:
        return [name for name in self.names if piece_of(name).place == place]


def piece_of(name: str) -> Piece:
    """The piece of a name, with or without a wrapper."""
    return PIECES[name.split(">")[-1]]


# --------------------------------------------------------------------------- drawing


def _coinciding(rng: random.Random, batch: int) -> int:
    return rng.choice([batch, batch, max(2, batch - 1), 2, 3, 4, 5, 6])


def draw(seed: int) -> Program:
    """A program of one to four pieces around a head and a loss."""
    rng = random.Random(seed)
    names = {place: sorted(n for n, p in PIECES.items() if p.place == place) for place in ("first", "body", "loss")}
    groups = {label: [n for n in names["body"] if PIECES[n].label == label] for label in LABELS}
    coupled = rng.random() < 0.5
    bad = ESCAPES if rng.random() < 0.03 else COUPLED
    length, chosen = rng.choice([1, 1, 2, 2, 3, 4]), list[str]()
    at = rng.randrange(length) if coupled and rng.random() < 0.7 else -1
    for place in range(length):
        label = bad if place == at else EITHER if rng.random() < 0.06 else RIGHT
        name = rng.choice(groups[label])
        if rng.random() < 0.2 and PIECES[name].may_be_wrapped and not PIECES[name].gives:
            name = rng.choice(sorted(WRAPPERS)) + ">" + name
        chosen.append(name)
    wanted = bad if coupled and at < 0 else EITHER if rng.random() < 0.07 else RIGHT
    fixed = {piece_of(n).reduction for n in chosen} - {""}
    losses_of = [n for n in names["loss"] if PIECES[n].label == wanted and {PIECES[n].reduction} <= {"", *fixed}
                 or not fixed and PIECES[n].label == wanted]  # fmt: skip
    loss = rng.choice(losses_of or ["loss: cross-entropy"])
    before = rng.choice(["before: own noise", "before: scaled"]) if rng.random() < 0.1 else ""
    if coupled and rng.random() < 0.02:
        before = rng.choice(["before: mix-up", "before: centred"])
    return arranged(seed, rng.choice(names["first"]), chosen, loss, before)


def arranged(
    seed: int, first: str, body: list[str], loss: str, before: str = "", inside: bool | None = None
) -> Program:
    """A program of these pieces; what else there is to choose comes of the seed."""
    rng = random.Random(seed * 7919 + 13)
    batch = rng.randint(2, 9)
    sizes = {name: _coinciding(rng, batch) for name in "TDK"}
    pieces = [piece_of(name) for name in (first, *body, loss)]
    takes = PIECES[first].gives or next((p.takes for p in pieces if p.takes != "any"), rng.choice(["vec", "seq"]))
    if body and not PIECES[first].gives and rng.random() < 0.3:
        takes = rng.choice(["vec", "seq"])
    reduction = next((p.reduction for p in pieces if p.reduction), rng.choice(["mean", "mean", "sum"]))
    outside = rng.random() < 0.55 if inside is None else not inside
    returns = "" if "model(" in PIECES[loss].lines else random.Random(seed).choice(["", "", "dict", "tuple"])
    return Program(
        seed,
        (first, *body, loss, *([before] if before else [])),
        takes,
        {**sizes, "V": 7, "B": batch},
        reduction,
        not outside and PIECES[loss].where != "outside",
        rng.random() < 0.75,
        rng.choice([1.0, 1.0, 1.0, 1.0, 1e-4, 1e-2, 10.0, 1e3, 1e5]),
        any(p.clipping for p in pieces) or rng.random() < 0.2,
        tuple(
            batch if k == 0 or rng.random() < 0.6 else rng.randint(2, 9) for k in range(max(p.steps for p in pieces))
        ),
        returns,
    )


def alone(name: str, seed: int) -> Program:
    """A program of one piece between a layer, a head and an ordinary loss."""
    first, plain, place = "first: layer", "loss: cross-entropy of samples", PIECES[name].place
    if place == "loss":
        return arranged(seed, first, [], name, inside=bool(seed % 2))
    if place == "before":
        return arranged(seed, first, [], plain, name)
    return arranged(seed, name, ["linear"], plain) if place == "first" else arranged(seed, first, [name], plain)


def smaller(program: Program) -> list[Program]:
    """Programs with a piece or a wrapper less, or a simpler one in its place."""
    found, plain = list[Program](), "loss: cross-entropy of samples"
    for i, name in enumerate(program.names):
        rest = (program.names[:i], program.names[i + 1 :])
        if piece_of(name).place in ("body", "before"):
            found.append(replace(program, names=rest[0] + rest[1]))
        if ">" in name:
            found.append(replace(program, names=(*rest[0], name.split(">")[1], *rest[1])))
        if piece_of(name).place == "loss" and name != plain:
            found.append(replace(program, names=(*rest[0], plain, *rest[1])))
    if len(program.batches) > 1:
        found.append(replace(program, batches=program.batches[:1]))
    changes = {"optimizer": False, "inside": False, "scale": 1.0, "double": True, "returns": ""}
    return found + [replace(program, **{k: v}) for k, v in changes.items() if getattr(program, k) != v]  # type: ignore[arg-type]


# --------------------------------------------------------------------------- source


def source(program: Program) -> str:
    """The program as a Python module: `Model` and `step(model, batch, state)`, which returns the loss."""
    kind, forward, init = program.kind, list[str](), list[str]()
    loss = piece_of(program.of("loss")[0])
    for number, name in enumerate(program.of("first") + program.of("body"), 1):
        piece, rng = piece_of(name), random.Random(f"{program.seed} {name}")
        forward += _converted(kind, piece.takes)
        kind = piece.takes if piece.takes in ("vec", "seq") else kind
        lines, state = (_shaped(text, number, name, kind, program) for text in (piece.lines, piece.init))
        forward += _wrapped(lines, name, number, rng)
        init += state
        kind = piece.gives or kind
    forward += [*_converted(kind, loss.takes), HEAD]
    init += ["self.head = nn.Linear(D, K)"]
    last, inner = fill(loss.lines, 0, random.Random(program.seed), program.reduction), ["x"]
    before = list[str]()
    for name in program.of("before"):
        before += fill(piece_of(name).lines, 0, random.Random(program.seed), program.reduction)
    for name in program.names:
        if piece_of(name).place in ("first", "body") or (name in program.of("loss") and program.inside):
            inner += [word for word in piece_of(name).needs() if word not in inner]
    arguments = ", ".join(inner)
    calls = {"ARGS2": ["x2", *inner[1:]], "ARGS3": ["e", *inner[1:]], "ARGSF": [f"{word}.flip(0)" for word in inner]}
    used = {
        *inner,
        *(word for name in program.names for word in piece_of(name).needs() if piece_of(name).place == "before"),
    }
    used |= {*loss.needs(), *(v[0] for k, v in calls.items() if k in loss.lines and k != "ARGSF")}
    needed = [name for name in ARGUMENTS if name in used]
    name = "loss" if program.inside else "out"
    forward += [*last, _returned(program, "loss, out")] if program.inside else [_returned(program, "out, h")]
    body = [*before, f"{name} = model({arguments}){RETURNS[program.returns][1]}"] + ([] if program.inside else last)
    for word, values in calls.items():
        body = [line.replace(word, ", ".join(values)) for line in body]
    sizes = ", ".join(program.sizes), ", ".join(str(v) for v in program.sizes.values())
    if any("self.call(" in line for line in forward):
        init += ["self.call = Call()"]
    text = [
        "import torch", "import torch.utils.checkpoint", "import torch.nn.functional as F", "from torch import nn", "",
        f"{sizes[0]} = {sizes[1]}", "",
        *(["@torch.jit.script", "def mixing_script(h: torch.Tensor) -> torch.Tensor:", "    return h - h.mean(0)", ""]
          if any("mixing_script" in line for line in forward) else []),
        *(["class Call(nn.Module):", "    def forward(self, function, h):", "        return function(h)", ""]
          if "self.call = Call()" in init else []),
        "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()",
        *(f"        {line}" for line in init), "",
        f"    def forward(self, {arguments}):", *(f"        {line}" for line in forward), "",
        "def step(model, batch, state):",
        f"    {', '.join(needed)}{',' if len(needed) == 1 else ''} = (batch[k] for k in {needed!r})",
        *(f"    {line}" for line in body), "    return loss", "",
    ]  # fmt: skip
    return "\n".join(text)


RETURNS = {"": ("return A", ""), "dict": ("return {'a': A, 'b': B_}", "['a']"), "tuple": ("return A, B_", "[0]")}


def _returned(program: Program, names: str) -> str:
    """The forward's last line. names: the output that is used, and one that is not."""
    used, other = names.split(", ")
    return RETURNS[program.returns][0].replace("B_", other).replace("A", used)


def _shaped(text: str, number: int, name: str, kind: str, program: Program) -> list[str]:
    """A piece's lines, filled; the same constants in its forward and its init."""
    shape = "(T, D)" if kind == "seq" else "(D,)"
    return fill(text.replace("SHAPE", shape), number, random.Random(f"{program.seed} {name}"), program.reduction)


def _wrapped(lines: list[str], name: str, number: int, rng: random.Random) -> list[str]:
    if ">" not in name:
        return lines
    call = fill(WRAPPERS[name.split(">")[0]].replace("PART", f"part{number}"), number, rng, "")
    return [f"def part{number}(h):", *(f"    {line}" for line in lines), "    return h", *call]


def _converted(kind: str, takes: str) -> list[str]:
    """Between a vector and tokens, without parameters."""
    if kind == "vec" and takes == "seq":
        return ["h = h[:, None] * torch.linspace(0.5, 1.5, T).to(h)[:, None]"]
    if kind == "seq" and takes == "vec":
        return ["h = h.mean(1)"]
    return []


# --------------------------------------------------------------------------- what runs


class Runnable:
    """A program's model, fresh at every `model()`, its step and its batches (one a step)."""

    def __init__(self, program: Program) -> None:
        self.program, self.text = program, source(program)
        scope: dict[str, Any] = {"__name__": "program"}
        filename = f"<program {program.seed} {abs(hash(program.names)) % 10**8}>"
        linecache.cache[filename] = (len(self.text), None, self.text.splitlines(True), filename)
        exec(compile(self.text, filename, "exec"), scope)
        self.step = scope["step"]
        self._class = scope["Model"]
        torch.manual_seed(program.seed)
        self.batches = [_batch(program, size, k) for k, size in enumerate(program.batches)]

    def model(self, double: bool | None = None) -> nn.Module:
        torch.manual_seed(self.program.seed + 5)
        model: nn.Module = self._class()
        return model.double() if (self.program.double if double is None else double) else model


def _batch(program: Program, size: int, number: int) -> Batch:
    """Random data; sizes of the program, whatever a step's batch is."""
    length, width, classes = program.sizes["T"], program.sizes["D"], program.sizes["K"]
    shape = (size, length, width) if program.kind == "seq" else (size, width)
    spread = torch.rand(size).mul(3).sub(1.5).exp().view(-1, *[1] * (len(shape) - 1))
    lens = torch.randint(1, length + 1, (size,))
    mask = torch.arange(length)[None] < lens[:, None]
    classes_of = torch.randint(0, classes, (size, length))
    equal = classes_of.clone()
    equal[:, -1] = -100
    batch = {
        "x": torch.randn(shape) * spread * program.scale,
        "x2": torch.randn(shape) * program.scale,
        "y": torch.randint(0, classes, (size,)),
        "t": torch.randn(size),
        "w": torch.rand(size) * 3 + 0.05,
        "n": torch.randperm(20)[:size],
        "ids": torch.randint(0, program.sizes["V"], (size, length)),
        "m": mask,
        "lens": lens,
        "lab": torch.where(mask, classes_of, -100),
        "eq": equal,
        "e": torch.randn(shape),
    }
    return doubled(batch) if program.double else batch


def doubled(batch: Batch) -> Batch:
    return {name: v.double() if v.is_floating_point() else v for name, v in batch.items()}


def rows(batch: Batch, kept: list[int]) -> Batch:
    return {name: v[kept] for name, v in batch.items()}


def copied(batch: Batch) -> Batch:
    return copy.deepcopy(batch)
