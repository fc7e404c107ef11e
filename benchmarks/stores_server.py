"""moto's S3 in a process of its own, which counts what passes and can be far away.

    python stores_server.py    prints the port it listens on, and serves until its stdin is closed

`GET /__passed` answers with the bytes of bodies [sent, received] since it was asked last. `GET
/__far?SECONDS` has every request from then on wait so long before it is answered.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import FakeKey
from werkzeug.serving import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        pass


class Counted:
    """The application, with what passes."""

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()
        self._passed, self._far = [0, 0], 0.0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/__"):
            body = b""
            with self._lock:
                if path == "/__passed":
                    body, self._passed = json.dumps(self._passed).encode(), [0, 0]
                else:
                    self._far = float(environ["QUERY_STRING"])
            start("200 OK", [("Content-Length", str(len(body)))])
            return [body]
        if self._far:
            time.sleep(self._far)
        body = b"".join(self._application(environ, start))
        with self._lock:
            self._passed[0] += len(body)
            self._passed[1] += int(environ.get("CONTENT_LENGTH") or 0)
        return [body]


def keep_bytes() -> None:
    """Has the bytes of objects kept beside moto's own copy: it reads a whole object for each range
    of it, which no store does.
    """
    plain = FakeKey.value

    def put(self: Any, content: bytes) -> None:
        plain.fset(self, content)
        self.__dict__["held"] = bytes(content)

    FakeKey.value = property(lambda self: self.__dict__["held"], put)


def main() -> None:
    keep_bytes()
    application = Counted(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
