"""The rule files that changed since a commit, as git knows them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from ..core.errors import fail, option, printable

# the repository's configuration names programs of its owner's; comparing names needs none of them
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


def changed_since(ref: str, files: Iterable[Path]) -> list[Path]:
    """Those of the files that differ from what the commit `ref` holds, or that it does not hold.

    M115 where they lie in no repository, where git is not installed, and for a `ref` that it does
    not know.
    """
    if not ref or ref.startswith("-"):
        fail("M115", f"`{printable(ref)}` is no commit", help=f"such as {option('since', 'main')}")
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        by_folder.setdefault(file.absolute().parent, []).append(file)
    known: dict[Path, set[str]] = {}
    out = []
    for folder, those in by_folder.items():
        top = _top(folder)
        if top not in known:
            commit = _git(
                top,
                ref,
                "rev-parse",
                "--verify",
                "--quiet",
                f"{ref}^{{commit}}",
            )
            changed = _git(
                top, ref, "diff", "--name-only", "-z", "--no-renames", "--no-ext-diff",
                "--no-textconv", commit.decode().strip(), "--",
            )  # fmt: skip
            new = _git(top, ref, "ls-files", "--others", "--exclude-standard", "-z")
            known[top] = {os.fsdecode(name) for name in (changed + new).split(b"\0")}
        real = folder.resolve()
        out += [file for file in those if os.path.relpath(real / file.name, top) in known[top]]
    return out


def _top(folder: Path) -> Path:
    """The root of the repository that the folder lies in."""
    out = _git(folder, None, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(out.removesuffix(b"\n"))).resolve()


def _git(folder: Path, ref: str | None, *words: str) -> bytes:
    """What git says in the folder; `ref` is the commit that is asked about."""
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        said = subprocess.run(
            ["git", "-C", str(folder), *_QUIET, *words],
            stdin=subprocess.DEVNULL, capture_output=True, env=quiet, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        fail("M115", f"{option('since')} asks git, which is not installed")
    except (OSError, ValueError) as error:
        # no argument can hold a zero byte
        fail("M115", f"{option('since')} asks git, which cannot be started: {error}")
    if said.returncode:
        _refuse(folder, ref, said.stderr)
    return said.stdout


def _refuse(folder: Path, ref: str | None, stderr: bytes) -> NoReturn:
    notes = tuple(
        printable(line, 300) for line in stderr.decode("utf-8", "replace").splitlines()[:3]
    )
    if ref is not None:
        fail(
            "M115",
            f"git knows no commit `{printable(ref)}` in {printable(str(folder), 300)}",
            notes=notes,
            help=f"such as {option('since', 'main')}; a shallow clone holds the last commits alone",
        )
    fail(
        "M115",
        f"{option('since')} asks git, and {printable(str(folder), 300)} lies in no repository",
        notes=notes,
        help="name files of a repository, or leave it out",
    )
