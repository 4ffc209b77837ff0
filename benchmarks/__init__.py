"""Each headline number as a command that prints a ratio."""
