"""Checkpoints of raw elements in memory, and what relations make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from migrate.authoring import writing
from migrate.authoring.compact import compact
from migrate.authoring.infer import proof
from migrate.authoring.relations import Relation
from migrate.core.spec import BITS, spec
from migrate.formats.memory import MemoryBlob, MemorySource
from migrate.live.migration import prepare
from migrate.planning.request import make_request
from migrate.running.eager import evaluated
from migrate.source.blobs import Stored
from migrate.source.index import Index

State = Mapping[str, tuple[str, np.ndarray]]


def opened(state: State) -> MemorySource:
    """A source of tensors, each as its dtype and its raw elements."""
    tensors, blobs = {}, []
    for key, (dtype, bits) in state.items():
        flat = np.array(bits, f"<u{BITS[dtype] // 8}", order="C").reshape(-1)
        tensors[key] = Stored(spec(dtype, bits.shape), len(blobs), 0)
        blobs.append(MemoryBlob(key, flat.view("u1")))
    return MemorySource(Index(tensors, tuple(b.name for b in blobs)), blobs)


class CountedBlob(MemoryBlob):
    """Bytes in memory that know how many of them were read."""

    read = 0

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self.read += buffer.nbytes
        super().readinto(offset, buffer)


def counted(state: State) -> MemorySource:
    """The same, and how much of each tensor is read."""
    blobs = [CountedBlob(k, array.reshape(-1).view("u1")) for k, (_, array) in state.items()]
    return MemorySource(opened(state).index, blobs)


def bits(seed: np.random.Generator, dtype: str, shape: Iterable[int]) -> np.ndarray:
    """Random numbers as raw elements: normally distributed ones of a float."""
    shape = tuple(shape)
    if dtype == "bool":
        return seed.integers(0, 2, shape, dtype=np.uint8)
    if dtype in ("float32", "bfloat16"):
        whole = seed.standard_normal(shape).astype("<f4").view("<u4")
        return whole if dtype == "float32" else (whole >> 16).astype("<u2")
    if dtype in ("float16", "float64"):
        kind = f"<f{BITS[dtype] // 8}"
        return seed.standard_normal(shape).astype(kind).view(f"<u{BITS[dtype] // 8}")
    return seed.integers(0, 1 << BITS[dtype], shape, dtype=f"<u{BITS[dtype] // 8}")


def applied(relations: Iterable[Relation], state: State) -> dict[str, tuple[str, np.ndarray]]:
    """What the relations make of a state."""
    made: dict[str, tuple[str, np.ndarray]] = {}
    for relation in relations:
        held = [state[key][1] for key in relation.sources]
        dtypes = {state[key][0] for key in relation.sources}
        (dtype,) = dtypes if len(dtypes) == 1 else ("",)
        after = [proof.after(relation.ops, dtype)] * len(relation.targets)

        def call(op: Any, args: Any, inputs: list[Any], parts: int, dtype: str = dtype) -> Any:
            return op.eager(args, inputs, parts, [dtype] * len(inputs))

        for key, array, of in zip(
            relation.targets, proof.run(relation.ops, held, call), after, strict=True
        ):
            made[key] = (of, array)
    return made


def applied_as_file(
    relations: Iterable[Relation], state: State, folder: Path
) -> dict[str, tuple[str, np.ndarray]]:
    """What the rule file that is made of the relations makes of a state."""
    head = writing.FileHead("made/new/rules", "Made", "made", ("old", "new"))
    file = folder / "made.yaml"
    file.write_text(writing.text(compact(relations), head), encoding="utf-8")
    source = opened(state)
    request = make_request((), (), (str(file),), None, ("lossy", "drop"))
    outputs = prepare(source, request).composition.graph.outputs
    return {key: (t.spec.dtype, evaluated(source, t, {})) for key, t in outputs.items()}
