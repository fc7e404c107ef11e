"""migrate: Alembic for PyTorch checkpoints.

Public names are loaded on first use, so that `import migrate` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import dcp as dcp
    from .api import apply as apply
    from .api import clean as clean
    from .api import diff as diff
    from .api import downgrade as downgrade
    from .api import history as history
    from .api import inspect as inspect
    from .api import lint as lint
    from .api import new as new
    from .api import plan as plan
    from .api import publish as publish
    from .api import seal as seal
    from .api import stamp as stamp
    from .api import test as test
    from .api import verify as verify
    from .core.errors import Diagnostic as Diagnostic
    from .core.errors import MigrateError as MigrateError
    from .core.spec import Spec as Spec
    from .core.types import __version__ as __version__
    from .live.hook import attach as attach
    from .live.load import convert_module as convert_module
    from .live.load import load as load
    from .live.save import save as save
    from .live.statedict import migrate_state_dict as migrate_state_dict
    from .planning.plan import Plan as Plan
    from .source.index import Index as Index
    from .staging.jobs import Job as Job
    from .staging.snapshot import Snapshot as Snapshot
    from .staging.stager import Stager as Stager

_HOMES = {
    "__version__": "core.types",
    "apply": "api",
    "attach": "live.hook",
    "clean": "api",
    "diff": "api",
    "downgrade": "api",
    "history": "api",
    "inspect": "api",
    "lint": "api",
    "new": "api",
    "plan": "api",
    "publish": "api",
    "test": "api",
    "verify": "api",
    "Diagnostic": "core.errors",
    "Index": "source.index",
    "Job": "staging.jobs",
    "MigrateError": "core.errors",
    "Plan": "planning.plan",
    "Snapshot": "staging.snapshot",
    "Spec": "core.spec",
    "Stager": "staging.stager",
    "convert_module": "live.load",
    "load": "live.load",
    "migrate_state_dict": "live.statedict",
    "save": "live.save",
    "seal": "api",
    "stamp": "api",
}

__all__ = [
    "Diagnostic",
    "Index",
    "Job",
    "MigrateError",
    "Plan",
    "Snapshot",
    "Spec",
    "Stager",
    "apply",
    "attach",
    "clean",
    "convert_module",
    "diff",
    "downgrade",
    "history",
    "inspect",
    "lint",
    "load",
    "migrate_state_dict",
    "new",
    "plan",
    "publish",
    "save",
    "seal",
    "stamp",
    "test",
    "verify",
]


def __getattr__(name: str) -> Any:
    import os
    from importlib import import_module

    if name == "dcp":
        # a module with public names of its own, which imports torch
        return import_module("migrate.dcp")
    if name not in _HOMES:
        raise AttributeError(f"module 'migrate' has no attribute {name!r}")
    if os.name == "nt":
        raise ImportError("migrate runs on Linux and macOS, not on Windows; use WSL there")
    value = getattr(import_module(f"migrate.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "dcp"})
