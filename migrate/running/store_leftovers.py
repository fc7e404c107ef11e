"""What a run into a bucket has left there when it ended early, and throwing it away.

Uploads that do not show are billed like objects. Those of a run stand in its journal; all others
are somebody else's and stay, and so does what has appeared already.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any

from ..core.errors import fail, option, printable
from ..source.places import output_in_store
from ..source.stores.s3_uploads import PARTIAL, S3Output
from .meeting_in_bucket import COMPARE, RANKS
from .store_journal import begun_unnamed, own_words, parse_journal

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str) -> timedelta:
    """An age such as `90m`, `36h` or `2d`. M115 for anything else."""
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text.strip().lower(), re.ASCII)
    if found is None:
        fail("M115", f"{printable(repr(text))} is no age", help=option("older_than", "2d"))
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def clean_output(url: str, older_than: timedelta | None, dry_run: bool) -> dict[str, Any]:
    """Aborts the uploads of the run that has left a journal beside this output, and removes that;
    answers with what there was. Touches nothing with `dry_run`, or of a run whose journal was
    written since.
    """
    output = output_in_store(url)
    if output is None:
        fail(
            "M115",
            f"{printable(url, 240)}: is on this machine",
            help=f"remove {printable(url, 240)}{PARTIAL}: it is a folder",
        )
    if output.name.endswith(PARTIAL):
        output = S3Output(f"s3://{output.bucket}/{output.key.removesuffix(PARTIAL)}")
    there, every = output.read_journal(), output.uploads()
    found = None if there is None else parse_journal(there[0], output)
    ours: dict[str, str] = {}
    if found is not None:
        output.single = found.get("single") is True
        pairs = [(output.key_of(name), upload) for name, upload in found["uploads"].items()]
        pairs += begun_unnamed(found, output)
        ours = {upload: key for key, upload in pairs if upload in every}
    age = None if there is None else datetime.now(timezone.utc) - there[1]
    young = older_than is not None and age is not None and age < older_than
    held = {upload: output.parts(key, upload) or {} for upload, key in ours.items()}
    appeared = []
    if found is not None:
        made = ((key, output.head(key)) for key in output.objects(most=1000))
        appeared = [key for key, head in made if head is not None and head[1] == found["run"]]
    removed = found is not None and not dry_run and not young
    if found is not None and removed:
        for upload, key in ours.items():
            output.abort(key, upload)
        words = own_words(output.words().names(), found["run"]) if "begun" in found else ()
        removed = output.remove_journal(words)
    if not dry_run and not young:
        for name in (RANKS, COMPARE):
            output.words(name).remove(output.words(name).names())
    return {
        "path": output.location,
        "digest": None if found is None else found["digest"],
        "written": None if there is None else there[1].isoformat(),
        "removed": removed,
        "uploads": [
            {"key": key, "bytes": sum(part.size for part in held[upload].values())}
            for upload, key in sorted(ours.items(), key=lambda one: one[1])
        ],
        "foreign": sorted(key for upload, (key, _) in every.items() if upload not in ours),
        "appeared": appeared,
    }
