"""The model file of a run: the weights, and all that a prediction needs."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from fedveil.base.errors import BadInput
from fedveil.base.identity import identity
from fedveil.base.inputs import Inputs, Target, join_inputs, mapped
from fedveil.data.columns import Column
from fedveil.data.federated import Array, FederatedData
from fedveil.data.schema import TableSchema
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.first_weights import ABOUT
from fedveil.runs.sections.data_section import ModelSection
from fedveil.training.session import Training


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A trained model with all that a prediction needs.

    Attributes:
        tensors: The trainable weights by name.
        model: The recipe's [model] section.
        record_shape: The shape of a record, or of each input by name.
        record_type: The type of a record likewise, "" in older files.
        target: What is predicted.
        claims: What the run claims.
        layers: A digest of the module's layers as they print, and of its frozen weights.
        schema: How rows of a table become records. Records that were arrays are a column "x", or
            one column per input.
    """

    tensors: dict[str, torch.Tensor]
    model: ModelSection
    record_shape: Inputs[tuple[int, ...]]
    record_type: Inputs[str]
    target: Target
    claims: tuple[PrivacyClaim, ...]
    layers: str
    schema: TableSchema

    @classmethod
    def of(
        cls,
        model: ModelSection,
        training: Training,
        params: torch.Tensor,
        claims: tuple[PrivacyClaim, ...],
    ) -> "StoredModel":
        """The model of a training with the parameters `params`."""
        task, data = training.task, training.data
        tensors = {name: value.clone() for name, value in task.named(params).items()}
        layers = layers_of(task)
        schema, types = data.schema or arrays(data), mapped(lambda x: str(x.dtype), data.x)
        return cls(tensors, model, data.record_shape, types, data.target, claims, layers, schema)

    def inputs(self, rows: object) -> Inputs[Array]:
        """The records of a table, in the shape and type that the model was trained on."""
        encoded = self.schema.encode(rows)
        if not self.record_type:
            return encoded

        def cast(parts: list[Any]) -> Array:
            array, shape, kind = parts
            records: Array = array.reshape(len(array), *shape).astype(kind, copy=False)
            return records

        return join_inputs([encoded, self.record_shape, self.record_type], cast)

    def check_layers(self, task: Task, where: Path) -> None:
        """Refuse weights for another module than the one they were trained in."""
        shapes = {name: tuple(v.shape) for name, v in task.named(task.parameters).items()}
        wanted = {name: tuple(value.shape) for name, value in self.tensors.items()}
        for name in {**wanted, **shapes}:
            if shapes.get(name) != wanted.get(name):
                raise BadInput(
                    f"{name!r} of the module is {shapes.get(name, 'missing')}, and "
                    f"{wanted.get(name, 'missing')} in {where}: give the module that was trained"
                )
        if layers_of(task) != self.layers:
            raise BadInput(
                f"the module has the parameters of {where} beside other layers, such as another "
                "activation, or other frozen weights: give the module that was trained"
            )

    def to_bytes(self) -> bytes:
        """A safetensors file. The same model always gives the same bytes."""
        about = {
            "model": self.model.model_dump(),
            "record_shape": mapped(list, self.record_shape),
            "record_type": self.record_type,
            "target": asdict(self.target),
            "claims": [claim.to_dict() for claim in self.claims],
            "layers": self.layers,
            "schema": self.schema.to_dict(),
        }
        return safetensors.torch.save(self.tensors, {ABOUT: json.dumps(about)})

    @classmethod
    def read(cls, path: Path) -> "StoredModel":
        """Read the file that a run left."""
        if not path.is_file():
            raise BadInput(f"{path} is missing: the run has not ended (fedveil run --resume)")
        try:
            with safetensors.safe_open(path, framework="pt") as f:
                about: dict[str, Any] = json.loads(f.metadata()[ABOUT])
                tensors = {name: f.get_tensor(name) for name in list(f.keys())}
            return cls(
                tensors,
                ModelSection.model_validate(about["model"]),
                mapped(lambda shape: tuple(map(int, shape)), about["record_shape"]),
                about.get("record_type", ""),
                _target(about),
                tuple(map(PrivacyClaim.from_dict, about["claims"])),
                str(about["layers"]),
                TableSchema.from_dict(about["schema"]),
            )
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
            raise BadInput(
                f"{path} is not a model that a run left: {' '.join(str(e).split())}"
            ) from e


def _target(about: dict[str, Any]) -> Target:
    """What is predicted. Older files have the number of labels only."""
    said = about.get("target") or {"classes": about["classes"]}
    return Target(int(said["classes"]), tuple(said.get("shape", ())), bool(said.get("several")))


def layers_of(task: Task) -> str:
    """A digest of the layers as they print, and of the frozen weights."""
    return hashlib.sha256(identity((str(task.module), task.frozen)).encode()).hexdigest()


def arrays(data: FederatedData) -> TableSchema:
    """Records that are arrays as they are, and labels that are called by their numbers."""
    inputs = data.x if isinstance(data.x, dict) else {"x": data.x}
    columns = tuple(_column(name, array) for name, array in inputs.items())
    return TableSchema(columns, Column.of_target("y", data.target), isinstance(data.x, dict))


def _column(name: str, array: Array) -> Column:
    if array.ndim == 1:
        return Column(name, mean=0.0, std=1.0)
    return Column(name, shape=tuple(array.shape[1:]), whole=array.dtype.kind in "iu")
