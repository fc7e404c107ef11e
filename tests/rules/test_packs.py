from __future__ import annotations

import re
import shutil
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from migrate.core.errors import QuestionError
from migrate.rules import packs
from migrate.rules.packs import Pack, Packs, built_in, find_packs

LAYOUTS = (
    "lineage: {name}\ntitle: {title}\nordered: true\nlayouts:\n  v1: {{title: one}}\n  v2: "
    "{{title: two}}\n"
)
RULES = (
    "id: {name}/{slug}\ntitle: t\nlineage: {name}\nedge: [v1, v2]\nrules: [{{name: r, from: "
    '"{{k...}}.a", to: "{{k}}.b"}}]\n'
)


def write(folder: Path, name: str = "acme", title: str = "t", slugs: str = "a b") -> Path:
    (folder / name / "v2").mkdir(parents=True)
    (folder / name / "layouts.yaml").write_text(LAYOUTS.format(name=name, title=title))
    for slug in slugs.split():
        (folder / name / "v2" / f"{slug}.yaml").write_text(RULES.format(name=name, slug=slug))
    return folder


@pytest.fixture
def no_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "_scan", lambda: iter(()))


def test_rule_files_of_one_edge_are_collected(tmp_path: Path, no_installed: None) -> None:
    lineage = find_packs(write(tmp_path), cwd=tmp_path / "acme").load_lineage("acme")
    (edge,) = lineage.edges
    assert (edge.source, edge.target, [f.name for f in edge.files]) == (
        "v1",
        "v2",
        ["a.yaml", "b.yaml"],
    )


def test_a_folder_of_one_lineage_can_be_named_itself(tmp_path: Path, no_installed: None) -> None:
    assert find_packs(write(tmp_path) / "acme", cwd="/").load_lineage("acme").names == ["v1", "v2"]


def test_named_then_beside_then_built_in(tmp_path: Path, no_installed: None) -> None:
    write(tmp_path / "rules", "acme", "beside")
    write(tmp_path / "named", "acme", "named")
    write(tmp_path / "named", "hf-mixtral", "mine")
    both = find_packs(tmp_path / "named", cwd=tmp_path)
    assert both.load_lineage("acme").title == "named"
    assert find_packs(cwd=tmp_path).load_lineage("acme").title == "beside"
    assert both.load_lineage("hf-mixtral").title == "mine"
    names, problems = both.lineages()
    assert list(names)[:2] == ["acme", "hf-mixtral"]
    assert "te-grouped-bias" in names
    assert problems == []


def refused(found: Packs, name: str) -> str:
    with pytest.raises(QuestionError) as caught:
        found.load_lineage(name)
    (problem,) = caught.value.diagnostics
    assert problem.code == "M508"
    return f"{problem.message} {problem.notes} {problem.help}"


def test_a_folder_beside_replaces_no_lineage_that_is_known(
    tmp_path: Path, no_installed: None
) -> None:
    write(tmp_path / "rules", "hf-mixtral", "mine")
    write(tmp_path / "rules", "acme")
    found = find_packs(cwd=tmp_path)
    said = refused(found, "hf-mixtral")
    assert str(tmp_path / "rules") in said
    assert str(built_in().folder) in said
    # what is asked for by its name is not in the way of others; all together are refused
    assert found.load_lineage("acme").names == ["v1", "v2"]
    assert found.load_lineage("hf-qwen2-moe").names == ["v4", "v5"]
    with pytest.raises(QuestionError, match="M508"):
        found.lineages()
    named = find_packs(tmp_path / "rules", cwd=tmp_path)
    assert named.load_lineage("hf-mixtral").title == "mine"
    assert "hf-mixtral" in named.lineages()[0]


def test_homes_that_do_the_same_are_one(tmp_path: Path, no_installed: None) -> None:
    shipped = built_in().folder
    assert shipped is not None
    copied = tmp_path / "rules" / "hf-mixtral"
    shutil.copytree(shipped / "hf-mixtral", copied)
    assert find_packs(cwd=tmp_path).home("hf-mixtral").origin == "built-in"
    # prose and the name of a file mean nothing
    (path,) = copied.glob("v5/*.yaml")
    path = path.rename(path.with_name("other.yaml"))
    layouts = copied / "layouts.yaml"
    path.write_text("# a comment\n" + path.read_text().replace("title: ", "title: About ", 1))
    layouts.write_text(layouts.read_text().replace("title: ", "title: About ", 1))
    assert find_packs(cwd=tmp_path).home("hf-mixtral").origin == "built-in"
    rules, written = path.read_text(), layouts.read_text()
    for file, text in (
        (path, rules.replace("dim: 1", "dim: 0")),
        (path, rules.replace("id: hf-mixtral", "id: mixtral")),
        (path, "id: ["),
        (layouts, written.replace("present", "absent", 1)),
    ):
        assert text != file.read_text()
        path.write_text(rules)
        layouts.write_text(written)
        file.write_text(text)
        refused(find_packs(cwd=tmp_path), "hf-mixtral")
    path.write_text(rules)
    layouts.write_text(written)
    (copied / "v5" / "one_more.yaml").write_text(rules.replace("id: hf-mixtral", "id: mixtral"))
    refused(find_packs(cwd=tmp_path), "hf-mixtral")


def test_without_a_folder_beside_nothing_is_compared(
    tmp_path: Path, no_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "_alike", lambda *_: pytest.fail("compared"))
    assert find_packs(cwd=tmp_path).load_lineage("hf-mixtral").edges
    write(tmp_path / "rules", "acme")
    assert find_packs(cwd=tmp_path).load_lineage("acme").edges


def test_the_rules_of_the_source_tree_are_not_searched_twice(no_installed: None) -> None:
    found = find_packs(cwd=Path(__file__).resolve().parents[2])
    assert [p.origin for p in found.all] == ["built-in"]


def test_a_lineage_that_is_not_there_names_the_nearest_and_the_places(
    tmp_path: Path, no_installed: None
) -> None:
    with pytest.raises(QuestionError) as caught:
        find_packs(write(tmp_path), cwd="/").load_lineage("hf-mixtrall")
    (found,) = caught.value.diagnostics
    assert (found.code, found.help) == ("M507", "did you mean `hf-mixtral`?")
    assert any(str(tmp_path) in note for note in found.notes)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match="M507"):
        find_packs(tmp_path / "none")


def test_a_broken_rule_file_of_another_lineage_does_no_harm(
    tmp_path: Path, no_installed: None
) -> None:
    write(tmp_path, "acme")
    write(tmp_path, "other")
    (tmp_path / "other" / "v2" / "a.yaml").write_text("id: [")
    found = find_packs(tmp_path, cwd="/")
    assert found.load_lineage("acme").edges
    assert set(found.lineages()[0]) >= {"acme", "other"}
    with pytest.raises(QuestionError, match=r"M108"):
        found.load_lineage("other")


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (("edge: [v1, v2]", "edge: [v1, v3]"), "M501"),
        (("lineage: acme", "lineage: other"), "M114"),
        (("edge: [v1, v2]", "edge: v1"), "M106"),
        (("lineage: acme\n", ""), "M101"),
    ],
)
def test_a_rule_file_must_fit_its_lineage(
    tmp_path: Path, no_installed: None, edit: tuple[str, str], code: str
) -> None:
    path = write(tmp_path) / "acme" / "v2" / "a.yaml"
    path.write_text(path.read_text().replace(*edit))
    with pytest.raises(QuestionError) as caught:
        find_packs(tmp_path, cwd="/").load_lineage("acme")
    (found,) = caught.value.diagnostics
    assert (found.code, found.spans[0].file) == (code, str(path))


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (("v1: {title: one}", "v1: {titel: one}"), "M103"),
        (("v1: {title: one}", "latest: {title: one}"), "M114"),
        (("v1: {title: one}", "v1: {title: one, status: old}"), "M114"),
        (("v1: {title: one}", 'v1: {title: one, detect: {present: "{p"}}'), "M20"),
        (("v1: {title: one}", 'v1: {title: one, detect: {ndim: {"{p...}.w": x}}}'), "M106"),
        (("v1: {title: one}", 'v1: {title: one, detect: {dtype: {"{p...}.w": [f61]}}}'), "M114"),
        (("lineage: acme", "lineage: acme2"), "M114"),
        (("ordered: true", 'requires: ">99"'), "M107"),
        (("v2: {title: two}", "v1: {title: two}"), "M104"),
    ],
)
def test_a_mistake_in_layouts_is_raised_for_local_packs(
    tmp_path: Path, no_installed: None, edit: tuple[str, str], code: str
) -> None:
    path = write(tmp_path) / "acme" / "layouts.yaml"
    path.write_text(path.read_text().replace(*edit))
    for call in (lambda p: p.lineages(), lambda p: p.load_lineage("acme")):
        with pytest.raises(QuestionError) as caught:
            call(find_packs(tmp_path, cwd="/"))
        assert code in str(caught.value)


def entry(value: str, name: str = "acme") -> EntryPoint:
    return EntryPoint(name, value, packs.GROUP)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "acme_rules_of_a_test"
    write(package / "data")
    (package / "__init__.py").write_text(
        "raise RuntimeError('a pack is data and is never imported')\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def test_an_installed_pack_is_found_without_importing_it(installed: Path) -> None:
    found = packs._located(entry("acme_rules_of_a_test:data"))
    assert (found.folder, found.error) == (installed / "data", "")
    assert list(found.lineages) == ["acme"]
    assert "acme_rules_of_a_test" not in sys.modules


@pytest.mark.parametrize(
    "value", ["acme_rules_of_a_test:nowhere", "no_such_package_anywhere:data", "json:tool"]
)
def test_a_pack_that_is_not_there_is_reported_and_not_fatal(
    installed: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(packs, "_scan", lambda: iter([packs._located(entry(value))]))
    found = find_packs(cwd="/")
    assert "not a folder" in found.installed[0].error
    assert "hf-mixtral" in found.lineages()[0]


def test_a_broken_lineage_of_an_installed_pack_is_reported_and_not_fatal(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "data" / "acme" / "layouts.yaml").write_text("lineage: [")
    monkeypatch.setattr(
        packs, "_scan", lambda: iter([packs._located(entry("acme_rules_of_a_test:data"))])
    )
    lineages, problems = find_packs(cwd="/").lineages()
    assert "acme" not in lineages
    assert [d.code for d in problems] == ["M108"]


def test_two_installed_packs_with_one_lineage_are_refused_unless_a_named_one_decides(
    tmp_path: Path,
) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", slugs="a c")
    found = Packs((), scan=False)
    found._installed = (Pack("one", "installed", one, "1.0"), Pack("two", "installed", two, "2.0"))
    with pytest.raises(QuestionError, match=r"M508.*\n?.*one 1\.0, two 2\.0"):
        found.load_lineage("acme")
    lineages, problems = found.lineages()
    assert "acme" not in lineages
    assert [d.code for d in problems] == ["M508"]
    named = Packs((Pack("here", "local", one, named=True),), scan=False)
    named._installed = found._installed
    assert named.load_lineage("acme").names == ["v1", "v2"]
    beside = Packs((Pack("here", "local", one),), scan=False)
    beside._installed = found._installed[1:]
    assert f'rules="{two}"' in refused(beside, "acme")


def test_a_lineage_knows_its_layouts_and_edges(tmp_path: Path, no_installed: None) -> None:
    lineage = find_packs(write(tmp_path), cwd="/").load_lineage("acme")
    assert lineage.names == ["v1", "v2"]
    assert [(e.source, e.target, len(e.files)) for e in lineage.edges] == [("v1", "v2", 2)]


def test_the_built_in_rules_are_there() -> None:
    assert {"hf-mixtral", "hf-qwen2-moe", "te-grouped-weight", "te-grouped-bias"} <= set(
        built_in().lineages
    )


def test_a_pack_without_a_lineage_where_it_points_is_warned_of(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        packs, "_scan", lambda: iter([packs._located(entry("acme_rules_of_a_test"))])
    )
    monkeypatch.chdir(installed.parent)
    document = packs.list_packs()
    (warning,) = document["warnings"]
    assert warning["code"] == "M627"
    assert str(installed) in warning["message"]
    assert warning["notes"] == [f"{installed / 'data'} has acme"]
    assert "data" in warning["help"]
    with pytest.raises(QuestionError) as caught:
        find_packs(cwd="/").load_lineage("acme")
    assert any(str(installed / "data") in note for note in caught.value.diagnostics[0].notes)
    # one that has some, and what the folder of a named pack should be
    monkeypatch.setattr(
        packs, "_scan", lambda: iter([packs._located(entry("acme_rules_of_a_test:data"))])
    )
    assert packs.list_packs()["warnings"] == []
    (named,) = packs.list_packs([installed])["warnings"]
    assert f'rules="{installed / "data"}"' in named["help"]
    (installed / "data" / "acme" / "layouts.yaml").unlink()
    (lost,) = packs.list_packs()["warnings"]
    assert lost["notes"] == []
    assert "layouts.yaml" in lost["help"]


def test_the_folder_of_a_pack_may_have_a_name_that_python_does_not_take(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "data").rename(installed / "our-data")
    for value in ("acme_rules_of_a_test:our-data", "acme_rules_of_a_test : our-data [extra]"):
        pack = packs._located(entry(value))
        assert pack.folder == installed / "our-data"
        assert list(pack.lineages) == ["acme"]
    for value in ("acme_rules_of_a_test:/etc", "acme_rules_of_a_test:../..", "", ":"):
        pack = packs._located(entry(value))
        assert pack.folder is None
        assert "NoneType" not in pack.error


def test_the_pyproject_of_the_tutorial_makes_a_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "two-releases.md"
    text = page.read_text()
    (written,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (name, value) = re.findall(
        r'^\[project.entry-points."migrate.rulepacks"\]\n(\w+) = "(.*)"$', written, re.MULTILINE
    )[0]
    package = tmp_path / "acme_rules"
    write(package / "rules", "toy")
    (package / "__init__.py").write_text("raise RuntimeError\n")
    (tmp_path / "pyproject.toml").write_text(written)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = packs._located(entry(value, name))
    assert (found.error, list(found.lineages)) == ("", ["toy"])
    build = pytest.importorskip(
        "hatchling.builders.wheel",
        reason="hatchling, which builds the wheel, is not installed here",
    )
    (wheel,) = build.WheelBuilder(str(tmp_path)).build(
        directory=str(tmp_path / "dist"), versions=["standard"]
    )
    with zipfile.ZipFile(wheel) as archive:
        assert "acme_rules/rules/toy/layouts.yaml" in archive.namelist()
        assert value in archive.read("acme_rules-1.0.dist-info/entry_points.txt").decode()
