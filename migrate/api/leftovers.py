"""What runs into stores have left there."""

from __future__ import annotations

from ..core.types import PathLike
from ..planning.request import path_text
from ..results import CleanReport


def clean(out: PathLike, *, older_than: str | None = None, dry_run: bool = False) -> CleanReport:
    """Throw away what a run into a store left when it ended early: in S3 its uploads and its
    journal, in other stores the files of a run that was killed.

    What is of others and objects that have appeared are named, and stay.

    Args:
        out: The output of that run, a URL.
        older_than: Only if its journal, or its last file, was written longer ago, such as "36h" or
            "2d". Default: None, whatever its age.
        dry_run: Only look. Default: False.

    Returns:
        A `CleanReport`.

    Raises:
        MigrateError: M115 for wrong arguments, M926 for anything but a run's journal, M968 or M969
            where the store refuses or fails.

    Example:
        >>> migrate.clean("s3://models/new").removed
        True
    """
    from ..running.store_leftovers import clean_output, parse_age

    age = None if older_than is None else parse_age(older_than)
    return CleanReport.of(**clean_output(path_text("out", out), age, dry_run))
