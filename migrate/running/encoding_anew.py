"""`--set requantize=PATTERN`: which quantized tensors are decoded and encoded anew where what is to
be done with them is not exact, and what a plan says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import Report, fail, listed, option, plural, printable
from ..core.keys import Pattern, parse
from ..core.spec import Spec
from ..core.templates import list_collapsed, matches
from ..planning.graph import Tensor, computations
from ..planning.requantized import box_of, cut_anew, why_not, why_unread
from ..planning.request import Request
from ..source.blobs import ChunkedTensor, StoredTensor
from ..source.index import Source
from ..source.pickle.tree import PARAMETER, Encoding, ask
from ..source.torn_tensors import REQUANTIZE, TornShard, TornTensor
from ..source.tree import object_encodings

if TYPE_CHECKING:
    from ..source.component_boxes import Box, ComponentCut

S = TypeVar("S", bound=Source)


def patterns_of(request: Request) -> list[Pattern]:
    """The patterns of keys that the request lists."""
    return [parse(text) for text in request.params.get(REQUANTIZE, ())]


def encodes_anew(source: S, request: Request, *, every: bool = False) -> S:
    """The source in which the torn tensors that the request names are encoded anew; `every`: all
    that can be. M946 for those that cannot, M115 where no object is named, M955 where the dtype of
    one is not known.
    """
    patterns, index = patterns_of(request), source.index
    if not (patterns or (every and index.torn)):
        return source
    encodings = object_encodings(index.tree, request.params.get(PARAMETER))
    if patterns and not every and request.chunks is None:
        # chunks are cut under the names that are written
        _require_objects(patterns, [*encodings, *(one.name for one in index.torn)])
    if not index.torn:
        return source
    report, settled = Report(), dict[int, TornTensor]()

    def replaced(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        out = dict(tensors)
        for key, at in tensors.items():
            if not isinstance(at, ChunkedTensor) or at.torn is None:
                continue
            tensor = at.torn.tensor
            path = key[: -len(at.torn.attribute) - 1]
            if not every and not any(matches(p, k) for p in patterns for k in (path, tensor.name)):
                continue
            if id(tensor) not in settled:
                dtypes = {
                    name: tensors[own].spec.dtype for name, own in at.torn.siblings(key).items()
                }
                settled[id(tensor)] = _settled(
                    tensor, encodings.get(path, tensor.encoding), dtypes, report, every
                )
            tensor = settled[id(tensor)]
            out[key] = at._replace(torn=at.torn._replace(tensor=tensor))
        return out

    found, tree = copy(source), index.tree
    if tree is not None:
        tree = replace(tree, passed_through=replaced(tree.passed_through))
    found.index = replace(index, tensors=replaced(index.tensors), tree=tree)
    report.check()
    return found


def _settled(
    tensor: TornTensor,
    encoding: Encoding,
    dtypes: Mapping[str, str],
    report: Report,
    every: bool,
) -> TornTensor:
    """The tensor with all its encodings known, to be encoded anew if it can be."""
    if encoding.number is None and encoding.readings and not every:
        ask({tensor.name: encoding})
    shards = tuple(_read_as(shard, encoding.number) for shard in tensor.shards)
    why = why_not(encoding, dtypes)
    for shard in shards:
        if why is None and shard.encoding is not None:
            why = why_unread(shard.encoding, {name: dtypes[name] for name in shard.chunks})
    if why is not None and not every:
        report.add(
            "M946",
            f"{tensor.message}; and it cannot be encoded anew: {why}",
            help="save full_tensor() of it, or leave it out by a rule",
        )
    return replace(tensor, encoding=encoding, shards=shards, anew=why is None)


def _read_as(shard: TornShard, number: str | None) -> TornShard:
    """The shard with the integer of its dtype read as that of the whole, where it is open."""
    encoding = shard.encoding
    if encoding is None or encoding.number is not None:
        return shard
    possible = {name: one for name, one in (encoding.readings or {}).items() if one == number}
    return shard._replace(encoding=replace(encoding, number=number)) if possible else shard


def _require_objects(patterns: Sequence[Pattern], keys: Iterable[str]) -> None:
    """M115 for a pattern that matches the name of no quantized object."""
    names = list(keys)
    lost = [p.text for p in patterns if not any(matches(p, name) for name in names)]
    if lost:
        fail(
            "M115",
            f"{option('params', f'{REQUANTIZE}={printable(lost[0])}')} names no quantized tensor "
            "that is an object",
            help=f"there are {listed([printable(name) for name in names], 4)}"
            if names
            else "leave it out: the checkpoint has none",
        )


def named_by(request: Request) -> Callable[[str], bool]:
    """Whether the request has the tensor of this name encoded anew."""
    patterns = patterns_of(request)
    return lambda key: any(matches(pattern, key) for pattern in patterns)


def cut_components(
    outputs: Mapping[str, Tensor], cuts: Mapping[str, ComponentCut], request: Request
) -> dict[str, Tensor]:
    """What components that are written in parts have in each of them."""
    found = {}
    for key, cut in cuts.items():
        if cut.anew is None:
            whole = outputs[cut.key]
            view = cut.view_of(whole.view, whole.spec.dtype)
            found[key] = Tensor(Spec(whole.spec.dtype, view.shape), view, whole.sources)
    return found if len(found) == len(cuts) else found | cut_all(outputs, cuts, request)


def cut_all(
    outputs: Mapping[str, Tensor], cuts: Mapping[str, ComponentCut], request: Request
) -> dict[str, Tensor]:
    """The components of boxes that are decoded and encoded anew, by their keys. M946 for objects
    that cannot be, M401 unless losses are allowed.
    """
    boxes: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    out: dict[str, Tensor] = {}
    for key, cut in cuts.items():
        if cut.anew is None:
            continue
        of = (*cut.anew.values(), cut.box)
        if of not in boxes:
            parts = {name: outputs[own] for name, own in cut.anew.items()}
            boxes[of] = cut_box(cut.encoding, parts, cut.box, tuple(cut.anew.values()), request)
        out[key] = boxes[of][cut.name]
    require_lossy(out, request)
    return out


def cut_box(
    encoding: Encoding,
    parts: Mapping[str, Tensor],
    box: Box,
    keys: tuple[str, ...],
    request: Request,
) -> dict[str, Tensor]:
    """The components of a box of an object, encoded anew. M946 if they cannot be, M955 where the
    dtype is not known.
    """
    numbering = request.params.get(PARAMETER)
    if numbering is not None:
        encoding = encoding.read_as(numbering)
    name = keys[0].rpartition(".")[0]
    ask({name: encoding})
    dtypes = {part: tensor.spec.dtype for part, tensor in parts.items()}
    why = why_unread(encoding, dtypes) or why_not(box_of(encoding, box[1]), dtypes)
    if why is not None:
        fail(
            "M946",
            f"{printable(name)} is not cut on borders of blocks, and its parts cannot be encoded "
            f"anew: {why}",
            help="cut it on borders, or leave it whole",
        )
    return cut_anew(encoding, parts, box, keys)


def list_anew(outputs: Mapping[str, Tensor]) -> list[str]:
    """The keys of outputs that are encoded anew."""
    calls = computations(outputs.values())
    made = {id(call) for call in calls if call.rule == REQUANTIZE}
    if not made:
        return []
    return [
        key
        for key, tensor in outputs.items()
        if any(id(call) in made for call in computations([tensor]))
    ]


def require_lossy(outputs: Mapping[str, Tensor], request: Request) -> None:
    """M401 for outputs that are encoded anew, unless that is allowed."""
    if "lossy" in request.allow or REQUANTIZE not in request.params:
        return
    if keys := list_anew(outputs):
        fail(
            "M401",
            f"`{REQUANTIZE}` changes values of {plural(len(keys), 'tensor')}",
            notes=(listed(keys, 8),),
            help=f"if that is wanted: {option('allow', 'lossy')}",
            permit="lossy",
        )


def loss_of(keys: Sequence[str]) -> dict[str, Any]:
    """What a plan says of tensors that are encoded anew, among its losses."""
    return {
        "kind": "lossy",
        "rule": REQUANTIZE,
        "at": REQUANTIZE,
        "why": "decoded and encoded anew: as it lies it can be neither joined nor cut",
        "keys": [list_collapsed(keys, 20)],
    }
