"""Parts of a run into a bucket.

    OUT.migrate-partial/journal.json        by the part that comes first, under the condition that
                                            there is none; the others wait until it is `ready`
    OUT.migrate-partial/parts/<run>-<n>.json    of a part that is done: what it wrote
    OUT.migrate-partial/parts/<run>-<n>-made.json    the ETags of the parts of uploads that it made

Each part makes the parts of uploads that hold its files, or its pieces of files, and asks the store
which of them are there. Nothing is locked: two processes that do the same upload the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import MigrateError, fail, option, plural, printable
from ..core.types import RunPart
from ..source.stores.s3_uploads import GONE, PARTIAL, S3Output
from .parts import Begun, LeftBehind, what_is_said
from .pieces import sealed_tail
from .publish import parsed_line
from .store_journal import own_words, parse_journal, refuse_left, word_of, word_of_made
from .store_run import StoreRun

if TYPE_CHECKING:
    from ..source.target import OutputFile

# seconds that a part waits for the first one to begin all uploads, and between two looks
APPEAR, POLL = 120.0, 0.5
# seconds for which a listing of what parts say holds
LOOK = 1.0


class LeftInBucket:
    """What parts have left beside an output in a bucket."""

    def __init__(self, output: S3Output) -> None:
        self._output, self.shown = output, f"{output.location}{PARTIAL}"
        self._journal: Mapping[str, Any] | None = None
        # the words that there are, and when they were listed
        self._words, self._listed = frozenset[str](), 0.0

    def journal(self) -> Mapping[str, Any] | None:
        """The journal of the run, as it was when it was read first; None without."""
        if self._journal is None:
            there = self._output.read_journal()
            self._journal = None if there is None else parse_journal(there[0], self._output)
        return self._journal

    def exists(self) -> bool:
        return self.journal() is not None

    def appeared(self) -> bool:
        return not self.exists() and bool(self._output.objects())

    def begun(self) -> Begun | None:
        found = (self.journal() or {}).get("begun")
        return None if found is None else begun_of(found)

    def done(self, of: int, digest: str) -> set[int]:
        found = self.journal()
        if found is None or found["digest"] != digest:
            return set()
        names = set(own_words(self._output.words().names(), found["run"]))
        return {number for number in range(of) if word_of(found["run"], number) in names}

    def said(self, number: int, digest: str) -> dict[str, Any] | None:
        found = self.journal()
        word = (
            parsed_line(self._output.words().said(word_of(found["run"], number))) if found else {}
        )
        if word.get("digest") != digest or type(word.get("shared")) is not int:
            return None
        return word if isinstance(word.get("account"), dict) else None

    def state(self, part: RunPart, second: bool = False) -> str:
        return "has not said that it is done"

    def written(self, part: RunPart, second: bool = False) -> int | None:
        """0 once the part is at work: how far it is would be a request for each of its files."""
        if (found := self.journal()) is None:
            return None
        if time.monotonic() > self._listed + LOOK:
            self._words, self._listed = frozenset(self._output.words().names()), time.monotonic()
        return 0 if word_of_made(found["run"], part.number) in self._words else None


def begun_of(found: Any) -> Begun | None:
    """What a journal says of how a run in parts was begun; None if it is not as it is written."""
    of, plan, copy = (
        found.get(name) if isinstance(found, dict) else None for name in ("of", "plan", "copy_of")
    )
    if type(of) is not int or of < 1 or not isinstance(plan, dict):
        return None
    return Begun(of, plan, copy if isinstance(copy, str) else None)


class StorePartRun(StoreRun):
    """The steps of a run into a bucket, for one part of it."""

    # what others have uploaded is kept whatever happens
    _alone = False

    def enter_part(
        self, part: RunPart, own: Sequence[OutputFile], begun: Begun, second: bool = False
    ) -> LeftBehind:
        """The uploads, begun if no other part was here before."""
        output, left = self.output, LeftInBucket(self.output)
        self.options = replace(self.options, resume=True)
        self._part, self._own, self._of, self._number = part, own, part.of, part.number
        self._more = {"begun": asdict(begun), "by": part.number}
        if output.read_journal() is not None or not self._begin():
            found = self._ready(part)
            of = begun_of(found.get("begun"))
            if of is None or of.of != part.of:
                was = "by no parts" if of is None else f"with {plural(of.of, 'part')}"
                fail(
                    "M918",
                    f"{printable(left.shown, 300)} was begun {was}, and "
                    + (f"this is part {part}" if own else f"this is of {part.of}"),
                    help=f"`migrate clean {printable(output.location, 240)}` and start over, or go "
                    + ("on " if of is None else f"on with {plural(of.of, 'part')}, or ")
                    + f"in one process with {option('resume', True)}",
                )
            names = None if not found.get("ready") else [file.name for file in own]
            self._take_over(found, names)
            if names is None and self.uploads is not None:
                self.uploads.write_journal(ready=True)
            there = {} if self.uploads is None else self.uploads.present
            self._resumed = any(there.get(file.name) for file in own)
        # by which others see that it is at work
        self._begun().note()
        return left

    def _ready(self, part: RunPart) -> dict[str, Any]:
        """The journal, when all uploads are begun, or if this part was about to begin them. M911
        if it does not come to that.
        """
        output, until = self.output, time.monotonic() + APPEAR
        while True:
            if (there := output.read_journal()) is None:
                fail(
                    "M911",
                    f"the journal of {printable(output.location, 240)} was removed meanwhile",
                    help="run the part again",
                )
            found = parse_journal(there[0], output)
            if "begun" not in found or found.get("ready") or found.get("by") == part.number:
                return found
            if time.monotonic() > until:
                by = f"{found.get('by')}/{part.of}"
                fail(
                    "M911",
                    f"part {by} was about to begin the uploads of "
                    f"{printable(output.location, 240)}, and has not done so",
                    help=f"run part {by} first; it goes on where it ended",
                )
            time.sleep(POLL)

    def has_all(self) -> bool:
        """Whether the store has all parts of uploads that this part makes."""
        uploads = self._begun()
        return not any(True for file in self._own for _ in uploads.missing(file))

    def allocate_own(self, own: Sequence[OutputFile]) -> int:
        """Nothing is allocated, and nothing shared."""
        return 0

    def say_done(self, own: Sequence[OutputFile], shared: int) -> dict[str, Any]:
        """Says that the part is done."""
        self._begun().note()
        said = what_is_said(self, own, shared)
        content = json.dumps(said, separators=(",", ":")).encode()
        self.output.words().say(word_of(self._begun().run, self._part.number), content)
        return said

    def enter_to_publish(self) -> LeftBehind:
        """The uploads of parts that are done."""
        left = LeftInBucket(self.output)
        self.options = replace(self.options, resume=True)
        if (found := left.journal()) is not None:
            self._take_over(found, ())
        self._begun()
        # what parts computed they say
        self._resumed = False
        return left

    def seal(self, said: Mapping[str, Sequence[tuple[OutputFile, Mapping[str, Any]]]]) -> None:
        """Uploads the tails of the archives that were uploaded in pieces, by what is `said` of
        these.
        """
        uploads = self._begun()
        for file in self.target.files:
            if file.seal is None or file.name not in said:
                continue
            crcs = [
                (piece, one["account"]["files"][file.name]["crcs"])
                for piece, one in said[file.name]
            ]
            start, tail = sealed_tail(file, crcs)
            self.written += len(tail)
            if uploads.list_parts(file.name) is None:
                # completed by one that was killed while it published
                continue
            for number, part in enumerate(uploads.plan.files[file.name], 1):
                if part.start >= start:
                    uploads.put(file.name, number, tail[part.start - start : part.stop - start])

    @property
    def shown(self) -> str:
        """Where the output goes."""
        return self.output.location

    def left(self) -> LeftBehind:
        """What parts have left already."""
        return LeftInBucket(self.output)

    def refuse_left(self) -> NoReturn:
        """M911 for what is left."""
        refuse_left(self.output)

    def discard_all(self) -> None:
        """Aborts all uploads, and removes what parts have left."""
        self._begun().abort()

    def _kept(self, error: MigrateError) -> MigrateError:
        where = printable(self.output.location, 240)
        note = f"what was uploaded so far is kept, and does not show: {where}{PARTIAL}"
        way = f"run it again: it goes on where it ended; or `migrate clean {where}`"
        return type(error)(
            [
                one
                if GONE in one.notes
                else replace(
                    one,
                    notes=(*one.notes, note),
                    help=f"{one.help}; then {way}" if one.help else way,
                )
                for one in error.diagnostics
            ]
        )
