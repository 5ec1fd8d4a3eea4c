"""`fedveil plan`: from command line options to a ranked table and a recipe."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil.base.checks import OPTIONS, hint
from fedveil.base.errors import BadInput
from fedveil.runs.glossary import terms_line
from fedveil.runs.run_directory import json_text, write_atomic
from fedveil.tuning.recipe_grid import ITERATIONS, STEPS, Space
from fedveil.tuning.search import OnTrial, plan_by_training
from fedveil.tuning.sweep import make_folder
from fedveil.tuning.theory import (
    FormulaSettings,
    Sizes,
    convergence,
    formula_options,
    rule_of_thumb_text,
)
from fedveil.tuning.theory_plan import plan_by_theory
from fedveil.tuning.trials import Laboratory
from fedveil.tuning.tuning_pages import PlanReport, plan_page

_SHOWN = 12
_DELTA = 1e-5
_AXES = ("steps", "iterations", "clips", "rates")


_COUNTS = ("clients", "per_round", "parameters")
_NEEDED = (*_COUNTS, "epsilon")
_NAMES = {"noise": ("gaussian", "laplace"), "trust": ("local", "central")}
_FORMULA_KEYS = (*_NEEDED, "delta", *_NAMES)


def formula_settings(assignments: Sequence[str]) -> FormulaSettings:
    """Return the settings of a plan by formulas from texts such as "clients=350".

    Raise BadInput if a key is unknown or missing, or a value is out of range.
    """
    values: dict[str, Any] = {"delta": _DELTA, "noise": "gaussian", "trust": "local"}
    for text in assignments:
        key, value = _split("--set", text)
        if key not in _FORMULA_KEYS:
            raise BadInput(
                f"--set {key}: unknown key without a recipe{hint(key, _FORMULA_KEYS)}; choose from "
                f"{', '.join(_FORMULA_KEYS)}, or name a recipe"
            )
        values[key] = _formula_value(key, value)
    missing = [f"--set {name}=..." for name in _NEEDED if name not in values]
    if missing:
        raise BadInput(f"formulas need {' '.join(missing)}; or name a recipe to plan")
    return FormulaSettings(
        Sizes(*(values[name] for name in _COUNTS)),
        values["epsilon"],
        values["delta"],
        laplace=values["noise"] == "laplace",
        trusted_server=values["trust"] == "central",
    )


def _formula_value(key: str, text: str) -> Any:
    """Return the value of a key of plans by formulas. Raise BadInput if it is out of range."""
    if key in _NAMES:
        if text not in _NAMES[key]:
            raise BadInput(f"{key} is {text!r}: use {' or '.join(_NAMES[key])}")
        return text
    try:
        value = int(text) if key in _COUNTS else float(text)
    except ValueError as e:
        needed = "a whole number" if key in _COUNTS else "a number"
        raise BadInput(f"{key} is {text!r}: {needed} is needed") from e
    OPTIONS[key].check(key, value)
    return value


def by_formula(assignments: Sequence[str], space: Space, console: Console | None) -> None:
    """Plan by formulas, without data or training, and print the options, or JSON without a console.

    Raise BadInput if clips or rates are given, or a setting is missing or out of range.
    """
    if space.clips or space.rates:
        raise BadInput("--grid clips and --grid rates need a recipe: name one")
    settings = formula_settings(assignments)
    ranked = formula_options(settings, space)
    verdict = str(convergence(settings.exponent))
    rule = rule_of_thumb_text(settings, max(space.steps_in_all))
    if console is None:
        rows = [
            {
                "steps": option.steps,
                "iterations": option.iterations,
                "rounds": option.rounds,
                "reports_per_client": option.reports_per_client,
                "noise": option.noise_std,
                "signal": option.signal,
                "claim": option.claim.to_dict(),
            }
            for option in ranked
        ]
        found = {"z": settings.exponent, "verdict": verdict, "rule": rule, "options": rows}
        print(json.dumps(found, indent=2))
        return
    table = Table(title="strongest signal first", title_justify="left")
    for name in ("E", "T", "rounds", "reports per client", "noise / clip", "signal / noise"):
        table.add_column(name, justify="right")
    for option in ranked[:_SHOWN]:
        counts = (option.steps, option.iterations, option.rounds, option.reports_per_client)
        table.add_row(*map(str, counts), f"{option.noise_std:.3g}", f"{option.signal:.3g}")
    console.print(table)
    _print_lines(
        console,
        f"z = {settings.exponent:g}: {verdict}",
        f"theory without constants: {rule}",
        f"the claim of the first: {ranked[0].claim}",
        "noise / clip: on a coordinate of a round's mean update, as a share of the clip on one "
        "client's update; signal / noise: of the whole run, if every update reached the clip",
        terms_line([ranked[0].claim]),
    )


def by_recipe(
    recipe: str,
    overrides: Sequence[str],
    space: Space,
    laboratory: Laboratory,
    *,
    simulated: bool,
    against: Sequence[str],
    repeat: int,
    out: Path | None,
    on_trial: OnTrial,
) -> PlanReport:
    """Plan on the recipe's data and return the report: by theory, or by training if `simulated`.

    Nothing is written. Raise BadInput if `out` is no new .toml file in a writable place, or
    `against` is given without `simulated`.

    Args:
        recipe: A shipped recipe or a .toml file.
        overrides: Settings "section.key=value".
        space: The E, T, clips and rates to try.
        laboratory: Builds and trains recipes.
        simulated: Whether options are trained.
        against: Recipes to compare with.
        repeat: The most trainings of one option.
        out: The file that will be written later, only checked here. None checks nothing.
        on_trial: Called with (trials done, trials planned so far, cell) after each training.
    """
    if against and not simulated:
        raise BadInput("--against compares by training: add --simulate")
    if out is not None:
        _check_out(out)
    if not simulated:
        return plan_by_theory(recipe, overrides, space, laboratory)
    return plan_by_training(
        recipe, overrides, space, laboratory, repeat=repeat, against=against, on_trial=on_trial
    )


def space_of(axes: Sequence[str]) -> Space:
    """Parse the command line's lists of values to try, such as "steps=1,2,3".

    Of the default steps, those that are more than the largest T are dropped. Raise BadInput if a
    key is unknown or named twice, or a list is malformed.
    """
    lists: dict[str, str] = {}
    for text in axes:
        key, values = _split("--grid", text)
        if key not in _AXES:
            raise BadInput(f"--grid {key}: choose from {', '.join(_AXES)}{hint(key, _AXES)}")
        if key in lists:
            raise BadInput(f"--grid {key} is given twice: put all values into one list")
        lists[key] = values
    t = _parse_integers("iterations", lists["iterations"]) if "iterations" in lists else ITERATIONS
    e = tuple(number for number in STEPS if number <= max(t, default=0)) or STEPS
    if "steps" in lists:
        e = _parse_integers("steps", lists["steps"])
    clips, rates = (_parse_numbers(name, lists.get(name, "")) for name in ("clips", "rates"))
    return Space(e, t, clips, rates)


def _split(option: str, text: str) -> tuple[str, str]:
    """Return (key, value) of "key=value". Raise BadInput if there is no "="."""
    key, equals, value = text.partition("=")
    if not equals:
        raise BadInput(f"{option} {text}: write {option} KEY=VALUE")
    return key.strip(), value.strip()


def write_and_print(
    report: PlanReport, recipe: str, out: Path | None, console: Console | None
) -> None:
    """Write the best recipe and its page, and print the report, or JSON without a console."""
    path = _write_recipe(report, out, recipe)
    if console is None:
        print(json_text(_report_json(report, path), indent=2), end="")
        return
    first, more = report.options[0], len(report.options) - _SHOWN
    _print_lines(console, report.title)
    console.print(_options_table(report))
    if more > 0:
        _print_lines(console, f"and {more} more")
    _print_lines(console, f"the least {report.ranked_by} over E (down) and T (across):")
    console.print(_least_table(report))
    reasons = [f"why: {line}" for line in report.reasons]
    _print_lines(console, f"the claim of the first: {first.privacy}", *reasons)
    for line in report.warnings:
        console.print(f"note: {line}", style="yellow", highlight=False)
    _print_lines(console, terms_line([first.privacy]), f"run it: fedveil run {path}")


def _options_table(report: PlanReport) -> Table:
    """Return the best twelve options as a table for the terminal."""
    keys = list(dict.fromkeys(key for option in report.options for key in option.choice))
    remarks = any(option.remark for option in report.options)
    table = Table()
    for name in ("E", "T", "rounds", *keys, report.ranked_by, "noise"):
        table.add_column(name, overflow="fold")
    if remarks:
        table.add_column("remark", overflow="fold")
    for option in report.options[:_SHOWN]:
        table.add_row(
            *map(str, (option.steps, option.iterations, option.rounds)),
            *(option.choice.get(key, "") for key in keys),
            option.value_text,
            option.noise_text,
            *([option.remark] if remarks else []),
        )
    return table


def _least_table(report: PlanReport) -> Table:
    """Return the least value by E (rows) and T (columns) as a table for the terminal.

    Cells that were not tried are empty.
    """
    steps, times = report.axes
    table = Table()
    table.add_column("E \\ T")
    for t in times:
        table.add_column(str(t), justify="right")
    for e in steps:
        texts = []
        for t in times:
            value = report.least_values.get((e, t), math.nan)
            text = f"{value:.3g}" if math.isfinite(value) else "diverged"
            texts.append("" if math.isnan(value) else text)
        table.add_row(str(e), *texts)
    return table


def _write_recipe(report: PlanReport, out: Path | None, recipe: str) -> Path:
    """Write the best recipe to `out` and its page beside it, and return the recipe's path.

    None takes the first free name plan-RECIPE.toml, plan-RECIPE-2.toml, ... below runs/. Raise
    BadInput if the directory cannot be made.
    """
    path = out or _free_path(Path("runs"), f"plan-{Path(recipe).stem}")
    make_folder(path.parent)
    write_atomic(path.with_suffix(".html"), plan_page(report, path.name))
    write_atomic(path, report.recipe_toml.encode())
    return path


def _check_out(out: Path) -> None:
    """Raise BadInput unless `out` is a new .toml file in a writable directory.

    Its page, the same name with .html, must be new too. Directories may be missing.
    """
    if out.suffix != ".toml" or out.exists():
        raise BadInput(f"--out {out}: name a .toml file that does not exist")
    if out.with_suffix(".html").exists():
        raise BadInput(f"--out {out}: the page beside it, {out.stem}.html, exists already")
    there = next(parent for parent in out.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadInput(f"--out {out}: nothing can be written in {there}")


def _free_path(folder: Path, name: str) -> Path:
    """Return the first of name.toml, name-2.toml, ... that does not exist, nor its page.

    Raise BadInput after 999 names.
    """
    for number in range(1, 1000):
        path = folder / (f"{name}.toml" if number == 1 else f"{name}-{number}.toml")
        if not path.exists() and not path.with_suffix(".html").exists():
            return path
    raise BadInput(f"{folder}/{name}.toml and 999 more exist: use --out")


def _report_json(report: PlanReport, path: Path) -> dict[str, Any]:
    """Return the report as a dictionary for JSON.

    Keys: title, options, why, notes, and recipe (the path). An option has steps, iterations,
    rounds, its choices by key, the value by the name in `report.ranked_by`, half, noise, privacy
    and remark.
    """
    return {
        "title": report.title,
        "options": [
            {
                "steps": row.steps,
                "iterations": row.iterations,
                "rounds": row.rounds,
                **row.choice,
                report.ranked_by: row.value,
                "half": row.half,
                "noise": row.noise_std,
                "privacy": row.privacy,
                "remark": row.remark,
            }
            for row in report.options
        ],
        "why": report.reasons,
        "notes": report.warnings,
        "recipe": str(path),
    }


def _print_lines(console: Console, *texts: str) -> None:
    """Print each text that is not empty on a line of its own, without colours."""
    for text in filter(None, texts):
        console.print(text, highlight=False)


def _parse_integers(name: str, text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas. Raise BadInput otherwise. `name` is the option's."""
    numbers = _parse_numbers(name, text)
    if not all(number.is_integer() for number in numbers):
        raise BadInput(f"--grid {name} is {text!r}: give whole numbers, with commas")
    return tuple(int(number) for number in numbers)


def _parse_numbers(name: str, text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas, () for an empty text.

    Raise BadInput if a number is malformed or repeated. `name` is the option's.
    """
    try:
        numbers = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as e:
        raise BadInput(f"--grid {name} is {text!r}: give numbers, with commas") from e
    if len(set(numbers)) != len(numbers):
        raise BadInput(f"--grid {name} is {text!r}: a number appears twice")
    return numbers
