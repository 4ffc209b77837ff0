"""Text in and out: template, tokenise, detokenise, stop strings."""
