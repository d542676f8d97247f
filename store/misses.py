"""Why an object did not come into the CPU pool."""

from __future__ import annotations

import enum


class Miss(enum.Enum):
    """A reason for a load without a result."""

    ABSENT = enum.auto()
    """No tier has it."""
    DAMAGED = enum.auto()
    """What was there was wrong, and is deleted."""
    AWAY = enum.auto()
    """The tier that may have it does not answer."""
    LATE = enum.auto()
    """It did not come in time."""
    NO_ROOM = enum.auto()
    """The pool has no room for it."""
