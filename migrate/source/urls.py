"""Locations that are URLs: taken apart, and shown without what they keep secret."""

from __future__ import annotations

import re
import shlex
from typing import Final, NamedTuple

# a pathlib.Path has lost the second slash; one letter would be a drive
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(.+)", re.IGNORECASE | re.DOTALL)
# as huggingface_hub allows them
_HUB_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
# of Azure: CONTAINER@ACCOUNT, as hosts are written there
_AZURE: Final = ("abfs", "abfss", "az", "wasb", "wasbs")
_HUB_ID: Final = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)


class Url(NamedTuple):
    """A URL as it was given, its scheme in lower case, and what follows the slashes. `shown` is
    what messages, plans and stamps call it: without user, password, query and fragment, in which
    keys and signatures stand.
    """

    text: str
    scheme: str
    rest: str
    shown: str


def is_url(text: str) -> bool:
    """Whether it is written like a URL."""
    return _SCHEME.fullmatch(text) is not None


def split_url(text: str) -> Url:
    """The parts of what `is_url` takes for one; ValueError for anything else."""
    found = _SCHEME.fullmatch(text)
    if found is None:
        raise ValueError("not a URL")
    scheme, rest = found[1].lower(), found[2].lstrip("/")
    if scheme in ("http", "https"):
        shown = re.split("[?#]", rest, maxsplit=1)[0]
        host, slash, path = shown.partition("/")
        shown = host.rpartition("@")[2] + slash + path
    elif scheme == "hf":
        shown = rest
    else:
        # a name in front of the first slash has no `@`, unless a secret stands there
        host, slash, path = rest.partition("/")
        before, at, after = host.rpartition("@")
        container = at and scheme in _AZURE and ":" not in before
        shown = (host if container else after) + slash + path
    return Url(f"{scheme}://{rest}", scheme, rest, f"{scheme}://{shown}")


def shown_url(text: str) -> str:
    """A location as messages show it: a URL without its secrets, all else as it is."""
    return split_url(text).shown if is_url(text) else text


def hub_location(url: Url) -> str | None:
    """What a page of the Hugging Face Hub is about, as the URL that is read; None for others, a
    download of one file among them.
    """
    host, _, path = url.shown.partition("://")[2].partition("/")
    if host.lower() not in _HUB_HOSTS:
        return None
    names = [name for name in path.split("/") if name]
    first = 1 if names and names[0] in ("datasets", "spaces") else 0
    repo, rest = names[: first + 2], names[first + 2 :]
    if len(repo) < first + 2 or rest[:1] == ["resolve"]:
        return None
    revision = f"@{rest[1]}" if len(rest) > 1 else ""
    return "/".join([f"hf://{'/'.join(repo)}{revision}", *rest[2:]])


def how_to_fetch(text: str) -> str | None:
    """The command that downloads what an id of the Hub names, as help for the one who gave it in
    place of a path; None for any other name.
    """
    if _HUB_ID.fullmatch(text) is None:
        return None
    return (
        f"if this is a model on the Hugging Face Hub, give hf://{text}, or download it first:  "
        f"hf download {shlex.quote(text)} --local-dir {shlex.quote(text.partition('/')[2])}"
    )
