"""Engines: where a cohort's work runs, never what it computes."""

from fedveil.training.cohort import CohortData
from fedveil.training.engines.engine import Engine, Job
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.evaluate import evaluate
from fedveil.training.exchange import client_report, server_sum
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.reports import ClientBatch, CohortSum

__all__ = [
    "ClientBatch",
    "CohortData",
    "CohortSum",
    "Engine",
    "Job",
    "Mode",
    "RayCluster",
    "client_report",
    "evaluate",
    "gradients_of",
    "server_sum",
]
