"""`[server]`, `[evaluate]` and `[engine]`: how the server steps, measures and computes."""

import math
from typing import TYPE_CHECKING, Literal

from fedveil.base import checks
from fedveil.base.errors import BadInput
from fedveil.runs.sections.section import RateKeys, Section, in_keys, setting

if TYPE_CHECKING:
    from fedveil.data.federated import FederatedData
    from fedveil.models.task import Task
    from fedveil.privacy.priced_metrics import PricedMetrics
    from fedveil.privacy.sampling import Sampler
    from fedveil.privacy.site_metrics import SiteMetrics
    from fedveil.runs.recipe import Recipe
    from fedveil.training.aggregates import Aggregate
    from fedveil.training.server import ServerOptimizer


class _StepKeys(Section):
    """The first keys of `[server]`: the step along the mean update."""

    optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    """How the server steps along the mean update: 'sgd' is FedAvg, with momentum FedAvgM; 'adam',
    'yogi' and 'adagrad' are FedAdam, FedYogi and FedAdagrad."""
    lr: float | None = setting(checks.POSITIVE, None)
    """Learning rate of the server. Default: 1.0 for 'sgd', 0.01 for all others."""
    momentum: float = setting(checks.FRACTION, 0.0)
    """Momentum of the server's steps (FedAvgM). For optimizer 'sgd'."""
    beta1: float | None = setting(checks.FRACTION, None)
    """Share of the first moment that a round keeps. For optimizer 'adam' and 'yogi'. Default:
    0.9."""
    beta2: float | None = setting(checks.FRACTION, None)
    """Share of the second moment that a round keeps. For optimizer 'adam' and 'yogi'. Default:
    0.99."""
    floor: float | None = setting(checks.POSITIVE, None)
    """Added to the root of the second moment. For optimizer 'adam', 'yogi' and 'adagrad'. Default:
    0.001."""


class ServerSection(RateKeys, _StepKeys):
    """`[server]`: how the server aggregates updates, and how it steps."""

    aggregate: Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "flame"] = "mean"
    """What the server takes of a round's updates. All but 'mean' look at them one by one, as a
    defence against malicious clients; refused where noise is for the sum."""
    trim: float | None = setting(checks.TRIM, None)
    """Share that is left out at either end of every coordinate. For aggregate 'trimmed-mean'.
    Default: 0.1."""
    malicious: int | None = setting(checks.ANY_COUNT, None)
    """How many malicious clients a round is expected to have. For aggregate 'krum' and
    'multi-krum'. Default: 1."""
    weights: Literal["uniform", "examples"] = "uniform"
    """How clients count in the mean: all alike, or by their numbers of records, of people where
    these are sampled. 'examples' is refused where the claim is about clients."""

    def build(self, rounds: int) -> "ServerOptimizer":
        """Build the server's optimiser for a run of `rounds` rounds.

        Raises BadInput for keys that have no effect on it.
        """
        from fedveil.training.server import AdagradServer, AdamServer, SgdServer, YogiServer

        kinds: dict[str, type[SgdServer | AdamServer | YogiServer | AdagradServer]] = {
            "sgd": SgdServer,
            "adam": AdamServer,
            "yogi": YogiServer,
            "adagrad": AdagradServer,
        }
        moments = ("lr", "beta1", "beta2", "floor")
        known = {"sgd": ("lr", "momentum"), "adagrad": ("lr", "floor")}
        chosen = self.present_values(*moments)
        if self.momentum:
            chosen["momentum"] = self.momentum
        for key in chosen.keys() - set(known.get(self.optimizer, moments)):
            raise BadInput(f"server.{key} has no effect on {self.optimizer}: omit it")
        with in_keys("server"):
            return kinds[self.optimizer](**chosen, schedule=self.build_rates("server", rounds))

    @in_keys("server")
    def build_aggregate(self) -> "Aggregate | None":
        """Build the robust aggregate that replaces the mean. None for the mean itself.

        Raises BadInput for keys that have no effect on it.
        """
        from fedveil.training.aggregates import CoordinateMedian, Flame, Krum, TrimmedMean

        allowed = {"trim": ("trimmed-mean",), "malicious": ("krum", "multi-krum")}
        for key in self.present_values(*allowed):
            if self.aggregate not in allowed[key]:
                raise BadInput(f"server.{key} has no effect on {self.aggregate}: omit it")
        expected = 1 if self.malicious is None else self.malicious
        match self.aggregate:
            case "mean":
                return None
            case "median":
                return CoordinateMedian()
            case "trimmed-mean":
                return TrimmedMean(**self.present_values("trim"))
            case "krum":
                return Krum(expected)
            case "multi-krum":
                return Krum(expected, chosen=None)
            case "flame":
                return Flame()


class EvaluateSection(Section):
    """`[evaluate]`: when the model is measured, by which metrics, and at which price."""

    every: int | None = setting(checks.COUNT, None)
    """Rounds from one measurement on the test split to the next; the last round is always measured.
    Default: 1; with epsilon, the last round and three on the way."""
    epsilon: float | None = setting(checks.BUDGET, None)
    """What all measurements of the run may cost an owner of the records that they are made on:
    accuracy and other means over records, and the loss, get Gaussian noise, and a charge of their
    own. Measured are the held-out owners (data.test); without test records the clients themselves,
    whose budget.epsilon then pays for updates and metrics together. Default: test records are
    measured in the clear."""
    where: Literal["server", "site"] | None = None
    """Who measures. For epsilon. 'server': whoever has the test records. 'site': in a federation,
    each site on the people whom data.test holds out of its table, with noise of its own; for claims
    about records or people. Default: 'server'."""
    delta: float | None = setting(checks.DELTA, None)
    """The delta of that epsilon. For epsilon. Default: budget.delta."""
    loss_clip: float | None = setting(checks.LOSS_CLIP, None)
    """What a record's loss counts as at most, chosen without looking at records. For epsilon.
    Default: twice the logarithm of the number of labels; needed for numbers."""
    metrics: list[str] | None = setting(checks.Rule(checks.check_metrics), None)
    """Measured on the test split beside the loss, the first also drawn. Labels: 'accuracy', 'top-K'
    (such as 'top-5'), 'balanced-accuracy' and 'f1-macro' (means over labels), 'f1' and 'auroc' (of
    label 1 if there are two, else means over labels), 'perplexity' (per token). Numbers: 'mae',
    'rmse', 'r2'. A Task's own come first. Default: 'accuracy' for labels, only the loss for
    numbers."""
    clients: bool | None = None
    """Whether the model is measured across clients at the end: loss, accuracy and other means over
    examples on each client's own records, and of these the mean over clients and that of the lowest
    and highest tenth. It comes from private data, is outside every claim, and is refused with
    secure noise. Default: false."""
    clients_every: int | None = setting(checks.COUNT, None)
    """Rounds from one such measurement to the next. For clients true. Default: only at the end."""
    diagnostics: bool | None = None
    """Whether shares clipped, signal/noise, cohort sizes and refused reports are shown and kept;
    they come from private data and are outside every claim. Default: true with seeded noise, false
    with secure noise."""

    def build_price(
        self, recipe: "Recipe", sampler: "Sampler", data: "FederatedData", task: "Task"
    ) -> "PricedMetrics | SiteMetrics":
        """Build the noisy metrics that `epsilon`, which must be set, pays for over all rounds.

        Raises BadInput without a [budget], for a metric that cannot be priced, for data in which
        nobody has to be paid for, and for numbers without loss_clip. Where sites measure, also for
        claims about whole sites, and for data that are not at sites.
        """
        from fedveil.privacy.accounting.claims import Relation, Unit
        from fedveil.privacy.priced_metrics import measurement_rounds, priced_metrics
        from fedveil.privacy.site_metrics import site_metrics
        from fedveil.training.evaluate import owners_to_measure, priced_names

        if recipe.budget is None:
            raise BadInput(
                "evaluate.epsilon is given and nothing is claimed of the training: omit it, "
                "or add noise that is claimed, and a [budget]"
            )
        names = priced_names(task)
        loss_clip = self.loss_clip
        if loss_clip is None:
            if not data.classes:
                raise BadInput(
                    "evaluate.loss_clip is missing: for numbers nobody knows in advance how large "
                    "a loss may be; give what a record's loss counts as at most"
                )
            loss_clip = 2 * math.log(max(data.classes, 2))
        budget = recipe.budget.build(recipe.noise.source, self.epsilon, self.delta)
        rounds = measurement_rounds(recipe.rounds, self.every)
        if self.where == "site":
            self._check_at_sites(recipe, data)
            of_people = getattr(recipe.client, "cap", None) is not None
            with in_keys("evaluate"):
                return site_metrics(
                    names,
                    data.clients,
                    budget=budget,
                    rounds=rounds,
                    loss_clip=loss_clip,
                    unit=Unit.PERSON if of_people else Unit.RECORD,
                )
        owners = owners_to_measure(data)
        unit = Unit.RECORD if owners.single_records else Unit.CLIENT
        if data.cap is not None and data.test_persons is not None and not owners.of_clients:
            unit = Unit.PERSON
        with in_keys("evaluate"):
            return priced_metrics(
                names,
                len(owners),
                budget=budget,
                rounds=rounds,
                loss_clip=loss_clip,
                of_clients=owners.of_clients,
                relation=sampler.relation if owners.of_clients else Relation.ZERO_OUT,
                unit=unit,
            )

    def _check_at_sites(self, recipe: "Recipe", data: "FederatedData") -> None:
        """Raise BadInput for what sites cannot measure: see `build_price`."""
        if not data.elsewhere:
            raise BadInput(
                "evaluate.where is 'site' and this run has no sites that measure: deploy it "
                "(fedveil deploy), or omit it (--set evaluate.where=none)"
            )
        if recipe.client.kind != "dp-sgd" and recipe.noise.where != "site":
            raise BadInput(
                "evaluate.where is 'site' and the claim is about each site as a whole, of which "
                "the people that it measures are a part: use a recipe that protects records or "
                "people (sites, dp-sgd), or leave evaluate.epsilon out"
            )
        if len(data.test_y):
            raise BadInput(
                f"evaluate.where is 'site' and the server has {len(data.test_y)} test records: "
                "leave out --test, or evaluate.where"
            )


class EngineSection(Section):
    """`[engine]`: how a round is computed. No key changes a result beyond rounding."""

    kind: Literal["processes", "ray"] | None = None
    """Where clients are computed: on processes of this machine, or on a Ray cluster (pip install
    'fedveil[ray]'); it changes no result. Default: 'processes'."""
    address: str | None = setting(checks.Rule(checks.check_address), None)
    """The Ray cluster to join: 'auto', or the head's 'host:port'. For kind 'ray'. Default: one of
    its own on this machine, which ends with the run."""
    mode: Literal["vectorised", "looped", "fastest"] | None = None
    """Whether the clients of a chunk are one computation or one after the other; it changes
    rounding only. 'fastest' measures both before the first round and records which it was: another
    machine may choose the other. Default: by a rule from model and records, the same everywhere;
    with secure noise 'looped' where the machine's kernels let clients see each other."""
    timings: dict[Literal["vectorised", "looped"], float] | None = None
    """What mode 'fastest' has measured, which a run records beside its choice, in seconds per
    client and local step. Default: in every recipe that somebody writes."""
    chunk: int = setting(checks.ANY_COUNT, 0)
    """Clients that are summed together; 0: as many as memory holds. It changes rounding only."""
    memory: int = setting(checks.COUNT, 512)
    """MiB per worker for the clients of a chunk. For chunk 0."""
    workers: int = setting(checks.WORKERS, 0)
    """Processes; 0: one per core of the machine or the cluster. Their number changes no result."""
    checkpoint: int = setting(checks.COUNT, 1)
    """Rounds from one checkpoint to the next, from which --resume continues; with secure noise
    always 1."""

    def check_values(self, where: str = "engine") -> None:
        """Raise BadInput for values out of range, an address without "ray", or timings alone."""
        super().check_values(where)
        if self.address is not None and self.kind != "ray":
            raise BadInput(
                f"engine.address is {self.address!r} and engine.kind is not 'ray': omit it, "
                "or set that"
            )
        if self.timings is not None and self.mode in (None, "fastest"):
            raise BadInput("engine.timings is what a run records beside engine.mode: omit it")
