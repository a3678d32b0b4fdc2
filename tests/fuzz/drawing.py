"""Draw programs. Each instruction must run in eager PyTorch."""

from __future__ import annotations

import random
import types
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8pass.testing.closeness import Reference
from fp8pass.testing.noise import Formats

from .events import EVENTS, TOOLS
from .operators import EMBEDDING, FAMILIES, OPERATORS, RANDOM, Operator, Shape
from .program import PARTS, Input, Instruction, Parameter, Program, make_input, rng_of

WIDTHS = (16, 32, 32, 48, 64, 64, 64, 96, 128, 24, 40)
ROWS = (16, 16, 32, 48, 64, 1, 7, 17, 33)
RECIPES = {"exact": 0.36, "coat": 0.32, "agoq": 0.2, "linear": 0.12}
LARGEST = 32 * 1024  # elements of a value
OPTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("memory_budget", (0.6, 0.8, 0.95)),
    ("group_size", (16, 32, 64)),
    ("scales", ("rowwise", "tensorwise", "mx")),
    ("gradient_format", ("e4m3", "e5m2")),
    ("save_format", ("e2m3", "e2m2", "e4m3", "none")),
    ("quantize_lm_head", (True,)),
)


def draw(seed: int, index: int, inductor_share: float = 0.0, recipe: str | None = None) -> Program:
    """Draw a program, which depends on the arguments only."""
    rng = rng_of(seed, index)
    for _ in range(50):
        program = _Drawing(rng).program(inductor_share, recipe)
        if program and runs(program):
            return program
    raise AssertionError(f"no program could be drawn for {seed}/{index}")


def runs(program: Program) -> bool:
    """Whether eager PyTorch runs a program in its dtype and in fp64, with finite gradients."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = Reference(
                program.model(), program.all_batches, Formats(), in_mode(program),
                between=program.act,
            )  # fmt: skip
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        return False
    steps = [*found.plain, *found.exact]
    gradients = [g for s in steps for g in s.gradients.values() if g is not None]
    results = [*gradients, *(y for s in steps for y in s.outputs)]
    return all(x.isfinite().all() for x in results) and any(g.any() for g in gradients)


def in_mode(program: Program, device: str = "cpu") -> Any:
    """Return a wrapper of the model that enables autocast if the program needs it."""

    def wrap(run: Any) -> Any:
        def under_autocast(*args: Any) -> Any:
            with torch.autocast(device, torch.bfloat16):
                return run(*args)

        return under_autocast if program.dtype == "autocast" else run

    return wrap


class _Drawing:
    """An attempt to draw a program, with its values so far, computed in eager PyTorch."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.seed = rng.randrange(10**6)
        torch.manual_seed(self.seed)
        self.inputs: dict[str, Input] = {}
        self.parameters: dict[str, Parameter] = {}
        self.values: dict[str, Tensor] = {}
        self.code: list[Instruction] = []
        self.module = types.SimpleNamespace()

    def program(self, inductor_share: float, recipe: str | None) -> Program | None:
        rng = self.rng
        sizes = {"S": rng.choice(ROWS)}
        dynamic = rng.random() < 0.15
        if rng.random() < 0.5:
            sizes["B"] = rng.choice((1, 2, 2, 3, 4))
        self._draw_inputs(sizes)
        for _ in range(rng.randint(2, 12)):
            self._draw_instruction()
        if not any(p.shape[1:] for p in self.parameters.values()):
            return None
        batches = [sizes]
        if dynamic:
            batches += [{k: v + rng.choice((1, 3, 16)) for k, v in sizes.items()} for _ in range(2)]
        elif rng.random() < 0.35:
            batches.append(dict(sizes))
        drawn = recipe or rng.choices(list(RECIPES), list(RECIPES.values()))[0]
        program = Program(
            self.seed, self.inputs, self.parameters, tuple(self.code), self._draw_returned(),
            tuple(batches), self._draw_dtype(), dynamic, drawn, events=self._draw_events(batches),
        )  # fmt: skip
        program = self._with_options(remove_unused(program), inductor_share)
        return program if _has_reference(program) else None

    def _draw_events(self, batches: list[dict[str, int]]) -> tuple[str, ...]:
        names = ("", *EVENTS, *TOOLS)
        weights = (len(names), *[1] * (len(names) - 1))  # no event in half of the steps
        return tuple(self.rng.choices(names, weights, k=len(batches) - 1))

    def _draw_dtype(self) -> str:
        names = ("float32", "bfloat16", "float16", "autocast")
        return self.rng.choices(names, (55, 30, 5, 10))[0]

    def _with_options(self, program: Program, inductor_share: float) -> Program:
        rng = self.rng
        compiler = rng.choices(
            ("inductor", "lowered", "eager"),
            (inductor_share, 0.25 * (1 - inductor_share), 0.75 * (1 - inductor_share)),
        )[0]
        options: dict[str, Any] = {}
        if program.recipe != "exact" and rng.random() < 0.3:
            name, choices = rng.choice(OPTIONS)
            options[name] = rng.choice(choices)
        elif rng.random() < 0.1:
            options["memory_budget"] = rng.choice((0.7, 0.9))
        aot = program.recipe == "exact" and compiler == "eager" and not options
        path = "aot" if aot and rng.random() < 0.3 else "inductor"
        return program.changed(
            options=options, compiler=compiler, path=path, observed=rng.random() < 0.4
        )

    def _draw_inputs(self, sizes: dict[str, int]) -> None:
        rng = self.rng
        rows = tuple(sorted(sizes))  # B before S
        for i in range(rng.choice((1, 1, 2))):
            dims = (*rows, rng.choice(WIDTHS)) if rng.random() < 0.9 else ("S", 2, 4, 32)
            kind = "ids" if rng.random() < 0.15 else "float"
            layout = rng.choice(("contiguous",) * 7 + ("transposed", "expanded", "sliced"))
            self._add_input(f"x{i}", dims, kind, layout, sizes)

    def _add_input(
        self, name: str, dims: tuple[int | str, ...], kind: str, layout: str, sizes: dict[str, int]
    ) -> None:
        rng = self.rng
        dims = dims[:-1] if kind == "ids" else dims
        grad = rng.random() < 0.6 and kind == "float"
        layout = layout if kind == "float" else "contiguous"
        self.inputs[name] = Input(dims, kind, grad, layout)
        shape = [sizes.get(d, d) for d in dims]
        generator = torch.Generator().manual_seed(self.seed)
        value = make_input(kind, shape, layout, generator, torch.float32)
        self.values[name] = value
        if kind == "ids":
            self._take("embedding", EMBEDDING, (name,))

    def _draw_instruction(self) -> None:
        """Draw until an instruction runs and its result is usable."""
        weights = [weight for weight, _ in FAMILIES.values()]
        for _ in range(20):
            family = self.rng.choices(list(FAMILIES), weights)[0]
            operators = FAMILIES[family][1]
            name = self.rng.choices(list(operators), [o.weight for o in operators.values()])[0]
            operands = self._draw_operands(operators[name].operands)
            if operands and self._take(name, operators[name], operands):
                return

    def _draw_operands(self, count: int) -> tuple[str, ...] | None:
        """Draw names of values. Later values and equal shapes are more frequent."""
        names = [n for n, v in self.values.items() if v.is_floating_point() and v.ndim > 1]
        if not names:
            return None
        first = self.rng.choices(names, [1.5**i for i in range(len(names))])[0]
        alike = [n for n in names if self.values[n].shape == self.values[first].shape]
        pool = alike if self.rng.random() < 0.85 else names
        return (first, *(self.rng.choice(pool) for _ in range(count - 1)))

    def _take(self, name: str, operator: Operator, operands: tuple[str, ...]) -> bool:
        """Append an instruction if it runs. Return whether it did."""
        width = self.values[operands[0]].shape[-1] if operator is not EMBEDDING else 0
        n = self.rng.choice(WIDTHS)
        parameters = [self._draw_parameter(s, width, n, False) for s in operator.parameters]
        buffers = [self._draw_parameter(s, width, n, True) for s in operator.buffers]
        names = tuple(p for p, _ in parameters), tuple(b for b, _ in buffers)
        instruction = Instruction(f"v{len(self.code)}", name, operands, *names)
        new = {p: q for p, q in (*parameters, *buffers) if p not in self.parameters}
        value = self._compute(instruction, new)
        if value is None:
            return False
        self.parameters.update(new)
        self.code.append(instruction)
        self.values[instruction.name] = value
        return True

    def _draw_parameter(self, shape: Shape, d: int, n: int, buffer: bool) -> tuple[str, Parameter]:
        """Draw a new parameter or buffer, or sometimes an existing one."""
        sizes = tuple({"d": d, "n": n}.get(s, s) if isinstance(s, str) else s for s in shape)
        alike = [
            name for name, p in self.parameters.items() if p.shape == sizes and p.buffer == buffer
        ]
        if alike and self.rng.random() < 0.35:
            name = self.rng.choice(alike)
            return name, self.parameters[name]
        trained = self.rng.random() < 0.88
        return f"{'b' if buffer else 'w'}{self.rng.randrange(10**4)}", Parameter(
            sizes, trained and not buffer, buffer
        )

    def _compute(self, instruction: Instruction, new: dict[str, Parameter]) -> Tensor | None:
        for name, p in new.items():
            scale = p.shape[1] ** 0.5 if len(p.shape) > 1 else 8
            value = torch.randn(p.shape) / scale + (0 if len(p.shape) > 1 else 1)
            setattr(self.module, name, value)
        values = {n: v.clone() for n, v in self.values.items()}
        namespace = {"torch": torch, "F": F, "self": self.module, **PARTS, **values}
        try:
            value = eval(instruction.expression(), namespace)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
            return None
        return value if _is_usable(value) else None

    def _draw_returned(self) -> tuple[str, ...]:
        """Draw the returned values: all unread values and up to two more."""
        names = [i.name for i in self.code]
        more = self.rng.sample(names, min(len(names), self.rng.choice((0, 0, 1, 2))))
        read = {o for i in self.code for o in i.operands}
        ends = [n for n in names if n not in read]
        return tuple(dict.fromkeys([*ends, *more]))


def _is_usable(value: Any) -> bool:
    """Whether a value is a tensor of usual size and magnitude."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    if value.numel() > LARGEST or value.ndim > 4 or not value.isfinite().all():
        return False
    magnitude = float(value.float().square().mean().sqrt())
    return 1e-3 < magnitude < 20


def _has_reference(program: Program) -> bool:
    """Whether a correct reference draws the same random numbers.

    Stock PyTorch can be wrong if a forward writes to buffers. Eager PyTorch draws other numbers.
    """
    operators = [OPERATORS[i.operator] for i in program.code]
    writes = any(o.buffers for o in operators)
    if writes and any(i.operator in RANDOM for i in program.code):
        return False
    if any(o.random for o in operators) and not program.is_bitwise:
        return False
    narrow = program.dtype != "float32" and program.compiler == "inductor"
    return not (narrow and any(o.ties for o in operators))


def remove_unused(program: Program) -> Program:
    """Remove unused instructions, parameters and inputs."""
    code: list[Instruction] = []
    needed = set(program.returned)
    writes = ("_(", "moving_average", "read_before", "counted", "observed", "batch_norm", "half_")
    for i in reversed(program.code):
        if i.name in needed or any(w in i.expression() for w in writes):
            code.insert(0, i)
            needed.update(i.operands, i.parameters, i.buffers)
    return program.changed(
        code=tuple(code),
        parameters={n: p for n, p in program.parameters.items() if n in needed},
        inputs={n: i for n, i in program.inputs.items() if n in needed} or program.inputs,
    )
