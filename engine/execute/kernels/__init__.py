"""Every op in plain torch (the reference), and the faster versions registered beside it."""
