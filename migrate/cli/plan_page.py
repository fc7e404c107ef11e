"""`migrate plan --html`: a plan as one page, which needs neither a network nor another file.

The page has the data as JSON by form of keys; rows are made when they are opened. What comes from
the checkpoint or the rules is only ever text: JSON in an element that no browser runs, put into the
page as the content of text nodes, under a policy that permits its own script and style alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Hashable, Iterable, Mapping
from itertools import chain, count, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.spec import Spec
from ..core.templates import SLOT, Form, Template, group, merge
from ..source.jsontext import collector_paused

if TYPE_CHECKING:
    from ..core.errors import Diagnostic
    from ..planning.plan import Plan
    from ..source.index import Source

TEMPLATE = Path(__file__).with_suffix(".html")
# what would end the element or begin another one
_ESCAPED = {c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
_UNSHOWN = ("rows", "source", "free", "decided")
# the largest integer up to which a browser tells all of them apart
_EXACT = (1 << 53) - 1


def page(plan: Plan) -> str:
    """The text of the page."""
    return _written(data_of(plan))


def page_of_problems(place: str, source: Source, problems: Iterable[Diagnostic]) -> str:
    """The text of the page where there is no plan: what the checkpoint at `place` has, and why."""
    tensors, specs = source.index.tensors, _Numbers()
    forms = group(tensors)
    return _written(
        {
            "plan": None,
            "problems": [_problem(one) for one in problems],
            "origins": {},
            "source": {"path": place, "tensors": len(tensors), "bytes": source.index.nbytes},
            "forms": list(map(_form, forms)),
            "before": _folded(tensors, forms, specs),
            "after": [],
            "legs": [],
            "lost": [],
            "specs": _shown(specs),
            "deeds": [],
        }
    )


def _written(data: Mapping[str, Any]) -> str:
    template = TEMPLATE.read_text(encoding="utf-8")
    style, script = (
        b64encode(hashlib.sha256(found.encode()).digest()).decode()
        for tag in ("style", "script")
        for found in re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    )
    policy = (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head, _, tail = template.replace("{{policy}}", policy).partition("{{data}}")
    text = json.dumps(data, separators=(",", ":"))
    for char, escaped in _ESCAPED.items():
        text = text.replace(char, escaped)
    return head + text + tail


@collector_paused()
def data_of(plan: Plan) -> dict[str, Any]:
    """What the page shows: the plan's document without its rows, keys by number, what is `made` and
    `gone` on each edge, and both sides folded.
    """
    steps = plan.composition.steps
    made = chain(plan.outputs, *((*bound.provenance, *bound.followed) for _, bound in steps))
    others = dict.fromkeys(name for name in made if name not in plan.stored)
    forms = group(chain(plan.stored, others))
    key = dict(zip(chain.from_iterable(form.keys for form in forms), count(), strict=False))
    specs, deeds = _Numbers(), _Numbers()
    return {
        "plan": {name: said for name, said in plan.document.items() if name not in _UNSHOWN},
        "problems": [],
        "origins": dict(plan.param_sources),
        "source": {n: plan.document["source"][n] for n in ("path", "format", "tensors", "bytes")},
        "forms": list(map(_form, forms)),
        "before": _folded(plan.stored, forms, specs),
        "after": _folded(plan.outputs, forms, specs),
        "legs": [_leg(step, bound, key, specs, deeds) for step, bound in steps],
        "lost": [
            [
                loss.kind,
                loss.rule.name,
                str(loss.rule.span),
                loss.why,
                _numbers([key[k] for k in loss.keys]),
            ]
            for loss in plan.composition.losses
        ],
        "specs": _shown(specs),
        "deeds": [json.loads(deed) for deed in deeds.known],
    }


class _Numbers:
    """Things by number, each once."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def of(self, thing: Hashable) -> int:
        return self.known.setdefault(thing, len(self.known))


def _shown(specs: _Numbers) -> list[list[Any]]:
    return [[str(spec), spec.nbytes] for spec in specs.known]


def _form(form: Template) -> list[Any]:
    return [form.text, int(form.literal), len(form.keys), _integers(form)]


def _problem(found: Diagnostic) -> dict[str, Any]:
    said = {name: getattr(found, name) for name in ("severity", "code", "message", "help")}
    at = ", ".join(f"{span.file}:{span.line}" for span in found.spans)
    return {**said, "at": at, "notes": list(found.notes)}


def _numbers(found: list[int]) -> list[int] | dict[str, int]:
    """Numbers of keys; those in a row, which most are, by the first one and how many they are."""
    if len(found) > 2 and found == list(range(found[0], found[0] + len(found))):
        return {"from": found[0], "count": len(found)}
    return found


def _integers(form: Template) -> list[Any]:
    """The integers of a form's keys: those of each slot, where the keys are all combinations of
    them in order, else those of each key, one after the other.
    """
    columns: list[Any] = [list(dict.fromkeys(column)) for column in zip(*form.ints, strict=True)]
    if max(map(max, columns), default=0) > _EXACT:
        # a browser would round numbers
        return [str(number) for row in form.ints for number in row]
    count = len(form.ints)
    if count > 1 and prod(map(len, columns)) == count and list(product(*columns)) == form.ints:
        return columns
    return list(chain.from_iterable(form.ints))


def _folded(
    tensors: Mapping[str, Any], forms: Iterable[Template], specs: _Numbers
) -> list[list[Any]]:
    """The lines of a side: text, spec, and the numbers of the keys, as `_numbers` has them; a line
    for the keys of one form and spec.
    """
    lines, start = [], 0
    for form in forms:
        numbers = range(start, start + len(form.keys))
        start = numbers.stop
        segments = tuple(form.text.split("."))
        slots = tuple(i for i, text in enumerate(segments) if text == SLOT and not form.literal)
        found = [None if one is None else one.spec for one in map(tensors.get, form.keys)]
        if not any(found):
            # all of the form's keys are on the other side
            continue
        first = found[0]
        alike: dict[Spec, tuple[Form, list[int]]] = {}
        # most forms have one spec, which is one object
        if first is not None and found.count(first) == len(found):
            alike[first] = Form(segments, slots, None, form.keys, form.ints), [*numbers]
        else:
            for spec, name, ints, number in zip(found, form.keys, form.ints, numbers, strict=True):
                if spec is None:
                    continue
                part, own = alike.setdefault(spec, (Form(segments, slots, None), []))
                part.keys.append(name)
                part.ints.append(ints)
                own.append(number)
        for spec, (part, own) in alike.items():
            text = ", ".join(line.text for line in merge([part]))
            lines.append([text, specs.of(spec), _numbers(own)])
    return lines


def _leg(
    step: Any, bound: Any, key: Mapping[str, int], specs: _Numbers, deeds: _Numbers
) -> dict[str, Any]:
    # `--help` imports this module, as all of its folder
    from ..planning.rows import NUMBERS, change_of, going, leg_of, rounds, why_gone

    made: list[list[Any]] = []
    known: dict[Any, int] = {}

    def add(one: Any, name: str, tensor: Any, change: str, ops: Iterable[str], lossy: bool) -> None:
        rule = one.rule
        kind = change, id(rule), lossy
        deed = known.get(kind)
        if deed is None:
            said = [change, rule.name, str(rule.span), list(ops), lossy, rule.why]
            deed = known[kind] = deeds.of(json.dumps(said))
        try:
            sources = [*map(key.__getitem__, one.keys)]
        except KeyError:
            sources = [key[k] for k in one.keys if k in key]
        made.append([key[name], specs.of(tensor.spec), deed, _numbers(sources)])

    for name, one in bound.provenance.items():
        tensor, ops = bound.tensors[name], [call.name for call in one.rule.steps]
        change = change_of(one.rule, one, name, tensor)
        add(one, name, tensor, change, ops, rounds(one.rule, tensor))
    for name, one in bound.followed.items():
        ops = [call.name for call in one.rule.steps if call.name not in NUMBERS]
        add(one, name, one.tensor, "followed", ops, False)
    gone = []
    for change, table in going(bound):
        ends: dict[Any, int] = {}
        for name, rule in table.items():
            if name not in key:
                continue
            kind = id(rule), why_gone(bound, table, name)
            deed = ends.get(kind)
            if deed is None:
                ops = [call.name for call in rule.steps]
                said = [change, rule.name, str(rule.span), ops, False, kind[1]]
                deed = ends[kind] = deeds.of(json.dumps(said))
            gone.append([key[name], deed])
    return {"leg": leg_of(step), "made": made, "gone": gone}
