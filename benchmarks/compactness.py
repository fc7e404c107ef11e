"""How long made rules are beside those that were written by hand: rules and characters.

    python benchmarks/compactness.py

For each shipped rule file, of those of its tests in which only layout ops take part, the one that
takes the most rules is bound to the hand's rules. What they do there is written down key by key,
and `compact` makes rules of that alone, which then have to pass the same test. Both are written by
the same writer; of the hand's file only those rules and patterns of `keep` count that took a key.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from migrate import ops
from migrate.authoring import writing
from migrate.authoring.compact import compact
from migrate.authoring.relations import Relation, RuleDraft
from migrate.core.errors import Report
from migrate.core.keys import Pattern, parse
from migrate.core.templates import as_seen, takes
from migrate.ops.base import ValueOp
from migrate.rules.compiled import ROLE, CompiledRule
from migrate.rules.families import families
from migrate.rules.files import files_below, shipped_folder
from migrate.rules.loading import load_document, load_files
from migrate.ruletests.binding import (
    BoundTest,
    CompiledFile,
    RefusedTest,
    bind_test,
    compiled,
    siblings,
)
from migrate.ruletests.checks import compare
from migrate.source import yaml

# ops that only move elements; what else there is has rules that say more than keys
LAYOUT = ("join", "part", "each", "end")


class Row(NamedTuple):
    """A rule file: how many rules, and characters of rules and `keep`, by hand and made."""

    file: str
    keys: int
    hand: tuple[int, int]
    made: tuple[int, int]

    @property
    def ratio(self) -> tuple[float, float]:
        return self.made[0] / self.hand[0], self.made[1] / self.hand[1]


def rows() -> Iterator[Row]:
    """One for each shipped file that was written by hand and only moves tensors."""
    folder = shipped_folder()
    by_hand = (p for p in files_below(folder) if p.relative_to(folder).parts[0] not in families())
    for path in by_hand:
        file = compiled(load_files([path])[0], Report())
        best = max(moving_tests(file), key=lambda bound: len(used_rules(bound)), default=None)
        if best is not None:
            yield _row(file, best, path.relative_to(folder).as_posix())


def _moves(file: CompiledFile, bound: BoundTest) -> bool:
    """Whether all rules that take part only move elements."""
    used = used_rules(bound)
    calls = [ops.get(c.op) for rule in file.model.rules if rule.name in used for c in rule.via]
    return all(op.kind in LAYOUT and not isinstance(op, ValueOp) for op in calls)


def moving_tests(file: CompiledFile) -> Iterator[BoundTest]:
    """Those tests of a file in which rules take part that only move elements, bound."""
    others = siblings(file)
    for number, test in enumerate(file.model.tests):
        if test.backwards or test.error is not None:
            continue
        bound = bind_test(file, number, others)
        if isinstance(bound, RefusedTest) or used_rules(bound) - {r.name for r in file.model.rules}:
            continue
        if used_rules(bound) and _moves(file, bound):
            yield bound


def used_rules(bound: BoundTest) -> set[str]:
    """The names of the rules that take part in a test."""
    _, result = bound.composition.steps[0]
    made = [p.rule.name for p in result.provenance.values()]
    return {*made, *(rule.name for rule in result.dropped.values())}


def _row(file: CompiledFile, bound: BoundTest, name: str) -> Row:
    relations, kept = _relations(file, bound)
    used = used_rules(bound)
    hand = [
        RuleDraft(
            rule.name,
            _side(rule.sources),
            _side(rule.targets),
            tuple({call.op: call.args} for call in rule.via),
            rule.map,
            rule.where,
            _fields(rule),
        )
        for rule in file.model.rules
        if rule.name in used
    ]
    hand += [
        RuleDraft("", pattern, keep=True)
        for pattern in file.model.keep
        if any(takes(parse(pattern), key) for key in kept)
    ]
    params = {
        name: value
        for step in bound.steps
        for _, of in step.rules
        for name, value in of.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    made = compact(relations, params=params)
    _prove(file, bound, made)
    return Row(name, len(bound.source.index.tensors), _length(hand), _length(made))


def _prove(file: CompiledFile, bound: BoundTest, made: list[RuleDraft]) -> None:
    """The made rules pass the test that the hand's pass; RuntimeError if not."""
    data = _typed(file.loaded.document.data)
    header = writing.FileHead(
        file.model.id, "Made", file.model.lineage, file.model.edge, params=data.get("params", {})
    )
    # rules have no hand in side files
    test = {n: v for n, v in data["tests"][bound.number].items() if n != "expect_side"}
    text = writing.text(made, header, [test])
    report = Report()
    document = yaml.read_yaml(text, "made.yaml", report)
    loaded = load_document(Path("made.yaml"), document, report)
    report.check()
    if loaded is None:
        raise RuntimeError(text)
    again = bind_test(compiled(loaded, report), 0)
    report.check()
    found = again.diagnostics if isinstance(again, RefusedTest) else compare(again, 0, values=True)
    if found:
        raise RuntimeError("\n".join([text, *(d.render() for d in found)]))


def _typed(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(name): _typed(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_typed(value) for value in data]
    return yaml.core(data) if isinstance(data, yaml.PlainScalar) else data


def _side(patterns: Mapping[str | None, str]) -> Any:
    if [*patterns] == [None]:
        return patterns[None]
    if [*patterns] == [str(n) for n in range(len(patterns))]:
        return tuple(patterns.values())
    return {str(role): pattern for role, pattern in patterns.items()}


def _fields(rule: Any) -> dict[str, Any]:
    out = {}
    if rule.when:
        out["when"] = {str(role): test for role, test in rule.when.items()}
    for name, default in (("optional", False), ("keep_source", False), ("if_exists", "error")):
        if getattr(rule, name) != default:
            out[name] = getattr(rule, name)
    if rule.inverse:
        out["inverse"] = rule.inverse
    return out


def _length(drafts: list[RuleDraft]) -> tuple[int, int]:
    header = writing.FileHead("a/b/c", "T", "a", ("x", "y"))
    text = writing.text(drafts, header)
    empty = writing.text([], header)
    return sum(not d.keep for d in drafts), len(text) - len(empty)


def _relations(file: CompiledFile, bound: BoundTest) -> tuple[list[Relation], list[str]]:
    """What the rules do to the keys of a test, and the keys that stay."""
    _, result = bound.composition.steps[0]
    rules = {rule.name: rule for rule in file.model.rules}
    by_name = {rule.rule.name: rule for rule in file.rules}
    by_source: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    kept = []
    for key in result.tensors:
        made = result.provenance.get(key)
        if made is None:
            kept.append(key)
        else:
            by_source.setdefault((made.rule.name, made.keys), []).append(key)
    out = [Relation((key,), (key,)) for key in kept]
    for (name, sources), targets in by_source.items():
        rule = rules[name]
        parts = any(ops.get(call.op).kind == "part" for call in rule.via)
        out += [
            Relation(
                sources,
                tuple(made_keys),
                tuple(_calls(by_name[name], sources, made_keys)),
                fields=_semantic(rule),
            )
            for made_keys in ([targets] if parts else [[key] for key in targets])
        ]
    for key, directed in result.dropped.items():
        rule = rules[directed.name]
        out.append(Relation((key,), (), tuple({c.op: dict(c.args)} for c in rule.via)))
    return out, kept


def _semantic(rule: Any) -> dict[str, Any]:
    """The fields that say what happens, and not which keys: a made rule cannot know better."""
    return {n: v for n, v in _fields(rule).items() if n in ("keep_source", "if_exists", "inverse")}


def _calls(
    rule: CompiledRule, sources: Sequence[str], targets: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The ops as a relation has them: without captures, and with how many they join or make."""
    read = _values(rule.sources, sources)
    written = _values(rule.targets, targets)
    joined = [call.args["over"] for call in rule.rule.via if "over" in call.args]
    for call in rule.rule.via:
        args = {n: v for n, v in call.args.items() if v is not None and n != "start"}
        for word, values in (("over", read), ("into", written)):
            if word in args:
                name = args.pop(word)
                args.setdefault("count", len({v[name] for v in values}))
        if only := args.pop("only", None):
            ((name, wanted),) = only.items()
            values = read if name in read[0] else written
            found = [*dict.fromkeys(v[name] for v in values)]
            inside = [n for n, value in enumerate(found) if value in wanted]
            if name in joined or values is written:
                args["only"] = inside
            elif not inside:
                continue
        yield {call.op: args}


def _values(side: Mapping[str | None, Pattern], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The values of the captures in each of the keys, its role among them."""
    out = []
    for key in keys:
        for role, pattern in side.items():
            row = None if pattern.has_flat else pattern.match(as_seen(pattern, key))
            if row is not None:
                out.append({ROLE: role, **dict(zip(pattern.captures, row, strict=True))})
                break
    return out


def report(found: Sequence[Row]) -> str:
    """The rows as text, as the docs show them."""
    out = [f"{'file':<44}{'keys':>6}{'rules':>12}{'characters':>16}{'ratio':>8}"]
    for row in found:
        rules = f"{row.hand[0]} -> {row.made[0]}"
        characters = f"{row.hand[1]} -> {row.made[1]}"
        out.append(f"{row.file:<44}{row.keys:>6}{rules:>12}{characters:>16}{row.ratio[1]:>8.2f}")
    for name, at in (("rules", 0), ("characters", 1)):
        out.append(f"median of {name}: {statistics.median(row.ratio[at] for row in found):.2f}")
    return "\n".join(out) + "\n"


def main() -> int:
    print(report(list(rows())), end="")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
