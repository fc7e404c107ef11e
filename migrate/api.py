"""One function per verb. The command line calls only these; they print nothing and exit nowhere.

    inspect, plan       headers only
    apply, downgrade    plan, then run: gather, write, check, publish
    verify, diff        compare bytes
    history             read stamps and lineages

`to`, `from_`, `rules`, `params` and `allow` mean the same everywhere: layouts to reach, layouts the checkpoint is in,
rule files or folders of lineages, values of parameters, and what is permitted beyond the default.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__, formats
from .core.diagnostics import Report, fail, listed
from .formats import memory, parse_size
from .planning.compose import Composition, compose
from .planning.plan import Plan, document
from .planning.question import Question, ask, asked_in, saved_plan
from .planning.route import Route, find_route, known_lineages, layouts_of
from .running import history as stamps
from .source.index import Source, specs_hash

if TYPE_CHECKING:
    from .planning.graph import Tensor

FORMAT_VERSION = "1.0"
DEFAULT_SHARD = "5GB"

Progress = Callable[[int, int], None]
PathLike = str | os.PathLike[str]


def inspect(path: PathLike, *, rules: Iterable[PathLike] = (), allow: Iterable[str] = (), expand: bool = False) -> dict[str, Any]:
    """What the checkpoint holds and which layouts it fits, with evidence; from headers only. `expand` lists every key."""
    from .core.templates import collapse

    source = formats.open(path, "links" in set(allow))
    try:
        index = source.index
        specs = {key: stored.spec for key, stored in index.tensors.items()}
        index_hash = index.hash()
        stamp, notes = stamps.read(source.history, index_hash)
        if expand:
            keys = [{"keys": k, "count": 1, "spec": str(s), "bytes": s.nbytes} for k, s in specs.items()]
        else:
            keys = [
                {"keys": c.text, "count": c.count, "spec": str(specs[c.sample]), "bytes": c.count * specs[c.sample].nbytes}
                for c in collapse(list(specs), specs.__getitem__)
            ]
        return {
            "format_version": FORMAT_VERSION,
            "kind": "inspection",
            "path": source.path,
            "format": source.format,
            "index_hash": index_hash,
            "files": [{"name": name, "size": blob.size} for name, blob in zip(index.files, source.blobs, strict=True)],
            "tensors": len(specs),
            "bytes": index.nbytes,
            "layouts": layouts_of(index, _side_reader(source), [str(r) for r in rules], stamp.layouts),
            "keys": keys,
            "side_files": [{"path": f.path, "size": f.size} for f in index.side_files],
            "left_out": list(index.left_out),
            "metadata": dict(index.metadata),
            "notes": notes,
        }
    finally:
        source.close()


def plan(
    path: PathLike,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str = DEFAULT_SHARD,
    single_file: bool | None = None,
) -> Plan:
    """What a migration would do: every output name, shape, dtype, offset and problem, before a tensor is read.

    Raises all problems at once. `single_file` None means: like the source.
    """
    question = ask(to, from_, rules, params, allow, backwards=False)
    source = formats.open(path, "links" in question.allow)
    try:
        return _plan(source, question, _shape(source, single_file), parse_size(max_shard_size))
    finally:
        source.close()


def apply(
    path: PathLike | Mapping[str, Any],
    out: PathLike | None = None,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GiB",
    fsync: bool = True,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Migrates a checkpoint into `out`, which then is whole; on any error it is absent. Answers with what was published.

    `path` may be a saved plan (a file ending in .json that is not an index): it is planned again and refused (M903)
    unless the digest is the same. A state dict (a mapping) is written to `out`, or, without `out`, migrated in memory: the
    answer is then the new state dict, tied tensors still tied.
    """
    question = ask(to, from_, rules, params, allow, backwards=False)
    if out is None:
        if not isinstance(path, Mapping):
            fail("M115", "apply needs a place for its output", help="-o OUT, or out= in Python")
        return _apply_in_memory(path, question, parse_size(max_memory))
    saved = None if isinstance(path, Mapping) else saved_plan(path)
    if saved is not None:
        if question != Question() or max_shard_size is not None:
            fail("M115", "a saved plan is run as it is; --to, --from, --rules, --set, --allow and --max-shard-size are part of it")
        question = asked_in(saved)
        path = saved["source"]["path"]
        max_shard_size = saved["options"]["max_shard_size"]
    return _run(path, Path(out), question, max_shard_size, threads, max_memory, fsync, resume, progress, saved)


def downgrade(
    path: PathLike,
    out: PathLike,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GiB",
    fsync: bool = True,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Takes a checkpoint back to an older layout; without `to` and `rules`, undoes what its stamp says was applied last."""
    question = ask(to, from_, rules, params, allow, backwards=True)
    return _run(path, Path(out), question, max_shard_size, threads, max_memory, fsync, resume, progress, None)


def verify(
    out: PathLike,
    *,
    source: PathLike,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
) -> dict[str, Any]:
    """Recomputes every output tensor from `source` through the eager path and compares bytes with `out`.

    Which edges were applied is taken from the stamp of `out`, unless `to` or `rules` says it.
    """
    from .running.verify import recompute

    question = ask(to, from_, rules, params, {*allow, "lossy", "drop"}, backwards=False)
    links = "links" in question.allow
    opened, made = formats.open(source, links), formats.open(out, links)
    try:
        index_hash = made.index.hash()
        stamp, notes = stamps.read(made.history, index_hash)
        route = find_route(opened.index, _side_reader(opened), _stamp(opened)[0], question, applied=_applied_after(opened, stamp))
        composition = _compose(opened, route, question, programs=True, prove=False)
        differences = _spec_differences(composition, made)
        wrong = {d["key"] for d in differences}
        programs = {key: program for key, program in composition.programs.items() if key not in wrong}
        for found in recompute(programs, opened, made):
            at = "" if found.index is None else f", first at {list(found.index)}"
            differences.append({"key": found.key, "what": f"{found.detail}{at}"})
        differences += _side_differences(opened, made)
        opened.check_unchanged()
        return {
            "format_version": FORMAT_VERSION,
            "kind": "verification",
            "path": made.path,
            "source": opened.path,
            "equal": not differences,
            "tensors": len(composition.graph.outputs),
            "bytes": made.index.nbytes,
            "differences": differences,
            "notes": notes,
        }
    finally:
        opened.close()
        made.close()


def diff(a: PathLike, b: PathLike, *, allow: Iterable[str] = ()) -> dict[str, Any]:
    """Where two checkpoints differ: keys, specs, element bytes, side files. Stamps and header spacing do not count."""
    from .running.diff import diff as compare

    links = "links" in set(allow)
    one, other = formats.open(a, links), formats.open(b, links)
    try:
        found = compare(one, other)
        others = [d["what"] for d in _side_differences(one, other)]
        equal = not (found.only_a or found.only_b or found.specs or found.bytes or others)
        return {
            "format_version": FORMAT_VERSION,
            "kind": "difference",
            "a": one.path,
            "b": other.path,
            "equal": equal,
            "tensors": len(one.index.tensors),
            "bytes": one.index.nbytes,
            "only_a": list(found.only_a),
            "only_b": list(found.only_b),
            "specs": [{"key": k, "a": str(x), "b": str(y)} for k, x, y in found.specs],
            "bytes_differ": [
                {"key": d.key, "index": list(d.index), "count": d.count, "max_abs_error": _number(d.max_abs_error), "sqnr_db": _number(d.sqnr_db)}
                for d in found.bytes
            ],
            "others": others,
        }
    finally:
        one.close()
        other.close()


def _number(value: float | None) -> float | None:
    """A float that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def history(path: PathLike | None = None, *, lineage: str | None = None, rules: Iterable[PathLike] = ()) -> dict[str, Any]:
    """What the stamp of a checkpoint says was applied; without a path, the known lineages with layouts and edges."""
    if path is None:
        return {"format_version": FORMAT_VERSION, "kind": "lineages", "lineages": known_lineages([str(r) for r in rules], lineage)}
    source = formats.open(path)
    try:
        stamp, notes = stamps.read(source.history, source.index.hash())
        applied = [dict(e) for e in stamp.applied if lineage in (None, e["lineage"])]
        return {
            "format_version": FORMAT_VERSION,
            "kind": "history",
            "path": source.path,
            "layouts": dict(stamp.layouts),
            "applied": applied,
            "notes": notes if source.history is not None else ["no stamp: nothing was applied by migrate"],
        }
    finally:
        source.close()


# ---- planning ---------------------------------------------------------------------------------------------------------


def _stamp(source: Source) -> tuple[stamps.Stamp, list[str]]:
    return stamps.read(source.history, source.index.hash())


def _side_reader(source: Source) -> Callable[[str], bytes | None]:
    present = {f.path for f in source.index.side_files}
    return lambda name: source.side_file(name) if name in present else None


def _shape(source: Source, single_file: bool | None) -> bool:
    """Whether the output is a folder."""
    return not single_file if single_file is not None else os.path.isdir(source.path) or source.path.endswith(".index.json")


def _compose(source: Source, route: Route, question: Question, *, programs: bool = False, prove: bool = True) -> Composition:
    from .running.checks import equal

    def same_bytes(key: str, present: Tensor, made: Tensor) -> bool:
        return equal(present, made, source)

    report = Report()
    composition = compose(source.index.tensors, route.legs, question.allow, same_bytes, report, programs=programs, prove=prove)
    report.check()
    return composition


def _plan(source: Source, question: Question, folder: bool, max_shard_size: int) -> Plan:
    index_hash = source.index.hash()
    stamp, notes = stamps.read(source.history, index_hash)
    route = find_route(source.index, _side_reader(source), stamp, question)
    composition = _compose(source, route, question)
    specs = {key: t.spec for key, t in composition.graph.outputs.items()}
    report = Report()
    route.check_output(composition.graph.outputs, _side_reader(source), report)
    report.check()
    entries = [{**entry, "tool": __version__, "source": index_hash} for entry in route.entries]
    text = stamps.write(stamp, route.layouts, entries, specs_hash(specs))
    notes += _unheld(source, question)
    target = formats.get("safetensors").describe(specs, folder=folder, max_shard_size=max_shard_size, metadata=source.index.metadata, stamp=text)
    body = document(
        tool=__version__,
        source={
            "path": os.path.abspath(source.path),
            "format": source.format,
            "index_hash": index_hash,
            "tensors": len(source.index.tensors),
            "bytes": source.index.nbytes,
            "files": list(source.index.files),
            "sizes": {key: stored.spec.nbytes for key, stored in source.index.tensors.items()},
        },
        composition=composition,
        rules=route.rules,
        params=route.params,
        allow=question.allow,
        target=target,
        options={"max_shard_size": max_shard_size, "folder": folder},
        side_files=[{"path": f.path, "size": f.size} for f in source.index.side_files] if folder else [],
        layouts=route.layouts,
        warnings=[d.to_json() for d in route.warnings],
    )
    body["notes"] += notes
    body["question"] = question.to_json()
    body["free"] = shutil.disk_usage(os.path.dirname(os.path.abspath(source.path)) or ".").free
    return Plan(body, composition, target)


def _unheld(source: Source, question: Question) -> list[str]:
    """Notes on what the target cannot hold: ties are written each, values that are no tensors need leave to go."""
    items = list(source.index.items)
    if items and "drop" not in question.allow:
        fail("M916", f"safetensors holds tensors only, not {listed(items)}", help="leave them out, or --allow drop")
    storages = [stored.storage for stored in source.index.tensors.values() if stored.storage is not None]
    ties = len(storages) - len(set(storages))
    return [f"dropped, because safetensors holds tensors only: {listed(items)}"] * bool(items) + [
        f"{ties} tensors share memory with another one; each is written"
    ] * bool(ties)


def _applied_after(source: Source, stamp: stamps.Stamp) -> Sequence[Mapping[str, Any]]:
    """The edges that the stamp of an output has beyond its source's: those that made the one of the other."""
    index_hash = source.index.hash()
    for position, entry in enumerate(stamp.applied):
        if entry["source"] == index_hash:
            return stamp.applied[position:]
    return ()


# ---- running ----------------------------------------------------------------------------------------------------------


def _run(
    path: PathLike | Mapping[str, Any],
    out: Path,
    question: Question,
    max_shard_size: int | str | None,
    threads: int,
    max_memory: int | str,
    fsync: bool,
    resume: bool,
    progress: Progress | None,
    saved: Mapping[str, Any] | None,
) -> dict[str, Any]:
    from .running.publish import check_place
    from .running.tiles import run

    shard = parse_size(DEFAULT_SHARD if max_shard_size is None else max_shard_size)
    source: Source
    if isinstance(path, Mapping):
        source = memory.open(path)
    else:
        source = formats.open(path, "links" in question.allow)
    try:
        check_place(out, source.path)
        folder = bool(saved["options"]["folder"]) if saved else not out.name.endswith(".safetensors")
        made = _plan(source, question, folder, shard)
        if saved is not None and made.digest != saved["digest"]:
            fail(
                "M903",
                f"the plan does not fit any more: its digest is {saved['digest'][:15]}…, now it is {made.digest[:15]}…",
                notes=tuple(_what_changed(saved, made.document)),
                help="plan again, and review the new plan",
            )
        side_files = [(f.path, source.side_file(f.path)) for f in source.index.side_files] if folder else []
        result = run(
            made.composition.graph.outputs,
            source,
            made.target,
            out,
            digest=made.digest,
            side_files=side_files,
            checks=made.composition.graph.checks,
            threads=threads,
            fsync=fsync,
            resume=resume,
            max_memory=parse_size(max_memory),
            progress=progress,
        )
        return {
            "format_version": FORMAT_VERSION,
            "kind": "published",
            "path": os.fspath(out),
            "source": source.path,
            "digest": made.digest,
            "tensors": len(made.composition.graph.outputs),
            "files": result.files,
            "bytes_read": result.bytes_read,
            "bytes_written": result.bytes_written,
            "layouts": made.document["layouts"],
            "losses": made.document["losses"],
            "downgrade": made.document["downgrade"],
            "notes": made.document["notes"],
        }
    finally:
        source.close()


def _what_changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    parts = {"source": "the checkpoint", "rules": "the rules", "params": "the params", "target": "the output's files", "decided": "values that decide keys"}
    for name, what in parts.items():
        one, other = saved.get(name), now.get(name)
        if name == "source":
            one, other = (one or {}).get("index_hash"), (other or {}).get("index_hash")
        if one != other:
            yield f"changed since: {what}"


def _spec_differences(composition: Composition, made: Source) -> list[dict[str, str]]:
    """Keys that are missing, too many, or of another spec than planned."""
    outputs, there = composition.graph.outputs, made.index.tensors
    out = [{"key": key, "what": "is not in the output"} for key in outputs if key not in there]
    out += [{"key": key, "what": "is in the output and nothing makes it"} for key in there if key not in outputs]
    for key, tensor in outputs.items():
        if key in there and there[key].spec != tensor.spec:
            out.append({"key": key, "what": f"is {there[key].spec}, planned was {tensor.spec}"})
    return out


def _side_differences(one: Source, other: Source) -> list[dict[str, str]]:
    """Side files that are not byte for byte the same, where both are folders."""
    a, b = ({f.path: f.size for f in s.index.side_files} for s in (one, other))
    if not (os.path.isdir(one.path) and os.path.isdir(other.path)):
        return []
    out = [{"key": name, "what": f"side file {name} is in one of them only"} for name in sorted(a.keys() ^ b.keys())]
    for name in sorted(a.keys() & b.keys()):
        if a[name] != b[name] or one.side_file(name) != other.side_file(name):
            out.append({"key": name, "what": f"side file {name} differs"})
    return out


def _apply_in_memory(tensors: Mapping[str, Any], question: Question, max_memory: int) -> dict[str, Any]:
    from .live.statedict import materialise

    source = memory.open(tensors)
    try:
        route = find_route(source.index, _side_reader(source), stamps.Stamp(), question)
        return materialise(_compose(source, route, question, prove=False).graph, source, max_memory)
    finally:
        source.close()
