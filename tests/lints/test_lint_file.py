"""What a rule file says about itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from written_rules import MODELINE, Lineage

from migrate.lints.findings import lint

RULES = """rules:
  - {name: a, from: "old.{i:int}.w", to: "new.{i}.w"}
tests:
  - {name: t, given: {old.0.w: {shape: [1]}}, expect: {new.0.w: {shape: [1]}}}
"""


def test_a_careful_file_is_clean(lineage: Lineage) -> None:
    lineage.rules(RULES)
    assert lineage.found() == []


def test_the_id_is_that_of_the_place(lineage: Lineage) -> None:
    path = lineage.rules(RULES)
    path.rename(path.with_name("second.yaml"))
    (finding,) = lineage.found()
    assert (finding.code, finding.message) == (
        "M604",
        "the id `demo/v2/first` is not that of the file's place, `demo/v2/second`",
    )
    assert finding.spans[0].line == 2


def test_the_place_is_the_folder_of_the_layout_it_leads_to(lineage: Lineage) -> None:
    path = lineage.rules(RULES)
    path.rename(lineage.root / "demo" / "first.yaml")
    assert [d.help for d in lineage.found()] == ["move it to demo/v2/first.yaml"]
    assert lineage.codes() == ["M611"]


def test_a_loose_file_has_no_place(tmp_path: Path, lineage: Lineage) -> None:
    loose = tmp_path / "loose.yaml"
    loose.write_text(lineage.rules(RULES).read_text())
    assert lint([loose]).findings == ()


@pytest.mark.parametrize(
    ("title", "wrong"),
    [
        ("Fuse the experts", None),
        ("RoPE rows change their order", None),
        ("q, k and v become one", None),
        ("Mixtral experts as Megatron Core", None),
        ("Fuse the experts.", "ends with a period"),
        ("fuse the experts", "begins with a lower-case letter"),
        ("Fuse Expert Weights Into Stacked Tensors", "is capitalised like a headline"),
    ],
)
def test_a_title_is_written_like_a_sentence(
    lineage: Lineage, title: str, wrong: str | None
) -> None:
    lineage.rules(RULES, head=f"{MODELINE}id: demo/v2/first\ntitle: {title}\n")
    assert [d.message for d in lineage.found("M605")] == ([f"the title {wrong}"] if wrong else [])


def test_a_file_says_which_migrate_it_needs(lineage: Lineage) -> None:
    path = lineage.rules(RULES)
    path.write_text(path.read_text().replace('requires: ">=0.1"\n', ""))
    assert lineage.codes() == ["M608"]


@pytest.mark.parametrize(
    "use",
    [
        'rules:\n  - {name: a, from: "old.{i:int}.w", to: "new.{i-$n}.w"}\n',
        'rules:\n  - {name: a, from: "old.{i:int}.w", to: "new.{i}.w", where: {i: {max: $n}}}\n',
        (
            'rules:\n  - {name: a, from: "old.{i:int}.w", to: new.0.w, via: [{stack: {over: i, '
            "count: "
            "$n}}]}\n"
        ),
        "files: {config.json: {n: $n}}\n" + RULES,
    ],
)
def test_a_param_that_is_used_anywhere_is_used(lineage: Lineage, use: str) -> None:
    lineage.rules("params: {n: {type: int, default: 1}, m: {type: int, default: 1}}\n" + use)
    assert [d.message for d in lineage.found("M607")] == ["nothing uses the param `m`"]


def test_a_param_that_refuses_what_a_checkpoint_says_is_used(lineage: Lineage) -> None:
    gate = "{type: bool, value: args.swiglu, choices: [true], default: true}"
    free = "{type: bool, value: args.swiglu, default: true}"
    sized = "{type: int, config: hidden_size, shape: {key: norm.weight}}"
    both = "{type: float, value: args.norm_epsilon, config: rms_norm_eps}"
    lineage.rules(f"params: {{n: {gate}, m: {free}, o: {sized}, p: {both}}}\n" + RULES)
    assert [d.message for d in lineage.found("M607")] == ["nothing uses the param `m`"]


def test_a_layout_that_looks_like_a_number_is_quoted(lineage: Lineage) -> None:
    text = (
        "lineage: demo\ntitle: Demo\nlayouts:\n  2.9: {title: a, note: n}\n  '2.10': {title: "
        "b, note: n}\n"
    )
    lineage.layouts(f"# yaml-language-server: $schema=x\n{text}")
    folder = lineage.rules(
        RULES, edge=("2.9", "'2.10'"), head=f"{MODELINE}id: demo/2.10/first\ntitle: Some rules\n"
    ).parent
    folder.rename(lineage.root / "demo" / "2.10")
    places = [
        (d.spans[0].file.rpartition("/")[2], d.spans[0].text.strip()) for d in lineage.found("M609")
    ]
    assert places == [
        ("first.yaml", "edge: [2.9, '2.10']"),
        ("layouts.yaml", "2.9: {title: a, note: n}"),
    ]
    assert lineage.codes() == ["M609", "M609"]


def test_a_rule_that_names_alone_decided_is_told_until_values_were_compared(
    lineage: Lineage,
) -> None:
    guessed = RULES.replace('"new.{i}.w"}', '"new.{i}.w", guessed: true}')
    path = lineage.rules(guessed)
    (finding,) = lineage.found()
    assert (finding.code, finding.severity) == ("M652", "warning")
    assert finding.message == "rule `a` was guessed from names"
    span = finding.spans[0]
    assert (span.file, span.text[span.column - 1 :][:7]) == (str(path), "guessed")
    lineage.rules(guessed.replace("guessed: true", "guessed: false"))
    assert lineage.found() == []


def test_what_names_alone_keep_is_told_and_so_is_a_guess_of_what_is_not_kept(
    lineage: Lineage,
) -> None:
    path = lineage.rules('keep: ["other.w"]\nguessed: ["other.w", "third.w"]\n' + RULES)
    first, second = lineage.found("M652")
    assert first.message == "that `other.w` stays as it is was guessed from names"
    assert second.message == "`third.w` is called guessed, and is not under `keep`"
    span = second.spans[0]
    assert (span.file, span.text[span.column - 1 :][:9]) == (str(path), '"third.w"')


def test_a_param_that_follows_others_need_not_fit_the_numbers_that_lint_takes(
    lineage: Lineage,
) -> None:
    """2 is no multiple of 64, and of a checkpoint it may be."""
    lineage.rules(
        "params:\n  width: {type: int, title: width}\n"
        "  head: {type: int, default: 64, title: width of a head}\n"
        "  heads: {type: int, follows: $width // $head, title: heads}\n"
        'rules:\n  - {name: r, from: "old.{i:int}.w", to: "new.{i}.w", '
        'via: [{rearrange: {pattern: "(h d) -> (h d)", axes: {h: $heads}}}]}\n'
    )
    assert not lineage.found("M111")
