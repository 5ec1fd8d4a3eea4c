"""Recipe keys as people call them, for axes and headings."""

PER_ROUND, IN_ALL = "local steps per round (E)", "local steps in all (T)"

_LABELS = {
    "budget.delta": "delta of the budget",
    "budget.epsilon": "epsilon of the budget",
    "client.batch": "records per batch",
    "client.epochs": "local epochs per round",
    "client.lr": "learning rate of clients",
    "client.steps": "local steps per round",
    "clip.value": "clip norm",
    "data.alpha": "alpha of the partition, smaller is less alike",
    "data.clients": "clients",
    "noise.epsilon": "epsilon of one report",
    "noise.multiplier": "noise multiplier, std / clip norm",
    "rounds": "rounds",
    "sample.rate": "share of clients per round",
    "sample.size": "clients per round",
    "seed": "seed",
    "server.lr": "learning rate of the server",
}


def axis_label(key: str) -> str:
    """A key, or several that move together, in words; a key without any is told as it is.

    >>> axis_label("client.steps:rounds")
    'local steps per round : rounds'
    """
    return " : ".join(_LABELS.get(part, part) for part in key.split(":"))
