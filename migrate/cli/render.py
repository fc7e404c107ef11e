"""Text is rendered from the JSON documents; nothing here knows more than they say.

Names in a document come from the authors of the checkpoint or the rules, so each renderer is given
the document with all its texts made printable (`_answer`), and the lists of keys that are collapsed
first are made so afterwards.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import click

from ..core.errors import Diagnostic, Span, plural, printable
from ..core.errors import place as _lineage_place
from .store_text import stored
from .terminal import LIMIT, safe, say, size

SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
}
SYMBOLS = {
    "renamed": "~",
    "merged": "><",
    "split": "<>",
    "rearranged": "%",
    "computed": "*",
    "added": "+",
    "followed": "^",
    "dropped": "-",
    "redundant": "-",
    "unchanged": "=",
}
# ops that measure against the largest number of a block, and may take a sample
IN_BLOCKS = ("dequantize", "quantize")
MOST_LISTED = 50
MOST_ITEMS = 12
MOST_NAMES = 8


def emit(document: Mapping[str, Any], form: str, text: Callable[[Mapping[str, Any]], str]) -> None:
    """Writes the answer to stdout, as JSON or as `text` renders it, then its warnings to stderr."""
    if form == "json":
        click.echo(json.dumps(document, indent=1))
        return
    say(text(document))
    for warning in safe(document.get("warnings", ())):
        lines = [
            f"warning[{warning['code']}]: {warning['message']}",
            *(f"  = note: {note}" for note in warning["notes"]),
        ]
        say(
            "\n".join([*lines, *([f"  = help: {warning['help']}"] if warning["help"] else [])]),
            err=True,
        )


def diagnostic(found: Mapping[str, Any]) -> str:
    """A diagnostic of a document as rustc would draw it."""
    code, message, note, severity = (
        found[name] for name in ("code", "message", "help", "severity")
    )
    spans = tuple(Span(**span) for span in found["spans"])
    return Diagnostic(code, message, spans, tuple(found["notes"]), note, severity).render()


def word(text: str) -> str:
    """A word for a shell's command line; one that would not print is escaped, not to be copied."""
    return shlex.quote(text if text.isprintable() else safe(text))


def _answer(renderer: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    @wraps(renderer)
    def rendered(doc: Mapping[str, Any]) -> str:
        return renderer(safe(doc))

    return rendered


def short(spec: str) -> str:
    """`bfloat16 [4, 4]` as `bf16 [4, 4]`."""
    dtype, _, shape = spec.partition(" ")
    return f"{SHORT.get(dtype, dtype)} {shape}"


def place(path: str) -> str:
    """A path, relative to the working directory where it lies below it."""
    return path.removeprefix(os.getcwd() + os.sep)


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Left-aligned columns."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (
            indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def collapsed(keys: Iterable[str]) -> list[str]:
    """Keys as few lines: `layers.{0..31}.weight  ×32`."""
    from ..core.templates import collapse

    return [
        f"{_name(line.text)}  ×{line.count:,}" if line.count > 1 else _name(line.text)
        for line in collapse(list(keys))
    ]


def _name(key: str) -> str:
    return printable(key, LIMIT)


def _shown(text: str) -> str:
    """Text that is safe already, and still to be seen where it is empty."""
    return text or _name(text)


def capped(lines: Sequence[str]) -> list[str]:
    """At most as many lines as are read, and how many more there are."""
    more = len(lines) - MOST_LISTED
    return (
        list(lines)
        if more <= 0
        else [*lines[:MOST_LISTED], f"… and {more:,} more (--format json lists them all)"]
    )


def _objects(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Objects of one sort as one line: the first of them, and what is unknown of their numbers."""
    sorts: dict[tuple[Any, ...], list[str]] = {}
    for one in objects:
        either = " or ".join(f"{dtype} ({release})" for release, dtype in one["readings"].items())
        sorts.setdefault((one["format"], one["number"] or either, bool(one["members"])), []).append(
            one["key"]
        )
    lines = []
    for (form, number, together), keys in sorts.items():
        grouped = ", grouped" if together and form != "te-grouped" else ""
        lines.append(
            f"  {form}{grouped}{f' of {number}' if number else ''}: "
            f"{_name(keys[0])}{_more(len(keys) - 1)}"
        )
    if any(one["readings"] for one in objects):
        lines.append(
            "  the file does not say which of the two it is: --set te_dtype_numbering=0.8 or =2.4"
        )
    return lines


@_answer
def inspection(doc: Mapping[str, Any]) -> str:
    # where rules see none, all are carried
    held = doc if doc["tensors"] or doc["at"] is not None else doc["carried"]
    what = [
        doc["format"],
        plural(len(doc["files"]), "file"),
        plural(held["tensors"], "tensor"),
        size(held["bytes"]),
    ]
    out = [f"{doc['path']}   {', '.join(what)}   (no weights read)"]
    dtypes = [
        f"{SHORT.get(row['dtype'], row['dtype'])} {row['parameters']:,} in "
        f"{plural(row['tensors'], 'tensor')}"
        for row in doc["dtypes"]
    ]
    held = (
        f": {', '.join(dtypes)}"
        if len(dtypes) > 1
        else f", {dtypes[0].split()[0]}"
        if dtypes
        else ""
    )
    out.append(f"holds    {plural(doc['parameters'], 'parameter')}{held}")
    if doc["grid"] is not None:
        out.append(f"grid     {doc['grid']}")
    for layout in doc["layouts"]:
        out.append(f"layout   {layout['lineage']}@{layout['layout']}")
        out += [f"           {sign}" for sign in layout["evidence"]]
        if layout.get("note"):
            out.append(f"           note: {layout['note']}")
    if not doc["layouts"]:
        out.append("layout   none of the known ones  (`migrate history` lists them)")
        for near in doc["nearest"]:
            out.append(f"nearest  {near['lineage']}@{near['layout']}")
            out += [f"           {sign}" for sign in near["found"]] + [
                f"           not: {sign}" for sign in near["against"]
            ]
    out += _number_formats(doc)
    out += [f"note     {note}" for note in doc["notes"]]
    out.append("")
    out += columns(
        [
            [
                _shown(k["keys"]),
                f"×{k['count']:,}" if k["count"] > 1 else "",
                short(k["spec"]),
                size(k["bytes"]),
            ]
            for k in doc["keys"]
        ]
    )
    if doc["objects"]:
        out += [
            "",
            "quantized tensors that are objects, made of the tensors above:",
            *capped(_objects(doc["objects"])),
        ]
    if doc["unjoined"]:
        out += [
            "",
            "quantized tensors whose shards make no whole tensor without loss (M946):",
            *capped([f"  {_name(key)}: {why}" for key, why in doc["unjoined"].items()]),
        ]
    if doc["outside"]:
        out += ["", "outside the allow-list, and left out (nothing was executed):"]
        out += [
            f"  {o['name']} ({o['reason']}) at {', '.join(o['paths'][:3])}" + _more(o["count"] - 3)
            for o in doc["outside"]
        ]
    out += _beside_tensors(doc)
    if doc["side_files"] or doc["left_out"]:
        out.append("")
    if doc["side_files"]:
        out.append(f"carried along: {', '.join(f['path'] for f in doc['side_files'])}")
    if doc["left_out"]:
        out.append(f"left behind:   {', '.join(doc['left_out'])}")
    return "\n".join(out)


def _number_formats(doc: Mapping[str, Any]) -> list[str]:
    """The number formats of the checkpoint, what shows them, and the matrices that are plain."""
    out = []
    for group in doc["number_formats"]:
        readings = group["readings"]
        first = readings[0] if readings else None
        if first is None:
            what = group["problem"]
        else:
            same = {k: v for k, v in first["arguments"].items() if k not in group["decides"]}
            what = ", ".join([_reading(first), *_arguments(same)])
        out.append(f"numbers  {_several(group)}   {what}")
        parts = [f"{printable(p['name'])} {short(p['spec'])}" for p in group["parts"]]
        out.append(f"           {', '.join(parts)}")
        if first is not None and group["problem"]:
            out.append(f"           is not decoded: {group['problem']}")
        if group["configured"] and not group["contradiction"]:
            out.append(f"           {printable(group['configured'], 600)}")
        if group["contradiction"]:
            out.append(f"           contradiction: {printable(group['contradiction'], 600)}")
        if group["missing"]:
            out.append(f"           missing: {', '.join(map(printable, group['missing']))}")
        if group["decides"]:
            ways = " or ".join(_way(reading, group["decides"]) for reading in readings)
            out.append(f"           either {ways}: `{'`, `'.join(group['decides'])}` decides")
    for group in doc["plain"]:
        out.append(f"numbers  {_several(group)}   {SHORT.get(group['dtype'], group['dtype'])}")
        if group["contradiction"]:
            out.append(f"           contradiction: {printable(group['contradiction'], 600)}")
    return out


def _reading(reading: Mapping[str, Any]) -> str:
    return f"{reading['format']} ({reading['producer']})"


def _way(reading: Mapping[str, Any], decides: Sequence[str]) -> str:
    """What one of several readings says of the arguments that decide between them."""
    if "codec" in decides:
        return ", ".join([_reading(reading), *_arguments(reading["arguments"])])
    return ", ".join(_arguments({name: reading["arguments"].get(name) for name in decides}))


def _arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of a codec as words; those of a shape are one."""
    said = dict(arguments)
    out = []
    if "rows" in said and "columns" in said:
        out.append(f"blocks of {said.pop('rows')} × {said.pop('columns')}")
    for name, value in said.items():
        if isinstance(value, bool) or value is None:
            out.append(name if value else f"no {name}")
        else:
            out.append(f"{name} {value}")
    return out


def _several(group: Mapping[str, Any]) -> str:
    """The modules of a group: `q_proj`, `k_proj` and `lm_head` are `q,k_proj, lm_head`."""
    ends: dict[str, list[str]] = {}
    for name in map(printable, group["names"][:MOST_NAMES]):
        head, _, tail = name.rpartition("_")
        whole = not head or "*" in name
        ends.setdefault(f"={name}" if whole else tail, []).append(name if whole else head)
    shown = [
        heads[0] if tail.startswith("=") else f"{','.join(heads)}_{tail}"
        for tail, heads in ends.items()
    ]
    names = ", ".join(shown) + _more(len(group["names"]) - MOST_NAMES)
    return f"{names} ×{group['count']:,}" if group["count"] > 1 else names


def _more(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def _value(value: Any) -> str:
    """A value that is not a tensor as a person would write it; long ones and objects by kind."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    kind, held = next(iter(value.items()))
    match kind, held:
        case "call", [[module, name], arguments]:
            plain = all(isinstance(a, (int, float, str)) for a in arguments)
            return f"{module}.{name}({', '.join(map(json.dumps, arguments)) if plain and arguments else '...'})"  # noqa: E501
        case "name", [module, name]:
            return f"{module}.{name}"
        case (("bytes" | "bytearray"), str(text)):
            return f"{kind}, {size(len(text) * 3 // 4 - text.count('='))}"
        case (("dict" | "tuple" | "set" | "frozenset"), []):
            return {"dict": "{}", "tuple": "()"}.get(kind, f"{kind}()")
        case "id", _ if "is" in value:
            return _value(value["is"])
    return json.dumps(value)


def _beside_tensors(doc: Mapping[str, Any]) -> list[str]:
    """What else the checkpoint holds: where rules work, other tensors, the first of the values."""
    out = (
        [f"rules work on: {doc['at']}"]
        if doc["at"]
        else []
        if doc["at"] is not None
        else ["rules work on nothing here: no dict of tensors"]
    )
    if doc["carried"]["tensors"]:
        out.append(
            f"carried as they are: {plural(doc['carried']['tensors'], 'tensor')}, "
            f"{size(doc['carried']['bytes'])}"
        )
    items = [
        f"  {printable(paths, 200)} = {printable(_value(said['value']), 60)}"
        + f" and {said['distinct'] - 1:,} more" * (said["distinct"] > 1)
        for paths, said in doc["values"].items()
    ] or [
        f"  {i['path']} = {printable(_value(i['value']), 60)}"
        for i in sorted(doc["items"], key=lambda item: str(item["path"]).count("."))[:MOST_ITEMS]
    ]
    hidden = 0 if doc["values"] else len(doc["items"]) - len(items) + doc["items_more"]
    if items:
        out += [
            "values that are not tensors:",
            *items,
            *([f"  and {hidden:,} more"] if hidden else []),
        ]
    return ["", *out] if out else []


def _standing(layouts: Mapping[str, str]) -> str:
    where = " and ".join(f"{lineage}@{layout}" for lineage, layout in layouts.items())
    return f"nothing to do: the checkpoint is already in {where}" if where else "nothing to do"


@_answer
def plan(doc: Mapping[str, Any]) -> str:
    from ..planning.path import remarks

    asked, options = doc["question"], doc["options"]
    recuts = asked.get("chunks") is not None or asked.get("rewrite", False)
    if not doc["path"] and asked["output_format"] is None and not recuts:
        return _standing(doc["layouts"])
    path = ", then ".join(f"{s['lineage']} {s['from']} → {s['to']}" for s in doc["path"])
    if doc["source"]["format"] != options["format"] or not path:
        path = f"{path}{', then ' if path else ''}{doc['source']['format']} → {options['format']}"
    if options.get("chunks"):
        path += f", cut for {plural(options['chunks'], 'rank')}"
    elif asked.get("rewrite"):
        path += ", written anew"
    out = [f"{path}    {plural(len(doc['rules']), 'rule file')}"]
    out += remarks(
        [
            {**origin, "places": [place(path) for path in origin["places"]]}
            for origin in doc["origins"]
        ]
    )
    rows = [r for r in doc["rows"] if r["change"] != "unchanged"]
    present = [c for c in SYMBOLS if any(r["change"] == c for r in rows)]
    counts = {c: sum(r["count"] for r in rows if r["change"] == c) for c in present}
    if rows:
        legend = "   ".join(f"{SYMBOLS[c]} {c}" for c in present)
        hidden = f"   ({doc['unchanged']:,} unchanged not listed)" if doc["unchanged"] else ""
        out += ["", f"  {legend}{hidden}", ""]
    leg = None
    for row in rows:
        if row["leg"] != leg and len(doc["path"]) > 1:
            leg = row["leg"]
            out.append(f"{leg}:")
        out += _row(row)
    source, target = doc["source"], doc["target"]
    tally = [*(f"{n:,} {c}" for c, n in counts.items()), f"{doc['unchanged']:,} unchanged"]
    # of the kind that the sizes are of: another suffix behind `apply -o` makes another
    written = f"{doc['options']['format']} file"
    tensors = (
        f"{source['tensors']:,} → {plural(target['tensors'], 'tensor')}, {size(source['bytes'])} → "
        f"{size(target['bytes'])}"
    )
    free = f", {size(doc['free'])} free beside the source" if doc.get("free") is not None else ""
    out += [
        "",
        f"Plan: {', '.join(tally)}",
        f"      {tensors} in {plural(len(target['files']), written)}",
        (
            f"      reads {size(doc['bytes_read'])}, writes {size(doc['bytes_written'])}, peak "
            f"memory about {size(doc['peak_memory'])}{free}"
        ),
    ]
    if doc["side_files"]:
        out.append(f"      carried along: {', '.join(f['path'] for f in doc['side_files'])}")
    if doc["left_out"]:
        out.append(f"      left behind: {', '.join(doc['left_out'])}")
    out += [f"      {line}" for patched in doc["patched"] for line in _patched(patched)]
    if doc["params"]:
        out.append(
            "      params: " + ", ".join(f"{k}={json.dumps(v)}" for k, v in doc["params"].items())
        )
    for loss in doc["losses"]:
        why = f" ({loss['why']})" if loss["why"] else ""
        out.append(
            f"      loss ({loss['kind']}): rule {loss['rule']}: "
            f"{', '.join(map(_shown, loss['keys']))}{why}"
        )
    for check in doc["checks"]:
        whose = f"rule {check['rule']}" if check["rule"] else "in all parts that have them"
        out.append(f"      values are checked first: {check['kind']}, {check['count']:,}×, {whose}")
    out += [f"      note: {note}" for note in doc["notes"]]
    out += _way_back(doc["path"], doc["downgrade"], "      ")
    out += [f"      {line}" for line in (*_undo(doc), *stored(doc))]
    for found in doc.get("returns", ()):
        out.append(
            f"      encoded again: {found['codec']}, rule {found['rule']}: {found['returns']}"
        )
    return "\n".join(out)


def _patched(patched: Mapping[str, Any]) -> list[str]:
    """What an edge does to a side file, a line for each place."""
    what = {"added": " (new)", "removed": " (goes)"}.get(patched["change"], "")
    return [
        f"{patched['path']}{what}: {c['at']}: {_json(c, 'before')} → {_json(c, 'after')}"
        for c in patched["changes"]
    ]


def _json(change: Mapping[str, Any], side: str) -> str:
    return printable(json.dumps(change[side]), 60) if side in change else "nothing"


def _row(row: Mapping[str, Any]) -> list[str]:
    symbol, count = SYMBOLS[row["change"]], f"  ×{row['count']:,}" if row["count"] > 1 else ""
    sources = ("e.g. " if row.get("sample") else "") + ", ".join(map(_shown, row["from"]))
    # what a reader opens is the line
    by = f"     rule {row['rule']}, {place(row['at']).rpartition(':')[0]}"
    if row["to"] is None:
        return [
            f"{symbol:>2} {_shown(row['from'][0])}{count}"
            + (f"   {row['why']}" if row["why"] else ""),
            by,
        ]
    out = [f"{symbol:>2} {_shown(row['to'])}{count}  {short(row['spec'])}"]
    if row["change"] == "followed":
        return [f"   {out[0]}  {size(row['bytes'])}"]
    rounds = "  (rounds)" if row.get("lossy") else ""
    return [
        *out,
        f"     {' · '.join(row['ops'])} of {sources}{rounds}"
        if row["ops"]
        else f"     was {sources}",
        by,
    ]


def _way_back(
    steps: Sequence[Mapping[str, Any]], downgrade: Mapping[str, Any], indent: str = ""
) -> list[str]:
    """Whether the source can be had back by a downgrade; after a downgrade, by the upgrade."""
    word = "upgrade" if any(step["backwards"] for step in steps) else "downgrade"
    verdict = f"{indent}{word}: exact" if downgrade["exact"] else f"{indent}{word}: not exact"
    return [verdict, *(f"{indent}  because {reason}" for reason in downgrade["because"])]


def published(doc: Mapping[str, Any]) -> str:
    # figures of single tensors, as many as there are, are for JSON and `--report`
    report = doc["report"] and {**doc["report"], "tensors": []}
    return _published({**doc, "report": report})


@_answer
def _published(doc: Mapping[str, Any]) -> str:
    if doc["path"] is None:
        return f"{_standing(doc['layouts'])}; nothing was written"
    what = (
        f"{plural(doc['tensors'], 'tensor')}, "
        f"{size(sum(f['size'] for f in doc['files'].values()))} in "
        f"{plural(len(doc['files']), 'file')}"
    )
    if doc["bytes_shared"]:
        what += f", {size(doc['bytes_shared'])} of it shared with the source by the file system"
    back = _way_back(doc["steps"], doc["downgrade"])
    notes = [f"note: {note}" for note in doc["notes"]]
    return "\n".join(
        [
            f"published {doc['path']}   {what}   {back[0]}",
            *back[1:],
            *_undo(doc),
            *stored(doc),
            *_restored(doc.get("restored")),
            *_errors(doc["report"]),
            *notes,
        ]
    )


def _undo(doc: Mapping[str, Any]) -> list[str]:
    """What is kept, or was, of what the way back does not bring back."""
    found = doc.get("undo")
    if found is None or not found["tensors"]:
        return []
    where = "" if found["path"] is None else f" in {safe(found['path'])}"
    what = f"{plural(found['tensors'], 'tensor')}, {size(found['bytes'])}{where}"
    how = "exact" if found["exact"] else "exact for tensors, and not for what else is named above"
    if doc["question"]["backwards"]:
        return [f"undo: {what}, taken back bit for bit"]
    return [f"undo: {what}, with which a downgrade is {how}"]


# tensors that did not come back
_MOST_NAMED = 4


def _restored(found: Mapping[str, Any] | None) -> list[str]:
    """Which tensors that were made again came back bit for bit."""
    if found is None:
        return []
    count, equal = found["tensors"], found["equal"]
    again = plural(count, "tensor") + " made again"
    if equal == count:
        return [f"restored: {'all ' * (count > 1)}{again}, bit for bit"]
    if found["known"] == "nothing":
        return [f"restored: {again}; whether bit for bit cannot be told, for no hashes were kept"]
    if equal is None:
        why = "which cannot be told, for one file keeps one hash of all"
        return [f"restored: not all {again} came back bit for bit; {why}"]
    named = found["different"][:_MOST_NAMED]
    more = f" … and {count - equal - len(named):,} more" if count - equal > len(named) else ""
    others = ", ".join(map(printable, named)) + more
    return [f"restored: {equal:,} of {again}, bit for bit; not: {others}"]


def _errors(report: Mapping[str, Any] | None) -> list[str]:
    """What happened to the numbers, a line for each op of a rule."""
    if report is None:
        return []
    out = []
    for rule in report["rules"]:
        what = "exact"
        if not rule["exact"]:
            what, measured = "error not measured", rule["max_abs_error"] is not None
            if measured:
                what = _largest(rule, report["complete"])
            what += f", {rule['saturated']:,} saturated" + (
                f", {rule['underflowed']:,} underflowed" if measured else ""
            )
            if rule["non_finite"]:
                what += f", {rule['non_finite']:,} not finite"
        out.append(
            f"values: rule {rule['rule']}: {rule['op']} of {plural(rule['tensors'], 'tensor')}: "
            f"{what}"
        )
    return (
        out
        if report["complete"]
        else [
            *out,
            "values: of what this run computed; tensors of an earlier run are not included",
        ]
    )


def _largest(rule: Mapping[str, Any], complete: bool) -> str:
    """The largest errors of an op of a rule, and what part of the elements they are known of."""
    blocks, part = rule["op"] in IN_BLOCKS, rule["elements_measured"] < rule["elements"]
    # other ops leave out only what came out exactly
    least = "at least " if part and (blocks or not complete) else ""
    of = f"{rule['max_relative_error']:.3g} of the {'block' if blocks else 'tensor'}'s amax"
    sqnr = "" if rule["sqnr_db"] is None else f", SQNR {rule['sqnr_db']:.1f} dB"
    measured = (
        f" (measured on {rule['elements_measured']:,} of {plural(rule['elements'], 'element')})"
        if part
        else ""
    )
    return f"max error {least}{rule['max_abs_error']:.3g}, {of}{sqnr}{measured}"


def difference(doc: Mapping[str, Any]) -> str:
    beside = [*_unlooked(doc), *(f"note: {safe(note)}" for note in doc["notes"])]
    what = f"{plural(doc['tensors'], 'tensor')}, {size(doc['bytes'])}"
    if doc["equal"]:
        part = " in all that was compared" if doc["not_compared"] else ""
        return "\n".join([f"equal{part}: {what}, keys, specs and bytes", *beside])
    parts = {
        "only in A": "only_a",
        "only in B": "only_b",
        "with another spec": "specs",
        "with other bytes": "bytes_differ",
        "side files": "side_files",
        "other": "others",
    }
    tensors = f"tensors equal ({what}); " if doc["tensors_equal"] else ""
    out = [
        f"differ: {tensors}"
        + ", ".join(f"{len(doc[name]):,} {what}" for what, name in parts.items() if doc[name])
    ]
    for name, keys in (("only in A", doc["only_a"]), ("only in B", doc["only_b"])):
        out += [f"{name}: {line}" for line in capped(collapsed(keys))]
    alike: dict[tuple[str, str], list[str]] = {}
    for d in doc["specs"]:
        alike.setdefault((d["a"], d["b"]), []).append(d["key"])
    for (a, b), keys in alike.items():
        out += [
            f"spec differs: {line}: {safe(short(a))} and {safe(short(b))}"
            for line in capped(collapsed(keys))
        ]
    out += capped([_measured(d) for d in doc["bytes_differ"]])
    return "\n".join(
        [
            *out,
            *(f"differs: {safe(item)}" for item in (*doc["side_files"], *doc["others"])),
            *beside,
        ]
    )


def _unlooked(doc: Mapping[str, Any]) -> list[str]:
    """What a comparison did not look at, a line each."""
    return [f"not compared: {safe(one['what'])} ({one['why']})" for one in doc["not_compared"]]


def _measured(d: Mapping[str, Any]) -> str:
    measured = ""
    if d["max_abs_error"] is not None:
        sqnr = "" if d["sqnr_db"] is None else f", SQNR {d['sqnr_db']:.1f} dB"
        measured = f", max error {d['max_abs_error']:g}{sqnr}"
    return (
        f"bytes differ: {printable(d['key'])}: {plural(d['count'], 'element')}, the first at "
        f"{d['index']}{measured}"
    )


def announcement(found: Mapping[str, Any]) -> str:
    """What `verify` is about to do, and what it takes."""
    most = ""
    if found["largest"] is not None:
        most = (
            f" ({printable(found['largest'])} with what it is made of: "
            f"{size(found['largest_memory'])})"
        )
    seconds = "" if found["seconds"] is None else f", about {_duration(found['seconds'])}"
    several = found["processes"] > 1
    who = f"in {found['processes']} processes with" if several else "with"
    what = (
        f"{plural(found['tensors'], 'tensor')}, {size(found['bytes'])}, {who} "
        f"{plural(found['threads'], 'thread')}{' each' * several}"
    )
    memory = f"at most {size(found['memory'])} of memory{' in each' * several} for tensors"
    return f"verifying {what}: {memory}{most}{seconds}"


def _duration(seconds: float) -> str:
    return (
        f"{max(1, round(seconds))} s"
        if seconds < 120
        else f"{round(seconds / 60)} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


@_answer
def verification(doc: Mapping[str, Any]) -> str:
    notes = capped([f"near: {printable(d['key'])}: {d['what']}" for d in doc["near"]]) + _unlooked(
        doc
    )
    notes += [f"note: {note}" for note in doc["notes"]]
    what, part = f"{plural(doc['tensors'], 'tensor')}, {size(doc['bytes'])}", doc["sample"]
    if part is not None:
        looked = (
            f"{plural(part['tensors'], 'tensor')} and parts of {part['tensors_in_part']:,}, "
            f"{size(part['bytes'])}"
        )
        what = f"{looked}, of {what}, chosen by --sample {part['share']:.6g} --seed {part['seed']},"
    if doc["equal"]:
        how = (
            f"every byte equal except in {plural(len(doc['near']), 'tensor')}"
            if doc["near"]
            else "every byte equal"
        )
        verb = "verified" if part is None else "verified in part"
        return "\n".join(
            [f"{verb}: {what} recomputed from {doc['source']} on the eager path, {how}", *notes]
        )
    lines = capped([f"differs: {printable(d['key'])}: {d['what']}" for d in doc["differences"]])
    looked = "" if part is None else f" in {what} which were compared"
    return "\n".join(
        [
            (
                f"differs from what {doc['source']} gives: "
                f"{plural(len(doc['differences']), 'difference')}{looked}"
            ),
            *lines,
            *notes,
        ]
    )


@_answer
def history(doc: Mapping[str, Any]) -> str:
    if doc["kind"] == "lineages":
        return (
            "\n".join(line for lineage in doc["lineages"] for line in _lineage(lineage))
            or "no lineages found"
        )
    out = [
        f"{doc['path']}   "
        + (", ".join(f"{k}@{v}" for k, v in doc["standing"].items()) or "no layout is known")
    ]
    out += [line for lineage in doc["lineages"] for line in _lineage(lineage, doc["standing"])]
    out += ["applied, the oldest first:"] if doc["applied"] else []
    for entry in doc["applied"]:
        out.append(
            f"  {entry['lineage']} {entry['from']} → {entry['to']}   migrate {entry['tool']}   "
            f"from {entry['source'][:15]}…"
        )
        out += [f"    {rule['id']}   {rule['hash'][:15]}…" for rule in entry["rules"]]
        if pack := entry.get("pack"):
            named = " ".join(pack[word] for word in ("name", "version") if word in pack)
            out.append(
                "    not shipped with migrate: from "
                f"{'an installed pack, ' if named else 'a '}{named or pack['origin']}"
            )
        if entry["params"]:
            out.append(
                "    " + ", ".join(f"{k}={json.dumps(v)}" for k, v in entry["params"].items())
            )
        if entry.get("optimizer"):
            out.append(f"    optimizer state: {entry['optimizer']}")
        if entry.get("files"):
            out.append(f"    changed {', '.join(entry['files'])}")
        for word, what in (("kept", "stays"), ("absent", "is not made")):
            forms = [
                printable(one if isinstance(one, str) else one[0]) for one in entry.get(word) or ()
            ]
            out += [f"    {what} on a downgrade: {form}" for form in capped(forms)]
    return "\n".join([*out, *(f"note: {note}" for note in doc["notes"])])


def _lineage(lineage: Mapping[str, Any], standing: Mapping[str, str] | None = None) -> list[str]:
    """A table of a lineage's layouts; marked is the checkpoint's layout, or the current one."""
    rows = [[" ", "layout", "status", "title"]]
    for layout in lineage["layouts"]:
        here = (
            layout["status"] == "current"
            if standing is None
            else layout["name"] == standing.get(lineage["name"])
        )
        rows.append(["*" if here else " ", layout["name"], layout["status"], layout["title"]])
    head = (
        f"{lineage['name']}   {lineage['title']}   "
        f"({'ordered' if lineage['ordered'] else 'any way'})"
    )
    edges = [
        f"     {edge['from']} → {edge['to']}   {', '.join(map(_lineage_place, edge['files']))}"
        for edge in lineage["edges"]
    ]
    return [head, *columns(rows), *edges]
