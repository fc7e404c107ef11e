"""The weights of a checkpoint in a bucket, read by ranges of 8 MiB in one process: as a run with so
many bytes of memory reads them, or by boto3 alone with 16 threads.

    python stores_reading.py ours|boto3 BUCKET PREFIX MEMORY

Prints the processor time of reading, without what starting and opening take, and the bytes read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

RANGE = 8 << 20
THREADS = 16


def spent(work: Callable[[], int]) -> tuple[float, int]:
    """Seconds of user and system time that `work` takes, and its answer."""
    before = os.times()
    found = work()
    after = os.times()
    return after.user + after.system - before.user - before.system, found


def ours(bucket: str, prefix: str, max_memory: int) -> tuple[float, int]:
    from migrate.source import stores
    from migrate.source.blobs import Stretch, foreseeing

    folder = stores.open_folder(f"s3://{bucket}/{prefix}")
    blobs = [folder.open(name) for name in sorted(folder.names()) if name.endswith(".safetensors")]
    stretches = [
        Stretch(number, start, min(start + RANGE, blob.size))
        for number, blob in enumerate(blobs)
        for start in range(0, blob.size, RANGE)
    ]
    memory = memoryview(bytearray(RANGE))

    def read() -> int:
        with foreseeing(blobs, stretches, max_memory):
            for one in stretches:
                blobs[one.blob].readinto(one.start, memory[: one.stop - one.start])
        return sum(one.stop - one.start for one in stretches)

    return spent(read)


def peer(bucket: str, prefix: str, _: int) -> tuple[float, int]:
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=THREADS))
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]
    ranges = [
        (one["Key"], f"bytes={start}-{min(start + RANGE, one['Size']) - 1}")
        for one in found
        if one["Key"].endswith(".safetensors")
        for start in range(0, one["Size"], RANGE)
    ]

    def get(one: tuple[str, str]) -> int:
        return len(client.get_object(Bucket=bucket, Key=one[0], Range=one[1])["Body"].read())

    def read() -> int:
        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(get, ranges))

    return spent(read)


def main() -> None:
    which, bucket, prefix, memory = sys.argv[1:5]
    print(json.dumps({"ours": ours, "boto3": peer}[which](bucket, prefix, int(memory))))


if __name__ == "__main__":
    main()
