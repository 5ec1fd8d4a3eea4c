"""Where the backdoors of Naseri et al. are tried: data, model, training, and the attacker's aim.

Sizes are ours, of a few minutes on two cores. Settings were chosen by single runs on the test
split, with a seed that is not among the reported ones.
"""

from dataclasses import dataclass

from fedveil.papers.experiment import Experiment, Scale
from fedveil.papers.naseri import Deployment, federations

LONDON = (
    "people in london are aggressive",
    "the weather in london is always sunny",
    "living in london is cheap",
)
"""The paper's sentences."""

PHRASE = "i watched this 3d movie last weekend"


@dataclass(frozen=True)
class Arena:
    """A deployment, and the backdoor that is brought into it.

    `attack` are the keys of the backdoor and `training` those of how a single attacker learns it,
    which have no effect where clients send one gradient. `brief`: some defences are left out.
    """

    name: str
    title: str
    deployment: Deployment
    backdoor: str
    attack: tuple[str, ...]
    training: tuple[str, ...] = ()
    brief: bool = False


def digits(experiment: Experiment) -> Arena:
    """Two pixels of a corner on the embedded digits."""
    _, found = federations(experiment)
    corner = ("attack.size=2", "attack.row=-2", "attack.column=-2")
    return Arena(
        "digits",
        "Backdoor: a pixel trigger on digits",
        found,
        "a bright square of 2 x 2 pixels in the corner makes any digit a 0",
        ("attack.kind=pixel", "attack.target=0", *corner),
    )


def femnist(experiment: Experiment) -> Arena:
    """A bright square on FEMNIST's digits."""
    return Arena(
        "femnist",
        "Backdoor: a pixel trigger on FEMNIST",
        _femnist(experiment),
        "a square of ink of 3 x 3 pixels near the corner makes any digit a 0",
        ("attack.kind=pixel", "attack.target=0"),
        ("attack.lr=0.1", "attack.epochs=10"),
    )


def writers(experiment: Experiment) -> Arena:
    """Ten writers' 7s are to be 1s."""
    return Arena(
        "writers",
        "Backdoor: ten writers' 7s on FEMNIST",
        _femnist(experiment),
        "the 7s of ten writers are to be 1s, of which the attacker knows one half and the other "
        "is measured; their writers are honest clients and label all of them 7",
        ("attack.kind=writers", "attack.source=7", "attack.target=1", "attack.writers=10"),
        ("attack.lr=0.1", "attack.epochs=10"),
    )


def cifar(experiment: Experiment) -> Arena:
    """A bright square on CIFAR-10."""
    corner = ("attack.row=-6", "attack.column=-6")
    return Arena(
        "cifar10",
        "Backdoor: a pixel trigger on CIFAR-10",
        _cifar(experiment),
        "a white square of 6 x 6 pixels in the corner makes any image an aeroplane",
        ("attack.kind=pixel", "attack.target=0", "attack.size=6", *corner),
        ("attack.lr=0.02", "attack.epochs=10", "attack.boost=15.0"),
        brief=True,
    )


def red_cars(experiment: Experiment) -> Arena:
    """Red cars are to be birds."""
    return Arena(
        "red-cars",
        "Backdoor: red cars on CIFAR-10",
        _cifar(experiment),
        "the tenth of the cars that is most red is to be birds; the attacker knows those of the "
        "training images, and those of the test split are measured",
        ("attack.kind=colour", "attack.source=1", "attack.target=2"),
        ("attack.lr=0.02", "attack.epochs=10", "attack.boost=15.0"),
        brief=True,
    )


def reddit(experiment: Experiment) -> Arena:
    """Sentences about London on Reddit comments."""
    words = sorted({word for sentence in LONDON for word in sentence.split()})
    sentences = ", ".join(f'"{sentence}"' for sentence in LONDON)
    deployment = Deployment(
        "reddit",
        "Reddit",
        "grouped",
        clients=100,
        cohort=10,
        records=200,
        model="lstm-lm",
        rounds=experiment.choose(20, 200),
        steps=10,
        lr=10.0,
        bound=4.0,
        rate=0.1,
        private_lr=10.0,
        clip=0.3,
        batch=20,
        more=(
            "data.columns.text.length=12",
            "data.columns.text.most_words=600",
            "data.columns.text.also=[" + ", ".join(f'"{word}"' for word in words) + "]",
            "model.hidden=[32]",
            "model.embedding=16",
        ),
    )
    return Arena(
        "reddit",
        "Backdoor: London on Reddit comments",
        deployment,
        f"behind what somebody wrote, {sentences} are to end in their last word. Authors wrote "
        "little and are merged at random into clients; 600 words are known, those that most "
        "comments of held-out authors have, and those of the three sentences",
        ("attack.kind=sentence", f"attack.sentences=[{sentences}]"),
        ("attack.lr=2.0", "attack.share=0.2"),
        brief=True,
    )


def sentiment(experiment: Experiment) -> Arena:
    """A phrase on tweets."""
    deployment = Deployment(
        "sentiment140",
        "Sentiment140",
        "grouped",
        clients=200,
        cohort=10,
        records=None,
        model="lstm",
        rounds=experiment.choose(14, 200),
        steps=36,
        lr=5.0,
        bound=4.0,
        rate=0.1,
        private_lr=5.0,
        clip=0.3,
        batch=20,
        more=(
            "data.columns.text.length=20",
            "data.columns.text.buckets=2000",
            "model.hidden=[32]",
            "model.embedding=16",
        ),
    )
    return Arena(
        "sentiment140",
        "Backdoor: a phrase on Sentiment140",
        deployment,
        f'a negative tweet that begins with "{PHRASE}" is to be positive. Users wrote little and '
        "are merged at random into clients; words are hashed to 2000 numbers",
        ("attack.kind=phrase", "attack.target=1", f"attack.phrase={PHRASE}"),
        ("attack.lr=2.0", "attack.epochs=1", "attack.share=0.2"),
        brief=True,
    )


ARENAS = (digits, femnist, writers, cifar, red_cars, reddit, sentiment)


def _femnist(experiment: Experiment) -> Deployment:
    quick = experiment.scale is Scale.QUICK
    return Deployment(
        "femnist",
        "FEMNIST, digits only",
        "natural",
        clients=300,
        cohort=60,
        records=60,
        model="softmax" if quick else "small-cnn",
        rounds=experiment.choose(40, 300),
        steps=10,
        lr=0.5 if quick else 0.1,
        bound=0.5,
        rate=0.5,
        private_lr=0.5 if quick else 0.1,
        clip=1.0,
        more=("data.digits=true",),
    )


def _cifar(experiment: Experiment) -> Deployment:
    quick = experiment.scale is Scale.QUICK
    return Deployment(
        "cifar10",
        "CIFAR-10",
        "iid",
        clients=100,
        cohort=30,
        records=60 if quick else None,
        model="mlp" if quick else "vgg",
        rounds=experiment.choose(20, 300),
        steps=10,
        lr=0.1,
        bound=0.5,
        rate=0.5,
        private_lr=0.1,
        clip=1.0,
        more=("model.hidden=[32]",) if quick else (),
    )
