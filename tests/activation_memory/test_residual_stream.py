"""Residual streams: the sums that the backward recomputes, and the bytes alive for them."""

from __future__ import annotations

from itertools import accumulate, combinations

import pytest
import torch
from helpers import COAT_EAGER, benchmark_models, capture_joint, tokens
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fp8pass import graph
from fp8pass.activation_memory.backward_memory import is_buffered
from fp8pass.config import Config
from fp8pass.graph.patterns import is_same_shape_addition
from fp8pass.graph.tags import COPIED_VALUE
from fp8pass.passes import JOINT_PASSES
from fp8pass.passes.runner import run_passes

RECIPES = ("agoq", "coat", "linear")
HIDDEN, LAYERS, ROWS = 64, 10, 2048
U = ROWS * HIDDEN * 2  # bytes of a residual stream in 16 bits


class Block(nn.Module):
    """A pre-norm block, or a post-norm block if `post` is true."""

    def __init__(self, *, post: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.post = post

    def branch(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return self.norm(x + self.branch(x)) if self.post else x + self.branch(self.norm(x))


def stack(layers: int = LAYERS, *, post: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(post=post) for _ in range(layers)))


def under_autocast(model):
    def run(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*args)

    return run


class Planned:
    """A joint graph after the passes on it."""

    def __init__(self, model, *args, recipe: str) -> None:
        config = Config.recipe(recipe, compiler="eager")
        joint = capture_joint(model, *args, config=config)
        run_passes(JOINT_PASSES, joint.gm, joint.ctx)
        self.g, self.ctx = joint.gm.graph, joint.ctx

    @property
    def saved(self) -> int:
        return self.ctx.plan.saved_bytes

    def longest_chain(self) -> int:
        """Return the most sums of the residual stream that are recomputed from one another."""
        lengths: dict[fx.Node, int] = {}
        for node in self.g.nodes:
            if COPIED_VALUE in node.meta and node.target not in STORED:
                before = max((lengths.get(n, 0) for n in node.all_input_nodes), default=0)
                lengths[node] = before + is_same_shape_addition(node)
        return max(lengths.values(), default=0)

    def held_at_once(self) -> int:
        """Return the most bytes alive at a time of the backward, except parameters."""
        facts = self.ctx.facts
        results = graph.outputs(self.g)[: facts.num_fwd_outputs]
        given = [*(n for n in results if isinstance(n, fx.Node)), *self.ctx.saved]
        forward = graph.ancestors(given) | set(given)
        backward = [n for n in self.g.nodes if n.op != "placeholder" and n not in forward]
        position = {n: i for i, n in enumerate(backward)}
        last: dict[fx.Node, int] = {}
        change = [0] * (len(backward) + 1)
        for node in reversed([*self.ctx.saved, *backward]):
            users = [u for u in node.users if u in position]
            inlined = [last[u] for u in users if not has_buffer(u)]
            last[node] = max([*(position[u] for u in users), *inlined], default=-1)
            if node in facts.parameters | facts.leaves or not (node in forward or has_buffer(node)):
                continue
            change[position.get(node, 0)] += graph.nbytes(node)
            change[last[node] + 1] -= graph.nbytes(node)
        return max(accumulate(change))


STORED = {torch.ops.fp8pass.dequantize.default}


def has_buffer(node: fx.Node) -> bool:
    """Whether a node of the backward has a buffer, instead of being fused with its users."""
    if node.op == "output":
        return True
    return node.target not in STORED and graph.value(node) is not None and is_buffered(node)


def planned_stack(shape: tuple[int, ...], dtype: torch.dtype, recipe: str) -> Planned:
    """Plan a stack in 16 bits, or with FP32 weights under autocast."""
    model = stack().to(dtype)
    run = under_autocast(model) if dtype is torch.float32 else model
    return Planned(run, torch.randn(shape, dtype=dtype).requires_grad_() * 1, recipe=recipe)


def planned_gpt(recipe: str) -> Planned:
    """Plan a small GPT-2 of nanoGPT, with FP32 weights under autocast."""
    torch.manual_seed(0)
    model = benchmark_models().GPT(6, HIDDEN, 2, vocabulary=96, length=64)
    ids = tokens(ROWS // 64, 64)
    return Planned(under_autocast(model), ids, ids, recipe=recipe)


FLAT, BATCHED = (ROWS, HIDDEN), (ROWS // 64, 64, HIDDEN)
CASES = {
    "2-D": lambda recipe: planned_stack(FLAT, torch.bfloat16, recipe),
    "2-D, autocast": lambda recipe: planned_stack(FLAT, torch.float32, recipe),
    "3-D, autocast": lambda recipe: planned_stack(BATCHED, torch.float32, recipe),
    "GPT-2, autocast": planned_gpt,
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_plans_that_save_less_have_lower_peaks(case):
    plans = []
    for recipe in RECIPES:
        torch._dynamo.reset()
        plans.append(CASES[case](recipe))
    for a, b in combinations(sorted(plans, key=lambda p: p.saved), 2):
        assert a.held_at_once() <= b.held_at_once()
    agoq, coat, linear = plans
    # In low bits a sum is no larger than its branch.
    assert agoq.longest_chain() <= 1
    assert coat.longest_chain() <= 1
    assert linear.longest_chain() <= 2  # with the sum of embeddings, which is never saved
    for plan in plans:  # besides saved bytes, one block's values, some of them in FP32
        assert plan.held_at_once() < plan.saved + 7.5 * U


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["agoq", "coat"])
def test_streams_take_equal_bytes_in_two_and_three_dimensions(recipe):
    """In two dimensions there is no view between a branch and its sum."""
    flat = planned_stack(FLAT, torch.bfloat16, recipe)
    torch._dynamo.reset()
    batched = planned_stack(BATCHED, torch.bfloat16, recipe)
    assert flat.saved == batched.saved
    assert flat.held_at_once() == batched.held_at_once()


@pytest.mark.long
def test_every_second_sum_is_saved_in_full_precision():
    """Under autocast a sum takes twice the bytes of its branch."""
    model, x = under_autocast(stack(6)), torch.randn(FLAT).requires_grad_() * 1
    plan = Planned(model, x, recipe="linear")
    saved = [s for s in plan.ctx.plan.saved if s.shape == f"{ROWS}×{HIDDEN}"]
    sums = [s for s in saved if s.op == "aten.add.Tensor"]
    assert {s.dtype for s in sums} == {"float32"}
    assert len(sums) == 2  # norms read five sums and the input
    assert plan.longest_chain() == 1


@pytest.mark.long
def test_post_norm_streams_have_no_long_chains():
    """In post-norm layers a norm lies between two sums."""
    model, x = under_autocast(stack(6, post=True)), torch.randn(FLAT).requires_grad_() * 1
    plan = Planned(model, x, recipe="linear")
    assert plan.longest_chain() <= 2


@pytest.mark.long
def test_sums_of_a_checkpointed_region_are_recomputed():
    """The checkpoint includes the whole stream."""
    model, x = stack(3).bfloat16(), torch.randn(FLAT).bfloat16().requires_grad_() * 1

    def run(x):
        return checkpoint(model, x, use_reentrant=False).sin()

    plan = Planned(run, x, recipe="linear")
    assert plan.longest_chain() == 3


def test_branches_computed_from_a_leaf_are_not_saved():
    """Every sum is recomputed from the input, which autograd keeps alive anyway."""

    def run(x):
        for _ in range(3):
            x = x + x.sin()
        return x.exp()

    plan = Planned(run, torch.randn(FLAT, requires_grad=True), recipe="linear")
    assert plan.saved == 0


def test_sums_of_a_leaf_are_not_saved():
    """The sums are recomputed from the leaf, which autograd keeps alive anyway."""

    class Distances(nn.Module):
        def forward(self, x):
            shifted = x + x[:1].expand_as(x)
            return F.mse_loss(shifted, x)

    joint = capture_joint(Distances(), torch.randn(4, 32, requires_grad=True), config=COAT_EAGER)
    run_passes(JOINT_PASSES, joint.gm, joint.ctx)
    assert joint.ctx.plan.saved_bytes == 0
