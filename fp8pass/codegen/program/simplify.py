"""Shorten programs: use `sigmoid` instead of its formula, and compute every value only once.

    before   e = exp(-g);  a = g / (e + 1);  p = sigmoid(g);  x = pow(y, 1.0);  b = a * x
    after    p = sigmoid(g);  a = g * p;  b = a * y

    before   m = row_max(x);  e = exp(x - m);  s = row_sum(e)
    after    m = row_max(x);  s = row_exp_sum(x, m)

    before   g = where(is_column(y), -1, 0);  s = row_sum(g * w)
    after    s = where(0 <= y < N, -1, 0) * w

Instructions rather than memory limit the speed of these kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fp8pass.codegen.program.ir import IS_COLUMN, ROW_EXP_SUM, Program, Step

_SUMS = "aten.add.Tensor", "aten.add.Scalar"


def simplify(program: Program, columns: int) -> Program:
    """Shorten a program for matrices of `columns` columns. Rounding errors may differ."""
    numbers = {load.name for load in program.loads if load.operand in ("row", "scalar")}
    stored = {name for store in program.stores for name in (store.name, store.scale)}
    rounded = {store.name for store in program.stores if "full" in store.layouts}
    steps: dict[str, Step] = {}
    equal: dict[object, str] = {}
    renamed: dict[str, str] = {}
    for old in program.steps:
        step = replace(old, args=tuple(renamed.get(x, x) for x in old.args))
        exact = {name: known for name, known in steps.items() if name not in rounded}
        shorter = _sum_one_hot(step, exact, numbers, columns) or _shorten(step, exact)
        for new in shorter:
            new = replace(new, args=tuple(renamed.get(x, x) for x in new.args))
            same = _find_unchanged(new) or equal.get((new.target, new.args))
            if same and new.name not in stored:
                renamed[new.name] = same
            else:
                steps[new.name] = new
                if new.name not in rounded:
                    equal.setdefault((new.target, new.args), new.name)
    return replace(program, steps=tuple(_remove_unused(steps, stored)))


def _shorten(step: Step, steps: dict[str, Step]) -> list[Step]:
    """Replace y / (1 + exp(-x)) by y · sigmoid(x), and a softmax's denominator by `ROW_EXP_SUM`."""
    if step.target == "aten.reciprocal.default" and (x := _match_logistic(step.args[0], steps)):
        return [Step(step.name, "aten.sigmoid.default", (x,))]
    if step.target == "aten.div.Tensor" and (x := _match_logistic(step.args[1], steps)):
        sigmoid = Step(f"{step.name}_sigmoid", "aten.sigmoid.default", (x,))
        return [sigmoid, Step(step.name, "aten.mul.Tensor", (step.args[0], sigmoid.name))]
    if step.target == "row_sum" and (operands := _match_exponentials(step.args[0], steps)):
        return [Step(step.name, ROW_EXP_SUM, operands)]
    return [step]


def _sum_one_hot(
    step: Step, steps: dict[str, Step], numbers: set[str], columns: int
) -> list[Step] | None:
    """Return steps that replace a `row_sum` of rows with at most one nonzero element, or None.

    The element is the product of a constant and one of `numbers`, which do not vary along a row.
    """
    product = steps.get(str(step.args[0])) if step.target == "row_sum" else None
    if product is None or product.target != "aten.mul.Tensor" or product.args[1] not in numbers:
        return None
    one_hot = steps.get(str(product.args[0]))
    if one_hot is None or one_hot.target != "aten.where.self" or one_hot.args[2] != 0:
        return None
    is_label, value, _ = one_hot.args
    found = steps.get(str(is_label))
    if found is None or found.target != IS_COLUMN or isinstance(value, str):
        return None
    label, weight, name = found.args[0], product.args[1], step.name
    return [
        Step(f"{name}_from", "aten.ge.Scalar", (label, 0)),
        Step(f"{name}_some", "aten.where.self", (f"{name}_from", value, 0.0)),
        Step(f"{name}_to", "aten.lt.Scalar", (label, columns)),
        Step(f"{name}_element", "aten.where.self", (f"{name}_to", f"{name}_some", 0.0)),
        Step(name, "aten.mul.Tensor", (f"{name}_element", weight)),
    ]


def _match_exponentials(name: object, steps: dict[str, Step]) -> tuple[str, str] | None:
    """Return x and its row maximum m, if the value `name` is exp(x - m)."""
    power = steps.get(str(name))
    if power is None or power.target != "aten.exp.default":
        return None
    difference = steps.get(power.args[0])
    if difference is None or difference.target != "aten.sub.Tensor":
        return None
    x, largest = difference.args
    found = steps.get(str(largest))
    is_first = all((s.target, s.args) != (ROW_EXP_SUM, (x, largest)) for s in steps.values())
    is_largest = found is not None and (found.target, found.args) == ("row_max", (x,))
    return (x, largest) if is_largest and is_first else None


def _match_logistic(name: object, steps: dict[str, Step]) -> str | None:
    """Return x if the value `name` is 1 + exp(-x)."""
    sum_ = steps.get(str(name))
    if sum_ is None or sum_.target not in _SUMS or 1 not in sum_.args or len(sum_.args) != 2:
        return None
    (term,) = (x for x in sum_.args if x != 1)
    power = steps.get(str(term))
    if power is None or power.target != "aten.exp.default":
        return None
    negated = steps.get(power.args[0])
    return negated.args[0] if negated and negated.target == "aten.neg.default" else None


def _find_unchanged(step: Step) -> str | None:
    """Return the operand x of x ** 1."""
    is_first_power = step.target == "aten.pow.Tensor_Scalar" and step.args[1] == 1
    return step.args[0] if is_first_power else None


def _remove_unused(steps: dict[str, Step], stored: Iterable[str]) -> list[Step]:
    needed = set(stored)
    for step in reversed(steps.values()):
        if step.name in needed:
            needed |= {x for x in step.args if isinstance(x, str)}
    return [step for step in steps.values() if step.name in needed]
