"""Quantized objects encoded anew: where shards of ranks make no whole tensor, and where a tensor is
cut inside of blocks.

Each shard is decoded by its own scales, the numbers are put together, and the whole is encoded as
the class encodes it. In the graph these are `dequantize` and `quantize` like those of a rule, with
views between them, so they run by region, and the error report has them under `requantize`. It is
a loss and never happens unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import ops
from ..core import view as views
from ..core.spec import BITS, Spec
from ..core.view import View
from ..ops.base import Loss, OpCall, OpError, ValueOp, step
from ..source.blobs import ChunkedTensor, ChunkOf, StoredTensor
from ..source.component_grids import ComponentGrid, matrix, padded, segments, unpadded
from ..source.quantized_layouts import layout_of
from ..source.torn_tensors import REQUANTIZE, TornTensor, part_of
from .graph import Computation, ComputedTensor, Tensor
from .object_numbers import NUMBERS, Coding, codings, decodes

if TYPE_CHECKING:
    from ..source.component_boxes import Box
    from ..source.pickle.tree import Encoding


def whole_again(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The torn tensors among these that are to be encoded anew, by the keys of components."""
    groups: dict[int, tuple[TornTensor, dict[str, str]]] = {}
    for key, at in stored.items():
        torn = part_of(at)
        if torn is not None and torn.anew:
            groups.setdefault(id(torn.tensor), (torn.tensor, torn.siblings(key)))
    out: dict[str, Tensor] = {}
    for tensor, keys in groups.values():
        numbers = _together(tensor, keys, stored)
        specs = {name: stored[key].spec for name, key in keys.items()}
        for name, one in encode(numbers, tensor.encoding, specs, tuple(keys.values())).items():
            sources = tuple(
                replace(source, stands_for=keys[name])
                for source in one.sources
                if isinstance(source, ComputedTensor)
            )
            out[keys[name]] = Tensor(one.spec, one.view, sources)
    return out


def why_not(encoding: Encoding, components: Mapping[str, str]) -> str | None:
    """Why an object of these components (name -> dtype) cannot be encoded anew; None if it can."""
    found = codings(encoding, components)
    if isinstance(found, str):
        return found
    high, wide = matrix(_member(encoding).shape)
    for coding in found:
        numbers = Spec(NUMBERS, (wide, high) if coding.turned else (high, wide))
        try:
            call = coding.encoding(numbers)
            ops.get(call.op).infer(call.args, [numbers], 1)
        except OpError as error:
            return error.message
    return None


def why_unread(encoding: Encoding, components: Mapping[str, str]) -> str | None:
    """Why an object of these components cannot be decoded; None if it can."""
    found = decodes(encoding, components)
    return found if isinstance(found, str) else None


def encode(
    numbers: Tensor, encoding: Encoding, specs: Mapping[str, Spec], keys: tuple[str, ...]
) -> dict[str, Tensor]:
    """The components of an object of the encoding's shape, of these specs but for their shapes,
    from its numbers as a matrix. `keys` are those that reports name.
    """
    if encoding.members:
        return _encode_members(numbers, encoding, specs, keys)
    found = codings(encoding, {name: spec.dtype for name, spec in specs.items()})
    layout = layout_of(encoding)
    if isinstance(found, str) or layout is None:
        raise ValueError(f"{encoding.name}: {found}")
    out: dict[str, Tensor] = {}
    for coding in found:
        given = numbers
        if coding.turned:
            given = _viewed(numbers, views.permute(numbers.view, (1, 0)))
        call = coding.encoding(given.spec)
        made = computed(call, [given], keys)
        for role in coding.zeros:
            for name in coding.roles[role]:
                shape = layout.grids[name].borders(specs[name]).stored_shape(encoding.shape)
                shape = specs[name].shape if layout.grids[name].shared else shape
                spec = Spec(specs[name].dtype, shape)
                out[name] = Tensor(spec, views.filled(shape, 0), made[0].sources)
        for role, part in zip(coding.encoded_parts(), made, strict=True):
            for name in coding.roles[role]:
                if name in specs:
                    grid = layout.grids[name].borders(specs[name])
                    view = _laid(grid, encoding.shape, part.spec.shape, coding.turned)
                    if grid.shared:
                        view = views.reshape(view, specs[name].shape)
                    spec = Spec(specs[name].dtype, view.shape)
                    out[name] = Tensor(spec, view, part.sources)
    return {name: out[name] for name in specs}


def _member(encoding: Encoding) -> Encoding:
    """The encoding of one member of a group; of what is none, its own."""
    return replace(encoding, shape=encoding.shape[1:], members=0) if encoding.members else encoding


def _encode_members(
    numbers: Tensor, encoding: Encoding, specs: Mapping[str, Spec], keys: tuple[str, ...]
) -> dict[str, Tensor]:
    """`encode` of a group: each member by itself, and each component a stack."""
    one = _member(encoding)
    rows = matrix(one.shape)[0]
    own = {name: Spec(spec.dtype, spec.shape[1:]) for name, spec in specs.items()}
    made = [
        encode(_viewed(numbers, views.slice_(numbers.view, 0, at, at + rows)), one, own, keys)
        for at in range(0, encoding.shape[0] * rows, rows)
    ]
    return {name: _combined([m[name] for m in made], views.stack) for name in specs}


def _combined(tensors: Sequence[Tensor], how: Callable[[Sequence[View], int], View]) -> Tensor:
    """Tensors of one dtype as one, over the sources of all."""
    parts, sources = list[View](), list[Any]()
    for tensor in tensors:
        first = len(sources)
        parts.append(views.relabel(tensor.view, range(first, first + len(tensor.sources))))
        sources += tensor.sources
    view = how(parts, 0)
    return Tensor(Spec(tensors[0].spec.dtype, view.shape), view, tuple(sources))


def decode(
    encoding: Encoding,
    parts: Mapping[str, Tensor],
    keys: tuple[str, ...],
    rule: str = REQUANTIZE,
) -> Tensor:
    """The numbers of an object as a matrix, from its components; `rule` is who asks for them."""
    if encoding.members:
        split = {name: views.unbind(part.view, 0) for name, part in parts.items()}
        found = []
        for number in range(encoding.shape[0]):
            own = {name: _viewed(part, split[name][number]) for name, part in parts.items()}
            found.append(decode(_member(encoding), own, keys, rule))
        return _combined(found, views.concat)
    coding = decodes(encoding, {name: part.spec.dtype for name, part in parts.items()})
    layout = layout_of(encoding)
    if isinstance(coding, str) or layout is None:
        raise ValueError(f"{encoding.name}: {coding}")
    given: dict[str, Tensor] = {}
    for role in coding.parts():
        name = coding.roles[role][0]
        part = parts[name]
        grid = unpadded(layout.grids[name].borders(part.spec), part.view, encoding.shape)
        given[role] = _role(coding, role, part, grid)
    call = coding.decoding({role: one.spec for role, one in given.items()})
    (made,) = computed(call, list(given.values()), keys, rule)
    made = _viewed(made, views.reshape(made.view, matrix(made.spec.shape)))
    return _viewed(made, views.permute(made.view, (1, 0))) if coding.turned else made


def cut_anew(
    encoding: Encoding, parts: Mapping[str, Tensor], box: Box, keys: tuple[str, ...]
) -> dict[str, Tensor]:
    """The components of a box of an object as an object of its own: decoded, cut, and encoded."""
    specs = {name: part.spec for name, part in parts.items()}
    return cut_from(numbers_of(encoding, parts, keys), encoding, specs, box, keys)


def numbers_of(encoding: Encoding, parts: Mapping[str, Tensor], keys: tuple[str, ...]) -> Tensor:
    """The numbers of an object as a matrix: those that it is encoded anew from, or decoded."""
    return _encoded_from(encoding, parts) or decode(encoding, parts, keys)


def cut_from(
    whole: Tensor,
    encoding: Encoding,
    specs: Mapping[str, Spec],
    box: Box,
    keys: tuple[str, ...],
) -> dict[str, Tensor]:
    """The components of a box of an object, from the numbers of the whole; `specs` are those of the
    whole's components.
    """
    starts, sizes = box
    columns = views.slice_(whole.view, 1, starts[-1], starts[-1] + sizes[-1])
    runs = [
        views.slice_(columns, 0, run.whole, run.whole + run.size)
        for run in segments(encoding.shape, starts, sizes)
    ]
    numbers = _viewed(whole, views.concat(runs, 0))
    return encode(numbers, box_of(encoding, sizes), specs, keys)


def _encoded_from(encoding: Encoding, parts: Mapping[str, Tensor]) -> Tensor | None:
    """The numbers that an object is encoded anew from, so that nothing is rounded twice; None for
    others.
    """
    coding = decodes(encoding, {name: part.spec.dtype for name, part in parts.items()})
    layout = layout_of(encoding)
    if isinstance(coding, str) or layout is None or encoding.members:
        return None
    name = coding.roles["weight"][0]
    part = parts[name]
    source = part.sources[0] if len(part.sources) == 1 else None
    if not isinstance(source, ComputedTensor) or source.computation.rule != REQUANTIZE:
        return None
    grid = layout.grids[name].borders(part.spec)
    if part.view != _laid(grid, encoding.shape, source.spec.shape, coding.turned):
        return None
    (given,) = source.computation.inputs
    return _viewed(given, views.permute(given.view, (1, 0))) if coding.turned else given


def box_of(encoding: Encoding, sizes: tuple[int, ...]) -> Encoding:
    """The encoding of a part of such a tensor, as an object of its own."""
    block = encoding.block
    if block == encoding.shape:
        block = (sizes[0], sizes[1])
    members = sizes[0] if encoding.members else 0
    return replace(encoding, shape=sizes, block=block, members=members)


class _Place(NamedTuple):
    """Where the numbers of a shard go, and the view of them."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    numbers: Tensor


def _together(
    tensor: TornTensor, keys: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> Tensor:
    """The numbers of all shards as one matrix."""
    places = []
    every = tuple(keys.values())
    for shard in tensor.shards:
        parts = {}
        for name, number in shard.chunks.items():
            at = stored[keys[name]]
            if isinstance(at, ChunkedTensor):
                chunk = at.chunks[number]
                view = views.stored(0, chunk.spec.shape, chunk.strides)
                parts[name] = Tensor(chunk.spec, view, (ChunkOf(keys[name], number),))
        if shard.encoding is None:
            (plain,) = parts.values()
            numbers = _plain(plain, every)
        else:
            numbers = decode(shard.encoding, parts, every)
        places.append(_Place(shard.starts, shard.sizes, numbers))
    shape = tensor.encoding.shape
    tiles, sources = [], list[Any]()
    for place in places:
        first = len(sources)
        sources += place.numbers.sources
        own = views.relabel(place.numbers.view, range(first, len(sources)))
        column = place.starts[-1]
        tiles += [
            (views.slice_(own, 0, run.own, run.own + run.size), (run.whole, column))
            for run in segments(shape, place.starts, place.sizes)
        ]
    view = views.mosaic(matrix(shape), tiles)
    return Tensor(Spec(NUMBERS, view.shape), view, tuple(sources))


def _plain(part: Tensor, keys: tuple[str, ...]) -> Tensor:
    """Plain numbers of a shard as a matrix."""
    flat = _viewed(part, views.reshape(part.view, matrix(part.spec.shape)))
    if part.spec.dtype == NUMBERS:
        return flat
    return computed(step("cast", to=NUMBERS), [flat], keys)[0]


def _viewed(tensor: Tensor, view: View) -> Tensor:
    return Tensor(Spec(tensor.spec.dtype, view.shape), view, tensor.sources)


def _role(coding: Coding, role: str, part: Tensor, grid: View) -> Tensor:
    """A part as its codec takes it."""
    if coding.turned:
        grid = views.permute(grid, (1, 0))
    if role in coding.shapes:
        grid = views.reshape(grid, coding.shapes[role])
    dtype = part.spec.dtype
    if role == "weight" and coding.codes and BITS[dtype] == BITS[coding.codes]:
        # bytes that hold codes of this dtype
        dtype = coding.codes
    return Tensor(Spec(dtype, grid.shape), grid, part.sources)


def _laid(grid: ComponentGrid, shape: tuple[int, ...], made: tuple[int, ...], turned: bool) -> View:
    """The component of a tensor of `shape` over a part that was encoded, in the shape `made`."""
    high, wide = grid.size(shape)
    if turned:
        high, wide = wide, high
    v = views.stored(0, made)
    if len(made) != 2:
        v = views.reshape(v, (high, wide))
    v = views.slice_(views.slice_(v, 0, 0, high), 1, 0, wide)
    if turned:
        v = views.permute(v, (1, 0))
    return padded(grid, v, shape)


def computed(
    call: OpCall, inputs: Sequence[Tensor], keys: tuple[str, ...], rule: str = REQUANTIZE
) -> list[Tensor]:
    """What an op makes, each over one computed tensor."""
    op = ops.get(call.op)
    if not isinstance(op, ValueOp):
        raise TypeError(f"{call.op} computes nothing")
    given = [one.spec for one in inputs]
    specs = op.infer(call.args, given, 1)
    lossy = op.loss_on(call.args, given) is Loss.LOSSY
    made = Computation(call, tuple(inputs), len(specs), rule, keys, lossy)
    return [
        Tensor(spec, views.stored(0, spec.shape), (ComputedTensor(made, number, spec),))
        for number, spec in enumerate(specs)
    ]
