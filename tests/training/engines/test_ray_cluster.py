"""Clusters: what is refused before anything starts, and what is left when all has ended."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from fedveil.attacks.adversary import ReportAttack
from fedveil.base.errors import BadInput
from fedveil.runs.recipe import load_recipe, on_this_machine, with_engine
from fedveil.training.engines import ray_cluster as clusters
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.session import Training
from tests.training.engines.test_processes import RECIPES, net, ragged

assert ragged
pytestmark = pytest.mark.filterwarnings(  # Ray leaves files and sockets open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.parametrize(
    "address", ["", " ", 7, "ray://head:10001", "http://head:8265", "head", "head:", ":6379", "a:b"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(BadInput, match="use 'auto'"):
        RayCluster(address)


@pytest.mark.parametrize("address", [None, "auto", "head:6379", "10.0.0.7:6379"])
def test_addresses(address):
    assert RayCluster(address).address == address


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else found(name)
    )
    with pytest.raises(BadInput, match=r"pip install 'fedveil\[ray\]'"):
        RayCluster()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["engine.kind=dask"], "engine.kind is 'dask'"),
        (["engine.address=auto"], "engine.kind is not 'ray'"),
        (["engine.kind=processes", "engine.address=auto"], "engine.kind is not 'ray'"),
        (["engine.kind=ray", "engine.address=ray://x:1"], "engine.address is 'ray://x:1'"),
    ],
)
def test_bad_settings_of_a_recipe(settings, said):
    with pytest.raises(BadInput, match=said):
        load_recipe("central", settings)


def test_the_kind_of_an_engine_leaves_its_other_keys():
    recipe = load_recipe("central", ["engine.chunk=7", "engine.kind=ray", "engine.address=a:1"])
    assert (recipe.engine.kind, recipe.engine.address, recipe.engine.chunk) == ("ray", "a:1", 7)
    assert (
        on_this_machine(recipe).engine
        == load_recipe("central", ["engine.chunk=7", "engine.kind=processes"]).engine
    )
    assert with_engine(recipe, ["engine.kind=ray"]).engine.address is None
    assert with_engine(recipe, []) is recipe


def test_an_adversary_that_remembers_stays_in_one_process(ragged):
    plan, work = RECIPES["fedavg"](net(ragged))
    watching = ReportAttack(lambda round, ids, reports: reports)
    with pytest.raises(BadInput, match="ReportAttack remembers"):
        Training(net(ragged), ragged, plan, work, participants=watching, cluster=RayCluster())


def test_one_engine_is_enough(ragged):
    plan, work = RECIPES["fedavg"](net(ragged))
    with pytest.raises(BadInput, match="cluster and make_engine are both given"):
        Training(net(ragged), ragged, plan, work, make_engine=object, cluster=RayCluster())


def listening():
    """(address, port) in hexadecimal of every listening socket of this machine, with its inode."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield fields[1].split(":")[0], fields[9]


def descendants(pid):
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.slow
def test_our_own_cluster_is_on_loopback_alone_and_leaves_nothing(tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(clusters.tempfile, "tempdir", "/tmp")
    before = signal.getsignal(signal.SIGTERM), set(Path("/tmp").iterdir()), dict(os.environ)
    with RayCluster().joined(2) as workers:
        assert workers == 2
        with RayCluster().joined(0) as again:  # the same one, used twice
            assert again == 2
        assert signal.getsignal(signal.SIGTERM) is before[0]
        new = set(Path("/tmp").iterdir()) - before[1]
        (folder,) = [path for path in new if path.name.startswith("fedveil-")]
        assert folder.stat().st_mode & 0o777 == 0o700
        started = [os.getpid(), *descendants(os.getpid())]
        sockets = set()
        for pid in started:
            for file in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(file) if file.is_symlink() else ""
                sockets |= {target[8:-1]} if target.startswith("socket:[") else set()
        places = [address for address, inode in listening() if inode in sockets]
        assert len(places) > 3
        assert set(places) <= LOOPBACK
        with (
            pytest.raises(BadInput, match="this process uses the Ray cluster"),
            RayCluster("127.0.0.1:1").joined(1),
        ):
            pass
    assert not ray.is_initialized()
    assert not folder.exists()
    assert [pid for pid in started[1:] if Path(f"/proc/{pid}/exe").exists()] == []
    assert signal.getsignal(signal.SIGTERM) is before[0]
    assert dict(os.environ) == before[2]


@pytest.mark.slow
def test_nobody_at_the_address_is_one_line():
    with pytest.raises(BadInput, match=r"a Ray cluster at '127\.0\.0\.1:1' is not there") as e:
        RayCluster("127.0.0.1:1").joined(1).__enter__()
    assert "\n" not in str(e.value)
