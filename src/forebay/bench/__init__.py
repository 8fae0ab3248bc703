"""Measurements that a reader can check: the demo, the evidence that reads were physical, and their reports."""
