"""Run as a process of its own: reads mutants of small genuine files and counts what came of them.

Arguments: a JSON file of {"files": {kind: path}, "flips": number of mutants of each kind, "seed":
number}. Standard output: for each kind how many were opened and refused, what escaped, the dearest
in yardsticks, and the peak of memory in MB.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import work
from file_readers import FROM_BYTES, Bytes, known
from tripwire import peak

from migrate import formats
from migrate.core.errors import MigrateError
from migrate.source.pickle import machine
from migrate.source.pickle.nodes import ARCHIVE

LIMIT = 1 << 30  # bytes of address space: what wants more gets a MemoryError, and that would escape
MOST_ESCAPES = 5


def read_data_pkl(data: bytes) -> Any:
    """data.pkl without its archive, whose CRC would refuse every mutant before the machine sees
    it.
    """
    return known(
        machine.read_pickle(data, ARCHIVE, name="data.pkl", persistent=True),
        "data.pkl",
        {"0": 16, "1": 24},
    )


def from_place(path: Path, opened: Path) -> Callable[[bytes], Any]:
    """Opens what a user would pass, with the mutant in the place of the file."""

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        formats.open(opened).close()

    return read


def reader_of(kind: str, path: Path) -> Callable[[bytes], Any]:
    if kind == "data.pkl":
        return read_data_pkl
    if kind == "index":
        return from_place(path, path.parent)
    if kind.endswith("opened"):
        return from_place(path, path)
    return lambda data: FROM_BYTES[kind](Bytes(data))


def cut(raw: bytes) -> Iterator[bytes]:
    """The file cut before each of its bytes."""
    return (raw[:size] for size in range(len(raw)))


def flipped(raw: bytes, chance: random.Random, count: int) -> Iterator[bytes]:
    """Mutants of one to three bytes: any byte, a neighbour of what stood there, or one that stands
    elsewhere in the file.
    """
    for _ in range(count):
        mutant = bytearray(raw)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            at = chance.randrange(len(raw))
            mutant[at] = chance.choice(
                (
                    chance.randrange(256),
                    mutant[at] ^ (1 << chance.randrange(8)),
                    raw[chance.randrange(len(raw))],
                )
            )
        yield bytes(mutant)


def survey(read: Callable[[bytes], Any], mutants: Iterator[bytes]) -> dict[str, Any]:
    opened = refused = 0
    dearest = 0.0
    escaped: list[str] = []

    def look(mutant: bytes) -> None:
        nonlocal opened, refused
        try:
            read(mutant)
            opened += 1
        except MigrateError as error:
            refused += 1
            said = str(error)
            if (
                error.exit_code != 3
                or len(said) > 20_000
                or not all(c.isprintable() or c == "\n" for c in said)
            ):
                escaped.append(f"exit {error.exit_code}: {said[:300]}")
        except BaseException:  # noqa: BLE001 - whatever else comes out is the finding
            escaped.append(f"{mutant.hex()[:2000]}\n{traceback.format_exc()[-1500:]}")

    yardstick = work.processor(work.loop)
    for mutant in mutants:
        dearest = max(
            dearest, work.processor(lambda mutant=mutant: look(mutant), best_of=1) / yardstick
        )
        if len(escaped) >= MOST_ESCAPES:
            break
    return {"opened": opened, "refused": refused, "escaped": escaped, "dearest": dearest}


def main(asked: dict[str, Any]) -> dict[str, Any]:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    out: dict[str, Any] = {}
    for kind, path in asked["files"].items():
        raw = Path(path).read_bytes()
        read = reader_of(kind, Path(path))
        read(raw)
        chance = random.Random(f"{asked['seed']} {kind}")
        out[kind] = {
            "cut": survey(read, cut(raw)),
            "flipped": survey(read, flipped(raw, chance, asked["flips"])),
            "size": len(raw),
        }
    return out | {"memory": peak()}


if __name__ == "__main__":
    os.chdir(tempfile.gettempdir())
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
