"""Slower tiers: how soon a prefix comes back from each, and what keeping it costs a step."""
