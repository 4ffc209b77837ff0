"""The two faults text can have: the caller's (TextError, a 400) and the node's (BundleError)."""

from __future__ import annotations


class TextError(Exception):
    """The caller's text cannot become a prompt: field, what was found, what is allowed, remedy."""

    def __init__(
        self, field: str, *, found: str, allowed: str, remedy: str, code: str = "invalid_prompt"
    ) -> None:
        super().__init__(f"{field}: found {found}; allowed: {allowed}; {remedy}")
        self.field = field
        self.found = found
        self.allowed = allowed
        self.remedy = remedy
        self.code = code  # a name from docs/errors.md


class BundleError(ValueError):
    """A published bundle cannot serve text; the node that published it is at fault."""
