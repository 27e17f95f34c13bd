"""The keys of a run, and the environment in which its steps come out the same.

The noise of a step is a function of (noise key, step), its records of (sampling key, step), dropout and whatever else
is drawn from the generators of torch, numpy and Python of (generator key, step). So the keys are all that repeats a
step. They lie in a file of their own with mode 0600, outside the folder of the run, until the run is over: whoever has
them can take the noise off.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import AccountingError
from ..ops.common import bytes_of
from ..ops.noise import native_status
from ..optim.fused_update import Release
from ..utils.append_log import write_whole

CHUNK = 1 << 22  # elements hashed at once on a device


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of one generation. Steps that cannot be repeated are followed by a new one, for sampling as for noise:
    the same records with new noise would be one sample with two releases."""

    generation: int
    noise: bytes
    sampling: bytes
    generators: bytes

    @classmethod
    def new(cls, generation: int, seed: int | None) -> Keys:
        """Draw keys from the operating system; with a seed, they are a function of it."""
        if seed is None:
            return cls(generation, *(secrets.token_bytes(32) for _ in range(3)))
        made = (f"fastdp run: {what}, {generation}, {seed}" for what in ("noise", "sampling", "generators"))
        return cls(generation, *(hashlib.sha256(text.encode()).digest() for text in made))

    def seed_generators(self, step: int, rank: int) -> None:
        """Seed torch's, numpy's and Python's generators for a step of a process."""
        drawn = hashlib.sha256(self.generators + step.to_bytes(8, "little") + rank.to_bytes(8, "little")).digest()
        torch.manual_seed(int.from_bytes(drawn[:8], "little") >> 1)
        np.random.seed(int.from_bytes(drawn[8:12], "little"))
        random.seed(drawn[12:])

    def digest(self, release: Release, step: int) -> str:
        """A keyed digest of everything that the noise of a step is added to. Without the key it says nothing."""
        key = hashlib.sha256(b"fastdp digest of sums" + self.noise).digest()
        found = hmac.new(key, repr((step, release.std, release.scale)).encode(), "sha256")
        for place, name in sorted((place, name) for name, place in release.offsets.items()):
            total = release.sums[name]
            found.update(repr((place, tuple(total.shape), total.dtype)).encode())
            bits: Any = total.numpy() if total.device.type == "cpu" else device_hash(total, key, step)
            found.update(bits)
        return found.hexdigest()[:32]

    def save(self, path: Path, run: str, fingerprint: Mapping[str, Any]) -> None:
        """Write them for the run of this name, with the fingerprint of what it is made of: a digest of data can tell
        whether a record is in it, so it is as secret as the keys."""
        kept = {name: value.hex() if isinstance(value, bytes) else value for name, value in vars(self).items()}
        content = {"run": run, "keys": kept, "fingerprint": dict(fingerprint)}
        write_whole(path, json.dumps(content).encode(), 0o600)

    @classmethod
    def load(cls, path: Path, run: str) -> tuple[Keys, dict[str, Any]] | None:
        """(keys, fingerprint), or None if they are gone, damaged, or of another run."""
        try:
            content = json.loads(path.read_bytes())
            kept = content["keys"]
            found = cls(
                kept["generation"], *(bytes.fromhex(kept[name]) for name in ("noise", "sampling", "generators"))
            )
            return (found, content["fingerprint"]) if content["run"] == run and len(found.noise) == 32 else None
        except PermissionError as problem:
            raise AccountingError(
                f"the run's keys in {path} may not be read ({problem.strerror}): resume as the user who began the run, "
                "or delete the file: then the steps since the last checkpoint are lost, and count"
            ) from problem
        except (OSError, ValueError, KeyError, TypeError):
            return None


def delete(path: Path) -> None:
    """Overwrite and remove a file of keys."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)


def device_hash(total: torch.Tensor, key: bytes, step: int) -> bytes:
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


def environment(model: nn.Module, processes: int) -> dict[str, Any]:
    """What the bits of a step may depend on, beside the data and the keys."""
    device = next(model.parameters()).device
    names = sorted({"torch", "numpy", "transformers", "peft", "timm", "fastdp"} & set(sys.modules))
    return {
        **{name: str(getattr(sys.modules[name], "__version__", "?")) for name in names},
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_processor()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "native kernels": native_status() == "built",
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 precision": torch.get_float32_matmul_precision(),
        "default type": str(torch.get_default_dtype()),
        "processes": processes,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def frozen_digest(model: nn.Module) -> str:
    """A digest of the parameters that are not trained: names, shapes, and some numbers of each."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(repr((name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)).encode())
        if not parameter.requires_grad:
            flat = parameter.detach().reshape(-1)
            found.update(bytes_of(flat[:: max(1, flat.numel() >> 14)]))
    return found.hexdigest()
