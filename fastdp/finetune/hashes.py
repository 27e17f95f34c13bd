"""Hashes for the card: of weights, which are public, and a commitment to the data, which says nothing of it.

Differential privacy is about someone who has all of a data set but one record. The hash of the data set would tell him
whether a record that he guesses is in it: he hashes both. So the card holds no such hash, but an HMAC-SHA256 of it
under a random key that stays with the owner, in a file of mode 0600. Without the key, the commitment looks like random
bits; with it, the owner can prove later which files the model was trained on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from .files import PRIVATE, new_file

COMMITMENT = "data_commitment.json"
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def of_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def of_folder(folder: Path) -> dict[str, str]:
    """{name: SHA-256} of all files in a folder, by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): of_file(path) for path in paths}


def of_weights(model: str) -> dict[str, str]:
    """{name: SHA-256} of the weights and the config.json of a folder or a file; nothing of a name on the hub."""
    place = Path(model).expanduser()
    paths = [place] if place.is_file() else sorted(place.glob("*")) if place.is_dir() else []
    return {path.name: of_file(path) for path in paths
            if path.is_file() and (path.suffix in _WEIGHTS or path.name == "config.json")}  # fmt: skip


def commitment(key: bytes, files: Mapping[str, str]) -> str:
    """HMAC-SHA256 of {name: SHA-256} under a secret key."""
    return hmac.new(key, json.dumps(dict(files), sort_keys=True).encode(), "sha256").hexdigest()


def commit(folder: Path, files: Mapping[str, str]) -> str:
    """The commitment of a run to its files of data; the key is kept in the folder, readable by its owner only.

    A run that is taken up again keeps its key. Raises SaveError.
    """
    path = folder / COMMITMENT
    try:
        kept = json.loads(path.read_text())
        key = bytes.fromhex(kept["key"])
        if len(key) == 32 and kept["files"] == dict(files):
            return commitment(key, files)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or of other files
    key = secrets.token_bytes(32)
    about = {
        "keep": "secret: with this key, the commitment in the card can be compared with data",
        "key": key.hex(), "files": dict(files), "commitment": commitment(key, files),
    }  # fmt: skip
    with new_file(path, PRIVATE) as file:
        file.write((json.dumps(about, indent=2) + "\n").encode())
    return commitment(key, files)
