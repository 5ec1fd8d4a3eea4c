"""The entry point of the command line: its commands, its errors and its exit codes."""

import inspect
import os
import sys
from typing import Annotated

import click
import typer
from typer import Option
from typer.main import get_command
from typer.utils import get_params_from_function

import fedveil
from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, FedveilError
from fedveil.cli import deploy, results, train

app = typer.Typer(
    name="fedveil",
    help="Differentially private federated learning: train, plan, and know the epsilon.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    *(train.run, train.plan, train.sweep, train.reproduce, results.audit, results.evaluate),
    *(results.predict, results.compare, results.report, train.watch, results.recipes),
    *(results.explain, results.account, results.ledger, deploy.mixer, deploy.deploy),
):
    app.command()(command)
app.add_typer(deploy.site)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedveil {fedveil.__version__}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[
        bool, Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


_CTRL_C = 130
"""What typer returns when a command ends in KeyboardInterrupt."""


def main() -> None:
    """Run a command: exit 0 when done, 2 with one line on bad input, 1 on anything else."""
    try:
        code = as_written(get_command(app))(standalone_mode=False)
    except BadInput as e:
        _fail(str(e))
    except FedveilError as e:
        _fail(str(e), code=1)
    except BrokenPipeError:
        _stop_printing()
        code = 1
    except OSError as e:
        _fail(f"{shown(e.filename)}: {e.strerror}" if e.filename else str(e))
    except MemoryError:
        _fail("memory ran out: use fewer clients, a smaller model or a lower engine.memory", 1)
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        if not e.format_message():
            sys.exit(2)
        _fail(f"{e.format_message()} (see fedveil --help)")
    if code == _CTRL_C:
        print("interrupted", file=sys.stderr)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def as_written(command: click.Command) -> click.Command:
    """The command with help texts that are printed as they are written.

    Typer lets rich read help texts as markup, in which [shuffle] is a style and not shown. Click
    from version 8.5 on forgets the help of typer's arguments.
    """
    from rich.markup import escape

    for each in (command, *getattr(command, "commands", {}).values()):
        if each is not command and hasattr(each, "commands"):
            as_written(each)
            continue
        each.help = each.help and escape(each.help)
        each.short_help = each.short_help and escape(each.short_help)
        meant = get_params_from_function(inspect.unwrap(each.callback)) if each.callback else {}
        for param in each.params:
            info = meant[param.name].default if param.name in meant else param
            text = getattr(info, "help", None)
            param.help = text and escape(text)
    return command


def _fail(message: str, code: int = 2) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _stop_printing() -> None:
    """Send the rest of the output to /dev/null after the reader of the pipe has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
