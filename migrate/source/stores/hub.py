"""The Hugging Face Hub through huggingface_hub. `hf://org/model@revision` is resolved to a commit
once, and everything is read at that commit, so nothing can change while it is read.

Tokens, endpoint and cache are those of the library. A commit that is in the cache as a whole is
read from there, and so is everything while `HF_HUB_OFFLINE` is set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Any, Final
from urllib.parse import unquote

from ...core import log
from ...core.errors import fail, printable
from ..urls import Url
from .objects import Located, RemoteObject, refuse_range, refuse_without

_KINDS: Final = {"datasets": "dataset", "spaces": "space"}
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_FORM: Final = "hf://ORG/MODEL, hf://ORG/MODEL@REVISION or hf://ORG/MODEL@REVISION/FILE"


def locate(url: Url) -> Located:
    """What the URL names, at the commit that its revision is now."""
    shown = url.shown
    try:
        import huggingface_hub as hub
    except ImportError:
        refuse_without("huggingface_hub", "hub", shown)
    kind, repo, revision, path = split_names(url)
    offline = hub.is_offline_mode()
    commit, files = revision, dict[str, RemoteObject]()
    if not offline:
        with asking(shown):
            api = hub.HfApi()
            found = api.repo_info(repo, repo_type=kind, revision=revision)
            if found.id != repo:
                fail(
                    "M917",
                    f"{printable(shown, 240)}: is called {printable(found.id)} now",
                    help=f"give hf://{printable(found.id)}",
                )
            commit = found.sha
            for one in api.list_repo_tree(repo, recursive=True, revision=commit, repo_type=kind):
                # folders have no size
                if (size := getattr(one, "size", None)) is not None:
                    files[one.path] = RemoteObject(one.path, size, one.blob_id)
    copy = _cached(hub, repo, kind, commit, files, shown, offline)
    if offline and copy is not None:
        commit = os.path.basename(copy)
        for above, _, names in os.walk(copy):
            for name in names:
                place = os.path.join(above, name)
                one = os.path.relpath(place, copy)
                files[one] = RemoteObject(one, os.path.getsize(place), commit)
    prefix = "" if kind == "model" else f"{kind}s/"
    log.debug("%s is commit %s", printable(shown, 240), commit)
    commits = HubCommit(repo, kind, commit, files, f"hf://{prefix}{repo}@{commit}/")
    if path in files:
        folder, _, name = path.rpartition("/")
        file = files[path]._replace(path=name)
        return Located(commits.below(folder), file, copy and os.path.join(copy, folder))
    if path and not any(name.startswith(path + "/") for name in files):
        fail(
            "M917",
            f"{printable(shown, 240)}: there is no such file or folder at this revision",
            help=f"look at the spelling: {_FORM}",
        )
    return Located(commits.below(path), None, copy and os.path.join(copy, path))


def split_names(url: Url) -> tuple[str, str, str | None, str]:
    """Kind, repository, revision and path of a URL."""
    names = [part for part in url.rest.split("/") if part]
    kind = _KINDS.get(names[0], "model") if names else "model"
    names = names[1:] if kind != "model" else names
    if len(names) < 2:
        fail("M917", f"{printable(url.shown, 240)}: names no repository", help=_FORM)
    name, at, revision = names[1].partition("@")
    rest = names[2:]
    # of pull requests and conversions, which have slashes in their names
    if revision == "refs" and len(rest) > 1:
        revision, rest = "/".join((revision, *rest[:2])), rest[2:]
    if at and not revision:
        fail("M917", f"{printable(url.shown, 240)}: names no revision after `@`", help=_FORM)
    return kind, f"{names[0]}/{name}", unquote(revision) or None, "/".join(rest)


def _cached(
    hub: Any,
    repo: str,
    kind: str,
    commit: str | None,
    files: dict[str, RemoteObject],
    shown: str,
    offline: bool,
) -> str | None:
    """The folder of the cache that has all files of a commit; M917 offline, where there is none."""
    try:
        copy: str = hub.snapshot_download(
            repo, repo_type=kind, revision=commit, local_files_only=True
        )
    except (OSError, ValueError):
        if offline:
            fail(
                "M917",
                f"{printable(shown, 240)}: is not in the cache, and HF_HUB_OFFLINE is set",
                help="unset it, or download it where there is a network",
            )
        return None
    whole = all(os.path.exists(os.path.join(copy, name)) for name in files)
    return copy if whole else None


class HubCommit:
    """The files of a repository at one commit, below `root`."""

    fixed = True

    def __init__(
        self,
        repo: str,
        kind: str,
        commit: str | None,
        files: dict[str, RemoteObject],
        location: str,
        root: str = "",
    ) -> None:
        self._repo, self._kind, self._commit, self._files = repo, kind, commit, files
        self.location, self._root = location + root, root

    def below(self, folder: str) -> HubCommit:
        if not folder:
            return self
        return HubCommit(
            self._repo, self._kind, self._commit, self._files, self.location, folder + "/"
        )

    def listing(self) -> Iterator[RemoteObject]:
        at = len(self._root)
        for path, found in self._files.items():
            if path.startswith(self._root):
                yield found._replace(path=path[at:])

    def find(self, path: str) -> RemoteObject | None:
        found = self._files.get(self._root + path)
        return None if found is None else found._replace(path=path)

    def fill(self, item: RemoteObject, start: int, buffer: memoryview) -> int:
        import huggingface_hub as hub
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        name = self.location + item.path
        with asking(name):
            url = hub.hf_hub_url(
                self._repo, self._root + item.path, repo_type=self._kind, revision=self._commit
            )
            headers = {
                **build_hf_headers(),
                "Range": f"bytes={start}-{start + buffer.nbytes - 1}",
                # a range of what was compressed would be another
                "Accept-Encoding": "identity",
            }
            with http_stream_backoff("GET", url, headers=headers) as answer:
                hf_raise_for_status(answer)
                span = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if span is None and (answer.status_code == 206 or buffer.nbytes != item.size):
                    refuse_range(name)
                if span is not None and int(span[1]) != start:
                    refuse_range(name)
                if span is not None and int(span[3]) != item.size:
                    raise FileNotFoundError(item.path)
                length = answer.headers.get("Content-Length", str(item.size))
                if span is None and length != str(item.size):
                    refuse_range(name)
                done = 0
                try:
                    for part in answer.iter_raw():
                        part = part[: buffer.nbytes - done]
                        buffer[done : done + len(part)] = part
                        done += len(part)
                        if done == buffer.nbytes:
                            break
                except Exception as error:  # noqa: BLE001 - whatever the library's transport raises
                    log.debug("%s: %s", printable(name, 240), type(error).__name__)
                return done


@contextmanager
def asking(shown: str) -> Iterator[None]:
    """Raises what the library raises as diagnostics. Its own words are left out: they hold URLs."""
    from huggingface_hub import errors as found

    name = printable(shown, 240)
    log_in = "`hf auth login` keeps a token, and HF_TOKEN takes one"
    try:
        yield
    except found.GatedRepoError:
        fail(
            "M968",
            f"{name}: is gated, and access has not been granted to you",
            help=f"ask for access on the page of the repository; {log_in}",
        )
    except found.RevisionNotFoundError:
        fail("M917", f"{name}: the repository has no such revision", help=_FORM)
    except found.RepositoryNotFoundError:
        fail(
            "M917",
            f"{name}: there is no such repository, or it is private and not shown to you",
            help=log_in,
        )
    except found.EntryNotFoundError:
        fail(
            "M905",
            f"{name}: is no longer there, at a commit that had it",
            help="the history of the repository was rewritten: run it again without that commit",
        )
    except found.HFValidationError:
        fail("M917", f"{name}: names no repository", help=_FORM)
    except found.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            fail("M968", f"{name}: the Hub refuses (status {status})", help=log_in)
        fail("M969", f"{name}: the Hub fails (status {status})", help="run it again later")
    except (JSONDecodeError, KeyError, TypeError):
        fail(
            "M969",
            f"{name}: what answers does not speak as the Hub does",
            help="a proxy, a page for logging in or another server answers at that address: look "
            "at HF_ENDPOINT and HTTPS_PROXY",
        )
    except (found.OfflineModeIsEnabled, found.HTTPError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        fail(
            "M969",
            f"{name}: the Hub does not answer ({type(error).__name__})",
            help="look at the network and at HF_ENDPOINT, then run it again",
        )
