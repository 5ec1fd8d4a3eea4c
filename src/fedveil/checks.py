"""What a value may be by itself: one table, by the names that recipes and messages use.

Recipes are checked by it when they are read and constructors when they are called, so both say the
same. Nothing but the standard library is imported: a wrong value is refused before anything heavy.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real

from fedveil.errors import BadInput

MOST_ROUNDS = 1_000_000
"""Rounds of a run, and local steps of a round."""

SMALLEST_CLIP = 1e-20
"""Below, float32 has no room for the rounding of a clipped row."""

SMALLEST_FLOOR = 1e-12
SMALLEST_RADIUS = 1e-6
SMALLEST_REPORT, LARGEST_REPORT = 1e-6, 1e6
"""Epsilons of one report: below, the grid of a draw would show; above, nothing is protected."""

_SMALLEST_RATE = 1e-12
_SMALLEST_DELTA = 1e-100
_MOST_NOISE = 1e6
_WORKERS_ANYWHERE, _WORKERS_PER_CORE = 64, 4

Test = Callable[[float], bool]


@dataclass(frozen=True)
class Kind:
    """Tests that a number must pass, each with a text of what is needed. `whole`: integers only."""

    tests: tuple[tuple[Test, str], ...] = ()
    whole: bool = False

    def check(self, name: str, value: object) -> None:
        """Refuse a value that is not a number, or fails a test."""
        wanted = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            what = "a whole number" if self.whole else "a number"
            raise BadInput(f"{name} is {shown(value)}: {what} is needed")
        for passes, need in self.tests:
            if not passes(value):  # type: ignore[arg-type]
                raise BadInput(f"{name} is {value}: {need}")

    @property
    def words(self) -> str:
        """The values that pass, in the words of the refusals."""
        needs = [need for _, need in self.tests]
        for end in (" is needed", " are needed", " is possible", " are possible", ","):
            needs = [need.removesuffix(end) for need in needs]
        return ", ".join(needs)


def shown(value: object) -> str:
    """A value of any type as a short text, for messages."""
    text = str(value) if isinstance(value, Real) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def check(name: str, value: object) -> None:
    """Refuse a value that cannot be what its name says, whatever else is chosen.

    >>> check("sample.rate", 0.5)
    """
    VALUES[name].check(name, value)


def allowed(name: str) -> str:
    """The values that a number of that name may have, in words. Empty for other settings.

    >>> allowed("sample.rate")
    'a probability in (0, 1], at least 1e-12'
    """
    if name == "engine.workers":
        return f"0 to {_WORKERS_ANYWHERE}, or to {_WORKERS_PER_CORE} per core where that is more"
    return VALUES[name].words if name in VALUES else ""


def check_ledger_epsilon(name: str, epsilon: object, ledger: object) -> None:
    """Refuse a common budget that is none, or that no ledger would keep."""
    if epsilon is None:
        return
    if ledger is None:
        raise BadInput(f"{name} is the budget of a shared ledger: name its file as well")
    VALUES["budget.epsilon"].check(name, epsilon)


def check_address(name: str, address: object) -> None:
    """Refuse a text that is not the address of a cluster's head."""
    if address is None:
        return
    if not isinstance(address, str) or not address.strip():
        raise BadInput(f"{name} is {shown(address)}: use 'auto' or 'host:port'")
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in address or not host or not port.isdecimal()):
        raise BadInput(
            f"{name} is {shown(address)}: use 'auto', or the head's 'host:port' (not a client's "
            "ray:// address: run this on a node of the cluster)"
        )


def one_of(name: str, value: object, kind: type[Enum]) -> None:
    """Refuse a value that is not a member of the enumeration. An equal string is not enough.

    A member is compared by identity, so that its text would be accepted and have no effect.
    """
    if not isinstance(value, kind):
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise BadInput(f"{name} is {shown(value)}: use one of {members}")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def most_workers() -> int:
    """The largest useful number of processes. More only wait for each other, for minutes."""
    return max(_WORKERS_ANYWHERE, _WORKERS_PER_CORE * cores())


def check_workers(name: str, value: object) -> None:
    """Refuse a number of processes that no machine like this one can use."""
    most = most_workers()
    need = f"a number from 1 to {most} is needed on this machine, or 0 for one per core"
    Kind(((lambda v: 0 <= v <= most, need),), whole=True).check(name, value)


def _whole(least: int, need: str = "", most: int | None = None) -> Kind:
    tests: list[tuple[Test, str]] = [(lambda v: v >= least, need or f"at least {least} is needed")]
    if most is not None:
        tests.append((lambda v: v <= most, f"at most {most:,} are possible"))
    return Kind(tuple(tests), whole=True)


def _number(passes: Test, need: str, most: float | None = None) -> Kind:
    tests = [(passes, need)]
    if most is not None:
        tests.append((lambda v: abs(v) <= most, f"at most {most:g} is possible"))
    return Kind(tuple(tests))


def _from(least: float) -> Kind:
    return _number(lambda v: least <= v < math.inf, f"a number >= {least:g} is needed")


_POSITIVE = _number(lambda v: 0 < v < math.inf, "a positive number is needed")
_SHARE = _number(lambda v: 0 <= v < 1, "a number in [0, 1) is needed")
_INSIDE = _number(lambda v: 0 < v < 1, "a number in (0, 1) is needed")
_DELTA = Kind(
    (
        *_INSIDE.tests,
        (lambda v: v >= _SMALLEST_DELTA, f"at least {_SMALLEST_DELTA:g} is possible"),
    )
)
_BUDGET = _number(lambda v: v > 0, "a positive number is needed")
_SEED = _number(lambda v: 0 <= v < 2**63, "a number from 0 to 2^63 - 1 is needed")
_RATE = Kind(
    (
        (lambda v: 0 < v <= 1, "a probability in (0, 1] is needed"),
        (lambda v: v >= _SMALLEST_RATE, f"at least {_SMALLEST_RATE:g} is possible"),
    )
)
_STEPS = _whole(1, most=MOST_ROUNDS)
_WARMUP = _whole(0, most=MOST_ROUNDS)
_POWER = Kind(((lambda v: -60 <= v <= 60, "a power of two from -60 to 60 is needed"),), whole=True)
_PLACE = Kind(((lambda v: abs(v) <= 1e6, "a place within an image is needed"),), whole=True)

_CLIENTS = _whole(1, most=100_000_000)

VALUES = {
    "seed": Kind(_SEED.tests, whole=True),
    "rounds": _whole(1, "at least one is needed", MOST_ROUNDS),
    "iterations": _whole(1, "at least one is needed"),
    "clients": _CLIENTS,
    "parameters": _whole(1),
    "data.clients": _whole(1),
    "data.alpha": _POSITIVE,
    "data.shards_per_client": _whole(1),
    "data.min_records": _whole(1),
    "data.resample": _whole(1, "at least one record is needed"),
    "data.most_records": _whole(1, "at least one record is needed"),
    "data.seed": Kind(_SEED.tests, whole=True),
    "data.columns.NAME.length": _whole(1, "at least one word is needed", 10_000),
    "data.columns.NAME.buckets": _whole(1, most=1_000_000),
    "data.columns.NAME.most_words": _whole(1, most=1_000_000),
    "data.columns.NAME.min_texts": _whole(1),
    "model.hidden": _whole(1, "the width of a layer starts at 1"),
    "model.embedding": _whole(1, most=10_000),
    "model.layers": _whole(1, most=100),
    "model.heads": _whole(1, most=100),
    "model.words": _whole(2, "at least padding and one word are needed", 10_000_000),
    "sample.rate": _RATE,
    "sample.size": _whole(1, "at least one client per round is needed"),
    "sample.max_participations": _whole(1),
    "client.epochs": _STEPS,
    "client.steps": _STEPS,
    "client.batch": _whole(0, "a size, or 0 for all records, is needed"),
    "client.lr": _POSITIVE,
    "client.mu": _POSITIVE,
    "client.gamma": _POSITIVE,
    "client.momentum": _SHARE,
    "client.weight_decay": _from(0),
    "client.proximal": _from(0),
    "client.beta1": _SHARE,
    "client.beta2": _SHARE,
    "client.floor": _POSITIVE,
    "client.warmup": _WARMUP,
    "client.lr_floor": _SHARE,
    "client.rate": _RATE,
    "client.nominal": _whole(1, "at least 1 record is needed"),
    "clip.value": _number(
        lambda v: SMALLEST_CLIP <= v < math.inf,
        f"a number of at least {SMALLEST_CLIP} is needed",
        1e30,
    ),
    "clip.power": _from(0),
    "clip.floor": _number(
        lambda v: SMALLEST_FLOOR <= v < math.inf,
        f"a number from {SMALLEST_FLOOR} to clip.value is needed",
    ),
    "clip.quantile": _INSIDE,
    "clip.lr": _POSITIVE,
    "clip.bit_noise": _from(0),
    "clip.bit_epsilon": _number(lambda v: v >= 0, "a number >= 0 is needed", 50),
    "clip.low": _POWER,
    "clip.high": _POWER,
    "clip.every": _whole(1, "at least 1 round is needed"),
    "clip.epsilon": _BUDGET,
    "clip.delta": _DELTA,
    "clip.cap": _BUDGET,
    "clip.centre": _number(math.isfinite, "a finite number is needed", 1e30),
    "clip.radius": _number(
        lambda v: SMALLEST_RADIUS <= v < math.inf, f"at least {SMALLEST_RADIUS} is needed", 1e30
    ),
    "clip.growth": _from(1),
    "noise.multiplier": _number(
        lambda v: 0 <= v < math.inf, "a number >= 0 is needed", _MOST_NOISE
    ),
    "noise.epsilon": _number(
        lambda v: v >= SMALLEST_REPORT,
        "a number >= 1e-6 is needed",
        LARGEST_REPORT,
    ),
    "noise.c2": _POSITIVE,
    "budget.epsilon": _BUDGET,
    "budget.epsilons": _BUDGET,
    "budget.delta": _DELTA,
    "shuffle.minimum": _whole(1, "at least 1 report is needed"),
    "shuffle.dishonest": _whole(0, "0 or more clients are needed"),
    "server.lr": _POSITIVE,
    "server.momentum": _SHARE,
    "server.beta1": _SHARE,
    "server.beta2": _SHARE,
    "server.floor": _POSITIVE,
    "server.trim": _number(lambda v: 0 <= v < 0.5, "a share in [0, 0.5) is needed"),
    "server.malicious": _whole(0),
    "server.chosen": _whole(1),
    "server.warmup": _WARMUP,
    "server.lr_floor": _SHARE,
    "warmup": _WARMUP,
    "lr_floor": _SHARE,
    "attack.attackers": _whole(0),
    "attack.share": _number(lambda v: 0 < v <= 1, "a share in (0, 1] is needed"),
    "attack.boost": _POSITIVE,
    "attack.epochs": _STEPS,
    "attack.lr": _POSITIVE,
    "attack.target": _whole(0, "labels start at 0"),
    "attack.source": _whole(0, "labels start at 0"),
    "attack.row": _PLACE,
    "attack.column": _PLACE,
    "attack.value": _number(math.isfinite, "a finite number is needed", 1e30),
    "attack.channel": _whole(0),
    "attack.start": _whole(1),
    "attack.end": _whole(1),
    "attack.every": _whole(1),
    "attack.size": _whole(1),
    "attack.parts": _whole(1),
    "attack.writers": _whole(1),
    "attack.feature_share": _number(lambda v: 0 < v <= 1, "a share in (0, 1] is needed"),
    "evaluate.every": _whole(1),
    "evaluate.clients_every": _whole(1),
    "evaluate.epsilon": _BUDGET,
    "evaluate.delta": _DELTA,
    "evaluate.loss_clip": _number(
        lambda v: 1e-6 <= v <= 1e6, "a number from 1e-6 to 1e6 is needed"
    ),
    "engine.chunk": _whole(0),
    "engine.memory": _whole(1),
    "engine.checkpoint": _whole(1),
    "--repeat": Kind(
        ((lambda v: 1 <= v <= 10_000, "a number from 1 to 10000 is needed"),), whole=True
    ),
    "--clients": _CLIENTS,
    "--per-round": _CLIENTS,
    "--parameters": _whole(1, most=10**15),
    "--epsilon": _POSITIVE,
    "--delta": _DELTA,
    "--rounds": _whole(1, most=MOST_ROUNDS),
    "--noise": _number(lambda v: 0 < v < math.inf, "a positive number is needed", _MOST_NOISE),
    "--rate": _RATE,
}
"""By the recipe's key or the command line's option; values of a list are checked one by one."""
