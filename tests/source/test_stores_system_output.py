"""Checkpoints written through fsspec: what shows, in which order, and what is left of a failure."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stored_checkpoint import rule, shards

import migrate
from migrate import formats
from migrate.core.errors import MigrateError
from migrate.core.types import Ranks, RunPart
from migrate.source.stores import system_output
from migrate.source.stores.system_output import HeldFiles, SystemOutput

fsspec = pytest.importorskip("fsspec")

from stored_systems import Closing, ClosingFile, Folders, Reading, held, tree  # noqa: E402

KINDS = ("memory", "closing", "folders")
SECRET = "planted-secret"


class Place(NamedTuple):
    """Where a test writes: `at` is a URL without a slash at its end."""

    at: str
    system: Any

    def held(self, below: str = "") -> dict[str, bytes]:
        """All that is there, shown or not."""
        return held(self.system, self.at + below)


@pytest.fixture(params=KINDS)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    for one in (Closing, Folders, Reading):
        monkeypatch.setitem(import_module("fsspec.registry")._registry, one.protocol, one)
    Closing.objects.clear()
    if request.param == "folders":
        (tmp_path / "store").mkdir()
        yield Place(f"folders://{str(tmp_path / 'store').lstrip('/')}", Folders())
        return
    scheme = {"memory": "memory", "closing": "gs"}[request.param]
    place = Place(f"{scheme}://{tmp_path.name}/deep", fsspec.filesystem(scheme))
    yield place
    Closing.objects.clear()
    if place.held():
        place.system.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return shards(tmp_path / "old")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return rule(tmp_path)


def refused(code: str, *arguments: Any, **named: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        migrate.apply(*arguments, **named)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def put(place: Place, name: str, content: bytes = b"mine") -> None:
    path = f"{place.at}/{name}"
    if isinstance(place.system, Folders):
        place.system.makedirs(path.rpartition("/")[0], exist_ok=True)
    place.system.pipe_file(path, content)


def test_an_output_is_what_a_folder_of_this_machine_gets(
    place: Place, local: Path, made: Path, tmp_path: Path
) -> None:
    options: Any = {"rules": [made], "max_shard_size": "1MB"}
    here = migrate.apply(local, tmp_path / "here", **options)
    there = migrate.apply(local, f"{place.at}/new", **options)
    assert there.path == f"{place.at}/new"
    assert place.held() == {f"new/{name}": data for name, data in tree(tmp_path / "here").items()}
    assert there.files == here.files
    assert len(there.files) == 2
    assert there.digest == here.digest
    assert migrate.diff(there.path, tmp_path / "here").equal
    assert migrate.verify(there.path, source=local, rules=[made]).equal
    back = migrate.downgrade(there.path, f"{place.at}/back", rules=[made])
    assert back.path == f"{place.at}/back"
    assert migrate.diff(back.path, local).tensors_equal


@pytest.mark.parametrize("name", ["new.safetensors", "new.pt", "new.ckpt", "dcp"])
def test_all_that_is_written_to_a_folder_is_written_to_a_store(
    place: Place, local: Path, made: Path, tmp_path: Path, name: str
) -> None:
    options: Any = {"rules": [made], "output_format": "dcp" if name == "dcp" else None}
    migrate.apply(local, tmp_path / name, **options)
    migrate.apply(local, f"{place.at}/{name}", **options)
    here = tmp_path / name
    expected = tree(here) if here.is_dir() else {"": here.read_bytes()}
    assert place.held() == {f"{name}/{inner}".rstrip("/"): d for inner, d in expected.items()}
    assert migrate.history(f"{place.at}/{name}").applied[0].to == "b"


def test_a_plan_says_that_all_of_it_passes_through_this_machine(
    place: Place, local: Path, made: Path, tmp_path: Path
) -> None:
    planned = migrate.apply(local, f"{place.at}/new", rules=[made], dry_run=True)
    assert not place.held()
    report = migrate.apply(local, f"{place.at}/new", rules=[made])
    size = sum(one.size for one in report.files.values())
    for found in (planned.store, report.store):
        assert (found.copied, found.passed, found.requests) == (0, size, None)
        assert "fsspec" in found.why
    assert planned.digest == report.digest
    assert planned.to_json()["store"]["requests"] is None


def test_nothing_shows_before_all_is_there_and_the_index_shows_last(
    place: Place,
    local: Path,
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def look(done: int, total: int) -> None:
        assert not place.held("/new")

    def appear(files: HeldFiles, name: str) -> None:
        there = place.held("/new")
        assert sorted(there) == sorted(seen)
        # for a moment the index alone is missing
        if there and name != "model.safetensors.index.json":
            with pytest.raises(MigrateError):
                migrate.inspect(f"{place.at}/new")
        real(files, name)
        seen.append(name)

    real = HeldFiles.appear
    monkeypatch.setattr(HeldFiles, "appear", appear)
    migrate.apply(local, f"{place.at}/new", rules=[made], max_shard_size="1MB", progress=look)
    one, two = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert [seen[0], *seen[-3:]] == [
        one,
        "migrate.history.json",
        two,
        "model.safetensors.index.json",
    ]
    assert sorted(seen[1:-3]) == ["config.json", "tokenizer/vocab.txt"]


@pytest.mark.parametrize("name", ["new/notes.txt", "new", "new/deep/er/notes.txt"])
def test_what_is_there_is_never_replaced(place: Place, local: Path, made: Path, name: str) -> None:
    put(place, name)
    assert "already exists" in refused("M904", local, f"{place.at}/new", rules=[made])
    assert place.held() == {name: b"mine"}


@pytest.mark.parametrize("name", ["new/notes.txt", "new/model-00001-of-00002.safetensors", "new"])
def test_what_appears_during_a_run_is_not_replaced(
    place: Place, local: Path, made: Path, name: str
) -> None:
    def appear(done: int, total: int) -> None:
        if not place.held(f"/{name}"):
            put(place, name)

    said = refused(
        "M904",
        local,
        f"{place.at}/new",
        rules=[made],
        max_shard_size="1MB",
        progress=appear,
    )
    assert "appeared during this run" in said
    assert place.held() == {name: b"mine"}


LAST = ("config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("name", LAST)
def test_what_appears_between_two_files_is_not_replaced(
    place: Place, local: Path, made: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(files: HeldFiles, now: str) -> None:
        if now == name:
            put(place, f"new/{name}")
        real(files, now)

    real = HeldFiles.appear
    monkeypatch.setattr(HeldFiles, "appear", appear)
    out = f"{place.at}/new"
    said = refused("M904", local, out, rules=[made], max_shard_size="1MB")
    assert f"new/{name} appeared during this run" in said
    assert place.held() == {f"new/{name}": b"mine"}


def fails(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which fails when it comes for this time, as a library might: with secrets."""
    left = [number]

    def failing(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise OSError(f"https://host/?sig={SECRET}")
        return call(*arguments, **named)

    return failing


STEPS = [
    *(("write", number) for number in (1, 2, 3, 5, 6)),
    *(("appear", number) for number in (1, 2, 4, 6)),
    *(("open", number) for number in (1, 2, 4)),
]


@pytest.mark.parametrize(("what", "number"), STEPS)
def test_of_a_run_that_fails_nothing_is_left(
    place: Place,
    local: Path,
    made: Path,
    what: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(place, "new.txt")
    system = type(place.system)
    with monkeypatch.context() as patched:
        if what == "open":
            patched.setattr(system, "_open", fails(number, system._open))
        elif what == "write":
            patched.setattr(HeldFiles, "write", within(fails(number, HeldFiles.write)))
        elif isinstance(place.system, Closing):
            patched.setattr(ClosingFile, "close", fails(number, ClosingFile.close))
        else:
            patched.setattr(HeldFiles, "_move", fails(number, HeldFiles._move))
        said = refused("M969", local, f"{place.at}/new", rules=[made], max_shard_size="1MB")
    assert f"nothing of this run is left at {place.at}/new" in said
    # a file that is not closed is completed when it is collected
    gc.collect()
    assert place.held() == {"new.txt": b"mine"}
    migrate.apply(local, f"{place.at}/new", rules=[made], max_shard_size="1MB")
    assert migrate.verify(f"{place.at}/new", source=local, rules=[made]).equal


def within(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `HeldFiles` whose library fails."""

    def wrapped(files: HeldFiles, name: str, data: Any) -> None:
        with system_output._writing(files.output.location, files.output.scheme):
            call(files, name, data)

    return wrapped


def test_of_a_run_that_is_interrupted_nothing_is_left(
    place: Place, local: Path, made: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate.apply(local, f"{place.at}/new", rules=[made], progress=interrupt)
    assert not place.held()


def test_of_a_run_whose_source_is_replaced_nothing_is_left(
    place: Place, local: Path, made: Path, tmp_path: Path
) -> None:
    """The kept listing of a file system would say that nothing has changed."""
    for name, data in tree(local).items():
        put(place, f"old/{name}", data)
    name = "model-00002-of-00003.safetensors"

    def replace(done: int, total: int) -> None:
        put(place, f"old/{name}", b"other")

    out = f"{place.at}/new"
    assert name in refused("M905", f"{place.at}/old", out, rules=[made], progress=replace)
    assert not place.held("/new")
    assert not place.held("/new.migrate-partial")


@pytest.mark.parametrize("place", ["closing"], indirect=True)
def test_each_read_names_the_generation_that_was_there_at_first(place: Place, local: Path) -> None:
    for name, data in tree(local).items():
        put(place, f"old/{name}", data)
    name = "model-00002-of-00003.safetensors"
    Closing.asked.clear()
    with formats.open(f"{place.at}/old") as source:
        blob = source.blobs[source.index.files.index(name)]
        # beyond what opening has read
        there = memoryview(bytearray(100))
        blob.readinto(600 << 10, there)
        assert there == tree(local)[name][600 << 10 :][:100]
        put(place, f"old/{name}", tree(local)[name][::-1])
        with pytest.raises(MigrateError) as caught:
            blob.readinto(700 << 10, there)
    assert [d.code for d in caught.value.diagnostics] == ["M905"]
    assert name in str(caught.value)
    assert Closing.asked
    assert None not in Closing.asked


def test_a_store_that_has_less_than_was_written_is_refused(
    place: Place, local: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = type(place.system)
    real = system.info

    def short(self: Any, path: str, **named: Any) -> Any:
        found = real(self, path, **named)
        lost = path.endswith("model-00002-of-00002.safetensors")
        return {**found, "size": found["size"] - lost}

    monkeypatch.setattr(system, "info", short)
    said = refused("M913", local, f"{place.at}/new", rules=[made], max_shard_size="1MB")
    assert "model-00002-of-00002.safetensors" in said
    assert not place.held()


def test_what_cannot_be_removed_is_named(
    place: Place, local: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(files: HeldFiles, name: str) -> None:
        real(files, name)
        raise MemoryError

    def kept(*_: Any, **__: Any) -> None:
        raise OSError(SECRET)

    real = HeldFiles.appear
    system = type(place.system)
    with monkeypatch.context() as patched:
        patched.setattr(HeldFiles, "appear", appear)
        patched.setattr(system, "rm_file", kept)
        patched.setattr(system, "rm", kept)
        with pytest.raises(MigrateError) as caught:
            migrate.apply(local, f"{place.at}/new", rules=[made])
    assert f"{place.at}/new/config.json could not be removed" in str(caught.value)
    assert "nothing of this run" not in str(caught.value)
    assert SECRET not in str(caught.value)
    # of an output that is complete the answer names it
    if not isinstance(place.system, Closing):
        with monkeypatch.context() as patched:
            patched.setattr(system, "rm", kept)
            report = migrate.apply(local, f"{place.at}/other", rules=[made])
        assert any("could not be removed" in note for note in report.notes)
        assert migrate.verify(f"{place.at}/other", source=local, rules=[made]).equal


def test_one_process_writes_and_nothing_is_resumed(place: Place, local: Path, made: Path) -> None:
    out = f"{place.at}/new"
    assert "cannot be resumed" in refused("M115", local, out, rules=[made], resume=True)
    for named in ({"part": RunPart(0, 2)}, {"ranks": Ranks(0, 2)}):
        assert "one process writes" in refused("M115", local, out, rules=[made], **named)
    with pytest.raises(MigrateError, match="one process writes"):
        migrate.publish(out)
    assert not place.held()


def test_places_that_cannot_be_written_are_refused(place: Place, local: Path, made: Path) -> None:
    for name, data in tree(local).items():
        put(place, f"old/{name}", data)
    before = place.held()
    assert "overlap" in refused("M904", f"{place.at}/old", f"{place.at}/old/new", rules=[made])
    assert "only reads by reading" in refused("M115", local, "reading://x/new", rules=[made])
    for url in ("https://host/new", "file:///tmp/new"):
        assert "nothing is written" in refused("M115", local, url, rules=[made])
    for url in ("gs://bucket", "memory://"):
        assert "a whole store" in refused("M115", local, url + "/", rules=[made])
    assert place.held() == before


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
import fsspec
from stored_systems import Folders
fsspec.register_implementation("folders", Folders)
import migrate
migrate.apply(sys.argv[3], sys.argv[4], rules=[sys.argv[5]],
              progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_what_a_killed_run_leaves_is_cleaned(
    place: Place, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"{place.at}/new"
    if not isinstance(place.system, Folders):
        # the memory of another process is gone with it, and what was not closed never shows
        put(place, f"new.migrate-partial/{'0' * 32}/model.safetensors")
    else:
        paths = [str(Path(migrate.__file__).parents[1]), str(Path(__file__).parent)]
        command = [sys.executable, "-c", KILLED, *paths, str(local), out, str(made)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    put(place, "new.migrate-partial/notes.txt")
    assert not place.held("/new")
    left = place.held()
    assert "migrate clean" in refused("M911", local, out, rules=[made])
    looked = migrate.clean(out, dry_run=True)
    assert not looked.removed
    (file,) = looked.uploads
    assert file.key.startswith(f"{out}.migrate-partial/")
    assert file.key.endswith("/model.safetensors")
    assert not migrate.clean(out, older_than="1h").removed
    assert place.held() == left
    found = migrate.clean(f"{out}.migrate-partial")
    assert found.removed
    assert found.foreign == (f"{out}.migrate-partial/notes.txt",)
    assert place.held() == {"new.migrate-partial/notes.txt": b"mine"}
    assert not migrate.clean(out).removed
    place.system.rm(f"{place.at}/new.migrate-partial", recursive=True)
    migrate.apply(local, out, rules=[made])


@pytest.mark.parametrize("place", ["closing"], indirect=True)
def test_files_that_stay_open_share_what_memory_there_is(place: Place) -> None:
    output = SystemOutput("gs://bucket/new")
    for count, memory, block in (
        (1, 256 << 20, 8 << 20),
        (100, 250 << 20, 2 << 20),
        (9, 1, 1 << 20),
    ):
        files = [(str(number), 10 << 20) for number in range(count)]
        held_files = HeldFiles(output, files, memory)
        held_files.begin("0")
        assert held_files._opened["0"].stream.blocksize == block
        held_files.discard()
    # of the largest that there can be, there are not more blocks than a store takes
    huge = HeldFiles(output, [("0", 5 << 40)], 256 << 20)
    huge.begin("0")
    assert (5 << 40) / huge._opened["0"].stream.blocksize <= 50_000
    huge.discard()
    assert not Closing.objects


@pytest.mark.parametrize("place", ["folders"], indirect=True)
def test_the_command_line_says_what_passes_through_this_machine(
    place: Place, local: Path, made: Path
) -> None:
    out = f"{place.at}/new"
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import fsspec; from stored_systems import Folders\n"
        "fsspec.register_implementation('folders', Folders)\n"
        "from migrate.cli.main import main; sys.argv[1:3] = []; main()"
    )
    paths = [str(Path(migrate.__file__).parents[1]), str(Path(__file__).parent)]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *paths, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for more in (["--dry-run"], []):
        done = run("apply", str(local), "-o", out, "--rules", str(made), *more)
        assert done.returncode == 0, done.stderr
        assert "through this machine; nothing is copied by the store: what fsspec" in done.stdout
    assert f"migrate verify {out}" in done.stderr
    done = run("apply", str(local), "-o", f"{out}2", "--rules", str(made), "--resume")
    assert done.returncode == 2
    assert "--resume: a run into" in done.stderr
    assert "no run has left anything" in run("clean", out).stdout
