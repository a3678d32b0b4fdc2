"""The time of an optimizer step: a roofline of the GPU, and the link to the host beside it."""

from __future__ import annotations

from dataclasses import dataclass

from fp8pass.hardware import Gpu, Work
from fp8pass.tools.fitting.parameters import Parameters
from fp8pass.tools.fitting.setup import Setup

# The CPU takes so long to launch the update of one parameter within the backward: Llama-2-7B's 291
# take 12 ms a step on an H200 (benchmarks/results/model.json).
ATTACHED_SECONDS = 40e-6


@dataclass(frozen=True)
class Seconds:
    """Where the time of a step goes.

    Attributes:
        forward, backward: of all micro-batches.
        update: of the optimizer, and of adding up gradients.
        waiting: for the link to the host, while nothing else runs.
        link: for which the link is busy, the busier way.
    """

    forward: float
    backward: float
    update: float
    waiting: float
    link: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.forward + self.backward + self.update + self.waiting


def step_seconds(
    work: tuple[Work, Work], parameters: Parameters, setup: Setup, accumulate: int, gpu: Gpu
) -> Seconds:
    """The time of a step of `accumulate` micro-batches.

    Args:
        work: of the forward and the backward of a micro-batch.
        parameters: of the model.
        setup: the way to train.
        accumulate: backwards whose gradients are added up.
        gpu: the GPU.
    """
    forward, backward = map(gpu.seconds, work)
    here, host = parameters.place(setup, accumulate)
    gradients = parameters.gradient_bytes
    sums = here.sums + host.sums
    # Moved: weights and gradients, three times their bytes; states, read and written.
    update = (3 * gradients + 2 * (here.states + host.states)) / gpu.bandwidth
    if setup.attach:
        update += ATTACHED_SECONDS * len(parameters.trained)
    adding = (gradients + 2 * sums) / gpu.bandwidth if accumulate > 1 else 0.0
    one_way, sums_one_way = (host.states + host.weights) / gpu.link, host.sums / gpu.link
    # Beside the backward if it updates parameters, otherwise beside the updates alone.
    beside = backward + adding if setup.attach else 0.0
    waits = (accumulate - 1) * max(0.0, sums_one_way - beside)
    waits += max(0.0, one_way + sums_one_way - beside - update)
    return Seconds(
        accumulate * forward,
        accumulate * backward,
        (accumulate - 1) * adding + update,
        waits,
        one_way + accumulate * sums_one_way,
    )
