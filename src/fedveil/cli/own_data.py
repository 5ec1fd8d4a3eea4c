"""`fedveil data check`: a first look at tables before a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedveil.base.errors import BadInput
from fedveil.cli import options

if TYPE_CHECKING:
    from fedveil.data.table_check import TableCheck

app = typer.Typer(name="data", help="Look at your own tables.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at your own tables before a run."""


@app.command()
def check(
    tables: Annotated[
        list[Path],
        Argument(metavar="FILES...", help="CSV or Parquet files, a folder of them, or a recipe."),
    ],
    client: Annotated[str | None, Option(help="The column with the client of a row.")] = None,
    person: Annotated[str | None, Option(help="The column with the person of a row.")] = None,
    target: Annotated[str | None, Option(help="The column to predict.")] = None,
    delta: Annotated[float, Option(help="The delta of the claims.")] = 1e-5,
    recipe: Annotated[
        str | None, Option(help="Write this recipe to --out, with the tables as its data.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Write the [data] section, or the recipe, to this new file.")
    ] = None,
    json_: options.Json = False,
) -> int:
    """List columns, roles and problems of tables, and write the [data] section of a recipe.

    Of a recipe, the table that it names is checked with all that it declares. Everything is
    computed from private rows in the clear, for the owner of the tables alone.
    """
    options.check_numbers(delta=delta)
    options.check_path("--out", out, writable=True)
    if recipe is not None and out is None:
        raise BadInput(f"--recipe is {recipe!r} without --out: name the file to write")
    from fedveil.data.table_check import check_table

    roles = {"client": client, "person": person, "target": target}
    if len(tables) == 1 and tables[0].suffix == ".toml":
        if out is not None or any(roles.values()):
            raise BadInput(f"{tables[0]} is a recipe: omit --out, --client, --person and --target")
        checked = _check_recipe(tables[0])
    else:
        checked = check_table(*tables, delta=delta, **roles)
    if out is not None:
        _write(out, checked, recipe)
    if json_:
        print(json.dumps(checked.to_dict(), indent=2))
        return 2 if checked.problems else 0
    from fedveil.console import print_table_check

    print_table_check(options.plain_console(highlight=False), checked)
    if out is not None:
        print(f"written: {out}")
    return 2 if checked.problems else 0


def _check_recipe(path: Path) -> "TableCheck":
    """Check the table of a recipe with everything that its [data] section declares."""
    from fedveil.base.checks import TABLE
    from fedveil.data.table_check import check_table
    from fedveil.runs.recipe import load_recipe

    recipe = load_recipe(str(path))
    section = recipe.data
    if section.name != TABLE or section.path is None:
        raise BadInput(f"{path}: data.name is {section.name!r}: name a recipe with a table")
    paths = section.path if isinstance(section.path, list) else [section.path]
    delta = 1e-5 if recipe.budget is None else recipe.budget.delta
    return check_table(*paths, delta=delta, **section.check_options)


def _write(out: Path, checked: "TableCheck", recipe: str | None) -> None:
    """Write the [data] section, or a recipe that ends with it, to a new file.

    If the rows have persons and the recipe can protect them, it does.
    """
    from fedveil.runs.recipe import read_recipe, to_toml
    from fedveil.runs.run_directory import write_new

    text = checked.block
    if recipe is not None:
        document = read_recipe(recipe)
        document.pop("data", None)
        client, noise = document.get("client", {}), document.get("noise", {})
        if client.get("kind") == "dp-sgd" or noise.get("where") == "site":
            document["client"] = {**client, **checked.person_keys}
        text = f"{to_toml({**document, 'name': out.stem})}\n{text}"
    write_new(out, text.encode())
