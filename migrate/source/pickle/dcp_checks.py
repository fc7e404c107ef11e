"""Whether the parts of a DCP checkpoint fit together. torch checks none of this when it loads: a
hole is uninitialised memory there.

That chunks cover their tensor exactly is decided by their corners. The sum of the boxes' indicator
functions equals the tensor's if and only if the signed counts of all corners do (the mixed
difference of a function with bounded support determines it). It takes time linear in the chunks,
where comparing pairs would take quadratic time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ...core.diagnostics import printable
from ..paths import plain_name
from .findings import Findings

# No tensor has more elements, no path more parts.
MOST_ELEMENTS, MOST_PARTS = 2**50, 64
# corners of all chunks of one tensor that are counted
MOST_CORNERS = 1 << 24


class Chunk(NamedTuple):
    """A box of a tensor: where it begins and how large it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Part(NamedTuple):
    """Where one entry lies: `length` bytes from `offset` of `file`, written through `transforms`
    (compression; usually none).
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `chunks` cover `shape` exactly, and `parts` says where each of them lies.

    `strides` are those of the saved tensor, None where torch did not write them (before 2.15).
    """

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    strides: tuple[int, ...] | None
    chunks: tuple[Chunk, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """One value that is no tensor: a torch.save stream that lies in `part`."""

    part: Part


class Check:
    """Collects what is wrong in one file."""

    __slots__ = ("problems",)

    def __init__(self, problems: Findings) -> None:
        self.problems = problems

    def problem(self, where: str, message: str, code: str = "M938") -> None:
        self.problems.add(code, f"{printable(where)}: {message}")

    def place(
        self,
        tensors: Mapping[str, Any],
        others: Iterable[str],
        storage: Mapping[tuple[str, tuple[int, ...] | None], Part],
    ) -> tuple[dict[str, TensorEntry], dict[str, BytesEntry]]:
        """The entries with their places: each chunk has one entry of storage, and each entry of
        storage a chunk or a value.
        """
        used: set[tuple[str, tuple[int, ...] | None]] = set()
        placed: dict[str, TensorEntry] = {}
        for key, (dtype, shape, requires_grad, strides, chunks) in tensors.items():
            wrong = uncovered(shape, chunks)
            if wrong:
                self.problem(key, wrong)
            parts = []
            for chunk in chunks:
                where = (key, chunk.offsets)
                part = storage.get(where)
                if part is None:
                    self.problem(
                        key, f"nothing says where its chunk at {_numbers(chunk.offsets)} lies"
                    )
                else:
                    used.add(where)
                    parts.append(part)
            placed[key] = TensorEntry(
                dtype, shape, requires_grad, strides, tuple(chunks), tuple(parts)
            )
        values: dict[str, BytesEntry] = {}
        for key in others:
            part = storage.get((key, None))
            if part is None:
                self.problem(key, "nothing says where its bytes lie")
            else:
                used.add((key, None))
                values[key] = BytesEntry(part)
        for key, offsets in storage:
            if (key, offsets) not in used:
                chunk_text = "" if offsets is None else f" the chunk at {_numbers(offsets)} of"
                self.problem(
                    key,
                    f"storage_data says where{chunk_text} this key lies, and no such entry exists",
                )
        return placed, values

    def extents(self, storage: Mapping[Any, Part], sizes: Mapping[str, int] | None) -> None:
        """Names of data files are plain names; the intervals of one file lie in it and do not
        overlap.
        """
        files: dict[str, list[tuple[int, int, str]]] = {}
        for (key, _), part in storage.items():
            if part.offset < 0 or part.length < 0 or part.offset + part.length >= 2**63:
                self.problem(
                    key, f"lies at byte {_number(part.offset)} with {_number(part.length)} bytes"
                )
            else:
                files.setdefault(part.file, []).append((part.offset, part.length, key))
        for file, extents in files.items():
            if not plain_name(file, ".distcp") and not plain_name(file, ".safetensors"):
                self.problem(
                    extents[0][2],
                    f"lies in {printable(file)}, which is no plain name of a data file",
                    "M907",
                )
                continue
            size = None if sizes is None else sizes.get(file)
            if sizes is not None and size is None:
                self.problem(extents[0][2], f"lies in {printable(file)}, which is missing")
            end, last = 0, ""
            for offset, length, key in sorted(extents):
                if offset < end and length:
                    self.problem(key, f"shares bytes of {printable(file)} with {printable(last)}")
                if size is not None and offset + length > size:
                    self.problem(
                        key,
                        f"ends at byte {offset + length:,} of {printable(file)}, which has "
                        f"{size:,}",
                    )
                if offset + length > end:
                    end, last = offset + length, key

    def planner(
        self, planner: Mapping[str, tuple[str | int, ...]], keys: Mapping[str, Any]
    ) -> None:
        """Every path leads to a place of its own; places in lists are not beyond the number of
        entries.
        """
        inner: dict[tuple[str | int, ...], type] = {}
        ends: dict[tuple[str | int, ...], str] = {}
        count = len(planner)
        for key, path in planner.items():
            if key not in keys:
                self.problem(key, "planner_data has a path for a key that does not exist")
                continue
            if len(path) > MOST_PARTS:
                self.problem(
                    key,
                    f"planner_data has a path of {len(path):,} parts; at most {MOST_PARTS} are "
                    "allowed",
                )
                continue
            if len(path) > 1 and any(type(part) is int and not 0 <= part < count for part in path):
                self.problem(
                    key,
                    f"planner_data puts it at a place of a list beyond the {count:,} entries that "
                    "there are",
                )
                continue
            if path in ends:
                self.problem(key, f"planner_data gives it the path of {printable(ends[path])}")
            ends[path] = key
            for at in range(len(path)):
                if inner.setdefault(path[:at], type(path[at])) is not type(path[at]):
                    self.problem(key, "planner_data makes its parent a dict and a list at once")
                    break
        for path, key in ends.items():
            if path in inner:
                self.problem(key, "planner_data puts other keys below it")


def uncovered(shape: tuple[int, ...], chunks: list[Chunk]) -> str:
    """What is wrong with the chunks of a tensor of this shape; "" when they cover it exactly."""
    if prod(shape) > MOST_ELEMENTS:
        return f"has a shape of {_number(prod(shape))} elements; at most 2^50 are read"
    if (
        len(chunks) == 1
        and chunks[0].sizes == shape
        and not any(chunks[0].offsets)
        and len(chunks[0].offsets) == len(shape)
    ):
        return ""
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return (
                f"has {len(shape)} dimensions and a chunk of {len(chunk.offsets)} and "
                f"{len(chunk.sizes)}"
            )
        if any(
            offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            return (
                f"a chunk at {_numbers(chunk.offsets)} of size {_numbers(chunk.sizes)} reaches "
                f"outside of {_numbers(shape)}"
            )
    # dimensions that every chunk covers do not matter
    cut = [d for d, whole in enumerate(shape) if any(chunk.sizes[d] != whole for chunk in chunks)]
    if len(cut) > 24 or len(chunks) << len(cut) > MOST_CORNERS:
        return (
            f"is cut along {len(cut)} dimensions into {len(chunks):,} chunks, which is more "
            "than is checked"
        )
    if 0 in shape:
        return "" if chunks else "has no chunk"
    corners: dict[tuple[int, ...], int] = {}
    for chunk in chunks:
        if 0 not in chunk.sizes:
            _count(corners, [(chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d]) for d in cut], 1)
    _count(corners, [(0, shape[d]) for d in cut], -1)
    if not any(corners.values()):
        return ""
    held = sum(prod(chunk.sizes) for chunk in chunks)
    what = (
        "a hole"
        if held < prod(shape)
        else "an overlap"
        if held > prod(shape)
        else "an overlap and a hole"
    )
    return f"its chunks hold {held:,} of {prod(shape):,} elements: there is {what}"


def _count(corners: dict[tuple[int, ...], int], box: list[tuple[int, int]], sign: int) -> None:
    for choice in product((0, 1), repeat=len(box)):
        corner = tuple(edges[side] for edges, side in zip(box, choice, strict=True))
        corners[corner] = corners.get(corner, 0) + (-sign if sum(choice) % 2 else sign)


def _numbers(numbers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}]"


def _number(value: int) -> str:
    return f"{value:,}" if abs(value) < 10**30 else "a number of more than 30 digits"
