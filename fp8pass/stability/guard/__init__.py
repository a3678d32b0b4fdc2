"""`Guard` detects that a training is about to fail, names suspects, and can intervene.

guard.py         `Guard`: raises alarms, and decides when an alarm is over
measurements.py  norms, losses and loss scales, copied to the host without waiting
past.py          comparison of measured numbers with medians of earlier numbers
signals.py       thresholds: which numbers are signals, and which tensors are suspects
actions.py       responses to alarms: lower learning rate, high precision, roll back
snapshots.py     copies of weights and optimizer states in host memory
events.py        records of what was detected and done
"""

from __future__ import annotations

from fp8pass.stability.guard.events import Event, Signal, Suspect
from fp8pass.stability.guard.guard import Guard

__all__ = ["Event", "Guard", "Signal", "Suspect"]
