"""Quantized tensors that are objects, as they stand in files: saved whole, and read by torch from
the chunks of a distributed checkpoint.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import quantized_classes as classes
import torch
from quantized_ranks import KINDS, whole, wrapped

# a group's members have components, and names, of their own
NAMES = [name for name, kind in KINDS.items() if kind.cls != "GroupedTensor"]


def saved(path: Path, names: list[str]) -> Path:
    """One file with the whole tensors, as one process saves them."""
    with classes.installed():
        state = {name: wrapped(name, KINDS[name].shape, whole(name)) for name in names}
        torch.save({"model": state, "step": 1}, path)
    return path


class Chunk(NamedTuple):
    """Where a chunk begins in its tensor, what torch loads from its archive, and the data file."""

    at: tuple[int, ...]
    value: Any
    file: str


def chunks(folder: Path, key: str) -> list[Chunk]:
    """The chunks of a tensor in order; the folder is one that the test made."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    found = []
    for index, at in metadata.storage_data.items():
        if index.fqn == key:
            with (folder / at.relative_path).open("rb") as file:
                file.seek(at.offset)
                held = io.BytesIO(file.read(at.length))
            value = torch.load(held, weights_only=True)
            found.append(Chunk(tuple(index.offset), value, at.relative_path))
    return sorted(found, key=lambda one: one.at)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def of_object(kind: str, held: classes.Wrapper) -> dict[str, bytes]:
    """The bytes of an object's components, by the names that they have in one tensor."""
    names = list(KINDS[kind].parts)
    if KINDS[kind].cls != "GroupedTensor":
        return {name: raw(held.held()[name]) for name in names}
    runs = {name: name.replace("_rowwise_scale", "scale").removeprefix("_") for name in names}
    return {name: raw(held.held()[run]) for name, run in runs.items()}
