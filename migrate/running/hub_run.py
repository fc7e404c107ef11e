"""A run whose output goes to the Hugging Face Hub: written to a folder of this machine first, which
is committed when it is finished.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..core.errors import Diagnostic, MigrateError, printable
from ..results import ApplyReport
from ..source.stores.hub_output import HubOutput

Report = TypeVar("Report")


def write_to_hub(output: HubOutput, run: Callable[[Path], Report]) -> Report | ApplyReport:
    """Calls `run` with a place beside the working directory's files, commits what is there then,
    and removes it; answers with the report of the run, about what was committed.

    What could not be committed stays, and the diagnostic names it.
    """
    place = Path(f"{output.name}.migrate-hub").absolute()
    report = run(place)
    if not isinstance(report, ApplyReport) or report.path is None:
        return report
    steps = ", ".join(edge.to for edge in report.steps) or "as it was"
    try:
        made = output.commit(str(place), f"Migrated by migrate: {steps}")
    except MigrateError as error:
        raise type(error)([_kept(d, place, output) for d in error.diagnostics]) from error
    shutil.rmtree(place)
    found = report.to_json()
    return ApplyReport.from_json(
        {**found, "path": made.location, "notes": [*found["notes"], *made.notes]}
    )


def _kept(found: Diagnostic, place: Path, output: HubOutput) -> Diagnostic:
    """The diagnostic, with where the finished output is."""
    to = f"--revision {shlex.quote(output.branch)}" if output.branch else "--create-pr"
    again = f"hf upload {output.repo} {shlex.quote(str(place))} . {to}"
    return replace(
        found,
        notes=(*found.notes, f"the output is finished, and kept: {printable(str(place), 300)}"),
        help=f"{found.help}; `{printable(again, 400)}` uploads it",
    )
