"""`forebay bench`: measurements that can be repeated anywhere."""

from __future__ import annotations

import click

from forebay.cli.bench_io import bench_io
from forebay.cli.bench_policy import bench_policy
from forebay.cli.bench_restore import bench_restore
from forebay.cli.bench_storm import bench_storm


@click.group()
def bench() -> None:
    """Measure this machine, or compare policies on it."""


bench.add_command(bench_io)
bench.add_command(bench_policy)
bench.add_command(bench_restore)
bench.add_command(bench_storm)
