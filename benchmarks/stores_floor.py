"""The least that bucket to bucket takes through boto3: as many bytes in as many requests as a run
has made, and nothing else. No plan, no journal, nothing looked up before or compared after.

    python stores_floor.py BUCKET OLD NEW PASSED PARTS HELD

The weight files of OLD make one upload. All of their bytes but the first PASSED are copied by the
store, the others are read and uploaded with their MD5; both in PARTS parts, of which HELD that are
uploaded are held at once.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import boto3
from botocore.config import Config

# requests at a time of those that copy
FLIGHT = 16


def evenly(files: list[Any], start: int, stop: int, count: int) -> Iterator[tuple[Any, int, int]]:
    """About so many ranges of files in a row, between two bytes of all of them."""
    step, at = -(-(stop - start) // max(1, count)), 0
    for one in files:
        low, high = max(start - at, 0), min(stop - at, one["Size"])
        pieces = max(1, round((high - low) / step)) if low < high else 0
        for i in range(pieces):
            edges = (low + (high - low) * n // pieces for n in (i, i + 1))
            yield one, *edges
        at += one["Size"]


def main() -> None:
    bucket, source, out = sys.argv[1:4]
    passed, parts, held = map(int, sys.argv[4:])
    config = Config(
        max_pool_connections=FLIGHT + held,
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
        s3={"payload_signing_enabled": False},
    )
    client = boto3.client("s3", config=config)
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{source}/")["Contents"]
    files = [one for one in found if one["Key"].endswith(".safetensors")]
    size = sum(one["Size"] for one in files)
    place = {"Bucket": bucket, "Key": f"{out}/floor"}
    place["UploadId"] = client.create_multipart_upload(**place)["UploadId"]
    few = min(parts, round(parts * passed / size)) if passed < size else parts
    # parts have at least 5 MiB
    few = max(1, min(few, passed // (5 << 20))) if passed else 0

    def send(number: int, one: Any, start: int, stop: int) -> str:
        of = {"Bucket": bucket, "Key": one["Key"], "IfMatch": one["ETag"]}
        data = client.get_object(**of, Range=f"bytes={start}-{stop - 1}")["Body"].read()
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        sent = client.upload_part(**place, PartNumber=number, Body=data, ContentMD5=digest)
        return str(sent["ETag"])

    def copy(number: int, one: Any, start: int, stop: int) -> str:
        made = client.upload_part_copy(
            **place,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": one["Key"]},
            CopySourceIfMatch=one["ETag"],
            CopySourceRange=f"bytes={start}-{stop - 1}",
        )
        return str(made["CopyPartResult"]["ETag"])

    works = [partial(send, *one) for one in _numbered(evenly(files, 0, passed, few), 1)]
    ranges = evenly(files, passed, size, parts - few)
    copies = [partial(copy, *one) for one in _numbered(ranges, len(works) + 1)]
    with ThreadPoolExecutor(FLIGHT) as copying, ThreadPoolExecutor(held) as sending:
        made = [copying.submit(work) for work in copies]
        named = [one.result() for one in [*[sending.submit(work) for work in works], *made]]
    listed = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(named, 1)]
    client.complete_multipart_upload(**place, MultipartUpload={"Parts": listed})
    if client.head_object(Bucket=bucket, Key=place["Key"])["ContentLength"] != size:
        raise SystemExit("not all was moved")


def _numbered(ranges: Iterator[tuple[Any, int, int]], first: int) -> Iterator[Any]:
    return ((number, *one) for number, one in enumerate(ranges, first))


if __name__ == "__main__":
    main()
