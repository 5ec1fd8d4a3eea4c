"""A finished run, opened from its directory: claims, history, result, model, predictions."""

import csv
import html
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import nn

from fedveil.base.checks import OWN
from fedveil.base.errors import BadInput, one_line
from fedveil.base.identity import digest_of
from fedveil.base.inputs import Inputs, Target, arrays_by_name, count, join_inputs, mapped, taken
from fedveil.base.platforms import one_thread
from fedveil.data.columns import Column
from fedveil.data.data_files import UNREADABLE, warnings_as_errors
from fedveil.data.entries import as_texts
from fedveil.data.federated import Array, FederatedData
from fedveil.data.schema import TableSchema
from fedveil.data.tables import SUFFIXES, read_table
from fedveil.data.vocabulary import lines_of
from fedveil.models.task import Task
from fedveil.pages.run_report import ended_text
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.runs.evidence import unchanged_file
from fedveil.runs.modules import METADATA_KEY, Model, note_claims, own_task, set_metrics
from fedveil.runs.recipe import Recipe, recipe_in
from fedveil.runs.run_directory import read_metrics, readable
from fedveil.runs.sections.model_section import ModelSection
from fedveil.training.evaluate import BATCH, evaluate
from fedveil.training.session import Training


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A trained model. The module's layers and frozen weights are not part of it.

    Attributes:
        tensors: The trainable weights by name.
        model: The recipe's [model] section.
        record_shape: The shape of a record, or of each input by name.
        record_type: The NumPy type of a record, or of each input by name. "" in older files.
        target: What is predicted.
        claims: What the run claims.
        layers_digest: A digest of the module's layers as they print, and of its frozen weights.
        table_schema: How rows of a table become records. None for records that were arrays.
    """

    tensors: dict[str, torch.Tensor]
    model: ModelSection
    record_shape: Inputs[tuple[int, ...]]
    record_type: Inputs[str]
    target: Target
    claims: tuple[PrivacyClaim, ...]
    layers_digest: str
    table_schema: TableSchema | None

    @classmethod
    def from_training(
        cls,
        model: ModelSection,
        training: Training,
        params: torch.Tensor,
        claims: tuple[PrivacyClaim, ...],
    ) -> "StoredModel":
        """Return the model of a training with copies of the parameters `params`.

        `model` and `claims` are stored with it.
        """
        task, data = training.task, training.data
        tensors = {name: value.clone() for name, value in task.named(params).items()}
        layers = digest_of(str(task.module), task.frozen)
        types = mapped(lambda x: str(x.dtype), data.x)
        target, schema = data.target, data.schema
        return cls(tensors, model, data.record_shape, types, target, claims, layers, schema)

    @cached_property
    def schema(self) -> TableSchema:
        """How rows of a table become records.

        Records that were arrays are a column "x", or one column per input, with values as they are.
        Their labels are numbers.
        """
        if self.table_schema is not None:
            return self.table_schema
        types = arrays_by_name("x", self.record_type)
        columns = []
        for name, shape in arrays_by_name("x", self.record_shape).items():
            if shape:
                whole = types[name].startswith(("int", "uint"))
                columns.append(Column(name.removeprefix("x."), shape=shape, whole=whole))
            else:
                columns.append(Column(name.removeprefix("x."), mean=0.0, std=1.0))
        target = Column.of_target("y", self.target)
        return TableSchema(tuple(columns), target, isinstance(self.record_shape, dict))

    def inputs(self, rows: object) -> Inputs[Array]:
        """Encode the rows of a table as records of the shape and type that the model expects.

        Raises BadInput for rows that do not fit the schema.
        """
        encoded = self.schema.encode(rows)
        if not self.record_type:
            return encoded

        def cast(parts: list[Any]) -> Array:
            array, shape, kind = parts
            records: Array = array.reshape(len(array), *shape).astype(kind, copy=False)
            return records

        return join_inputs([encoded, self.record_shape, self.record_type], cast)

    def check_layers(self, task: Task, where: Path) -> None:
        """Raise BadInput unless `task` has the parameters, layers and frozen weights of this model.

        `where` names the run in the message.
        """
        shapes = {name: tuple(v.shape) for name, v in task.named(task.parameters).items()}
        wanted = {name: tuple(value.shape) for name, value in self.tensors.items()}
        for name in {**wanted, **shapes}:
            if shapes.get(name) != wanted.get(name):
                raise BadInput(
                    f"{name!r} of the module is {shapes.get(name, 'missing')}, and "
                    f"{wanted.get(name, 'missing')} in {where}: give the module that was trained"
                )
        if digest_of(str(task.module), task.frozen) != self.layers_digest:
            raise BadInput(
                f"the module has the parameters of {where} beside other layers, such as another "
                "activation, or other frozen weights: give the module that was trained"
            )

    def to_bytes(self) -> bytes:
        """Return the bytes of the safetensors file that `read` opens. Writes no file.

        The trained weights are tensors, everything else is JSON in one metadata entry. Layers and
        frozen weights are not stored, only their digest. The same model always gives the same
        bytes.
        """
        about = {
            "model": self.model.model_dump(),
            "record_shape": mapped(list, self.record_shape),
            "record_type": self.record_type,
            "target": asdict(self.target),
            "claims": [claim.to_dict() for claim in self.claims],
            "layers": self.layers_digest,
            "schema": None if self.table_schema is None else self.table_schema.to_dict(),
        }
        return safetensors.torch.save(self.tensors, {METADATA_KEY: json.dumps(about)})

    @classmethod
    def read(cls, path: Path) -> "StoredModel":
        """Read a stored model from the file `path`, a run's model.safetensors.

        Raises BadInput if it is missing or damaged, or if fedveil did not write it.
        """
        if not path.is_file():
            raise BadInput(f"{path} is missing: the run has not ended (fedveil run --resume)")
        try:
            with safetensors.safe_open(path, framework="pt") as f:
                about: dict[str, Any] = json.loads(f.metadata()[METADATA_KEY])
                tensors = {name: f.get_tensor(name) for name in list(f.keys())}
            # Older files have the number of labels only.
            target = about.get("target") or {"classes": about["classes"]}
            return cls(
                tensors,
                ModelSection.model_validate(about["model"]),
                mapped(lambda shape: tuple(map(int, shape)), about["record_shape"]),
                about.get("record_type", ""),
                Target(
                    int(target["classes"]),
                    tuple(target.get("shape", ())),
                    bool(target.get("several")),
                ),
                tuple(map(PrivacyClaim.from_dict, about["claims"])),
                str(about["layers"]),
                None if about["schema"] is None else TableSchema.from_dict(about["schema"]),
            )
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
            raise BadInput(f"{path} is not a model that a run left: {one_line(e)}") from e


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """What a run left in its directory.

    Files are read on first use. A file that was changed since the run ended is refused if the run's
    ledger is there.

    Attributes:
        folder: The run directory.
        recipe: The recipe that was trained.
        model: For a run of the user's own module, a module with the same layers and any weights.
        allow_code: Whether code that the recipe names may be run.
    """

    folder: Path
    recipe: Recipe = field(repr=False)
    model: Model | None = field(default=None, repr=False)
    allow_code: bool = field(default=False, repr=False)

    @classmethod
    def at(
        cls, folder: Path | str, model: Model | None = None, *, allow_code: bool = False
    ) -> "OpenedRun":
        """Open the run in a directory, ended or not, by reading its recipe. No other file is read.

        `model` is needed to use the model if the run had a module of the user's. Raises BadInput if
        there is no run.
        """
        folder = Path(folder)
        return cls(folder, recipe_in(folder), model, allow_code)

    @cached_property
    def result(self) -> dict[str, Any]:
        """Return the content of result.json: metrics, claims, budget, timing, notes.

        Numbers that are not finite are None. Raises BadInput if the run has not ended, or the
        ledger shows that the file was changed.
        """
        path = self.folder / "result.json"
        if not path.is_file():
            raise BadInput(
                f"{path} is missing: the run has not ended; fedveil.resume, or fedveil run "
                f"--resume {self.folder}, ends it"
            )
        with readable(unchanged_file(path)):
            result: dict[str, Any] = json.loads(path.read_text())
        return result

    @property
    def claims(self) -> tuple[PrivacyClaim, ...]:
        """Return all claims of the result, by every budget line and accountant, possibly none."""
        return tuple(map(PrivacyClaim.from_dict, self.result["claims"]))

    @property
    def claim(self) -> PrivacyClaim | None:
        """Return the headline claim, the one with the fewest conditions. None without claims."""
        return counting(self.claims)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl as dictionaries, one per round.

        The first line, round 0, is from before training and has only its metrics and epsilon. []
        without the file, which is read even if the run has not ended. Lines after a damaged one are
        left out. The file is not compared with the ledger.
        """
        return read_metrics(self.folder / "metrics.jsonl")[0]

    @cached_property
    def stored(self) -> StoredModel:
        """Return the model in model.safetensors: weights, and all that a prediction needs.

        Raises BadInput if the file is missing, or the ledger shows that it was changed.
        """
        return StoredModel.read(unchanged_file(self.folder / "model.safetensors"))

    @cached_property
    def task(self) -> Task:
        """Return a task of the module with the trained weights, its loss and metrics.

        The module is new, or a copy of `model`. Raises BadInput if the module's code is missing or
        not allowed, or its layers differ. The claims of the run are noted on the module, so that
        training it further adds to them.
        """
        stored = self.stored
        if stored.model.name != OWN:
            words = (stored.schema.vocabulary_size or stored.model.words) or 0
            shape, seed = stored.record_shape, self.recipe.seed
            task = stored.model.build(shape, stored.target, seed, words, allow_code=self.allow_code)
        elif self.model is None:
            raise BadInput(
                f"{self.folder} holds the weights of a module of its own, and not its code: "
                "open it with the module, fedveil.open_run(folder, model=...)"
            )
        else:
            task = own_task(self.model, stored.target, stored.model.class_weights)
        if self.recipe.evaluate.metrics is not None:
            set_metrics(task, self.recipe.evaluate.metrics, self.model)
        stored.check_layers(task, self.folder)
        for name, value in task.named(task.parameters).items():
            value.copy_(stored.tensors[name])
        note_claims(task.module, str(self.folder), stored.claims)
        return task

    @property
    def module(self) -> nn.Module:
        """Return the trained module, in eval mode. Raises BadInput as `task` does."""
        return self.task.module.eval()

    def predict(self, rows: object) -> dict[str, Array]:
        """Return the model's predictions by column: "prediction", and "p(LABEL)" for every label.

        `rows` is a table as people write it (a .csv or .parquet file, a data frame, a dict of
        columns), or an array of records where the run was trained on arrays, or a dict of them
        where it was trained on inputs by name. Raises BadInput for rows that do not fit.
        """
        schema = self.stored.schema
        x = self.stored.inputs(_as_table(rows))
        task, parts = self.task, []
        with torch.inference_mode(), one_thread():
            for start in range(0, max(1, count(x)), BATCH):
                piece = taken(x, slice(start, start + BATCH))
                outputs = task.answers(task.parameters, mapped(torch.tensor, piece)).numpy()
                parts.append(schema.decode(outputs, piece))
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def evaluate(self, rows: object) -> dict[str, float]:
        """Return the model's loss and metrics, by name, on rows with a target.

        Arrays are given as {"x": records, "y": targets}, or with inputs by their names beside "y".
        The metrics have no noise: publishing them is outside every claim. Raises BadInput for rows
        that do not fit, and for none.
        """
        schema, rows = self.stored.schema, _as_table(rows)
        x, y = self.stored.inputs(rows), schema.targets(rows)
        if not len(y):
            raise BadInput("there are no rows: nothing can be measured")
        one = np.array([0, 1], dtype=np.int64)
        data = FederatedData(taken(x, slice(1)), y[:1], one, x, y, self.stored.target.classes)
        return evaluate(self.task, self.task.parameters, data)

    def __repr__(self) -> str:
        path = self.folder / "result.json"
        if not path.is_file():
            return f"OpenedRun({str(self.folder)!r}, not ended)"
        try:
            _ = self.result
        except BadInput as e:
            return f"OpenedRun({str(self.folder)!r}, {e})"
        claim = "nothing is claimed" if self.claim is None else self.claim.short
        return f"OpenedRun({str(self.folder)!r}, {self._metrics_text}, {claim})"

    @property
    def _metrics_text(self) -> str:
        """Return the result's metrics as text, such as "loss 0.5, accuracy 0.81"."""
        measured: Mapping[str, float | None] = self.result["metrics"]
        numbers = {name: math.nan if v is None else v for name, v in measured.items()}
        return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: metrics, how the run ended, all claims, and the notes."""
        try:
            result = self.result
        except BadInput:
            return html.escape(repr(self))
        summary = f"<b>{html.escape(result['recipe'])}</b>: {result['rounds']} rounds, "
        summary += f"{html.escape(ended_text(result['stopped']))}; "
        summary += f"{html.escape(self._metrics_text)}; "
        summary += f"<code>{html.escape(str(self.folder))}</code>"
        claims = "".join(claim._repr_html_() for claim in self.claims) or "nothing is claimed"
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in result["notes"])
        return f"<p>{summary}</p>{claims}" + (f"<ul>{notes}</ul>" if notes else "")


def _as_table(rows: object) -> object:
    """Return an array as a table of one column "x", and anything else unchanged."""
    return {"x": rows} if isinstance(rows, np.ndarray | torch.Tensor) else rows


def measure_run(run: OpenedRun, source: Path | None) -> dict[str, float]:
    """Return loss and metrics of a run's model on a table, or on the test split of its own data.

    The metrics have no noise. Raises BadInput if the run's own data are not in a file or have no
    test split, if its metrics have a price, and if secure noise protects the owners of the test
    records.

    Args:
        run: The run.
        source: A table with targets, or the folder with published data sets, None for that in
            FEDVEIL_DATA.
    """
    if source is not None and source.suffix in SUFFIXES:
        _check_takes_tables(run, source)
        return run.evaluate(source)
    if run.recipe.data.name == OWN:
        raise BadInput(
            f"{run.folder} was trained on data from Python, which no file holds: give a table with "
            "--data, or use fedveil.open_run(folder).evaluate"
        )
    data = run.recipe.load_data(source)
    data.check_tested("measuring a run on its own data")
    if run.recipe.evaluate.epsilon is not None:
        raise BadInput(
            f"the metrics of {run.folder} have a price (evaluate.epsilon), and measuring again "
            "would show them without noise: result.json has them, --data measures on other rows"
        )
    if data.test_of_clients and getattr(run.recipe.noise, "source", "seeded") == "secure":
        data.check_secure()
    return evaluate(run.task, run.task.parameters, data)


def predictions_csv(run: OpenedRun, source: Path, id_column: str | None = None) -> str:
    """Return predictions for a file as CSV: a header, and a line per row or non-blank line of text.

    Probabilities have six digits. With `id_column`, the entries of this column of a table come
    first in each line. Raises BadInput unless the file is a table, .npy records or, for models of
    texts, .txt.
    """
    features = run.stored.schema.feature_columns
    ids: dict[str, list[str]] = {}
    if id_column is not None and source.suffix.lower() not in SUFFIXES:
        raise BadInput(f"--id is {id_column!r} and {source} is no table: omit it")
    if source.suffix.lower() in SUFFIXES:
        _check_takes_tables(run, source)
        table = read_table(source)
        if id_column is not None:
            ids[id_column] = [text or "" for text in as_texts(table[id_column])]
        predictions = run.predict(table)
        if id_column in predictions:
            raise BadInput(f"--id is {id_column!r}, which is a column of predictions: rename it")
    elif source.suffix == ".npy":
        predictions = run.predict(_read_npy(source))
    elif source.suffix == ".txt" and features[0].text is not None:
        predictions = run.predict({features[0].name: lines_of(source)})
    else:
        known = ", ".join(SUFFIXES if features[0].text is None else (*SUFFIXES, ".txt"))
        raise BadInput(f"{source} is no input: name a {known} or .npy file")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*ids, *predictions])
    columns = [
        [f"{share:.6f}" for share in column] if name.startswith("p(") else column.tolist()
        for name, column in predictions.items()
    ]
    writer.writerows(zip(*ids.values(), *columns, strict=True))
    return out.getvalue()


def _check_takes_tables(run: OpenedRun, source: Path) -> None:
    """Raise BadInput if the run was trained on arrays, which the table `source` cannot hold."""
    schema = run.stored.schema
    if any(column.shape and column.text is None for column in schema.feature_columns):
        way_out = "use fedveil.open_run(folder).predict" if schema.by_name else "give them as .npy"
        raise BadInput(
            f"{source} is a table and the records of {run.folder} are arrays of shape "
            f"{schema.record_shape}: {way_out}"
        )


def _read_npy(path: Path) -> Array:
    """Read the array of a .npy file. Raises BadInput if it has none or cannot be read."""
    try:
        with warnings_as_errors():
            records = np.load(path, allow_pickle=False)
    except UNREADABLE as e:
        raise BadInput(f"{path} cannot be read: {one_line(e)}") from e
    if not isinstance(records, np.ndarray):
        raise BadInput(f"{path} holds no array: write one with numpy.save")
    return records
