"""What a node agent says when it cannot go on: field, found, allowed, remedy."""

from __future__ import annotations


class NodeError(Exception):
    """A fault that a person must mend; `__str__` is one line that holds all four parts."""

    def __init__(self, field: str, *, found: str, allowed: str, remedy: str) -> None:
        super().__init__(f"{field}: found {found}; allowed: {allowed}; remedy: {remedy}")
        self.field = field
        self.found = found
        self.allowed = allowed
        self.remedy = remedy

    def as_dict(self) -> dict[str, str]:
        return {
            "field": self.field,
            "found": self.found,
            "allowed": self.allowed,
            "remedy": self.remedy,
        }
