"""Make PEFT's adapters of expert weights (`LoraConfig(target_parameters=...)`) compilable.

    model = get_peft_model(base, LoraConfig(target_parameters=["experts.gate_up_proj"]))
    fp8pass.integrations.peft.prepare_experts(model)
    model.compile(backend="fp8pass")

In each forward, PEFT adds a parametrization to the module of experts and removes it. Dynamo cannot
trace this. After `prepare_experts`, PEFT's wrapper instead calls the module of experts with the
adapted parameter. In the compiled graph, adapters become grouped GEMMs (`graph/split_adapters.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from peft import __version__
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from fp8pass.option_checks import ConfigError


class PreparedParamWrapper(ParamWrapper):
    """PEFT's wrapper of a parameter, with a forward that can be compiled."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the wrapped module with the sum of the parameter and its active adapters."""
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not adapters or kwargs.get("adapter_names"):
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        parameter = self.get_param()
        for name in adapters:
            parameter = self._add_adapter(parameter, name)
        owner = self.get_base_layer()
        (path,) = (path for path, module in self.base_layer.named_modules() if module is owner)
        name = f"{path}.{self.parameter_name}" if path else self.parameter_name
        return torch.func.functional_call(self.base_layer, {name: parameter}, (x, *args), kwargs)

    def _add_adapter(self, parameter: Tensor, adapter: str) -> Tensor:
        if self.num_experts == 1:
            return parameter + self.get_delta_weight(adapter)
        left, right, scale = self.get_delta_factors(adapter)
        with torch.autocast(parameter.device.type, enabled=False):
            return torch.baddbmm(parameter, left, right, alpha=scale)


PreparedParamWrapper.__name__ = ParamWrapper.__name__  # PEFT compares names of classes


def prepare_experts(model: nn.Module) -> nn.Module:
    """Make a model that has PEFT's adapters of parameters compilable, in place.

    Results do not change, except for rounding if several adapters are active. Call this function
    after the last adapter has been added, and before `fully_shard`. Saving, loading and switching
    adapters work as before.

    Args:
        model: a model with adapters from `LoraConfig(target_parameters=...)`.

    Raises:
        ConfigError: the model has no such adapter or is already sharded, or PEFT is too old.
    """
    if not hasattr(ParamWrapper, "get_delta_factors"):
        raise ConfigError(f"peft {__version__} is too old: pip install -U peft.")
    found = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    if not found:
        raise ConfigError(
            "The model has no adapter of a parameter. Pass "
            'LoraConfig(target_parameters=["experts.gate_up_proj"]) to get_peft_model first.'
        )
    if any(type(module) not in (ParamWrapper, PreparedParamWrapper) for module in found):
        raise ConfigError("The model is already sharded: call prepare_experts before fully_shard.")
    for module in found:
        module.__class__ = PreparedParamWrapper
    return model
