"""How long a row may take: its whole time, or less once others of its verifier have shown that what takes long hangs."""

import dataclasses
from collections import defaultdict

LEAST_SECONDS = 0.5
"""CPU or idle time that every row has, also one that is taken to hang because others do."""
OUTLIER = 4
"""Times the longest row of the verifier that came to a verdict: less is no sign of hanging."""


@dataclasses.dataclass
class _Known:
    """Of a verifier: the longest clocks of a row with a verdict, and how many rows of this batch ran out of their whole time."""

    cpu: float = 0.0
    idle: float = 0.0
    hung: int = 0


class Patience:
    """Limits of a row's two clocks, CPU and idle seconds.

    Rows that hang shall cost a batch one deadline, not one each. When ``enough`` rows of a verifier have run out of ``cpu`` or ``wall``
    seconds, its others are given up with them, but only those that have had :data:`LEAST_SECONDS`, and :data:`OUTLIER` times what any
    of its rows ever took to a verdict. So rows of a slow verifier keep their whole time, and so does the first row of every batch.
    """

    def __init__(self, cpu: float, wall: float, enough: int) -> None:
        self.cpu, self.wall, self.enough = cpu, wall, enough
        self._known: defaultdict[str, _Known] = defaultdict(_Known)

    def limits(self, verifier: str) -> tuple[float, float, str]:
        """``(CPU seconds, idle seconds, why they are less than all)``."""
        known = self._known[verifier]
        if known.hung < self.enough:
            return self.cpu, self.wall, ""
        cpu, wall = (min(whole, max(LEAST_SECONDS, round(OUTLIER * longest, 1))) for whole, longest in ((self.cpu, known.cpu), (self.wall, known.idle)))
        return cpu, wall, f", since other rows ran out of all their time ({self.cpu:g} s, waiting {self.wall:g} s)"

    def had_verdict(self, verifier: str, cpu: float, idle: float) -> None:
        known = self._known[verifier]
        known.cpu, known.idle = max(known.cpu, cpu), max(known.idle, idle)

    def ran_out(self, verifier: str, cpu: float, idle: float) -> None:
        """A row was given up; only one that had its whole time is evidence."""
        self._known[verifier].hung += cpu > self.cpu or idle > self.wall

    def forget(self) -> None:
        """A batch is over: that rows of it hung says nothing about the next."""
        for known in self._known.values():
            known.hung = 0
