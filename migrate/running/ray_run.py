"""A run whose files are written by the workers of a Ray cluster: each file is a part of the run
(`parts`), the largest first, and this process hands them out and publishes. Where there are fewer
files than workers, there are as many parts as workers, and long files are divided.

    here                                        a worker
        ray, the cluster
        enter the partial folder
        "look", once for each machine           see the same source, version and folder
        hand out parts, the largest first       "work": plan, once for each process; write_part
        tell how far all are                    (dies: Ray starts the part again, and that goes on
        a second time for what takes long        after its journal)
        publish_parts

Ray moves the question to the workers and a word back. What is read and written never passes through
its object store, and what a part found lies in the partial folder. So the run can be gone on with
by any of the other ways, and what has been written is there when this process dies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import (
    CheckpointError,
    MigrateError,
    fail,
    on_command_line,
    option,
    printable,
    refusal,
)
from ..core.types import RunPart
from ..source.places import output_in_store
from .parts import (
    Begun,
    LeftBehind,
    LeftInFolder,
    missing_parts,
    part_run,
    publish_parts,
    said_by,
    write_part,
)
from .publish import AGAIN, PARTS
from .ranks import difference_of, facts_of
from .resources import NAMES, RunOptions, RunResult, parse_device

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..planning.request import Request
    from ..source.index import Source
    from ..source.target import OutputFile

# how often a part is begun again whose worker died
RETRIES = 5
# seconds between two looks at the workers
POLL = 0.2
# a file is written a second time when it has taken so many times what others took for as many
# bytes, and so many seconds
SLOW, LATE = 3.0, 20.0
# seconds that workers are waited for that were told to end, or that died with a lock
ENDING = 60.0
# bytes of Ray's object store where this process starts a cluster: nothing of ours lies there
_OBJECTS = 80 << 20
_SELF = "the process that started the run"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where workers are: `address` as it was given, and the device that each computes on."""

    address: str
    device: str


def cluster_of(on: str | None, device: str) -> Cluster | None:
    """The cluster that `on` names. QuestionError M115 for what names none, M967 without Ray."""
    if on is None:
        return None
    if not isinstance(on, str) or not (on == "ray" or on.removeprefix("ray://") not in ("", on)):
        fail(
            "M115",
            f"{option('on', str(on))} names no cluster",
            help='"ray" or "ray://ADDRESS"',
        )
    if device not in NAMES:
        parse_device(device)
    if not is_installed():
        fail(
            "M967",
            f"{option('on', on)} needs Ray, which is not installed",
            help="pip install 'ckpt-migrate[ray]'",
        )
    return Cluster(on, device)


def is_installed() -> bool:
    """Whether there is Ray; it is not imported for that."""
    return importlib.util.find_spec("ray") is not None


@dataclass(frozen=True, slots=True)
class _Order:
    """What a worker is sent: the question, and what is the same for all who take part."""

    home: str
    flags: bool
    opened: Callable[[], Source]
    request: Request
    folder: bool
    options: RunOptions
    device: str
    out: str
    of: int
    copy_of: str | None
    facts: Mapping[str, Any]

    def place(self) -> Any:
        """Where the output goes, as a run takes it."""
        stored = output_in_store(self.out)
        if stored is None:
            return self.out
        stored.single = not self.folder
        return stored


# in a worker, which lives for many parts: what it has planned
_kept: dict[str, tuple[Source, Plan]] = {}


def look(order: _Order, probe: str | None, written: str) -> str | None:
    """How what a worker sees differs from what is seen where the run was started; None if it does
    not. The `probe` is a file that holds what was `written`; of a bucket the journal is looked at.
    """
    if (found := _at_home(order)) is not None:
        return found
    if probe is None:
        try:
            if order.place().read_journal() is None:
                return f"does not see what was just written to {printable(order.out, 300)}"
        except MigrateError as error:
            return f"cannot reach the output: {error.diagnostics[0].message}"
    else:
        try:
            seen = Path(probe).read_text(encoding="utf-8")
        except OSError as error:
            return f"does not see what was just written: {printable(probe, 300)}: {refusal(error)}"
        if seen != written:
            return f"sees another file under the name {printable(probe, 300)}"
    try:
        source = order.opened()
    except MigrateError as error:
        return f"cannot open the source: {error.diagnostics[0].message}"
    try:
        mine = facts_of(source.identities(), order.facts["digest"])
    finally:
        source.close()
    return difference_of(order.facts, mine, _SELF)


def work(order: _Order, number: int, second: bool) -> MigrateError | None:
    """Writes one part in a worker; answers with what went wrong."""
    with on_command_line() if order.flags else nullcontext():
        try:
            if (found := _at_home(order)) is not None:
                _refuse_differing([f"a worker {found}"])
            _write(order, number, second)
        except MigrateError as error:
            return error
    return None


def _at_home(order: _Order) -> str | None:
    try:
        os.chdir(order.home)
    except OSError as error:
        return f"cannot enter {printable(order.home, 300)}: {refusal(error)}"
    return None


def _write(order: _Order, number: int, second: bool) -> None:
    from .prepare import what_is_read
    from .restored import parts_of_run

    source, made = _planned(order)
    tensors, side_files = what_is_read(made, source)
    options = replace(order.options, device=parse_device(order.device))
    part, since = RunPart(number, order.of), time.monotonic()
    begun = Begun(order.of, made.document, order.copy_of)
    while True:
        target, more = made.target, dict[str, Any]()
        if made.parts is not None or made.expected is not None:
            target, more["parts"] = parts_of_run(made, tensors)
        place = order.place()
        if not isinstance(place, str):
            from .store_parts import StorePartRun

            more["kind"] = StorePartRun
        try:
            write_part(
                made.written,
                tensors,
                target,
                place,
                digest=made.digest,
                side_files=side_files,
                checks=made.checks,
                options=options,
                part=part,
                begun=begun,
                second=second,
                **more,
            )
            return
        except MigrateError as error:
            # the system may not have noticed yet that the one before has died
            late = time.monotonic() > since + ENDING
            if late or error.diagnostics[0].code != "M911":
                raise
        time.sleep(POLL)


def _planned(order: _Order) -> tuple[Source, Plan]:
    from .prepare import plan_for

    digest = order.facts["digest"]
    if digest not in _kept:
        source = order.opened()
        made = plan_for(source, order.request, order.folder, order.options.max_shard_size)
        mine = facts_of(source.identities(), made.digest)
        if (found := difference_of(order.facts, mine, _SELF)) is not None:
            source.close()
            _refuse_differing([f"a worker {found}"])
        for old, _ in _kept.values():
            old.close()
        _kept.clear()
        _kept[digest] = source, made
    return _kept[digest]


def write_on_ray(
    *where: Any, cluster: Cluster, begun: Begun, order: Mapping[str, Any], **named: Any
) -> RunResult:
    """`write_target` by the workers of a cluster; `order` are the opener of the source, the request
    and the shape of the output, which a worker plans from.

    RunError M985 where the cluster fails, M974 if a worker sees something else. What was written is
    kept but where the checkpoint is at fault.
    """
    checks, options = named.pop("checks"), named["options"]
    run = part_run(*where, **named)
    with run.ending(), _connected(cluster) as ray:
        left = run.left()
        if left.exists() and not options.resume:
            run.refuse_left()
        needs = {
            "num_cpus": options.threads,
            **({"num_gpus": 1} if cluster.device != "cpu" else {}),
        }
        of, earlier = max(len(run.target.files), _slots(ray, needs)), left.begun()
        if earlier is not None and earlier.of >= len(run.target.files):
            # as many as the run was begun with, on a larger or smaller cluster
            of = earlier.of
        told = _Order(
            os.getcwd(),
            option("on").startswith("-"),
            options=replace(options, progress=None, resume=True),
            device=cluster.device,
            out=run.shown,
            of=of,
            copy_of=begun.copy_of,
            facts=facts_of(run.source.identities() or {}, run.digest),
            **order,
        )
        run.enter_part(RunPart(of, of), (), replace(begun, of=of))
        run.allocate_own(())
        _look_everywhere(ray, told, left)
        dealt = run.deal(of)
        dealer = _Dealer(ray, told, left, dealt, needs)
        try:
            dealer.go(options.progress)
        except BaseException as error:
            dealer.end()
            if isinstance(error, CheckpointError):
                run.discard_all()
            raise
    return publish_parts(*where, checks=checks, of=of, **named)


def _slots(ray: Any, needs: Mapping[str, int]) -> int:
    """How many parts the cluster works on at a time."""
    there = ray.cluster_resources()
    found = [int(there.get("CPU", 0) // needs["num_cpus"])]
    if "num_gpus" in needs:
        found.append(int(there.get("GPU", 0)))
    return min(found)


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected to the cluster, or to one of this machine's cores that is started for it."""
    # a cluster on this machine alone needs no network
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # what a device of 0 GPUs means, which Ray is about to change
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield ray
        return
    address = cluster.address if cluster.address != "ray" else os.environ.get("RAY_ADDRESS")
    common: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    local = {"address": "local", "object_store_memory": _OBJECTS, "include_dashboard": False}
    try:
        ray.init(**({"address": address} if address else local), **common)
    except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        what = "reach the cluster" if address else "start a cluster on this machine"
        fail(
            "M985",
            f"cannot {what} ({option('on', cluster.address)}): {printable(str(error), 600)}",
            help="`ray status` says whether it runs; nothing was written",
        )
    try:
        yield ray
    finally:
        ray.shutdown()


def _look_everywhere(ray: Any, order: _Order, left: LeftBehind) -> None:
    """RunError M974 if the workers of one of the machines see something else than this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    probe, written = None, json.dumps({"probe": os.urandom(16).hex()})
    if isinstance(left, LeftInFolder):
        probe = str(left.folder / PARTS / "probe.json")
        Path(f"{probe}.new").write_text(written, encoding="utf-8")
        os.replace(f"{probe}.new", probe)
    task = ray.remote(look)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            strategy = On(node_id=node["NodeID"], soft=False)
            options = {"num_cpus": 0, "max_retries": RETRIES, "scheduling_strategy": strategy}
            asked[node["NodeManagerHostname"], node["NodeID"]] = task.options(**options).remote(
                order, probe, written
            )
    found = []
    for (host, _), reference in asked.items():
        try:
            if (differs := ray.get(reference)) is not None:
                found.append(f"a worker on {printable(host, 80)} {differs}")
        except ray.exceptions.RayError as error:
            _refuse_worker(f"a worker on {printable(host, 80)}", error)
    if found:
        _refuse_differing(found)


def _refuse_differing(found: Sequence[str]) -> NoReturn:
    fail(
        "M974",
        f"the workers do not see the same: {found[0]}",
        notes=tuple(found[1:6]),
        help="all machines of the cluster need the same paths, rules and version, on a file system "
        "that they share",
    )


def _refuse_worker(who: str, error: Exception) -> NoReturn:
    said = printable(str(error).strip().splitlines()[-1] if str(error).strip() else "", 600)
    absent = "No module named" in str(error)
    fail(
        "M985",
        f"{who} failed: {type(error).__name__}: {said}",
        help="install the same version of migrate on all machines of the cluster"
        if absent
        else f"fix the cause, and run it again with {option('resume', True)}",
    )


class _Dealer:
    """Hands the parts out, and looks how far they are.

    `go` returns when all are done. `end` has the workers end; after it none of them writes.
    """

    def __init__(
        self,
        ray: Any,
        order: _Order,
        left: LeftBehind,
        dealt: Sequence[Sequence[OutputFile]],
        needs: Mapping[str, int],
    ) -> None:
        self.ray, self.order, self.left, self.needs = ray, order, left, needs
        # files that are written as a whole
        self.files = [[file.name for file in one if file.of is None] for one in dealt]
        self.sizes = [sum(file.nbytes for file in one) for one in dealt]
        self.total, self.told = sum(self.sizes), 0
        # by reference: the number of a part, and whether this is the second time
        self.running: dict[Any, tuple[int, bool]] = {}
        self.done: set[int] = set()
        # when parts were first seen to write, and what those that are done took, by byte
        self.since: dict[int, float] = {}
        self.took: list[float] = []
        self.task = ray.remote(work).options(max_retries=RETRIES, **self.needs)

    def go(self, progress: Callable[[int, int], None] | None = None) -> None:
        missing = missing_parts(self.left, self.order.of, self.order.facts["digest"])
        self.done = set(range(self.order.of)) - set(missing)
        waiting = deque(sorted(missing, key=lambda number: -self.sizes[number]))
        while waiting or self.running:
            slots = _slots(self.ray, self.needs)
            # some more than there are workers for, by which a cluster knows that it should grow
            while waiting and len(self.running) < 2 * max(1, slots):
                self.begin(waiting.popleft(), second=False)
            ready, _ = self.ray.wait(list(self.running), timeout=POLL)
            for reference in ready:
                self.settle(reference)
            self.tell(progress)
            if not waiting:
                self.begin_again(slots - len(self.running))

    def begin(self, number: int, *, second: bool) -> None:
        self.running[self.task.remote(self.order, number, second)] = number, second

    def begin_again(self, idle: int) -> None:
        """Has what takes much longer than the others written a second time, by `idle` workers."""
        if idle <= 0 or not self.took:
            return
        now, twice = (
            time.monotonic(),
            {number for number, second in self.running.values() if second},
        )
        for number, second in list(self.running.values()):
            most = max(LATE, SLOW * median(self.took) * self.sizes[number])
            begun = self.since.get(number)
            if second or number in twice or begun is None or now < begun + most:
                continue
            self.begin(number, second=True)
            idle -= 1
            if not idle:
                return

    def settle(self, reference: Any) -> None:
        """Enters what a worker answers."""
        if reference not in self.running:
            return
        number, second = self.running.pop(reference)
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            _refuse_worker(f"the worker of part {number}/{self.order.of}", error)
        if answer is not None:
            raise answer
        other = next((r for r, (n, _) in self.running.items() if n == number), None)
        if other is not None:
            del self.running[other]
            self.kill([(other, RunPart(number, self.order.of), not second)])
        if second:
            self.take_second(number)
        elif other is not None and isinstance(self.left, LeftInFolder):
            shutil.rmtree(self.left.folder / AGAIN / str(number), ignore_errors=True)
        self.done.add(number)
        if not second and self.sizes[number]:
            # what was never seen at work was done between two looks
            took = time.monotonic() - self.since.get(number, time.monotonic() - POLL)
            self.took.append(took / self.sizes[number])

    def take_second(self, number: int) -> None:
        """Puts what was written the second time in the place of the first, which has ended."""
        if not isinstance(self.left, LeftInFolder):
            return
        made = self.left.folder / AGAIN / str(number)
        for name in self.files[number]:
            os.replace(made / name, self.left.folder / "data" / name)
        said = self.left.folder / PARTS
        os.replace(said / said_by(number, True), said / said_by(number))
        shutil.rmtree(made, ignore_errors=True)

    def tell(self, progress: Callable[[int, int], None] | None) -> None:
        """Says how many bytes are done, by the journals of those that are at work."""
        now, done = time.monotonic(), sum(self.sizes[number] for number in self.done)
        written: dict[int, int] = {}
        for number, second in self.running.values():
            found = self.left.written(RunPart(number, self.order.of), second)
            if found is not None:
                self.since.setdefault(number, now)
                written[number] = max(found, written.get(number, 0))
        self.told = max(self.told, min(self.total, done + sum(written.values())))
        if progress is not None:
            progress(self.told, self.total)

    def end(self) -> None:
        """Ends all workers that are at work."""
        of = self.order.of
        left = [
            (reference, RunPart(n, of), second) for reference, (n, second) in self.running.items()
        ]
        self.running.clear()
        self.kill(left)

    def kill(self, tasks: Sequence[tuple[Any, RunPart, bool]]) -> None:
        """Ends these workers, and waits until they are known to have ended: none of them answers,
        and no lock is held on their journals. RunError M985 if that is not known after `ENDING`
        seconds.
        """
        for reference, _, _ in tasks:
            with suppress(Exception):
                self.ray.cancel(reference, force=True)
        until = time.monotonic() + ENDING
        for reference, _, _ in tasks:
            with suppress(self.ray.exceptions.RayError):
                self.ray.get(reference, timeout=max(0.1, until - time.monotonic()))
        for _, part, second in tasks:
            while self.left.state(part, second) == "is at work":
                if time.monotonic() > until:
                    fail(
                        "M985",
                        f"the worker of part {part} was told to end, and may still be at work",
                        help=f"end it, and run it again with {option('resume', True)}",
                    )
                time.sleep(POLL)
