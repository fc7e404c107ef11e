"""What a checkpoint is, without a look at its tensors: the answers of `inspect` and `history`."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..core.errors import MigrateError, listed, printable
from ..core.templates import collapse
from ..extra_state.states import States
from ..planning.lineages import known_lineages, layouts_of, nearest_to
from ..planning.sides import ReadSide, SideFiles
from ..results import HistoryReport, InspectReport
from ..rules.lineage import Matcher
from ..source.pickle.tree import PARAMETER, DictNode
from ..source.quantization import Quantization, read_quantization
from ..source.tree import PARTS, kept_by_part, object_encodings
from . import stamp as stamps
from .number_formats import describe_formats, read_elements
from .prepare import side_reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..core.spec import Spec
    from ..planning.request import Request
    from ..source.index import Index, Source

MOST_ITEMS = 1000
# characters of one value
LONGEST = 10_000
# lines of values that are alike, and how many values of one form are told apart
MOST_LINES, MOST_DISTINCT = 10_000, 4
# a segment of a path that is a number
_NUMBER = re.compile(r"(?:(?<=\.)|^)[0-9]+(?=\.|$)")


def describe(
    source: Source, request: Request, *, expand: bool, values: bool = False
) -> InspectReport:
    """What the checkpoint holds and which layouts it fits; `expand` lists every key, `values` all
    values that are no tensors.
    """
    index = source.index
    specs = {key: stored.spec for key, stored in index.tensors.items()}
    index_hash = index.hash()
    stamp, notes = stamps.read_stamp(source.history, index_hash)
    if expand:
        keys = [
            {"keys": k, "count": 1, "spec": str(s), "bytes": s.nbytes} for k, s in specs.items()
        ]
    else:
        keys = [
            {
                "keys": c.text,
                "count": c.count,
                "spec": str(specs[c.sample]),
                "bytes": c.count * specs[c.sample].nbytes,
            }
            for c in collapse(list(specs), specs.__getitem__)
        ]
    read_side, states = side_reader(source), States(source)
    match = Matcher(index, states)
    lines = list(_alike(index)) if values else []
    if len(lines) > MOST_LINES:
        notes.append(f"{len(lines) - MOST_LINES:,} more lines of values are not listed")
    layouts = layouts_of(index, read_side, request.rules, stamp.layouts, states, match)
    return InspectReport.of(
        path=source.path,
        format=source.format,
        index_hash=index_hash,
        files=[
            {"name": name, "size": blob.size}
            for name, blob in zip(index.files, source.blobs, strict=True)
        ],
        grid=None if index.grid is None else str(index.grid),
        tensors=len(specs),
        bytes=index.nbytes,
        **_counted(specs.values()),
        layouts=layouts,
        nearest=[] if layouts else nearest_to(index, read_side, request.rules, states, match),
        keys=keys,
        **describe_formats(
            specs, partial(_configured, read_side, notes), partial(read_elements, source)
        ),
        side_files=[{"path": f.path, "size": f.size} for f in index.side_files],
        left_out=list(index.left_out),
        metadata=dict(index.metadata),
        **describe_items(index, request.params.get(PARAMETER)),
        values=dict(lines[:MOST_LINES]),
        unjoined={one.name: one.why for one in index.torn},
        notes=[*index.notes, *_note_kept(index), *notes],
    )


def _configured(read_side: ReadSide, notes: list[str]) -> Quantization | None:
    """What the configuration says of number formats; a note where it cannot be read."""
    try:
        return read_quantization(SideFiles(read_side).value)
    except MigrateError as error:
        notes += [diagnostic.message for diagnostic in error.diagnostics]
        return None


def _counted(specs: Iterable[Spec]) -> dict[str, Any]:
    """The elements of all tensors, and of those of each dtype."""
    alike = Counter(specs)
    dtypes: dict[str, dict[str, Any]] = {}
    for spec, count in alike.items():
        row = dtypes.setdefault(
            spec.dtype, {"dtype": spec.dtype, "tensors": 0, "parameters": 0, "bytes": 0}
        )
        row["tensors"] += count
        row["parameters"] += count * spec.numel
        row["bytes"] += count * spec.nbytes
    rows = sorted(dtypes.values(), key=lambda row: (-row["parameters"], row["dtype"]))
    return {"parameters": sum(row["parameters"] for row in rows), "dtypes": rows}


def describe_items(index: Index, numbering: str | None = None) -> dict[str, Any]:
    """What is beside the tensors that rules work on; `numbering` as for `object_encodings`."""
    outline = index.tree
    first = outline.parts[0].at if outline is not None and outline.parts else ()
    carried = index.passed_through
    known: dict[int, Any] = {}
    items = _not_of_parts(index)
    return {
        "at": None if first is None else ".".join(first),
        "items": [
            {"path": path, "value": _shortened(value, known)}
            for path, value in islice(items.items(), MOST_ITEMS)
        ],
        "objects": [
            {"key": key, **e.described()}
            for key, e in list(object_encodings(outline, numbering).items())[:MOST_ITEMS]
        ],
        "items_more": max(0, len(items) - MOST_ITEMS),
        "carried": {
            "tensors": len(carried),
            "bytes": sum(stored.spec.nbytes for stored in carried.values()),
        },
        "outside": [
            {"name": o.name, "reason": o.reason, "count": o.count, "paths": list(o.paths)}
            for o in (*index.outside, *index.carried)
        ],
    }


def _kept(index: Index) -> Sequence[tuple[str, Any]]:
    """What the trees keep of parts."""
    parts = () if index.tree is None else index.tree.parts
    return [entry for part in parts for entry in kept_by_part(part.root)]


def _not_of_parts(index: Index) -> Mapping[str, Any]:
    """The values but for those that are kept by part, of which there can be very many."""
    if not _kept(index):
        return index.items
    return {path: held for path, held in index.items.items() if not path.startswith(f"{PARTS}.")}


def _note_kept(index: Index) -> list[str]:
    """The note on what is kept by part, in one line."""
    kept = _kept(index)
    names: dict[str, None] = {}
    for _, entry in kept:
        for key, value in entry.pairs if type(entry) is DictNode else ():
            inner = value.pairs if type(value) is DictNode else ()
            names.update((f"{key}.{name}", None) for name, _ in inner)
            names.update({} if inner else {str(key): None})
    said = listed([printable(name) for name in names], 8) if names else "nothing"
    return [f"kept by part at `{PARTS}`, for {len(kept)} parts: {said}"] if kept else []


def _alike(index: Index) -> Iterator[tuple[str, dict[str, Any]]]:
    """The values, those in one line that are equal and whose paths differ in numbers only; so are
    values of that kind that differ, where there are many.
    """
    several = index.tree is not None and len(index.tree.parts) > 1
    known: dict[int, Any] = {}
    forms: dict[str, dict[str, str]] = {}
    for path, value in _not_of_parts(index).items():
        if several:
            # the rank is a number in front while lines are made
            path, _, rank = path.rpartition("@")
            path = f"{rank}.{path}"
        text = json.dumps(_shortened(value, known))
        forms.setdefault(_NUMBER.sub("#", path), {})[path] = text
    for said in forms.values():
        distinct = len(set(said.values()))
        for line in collapse(list(said), said.__getitem__ if distinct <= MOST_DISTINCT else None):
            text = _rank_last(line.text) if several else line.text
            yield (
                text,
                {
                    "count": line.count,
                    "value": json.loads(said[line.sample]),
                    "distinct": distinct if distinct > MOST_DISTINCT else 1,
                },
            )


def _rank_last(text: str) -> str:
    """`args.x@{0..7}` of `{0..7}.args.x`."""
    end = text.index(".", text.find("}") if text.startswith("{") else 0)
    return f"{text[end + 1 :]}@{text[:end]}"


def _shortened(value: Any, known: dict[int, Any]) -> Any:
    """A value, or the begin of its JSON text if that is long; of an object in memory its class."""
    if id(value) not in known:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            value = text = f"<{type(value).__name__}>"
        known[id(value)] = value if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return known[id(value)]


def describe_history(
    source: Source, request: Request, lineage: str | None, counts: bool
) -> HistoryReport:
    """What the stamp says was applied, and the layouts that the checkpoint stands in."""
    index_hash = source.index.hash()
    stamp, notes = stamps.read_stamp(source.history, index_hash)
    if lineage is not None and lineage not in {
        *stamp.layouts,
        *(e["lineage"] for e in stamp.applied),
    }:
        known_lineages(request.rules, lineage)  # M507 if there is none of this name
    found = layouts_of(
        source.index, side_reader(source), request.rules, stamp.layouts, States(source)
    )
    standing = {
        entry["lineage"]: entry["layout"] for entry in found if lineage in (None, entry["lineage"])
    }
    stated = [
        f"{one['lineage']}@{one['layout']} was stated against its signs: {one['why']}"
        for one in stamp.declared
        if "why" in one
    ]
    applied = [dict(e) for e in stamp.applied if lineage in (None, e["lineage"])]
    return HistoryReport.of(
        path=source.path,
        output=index_hash,
        **({"carried": list(stamp.carried)} if stamp.carried else {}),
        **({"declared": [dict(one) for one in stamp.declared]} if stamp.declared else {}),
        layouts=dict(stamp.layouts),
        standing=standing,
        lineages=[
            row for name in standing for row in known_lineages(request.rules, name, counts=counts)
        ],
        applied=applied,
        notes=[*notes, *stated]
        if source.history is not None
        else ["no stamp: nothing was applied by migrate"],
    )
