"""`fedveil plan`: from command line options to a ranked table and a recipe."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil.base.checks import check_option
from fedveil.base.errors import BadInput
from fedveil.runs.glossary import terms_line
from fedveil.runs.run_directory import write_atomic
from fedveil.tuning.recipe_grid import STEPS, Space
from fedveil.tuning.search import OnTrial, simulate
from fedveil.tuning.theory import FormulaSettings, Sizes, convergence, formula_options, thumb
from fedveil.tuning.theory_plan import theorise
from fedveil.tuning.trials import Laboratory
from fedveil.tuning.tuning_pages import PlanReport, plan_page

_SHOWN = 12
_DELTA = 1e-5


def formula_settings(options: Mapping[str, Any]) -> FormulaSettings:
    """The settings of a plan without a recipe, from command line options that are complete."""
    needed = ("clients", "per_round", "parameters", "epsilon")
    missing = [_option(name) for name in needed if options[name] is None]
    if missing:
        raise BadInput(f"formulas need {', '.join(missing)}; or name a recipe to plan")
    delta = _DELTA if options["delta"] is None else options["delta"]
    for name in needed:
        check_option(name, options[name])
    check_option("delta", delta)
    for name, names in (("noise", ("laplace", "gaussian")), ("trust", ("local", "central"))):
        if options[name] not in (None, *names):
            raise BadInput(f"--{name} is {options[name]!r}: use {' or '.join(names)}")
    return FormulaSettings(
        Sizes(options["clients"], options["per_round"], options["parameters"]),
        options["epsilon"],
        delta,
        laplace=options["noise"] == "laplace",
        trusted_server=options["trust"] == "central",
    )


def check_unused(options: Mapping[str, Any]) -> None:
    """Refuse options of a plan by formulas beside a recipe, which sets them itself."""
    for name, value in options.items():
        if value is not None:
            raise BadInput(
                f"{_option(name)} is for formulas without a recipe: use --set, as in --set "
                "budget.epsilon=1"
            )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def by_formula(options: Mapping[str, Any], space: Space, *, as_json: bool) -> None:
    """Plan by formulas, without data or training: how much signal the noise leaves."""
    if space.clips or space.rates:
        raise BadInput("--clips and --rates need a recipe: name one")
    settings = formula_settings(options)
    ranked = formula_options(settings, space)
    verdict, rule = str(convergence(settings.exponent)), thumb(settings, max(space.steps_in_all))
    if as_json:
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
    console = Console(markup=False, emoji=False)
    console.print(table)
    _say(
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
    """Plan on the recipe's data: by the bound of the theory, or by training."""
    if against and not simulated:
        raise BadInput("--against compares by training: add --simulate")
    if out is not None:
        _check_out(out)
    if not simulated:
        return theorise(recipe, overrides, space, laboratory)
    return simulate(
        recipe, overrides, space, laboratory, repeat=repeat, against=against, on_trial=on_trial
    )


def space_of(steps: str, iterations: str, clips: str, rates: str) -> Space:
    """The space that the command line's lists describe.

    Of the steps that are looked at unless others are named, those that fit the iterations stay.
    """
    e, t = _integers("steps", steps), _integers("iterations", iterations)
    if e == STEPS:
        e = tuple(number for number in e if number <= max(t, default=0)) or e
    return Space(e, t, _numbers("clips", clips), _numbers("rates", rates))


def write_and_print(report: PlanReport, recipe: str, out: Path | None, *, as_json: bool) -> None:
    """Write the recipe that won, and print the report."""
    path = _written(report, out, recipe)
    if as_json:
        print(json.dumps(_report_json(report, path), indent=2))
        return
    console = Console(markup=False, emoji=False)
    first, more = report.options[0], len(report.options) - _SHOWN
    _say(console, report.title)
    console.print(_options_table(report))
    if more > 0:
        _say(console, f"and {more} more")
    _say(console, f"the least {report.ranked_by} over E (down) and T (across):")
    console.print(_least_table(report))
    reasons = [f"why: {line}" for line in report.reasons]
    _say(console, f"the claim of the first: {first.privacy}", *reasons)
    for line in report.warnings:
        console.print(f"note: {line}", style="yellow", highlight=False, soft_wrap=True)
    _say(console, terms_line([first.privacy]), f"run it: fedveil run {path}")


def _options_table(report: PlanReport) -> Table:
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


def _written(report: PlanReport, out: Path | None, recipe: str) -> Path:
    """Write the recipe, and its page beside it."""
    path = out or _free(Path("runs"), f"plan-{Path(recipe).stem}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{path.parent} cannot be made: {e.strerror}; use another --out") from e
    write_atomic(path.with_suffix(".html"), plan_page(report, path.name))
    write_atomic(path, report.recipe_toml.encode())
    return path


def _check_out(out: Path) -> None:
    """Refuse, before any training, a path that cannot be written."""
    if out.suffix != ".toml" or out.exists():
        raise BadInput(f"--out {out}: name a .toml file that does not exist")
    if out.with_suffix(".html").exists():
        raise BadInput(f"--out {out}: the page beside it, {out.stem}.html, exists already")
    there = next(parent for parent in out.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadInput(f"--out {out}: nothing can be written in {there}")


def _free(folder: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = folder / (f"{name}.toml" if number == 1 else f"{name}-{number}.toml")
        if not path.exists() and not path.with_suffix(".html").exists():
            return path
    raise BadInput(f"{folder}/{name}.toml and 999 more exist: use --out")


def _report_json(report: PlanReport, path: Path) -> dict[str, Any]:
    return {
        "title": report.title,
        "options": [
            {
                "steps": row.steps,
                "iterations": row.iterations,
                "rounds": row.rounds,
                **row.choice,
                report.ranked_by: _number(row.value),
                "half": _number(row.half),
                "noise": _number(row.noise_std),
                "privacy": row.privacy,
                "remark": row.remark,
            }
            for row in report.options
        ],
        "why": report.reasons,
        "notes": report.warnings,
        "recipe": str(path),
    }


def _number(value: float) -> float | None:
    """As JSON can hold it."""
    return value if math.isfinite(value) else None


def _say(console: Console, *texts: str) -> None:
    for text in filter(None, texts):
        console.print(text, highlight=False, soft_wrap=True)


def _integers(name: str, text: str) -> tuple[int, ...]:
    numbers = _numbers(name, text)
    if not all(number.is_integer() for number in numbers):
        raise BadInput(f"--{name} is {text!r}: whole numbers with commas in between are needed")
    return tuple(int(number) for number in numbers)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as e:
        raise BadInput(f"--{name} is {text!r}: numbers with commas in between are needed") from e
    if len(set(numbers)) != len(numbers):
        raise BadInput(f"--{name} is {text!r}: a number appears twice")
    return numbers
