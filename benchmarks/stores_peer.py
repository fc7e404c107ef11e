"""A checkpoint of a bucket migrated without a client that writes there: all of it downloaded by
boto3's transfer manager, a command over the folder, and all that it wrote uploaded.

    python stores_peer.py BUCKET OLD NEW SCRATCH COMMAND…

The command is given SCRATCH/old -o SCRATCH/new.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import boto3
from s3transfer.manager import TransferConfig, TransferManager

# requests at a time
FLIGHT = 16


def main() -> None:
    bucket, source, out, scratch = sys.argv[1:5]
    old, new = (Path(scratch) / name for name in ("old", "new"))
    old.mkdir(parents=True)
    client = boto3.client("s3")
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{source}/")["Contents"]
    with TransferManager(client, TransferConfig(max_request_concurrency=FLIGHT)) as manager:
        for one in found:
            manager.download(bucket, one["Key"], str(old / one["Key"].rpartition("/")[2]))
    subprocess.run([*sys.argv[5:], old, "-o", new], check=True)
    with TransferManager(client, TransferConfig(max_request_concurrency=FLIGHT)) as manager:
        for path in new.iterdir():
            manager.upload(str(path), bucket, f"{out}/{path.name}")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
