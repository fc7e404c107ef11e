"""A rule file of two checkpoints with the same weights in two layouts.

What is inferred is made short, gets tests of its values, and is then run: the file, as it is
written, is applied to the old checkpoint in memory and compared with the new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import Diagnostic, MigrateError, listed, option, plural, printable
from ..planning.stored import stored_tensor
from ..running.resources import MAX_MEMORY
from ..source.jsontext import collector_paused
from . import scaffold, writing
from .compact import compact
from .configured_numbers import NamedNumbers, mark_lone, named_numbers
from .infer import infer
from .infer.compared import require_memory
from .relations import RuleDraft

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.index import Source
    from .infer import Inferred
    from .infer.names import Ask, Question
    from .relations import Relation

# how many times the elements of a rule's tensors are held when an example is made of them
_HELD = 3
# how many tensors that nothing explains are named
_NAMED = 20
_WHY = "the same weights in another layout"


class UndecidedError(MigrateError):
    """What two checkpoints leave open: `questions` to answer, and what is not explained."""

    exit_code = 1

    def __init__(
        self, diagnostics: Sequence[Diagnostic], questions: Sequence[Question] = ()
    ) -> None:
        super().__init__(diagnostics)
        self.questions = tuple(questions)

    def __reduce__(self) -> Any:
        return type(self), (self.diagnostics, self.questions)


@collector_paused()
def made_file(
    old: Source,
    new: Source,
    header: writing.FileHead,
    *,
    headers: bool = False,
    answers: Mapping[str, str] | None = None,
    ask: Ask | None = None,
    partial: bool = False,
    max_memory: int = MAX_MEMORY,
) -> writing.MadeFile:
    """The rule file from `old` to `new`. UndecidedError for what has to be asked and, unless it may
    be `partial`, for what nothing explains; also if the file does not make the new checkpoint.
    """
    if not headers:
        require_memory((old, new), max_memory)
    found = infer(old, new, headers=headers, answers=answers, ask=ask)
    _require_answers(found, partial, headers)
    relations = found.relations
    named = named_numbers(relations, old, new)
    drafts = mark_lone(compact(named.relations, params=named.values), old.index.tensors)
    taken = {key for relation in relations for key in relation.sources}
    left = [key for key in old.index.tensors if key not in taken]
    header = replace(
        header, why=header.why or _WHY, params=named.params, comments=tuple(_open(found, left))
    )
    tests: Sequence[Mapping[str, Any]] = ()
    if not headers:
        tests = _tests(drafts, named, old, new, header, max_memory)
    text = writing.text(drafts, header, tests or scaffold.STUB)
    if not headers:
        # what is left has no rule, and would be refused
        rest = [_dropped(number, key) for number, key in enumerate(left)]
        whole = writing.text([*drafts, *rest], header) if rest else text
        _require_proof(whole, old, new, relations)
    return writing.MadeFile.written(text, drafts, len(tests or scaffold.STUB))


def _tests(
    drafts: Sequence[RuleDraft],
    found: NamedNumbers,
    old: Source,
    new: Source,
    header: writing.FileHead,
    max_memory: int,
) -> Sequence[Mapping[str, Any]]:
    from ..running.eager import read_elements
    from .examples import made_tests

    specs = {key: at.spec for key, at in old.index.tensors.items()}
    read = (lambda key: read_elements(old, key)), (lambda key: read_elements(new, key))
    return made_tests(
        drafts, found.relations, specs, read, header, found.values, max_memory // _HELD
    ).tests


def _require_answers(found: Inferred, partial: bool, headers: bool) -> None:
    out = [
        Diagnostic(
            "M993",
            f"which old tensor became {printable(question.target)}: {question.why}",
            notes=tuple(
                f"{printable(pattern)} (likeness {score})" for pattern, score in question.candidates
            ),
            help=f"say it with {option('answer')}: OLD PATTERN=NEW PATTERN",
        )
        for question in found.questions
    ]
    # of other weights there is no part to write either
    if found.unexplained and not (partial and found.matched):
        share = f"{found.matched / found.total:.0%}" if found.total else "nothing"
        rest = len(found.unexplained)
        out.append(
            Diagnostic(
                "M994",
                f"{plural(rest, 'tensor')} of the new checkpoint "
                f"{'is' if rest == 1 else 'are'} not explained; {share} of its bytes are",
                notes=tuple(_rest_of(found)),
                help=f"write the other rules with {option('partial')}"
                + ("" if headers else ", and the missing ones by hand")
                if found.matched
                else "are both checkpoints of the same weights?",
            )
        )
    if out:
        raise UndecidedError(out, found.questions)


def _rest_of(found: Inferred) -> list[str]:
    """What nothing explains, with what comes nearest to it."""
    rest = [f"{printable(one.key)} {printable(one.why, 400)}" for one in found.unexplained]
    return rest[:_NAMED] + [f"and {len(rest) - _NAMED} more"] * (len(rest) > _NAMED)


def _open(found: Inferred, left: Sequence[str]) -> Iterator[str]:
    """Comments for a file that is partial: what nothing explains, and what no rule takes."""
    yield from (f"Not explained: {one}" for one in _rest_of(found))
    if found.unexplained and left:
        yield f"No rule takes {listed(list(left), _NAMED)}"


def _dropped(number: int, key: str) -> RuleDraft:
    pattern = key.replace("{", "{{").replace("}", "}}")
    # no made rule is called so
    return RuleDraft(f"left.{number}", pattern, (), ({"drop": {"why": "left"}},))


def _require_proof(text: str, old: Source, new: Source, relations: Sequence[Relation]) -> None:
    """Applies the file to the old checkpoint; UndecidedError naming what it makes otherwise.

    The relations were compared with the new checkpoint to the last bit: a tensor that the file
    copies as its relation does is not read again.
    """
    from ..live.migration import prepare
    from ..planning.request import make_request
    from .infer.proof import StreamedComparison, made_tensors

    wrong = []
    with TemporaryDirectory(prefix="migrate-new-") as folder:
        file = Path(folder) / "made.yaml"
        file.write_text(text, encoding="utf-8")
        request = make_request((), (), (str(file),), None, ("lossy", "drop"))
        try:
            outputs = prepare(old, request).composition.graph.outputs
        except MigrateError as error:
            _refuse_made("cannot be applied to the old checkpoint", error.diagnostics)
    compare = StreamedComparison(old, new)
    for relation in relations:
        proven = made_tensors(relation, old.index.tensors) or ()
        for key, known in zip_longest(relation.targets, proven):
            made, wanted = outputs.get(key), new.index.tensors[key]
            if made is None or made.spec != wanted.spec:
                wrong.append(key)
                continue
            if known is not None and known.spec == made.spec and _copies(known) == _copies(made):
                continue
            if compare.compare(key, made, stored_tensor(key, wanted)) is not None:
                wrong.append(key)
    wrong += outputs.keys() - new.index.tensors.keys()
    if wrong:
        what = f"do not make {listed(sorted(wrong))} as the new checkpoint has it"
        _refuse_made(what, ())


def _refuse_made(what: str, found: Sequence[Diagnostic]) -> NoReturn:
    """M995, with what was found in the file that was made."""
    notes = tuple(note for one in found[:8] for note in (one.message, *one.notes))
    raise UndecidedError(
        [
            Diagnostic(
                "M995",
                f"the rules that were made {what}; no file was written",
                notes=notes,
                help="please report this: the rules were right for each tensor by itself",
            )
        ]
    )


def _copies(tensor: Tensor) -> set[Any]:
    """What a tensor copies from where."""
    return {
        (tensor.sources[p.leaf] if isinstance(p.leaf, int) else p.leaf, *p[1:])
        for p in tensor.view.pieces
    }
