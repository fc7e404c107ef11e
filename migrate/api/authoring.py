"""New rule files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from ..core.errors import fail, option
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import make_request, path_text
from ..results import NewReport
from ..rules.files import SUFFIXES
from .opening import opened


@guarded
def new(
    out: PathLike,
    *,
    from_: str | None = None,
    index: PathLike | None = None,
    from_transformers: PathLike | None = None,
    cls: str | None = None,
    reverse: bool = False,
    rules: PathLike = "rules",
    allow: Iterable[str] = (),
    at: str | None = None,
) -> NewReport:
    """Write a rule file, to fill in or imported, and the `layouts.yaml` of a new lineage.

    Args:
        out: `LINEAGE/TO/SLUG`, or the path of a rule file without a lineage, which ends in `.yaml`.
        from_: The layout that the edge begins in. Default: the layout before it, or that of the
            last edge that leads to it.
        index: A checkpoint whose key templates are listed under `keep`, to be deleted and moved.
            Default: None.
        from_transformers: A checkpoint with its `config.json`, for whose class the rules are
            imported from the conversion mapping of the installed transformers. Default: None.
        cls: The class instead of the one that `config.json` names. Default: None.
        reverse: That checkpoint is in the layout of transformers 5 already. Default: False.
        rules: The folder of lineages that the file goes to. Default: "rules".
        allow: Permissions to open that checkpoint: "links", "opaque". Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.

    Returns:
        A `NewReport`: the files that were written, and what lint says of them.

    Raises:
        MigrateError: M904 if the file exists, M115 and M5xx for a name that cannot be, M9xx where
            a checkpoint cannot be read, among them M990 to M992 where nothing can be imported.

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
    if index is not None and from_transformers is not None:
        fail(
            "M115", f"{option('index')} and {option('from_transformers')} each say what is written"
        )
    if from_transformers is None and (cls is not None or reverse):
        given = option("cls" if cls is not None else "reverse")
        fail("M115", f"{given} goes with {option('from_transformers')}")
    header = writing.FileHead(
        place.id, scaffold.titled(place.slug), place.lineage, place.edge, schema=place.schema
    )
    drafts = []
    tests: list[Any] = [*scaffold.STUB]
    examples = scaffold.examples()
    if from_transformers is not None:
        from ..authoring.examples import made_tests
        from ..authoring.transformers import imported

        request = make_request((), (), (), None, allow, at=at)
        with closing(opened("from_transformers", from_transformers, request)) as source:
            made = imported(source, cls, reverse=reverse)
        drafts, header, examples = list(made.drafts), made.header(header), []
        tests = list(
            made_tests(
                made.drafts, made.relations, made.specs, made.read, header, made.values
            ).tests
        )
    if index is not None:
        source = opened("index", index, make_request((), (), (), None, allow, at=at))
        try:
            drafts = scaffold.templates(source.index.tensors)
        finally:
            source.close()
    text = writing.text(drafts, header, tests, examples)
    files, findings = places.publish(place, text)
    return NewReport.of(
        id=place.id,
        files=[str(file) for file in files],
        counts={
            "rules": sum(not draft.keep for draft in drafts),
            "keep": sum(draft.keep for draft in drafts),
            "tests": len(tests),
            "guessed": sum(draft.guessed for draft in drafts),
        },
        diagnostics=[d.to_json() for d in findings],
    )
