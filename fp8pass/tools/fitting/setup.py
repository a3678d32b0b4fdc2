"""A way to train: the options of the backend and of the optimizer, as lines to paste."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8pass.config import RECIPES, Config


def in_list(path: str) -> bool:
    """Whether a module is one of several in a list: a memory budget is for these, if there are."""
    return any(part.isdigit() for part in path.split("."))


# What may be on the host, in the words of `AdamW` and `offload_weights`.
OFFLOAD = ("states", "gradients", "weights")


@dataclass(frozen=True)
class Setup:
    """The options of one way to train.

    Attributes:
        config: of the backend.
        attach: whether each parameter is updated within the backward.
        offload: what is on the host, of `OFFLOAD`.
        preset: of `fp8pass.optim.AdamW`; None for `torch.optim.AdamW`.
    """

    config: Config = dataclasses.field(default_factory=Config)
    attach: bool = False
    offload: tuple[str, ...] = ()
    preset: str | None = "coat"

    def lines(self, accumulate: int, blocks: Sequence[str]) -> str:
        """Python that trains a `model` so.

        Args:
            accumulate: backwards whose gradients are added up.
            blocks: paths of modules that are compiled one by one, of lists with `.*` behind; none
                if the model is as a whole.
        """
        found = [f"config = {config_text(self.config)}"]
        if "weights" in self.offload:
            found.append('fp8pass.optim.offload_weights(model, "cuda")')
        else:
            found.append('model.to("cuda")')
        found.append(f"optimizer = {self._optimizer()}")
        if self.attach:
            also = f", accumulate={accumulate}" if accumulate > 1 else ""
            found.append(f"fp8pass.optim.attach(model, optimizer{also})")
        found += [self._compiled(path, blocks) for path in blocks]
        if not blocks:
            found.append("model = torch.compile(model, backend=fp8pass.backend(config))")
        return "\n".join(found)

    def _compiled(self, path: str, blocks: Sequence[str]) -> str:
        """The line that compiles a block, or the members of a list."""
        is_list, has_lists = path.endswith(".*"), any(p.endswith(".*") for p in blocks)
        of_layers = is_list or not has_lists or in_list(path)
        unlimited = config_text(replace(self.config, memory_budget=None))
        compiled = f".compile(backend=fp8pass.backend({'config' if of_layers else unlimited}))"
        if is_list:
            return f"for block in model.{path.removesuffix('.*')}:\n    block{compiled}"
        return f'model.get_submodule("{path}"){compiled}'

    def _optimizer(self) -> str:
        if self.preset is None:
            return "torch.optim.AdamW(model.parameters(), fused=True)"
        moved = tuple(name for name in self.offload if name != "weights")
        options = [
            "model.parameters()",
            *([f"preset={self.preset!r}"] if self.preset != "coat" else []),
            *([f"offload={moved!r}"] if moved else []),
        ]
        return f"fp8pass.optim.AdamW({', '.join(options)})"

    def __str__(self) -> str:
        """In a few words."""
        optimizer = "AdamW" if self.preset in (None, "coat") else f"AdamW {self.preset}"
        words = [
            changes_text(self.config) or "default",
            ("torch " if self.preset is None else "") + optimizer,
            *(["attach"] if self.attach else []),
            *([f"{', '.join(self.offload)} on the host"] if self.offload else []),
        ]
        return " · ".join(words)


def config_text(config: Config) -> str:
    """A configuration as Python."""
    recipe, changes = _nearest_recipe(config)
    given = [f"{name}={value!r}" for name, value in changes.items()]
    if recipe == "coat":
        return f"fp8pass.Config({', '.join(given)})"
    return f"fp8pass.Config.recipe({', '.join([repr(recipe), *given])})"


def changes_text(config: Config) -> str:
    """What of a configuration is not the default, in a few words."""
    recipe, changes = _nearest_recipe(config)
    words = [recipe] if recipe != "coat" else []
    return ", ".join([*words, *(f"{name}={value!r}" for name, value in changes.items())])


def _nearest_recipe(config: Config) -> tuple[str, dict[str, object]]:
    """The recipe from which fewest options differ, and those."""
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}

    def changes(recipe: str) -> dict[str, object]:
        of_recipe = Config.recipe(recipe)
        return {n: x for n, x in options.items() if x != getattr(of_recipe, n)}

    recipe = min(("coat", *RECIPES), key=lambda name: len(changes(name)))
    return recipe, changes(recipe)
