"""One function per verb. The command line calls only these; they print nothing and exit nowhere.

    inspect, plan       headers only
    apply, downgrade    plan, then run: gather, write, check, publish
    publish             what parts of a run wrote
    verify, diff        compare bytes
    history             read stamps and lineages
    new                 write a rule file to fill in
    lint                look at rule files
    test                run the tests of rule files
    clean               throw away what a run into a bucket left

The first four take state dicts and modules too. Each answers with a read-only object of
`migrate.results`, whose `to_json()` is what the command of the same name prints.
"""

from __future__ import annotations

from ..ruletests.run import test as test
from .authoring import new as new
from .comparisons import diff as diff
from .comparisons import verify as verify
from .histories import history as history
from .inspection import inspect as inspect
from .leftovers import clean as clean
from .plans import plan as plan
from .rule_files import lint as lint
from .runs import apply as apply
from .runs import downgrade as downgrade
from .runs import publish as publish
from .seals import seal as seal
from .stamps import stamp as stamp
