"""An error a person can act on: the field, what was found, what is allowed, the remedy."""

from __future__ import annotations

FAILED = 1  # the command ran and the answer is no
MISUSED = 2  # the command line or the machine must change first


class Problem(Exception):
    """Ends a command; `main` prints the four parts on stderr and leaves with `exit_code`."""

    def __init__(
        self, field: str, *, found: str, allowed: str, remedy: str, exit_code: int = MISUSED
    ) -> None:
        super().__init__(f"{field}: {found}")
        self.field = field
        self.found = found
        self.allowed = allowed
        self.remedy = remedy
        self.exit_code = exit_code

    def __str__(self) -> str:
        return (
            f"error: {self.field}\n"
            f"  found:   {self.found}\n"
            f"  allowed: {self.allowed}\n"
            f"  remedy:  {self.remedy}"
        )
