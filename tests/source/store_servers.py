"""Stores that tests start: moto's S3 in a child process, or a proxy there before the server of
others, a web server with ranges, a small hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlencode
from urllib.request import urlopen

SERVE = Path(__file__).parent / "serve_s3.py"
COMMIT, MOVED, MADE = "a" * 40, "b" * 40, "c" * 40


class Sent(NamedTuple):
    """A request that a server answered, with the bytes that it sent."""

    method: str
    path: str
    range: str
    sent: int


class S3:
    """The server in its child process, empty."""

    def __init__(self, url: str) -> None:
        import boto3

        self.url = url
        self.client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="planted-key",
            aws_secret_access_key="planted-secret",
        )
        self.client.create_bucket(Bucket="bucket")

    def put(self, folder: Path, prefix: str) -> str:
        """Uploads a folder, and answers with its URL."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                key = f"{prefix}/{file.relative_to(folder).as_posix()}"
                self.client.put_object(Bucket="bucket", Key=key, Body=file.read_bytes())
        return f"s3://bucket/{prefix}"

    def log(self) -> list[Sent]:
        """The requests since it was asked last."""
        with urlopen(f"{self.url}/__log") as answer:
            return [Sent(*one) for one in json.load(answer)]

    def wait_until_held(self) -> None:
        """Until a request has come that is never answered."""
        urlopen(f"{self.url}/__held").close()

    def spoil(self, **faults: str) -> None:
        """Has answers spoilt from now on: kind of fault -> pattern of method and path."""
        urlopen(f"{self.url}/__fault?{urlencode(faults)}").close()


@contextmanager
def s3_server(*of: str) -> Iterator[S3]:
    """moto, or a proxy of the server that has this URL."""
    child = subprocess.Popen(
        [sys.executable, str(SERVE), *of], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        yield S3(f"http://127.0.0.1:{int(child.stdout.readline())}")
    finally:
        child.communicate()


class Served(ThreadingHTTPServer):
    """A server in a thread, with what it was asked for in `log`."""

    daemon_threads = True

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.log: list[Sent] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(handler: Any) -> Iterator[Served]:
    server = Served(handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Files(BaseHTTPRequestHandler):
    """A folder over HTTP, with ranges and conditions; `ranges` says whether it knows them, `signed`
    is the query without which a file is not given, and `stamp` what it says of a file's version.
    """

    protocol_version = "HTTP/1.1"

    def __init__(
        self,
        *arguments: Any,
        root: Path,
        ranges: bool = True,
        signed: str = "",
        stamp: Literal["strong", "weak", "time"] = "strong",
    ) -> None:
        self.root, self.ranges, self.signed, self.stamp = root, ranges, signed, stamp
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        sent = 0 if self.command == "HEAD" else len(body)
        path = unquote(self.path)
        self.server.log.append(Sent(self.command, path, self.headers.get("Range", ""), sent))

    def do_GET(self) -> None:
        place = self.root / unquote(self.path.partition("?")[0]).lstrip("/")
        if place.is_dir():
            names = [p.name + "/" * p.is_dir() for p in sorted(place.iterdir())]
            links = "".join(f'<a href="{name}">{name}</a>' for name in names)
            return self.answer(200, links.encode(), Content_Type="text/html")
        if not place.is_file():
            return self.answer(404)
        if self.signed not in self.path:
            return self.answer(403)
        return self.file(place)

    def file(self, place: Path, **more: str) -> None:
        body = place.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        strong = self.stamp == "strong"
        if self.headers.get("If-Match", tag) != tag or ("If-Match" in self.headers and not strong):
            return self.answer(412)
        if self.stamp == "time":
            more["Last_Modified"] = formatdate(zlib.crc32(body), usegmt=True)
        else:
            more["ETag"] = tag if strong else f"W/{tag}"
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not (asked and self.ranges):
            return self.answer(200, body, **more)
        first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
        if first >= len(body):
            return self.answer(416)
        span = f"bytes {first}-{last}/{len(body)}"
        return self.answer(206, body[first : last + 1], Content_Range=span, **more)

    do_HEAD = do_GET


def web_server(root: Path, **named: Any) -> Any:
    return serving(partial(Files, root=root, **named))


class Pushed:
    """What a hub was sent: tips of branches that were made, each commit as what it went to and its
    operations, and large files by their hash.
    """

    def __init__(self) -> None:
        self.branches: dict[str, str] = {}
        self.commits: list[tuple[str, list[dict[str, Any]]]] = []
        self.large: dict[str, bytes] = {}
        self.forbidden = False

    def files(self) -> dict[str, bytes]:
        """The files of the only commit."""
        ((_, operations),) = self.commits
        found = {}
        for one in operations:
            value = one["value"]
            if one["key"] == "file":
                found[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                found[value["path"]] = self.large[value["oid"]]
        return found

    def removed(self) -> set[str]:
        ((_, operations),) = self.commits
        return {one["value"]["path"] for one in operations if one["key"] == "deletedFile"}


class Hub(Files):
    """A hub of one repository, `org/model`, whose `main` is the commit `at[0]`; `org/old` has moved
    there and `org/gated` is gated. Weights are on another host, as on the real one. What is
    committed is kept in `pushed`.
    """

    def __init__(
        self, *arguments: Any, root: Path, at: list[str], other: str, pushed: Pushed
    ) -> None:
        self.at, self.other, self.pushed = at, other, pushed
        super().__init__(*arguments, root=root)

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": place.relative_to(self.root).as_posix(),
                "size": place.stat().st_size,
                "oid": hashlib.sha1(place.read_bytes()).hexdigest(),
            }
            for place in sorted(self.root.rglob("*"))
            if place.is_file()
        ]

    def json(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path.startswith("/api/models/org/gated"):
            return self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="Access restricted")
        if path.startswith("/api/models/org/model/tree/"):
            return self.json(self.tree())
        if found := re.fullmatch(r"/api/models/org/(model|old)(?:/revision/(.+))?", path):
            if (found[2] or "main") not in ("main", *self.at, *self.pushed.branches):
                return self.answer(404, X_Error_Code="RevisionNotFound")
            sha = self.at[0] if found[2] in (None, "main") else found[2]
            sha = self.pushed.branches.get(sha, sha)
            return self.json({"id": "org/model", "sha": sha, "siblings": [], "tags": []})
        found = re.fullmatch(r"/org/model/resolve/([^/]+)/(.+)", path)
        if found is None or found[1] not in self.at:
            return self.answer(404, X_Error_Code="RepoNotFound")
        place = self.root / found[2]
        if not place.is_file():
            return self.answer(404, X_Error_Code="EntryNotFound")
        if place.suffix == ".safetensors":
            tag = hashlib.sha256(place.read_bytes()).hexdigest()
            size = str(place.stat().st_size)
            more = {"X_Linked_ETag": f'"{tag}"', "X_Linked_Size": size, "ETag": f'"{tag}"'}
            where = f"{self.other}/{found[2]}"
            return self.answer(302, Location=where, X_Repo_Commit=found[1], **more)
        return self.file(place, X_Repo_Commit=found[1])

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        path, pushed = unquote(path), self.pushed
        if self.headers.get("Authorization") != "Bearer hf_planted" or pushed.forbidden:
            return self.answer(403)
        if found := re.fullmatch("/api/models/org/model/branch/(.+)", path):
            pushed.branches[found[1]] = self.at[0]
            return self.answer(200)
        if path.startswith("/api/models/org/model/preupload/"):
            asked = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            files = [
                {
                    "path": one["path"],
                    "uploadMode": modes[one["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for one in asked
            ]
            return self.json({"files": files})
        if path == "/org/model.git/info/lfs/objects/batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.other}/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.json({"objects": objects, "transfer": "basic"})
        found = re.fullmatch("/api/models/org/model/commit/(.+)", path)
        if found is None:
            return self.answer(404)
        lines = [json.loads(line) for line in body.splitlines()]
        tip = pushed.branches.get(found[1], self.at[0])
        if lines[0]["value"].get("parentCommit", tip) != tip:
            return self.answer(412)
        to = "pull request" if "create_pr=1" in query else found[1]
        pushed.commits.append((to, lines[1:]))
        made = {"commitUrl": f"{self.server.url}/org/model/commit/{MADE}", "commitOid": MADE}
        return self.json({**made, "pullRequestUrl": f"{self.server.url}/org/model/discussions/7"})


class Elsewhere(Files):
    """Where the hub keeps weights: no token is to arrive there."""

    def __init__(self, *arguments: Any, root: Path, pushed: Pushed | None = None) -> None:
        self.pushed = pushed or Pushed()
        super().__init__(*arguments, root=root)

    def do_GET(self) -> None:
        if self.headers.get("Authorization"):
            return self.answer(400)
        return super().do_GET()

    do_HEAD = do_GET

    def _chunk(self) -> bytes:
        found = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return found

    def do_PUT(self) -> None:
        if (length := self.headers.get("Content-Length")) is not None:
            body = self.rfile.read(int(length))
        else:
            body = b"".join(iter(self._chunk, b""))
        right = hashlib.sha256(body).hexdigest() == self.path.lstrip("/")
        if right:
            self.pushed.large[self.path.lstrip("/")] = body
        self.answer(200 if right else 400)


class HubServers(NamedTuple):
    """The hub, what it keeps weights on, and the commits that it knows, that of `main` first."""

    hub: Served
    weights: Served
    at: list[str]
    pushed: Pushed


@contextmanager
def hub_server(root: Path) -> Iterator[HubServers]:
    at, pushed = [COMMIT], Pushed()
    # another name of the host is another host
    with serving(partial(Elsewhere, root=root, pushed=pushed)) as weights:
        other = f"http://localhost:{weights.server_port}"
        with serving(partial(Hub, root=root, at=at, other=other, pushed=pushed)) as hub:
            yield HubServers(hub, weights, at, pushed)
