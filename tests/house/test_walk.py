"""The way of an ordinary call stays short: how many functions and modules the second one enters.

`benchmarks/walk.py` counts, and `python benchmarks/walk.py --names` lists them. A bar is the most
that a call may enter. Every feature costs a function or two, and their sum is seen here alone: what
a checkpoint does not have is asked for once, in its index or in the compiled rules, and the code of
the feature is not entered. A later feature may add one function to the way of an ordinary
checkpoint. A change that raises a bar by more says here, beside the bar, why a checkpoint without
the feature passes through it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import walk

# case -> modules, functions
BARS = {
    # each tensor of the graph is made from the index in one place, `planning/stored.py`
    # a run into files is a sum of steps, which several processes take one by one: 7 functions
    # threads share an object that outlives them, and chance adds one or two of a thread that helps
    # where a checkpoint lies is asked of `source`, and its home on this machine is a module of its
    # own: 2 modules with what was in two others, and 3 functions where the system was asked before;
    # which headers are read next a folder is told, for those that have to fetch them: 1 function
    # whether there is a grid, an edge from a layout to itself, a place for what is cut, and a param
    # that follows others is asked once each: 3 modules and 11 functions, each with its feature
    # verbs open their checkpoints in one module, and are written in others: 1 module; who writes,
    # and what is checked while it is copied, is asked in a function each
    # whether what was sealed is as it was is asked once for each lineage and edge: 2 modules and 9
    # functions or 10
    # the rows of a plan have a module of their own, and what a row says of an edge, of rounding and
    # of what goes is said by functions that one key's answer shares: 1 module, 3 functions
    # what an output is written as is said above the formats, where those of third parties can be
    # asked, in a module of its own: 1 module, and no function
    "apply": (64, 499),
    "plan": (57, 395),
    "rules": (9, 59),
    # which of two threads gets a tile is chance, and one that helps enters a function or two more
    # the arguments of a codec are declared as those of an op, and checked by the base of codecs
    # each kind of computed tensor is asked once whether it needs a first pass over its numbers
    # what is decoded is hashed, for a way back to tell what it restored: 5 modules, 33 functions
    # its scale is called `scale`, which the tables of names know since DeepSeek-V4: whether the two
    # stay together is looked at, 13 functions and the module of the tables
    # it is decoded by the kit that all number formats share, of which it takes the shapes, boxes,
    # lookups and the meter: 11 modules and 82 functions more than code for one format had
    # what is decoded is held against the configuration, if there is one: 3 modules, 7 functions,
    # and 2 that chance adds
    # products of e4m3 without torch have a module of their own, which spares 8 functions
    # which parts its way back makes, the base of codecs that encode says, once: 1 module, and 4
    # functions less
    # which of two threads leaves a file last is chance: one function more in some runs
    # what a thread keeps of inputs has a module of its own, and is asked for once a box
    # the home of checkpoints on this machine is a module of its own
    # the rows of its plan are those above: 1 module, 3 functions
    # what an output's ending says is asked by a function of its own: 1 function
    "fp8": (91, 607),
    "attach": (37, 184),
    # which dict rules work on is decided in a module of its own, by functions that were there
    "pt": (20, 100),
}


def test_every_case_has_a_bar() -> None:
    assert BARS.keys() == walk.CASES.keys()


@pytest.mark.heavy
@pytest.mark.parametrize("case", BARS)
def test_a_second_call_enters_no_more_than_its_bar(case: str) -> None:
    names = walk.walk([case])[case]
    counted = (len(walk.modules(names)), len(names))
    assert all(number <= bar for number, bar in zip(counted, BARS[case], strict=True)), (
        f"{counted}, at most {BARS[case]}: python benchmarks/walk.py {case} --names"
    )


def test_what_threads_enter_is_counted_and_what_only_the_first_call_enters_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "little").mkdir()
    (tmp_path / "little" / "__init__.py").write_text(
        "import _thread, threading\n"
        "def once(): ...\n"
        "def inner(): return [(lambda: 1)() for _ in range(2)]\n"
        "def call(number):\n"
        "    if not number:\n"
        "        once()\n"
        "    thread = threading.Thread(target=inner)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    done = threading.Event()\n"
        "    _thread.start_new_thread(raw, (done,))\n"
        "    done.wait()\n"
        "def raw(done): done.set()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import little

    names = walk.entered(little.call, str(tmp_path))
    assert sorted(name.split(":")[1].split(".")[-1] for name in names) == [
        "<lambda>",
        "call",
        "inner",
        "raw",
    ]
