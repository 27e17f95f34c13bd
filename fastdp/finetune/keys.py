"""The keys of a run, and what must be the same for its steps to come out the same.

The noise of a step is a function of (noise key, step), the records it takes of (sampling key, step), the dropout and
whatever else is drawn from torch's, numpy's and Python's own generators of (other key, step). So the keys are all that
is needed to repeat a step; they are written once, to a file of their own with mode 0600, beside the run's folder and
not in it, and deleted when the run is over. Whoever has them can take the noise off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import platform
import random
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..ops.common import bytes_of
from ..ops.noise import native_status
from ..optim.fused_update import Release
from .checkpoint import PRIVATE, new_file
from .job import FinetuneError

CHUNK = 1 << 22  # elements hashed at once on a device


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of one generation: after a loss that cannot be repeated come new ones, for sampling as for noise."""

    generation: int
    noise: bytes
    sampling: int
    other: bytes

    @classmethod
    def new(cls, generation: int, seed: int | None) -> Keys:
        """From the operating system's entropy; with a seed, a function of it."""
        if seed is None:
            return cls(generation, secrets.token_bytes(32), secrets.randbits(256), secrets.token_bytes(32))
        made = [hashlib.sha256(b"fastdp run: %s, %d, %d" % (what, generation, seed)).digest() for what in
                (b"noise", b"sampling", b"other")]  # fmt: skip
        return cls(generation, made[0], int.from_bytes(made[1], "little"), made[2])

    def seed_generators(self, step: int, rank: int = 0) -> None:
        """Begin torch's, numpy's and Python's generators anew for a step of a process."""
        process = b"" if rank == 0 else rank.to_bytes(8, "little")
        drawn = hashlib.sha256(self.other + step.to_bytes(8, "little") + process).digest()
        torch.manual_seed(int.from_bytes(drawn[:8], "little") >> 1)
        np.random.seed(int.from_bytes(drawn[8:12], "little"))
        random.seed(drawn[12:])

    def digest(self, release: Release, step: int) -> str:
        """A keyed digest of everything that the noise of a step is added to, to compare a repetition with.

        Without the key it tells nothing of the sums.
        """
        key = hashlib.sha256(b"fastdp digest of sums" + self.noise).digest()
        found = hmac.new(key, repr((step, release.std, release.scale)).encode(), "sha256")
        for place, name in sorted((place, name) for name, place in release.offsets.items()):
            total = release.sums[name]
            found.update(repr((place, tuple(total.shape), total.dtype)).encode())
            bits: Any = total.numpy() if total.device.type == "cpu" else _on_device(total, key, step)
            found.update(bits)
        return found.hexdigest()[:32]

    # ------------------------------------------------------------------ the file

    def save(self, path: Path, run: str, fingerprint: Mapping[str, Any]) -> None:
        """run: the journal's name, without which nobody shall take them. Raises SaveError."""
        state = {**dataclasses.asdict(self), "noise": self.noise.hex(), "other": self.other.hex()}
        state["sampling"] = f"{self.sampling:x}"
        with new_file(path, PRIVATE) as file:
            file.write(json.dumps({"run": run, "keys": state, "fingerprint": fingerprint}).encode())

    @classmethod
    def load(cls, path: Path, run: str) -> tuple[Keys, dict[str, Any]] | None:
        """The keys and the fingerprint; None where they are gone, damaged, or of another run."""
        try:
            content = json.loads(path.read_bytes())
            state = content["keys"]
            noise, other = bytes.fromhex(state["noise"]), bytes.fromhex(state["other"])
            if content["run"] != run or len(noise) != 32 or len(other) != 32:
                return None
            return cls(int(state["generation"]), noise, int(state["sampling"], 16), other), content["fingerprint"]
        except PermissionError as problem:
            raise FinetuneError(
                f"the run's keys in {path} may not be read ({problem.strerror}): resume as the user who began the run, "
                "or delete the file: then the steps since the last checkpoint are lost, and count"
            ) from problem
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _on_device(total: torch.Tensor, key: bytes, step: int) -> bytes:
    """Two multilinear hashes modulo 2^64 with random coefficients: any other bits collide with probability 2^-66.

    Integer sums do not depend on their order, and only 16 bytes leave the device.
    """
    words = total.reshape(-1).view(torch.int32)
    generator = torch.Generator(total.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key + step.to_bytes(8, "little")).digest()[:8], "little") >> 1)
    found = torch.zeros(2, dtype=torch.int64, device=total.device)
    for low in range(0, len(words), CHUNK):
        part = words[low : low + CHUNK].long()
        for row in range(2):
            by = torch.empty_like(part).random_(generator=generator) * 2 + 1  # odd: a change of one bit is seen
            found[row] += (part * by).sum()
    return found.cpu().numpy().tobytes()


def delete(path: Path) -> None:
    """Overwrite and remove a file of keys."""
    with contextlib.suppress(OSError):
        with open(path, "r+b") as file:
            file.write(bytes(os.fstat(file.fileno()).st_size))
            file.flush()
            os.fsync(file.fileno())
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


# ---------------------------------------------------------------------- what must be the same


def environment(model: nn.Module) -> dict[str, Any]:
    """What a step's bits may depend on, beside the data and the keys."""
    device = next(model.parameters()).device
    names = {"torch", "numpy", "transformers", "peft", "timm", "fastdp"} & set(sys.modules)
    known: dict[str, Any] = {name: str(getattr(sys.modules[name], "__version__", "?")) for name in sorted(names)}
    known |= {
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_processor()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "native kernels": native_status() == "built",
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 precision": torch.get_float32_matmul_precision(),
        "default type": str(torch.get_default_dtype()),
    }
    return known


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def weights_digest(model: nn.Module) -> str:
    """Of the frozen parameters (which checkpoints leave out): names, shapes, and some numbers of each."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(repr((name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)).encode())
        if not parameter.requires_grad:
            flat = parameter.detach().reshape(-1)
            found.update(bytes_of(flat[:: max(1, flat.numel() >> 14)]))
    return found.hexdigest()


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """torch's, numpy's and Python's generators are afterwards what they were."""
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
