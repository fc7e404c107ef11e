"""The configuration of number formats against tensors: that of the source where a path decodes it,
and that of the output where the run changes it.

A rule file writes one configuration for all that comes out. So tensors that no rule takes have to
be what it says, and those that a way back leaves plain, because nothing encodes them, are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.errors import Diagnostic, MigrateError, Report
from ..core.part_names import WIDE
from ..core.templates import takes
from ..planning.configured_caches import check_caches
from ..planning.configured_formats import changes_formats, check_written
from ..planning.configured_inputs import check_inputs
from ..planning.module_names import follow_all
from ..planning.pipeline import CODING
from ..planning.sides import ReadSide, SideFiles
from ..source.quantization import read_quantization
from .number_formats import contradictions

if TYPE_CHECKING:
    from ..planning.bind import StepResult
    from ..planning.graph import Tensor
    from ..planning.pathstate import PathState, PathStep
    from ..source.index import Index

    _Elements = Callable[[str], tuple[int, ...] | None]

_MOST = 8


def check_configuration(
    index: Index,
    read_side: ReadSide,
    steps: Sequence[tuple[PathStep, StepResult]],
    path_state: PathState,
    outputs: Mapping[str, Tensor],
    elements: _Elements,
    report: Report,
) -> None:
    """M315 for tensors that the path decodes and that are not what the configuration says, and for
    those that come out and are not what the run writes; M519, a warning of the path, for lists that
    contradict tensors. M513 for what cannot be read. `elements` answers with those of a small
    tensor.
    """
    coding = any(
        call.op in CODING for step, _ in steps for rule, _ in step.rules for call in rule.rule.via
    )
    if coding:
        said = read_quantization(SideFiles(read_side).value)
        specs = {key: tensor.spec for key, tensor in index.tensors.items()}
        found = contradictions(specs, said, elements) if said is not None else []
        for scheme, sentence, count in found[:_MOST]:
            more = (f"{count:,} tensors are like it",) if count > 1 else ()
            if scheme is None:
                path_state.warnings.append(Diagnostic("M519", sentence, notes=more))
            else:
                report.add("M315", sentence, notes=more, help=_HELP)
    if not changes_formats(path_state.changes):
        return
    left = _left_plain(steps) if any(step.backwards for step, _ in steps) else ()
    path_state.warnings += check_written(path_state.sides, outputs, left)
    before = SideFiles(read_side)
    path_state.warnings += check_caches(before, path_state.sides, index.tensors, outputs)
    path_state.warnings += check_inputs(path_state.sides, outputs)
    written = read_quantization(path_state.sides.value) if coding else None
    specs = {key: tensor.spec for key, tensor in outputs.items()}
    found = contradictions(specs, written) if written is not None else []
    # modules that are plain by a list are said above
    for _, sentence, count in [one for one in found if one[0] is not None][:_MOST]:
        more = (f"{count:,} tensors are like it",) if count > 1 else ()
        report.add("M315", f"{sentence}, which this run writes", notes=more, help=_LEFT)


def check_misfits(
    error: MigrateError, index: Index, read_side: ReadSide, elements: _Elements
) -> None:
    """M315 in the place of `error`, if parts do not fit a rule that took its arguments from a
    configuration that contradicts them: then all modules would be named, and not what is wrong.
    """
    misfits = any(one.code == "M310" for one in error.diagnostics)
    said = read_quantization(SideFiles(read_side).value) if misfits else None
    if said is None:
        return
    report = Report()
    specs = {key: tensor.spec for key, tensor in index.tensors.items()}
    found = [one for one in contradictions(specs, said, elements) if one[0] is not None]
    for _, sentence, count in found[:_MOST]:
        more = (f"{count:,} tensors are like it",) if count > 1 else ()
        report.add("M315", sentence, notes=more, help=_HELP)
    report.check()


def _left_plain(steps: Sequence[tuple[PathStep, StepResult]]) -> set[str]:
    """The modules, as they are called in the end, of what rules decode and their way back leaves as
    it is.
    """
    out: set[str] = set()
    for number, (step, bound) in enumerate(steps):
        patterns = [
            pattern
            for rule, _ in step.rules
            if step.backwards
            and rule.rule.skipped_back
            and any(call.op == "dequantize" for call in rule.rule.via)
            for pattern in rule.targets.values()
        ]
        modules = {
            key.rpartition(".")[0]
            for key, tensor in (bound.tensors.items() if patterns else ())
            if tensor.spec.dtype in WIDE
            and len(tensor.spec.shape) > 1
            and key not in bound.provenance
            and any(takes(pattern, key) for pattern in patterns)
        }
        after = [later for _, later in steps[number + 1 :]]
        out.update(name for names in follow_all(after, modules).values() for name in names)
    return out


_LEFT = (
    "no rule of this path takes these tensors: take a path that decodes them, as those to plain "
    "weights do, or write a rule for them"
)
_HELP = (
    "decoding would take the one or the other: correct the configuration in a copy of the side "
    "files, or fetch the checkpoint again"
)
