"""The live show: what affinity and the cache are worth, on real processes and a real model."""
