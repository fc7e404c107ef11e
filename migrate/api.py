"""One function per verb. The command line calls only these; they print nothing and exit nowhere.

    inspect, plan       headers only
    apply, downgrade    plan, then run: gather, write, check, publish
    verify, diff        compare bytes
    history             read stamps and lineages
    lint                look at rule files
    test                run the tests of rule files

These four take state dicts and modules too.
`to`, `from_`, `rules`, `params` and `allow` mean the same everywhere: layouts to reach, layouts the
checkpoint is in, rule files or folders of lineages, values of parameters, and what is permitted
beyond the default.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from . import formats
from .core.diagnostics import fail, printable
from .core.memory import guarded
from .core.spelling import option
from .extra_state.age import States
from .planning.graph import Read
from .planning.optimizers import DROP
from .planning.optimizers import PARAM as OPTIMIZER
from .planning.plan import Plan
from .planning.question import (
    CHANGED_SOURCE,
    OUTPUT_FORMATS,
    Question,
    ask,
    asked_in,
    path_text,
    saved_plan,
)
from .planning.route import find_route, known_lineages, layouts_of, nearest_to
from .planning.sides import SideFiles
from .rules.catalog import explain as explain
from .rules.catalog import packs as packs
from .rules.catalog import schema as schema
from .rules.params import resolve
from .ruletests.run import test as test
from .running import history as stamps
from .running import limits
from .running.device import parse as parse_device
from .running.differences import (
    TENSORS_ONLY,
    Unlooked,
    beside,
    item_differences,
    not_compared,
    side_differences,
    spec_differences,
    unread_differences,
    unread_outcome,
)
from .running.prepare import (
    compose_for,
    is_folder,
    plan_for,
    side_reader,
    stamp_of,
    walk_for,
    without_optimizers,
)
from .running.rest import whole
from .running.sums import check_all
from .source.index import Source
from .source.pickle.encodings import PARAMETER

if TYPE_CHECKING:
    import torch

    from .core.spec import Spec

FORMAT_VERSION = "1.0"

Progress = Callable[[int, int], None]
PathLike = str | os.PathLike[str]
# what a saved plan holds of the question
_IN_PLAN = ("to", "from_", "rules", "params", "allow", "max_shard_size")
# a state dict or a module
Live: TypeAlias = "Mapping[str, Any] | torch.nn.Module"


@guarded
def inspect(
    path: PathLike | Live,
    *,
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    expand: bool = False,
    at: str | None = None,
) -> dict[str, Any]:
    """What the checkpoint holds and which layouts it fits, with evidence; from headers and extra
    states. `expand` lists every key.

    Of `params` there is one, `te_dtype_numbering`: what an integer means that Transformer Engine
    renumbered.
    """
    from .core.templates import collapse

    question = ask((), (), rules, params, allow, at=at)
    resolve({}, question.params, known=[PARAMETER])
    source = _opened("path", path, question, meta=True)
    try:
        index = source.index
        specs = {key: stored.spec for key, stored in index.tensors.items()}
        index_hash = index.hash()
        stamp, notes = stamps.read(source.history, index_hash)
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
        layouts = layouts_of(
            index, side_reader(source), question.rules, stamp.layouts, States(source)
        )
        return {
            "format_version": FORMAT_VERSION,
            "kind": "inspection",
            "path": source.path,
            "format": source.format,
            "index_hash": index_hash,
            "files": [
                {"name": name, "size": blob.size}
                for name, blob in zip(index.files, source.blobs, strict=True)
            ],
            "tensors": len(specs),
            "bytes": index.nbytes,
            **_counted(specs.values()),
            "layouts": layouts,
            "nearest": []
            if layouts
            else nearest_to(index, side_reader(source), question.rules, States(source)),
            "keys": keys,
            "side_files": [{"path": f.path, "size": f.size} for f in index.side_files],
            "left_out": list(index.left_out),
            "metadata": dict(index.metadata),
            **beside(index, question.params.get(PARAMETER)),
            "notes": [*index.notes, *notes],
        }
    finally:
        source.close()


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


@guarded
def plan(
    path: PathLike | Live,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str = limits.SHARD,
    single_file: bool | None = None,
    backwards: bool = False,
    at: str | None = None,
    output_format: str | None = None,
) -> Plan:
    """What a migration would do: every output name, shape, dtype, offset and problem, before a
    tensor is read.

    Raises all problems at once. `single_file` None means: like the source. `backwards` plans what
    `downgrade` would do. `at` is the dict of a nested checkpoint that rules work on,
    `output_format` "safetensors" or "torch"; without it like the source.
    """
    question = ask(
        to, from_, rules, params, allow, backwards=backwards, at=at, output_format=output_format
    )
    source = _opened("path", path, question, meta=True)
    try:
        return plan_for(
            source, question, is_folder(source, single_file), limits.size(max_shard_size)
        )
    finally:
        source.close()


@guarded
def apply(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GB",
    fsync: bool = True,
    resume: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
    inform: Callable[[dict[str, Any]], None] | None = None,
    at: str | None = None,
    output_format: str | None = None,
    dry_run: bool = False,
    source: PathLike | None = None,
) -> dict[str, Any]:
    """Migrates a checkpoint into `out`, which then is whole; on any error it is absent. Answers
    with what was published.

    `device` is "cpu", "cuda", or "cuda:all" (also for ops whose bits differ there). The answer's
    `report` has the errors of what was computed. A checkpoint that is where it shall go already is
    left alone: the answer's `path` is then None and nothing is written. `path` may be a saved plan
    (a file ending in .json that is not an index): it is planned again and refused (M903) unless the
    digest is the same and the files of the checkpoint have the size and the time of modification
    that the plan says. `source` runs it on a copy, whose times may be others, and
    `allow={"changed-source"}` on any files that hold the same tensors. A state dict (a mapping) or
    a module is written to `out`, or, without `out`, migrated in memory: the answer is then the new
    state dict, tied tensors still tied, and `inform` is called with what else there is to say:
    `steps`, `layouts`, `params`, `losses`, `notes`, `warnings` and `report`, as the answer of a run
    into files has them. With `dry_run` the answer is the document of the plan, which `plan` makes
    too, and nothing is written; `out` may then be left out.
    """
    from .live.module import is_module, state
    from .running.job import write

    live = isinstance(path, Mapping) or is_module(path)
    saved = None if live else saved_plan(path_text("path", path))
    question = ask(
        to,
        from_,
        rules,
        params,
        allow,
        at=at,
        output_format=output_format,
        planned=saved is not None,
    )
    if out is None and live and not dry_run:
        from .live.statedict import migrated

        tensors = path if isinstance(path, Mapping) else state(path)
        return migrated(tensors, question, limits.memory(max_memory), parse_device(device), inform)
    if inform is not None:
        fail(
            "M115",
            "`inform` is for a state dict that is migrated in memory",
            help="the answer of a run into files says it all",
        )
    copy = None if source is None else path_text("source", source)
    changed = CHANGED_SOURCE in question.allow
    if saved is not None:
        if (
            replace(question, allow=question.allow - {CHANGED_SOURCE}) != Question()
            or max_shard_size is not None
        ):
            beside = (
                f"beside it stand {option('source')}, and of what is allowed "
                f"{option('allow', CHANGED_SOURCE)} alone"
            )
            fail(
                "M115",
                f"a saved plan is run as it is; {', '.join(map(option, _IN_PLAN))} are part of it",
                help=beside,
            )
        question = asked_in(saved)
        path, max_shard_size = copy or saved["source"]["path"], saved["options"]["max_shard_size"]
    elif copy is not None:
        fail(
            "M115",
            f"{option('source')} says where a copy of a saved plan's checkpoint lies, and this is "
            "no saved plan",
        )
    return write(
        lambda: _opened("path", path, question, wrapped=False),
        out,
        question,
        max_shard_size=max_shard_size,
        threads=threads,
        max_memory=max_memory,
        fsync=fsync,
        resume=resume,
        device=device,
        progress=progress,
        saved=saved,
        changed=changed,
        dry_run=dry_run,
    )


@guarded
def downgrade(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GB",
    fsync: bool = True,
    resume: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
    at: str | None = None,
    output_format: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Takes a checkpoint, state dict or module back to an older layout; without `to` and `rules`,
    to before the last run in its stamp.

    The answer and all arguments are those of `apply`.
    """
    from .running.job import write

    question = ask(
        to, from_, rules, params, allow, backwards=True, at=at, output_format=output_format
    )
    return write(
        lambda: _opened("path", path, question, wrapped=False),
        out,
        question,
        max_shard_size=max_shard_size,
        threads=threads,
        max_memory=max_memory,
        fsync=fsync,
        resume=resume,
        device=device,
        progress=progress,
        dry_run=dry_run,
    )


@guarded
def verify(
    out: PathLike,
    *,
    source: PathLike,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    threads: int = 2,
    max_memory: int | str | None = None,
    sample: float | str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    inform: Callable[[dict[str, Any]], None] | None = None,
    at: str | None = None,
) -> dict[str, Any]:
    """Recomputes every output tensor from `source` through the eager path and compares bytes with
    `out`.

    Which edges were applied is taken from the stamp of `out`, unless `to` or `rules` says it.
    `not_compared` in the answer lists what was not looked at. Tensors are held whole with all that
    they are made of: M919 before anything is read where one takes more than `max_memory`; without
    it, two are made at a time as long as they take no more than 1 GB or the largest alone.
    `sample`, as "5%", looks at that part of the tensors and of the rows of large ones, chosen by
    `seed`. `inform` is called before the work begins, with `tensors`, `bytes`, `threads`, `memory`
    (the most bytes held at once), `largest` (a key, None without tensors), and `seconds` (about how
    long it takes, measured on a small part; None where that is too little to tell).
    """
    from .running import forms, spotcheck
    from .running.verify import Recomputation

    limits.check_threads(threads)
    budget = None if max_memory is None else limits.memory(max_memory)
    share = None if sample is None else spotcheck.share_of(sample)
    if seed is not None and share is None:
        fail(
            "M115",
            "a seed chooses a sample, and none is asked for",
            help=f"give {option('sample', '5%')} too, or leave {option('seed')} out",
        )
    question = ask(to, from_, rules, params, allow, at=at)
    question = replace(question, allow=question.allow | {"lossy", "drop", "delayed-scaling"})
    opened, made = _opened("source", source, question), _opened("out", out, question)
    try:
        index_hash = made.index.hash()
        stamp, notes = stamps.read(made.history, index_hash)
        applied = _applied_after(opened, stamp)
        if (
            not (applied or question.to or question.files)
            and made.history is not None
            and index_hash == opened.index.hash()
        ):
            # the same tensors in another format
            question = replace(question, output_format=OUTPUT_FORMATS[0])
        if not (question.to or question.files or applied or question.output_format):
            missing = (
                f"no stamp in {printable(made.path)} says that it was made from "
                f"{printable(opened.path)}"
            )
            if made.history is None:
                missing = (
                    f"the output {printable(made.path)} has no stamp that says what was applied"
                )
            fail(
                "M115",
                missing,
                notes=tuple(notes),
                help=f"give {option('to', 'LINEAGE@LAYOUT')} or {option('rules', 'FILE')}",
            )
        if any(entry.get("optimizer") == "dropped" for entry in applied):
            question = replace(question, params={**question.params, OPTIMIZER: DROP})
        before, (opened, _) = stamp_of(opened)[0], without_optimizers(opened, question)
        route = find_route(
            opened.index, side_reader(opened), before, question, applied, States(opened)
        )
        notes += [*route.remarks, *(d.message for d in route.warnings if d.code == "M518")]
        walk = walk_for(opened, route, os.path.isdir(made.path))
        composition = compose_for(opened, route, question, walk, programs=True, prove=False)
        differences = spec_differences(composition, made)
        wrong = {d["key"] for d in differences}
        programs = {
            key: program for key, program in composition.programs.items() if key not in wrong
        }
        if made.index.tree is not None:
            programs.update((key, Read(key)) for key in opened.index.passed_through)
        both = whole(opened), whole(made)
        chosen = None if share is None else spotcheck.choose(programs, *both, share, seed)
        work = Recomputation(programs, *both, budget, chosen)
        if inform is not None:
            inform(work.announced(threads, spotcheck.estimate(work, threads)))
        if chosen is None:
            for one in (opened, made):
                check_all(one)
        near: list[dict[str, str]] = []
        for found in work.run(threads, progress):
            first = "" if found.index is None else f", first at {list(found.index)}"
            (near if found.what == "near" else differences).append(
                {"key": found.key, "what": f"{found.detail}{first}"}
            )
        unread, unlooked = unread_outcome(opened, made, "opaque" in question.allow)
        if chosen is not None:
            unlooked += spotcheck.unlooked(
                chosen, programs, both[1], any(one.index.sums() for one in both)
            )
        differences += side_differences(opened, made, walk.sides) + unread
        differences += item_differences(opened, made, bool(route.legs)) + forms.made_differences(
            opened, composition, made
        )
        opened.check_unchanged()
        return {
            "format_version": FORMAT_VERSION,
            "kind": "verification",
            "path": made.path,
            "source": opened.path,
            "equal": not differences,
            "tensors": len(composition.graph.outputs),
            "bytes": made.index.nbytes,
            "memory": work.memory(threads),
            "sample": None if chosen is None else chosen.to_json(both[1]),
            "differences": differences,
            "near": near,
            "not_compared": [one.to_json() for one in unlooked],
            "notes": notes,
        }
    finally:
        opened.close()
        made.close()


@guarded
def diff(
    a: PathLike,
    b: PathLike,
    *,
    allow: Iterable[str] = (),
    progress: Progress | None = None,
    at: str | None = None,
    tensors_only: bool = False,
) -> dict[str, Any]:
    """Where two checkpoints differ: keys, specs, element bytes, side files, values. Stamps and
    header spacing do not count.

    `not_compared` in the answer lists what was not looked at. `tensors_only` looks at tensors and
    at nothing beside them.
    """
    from .running import forms
    from .running.diff import diff as compare

    question = ask((), (), (), None, allow, at=at)
    one, other = _opened("a", a, question), _opened("b", b, question)
    try:
        found = compare(whole(one), whole(other), progress=progress)
        side: list[dict[str, str]] = []
        others: list[dict[str, str]] = []
        notes: list[str] = []
        if tensors_only:
            unlooked = [Unlooked(what, "only tensors were asked for") for what in TENSORS_ONLY]
        else:
            unread, notes = unread_differences(one, other)
            side = side_differences(one, other, SideFiles(side_reader(one)))
            others = [*item_differences(one, other), *forms.differences(one, other), *unread]
            unlooked = not_compared(one, other)
        return {
            "format_version": FORMAT_VERSION,
            "kind": "difference",
            "a": one.path,
            "b": other.path,
            "equal": found.equal and not (side or others),
            "tensors_equal": found.equal,
            "tensors": len(one.index.tensors),
            "bytes": one.index.nbytes,
            "only_a": list(found.only_a),
            "only_b": list(found.only_b),
            "specs": [{"key": k, "a": str(x), "b": str(y)} for k, x, y in found.specs],
            "bytes_differ": [
                {
                    "key": d.key,
                    "index": list(d.index),
                    "count": d.count,
                    "max_abs_error": _number(d.max_abs_error),
                    "sqnr_db": _number(d.sqnr_db),
                }
                for d in found.bytes
            ],
            "side_files": [d["what"] for d in side],
            "others": [d["what"] for d in others],
            "not_compared": [one.to_json() for one in unlooked],
            "notes": notes,
        }
    finally:
        one.close()
        other.close()


def _number(value: float | None) -> float | None:
    """A float that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


@guarded
def history(
    path: PathLike | None = None,
    *,
    lineage: str | None = None,
    rules: Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
) -> dict[str, Any]:
    """What the stamp of a checkpoint says was applied; without a path, the known lineages with
    layouts and edges.
    """
    question = ask((), (), rules, None, allow, at=at)
    if path is None:
        return {
            "format_version": FORMAT_VERSION,
            "kind": "lineages",
            "lineages": known_lineages(question.rules, lineage),
        }
    source = _opened("path", path, question)
    try:
        index_hash = source.index.hash()
        stamp, notes = stamps.read(source.history, index_hash)
        if lineage is not None and lineage not in {
            *stamp.layouts,
            *(e["lineage"] for e in stamp.applied),
        }:
            known_lineages(question.rules, lineage)  # M507 if there is none of this name
        found = layouts_of(
            source.index, side_reader(source), question.rules, stamp.layouts, States(source)
        )
        standing = {
            entry["lineage"]: entry["layout"]
            for entry in found
            if lineage in (None, entry["lineage"])
        }
        applied = [dict(e) for e in stamp.applied if lineage in (None, e["lineage"])]
        return {
            "format_version": FORMAT_VERSION,
            "kind": "history",
            "path": source.path,
            "output": index_hash,
            "layouts": dict(stamp.layouts),
            "standing": standing,
            "lineages": [row for name in standing for row in known_lineages(question.rules, name)],
            "applied": applied,
            "notes": notes
            if source.history is not None
            else ["no stamp: nothing was applied by migrate"],
        }
    finally:
        source.close()


@guarded
def lint(
    paths: Iterable[PathLike] = (),
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    index: PathLike | None = None,
    allow: Iterable[str] = (),
    at: str | None = None,
) -> dict[str, Any]:
    """What can be said against rule files and layouts, by line; without `paths`, those in `./rules`
    or those that are shipped.

    `select` and `ignore` hold codes or names of findings. `index` is a checkpoint whose headers the
    rules are held against, `at` the dict in it that they work on.
    The answer's `exit` is 0, 1 where something is found, and 2 where a file cannot be loaded.
    """
    from .lints.findings import lint as find

    given = (paths,) if isinstance(paths, (str, os.PathLike)) else tuple(paths)
    places = [path_text("paths", p) for p in given]
    codes = [(word,) if isinstance(word, str) else tuple(word) for word in (select, ignore)]
    source = None if index is None else _opened("index", index, ask((), (), (), None, allow, at=at))
    try:
        headers = None if source is None else source.index
        found = find(
            places,
            codes[0],
            codes[1],
            headers,
            side_reader(source) if source is not None else lambda name: None,
        )
    finally:
        if source is not None:
            source.close()
    broken = any(d.severity == "error" for d in found.problems)
    diagnostics = [*found.problems, *found.findings]
    return {
        "format_version": FORMAT_VERSION,
        "kind": "lint",
        "exit": 2 if broken else 1 if diagnostics else 0,
        "files": list(found.files),
        "suppressed": found.suppressed,
        "diagnostics": [d.to_json() for d in diagnostics],
    }


def _opened(
    name: str,
    path: PathLike | Live,
    question: Question,
    *,
    meta: bool = False,
    wrapped: bool = True,
) -> Source:
    """A checkpoint on disk, a state dict or a module; `meta` and `wrapped` say what of the latter
    two is taken.
    """
    if not isinstance(path, (str, os.PathLike)):
        from .live.module import is_module, opened

        if isinstance(path, Mapping) or is_module(path):
            return opened(path, meta=meta, wrapped=wrapped)
    return formats.open(path_text(name, path), "links" in question.allow, question.at)


def _applied_after(source: Source, stamp: stamps.Stamp) -> Sequence[Mapping[str, Any]]:
    """The edges that the stamp of an output has beyond its source's: those that made the one of the
    other.
    """
    index_hash = source.index.hash()
    for position, entry in enumerate(stamp.applied):
        if entry["source"] == index_hash:
            return stamp.applied[position:]
    return ()
