"""`split_parameters`: divide the parameters of a model between Muon and AdamW."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fp8pass.graph.names import clean_path, matching_pattern, warn_about_idle_patterns
from fp8pass.graph.output_heads import has_head_name, largest_embedding_size
from fp8pass.option_checks import ConfigError, checked_patterns

# Output heads that are layers of the model itself.
CLASSIFIERS = ("head", "classifier", "score", "fc")


def split_parameters(
    model: nn.Module, *, skip: str | Sequence[str] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide the parameters of a model: matrices of hidden layers for Muon, others for AdamW.

        matrices, others = fp8pass.optim.split_parameters(model)
        optimizers = [fp8pass.optim.Muon(matrices, lr=0.02), fp8pass.optim.AdamW(others, lr=3e-4)]

    A parameter is a matrix of a hidden layer if it has two dimensions, both longer than 1, and no
    embedding or output head uses it. Embeddings are `nn.Embedding` and `nn.EmbeddingBag`. An output
    head is a layer named `lm_head`, `embed_out` or `unembed`, or a layer of the model itself named
    `output`, `head`, `classifier`, `score` or `fc`. If there is no such layer, and no linear layer
    shares the weight of an embedding, the output heads are the linear layers of the size of the
    largest embedding. Name other tables in `skip`, such as positions that are plain parameters.

    Args:
        model: a module, also a compiled or distributed module.
        skip: paths, or patterns with *, of modules or parameters that AdamW trains.

    Returns:
        The parameters for Muon, and the parameters for AdamW, both in the order of the model.
        Frozen parameters are included.

    Raises:
        ConfigError: the model is not a module, or `skip` has an invalid pattern.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    patterns = checked_patterns("skip", skip)
    named = [(clean_path(n), p) for n, p in model.named_parameters(remove_duplicate=False)]
    warn_about_idle_patterns("skip", patterns, "parameter", [name for name, _ in named])
    excluded = _parameters_of_tables(model)
    excluded |= {id(p) for name, p in named if matching_pattern(name, patterns) is not None}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        (matrices if is_matrix and id(parameter) not in excluded else others).append(parameter)
    return matrices, others


def _parameters_of_tables(model: nn.Module) -> set[int]:
    modules = [(clean_path(path), module) for path, module in model.named_modules()]
    embeddings = [m for _, m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    heads = [m for path, m in modules if has_head_name(path) or path in CLASSIFIERS]
    tables = {id(p) for m in (*embeddings, *heads) for p in m.parameters()}
    linears = [m for _, m in modules if isinstance(m, nn.Linear)]
    if not heads and not any(id(m.weight) in tables for m in linears):
        size = largest_embedding_size(model)
        found = (m for m in linears if (m.out_features, m.in_features) == size)
        tables |= {id(m.weight) for m in found}
    return tables
