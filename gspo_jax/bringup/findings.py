"""Results of checks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    """What was checked, a short noun phrase."""
    state: str
    """One of "ok", "warning" and "failed"."""
    found: str
    """One sentence or phrase with figures."""
    remedy: str = ""
    """Command or step that mends it. Empty if ok."""
