"""`migrate history --graph`: layouts, edges, and what the text of rules says."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import done, mixtral, run, safetensors

from migrate.cli import lineage_graph


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A lineage with an edge that loses nothing, one that rounds, and one that a param decides."""
    folder = tmp_path / "rules" / "demo"
    folder.mkdir(parents=True)
    layouts = "\n".join(f"  {v}: {{title: t}}" for v in ("v1", "v2", "v3", "v4"))
    (folder / "layouts.yaml").write_text(
        f"lineage: demo\ntitle: t\nordered: true\nlayouts:\n{layouts}\n"
    )
    decided = "  - {name: b, from: b, to: b, via: [{cast: {to: $kind}}]}\n"
    for before, after, text in (
        ("v1", "v2", "rules:\n  - {name: a, from: a, to: b}\n  - {name: c, from: c, to: d}\n"),
        ("v2", "v3", "rules:\n  - {name: b, from: b, to: b, via: [{cast: {to: float16}}]}\n"),
        (
            "v3",
            "v4",
            f"params: {{kind: {{type: str}}}}\nrules:\n{decided}",
        ),
    ):
        place = folder / after / "x.yaml"
        place.parent.mkdir()
        head = f"id: demo/{after}/x\ntitle: x\nlineage: demo\nedge: [{before}, {after}]\n"
        place.write_text(head + text)
    return tmp_path / "rules"


def test_edges_say_how_many_rules_and_whether_they_lose(demo: Path) -> None:
    asked = ["history", "--lineage", "demo", "--rules", demo, "--graph", "mermaid"]
    (lineage,) = done(*asked, "--format", "json").json["lineages"]
    found = [(e["from"], e["rules"], e["lossless"]) for e in lineage["edges"]]
    assert found == [("v1", 2, True), ("v2", 1, False), ("v3", 1, None)]
    lines = done(*asked).out.splitlines()
    assert lines[0] == "flowchart LR"
    assert '    n0_0 -->|"2 rules, lossless"| n0_1' in lines
    assert '    n0_1 -.->|"1 rule, not lossless"| n0_2' in lines
    assert '    n0_2 -.->|"1 rule, params decide what is lost"| n0_3' in lines


def test_rules_are_counted_only_where_that_is_asked_for() -> None:
    for lineage in done("history", "--format", "json").json["lineages"]:
        assert all(edge.keys() == {"from", "to", "files"} for edge in lineage["edges"])


@pytest.mark.parametrize(
    ("form", "here"), [("mermaid", "  class n0_0 here"), ("dot", 'n0_0 [label="v4", penwidth=3];')]
)
def test_the_layout_of_a_checkpoint_is_marked(tmp_path: Path, form: str, here: str) -> None:
    path = safetensors(tmp_path / "old.safetensors", mixtral())
    out = done("history", path, "--lineage", "hf-mixtral", "--graph", form).out
    assert here in out
    assert "3 rules, lossless" in out


def test_all_that_is_included_can_be_drawn() -> None:
    known = done("history", "--format", "json").json["lineages"]
    dot = done("history", "--graph", "dot").out
    assert dot.count(" -> ") == sum(len(lineage["edges"]) for lineage in known)
    assert dot.count("subgraph") == len(known)
    assert dot.count("{") == dot.count("}")


def test_names_cannot_leave_their_labels() -> None:
    name = 'a"];\n</script>`b`\\"'
    layout = {"name": name, "title": "", "status": "current", "note": ""}
    doc = {"lineages": [{"name": name, "layouts": [layout], "edges": []}]}
    mermaid = lineage_graph.graph(doc, "mermaid")
    assert [line.count('"') for line in mermaid.splitlines()] == [0, 2, 2, 0, 0, 0]
    assert not set("<>`\\") & set(mermaid)
    dot = lineage_graph.graph(doc, "dot")
    assert len(dot.splitlines()) == 7
    for line in dot.splitlines()[3:5]:
        bare = line.replace("\\\\", "").replace('\\"', "")
        assert bare.count('"') == 2


def test_an_unknown_form_is_refused() -> None:
    assert run("history", "--graph", "svg").exit == 2
