"""`RayCluster`: an existing Ray cluster, or one of our own on this machine.

Our own listens on the loopback interface only and requires a secret token. It reports no usage, has
no dashboard, and keeps its files, in which records may be, in a folder that only this user can
open. It ends with its last user, and the folder with it. A cluster that was merely joined is left
as it was found.
"""

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fedveil.base.checks import check_address, shown
from fedveil.base.errors import BadInput, one_line
from fedveil.training.engines.processes import available_workers

OOM_RETRIES = 2
"""How often our own cluster repeats a task that ran out of memory. Ray itself never stops."""

_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_PATIENT = {"task_oom_retries": OOM_RETRIES, "health_check_failure_threshold": 100}
_TOKEN = secrets.token_hex(32)


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster to compute on: the one at `address`, or with None one of our own.

    `address` is "auto", for the cluster that this machine belongs to, or the head's "host:port".

    | edge | behaviour |
    |---|---|
    | the package ray is missing | BadInput: names the extra |
    | an address that is empty or a Ray Client's ("ray://...") | BadInput |
    | nobody answers at the address | BadInput when it is joined, before anything is charged |
    | this process is connected to another cluster | BadInput when it is joined |
    | this process was connected by somebody else | their connection is used and left open |
    """

    address: str | None = None

    def __post_init__(self) -> None:
        check_address("address", self.address)
        check_package()

    @contextmanager
    def joined(self, workers: int) -> Iterator[int]:
        """Context manager: connect, and yield the number of workers.

        It is `workers`, or with 0 the number of the cluster's cores. Uses may be nested: the first
        connects, the last disconnects. Raises BadInput as the table of the class says, and for a
        cluster without cores.
        """
        _enter(self.address, workers)
        try:
            there = cluster_cores()
            if not (workers or there):
                raise BadInput("the Ray cluster has no core: add a node that has, or wait for one")
            yield workers or there
        finally:
            with _Connection.lock:
                _Connection.users -= 1
                if not _Connection.users:
                    _Connection.opened.close()


def cluster_cores() -> int:
    """The number of CPU cores of the Ray cluster that this process is connected to."""
    import ray

    untyped: Any = ray
    return int(untyped.cluster_resources().get("CPU", 0))


def check_package() -> None:
    """Raise BadInput if Ray is not installed, without importing it."""
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:  # a folder of that name is no package
        raise BadInput("engine 'ray' needs a package: pip install 'fedveil[ray]'")


class _Connection:
    """State of this process's one connection to Ray, as class attributes.

    Attributes:
        users: The number of open uses.
        address: The address in use.
        opened: Undoes what we opened. Empty if somebody else connected.
        lock: Guards the other attributes.
    """

    users = 0
    address: str | None = None
    opened = ExitStack()
    lock = threading.RLock()


def _enter(address: str | None, workers: int) -> None:
    """Count one more user of the cluster at `address`, and connect if this process is not.

    Raises BadInput if another cluster is in use.
    """
    import ray

    with _Connection.lock:
        if _Connection.users and _Connection.address != address:
            raise BadInput(
                f"this process uses the Ray cluster {shown(_Connection.address or 'of its own')}: "
                f"finish there before {shown(address or 'one of its own')}"
            )
        if not ray.is_initialized():
            with ExitStack() as opened:
                _connect(address, workers, opened)
                _Connection.opened = opened.pop_all()
        _Connection.users, _Connection.address = _Connection.users + 1, address


def _connect(address: str | None, workers: int, opened: ExitStack) -> None:
    """Connect to the cluster at `address`, or start one of `workers` cores (0: all) if None.

    Callbacks that undo it are added to `opened`. Raises BadInput if it fails.
    """
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        folder = tempfile.mkdtemp(prefix="fedveil-")
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        opened.enter_context(_loopback_with_token())
        options |= {
            "num_cpus": workers or available_workers(),
            "num_gpus": 0,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": os.path.join(folder, "ray"),
            "_system_config": _PATIENT,
        }
    try:
        _check_reachable(address)
        with patch.dict(os.environ, _SETTINGS), _keep_sigterm(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if address is None:
                os.environ.pop("RAY_ADDRESS", None)
            ray.init(address=address, **options)
    except Exception as e:
        ray.shutdown()
        what = "cannot be started here" if address is None else f"at {shown(address)} is not there"
        raise BadInput(
            f"a Ray cluster {what}: {one_line(e)}; start one (ray start --head), or use engine "
            "'processes'"
        ) from e
    opened.callback(_disconnect)


def _check_reachable(address: str | None) -> None:
    """Raise OSError at once if nobody answers at "host:port". Ray would try for minutes.

    Does nothing for None and "auto".
    """
    if address not in (None, "auto"):
        host, _, port = str(address).rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _disconnect() -> None:
    """Disconnect from Ray, which ends a cluster of our own."""
    import ray

    with _keep_sigterm():
        ray.shutdown()


@contextmanager
def _loopback_with_token() -> Iterator[None]:
    """Context manager: a cluster started inside listens on loopback only and requires the token.

    Ray replaces the loopback address by one that others reach, unless clusters are ruled out.
    """
    import ray._private.ray_constants as constants

    wanted: dict[str, str | None] = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    before = {name: os.environ.get(name) for name in wanted}
    with patch.object(constants, "ENABLE_RAY_CLUSTER", False):
        _set_authentication(wanted)
        try:
            yield
        finally:
            _set_authentication(before)


def _set_authentication(environment: dict[str, str | None]) -> None:
    """Set environment variables that Ray reads on import, and make Ray read them again.

    The value None removes a variable.
    """
    from ray import _raylet

    inner: Any = _raylet
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    inner.AuthenticationTokenLoader.instance().reset_cache()
    inner.Config.initialize("")


@contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Context manager: restore the handler of SIGTERM afterwards, which Ray replaces.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
