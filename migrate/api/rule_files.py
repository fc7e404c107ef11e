"""Rule files looked at without running them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import make_request, path_text
from ..results import LintReport
from ..running.prepare import side_reader
from .opening import opened


@guarded
def lint(
    paths: Iterable[PathLike] = (),
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    index: PathLike | None = None,
    fix: bool = False,
    since: str | None = None,
    allow: Iterable[str] = (),
    at: str | None = None,
) -> LintReport:
    """Check rule files and layouts without running them.

    Args:
        paths: Rule files or folders. Default: none: those in `./rules`, else those included with
            migrate.
        select: Codes or names of the only findings to report. Default: all.
        ignore: Codes or names of findings to leave out. Default: none.
        index: A checkpoint whose headers the rules are checked against. Default: None.
        fix: Mend what has one answer, in the files themselves, before they are checked: the line
            that tells editors the schema, `requires`, quotes, the order of `keep`, misspelt fields.
            Comments stay as they are, and so does what a file means, but where a field was
            misspelt. Default: False.
        since: A commit of the git repository that the files lie in; only files are checked, and
            mended, that changed since. Default: None, all.
        allow: Permissions to open that checkpoint: "links", "opaque". Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.

    Returns:
        A `LintReport`: its `exit` is 0, 1 with findings, and 2 where a file cannot be loaded.

    Raises:
        MigrateError: M115 for wrong arguments, and where `since` finds no repository or no such
            commit, M9xx where `index` cannot be read. What is wrong
            with rule files is in the report.

    Example:
        >>> migrate.lint("rename.yaml", ignore=["M608", "M610", "M622"]).exit
        0
    """
    from ..lints.findings import lint as find
    from ..lints.inputs import files_at, name_of

    given = (paths,) if isinstance(paths, (str, os.PathLike)) else tuple(paths)
    places = [path_text("paths", p) for p in given]
    if since is not None:
        from ..lints.since import changed_since

        places = [str(p) for p in changed_since(since, files_at(places or ["rules"]))]
        if not places:
            return LintReport.of(exit=0, files=[], fixed=[], suppressed=0, diagnostics=[])
    fixed = []
    if fix:
        from ..lints.fixing import fix_file

        done = [fix_file(path, name_of(path)) for path in files_at(places or ["rules"])]
        fixed = [{"file": one.file, "fixes": list(one.fixes)} for one in done if one is not None]
    codes = [(word,) if isinstance(word, str) else tuple(word) for word in (select, ignore)]
    source = (
        None
        if index is None
        else opened("index", index, make_request((), (), (), None, allow, at=at), meta=True)
    )
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
    return LintReport.of(
        exit=2 if broken else 1 if diagnostics else 0,
        files=list(found.files),
        fixed=fixed,
        suppressed=found.suppressed,
        diagnostics=[d.to_json() for d in diagnostics],
    )
