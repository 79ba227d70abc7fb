"""autopar: from an ordinary model and a cluster to a distributed training program."""

from autopar.workload import Workload, parallelize

__all__ = ["Workload", "parallelize"]
