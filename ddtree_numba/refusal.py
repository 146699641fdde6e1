"""Bad input from the user of a command: one line, and nothing was done yet."""

from __future__ import annotations

__all__ = ["RefusedError"]


class RefusedError(Exception):
    """Says in one line which `argument` was wrong, what it `got` and what it `needs`; a command ends with code 2."""

    def __init__(self, argument: str, got: object, needs: str) -> None:
        super().__init__(f"{argument}: got {got}, needs {needs}")
