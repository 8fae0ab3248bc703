"""What to buy, and why: from a model, a fleet and a workload to storage, bandwidth, times and a recommendation."""
