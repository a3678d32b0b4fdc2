"""Row kernels compute cross entropies and their gradients, and overwrite the logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch._functorch.config as functorch_config
from head_helpers import (
    HIDDEN,
    LOSSES,
    VOCABULARY,
    by_hand,
    padded_labels,
    plain,
    shifted,
    shifted_afterwards,
    smoothed,
    softcapped_with_z_loss,
    summed,
)
from helpers import relative
from kernel_helpers import both_devices, interpret_halves
from torch import nn
from torch.nn import functional as F

from fp8pass import compilation, hardware
from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.passes import LOWERING_PASSES
from fp8pass.passes.lowering import fuse_losses as pass_module
from fp8pass.passes.lowering.fuse_losses import fuse_losses

WITHOUT = tuple(p for p in LOWERING_PASSES if p is not fuse_losses)
OPTIONS = {"fp8_gemms": "all", "compact_saves": "all"}  # not the plan of stock `torch.compile`


class Head(nn.Module):
    """A linear layer and its loss."""

    def __init__(self, loss, vocabulary=VOCABULARY, bias=False) -> None:
        super().__init__()
        self.loss, self.linear = loss, nn.Linear(HIDDEN, vocabulary, bias=bias)

    def forward(self, x, targets):
        return self.loss(self.linear(x), targets)


def train(loss, device, passes=LOWERING_PASSES, *, dynamic=False, edges=(), bias=False, **options):
    """Return the loss, the gradients, and the number of programs with names of columns."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    head = Head(loss, bias=bias).to(device, torch.bfloat16)
    x = torch.randn(4, 16, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    for i, edge in enumerate(edges):
        x.data[0, i, 0] = edge
    targets = torch.randint(VOCABULARY, (4, 16), device=device)
    if loss not in (by_hand, smoothed):  # other losses ignore these tokens
        targets[1, :3] = -100
    found = []

    def count(gm, ctx):
        found.extend(n for n in gm.graph.nodes if n.target is rows and "row_exp" in n.args[1])
        found.extend(n for n in gm.graph.nodes if n.target is rows and "is_column" in n.args[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_module, "FEWEST_CLASSES", 64)
        patch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
        patch.setattr(compilation, "LOWERING_PASSES", (*passes, count))
        if device == "cpu":
            interpret_halves(patch)
        config = Config.recipe("coat", **OPTIONS, **options)
        value = torch.compile(head, backend=Backend(config), dynamic=dynamic)(x, targets)
        value.backward()
    return [value, x.grad, *(p.grad for p in head.parameters())], found


@both_devices
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", [plain, padded_labels, summed])
def test_losses_and_gradients(device, dynamic, chunks, loss):
    how = {"dynamic": dynamic, "head_chunks": chunks}
    want, none = train(loss, device, WITHOUT, **how)
    got, kernels = train(loss, device, **how)
    assert not none
    assert len(kernels) == (2 if chunks == 1 else 2 * chunks)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 5e-3


# Generated code computes the gradients of these: operators scatter or pad them before the GEMM.
SCATTERED = (by_hand, shifted, shifted_afterwards)


@both_devices
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_spellings_of_losses(device, loss):
    (want, none), (got, kernels) = train(loss, device, WITHOUT), train(loss, device)
    assert not none
    assert len(kernels) == (1 if loss in SCATTERED else 2)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 5e-3


@both_devices
def test_biases(device):
    want, got = (
        train(plain, device, passes, bias=True)[0] for passes in (WITHOUT, LOWERING_PASSES)
    )
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 5e-3


@both_devices
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("loss", [plain, softcapped_with_z_loss])
def test_invalid_logits_reach_the_parameters(device, chunks, loss):
    edges = math.nan, math.inf, -math.inf
    want, _ = train(loss, device, WITHOUT, edges=edges, head_chunks=chunks)
    got, _ = train(loss, device, edges=edges, head_chunks=chunks)
    assert got[0].isnan()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3, equal_nan=True)


def masked(logits, targets):
    """Mask half of the classes, as padded vocabularies do."""
    allowed = torch.arange(VOCABULARY, device=logits.device) >= VOCABULARY // 2
    logits = torch.where(allowed, logits.float(), -math.inf).flatten(0, -2)
    targets = torch.where(targets >= 0, targets % (VOCABULARY // 2) + VOCABULARY // 2, targets)
    return F.cross_entropy(logits, targets.flatten())


@both_devices
@pytest.mark.parametrize("chunks", [1, 4])
def test_masked_classes(device, chunks):
    want, _ = train(masked, device, WITHOUT, head_chunks=chunks)
    got, _ = train(masked, device, head_chunks=chunks)
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert relative(a, b) < 5e-3


def test_recipe_exact_keeps_generated_code(monkeypatch):
    interpret_halves(monkeypatch)
    monkeypatch.setattr(pass_module, "FEWEST_CLASSES", 64)
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    graphs = []
    passes = (*LOWERING_PASSES, lambda gm, ctx: graphs.append(gm.graph))
    monkeypatch.setattr(compilation, "LOWERING_PASSES", passes)
    head = Head(plain).bfloat16()
    x, targets = torch.randn(4, HIDDEN).bfloat16(), torch.randint(VOCABULARY, (4,))
    torch.compile(head, backend=Backend(Config.recipe("exact")))(x, targets).backward()
    assert len(graphs) == 2
    assert not any(graph.find_nodes(op="call_function", target=rows) for graph in graphs)


def in_bf16(logits, targets):
    """All values are in BF16, and the logarithm is used alone, too."""
    logits = logits.flatten(0, -2)
    shifted = logits - logits.amax(-1, keepdim=True)
    log = shifted.exp().sum(-1, keepdim=True).log()
    picked = (shifted - log).gather(-1, targets.flatten()[:, None].clamp_min(0))
    return log.square().mean() - picked.mean()


def focal(logits, targets):
    """The weight of a token depends on its loss."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return ((1 - (-losses).exp()).square() * losses).mean()


def hashed(logits, targets):
    """Integers of labels that FP32 cannot represent."""
    labels = targets.flatten().clamp_min(0)
    weights = torch.where((labels + 2**24) > 2**24, 1.0, 0.5)
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels, reduction="none")
    return (losses * weights).sum()


@both_devices
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("loss", [in_bf16, focal, hashed])
def test_unusual_losses(device, chunks, loss):
    want, _ = train(loss, device, WITHOUT, head_chunks=chunks)
    got, kernels = train(loss, device, head_chunks=chunks)
    assert kernels
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) < (0.02 if loss is in_bf16 else 5e-3)


def test_losses_in_fp64_keep_generated_code():
    assert train(lambda x, y: plain(x.double(), y), "cpu")[1] == []


def test_softmaxes_without_a_loss_keep_generated_code():
    def attention(logits, targets):
        return logits.float().softmax(-1).square().mean()

    assert train(attention, "cpu")[1] == []


def peak_bytes(run) -> int:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_gradients_overwrite_logits(monkeypatch, chunks, mode):
    """The peak has one matrix of logits, as with stock `torch.compile`."""
    tokens, vocabulary = 2048, 32768
    head = Head(plain, vocabulary).cuda().bfloat16()
    x = torch.randn(1, tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (1, tokens), device="cuda")
    losses = []

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(x, targets)
        loss.backward()
        losses.append(loss.item())
        x.grad = head.linear.weight.grad = None

    backend = Backend(Config(head_chunks=chunks, **OPTIONS))
    compiled = torch.compile(head, backend=backend, mode=mode)
    peak = peak_bytes(step)
    if mode is None:
        assert peak < 1.25 * 2 * tokens * vocabulary / chunks
    assert max(losses) - min(losses) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("donated", [False, True])
def test_graphs_that_are_retained_keep_their_logits(donated):
    """A second backward reads logits that the first kept, or PyTorch refuses to run the first."""
    head = Head(plain, 4096).cuda().bfloat16()
    x = torch.randn(64, HIDDEN, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(4096, (64,), device="cuda")
    with functorch_config.patch(donated_buffer=donated):
        loss = torch.compile(head, backend="fp8pass", options=OPTIONS)(x, targets)
        try:
            loss.backward(retain_graph=True)
        except RuntimeError as error:
            if donated and "donated buffers" in str(error):
                return
            raise
        first = head.linear.weight.grad.clone()
        loss.backward()
    assert torch.equal(head.linear.weight.grad, 2 * first)
