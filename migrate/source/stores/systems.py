"""All other stores through fsspec: `gs://`, `az://`, `http(s)://`, `memory://` and whatever else
has a file system there. Credentials are those of the file system's own library.

Every read is of the version that was opened where the store can be told so: over HTTP and of Azure
by `If-Match`, of Google by the generation. Other file systems read without a condition, and whether
an object is still the same is asked when everything was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NoReturn

from ...core.errors import MigrateError, fail, printable
from ..urls import Url, hub_location
from .objects import Located, RemoteObject, refuse_range, refuse_without

HTTP: Final = ("http", "https")
GOOGLE: Final = ("gs", "gcs")
AZURE: Final = ("az", "abfs", "abfss")
LOCAL: Final = ("file", "local")
# what file systems call the version of an object, from the surest to the least
_VERSIONS: Final = (
    "generation", "etag", "ETag", "version_id", "Last-Modified", "md5Hash", "content_md5",
    "Content-MD5", "crc32c", "sha", "hex", "mtime", "updated", "last_modified", "LastModified",
    "modify", "modificationTime", "created",
)  # fmt: skip
_TIMES: Final = ("mtime", "updated", "last_modified", "LastModified", "created")
# what a user of adlfs may set for all requests
_AZURE_TIMEOUTS: Final = ("timeout", "connection_timeout", "read_timeout")
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
# of these, the headers that each answer of a web server has
_STAMPS: Final = ("ETag", "Last-Modified")
# what a web server answers that has no such file, and a store that has another one by now
_ABSENT: Final = (404, 410)
_OTHER: Final = (*_ABSENT, 412, 416)


def open_system(url: Url) -> tuple[Any, str]:
    """The file system that the URL leads to, and the path in it. M917 where there is none, M967."""
    shown = url.shown
    if url.scheme in LOCAL:
        fail(
            "M917",
            f"{printable(shown, 240)}: a URL",
            help=f"give the path without `{printable(url.scheme)}://`",
        )
    try:
        import fsspec  # noqa: F401 - the package decides, whatever of it is loaded
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError:
        refuse_without("fsspec", "stores", shown)
    try:
        system, path = url_to_fs(url.text)
    except ImportError:
        package = known_implementations.get(url.scheme, {}).get("class", "")
        library = package.partition(".")[0]
        if library == "fsspec":
            refuse_without("aiohttp", "stores", shown)
        fail(
            "M967",
            f"{printable(shown, 240)}: fsspec reads it through {printable(library)}, which is not "
            "installed",
            help=f"pip install {printable(library)}",
        )
    except ValueError:
        fail(
            "M917",
            f"{printable(shown, 240)}: no store is known for {printable(url.scheme)}://",
            help="s3://, gs://, az://, hf://, https:// and other protocols of fsspec are read",
        )
    return system, str(path)


def locate(url: Url) -> Located:
    """What the URL names: a file, or a folder."""
    shown = url.shown
    if url.scheme in HTTP and (meant := hub_location(url)) is not None:
        fail("M917", f"{printable(shown, 240)}: a page of the Hub", help=f"give {printable(meant)}")
    system, path = open_system(url)
    is_folder = path.endswith("/") or url.text.endswith("/")
    with asking(shown):
        try:
            if not is_folder:
                is_folder = system.info(path)["type"] == "directory"
        except FileNotFoundError as error:
            if url.scheme in HTTP:
                _raise_cause(error)
            fail(
                "M917",
                f"{printable(shown, 240)}: there is no such file or folder, or it is not shown to "
                "you",
                help="look at the spelling of the URL, and at who may read it",
            )
    make = _PREFIXES.get(url.scheme, SystemPrefix)
    if is_folder:
        return Located(make(system, path.rstrip("/") + "/", shown.rstrip("/") + "/"))
    above, _, name = path.rpartition("/")
    # a query belongs to the one file that it was signed for
    file, _, query = name.partition("?")
    store = make(system, above + "/", shown.rpartition("/")[0] + "/", f"?{query}" if query else "")
    return Located(store, store.find(file))


class SystemPrefix:
    """What a file system of fsspec has below a path."""

    fixed = False

    def __init__(self, system: Any, root: str, location: str, query: str = "") -> None:
        self._system, self._root, self.location, self._query = system, root, location, query

    def listing(self) -> Iterator[RemoteObject]:
        with asking(self.location):
            # a listing that is kept would say that nothing has changed
            self._system.invalidate_cache()
            try:
                walked = self._system.walk(self._root, detail=True, on_error="raise")
                for _, _, files in walked:
                    for found in files.values():
                        yield self._object(found["name"], found)
            except FileNotFoundError as error:
                self._absent(error)
                fail(
                    "M917",
                    f"{printable(self.location, 240)}: there is no such folder",
                    help="look at the spelling of the URL, and at who may read it",
                )

    def find(self, path: str) -> RemoteObject | None:
        with asking(self.location + path):
            self._system.invalidate_cache()
            try:
                found = self._system.info(self._root + path + self._query)
            except FileNotFoundError as error:
                self._absent(error)
                return None
        return RemoteObject(path, *facts(found, self.location + path))

    def _absent(self, error: FileNotFoundError) -> None:
        """Raises what stands behind the error, if that is something else than an absent file."""

    def _object(self, name: str, found: Any) -> RemoteObject:
        root = self._root.lstrip("/")
        path = name.lstrip("/")
        if not path.startswith(root):
            fail(
                "M907",
                f"{printable(self.location, 240)}: lists {printable(name)}, which lies elsewhere",
            )
        return RemoteObject(path[len(root) :], *facts(found, self.location))

    def fill(self, item: RemoteObject, start: int, buffer: memoryview) -> int:
        name = self.location + item.path
        with asking(name):
            path = self._root + item.path + self._query
            data = self._read(path, item.version, start, buffer.nbytes)
        if len(data) > buffer.nbytes:
            refuse_range(name)
        buffer[: len(data)] = data
        return len(data)

    def _read(self, path: str, version: str, start: int, size: int) -> bytes:
        """Bytes of this version, if the store can be asked for that alone."""
        data: bytes = self._system.cat_file(path, start=start, end=start + size)
        return data


class GooglePrefix(SystemPrefix):
    """What Google's store has below a path. `cat_file` of gcsfs takes a generation, and the store
    has no file where another one stands by now.
    """

    def _read(self, path: str, version: str, start: int, size: int) -> bytes:
        named = {"generation": version} if version.isdecimal() else {}
        data: bytes = self._system.cat_file(path, start=start, end=start + size, **named)
        return data


class AzurePrefix(SystemPrefix):
    """What Azure's store has below a path. `cat_file` of adlfs takes no condition, as the client
    does that adlfs reads through.
    """

    def _read(self, path: str, version: str, start: int, size: int) -> bytes:
        from fsspec.asyn import sync

        data: bytes = sync(self._system.loop, self._range, path, version, start, size)
        return data

    async def _range(self, path: str, version: str, start: int, size: int) -> bytes:
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        options = self._system.storage_options
        named = {name: options[name] for name in _AZURE_TIMEOUTS if name in options}
        if _is_strong(version):
            named |= {"etag": version, "match_condition": MatchConditions.IfNotModified}
        container, blob, _ = self._system.split_path(path)
        async with self._system.service_client.get_blob_client(container, blob) as client:
            try:
                stream = await client.download_blob(start, size, **named)
                data: bytes = await stream.readall()
            except HttpResponseError as error:
                if status_of(error) in _OTHER:
                    raise FileNotFoundError(path) from error
                raise
        return data


class HttpPrefix(SystemPrefix):
    """What a web server has below a URL, as far as its pages list it."""

    def _absent(self, error: FileNotFoundError) -> None:
        _raise_cause(error)

    def _object(self, name: str, found: Any) -> RemoteObject:
        # a page of links says nothing of sizes
        return super()._object(name, found if found.get("size") else self._system.info(name))

    def fill(self, item: RemoteObject, start: int, buffer: memoryview) -> int:
        from fsspec.asyn import sync

        name = self.location + item.path
        with asking(name):
            came: int = sync(self._system.loop, self._range, name, item, start, buffer)
        return came

    async def _range(self, name: str, found: RemoteObject, start: int, buffer: memoryview) -> int:
        import aiohttp

        url, options = self._root + found.path + self._query, {**self._system.kwargs}
        headers = {
            **options.pop("headers", {}),
            "Range": f"bytes={start}-{start + buffer.nbytes - 1}",
            # a range of what was compressed would be another
            "Accept-Encoding": "identity",
        }
        if _is_strong(found.version):
            headers["If-Match"] = found.version
        session = await self._system.set_session()
        async with session.get(self._system.encode_url(url), headers=headers, **options) as answer:
            if answer.status in _OTHER:
                raise FileNotFoundError(found.path)
            answer.raise_for_status()
            span = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status != 206 and buffer.nbytes != found.size:
                answer.close()
                refuse_range(name)
            if answer.status == 206 and (span is None or int(span[1]) != start):
                refuse_range(name)
            now = {answer.headers[name] for name in _STAMPS if name in answer.headers}
            size = int(span[3]) if span is not None and span[3] != "*" else found.size
            if size != found.size or (found.version and now and found.version not in now):
                raise FileNotFoundError(found.path)
            done = 0
            try:
                async for part in answer.content.iter_chunked(1 << 18):
                    part = part[: buffer.nbytes - done]
                    buffer[done : done + len(part)] = part
                    done += len(part)
            except aiohttp.ClientPayloadError:
                return done
            return done


_PREFIXES: Final[dict[str, type[SystemPrefix]]] = {
    **dict.fromkeys(HTTP, HttpPrefix),
    **dict.fromkeys(GOOGLE, GooglePrefix),
    **dict.fromkeys(AZURE, AzurePrefix),
}


def _is_strong(version: str) -> bool:
    """Whether it is an ETag that `If-Match` may name: one that begins with W/ never matches."""
    return version.startswith('"')


def facts(found: Any, shown: str) -> tuple[int, str, int]:
    """Size, version and time of an object, as its file system says them."""
    size = found.get("size")
    if not isinstance(size, int):
        fail(
            "M969",
            f"{printable(shown, 240)}: the server does not say how long the file is",
            help="download the checkpoint",
        )
    version = next((found[name] for name in _VERSIONS if found.get(name)), "")
    moment = next((found[name] for name in _TIMES if found.get(name)), None)
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    modified = int(moment) * 10**9 if isinstance(moment, (int, float)) else 0
    return size, str(version), modified


def status_of(error: BaseException) -> int | None:
    """The status of the answer that an error, or what caused it, is about."""
    seen: BaseException | None = error
    while seen is not None:
        for name in ("status", "code", "status_code"):
            found = getattr(seen, name, None)
            if isinstance(found, (int, str)) and str(found).isdecimal():
                return int(found)
        seen = seen.__cause__
    return None


def _raise_cause(error: FileNotFoundError) -> None:
    """Raises what fsspec calls an absent file whatever it was, unless the web server says that
    there is none.
    """
    cause = error.__cause__
    if cause is not None and status_of(cause) not in _ABSENT:
        raise cause


@contextmanager
def asking(shown: str, right: str = "read") -> Iterator[None]:
    """Raises what a file system raises as diagnostics. Its own words are left out: they may hold
    tokens. `right` is what it takes.
    """
    name = printable(shown, 240)
    try:
        yield
    except (MigrateError, FileNotFoundError, GeneratorExit, MemoryError):
        raise
    except PermissionError:
        _refuse(name, "", right)
    except Exception as error:  # noqa: BLE001 - each file system has exceptions of its own
        status = status_of(error)
        if status in (401, 403):
            _refuse(name, f" (status {status})", right)
        if type(error).__name__ in ("DefaultCredentialsError", "ClientAuthenticationError"):
            _refuse(name, f" ({type(error).__name__})", right)
        said = type(error).__name__ if status is None else f"status {status}"
        fail(
            "M969",
            f"{name}: the store does not answer as it should ({said})",
            help="look at the network and at the address, then run it again",
        )


def _refuse(name: str, said: str, right: str) -> NoReturn:
    fail(
        "M968",
        f"{name}: the store refuses{said}",
        help=f"log in as the library for this store says, or ask for the right to {right}",
    )
