"""Quantized tensors of which each rank wrote its shard as an object of its own: data, scales and
padding. Here they become one object with the components of the whole tensor.

That is layout and nothing else. Of each shard's component the grid is taken out of what is stored
around it, grids are put together where the shards lie in the tensor, and the whole is stored as the
class stores it, filled up with zeros (`source.quantized_layouts`). It is exact where shards end on
borders of blocks and what all elements share is the same on all ranks, to the bit. Anything else
is refused here, each tensor by name with what speaks against it. Of the elements only those are
read that are shared by a whole tensor: a scale, an amax.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

from ..core import view as views
from ..core.errors import listed
from ..core.spec import PACKED
from ..core.spec import spec as make_spec
from ..core.view import TooManyPieces, View
from ..source.blobs import ChunkedTensor, Stored, StoredTensor
from ..source.component_grids import (
    ALL,
    ComponentGrid,
    ComponentLayout,
    misplaced,
    padded,
    segments,
    unpadded,
)
from ..source.pickle.resized_objects import resized
from ..source.pickle.tree import Composite, Encoding, TensorRecord
from ..source.quantized_layouts import layout_of
from ..source.target import NOWHERE
from ..source.torn_tensors import TornPart, TornShard, TornTensor

# where a box begins in a tensor, and its sizes
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_RANK = re.compile(r"(?:.*/)?__([0-9]{1,7})_")
# stretches of rows of all shards of one tensor, and members that shards may hold
_MOST_PIECES = 100_000
# what is shared is a number or a small matrix; more of it is no such thing
_MOST_SHARED = 1 << 16


class Shard(NamedTuple):
    """What one rank wrote of a tensor: the object or, if it is no object, None; where it lies in
    the tensor, the data file, and where a plain tensor is stored. `taken`: it was not looked at,
    and has what another shard has but for the place.
    """

    value: Composite | None
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    plain: Stored | None = None
    taken: bool = False

    def __str__(self) -> str:
        found = _RANK.match(self.file)
        of = f"rank {int(found[1])}" if found else self.file
        return f"the chunk of {of} at {list(self.starts)}"


class Joined(NamedTuple):
    """A whole tensor: the object, where each of its components lies by the identity of its record,
    and the bytes of those that the shards share. `torn`: what it is where shards make none.
    """

    leaf: Composite
    placed: dict[int, StoredTensor]
    shared: dict[str, bytes]
    torn: TornTensor | None = None


class UnjoinableError(Exception):
    """Why shards make no whole tensor without loss."""


class Joiner:
    """Joins the tensors of one checkpoint. `placed`: where the components of shards lie, by the
    identity of their records; `read` reads the bytes of one.
    """

    def __init__(self, placed: Mapping[int, StoredTensor], read: Callable[[Stored], bytes]) -> None:
        self._placed, self._read = placed, read
        # layers are alike, and so are the views of their weights
        self._made: dict[Any, View] = {}

    def join(self, shape: tuple[int, ...], shards: Sequence[Shard]) -> Joined:
        """The tensor of `shape` that these shards, which cover it, are. UnjoinableError if they
        make none.
        """
        held = [(shard, shard.value) for shard in shards if 0 not in shard.sizes]
        if not held:
            held = [(shard, shard.value) for shard in shards]
        objects = [(shard, value) for shard, value in held if value is not None]
        if len(objects) < len(held):
            dense = next(shard for shard, value in held if value is None)
            # it may be a shard without elements
            other, found = next((s, s.value) for s in shards if s.value is not None)
            raise UnjoinableError(
                f"{dense} is a plain tensor, and {other} is an object ({found.encoding.name})"
            )
        model = objects[0][1]
        _check_alike(objects)
        layout = layout_of(model.encoding)
        names = [name for name, _ in model.components]
        grids = layout and {name: _grid(layout, name) for name in names}
        if layout is None or grids is None or any(grid is None for grid in grids.values()):
            raise UnjoinableError(
                f"how {model.encoding.name} ({model.encoding.format}) is cut is not known"
            )
        members = model.encoding.members
        _check_pieces(shape, [shard for shard, _ in objects], members)
        _check_borders(layout, names, shape, [shard for shard, _ in objects], members)
        stored: dict[str, StoredTensor] = {}
        shared: dict[str, bytes] = {}
        for number, name in enumerate(names):
            grid = grids[name]
            parts = [self._place(value.components[number][1]) for _, value in objects]
            if "." in name or (grid is not None and grid.shared and not members):
                stored[name], shared[name] = self._same(name, objects, parts)
            elif grid is not None:
                stored[name] = self._component(name, grid, shape, objects, parts, members)
        shapes = {name: _torch_shape(model, name, at) for name, at in stored.items()}
        leaf = resized(model, shape, shapes)
        leaf = _settled(leaf, [value.encoding for _, value in objects])
        records = tuple(
            (name, record._replace(storage=NOWHERE)) for name, record in leaf.components
        )
        leaf = replace(leaf, components=records)
        return Joined(leaf, {id(record): stored[name] for name, record in records}, shared)

    def torn(
        self, key: str, shape: tuple[int, ...], shards: Sequence[Shard], why: str
    ) -> Joined | None:
        """The tensor that these shards would be, were they not what they are (`why`): an object
        whose components cannot be read. None if that cannot be told either.
        """
        held = [shard for shard in shards if 0 not in shard.sizes] or list(shards)
        objects = [shard.value for shard in held if shard.value is not None]
        if not objects:
            return None
        model = objects[0]
        layout, first = layout_of(model.encoding), model.components[0][0]
        parts: dict[str, list[Stored]] = {name: [] for name, _ in model.components}
        torn = []
        for shard in held:
            own: dict[str, int] = {}
            named = (
                [(first, shard.plain)]
                if shard.value is None
                else [(name, self._placed.get(id(at))) for name, at in shard.value.components]
            )
            for name, at in named:
                if name in parts and isinstance(at, Stored):
                    own[name] = len(parts[name])
                    parts[name].append(at)
            encoding = None if shard.value is None else shard.value.encoding
            torn.append(TornShard(shard.starts, shard.sizes, encoding, own))
        stored: dict[str, StoredTensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, record in model.components:
            at = self._placed.get(id(record))
            if not isinstance(at, Stored):
                return None
            if "." in name and len(parts[name]) == len(objects):
                # what a quantizer holds is of no shape of the tensor's, and nothing computes it
                with suppress(UnjoinableError):
                    pairs = [(shard, shard.value) for shard in held if shard.value is not None]
                    stored[name], _ = self._same(name, pairs, parts[name])
                    shapes[name] = record.shape
                    continue
            grid = None if layout is None or "." in name else layout.grids.get(name)
            if grid is not None and model.encoding.members:
                inner = grid.borders(at.spec).stored_shape(shape[1:])
                inner = at.spec.shape[1:] if grid.shared else inner
                whole = make_spec(at.spec.dtype, (shape[0], *inner))
            elif grid is not None and not grid.shared:
                whole = make_spec(at.spec.dtype, grid.borders(at.spec).stored_shape(shape))
            else:
                whole = at.spec
            view = views.stored(len(parts[name]), whole.shape)
            stored[name] = ChunkedTensor(whole, tuple(parts[name]), (), view)
            shapes[name] = _torch_shape(model, name, stored[name])
        leaf = resized(model, shape, shapes)
        records = tuple(
            (name, record._replace(storage=NOWHERE)) for name, record in leaf.components
        )
        leaf = replace(leaf, components=records)
        names = tuple(name for name, at in stored.items() if isinstance(at, ChunkedTensor))
        tensor = TornTensor(key, why, leaf.encoding, tuple(torn), names)
        placed: dict[int, StoredTensor] = {
            id(record): part._replace(torn=TornPart(tensor, name))
            if isinstance(part := stored[name], ChunkedTensor)
            else part
            for name, record in records
        }
        return Joined(leaf, placed, {}, tensor)

    def _place(self, record: TensorRecord) -> Stored:
        at = self._placed.get(id(record))
        if not isinstance(at, Stored):
            raise UnjoinableError(f"a component of {record.dtype} is in no output")
        return at

    def _same(
        self, name: str, objects: Sequence[tuple[Shard, Composite]], parts: Sequence[Stored]
    ) -> tuple[Stored, bytes]:
        """A component that all ranks have alike, and its bytes."""
        first: bytes | None = None
        for (shard, _), at in zip(objects, parts, strict=True):
            if at.spec != parts[0].spec or at.spec.nbytes > _MOST_SHARED:
                raise UnjoinableError(
                    f"`{name}` is {at.spec} in {shard}, and {parts[0].spec} in {objects[0][0]}"
                )
            if shard.taken:
                # the shard that it is like comes before it
                continue
            found = self._read(at)
            if first is None:
                first = found
            elif found != first:
                raise UnjoinableError(
                    f"`{name}` is {_shown(first, at)} in {objects[0][0]}, and "
                    f"{_shown(found, at)} in {shard}"
                )
        return parts[0], first or b""

    def _component(
        self,
        name: str,
        grid: ComponentGrid,
        shape: tuple[int, ...],
        objects: Sequence[tuple[Shard, Composite]],
        parts: Sequence[Stored],
        members: int,
    ) -> StoredTensor:
        """One component of the whole tensor, over the places of its parts."""
        grid = grid.borders(parts[0].spec)
        boxes = [(shard.starts, shard.sizes) for shard, _ in objects]
        forms = [(at.spec, at.strides) for at in parts]
        if len({spec.dtype for spec, _ in forms}) > 1:
            raise UnjoinableError(f"`{name}` has several dtypes")
        form = (grid, shape, tuple(boxes), tuple(forms), members)
        if not members and (starts := _starts(grid, shape, boxes, parts)) is not None:
            order = sorted(range(len(parts)), key=starts.__getitem__)
            whole = make_spec(parts[0].spec.dtype, grid.stored_shape(shape))
            chunks = tuple(parts[n] for n in order)
            return ChunkedTensor(whole, chunks, tuple(starts[n] for n in order))
        view = self._made.get(form)
        if view is None:
            try:
                made = _members if members else _matrix
                view = self._made[form] = made(grid, shape, boxes, parts)
            except (ValueError, TooManyPieces) as error:
                raise UnjoinableError(f"`{name}`: {error}") from None
        return ChunkedTensor(make_spec(parts[0].spec.dtype, view.shape), tuple(parts), (), view)


def _starts(
    grid: ComponentGrid, shape: tuple[int, ...], boxes: Sequence[Box], parts: Sequence[Stored]
) -> list[tuple[int, ...]] | None:
    """Where the parts begin in the component, if they are boxes of it as they are stored."""
    if not grid.deep or len(shape) < 2 or (grid.rows > 1 and len(shape) > 2):
        return None
    if any(
        at.spec.shape != grid.stored_shape(sizes)
        for at, (_, sizes) in zip(parts, boxes, strict=True)
    ):
        return None
    out = []
    for starts, _ in boxes:
        *leading, row, column = starts
        row, column = _nth(row, grid.rows), _nth(column, grid.columns)
        out.append((column, *leading, row) if grid.turned else (*leading, row, column))
    return out


def _nth(at: int, step: int) -> int:
    """In which of the elements for `step` rows or columns the one at `at` has its part."""
    return 0 if step == ALL else at // step


def _matrix(
    grid: ComponentGrid,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    parts: Sequence[Stored | View],
) -> View:
    """The component of a tensor from those of its boxes; leaf n is part n, unless it is a view."""
    tiles: list[tuple[View, tuple[int, int]]] = []
    for number, ((starts, sizes), part) in enumerate(zip(boxes, parts, strict=True)):
        if isinstance(part, Stored):
            part = views.stored(number, part.spec.shape, part.strides)
        own = unpadded(grid, part, sizes)
        column = starts[-1] // grid.columns if grid.columns and shape else 0
        for run in segments(shape, starts, sizes):
            if grid.rows:
                row, first = run.whole // grid.rows, run.own // grid.rows
                last = -(-(run.own + run.size) // grid.rows)
            else:
                row, first, last = 0, 0, 1
            tiles.append((views.slice_(own, 0, first, last), (row, column)))
    return padded(grid, views.mosaic(grid.size(shape), tiles), shape)


def _members(
    grid: ComponentGrid,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    parts: Sequence[Stored],
) -> View:
    """A stack of the members' components, each joined for itself."""
    for (_, sizes), at in zip(boxes, parts, strict=True):
        if at.spec.shape[:1] != sizes[:1]:
            raise ValueError(f"{at.spec} is stored for {sizes[0]} members")
    split = [
        views.unbind(views.stored(number, at.spec.shape, at.strides), 0)
        for number, at in enumerate(parts)
    ]
    out = []
    for member in range(shape[0]):
        here = [
            ((starts[1:], sizes[1:]), split[number][member - starts[0]])
            for number, (starts, sizes) in enumerate(boxes)
            if starts[0] <= member < starts[0] + sizes[0]
        ]
        if grid.shared:
            if len(here) > 1:
                raise ValueError("a member that is cut has one element in all of its parts")
            out.append(here[0][1])
            continue
        out.append(_matrix(grid, shape[1:], [box for box, _ in here], [part for _, part in here]))
    return views.stack(out, 0)


def _grid(layout: ComponentLayout, name: str) -> ComponentGrid | None:
    # the tensors of a quantizer are not of the tensor's shape
    return ComponentGrid() if "." in name else layout.grids.get(name)


def _check_alike(objects: Sequence[tuple[Shard, Composite]]) -> None:
    """UnjoinableError unless the objects are of one class, with the same components and flags."""
    first, model = objects[0]
    for shard, value in objects[1:]:
        for what, here, there in _said(model, value):
            if here != there:
                raise UnjoinableError(
                    f"{what} is {_text(here)} in {first}, and {_text(there)} in {shard}"
                )


def is_like(one: Composite, other: Composite) -> bool:
    """Whether two objects of one shape are equal but for their elements and where these lie."""
    a, b = one.encoding, other.encoding
    if any(here != there for _, here, there in _said(one, other)):
        return False
    same = (a.format, a.shape, a.number, a.readings, a.block, a.members)
    return same == (b.format, b.shape, b.number, b.readings, b.block, b.members) and all(
        (x.dtype, x.shape, x.strides) == (y.dtype, y.shape, y.strides)
        for (_, x), (_, y) in zip(one.components, other.components, strict=True)
    )


def _said(one: Composite, other: Composite) -> Iterator[tuple[str, Any, Any]]:
    """What two objects say that shards of one tensor say alike."""
    a, b = one.encoding, other.encoding
    yield "the class", a.name, b.name
    yield "the dtype", a.dtype, b.dtype
    yield "the integer of the dtype", a.code, b.code
    names = [[name for name, _ in x.components] for x in (one, other)]
    yield "the list of components", names[0], names[1]
    yield "whether it is a group", bool(a.members), bool(b.members)
    here, there = dict(a.options or {}), dict(b.options or {})
    for name in {**here, **there}:
        yield f"`{name}`", here.get(name), there.get(name)


def _check_pieces(shape: tuple[int, ...], shards: Sequence[Shard], members: int) -> None:
    """UnjoinableError where shards are cut so that their rows lie in very many places."""
    if members and not shape:
        raise UnjoinableError("a group of tensors has an axis for its members, and this has none")
    count = shape[0] * len(shards) if members else 0
    for shard in shards:
        whole = len(shape) - 1
        while whole > 0 and shard.sizes[whole - 1] == shape[whole - 1]:
            whole -= 1
        count += prod(shard.sizes[: max(0, whole - 1)])
    if count > _MOST_PIECES:
        raise UnjoinableError(f"their rows lie in {count:,} places, allowed are {_MOST_PIECES:,}")


def _check_borders(
    layout: ComponentLayout,
    names: Iterable[str],
    shape: tuple[int, ...],
    shards: Sequence[Shard],
    members: int,
) -> None:
    """UnjoinableError for a shard that begins or ends inside a block."""
    parts = [name for name in names if "." not in name]
    cut = 1 if members else 0
    for shard in shards:
        why = misplaced(layout, parts, shape[cut:], shard.starts[cut:], shard.sizes[cut:])
        if why is not None:
            raise UnjoinableError(f"{shard} is not cut on a border: {why}")


def _settled(leaf: Composite, encodings: Sequence[Encoding]) -> Composite:
    """The object with its integer read as all shards can have meant it: one program wrote them."""
    own = leaf.encoding.readings
    if not own:
        return leaf
    common = [name for name in own if all(name in (e.readings or {}) for e in encodings)]
    if not common:
        raise UnjoinableError("releases that number dtypes differently wrote its chunks")
    readings = {name: own[name] for name in common}
    number = next(iter(readings.values())) if len(readings) == 1 else leaf.encoding.number
    return replace(leaf, encoding=replace(leaf.encoding, readings=readings, number=number))


def _torch_shape(model: Composite, name: str, at: StoredTensor) -> tuple[int, ...]:
    """The shape of a component as torch counts it: two numbers of 4 bits are one element."""
    shape = at.spec.shape
    record = dict(model.components)[name]
    return (*shape[:-1], shape[-1] // 2) if record.dtype == PACKED else shape


def _shown(data: bytes, at: Stored) -> str:
    """Bytes as a message has them."""
    if at.spec.dtype == "float32" and prod(at.spec.shape) == 1:
        return repr(struct.unpack("<f", data)[0])
    return f"{len(data)} bytes {data[:16].hex()}" + "…" * (len(data) > 16)


def _text(value: Any) -> str:
    return listed([str(one) for one in value], 8) if isinstance(value, list) else str(value)
