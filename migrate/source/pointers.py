"""Pointers of Git LFS: the small text files that stand where a clone without `git lfs` has no
weights.

The form is that of the Git LFS specification (docs/spec.md there): less than 1024 bytes, `version`
in the first line, then `oid` and `size`, in the order of their names.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Final

from .blobs import release

LARGEST: Final = 1024
# what every pointer begins with
HEAD: Final = b"version https://"
_POINTER: Final = re.compile(
    rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v1\r?\n(?:[a-z0-9.-]+ "
    rb"[^\n]*\n)*size ([0-9]{1,18})\r?\n?"
)


def pointer_size(descriptor: int) -> int | None:
    """The size in bytes of the file that an open file is a pointer to, None if it is none."""
    head = os.pread(descriptor, LARGEST, 0)
    found = _POINTER.match(head) if head.startswith(HEAD) else None
    return int(found[1]) if found else None


def is_pointer(name: str, folder: int) -> bool:
    """Whether a regular file in the folder, which is given by its descriptor, is a pointer."""
    try:
        descriptor = os.open(
            name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder
        )
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_size < LARGEST and pointer_size(descriptor) is not None
    except OSError:
        return False
    finally:
        release(descriptor)


# a pathlib.Path has lost the second slash; one letter would be a drive
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(.+)", re.IGNORECASE | re.DOTALL)
# as huggingface_hub allows them
_HUB_ID: Final = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_HUB_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
_KINDS: Final = {"datasets": "dataset", "spaces": "space"}


def is_url(text: str) -> bool:
    """Whether it is written like a URL."""
    return _SCHEME.fullmatch(text) is not None


def how_to_fetch(text: str) -> str | None:
    """The command that downloads what a URL or an id of the Hub names, as help for the one who gave
    it; None for any other name.
    """
    found = _SCHEME.fullmatch(text)
    if found is None:
        return (
            f"if this is a model on the Hugging Face Hub, download it first:  {_hub(text)}"
            if _HUB_ID.fullmatch(text)
            else None
        )
    scheme, rest = found[1].lower(), found[2]
    here = shlex.quote(rest.rstrip("/").rpartition("/")[2] or "CKPT")
    url = shlex.quote(text)
    host, _, path = rest.partition("/")
    if scheme == "hf":
        command = _hub(rest)
    elif scheme in ("http", "https"):
        command = _hub(path) if host.lower() in _HUB_HOSTS else f"curl -L -o {here} {url}"
    elif scheme == "s3":
        command = f"aws s3 cp --recursive {url} {here}"
    elif scheme == "gs":
        command = f"gcloud storage cp --recursive {url} {here}"
    elif scheme == "file":
        return "give the path without `file://`"
    else:
        return "download it first, and give the path of the folder"
    return f"download it first:  {command}"


def _hub(path: str) -> str:
    """`hf download` for `[datasets/]org/name[@revision][/{tree,blob,resolve}/revision][/file]`."""
    parts = [part for part in path.partition("?")[0].split("/") if part]
    kind = _KINDS.get(parts[0]) if len(parts) > 2 else None
    org, name, *more = [*(parts[1:] if kind else parts), "", ""][: max(2, len(parts) - bool(kind))]
    name, _, revision = name.partition("@")
    if len(more) > 1 and more[0] in ("tree", "blob", "resolve"):
        revision, more = more[1], more[2:]
    words = ["hf", "download", f"{org}/{name}" if name else org]
    words += ["/".join(more)] if more else []
    words += ["--repo-type", kind] if kind else []
    words += ["--revision", revision] if revision not in ("", "main") else []
    return shlex.join([*words, "--local-dir", name or org])
