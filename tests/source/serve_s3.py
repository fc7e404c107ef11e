"""A child process: moto's S3, or a proxy of another server, with a log of its requests and with
faults on demand.

    python serve_s3.py [URL]    prints the port it listens on, and serves until its stdin is closed

`GET /__log` answers with [method, path, range, bytes sent] of each request since the last one.
`GET /__fault?KIND=PATTERN` has the next requests whose method and path match answered wrongly, or,
with `*N=PATTERN`, the one after N that match:
`truncate` cuts the body in half, `whole` ignores the range, `flip` changes a byte on the way in;
`shift` copies the range one byte before the one asked for;
`sums` lists the parts of an upload with their checksums, as S3 does and moto does not;
`fail` answers 500, `slow` 503, `stale` 412, `clash` 409, `moved` 301, `forbid` 403, `reject` 400;
`page` answers 200 with a page for people; `drop` does nothing and ends the connection, `lose` does
what was asked and ends it; `delay` does it half a second later; `hold` does nothing and `late` what
was asked, and neither answers. `GET /__held` answers when such a request has come.
What comes in is compared with its checksum, as S3 does.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import re
import select
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl, unquote

from awscrt import checksums
from werkzeug.serving import WSGIRequestHandler, make_server

_ANSWERS = {
    "fail": ("500 Internal Server Error", "InternalError"),
    "slow": ("503 Slow Down", "SlowDown"),
    "stale": ("412 Precondition Failed", "PreconditionFailed"),
    "clash": ("409 Conflict", "ConditionalRequestConflict"),
    "moved": ("301 Moved Permanently", "PermanentRedirect"),
    "reject": ("400 Bad Request", "InvalidRequest"),
    "forbid": ("403 Forbidden", "AccessDenied"),
}

_PAGE = b"<!DOCTYPE html><html><body>Please log in, and try again.</body></html>"

_OF_A_CONNECTION = ("connection", "date", "keep-alive", "server", "transfer-encoding")


_SUMS: dict[str, Callable[[bytes], bytes]] = {
    "X_AMZ_CHECKSUM_CRC32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "X_AMZ_CHECKSUM_CRC32C": lambda data: checksums.crc32c(data).to_bytes(4, "big"),
    "X_AMZ_CHECKSUM_CRC64NVME": lambda data: checksums.crc64nvme(data).to_bytes(8, "big"),
    "CONTENT_MD5": lambda data: hashlib.md5(data).digest(),
}


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        pass


class Forwarded:
    """An application that passes each request on as it is signed, and each answer back."""

    def __init__(self, url: str) -> None:
        self._address, self._kept = url.removeprefix("http://"), threading.local()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        headers = {
            name.removeprefix("HTTP_").replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_") and name not in ("HTTP_CONNECTION", "HTTP_EXPECT")
        }
        headers["Content-Length"] = str(length)
        if kind := environ.get("CONTENT_TYPE"):
            headers["Content-Type"] = kind
        connection = http.client.HTTPConnection(self._address)
        try:
            connection.request(environ["REQUEST_METHOD"], environ["REQUEST_URI"], body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        named = [pair for pair in answer.getheaders() if pair[0].lower() not in _OF_A_CONNECTION]
        if answer.getheader("Content-Length") is None:
            named.append(("Content-Length", str(len(content))))
        start(f"{answer.status} {answer.reason}", named)
        return [content]


class Watched:
    """The application, with each request in `log` and some answers spoilt."""

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()
        self._log: list[tuple[str, str, str, int]] = []
        self._faults: list[tuple[str, str]] = []
        self._held, self._free = threading.Event(), threading.Event()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path == "/__log":
            with self._lock:
                body, self._log = json.dumps(self._log).encode(), []
            start("200 OK", [("Content-Length", str(len(body)))])
            return [body]
        if path == "/__held":
            self._held.wait()
            start("200 OK", [("Content-Length", "0")])
            return [b""]
        if path == "/__fault":
            with self._lock:
                self._faults = parse_qsl(query)
            self._free.set()
            self._held, self._free = threading.Event(), threading.Event()
            start("200 OK", [("Content-Length", "0")])
            return [b""]
        method, asked = environ["REQUEST_METHOD"], environ.get("HTTP_RANGE", "")
        name = f"{method} {unquote(path)}"
        if query and (method in ("PUT", "POST", "DELETE") or "uploadId=" in query):
            name += f"?{query}"
        if "HTTP_X_AMZ_COPY_SOURCE" in environ:
            name += "&copy"
        if method == "POST" and "HTTP_X_AMZ_CHECKSUM_ALGORITHM" in environ:
            name += f"&{environ['HTTP_X_AMZ_CHECKSUM_ALGORITHM']}"
        fault = self._fault(name)
        if method == "PUT" and not self._right(environ, fault == "flip"):
            self._note(method, path, asked, 0)
            body = b"<Error><Code>BadDigest</Code><Message/></Error>"
            start("400 Bad Request", [("Content-Length", str(len(body)))])
            return [body]
        if fault == "whole":
            environ.pop("HTTP_RANGE", None)
        if fault == "shift":
            first, last = environ["HTTP_X_AMZ_COPY_SOURCE_RANGE"].removeprefix("bytes=").split("-")
            shifted = f"bytes={int(first) - 1}-{int(last) - 1}"
            environ["HTTP_X_AMZ_COPY_SOURCE_RANGE"] = shifted
        if fault in _ANSWERS:
            self._note(method, path, asked, 0)
            status, code = _ANSWERS[fault]
            body = f"<Error><Code>{code}</Code><Message/></Error>".encode()
            start(status, [("Content-Length", str(len(body))), ("Content-Type", "text/xml")])
            return [b"" if method == "HEAD" else body]
        if fault == "page":
            self._note(method, path, asked, 0)
            start("200 OK", [("Content-Length", str(len(_PAGE))), ("Content-Type", "text/html")])
            return [b"" if method == "HEAD" else _PAGE]
        if fault == "delay":
            time.sleep(0.5)
        if fault in ("drop", "lose"):
            if fault == "lose":
                b"".join(self._application(environ, lambda *_: None))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError(name)
        if fault in ("hold", "late"):
            done: list[bytes] = []
            if fault == "late":
                done.append(b"".join(self._application(environ, start)))
            free = self._free
            self._held.set()
            free.wait()
            if _gone(environ["werkzeug.socket"]):
                raise ConnectionResetError(name)
            return done or self(environ, start)
        if fault == "truncate":
            plain = start

            def start(status: str, headers: Any, *more: Any) -> Any:
                # a client would wait for the rest
                return plain(status, [*headers, ("Connection", "close")], *more)

        if fault == "sums":
            first = start

            def start(status: str, headers: Any, *more: Any) -> Any:
                # it is longer than the application says
                plain = [one for one in headers if one[0].lower() != "content-length"]
                return first(status, [*plain, ("Connection", "close")], *more)

        body = b"".join(self._application(environ, start))
        if fault == "sums":
            body = _with_sums(body)
        if fault == "truncate":
            body = body[: len(body) // 2]
        self._note(method, path, asked, len(body))
        return [body]

    def _fault(self, name: str) -> str:
        with self._lock:
            for at, (kind, like) in enumerate(self._faults):
                once = re.match(r"\*(\d+)=", like)
                if once is None:
                    if re.search(like, name):
                        return kind
                elif re.search(like[once.end() :], name):
                    left = int(once[1]) - 1
                    self._faults[at] = (kind, f"*{left}={like[once.end() :]}")
                    if left < 0:
                        del self._faults[at]
                        return kind
        return ""

    def _right(self, environ: dict[str, Any], flip: bool) -> bool:
        """Whether a body that comes in is what its checksum says; with `flip` it is changed."""
        said = {name: environ[f"HTTP_{name}"] for name in _SUMS if f"HTTP_{name}" in environ}
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if environ.get("HTTP_TRANSFER_ENCODING") or not (flip or said):
            return True
        data = bytearray(environ["wsgi.input"].read(length))
        if flip and data:
            data[len(data) // 2] ^= 1
        environ["wsgi.input"] = io.BytesIO(data)
        content = bytes(data)
        return all(base64.b64decode(value) == _SUMS[name](content) for name, value in said.items())

    def _note(self, method: str, path: str, asked: str, sent: int) -> None:
        with self._lock:
            self._log.append((method, path, asked, sent))


def _gone(client: socket.socket) -> bool:
    """Whether the other end, which waits for an answer and so sends nothing, is closed."""
    return bool(select.select([client], [], [], 0)[0]) and not client.recv(1, socket.MSG_PEEK)


def _with_sums(listed: bytes) -> bytes:
    """A list of parts as moto writes it, with the checksums of what it holds of them."""
    from moto.s3.models import s3_backends

    bucket, upload = (
        found[1].decode() if (found := re.search(f"<{name}>(.*?)<".encode(), listed)) else ""
        for name in ("Bucket", "UploadId")
    )
    if not upload:
        return listed
    made = s3_backends["123456789012"]["aws"].buckets[bucket].multiparts[upload]
    kind = made.metadata["x-amz-checksum-algorithm"]
    of = _SUMS[f"X_AMZ_CHECKSUM_{kind}"]

    def add(found: re.Match[bytes]) -> bytes:
        value = base64.b64encode(of(made.parts[int(found[1])].value)).decode()
        return found[0] + f"<Checksum{kind}>{value}</Checksum{kind}>".encode()

    return re.sub(rb"<PartNumber>(\d+)</PartNumber>", add, listed)


def main() -> None:
    if sys.argv[1:]:
        application: Any = Forwarded(sys.argv[1])
    else:
        from moto.moto_server import werkzeug_app as moto

        # which it takes from a package of that name, and without it computes another one
        sys.modules["crc32c"] = checksums
        application = moto.DomainDispatcherApplication(moto.create_backend_app)
    server = make_server("127.0.0.1", 0, Watched(application), threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
