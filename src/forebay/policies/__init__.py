"""Eviction and admission policies, one file each. A policy is found by its module's name or by a dotted path."""
