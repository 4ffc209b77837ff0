"""A modest tenant beside a greedy one: how long its first tokens take, with turns and without."""
