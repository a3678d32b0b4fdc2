"""Output heads are found, and stay in high precision unless the user quantizes them."""

from __future__ import annotations

import pytest
import torch
from helpers import COAT_EAGER, MLP, llama, relative, sqnr, tokens
from linear_helpers import linear, reasons, rewritten, rows
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.graph.output_heads import find_logit_gemms

fp8 = torch.ops.fp8pass


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.body = nn.Linear(64, 64, bias=False)
        self.add_module(name, nn.Linear(64, 96, bias=False))
        self.name = name

    def forward(self, x):
        return getattr(self, self.name)(self.body(x))


@pytest.mark.parametrize("name", ["lm_head", "embed_out", "output"])
def test_output_head_by_name(name):
    assert reasons(rewritten(Named(name), rows())) == {
        "body": "",
        name: "an output head, which stays exact unless quantize_lm_head=True",
    }
    torch._dynamo.reset()
    joint = rewritten(Named(name), rows(), config=Config(quantize_lm_head=True))
    assert reasons(joint) == {"body": "", name: ""}


def test_the_size_is_the_reason_if_no_option_helps():
    model = Named("lm_head")
    model.lm_head = nn.Linear(64, 100, bias=False)
    found = reasons(rewritten(model, rows()))
    assert found == {"body": "", "lm_head": "weight 100×64: both sizes must be multiples of 16"}


def test_output_below_the_top_is_no_head():
    """BERT calls a layer of each block `output`."""
    model = nn.Sequential(Named("output"))
    assert reasons(rewritten(model, rows())) == {"0.body": "", "0.output": ""}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.body = nn.Linear(64, 64)

    def forward(self, ids):
        return F.linear(self.body(self.embedding(ids)), self.embedding.weight)


def test_output_head_by_its_tied_embedding():
    found = [y.reason for y in rewritten(Tied(), tokens()).ctx.plan.linears]
    assert found == ["", "an output head, which stays exact unless quantize_lm_head=True"]


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cross_entropy", "chunked", "logsumexp"])
def test_output_head_by_the_log_softmax_it_feeds(loss):
    model, ids = Named("classify"), torch.randint(96, (32,))

    def run(x):
        logits = model(x).float()
        if loss == "cross_entropy":
            return F.cross_entropy(logits, ids)
        if loss == "chunked":
            return sum(F.cross_entropy(a, b) for a, b in zip(logits.chunk(2), ids.chunk(2)))  # noqa: B905
        return (logits.logsumexp(-1) - logits[:, 0]).mean()

    found = [y.reason for y in rewritten(run, rows()).ctx.plan.linears]
    assert found == ["", "an output head, which stays exact unless quantize_lm_head=True"]


class Stream(nn.Module):
    """A residual stream of two blocks that ends in a log-softmax, with or without a head."""

    def __init__(self, head, norm_last=False):
        super().__init__()
        self.blocks = nn.ModuleList(MLP((64, 128, 64)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(64))
        self.norm_last = norm_last
        self.classify = nn.Linear(64, 96) if head else nn.Identity()

    def forward(self, x):
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(x + block(x)) if self.norm_last else 0.5 * x + self.gain * block(norm(x))
        return self.classify(x).log_softmax(-1)


@pytest.mark.long
def test_rows_of_symbolic_length_share_a_scale():
    """The transpose is padded with zeros, and its rows differ."""
    layer = nn.Linear(32, 32).bfloat16()

    def model(x):
        y = x.unflatten(-1, (2, -1)).transpose(-2, -3)
        return layer(y.transpose(-2, -3).flatten(-2))

    program = torch.compile(model, backend=Backend(COAT_EAGER), dynamic=True)
    x = torch.randn(1, 1, 32).bfloat16()
    assert sqnr(program(x), model(x)) > 20


@pytest.mark.parametrize("dynamic", [False, True])
def test_tokens_are_no_columns_of_a_product_that_tensor_cores_do_not_take(dynamic):
    """The gradient of a transposed input comes as W dYᵀ, with a column for each token."""
    joint = rewritten(linear(), torch.randn(64, 17).t().requires_grad_(), dynamic=dynamic)
    products = joint.calls(fp8.scaled_mm.default)
    assert len(products) == 3
    assert all(n.meta["val"].shape[1] % 16 == 0 for n in products)


@pytest.mark.long
def test_sizes_that_a_guard_has_fixed_are_known():
    """The gradient of the weight has 2 · (n // 2) columns, which must be as many as the weight."""
    layer = nn.Linear(16, 16, bias=False)

    def model(x):
        heads = x.unflatten(-1, (2, -1)).transpose(-2, -3)
        y = F.scaled_dot_product_attention(heads, heads, heads).transpose(-2, -3).flatten(-2)
        return y + layer(y)

    program = torch.compile(model, backend=Backend(COAT_EAGER), dynamic=True)
    x = torch.randn(2, 16)
    (got,) = torch.autograd.grad(program(x).square().sum(), layer.weight)
    (want,) = torch.autograd.grad(model(x).square().sum(), layer.weight)
    assert sqnr(got, want) > 20


@pytest.mark.long
def test_symbolic_sizes_are_not_terms_of_a_sum_before_a_log_softmax():
    """`roll` adds to a size."""
    layer = nn.Linear(16, 16)
    program = torch.compile(
        lambda x: layer(x).roll(1, 0).log_softmax(-1), backend=Backend(COAT_EAGER), dynamic=True
    )
    assert program(torch.randn(24, 16)).isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
@pytest.mark.parametrize("norm_last", [False, True])
def test_a_stream_that_ends_in_log_softmax_without_a_head_has_none(norm_last, shape):
    found = reasons(rewritten(Stream(False, norm_last), torch.randn(shape)))
    assert len(found) == 4
    assert not any(found.values())


@pytest.mark.long
def test_the_head_of_a_stream_is_its_only_one():
    found = reasons(rewritten(Stream(True), rows()))
    heads = [name for name, reason in found.items() if "output head" in reason]
    assert (len(found), heads) == (5, ["classify"])


def test_a_parallel_branch_makes_no_head():
    """As in GPT-J: attention and MLP read the same normed stream, and both are added to it."""

    class Parallel(Stream):
        def forward(self, x):
            y = self.norms[0](x)
            return (x + self.blocks[0](y) + self.blocks[1](y)).log_softmax(-1)

    assert not any(reasons(rewritten(Parallel(False), rows())).values())


def test_logits_that_are_a_sum_of_several_layers_have_several_heads():
    """For example with an adapter, a mask, and noise."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(64, 64)
            self.base = nn.Linear(64, 96)
            self.down, self.up = nn.Linear(64, 16), nn.Linear(16, 96)

        def forward(self, x, mask):
            x = nn.functional.gelu(self.body(x))
            y = self.base(x) + self.up(self.down(x)) + mask
            return (y + torch.rand_like(y)).log_softmax(-1)

    found = reasons(rewritten(Adapted(), rows(), torch.zeros(32, 96)))
    assert {name for name, reason in found.items() if reason} == {"base", "up"}


@pytest.mark.long
def test_softmax_inside_attention_makes_no_head():
    joint = rewritten(llama("eager"), tokens())
    assert [y.module for y in joint.ctx.plan.linears if not y.fp8] == ["lm_head"]


@torch.library.custom_op("fp8pass_tests::loss_and_slopes", mutates_args=())
def loss_and_slopes(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy and its gradient for logits, as one opaque operator."""
    logp = logits.log_softmax(-1)
    slopes = logp.exp() - F.one_hot(labels, logits.shape[-1])
    return -logp.gather(1, labels[:, None]).sum(), slopes


@loss_and_slopes.register_fake
def _(logits, labels):
    return logits.new_empty(()), torch.empty_like(logits)


@torch.library.custom_op("fp8pass_tests::replace_by_slopes", mutates_args=("logits", "losses"))
def replace_by_slopes(logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor) -> None:
    """Store the loss of each row and replace logits by their gradients, as Liger's kernel does."""
    logp = logits.log_softmax(-1)
    losses.copy_(-logp.gather(1, labels[:, None])[:, 0])
    logits.copy_(logp.exp() - F.one_hot(labels, logits.shape[-1]))


class Fused(torch.autograd.Function):
    """A linear cross entropy that computes gradients in the forward, as Liger and Unsloth do."""

    @staticmethod
    def forward(ctx, x, weight, ids, spelling):
        ctx.scale = 0.5 if spelling.startswith("scaled") else 1.0
        chunks = 4 if spelling == "in chunks" else 1
        loss, of_x, of_weight = 0.0, [], 0.0
        for part, labels in zip(x.chunk(chunks), ids.chunk(chunks), strict=True):
            logits = ctx.scale * (part @ weight.t()).float()
            if spelling.startswith("operator"):
                if spelling.endswith("in place"):
                    losses = logits.new_empty(len(logits))
                    torch.ops.fp8pass_tests.replace_by_slopes(logits, labels, losses)
                    change, slopes = losses.sum(), logits
                else:
                    change, slopes = torch.ops.fp8pass_tests.loss_and_slopes(logits, labels)
                loss = loss + change / len(x)
                of_x.append(slopes / len(x) @ weight)
                of_weight = of_weight + (slopes / len(x)).t() @ part
                continue
            if spelling == "log_softmax":
                logp = logits.log_softmax(-1)
            else:
                logp = logits - logits.logsumexp(-1, keepdim=True)
            loss = loss - logp.gather(1, labels[:, None]).sum() / len(x)
            slopes = ctx.scale * (logp.exp() - F.one_hot(labels, len(weight))) / len(x)
            if spelling.endswith("in the backward"):
                ctx.save_for_backward(slopes, x, weight)
                return loss
            of_x.append(slopes @ weight)
            of_weight = of_weight + slopes.t() @ part
        ctx.save_for_backward(torch.cat(of_x), of_weight)
        return loss

    @staticmethod
    def backward(ctx, g):
        first, second, *weight = ctx.saved_tensors
        if weight:
            first, second = first @ weight[0], first.t() @ second
        return g * first, g * second, None, None


SPELLINGS = [
    "logsumexp",
    "log_softmax",
    "in chunks",
    "scaled, products in the backward",
    "operator",
    "operator in place",
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("recipe", ["coat", "agoq"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_heads_that_compute_gradients_in_the_forward_are_exact(spelling, recipe):
    torch.manual_seed(0)
    norm, weight = nn.LayerNorm(64), torch.randn(256, 64, requires_grad=True)
    x, ids = torch.randn(64, 64, requires_grad=True), torch.randint(256, (64,))

    def run(x, weight):
        return Fused.apply(norm(x), weight, ids, spelling)

    want = torch.autograd.grad(run(x, weight), (x, weight))
    compiled = torch.compile(run, backend=Backend(Config.recipe(recipe, compiler="eager")))
    got = torch.autograd.grad(compiled(x, weight), (x, weight))
    assert relative(got[1], want[1]) < 1e-3
    assert relative(got[0], want[0]) < 0.3  # the norm's saved values are in low-bit formats


def test_a_triton_kernel_that_reads_labels_makes_a_head():
    """Liger's kernel in a joint graph: a functional operator with tensors in a dictionary."""
    g, mode = fx.Graph(), FakeTensorMode()
    with mode:
        x, weight = torch.empty(32, 64), torch.empty(64, 256)
        labels, losses = torch.empty(32, dtype=torch.int64), torch.empty(32)
        logits = torch.empty(32, 256)
    nodes = {}
    for name, fake in {"x": x, "weight": weight, "labels": labels, "losses": losses}.items():
        nodes[name] = g.placeholder(name)
        nodes[name].meta["val"] = fake
    product = g.call_function(torch.ops.aten.mm.default, (nodes["x"], nodes["weight"]))
    product.meta["val"] = logits
    arguments = {"X_ptr": product, "Y_ptr": nodes["labels"], "loss_ptr": nodes["losses"]}
    kernel = g.call_function(triton_kernel_wrapper_functional, (), {"kwargs": arguments})
    kernel.meta["val"] = {"X_ptr": logits, "loss_ptr": losses}
    g.output(kernel)
    assert find_logit_gemms(g) == {product}


@torch.library.custom_op("fp8pass_tests::rotate", mutates_args=())
def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scale rows by their position: integers per row that are not labels."""
    return x * (1 + positions[:, None])


rotate.register_fake(lambda x, positions: torch.empty_like(x))
rotate.register_autograd(
    lambda ctx, g: (torch.ops.fp8pass_tests.rotate(g, ctx.positions), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "positions", inputs[1]),
)


def test_an_operator_that_reads_positions_makes_no_head():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 128, bias=False)

        def forward(self, x):
            return torch.ops.fp8pass_tests.rotate(self.layer(x), torch.arange(len(x)))

    assert reasons(rewritten(Rotated(), rows())) == {"layer": ""}
