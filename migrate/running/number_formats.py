"""Which number formats a checkpoint's tensors are in, from names, dtypes, shapes and configuration.

Tensors that can be read alike are one group. Where headers allow several readings, those count that
the configuration does not contradict, then those that fit what a small part says (`weight_shape`);
if more than one is left, all are given with the argument of the codec that decides between them.
What looks like codes and is in no known format is named as well, with what it lacks. A checkpoint
without such tensors costs a look at its specs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import codecs
from ..codecs.base import MOST_PLANNED, OpError
from ..core.part_names import FLOAT8, PartNames, key_of_part
from ..core.spec import BITS, Spec
from ..core.templates import collapse, is_integer, rank_of
from ..planning.pairs import may_hold_codes
from ..planning.stored import stored_tensor
from ..planning.unscaled import Neighbours, likely_scale, module_of
from ..source.quantization import Quantization, Scheme, contradiction, describe

if TYPE_CHECKING:
    from ..core.part_names import Reading
    from ..source.index import Source

    Said = Callable[[], Quantization | None]
    Elements = Callable[[str], tuple[int, ...] | None]

_INTEGERS = {"int32": "<i", "int64": "<q"}
# what codes are in only; integers of a byte may be anything
_CODES = {*FLOAT8, "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}


@dataclass(slots=True)
class _Group:
    """Tensors with the same readings: the keys of their codes, the parts of the first, and what the
    configuration says of them.
    """

    readings: Sequence[Reading]
    parts: Mapping[str, Spec]
    problem: str | None = None
    said: Scheme | None = None
    contradiction: str | None = None
    stems: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


def describe_formats(
    specs: Mapping[str, Spec], said: Said = lambda: None, elements: Elements | None = None
) -> dict[str, Any]:
    """`number_formats` and `plain` of an `InspectReport`; empty where no tensor holds codes.

    `said` answers with what the configuration says, and is asked only if a tensor holds codes;
    `elements` with those of a small tensor, and is asked only where a configuration does not make
    the reading certain.
    """
    # few specs stand for many tensors
    if not any(map(may_hold_codes, {id(spec): spec for spec in specs.values()}.values())):
        return {"number_formats": [], "plain": []}
    configured = said()
    groups, used = _grouped(specs, codecs.part_names(), configured, elements)
    groups += _unexplained(specs, used)
    return {
        "number_formats": [_described(group, specs) for group in groups],
        "plain": _plain(specs, used, configured) if groups else [],
    }


class EncodedTensor(NamedTuple):
    """A tensor in a number format of which there is one reading: the key of its codes, its module,
    the codec's name and arguments, and the keys of its parts by role.
    """

    key: str
    module: str
    format: str
    arguments: Mapping[str, Any]
    parts: Mapping[str, str]


def encoded_tensors(specs: Mapping[str, Spec]) -> Iterator[EncodedTensor]:
    """The tensors whose format names, dtypes and shapes tell."""
    if not any(map(may_hold_codes, {id(spec): spec for spec in specs.values()}.values())):
        return
    for group in _grouped(specs, codecs.part_names(), None)[0]:
        if len(group.readings) != 1 or group.readings[0].missing:
            continue
        (reading,) = group.readings
        first = next(iter(reading.endings.values()))
        for key in group.keys:
            rank = _rank(key)
            stem = key.removesuffix(rank).removesuffix(first)
            yield EncodedTensor(
                key,
                stem.removesuffix(".weight"),
                reading.format,
                reading.arguments,
                {role: key_of_part(stem, end) + rank for role, end in reading.endings.items()},
            )


def read_elements(source: Source, key: str) -> tuple[int, ...] | None:
    """The integers in a small tensor; None for another one."""
    at = source.index.tensors[key]
    form = _INTEGERS.get(at.spec.dtype)
    if form is None or at.spec.nbytes > MOST_PLANNED:
        return None
    from .checks import read_content

    content = read_content(stored_tensor(key, at), source)
    return tuple(one for (one,) in struct.iter_unpack(form, content))


def contradictions(
    specs: Mapping[str, Spec], said: Quantization, elements: Elements | None = None
) -> list[tuple[Scheme | None, str, int]]:
    """What the configuration says of groups of tensors that are something else: (its scheme, None
    for plain modules; a sentence about the first, with both readings; how many there are).
    """
    groups, _ = _grouped(specs, codecs.part_names(), said, elements)
    return [(g.said, g.contradiction, len(g.keys)) for g in groups if g.contradiction is not None]


def _grouped(
    specs: Mapping[str, Spec],
    table: PartNames,
    said: Quantization | None,
    elements: Elements | None = None,
) -> tuple[list[_Group], set[str]]:
    """The groups of tensors with parts of known names, and the keys of all of these."""
    groups: dict[Any, _Group] = {}
    known: dict[Any, tuple[Sequence[Reading], Any]] = {}
    sized: dict[Any, Sequence[Reading]] = {}
    used: set[str] = set()
    for key, spec in specs.items():
        if not may_hold_codes(spec) or key in used:
            continue
        best: tuple[Any, ...] | None = None
        for stem, first, near in _parts(key, spec, specs, table):
            signature = (first, tuple(near.items()))
            if signature not in known:
                found = table.read(first, near)
                known[signature] = found, tuple(map(_identity, found)) or signature
            alike, identity = known[signature]
            # complete beats partial, many parts few, and a long ending a short one
            rank = (
                bool(alike) and not alike[0].missing,
                len(alike[0].endings) if alike else 0,
                len(first),
            )
            if best is None or rank > best[0]:
                best = rank, stem, first, near, alike, identity
        if best is None:
            continue
        _, stem, first, near, readings, identity = best
        if len(near) < 2 and first in ("", ".weight"):
            continue
        rank_text = _rank(key)
        used.update(key_of_part(stem, end) + rank_text for end in near)
        module = stem if first else stem.removesuffix(".weight")
        scheme = None if said is None else said.scheme_of(module)
        group = groups.get((identity, scheme))
        if group is None:
            group = groups[identity, scheme] = _group(readings, dict(near), module, scheme, said)
            group.problem = (
                codecs.why_undecodable(readings[0].format)
                if readings
                else _lacking(first, near, table)
            )
        # a configuration that agrees with the one reading there is says all that is needed
        certain = len(group.readings) == 1 and group.said is not None and not group.contradiction
        if elements is not None and first in table.sized and not certain:
            parts = [end for end in table.sized[first] if end in near]
            keys = {end: key_of_part(stem, end) + rank_text for end in parts}
            shape = {end: s for end, key in keys.items() if (s := elements(key)) is not None}
            asked = (first, tuple(near.items()), tuple(shape.items()))
            if asked not in sized:
                sized[asked] = table.read(first, near, shape)
            readings = sized[asked]
            identity = tuple(map(_identity, readings)) or asked
            group = groups.get((identity, scheme))
            if group is None:
                group = _group(readings, dict(near), module, scheme, said)
                groups[identity, scheme] = group
                group.problem = _unreadable(readings[0]) if readings else _misfit(shape)
        group.stems.append(module)
        group.keys.append(key)
    return _merged([group for group in groups.values() if group.keys]), used


def _group(
    readings: Sequence[Reading],
    parts: Mapping[str, Spec],
    module: str,
    scheme: Scheme | None,
    said: Quantization | None,
) -> _Group:
    """A group with those readings that the configuration does not contradict; if there are none,
    with all of them, and the contradiction.
    """
    if said is None or not readings:
        return _Group(readings, parts, said=scheme)
    found = [_scheme(reading, parts, scheme) for reading in readings]
    apart = [contradiction(module, scheme, one) for one in found]
    kept = [r for r, sentence in zip(readings, apart, strict=True) if sentence is None]
    if kept:
        return _Group(kept, parts, said=scheme)
    # what all readings have in common is certain
    certain = dict(readings[0].arguments)
    for reading in readings:
        certain = {k: v for k, v in certain.items() if reading.arguments.get(k) == v}
    common = _scheme(readings[0]._replace(arguments=certain), parts, scheme)
    sentence = contradiction(module, scheme, common)
    return _Group(readings, parts, said=scheme, contradiction=sentence or apart[0])


# of formats whose groups, and whose codes, have one size, which no argument says
_GROUPS = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
_BITS = {"awq": 4, "int4-rows": 4}
# formats with a part that names the group of each column
_INDEXED = ("gptq", "int-pack")


def _scheme(reading: Reading, parts: Mapping[str, Spec], said: Scheme | None) -> Scheme:
    """What tensors tell, in the terms of configurations: `said` where both mean the same."""
    known = reading.arguments
    rows, columns = known.get("rows"), known.get("columns")
    lacks_index = reading.format in _INDEXED and "group" not in reading.endings
    # most have none, and say so only where one is asked for
    lacks_index = lacks_index and said is not None and bool(said.indexed)
    found = Scheme(
        reading.format,
        bits=known.get("bits", _BITS.get(reading.format)),
        group=known.get("group", _GROUPS.get(reading.format)),
        block=(rows, columns) if rows and columns else None,
        granularity=known.get("granularity"),
        symmetric="zero" not in reading.endings if reading.format == "int-pack" else None,
        form=known.get("form"),
        indexed=False if lacks_index else None,
        # a way back restores a configuration that says it, beside scales that are not
        nested="nested_absmax" in reading.endings or None,
        place="tensors",
    )
    if said is None or (found.granularity, said.granularity) != ("channel", "group"):
        return found
    # a row that is one group; only codes of a byte each have a granularity
    codes = parts[next(iter(reading.endings.values()))]
    whole = codes.shape[-1:] == (said.group,)
    return found._replace(granularity="group", group=said.group) if whole else found


def _parts(
    key: str, spec: Spec, specs: Mapping[str, Spec], table: PartNames
) -> Iterator[tuple[str, str, dict[str, Spec]]]:
    """For each way to read the key as that of codes: what `{w}` stands for, its ending, and what is
    there of the other parts, by ending.
    """
    rank = _rank(key)
    for stem, first, _ in table.firsts.find(key.removesuffix(rank)):
        near = {first: spec}
        for end in table.partners(first):
            part = specs.get(key_of_part(stem, end) + rank)
            if part is not None:
                near[end] = part
        yield stem, first, near


def _rank(key: str) -> str:
    return f"@{rank_of(key)}" if "@" in key and rank_of(key) is not None else ""


def _identity(reading: Reading) -> tuple[Any, ...]:
    return (
        reading.format,
        reading.producer,
        tuple(sorted(reading.arguments.items())),
        tuple(reading.endings.values()),
        reading.missing,
    )


def _merged(groups: list[_Group]) -> list[_Group]:
    """The groups, those of small tensors with the others: of a tensor that is not larger than a
    block, shapes do not tell how large a block is.
    """
    out: list[_Group] = []
    for group in sorted(groups, key=lambda g: -sum(len(r.arguments) for r in g.readings)):
        into = next((other for other in out if _within(group, other)), None)
        if into is None:
            out.append(group)
        else:
            into.stems += group.stems
            into.keys += group.keys
    order = {id(group): number for number, group in enumerate(groups)}
    return sorted(out, key=lambda group: order[id(group)])


def _within(group: _Group, other: _Group) -> bool:
    return (
        bool(group.readings)
        and group.said == other.said
        and group.contradiction is other.contradiction is None
        and len(group.readings) == len(other.readings)
        and all(
            _identity(a)[:2] + _identity(a)[3:] == _identity(b)[:2] + _identity(b)[3:]
            and a.arguments.items() <= b.arguments.items()
            for a, b in zip(group.readings, other.readings, strict=True)
        )
    )


def _lacking(first: str, near: Mapping[str, Spec], table: PartNames) -> str:
    if len(near) > 1:
        return "dtypes and shapes of these parts are those of no known format"
    ends = [end.lstrip("._") for end, decodes in table.partners(first).items() if decodes]
    return f"the other parts are missing: {' or '.join(ends)}"


def _misfit(elements: Mapping[str, tuple[int, ...]]) -> str:
    said = " and ".join(f"{end.lstrip('._')} says {list(n)}" for end, n in elements.items())
    return f"{said}, which is the shape of no known format with these parts"


def _unreadable(reading: Reading) -> str | None:
    """Why the codec does not take what parts say, such as a type that it does not decode."""
    codec = codecs.get(reading.format)
    known = {field.name for field in fields(codec.Args)}
    said = {name: value for name, value in reading.arguments.items() if name in known}
    try:
        codec.validate(codec.Args(**said), encoding=False)
    except OpError as error:
        return error.message
    return None


def _unexplained(specs: Mapping[str, Spec], used: set[str]) -> list[_Group]:
    """Tensors of dtypes that are hardly ever numbers by themselves."""
    keys = [key for key, spec in specs.items() if spec.dtype in _CODES and key not in used]
    neighbours = Neighbours(specs if keys else ())
    groups: dict[Any, _Group] = {}
    for key in keys:
        near = {other: specs[other] for other in neighbours.of(key)}
        scale = likely_scale(key, near, used) if specs[key].dtype in FLOAT8 else None
        leaf = "" if scale is None else scale.removeprefix(module_of(key))
        problem = (
            "no scale under a known name"
            if scale is None
            else f"no scale under a known name, and {leaf} is all but certainly one"
        )
        parts = {key[len(module_of(key)) :]: specs[key]}
        if scale is not None:
            parts[leaf] = specs[scale]
            used.add(scale)
        used.add(key)
        group = groups.setdefault((specs[key].dtype, problem), _Group((), parts, problem))
        group.stems.append(key.removesuffix(_rank(key)).removesuffix(".weight"))
        group.keys.append(key)
    return list(groups.values())


def _plain(
    specs: Mapping[str, Spec], used: set[str], said: Quantization | None
) -> list[dict[str, Any]]:
    """The matrices that are stored as floats, by dtype."""
    found: dict[str, list[str]] = {}
    for key, spec in specs.items():
        wide = spec.dtype.startswith(("float", "bfloat")) and BITS[spec.dtype] > 8
        if key not in used and wide and len(spec.shape) > 1:
            found.setdefault(spec.dtype, []).append(key)
    out = []
    for dtype, keys in found.items():
        modules = [_module_of_weight(key) for key in keys]
        apart = (contradiction(m, said.scheme_of(m), None) for m in modules if said is not None)
        out.append(
            {
                "dtype": dtype,
                "names": _words(modules),
                "count": len(keys),
                "contradiction": next((sentence for sentence in apart if sentence), None),
            }
        )
    return out


def _module_of_weight(key: str) -> str:
    return key.removesuffix(_rank(key)).removesuffix(".weight")


def _described(group: _Group, specs: Mapping[str, Spec]) -> dict[str, Any]:
    return {
        "names": _words(group.stems),
        "keys": [line.text for line in collapse(group.keys, lambda key: specs[key].dtype)],
        "count": len(group.keys),
        "parts": [
            {"name": end.lstrip("._") or "weight", "spec": str(spec)}
            for end, spec in _in_order(group)
        ],
        "readings": [
            {"format": r.format, "producer": r.producer, "arguments": dict(r.arguments)}
            for r in group.readings
        ],
        "decides": _deciding(group.readings),
        "missing": [end.lstrip(".") for r in group.readings[:1] for end in r.missing],
        "problem": group.problem,
        "configured": (
            None if group.said is None else f"{describe(group.said)} ({group.said.place})"
        ),
        "contradiction": group.contradiction,
    }


def _in_order(group: _Group) -> list[tuple[str, Spec]]:
    """The parts as the format has them, then the others."""
    ends = [*(group.readings[0].endings.values() if group.readings else ()), *group.parts]
    return [(end, group.parts[end]) for end in dict.fromkeys(ends)]


def _deciding(readings: Sequence[Reading]) -> list[str]:
    """The arguments in which the readings differ; `codec` where the formats do."""
    if len({reading.format for reading in readings}) > 1:
        return ["codec"]
    names = dict.fromkeys(name for reading in readings for name in reading.arguments)
    return [
        name
        for name in names
        if len({repr(reading.arguments.get(name)) for reading in readings}) > 1
    ]


def _words(stems: Iterable[str]) -> list[str]:
    """The last segments of these names, each once, those that are numbers with what is before."""
    found: dict[str, None] = {}
    for stem in stems:
        *before, word = stem.split(".")
        found[f"{before[-1]}.*" if is_integer(word) and before else word] = None
    return list(found)
