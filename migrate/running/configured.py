"""The configuration of number formats against tensors: that of the source where a path decodes it,
and that of the output where the run changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.errors import Diagnostic, Report
from ..planning.configured_formats import changes_formats, check_written
from ..planning.sides import ReadSide, SideFiles
from ..source.quantization import read_quantization
from .number_formats import contradictions

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..planning.pathstate import PathState, PathStep
    from ..source.index import Index

_CODING = ("dequantize", "quantize", "recode")
_MOST = 8


def check_configuration(
    index: Index,
    read_side: ReadSide,
    steps: Sequence[PathStep],
    path_state: PathState,
    outputs: Mapping[str, Tensor],
    elements: Callable[[str], tuple[int, ...] | None],
    report: Report,
) -> None:
    """M315 for tensors that the path decodes and that are not what the configuration says; M519, a
    warning of the path, for lists that contradict tensors. M513 for what cannot be read.
    `elements` answers with those of a small tensor.
    """
    if any(
        call.op in _CODING for step in steps for rule, _ in step.rules for call in rule.rule.via
    ):
        said = read_quantization(SideFiles(read_side).value)
        specs = {key: tensor.spec for key, tensor in index.tensors.items()}
        found = contradictions(specs, said, elements) if said is not None else []
        for scheme, sentence, count in found[:_MOST]:
            more = (f"{count:,} tensors are like it",) if count > 1 else ()
            if scheme is None:
                path_state.warnings.append(Diagnostic("M519", sentence, notes=more))
            else:
                report.add("M315", sentence, notes=more, help=_HELP)
    if changes_formats(path_state.changes):
        path_state.warnings += check_written(path_state.sides, outputs)


_HELP = (
    "decoding would take the one or the other: correct the configuration in a copy of the side "
    "files, or fetch the checkpoint again"
)
