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
    for place, name in ((one / "acme_rules", "acme-rules"), (other / "acme_copy", "acme-copy")):
        assert f"has it in {place}/rules/acme" in refused.err
        assert f"--pack {name}" in refused.err
        # what the help says works, and so does the folder
        made = migrate(work, [one, other], *PLAN, "--pack", name)
        assert made.exit == 0, made.err
        assert f"installed acme ({name})" in made.out
        assert migrate(work, [one, other], *PLAN, "--rules", f"{place}/rules").exit == 0
    # the entries of both are called acme
    either = migrate(work, [one, other], *PLAN, "--pack", "acme")
    assert either.exit == 2
    assert "2 installed packs are called `acme`" in either.err
    assert "--pack acme-copy or --pack acme-rules" in either.err
    listed = migrate(work, [one, other], "packs")
    assert listed.exit == 0
    assert "warning[M508]: lineage `acme` is defined by" in listed.err
    # and nothing else is stopped
    assert migrate(work, [one, other], "history", "--lineage", "hf-mixtral").exit == 0


def test_a_pack_that_was_asked_for_stays_so_in_a_saved_plan_and_in_a_stamp(
    tmp_path: Path, work: Path
) -> None:
    one = install(tmp_path / "one", "acme-rules", "acme_rules", "1.0", "new")
    other = install(tmp_path / "other", "acme-copy", "acme_copy", "3.0", "other")
    path = [one, other]
    saved = migrate(work, path, *PLAN, "--pack", "acme_copy", "-o", "plan.json")
    assert saved.exit == 0, saved.err
    applied = migrate(work, path, "apply", "plan.json", "-o", "NEW.safetensors")
    assert applied.exit == 0, applied.err
    told = migrate(work, path, "history", "NEW.safetensors", "--pack", "acme-copy")
    assert "from an installed pack, acme (acme-copy) 3.0" in told.out
    assert "other.w" in migrate(work, path, "inspect", "NEW.safetensors", "--no-packs").out


def test_installed_packs_can_be_left_out(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = install(tmp_path / "one", "acme-rules", "acme_rules", "1.0", "new")
    other = install(tmp_path / "other", "acme-copy", "acme_copy", "3.0", "other")
    path = [one, other]
    monkeypatch.setenv("MIGRATE_DISABLE_PACKS", "Acme_Copy")
    assert "new.w" in migrate(work, path, *PLAN).out
    lost = migrate(work, path, *PLAN, "--pack", "acme-copy")
    assert (lost.exit, lost.codes if lost.out else []) == (2, [])
    assert "MIGRATE_DISABLE_PACKS leaves acme-copy out" in lost.err
    listed = migrate(work, path, "packs")
    assert "left out of what is installed: acme-copy" in listed.out
    monkeypatch.setenv("MIGRATE_DISABLE_PACKS", "1")
    assert "error[M507]: there is no lineage `acme`" in migrate(work, path, *PLAN).err
    monkeypatch.delenv("MIGRATE_DISABLE_PACKS")
    assert "error[M507]: there is no lineage `acme`" in migrate(work, path, *PLAN, "--no-packs").err
    assert migrate(work, path, "packs", "--no-packs", "--format", "json").json["left_out"] == [
        "all"
    ]


def test_an_installed_pack_is_held_against_its_own_lock(tmp_path: Path, work: Path) -> None:
    site = install(tmp_path / "site", "acme-rules", "acme_rules", "1.0", "new")
    rule = site / "acme_rules" / "rules" / "acme" / "v2" / "rename.yaml"
    tests = "\ntests: [{name: t, given: {old.w: {shape: [2]}}, expect: {new.w: {shape: [2]}}}]\n"
    rule.write_text(rule.read_text() + tests)
    sealed = migrate(work, [site], "seal", "--rules", f"{site}/acme_rules/rules")
    assert sealed.exit == 0, sealed.err
    assert migrate(work, [site], *PLAN).exit == 0
    rule.write_text(rule.read_text().replace("new.", "newer."))
    changed = migrate(work, [site], *PLAN)
    assert changed.exit == 2
    assert changed.err.startswith("error[M521]: `acme/v2/rename` means something else")
    # and nothing else is stopped
    assert migrate(work, [site], "history", "--lineage", "hf-mixtral").exit == 0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("acme_gone:rules", "acme_gone:rules is not a folder of an installed package"),
        ("acme_rules:gone", "acme_rules:gone is not a folder of an installed package"),
        ("acme_rules:../other", "has a slash"),
    ],
)
def test_a_pack_that_points_nowhere_is_reported_and_hurts_no_other(
    tmp_path: Path, work: Path, value: str, why: str
) -> None:
    site = install(tmp_path / "site", "acme-rules", "acme_rules", "1.0", "new")
    lost = tmp_path / "lost" / "lost-1.0.dist-info"
    lost.mkdir(parents=True)
    (lost / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1.0\n")
    (lost / "entry_points.txt").write_text(f"[migrate.rulepacks]\nlost = {value}\n")
    path = [site, lost.parent]
    listed = migrate(work, path, "packs")
    assert listed.exit == 0
    assert f"cannot be used: {why}" in listed.out.replace(f"ValueError: {value} ", "")
    assert migrate(work, path, *PLAN).exit == 0
    asked = migrate(work, path, *PLAN, "--pack", "lost")
    assert asked.exit == 2
    assert "error[M507]: pack lost (lost) 1.0 cannot be used" in asked.err


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


def test_code_that_packages_declare_is_listed_with_its_distribution_and_not_imported(
    work: Path, plugins: list[Path]
) -> None:
    for file in plugins[0].glob("*.py"):
        file.write_text("raise SystemExit('imported')\n")
    told = migrate(work, plugins, "packs", "-v")
    assert told.exit == 0, told.err
    lines = told.out.splitlines()
    first = lines.index("code, imported when a rule or a checkpoint asks for it:")
    assert [line.split() for line in lines[first + 1 :]] == [
        ["op", "old_reverse", "old-ops", "1.0", "old_ops:OP"],
        ["codec", "old-codec", "old-codecs", "1.0", "old_codecs:CODEC"],
        ["format", "old_format", "old-formats", "1.0", "old_formats:FORMAT"],
    ]
    assert "old_reverse" not in migrate(work, plugins, "packs").out
    left = migrate(work, plugins, "packs", "-v", "--no-packs")
    assert left.out.endswith(
        "left out of what is installed: all\nno installed package declares code\n"
    )
    (work / "op.yaml").write_text(
        HEAD + 'rules: [{name: r, from: "{k...}.w", to: "{k}.v", via: [{old_reverse: {}}]}]\n'
    )
    without = migrate(work, plugins, "plan", "OLD.safetensors", "--rules", "op.yaml", "--no-packs")
    assert without.exit == 2
    assert "error[M102]" in without.err


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


@pytest.fixture
def flat(tmp_path: Path) -> list[Path]:
    """A folder with the format that the docs show, as a package declares it; `flat_read` only
    reads, and `flat_lost` cannot be loaded.
    """
    page = (ROOT / "docs" / "how-to" / "custom-format.md").read_text(encoding="utf-8")
    folder = tmp_path / "formats"
    info = folder / "acme_formats-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-formats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[migrate.formats]\nflat = acme_formats:FORMAT\nflat_read = acme_more:FORMAT\n"
        "flat_lost = acme_gone:FORMAT\n"
    )
    (folder / "acme_formats.py").write_text(page.split("```python\n")[1].split("```")[0])
    (folder / "acme_more.py").write_text(
        "class Reader:\n    name = 'flat_read'\n    suffixes = ('.flat2',)\n"
        "    def sniff(self, place): return 0\nFORMAT = Reader()\n"
    )
    return [folder]


def test_a_third_partys_format_is_written_and_read_again(work: Path, flat: list[Path]) -> None:
    (work / "rename.yaml").write_text(HEAD + 'rules: [{name: r, from: "{k...}.w", to: "{k}.v"}]\n')
    rename = ("--rules", "rename.yaml")
    # by the ending, by name, and as the source is
    first = migrate(work, flat, "apply", "OLD.safetensors", "-o", "NEW.flat", *rename)
    assert first.exit == 0, first.err
    assert (work / "NEW.flat").read_bytes()[:6] == b"FLATv1"
    told = migrate(work, flat, "inspect", "NEW.flat", "--format", "json").json
    assert told["format"] == "flat"
    source = ("--source", "OLD.safetensors", *rename)
    assert migrate(work, flat, "verify", "NEW.flat", *source).exit == 0
    folder = ("apply", "OLD.safetensors", "-o", "FOLDER", "--output-format", "flat", *rename)
    assert migrate(work, flat, *folder).exit == 0
    assert [file.name for file in (work / "FOLDER").iterdir()] == ["model.flat"]
    assert migrate(work, flat, "verify", "FOLDER", *source).exit == 0
    back = migrate(work, flat, "downgrade", "NEW.flat", "-o", "BACK.flat", *rename)
    assert back.exit == 0, back.err
    assert migrate(work, flat, "diff", "OLD.safetensors", "BACK.flat").exit == 0
    planned = migrate(work, flat, "plan", "BACK.flat", *rename, "-o", "plan.json")
    assert planned.exit == 0, planned.err
    assert migrate(work, flat, "apply", "plan.json", "-o", "AGAIN.flat").exit == 0
    assert (work / "AGAIN.flat").read_bytes()[:6] == b"FLATv1"


def test_an_unknown_format_is_refused_with_those_that_are_declared(
    work: Path, flat: list[Path]
) -> None:
    asked = ("apply", "OLD.safetensors", "-o", "NEW", "--output-format")
    unknown = migrate(work, flat, *asked, "flatt")
    assert unknown.exit == 2
    assert "flatt" in unknown.err
    read = migrate(work, flat, *asked, "flat_read")
    assert read.exit == 2
    assert read.err.startswith("error[M115]: the format flat_read is only read")
    lost = migrate(work, flat, *asked, "flat_lost")
    assert lost.exit == 2
    assert lost.err.startswith(
        "error[M115]: format `flat_lost` cannot be loaded: flat_lost of acme"
    )
    assert "help: update or remove that package" in lost.err
    without = migrate(work, flat, *asked, "flat", "--no-packs")
    assert without.exit == 2
    script = (
        "import migrate\ntry: migrate.apply({}, 'X', output_format='flatt')\n"
        "except migrate.MigrateError as error: print(error)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        cwd=work,
        env={**environment(), "PYTHONPATH": ":".join(map(str, [ROOT, *flat]))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "`flatt` is not a format that is written" in child.stdout
    assert "flat, flat_lost, flat_read" in child.stdout


@pytest.mark.heavy
def test_what_a_format_has_no_place_for_is_refused_or_said(work: Path, flat: list[Path]) -> None:
    import torch

    weights = {"w": torch.arange(2.0)}
    torch.save({"epoch": 3, "model": weights}, work / "values.pt")
    torch.save({"model": weights, "more": {"m": torch.ones(2)}}, work / "beside.pt")
    versions = torch.nn.BatchNorm1d(2).state_dict()
    torch.save(versions, work / "versions.pt")
    torch.save(weights, work / "plain.pt")
    asked = ("--output-format", "flat", "--at", "model")
    for name, key in (("values", "epoch"), ("beside", "/more.m")):
        refused = migrate(work, flat, "apply", f"{name}.pt", "-o", "NEW", *asked)
        assert refused.exit == 3
        assert refused.err.startswith(f"error[M916]: flat holds tensors only, not {key}")
        dropped = migrate(work, flat, "apply", f"{name}.pt", "-o", name, *asked, "--allow", "drop")
        assert dropped.exit == 0, dropped.err
        held = migrate(work, flat, "inspect", name, "--format", "json").json
        assert held["tensors"] == 1
    said = migrate(work, flat, "plan", "versions.pt", "--output-format", "flat", "--format", "json")
    assert said.exit == 0, said.err
    assert (
        "flat holds tensors alone: what stands beside the tensors is left out" in said.json["notes"]
    )
    assert said.json["downgrade"]["exact"] is False
    plain = migrate(work, flat, "plan", "plain.pt", "--output-format", "flat", "--format", "json")
    assert not any("flat holds" in note for note in plain.json["notes"])
    ranks = work / "ranks"
    ranks.mkdir()
    for rank in range(2):
        torch.save(weights, ranks / f"consolidated.0{rank}.pth")
    apart = migrate(work, flat, "apply", "ranks", "-o", "NEW", "--output-format", "flat")
    assert apart.exit == 3
    assert "error[M916]: the format flat has no place for what each of 2 ranks has" in apart.err
