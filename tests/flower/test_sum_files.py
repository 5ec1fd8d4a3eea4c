"""What a deployment with a secure sum writes: the sites' keys, which owners compare."""

import tomllib

import pytest

from fedveil.base.errors import BadInput
from fedveil.flower.bundle import Bundle, _check_manifest
from fedveil.flower.deployment import Address, load_for_sites
from fedveil.flower.federation_files import fingerprint, read_federation, read_site_file
from fedveil.flower.flwr_private.superlink import _OVERHEAD
from fedveil.flower.joining import joining
from fedveil.flower.one_machine import write_trial
from fedveil.flower.owner import Owner
from fedveil.flower.site import Site
from fedveil.flower.sum_terms import step_forms

NAMES = ("north", "south", "east")


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums") / "d"
    recipe = load_for_sites("sites", ["sum.kind=secure", "rounds=2"], 3, divided=True)
    write_trial(folder, recipe, recipe.load_data(), NAMES, superlink=Address())
    return folder


def test_every_site_has_the_keys_of_all_and_its_own_in_its_place(trial):
    federation = read_federation(trial / "server" / "federation.toml")
    assert federation.minimum == 2
    keys = [site.key for site in federation.sites]
    for number, name in enumerate(NAMES):
        owner = Owner.open(trial / "owners" / name)
        file = read_site_file(trial / "sites" / name / "site.toml")
        assert file.sum_keys.public_keys == keys
        assert file.sum_keys.key == str(owner.private_key)
        assert fingerprint(keys[number]) == owner.fingerprint
        site = Site.open(trial / "sites" / name / "site.toml")
        assert site.sums.number == number
        assert site.policy.trust == ["local", "secure-sum"]
    secret = (trial / "owners" / "north" / "node").read_bytes()
    assert not any(
        secret in path.read_bytes() for path in (trial / "server").rglob("*") if path.is_file()
    )


def test_clients_as_a_whole_are_deployed_with_their_bits_in_the_sum(tmp_path):
    """A report has one word more than parameters, and SuperLink takes it."""
    clip = ("clip.kind=quantile", "clip.value=1.0", "clip.bit_noise=2.0")
    recipe = load_for_sites("central", ["sum.kind=secure", "rounds=2", *clip], 3)
    folder = tmp_path / "d"
    write_trial(folder, recipe, recipe.load_data(), NAMES, superlink=Address())
    assert read_federation(folder / "server" / "federation.toml").minimum == 2
    for number, name in enumerate(NAMES):
        site = Site.open(folder / "sites" / name / "site.toml")
        assert (site.sums.number, site.plan.width) == (number, 1)
        assert not list(site.objections())
    text = (folder / "server" / "superlink.sh").read_text()
    most = int(text.partition("--answer-bytes ")[2].split()[0])
    forms = step_forms(site.training.task.size + 1, 64, len(NAMES))
    assert most == sum(form.encoded_length for form in forms.values())


def test_a_sum_of_bits_alone_is_not_deployed(tmp_path):
    clip = ("clip.kind=quantile", "clip.value=0.05", "clip.bit_noise=20")
    size = ("sample.kind=fixed", "sample.size=3", "rounds=2", "sum.kind=secure")
    recipe = load_for_sites("ldp-sgd", [*size, *clip], 3)
    with pytest.raises(BadInput, match="is for simulations") as refused:
        write_trial(tmp_path / "d", recipe, recipe.load_data(), NAMES, superlink=Address())
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_an_owner_is_shown_every_key_before_joining(trial, tmp_path):
    owner, bundle = Owner.open(trial / "owners" / "south"), Bundle.read(trial / "bundles" / "south")
    with joining(owner, bundle, tmp_path / "joined") as joined:
        text = joined.status_lines()
    for name, key in zip(NAMES, bundle.manifest.public_keys, strict=True):
        assert any(
            line.startswith(f"key       {fingerprint(key)} of {name}: compare it") for line in text
        )
    assert any("if all other sites side with the server" in line for line in text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys: keys[:2], "2 keys for 3 sites"),
        (lambda keys: keys[::-1], "the key of 'north' is another in the list of keys"),
    ],
)
def test_keys_that_do_not_belong_to_the_sites_are_no_bundle(trial, change, message):
    manifest = Bundle.read(trial / "bundles" / "north").manifest
    changed = manifest.model_copy(update={"public_keys": change(manifest.public_keys)})
    with pytest.raises(BadInput, match=message):
        _check_manifest(trial, changed)


def test_superlink_takes_a_masked_vector_and_its_boxes(trial):
    text = (trial / "server" / "superlink.sh").read_text()
    most = int(text.partition("--answer-bytes ")[2].split()[0])
    site = Site.open(trial / "sites" / "north" / "site.toml")
    size = site.training.task.size
    assert 8 * size + 32 * 9 + 3 * 212 <= most <= 8 * size + _OVERHEAD
    forms = site.ask_forms
    assert {"roster_message", "content"} <= set(forms)


def test_plain_deployments_name_no_keys(tmp_path):
    recipe = load_for_sites("sites", ["noise.share=whole", "rounds=2"], 3, divided=True)
    write_trial(tmp_path / "d", recipe, recipe.load_data(), NAMES, superlink=Address())
    assert Bundle.read(tmp_path / "d" / "bundles" / "north").manifest.public_keys is None
    file = tomllib.loads((tmp_path / "d" / "sites" / "north" / "site.toml").read_text())
    assert "sum_keys" not in file
