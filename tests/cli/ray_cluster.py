"""A Ray cluster of this machine, until the standard input ends: `ray_cluster.py WORKERS FOLDER`.

Its workers import the module `sitecustomize`, which is written here: it has them wait where a test
says so. In the folder, `pause` holds the seconds after each tile, and as long as there is a file
`hold`, the first that writes the file that it names waits after its first tile. `without` names a
library that a worker does not find when it looks around; what the options of each part are is
appended to `told`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Ray gives up when its processes take more than 30 seconds to start, which nothing changes
ATTEMPTS = 4
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

import json, os, sys
from migrate.running import ray_run
look, write = ray_run.look, ray_run.write_part
def looking(*arguments):
    without = folder / "without"
    name = without.read_text() if without.exists() else None
    there = sys.modules.pop(name, None)
    if name is not None:
        sys.modules[name] = None
    try:
        return look(*arguments)
    finally:
        if name is not None:
            del sys.modules[name]
            if there is not None:
                sys.modules[name] = there
def writing(*arguments, options, part, **named):
    said = [part.number, os.getpid(), options.max_memory, options.threads, options.device.name]
    with open(folder / "told", "a") as told:
        told.write(json.dumps(said) + chr(10))
    return write(*arguments, options=options, part=part, **named)
ray_run.look, ray_run.write_part = looking, writing
"""


def main() -> None:
    workers, folder = int(sys.argv[1]), sys.argv[2]
    Path(folder, "sitecustomize.py").write_text(CUSTOM.format(folder=folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    for left in reversed(range(ATTEMPTS)):
        try:
            context = ray.init(
                address="local",
                num_cpus=workers,
                num_gpus=int(gpus) if (gpus := os.environ.get("MADE_UP_GPUS")) else None,
                object_store_memory=80 << 20,
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
                _temp_dir=str(Path(folder, f"ray{left}")),
            )
            break
        except Exception as error:
            if not left or "timed out" not in str(error):
                raise
            ray.shutdown()
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
