"""`[model]`: which model is trained."""

import itertools
import math
from typing import TYPE_CHECKING, Literal

from fedveil.base.checks import (
    CLASS_WEIGHT,
    CODE,
    MODEL_NAMES,
    NEXT_WORD,
    OWN,
    TEXT_MODELS,
    Each,
    whole,
)
from fedveil.base.errors import BadInput
from fedveil.runs.sections.data_section import Value
from fedveil.runs.sections.section import Section, in_keys, setting

if TYPE_CHECKING:
    from fedveil.base.inputs import Inputs, Target
    from fedveil.data.federated import FederatedData
    from fedveil.models.task import Task

_MOST_PARAMETERS, _MOST_LAYERS = 1 << 25, 100
_VOCABULARY = whole(2, "at least padding and one word are needed", 10_000_000)
_SIZES = {
    "hidden": ("mlp", "lstm", "lstm-lm"),
    "embedding": TEXT_MODELS,
    "layers": ("transformer", "transformer-lm"),
    "heads": ("transformer", "transformer-lm"),
    "words": TEXT_MODELS,
}
"""Which models each key of sizes is for."""

_HIDDEN = {"mlp": (200,), "lstm": (64,), "lstm-lm": (64,)}


class ModelSection(Section):
    """`[model]`: the model that is trained, and its first weights."""

    name: str = setting(MODEL_NAMES)
    """The model. linear predicts a number, mlp a number or a label, all others labels; fu-cnn and
    small-cnn take images of 28 x 28, vgg of 32 x 32; lstm and transformer read texts, lstm-lm and
    transformer-lm predict their next words; code is what path makes. May be left out where path is
    given."""
    path: str | None = None
    """A function that makes the model, an nn.Module, or a Task with a loss and metrics of its own,
    as 'net.py:make'; the file is relative to the current directory. Its code is run only with
    --allow-code (in Python, allow_code=True): a recipe could otherwise run anybody's. A run records
    what it made, and is not resumed with another. Required for model
    'code'. Default: none."""
    options: dict[str, Value | list[Value]] | None = None
    """Keyword arguments of the function in path. Parameters called shape and classes are filled in:
    the shape of a record, and the number of labels (0 for numbers). Default: none."""
    hidden: list[int] | None = setting(Each(whole(1, "the width of a layer starts at 1")), None)
    """Widths of the hidden layers, in units. For mlp, lstm and lstm-lm. Default: [200] for mlp,
    [64] for the others."""
    embedding: int | None = setting(whole(1, most=10_000), None)
    """How many numbers stand for a word. For models of texts. Default: 32."""
    layers: int | None = setting(whole(1, most=100), None)
    """How many layers of attention. For transformer and transformer-lm. Default: 2."""
    heads: int | None = setting(whole(1, most=100), None)
    """How many heads a layer of attention has; embedding is a multiple of it. For transformer and
    transformer-lm. Default: 4."""
    words: int | None = setting(_VOCABULARY, None)
    """How many different numbers words have in records that are arrays; 0 is padding. For models of
    texts. Default: the data's vocabulary tells."""
    weights: str | None = None
    """A .safetensors file with the model's first weights, relative to the current directory; names
    and shapes must be the model's. Claims take them as public. Default: they are drawn from the
    seed."""
    new: list[str] | None = None
    """Patterns of names, such as 'head.*', that are not read from weights and keep what was drawn.
    Default: every weight is read."""
    freeze: list[str] | None = None
    """Patterns of parameters' names, such as 'encoder.*', that do not learn. Claims take them as
    public. Default: every parameter learns, but for those that the code froze."""
    class_weights: list[float] | None = setting(Each(CLASS_WEIGHT), None)
    """One number per label, in the order of labels, that multiplies the loss of its records before
    anything is clipped: larger for rare labels. Claims take them as public, so do not compute them
    from clients' records. Default: all records count alike."""
    batch_norm: Literal["group"] | None = None
    """'group' puts a group norm in place of every batch norm, which no claim could cover, with the
    same scale and shift. Default: a model with batch norm is refused."""
    sha256: dict[Literal["path", "weights"], str] | None = None
    """What fedveil deploy records of the files in path and weights: their SHA-256, so that server
    and sites use the same. Not for authors. Default: files are not compared."""
    digest: str | None = None
    """What a run records of a module that came from Python, from path or with weights, so that no
    other continues it. Not for authors. Default: the run fills it in."""

    @property
    def needs_digest(self) -> bool:
        """Return whether the model depends on more than the recipe, so that runs record its digest.

        True for modules from Python, from `path` and with `weights`.
        """
        return self.name in (OWN, CODE) or self.weights is not None

    def check_values(self, where: str = "model") -> None:
        """Raise BadInput for values out of range, or keys that contradict each other."""
        super().check_values(where)
        if self.name == CODE and self.path is None:
            raise BadInput(f"model.name is {CODE!r}: give model.path, such as 'net.py:make'")
        if self.path is not None and self.name != CODE:
            raise BadInput(f"model.path is given beside model.name = {self.name!r}: leave one out")
        if self.options is not None and self.path is None:
            raise BadInput("model.options is for the function in model.path: omit it")
        for key in ("weights", "new", "freeze", "batch_norm"):
            if self.name == OWN and getattr(self, key) is not None:
                raise BadInput(f"model.{key} has no effect on a module from Python: do it there")
        if self.new is not None and self.weights is None:
            raise BadInput("model.new says what model.weights leaves out: give both, or neither")
        for key in self.sha256 or {}:
            if getattr(self, key) is None:
                raise BadInput(f"model.sha256.{key} is about model.{key}: give both, or neither")
        if self.digest is not None and not self.needs_digest:
            raise BadInput("model.digest is what a run records of an own module: omit it")

    def check_allowed(self, allow_code: bool) -> None:
        """Raise BadInput if the recipe names code (model.path) and `allow_code` is False."""
        if self.path is not None and not allow_code:
            raise BadInput(
                f"model.path is {self.path!r}: a recipe may come from anybody, so the code it "
                "names is run only with --allow-code (fedveil run, evaluate, predict) or "
                "allow_code=True (Python); look at the file first"
            )

    @in_keys("model")
    def build(
        self,
        shape: "Inputs[tuple[int, ...]]",
        target: "Target",
        seed: int,
        words: int = 0,
        *,
        allow_code: bool = False,
    ) -> "Task":
        """Build the model as a task, for records of a shape and a target.

        First weights are drawn from `seed`. Then `weights`, `batch_norm` and `freeze` have their
        effect, in this order, so that the weights may be those of a module with batch norm. Raises
        BadInput for keys that contradict each other, files that cannot be used, and a model that
        does not fit.

        Args:
            shape: The shape of a record, or of each input by name.
            target: What is predicted.
            seed: The recipe's seed.
            words: The size of the vocabulary (`vocabulary`), for models of texts.
            allow_code: Whether the code that the recipe names may be run.
        """
        import torch

        from fedveil.models.metrics import default_loss
        from fedveil.models.task import Task
        from fedveil.models.zoo import without_batch_norm
        from fedveil.runs.modules import check_file, freeze_, made_by_code, read_weights_

        self.check_values()
        self.check_allowed(allow_code)
        for key in self.present_values(*_SIZES):
            if self.name not in _SIZES[key]:
                raise BadInput(f"model.{key} has no effect on {self.name!r}: omit it")
        sha256 = dict[str, str]((self.sha256 or {}).items())
        loss: Task | None = None
        if self.path is None:
            task = self._build_shipped(shape, target, seed, words)
            if not any((self.weights, self.freeze, self.batch_norm, self.class_weights)):
                return task
            module = task.module
        else:
            check_file("model.path", self.path.rpartition(":")[0], sha256.get("path"))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                made = made_by_code(self.path, self.options or {}, shape, target.classes)
            module, loss = (made.module, made) if isinstance(made, Task) else (made, None)
        if self.weights is not None:
            check_file("model.weights", self.weights, sha256.get("weights"))
            read_weights_(module, self.weights, self.new or [])
        if self.batch_norm is not None:
            module = without_batch_norm(module)
        freeze_(module, self.freeze or [])
        if loss is None:
            return Task(module, *default_loss(target, self.class_weights))
        if self.class_weights is not None:
            raise BadInput("model.class_weights is given and the Task has a loss: leave one out")
        return Task(module, loss.loss, loss.measures)

    def vocabulary(self, data: "FederatedData") -> int:
        """Return the size of the vocabulary of the data's texts, padding included.

        Raises BadInput if neither the data nor `words` give it, if they contradict each other, or
        if a record's number is beyond it.
        """
        from fedveil.base.inputs import single

        known = 0 if data.schema is None else data.schema.vocabulary_size
        if known:
            if self.words not in (None, known):
                raise BadInput(
                    f"model.words is {self.words} and the data's vocabulary has {known}: omit it"
                )
            return known
        if self.words is None or isinstance(data.x, dict) or data.x.dtype.kind not in "iu":
            raise BadInput(
                f"model {self.name!r} reads texts and the records have no vocabulary: declare a "
                "column of texts (data.columns.NAME.length), or give model.words for records that "
                "are rows of whole numbers"
            )
        for name, records in (("", data.x), ("test ", single(data.test_x))):
            if not len(records):  # they are at their sites
                continue
            low, high = int(records.min()), int(records.max())
            if low < 0 or high >= self.words:
                raise BadInput(
                    f"model.words is {self.words} and {name}records have numbers from {low} to "
                    f"{high}: they are to be 0 to {self.words - 1}"
                )
        return self.words

    def _build_shipped(
        self, shape: "Inputs[tuple[int, ...]]", target: "Target", seed: int, words: int
    ) -> "Task":
        """Build a model that comes with fedveil, as a task. Arguments are as in `build`.

        Raises BadInput if it does not fit the records or the target, or has too many parameters.
        """
        from fedveil.models.zoo import Reading, build_task

        if isinstance(shape, dict):
            raise BadInput(
                f"model {self.name!r} takes one array per record and the data have inputs by name "
                f"({', '.join(shape)}): bring a module (fedveil.run(model=...))"
            )
        if self.name in NEXT_WORD:
            if not target.classes or target.shape != shape:
                raise BadInput(
                    f"model {self.name!r} predicts the next word in each place of a text and the "
                    f"data have {target}: make a column of texts the target, or use another model"
                )
        elif target.shape:
            raise BadInput(
                f"model {self.name!r} predicts one label or one number per record and the data "
                f"have {target}: bring a module (model.path, or fedveil.run(model=...))"
            )
        hidden = tuple(self.hidden or ()) or _HIDDEN.get(self.name, ())
        reading, outputs, count = None, target.classes or 1, 0
        if self.name in TEXT_MODELS:
            reading = Reading(words, **self.present_values("embedding", "layers", "heads"))
            count = reading.count(self.name, shape, hidden, outputs)
        elif len(hidden) > _MOST_LAYERS:
            raise BadInput(f"model.hidden has {len(hidden)} layers: use at most {_MOST_LAYERS}")
        else:
            widths = (math.prod(shape), *hidden, outputs)
            if min(widths) > 0:
                count = sum((a + 1) * b for a, b in itertools.pairwise(widths))
        if count > _MOST_PARAMETERS:
            raise BadInput(
                f"the model's sizes ask for {count:,} parameters: at most {_MOST_PARAMETERS:,} are "
                "possible"
            )
        return build_task(
            self.name, shape, target.classes, seed=seed, hidden=hidden, reading=reading
        )
