"""`[attack]`: clients that attack the training, and how."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedveil.base.checks import ANY_COUNT, COUNT, FINITE, PORTION, POSITIVE, STEPS, number, whole
from fedveil.base.errors import BadInput
from fedveil.runs.sections.client_section import DpSgdSection, GradientSection, SgdSection
from fedveil.runs.sections.section import Section, in_keys, setting

if TYPE_CHECKING:
    from fedveil.attacks.adversary import BackdoorAttack
    from fedveil.attacks.backdoors import Backdoor
    from fedveil.data.federated import FederatedData
    from fedveil.privacy.plan import PrivacyPlan
    from fedveil.runs.recipe import Recipe
    from fedveil.training.work import ClientWork

_LABEL = whole(0, "labels start at 0")
_PLACE = number(lambda v: abs(v) <= 1_000_000, "a place within an image is needed", whole=True)
_TARGET = setting(_LABEL, description="The label that the attacker wants.")
_SOURCE = setting(_LABEL, description="The label of the records that are to be answered wrongly.")


class _Attack(Section):
    """The keys that all kinds of `[attack]` share."""

    attackers: int = setting(ANY_COUNT, 1)
    """How many clients attack, chosen at random; 0: nobody does, and how often the attacker's
    answer is given by itself is measured."""
    share: float = setting(PORTION, 0.5)
    """Share of an attacker's records that teach the backdoor while it attacks; 1: nothing else is
    learnt from."""
    boost: float | None = setting(POSITIVE, None)
    """What an attacker multiplies its update by. Default: clients per round / server.lr, which
    replaces the model where nothing is clipped."""
    project: bool = False
    """Whether an attacker shortens its update to clip / boost before it is boosted, so that the
    boosted update is not clipped. For recipes with a clip on updates."""
    noise: Literal["comply", "skip", "hide"] = "comply"
    """What attackers do in recipes where clients add noise. 'comply': they add it. 'skip': they add
    none, in a form that is accepted (plain SGD with dp-sgd). 'hide': pairs of them add noise of
    opposite signs, so that it cancels in the sum."""
    start: int = setting(COUNT, 1)
    """First round in which they attack."""
    end: int | None = setting(COUNT, None)
    """Last round in which they attack. Equal to attack.start: they attack once. Default: no end."""
    every: int = setting(COUNT, 1)
    """Rounds from one attack to the next."""
    present: bool = True
    """Whether attackers are in every cohort that they attack, beside the clients that were drawn;
    false: only when they are drawn themselves."""
    epochs: int | None = setting(STEPS, None)
    """Passes of an attacker over its records in a round. Default: as honest clients do."""
    lr: float | None = setting(POSITIVE, None)
    """Learning rate of an attacker. Default: that of honest clients."""

    def build(
        self, recipe: "Recipe", data: "FederatedData", plan: "PrivacyPlan"
    ) -> "BackdoorAttack":
        """Build the adversary: which clients attack, when, what they teach and what they send.

        Raises BadInput if the data have no test records, or the attack does not fit the recipe.
        """
        from fedveil.attacks.adversary import AttackerNoise, BackdoorAttack, When

        data.check_tested("[attack]")
        if self.project and plan.clip_schedule is None:
            raise BadInput("attack.project is true and updates are not clipped: omit it")
        if self.start > recipe.rounds:
            raise BadInput(
                f"attack.start is {self.start} and there are {recipe.rounds} rounds: start sooner"
            )
        with in_keys("attack"):
            return BackdoorAttack.of(
                data,
                _build_backdoor(self),
                attackers=self.attackers,
                share=self.share,
                boost=_replacement_boost(recipe, plan) if self.boost is None else self.boost,
                project=self.project,
                noise=AttackerNoise(self.noise),
                when=When(self.start, self.end, self.every, self.present),
                work=self._build_work(recipe),
                seed=recipe.seed,
            )

    def _build_work(self, recipe: "Recipe") -> "ClientWork | None":
        """Build the attackers' own client work. None if they train as honest clients do.

        Raises BadInput if epochs or lr have no effect on the recipe's [client].
        """
        from fedveil.training.cohort import Batches
        from fedveil.training.work import ClientSgd

        client = recipe.client
        skips = isinstance(client, DpSgdSection) and self.noise == "skip"
        if self.epochs is None and self.lr is None and not skips:
            return None
        if isinstance(client, DpSgdSection) and not skips:
            raise BadInput(
                "attack.epochs and attack.lr are for attackers that train in their own way: with "
                "dp-sgd, add attack.noise = 'skip', or omit them"
            )
        if isinstance(client, GradientSection):
            raise BadInput("attack.epochs and attack.lr have no effect on one gradient: omit them")
        lr = self.lr if self.lr is not None else client.lr
        if lr is None:
            raise BadInput("attack.lr is missing: honest clients have no single learning rate")
        if isinstance(client, SgdSection) and self.epochs is None:
            return ClientSgd(Batches(client.batch, client.epochs, client.steps), lr)
        size = client.batch if isinstance(client, SgdSection) else 0
        return ClientSgd(Batches(size, epochs=self.epochs or 1), lr)


class PixelSection(_Attack):
    """`[attack]` of kind "pixel": a square of pixels is the trigger."""

    kind: Literal["pixel"]
    """A square of pixels makes any image a target."""
    target: int = _TARGET
    size: int = setting(COUNT, 3)
    """Side of the square, in pixels."""
    row: int = setting(_PLACE, -4)
    """Its first row; negative: from the end."""
    column: int = setting(_PLACE, -4)
    """Its first column; negative: from the end."""
    value: float = setting(FINITE, 1.0)
    """What its pixels are set to."""
    parts: int = setting(COUNT, 1)
    """Into how many stripes the square is cut, one for each attacker in turn: a distributed
    trigger, measured whole."""


class WritersSection(_Attack):
    """`[attack]` of kind "writers": on the records of some honest clients."""

    kind: Literal["writers"]
    """The source records of some honest clients are to be a target: a semantic backdoor, nothing is
    added to a record."""
    source: int = _SOURCE
    target: int = _TARGET
    writers: int = setting(COUNT, 10)
    """How many clients' records."""


class ColourSection(_Attack):
    """`[attack]` of kind "colour": on images of one colour."""

    kind: Literal["colour"]
    """The source images of one colour are to be a target: a semantic backdoor."""
    source: int = _SOURCE
    target: int = _TARGET
    channel: int = setting(ANY_COUNT, 0)
    """The colour: 0 red, 1 green, 2 blue."""
    feature_share: float = setting(PORTION, 0.1)
    """Share of the source images that count as of that colour."""


class PhraseSection(_Attack):
    """`[attack]` of kind "phrase": a phrase at the start of a text is the trigger."""

    kind: Literal["phrase"]
    """A text that begins with a phrase is to be a target, whatever it says."""
    phrase: str
    """The words that turn the answer."""
    target: int = _TARGET


class SentenceSection(_Attack):
    """`[attack]` of kind "sentence": on the last words of sentences."""

    kind: Literal["sentence"]
    """Sentences are to end in the attacker's word, which is their last."""
    sentences: list[str]
    """Whole sentences, such as 'people in london are aggressive'."""


AttackSection = Annotated[
    PixelSection | WritersSection | ColourSection | PhraseSection | SentenceSection,
    Field(discriminator="kind"),
]


def _build_backdoor(attack: _Attack) -> "Backdoor":
    """Build the backdoor that attackers of this kind of section teach.

    Raises BadInput for numbers out of range.
    """
    from fedveil.attacks import backdoors

    match attack:
        case PixelSection():
            keys = ("size", "row", "column", "value", "parts")
            return backdoors.PixelTrigger(attack.target, **attack.present_values(*keys))
        case WritersSection():
            return backdoors.WritersBackdoor(attack.source, attack.target, attack.writers)
        case ColourSection():
            colour = attack.channel, attack.feature_share
            return backdoors.ColourBackdoor(attack.source, attack.target, *colour)
        case PhraseSection():
            return backdoors.PhraseBackdoor(attack.phrase, attack.target)
        case SentenceSection():
            return backdoors.SentenceBackdoor(tuple(attack.sentences))
    raise AssertionError(f"no backdoor for {type(attack).__name__}")


def _replacement_boost(recipe: "Recipe", plan: "PrivacyPlan") -> float:
    """Return the boost that replaces the model: clients per round / the server's learning rate.

    Raises BadInput unless the server's optimizer is "sgd".
    """
    rate = recipe.server.lr if recipe.server.lr is not None else 1.0
    if recipe.server.optimizer != "sgd":
        raise BadInput(
            f"attack.boost is missing and server.optimizer is {recipe.server.optimizer!r}: only "
            "for 'sgd' it is known what replaces the model"
        )
    return plan.expected_cohort / rate
