"""New rule files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import make_request, path_text
from ..results import NewReport
from ..rules.files import SUFFIXES
from .opening import Live, opened

if TYPE_CHECKING:
    from ..authoring.from_diff import MadeFile
    from ..authoring.writing import FileHead


@guarded
def new(
    out: PathLike,
    *,
    from_: str | None = None,
    index: PathLike | None = None,
    from_diff: tuple[PathLike | Live, PathLike | Live] | None = None,
    headers: bool = False,
    answers: Mapping[str, str] | None = None,
    partial: bool = False,
    rules: PathLike = "rules",
    allow: Iterable[str] = (),
    at: str | None = None,
) -> NewReport:
    """Write a rule file to fill in, and the `layouts.yaml` of its lineage where that is new.

    Args:
        out: `LINEAGE/TO/SLUG`, or the path of a rule file without a lineage, which ends in `.yaml`.
        from_: The layout that the edge begins in. Default: the layout before it, or that of the
            last edge that leads to it.
        index: A checkpoint whose key templates are listed under `keep`, to be deleted and moved.
            Default: None.
        from_diff: Two checkpoints or state dicts with the same weights, in the old layout and in
            the new one; the rules between them are found. Default: None.
        headers: Look at names, shapes and dtypes alone, so that all that is found is guessed.
            Default: False.
        answers: What became of tensors that cannot be told apart, as old pattern -> new pattern;
            an empty one drops them. Default: none.
        partial: Write the rules that were found although some tensors are not explained. Default:
            False.
        rules: The folder of lineages that the file goes to. Default: "rules".
        allow: Permissions to open that checkpoint: "links", "opaque". Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.

    Returns:
        A `NewReport`: the files that were written, and what lint says of them.

    Raises:
        MigrateError: M904 if the file exists, M115 and M5xx for a name that cannot be, M9xx where
            a checkpoint cannot be read, M670 with `questions` and M671 for what `from_diff` leaves
            open.

    Example:
        >>> migrate.new("toy/v3/join-experts").files
        ('rules/toy/layouts.yaml', 'rules/toy/v3/join-experts.yaml')
    """
    from ..authoring import new as places
    from ..authoring import scaffold, writing

    name = path_text("out", out)
    if name.endswith(SUFFIXES):
        place = places.alone(Path(name), from_)
    else:
        place = places.in_lineage(name, from_, Path(path_text("rules", rules)))
    header = writing.FileHead(
        place.id, scaffold.titled(place.slug), place.lineage, place.edge, schema=place.schema
    )
    if from_diff is not None:
        made = _from_diff(from_diff, header, headers, answers, partial, allow, at)
        files, findings = places.publish(place, made.text)
        return NewReport.of(
            id=place.id,
            files=[str(file) for file in files],
            counts={
                "rules": made.rules,
                "keep": made.keep,
                "tests": made.tests,
                "guessed": made.guessed,
            },
            diagnostics=[d.to_json() for d in findings],
        )
    drafts = []
    if index is not None:
        source = opened("index", index, make_request((), (), (), None, allow, at=at))
        try:
            drafts = scaffold.templates(source.index.tensors)
        finally:
            source.close()
    text = writing.text(drafts, header, scaffold.STUB, scaffold.examples())
    files, findings = places.publish(place, text)
    return NewReport.of(
        id=place.id,
        files=[str(file) for file in files],
        counts={"rules": 0, "keep": len(drafts), "tests": len(scaffold.STUB), "guessed": 0},
        diagnostics=[d.to_json() for d in findings],
    )


def _from_diff(
    pair: tuple[PathLike | Live, PathLike | Live],
    header: FileHead,
    headers: bool,
    answers: Mapping[str, str] | None,
    partial: bool,
    allow: Iterable[str],
    at: str | None,
) -> MadeFile:
    from ..authoring.from_diff import made_file

    request = make_request((), (), (), None, allow, at=at)
    with ExitStack() as stack:
        old, new = (
            stack.enter_context(closing(opened("from_diff", path, request, meta=headers)))
            for path in pair
        )
        return made_file(old, new, header, headers=headers, answers=answers, partial=partial)
