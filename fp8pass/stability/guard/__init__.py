"""A guard of training: it notices that a run is about to fail, says where, and acts if asked to.

norms.py       norms of every parameter, its gradient and its change, measured on their device
readings.py    those and each step's loss, on their way to the host without waiting
loss_scale.py  the factor that a `GradScaler` leaves in gradients
trend.py       how far a number has risen above its recent past, by medians
history.py     how far each of many numbers is from its own past
signals.py     thresholds: which numbers are a signal, which tensors are suspect
snapshots.py   copies of weights and optimizer states on the host, trusted after quiet steps
rate.py        a lower learning rate, whatever schedule sets it
responses.py   what is done about alarms, and when it ends
events.py      the record of what was noticed and done
callbacks.py   callbacks for Hugging Face's and Lightning's `Trainer`
guard.py       `Guard`, which puts these together: alarms, and what becomes of them
"""

from __future__ import annotations

from fp8pass.stability.guard.events import Event, Signal, Suspect
from fp8pass.stability.guard.guard import Guard

__all__ = ["Event", "Guard", "Signal", "Suspect"]
