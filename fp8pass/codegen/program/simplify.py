"""Programs with fewer steps: sigmoids in place of their formula, and nothing computed twice.

    before   e = exp(-g);  a = g / (e + 1);  p = sigmoid(g);  x = pow(y, 1.0);  b = a * x
    after    p = sigmoid(g);  a = g * p;  b = a * y

Kernels of activations are limited by instructions rather than by memory. PyTorch's decompositions
write silu as a quotient in the forward and with a sigmoid in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fp8pass.codegen.program.ir import Program, Step

_SUMS = "aten.add.Tensor", "aten.add.Scalar"


def simplify(program: Program) -> Program:
    """An equal program, except that its values are rounded elsewhere."""
    stored = {name for store in program.stores for name in (store.name, store.scale)}
    rounded = {store.name for store in program.stores if "full" in store.layouts}
    steps: dict[str, Step] = {}
    equal: dict[object, str] = {}
    renamed: dict[str, str] = {}
    for old in program.steps:
        step = replace(old, args=tuple(renamed.get(x, x) for x in old.args))
        for new in _shorter(step, steps):
            new = replace(new, args=tuple(renamed.get(x, x) for x in new.args))
            same = _operand_itself(new) or equal.get((new.target, new.args))
            if same and new.name not in stored:
                renamed[new.name] = same
            else:
                steps[new.name] = new
                if new.name not in rounded:
                    equal.setdefault((new.target, new.args), new.name)
    return replace(program, steps=tuple(_needed(steps, stored)))


def _shorter(step: Step, steps: dict[str, Step]) -> list[Step]:
    """The steps in place of one: y / (1 + exp(-x)) is y · sigmoid(x), 1 / (1 + exp(-x)) sigmoid."""
    if step.target == "aten.reciprocal.default" and (x := _logistic(step.args[0], steps)):
        return [Step(step.name, "aten.sigmoid.default", (x,))]
    if step.target == "aten.div.Tensor" and (x := _logistic(step.args[1], steps)):
        sigmoid = Step(f"{step.name}_sigmoid", "aten.sigmoid.default", (x,))
        return [sigmoid, Step(step.name, "aten.mul.Tensor", (step.args[0], sigmoid.name))]
    return [step]


def _logistic(name: object, steps: dict[str, Step]) -> str | None:
    """The name of x if a value is 1 + exp(-x), else None."""
    sum_ = steps.get(str(name))
    if sum_ is None or sum_.target not in _SUMS or 1 not in sum_.args or len(sum_.args) != 2:
        return None
    (term,) = (x for x in sum_.args if x != 1)
    power = steps.get(str(term))
    if power is None or power.target != "aten.exp.default":
        return None
    negated = steps.get(power.args[0])
    return negated.args[0] if negated and negated.target == "aten.neg.default" else None


def _operand_itself(step: Step) -> str | None:
    """The operand of a step that returns it unchanged, None for other steps."""
    is_first_power = step.target == "aten.pow.Tensor_Scalar" and step.args[1] == 1
    return step.args[0] if is_first_power else None


def _needed(steps: dict[str, Step], stored: Iterable[str]) -> list[Step]:
    """The steps that stored values depend on, in order."""
    needed = set(stored)
    for step in reversed(steps.values()):
        if step.name in needed:
            needed |= {x for x in step.args if isinstance(x, str)}
    return [step for step in steps.values() if step.name in needed]
