"""A program as data: parameters, inputs, instructions, and how it is compiled and run."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import linecache
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass.config import Config

from . import parts
from .events import EVENTS, TOOLS
from .operators import OPERATORS

PARTS = {
    name: value
    for name, value in vars(parts).items()
    if getattr(value, "__module__", "") == parts.__name__
}


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer of the model."""

    shape: tuple[int, ...]
    trained: bool = True
    buffer: bool = False

    def changed(self, **changes: Any) -> Parameter:
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Input:
    """An input of the model.

    Attributes:
        dims: sizes; a string names a size that varies between batches.
        kind: `float`, or `ids` for token ids.
        grad: whether it requires a gradient.
        layout: layout in memory.
    """

    dims: tuple[int | str, ...]
    kind: str = "float"
    grad: bool = True
    layout: str = "contiguous"

    def changed(self, **changes: Any) -> Input:
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Instruction:
    """`name = operator(operands, parameters, buffers)`."""

    name: str
    operator: str
    operands: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()

    def with_operands(self, named: Mapping[str, str]) -> Instruction:
        """Return a copy with other names of operands."""
        return dataclasses.replace(self, operands=tuple(named.get(o, o) for o in self.operands))

    def expression(self) -> str:
        """Return the right-hand side."""
        named = {f"p{i}": f"self.{p}" for i, p in enumerate(self.parameters)}
        named |= {f"b{i}": f"self.{b}" for i, b in enumerate(self.buffers)}
        return OPERATORS[self.operator].template.format(*self.operands, **named)


@dataclass(frozen=True)
class Program:
    """A drawn program and how to run it.

    Attributes:
        seed: seed of parameters and inputs.
        inputs, parameters: by name.
        code: the instructions.
        returned: names of the returned values.
        batches: sizes by name, for each step.
        events: actions of the user before each step but the first (events.py), '' for none.
        dtype: dtype of parameters and inputs, or `autocast`: fp32 under autocast to bf16.
        dynamic: whether it is compiled with dynamic shapes.
        recipe, options: how it is compiled.
        compiler: what runs the rewritten graphs: `eager`, op by op; `lowered`, op by op after the
            passes on forward and backward graphs; `inductor`.
        path: the reference of recipe `exact`: `aot`, `inductor`.
        observed: whether the plan is compared with the tensors that autograd saves.
    """

    seed: int
    inputs: dict[str, Input]
    parameters: dict[str, Parameter]
    code: tuple[Instruction, ...]
    returned: tuple[str, ...]
    batches: tuple[dict[str, int], ...]
    dtype: str = "float32"
    dynamic: bool = False
    recipe: str = "exact"
    options: dict[str, Any] = field(default_factory=dict)
    compiler: str = "eager"
    path: str = "inductor"
    observed: bool = True
    events: tuple[str, ...] = ()

    def changed(self, **changes: Any) -> Program:
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)

    @property
    def config(self) -> Config:
        """Return the configuration of the compilation."""
        compiler = "eager" if self.compiler == "eager" else "inductor"
        return Config.recipe(self.recipe, compiler=compiler, fp8_gemms="all", **self.options)

    @property
    def is_bitwise(self) -> bool:
        """Whether results must equal the reference bit by bit."""
        return self.recipe == "exact" and self.compiler == "eager"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of parameters and inputs."""
        return torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)

    def used(self) -> set[str]:
        """Return all names in instructions and results."""
        found = set(self.returned)
        for i in self.code:
            found.update(i.operands, i.parameters, i.buffers)
        return found

    # --- as Python --------------------------------------------------------------------------------

    def model_source(self) -> str:
        """Return the source of the model's class."""
        return "\n".join(
            [
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                f"        torch.manual_seed({self.seed})",
                *(f"        {line}" for line in self._declarations()),
                "",
                f"    def forward(self, {', '.join(self.inputs)}):",
                *(f"        {i.name} = {i.expression()}" for i in self.code),
                f"        return [{', '.join(self.returned)}]",
                "",
            ]
        )

    def _declarations(self) -> Iterator[str]:
        # Biases have mean 0, because error rules assume that inputs of norms have no mean.
        biases = {i.parameters[-1] for i in self.code if i.operator in ("bias", "biased")}
        for name, p in self.parameters.items():
            size = ", ".join(map(str, p.shape))
            value = f"torch.randn({size}) / 8"
            value = value if name in biases else f"1 + {value}"
            if p.buffer:
                yield f"self.register_buffer({name!r}, 1 + torch.rand({size}))"
                continue
            if len(p.shape) > 1:
                fan_in = p.shape[1]
                value = f"torch.randn({size}) / {fan_in**0.5:.3f}"
            trained = "" if p.trained else ", requires_grad=False"
            yield f"self.{name} = nn.Parameter({value}{trained})"

    def helper_source(self) -> str:
        """Return the source of the functions that the model calls."""
        called = self.model_source()
        return "\n\n".join(
            inspect.getsource(value)
            for name, value in PARTS.items()
            if re.search(rf"\b{name}\(|\b{name}\.apply", called)
        )

    # --- as a model -------------------------------------------------------------------------------

    def model(self, device: str = "cpu") -> nn.Module:
        """Return the model with its parameters."""
        source = self.model_source()
        file = f"/fuzzed/{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        namespace: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, **PARTS, "__name__": file}
        exec(compile(source, file, "exec"), namespace)
        return namespace["Model"]().to(self.torch_dtype).to(device)

    def batch(self, index: int, device: str = "cpu") -> list[Tensor]:
        """Return the inputs of a step."""
        # With the seed of the parameters a batch would have the numbers of the first parameter.
        generator = torch.Generator().manual_seed(self.seed + 1 + index)
        sizes = self.batches[index]
        return [
            make_input(
                i.kind, [sizes.get(d, d) for d in i.dims], i.layout, generator, self.torch_dtype
            )
            .to(device)
            .requires_grad_(i.grad and i.kind == "float")
            for i in self.inputs.values()
        ]

    def act(self, model: nn.Module, index: int) -> None:
        """Change the model before a step, as its event demands."""
        if event := EVENTS.get(self._event(index)):
            event(model)

    def use_tools(self, compiled: Any, index: int, batch: Sequence[Any]) -> None:
        """Run a tool before a step, if its event is a tool."""
        if tool := TOOLS.get(self._event(index)):
            tool(compiled, batch)

    def _event(self, index: int) -> str:
        return self.events[index - 1] if 0 < index <= len(self.events) else ""

    def all_batches(self, device: str = "cpu") -> list[list[Tensor]]:
        """Return the inputs of all steps."""
        return [self.batch(i, device) for i in range(len(self.batches))]


def make_input(
    kind: str, shape: list[int], layout: str, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Return a random input with a layout."""
    if kind == "ids":
        return torch.randint(48, shape, generator=generator)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    if layout == "transposed":
        return draw(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "expanded":
        return draw(1, *shape[1:]).expand(shape)
    if layout == "sliced":
        return draw(2 * shape[0], *shape[1:])[::2]
    return draw(*shape)


def rng_of(seed: int, index: int) -> random.Random:
    """Return the random number generator of a program of a run."""
    return random.Random(f"{seed}/{index}")
