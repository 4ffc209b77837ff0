"""The command kagari."""
