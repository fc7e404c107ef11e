"""What has one answer, mended in the text of a rule file or a layouts.yaml.

The text is edited where its nodes stand and never written anew, so that comments, quotes and line
ends stay byte for byte. What a file means is compared before and after: only a misspelt field may
change it, because with one the file had no meaning.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import Diagnostic, Report, fail, printable
from ..rules.files import LAYOUTS
from ..rules.layouts import read_layouts
from ..rules.loading import load_document
from ..rules.model import semantic_hash
from ..source import yaml
from .file import find_numbers, has_modeline

# of two readings of a misspelt word the nearer one is an answer only if it is this near
NEAR = 0.75
_MEANT = re.compile(r"did you mean `(\w+)`\?")
_PATTERN = re.compile(r"\{[^{}\s'\"\\]*\}[^\s,\]'\"\\#]*")
_BETWEEN = re.compile(r"[\s,]*")
_SCHEMA = re.compile(r"#\s*yaml-language-server:\s*\$schema=(\S+)/[^/\s]+\.schema\.json")
# a file has no more misspelt fields
_ROUNDS = 50
REQUIRES = 'requires: ">=0.1"'


class Edit(NamedTuple):
    """`text[start:end]` becomes `new`; `what` says so to people."""

    start: int
    end: int
    new: str
    what: str


@dataclass(frozen=True, slots=True)
class FixedFile:
    """A file that was changed, and how."""

    file: str
    fixes: tuple[str, ...]


def fix_file(path: Path, name: str) -> FixedFile | None:
    """Mends the file in its place; None if there was nothing to mend. `name` is for messages."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None  # for the loader to report
    new, fixes = fixed(text, path)
    if not fixes:
        return None
    mark = b"\xef\xbb\xbf" if raw.startswith(b"\xef\xbb\xbf") else b""
    place = path.resolve()
    beside = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        try:
            beside.write_bytes(mark + new.encode())
            shutil.copymode(place, beside)
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        fail("M115", f"cannot write {printable(name, 300)}: {error.strerror or error}")
    return FixedFile(name, tuple(fixes))


def fixed(text: str, path: Path) -> tuple[str, list[str]]:
    """The mended text of the file at `path`, and what was done to it."""
    said: list[str] = []
    now = _EditedText(text, path)
    for _ in range(_ROUNDS):
        edits = [*now.unquoted_patterns(), *now.misspelt()]
        after = _EditedText(now.applied(edits), path)
        if not edits or not after.better_than(now):
            break
        said += [edit.what for edit in edits]
        now = after
    if now.meaning is None:
        return now.text, said
    edits = [*now.modeline(), *now.requires(), *now.numbers(), *now.keep()]
    after = _EditedText(now.applied(edits), path)
    if edits and after.meaning == now.meaning:
        return after.text, said + [edit.what for edit in edits if edit.what]
    return now.text, said


class _EditedText:
    """A text as the loader reads it, and the places in it that can be mended."""

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path = text, path
        self.is_layouts = path.name == LAYOUTS
        report = Report()
        self.document = yaml.read_yaml(text, str(path), report)
        self.meaning = self._meaning(report)
        self.problems = [d for d in report.diagnostics if d.severity == "error"]
        values, keys = self.document.places()
        self.values = {at: yaml.Mark(*place) for at, place in values}
        self.keys = {at: yaml.Mark(*place) for at, place in keys}
        self.starts = [0, *(found.end() for found in yaml.BREAK.finditer(text))]

    def _meaning(self, report: Report) -> Any:
        """What must stay as it is; None if the file cannot be loaded."""
        if not self.document.whole:
            return None
        if self.is_layouts:
            return None if read_layouts(self.document, report) is None else self.document.data
        loaded = load_document(self.path, self.document, report)
        broken = loaded is None or report.has_errors()
        return None if broken or loaded is None else semantic_hash(loaded.model)

    def better_than(self, other: _EditedText) -> bool:
        """Whether fewer things are wrong, or those that end the reading stand further down."""
        mine, others = ((r.document.whole, -len(r.problems)) for r in (self, other))
        if mine > others:
            return True
        if self.document.whole or other.document.whole or not self.problems:
            return False
        first, before = ((d.spans[0].line, d.spans[0].column) for d in (self._first, other._first))
        return first > before

    @property
    def _first(self) -> Diagnostic:
        return min(self.problems, key=lambda d: (d.spans[0].line, d.spans[0].column))

    def applied(self, edits: list[Edit]) -> str:
        """The text with these edits, which do not overlap."""
        out, at = [], 0
        for edit in sorted(edits):
            out += [self.text[at : edit.start], edit.new]
            at = edit.end
        return "".join([*out, self.text[at:]])

    def _at(self, line: int, column: int) -> int:
        return self.starts[line] + column

    def _slice(self, place: yaml.Mark) -> tuple[int, int]:
        return self._at(place.line, place.column), self._at(place.end_line, place.end_column)

    def unquoted_patterns(self) -> Iterator[Edit]:
        """Patterns that begin with a brace, of which YAML makes something else than text."""
        for problem in self.problems:
            if problem.code != "M110":
                continue
            start = self._at(problem.spans[0].line - 1, problem.spans[0].column - 1)
            found = _PATTERN.match(self.text, start)
            if found is None:
                continue
            value = found[0]
            while value.endswith("}") and value.count("}") > value.count("{"):
                value = value[:-1]
            yield Edit(start, start + len(value), f'"{value}"', "quoted a pattern")
            return  # what follows may have been read wrongly because of this one

    def misspelt(self) -> list[Edit]:
        """Fields that are near to one that exists and is not written beside them."""
        wrong = {(d.spans[0].line, d.spans[0].column): d for d in self.problems if d.code == "M103"}
        meant: dict[tuple[yaml.Path, str], list[Edit]] = {}
        for path, place in self.keys.items():
            problem = wrong.get((place.line + 1, place.column + 1))
            near = _MEANT.fullmatch(problem.help or "") if problem is not None else None
            if near is None:
                continue
            word, field = str(path[-1]), near[1]
            ratio = SequenceMatcher(None, word, field).ratio()
            if ratio >= NEAR and (*path[:-1], field) not in self.keys:
                edit = Edit(*self._slice(place), field, f"`{printable(word)}` is `{field}`")
                meant.setdefault((path[:-1], field), []).append(edit)
        # of two words that could both be the field, neither is
        return [edits[0] for edits in meant.values() if len(edits) == 1]

    def modeline(self) -> Iterator[Edit]:
        if has_modeline(self.document):
            return
        name = "layouts" if self.is_layouts else "rulefile"
        line = f"# yaml-language-server: $schema={_schemas(self.path)}/{name}.schema.json"
        yield Edit(0, 0, line + self._break(), "the schema for editors")

    def requires(self) -> Iterator[Edit]:
        data = self.document.data
        if self.is_layouts or "requires" in data or ("edge",) not in self.keys:
            return
        key = self.keys["edge",]
        ends = [self.values[at] for at in (("edge",), ("edge", 0), ("edge", 1))]
        start = self._at(ends[0].line, ends[0].column)
        # the list's own end is beyond it where it is written below its key
        last = ends[0] if self.text.startswith("[", start) else ends[2]
        rest = self.text[self._at(last.end_line, last.end_column) : self._line_end(last.end_line)]
        if key.column or (rest.strip() and not rest.lstrip().startswith("#")):
            return  # all fields stand in one line
        at, own = self._line_end(last.end_line), self._break()
        if self.text[at:]:
            yield Edit(
                self.starts[last.end_line + 1],
                self.starts[last.end_line + 1],
                REQUIRES + own,
                "`requires`",
            )
        else:
            yield Edit(at, at, own + REQUIRES, "`requires`")

    def numbers(self) -> Iterator[Edit]:
        """Layouts that other YAML readers take for numbers."""
        for span in find_numbers(self.document, self.is_layouts):
            start = self._at(span.line - 1, span.column - 1)
            word = self.text[start : start + span.length]
            yield Edit(start, start + span.length, f'"{word}"', f"quoted layout {word}")

    def keep(self) -> list[Edit]:
        """The patterns of `keep` in their order, where no comment stands between them."""
        kept = None if self.is_layouts else self.document.data.get("keep")
        if not isinstance(kept, list) or kept == sorted(kept):
            return []
        places = [self.values["keep", number] for number in range(len(kept))]
        slots = [self._slice(place) for place in places]
        between = [self.text[a[1] : b[0]] for a, b in pairwise(slots)]
        if not all(map(_BETWEEN.fullmatch, between)):
            # one below the other, each with its lines and what is remarked there
            slots = [(self.starts[p.line], self._line_end(p.end_line)) for p in places]
            between = [self.text[a[1] : b[0]] for a, b in pairwise(slots)]
            heads = {
                self.text[s : self._at(p.line, p.column)]
                for (s, _), p in zip(slots, places, strict=True)
            }
            if (
                len(heads) > 1
                or not all(map(yaml.BREAK.fullmatch, between))
                or next(iter(heads)).strip() != "-"
            ):
                return []
        order = sorted(range(len(kept)), key=lambda number: str(kept[number]))
        texts = [self.text[slice(*slots[number])] for number in order]
        done = [Edit(*slot, text, "") for slot, text in zip(slots, texts, strict=True)]
        return [done[0]._replace(what="sorted `keep`"), *done[1:]]

    def _line_end(self, line: int) -> int:
        """Where the line ends, before its break."""
        if line + 1 == len(self.starts):
            return len(self.text)
        end = self.starts[line + 1]
        return end - 2 if self.text.endswith("\r\n", 0, end) else end - 1

    def _break(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"


def _schemas(path: Path) -> str:
    """The folder of schemas as the file's first line names it: that of another file of its lineage,
    one that is there, or beside the folder of lineages.
    """
    folder = path.absolute().parent
    home = next((p for p in [folder, *folder.parents][:3] if (p / LAYOUTS).is_file()), None)
    for other in sorted(folder.glob("*.yaml") if home is None else home.rglob("*.yaml")):
        with other.open(encoding="utf-8", errors="replace") as file:
            if found := _SCHEMA.match(file.readline()):
                there = found[1]
                return there if "://" in there else os.path.relpath(other.parent / there, folder)
    top = home.parent if home is not None else folder
    for above in [top, *top.parents][:4]:
        if (above / "schemas" / "rulefile.schema.json").is_file():
            return os.path.relpath(above / "schemas", folder)
    return os.path.relpath(top.parent / "schemas", folder)
