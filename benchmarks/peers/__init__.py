"""Other engines and gateways to measure beside, each in an environment of its own."""
