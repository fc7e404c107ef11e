"""layouts.yaml: what may be written, and that a mistake is shown where it stands."""

from __future__ import annotations

import pytest

from migrate.core.errors import Report
from migrate.rules.layouts import load_layouts

HEAD = "lineage: acme\ntitle: Acme\n"


def load(tmp_path, text):
    path = tmp_path / "layouts.yaml"
    path.write_text(HEAD + text)
    report = Report()
    return load_layouts(path, report), report.diagnostics


def test_layouts_keep_their_order_and_all_their_signs(tmp_path):
    lineage, problems = load(
        tmp_path,
        """ordered: false
layouts:
  "2.10": {title: Old, status: deprecated, message: use new}
  new:
    title: New
    note: cannot tell a from b
    detect:
      present: "{p...}.w"
      absent: [x, "y.{i:int}"]
      dtype: {"{p...}.w": [bfloat16, float32]}
      ndim: {"{p...}.w": 2}
      shape: {"{p...}.w": [e, 3, $text.hidden_size, null], s: []}
      config: {model_type: [acme, acme2], quantization_config.bits: 8}
      configured: true
      module_version: {"{m}": [1, 2]}
""",
    )
    assert not problems
    assert (lineage.name, lineage.ordered, [x.name for x in lineage.layouts]) == (
        "acme",
        False,
        ["2.10", "new"],
    )
    old, new = lineage.layouts
    assert (old.status, old.message, old.detect) == ("deprecated", "use new", None)
    assert new.note == "cannot tell a from b"
    assert new.detect.present == ("{p...}.w",)
    assert new.detect.absent == ("x", "y.{i:int}")
    assert new.detect.dtype == {"{p...}.w": ("bfloat16", "float32")}
    assert new.detect.ndim == {"{p...}.w": (2,)}
    assert new.detect.shape == {"{p...}.w": ("e", 3, "$text.hidden_size", None), "s": ()}
    assert new.detect.config == {"model_type": ("acme", "acme2"), "quantization_config.bits": (8,)}
    assert new.detect.configured is True
    assert new.detect.module_version == {"{m}": (1, 2)}


@pytest.mark.parametrize(
    ("text", "code", "at"),
    [
        ("layouts: {}\n", "M114", "{}"),
        ("layouts: {a@b: {title: t}}\n", "M114", "a@b"),
        ("layouts: {+1: {title: t}}\n", "M114", "+1"),
        ("layouts: {latest: {title: t}}\n", "M114", "latest"),
        ("layouts: {a: {title: t, status: gone}}\n", "M114", "gone"),
        ("layouts: {a: {title: t, colour: red}}\n", "M103", "colour"),
        ("layouts: {a: {}}\n", "M101", "{}"),
        ('layouts: {a: {title: t, detect: {shape: {"{p...}.w": 3}}}}\n', "M106", "3"),
        ('layouts: {a: {title: t, detect: {shape: {"{p...}.w": [-1]}}}}\n', "M114", "-1"),
        ('layouts: {a: {title: t, detect: {shape: {"{p...}.w": [1.5]}}}}\n', "M106", "1.5"),
        ('layouts: {a: {title: t, detect: {shape: {"{p...}.w": ["a b"]}}}}\n', "M114", "a b"),
        ('layouts: {a: {title: t, detect: {shape: {"{p...}.w": [$]}}}}\n', "M114", "$"),
        ('layouts: {a: {title: t, detect: {shape: {"{p": [1]}}}}\n', "M201", "{p"),
        ("layouts: {a: {title: t, detect: {dtype: {w: bfloat}}}}\n", "M114", "bfloat"),
        ("layouts: {a: {title: t, detect: {present: ['{a']}}}\n", "M201", "{a"),
        ("layouts: {a: {title: t, detect: {unless: {present: ['{a']}}}}\n", "M201", "{a"),
    ],
)
def test_a_mistake_is_reported_at_its_place(tmp_path, text, code, at):
    lineage, problems = load(tmp_path, text)
    assert lineage is None
    assert code in [d.code for d in problems]
    span = next(d for d in problems if d.code == code).spans[0]
    assert at in span.text[span.column - 1 :]
