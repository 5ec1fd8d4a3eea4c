"""The defences that backdoors are tried against: each is a recipe and its keys."""

from fedveil.papers.naseri import DELTA, WEAK, Defence
from fedveil.papers.naseri_arenas import Arena

SERVER, UNDEFENDED, BOUND, CENTRAL = "nobody attacks", "no defence", "norm bound", "central DP"
LOCAL = "DP-SGD in clients, attacker: "
NOISES = ("comply", "skip", "hide")
"""What attackers do about the noise that they are to add."""
LOCAL_EPSILON = 50.0
ATTACKERS, BOOST = 4, 1000.0
"""Where every client's report is noised: one attacker alone is lost among the others."""
GRADIENTS = f"LDP-SGD, {ATTACKERS} attackers: "

_UNIFORM = "server.weights=uniform"
_ROBUST = (
    ("median", "median"),
    ("trimmed mean", "trimmed-mean"),
    ("Krum", "krum"),
    ("multi-Krum", "multi-krum"),
    ("FLAME's clusters", "flame"),
)


def defences(arena: Arena) -> list[Defence]:
    """The rows of an arena's table, each against the same backdoor."""
    every = [*_plain(arena), *_private(arena), *_at_clients(arena)]
    return [row for row in every if row.name not in arena.left_out]


def legend(arena: Arena) -> list[str]:
    """What the rows are, in words."""
    where = arena.federation
    return [
        f"*{SERVER}*: the same training without an attacker, so what the model does by itself.",
        f"*{UNDEFENDED}*: the server takes the mean of the updates.",
        f"*{BOUND}*: an update longer than {where.bound:g} is scaled down to that length. "
        "*projected*: the attacker knows the bound, trains within it and loses nothing to it. "
        f"*weak DP*: the bound, and Gaussian noise of {WEAK:g} times it on the sum, too little for "
        "a claim.",
        "*median*, *trimmed mean*, *Krum*, *multi-Krum*, *FLAME's clusters*: what the server takes "
        "instead of the mean. They look at single updates, so they cannot be combined with noise "
        "for the sum.",
        f"*{CENTRAL}*: clients are drawn independently, the server applies the same bound to all "
        "updates, the attacker's too, and adds noise for the claim.",
        "*DP-SGD in clients*: each client trains by DP-SGD, which protects its records from the "
        "server and puts no bound on its update. An attacker that *complies* does the same and "
        "multiplies what comes out; one that *skips* trains without clip and noise.",
        "*LDP-SGD*: each client clips one gradient and adds noise to it. Attackers multiply "
        f"theirs by {BOOST:g}. Those that *comply* clip and add noise after that; those that "
        "*skip* do neither; those that *hide* clip, and by twos add the same noise with opposite "
        "signs: each report looks as it should, and in the sum the noise is gone.",
        "*DP-FedAvg*, *LDP-FL*: each client protects what it sends, with Gaussian noise on its "
        "update or by sending one of two values for each weight. Whoever *skips* sends the value "
        "that is on its side.",
    ]


def _plain(arena: Arena) -> list[Defence]:
    """Those without a claim."""
    where = arena.federation
    plain = (
        *where.shared,
        *where.plain,
        *where.fixed,
        *arena.attack,
        *arena.attacker.keys,
        _UNIFORM,
    )
    bound = f"clip.value={where.bound}"
    return [
        Defence(SERVER, "fedavg", (*plain, "attack.attackers=0")),
        Defence(UNDEFENDED, "fedavg", plain),
        Defence(BOUND, "norm-bound", (*plain, bound)),
        Defence("norm bound, projected", "norm-bound", (*plain, bound, "attack.project=true")),
        Defence("weak DP", "weak-dp", (*plain, bound, f"noise.multiplier={WEAK}")),
        *(Defence(name, "fedavg", (*plain, f"server.aggregate={kind}")) for name, kind in _ROBUST),
    ]


def _private(arena: Arena) -> list[Defence]:
    """The paper's two, at every epsilon."""
    where = arena.federation
    delta = f"budget.delta={DELTA}"
    own = (*arena.attack, *arena.attacker.keys)
    complying = (*arena.attack, *arena.attacker.keys_of_honest_work, "attack.noise=comply")
    central = (
        *(*where.shared, *where.plain, *own, delta),
        f"sample.rate={where.cohort / where.clients}",
        f"clip.value={where.bound}",
    )
    inside = (*where.shared, *where.fixed, *where.inside, delta, _UNIFORM)
    return [
        Defence(CENTRAL, "central", central, private=True),
        Defence(f"{LOCAL}comply", "dp-sgd", (*inside, *complying), private=True),
        Defence(f"{LOCAL}skip", "dp-sgd", (*inside, *own, "attack.noise=skip"), private=True),
    ]


def _at_clients(arena: Arena) -> list[Defence]:
    """Those in which every report is noised by its client, against a few attackers."""
    where = arena.federation
    few = (*arena.attack, f"attack.attackers={ATTACKERS}")
    budget = f"budget.delta={DELTA}", f"budget.epsilon={LOCAL_EPSILON}"
    gradients = (
        *(*where.shared, *where.fixed, *few, *budget, "client.kind=gradient"),
        f"sample.max_participations={where.cap}",
        "clip.value=0.05",
        "server.lr=40.0",
        f"attack.boost={BOOST}",
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
        f"shuffle.dishonest={ATTACKERS}",
    )
    return [
        *(
            Defence(f"{GRADIENTS}{how}", "ldp-sgd", (*gradients, f"attack.noise={how}"))
            for how in NOISES
        ),
        Defence(f"DP-FedAvg, {ATTACKERS} attackers: comply", "dp-fedavg-gaussian", steps),
        Defence(f"LDP-FL, {ATTACKERS} attackers: comply", "ldp-fl", two_point),
        Defence(
            f"LDP-FL, {ATTACKERS} attackers: skip", "ldp-fl", (*two_point, "attack.noise=skip")
        ),
    ]
