"""What `resize` cuts is kept beside the tensors, comes back bit for bit, and is never lost without
a word; an edge from a layout to itself changes how often one asks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import folder, refusal, round_trip, stamp
from commandline import contents, done, rules, safetensors

CUT = (
    "params: {rows: {type: int, optional: true}, of: {type: int, optional: true}}\n"
    "rules:\n"
    '  - {name: cut, from: "{n}.old", to: "{n}.new", via: '
    "[{resize: {dim: 0, size: $rows, of: $of}}]}\n"
)
TENSORS = {"a.old": ("F32", [5, 2]), "b.old": ("F32", [5, 2])}


def cut(tmp_path: Path) -> Path:
    return rules(tmp_path, CUT)


def test_what_is_cut_comes_back_bit_for_bit_and_needs_no_permission(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", TENSORS)
    asked = ("--rules", cut(tmp_path), "--set", "rows=3", "--set", "of=5")
    planned = done("plan", source, *asked, "--format", "json").json
    assert planned["losses"] == []
    assert planned["downgrade"] == {"exact": True, "because": []}
    (note,) = [note for note in planned["notes"] if note.startswith("kept for the way back")]
    assert "cut n=a (float32 [2, 2])" in note
    new = round_trip(source, tmp_path, *asked)
    assert contents(new)["a.new"][1] == (3, 2)
    # beside them, and not among them
    assert set(contents(new / "model.safetensors")) == {"a.new", "b.new"}
    beside = contents(new / "migrate.items.safetensors")
    assert [shape for _, shape, _ in beside.values()] == [(2, 2)] * 2


def test_an_axis_that_grows_takes_back_what_fits_and_keeps_the_rest(tmp_path: Path) -> None:
    path, new = tmp_path / "old.pt", tmp_path / "new.pt"
    whole = torch.arange(10, dtype=torch.float32).reshape(5, 2)
    torch.save({"model": {"a.old": whole}, "step": 3}, path)
    rule = cut(tmp_path)
    done("apply", path, "-o", new, "--rules", rule, "--set", "rows=2", "--set", "of=5")
    saved = torch.load(new, weights_only=True)
    assert torch.equal(saved["model"]["a.new"], whole[:2])
    (kept,) = saved["migrate.kept"].values()
    assert torch.equal(kept, whole[2:])
    for of, rows in ((4, whole[:4]), (5, whole), (7, None)):
        back = tmp_path / f"back{of}.pt"
        # a stamp says 5, so that this is another way than it
        (tmp_path / "bare.pt").unlink(missing_ok=True)
        torch.save(torch.load(new, weights_only=True), tmp_path / "bare.pt")
        done(
            "downgrade", tmp_path / "bare.pt", "-o", back, "--rules", rule,
            "--set", "rows=2", "--set", f"of={of}",
        )  # fmt: skip
        saved = torch.load(back, weights_only=True)
        made = saved["model"]["a.old"]
        if rows is None:
            assert torch.equal(made[:5], whole)
            assert not made[5:].any()
        else:
            assert torch.equal(made, rows)
        left = list(saved.get("migrate.kept", {}).values())
        assert [part.tolist() for part in left] == ([whole[4:].tolist()] if of == 4 else [])
        assert saved["step"] == 3


def test_an_axis_that_no_param_says_the_length_of_is_left_with_a_note(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", TENSORS)
    titled = CUT.replace("rows: {type: int,", "rows: {type: int, title: what is kept of it,")
    for asked in ((), ("--single-file",)):
        planned = done("plan", source, *asked, "--rules", rules(tmp_path, titled))
        (note,) = [line for line in planned.out.splitlines() if "nothing is cut" in line]
        assert note.strip() == (
            "note: nothing is cut off a.old (5 on axis 0), b.old (5 on axis 0): `size` is $rows "
            "(what is kept of it), which has no value: --set rows=…"
        )
    planned = done("plan", source, "--rules", rules(tmp_path, titled), "--set", "rows=5")
    assert "nothing is cut" not in planned.out


def test_where_there_is_no_place_for_it_cutting_needs_a_word(tmp_path: Path) -> None:
    single = safetensors(tmp_path / "old.safetensors", TENSORS)
    asked = ("--rules", cut(tmp_path), "--set", "rows=3", "--set", "of=5")
    out = tmp_path / "new.safetensors"
    found = refusal("apply", single, "-o", out, *asked, exit=3)
    assert (found["code"], found["help"]) == ("M402", "if that is wanted: --allow drop")
    report = done("apply", single, "-o", out, *asked, "--allow", "drop", "--format", "json").json
    assert report["downgrade"]["exact"] is False
    # and a dict of tensors in memory has none either
    from migrate import MigrateError, migrate_state_dict

    params = {"rows": 3, "of": 5}
    tensors = {"a.old": torch.zeros(5, 2)}
    with pytest.raises(MigrateError, match="M402"):
        migrate_state_dict(tensors, rules=cut(tmp_path), params=params)


def test_kept_rows_that_do_not_fit_any_more_are_left_and_said(tmp_path: Path) -> None:
    path, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({"model": {"a.old": torch.ones(5, 2)}, "step": 3}, path)
    rule = cut(tmp_path)
    done("apply", path, "-o", new, "--rules", rule, "--set", "rows=2", "--set", "of=5")
    saved = torch.load(new, weights_only=True)
    saved["model"]["a.new"] = saved["model"]["a.new"].half()
    torch.save(saved, tmp_path / "half.pt")
    done(
        "downgrade", tmp_path / "half.pt", "-o", tmp_path / "back.pt", "--rules", rule,
        "--set", "rows=2", "--set", "of=5",
    )  # fmt: skip
    back = torch.load(tmp_path / "back.pt")
    assert not back["model"]["a.old"][2:].any()
    assert len(back["migrate.kept"]) == 1
    planned = done(
        "plan", tmp_path / "half.pt", "--rules", rule, "--set", "rows=2", "--set", "of=5",
        "--downgrade", "--format", "json",
    ).json  # fmt: skip
    assert any("does not fit" in note for note in planned["notes"])


DROP = """
rules:
  - {name: a, from: "{m...}.old", to: "{m}.new"}
  - {name: scratch, from: "{m...}.scratch", inverse: keep, via: [{drop: {why: it is never read}}]}
"""


def test_what_a_rule_drops_and_keeps_comes_back_and_needs_no_permission(tmp_path: Path) -> None:
    rule = rules(tmp_path, DROP)
    source = folder(tmp_path / "old", {"a.old": ("F32", [2]), "a.b.scratch": ("F32", [3])})
    planned = done("plan", source, "--rules", rule, "--format", "json").json
    assert (planned["losses"], planned["downgrade"]["exact"]) == ([], True)
    new = round_trip(source, tmp_path, "--rules", rule)
    assert set(contents(new / "model.safetensors")) == {"a.new"}
    single = safetensors(
        tmp_path / "old.safetensors", {"a.old": ("F32", [2]), "a.scratch": ("F32", [3])}
    )
    out = tmp_path / "new.safetensors"
    found = refusal("apply", single, "-o", out, "--rules", rule, exit=3)
    assert (found["code"], found["help"]) == ("M402", "if that is wanted: --allow drop")
    report = done(
        "apply", single, "-o", out, "--rules", rule, "--allow", "drop", "--format", "json"
    ).json
    assert report["downgrade"]["exact"] is False


def test_versions_of_modules_without_tensors_and_states_come_back_in_order(tmp_path: Path) -> None:
    path, new, back = (tmp_path / name for name in ("old.pt", "new.pt", "back.pt"))
    linear = torch.nn.Linear(2, 2, bias=False)
    inner = torch.nn.ModuleDict({"drop": torch.nn.Dropout(), "q": linear, "act": torch.nn.ReLU()})
    state = torch.nn.ModuleDict({"m": inner}).state_dict()
    state["m.q._extra_state"] = None
    torch.save({"model": state, "step": 3}, path)
    rule = rules(
        tmp_path,
        """rules:
  - {name: w, from: "m.q.weight", to: "n.p.weight"}
  - {name: s, from: "{m...}._extra_state", to: "{m}._extra_state", inverse: keep,
     via: [{extra_state: {}}]}
""",
    )
    assert "downgrade: exact" in done("apply", path, "-o", new, "--rules", rule).out
    made = torch.load(new, weights_only=True)["model"]
    assert (list(made), list(made._metadata)) == (["n.p.weight"], ["", "n.p"])
    done("downgrade", new, "-o", back, "--rules", rule)
    made = torch.load(back, weights_only=True)["model"]
    assert (list(made), list(made._metadata)) == ([*state], [*state._metadata])
    assert made["m.q._extra_state"] is None
    assert vars(made) == {"_metadata": state._metadata}
    done("diff", path, back)


LINEAGE = """
lineage: demo
title: tensors in one or more pieces
ordered: false
layouts:
  pieces: {title: in pieces, detect: {present: "w@{r:int}"}}
  other: {title: under another name}
"""
LOOP = """
id: demo/pieces/again
title: in more or fewer pieces
lineage: demo
edge: [pieces, pieces]
requires: ">=0.1"
params:
  was: {type: int, shape: {key: "w@{r:int}", count: r}}
  count: {type: int, minimum: 1, follows: $was, title: pieces}
  rows: {type: int, shape: {key: "w@{r:int}", sum: r}}
  size: {type: int, follows: $rows + (0 - $rows) % $count}
rules:
  - name: w
    from: "w@{r:int}"
    to: "w@{s:int}"
    via:
      - concat: {over: r, dim: 0, count: $was}
      - resize: {dim: 0, size: $size, of: $rows}
      - split: {into: s, dim: 0, count: $count}
"""


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    home = tmp_path / "rules" / "demo"
    (home / "pieces").mkdir(parents=True)
    (home / "other").mkdir()
    (home / "layouts.yaml").write_text(LINEAGE.lstrip())
    (home / "pieces" / "again.yaml").write_text(LOOP.lstrip())
    return tmp_path / "rules"


def pieces(path: Path, *sizes: int) -> Path:
    path.mkdir()
    for rank, rows in enumerate(sizes):
        safetensors(path / f"consolidated.{rank:02d}.safetensors", {"w": ("F32", [rows, 2])})
    return path


def shapes(path: Path) -> list[tuple[int, ...]]:
    return [contents(file)["w"][1] for file in sorted(path.glob("consolidated.*"))]


def test_an_edge_to_itself_is_walked_when_something_else_is_asked_for(
    tmp_path: Path, pack: Path
) -> None:
    source, asked = pieces(tmp_path / "a", 3, 3), ("--rules", pack, "--to", "demo@pieces")
    nothing = done("apply", source, "-o", tmp_path / "no", *asked, exit=1)
    assert "nothing to do" in nothing.out + nothing.err
    found = refusal("plan", source, *asked, "--set", "count=2", exit=2)
    assert found["code"] == "M115"
    assert "would change nothing" in found["message"]
    done("apply", source, "-o", tmp_path / "b", *asked, "--set", "count=4")
    assert shapes(tmp_path / "b") == [(2, 2)] * 4
    # asked for once more it counts from there, and remembers neither number
    done("apply", tmp_path / "b", "-o", tmp_path / "c", *asked, "--set", "count=1")
    assert [e["params"]["was"] for e in stamp(tmp_path / "c")["applied"]] == [2, 4]
    done("downgrade", tmp_path / "c", "-o", tmp_path / "d", "--rules", pack)
    assert shapes(tmp_path / "d") == [(2, 2)] * 4
    entries = stamp(tmp_path / "d")["applied"]
    assert [entry.get("backwards", False) for entry in entries] == [False, False, True]
    # what was undone is not undone again
    done("downgrade", tmp_path / "d", "-o", tmp_path / "e", "--rules", pack)
    assert shapes(tmp_path / "e") == shapes(source)
    assert contents(tmp_path / "e") == contents(source)
    found = done("verify", tmp_path / "d", "--source", tmp_path / "c", "--rules", pack)
    assert "verified" in found.out
