"""One file a model family: wiring only."""
