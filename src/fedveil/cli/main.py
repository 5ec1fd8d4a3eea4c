"""The entry point of the command line: its commands, its errors and its exit codes."""

import functools
import inspect
import os
import re
import sys
from typing import Any

import click
import typer
from typer.main import get_command
from typer.utils import get_params_from_function

import fedveil
from fedveil.base.checks import meant, shown
from fedveil.base.errors import BadInput, FedveilError
from fedveil.cli import deploy, evidence_commands, own_data, results, site_commands, train

app = typer.Typer(
    name="fedveil",
    help="Differentially private federated learning with an epsilon that can be checked.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
GROUPS = {
    "Train": (train.run, train.plan, train.sweep),
    "Use": (results.predict, results.evaluate),
    "Look": (results.compare, results.report, train.watch),
    "Check": (
        results.ledger,
        results.audit,
        results.account,
        evidence_commands.evidence,
        evidence_commands.verify,
    ),
    "Federate": (deploy.deploy, deploy.mixer),
    "Learn": (results.recipes, results.explain, train.reproduce),
}
"""The commands of each group in `fedveil --help`."""
for group, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group)(command)
app.add_typer(own_data.app, rich_help_panel="Train")
app.add_typer(site_commands.site, rich_help_panel="Federate")


_VERSION = click.version_option(
    fedveil.__version__, message="fedveil %(version)s", help="Print the version."
)
_CTRL_C = 130
"""What typer returns when a command ends in KeyboardInterrupt."""


def main() -> None:
    """Run the command in sys.argv and exit: 0 when done, 2 on bad input, 1 on anything else.

    Bad input prints one line on standard error.
    """
    try:
        code = whole_command()(standalone_mode=False)
    except BadInput as e:
        _fail(str(e))
    except FedveilError as e:
        _fail(str(e), code=1)
    except BrokenPipeError:  # whoever read the output has gone: the rest goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
        _fail(f"{_usage_text(e)} (see fedveil --help)")
    if code == _CTRL_C:
        print("interrupted", file=sys.stderr)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


@functools.cache
def whole_command() -> click.Command:
    """`fedveil` with all its commands. It is built once."""
    return _VERSION(without_markup(get_command(app)))


def without_markup(command: click.Command) -> click.Command:
    """Change the help texts of a command and its commands so that rich reads no markup in them.

    Returns the same command. Typer lets rich read help texts as markup, in which [shuffle] is a
    style and not shown. Click from version 8.5 on forgets the help of typer's arguments.
    """
    from rich.markup import escape

    for each in (command, *getattr(command, "commands", {}).values()):
        if each is not command and hasattr(each, "commands"):
            without_markup(each)
            continue
        each.help = each.help and escape(each.help)
        each.short_help = each.short_help and escape(each.short_help)
        typed = get_params_from_function(inspect.unwrap(each.callback)) if each.callback else {}
        for param in each.params:
            info = typed[param.name].default if param.name in typed else param
            text = getattr(info, "help", None)
            param.help = text and escape(text)
    return command


def _usage_text(error: Any) -> str:
    """Return the message of a click error. An option that is a recipe's key leads to --set."""
    message = re.sub(r"( Did you mean [^?]+\?)\1", r"\1", error.format_message())
    option = getattr(error, "option_name", None)
    command = getattr(getattr(error, "ctx", None), "command", None)
    if option is None or all(param.name != "set_" for param in getattr(command, "params", ())):
        return message
    from fedveil.runs.recipe import Recipe
    from fedveil.runs.sections.section import forms_of, paths_of_key

    forms, word = forms_of(Recipe), option.lstrip("-").replace("-", "_")
    keys = [word] if word in forms else paths_of_key(forms, word, similar=False)
    if not keys:
        return message
    return f"No such option {option!r}: keys of a recipe are set by --set KEY=VALUE; {meant(keys)}"


def _fail(message: str, code: int = 2) -> None:
    """Print "error: ..." on one line of standard error, and exit with `code`."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
