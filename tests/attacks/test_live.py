"""The control: every attack that is called live does something when it is read the usual way. One
child process reads them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corpus import ATTACKS
from hostile_streams import STREAMS
from work import HANG

HERE = Path(__file__).parent
# since 3.14 Python refuses it too
LIVE_STREAMS = [
    s for s in STREAMS if s.live and (s.name != "frame-too-short" or sys.version_info < (3, 14))
]
LIVE_FILES = [a for a in ATTACKS if a.live]

# modules that payloads name, written where the child finds them: one does its harm when it is
# imported alone, the other stands for an allowed module that imports os
TOUCHES = "import os\nopen(os.environ['ATTACK_CANARY'], 'w').close()\n"
RECIPES = "import os\nclass Float8CurrentScaling: pass\n"


@pytest.fixture(scope="module")
def touched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bool]]:
    """name -> [whether the canary was there before, and after]."""
    where = tmp_path_factory.mktemp("live")
    (where / "attack_touches_on_import.py").write_text(TOUCHES)
    package = where / "transformer_engine" / "common"
    package.mkdir(parents=True)
    for init in (package.parent, package):
        (init / "__init__.py").write_text("")
    (package / "recipe.py").write_text(RECIPES)
    jobs = []
    for stream in LIVE_STREAMS:
        canary = str(where / f"{stream.name}.canary")
        path = where / f"{stream.name}.pkl"
        path.write_bytes(stream.pickle(canary))
        jobs.append([stream.name, "extra state", str(path), canary])
    for attack in LIVE_FILES:
        canary = str(where / f"{attack.name}.canary")
        folder = where / attack.name
        folder.mkdir()
        jobs.append([attack.name, attack.kind, str(attack.build(folder, canary)), canary])
    (where / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "unsafe_reader.py"), "jobs.json"]
    done = subprocess.run(
        command,
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("\n{")[2].join(["{", ""]))


@pytest.mark.parametrize("name", [s.name for s in LIVE_STREAMS])
def test_plain_unpickling_touches_the_canary(touched: dict[str, list[bool]], name: str) -> None:
    assert touched[name][:2] == [False, True], touched[name]


@pytest.mark.parametrize("name", [a.name for a in LIVE_FILES])
def test_reading_the_usual_way_touches_the_canary(
    touched: dict[str, list[bool]], name: str
) -> None:
    assert touched[name][:2] == [False, True], touched[name]


def test_the_corpus_is_what_was_promised() -> None:
    """At least sixty, no name twice, every row of the threat table met, and enough of them live."""
    rows = {row for thing in (*STREAMS, *ATTACKS) for row in thing.rows.split()}
    wanted = [
        f"{letter}{i}"
        for letter, last in (("P", 9), ("Z", 4), ("T", 5), ("S", 4), ("I", 3), ("D", 5), ("Y", 1))
        for i in range(1, last + 1)
    ]
    assert not set(wanted) - rows
    assert len(ATTACKS) >= 60
    assert len({a.name for a in ATTACKS}) == len(ATTACKS)
    assert len({s.name for s in STREAMS}) == len(STREAMS)
    assert len(LIVE_STREAMS) >= 40
