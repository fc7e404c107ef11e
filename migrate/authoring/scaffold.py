"""A rule file for its author to fill in: head, keys, an example of each kind of op, a test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.templates import group
from ._indices import capture_integers
from .compact import drafts_of
from .relations import Relation, RuleDraft
from .writing import scalar

# of each kind of op; tests load every one
EXAMPLES = """\
- name: renamed                       # without `via` only the name changes
  from: "{p...}.attention.{w:wq|wk}.weight"
  to:   "{p}.self_attn.{w}.weight"
  map:  {w: {wq: q_proj, wk: k_proj}}
- name: joined                        # `same` joins equal tensors
  from: "{p...}.experts.{e:int}.{w:gate|up}.weight"
  to:   "{p}.experts.gate_up"
  via:  [{stack: {over: e, count: 8}}, {concat: {over: w, dim: 1}}]
- name: parted                        # or unbind, and copy and tie for several names of one tensor
  from: "{p...}.qkv.weight"
  to:   "{p}.{w:q|k|v}.weight"
  via:  [{split: {into: w}}]
- name: each                          # or transpose, permute, reshape, slice, pad, cast
  from: "{p...}.q_proj.weight"
  to:   "{p}.query.weight"
  via:  [{rearrange: {pattern: "(h two d) c -> (h d two) c", axes: {h: 8, two: 2}}}]
- name: one-for-several               # what keeps one of several states of a number format
  from: {a: "{p...}.w_a", b: "{p...}.w_b"}
  to:   {a: "{p}.v_a", b: "{p}.v_b"}
- name: made                          # a tensor that the old layout does not have
  from: "{p...}.norm.weight"
  to:   "{p}.norm.bias"
  via:  [{fill: {value: 0, dtype: float32, shape: [8]}}]
  keep_source: true
- name: dropped
  from: "{p...}.rotary.inv_freq"
  via:  [{drop: {why: the model computes it again}}]
- name: decided                       # extra states of Transformer Engine, by what they hold
  from: "{m...}._extra_state"
  to:   "{m}._extra_state"
  via:  [{extra_state: {stateless: empty}}]
- name: recoded                       # the parts of one number format from those of another
  from: {qweight: "{m...}.qweight", qzeros: "{m...}.qzeros", scales: "{m...}.scales"}
  to:   "{m}.weight"
  via:  [{dequantize: {codec: awq, dtype: bfloat16}}]
"""

STUB: list[dict[str, Any]] = [
    {
        "name": "write here a small checkpoint and what the rules make of it, worked out by hand",
        "given": {"old.key": {"values": [1, 2, 3]}},
        "expect": {"new.key": {"values": [1, 2, 3]}},
    }
]


def templates(keys: Iterable[str]) -> list[RuleDraft]:
    """A pattern of `keep` for each form of these keys, in their order."""
    # of a key that stays every integer is a capture, so that one key of each form says it all
    forms = [form.keys[0] for form in group(keys)]
    lines = capture_integers([Relation((key,), (key,)) for key in forms], {})
    return drafts_of(lines, {}, ordered=False)


def examples() -> list[str]:
    """The examples as comments of a rule file."""
    return [f"  # {line}".rstrip() for line in EXAMPLES.splitlines()]


def layouts_text(lineage: str, start: str, goal: str, schema: str) -> str:
    """The `layouts.yaml` of a lineage with these two layouts, to be filled in."""
    return f"""\
# yaml-language-server: $schema={schema}
lineage: {scalar(lineage)}
title: {scalar(titled(lineage))}
layouts:                                  # the oldest first
  {scalar(start)}:
    title: as it was before
    # detect: {{present: "{{p...}}.a.key.of.this.layout"}}
    note: write under `detect` how a checkpoint in this layout is recognised, and remove this note
  {scalar(goal)}:
    title: as it is now
    status: current
    note: write under `detect` how a checkpoint in this layout is recognised, and remove this note
"""


def titled(slug: str) -> str:
    """A sentence of the words of a name."""
    words = slug.replace("-", " ").replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def schema_path(depth: int, name: str) -> str:
    """Where a modeline finds a schema: in `schemas` beside the folder of rules."""
    return str(Path(*[".."] * depth, "schemas", f"{name}.schema.json"))
