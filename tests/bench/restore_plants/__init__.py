"""Targets for the audit to catch: each is the emulated accelerator, but for one thing."""
