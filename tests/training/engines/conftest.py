"""A Ray cluster of several nodes on this machine, on its loopback interface."""

import gc
import os
import warnings
from unittest.mock import patch

import pytest

from fedveil.training.engines.ray_cluster import _SETTINGS


@pytest.fixture
def open_cluster():
    """Makes a cluster of nodes with so many cores each; it ends with the test."""
    import ray
    import ray._private.ray_constants as constants
    from ray.cluster_utils import Cluster

    made = []

    def make(*cores):
        with patch.dict(os.environ, _SETTINGS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            of_node = {"include_dashboard": False, "object_store_memory": 200 * 2**20}
            of_head = {"_system_config": {"health_check_failure_threshold": 20}, **of_node}
            cluster = Cluster(True, head_node_args={"num_cpus": cores[0], **of_head})
            made.append(cluster)
            for count in cores[1:]:
                cluster.add_node(num_cpus=count, **of_node)
            cluster.wait_for_nodes()
        return cluster

    with patch.object(constants, "ENABLE_RAY_CLUSTER", False):
        yield make
        assert not ray.is_initialized()
        for cluster in made:
            cluster.shutdown()
    made.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray leaves files open
        gc.collect()
