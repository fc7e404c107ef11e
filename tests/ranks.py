"""Ranks of torch.distributed (gloo), started once for each number of them and then sent cases: a
case is a function of a module here.

Run as a process of its own, `ranks.py FOLDER`: it imports torch once, and forks as many ranks as a
case is for. A line of its standard input is a JSON list of the number of ranks, module, function
and arguments, or of the number alone: these are to end. The line that answers holds what went wrong
in a rank, or null.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeAlias

from work import HANG

HERE = Path(__file__).parent
NAMES = ("live", "formats", "cli", "source", "staging")


class Launcher:
    """The process that starts ranks; it lives until `close`."""

    def __init__(self, folder: Path) -> None:
        folders = (HERE.parent, HERE, *(HERE / name for name in NAMES))
        given = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([*map(str, folders), *([given] if given else [])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "ranks.py"), str(folder)]
        self.child = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *words: Any) -> str | None:
        """What went wrong, if anything did."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(words) + "\n")
        self.child.stdin.flush()
        answer = self.child.stdout.readline()
        return json.loads(answer) if answer else f"the ranks ended with {self.child.wait()}"

    def close(self) -> None:
        self.child.stdin and self.child.stdin.close()
        self.child.wait()
        self.child.stdout and self.child.stdout.close()


@dataclass(frozen=True)
class Ranks:
    """So many ranks, which live until `end` or the first case that fails; others come in their
    place.
    """

    world: int
    launcher: Launcher

    def run(self, module: str, function: str, *arguments: Any) -> None:
        """Calls `function(rank, *arguments)` in every rank; AssertionError with the trace of the
        first that fails.
        """
        if wrong := self.launcher.ask(self.world, module, function, arguments):
            raise AssertionError(wrong)

    def end(self) -> None:
        """What these ranks have imported the next ones have not."""
        self.launcher.ask(self.world)


def member(rank: int, world: int, store: str, cases: connection.Connection) -> None:
    """The life of one rank: what goes wrong in each case, or None."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
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


Started: TypeAlias = dict[connection.Connection, ForkProcess]


def start(world: int, store: str) -> Started:
    context = get_context("fork")
    ends = [context.Pipe() for _ in range(world)]
    ranks = [
        context.Process(
            target=member, args=(n, world, store, theirs), name=f"rank {n}", daemon=True
        )
        for n, (_, theirs) in enumerate(ends)
    ]
    for rank in ranks:
        rank.start()
    return {ours: rank for (ours, _), rank in zip(ends, ranks, strict=True)}


def answer(started: Started, case: list[Any]) -> str | None:
    """What went wrong first, in any of the ranks."""
    for end in started:
        end.send(case)
    wrong, left = None, dict(started)
    while left and not wrong:
        connection.wait([*left, *(rank.sentinel for rank in left.values())])
        for end, rank in list(left.items()):
            alive = rank.is_alive()
            try:
                if end.poll():
                    del left[end]
                    wrong = wrong or end.recv()
                    continue
            except EOFError:
                rank.join()
                alive = False
            if not alive:
                # killed, or in a library that aborts: the others would wait for it
                wrong = wrong or f"{rank.name} ended with {rank.exitcode}"
    return wrong


def finish(started: Started, *, kill: bool = False) -> None:
    for end, rank in started.items():
        rank.kill() if kill else end.send(None)
    for end, rank in started.items():
        rank.join()
        end.close()


def main() -> None:
    # what is imported here is imported once for all ranks; of torch this is most of what cases use
    import torch.distributed.checkpoint  # noqa: F401

    # gloo of torch 2.8 says on the standard output to whom it is connected
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started: dict[int, Started] = {}
    for number, line in enumerate(sys.stdin):
        world, *case = json.loads(line)
        wrong = None
        if case:
            if world not in started:
                started[world] = start(world, f"{sys.argv[1]}/store{number}")
            wrong = answer(started[world], case)
        if wrong or not case:
            # the others may wait for the one that failed
            finish(started.pop(world, {}), kill=bool(wrong))
        print(json.dumps(wrong), file=answers, flush=True)
    for ranks in started.values():
        finish(ranks)


if __name__ == "__main__":
    main()
