"""The answers of public functions: typed, read-only, and as JSON what the commands print."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from inspect import getdoc
from pathlib import Path
from typing import Any

import pytest
from commandline import DATA, ROOT, done, rules, safetensors

import migrate
from migrate import results
from migrate.core.document import DocumentPart, Result, fields_of
from migrate.results import ApplyReport, DocumentReport, HistoryReport, PlanReport
from migrate.rules.files import shipped_folder

HUB, V5 = DATA / "mixtral__v4" / "hub", DATA / "mixtral__v4" / "v5"
GOAL = "hf-mixtral@v5"
REPORTS = sorted(
    (cls for cls in vars(results).values() if isinstance(cls, type) and vars(cls).get("KIND")),
    key=lambda cls: str(cls.KIND),
)
SCHEMAS = {
    path.name.removesuffix(".schema.json"): json.loads(path.read_text(encoding="utf-8"))
    for path in (ROOT / "schemas").glob("*.schema.json")
}
# documents that no function answers with: the command line makes them, or `migrate.api` alone
OF_COMMANDS = {"explanation", "layouts", "packs", "problems", "report", "rulefile", "schemas"}
JSON = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "None": "null",
    "tuple": "array",
    "Mapping": "object",
}


def test_every_document_of_a_function_has_a_class() -> None:
    assert {cls.KIND for cls in REPORTS} == SCHEMAS.keys() - OF_COMMANDS


def unlike(
    cls: type[DocumentPart], schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> list[str]:
    """Where the fields of a class are not those of an object's schema, nested ones included."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    names = {cls.RENAMED.get(n, n.rstrip("_")): text for n, text in fields_of(cls).items()}
    wanted = {n: s for n, s in schema["properties"].items() if n not in ("format_version", "kind")}
    if not issubclass(cls, DocumentReport):
        wanted = dict(schema["properties"])
    out = [f"{cls.__name__}: {n}" for n in names.keys() ^ wanted.keys()]
    for name in names.keys() & wanted.keys():
        out += [
            f"{cls.__name__}.{name}: {x}" for x in misfit(names[name], wanted[name], definitions)
        ]
        # the stamp has the same schema, and less in it
        optional = name not in schema["required"] and cls is not HistoryReport
        if optional and not re.search(r"\| None|Any", names[name]):
            out.append(f"{cls.__name__}.{name} may be left out")
    return out


def misfit(annotation: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """What the annotation of a field says otherwise than the field's schema."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        schema = next(s for s in schema["anyOf"] if s != {"type": "null"})
        assert "| None" in annotation
    if annotation == "Any":
        return []
    kinds = {"object"} if "properties" in schema else set()
    said = schema.get("type", kinds)
    kinds = {said} if isinstance(said, str) else set(said)
    if "enum" in schema:
        names = {None: "null", bool: "boolean", int: "integer", str: "string"}
        kinds = {names[None if v is None else type(v)] for v in schema["enum"]}
    own = {
        part.strip().partition("[")[0] for part in re.sub(r"\[.*\]", "[]", annotation).split("|")
    }
    nested = [getattr(results, word, None) for word in re.findall(r"\w+", annotation)]
    inner = [one for one in nested if isinstance(one, type) and issubclass(one, DocumentPart)]
    made = {JSON.get(word, "object") for word in own}
    out = [] if not kinds or made >= kinds - {"null"} else [f"{sorted(kinds)}, not {annotation}"]
    # where a null may stand the annotation must say so; a field that is left out may be None too
    out += ["may be null"] * ("null" in kinds and "None" not in own)
    items = schema.get("items", schema.get("additionalProperties", schema))
    if inner and isinstance(items, dict):
        out += unlike(
            inner[0],
            items if schema.get("type") != "object" or "properties" not in schema else schema,
            definitions,
        )
    return out


@pytest.mark.parametrize("cls", REPORTS, ids=lambda cls: cls.__name__)
def test_the_attributes_are_the_fields_of_the_schema(cls: type[DocumentReport]) -> None:
    schema = SCHEMAS[cls.KIND]
    assert unlike(cls, schema, schema.get("$defs", {})) == []


def test_a_field_that_a_class_lacks_is_found() -> None:
    schema = copy.deepcopy(SCHEMAS["published"])
    schema["properties"]["added"] = {"type": "string"}
    schema["$defs"]["step"]["properties"]["more"] = {"type": "string"}
    schema["properties"]["tensors"] = {"type": ["integer", "null"]}
    found = unlike(ApplyReport, schema, schema["$defs"])
    assert {line.split(":")[0] for line in found} == {
        "ApplyReport",
        "ApplyReport.steps",
        "ApplyReport.tensors",
    }


def answers(folder: Path) -> dict[str, tuple[DocumentPart, list[str]]]:
    """Each verb's answer, and the arguments of the command that gives the same."""
    old, new = str(HUB), str(folder / "new")
    migrate.apply(HUB, new, to=GOAL)
    rule = str(ROOT / "rules" / "hf-mixtral" / "v5" / "fuse-experts.yaml")
    return {
        "inspect": (migrate.inspect(old), ["inspect", old]),
        "plan": (migrate.plan(old, to=GOAL).report, ["plan", old, "--to", GOAL]),
        "dry run": (
            migrate.apply(old, dry_run=True, to=GOAL),
            ["apply", old, "--dry-run", "--to", GOAL],
        ),
        "verify": (
            migrate.verify(new, source=old),
            ["verify", new, "--source", old],
        ),
        "diff": (migrate.diff(new, new), ["diff", new, new]),
        "history": (migrate.history(new), ["history", new]),
        "lineages": (migrate.history(), ["history"]),
        "lint": (migrate.lint(rule), ["lint", rule]),
        "test": (migrate.test(rule, specs=True), ["test", rule, "--specs"]),
    }


def test_to_json_is_what_the_command_prints(tmp_path: Path) -> None:
    for name, (answer, arguments) in answers(tmp_path).items():
        printed = done(*arguments, "--format", "json").json
        given = answer.to_json()
        for document in (printed, given):
            document.pop("free", None)
        assert list(given) == list(printed), name
        assert json.dumps(given) == json.dumps(printed), name
    for out, call in ((tmp_path / "a", "apply"), (tmp_path / "b", "downgrade")):
        source = HUB if call == "apply" else V5
        goal = GOAL if call == "apply" else "hf-mixtral@v4"
        given = getattr(migrate, call)(source, out, to=goal).to_json()
        printed = done(call, source, "-o", f"{out}2", "--to", goal, "--format", "json").json
        assert json.dumps({**given, "path": ""}) == json.dumps({**printed, "path": ""})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ApplyReport:
    return migrate.apply(HUB, tmp_path_factory.mktemp("out") / "new", to=GOAL)


def test_the_fields_are_attributes_with_types_of_their_own(report: ApplyReport) -> None:
    assert report.path is not None
    assert report.path.endswith("new")
    assert report.kind == "published"
    assert report.format_version == "1.0"
    (step,) = report.steps
    assert (step.lineage, step.from_, step.to, step.backwards) == ("hf-mixtral", "v4", "v5", False)
    assert (
        report.files["model.safetensors"].size
        == Path(report.path, "model.safetensors").stat().st_size
    )
    assert report.downgrade.exact is True
    assert report.notes == tuple(report.to_json()["notes"])
    assert report.question.allow == ()
    assert report.report is None


def test_an_answer_cannot_be_changed(report: ApplyReport) -> None:
    before = report.to_json()
    with pytest.raises(AttributeError, match="read-only"):
        report.path = "elsewhere"  # type: ignore[misc]
    with pytest.raises(AttributeError, match="read-only"):
        del report.path
    with pytest.raises(AttributeError, match="no attribute 'paths'"):
        report.paths  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        report.files["x"] = None  # type: ignore[index]
    report.to_json()["notes"].append("more")
    assert report.to_json() == before
    with pytest.raises(TypeError, match="no field wrong"):
        ApplyReport(wrong=1)  # type: ignore[call-arg]


def test_an_answer_is_a_value(report: ApplyReport) -> None:
    for other in (
        copy.deepcopy(report),
        pickle.loads(pickle.dumps(report)),
        ApplyReport.from_json(json.loads(json.dumps(report.to_json()))),
    ):
        assert other == report
        assert repr(other) == repr(report)
    assert report != PlanReport.from_json(report.to_json())
    assert "steps=(PathEdge(lineage='hf-mixtral'" in repr(report)
    assert {"path", "files", "to_json"} <= set(dir(report))


def test_diagnostics_of_a_document_are_diagnostics(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("title: No id\n")
    report = migrate.lint(bad)
    assert report.exit == 2
    assert all(isinstance(found, migrate.Diagnostic) for found in report.diagnostics)
    assert [found.to_json() for found in report.diagnostics] == report.to_json()["diagnostics"]


def test_reading_it_like_a_dict_works_with_a_warning(report: ApplyReport) -> None:
    document = report.to_json()
    with pytest.warns(DeprecationWarning, match=r"ApplyReport\['files'\].*use `.files`"):
        assert report["files"]["model.safetensors"]["size"] > 0
    with pytest.warns(DeprecationWarning, match="use `.path is not None`"):
        assert "path" in report
    with pytest.warns(DeprecationWarning, match="use `.copy_of`"):
        assert report.get("copy_of", 1) is None
    with pytest.warns(DeprecationWarning, match="use `.nothing`"):
        assert report.get("nothing", 1) == 1
    with pytest.warns(DeprecationWarning, match="to_json"):
        assert list(report) == list(document)
    with pytest.warns(DeprecationWarning, match="is removed in the next release"):
        assert {**report} == document  # type: ignore[dict-item]
    for method in ("keys", "items", "values"):
        with pytest.warns(DeprecationWarning, match=rf"{method}\(\).*to_json"):
            assert list(getattr(report, method)()) == list(getattr(document, method)())
    with pytest.warns(DeprecationWarning, match="nothing"), pytest.raises(KeyError):
        report["nothing"]
    with pytest.warns(DeprecationWarning, match="path") as caught:
        report["path"]
    # the line that is to be changed
    assert caught[0].filename == __file__


# every public function once
ALL_CALLS = """
import sys, torch, migrate
old, folder, rule = sys.argv[1:]
goal = {"to": "hf-mixtral@v5"}
migrate.inspect(old); migrate.plan(old, **goal); migrate.apply(old, dry_run=True, **goal)
print(migrate.apply(old, f"{folder}/new", **goal).path)
migrate.downgrade(f"{folder}/new", f"{folder}/back")
print(migrate.verify(f"{folder}/new", source=old, inform=lambda estimate: estimate.tensors).equal)
print(migrate.diff(old, f"{folder}/back").equal)
part = migrate.core.types.RunPart(0, 1)
migrate.apply(old, f"{folder}/parted", part=part, **goal); migrate.publish(f"{folder}/parted")
migrate.history(); migrate.history(f"{folder}/new"); migrate.lint(rule)
migrate.test(rule, specs=True); migrate.seal(f"{folder}/hf-mixtral", check=True)
migrate.stamp(f"{folder}/plain", "hf-mixtral@v4")
migrate.new(f"{folder}/made.yaml")
state = {"a": torch.ones(2), "note": 1}
seen = []
made = migrate.apply(state, rules=rule, inform=seen.append)
mapped = migrate.migrate_state_dict(state, rules=rule, inform=seen.append)
assert torch.equal(made["b"], mapped["b"]) and seen[0].steps == seen[1].steps
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.b = torch.nn.Parameter(torch.zeros(2))
model = Model()
handle = migrate.attach(model, rules=rule, inform=seen.append)
model.load_state_dict({"a": torch.ones(2)})
handle.remove()
assert seen[2].tensors.after == 1 and bool((model.b == 1).all())
migrate.load(model, {"a": torch.ones(2)}, rules=rule)
migrate.convert_module(Model(), Model())
migrate.save(model, f"{folder}/model.safetensors")
try:
    migrate.clean(f"{folder}/new")
except migrate.MigrateError as error:
    assert error.diagnostics[0].code == "M115"
"""


def test_no_public_call_warns(tmp_path: Path) -> None:
    rule = rules(tmp_path, "keep: [note]\nrules: [{name: r, from: a, to: b}]\n")
    shutil.copytree(shipped_folder() / "hf-mixtral", tmp_path / "hf-mixtral")
    shutil.copytree(HUB, tmp_path / "plain")
    command = [sys.executable, "-W", "error", "-c", ALL_CALLS, str(HUB), str(tmp_path), str(rule)]
    made = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert made.stdout.split() == [str(tmp_path / "new"), "True", "True"]
    called = set(re.findall(r"migrate\.(\w+)\(", ALL_CALLS))
    verbs = {name for name in migrate.__all__ if name.islower()}
    assert called == verbs


def test_the_results_need_no_library() -> None:
    code = "import sys, migrate.results; print(*sorted(m for m in sys.modules if '.' not in m))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "yaml", "click"} & set(made.stdout.split())


@pytest.mark.parametrize("cls", [Result, *REPORTS], ids=lambda cls: cls.__name__)
def test_a_class_says_what_it_holds(cls: type) -> None:
    assert getdoc(cls)


def test_a_file_of_its_own_answers_the_same(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [1])})
    assert migrate.inspect(source).keys[0].keys == "a"
    assert migrate.inspect(source).items == ()
