"""A child process: moto's S3, with a log of its requests and with faults on demand.

    python serve_s3.py        prints the port it listens on, and serves until its stdin is closed

`GET /__log` answers with [method, path, range, bytes sent] of each request since the last one.
`GET /__fault?KIND=PATTERN` has the next requests whose method and path match answered wrongly:
`truncate` cuts the body in half, `whole` ignores the range, `fail` answers 500, `moved` 301.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl, unquote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        pass


class Watched:
    """The application, with each request in `log` and some answers spoilt."""

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()
        self._log: list[tuple[str, str, str, int]] = []
        self._faults: list[tuple[str, str]] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path == "/__log":
            with self._lock:
                body, self._log = json.dumps(self._log).encode(), []
            start("200 OK", [("Content-Length", str(len(body)))])
            return [body]
        if path == "/__fault":
            with self._lock:
                self._faults = parse_qsl(query)
            start("200 OK", [("Content-Length", "0")])
            return [b""]
        method, asked = environ["REQUEST_METHOD"], environ.get("HTTP_RANGE", "")
        name = f"{method} {unquote(path)}"
        fault = next((kind for kind, like in self._faults if re.search(like, name)), "")
        if fault == "whole":
            environ.pop("HTTP_RANGE", None)
        if fault in ("fail", "moved"):
            self._note(method, path, asked, 0)
            code = "InternalError" if fault == "fail" else "PermanentRedirect"
            body = f"<Error><Code>{code}</Code><Message/></Error>".encode()
            status = "500 Internal Server Error" if fault == "fail" else "301 Moved Permanently"
            start(status, [("Content-Length", str(len(body))), ("Content-Type", "text/xml")])
            return [b"" if method == "HEAD" else body]
        if fault == "truncate":
            plain = start

            def start(status: str, headers: Any, *more: Any) -> Any:
                # a client would wait for the rest
                return plain(status, [*headers, ("Connection", "close")], *more)

        body = b"".join(self._application(environ, start))
        if fault == "truncate":
            body = body[: len(body) // 2]
        self._note(method, path, asked, len(body))
        return [body]

    def _note(self, method: str, path: str, asked: str, sent: int) -> None:
        with self._lock:
            self._log.append((method, path, asked, sent))


def main() -> None:
    application = Watched(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
