"""Thousands of rules that are all alike: work that is counted and bounded, and what was not looked
at is said.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ROOT, safetensors
from marks import thorough
from work import steps

import migrate
from migrate.core import keys, overlap
from migrate.lints import findings, matching
from migrate.lints.inputs import read_inputs
from migrate.rules.packs import Packs

RULES = ROOT / "rules"
HEAD = "id: t/b/many\ntitle: many rules\nlineage: t\nedge: [a, b]\nrules:\n"


def many(folder: Path, count: int, source: str, target: str) -> Path:
    path = folder / "many.yaml"
    rules = (
        f"  - {{name: r{i}, from: '{source % i}', to: "
        f"'{target % i if '%' in target else target}', optional: true}}\n"
        for i in range(count)
    )
    path.write_text(HEAD + "".join(rules))
    return path


class Counted:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        for module, name in (
            (matching, "common"),
            (matching, "shared_key"),
            (matching, "narrower"),
            (matching, "takes"),
        ):
            self._count(monkeypatch, module, name)

    def _count(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
        real = getattr(module, name)

        def counted(*given: object) -> object:
            self.calls += 1
            return real(*given)

        monkeypatch.setattr(module, name, counted)


def codes(answer: dict[str, object]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in answer.to_json()["diagnostics"]:
        found[one["code"]] = found.get(one["code"], 0) + 1
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    thorough(
        [
            ("{p...}.m%d.{k...}", "{p}.n%d.{k}"),
            ("l.{a}.m%d.{b}.{c}", "l.{a}.n%d.{b}.{c}"),
            ("{a}.{b:b%d|c}", "{a}.{b}"),
        ]
    ),
)
def test_the_work_does_not_grow_with_the_square_of_the_rules(tmp_path, monkeypatch, source, target):
    counted = Counted(monkeypatch)
    looked = []
    for count in (250, 500):
        counted.calls = 0
        migrate.lint([many(tmp_path, count, source, target)])
        looked.append(counted.calls)
    # the square would be four times as many
    assert looked[1] <= 2.5 * max(looked[0], 1000), looked
    # each check compares so many pairs, of which each takes a few questions, and asks of what it
    # found who else takes the key
    assert looked[1] <= 12 * matching.MOST_PAIRS + 2 * matching.MOST_FOUND * 500, looked


def test_two_thousand_overlapping_rules_are_named_in_part_and_the_rest_is_said(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(matching, "MOST_PAIRS", 300)
    monkeypatch.setattr(matching, "MOST_FOUND", 20)
    counted = Counted(monkeypatch)
    found = codes(migrate.lint([many(tmp_path, 2000, "{p...}.m%d.{k...}", "{p}.n%d.{k}")]))
    assert (found["M615"], found["M619"], found["M618"]) == (20, 20, 1)
    # two million pairs are not looked at; of each problem that is named, all rules are asked who
    # else takes the key
    assert counted.calls < 12 * 300 + 2 * 2 * 20 * 2000


def test_rules_that_are_told_apart_by_their_ends_or_segments_are_all_compared(tmp_path):
    for source, target in (
        ("m%d.{k...}", "n%d.{k}"),
        ("{p...}.m%d", "{p}.n%d"),
        ("l.{a}.m%d.{b}.{c}", "l.{a}.n%d.{b}.{c}"),
    ):
        assert "M618" not in codes(migrate.lint([many(tmp_path, 300, source, target)]))


def test_a_pair_among_many_is_found(tmp_path):
    path = many(tmp_path, 300, "l.{a}.m%d.{b}.{c}", "l.{a}.n%d.{b}.{c}")
    path.write_text(
        path.read_text()
        + "  - {name: odd, from: 'l.x.{a}.{b}.z', to: 'o.{a}.{b}.z', optional: true}\n"
    )
    answer = migrate.lint([path])
    assert codes(answer)["M615"] == matching.MOST_FOUND
    assert all(
        "`odd`" in d["message"] for d in answer.to_json()["diagnostics"] if d["code"] == "M615"
    )


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("a.{x}.c", "a.b.{y}", True),
        ("a.{x}.c", "a.{y}.d", False),
        ("{k...}.w", "x.{y}.w", True),
        ("{k...}.w", "{k...}.b", False),
        ("a.{i:int}", "a.b", True),
        ("a.{x:b|c.d}", "a.c.d", True),
        ("a.b", "a.b.c", False),
        ("a.w@{r:int}", "a.w", True),
        ("a.{{x}}", "a.{y}", True),
    ],
)
def test_what_is_passed_over_has_no_key_in_common(one, other, fits):
    from migrate.core.keys import parse

    first, second = parse(one), parse(other)
    assert bool(list(matching._Near([first]).of(second))) is fits
    assert bool(list(matching._Near([second]).of(first))) is fits
    if not fits:
        assert overlap.common(first.parts, second.parts) is None
        assert not keys.includes(first.parts, second.parts)


def irregular(path: Path, count: int) -> Path:
    """Keys that are all of another form, as of many small models in one file."""
    words = (
        f"part{n:x}_of.block_{n * 7 % 1009}x.{'norm' if n % 3 else 'gate'}" for n in range(count)
    )
    return safetensors(path, {f"{word}.weight": ("U8", [1]) for word in words})


@pytest.mark.parametrize("command", ["inspect", "lint"])
def test_keys_without_a_form_are_not_read_by_every_pattern(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the rules that ship are read and looked at alike whatever the checkpoint
    inputs = read_inputs([RULES])
    monkeypatch.setattr(findings, "read_inputs", lambda *_: inputs)
    monkeypatch.setattr(findings, "FAMILIES", ())

    def work(count: int) -> int:
        path = irregular(tmp_path / "x.safetensors", count)
        return steps(lambda: ask(path))

    def ask(path: Path) -> None:
        if command == "inspect":
            assert migrate.inspect(path).to_json()["layouts"] == []
        else:
            assert not codes(migrate.lint(index=path)).keys() & {*findings.CODES}

    # what is made once
    ask(irregular(tmp_path / "x.safetensors", 1))
    few, many = work(20), work(40)
    # layouts that ship and are told by keys alone
    asked = sum(
        not (layout.detect is not None and layout.detect.configured)
        for lineage in Packs((), scan=False).lineages()[0].values()
        for layout in lineage.layouts
    )
    # lines of Python for each key and layout
    assert (many - few) / 20 / asked < 27
