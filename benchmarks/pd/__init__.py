"""Prefill and decode apart, beside nodes that do both: what readers of streams feel."""
