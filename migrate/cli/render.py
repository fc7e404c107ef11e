"""Text is rendered from the JSON documents; nothing here knows more than they say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32"}
SYMBOLS = {
    "renamed": "~", "merged": "><", "split": "<>", "rearranged": "%", "computed": "*", "added": "+", "dropped": "-", "redundant": "-",
    "unchanged": "=",
}  # fmt: skip


def emit(document: Mapping[str, Any], form: str, text: str) -> None:
    """Writes the answer to stdout."""
    click.echo(json.dumps(document, indent=1, ensure_ascii=False) if form == "json" else text)


def size(nbytes: float) -> str:
    """Bytes in decimal units: 16.06 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return ""


def short(spec: str) -> str:
    """`bfloat16 [4, 4]` as `bf16 [4, 4]`."""
    dtype, _, shape = spec.partition(" ")
    return f"{SHORT.get(dtype, dtype)} {shape}"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Left-aligned columns."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [(indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows]


def inspection(doc: Mapping[str, Any]) -> str:
    out = [
        f"{doc['path']}   {doc['format']}, {plural(len(doc['files']), 'file')}, {plural(doc['tensors'], 'tensor')}, {size(doc['bytes'])}"
        "   (headers only, no tensor read)"
    ]
    for layout in doc["layouts"]:
        out.append(f"layout   {layout['lineage']}@{layout['layout']}")
        out += [f"           {sign}" for sign in layout["evidence"]]
        if layout.get("note"):
            out.append(f"           note: {layout['note']}")
    if not doc["layouts"]:
        out.append("layout   none of the known ones")
    out += [f"note     {note}" for note in doc["notes"]]
    out.append("")
    out += columns([[k["keys"], f"×{k['count']}" if k["count"] > 1 else "", short(k["spec"]), size(k["bytes"])] for k in doc["keys"]])
    if doc["side_files"]:
        out += ["", f"carried along: {', '.join(f['path'] for f in doc['side_files'])}"]
    if doc["left_out"]:
        out += [f"left behind:   {', '.join(doc['left_out'])}"]
    return "\n".join(out)


def plan(doc: Mapping[str, Any], expand: bool = False) -> str:
    path = ", then ".join(f"{s['lineage']} {s['from']} → {s['to']}" for s in doc["path"]) or "nothing to do"
    out = [f"{path}    {plural(len(doc['rules']), 'rule file')}"]
    rows = [r for r in doc["rows"] if r["change"] != "unchanged" or expand]
    present = [c for c in SYMBOLS if any(r["change"] == c for r in rows)]
    if rows:
        legend = "   ".join(f"{SYMBOLS[c]} {c}" for c in present)
        out += ["", f"  {legend}   ({doc['unchanged']:,} unchanged are not listed)", ""]
    leg = None
    for row in rows:
        if row["leg"] != leg and len(doc["path"]) > 1:
            leg = row["leg"]
            out.append(f"{leg}")
        symbol = SYMBOLS[row["change"]]
        count = f"  ×{row['count']}" if row["count"] > 1 else ""
        if row["to"] is None:
            out.append(f"{symbol:>2} {row['from'][0]}{count}    {row['why']}".rstrip())
        else:
            out.append(f"{symbol:>2} {row['to']}{count}  {short(row['spec'])}")
            ops = f"{' · '.join(row['ops'])} of " if row["ops"] else "was "
            out.append(f"     {ops}{', '.join(row['from'])}")
        out.append(f"     {row['rule']}   {row['at']}")
    source, target = doc["source"], doc["target"]
    counts = {c: sum(r["count"] for r in rows if r["change"] == c) for c in present}
    summary = ", ".join(f"{n:,} {c}" for c, n in counts.items())
    out += [
        "",
        f"Plan: {summary + ', ' if summary else ''}{doc['unchanged']:,} unchanged.",
        f"      {source['tensors']:,} → {target['tensors']:,} tensors, {size(source['bytes'])} → {size(target['bytes'])}"
        f" in {plural(len(target['files']), 'file')}; reads {size(doc['bytes_read'])}, writes {size(doc['bytes_written'])}",
        f"      peak memory about {size(doc['peak_memory'])}"
        + (f", {size(doc['free'])} free at the target" if doc.get("free") is not None else ""),
    ]
    if doc["params"]:
        out.append("      params: " + ", ".join(f"{k}={json.dumps(v)}" for k, v in doc["params"].items()))
    for loss in doc["losses"]:
        out.append(
            f"      loss ({loss['kind']}): rule {loss['rule']}: {', '.join(loss['keys'])}" + (f" ({loss['why']})" if loss["why"] else "")
        )
    for check in doc["checks"]:
        out.append(f"      checked while running: {check['kind']}, {check['count']}x, rule {check['rule']}")
    out += [f"      note: {note}" for note in doc["notes"]]
    downgrade = doc["downgrade"]
    out.append("      downgrade: exact" if downgrade["exact"] else "      downgrade: not exact")
    out += [f"        because {reason}" for reason in downgrade["because"]]
    return "\n".join(out)


def difference(doc: Mapping[str, Any]) -> str:
    if doc["equal"]:
        return f"equal: {plural(doc['tensors'], 'tensor')}, {size(doc['bytes'])}, keys, specs and bytes"
    out = []
    for name, keys in (("only in A", doc["only_a"]), ("only in B", doc["only_b"])):
        out += [f"{name}: {key}" for key in keys]
    out += [f"spec differs: {d['key']}: {short(d['a'])} and {short(d['b'])}" for d in doc["specs"]]
    for d in doc["bytes_differ"]:
        measured = ""
        if d.get("max_abs_error") is not None:
            sqnr = "" if d.get("sqnr_db") is None else f", SQNR {d['sqnr_db']:.1f} dB"
            measured = f", max error {d['max_abs_error']:g}{sqnr}"
        out.append(f"bytes differ: {d['key']}: first at {d['index']}, {d['count']:,} elements{measured}")
    out += [f"differs: {item}" for item in doc.get("others", [])]
    return "\n".join(out)


def verification(doc: Mapping[str, Any]) -> str:
    if doc["equal"]:
        return f"verified: {plural(doc['tensors'], 'tensor')} recomputed from {doc['source']} on the eager path, every byte equal ({size(doc['bytes'])})"
    return "\n".join(f"differs: {d['key']}: {d['what']}" for d in doc["differences"])


def history(doc: Mapping[str, Any]) -> str:
    if doc["kind"] == "lineages":
        out = []
        for lineage in doc["lineages"]:
            out.append(f"{lineage['name']}   {lineage['title']}   ({'ordered' if lineage['ordered'] else 'any way'})")
            for layout in lineage["layouts"]:
                note = f"   {layout['status']}" if layout["status"] != "current" else ""
                out.append(f"  {layout['name']:<10} {layout['title']}{note}")
            for edge in lineage["edges"]:
                out.append(f"    {edge['from']} -> {edge['to']}   {', '.join(edge['files'])}")
        return "\n".join(out) if out else "no lineages found"
    out = [f"{doc['path']}   " + (", ".join(f"{k}@{v}" for k, v in doc["layouts"].items()) or "no stamp")]
    for entry in doc["applied"]:
        out.append(f"  {entry['lineage']} {entry['from']} → {entry['to']}   migrate {entry['tool']}   from {entry['source'][:15]}…")
        out += [f"    {rule['id']}   {rule['hash'][:15]}…" for rule in entry["rules"]]
        if entry["params"]:
            out.append("    " + ", ".join(f"{k}={json.dumps(v)}" for k, v in entry["params"].items()))
    out += [f"note: {note}" for note in doc["notes"]]
    return "\n".join(out)
