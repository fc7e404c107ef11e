"""Prints, as JSON, how long the rules of one file take to bind and lower over one checkpoint's
headers.

bind_time.py CHECKPOINT RULES

`seconds` is binding and tracing of every key, in a fresh process; `prove` is the same for the way
back, which `plan` does as well. Reading headers, loading the rule file and imports are left out:
the whole command is timed elsewhere.
"""

from __future__ import annotations

import gc
import json
import sys
import time

from migrate import formats
from migrate.core.errors import Report
from migrate.planning.bind import BindContext
from migrate.planning.compose import compose, prove_downgrade
from migrate.planning.pathstate import PathStep
from migrate.rules.compiled import compile_file
from migrate.rules.loading import load_files


def main() -> None:
    checkpoint, rules = sys.argv[1:]
    source = formats.open(checkpoint)
    report = Report()
    (loaded,) = load_files([rules])
    compiled, keep = compile_file(loaded, report)
    report.check()
    start, goal = loaded.model.edge
    step = PathStep(
        loaded.model.lineage,
        start,
        goal,
        False,
        tuple((rule, {}) for rule in compiled),
        tuple(keep),
    )
    # as the command line does; the collector would walk every key again and again
    gc.disable()
    began = time.perf_counter()
    context = BindContext(lambda key, present, made: False)
    composition = compose(source.index.tensors, [step], context, report, prove=False)
    bound = time.perf_counter()
    report.check()
    composition.context = context
    inexact = prove_downgrade(source.index.tensors, composition)
    proved = time.perf_counter()
    if inexact:
        sys.exit(f"the way back is not exact: {inexact[:3]}")
    counts = {"keys": len(source.index.tensors), "outputs": len(composition.graph.outputs)}
    print(json.dumps({"seconds": bound - began, "prove": proved - bound, **counts}))


if __name__ == "__main__":
    main()
