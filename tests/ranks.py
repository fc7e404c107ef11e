"""Ranks of torch.distributed (gloo), started once for each number of them and then sent cases: a
case is a function of a module here.

Run as a process of its own, `ranks.py WORLD FOLDER`: it imports torch once and forks. A line of its
standard input is a JSON list of module, function and arguments; the line that answers holds what
went wrong in a rank, or null.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import traceback
from multiprocessing import connection, get_context
from pathlib import Path

from work import HANG

HERE = Path(__file__).parent
NAMES = ("live", "formats", "cli", "source", "staging")


class Ranks:
    """So many ranks, which live until `close` or the first case that fails."""

    def __init__(self, world: int, folder: Path) -> None:
        folders = (HERE.parent, HERE, *(HERE / name for name in NAMES))
        given = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([*map(str, folders), *([given] if given else [])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "ranks.py"), str(world), str(folder)]
        self.child = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def run(self, module: str, function: str, *arguments: str) -> None:
        """Calls `function(rank, *arguments)` in every rank; AssertionError with the trace of the
        first that fails.
        """
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps([module, function, arguments]) + "\n")
        self.child.stdin.flush()
        answer = self.child.stdout.readline()
        wrong = json.loads(answer) if answer else f"the ranks ended with {self.child.wait()}"
        if wrong:
            self.close()
            raise AssertionError(wrong)

    def close(self) -> None:
        self.child.stdin and self.child.stdin.close()
        self.child.wait()
        self.child.stdout and self.child.stdout.close()


def member(rank: int, world: int, folder: str, cases: connection.Connection) -> None:
    """The life of one rank: what goes wrong in each case, or None."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    while case := cases.recv():
        module, function, arguments = case
        # says where it waits, and ends
        faulthandler.dump_traceback_later(HANG, exit=True)
        try:
            getattr(importlib.import_module(module), function)(rank, *arguments)
            dist.barrier()
            cases.send(None)
        except BaseException:  # noqa: BLE001 - whatever it is, the others may wait for this one
            cases.send(f"rank {rank}: {traceback.format_exc()[-4000:]}")
        finally:
            faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def main() -> None:
    import torch.distributed  # noqa: F401 - what is imported here is imported once for all ranks

    # gloo of torch 2.8 says on the standard output to whom it is connected
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    world, folder = int(sys.argv[1]), sys.argv[2]
    context = get_context("fork")
    ends = [context.Pipe() for _ in range(world)]
    ranks = [
        context.Process(
            target=member, args=(n, world, folder, theirs), name=f"rank {n}", daemon=True
        )
        for n, (_, theirs) in enumerate(ends)
    ]
    for rank in ranks:
        rank.start()
    ours = {end: rank for (end, _), rank in zip(ends, ranks, strict=True)}
    for line in sys.stdin:
        for end in ours:
            end.send(json.loads(line))
        wrong, left = None, dict(ours)
        while left and not wrong:
            connection.wait([*left, *(rank.sentinel for rank in left.values())])
            for end, rank in list(left.items()):
                alive = rank.is_alive()
                if end.poll():
                    del left[end]
                    wrong = wrong or end.recv()
                elif not alive:
                    # killed, or in a library that aborts: the others would wait for it
                    wrong = wrong or f"{rank.name} ended with {rank.exitcode}"
        print(json.dumps(wrong), file=answers, flush=True)
        if wrong:
            # the others may wait for the one that failed
            for rank in ranks:
                rank.kill()
            return
    for end in ours:
        end.send(None)
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()
