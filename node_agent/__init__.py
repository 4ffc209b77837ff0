"""Runs the engines of one machine and speaks for them to the gateways."""
