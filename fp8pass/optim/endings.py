"""What an optimizer that steps in backwards has to do when one ends, or fails on its way.

A backward that fails has updated the parameters whose gradients were final, or added these to sums,
and leaves the others as they were. Sums of some parameters would then be a gradient ahead of the
others' for good: all begin again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

from fp8pass import compat
from fp8pass.optim.adamw import AdamW
from fp8pass.optim.sums import Accumulated

log = logging.getLogger("fp8pass")

# The number of the running backward outside of any.
NO_BACKWARD = -1


@dataclass
class Backward:
    """A backward that is running.

    Attributes:
        parameters: how many the optimizer updates.
        gradients: how many were final so far.
        updates: how many of them have updated their parameter; the rest are added to sums.
        ends: whether autograd reports the end. It does not where FSDP2 reduces the gradients of a
            pipeline's stage after the last backward.
    """

    parameters: int
    gradients: int = 0
    updates: int = 0
    ends: bool = True


@dataclass(eq=False)
class Endings:
    """The backwards in which an optimizer steps, until they end.

    Attributes:
        optimizer: the optimizer, which this does not keep alive.
        begin: checks the model when a backward begins; returns how many parameters are updated.
        sums: the sums of their gradients, if there are any.
    """

    optimizer: ref[AdamW]
    begin: Callable[[], int]
    sums: Sequence[Accumulated]
    _running: dict[int, Backward] = field(default_factory=dict)

    def note(self) -> Backward:
        """The backward of a gradient that is final."""
        number = compat.running_backward()
        if number == NO_BACKWARD:
            return Backward(self.begin(), gradients=1, ends=False)
        if number not in self._running:
            self._running[number] = Backward(self.begin())
            compat.after_backward(partial(self._end, number), partial(self._fail, number))
        self._running[number].gradients += 1
        return self._running[number]

    def _end(self, number: int) -> None:
        backward, optimizer = self._running.pop(number), self.optimizer()
        if optimizer is None:
            return
        if backward.updates:  # what follows this backward uses the new weights
            optimizer.join()
        else:  # no one reads a sum but what is added to it next
            optimizer.let_go()

    def _fail(self, number: int) -> None:
        backward, optimizer = self._running.pop(number), self.optimizer()
        if optimizer is not None:
            optimizer.abandon()
        for sum_ in self.sums:
            sum_.clear()
        log.warning(
            "A backward failed after %d of %d gradients: %d parameters have been updated by it, "
            "the others have not.%s Training can go on; to undo these updates, load a checkpoint.",
            *(backward.gradients, backward.parameters, backward.updates),
            " Sums of gradients are dropped: the next backward is the first of new ones."
            if self.sums
            else "",
        )
