"""`Guard` detects that a training is about to fail, names suspects, and can intervene.

guard.py         `Guard`: raises alarms, and decides when an alarm is over
measurements.py  norms, losses and loss scales, copied to the host without waiting
past.py          comparison of measured numbers with medians of earlier numbers
signals.py       thresholds for signals and suspects; the records `Event`, `Signal`, `Suspect`
actions.py       responses to alarms: lower learning rate, high precision, roll back
snapshots.py     copies of weights and optimizer states in host memory
"""

from __future__ import annotations

from fp8pass.stability.guard.guard import Guard
from fp8pass.stability.guard.signals import Event, Signal, Suspect

__all__ = ["Event", "Guard", "Signal", "Suspect"]
