"""New rule files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import fail, option
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import Request, make_request, path_text
from ..results import NewReport
from ..rules.files import SUFFIXES
from ..running.resources import memory_of
from .modules import CODE, built, names_module
from .opening import Live, opened

if TYPE_CHECKING:
    from ..authoring.infer.names import Ask
    from ..authoring.writing import FileHead, MadeFile
    from ..source.index import Source


@guarded
def new(
    out: PathLike | None = None,
    *,
    from_: str | None = None,
    index: PathLike | None = None,
    from_transformers: PathLike | None = None,
    cls: str | None = None,
    reverse: bool = False,
    from_diff: tuple[PathLike | Live, PathLike | Live] | None = None,
    headers: bool = False,
    answers: Mapping[str, str] | None = None,
    ask: Ask | None = None,
    partial: bool = False,
    max_memory: int | str = "1GB",
    rules: PathLike = "rules",
    pack: PathLike | None = None,
    allow: Iterable[str] = (),
    at: str | None = None,
) -> NewReport:
    """Write a rule file, to fill in or imported, and the `layouts.yaml` of a new lineage.

    Args:
        out: `LINEAGE/TO/SLUG`, or the path of a rule file without a lineage, which ends in `.yaml`.
            Default: None, with `pack` alone: an example.
        from_: The layout that the edge begins in. Default: the layout before it, or that of the
            last edge that leads to it.
        index: A checkpoint whose key templates are listed under `keep`, to be deleted and moved.
            Default: None.
        from_transformers: A checkpoint with its `config.json`, for whose class the rules are
            imported from the conversion mapping of the installed transformers. Default: None.
        cls: The class instead of the one that `config.json` names. Default: None.
        reverse: That checkpoint is in the layout of transformers 5 already. Default: False.
        from_diff: Two checkpoints or state dicts with the same weights, in the old layout and in
            the new one; the rules between them are found. With `headers` also modules, or
            `module:PACKAGE.MODULE:CALLABLE` for one that is made. Default: None.
        headers: Look at names, shapes and dtypes alone, so that all that is found is guessed.
            Default: False.
        answers: What became of tensors that cannot be told apart, as old pattern -> new pattern;
            an empty one drops them. Default: none.
        ask: Is asked what is open, a question at a time, the next one with what was answered
            before in mind. It answers with the number of a candidate, or None. Default: None.
        partial: Write the rules that were found although some tensors are not explained. Default:
            False.
        max_memory: Bytes for tensors that `from_diff` has to hold, also as text ("4GB"). Default:
            1 GB.
        rules: The folder of lineages that the file goes to. Default: "rules".
        pack: The folder of a new pack, named as its distribution, that the file goes to: with a
            `pyproject.toml`, tests, checks for CI and a README. Default: None.
        allow: Permissions to open that checkpoint: "links", "opaque"; "code" to make a module.
            Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.

    Returns:
        A `NewReport`: the files that were written, and what lint says of them.

    Raises:
        MigrateError: M904 if the file exists, M115 and M5xx for a name that cannot be, M9xx where
            a checkpoint cannot be read, M993 with `questions` and M994 for what `from_diff` leaves
            open, M990 to M992 where nothing can be imported.

    Example:
        >>> migrate.new("toy/v3/join-experts").files
        ('rules/toy/layouts.yaml', 'rules/toy/v3/join-experts.yaml')
    """
    from ..authoring import new as places
    from ..authoring import scaffold, writing
    from ..authoring.pack import example, pack_folder

    name = None if out is None else path_text("out", out)
    if pack is not None:
        if rules != "rules" or (name or "").endswith(SUFFIXES):
            fail(
                "M115",
                f"{option('pack')} says where the rule file goes",
                help="name LINEAGE/TO/SLUG",
            )
        place = places.in_pack(name, from_, pack_folder(path_text("pack", pack)))
    elif name is None:
        fail("M115", "nothing is named", help=f"LINEAGE/TO/SLUG, or {option('pack', 'NAME')}")
    elif name.endswith(SUFFIXES):
        place = places.alone(Path(name), from_)
    else:
        place = places.in_lineage(name, from_, Path(path_text("rules", rules)))
    ways = {"index": index, "from_diff": from_diff, "from_transformers": from_transformers}
    given = [option(way) for way, value in ways.items() if value is not None]
    if len(given) > 1:
        fail("M115", f"{' and '.join(given)} each say what is written", help="give one of them")
    if from_transformers is None and (cls is not None or reverse):
        asked = option("cls" if cls is not None else "reverse")
        fail("M115", f"{asked} goes with {option('from_transformers')}")
    if from_diff is None and (headers or answers or partial or ask):
        given_too = {"headers": headers, "answers": answers, "partial": partial, "ask": ask}
        asked = option(next(name for name, value in given_too.items() if value))
        fail("M115", f"{asked} goes with {option('from_diff')}")
    head = writing.FileHead(
        place.id, scaffold.titled(place.slug), place.lineage, place.edge, schema=place.schema
    )
    permitted = set(allow)
    request = make_request((), (), (), None, permitted - {CODE}, at=at)
    if from_diff is not None:
        if not headers and any(map(names_module, from_diff)):
            fail("M115", f"a module has no values; compare with {option('headers', True)}")
        sides = [built(p, permitted) if names_module(p) else p for p in from_diff]
        budget = memory_of(max_memory)

        def make(old: Source, new: Source) -> MadeFile:
            from ..authoring.from_diff import made_file

            return made_file(
                old,
                new,
                head,
                headers=headers,
                answers=answers,
                ask=ask,
                partial=partial,
                max_memory=budget,
            )

        made = _of_both(sides, headers, request, make)
    elif from_transformers is not None:
        with closing(opened("from_transformers", from_transformers, request)) as source:
            made = _imported(source, cls, reverse, head)
    elif name is None and index is None:
        made = example(head)
    else:
        drafts = []
        if index is not None:
            with closing(opened("index", index, request, meta=True)) as source:
                _check_names(source)
                drafts = scaffold.templates(source.index.tensors)
        made = writing.MadeFile.of(drafts, scaffold.STUB, head, scaffold.examples())
    files, findings = places.publish(place, made.text)
    return NewReport.of(
        id=place.id,
        files=[str(file) for file in files],
        counts={
            "rules": made.rules,
            "keep": made.keep,
            "tests": made.tests,
            "guessed": made.guessed,
            "keep_guessed": made.keep_guessed,
        },
        diagnostics=[d.to_json() for d in findings],
    )


def _imported(source: Source, cls: str | None, reverse: bool, head: FileHead) -> MadeFile:
    from ..authoring.examples import made_tests
    from ..authoring.transformers import imported
    from ..authoring.writing import MadeFile

    made = imported(source, cls, reverse=reverse)
    head = made.header(head)
    tests = made_tests(made.drafts, made.relations, made.specs, made.read, head, made.values).tests
    return MadeFile.of(made.drafts, tests, head)


def _of_both(
    pair: Sequence[PathLike | Live],
    meta: bool,
    request: Request,
    make: Callable[[Source, Source], MadeFile],
) -> MadeFile:
    with ExitStack() as stack:
        old, new = (
            stack.enter_context(closing(opened("from_diff", path, request, meta=meta)))
            for path in pair
        )
        for side in (old, new):
            _check_names(side)
        return make(old, new)


def _check_names(source: Source) -> None:
    """M921 for keys that no rule can name, as when it is applied."""
    from ..source.shards import check_names

    if source.format != "memory":
        check_names(source.index, source.path)
