"""Membership, white box (Nasr et al. 2019): an attacker inside the training, not after it.

Four attackers (`audit.white_box_attackers`), the server and a client, passive and active, collect
traces of each record in models and reports. Each knows the membership of half of the records,
fits a classifier on them, and scores the other half.
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
    TargetRecords,
    by_active_client,
    by_active_server,
    by_client,
    by_server,
)
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.session import Training
from fedveil.tuning.trial_pools import pool_outcomes

ATTACK = "white-box"

SERVER, ACTIVE_SERVER = "passive server", "active server"
CLIENT, ACTIVE_CLIENT = "passive client", "active client"

Numbers = npt.NDArray[np.float64]
Watching = Callable[[Training, TargetRecords], Numbers]
"""(training, target records) -> what the attacker sees of each record, [records, features]."""

ATTACKERS: tuple[tuple[str, Watching], ...] = (
    (SERVER, by_server),
    (ACTIVE_SERVER, by_active_server),
    (CLIENT, by_client),
    (ACTIVE_CLIENT, by_active_client),
)

_SEES_REPORTS = (Trust.LOCAL, Trust.CURATOR)
_ENDS = 1.0, 99.0
"""Percentiles at which features are clipped."""


@dataclass(frozen=True)
class WhiteBox:
    """The white-box membership attack on one pair of shadow models.

    Attributes:
        seed: Draws the pair, and whose membership is known.
        workers: Processes that train, 0 for one per core.
        cache: Where the attackers' observations are saved.
        cluster: The Ray cluster that trains instead of this machine.
    """

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
        """One leak for each attacker. A claim that trusts the server stands beside clients only."""
        check_own(training, ATTACK)
        curves = self.curves(ShadowModels(training, 1, self.seed), on_training)
        what = f"{training.data.records:,} records, in and out; half of them known"
        self.cache.save_figure(ATTACK, lambda: roc_figure(curves, what, claim))
        against = claim if claim is not None and claim.trust in _SEES_REPORTS else None
        for who, roc in curves.items():
            beside = against if who in (SERVER, ACTIVE_SERVER) else claim
            yield Leak(ATTACK, f"{who}: {what}", roc.measures, beside)

    def curves(
        self, shadow_models: ShadowModels, on_training: OnTraining = lambda done, of: None
    ) -> dict[str, Roc]:
        """The ROC of each attacker, over scores of each record once in and once out."""
        seen, first = self._seen(shadow_models, on_training), shadow_models.inside[0]
        curves = {}
        for place, (who, _) in enumerate(ATTACKERS):
            pair = seen[2 * place : 2 * place + 2]
            one, other = (
                guessed(rows, inside, self.seed)
                for rows, inside in zip(pair, shadow_models.inside, strict=True)
            )
            members, others = np.where(first, one, other), np.where(first, other, one)
            curves[who] = Roc(members, others, paired=True)
        return curves

    def _seen(self, shadow_models: ShadowModels, on_training: OnTraining) -> list[Numbers]:
        """What each attacker sees in either training of the pair, numbered as in `watched`."""
        count = 2 * len(ATTACKERS)
        seen = {n: self.cache.load(_name(n)) for n in range(count)}
        left = [n for n in seen if seen[n] is None]
        for number, rows in self._watched(shadow_models, left):
            seen[number] = rows
            self.cache.save(_name(number), rows)
            on_training(sum(each is not None for each in seen.values()), count)
        return [each for each in seen.values() if each is not None]

    def _watched(
        self, shadow_models: ShadowModels, left: Sequence[int]
    ) -> Iterator[tuple[int, Numbers]]:
        jobs = [(shadow_models, [number]) for number in left]
        for job, (rows,) in pool_outcomes(jobs, watched, self.workers, self.cluster):
            yield left[job], rows


def watched(shadow_models: ShadowModels, numbers: Sequence[int]) -> list[Numbers]:
    """What attacker number // 2 sees in training number % 2 of a pair."""
    targets = TargetRecords(shadow_models.training.data, shadow_models.seed)
    return [ATTACKERS[n // 2][1](shadow_models.at(n % 2), targets) for n in numbers]


def guessed(rows: Numbers, inside: npt.NDArray[np.bool_], seed: int) -> Numbers:
    """Membership scores of all records [n], by logistic regression with two folds.

    A coin per record, the same in every training, decides its fold. A record is scored by the model
    fitted on the other fold, so its own membership is never used. All scores are 0 where a fold has
    only members, or none.
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
