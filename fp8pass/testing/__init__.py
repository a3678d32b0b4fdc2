"""Property tests of what rounding does to a module: the checks and strategies of fp8pass's own.

    from hypothesis import given
    from fp8pass.testing import assert_close, assert_exact, assert_plan_is_true
    from fp8pass.testing.strategies import matrices

    @given(matrices(columns=64))
    def test_my_layer(x):
        layer = MyLayer(64)
        assert_exact(layer, x)
        assert_close(layer, x, config=Config.recipe("agoq"))
        assert_plan_is_true(layer, x)

`strategies` needs hypothesis, which the package does not: `pip install hypothesis`.

    checks.py       the assertions
    steps.py        a training step from fixed random numbers, and equality of two
    closeness.py    whether a step is as close to fp64 as rounding allows
    noise.py        how far rounding moves gradients, by formats that are written down once more
    kept.py         tensors that a forward keeps, and those that a plan says it keeps
    strategies.py   matrices, numbers at a format's edges, formats, granularities, modules, programs
    programs.py     random programs, as modules
"""

from fp8pass.dialect.accumulation import hardware_accumulation as hardware_accumulation
from fp8pass.testing.checks import assert_close as assert_close
from fp8pass.testing.checks import assert_exact as assert_exact
from fp8pass.testing.checks import assert_plan_is_true as assert_plan_is_true
from fp8pass.testing.closeness import Reference as Reference
from fp8pass.testing.steps import TrainingStep as TrainingStep
from fp8pass.testing.steps import assert_same_step as assert_same_step
from fp8pass.testing.steps import step as step

__all__ = [
    "Reference",
    "TrainingStep",
    "assert_close",
    "assert_exact",
    "assert_plan_is_true",
    "assert_same_step",
    "hardware_accumulation",
    "step",
]
