"""An audit in the report of its run: claimed beside found, of the run that was attacked."""

import json

import pytest

from fedveil.audit.audit_folder import ABOUT, FOUND, audit_section, audited_digest
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.runs.recipe import load_recipe, recipe_in, to_toml
from tests.runs.test_report import words

SCRIPT = "<script>alert(1)</script>"
CLAIM = PrivacyClaim(
    epsilon=2.0, delta=1e-5, unit=Unit.CLIENT, neighbours=Relation.ZERO_OUT, trust=Trust.CENTRAL,
    accountant=Accountant.PLD, noise=NoiseSource.SEEDED,
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    recipe = load_recipe("central")
    (tmp_path / "run" / "recipe.toml").write_text(to_toml(recipe.model_dump()))
    return tmp_path / "run"


@pytest.fixture
def audit(tmp_path, run):
    def made(violated=False, digest=None, **changed):
        folder = tmp_path / "audit"
        folder.mkdir(exist_ok=True)
        about = {"recipe": digest or audited_digest(recipe_in(run))}
        (folder / ABOUT).write_text(json.dumps(about))
        finding = {
            "attack": "canaries", "what": SCRIPT, "claim": CLAIM.to_dict(), "lower_bound": 1.23456,
            "confidence": 0.95, "estimate": None, "draws": 1000, "how": "x",
            "verdict": "not violated",
        }  # fmt: skip
        measures = {"AUC": {"value": 0.61, "low": 0.58, "high": 0.64}}
        leak = {"attack": "membership", "what": "records", "claim": None, "measures": measures}
        found = {"findings": [finding], "leaks": [leak], "left_out": [SCRIPT], "violated": violated}
        (folder / FOUND).write_text(json.dumps(found | changed))
        return folder

    return made


def test_what_is_claimed_stands_beside_what_was_found(audit, run):
    markup = str(audit_section(audit(), run))
    text = words("</style>" + markup)
    assert CLAIM.short in text
    assert "1.234 " in text
    assert "AUC 0.61 (0.58 to 0.64)" in text
    assert "does not prove the claim" in text
    assert SCRIPT not in markup


@pytest.mark.parametrize("estimate", [None, 8.457])
def test_an_estimate_is_said_to_refute_nothing(audit, run, estimate):
    folder = audit()
    found = json.loads((folder / FOUND).read_text())
    found["findings"][0]["estimate"] = estimate
    (folder / FOUND).write_text(json.dumps(found))
    markup = str(audit_section(folder, run))
    assert ("it refutes no claim" in markup) == (estimate is not None)
    assert ("8.457" in markup) == (estimate is not None)


def test_a_violated_claim_is_said_first(audit, run):
    text = words("</style>" + str(audit_section(audit(violated=True), run)))
    assert text.index("is violated") < text.index("canaries")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"digest": "other"}, "of another recipe"),
        ({"findings": [{}]}, "cannot be read"),
        ({"leaks": 3}, "cannot be read"),
        ({"leaks": [{"attack": 1}]}, "cannot be read"),
    ],
)
def test_another_audit_or_none_is_refused(audit, run, changed, said):
    with pytest.raises(BadInput, match=said):
        audit_section(audit(**changed), run)


def test_an_audit_that_has_not_ended_is_refused(audit, run):
    folder = audit()
    (folder / FOUND).unlink()
    with pytest.raises(BadInput, match="has finished"):
        audit_section(folder, run)
