"""What a plan says of one key: what it is made of, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from ..core.errors import fail, option, printable
from ..core.spec import Spec
from ..core.templates import collapse, group
from ..results import KeyReport
from ..source.blobs import StoredTensor
from .compose import Composition
from .graph import Tensor
from .rows import NUMBERS, change_of, going, leg_of, rounds, why_gone


def report_of(
    composition: Composition,
    stored: Mapping[str, StoredTensor],
    written: Mapping[str, Tensor],
    key: str,
) -> KeyReport:
    """The sources, ops and rules of a key of the output, and the same from the other end of a key
    of the source. M115 for a key that is in neither.
    """
    before, after = stored.get(key), written.get(key)
    if before is None and after is None:
        _refuse((*written, *stored), key)
    walk = _KeyWalk(composition, stored)
    sources = walk.back_from(key) if after is not None else []
    outputs = walk.on_from(key) if before is not None else []
    steps = [entry for leg in walk.entries for entry in leg]
    met = [t for s in steps for t in (*s["from"], *([s["to"]] if "to" in s else []))]
    touched = {key, *(t["key"] for t in met)}
    rules = {(s["rule"], s["at"]) for s in steps}
    return KeyReport.of(
        key=key,
        **({} if before is None else {"before": described(key, before.spec)}),
        **({} if after is None else {"after": described(key, after.spec)}),
        sources=[described(k, stored[k].spec) for k in sources if k in stored],
        outputs=[described(k, written[k].spec) for k in outputs if k in written],
        steps=steps,
        losses=[
            {
                "kind": loss.kind,
                "rule": loss.rule.name,
                "at": str(loss.rule.span),
                "why": loss.why,
                "keys": [line.text for line in collapse(lost)],
            }
            for loss in composition.losses
            if (loss.rule.name, str(loss.rule.span)) in rules
            and (lost := [k for k in loss.keys if k in touched])
        ],
    )


def described(key: str, spec: Spec) -> dict[str, Any]:
    return {"key": key, "spec": str(spec), "bytes": spec.nbytes}


class _KeyWalk:
    """What is met on the way from a key through the edges, edge by edge, each thing once."""

    def __init__(self, composition: Composition, stored: Mapping[str, StoredTensor]) -> None:
        self.steps, self.stored = composition.steps, stored
        self.entries: list[list[dict[str, Any]]] = [[] for _ in self.steps]
        self.seen = set[tuple[int, str]]()

    def back_from(self, key: str) -> list[str]:
        """The keys of the source that an output is made of."""
        keys = {key: None}
        for number in reversed(range(len(self.steps))):
            bound = self.steps[number][1]
            before = dict[str, None]()
            for one in keys:
                made = bound.provenance.get(one) or bound.followed.get(one)
                if made is not None:
                    self._made(number, one)
                before.update(dict.fromkeys((one,) if made is None else made.keys))
            keys = before
        return list(keys)

    def on_from(self, key: str) -> list[str]:
        """The keys of the output that a tensor of the source goes into."""
        keys = {key: None}
        for number, (_, bound) in enumerate(self.steps):
            after, taken = dict[str, None](), set[str]()
            for table in (bound.provenance, bound.followed):
                for out, made in table.items():
                    if not keys.keys().isdisjoint(made.keys):
                        self._made(number, out)
                        taken.update(made.keys)
                        after[out] = None
            for one in keys:
                made_anew = one in bound.provenance or one in bound.followed
                if self._gone(number, one) or made_anew:
                    continue
                if one in bound.tensors or one not in taken:
                    after[one] = None
            keys = after
        return list(keys)

    def _tensors(self, number: int, keys: Iterable[str]) -> list[dict[str, Any]]:
        """Tensors as they are before this edge; with the number after it, as they are then."""
        return [described(k, spec) for k in keys if (spec := self._spec(number, k)) is not None]

    def _spec(self, number: int, key: str) -> Spec | None:
        while number:
            number -= 1
            bound = self.steps[number][1]
            if (tensor := bound.tensors.get(key)) is not None:
                return tensor.spec
            if (followed := bound.followed.get(key)) is not None:
                return followed.tensor.spec
        stored = self.stored.get(key)
        return None if stored is None else stored.spec

    def _made(self, number: int, key: str) -> None:
        if (number, key) in self.seen:
            return
        self.seen.add((number, key))
        step, bound = self.steps[number]
        made = bound.provenance.get(key)
        if made is not None:
            rule, keys, tensor = made.rule, made.keys, bound.tensors[key]
            ops = [call.name for call in rule.steps]
            change, lossy = change_of(rule, made, key, tensor), rounds(rule, tensor)
        else:
            followed = bound.followed[key]
            rule, keys = followed.rule, followed.keys
            ops = [call.name for call in rule.steps if call.name not in NUMBERS]
            change, lossy = "followed", False
        self.entries[number].append(
            {
                "leg": leg_of(step),
                "change": change,
                "from": self._tensors(number, keys),
                "to": self._tensors(number + 1, (key,))[0],
                "ops": ops,
                "lossy": lossy,
                "rule": rule.name,
                "at": str(rule.span),
                "why": rule.why,
            }
        )

    def _gone(self, number: int, key: str) -> bool:
        """Whether the edge takes the key away, which is then noted."""
        step, bound = self.steps[number]
        for change, table in going(bound):
            if (rule := table.get(key)) is None:
                continue
            self.entries[number].append(
                {
                    "leg": leg_of(step),
                    "change": change,
                    "from": self._tensors(number, (key,)),
                    "ops": [call.name for call in rule.steps],
                    "lossy": False,
                    "rule": rule.name,
                    "at": str(rule.span),
                    "why": why_gone(bound, table, key),
                }
            )
            return True
        return False


def _refuse(known: Iterable[str], key: str) -> NoReturn:
    fail(
        "M115",
        f"{option('key', printable(key, 300))}: neither the source nor the output has this key",
        help=_near(known, key),
    )


def _near(known: Iterable[str], key: str) -> str:
    """The nearest key, by its form and then by its numbers: there are far fewer forms than keys."""
    (asked,) = group([key])
    found = {template.text: template for template in group(dict.fromkeys(known))}
    near = get_close_matches(asked.text, list(found), n=1, cutoff=0.6)
    if not near:
        return f"{option('expand', True)} lists all keys"
    template = found[near[0]]

    def distance(number: int) -> int:
        return sum(abs(a - b) for a, b in zip(asked.ints[0], template.ints[number], strict=False))

    best = min(range(len(template.keys)), key=distance)
    return f"did you mean `{printable(template.keys[best], 300)}`?"
