"""Help texts, shown as they are written."""

import inspect

import click
from typer.utils import get_params_from_function


def as_written(command: click.Command) -> click.Command:
    """The same command, whose help shows every text of it and of its subcommands.

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
