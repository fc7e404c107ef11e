"""What several processes do together: files written and published as one output, and outputs
compared.

    rank 0                                    the others
        enter: the partial folder             wait for it
        meet: all are there and see the same plan, source and folder
        examine own files, the value checks   enter: a journal of its own; examine own files
        allocate; "begun"                     wait for "begun"
        write own files                       write own files, fsync; "done"
        wait for all "done"                   wait for the end
        publish; "published"
        wait until all have left              leave
        remove the folder

Files are dealt by bytes, as all know from the plan alone. The output does not depend on how many
processes there are: each file is written by one of them as a single process would.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import MigrateError, fail, option, printable, refusal
from ..core.types import PathLike, Progress, Ranks
from ..source.urls import is_url
from .comparison import verify_output
from .publish import RANKS, partial_folder
from .ranks import Group, Meeting, deal, facts_of, meet, pause, require_quiet
from .resources import RunResult
from .tiles import TargetRun
from .verify import Mismatch, Recomputation

if TYPE_CHECKING:
    from ..planning.graph import Tensor, ValueCheck
    from ..planning.request import Request
    from ..results import VerifyReport
    from ..source.index import Source
    from ..source.target import Target
    from .resources import RunOptions
    from .restored import RestoredParts
    from .undo import UndoRun

# what the folder is called in which processes meet that compare
SUFFIX = ".migrate-ranks"
# seconds within which a network file system shows what another machine renamed
SHOWN = 30.0


class Terminated(KeyboardInterrupt):
    """The launcher ends this process, mostly because another one has ended."""


def fail_together(group: Group | None, error: BaseException) -> NoReturn:
    """Tells the other ranks of an error, and raises it; what ended another rank, where the launcher
    ends this one for it.
    """
    found = error
    if group is not None:
        if isinstance(error, Terminated):
            found = group.inquire() or error
        group.fail(found)
    if found is error:
        raise error
    raise found from error


class RankProgress:
    """What a process says of its progress: to the others, and to its caller of all together."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self.group: Group | None = None

    def __call__(self, done: int, _: int) -> None:
        self._done = done
        self.tell()

    def tell(self) -> None:
        """RunError M973 if another process failed or died."""
        group = self.group
        if group is not None:
            group.check()
            group.progress(self._done)
            if self._progress is not None:
                everybody = self._done + sum(group.done.values())
                self._progress(min(self._total, everybody), self._total)


def write_by_ranks(
    outputs: Mapping[str, Tensor],
    source: Source,
    target: Target,
    out: PathLike,
    *,
    digest: str,
    side_files: Sequence[tuple[str, bytes | PathLike]] = (),
    checks: Sequence[ValueCheck] = (),
    options: RunOptions,
    ranks: Ranks,
    parts: RestoredParts | None = None,
    undo: UndoRun | None = None,
) -> RunResult:
    """`write_target` by several processes, of which this is one: it returns when the output is
    published. What rank 0 returns speaks of all, what another one returns of itself.

    RunError M972 if a process does not appear, M974 if one sees something else, M973 if one fails
    or dies; the partial folder is then kept.
    """
    if source.identities() is None:
        fail("M115", "several processes cannot share a checkpoint that is in memory")
    dealt = deal({file.name: file.size for file in target.files}, ranks.world)
    own = [file for file in target.files if file.name in dealt[ranks.rank]]
    group: Group | None = None
    told = RankProgress(sum(file.size for file in target.files), options.progress)
    run = TargetRun(
        outputs,
        source,
        target,
        out,
        digest=digest,
        side_files=side_files,
        options=replace(options, progress=told),
        parts=parts,
    )
    folder = partial_folder(run.path)
    try:
        # rank 0 makes the folder in which the others wait for it
        entered = None if ranks.rank else run.enter(0)
        told.group = group = meet(folder / RANKS, ranks, facts_of(source.identities(), digest))
        if entered is None:
            entered = run.enter(ranks.rank)
            run.examine(own)
            group.wait("begun")
            run.share(own)
            run.write(own)
            if options.fsync:
                entered.sync([file.name for file in own])
            group.say("done", run.account())
            wait_for_the_end(group, str(run.path), partial(os.path.lexists, run.path))
            return RunResult(run.files, sum(t.spec.nbytes for t in outputs.values()), run.written)
        run.examine(own, checks)
        run.allocate()
        if undo is not None:
            undo.prepare()
        group.say("begun")
        run.write(own)
        for rank in range(1, ranks.world):
            run.add(group.wait("done", rank, told.tell))
        if undo is not None:
            undo.appear()
        entered.farewell = partial(say_published, group)
        return replace(run.publish(), idle=sum(not files for files in dealt))
    except BaseException as error:  # noqa: BLE001 - raised again
        found: BaseException = error
        if group is not None and isinstance(error, Terminated):
            found = group.inquire() or error
        if undo is not None:
            undo.end(found)
        try:
            run.fail(found)
        except BaseException as meant:
            if group is not None:
                group.fail(meant)
            raise
    finally:
        if group is not None:
            group.leave()
        if undo is not None:
            undo.end(None)
        run.close()


def say_published(group: Group) -> None:
    """Tells all that what they did is there, and waits until they have left."""
    try:
        group.say("published")
        group.part()
    except (OSError, MigrateError):
        # they see that the folder is gone and the output there
        return


def wait_for_the_end(group: Group, shown: str, is_there: Callable[[], bool]) -> None:
    """Returns when rank 0 has published what is `shown` so; RunError M973 if it, or another one,
    failed.
    """
    since = time.monotonic()
    there = since
    while group.heard("published") is None:
        group.check()
        # rank 0 removes the folder last; a network file system shows the output later
        gone = not group.home.exists()
        there = there if gone else time.monotonic()
        if gone and is_there():
            return
        if time.monotonic() > there + SHOWN:
            fail(
                "M973",
                f"rank 0 is gone, and {printable(shown, 300)} is not there",
                help="look at what rank 0 said",
            )
        pause(since, group.home.poll)


def verify_by_ranks(
    opened: Source,
    made: Source,
    request: Request,
    *,
    ranks: Ranks,
    share: float | None,
    seed: int | None,
    **options: Any,
) -> VerifyReport:
    """`verify_output` by several processes, of which this is one; each returns the same.

    They meet in a folder beside `made`, or beside it in its bucket, which is removed. RunError as
    `write_by_ranks`, and M913 where that folder cannot be made; QuestionError M115 where `made` is
    in a store that nothing can be written to.
    """
    place = _beside(made.path)
    both = (("source", opened), ("output", made))
    identities = {
        f"{role} {name}": found
        for role, one in both
        for name, found in (one.identities() or {}).items()
    }
    question = (request.to, request.from_, request.files, request.params, sorted(request.allow))
    group: Group | None = None
    try:
        if not ranks.rank:
            _make_meeting_place(place)
        facts = facts_of(identities, repr((*question, request.at, share, seed)))
        group = meet(place, ranks, facts)
        if group.first:
            group.say("seed", {"seed": random.SystemRandom().randrange(1 << 32)})
        if share is not None and seed is None:
            seed = group.wait("seed")["seed"]
        report = verify_output(
            opened,
            made,
            request,
            share=share,
            seed=seed,
            compare=partial(_compare_together, group),
            ranks=ranks,
            **options,
        )
        if group.first:
            say_published(group)
        return report
    except BaseException as error:  # noqa: BLE001 - raised again
        fail_together(group, error)
    finally:
        if group is not None:
            group.leave()
            if group.first:
                _remove_meeting_place(place)


def _beside(path: str) -> Path | Meeting:
    """Where those meet that compare this output. M115 where there is no such place."""
    if not is_url(path):
        return Path(os.path.abspath(path) + SUFFIX) / RANKS
    if not path.startswith("s3://"):
        fail(
            "M115",
            f"ranks meet beside the output, and nothing can be written beside {printable(path)}",
            help=f"{option('ranks', 'off')} compares in one process; or download it",
        )
    from ..source.stores.s3_uploads import S3Output
    from .meeting_in_bucket import COMPARE, BucketMeeting

    return BucketMeeting(S3Output(path).words(COMPARE))


def _make_meeting_place(place: Path | Meeting) -> None:
    shown = str(place.parent) if isinstance(place, Path) else place.shown
    alone = f"{option('ranks', 'off')} compares in one process"
    try:
        if isinstance(place, Path):
            place.parent.mkdir(mode=0o700, exist_ok=True)
        else:
            require_quiet(place)
            place.replace("call.json", {})
            return
    except OSError as error:
        fail(
            "M913",
            f"cannot make {printable(shown, 300)}, in which the ranks meet: {refusal(error)}",
            help=alone,
        )
    except MigrateError as error:
        raise type(error)([replace(d, help=alone) for d in error.diagnostics]) from error
    require_quiet(place)


def _remove_meeting_place(place: Path | Meeting) -> None:
    if isinstance(place, Path):
        import shutil

        shutil.rmtree(place.parent, ignore_errors=True)
        return
    with suppress(MigrateError):
        place.clear()


def _compare_together(
    group: Group, work: Recomputation, threads: int, progress: Progress | None
) -> list[Mismatch]:
    """What differs of all outputs, in the program's order, as all processes together found it."""
    sizes = work.parts()
    total, done = sum(sizes.values()), 0
    own = set(deal(sizes, group.ranks.world)[group.ranks.rank])
    mine = copy(work)
    mine.jobs = [job for n, job in enumerate(work.jobs) if n in own]
    if work.sample is not None:
        kept = {key: one for key, one in work.sample.regions.items() if key in own}
        mine.sample = replace(work.sample, regions=kept)

    def count(now: int, _: int) -> None:
        nonlocal done
        done = now
        tell()

    def tell() -> None:
        group.check()
        group.progress(done)
        if progress is not None:
            progress(min(total, done + sum(group.done.values())), total)

    found = {one.key: one for one in mine.run(threads, count)}
    if not group.first:
        group.say("done", {"found": [asdict(one) for one in found.values()]})
        return [_mismatch(one) for one in group.wait("answer")["found"]]
    for rank in range(1, group.ranks.world):
        found |= {one["key"]: _mismatch(one) for one in group.wait("done", rank, tell)["found"]}
    answer = [found[key] for key in work.program if key in found]
    group.say("answer", {"found": [asdict(one) for one in answer]})
    return answer


def _mismatch(said: Mapping[str, Any]) -> Mismatch:
    index = said["index"]
    return Mismatch(
        said["key"], said["what"], None if index is None else tuple(index), said["detail"]
    )
