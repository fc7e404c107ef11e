"""The command line: one file per command, found by name and imported when it is needed, so that
`--help` costs nothing; and the ways in which the process ends.

A library that finds no memory may end the process itself: OpenBLAS calls `exit(1)`, which would
pass for the answer no, and C++ and Rust abort. Both are caught below Python where memory is
limited, and only there: it takes ctypes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from ..core.types import FORMAT_VERSION, __version__
from . import terminal

ELSEWHERE = "migrate runs on Linux and macOS, not on Windows; use WSL there"
_HOME = Path(__file__).resolve().parent


@dataclass
class Done:
    """What a command has done that stands whatever follows: where it published an output. `result`:
    what has millions of objects, which are not let go of one by one before the process ends.
    """

    published: str | None = None
    result: object = None


@cache
def names() -> list[str]:
    """The modules of this folder; those that have a `COMMAND` are commands."""
    return sorted(
        name.removesuffix(".py")
        for name in os.listdir(_HOME)
        if name.endswith(".py") and name != "main.py" and name[0] != "_"
    )


@cache
def command(name: str) -> click.Command | None:
    """The command of this name, imported when it is asked for; None if there is none."""
    found = (
        getattr(import_module(f"migrate.cli.{name}"), "COMMAND", None) if name in names() else None
    )
    return _logging(found) if isinstance(found, click.Command) else None


def commands() -> list[str]:
    return [name for name in names() if command(name) is not None]


def _logging(command: click.Command) -> click.Command:
    """The command with `-v` and `--log-file`, which may stand before its name as well."""
    inner = command.callback
    if inner is None or any(param.name == "verbosity" for param in command.params):
        return command
    places = [
        param.name
        for param in command.params
        if param.name in ("checkpoint", "source", "index", "a", "b", "output") and param.name
    ]

    def callback(*, verbosity: int, log_file: str | None, **arguments: Any) -> Any:
        context = click.get_current_context()
        # what stands before the name of the command
        before = context.parent.params if context.parent is not None else {}
        verbosity += before.get("verbosity", 0)
        log_file = log_file or before.get("log_file")
        context.params["verbosity"] = verbosity
        if not verbosity and log_file is None:
            return inner(**arguments)

        with terminal.listening(
            verbosity,
            log_file,
            [arguments[name] for name in places if arguments[name]],
        ):
            return inner(**arguments)

    command.callback = callback
    command.params += _log_options()
    return command


def _log_options() -> list[click.Option]:
    return [
        click.Option(
            ["-v", "--verbose", "verbosity"],
            count=True,
            help="Log decisions and timings to stderr; -vv logs more.",
        ),
        click.Option(["--log-file", "log_file"], metavar="FILE", help="Append the log to a file."),
    ]


class Commands(click.Group):
    """The group of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return commands()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and command(args[0]) is None and not args[0].startswith("-"):
            from ..core.errors import did_you_mean

            near = did_you_mean(args[0], commands())
            raise click.UsageError(
                f"no such command `{args[0]}`"
                + (f"; {near}" if near else "; `migrate --help` lists them")
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    params=_log_options(),
    context_settings={"help_option_names": ["--help", "-h"]},
)
@click.version_option(__version__, prog_name="migrate")
def cli(verbosity: int, log_file: str | None) -> None:
    """Alembic for PyTorch checkpoints: exact, streaming, reversible migrations.

    \b
    migrate inspect CKPT
    migrate plan CKPT --to hf-mixtral@v5
    migrate apply CKPT -o NEW --to hf-mixtral@v5
    migrate verify NEW --source CKPT

    Exit status: 0 done, 1 the answer is no, 2 the question is wrong, 3 the checkpoint is the problem, 4 it failed while
    running and nothing was published unless the message says so, 130 interrupted.
    """  # noqa: E501


def main() -> None:
    """Runs the command line and leaves with the documented exit status."""
    if os.name == "nt":
        # files are held by descriptor, read at offsets and renamed without replacing, which Windows
        # has no calls for
        click.echo(ELSEWHERE, err=True)
        raise SystemExit(2)
    # torch's own threads would fight with those of the run; a library must not decide that, a
    # process of its own may
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # a plan holds some objects per key and no cycles worth looking for
    gc.set_threshold(200_000, 50, 50)
    watch_memory()
    out, _ = terminal.install_streams()
    done = Done()
    status = settle(run(sys.argv[1:], done), done, out)
    # a plan of a million keys takes seconds to take apart again, object by object, when the
    # interpreter ends
    os._exit(status)


def settle(status: int, done: Done, out: terminal.Standard) -> int:
    """Flushes the answer; the status, or 4 (M971) if it was lost and nothing was published."""
    sys.stdout.flush()
    error = terminal.loss(out)
    if error is not None:
        from ..core.errors import Diagnostic, printable, refusal

        why = f"the answer could not be written to stdout: {refusal(error)}"
        if done.published is None:
            found = Diagnostic(
                "M971", why, help="run it again with an stdout that can be written to"
            )
            status = status or found.exit_status
        else:
            found = Diagnostic(
                "M971",
                why,
                notes=(f"{printable(done.published, 300)} was published and is complete",),
                severity="warning",
            )
        click.echo(found.render(), err=True)
    sys.stderr.flush()
    return status


def run(arguments: list[str], done: Done | None = None) -> int:
    """The exit status of a command line; problems go to stderr, or on request as JSON to stdout."""
    from ..core.errors import on_command_line

    done = done or Done()
    try:
        with on_command_line():
            return _run(arguments, done)
    except MemoryError:
        # while an earlier one was reported
        return out_of_memory(done.published)


def _run(arguments: list[str], done: Done) -> int:
    from ..core.errors import MigrateError

    wants_json = "--format=json" in arguments or ("--format", "json") in pairwise(arguments)
    try:
        result = cli.main(arguments, prog_name="migrate", standalone_mode=False, obj=done)
        return result if isinstance(result, int) else 0
    except MigrateError as error:
        status = _report(error, wants_json)
        if done.published is None:
            return status
        click.echo(f"{done.published} was published and is complete", err=True)
        return 4
    except click.ClickException as error:
        return _misused(error, wants_json)
    except (click.Abort, KeyboardInterrupt) as error:
        click.echo(str(error) or "interrupted", err=True)
        return 130
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is reported as one
        return _failed(error, wants_json)


def _report(error: Any, wants_json: bool) -> int:
    status = int(error.exit_code)
    if wants_json:
        found = [d.to_json() for d in error.diagnostics]
        problems = {
            "format_version": FORMAT_VERSION,
            "kind": "problems",
            "exit": status,
            "diagnostics": found,
            "permits": list(error.permits),
        }
        click.echo(json.dumps(problems, indent=1))
        return status

    terminal.say(str(error), err=True)
    errors = sum(d.severity == "error" for d in error.diagnostics)
    if errors > 1:
        click.echo(f"\n{errors} errors", err=True)
    return status


def _misused(error: click.ClickException, wants_json: bool) -> int:
    """Wrong flags: click's message with its usage line, or the same as a diagnostic."""
    if wants_json:
        from ..core.errors import Diagnostic, QuestionError

        return _report(
            QuestionError(
                [
                    Diagnostic(
                        "M115", error.format_message(), help="--help shows what the command takes"
                    )
                ]
            ),
            True,
        )
    error.show(sys.stderr)
    return 2


def _failed(error: Exception, wants_json: bool) -> int:
    """A lack of memory, a refusal of the system that nothing else handled, or else a bug."""
    from ..core.errors import MigrateError, RunError
    from ..core.out_of_memory import lacking, ran_out

    if lacking(error):
        try:
            ran_out(error, "go on")
        except MigrateError as lack:
            return _report(lack, wants_json)
    if isinstance(error, OSError):
        from ..core.errors import Diagnostic, refusal

        return _report(
            RunError([Diagnostic("M913", f"the system refused: {refusal(error)}")]), wants_json
        )
    return _bug(error)


def _bug(error: Exception) -> int:
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    click.echo(
        f"this is a bug in migrate {__version__} ({_HOME.parent}); please report it with the "
        "lines above",
        err=True,
    )
    return 70


_OUT_OF_MEMORY = 4
_LINE = (
    b"error[M922]: a library ended the process, as libraries do that find no memory; nothing "
    b"was published\n"
)
_HELP = (
    b" = help: let the process have more (`ulimit -v`); a folder OUT.migrate-partial may be "
    b"left, which --resume goes on with\n"
)
# what C calls must not be collected
_kept: list[Any] = []


def out_of_memory(published: str | None) -> int:
    """Says by the least means that memory ran out; `published`: the output that is there."""
    _say(
        b"error[M922]: there was no memory to go on; "
        + (
            b"nothing was published\n"
            if published is None
            else b"the output is published and whole\n"
        )
    )
    return _OUT_OF_MEMORY


def watch_memory() -> None:
    """Where memory is limited, a library's exit becomes M922. The process must use `os._exit`."""
    if not _limited():
        return
    try:
        import ctypes
        import signal

        libc = ctypes.CDLL(None)

        def end(_: int) -> None:
            _say(_LINE)
            os._exit(_OUT_OF_MEMORY)

        at_end = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
        _kept.extend((libc, at_end))
        # called in reverse order: if there is no memory even for `at_end`, the status is right all
        # the same
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(_OUT_OF_MEMORY), None)
        libc.__cxa_atexit(at_end, None, None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(at_end, ctypes.c_void_p))
    except (ImportError, OSError, AttributeError, MemoryError):
        return


def _say(line: bytes) -> None:
    try:
        sys.stderr.flush()
        os.write(2, line + _HELP)
    except (OSError, ValueError, AttributeError, MemoryError):
        pass


def _limited() -> bool:
    """Whether the system says no to memory; elsewhere it ends a process that takes too much."""
    try:
        import resource

        if any(
            resource.getrlimit(which)[0] != resource.RLIM_INFINITY
            for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
        ):
            return True
        with open("/proc/sys/vm/overcommit_memory", "rb") as file:
            return file.read(1) == b"2"
    except (ImportError, OSError, MemoryError):
        return False
