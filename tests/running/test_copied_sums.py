"""Checksums of stretches in a row, and of what a store copied of an object."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("awscrt")

from awscrt import checksums

from migrate.running.copied_sums import compare_object, copied_parts
from migrate.running.part_plan import PartPlan, UploadPart
from migrate.source.stores.checksums import checksum_named, decoded, joined_parts
from migrate.source.stores.s3_uploads import ListedPart

WIDTHS = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8}
PLAIN = {"CRC32": zlib.crc32, "CRC32C": checksums.crc32c, "CRC64NVME": checksums.crc64nvme}


def coded(name: str, data: bytes) -> str:
    return base64.b64encode(PLAIN[name](data).to_bytes(WIDTHS[name], "big")).decode()


class Held:
    """A blob in memory that counts what is read of it."""

    name = "model.safetensors"

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.read = data, len(data), 0

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]
        self.read += len(buffer)


@pytest.mark.parametrize("name", list(WIDTHS))
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_stretches_in_a_row_have_the_checksum_of_the_whole(name: str, parts: list[bytes]) -> None:
    kind = checksum_named(name)
    assert kind is not None
    whole = b"".join(parts)
    assert kind.joined((kind.of(part, 0), len(part)) for part in parts) == PLAIN[name](whole)
    if parts:
        listed = [{"Size": len(one), f"Checksum{name}": coded(name, one)} for one in parts]
        assert joined_parts(listed) == (name, PLAIN[name](whole), len(whole))
    assert decoded(name, coded(name, whole)) == PLAIN[name](whole)
    # of parts whose checksums were hashed once more
    assert decoded(name, f"{coded(name, whole)}-2") is None


@st.composite
def copies(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """An object, and stretches of it that were copied, some twice, some that overlap."""
    data = draw(st.binary(min_size=16, max_size=200))
    edges = sorted(draw(st.sets(st.integers(0, len(data)), min_size=2, max_size=6)))
    spans = list(pairwise(edges))
    spans += draw(st.lists(st.sampled_from(spans), max_size=2))
    first = draw(st.integers(0, len(data) - 2))
    return data, spans + draw(
        st.sampled_from([[], [(first, draw(st.integers(first + 1, len(data))))]])
    )


@given(copies(), st.sampled_from(list(WIDTHS)), st.data())
def test_a_part_that_was_copied_wrongly_is_found(
    made: tuple[bytes, list[tuple[int, int]]], name: str, chance: st.DataObject
) -> None:
    data, spans = made
    kind = checksum_named(name)
    assert kind is not None
    wrong = chance.draw(st.sampled_from([None, *range(len(spans))]))
    parts, listed, at = list[UploadPart](), dict[int, ListedPart](), 0
    for number, (start, stop) in enumerate(spans):
        content = bytearray(data[start:stop])
        if number == wrong:
            content[-1] ^= 1
        parts.append(UploadPart(at, at + stop - start, 0, start))
        listed[number + 1] = ListedPart(
            stop - start, {f"Checksum{name}": coded(name, bytes(content))}
        )
        at += stop - start
    blob: Any = Held(data)
    found = copied_parts(PartPlan({"out": parts}, None), {"out": listed}, kind)
    compared = compare_object(kind, PLAIN[name](data), blob, 0, found[0])
    covered = len({at for start, stop in spans for at in range(start, stop)})
    if compared.nbytes == 0:
        assert blob.read == 0
        assert len(data) - covered > len(data) // 8 or len(set(spans)) > 1
        return
    if wrong is None:
        assert (compared.part, compared.blob) == (None, None)
        assert blob.read <= len(data) // 8
    elif compared.part is not None:
        assert compared.part.part == parts[wrong]
    else:
        # it overlaps with others, and was not compared
        assert compared.blob is None
        assert compared.nbytes < sum(stop - start for start, stop in spans)


def test_an_object_that_is_not_what_its_checksum_says_is_told_from_a_wrong_copy() -> None:
    data, kind = bytes(range(64)), checksum_named("CRC64NVME")
    assert kind is not None
    listed = {1: ListedPart(64, {"ChecksumCRC64NVME": coded("CRC64NVME", data)})}
    found = copied_parts(PartPlan({"out": [UploadPart(0, 64, 3, 0)]}, None), {"out": listed}, kind)
    blob: Any = Held(data)
    compared = compare_object(kind, PLAIN["CRC64NVME"](data) ^ 1, blob, 3, found[3])
    assert (compared.part, compared.blob) == (None, 3)


def test_parts_without_checksums_and_of_other_kinds_are_not_compared() -> None:
    kind = checksum_named("CRC32C")
    assert kind is not None
    plan = PartPlan({"out": [UploadPart(0, 64, 0, 0), UploadPart(64, 70)]}, None)
    told = {"ETag": '"x"', "ChecksumCRC32": coded("CRC32", b"x")}
    assert not copied_parts(plan, {"out": {1: ListedPart(64, told)}}, kind)
    # a file that has appeared already has no parts any more
    assert not copied_parts(plan, {"out": {}}, kind)
    assert checksum_named("MD5") is None
    assert joined_parts([{"Size": 1, "ChecksumCRC32": coded("CRC32", b"x")}, {"Size": 1}]) is None


def test_the_checksum_of_an_object_that_was_uploaded_in_parts_is_that_of_these_in_a_row() -> None:
    """S3 keeps only a hash of their checksums, and tells those of the parts when it is asked."""
    boto3 = pytest.importorskip("boto3")
    from botocore.stub import Stubber

    from migrate.source.stores.s3_uploads import S3Output

    data = bytes(range(256)) * 40
    output = object.__new__(S3Output)
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    output._client = boto3.client("s3", **keys)
    asked = {"Bucket": "b", "Key": "k"}

    def pages() -> Iterator[dict[str, Any]]:
        for number in range(2):
            one = data[number * 5000 : (number + 1) * 5000 + 240 * number]
            part = {
                "PartNumber": number + 1,
                "Size": len(one),
                "ChecksumCRC32": coded("CRC32", one),
            }
            more = {"IsTruncated": not number, "NextPartNumberMarker": number + 1}
            yield {"ETag": "e-2", "ObjectParts": {"Parts": [part], **more}}

    with Stubber(output._client) as answers:
        head = {"ChecksumCRC32": "AAAAAA==-2", "ChecksumType": "COMPOSITE", "ETag": '"e-2"'}
        wanted = {**asked, "IfMatch": '"e-2"', "ChecksumMode": "ENABLED"}
        for size in (len(data), len(data) + 1):
            answers.add_response("head_object", head, wanted)
            for number, page in enumerate(pages()):
                more = {"ObjectAttributes": ["ETag", "ObjectParts"], "PartNumberMarker": number}
                answers.add_response("get_object_attributes", page, {**asked, **more})
            found = output.kept_checksum(("b", "k", '"e-2"'), size)
            assert found == (("CRC32", zlib.crc32(data)) if size == len(data) else None)
        # who may not ask for it compares nothing
        answers.add_response("head_object", head, wanted)
        answers.add_client_error("get_object_attributes", "AccessDenied", http_status_code=403)
        assert output.kept_checksum(("b", "k", '"e-2"'), len(data)) is None
        answers.assert_no_pending_responses()
