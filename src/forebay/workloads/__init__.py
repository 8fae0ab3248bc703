"""Requests over time, to replay against a policy, a simulated machine or a real engine. One file a workload.

A workload is a module with an `Options` struct and `build(options)`, which returns a `Workload`. The same options, seed
included, give the same workload on every machine.
"""

from forebay.workloads.arrival import Arrival, Workload

__all__ = ["Arrival", "Workload"]
