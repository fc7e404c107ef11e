"""What all tests share: the command line helpers, how many examples Hypothesis takes, which marks
run only when they are asked for, and how much of a failure is shown."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from light import HEAVY, forbid, is_heavy
from marks import CAMPAIGN, GPU, MARKS

if TYPE_CHECKING:
    from ranks import Ranks

# what is started in the background of a shell ignores Ctrl-C, and so would every process that the
# tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path[:0] = [
    str(Path(__file__).parent / folder)
    for folder in ("cli", "source", "live", "formats", "genuine", "staging")
]

import weights  # noqa: E402

# with Python's own threshold of 700 objects, parsing the sources of the package takes twice as long
gc.set_threshold(100_000, 20, 20)

# no deadlines: a slow machine is no finding. Tests name no counts of their own, so that a profile
# decides
for name, examples in (("few", 20), ("many", 100), ("campaign", 2000)):
    unhurried = [
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ]
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=unhurried
    )
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--light", action="store_true", help="what needs no torch and no process")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        weights.unpack()


def pytest_collection(session: pytest.Session) -> None:
    # not before: a worker of xdist starts a process to say what machine it is
    if session.config.getoption("light"):
        forbid()


def pytest_collection_finish() -> None:
    """Tests that collect garbage need not walk through the tens of thousands of tests each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Nor through what the modules before them have left, which is hundreds of megabytes."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves heavy files out under `--light`, and folders whose conftest is heavy; None leaves the
    question to others.
    """
    if not config.getoption("light"):
        return None
    shared = collection_path / "conftest.py"
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return is_heavy(collection_path) or None
    return True if shared != Path(__file__) and shared.exists() and is_heavy(shared) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the marks out when no `-m` asks for any, campaign and GPU unless `-m` names them; what
    is named by its node id always runs.
    """
    if any("::" in argument for argument in config.args):
        return
    asked = set(re.findall(r"\w+", config.getoption("markexpr")))
    left = {CAMPAIGN, GPU, *(() if asked & {*MARKS, "hypothesis"} else MARKS)} - asked
    left |= {HEAVY} if config.getoption("light") else set()
    out = [item for item in items if any(mark.name in left for mark in item.iter_markers())]
    if out:
        config.hook.pytest_deselected(items=out)
        dropped = set(map(id, out))
        items[:] = [item for item in items if id(item) not in dropped]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where values are computed: a test runs on the CPU, and by `make gpu` on CUDA as well."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return str(request.param)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world).run(module, function, …)`: processes that are started once for each number of
    them.
    """
    from ranks import Launcher, Ranks

    started: list[Launcher] = []

    def of(world: int) -> Ranks:
        if not started or started[-1].child.poll() is not None:
            started.append(Launcher(tmp_path_factory.mktemp("ranks")))
        return Ranks(world, started[-1])

    yield of
    for one in started:
        one.close()


MOST = 8000  # characters of a failure


def shortened(said: str) -> str:
    """The beginning and the end of a text that is too long to be read."""
    return (
        said
        if len(said) <= MOST
        else f"{said[: MOST // 4]}\n[... {len(said) - MOST} characters "
        f"...]\n{said[-(MOST - MOST // 4) :]}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """Cuts what a failure prints: its message and what was captured."""
    report = yield
    if report.failed:
        if len(said := str(report.longrepr)) > MOST:
            report.longrepr = shortened(said)
        report.sections = [(name, shortened(text)) for name, text in report.sections]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failed test at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed after {report.duration:.0f} s", flush=True)
