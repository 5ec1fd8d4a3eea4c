"""The defences that backdoors are tried against: each is a recipe and its keys."""

from dataclasses import dataclass

from fedveil.papers.naseri import DELTA, WEAK
from fedveil.papers.naseri_arenas import Arena

NOBODY, UNDEFENDED, BOUND, CENTRAL = "nobody attacks", "no defence", "norm bound", "central DP"
LOCAL = "DP-SGD in clients, attacker: "
LOCAL_EPSILON = 50.0
ATTACKERS = 4
"""Where every client's report is noised; one alone is lost among the others."""

_UNIFORM = "server.weights=uniform"
_ROBUST = (
    ("median", "median"),
    ("trimmed mean", "trimmed-mean"),
    ("Krum", "krum"),
    ("multi-Krum", "multi-krum"),
    ("FLAME's clusters", "flame"),
)
_LEFT_OUT = ("norm bound, projected", "multi-Krum", "FLAME's clusters", f"{LOCAL}skip")


@dataclass(frozen=True)
class Defence:
    """A recipe and its keys, at every epsilon where it is `private`."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    private: bool = False


def defences(arena: Arena) -> list[Defence]:
    """The rows of an arena's table, each against the same backdoor."""
    every = [*_plain(arena), *_private(arena), *_at_clients(arena)]
    return [row for row in every if not (arena.brief and row.name in _LEFT_OUT)]


def _plain(arena: Arena) -> list[Defence]:
    """Those without a claim."""
    where = arena.deployment
    plain = (*where.shared, *where.plain, *where.fixed, *arena.attack, *arena.training, _UNIFORM)
    bound = f"clip.value={where.bound}"
    return [
        Defence(NOBODY, "fedavg", (*plain, "attack.attackers=0")),
        Defence(UNDEFENDED, "fedavg", plain),
        Defence(BOUND, "norm-bound", (*plain, bound)),
        Defence("norm bound, projected", "norm-bound", (*plain, bound, "attack.project=true")),
        Defence("weak DP", "weak-dp", (*plain, bound, f"noise.multiplier={WEAK}")),
        *(Defence(name, "fedavg", (*plain, f"server.aggregate={kind}")) for name, kind in _ROBUST),
    ]


def _private(arena: Arena) -> list[Defence]:
    """The paper's two, at every epsilon."""
    where = arena.deployment
    attack, delta = (*arena.attack, *arena.training), f"budget.delta={DELTA}"
    central = (
        *(*where.shared, *where.plain, *attack, delta),
        f"sample.rate={where.cohort / where.clients}",
        f"clip.value={where.bound}",
    )
    inside = (
        *(*where.shared, *where.fixed, *attack, delta, _UNIFORM),
        f"sample.max_participations={where.cap}",
        f"client.rate={where.rate}",
        f"client.steps={where.steps}",
        f"client.lr={where.private_lr}",
        f"clip.value={where.clip}",
    )
    honest = tuple(key for key in inside if not key.startswith(("attack.lr=", "attack.epochs=")))
    return [
        Defence(CENTRAL, "central", central, private=True),
        Defence(f"{LOCAL}comply", "dp-sgd", (*honest, "attack.noise=comply"), private=True),
        Defence(f"{LOCAL}skip", "dp-sgd", (*inside, "attack.noise=skip"), private=True),
    ]


def _at_clients(arena: Arena) -> list[Defence]:
    """Those in which every report is noised by its client, against a few attackers."""
    where = arena.deployment
    few = (*arena.attack, f"attack.attackers={ATTACKERS}")
    budget = f"budget.delta={DELTA}", f"budget.epsilon={LOCAL_EPSILON}"
    gradients = (
        *(*where.shared, *where.fixed, *few, *budget, "client.kind=gradient"),
        f"sample.max_participations={where.cap}",
        "clip.value=0.05",
        "server.lr=40.0",
        "attack.boost=1000.0",
    )
    steps = (
        *(*where.shared, *where.plain, *few, *budget),
        "sample.kind=round-robin",
        f"sample.size={where.cohort}",
        "clip.value=0.1",
    )
    two_point = (
        *(*where.shared, *where.plain, *where.fixed, *few, f"budget.delta={DELTA}"),
        f"shuffle.minimum={where.cohort - ATTACKERS}",
    )
    return [
        *(
            Defence(f"LDP-SGD, {ATTACKERS} attackers: {how}", "ldp-sgd", (*gradients, noise))
            for how, noise in ((how, f"attack.noise={how}") for how in ("comply", "skip", "hide"))
        ),
        Defence(f"DP-FedAvg, {ATTACKERS} attackers: comply", "dp-fedavg-gaussian", steps),
        Defence(f"LDP-FL, {ATTACKERS} attackers: comply", "ldp-fl", two_point),
        Defence(
            f"LDP-FL, {ATTACKERS} attackers: skip", "ldp-fl", (*two_point, "attack.noise=skip")
        ),
    ]
