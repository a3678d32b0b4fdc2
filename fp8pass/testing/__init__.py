"""Assertions and strategies for property tests of a module's numerics.

    from hypothesis import given
    from fp8pass.testing import assert_close, assert_exact, assert_plan_is_true
    from fp8pass.testing.strategies import matrices

    @given(matrices(columns=64))
    def test_my_layer(x):
        layer = MyLayer(64)
        assert_exact(layer, x)
        assert_close(layer, x, config=Config.recipe("agoq"))
        assert_plan_is_true(layer, x)

`strategies` needs hypothesis, which fp8pass does not install: `pip install hypothesis`.

    checks.py       the assertions
    steps.py        a reproducible training step, comparison of two steps, and saved tensors
    closeness.py    decides whether a step is as close to fp64 as its formats allow
    noise.py        a model of the rounding of formats, independent of the package
    strategies.py   hypothesis strategies: matrices, edges of formats, modules, programs
"""

from fp8pass.dialect.accumulation import hardware_accumulation
from fp8pass.testing.checks import assert_close, assert_exact, assert_plan_is_true
from fp8pass.testing.closeness import Reference
from fp8pass.testing.steps import TrainingStep, assert_same_step, step

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
