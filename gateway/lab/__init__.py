"""The live policies on modelled nodes: what routing would do, without a GPU or a clock."""
