"""Acceptance gates: limits that are stated beforehand, and verdicts that anybody can check."""
