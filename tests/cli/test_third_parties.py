"""A pack that is installed twice, and plugins that are written for an older contract: what the user
sees of them on the command line.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ROOT, Result, environment, safetensors

LAYOUTS = "lineage: acme\ntitle: {title}\nlayouts:\n  v1: {{title: one}}\n  v2: {{title: two}}\n"
RULES = (
    "id: acme/v2/rename\ntitle: {title}\nlineage: acme\nedge: [v1, v2]\n"
    'rules: [{{name: r, from: "old.{{k...}}", to: "{target}.{{k}}"}}]\n'
)


def install(
    folder: Path, distribution: str, package: str, version: str, target: str, title: str = "t"
) -> Path:
    """A folder for `sys.path` with a distribution whose package holds a pack of one lineage."""
    home = folder / package / "rules" / "acme"
    (home / "v2").mkdir(parents=True)
    (folder / package / "__init__.py").write_text("raise RuntimeError('packs are never imported')")
    (home / "layouts.yaml").write_text(LAYOUTS.format(title=title))
    (home / "v2" / "rename.yaml").write_text(RULES.format(target=target, title=title))
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[migrate.rulepacks]\nacme = {package}:rules\n")
    return folder


def migrate(cwd: Path, path: list[Path], *words: str) -> Result:
    """The command line in a process of its own, with these folders of packages in this order."""
    child = subprocess.run(
        [sys.executable, "-m", "migrate", *words],
        cwd=cwd,
        env={**environment(), "PYTHONPATH": ":".join(map(str, [ROOT, *path]))},
        capture_output=True,
        text=True,
    )
    return Result(child.returncode, child.stdout, child.stderr)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder without rules, with a checkpoint."""
    folder = tmp_path / "work"
    folder.mkdir()
    safetensors(folder / "OLD.safetensors", {"old.w": ("F32", [2])})
    return folder


PLAN = ("plan", "OLD.safetensors", "--to", "acme@v2", "--from", "acme@v1")


def test_one_distribution_in_two_places_is_one_pack_the_first_that_python_finds(
    tmp_path: Path, work: Path
) -> None:
    first = install(tmp_path / "user", "acme-rules", "acme_rules", "2.0", "new")
    second = install(tmp_path / "venv", "acme-rules", "acme_rules", "1.0", "older")
    listed = migrate(work, [first, second], "packs", "--format", "json")
    packs = [p for p in listed.json["packs"] if p["origin"] == "installed"]
    assert [(p["version"], p["folder"]) for p in packs] == [
        ("2.0", str(first / "acme_rules" / "rules"))
    ]
    made = migrate(work, [first, second], *PLAN)
    assert made.exit == 0, made.err
    assert "installed acme (acme-rules) 2.0" in made.out
    assert "new.w" in made.out


def test_two_distributions_with_the_same_rules_are_one_pack(tmp_path: Path, work: Path) -> None:
    one = install(tmp_path / "one", "acme-rules", "acme_rules", "1.0", "new")
    other = install(tmp_path / "other", "acme-copy", "acme_copy", "3.0", "new", "another title")
    listed = migrate(work, [one, other], "packs")
    assert "acme (acme-rules) 1.0" in listed.out
    assert "acme (acme-copy) 3.0" in listed.out
    assert migrate(work, [one, other], *PLAN).exit == 0


def test_two_distributions_that_differ_are_refused_and_both_ways_out_are_shown(
    tmp_path: Path, work: Path
) -> None:
    one = install(tmp_path / "one", "acme-rules", "acme_rules", "1.0", "new")
    other = install(tmp_path / "other", "acme-copy", "acme_copy", "3.0", "other")
    refused = migrate(work, [one, other], *PLAN)
    assert refused.exit == 2
    assert refused.err.startswith(
        "error[M508]: lineage `acme` is defined by acme (acme-copy) 3.0, acme (acme-rules) 1.0"
    )
    for place in (one / "acme_rules", other / "acme_copy"):
        assert f"has it in {place}/rules/acme" in refused.err
        assert f"--rules {place}/rules" in refused.err
        # what the help says works
        assert migrate(work, [one, other], *PLAN, "--rules", f"{place}/rules").exit == 0
    # and nothing else is stopped
    assert migrate(work, [one, other], "history", "--lineage", "hf-mixtral").exit == 0


OP = """
from migrate.core.view import permute
from migrate.ops._op import Only, Op, Step, arg, dataclass

class Reverse(Op):
    name = "old_reverse"
    summary = "puts the axes in reverse order"

    @dataclass(frozen=True, slots=True)
    class Args:
        only: Only | None = arg("limits the op", default=None)

    def trace(self, args, views, parts=1):
        return [permute(v, tuple(range(len(v.shape)))[::-1]) for v in views]

    def eager(self, args, arrays, parts=1, dtypes=()):
        return [a.T for a in arrays]

    def invert(self, args, enumerated=False):
        return Step("old_reverse", args)

    def samples(self):
        yield {}, [(2, 3, 4)]

OP = Reverse()
"""
HEAD = "id: a/v2/r\ntitle: t\nlineage: a\nedge: [v1, v2]\n"


@pytest.fixture
def plugins(tmp_path: Path) -> list[Path]:
    """A folder with an op, a codec and a format of third parties, written for release 0.1.0."""
    folder = tmp_path / "plugins"
    for group, name, attribute, text in (
        ("ops", "old_reverse", "OP", OP),
        (
            "codecs",
            "old-codec",
            "CODEC",
            "from migrate.codecs._codec import Codec\nCODEC = Codec()\n",
        ),
        (
            "formats",
            "old_format",
            "FORMAT",
            "from migrate.formats._kinds import kind\nFORMAT = 1\n",
        ),
    ):
        info = folder / f"old_{group}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: old-{group}\nVersion: 1.0\n")
        entry = f"[migrate.{group}]\n{name} = old_{group}:{attribute}\n"
        (info / "entry_points.txt").write_text(entry)
        (folder / f"old_{group}.py").write_text(text)
    return [folder]


def test_an_op_that_imports_the_contract_from_its_old_place_works_and_is_warned_of(
    work: Path, plugins: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "op.yaml").write_text(
        HEAD + 'rules: [{name: r, from: "{k...}.w", to: "{k}.v", via: [old_reverse]}]\n'
        "tests:\n- name: t\n  given: {a.w: {values: [[1, 2, 3]]}}\n"
        "  expect: {a.v: {values: [[1], [2], [3]]}}\n"
    )
    quiet = migrate(work, plugins, "test", "op.yaml")
    assert (quiet.exit, quiet.err) == (0, "")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    told = migrate(work, plugins, "test", "op.yaml")
    assert told.exit == 0
    assert "old_ops.py:3: DeprecationWarning: migrate.ops._op is now migrate.ops.base" in told.err
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    refused = migrate(work, plugins, "test", "op.yaml")
    assert refused.exit == 2
    assert refused.err.startswith(
        "error[M102]: operation `old_reverse` cannot be loaded: old_reverse of old-ops: "
        "DeprecationWarning"
    )


@pytest.mark.parametrize("verb", ["lint", "test"])
def test_a_codec_of_the_old_contract_is_refused_by_name(
    work: Path, plugins: list[Path], verb: str
) -> None:
    """That contract has no shim: the number formats of the next releases change it."""
    via = "via: [{dequantize: {codec: old-codec, dtype: bfloat16}}]"
    roles = 'from: {weight: "{k...}.w", scale: "{k...}.s"}, to: "{k}.w"'
    (work / "codec.yaml").write_text(HEAD + f"rules: [{{name: r, {roles}, {via}}}]\n")
    refused = migrate(work, plugins, verb, "codec.yaml")
    assert refused.exit == 2
    text = refused.out + refused.err
    assert (
        "M308]: codec 'old-codec' cannot be loaded: old-codec of old-codecs: ModuleNotFoundError: "
        "No module named 'migrate.codecs._codec'"
    ) in text
    assert "help: update or remove that package" in text


def test_a_format_of_the_old_contract_is_named_where_no_other_knows_the_file(
    work: Path, plugins: list[Path]
) -> None:
    (work / "weights.old").write_bytes(b"of a format that only the plugin knows")
    refused = migrate(work, plugins, "inspect", "weights.old")
    assert refused.exit == 2
    assert refused.err.startswith("error[M917]: weights.old: not a checkpoint in a known format\n")
    assert (
        "note: format old_format of old-formats cannot be loaded: ModuleNotFoundError"
        in refused.err
    )
    # and harms no other
    assert migrate(work, plugins, "inspect", "OLD.safetensors").exit == 0
