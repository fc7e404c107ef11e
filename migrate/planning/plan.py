"""The plan: the graph's account for people and machines. It is read and reviewed, never executed.

What was reviewed is what runs because `apply plan.json` plans again and compares `digest`, which
covers everything that decides the output's bytes: the source's index hash, the path, rule ids and
hashes, params, allowances, the target's files and headers, and the conditions on values that
decided which keys come out. Where the source lies is not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import fail, option
from ..core.spec import BITS, total_bytes
from ..core.templates import collapse
from ..core.types import FORMAT_VERSION
from ..ops.base import ValueOp
from ..results import KeyReport, PlanReport
from ..source.blobs import StoredTensor, chunk_at
from ..source.grids import WrittenGrid
from ..source.target import OutputFile, Target
from .compose import Composition
from .graph import (
    BLOCKS,
    CHUNK,
    MEMOS,
    ComputedTensor,
    Kind,
    Tensor,
    ValueCheck,
    computations,
    kind_of,
)
from .rows import rows_of
from .sides import SideFiles

if TYPE_CHECKING:
    from .path import MigrationPath
    from .pathstate import PathState
    from .request import Request
    from .restoring import Expected, PartsFile

# what a process takes before it does anything, measured; what the libraries add
INTERPRETER, NUMPY, TORCH = 24 << 20, 10 << 20, 160 << 20
# a run's buffers, and the size from which it reads a matrix whole (running/geometry)
STAGES, FILL, WINDOW, WHOLE_MATRIX = 2 << 20, 1 << 20, 64 << 20, 4 << 20
SHORT_RUN = 2048
# what calls may remember of three quarters of the memory that a run has unless it is said
REMEMBERED = 10**9 * 3 // 4 // MEMOS


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned migration: `document` is the content of `plan.json`, the rest is what a run needs.

    `sides` are the side files of the output. `outputs` are all tensors that are written, including
    those that no rule sees, and `checks` the conditions on values.

    `parts` is what the output keeps to tell whether a way back returned each bit, `expected` what
    such a way back is compared with; None where nothing is decoded. An output that is one file
    keeps it in its stamp: `sealed` gives the target that has this hash in it.
    """

    document: Mapping[str, Any]
    composition: Composition
    target: Target
    sides: SideFiles
    outputs: Mapping[str, Tensor]
    checks: tuple[ValueCheck, ...]
    parts: PartsFile | None = None
    expected: Expected | None = None
    sealed: Callable[[str], Target] | None = None
    # what the way back does not bring back, where that is to be kept, and what it makes beside
    lost: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    # the grid that the output is cut for
    grid: WrittenGrid | None = None
    # the tensors that are read
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    # where the values of params are from: "given", a side file, the stamp, the tensors, a default
    param_sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def written(self) -> Mapping[str, Tensor]:
        """The tensors whose bytes are written: of tied ones that are held once, the first."""
        return {
            placed.key: self.outputs[placed.key]
            for file in self.target.files
            for placed in file.tensors
        }

    @property
    def digest(self) -> str:
        """The hash of everything that decides the output."""
        return str(self.document["digest"])

    def expanded(self, each: bool = True) -> Plan:
        """The plan with a row for each tensor, state of optimizers under its parameter; as it is
        unless `each`.
        """
        if not each:
            return self
        steps = self.composition.steps
        rows = [row for step, bound in steps for row in rows_of(step, bound, each=True)]
        return replace(self, document={**self.document, "rows": rows})

    def key(self, key: str) -> KeyReport:
        """What a key of the output is made of, and what becomes of one of the source: sources, ops,
        rules, shapes, losses. M115 for a key that is in neither.
        """
        from .one_key import report_of

        return report_of(self.composition, self.stored, self.outputs, key)

    @property
    def report(self) -> PlanReport:
        """The document with typed attributes."""
        return PlanReport.from_json(self.document)

    def to_json(self) -> str:
        """The text of a file that `apply` runs."""
        return json.dumps(self.document, indent=1) + "\n"


def _fixed_bytes(file: OutputFile) -> bytes:
    """What is known of a file without tensors and checksums: equal for equal plans."""
    if file.seal is None or not file.tensors:
        return file.header
    return file.header + file.seal([0] * len(file.tensors))


def document(
    request: Request,
    migration_path: MigrationPath,
    path_state: PathState,
    composition: Composition,
    target: Target,
    *,
    tool: str,
    source: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    options: Mapping[str, Any],
    side_files: Sequence[Mapping[str, Any]],
    left_out: Sequence[str],
    shared: Mapping[str, bytes],
    reference: Mapping[str, str],
) -> dict[str, Any]:
    """The plan as JSON. `source` has path, format, index_hash, tensors, bytes; `options` what
    `describe` was asked for. `shared` is that of the source's index, `reference` that of the
    source.
    """
    if reference and not target.folder:
        fail(
            "M115",
            f"{option('side')}: an output that is one file has no files beside it",
            help="name a folder as the output, or leave it out",
        )
    outputs = composition.graph.outputs
    path = steps_of(composition)
    files = [
        {
            "name": f.name,
            "size": f.size,
            "tensors": 0 if f.name in target.whole else len(f.tensors),
            "header_sha256": hashlib.sha256(_fixed_bytes(f)).hexdigest(),
        }
        for f in target.files
    ]
    decided = {key: went for _, bound in composition.steps for key, went in bound.decided.items()}
    binding = {
        "source": source["index_hash"],
        "path": path,
        "rules": list(migration_path.rules),
        "params": dict(path_state.params),
        "allow": sorted(request.allow),
        "layouts": dict(migration_path.layouts),
        "target": {
            "folder": target.folder,
            "files": files,
            "small": {n: hashlib.sha256(b).hexdigest() for n, b in target.small.items()},
        },
        "side_files": list(side_files),
        "patched": list(path_state.changes),
        "decided": decided,
        **({"undo": True} if request.undo else {}),
        **({"reference": dict(reference)} if reference else {}),
    }
    if values := {key: seen for _, b in composition.steps for key, seen in b.values.items()}:
        # there may be one for each tensor of a number format
        text = json.dumps(values, sort_keys=True).encode("utf-8", "surrogatepass")
        binding["values"] = hashlib.sha256(text).hexdigest()
    if shared:
        said = b"".join(
            f"{key}\0".encode("utf-8", "surrogatepass") + shared[key] + b"\0"
            for key in sorted(shared)
        )
        binding["shared"] = hashlib.sha256(said).hexdigest()
    digest = (
        "m1:"
        + hashlib.sha256(
            json.dumps(binding, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        ).hexdigest()
    )
    size = sum(f.size for f in target.files)
    read = size if target.whole else _bytes_read(outputs, stored)
    return {
        "format_version": FORMAT_VERSION,
        "kind": "plan",
        "digest": digest,
        "tool": tool,
        "source": dict(source),
        "path": path,
        "layouts": dict(migration_path.layouts),
        "rules": list(migration_path.rules),
        "origins": [dict(origin) for origin in migration_path.origins],
        "params": dict(path_state.params),
        "allow": sorted(request.allow),
        "options": dict(options),
        "rows": [row for step, bound in composition.steps for row in rows_of(step, bound)],
        "unchanged": _unchanged(composition),
        "target": {
            "folder": target.folder,
            "tensors": len(outputs),
            "bytes": size,
            "files": files,
            "small": sorted(target.small),
        },
        "side_files": list(side_files),
        **({"reference": dict(reference)} if reference else {}),
        "left_out": list(left_out),
        "patched": list(path_state.changes),
        "bytes_read": read,
        "bytes_written": size + sum(len(b) for b in target.small.values()),
        "peak_memory": peak_memory(outputs),
        "losses": losses_of(composition) if composition.losses else [],
        "checks": _checks(composition) if composition.graph.checks else [],
        "decided": decided,
        "notes": [note for _, bound in composition.steps for note in bound.notes],
        "downgrade": {"exact": not composition.inexact, "because": composition.inexact},
        "warnings": [d.to_json() for d in (*migration_path.warnings, *path_state.warnings)],
    }


def steps_of(composition: Composition) -> list[dict[str, Any]]:
    """The edges that are walked, in order."""
    return [
        {"lineage": step.lineage, "from": step.start, "to": step.goal, "backwards": step.backwards}
        for step, _ in composition.steps
    ]


def losses_of(composition: Composition) -> list[dict[str, Any]]:
    """What does not survive, by rule."""
    return [
        {
            "kind": x.kind,
            "rule": x.rule.name,
            "at": str(x.rule.span),
            "why": x.why,
            "keys": _texts(x.keys),
        }
        for x in composition.losses
    ]


def _unchanged(composition: Composition) -> int:
    """How many outputs are a source key untouched: same name, and no rule made it on any step."""
    keys = set(composition.graph.outputs)
    for _, bound in composition.steps:
        keys &= bound.tensors.keys() - {
            k for k, m in bound.provenance.items() if m.rule.steps or m.keys != (k,)
        }
        keys.difference_update(bound.followed)
    return len(keys)


def _texts(keys: Sequence[str], limit: int = 20) -> list[str]:
    texts = [f"{c.text} ×{c.count}" if c.count > 1 else c.text for c in collapse(list(keys))]
    return texts if len(texts) <= limit else [*texts[:limit], f"… and {len(texts) - limit} more"]


def _checks(composition: Composition) -> list[dict[str, Any]]:
    """The conditions on values the run will check, counted by rule and kind."""
    counts: dict[tuple[str, str], list[str]] = {}
    for check in composition.graph.checks:
        counts.setdefault((check.rule, check.kind), []).extend(check.keys[:1])
    return [
        {"rule": rule, "kind": kind, "count": len(keys), "sample": keys[0] if keys else ""}
        for (rule, kind), keys in counts.items()
    ]


def _bytes_read(outputs: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> int:
    tensors = [
        *outputs.values(),
        *(t for call in computations(outputs.values()) for t in call.inputs),
    ]
    seen = {
        source
        for tensor in tensors
        for source in tensor.sources
        if not isinstance(source, ComputedTensor)
    }
    return total_bytes(
        stored[s].spec if isinstance(s, str) else chunk_at(stored, s).spec for s in seen
    )


def peak_memory(outputs: Mapping[str, Tensor], threads: int = 2) -> int:
    """Estimated private bytes of the process that runs this: interpreter and libraries, buffers,
    moved matrices, computed tensors.
    """
    moved = largest = 0
    short = False
    computed = _computed(outputs.values())
    kinds: dict[int, tuple[int, int, bool]] = {}
    for tensor in outputs.values():
        kind = kinds.get(id(tensor.view))
        if kind is None:
            kind = kinds[id(tensor.view)] = _moved(tensor)
        moved, largest, short = moved + kind[0], max(largest, kind[1]), short or kind[2]
    libraries = (TORCH if computed.torch else 0) + (
        NUMPY if short or moved or computed.boxes or computed.whole else 0
    )
    return (
        INTERPRETER
        + libraries
        + threads * (STAGES + min(WINDOW, largest) + computed.boxes)
        + computed.whole
        + min(computed.remembered, REMEMBERED)
    )


class _Computed(NamedTuple):
    """The most that a thread takes for boxes of one computed tensor, that one takes which is made
    whole, and whether torch is loaded; what all calls would remember.
    """

    boxes: int = 0
    whole: int = 0
    torch: bool = False
    remembered: int = 0


def _computed(tensors: Iterable[Tensor]) -> _Computed:
    seen, known = set[int](), dict[tuple[Any, ...], Kind]()
    calls, remembered = set[int](), 0
    todo = list(tensors)
    while todo:
        for source in todo.pop().sources:
            if not isinstance(source, ComputedTensor) or id(source) in seen:
                continue
            seen.add(id(source))
            call = source.computation
            todo += call.inputs
            key = (
                id(call.op_call.args),
                source.output,
                source.spec,
                *[t.spec for t in call.inputs],
            )
            if key not in known:
                known[key] = kind_of(call, source.output, source.spec)
            if id(call) not in calls and known[key].regional:
                calls.add(id(call))
                remembered += known[key].op.remembers(known[key].args, known[key].specs)
    kinds = known.values()
    return _Computed(
        # of blocks more goes through a thread's buffer at once
        max(
            (
                max(CHUNK, k.least) + (BLOCKS if max(k.grain) > 1 else 0)
                for k in kinds
                if k.regional
            ),
            default=0,
        ),
        max((k.least for k in kinds if not k.regional), default=0),
        any(isinstance(k.op, ValueOp) and k.op.torch(k.args, k.specs) for k in kinds),
        remembered,
    )


def _moved(tensor: Tensor) -> tuple[int, int, bool]:
    """Bytes of the pieces whose last axis moves, of those that are read whole because a buffer of
    them needs far more of the source, and whether any piece has short runs."""
    bits, moved, whole, short = BITS[tensor.spec.dtype], 0, 0, False
    for piece in tensor.view.pieces:
        moves = bool(piece.counts) and piece.src_strides[-1] != 1
        short = (
            short or moves or (len(piece.counts) > 1 and piece.counts[-1] * bits < 8 * SHORT_RUN)
        )
        if not moves:
            continue
        filled = span = 1
        for count, stride in zip(reversed(piece.counts), reversed(piece.src_strides), strict=True):
            steps = min(count, max(1, -(-8 * FILL // (filled * bits))))
            filled, span = filled * steps, span + (steps - 1) * abs(stride)
        nbytes = prod(piece.counts) * bits // 8
        moved, whole = moved + nbytes, whole + nbytes * (span * bits > 8 * WHOLE_MATRIX)
    return moved, whole, short
