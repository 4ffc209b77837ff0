"""What quantised pages hold, how quick they are when memory is short, and what they cost."""
