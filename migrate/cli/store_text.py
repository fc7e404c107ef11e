"""Text of what commands answer about buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import plural
from .terminal import safe, size


def stored(doc: Mapping[str, Any]) -> list[str]:
    """How the output of a run comes into a bucket, if it does."""
    found = doc.get("store")
    if found is None:
        return []
    passed = f"{size(found['passed'])} through this machine, {plural(found['requests'], 'request')}"
    if not found["copied"]:
        return [f"store: {passed}; nothing is copied by the store: {found['why']}"]
    how, compared = "", found.get("compared", 0)
    if found.get("read_back"):
        how = ", read and compared"
    elif compared == found["copied"]:
        how = ", compared by checksums and not read"
    elif compared:
        how = f", not read, {size(compared)} of it compared by checksums"
    elif "read_back" in found:
        how = ", not read"
    return [f"store: {size(found['copied'])} copied by the store{how}, {passed}"]


def cleaned(doc: Mapping[str, Any]) -> str:
    doc = safe(doc)
    uploads, nbytes = doc["uploads"], sum(one["bytes"] for one in doc["uploads"])
    if doc["digest"] is None:
        lines = [f"no run has left anything at {doc['path']}"]
    else:
        what = f"{plural(len(uploads), 'unfinished upload')} with {size(nbytes)}, and a journal"
        how = "removed" if doc["removed"] else "left, and not removed"
        lines = [f"{doc['path']}: {what} of {doc['written']}: {how}"]
    lines += [f"  {one['key']}  {size(one['bytes'])}" for one in uploads]
    lines += [f"an upload of others, which stays: {key}" for key in doc["foreign"]]
    lines += [f"an object that the run has made, which stays: {key}" for key in doc["appeared"]]
    return "\n".join(lines)
