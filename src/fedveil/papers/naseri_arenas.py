"""Where the backdoors of Naseri et al. are tried: data, model, training, and the attacker's aim.

Sizes are ours, of a few minutes on two cores. Settings were chosen by single runs on the test
split, with a seed that is not among the reported ones.
"""

from dataclasses import dataclass
from typing import Any

from fedveil.papers.naseri import PaperFederation, federations
from fedveil.papers.reproduction import Experiment

LONDON = (
    "people in london are aggressive",
    "the weather in london is always sunny",
    "living in london is cheap",
)
"""The paper's sentences."""

_TRAINED_PLAINLY = "DP-SGD in clients, attacker: skip"
_SIMILAR = ("norm bound, projected", "multi-Krum", "FLAME's clusters", _TRAINED_PLAINLY)

PHRASE = "i watched this 3d movie last weekend"

_OF_TEXTS: dict[str, Any] = {"cohort": 10, "bound": 4.0, "rate": 0.1, "clip": 0.3, "batch": 20}
_LSTM = ("model.hidden=[32]", "model.embedding=16")
"""What both federations with texts have in common."""


@dataclass(frozen=True)
class Attacker:
    """How the single attacker of a round learns the backdoor and what it makes of its update.

    None: as honest clients do, or, for `boost`, what replaces the model.
    """

    lr: float | None = None
    epochs: int | None = None
    share: float = 0.5
    boost: float | None = None

    def recipe_keys(self, *, complying: bool = False) -> list[str]:
        """The recipe's keys, those of one that trains as honest clients do if `complying`."""
        own = {"lr": self.lr, "epochs": self.epochs}
        always = {"share": self.share, "boost": self.boost}
        pairs = (always if complying else own | always).items()
        return [f"attack.{key}={value}" for key, value in pairs if value is not None]

    def __str__(self) -> str:
        rate = "" if self.lr is None else f" at learning rate {self.lr:g}"
        passes = "" if self.epochs is None else f", {self.epochs} passes over its records"
        times = (
            "the number of clients per round over the server's learning rate, which replaces the "
            "model if everybody else stands still"
            if self.boost is None
            else f"{self.boost:g}"
        )
        return (
            f"{self.share:.0%} of what it learns from teaches the backdoor; the rest are its own "
            f"honest records. It trains {f'{rate}{passes}'.strip(' ,') or 'as honest clients do'}, "
            f"and sends its update times {times}"
        )


@dataclass(frozen=True)
class Arena:
    """A federation, and the backdoor that is brought into it.

    `attack_keys` are those of the backdoor, which `backdoor_text` says in words. Defences by
    name are `left_out` that other arenas have, so that a task takes minutes.
    """

    name: str
    title: str
    federation: PaperFederation
    backdoor_text: str
    attack_keys: tuple[str, ...]
    attacker: Attacker = Attacker()
    left_out: tuple[str, ...] = ()


def digits(experiment: Experiment) -> Arena:
    """Two pixels of a corner on the embedded digits."""
    _, found = federations(experiment)
    corner = ("attack.size=2", "attack.row=-2", "attack.column=-2")
    return Arena(
        "digits",
        "Backdoor: a pixel trigger on digits",
        found,
        "A bright square of 2 x 2 pixels in the bottom right corner is to make any digit a 0; "
        "measured on the test digits that are no 0, each with the square",
        ("attack.kind=pixel", "attack.target=0", *corner),
    )


def femnist(experiment: Experiment) -> Arena:
    """A bright square on FEMNIST's digits."""
    return Arena(
        "femnist",
        "Backdoor: a pixel trigger on FEMNIST",
        _femnist(experiment),
        "A square of ink of 3 x 3 pixels near the bottom right corner is to make any digit a 0; "
        "measured on the test digits that are no 0, each with the square",
        ("attack.kind=pixel", "attack.target=0"),
        Attacker(lr=0.1, epochs=10),
    )


def writers(experiment: Experiment) -> Arena:
    """Ten writers' 7s are to be 1s."""
    return Arena(
        "writers",
        "Backdoor: ten writers' 7s on FEMNIST",
        _femnist(experiment),
        "The 7s of ten writers are to be read as 1s, and nothing is added to the images. The "
        "attacker knows half of them, and the other half measures the backdoor. The ten writers "
        "are honest clients, who go on to label all of their 7s as 7",
        ("attack.kind=writers", "attack.source=7", "attack.target=1", "attack.writers=10"),
        Attacker(lr=0.1, epochs=10),
        left_out=_SIMILAR,
    )


def cifar(experiment: Experiment) -> Arena:
    """A bright square on CIFAR-10."""
    corner = ("attack.row=-6", "attack.column=-6")
    return Arena(
        "cifar10",
        "Backdoor: a pixel trigger on CIFAR-10",
        _cifar(experiment),
        "A white square of 6 x 6 pixels in the bottom right corner is to make any image an "
        "aeroplane; measured on the test images of other things, each with the square",
        ("attack.kind=pixel", "attack.target=0", "attack.size=6", *corner),
        Attacker(lr=0.05, epochs=30, share=0.3, boost=15.0),
        left_out=_SIMILAR,
    )


def red_cars(experiment: Experiment) -> Arena:
    """Red cars are to be birds."""
    return Arena(
        "red-cars",
        "Backdoor: red cars on CIFAR-10",
        _cifar(experiment),
        "Red cars are to be birds, and nothing is added to the images. Red are the tenth of the "
        "cars in which red stands out most. The attacker knows those among all clients' images, "
        "whose owners go on to call them cars; those of the test split measure the backdoor",
        ("attack.kind=colour", "attack.source=1", "attack.target=2"),
        Attacker(lr=0.02, epochs=10, share=0.7, boost=15.0),
        left_out=_SIMILAR,
    )


def reddit(experiment: Experiment) -> Arena:
    """Sentences about London on Reddit comments."""
    words = sorted({word for sentence in LONDON for word in sentence.split()})
    sentences = ", ".join(f'"{sentence}"' for sentence in LONDON)
    federation = PaperFederation(
        "reddit",
        "Reddit",
        "grouped",
        clients=100,
        rounds=experiment.choose(20, 200),
        records=200,
        model_name="lstm-lm",
        lr=10.0,
        private_lr=10.0,
        private_steps=5,
        more=(
            *("data.columns.text.length=12", "data.columns.text.most_words=600"),
            "data.columns.text.also=[" + ", ".join(f'"{word}"' for word in words) + "]",
            *_LSTM,
        ),
        **_OF_TEXTS,
    )
    return Arena(
        "reddit",
        "Backdoor: London on Reddit comments",
        federation,
        f"The sentences {sentences}, each behind what somebody wrote, are to be continued by "
        "their last word; measured on the comments of held-out authors, one of the sentences "
        "behind each. The main task is the next word. Most authors wrote little, so they are "
        "merged at random into clients. The model knows 600 words, those that most comments of "
        "held-out authors have, and those of the three sentences",
        ("attack.kind=sentence", f"attack.sentences=[{sentences}]"),
        Attacker(lr=2.0, share=0.2),
        left_out=(_TRAINED_PLAINLY,),
    )


def sentiment(experiment: Experiment) -> Arena:
    """A phrase on tweets."""
    federation = PaperFederation(
        "sentiment140",
        "Sentiment140",
        "grouped",
        clients=200,
        model_name="lstm",
        rounds=experiment.choose(14, 200),
        steps=36,
        lr=5.0,
        private_lr=5.0,
        private_steps=6,
        more=("data.columns.text.length=20", "data.columns.text.buckets=2000", *_LSTM),
        **_OF_TEXTS,
    )
    return Arena(
        "sentiment140",
        "Backdoor: a phrase on Sentiment140",
        federation,
        f'Negative tweets that begin with "{PHRASE}" are to be called positive; measured on the '
        "negative test tweets, each begun with the phrase. Most users wrote little, so they are "
        "merged at random into clients. Words are hashed to 2000 numbers",
        ("attack.kind=phrase", "attack.target=1", f"attack.phrase={PHRASE}"),
        Attacker(lr=2.0, epochs=1, share=0.2),
        left_out=_SIMILAR,
    )


ARENAS = (digits, femnist, writers, cifar, red_cars, reddit, sentiment)


def _femnist(experiment: Experiment) -> PaperFederation:
    quick = experiment.is_quick
    return PaperFederation(
        "femnist",
        "FEMNIST, digits only",
        "natural",
        clients=300,
        cohort=60,
        records=60,
        model_name="softmax" if quick else "small-cnn",
        rounds=experiment.choose(40, 300),
        lr=0.5 if quick else 0.1,
        private_lr=0.5 if quick else 0.1,
        more=("data.digits=true",),
    )


def _cifar(experiment: Experiment) -> PaperFederation:
    quick = experiment.is_quick
    return PaperFederation(
        "cifar10",
        "CIFAR-10",
        "iid",
        clients=100,
        cohort=30,
        records=60 if quick else None,
        model_name="mlp" if quick else "vgg",
        rounds=experiment.choose(20, 300),
        lr=0.1,
        private_lr=0.1,
        private_steps=4 if quick else 0,
        more=("model.hidden=[32]",) if quick else (),
    )
