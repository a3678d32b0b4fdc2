"""A training setup: options of the backend and of the optimizer, as Python code to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType

from fp8pass.config import Config, Simulation
from fp8pass.tools.fitting.traced import is_in_list
from fp8pass.tools.running import find_recipe


@dataclass(frozen=True)
class Setup:
    """A training setup: a configuration of the backend, and options of the optimizer."""

    config: Config = field(default_factory=Config)
    # Whether the optimizer updates each parameter during the backward.
    step_in_backward: bool = False
    # The data in host memory: some of `states`, `gradients` and `weights`.
    offload: tuple[str, ...] = ()

    def lines(self, accumulate: int, blocks: Sequence[str]) -> str:
        """Return Python code that prepares a `model` and an optimizer for this setup.

        A path in `blocks` may end in `.*`, for the members of a list. If `blocks` is empty, the
        model is compiled as a whole.
        """
        found = [f"config = {format_config(self.config)}"]
        if "weights" in self.offload:
            found.append('fp8pass.optim.offload_weights(model, "cuda")')
        else:
            found.append('model.to("cuda")')
        moved = tuple(name for name in self.offload if name != "weights")
        offload = f", offload={moved!r}" if moved else ""
        found.append(f"optimizer = fp8pass.optim.AdamW(model.parameters(){offload})")
        if self.step_in_backward:
            also = f", accumulate={accumulate}" if accumulate > 1 else ""
            found.append(f"fp8pass.optim.step_in_backward(model, optimizer{also})")
        found += [self._compile_text(path, blocks) for path in blocks]
        if not blocks:
            found.append("model = torch.compile(model, backend=fp8pass.backend(config))")
        return "\n".join(found)

    def _compile_text(self, path: str, blocks: Sequence[str]) -> str:
        is_list, has_lists = path.endswith(".*"), any(p.endswith(".*") for p in blocks)
        of_layers = is_list or not has_lists or is_in_list(path)
        unlimited = format_config(replace(self.config, memory_budget=None))
        compiled = f".compile(backend=fp8pass.backend({'config' if of_layers else unlimited}))"
        if is_list:
            return f"for block in model.{path.removesuffix('.*')}:\n    block{compiled}"
        return f'model.get_submodule("{path}"){compiled}'

    def __str__(self) -> str:
        recipe, changes = find_recipe(self.config)
        options = [f"{name}={value!r}" for name, value in changes.items()]
        words = [
            ", ".join([recipe] * (recipe != "coat") + options) or "default",
            "AdamW",
            *(["step_in_backward"] if self.step_in_backward else []),
            *([f"{', '.join(self.offload)} on the host"] if self.offload else []),
        ]
        return " · ".join(words)


def _format_value(value: object) -> str:
    """Write the value of an option as Python code. Functions are written by their names."""
    if isinstance(value, Simulation):
        return f"fp8pass.{value!r}"
    if isinstance(value, tuple):
        parts = ", ".join(map(_format_value, value))
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    return value.__name__ if isinstance(value, FunctionType) else repr(value)


def format_config(config: Config) -> str:
    recipe, changes = find_recipe(config)
    if config.compiler != Config().compiler:
        changes |= {"compiler": config.compiler}
    given = [f"{name}={_format_value(value)}" for name, value in changes.items()]
    if recipe == "coat":
        return f"fp8pass.Config({', '.join(given)})"
    return f"fp8pass.Config.recipe({', '.join([repr(recipe), *given])})"
