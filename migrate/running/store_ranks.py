"""Several processes of one launcher that write into a bucket: each is a part of the run, and rank 0
publishes.

    rank 0                                    the others
        what an earlier run left is refused, unless this one resumes it
        meet: all are there and see the same plan and source
        as a part (`store_parts`)             as a part; "done"
        wait for all "done"                   wait for the end
        publish what parts wrote; "published"
        wait until all have left              leave
        remove what is left of the meeting

What parts say that they did stays beside the journal, so what was done before a rank died need not
be done again, by as many ranks or by one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.errors import MigrateError, fail
from ..core.types import Ranks, RunPart
from ..source.stores.s3_uploads import S3Output
from .meeting_in_bucket import RANKS, BucketMeeting
from .parts import Begun, publish_parts, write_part
from .rank_run import RankProgress, fail_together, say_published, wait_for_the_end
from .ranks import Group, facts_of, meet, require_quiet
from .resources import RunResult
from .store_journal import refuse_left
from .store_parts import StorePartRun
from .store_run import kept_uploads

if TYPE_CHECKING:
    from ..planning.graph import Tensor, ValueCheck
    from ..source.index import Source
    from ..source.target import Target
    from .resources import RunOptions
    from .restored import RestoredParts


class StoreRankRun(StorePartRun):
    """The steps of one rank: those of a part, which is run again with `--resume`."""

    def _kept(self, error: MigrateError) -> MigrateError:
        return kept_uploads(error, self.output)


def write_to_bucket_by_ranks(
    outputs: Mapping[str, Tensor],
    source: Source,
    target: Target,
    out: S3Output,
    *,
    checks: Sequence[ValueCheck] = (),
    options: RunOptions,
    ranks: Ranks,
    begun: Begun,
    digest: str,
    parts: RestoredParts | None = None,
    **named: Any,
) -> RunResult:
    """As `write_by_ranks`, into a bucket. What was uploaded is kept whatever happens, and does not
    show.
    """
    if source.identities() is None:
        fail("M115", "several processes cannot share a checkpoint that is in memory")
    told = RankProgress(sum(file.size for file in target.files), options.progress)
    named |= {"digest": digest, "kind": StoreRankRun}
    named["options"] = replace(options, progress=told)
    what, part = (outputs, source, target, out), RunPart(ranks.rank, ranks.world)
    place, group = BucketMeeting(out.words(RANKS)), None
    try:
        if not ranks.rank:
            if not options.resume and out.read_journal() is not None:
                refuse_left(out)
            require_quiet(place)
        told.group = group = meet(place, ranks, facts_of(source.identities(), digest))
        done = write_part(*what, checks=checks, part=part, begun=begun, parts=parts, **named)
        if not group.first:
            with _keeping(out):
                group.say("done")
                wait_for_the_end(group, out.location, lambda: bool(out.objects(most=1)))
            own = {name: dict(one) for name, one in done.files.items()}
            return RunResult(own, sum(t.spec.nbytes for t in outputs.values()), done.bytes_written)
        with _keeping(out):
            for rank in range(1, ranks.world):
                group.wait("done", rank, told.tell)
        # what this process hashed it has said, as the others have
        again = None if parts is None else replace(parts)
        result = publish_parts(*what, of=ranks.world, parts=again, **named)
        say_published(group)
        return replace(result, idle=sum(not own for own in done.dealt))
    except BaseException as error:  # noqa: BLE001 - raised again
        fail_together(group, error)
    finally:
        _leave(group, place)


@contextmanager
def _keeping(out: S3Output) -> Iterator[None]:
    """Has errors say what can be done with what was uploaded."""
    try:
        yield
    except MigrateError as error:
        raise kept_uploads(error, out) from error


def _leave(group: Group | None, place: BucketMeeting) -> None:
    if group is None:
        return
    group.leave()
    if group.first and group.heard("published") is not None:
        with suppress(MigrateError):
            place.clear()
