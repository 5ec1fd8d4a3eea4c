"""Metrics and predictions of a run's model on other rows."""

import csv
import io
from pathlib import Path

import numpy as np

from fedveil.base.checks import OWN
from fedveil.base.errors import BadInput
from fedveil.data.data_files import UNREADABLE, warnings_as_errors
from fedveil.data.tables import SUFFIXES
from fedveil.data.user_arrays import Array
from fedveil.data.vocabulary import lines_of
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.records import data_of
from fedveil.training.evaluate import evaluate


def measured(run: OpenedRun, source: Path | None) -> dict[str, float]:
    """Metrics on a table with targets, or on the test split of the run's own data."""
    if source is not None and source.suffix in SUFFIXES:
        _check_takes_tables(run, source)
        return run.evaluate(source)
    if run.recipe.data.name == OWN:
        raise BadInput(
            f"{run.folder} was trained on data from Python, which no file holds: give a table with "
            "--data, or use fedveil.open_run(folder).evaluate"
        )
    data = data_of(run.recipe, source)
    data.check_tested("measuring a run on its own data")
    if run.recipe.evaluate.epsilon is not None:
        raise BadInput(
            f"the metrics of {run.folder} have a price (evaluate.epsilon), and measuring again "
            "would show them without noise: result.json has them, --data measures on other rows"
        )
    if data.test_of_clients and getattr(run.recipe.noise, "source", "seeded") == "secure":
        data.check_secure()
    return evaluate(run.task, run.task.parameters, data)


def predictions_csv(run: OpenedRun, source: Path) -> str:
    """Predictions as CSV: a header, and one line per row or per non-blank line of text."""
    features = run.stored.schema.features
    if source.suffix in SUFFIXES:
        _check_takes_tables(run, source)
        predictions = run.predict(source)
    elif source.suffix == ".npy":
        predictions = run.predict(_records(source))
    elif source.suffix == ".txt" and features[0].text is not None:
        predictions = run.predict({features[0].name: lines_of(source)})
    else:
        known = ", ".join(SUFFIXES if features[0].text is None else (*SUFFIXES, ".txt"))
        raise BadInput(f"{source} is no input: name a {known} or .npy file")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(predictions)
    columns = [column.tolist() for column in predictions.values()]
    writer.writerows(zip(*columns, strict=True))
    return out.getvalue()


def _check_takes_tables(run: OpenedRun, source: Path) -> None:
    schema = run.stored.schema
    if any(column.shape and column.text is None for column in schema.features):
        way_out = "use fedveil.open_run(folder).predict" if schema.by_name else "give them as .npy"
        raise BadInput(
            f"{source} is a table and the records of {run.folder} are arrays of shape "
            f"{schema.record_shape}: {way_out}"
        )


def _records(path: Path) -> Array:
    try:
        with warnings_as_errors():
            records = np.load(path, allow_pickle=False)
    except UNREADABLE as e:
        raise BadInput(f"{path} cannot be read: {' '.join(str(e).split())}") from e
    if not isinstance(records, np.ndarray):
        raise BadInput(f"{path} holds no array: write one with numpy.save")
    return records
