"""A Ray cluster of this machine, until the standard input ends: `ray_cluster.py WORKERS FOLDER`.

Its workers import the module `sitecustomize`, which is written here: it has them wait where a test
says so. In the folder, `pause` holds the seconds after each tile, and as long as there is a file
`hold`, the first that writes the file that it names waits after its first tile.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CUSTOM = """
import time
from pathlib import Path
from migrate.running import publish
folder = Path({folder!r})
claim = publish.Partial.claim
def slowly(self, file, *arguments):
    claim(self, file, *arguments)
    if (folder / "pause").exists():
        time.sleep(float((folder / "pause").read_text()))
    hold = folder / "hold"
    while hold.exists() and hold.read_text() == file and self.data.name == "data":
        time.sleep(0.05)
publish.Partial.claim = slowly
"""


def main() -> None:
    workers, folder = int(sys.argv[1]), sys.argv[2]
    Path(folder, "sitecustomize.py").write_text(CUSTOM.format(folder=folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112 - as Ray spells it
    import ray

    context = ray.init(
        address="local",
        num_cpus=workers,
        object_store_memory=80 << 20,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        _temp_dir=str(Path(folder, "ray")),
    )
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
