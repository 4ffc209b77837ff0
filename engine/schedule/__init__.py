"""Which sequences run, on which pages: no torch in this folder."""
