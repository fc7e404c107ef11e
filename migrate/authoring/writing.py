"""Rule files as text: what is written by hand looks so, and each name means itself.

Names of a checkpoint can hold anything. A scalar is plain only if it cannot be taken for something
else; otherwise it stands between double quotes, where escapes can say every character. A line ends
before its column 140: texts are broken by escaped line ends, lists and mappings into lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import HIDDEN
from ..source.yaml import PlainScalar, core
from .compact import patterns
from .relations import Patterns, RuleDraft

WIDTH = 140
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_HIDDEN = re.compile(f"[{HIDDEN}]")
# `$param`, which people write without quotes
_PARAM = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}
# where a long text is broken: behind what separates names
_BREAKS = ("|", ".", " ")


@dataclass(frozen=True, slots=True)
class FileHead:
    """What a rule file says before its rules. `schema` is the path of the schemas from the file;
    `comments` stand below the modeline.
    """

    id: str
    title: str
    lineage: str
    edge: tuple[str, str]
    why: str | None = None
    requires: str = ">=0.1"
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schema: str = "../../../schemas/rulefile.schema.json"
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MadeFile:
    """The text of a rule file, and how many rules, patterns under `keep`, tests, rules that are
    guessed and such patterns.
    """

    text: str
    rules: int
    keep: int
    tests: int
    guessed: int
    keep_guessed: int

    @classmethod
    def of(
        cls,
        drafts: Sequence[RuleDraft],
        tests: Sequence[Mapping[str, Any]],
        head: FileHead,
        below: Sequence[str] = (),
    ) -> MadeFile:
        """The file of these drafts and tests; `below` are lines of comments below the rules."""
        return cls.written(text(drafts, head, tests, below), drafts, len(tests))

    @classmethod
    def written(cls, text: str, drafts: Sequence[RuleDraft], tests: int) -> MadeFile:
        """The file that has this text and these drafts."""
        kept = [draft for draft in drafts if draft.keep]
        rules = [draft for draft in drafts if not draft.keep]
        guesses = [sum(draft.guessed for draft in some) for some in (rules, kept)]
        return cls(text, len(rules), len(kept), tests, *guesses)


def text(
    drafts: Iterable[RuleDraft],
    header: FileHead,
    tests: Sequence[Mapping[str, Any]] = (),
    below: Sequence[str] = (),
) -> str:
    """The rule file; equal drafts give equal bytes. `below` are lines of comments below rules."""
    made = list(drafts)
    out = [f"# yaml-language-server: $schema={header.schema}"]
    out += [f"# {line}" for comment in header.comments for line in _wrapped(comment, WIDTH - 2)]
    for name in ("id", "title", "why", "lineage"):
        if (value := getattr(header, name)) is not None:
            out += entry(name, value, 0)
    out.append(f"edge: {flow(list(header.edge))}")
    out.append(f"requires: {quoted(header.requires)}")
    if header.params:
        out.append("params:")
        for name, said in header.params.items():
            out += entry(name, said, 2)
    # as `lint --fix` sorts them
    kept = sorted((draft for draft in made if draft.keep), key=lambda draft: str(draft.sources))
    if kept:
        out.append("keep:")
        for draft in kept:
            out += _comment(draft, 2)
            out += _item(draft.sources, 2)
    if guesses := [draft for draft in kept if draft.guessed]:
        out.append("guessed:")
        for draft in guesses:
            out += _item(draft.sources, 2)
    rules = [draft for draft in made if not draft.keep]
    out.append("rules:" if rules else "rules: []" + (" # instead of [] such as:" if below else ""))
    for draft in rules:
        out += _rule(draft)
    out += below
    if tests:
        out.append("tests:")
        for test in tests:
            out += _item(test, 2)
    return "\n".join(out) + "\n"


def _rule(draft: RuleDraft) -> list[str]:
    out = _comment(draft, 2)
    out += [f"  - name: {scalar(draft.name)}"]
    # beside one another, `from` and `to` show what changes
    simple = isinstance(draft.sources, str) and isinstance(draft.targets, str)
    out += _patterns("from", draft.sources, simple)
    if patterns(draft.targets):
        out += _patterns("to", draft.targets, simple)
    if draft.via:
        out += entry("via", [dict(call) for call in draft.via], 4)
    for name, value in (("map", draft.map), ("where", draft.where), *draft.fields.items()):
        if value or value is False or value == 0:
            out += entry(name, value, 4)
    if draft.guessed:
        out.append("    guessed: true")
    return out


def _patterns(name: str, side: Patterns, simple: bool) -> list[str]:
    if simple and name == "to":
        return entry(name, side, 4, "to:   ")
    return entry(name, list(side) if isinstance(side, tuple) else side, 4)


def _comment(draft: RuleDraft, indent: int) -> list[str]:
    if not draft.note:
        return []
    return [f"{' ' * indent}# {line}" for line in _wrapped(draft.note, WIDTH - indent - 2)]


def _wrapped(comment: str, width: int) -> list[str]:
    """A comment's lines; what could end the comment or hide in it is escaped."""
    lines = [""]
    for word in comment.split(" "):
        shown = "".join(_escaped(c) if _hides(c) else c for c in word)
        if lines[-1] and len(lines[-1]) + 1 + len(shown) > width:
            lines.append(shown)
        else:
            lines[-1] = f"{lines[-1]} {shown}" if lines[-1] else shown
    return lines


def entry(name: str, value: Any, indent: int, prefix: str = "") -> list[str]:
    """`name: value`, in one line if it fits."""
    start = " " * indent + (prefix or f"{scalar(name)}: ")
    line = start + flow(value)
    if len(line) < WIDTH:
        return [line]
    if isinstance(value, Mapping) and value:
        below = [line for n, v in value.items() for line in entry(str(n), v, indent + 2)]
        return [start.rstrip(), *below]
    if isinstance(value, (list, tuple)) and value:
        return [start.rstrip(), *(line for item in value for line in _item(item, indent + 2))]
    return _broken(start, str(value), indent + 2)


def _item(value: Any, indent: int) -> list[str]:
    """`- value`, in one line if it fits."""
    dash = " " * indent + "- "
    line = dash + flow(value)
    if len(line) < WIDTH and not (isinstance(value, Mapping) and len(value) > 1):
        return [line]
    if isinstance(value, (Mapping, list, tuple)) and value:
        if isinstance(value, Mapping):
            below = [line for n, v in value.items() for line in entry(str(n), v, indent + 2)]
        else:
            below = [line for item in value for line in _item(item, indent + 2)]
        return [dash + below[0][indent + 2 :], *below[1:]]
    return _broken(dash, str(value), indent + 2)


def _broken(start: str, value: str, indent: int) -> list[str]:
    """A long text between double quotes, over several lines."""
    out: list[str] = []
    line = start + '"'
    for piece in _pieces(value):
        if len(line) + len(piece) > WIDTH - 2 and line.strip() != '"':
            out.append(line + "\\")
            line = " " * indent
            if piece.startswith(" "):
                piece = "\\" + piece
        line += piece
    return [*out, line + '"']


def _pieces(value: str) -> Iterable[str]:
    piece = ""
    for character in value:
        piece += _escaped(character)
        if character in _BREAKS or len(piece) > 60:
            yield piece
            piece = ""
    if piece:
        yield piece


def flow(value: Any) -> str:
    """The value in one line."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{scalar(str(n))}: {flow(v)}" for n, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(flow, value))}]"
    return scalar(value)


def scalar(value: Any) -> str:
    """A scalar as it is written; text is read as the same text, whatever it holds."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return _number(value)
    said = str(value)
    if _PARAM.fullmatch(said):
        return said
    if _PLAIN.fullmatch(said) and isinstance(core(PlainScalar(said)), str) and not _taken(said):
        return said
    if " " in said and _prose(said):
        return said
    return quoted(said)


def _number(value: float) -> str:
    if isinstance(value, float) and value != value:
        return ".nan"
    if value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return repr(value)


def _taken(said: str) -> bool:
    """Whether YAML 1.1, as other readers speak it, takes the word for something else."""
    return said.lower() in ("yes", "no", "on", "off", "true", "false", "null")


def _prose(said: str) -> bool:
    """Whether it is a sentence that needs no quotes, inside of braces either."""
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9 _./()'-]*[A-Za-z0-9)]", said))


def quoted(said: str) -> str:
    """The text between double quotes."""
    return '"' + "".join(map(_escaped, said)) + '"'


def _hides(character: str) -> bool:
    """Whether it does not look as it is read."""
    return not character.isprintable() or _HIDDEN.match(character) is not None


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    if 0x20 <= code < 0x7F or (code < 0xD800 and not _hides(character)):
        return character
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
