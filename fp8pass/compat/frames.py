"""Look up properties of the function that Dynamo is tracing."""

from __future__ import annotations

from types import CodeType

from torch import fx, nn
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.symbolic_convert import tls

__all__ = ["compile_call", "rename_self"]


def rename_self(gm: fx.GraphModule) -> None:
    """Make module paths independent of how the traced method names its `self`.

    For `forward(module, x)`, `L['module'].layers` becomes `L['self'].layers`.
    """
    name = _find_self()
    if name in (None, "self"):
        return
    begin = f"L['{name}']"
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    for node in (n for g in graphs for n in g.nodes):
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {
                key: (f"L['self']{path[len(begin) :]}" if path.startswith(begin) else path, *rest)
                for key, (path, *rest) in stack.items()
            }


def compile_call() -> object:
    """Return an object that identifies the current `torch.compile` call.

    All graphs of the call have the same object.
    """
    current = getattr(tls, "current_tx", None)
    return current.output.compiler_fn if current is not None else None


def _find_self() -> str | None:
    current = getattr(tls, "current_tx", None)
    if current is None:
        return None
    frame = current.output.root_tx
    code = frame.f_code
    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    if resumed is not None:  # the rest of a function after a graph break
        code = resumed.code
    if not code.co_argcount:
        return None
    name = code.co_varnames[0]
    module = frame.f_locals.get(name)
    return name if isinstance(module, nn.Module) and _is_method(code, module) else None


def _is_method(code: CodeType, module: nn.Module) -> bool:
    owners = module, *type(module).__mro__
    attributes = (x for owner in owners for x in vars(owner).values())
    return any(getattr(x, "__code__", None) is code for x in attributes)
