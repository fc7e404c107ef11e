"""Hostile files streamed into a live module: the same readers, so the same refusals, and nothing in
the module has changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from archives import archive, data_pkl, genuine_pickle
from corpus import ATTACKS, BY_NAME, Attack
from marks import thorough
from test_refused import Acts, harmless, refused, run, short

FILES = [a for a in ATTACKS if a.kind != "rules"]
# all of them go through every command in `test_refused`
SOME = FILES[::6]


@pytest.fixture(scope="module", params=thorough(["some", "all"]))
def loads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Acts]:
    where = tmp_path_factory.mktemp("loads")
    out: dict[str, Acts] = {}
    for attack in FILES if request.param == "all" else SOME:
        folder = where / attack.name
        folder.mkdir()
        out[attack.name] = one = Acts(str(where / f"{attack.name}.canary"), folder)
        path = str(attack.build(folder, one.canary))
        one.add("load", path, [])
        one.add("load", path, ["opaque", "lossy", "drop"])
    run(out, where)
    return out


def test_nothing_hostile_reaches_a_module(loads: dict[str, Acts]) -> None:
    for name, one in loads.items():
        unharmed(BY_NAME[name], one)


def unharmed(attack: Attack, one: Acts) -> None:
    for job, answer in zip(one.jobs, one.answers, strict=True):
        if job["arguments"][1] and attack.carried and answer["exit"] == 0:
            # what is not known was left out, as was allowed
            harmless(job, answer)
        else:
            refused(job, answer, {attack.expected})
            assert not answer["out"], short(job, answer)


def test_the_genuine_twin_is_loaded(tmp_path: Path) -> None:
    one = Acts(str(tmp_path / "canary"), tmp_path)
    (tmp_path / "m.pt").write_bytes(archive(data_pkl(genuine_pickle())))
    one.add("load", str(tmp_path / "m.pt"), [])
    run({"twin": one}, tmp_path)
    (answer,) = one.answers
    harmless(one.jobs[0], answer)
    assert (answer["exit"], answer["out"]) == (0, "written"), answer
