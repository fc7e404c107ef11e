"""Checkpoints in stores, by URL: buckets, the Hugging Face Hub, and whatever fsspec reaches.

    s3       S3 and what speaks its protocol, through boto3: the extra `s3`
             (`s3_uploads`: what is written there)
    hub      models and datasets of the Hub, at one commit, through huggingface_hub: the extra `hub`
             (`hub_output`: what is committed there)
    systems  all other protocols, through fsspec: the extra `stores`
             (`system_output`: what is written there)

Each is a `Store` in a module of its own, imported when a URL asks for it. Signatures, credentials,
retries and endpoints are the library's business, and are set as it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..local import LocalFolder
from ..paths import Folder, Place
from ..urls import Url, split_url
from .objects import Located, StoreFolder, check_url

if TYPE_CHECKING:
    from .hub_output import HubOutput
    from .s3_uploads import S3Output
    from .system_output import SystemOutput

HUB, S3 = "hf", ("s3", "s3a")


def open_place(text: str, at: str | None = None) -> Place:
    """The place that a URL names. M905, M907, M914, M915, M917, M967 to M969."""
    located = _locate(_checked(text))
    folder, where = _folder(located), located.store.location
    try:
        if located.file is None:
            return Place(where, folder, None, tuple(folder.names()), at)
        name = located.file.path
        return Place(where + name, folder, folder.open(name), (name,), at)
    except BaseException:
        folder.close()
        raise


def open_folder(text: str) -> Folder:
    """The folder that a URL names, or the one that the file there lies in."""
    return _folder(_locate(_checked(text)))


def open_hub(text: str) -> HubOutput | None:
    """The repository that a URL names as an output; None for another store."""
    if _checked(text).scheme != HUB:
        return None
    from .hub_output import HubOutput

    return HubOutput(text)


def open_output(text: str) -> S3Output | SystemOutput | None:
    """The bucket, or the folder of another store, that a URL as an output leads to; None for the
    Hub.
    """
    if _checked(text).scheme == HUB:
        return None
    if split_url(text).scheme in S3:
        from .s3_uploads import S3Output

        return S3Output(text)
    from .system_output import SystemOutput

    return SystemOutput(text)


def _checked(text: str) -> Url:
    """The parts of a URL; M907."""
    url = split_url(text)
    check_url(url)
    return url


def _folder(located: Located) -> Folder:
    if located.copy is not None:
        # the links of a cache, which the library has made
        return LocalFolder(located.copy, True)
    found = StoreFolder(located.store)
    if located.file is not None:
        found.known(located.file)
    return found


def _locate(url: Url) -> Located:
    if url.scheme in S3:
        from .s3 import locate
    elif url.scheme == HUB:
        from .hub import locate
    else:
        from .systems import locate
    return locate(url)
