"""CRC-32s through a run: put together from parts in the order of a file, whatever was hashed by
whom.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import pytest
from raw_files import describe, whole

from migrate.core.errors import CheckpointError
from migrate.running import tiles
from migrate.running.checks import RecordedChecksum
from migrate.running.geometry import ByteLayouts
from migrate.running.tiles import FileChecksums
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
def test_a_checksum_that_the_source_records_is_compared_at_the_end_of_its_tensor(
    sealed: bool,
) -> None:
    file, outputs, held = sealed_file()
    if not sealed:
        outputs = {f"t{i}": whole(f"t{i}", "uint8", (n,)) for i, n in enumerate(SIZES)}
        file = describe(outputs).files[0]
    tensor = outputs["t2"]
    right = RecordedChecksum("in.pt", ArchiveRecord("data/2", 64, SIZES[2], zlib.crc32(held[2])))
    run(FileChecksums(file, {id(tensor): right}), file, outputs, held)
    wrong = RecordedChecksum(
        "in.pt", ArchiveRecord("data/2", 64, SIZES[2], zlib.crc32(held[2]) ^ 1)
    )
    with pytest.raises(CheckpointError, match=r"in\.pt: data/2"):
        run(FileChecksums(file, {id(tensor): wrong}), file, outputs, held)


def test_a_target_with_a_hole_and_no_seal_is_refused() -> None:
    file, outputs, _ = sealed_file()
    with pytest.raises(ValueError, match="a hole"):
        list(
            tiles.tiles(
                OutputFile(file.name, file.header, file.tensors, file.size), outputs, ByteLayouts()
            )
        )  # type: ignore[arg-type]
