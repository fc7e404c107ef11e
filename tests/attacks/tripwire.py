"""Run as a process of its own: gives hostile inputs to our readers and commands under an audit
hook, and writes down what happened.

The hook sees what an attack needs whatever its disguise: pickle's lookups, processes, sockets,
files opened for writing, imports of modules that the payloads name. It cannot be taken out again,
hence the process of its own. Arguments: a JSON file of jobs (see `main`) and one for the answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import work

# what payloads name and nothing of ours needs
NAMED = {
    "attack_touches_on_import",
    "transformer_engine",
    "megatron",
    "timeit",
    "runpy",
    "marshal",
    "shelve",
    "pty",
    "commands",
    "nt",
    "torch.jit",
    "distutils",
    "webbrowser",
    "sqlite3",
    "ctypes.util",
    "code",
    "pdb",
}
EVENTS = (
    "pickle.", "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork",
    "os.startfile", "socket.", "ctypes.", "pty.",
    "webbrowser.", "urllib.", "ftplib.", "http.", "sqlite3.", "os.chmod", "os.link", "os.symlink",
    "setopencodehook",
)  # fmt: skip
CHANGES = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.truncate", "shutil.")
# what a run itself asks the system's library for
OWN = ("fallocate", "renameat2")
ADDRESSES = {
    ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    for name in OWN
    if hasattr(ctypes.CDLL(None), name)
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

seen: list[str] = []
state: dict[str, Any] = {"armed": False, "allowed": "", "act": ""}


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not state["armed"]:
        return
    if event == "import":
        if any(arguments[0] == name or arguments[0].startswith(name + ".") for name in NAMED):
            seen.append(f"import {arguments[0]}")
    elif event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & WRITING and not inside(path):
            seen.append(f"open {path!r} for writing")
    elif (
        (event == "ctypes.dlopen" and arguments[0] is None)
        or (event == "ctypes.dlsym" and arguments[1] in OWN)
        or (event == "ctypes.call_function" and arguments[0] in ADDRESSES)
    ):
        return
    elif (
        event in ("ctypes.cdata", "ctypes.cdata/buffer")
        and sys.version_info >= (3, 15)
        and state["act"] == "command"
    ):
        # the addresses of the arguments of these
        return
    elif event == "ctypes.cdata" and state["act"] == "load":
        # the memory of a parameter, as bytes
        return
    elif event.startswith(EVENTS) or (event.startswith(CHANGES) and not inside(arguments[0])):
        seen.append(f"{event} {ascii(arguments)[:120]}")


def inside(path: Any) -> bool:
    """Whether the path lies in the folder that may be written to; a name relative to a descriptor
    has no slash.
    """
    if isinstance(path, int):
        return True
    text = os.fsdecode(path)
    return (
        text.startswith(state["allowed"])
        if text.startswith("/")
        else "/" not in text and text not in ("", ".", "..")
    )


def command(arguments: list[str]) -> dict[str, Any]:
    """One command line in this process."""
    from migrate.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(arguments)
    return {"exit": status, "out": out.getvalue()[:20_000], "err": err.getvalue()[:20_000]}


def api(verb: str, arguments: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """One function of the Python interface; its answer, or the status of the error it raised."""
    import migrate
    from migrate.core.errors import MigrateError

    try:
        getattr(migrate, verb)(*arguments, **keywords)
    except MigrateError as error:
        return {"exit": error.exit_code, "out": "", "err": str(error)[:20_000]}
    return {"exit": 0, "out": "", "err": ""}


def load(path: str, allow: list[str]) -> dict[str, Any]:
    """The file streamed into a live module that takes whatever fits it; whether its one parameter
    was touched is the output.
    """
    import torch

    import migrate
    from migrate.core.errors import MigrateError

    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.full((4,), 7.0))
    status, said = 0, ""
    try:
        migrate.load(model, path, strict=False, allow=allow)
    except MigrateError as error:
        status, said = error.exit_code, str(error)[:20_000]
    return {
        "exit": status,
        "out": "" if torch.equal(model.w, torch.full((4,), 7.0)) else "written",
        "err": said,
    }


def stream(path: str, limits: str) -> dict[str, Any]:
    """The pickle machine alone."""
    from migrate.source.pickle import nodes as presets
    from migrate.source.pickle.machine import read_pickle

    return reader(
        lambda: read_pickle(
            Path(path).read_bytes(),
            getattr(presets, limits),
            name="stream",
            persistent=limits == "ARCHIVE",
        )
    )


def container(path: str) -> dict[str, Any]:
    """Container, machine and decoders without a command around them."""
    from file_readers import read_path

    return reader(lambda: read_path(Path(path)))


def unsafe(path: str) -> dict[str, Any]:
    """The usual way, to see that the tripwire trips."""
    import pickle

    with contextlib.suppress(Exception):
        pickle.loads(Path(path).read_bytes())
    return {"exit": 0, "out": "", "err": ""}


def reader(call: Callable[[], Any]) -> dict[str, Any]:
    from migrate.core.errors import MigrateError

    try:
        made = call()
    except MigrateError as error:
        return {
            "exit": error.exit_code,
            "out": "",
            "err": str(error)[:20_000],
            "code": error.diagnostics[0].code,
        }
    return {"exit": 0, "out": type(made).__name__, "err": "", "code": ""}


def peak() -> int:
    """The most memory this process has had, in MB. Not ru_maxrss, which begins with what the parent
    had.
    """
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) // 1024 if found else 0


ACTS: dict[str, Callable[..., dict[str, Any]]] = {
    "command": command,
    "api": api,
    "load": load,
    "stream": stream,
    "container": container,
    "unsafe": unsafe,
}


def act(job: dict[str, Any]) -> dict[str, Any]:
    """What the job gives, or what it raised."""
    try:
        return ACTS[job["act"]](*job["arguments"])
    except BaseException:  # noqa: BLE001 - whatever came out is the finding
        return {"exit": "raised", "out": "", "err": traceback.format_exc()[-4000:]}


def main(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to `{"act": …, "arguments": […], "canary": path, "allowed": folder, "absent":
    [paths]}`, in order.

    Each answer has the exit status, the output, the cost in yardsticks, what the tripwire saw, and
    which of `absent` and the canary exist.
    """
    answers: list[dict[str, Any]] = []
    if any(job["act"] == "load" for job in jobs):
        # torch imports what payloads name as well; a hostile file must not be what brings it
        load("", [])
    sys.addaudithook(hook)
    for number, job in enumerate(jobs):
        if number % 16 == 0:
            yardstick = work.processor(work.loop)
        seen.clear()
        os.environ["ATTACK_CANARY"] = job["canary"]
        state.update(armed=True, allowed=job["allowed"], act=job["act"])
        spent = work.processor(lambda job=job: answers.append(act(job)), best_of=1)
        state["armed"] = False
        answer = answers[-1]
        answer["cost"] = spent / yardstick
        answer["seen"] = list(seen)
        answer["there"] = [p for p in (*job["absent"], job["canary"]) if os.path.lexists(p)]
        answer["memory"] = peak()
    return answers


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
