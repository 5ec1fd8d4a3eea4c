"""`[sample]` and `[client]`: who takes part in a round, and what a client computes in it."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedveil.base import checks
from fedveil.base.errors import BadInput
from fedveil.runs.sections.section import RateKeys, Section, in_keys, setting

if TYPE_CHECKING:
    from fedveil.privacy.release import NoisySteps
    from fedveil.privacy.sampling import Sampler
    from fedveil.training.work import Adam, ClientWork

_MOMENTUM = "Momentum of the local steps; every round starts without any. For optimizer 'sgd'."
_WEIGHT_DECAY = (
    "This times the model is added to every local gradient; with optimizer 'adam' to every step "
    "instead (AdamW)."
)


class PoissonSection(Section):
    """`[sample]` of kind "poisson": every client joins independently."""

    kind: Literal["poisson"]
    """Every client joins a round independently of all others, with probability rate."""
    rate: float = setting(checks.RATE)
    """Probability that a client joins a round."""

    def build(self) -> "Sampler":
        """Build the sampler that draws each client independently, with probability `rate`."""
        from fedveil.privacy.sampling import Poisson

        return Poisson(self.rate)


class FixedSection(Section):
    """`[sample]` of kind "fixed": a random cohort of a fixed size."""

    kind: Literal["fixed"]
    """A random cohort of exactly size clients."""
    size: int = setting(checks.COHORT)
    """Clients per round."""
    max_participations: int | None = setting(checks.COUNT, None)
    """How many rounds a client takes part in at most: afterwards it is not drawn. Only where
    clients protect themselves (noise.where 'client' or 'training'). Default: no limit."""

    def build(self) -> "Sampler":
        """Build the sampler of cohorts of exactly `size` clients, with its limit per client."""
        from fedveil.privacy.sampling import FixedSize

        return FixedSize(self.size, self.max_participations)


class RoundRobinSection(Section):
    """`[sample]` of kind "round-robin": clients in turn."""

    kind: Literal["round-robin"]
    """size clients at a time, in turn, around a random order that never changes."""
    size: int = setting(checks.COHORT)
    """Clients per round."""

    def build(self) -> "Sampler":
        """Build the sampler that takes `size` clients at a time, in turn."""
        from fedveil.privacy.sampling import RoundRobin

        return RoundRobin(self.size)


class EveryoneSection(Section):
    """`[sample]` of kind "all": all clients in every round."""

    kind: Literal["all"]
    """All clients in every round."""

    def build(self) -> "Sampler":
        """Build the sampler that takes all clients in every round."""
        from fedveil.privacy.sampling import Everyone

        return Everyone()


SampleSection = Annotated[
    PoissonSection | FixedSection | RoundRobinSection | EveryoneSection, Field(discriminator="kind")
]


class _PersonKeys(Section):
    """The keys of steps that may be about persons."""

    unit: Literal["record", "person"] | None = None
    """What is sampled and clipped: each 'record', or each 'person', by the mean of the gradients of
    that person's records. 'person' needs cap and data that say whose records are whose
    (data.person), and its claim is per person. For kind 'dp-sgd' and noise.where 'site'. Default:
    'record'."""
    cap: int | None = setting(checks.COUNT, None)
    """How many records of one person count at most. A public rule chooses them. With it the claim
    is per person. Under unit 'record' a person's records are sampled and clipped one by one, and
    all of them are accounted together. For kind 'dp-sgd' and noise.where 'site', and data that say
    whose records are whose. Default: every record counts, and the claim is per record."""


class _GradientKeys(Section):
    """The first key of `[client]` of kind "gradient"."""

    kind: Literal["gradient"]
    """One gradient on all of a client's records (FedSGD); the learning rate is server.lr."""


class GradientSection(_PersonKeys, _GradientKeys):
    """`[client]` of kind "gradient": one gradient per round (FedSGD)."""

    def build(self, rounds: int, steps: "NoisySteps | None" = None) -> "ClientWork":
        """Build the client work: one gradient (FedSGD), or the noisy sum that `steps` describe.

        `rounds` has no effect. Raises BadInput for a unit or a cap without noise at the sites.
        """
        from fedveil.training.work import OneGradient, SiteSum

        if steps is not None:
            return SiteSum(steps)
        for key, value in self.present_values("unit", "cap").items():
            raise BadInput(
                f"client.{key} is {value!r} and has no effect without noise.where = 'site': omit it"
            )
        return OneGradient()


class _LocalKeys(Section):
    """The keys of local steps that SGD and DP-SGD share."""

    proximal: float | None = setting(checks.NOT_NEGATIVE, None)
    """This times what the model has moved in the round is added to every local gradient (FedProx).
    Default: 0.0."""
    optimizer: Literal["sgd", "adam"] | None = None
    """What a client makes of its gradients: plain steps or momentum with 'sgd', or 'adam', which
    starts afresh in every round. Default: 'sgd'."""
    beta1: float | None = setting(checks.FRACTION, None)
    """Share of the first moment that a local step keeps. For optimizer 'adam'. Default: 0.9."""
    beta2: float | None = setting(checks.FRACTION, None)
    """Share of the second moment that a local step keeps. For optimizer 'adam'. Default: 0.999."""
    floor: float | None = setting(checks.POSITIVE, None)
    """Added to the root of the second moment. For optimizer 'adam'. Default: 1e-8."""

    def build_adam(self) -> "Adam | None":
        """Build the clients' Adam. None if the optimizer is "sgd".

        Raises BadInput for keys of Adam beside "sgd".
        """
        from fedveil.training.work import Adam

        chosen = self.present_values("beta1", "beta2", "floor")
        if self.optimizer == "adam":
            return Adam(**chosen)
        for key in chosen:
            raise BadInput(f"client.{key} has no effect on sgd: omit it, or use adam")
        return None


class _SgdKeys(Section):
    """The first keys of `[client]` of kind "sgd"."""

    kind: Literal["sgd"]
    """Local SGD from the round's model (FedAvg; with proximal FedProx)."""
    epochs: int | None = setting(checks.STEPS, None)
    """Passes over a client's records per round. Set exactly one of epochs and steps. Default:
    none."""
    steps: int | None = setting(checks.STEPS, None)
    """Local steps per round, whatever the number of records. Set exactly one of epochs and steps.
    Default: none."""
    batch: int = setting(checks.BATCH, 0)
    """Records per local step; 0: all records of the client."""
    lr: float | None = setting(checks.POSITIVE, None)
    """Learning rate, the same in every local step of a round; see schedule. Default: mu and gamma
    are needed."""
    mu: float | None = setting(checks.POSITIVE, None)
    """Makes the learning rate 2 / (mu (k + gamma)) in local step k, counted over all rounds. With
    gamma and steps, without lr and schedule. Default: lr decides."""
    gamma: float | None = setting(checks.POSITIVE, None)
    """Local steps by which the decaying learning rate is shifted; see mu. Default: lr decides."""
    momentum: float = setting(checks.FRACTION, 0.0, description=_MOMENTUM)
    weight_decay: float = setting(checks.NOT_NEGATIVE, 0.0, description=_WEIGHT_DECAY)


class SgdSection(RateKeys, _LocalKeys, _SgdKeys):
    """`[client]` of kind "sgd": local SGD (FedAvg, FedProx)."""

    def build(self, rounds: int, steps: "NoisySteps | None" = None) -> "ClientWork":
        """Build the local SGD of a run of `rounds` rounds. `steps` has no effect.

        Raises BadInput unless exactly one of epochs and steps is set, and either lr, or mu and
        gamma with steps.
        """
        from fedveil.training.cohort import Batches
        from fedveil.training.work import ClientSgd, Decay

        with in_keys("client", size="client.batch"):
            batches = Batches(self.batch, self.epochs, self.steps)
        decay = None
        if self.mu is not None or self.gamma is not None:
            if self.mu is None or self.gamma is None or self.lr is not None:
                raise BadInput("give client.lr, or both client.mu and client.gamma, not a mixture")
            if self.steps is None:
                raise BadInput("client.mu and client.gamma count local steps: give client.steps")
            decay = Decay(self.mu, self.gamma)
        elif self.lr is None:
            raise BadInput("client.lr is missing")
        lr = self.lr if decay is None else decay.rate(0)
        decaying, changing = "client.mu", "client.schedule, client.warmup and client.lr_floor"
        with in_keys("client", decay=decaying, schedule=changing):
            return ClientSgd(
                batches,
                lr or 0.0,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                decay=decay,
                proximal=self.proximal or 0.0,
                adam=self.build_adam(),
                schedule=self.build_rates("client", rounds),
            )


class _DpSgdKeys(Section):
    """The first keys of `[client]` of kind "dp-sgd"."""

    kind: Literal["dp-sgd"]
    """DP-SGD on Poisson batches of the client's own records; with noise.where 'training' and a
    fixed clip of each example's gradient."""
    rate: float = setting(checks.RATE)
    """Probability that a record, or a person, joins a local step."""
    steps: int = setting(checks.STEPS)
    """Local steps per round."""
    lr: float = setting(checks.POSITIVE)
    """Learning rate of the local steps."""
    nominal: int | None = setting(checks.NOMINAL, None)
    """One number of records, or of people where these are sampled, for all clients, by which sums
    are divided, so that the claim covers how many a client has. With server.weights 'uniform'.
    Default: each client's own number, which is then public."""


class _MomentumKeys(Section):
    """The keys of DP-SGD that follow those about persons."""

    momentum: float | None = setting(
        checks.FRACTION, None, description=f"{_MOMENTUM} Default: 0.0."
    )
    weight_decay: float | None = setting(
        checks.NOT_NEGATIVE, None, description=f"{_WEIGHT_DECAY} Default: 0.0."
    )


class DpSgdSection(RateKeys, _LocalKeys, _MomentumKeys, _PersonKeys, _DpSgdKeys):
    """`[client]` of kind "dp-sgd": local DP-SGD."""

    def build(self, rounds: int, steps: "NoisySteps | None" = None) -> "ClientWork":
        """Build the DP-SGD of a run of `rounds` rounds, with the noisy `steps` of its plan.

        AssertionError if `steps` is None: the plan is built first.
        """
        from fedveil.training.work import ClientDpSgd

        assert steps is not None, "DP-SGD is made from its plan"
        with in_keys("client"):
            return ClientDpSgd(
                steps,
                self.lr,
                momentum=self.momentum or 0.0,
                weight_decay=self.weight_decay or 0.0,
                proximal=self.proximal or 0.0,
                adam=self.build_adam(),
                schedule=self.build_rates("client", rounds),
            )


ClientSection = Annotated[GradientSection | SgdSection | DpSgdSection, Field(discriminator="kind")]


def client_cap(client: ClientSection) -> int | None:
    """Return the most records of a person that count, None if claims are not about persons."""
    cap: int | None = getattr(client, "cap", None)
    return cap


def samples_people(client: ClientSection) -> bool:
    """Return whether people join by themselves, in place of records."""
    return getattr(client, "unit", None) == "person" and client_cap(client) is not None
