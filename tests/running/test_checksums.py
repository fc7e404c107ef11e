"""CRC-32s through a run: put together from parts in the order of a file, whatever was hashed by
whom.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from itertools import pairwise

import pytest
from raw_files import describe, whole

from migrate.core.errors import CheckpointError
from migrate.running import tiles
from migrate.running.checks import FileChecksums, RecordedStretch
from migrate.running.geometry import ByteLayouts
from migrate.source.target import OutputFile, Placed
from migrate.source.zip_archive import ArchiveRecord

SIZES = [5, 0, 3 << 20, 1, 0, 2_500_001]


def sealed_file() -> tuple[OutputFile, dict[str, object], list[bytes]]:
    """A file that says after each tensor what the CRC-32s were so far, and what its tensors
    hold.
    """
    bits = random.Random(3)
    held = [bits.randbytes(n) for n in SIZES]
    placed, at = [], 8
    for number, content in enumerate(held):
        placed.append(Placed(f"t{number}", at, len(content)))
        at += len(content) + 4 * (number + 1)

    def seal(crcs: Sequence[int]) -> bytes:
        return b"".join(crc.to_bytes(4, "little") for crc in crcs)

    return (
        OutputFile("f", b"HEADER..", tuple(placed), at, seal),
        {f"t{i}": whole(f"t{i}", "uint8", (n,)) for i, n in enumerate(SIZES)},
        held,
    )


def run(sums: FileChecksums, file: OutputFile, outputs: dict, held: list[bytes]) -> bytes:
    out = bytearray(file.size)
    for tile in tiles.tiles(file, outputs, ByteLayouts()):
        for fill in tile.fills:
            data = memoryview(bytearray(fill.length))
            for part in fill.parts:
                if isinstance(part.content, bytes):
                    data[part.at : part.at + part.stop - part.start] = part.content[
                        part.start : part.stop
                    ]
                elif not isinstance(part.content, tiles.Sealed):
                    number = int(part.content.sources[0][1:])  # type: ignore[index]
                    data[part.at : part.at + part.stop - part.start] = held[number][
                        part.start : part.stop
                    ]
            sums.take(fill, sums.of(fill, data), data)
            out[fill.offset : fill.offset + fill.length] = data
    return bytes(out)


def test_what_follows_a_tensor_is_made_from_the_checksums_of_all_before_it() -> None:
    file, outputs, held = sealed_file()
    expected = b"HEADER.."
    for number, content in enumerate(held):
        expected += content + b"".join(
            zlib.crc32(c).to_bytes(4, "little") for c in held[: number + 1]
        )
    assert run(FileChecksums(file, {}), file, outputs, held) == expected


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    "borders",
    [
        [(0, SIZES[2])],
        [(0, 1), (1, 2 << 20), (2 << 20, SIZES[2])],
        [(7, 9), (1 << 20, (2 << 20) + 5), (SIZES[2] - 1, SIZES[2])],
    ],
    ids=["whole", "side by side", "apart"],
)
def test_checksums_that_the_source_records_are_compared_where_their_stretches_end(
    sealed: bool, borders: list[tuple[int, int]]
) -> None:
    file, outputs, held = sealed_file()
    if not sealed:
        outputs = {f"t{i}": whole(f"t{i}", "uint8", (n,)) for i, n in enumerate(SIZES)}
        file = describe(outputs).files[0]
    tensor = outputs["t2"]

    def recorded(wrong: int | None) -> dict[int, list[RecordedStretch]]:
        return {
            id(tensor): [
                RecordedStretch(
                    a,
                    b,
                    "in.pt",
                    ArchiveRecord(f"data/{n}", 64, b - a, zlib.crc32(held[2][a:b]) ^ (n == wrong)),
                )
                for n, (a, b) in enumerate(borders)
            ]
        }

    run(FileChecksums(file, recorded(None)), file, outputs, held)
    for number in range(len(borders)):
        with pytest.raises(CheckpointError, match=rf"in\.pt: data/{number}:"):
            run(FileChecksums(file, recorded(number)), file, outputs, held)


def test_a_tensor_may_lie_in_several_stretches_of_several_files() -> None:
    """Each place has a checksum of its own, and a record is compared in the place it lies in."""
    _, outputs, held = sealed_file()
    content = held[2]
    cuts = [0, 5, 2_500_000, len(content)]
    first = (Placed("t2", 1, cuts[1]), Placed("t2", 10, cuts[2] - cuts[1], cuts[1]))
    second = (Placed("t2", 3, cuts[3] - cuts[2], cuts[2]),)
    stretch = ArchiveRecord("data/2", 64, 100, zlib.crc32(content[1000:1100]))
    recorded = {id(outputs["t2"]): [RecordedStretch(1000, 1100, "in.pt", stretch)]}

    def seal(crcs: Sequence[int]) -> bytes:
        return crcs[-1].to_bytes(4, "little")

    one = OutputFile("one", b"H", first, 10 + cuts[2] - cuts[1] + 4, seal)
    other = OutputFile("other", b"HHH", second, 3 + cuts[3] - cuts[2] + 4, seal)
    crcs = [zlib.crc32(content[a:b]).to_bytes(4, "little") for a, b in pairwise(cuts)]
    expected = b"H" + content[: cuts[1]] + crcs[0] + content[cuts[1] : cuts[2]] + crcs[1]
    assert run(FileChecksums(one, recorded), one, outputs, held) == expected
    expected = b"HHH" + content[cuts[2] :] + crcs[2]
    assert run(FileChecksums(other, recorded), other, outputs, held) == expected


def test_a_target_with_a_hole_and_no_seal_is_refused() -> None:
    file, outputs, _ = sealed_file()
    with pytest.raises(ValueError, match="a hole"):
        list(
            tiles.tiles(
                OutputFile(file.name, file.header, file.tensors, file.size), outputs, ByteLayouts()
            )
        )  # type: ignore[arg-type]
