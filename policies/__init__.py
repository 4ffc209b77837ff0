"""Decisions as pure functions over values: no I/O, clock, randomness, threads or torch."""
