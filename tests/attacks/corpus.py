"""The table of hostile inputs: every one has a name, the rows of the threat table in
docs/reference/security.md, a kind, and a builder.

    pt             a .pt archive                  legacy     a torch.save stream of before 1.6, a
    raw pickle safetensors    a file, an index or a folder   dcp        a folder with .metadata
    gguf           a GGUF file, or a folder of shards
    rules          a rule file

A live one does something when it is read the usual way: it creates the file whose path (the canary)
its builder was given. Whatever is stored in the repository is text that builds it; the bytes exist
in a temporary folder only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hostile_archives
import hostile_dcp
import hostile_gguf
import hostile_items
import hostile_legacy
import hostile_rules
import hostile_safetensors
from archives import archive, data_pkl, genuine_pickle
from hostile_streams import STREAMS, Stream

# kinds that the commands read; any other is no checkpoint to them (exit status 2), whatever it
# holds
READ = {"safetensors", "rules", "pt", "legacy", "dcp", "gguf"}
# streams that make a sound archive: bytes that nobody loads later, and values that are small and
# have 2 ** 50 places
DOUBLED = tuple(f"{kind}-doubled-through-the-memo" for kind in ("tuples", "lists", "dicts"))
SOUND = {"bytesio-that-is-loaded-later", *DOUBLED}
MISSING_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile input. `build(folder, canary)` makes it in an empty folder and gives the path
    that a user would pass.

    `exit` is what every command must leave with. `carried`: nothing is wrong with the file but a
    value in it that is not known, so that what only looks may answer, and a plan and a run must
    refuse. `late`: what is wrong shows only when the bytes of a tensor are read, so that a plan may
    answer as well.
    """

    name: str
    rows: str
    kind: str
    live: bool
    build: Callable[[Path, str], Path]
    exit: int = 3
    carried: bool = False
    late: bool = False

    @property
    def expected(self) -> int:
        return self.exit if self.kind in READ else MISSING_FORMAT


def _file(name: str, make: Callable[[str], bytes]) -> Callable[[Path, str], Path]:
    def build(folder: Path, canary: str) -> Path:
        path = folder / name
        path.write_bytes(make(canary))
        return path

    return build


def _planted(stream: Stream) -> Callable[[str], bytes]:
    """The archive that holds the stream: as data.pkl itself, or as a value beside a genuine
    tensor.
    """

    def make(canary: str) -> bytes:
        body = stream.build(canary)
        return archive(data_pkl(body if stream.whole else genuine_pickle(body)))

    return make


def _attacks() -> list[Attack]:
    out = [
        Attack(
            f"pt-{s.name}",
            s.rows,
            "pt",
            s.live and s.torch_runs,
            _file("m.pt", _planted(s)),
            carried=s.machine != "refuse",
        )
        for s in STREAMS
        if s.name not in SOUND
    ]
    out += [
        Attack(
            f"pt-{name}",
            rows,
            "pt",
            live,
            _file("m.pt", make),
            carried=name in hostile_archives.CARRIED,
            late=name in hostile_archives.LATE,
        )
        for name, rows, live, make in hostile_archives.ARCHIVES
    ]
    out += [
        Attack(f"legacy-{name}", rows, "legacy", live, _file("m.bin", make), carried=carried)
        for name, rows, live, make, carried in hostile_legacy.FILES
    ]
    folders = (*hostile_safetensors.FOLDERS, *hostile_items.FOLDERS)
    out += [
        Attack(
            f"safetensors-{name}",
            rows,
            "safetensors",
            False,
            build,
            carried=name in hostile_items.CARRIED,
        )
        for name, rows, build in folders
    ]
    out += [
        Attack(f"gguf-{name}", rows, "gguf", False, build)
        for name, rows, build in hostile_gguf.FOLDERS
    ]
    out += [
        Attack(f"dcp-{name}", rows, "dcp", live, build, carried=name in hostile_dcp.CARRIED)
        for name, rows, live, build in hostile_dcp.FOLDERS
    ]
    out += [
        Attack(f"rules-{name}", rows, "rules", live, build, exit=2)
        for name, rows, live, build in hostile_rules.FILES
    ]
    return out


ATTACKS = _attacks()
BY_NAME = {attack.name: attack for attack in ATTACKS}
