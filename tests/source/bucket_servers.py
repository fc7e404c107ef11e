"""S3 servers of others, in processes that the tests start: Ceph's gateway, where Debian's packages
are installed, and ministack, where `make .venv-ministack/.ready` has made its environment.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

MINISTACK = Path(__file__).parents[2] / ".venv-ministack/bin/ministack"
PACKAGES = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
# a monitor, one OSD in memory and a gateway; nothing is proven to another, all is on loopback
_CEPH = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = {home}/run
pid file = {home}/run/$name.pid
admin socket = {home}/run/$name.asok
log file = {home}/log/$name.log
log to stderr = false
keyring = {home}/keyring
mon data = {home}/mon
mon allow pool size one = true
mon max pg per osd = 1000
osd data = {home}/osd
osd objectstore = memstore
# what is deleted is collected at once: requests to a full store never end
memstore device bytes = {memory}
osd memory target = 939524096
osd op num shards = 2
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {home}/rgw
rgw thread pool size = 32
rgw gc obj min wait = 1
rgw gc processor period = 1
# with the gateway's own choice, secure, it does not reach a monitor that proves nothing
ms mon client mode = crc
"""
# these packages allocate by glibc, which gives back each buffer that is let go of; Ceph's own by
# tcmalloc, which keeps them
_KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}


class Running(NamedTuple):
    """Where a server listens, and who may do everything there."""

    url: str
    key: str
    secret: str


def missing(kind: str) -> str | None:
    """Why a server cannot be started here; None if it can."""
    if kind == "ceph":
        tools = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "setpriv")
        lacks = [name for name in tools if shutil.which(name) is None]
        return f"there is no {lacks[0]}: {PACKAGES}" if lacks else None
    return None if MINISTACK.exists() else "make .venv-ministack/.ready makes its environment"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _process(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this one, however that ends."""
    dying = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    child = subprocess.Popen(
        [*dying, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _until_answered(url: str, child: subprocess.Popen[bytes]) -> None:
    """Until something listens there, whatever it says."""
    while child.poll() is None:
        try:
            with urlopen(url):
                return
        except HTTPError:
            return
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
    raise AssertionError(f"{child.args} ended with status {child.returncode}")


@contextmanager
def ministack() -> Iterator[Running]:
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        named = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
        with _process(str(MINISTACK), TMPDIR=folder, **named) as child:
            url = f"http://127.0.0.1:{port}"
            _until_answered(url, child)
            yield Running(url, "planted-key", "planted-secret")


@contextmanager
def ceph(memory: int = 2 << 30) -> Iterator[Running]:
    """Ceph's gateway over a store of so many bytes."""
    found = Running(f"http://127.0.0.1:{_free_port()}", "planted-key", "planted-secret")
    # a socket's name has at most 107 characters
    with tempfile.TemporaryDirectory(prefix="ceph-", dir="/tmp") as folder, ExitStack() as stack:
        home, cluster = Path(folder), str(uuid.uuid4())
        for name in ("mon", "osd", "rgw", "log", "run"):
            (home / name).mkdir()
        (home / "keyring").touch()
        v1, v2, conf = _free_port(), _free_port(), home / "ceph.conf"
        port = found.url.rpartition(":")[2]
        conf.write_text(
            _CEPH.format(fsid=cluster, home=home, v1=v1, v2=v2, port=port, memory=memory)
        )

        def ask(tool: str, *arguments: str) -> None:
            done = subprocess.run(
                [tool, "-c", str(conf), *arguments], capture_output=True, text=True
            )
            if done.returncode:
                raise AssertionError(f"{tool} {arguments[0]}: {done.stderr}")

        def start(tool: str, *arguments: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(
                _process(tool, "-c", str(conf), "-f", *arguments, **_KEEPING)
            )

        where, osd = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]", str(uuid.uuid4())
        chart = str(home / "monmap")
        ask("monmaptool", "--create", "--fsid", cluster, "--addv", "a", where, chart)
        ask("ceph-mon", "--mkfs", "-i", "a", "--monmap", chart)
        start("ceph-mon", "-i", "a")
        # waits for the monitor
        ask("ceph", "osd", "new", osd)
        ask("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", "-i", "0")
        gateway = start("radosgw", "-n", "client.rgw")
        _until_answered(found.url, gateway)
        user = ["--uid=tests", "--display-name=tests"]
        keys = [f"--access-key={found.key}", f"--secret-key={found.secret}"]
        ask("radosgw-admin", "-n", "client.rgw", "user", "create", *user, *keys)
        yield found


STARTED = {"ceph": ceph, "ministack": ministack}
