"""Processes that run one command together. They meet in a folder that all of them see, or in a
bucket (`store_ranks`), and end together.

    FOLDER/call.json               by rank 0 of the newest launch: its name, and what it is about
    FOLDER/<launch>/
        here-<rank>-<nonce>.json   a process answers the call, and says if it sees something else
        roll.json                  by rank 0: the processes that take part
        beat-<rank>.json           replaced every `BEAT` seconds: the process is there
        <word>-<rank>.json         what a process has to say: that it failed, that it is done
        end.json                   by rank 0, once: why all have to end

No lock is shared and no socket is opened: a file that is there was created whole (or is read again
until it is), and is looked for again and again. Renaming something in a folder also makes a client
of NFS forget what it remembers of that folder.

A launch is known by a name that its rank 0 draws by lot, because what a launcher says about itself
may be the same for two. A process takes part in the launch whose roll has the nonce that it drew
itself, so nothing that an earlier launch left is mistaken for a word of this one.

Rank 0 watches all others, and they watch rank 0, which says what became of the others: each look
costs the file system a few calls however many they are. A process on the same machine is dead when
the system does not know its number any more. One on another machine is given up when its beat has
not changed for `SILENT` seconds by the clock of the process that watches; clocks are not compared.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from ..core.errors import Diagnostic, MigrateError, RunError, fail, listed, option, printable
from ..core.types import Ranks, __version__
from ..source.blobs import Identity

# seconds that processes wait for each other at the beginning
APPEAR = 60.0
# between two signs of life; after so many without one a process of another machine is given up
BEAT, SILENT = 2.0, 60.0
# between two looks: a twentieth of what is waited for already, from `SOON` on up to `POLL`
SOON, POLL = 0.005, 0.2
# that rank 0 waits for the others to see that all is done, before it removes the folder
PARTING = 10.0
# that a process which is being terminated looks for the reason
INQUIRY = 1.0

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_ENDED = ("left", "failed")
T = TypeVar("T")


class Meeting(Protocol):
    """Where processes meet: words that each of them leaves, each a whole when it is there. What
    cannot be written is an OSError or a MigrateError.
    """

    # how messages call it, and what may be another one where a process does not appear
    shown: str
    apart: str

    @property
    def poll(self) -> float:
        """Seconds between two looks, at most."""

    @property
    def beat(self) -> float:
        """Seconds between two signs of life."""

    def below(self, name: str) -> Meeting:
        """The place for one launch, in this one."""

    def make(self) -> None:
        """Makes the place."""

    def clear(self) -> None:
        """Removes what launches that ended have left."""

    def exists(self) -> bool:
        """Whether the place is there."""

    def names(self) -> list[str]:
        """The words that are there."""

    def read(self, name: str) -> dict[str, Any] | None:
        """A word; None if it is not there."""

    def create(self, name: str, content: Mapping[str, Any]) -> None:
        """Leaves a word. FileExistsError if it is there."""

    def replace(self, name: str, content: Mapping[str, Any]) -> None:
        """Leaves a word in place of an earlier one."""


class MeetingFolder:
    """A folder in which processes meet."""

    apart = (
        "that folder is another one there: all ranks need the same path in a file system that they "
        "share"
    )

    def __init__(self, path: Path) -> None:
        self.path, self.shown = path, str(path.parent)

    @property
    def poll(self) -> float:
        return POLL

    @property
    def beat(self) -> float:
        return BEAT

    def below(self, name: str) -> MeetingFolder:
        return MeetingFolder(self.path / name)

    def make(self) -> None:
        self.path.mkdir(exist_ok=True)

    def clear(self) -> None:
        import shutil

        for left in self.path.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)

    def exists(self) -> bool:
        return self.path.exists()

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def read(self, name: str) -> dict[str, Any] | None:
        return _read(self.path / name)

    def create(self, name: str, content: Mapping[str, Any]) -> None:
        _create(self.path / name, content)

    def replace(self, name: str, content: Mapping[str, Any]) -> None:
        _replace(self.path / name, content)


class Group:
    """The processes of one launch, as one of them sees it.

    Call sequence: `meet`; `say` and `wait` for words of others, `check` in between; `leave`, or
    `fail` with what went wrong. While it waits and in `check` it raises RunError M973 if another
    process failed or died.
    """

    def __init__(self, ranks: Ranks, place: Meeting, launch: str) -> None:
        self.ranks, self.home = ranks, place.below(launch)
        # bytes that the others have written, by rank
        self.done: dict[int, int] = {}
        self._mine = 0
        # those of all, and those that this one watches
        self._all: Mapping[int, Mapping[str, Any]] = {}
        self._members: dict[int, Mapping[str, Any]] = {}
        self._heard: dict[int, tuple[Any, float]] = {}
        self._gone: set[int] = set()
        self._trouble: Diagnostic | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._looking = threading.Lock()
        self._beats = 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which begins, publishes and answers for all."""
        return not self.ranks.rank

    def begin(self, members: Mapping[int, Mapping[str, Any]]) -> None:
        """Watches the others from now on."""
        self._all, watched = members, members if self.first else {0: members[0]}
        self._members = {n: who for n, who in watched.items() if n != self.ranks.rank}
        now = time.monotonic()
        self._heard = dict.fromkeys(self._members, (None, now))
        self.beat()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def progress(self, done: int) -> None:
        """Says how many bytes this process has done."""
        self._mine = done

    def say(self, word: str, content: Mapping[str, Any] | None = None) -> None:
        """Tells the others a word. OSError if it cannot be written."""
        _place(self.home, f"{word}-{self.ranks.rank}.json", content or {})

    def heard(self, word: str, rank: int = 0) -> dict[str, Any] | None:
        """What a process said; None if it has not said that."""
        return self.home.read(f"{word}-{rank}.json")

    def wait(self, word: str, rank: int = 0, each: Callable[[], None] | None = None) -> Any:
        """What a process says, when it says it; `each` is called while it does not."""
        since = time.monotonic()
        while (found := self.heard(word, rank)) is None:
            self.check()
            if rank in self._gone and self.heard(word, rank) is None:
                self._trouble = self._trouble or self._end(rank, f"rank {rank} ended early")
            if each is not None:
                each()
            pause(since, self.home.poll)
        return found

    def check(self) -> None:
        """RunError M973 if another process has failed or died."""
        if self._trouble is not None:
            raise RunError([self._trouble])

    def look(self) -> None:
        """Looks at the others now; `check` then raises what is the matter."""
        with self._looking:
            if self._trouble is None and not self._over.is_set():
                self._trouble = self._found() if self.first else self._found_by_others()

    def inquire(self) -> RunError | None:
        """What went wrong with another process, for one that is being terminated: most launchers
        end all when one has ended, before its word has gone round.
        """
        until = time.monotonic() + INQUIRY
        while self._trouble is None and time.monotonic() < until:
            self.look()
            for rank, who in self._all.items() if self._trouble is None else ():
                if rank == self.ranks.rank or self.heard("left", rank) is not None:
                    continue
                if (said := self.heard("failed", rank)) is not None:
                    self._trouble = _diagnostic(f"rank {rank} failed: {said.get('message')}")
                elif is_alive(who) is False and self.heard("failed", rank) is None:
                    self._trouble = _diagnostic(f"rank {rank} {_died(who)}")
            time.sleep(self.home.poll)
        return None if self._trouble is None else RunError([self._trouble])

    def fail(self, error: BaseException) -> None:
        """Says why this process ends. What another one failed of is not said again."""
        if self._trouble is None:
            with suppress(OSError, MigrateError):
                self.say("failed", _reason(error))
            if self.first:
                self._end(0, f"rank 0 failed: {_reason(error)['message']}")

    def leave(self) -> None:
        """Ends the watch, and says that this process is no longer there."""
        self._rest()
        with suppress(OSError, MigrateError):
            self.say("left")

    def part(self) -> None:
        """Rank 0 waits until the others have left, at most `PARTING` seconds, and ends its watch:
        nothing is written into the folder from then on, so that it can be removed.
        """
        since = time.monotonic()
        for rank in self._members:
            while self.heard("left", rank) is None and time.monotonic() < since + PARTING:
                pause(since, self.home.poll)
        self._rest()

    def _rest(self) -> None:
        self._over.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(PARTING)

    def beat(self) -> None:
        """Gives a sign of life."""
        self._beats += 1
        with suppress(OSError, MigrateError):
            name = f"beat-{self.ranks.rank}.json"
            self.home.replace(name, {"beat": self._beats, "done": self._mine})

    def _watch(self) -> None:
        beaten = time.monotonic()
        while not self._over.wait(self.home.poll):
            if time.monotonic() - beaten >= self.home.beat:
                self.beat()
                beaten = time.monotonic()
            self.look()
            if self._trouble is not None:
                return

    def _found(self) -> Diagnostic | None:
        """What rank 0 finds to be the matter with the others."""
        try:
            there = set(self.home.names())
        except (OSError, MigrateError):
            return None
        for rank, who in self._members.items():
            if rank in self._gone:
                continue
            left = f"left-{rank}.json" in there
            # a process says why it fails before it leaves, and a listing may show the second alone
            if (left or f"failed-{rank}.json" in there) and (
                said := self.heard("failed", rank)
            ) is not None:
                return self._end(rank, f"rank {rank} failed: {said.get('message')}")
            if left:
                self._gone.add(rank)
            elif (why := self._lost(rank, who)) is not None:
                # what it said last counts
                if any(self.heard(word, rank) is not None for word in _ENDED):
                    return None
                return self._end(rank, f"rank {rank} {why}")
        return None

    def _found_by_others(self) -> Diagnostic | None:
        if (end := self.home.read("end.json")) is not None:
            return _diagnostic(str(end.get("message")))
        why = self._lost(0, self._members[0]) if 0 not in self._gone else None
        if why is None:
            return None
        # what it said last counts
        if (end := self.home.read("end.json")) is not None:
            return _diagnostic(str(end.get("message")))
        if self.heard("published") is not None or not self.home.exists():
            self._gone.add(0)
            return None
        return _diagnostic(f"rank 0 {why}")

    def _lost(self, rank: int, who: Mapping[str, Any]) -> str | None:
        """Why a process counts as dead; None if it does not."""
        if is_alive(who) is False:
            return _died(who)
        now = time.monotonic()
        before, since = self._heard[rank]
        # reading is left out while the last sign is fresh
        if now - since < self.home.beat:
            return None
        sign = self.home.read(f"beat-{rank}.json")
        if sign is not None and sign.get("beat") != before:
            self._heard[rank] = sign.get("beat"), now
            if isinstance(sign.get("done"), int):
                self.done[rank] = sign["done"]
            return None
        if now - since < SILENT:
            return None
        return (
            f"has given no sign of life for {SILENT:.0f} s (process {who.get('pid')} on "
            f"{printable(str(who.get('name')), 80)})"
        )

    def _end(self, rank: int, message: str) -> Diagnostic:
        """Rank 0 tells all others why they have to end."""
        found = _diagnostic(message)
        # the other thread asks why as soon as it sees that a process is gone
        self._trouble = self._trouble or found
        self._gone.add(rank)
        with suppress(OSError, MigrateError):
            _place(self.home, "end.json", {"message": message})
        return found


def meet(place: Path | Meeting, ranks: Ranks, facts: Mapping[str, Any]) -> Group:
    """The group of all processes of this launch, once all are there and see the same.

    `facts` are what has to be the same for all. `place` is one that rank 0 can make. RunError M972
    naming those that do not appear within `APPEAR` seconds, M974 naming one that sees something
    else.
    """
    at = MeetingFolder(place) if isinstance(place, Path) else place
    return _call(at, ranks, facts) if not ranks.rank else _answer(at, ranks, facts)


def pause(since: float, most: float) -> None:
    """Sleeps up to `most` seconds, the longer the longer ago `since` is: a wait is prolonged by a
    twentieth at most, and the place is asked a few times a second.
    """
    time.sleep(min(most, max(SOON, (time.monotonic() - since) / 20)))


def facts_of(identities: Mapping[str, Identity] | None, digest: str) -> dict[str, Any]:
    """What all processes have to agree on: the version, the source's files (inode, size, mtime; not
    the device, which is another on each machine) and the digest of what is done with them.
    """
    files = {name: list(found[1:4]) for name, found in (identities or {}).items()}
    return {"version": __version__, "source": files, "digest": digest}


def deal(sizes: Mapping[T, int], world: int) -> list[list[T]]:
    """What each of `world` processes does, so that their bytes are about equal; the order of
    `sizes` decides between equals.
    """
    loads = [0] * world
    dealt: list[list[T]] = [[] for _ in range(world)]
    for one, nbytes in sorted(sizes.items(), key=lambda pair: -pair[1]):
        least = loads.index(min(loads))
        loads[least] += nbytes
        dealt[least].append(one)
    return dealt


def require_quiet(place: Path | Meeting) -> None:
    """QuestionError M911 if processes of an earlier launch are still at work in this place.

    Those of other machines are listened to for three beats, unless they said that they left.
    """
    at = MeetingFolder(place) if isinstance(place, Path) else place
    call = at.read("call.json") or {}
    home = at.below(str(call.get("launch")))
    roll = (home.read("roll.json") or {}).get("members")
    members: dict[str, Any] = roll if isinstance(roll, dict) else {"0": call.get("who")}
    unknown = {}
    for rank, who in members.items():
        if not isinstance(who, dict) or home.read(f"left-{rank}.json") is not None:
            continue
        alive = is_alive(who)
        if alive:
            _refuse_busy(at, f"rank {rank}, process {who.get('pid')}")
        elif alive is None:
            unknown[rank] = home.read(f"beat-{rank}.json")
    if unknown:
        time.sleep(3 * at.beat)
    for rank, beat in unknown.items():
        if home.read(f"beat-{rank}.json") != beat:
            _refuse_busy(at, f"rank {rank} on {members[rank].get('name')}")


def _refuse_busy(place: Meeting, who: str) -> NoReturn:
    fail(
        "M911",
        f"another run is using {printable(place.shown, 300)}: {printable(who, 120)}",
        help="wait until it has finished",
    )


def _call(place: Meeting, ranks: Ranks, facts: Mapping[str, Any]) -> Group:
    place.make()
    place.clear()
    launch = os.urandom(8).hex()
    group = Group(ranks, place, launch)
    group.home.make()
    group.beat()
    call = {"launch": launch, "by": ranks.launch, "world": ranks.world, "who": myself()}
    place.replace("call.json", {**call, "facts": facts})
    since = beaten = time.monotonic()
    found: dict[int, dict[str, Any]] = {}
    try:
        while len(found) < ranks.world - 1:
            if time.monotonic() > since + APPEAR:
                _refuse_missing(place, [n for n in range(1, ranks.world) if n not in found])
            if time.monotonic() - beaten > place.beat:
                group.beat()
                beaten = time.monotonic()
            for name in sorted(group.home.names()):
                answer = group.home.read(name) if name.startswith("here-") else None
                if answer is not None and isinstance(answer.get("rank"), int):
                    found.setdefault(answer["rank"], answer)
            differing = [
                f"rank {n} {found[n]['differs']}" for n in sorted(found) if found[n].get("differs")
            ]
            if differing:
                _refuse_differing(differing)
            pause(since, place.poll)
    except BaseException as error:
        group.fail(error)
        group.leave()
        raise
    members = {0: myself(), **{n: answer["who"] for n, answer in found.items()}}
    nonces = {n: answer["nonce"] for n, answer in found.items()}
    _place(group.home, "roll.json", {"members": members, "nonces": nonces})
    group.begin(members)
    return group


def _answer(place: Meeting, ranks: Ranks, facts: Mapping[str, Any]) -> Group:
    nonce, answered, busy = os.urandom(8).hex(), "", None
    since = time.monotonic()
    until = since + APPEAR
    while True:
        if time.monotonic() > until:
            if busy and is_alive(busy):
                _refuse_busy(place, f"process {busy.get('pid')}")
            _refuse_missing(place, [0])
        call = place.read("call.json") or {}
        launch = str(call.get("launch"))
        if (
            (call.get("by"), call.get("world")) == (ranks.launch, ranks.world)
            # what an earlier launch left is not answered
            and is_alive(call.get("who")) is not False
        ):
            home, differs = place.below(launch), difference_of(call.get("facts") or {}, facts)
            if launch != answered:
                me = {"rank": ranks.rank, "nonce": nonce, "who": myself(), "differs": differs}
                # that launch may be removed while this is being read
                with suppress(OSError):
                    home.create(f"here-{ranks.rank}-{nonce}.json", me)
                    # rank 0 waits for others too
                    answered, until = launch, time.monotonic() + APPEAR + 3 * place.beat
            roll, end = home.read("roll.json"), home.read("end.json")
            if answered == launch and differs:
                _refuse_differing([f"this process, rank {ranks.rank}, {differs}"])
            if roll is not None and roll.get("nonces", {}).get(str(ranks.rank)) == nonce:
                group = Group(ranks, place, launch)
                group.begin({int(n): who for n, who in roll["members"].items()})
                return group
            if roll is None and end is not None and answered == launch:
                raise RunError([_diagnostic(str(end.get("message")))])
            busy = roll and call.get("who")
        pause(since, place.poll)


def _refuse_missing(place: Meeting, missing: Sequence[int]) -> NoReturn:
    one = len(missing) == 1
    fail(
        "M972",
        f"{'rank' if one else 'ranks'} {listed([str(n) for n in missing], 20)} did not appear in "
        f"{printable(place.shown, 300)} within {APPEAR:.0f} s",
        notes=(
            (
                f"{'it does' if one else 'they do'} not run, ended before with a message of "
                f"{'its' if one else 'their'} own, or {place.apart}"
            ),
        ),
        help=f"start all ranks with the same command; {option('ranks', 'off')} is for a command "
        "that runs alone in a job of several processes",
    )


def _refuse_differing(found: Sequence[str]) -> NoReturn:
    fail(
        "M974",
        f"the ranks do not see the same: {found[0]}",
        notes=tuple(found[1:6]),
        help="start all ranks with the same command and version, on files that all of them share",
    )


def difference_of(
    call: Mapping[str, Any], mine: Mapping[str, Any], other: str = "rank 0"
) -> str | None:
    """How what this process sees differs from what the `other` sees, in words; None if it does
    not.
    """
    if call.get("version") != mine["version"]:
        return (
            f"is migrate {mine['version']}, {other} is migrate "
            f"{printable(str(call.get('version')))}"
        )
    there, here = call.get("source"), mine["source"]
    if not isinstance(there, dict) or there != here:
        there = there if isinstance(there, dict) else {}
        name = next(n for n in {**there, **here} if there.get(n) != here.get(n))
        words = ("inode", "size", "time of the last change")
        if name not in there or name not in here:
            how = f"{other} has no such file" if name in here else "it has no such file"
        else:
            how = ", ".join(
                f"{word} {mine} instead of {his}"
                for word, mine, his in zip(words, here[name], there[name], strict=True)
                if mine != his
            )
        return f"sees another source: {printable(str(name), 200)}: {how}"
    if call.get("digest") != mine["digest"]:
        return (
            f"has another plan: its digest is {mine['digest']}, that of {other} "
            f"{printable(str(call.get('digest')), 100)}"
        )
    return None


def _died(who: Mapping[str, Any]) -> str:
    return f"died (process {who.get('pid')} on {printable(str(who.get('name')), 80)})"


def _diagnostic(message: str) -> Diagnostic:
    return Diagnostic("M973", printable(message, 2000))


def _reason(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MigrateError):
        first = error.diagnostics[0]
        return {"message": f"{first.message} ({first.code})"}
    if isinstance(error, KeyboardInterrupt):
        return {"message": "it was interrupted or terminated"}
    return {"message": f"{type(error).__name__}: {printable(str(error), 300)}"}


def myself() -> dict[str, Any]:
    """What tells this process from others: of one machine since it was started, of one space of
    process numbers (a container has its own), of one moment of start.
    """
    return {
        "name": os.uname().nodename,
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def is_alive(who: Any) -> bool | None:
    """Whether a process runs; None if it cannot be told from here."""
    if not isinstance(who, dict) or not who.get("machine") or who["machine"] != _machine():
        return None
    started = _started(who.get("pid"))
    return started is not None and started == who.get("started")


def _machine() -> str | None:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: Any) -> str | None:
    """When the process was started, as the system counts; None if it does not run any more."""
    try:
        with open(f"/proc/{int(pid)}/stat", encoding="ascii", errors="replace") as file:
            # its name may hold anything
            fields = file.read().rpartition(")")[2].split()
    except (OSError, TypeError, ValueError):
        return None
    # state and starttime: proc(5), fields 3 and 22
    return None if not fields or fields[0] in "ZX" else fields[19]


def _read(path: Path) -> dict[str, Any] | None:
    """What the file says; None if it is not there or not whole yet."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _create(path: Path, content: Mapping[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(_ENCODER.encode(content).encode())


def _place(place: Meeting, name: str, content: Mapping[str, Any]) -> None:
    """Leaves a word that was not there; one that is stays."""
    with suppress(FileExistsError):
        place.create(name, content)


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_suffix(".new")
    with suppress(FileNotFoundError):
        os.unlink(new)
    _create(new, content)
    os.replace(new, path)
