"""The hash of what a rule file means, which plans and stamps hold.

Over the parsed rules, not the bytes: a comment, a formatter, a moved file or a better title must
not make every checkpoint look as if it had been migrated by something else. What is left out is
prose and tests; what is written as its default counts as not written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from pydantic import BaseModel

from ..ops._op import Step
from .arguments import arguments
from .model import Rule, RuleFile

_PROSE = {"title", "why", "tests", "requires"}


def semantic_hash(file: RuleFile) -> str:
    """`m1:` and the sha256 of the file's meaning; equal for files that do the same under the same
    id.
    """
    text = json.dumps(
        meaning(file), ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=True
    )
    return f"m1:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def meaning(value: Any) -> Any:
    """`value` as JSON data without prose and without what stands at its default.

    The order of rules and of `keep` means nothing and is taken out; that of roles and of a `map`
    (it can be the order of a capture's values) means something, so both become lists of pairs.
    """
    if isinstance(value, RuleFile):
        out = _fields(value)
        out["rules"] = [meaning(rule) for rule in sorted(value.rules, key=lambda rule: rule.name)]
        out["keep"] = sorted(set(value.keep))
        return out
    if isinstance(value, Rule):
        out = _fields(value)
        out["from"], out["to"] = _pairs(value.sources), _pairs(value.targets)
        out["map"] = {name: _pairs(words) for name, words in value.map.items()}
        return out
    if isinstance(value, BaseModel):
        return _fields(value)
    if isinstance(value, Step):
        defaults = {argument.word: argument.default for argument in arguments(value.op)}
        return [
            value.op,
            {
                w: meaning(item)
                for w, item in value.args.items()
                if w != "why" and item != defaults.get(w, MISSING)
            },
        ]
    if isinstance(value, Mapping):
        return {str(key): meaning(item) for key, item in value.items()}
    return [meaning(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fields(value: BaseModel) -> dict[str, Any]:
    written = {
        (field.alias or name): (getattr(value, name), field)
        for name, field in type(value).model_fields.items()
    }
    return {
        word: meaning(item)
        for word, (item, field) in written.items()
        if word not in _PROSE and item != field.get_default(call_default_factory=True)
    }


def _pairs(mapping: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, value] for key, value in mapping.items()]
