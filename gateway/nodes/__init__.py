"""The fleet as the gateway sees it: links, nodes, streams."""
