"""Who is billed what: keys, rows, rollups."""
