"""The layers that families are wired from."""
