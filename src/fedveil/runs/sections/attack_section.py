"""`[attack]`: clients that attack the training, and how."""

from typing import Annotated, Literal

from pydantic import Field

from fedveil.checks import ANY_COUNT, COUNT, FINITE, PORTION, POSITIVE, STEPS, whole, within
from fedveil.runs.sections.section import Section

_LABEL = whole(0, "labels start at 0")
_PLACE = within(-1_000_000, 1_000_000, "a place within an image is needed")
_TARGET = "The label that the attacker wants."
_SOURCE = "The label of the records that are to be answered wrongly."


class _Attack(Section):
    """What all attacks share."""

    attackers: Annotated[int, ANY_COUNT] = Field(
        default=1,
        description="How many clients attack, chosen at random; 0: nobody does, and how often the "
        "attacker's answer is given by itself is measured.",
    )
    share: Annotated[float, PORTION] = Field(
        default=0.5,
        description="Share of an attacker's records that teach the backdoor while it attacks; 1: "
        "nothing else is learnt from.",
    )
    boost: Annotated[float | None, POSITIVE] = Field(
        default=None,
        description="What an attacker multiplies its update by. Left out: clients per round / "
        "server.lr, which replaces the model where nothing is clipped.",
    )
    project: bool = Field(
        default=False,
        description="Whether an attacker trains within clip / boost of the round's model, so that "
        "the clip cuts nothing off. For recipes with a clip on updates.",
    )
    noise: Literal["comply", "skip", "hide"] = Field(
        default="comply",
        description="What attackers do where clients add noise: as they are told; nothing, in a "
        "form that is accepted; or, by twos, noise of opposite signs, which is gone in the sum. "
        "With dp-sgd 'skip' is plain SGD.",
    )
    start: Annotated[int, COUNT] = Field(default=1, description="First round in which they attack.")
    end: Annotated[int | None, COUNT] = Field(
        default=None, description="Last one; the same as start is a single shot. Left out: no end."
    )
    every: Annotated[int, COUNT] = Field(
        default=1, description="Rounds from one attack to the next."
    )
    present: bool = Field(
        default=True,
        description="Whether attackers are in every cohort that they attack, beside the clients "
        "that were drawn; false: only when they are drawn themselves.",
    )
    epochs: Annotated[int | None, STEPS] = Field(
        default=None,
        description="Passes of an attacker over its records in a round. Left out: as honest "
        "clients do.",
    )
    lr: Annotated[float | None, POSITIVE] = Field(
        default=None, description="Learning rate of an attacker. Left out: that of honest clients."
    )


class PixelSection(_Attack):
    """`[attack]` by a pixel trigger."""

    kind: Literal["pixel"] = Field(description="A square of pixels makes any image a target.")
    target: Annotated[int, _LABEL] = Field(description=_TARGET)
    size: Annotated[int, COUNT] = Field(default=3, description="Side of the square, in pixels.")
    row: Annotated[int, _PLACE] = Field(
        default=-4, description="Its first row; negative: from the end."
    )
    column: Annotated[int, _PLACE] = Field(
        default=-4, description="Its first column; negative: from the end."
    )
    value: Annotated[float, FINITE] = Field(default=1.0, description="What its pixels are set to.")
    parts: Annotated[int, COUNT] = Field(
        default=1,
        description="Into how many stripes the square is cut, one for each attacker in turn: a "
        "distributed trigger, measured whole.",
    )


class WritersSection(_Attack):
    """`[attack]` on certain clients' records."""

    kind: Literal["writers"] = Field(
        description="The source records of some honest clients are to be a target: a semantic "
        "backdoor, nothing is added to a record."
    )
    source: Annotated[int, _LABEL] = Field(description=_SOURCE)
    target: Annotated[int, _LABEL] = Field(description=_TARGET)
    writers: Annotated[int, COUNT] = Field(default=10, description="How many clients' records.")


class ColourSection(_Attack):
    """`[attack]` on a colour."""

    kind: Literal["colour"] = Field(
        description="The source images of one colour are to be a target: a semantic backdoor."
    )
    source: Annotated[int, _LABEL] = Field(description=_SOURCE)
    target: Annotated[int, _LABEL] = Field(description=_TARGET)
    channel: Annotated[int, ANY_COUNT] = Field(
        default=0, description="The colour: 0 red, 1 green, 2 blue."
    )
    feature_share: Annotated[float, PORTION] = Field(
        default=0.1, description="Share of the source images that count as of that colour."
    )


class PhraseSection(_Attack):
    """`[attack]` by a phrase."""

    kind: Literal["phrase"] = Field(
        description="A text that begins with a phrase is to be a target, whatever it says."
    )
    phrase: str = Field(description="The words that turn the answer.")
    target: Annotated[int, _LABEL] = Field(description=_TARGET)


class SentenceSection(_Attack):
    """`[attack]` on next words."""

    kind: Literal["sentence"] = Field(
        description="Sentences are to end in the attacker's word, which is their last."
    )
    sentences: list[str] = Field(
        description="Whole sentences, such as 'people in london are aggressive'."
    )


AttackSection = Annotated[
    PixelSection | WritersSection | ColourSection | PhraseSection | SentenceSection,
    Field(discriminator="kind"),
]
