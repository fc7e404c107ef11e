"""A server of S3 in processes of its own, and a proxy before it, which counts what passes and can
be far away.

    python stores_server.py ceph|ministack|moto

Prints a line of JSON: the server's name, its URL, that of the proxy, key and secret. Then it
serves until its stdin is closed, and answers each line of it: `passed` with the bytes [sent,
received] by the server through the proxy since it was asked last, `far SECONDS` with nothing, when
every request through the proxy waits so long before it is passed on.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "source"))
import bucket_servers

# what the objects of all runs of a row may take
MEMORY = 8 << 30
CHUNK = 1 << 18


@contextmanager
def moto() -> Iterator[bucket_servers.Running]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import FakeKey
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    # moto reads a whole object for each range of it, which no store does
    plain = FakeKey.value

    def put(self: Any, content: bytes) -> None:
        plain.fset(self, content)
        self.__dict__["held"] = bytes(content)

    FakeKey.value = property(lambda self: self.__dict__["held"], put)
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield bucket_servers.Running(f"http://127.0.0.1:{server.server_port}", "key", "secret")


class Proxy:
    """Passes connections on to a server on this machine."""

    def __init__(self, port: int) -> None:
        self._port, self._lock = port, threading.Lock()
        self.passed, self.far = [0, 0], 0.0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # set while the next bytes of the client begin a request
            begins = threading.Event()
            begins.set()
            for way in ((server, client, 0), (client, server, 1)):
                threading.Thread(target=self._pass, args=(*way, begins), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, way: int, begins: Any) -> None:
        memory = memoryview(bytearray(CHUNK))
        with suppress(OSError):
            while came := one.recv_into(memory):
                if way == 1 and begins.is_set():
                    begins.clear()
                    time.sleep(self.far)
                with self._lock:
                    self.passed[way] += came
                # `100 Continue` is no answer
                if way == 0 and memory[9:12] != b"100":
                    begins.set()
                other.sendall(memory[:came])
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)


NAMES = {"ceph": "Ceph's gateway", "ministack": "ministack", "moto": "moto"}


def there() -> list[str]:
    """The servers that are installed; moto where no other is."""
    return [kind for kind in bucket_servers.STARTED if bucket_servers.missing(kind) is None] or [
        "moto"
    ]


def main() -> None:
    kind = sys.argv[1]
    starting = {
        "ceph": lambda: bucket_servers.ceph(MEMORY),
        "ministack": bucket_servers.ministack,
        "moto": moto,
    }
    with starting[kind]() as server:
        proxy = Proxy(int(server.url.rpartition(":")[2]))
        said = [NAMES[kind], server.url, proxy.url, server.key, server.secret]
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            what, _, number = line.strip().partition(" ")
            answer = None
            if what == "far":
                proxy.far = float(number)
            else:
                answer, proxy.passed = proxy.passed, [0, 0]
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
