"""Membership, white box (Nasr et al. 2019): an attacker inside the training, not after it.

Four attackers look at what each record leaves in models and reports (`audit.white_box_attackers`): the server
and a client, passive and active. Each knows of half of the records whether they were trained on,
learns from these what members look like, and guesses about the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedveil.audit.audit_cache import AuditCache
from fedveil.audit.findings import Leak
from fedveil.audit.roc import Roc, roc_figure
from fedveil.audit.seen import check_own
from fedveil.audit.shadow_models import OnTraining, ShadowModels
from fedveil.audit.white_box_attackers import (
    Asked,
    by_active_client,
    by_active_server,
    by_client,
    by_server,
)
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.session import Training
from fedveil.tuning.ray_bench import bench_outcomes

ATTACK = "white-box"

SERVER, ACTIVE_SERVER = "passive server", "active server"
CLIENT, ACTIVE_CLIENT = "passive client", "active client"

Numbers = npt.NDArray[np.float64]
Watching = Callable[[Training, Asked], Numbers]
"""A training and the records in question -> what the attacker sees of each, [records, features]."""

ATTACKERS: tuple[tuple[str, Watching], ...] = (
    (SERVER, by_server),
    (ACTIVE_SERVER, by_active_server),
    (CLIENT, by_client),
    (ACTIVE_CLIENT, by_active_client),
)

_SEES_REPORTS = (Trust.LOCAL, Trust.CURATOR)
_ENDS = 1.0, 99.0
"""Percentiles at which features are cut."""


@dataclass(frozen=True)
class WhiteBox:
    """From `seed`, on so many processes (0: one per core)."""

    seed: int = 0
    workers: int = 0
    cache: AuditCache = field(default_factory=AuditCache)
    cluster: RayCluster | None = field(default=None, repr=False)

    def leaks(
        self,
        training: Training,
        claim: PrivacyClaim | None,
        on_training: OnTraining = lambda done, of: None,
    ) -> Iterator[Leak]:
        """One for each attacker; nothing is claimed against a server that the claim trusts."""
        check_own(training, ATTACK)
        found = self.curves(ShadowModels(training, 1, self.seed), on_training)
        what = f"{training.data.records:,} records, in and out; half of them known"
        self.cache.save_figure(ATTACK, lambda: roc_figure(found, what, claim))
        against = claim if claim is not None and claim.trust in _SEES_REPORTS else None
        for who, roc in found.items():
            beside = against if who in (SERVER, ACTIVE_SERVER) else claim
            yield Leak(ATTACK, f"{who}: {what}", roc.measures, beside)

    def curves(
        self, shadow_models: ShadowModels, on_training: OnTraining = lambda done, of: None
    ) -> dict[str, Roc]:
        """Scores by attacker: of each record, once in and once not."""
        seen, first = self._seen(shadow_models, on_training), shadow_models.inside[0]
        found = {}
        for place, (who, _) in enumerate(ATTACKERS):
            pair = seen[2 * place : 2 * place + 2]
            one, other = (
                guessed(rows, inside, self.seed)
                for rows, inside in zip(pair, shadow_models.inside, strict=True)
            )
            members, others = np.where(first, one, other), np.where(first, other, one)
            found[who] = Roc(members, others, paired=True)
        return found

    def _seen(self, shadow_models: ShadowModels, on_training: OnTraining) -> list[Numbers]:
        """What each attacker sees in either training of the pair, by `watched`'s numbers."""
        count = 2 * len(ATTACKERS)
        found = {n: self.cache.load(_name(n)) for n in range(count)}
        left = [n for n in found if found[n] is None]
        for number, rows in self._watched(shadow_models, left):
            found[number] = rows
            self.cache.save(_name(number), rows)
            on_training(sum(each is not None for each in found.values()), count)
        return [each for each in found.values() if each is not None]

    def _watched(
        self, shadow_models: ShadowModels, left: Sequence[int]
    ) -> Iterator[tuple[int, Numbers]]:
        jobs = [(shadow_models, [number]) for number in left]
        for job, (rows,) in bench_outcomes(jobs, watched, self.workers, self.cluster):
            yield left[job], rows


def watched(shadow_models: ShadowModels, numbers: Sequence[int]) -> list[Numbers]:
    """What attacker number // 2 sees in training number % 2 of a pair."""
    asked = Asked(shadow_models.training.data, shadow_models.seed)
    return [ATTACKERS[n // 2][1](shadow_models.at(n % 2), asked) for n in numbers]


def guessed(rows: Numbers, inside: npt.NDArray[np.bool_], seed: int) -> Numbers:
    """Scores of all records [n] by what a logistic regression learns from the other half of them.

    Whose membership is known is a coin for each record, and the same in every training: nothing
    about a record's membership is used to score it. All scores are 0 where nothing can be learnt.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known = np.random.default_rng([seed, 0xF01D]).random(len(rows)) < 0.5
    scores = np.zeros(len(rows))
    for learnt in (known, ~known):
        if len(np.unique(inside[learnt])) < 2 or not rows.shape[1]:
            continue
        cut = np.clip(rows, *np.percentile(rows[learnt], _ENDS, axis=0))
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        model.fit(cut[learnt], inside[learnt])
        scores[~learnt] = model.decision_function(cut[~learnt])
    return scores


def _name(number: int) -> str:
    return f"white-box-{number}"
