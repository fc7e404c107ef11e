"""The command line: one file per command, imported when it is called, so that `--help` costs nothing."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .. import __version__

# what --help shows, without importing the commands
COMMANDS = {
    "inspect": "Show what a checkpoint holds, from its headers: keys, sizes, dtypes, layouts.",
    "plan": "Show what a migration would do, and save it for review.",
    "apply": "Migrate a checkpoint into a new one.",
    "downgrade": "Go back to an older layout.",
    "verify": "Recompute a migrated checkpoint on another path and compare its bytes.",
    "diff": "Compare two checkpoints: keys, specs, bytes.",
    "history": "Show what was applied to a checkpoint, or a lineage's layouts and edges.",
}


class Commands(click.Group):
    """Commands found by module name; a new command is a new file with `COMMAND` in it and its line above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"migrate.cli.{cmd_name}").COMMAND
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from ..core.diagnostics import did_you_mean

            near = did_you_mean(args[0], list(COMMANDS))
            raise click.UsageError(f"no such command `{args[0]}`" + (f"; {near}" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="migrate")
def cli() -> None:
    """Alembic for PyTorch checkpoints: exact, streaming, reversible migrations.

    \b
    migrate inspect CKPT
    migrate plan CKPT --to hf-mixtral@v5
    migrate apply CKPT -o NEW --to hf-mixtral@v5
    migrate verify NEW --source CKPT

    Exit status: 0 done, 1 the answer is no, 2 the question is wrong, 3 the checkpoint is the problem, 4 it failed while
    running and nothing was published, 130 interrupted.
    """


def main() -> None:
    """Runs the command line and leaves with the documented exit status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit status of one command line; output goes to stdout, diagnostics to stderr."""
    from ..core.errors import MigrateError

    wants_json = "--format=json" in arguments or any(a == "--format" and b == "json" for a, b in zip(arguments, arguments[1:], strict=False))
    try:
        result = cli.main(arguments, prog_name="migrate", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except MigrateError as error:
        _report(error, wants_json)
        return error.exit_code
    except click.UsageError as error:
        error.show(sys.stderr)
        return 2
    except click.ClickException as error:
        error.show(sys.stderr)
        return 2
    except (click.Abort, KeyboardInterrupt) as error:
        message = str(error) or "interrupted; nothing was published"
        print(message, file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is told as one
        return _bug(error)


def _report(error: Any, wants_json: bool) -> None:
    if wants_json:
        document = {
            "format_version": "1.0",
            "kind": "problems",
            "exit": error.exit_code,
            "diagnostics": [d.to_json() for d in error.diagnostics],
        }
        print(json.dumps(document, indent=1))  # noqa: T201
        return
    print(str(error), file=sys.stderr)  # noqa: T201
    errors = sum(d.severity == "error" for d in error.diagnostics)
    if errors > 1:
        print(f"\n{errors} errors", file=sys.stderr)  # noqa: T201


def _bug(error: Exception) -> int:
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    home = str(Path(__file__).resolve().parent.parent)
    print(f"this is a bug in migrate {__version__} ({home}); please report it with the lines above", file=sys.stderr)  # noqa: T201
    return 70
