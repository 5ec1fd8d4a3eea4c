"""White-box membership: what attackers find, and that they stay out of what they must not know."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedveil.attacks.adversary import ReportAttack
from fedveil.audit import white_box
from fedveil.audit.audit_folder import AuditCache
from fedveil.audit.findings import Attack
from fedveil.audit.membership import ShadowModels, ShadowRunner
from fedveil.audit.white_box import (
    ACTIVE_CLIENT,
    ACTIVE_SERVER,
    CLIENT,
    SERVER,
    WhiteBox,
    membership_scores,
)
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Trust
from tests.audit.test_membership import noise_labels, overfitted
from tests.audit.test_shadow_models import federation, plain, private


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(white_box, "WATCHED", 2)
        return WhiteBox(runner=ShadowRunner(1)).curves(
            ShadowModels(overfitted(300, 3, rounds=2), 1)
        )


def test_all_attackers_find_what_an_overfitted_model_remembers(found):
    assert list(found) == [SERVER, ACTIVE_SERVER, CLIENT, ACTIVE_CLIENT]
    for who in (SERVER, ACTIVE_SERVER):
        assert found[who].auc.low > 0.75, who
    for who in (CLIENT, ACTIVE_CLIENT):
        assert found[who].auc.value > 0.65, who


def test_the_server_sees_more_than_a_client(found):
    assert found[SERVER].auc.value > found[CLIENT].auc.value


@pytest.mark.slow
def test_record_level_privacy_leaves_little_to_tell(monkeypatch):
    """Gaussian noise of epsilon 1 allows 0.576, and 0.024 is four standard errors of 8,000 records.

    Without noise the server has more than 0.75 (above).
    """
    monkeypatch.setattr(white_box, "WATCHED", 2)
    shadow_models = ShadowModels(private(noise_labels(4000, 8), 1.0, rounds=2), 1)
    for roc in WhiteBox(runner=ShadowRunner(1)).curves(shadow_models).values():
        assert 0.47 < roc.auc.value < 0.6


def test_nothing_about_a_record_is_used_to_score_it():
    """Turning over the membership of records that are guessed about changes no score of theirs."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(200, 3))
    inside = rows[:, 0] + random.normal(size=200) > 0
    scores = membership_scores(rows, inside, 5)
    assert roc_auc_score(inside, scores) > 0.7
    known = np.random.default_rng([5, 0xF01D]).random(200) < 0.5
    other = np.where(known, inside, ~inside)
    assert membership_scores(rows, other, 5)[~known] == pytest.approx(scores[~known])
    assert membership_scores(rows, other, 5)[known] != pytest.approx(scores[known])
    assert (membership_scores(np.zeros((200, 0)), inside, 5) == 0).all()


def test_nothing_is_claimed_against_a_server_that_is_trusted(monkeypatch, found):
    monkeypatch.setattr(WhiteBox, "curves", lambda self, shadow_models, on_training: found)
    training = private(federation((20,) * 6))
    claim = training.plan.claims(1)[0]
    assert claim.trust is Trust.LOCAL
    leaks = {leak.what.split(":")[0]: leak.claim for leak in WhiteBox().leaks(training, claim)}
    assert set(leaks.values()) == {claim}
    central = replace(claim, trust=Trust.CENTRAL)
    leaks = {leak.what.split(":")[0]: leak.claim for leak in WhiteBox().leaks(training, central)}
    assert (leaks[SERVER], leaks[ACTIVE_SERVER]) == (None, None)
    assert (leaks[CLIENT], leaks[ACTIVE_CLIENT]) == (central, central)


def test_what_is_kept_is_not_watched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(white_box, "WATCHED", 1)
    shadow_models = ShadowModels(plain(rounds=2), 1)
    with AuditCache.locked_in(tmp_path, {}) as cache:
        first = WhiteBox(runner=ShadowRunner(1, cache)).curves(shadow_models)
        monkeypatch.setattr(white_box, "observe", None)
        again = WhiteBox(runner=ShadowRunner(1, cache)).curves(shadow_models)
    assert [roc.auc for roc in first.values()] == [roc.auc for roc in again.values()]


def test_a_run_with_an_attack_of_its_own_is_refused():
    training = replace(plain(), participants=ReportAttack(lambda round, ids, reports: reports))
    with pytest.raises(BadInput, match=f"leave out --attacks {Attack.WHITE_BOX}"):
        next(WhiteBox().leaks(training, None))
