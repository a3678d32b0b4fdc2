"""The output head and its loss in chunks of tokens: the same numbers, and no logits of all."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, relative
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import fp8pass
from fp8pass.config import Config, ConfigError
from fp8pass.dynamo import Backend
from fp8pass.graph.chunks import chunks_of
from fp8pass.passes.chunk_head import rule_of_chunks

HIDDEN, VOCABULARY = 32, 160


def _plain(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _smoothed(logits, targets):
    logits = logits.float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1, ignore_index=3)


def _softcapped_with_z_loss(logits, targets):
    logits = 30 * torch.tanh(logits.float() / 30)
    z_loss = logits.logsumexp(-1).square().mean()
    return _plain(logits, targets) + 1e-4 * z_loss


def _by_hand(logits, targets):
    log_p = logits.float().log_softmax(-1)
    return -log_p.gather(-1, targets[..., None]).squeeze(-1).mean()


def _shifted(logits, targets):
    return _plain(logits[:, :-1].float(), targets[:, 1:])


def _shifted_afterwards(logits, targets):
    return _plain(torch.tanh(logits.float())[..., :-1, :].contiguous(), targets[..., 1:])


def _padded_labels(logits, targets):
    return _plain(logits.float(), F.pad(targets, (0, 1), value=-100)[..., 1:])


def _summed(logits, targets):
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), reduction="sum") / 7


def _weighted_tokens(logits, targets):
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    weights = (targets.flatten() % 3).float()
    return (losses * weights).sum() / weights.sum()


def _scaled(logits, targets):
    return 1024 * _plain(logits.float() * 0.5, targets)


def _with_entropy(logits, targets):
    p = logits.float().softmax(-1)
    return _plain(logits.float(), targets) + 0.01 * (p * p.clamp_min(1e-9).log()).sum() / 64


LOSSES = (
    _plain,
    _smoothed,
    _softcapped_with_z_loss,
    _by_hand,
    _shifted,
    _shifted_afterwards,
    _padded_labels,
    _summed,
    _weighted_tokens,
    _scaled,
    _with_entropy,
)


class Model(nn.Module):
    """An embedding, a block, and a head with its loss."""

    def __init__(self, loss=_plain, *, bias=False, tied=False, frozen=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.block = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
        if tied:
            self.lm_head.weight = self.embedding.weight
        self.lm_head.requires_grad_(not frozen)
        self.loss = loss

    def forward(self, ids, targets):
        x = self.embedding(ids)
        return self.loss(self.lm_head(x + torch.tanh(self.block(x))), targets)


def batch(tokens=(2, 12), seed=0):
    """Token ids and targets."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, tokens, generator=generator) for _ in range(2)]


def in_parts(model, chunks, recipe="exact", **options):
    """The model with its head in so many chunks, and what was decided."""
    dynamic, halves = options.pop("dynamic", False), options.pop("halves", False)
    config = Config.recipe(recipe, **{"compiler": "eager", **options, "head_chunks": chunks})
    return compiled(model, config, halves=halves, dynamic=dynamic)


def run(model, data, chunks, **options):
    """Loss and gradients of one step, and what was decided."""
    model = copy.deepcopy(model)
    program, spy = in_parts(model, chunks, **options)
    loss = program(*data)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, spy


def assert_same(got, want, of_head=1e-6):
    """Bit-equal, but for what is summed over tokens in another order.

    GEMMs of a few rows may sum in another order as well: then it is 1e-6.
    """
    assert relative(got[0], want[0]) < 1e-6
    for name, gradient in want[1].items():
        if gradient is None:
            assert got[1][name] is None
        elif "lm_head" in name:
            assert relative(got[1][name], gradient) < of_head, name
        else:
            assert relative(got[1][name], gradient) < 1e-6, name


@pytest.mark.parametrize("loss", LOSSES)
def test_every_spelling_gives_the_same_numbers(loss):
    model, data = Model(loss), batch()
    got = run(model, data, 3)
    (head,) = got[2].plan.heads
    assert (head.chunks, head.reason) == (3, "")
    assert_same(got, run(model, data, 1))


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"frozen": True}, {"dtype": torch.bfloat16}], ids=str
)
def test_kinds_of_heads(options):
    model, data = Model(_softcapped_with_z_loss, **options), batch()
    got = run(model, data, 4)
    assert got[2].plan.heads[0].chunks == 4
    assert_same(got, run(model, data, 1), of_head=8e-3 if "dtype" in options else 1e-6)


def test_a_head_tied_to_the_embedding():
    model, data = Model(tied=True), batch()
    (loss, gradients, spy), want = run(model, data, 4), run(model, data, 1)
    assert spy.plan.heads[0].chunks == 4
    assert relative(loss, want[0]) < 1e-6
    assert all(relative(gradients[name], want[1][name]) < 1e-6 for name in gradients)


@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    tokens=st.tuples(st.integers(1, 3), st.integers(2, 17)),
    chunks=st.integers(2, 9),
    loss=st.sampled_from(LOSSES),
)
def test_any_number_of_tokens_and_chunks(tokens, chunks, loss):
    model, data = Model(loss), batch(tokens)
    got = run(model, data, chunks)
    assert_same(got, run(model, data, 1))
    enough = tokens[0] * tokens[1] >= 2 * chunks
    assert got[2].plan.heads[0].chunks == (chunks if enough else 1)


@pytest.mark.parametrize("loss", [_plain, _shifted, _softcapped_with_z_loss])
def test_sizes_that_vary(loss):
    model = Model(loss)
    program, spy = in_parts(model, 3, dynamic=True)
    for tokens in ((2, 12), (3, 9), (4, 17)):
        data = batch(tokens)
        model.zero_grad()
        loss_value = program(*data)
        loss_value.backward()
        got = loss_value.detach(), {n: p.grad for n, p in model.named_parameters()}
        assert_same(got, run(model, data, 1))
    assert spy.plan.heads[0].chunks == 3  # compiled once


@pytest.mark.parametrize("recipe", ["coat", "agoq", "linear"])
def test_a_head_in_fp8(recipe):
    model, data = Model(_plain, dtype=torch.bfloat16), batch((4, 16))
    loss, gradients, spy = run(model, data, 4, recipe=recipe, quantize_lm_head=True)
    head = spy.plan.linears[-1]
    assert (head.module, head.rows) == ("lm_head", "4 × 16")
    assert head.fp8 == ("forward", "dgrad", "wgrad")
    exact, want, _ = run(model, data, 1)
    assert relative(loss, exact) < 0.01
    assert all(relative(gradients[name], want[name]) < 0.2 for name in want)


def test_gradients_are_multiples_of_what_comes_from_outside():
    model, data = Model(), batch()
    _, once, _ = run(model, data, 3)
    program, _ = in_parts(model, 3)
    for factor in (8.0, 0.25, float("inf")):
        model.zero_grad()
        (program(*data) * factor).backward()
        for name, p in model.named_parameters():
            if factor == float("inf"):
                assert not p.grad.isfinite().all()
            else:
                assert torch.equal(p.grad, factor * once[name])


def test_nan_reaches_the_user():
    model, data = Model(), batch()
    with torch.no_grad():
        model.lm_head.weight[5, 3] = float("nan")
    loss, gradients, _ = run(model, data, 3)
    assert loss.isnan()
    assert gradients["lm_head.weight"].isnan().any()


def test_evaluation_is_chunked_as_well():
    model, data = Model(_shifted), batch()
    program, spy = in_parts(model, 3)
    with torch.no_grad():
        assert torch.equal(program(*data), model(*data))
    assert spy.plan.heads[0].chunks == 3


@pytest.mark.long
def test_inductor_runs_one_chunk_after_the_other():
    """The weight's gradient is summed in place."""
    model, data = Model(_softcapped_with_z_loss), batch((4, 32))
    got = run(model, data, 4, compiler="inductor")
    loss, gradients, _ = run(model, data, 1, compiler="inductor")
    assert relative(got[0], loss) < 1e-6
    assert all(relative(got[1][name], g) < 1e-5 for name, g in gradients.items())
    (passes,) = got[2].passes
    halves = [p.after for p in passes if p.name == "unroll_chunks"]
    assert len(halves) == 2
    assert "in_chunks" not in "".join(halves)
    assert halves[0].count("add_product.default(") == 3


def test_logits_of_one_chunk_are_alive_at_once():
    """With what GPUs do by themselves: losses computed where they are put together."""
    options = {"force_pointwise_cat": True, "reorder_for_peak_memory": False}
    model, data = Model(), batch((4, 32))
    with inductor_config.patch(allow_buffer_reuse=False, fx_graph_cache=False, **options):
        _, (forward, _) = run_and_get_code(run, model, data, 4, compiler="inductor")
    alive, most = set(), 0
    for line in forward.split("def call(")[1].splitlines():
        if match := re.match(rf"\s*(\w+) = empty_strided_cpu\(\(32, {VOCABULARY}\)", line):
            alive.add(match[1])
        elif match := re.match(r"\s*(\w+) = (\w+); del", line):
            alive = {match[1] if name == match[2] else name for name in alive}
        elif match := re.match(r"\s*del (\w+)", line):
            alive.discard(match[1])
        most = max(most, len(alive))
    assert most == 2  # logits and their gradient


def test_no_value_of_all_tokens_and_the_whole_vocabulary():
    graphs = []
    config = Config.recipe("exact", compiler="eager", head_chunks=8)
    program = torch.compile(Model(), backend=Backend(config, graphs.append))
    program(*batch((8, 64))).backward()
    (compiled_graph,) = graphs
    assert chunks_of(compiled_graph.gm.graph)
    values = [n.meta.get("val") for n in compiled_graph.gm.graph.nodes]
    assert max(v.numel() for v in values if isinstance(v, torch.Tensor)) == 8 * 64 * HIDDEN


class _Adding(torch.autograd.Function):
    """A loss that adds to the gradient of logits whatever the gradient of the loss is."""

    @staticmethod
    def forward(ctx, loss, logits):
        ctx.save_for_backward(logits)
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return gradient, logits * 1e-2


class _Clamping(torch.autograd.Function):
    """Logits whose gradient is clamped."""

    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


def _of_the_first_token(logits, y):
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat * flat[:1].detach(), y.flatten())


ODD_LOSSES = {
    "adding": lambda logits, y: _Adding.apply(_plain(logits, y), logits),
    "clamping": lambda logits, y: _plain(_Clamping.apply(logits), y),
    "of the first token": _of_the_first_token,
    "with an accuracy": lambda logits, y: (
        _plain(logits, y) + 0 * (logits.max(-1)[1] == y).float().mean()
    ),
    "with a largest logit": lambda logits, y: (
        _plain(logits, y) + 1e-3 * logits.detach().max(-1).values.mean()
    ),
    "narrow": lambda logits, y: _plain(torch.narrow(logits, -1, 0, 150), y % 150),
    "gathered by column": lambda logits, y: (
        -logits.flatten(0, 1).log_softmax(-1).gather(1, y.flatten()[None]).mean()
    ),
    "distilled": lambda logits, y: F.kl_div(
        logits.log_softmax(-1),
        torch.sin(torch.arange(VOCABULARY)).softmax(-1).expand_as(logits),
        reduction="batchmean",
    ),
}


@pytest.mark.parametrize("loss", ODD_LOSSES.values(), ids=ODD_LOSSES)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_odd_losses_are_right_in_chunks_or_whole(loss, factor):
    """What a backward is not a multiple of, what is read across tokens, several results."""
    model, data = Model(loss), batch((8, 20))  # as many tokens as the vocabulary has
    program, spy = in_parts(model, 3)
    (program(*data) * factor).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(*data) * factor).backward()
    for gradient, p in zip(got, model.parameters(), strict=True):
        assert relative(gradient, p.grad) < 1e-5
    assert len(spy.plan.heads) == 1


def test_a_sum_over_tokens_that_are_left():
    """The gradient of what multiplies probabilities behind a shift."""

    class Projected(Model):
        def __init__(self):
            super().__init__()
            places = torch.arange(VOCABULARY * VOCABULARY).view(VOCABULARY, VOCABULARY)
            self.projection = nn.Parameter(torch.sin(places))

        def forward(self, ids, targets):
            logits = self.lm_head(self.embedding(ids))
            p = logits[:, :-1].softmax(-1).flatten(0, 1)
            return _shifted(logits, targets) + (p @ self.projection).square().sum()

    model, data = Projected(), batch()
    assert_same(run(model, data, 3), run(model, data, 1), of_head=1e-5)


def test_gradients_in_float16_are_scaled_before_they_are_rounded():
    model, data = Model(_summed, dtype=torch.float16), batch()
    spy = run(model, data, 3)[2]
    assert "float16" in spy.plan.heads[0].reason


@pytest.mark.parametrize("loss", [lambda logits, y: _plain(logits * y.shape[1], y)])
def test_sizes_that_are_numbers_in_a_loss(loss):
    model, data = Model(loss), batch()
    program, spy = in_parts(model, 3, dynamic=True)
    torch.testing.assert_close(program(*data), model(*data))
    assert spy.plan.heads[0].chunks == 1


@pytest.mark.parametrize("chunks", [3, None])
def test_tokens_whose_number_depends_on_data(chunks):
    class Selecting(Model):
        def forward(self, ids, targets):
            taken = targets < VOCABULARY // 2
            return self.loss(self.lm_head(self.embedding(ids)[taken]), targets[taken])

    model, data = Selecting(), batch()
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        got = run(model, data, chunks)
    assert "depends on data" in got[2].plan.heads[0].reason
    torch.testing.assert_close(got[0], model(*data))


def test_a_bias_of_every_token():
    class Added(Model):
        def forward(self, ids, targets):
            x = self.embedding(ids).flatten(0, 1)
            bias = self.embedding.weight[:, :1].t().expand(len(x), -1) * targets.flatten()[:, None]
            return self.loss(torch.addmm(bias, x, self.lm_head.weight.t()), targets)

    model, data = Added(), batch()
    assert_same(run(model, data, 3), run(model, data, 1), of_head=1e-5)


class _Returning(Model):
    """Also returns something computed from logits."""

    def forward(self, ids, targets):
        logits = self.lm_head(torch.tanh(self.embedding(ids)))
        return self.loss(logits, targets)


def _whole_because(loss):
    model = _Returning(loss)
    program, spy = in_parts(model, 3)
    results = program(*batch())
    expected = model(*batch())
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want)
    (head,) = spy.plan.heads
    assert head.chunks == 1
    return head.reason


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda logits, y: (_plain(logits, y), logits), "its logits are returned"),
        (lambda logits, y: (_plain(logits, y), (logits * 2).exp()), "its logits are returned"),
        (lambda logits, y: (_plain(logits, y), logits.cumsum(0).mean()), "mix tokens"),
        (lambda logits, y: (_plain(logits / logits.std(), y),), "needs all tokens"),
        (lambda logits, y: (_plain(logits, y).exp(),), "needs all tokens"),
        (lambda logits, y: (_by_hand(logits, y).square(),), "mix tokens"),
        (lambda logits, y: (_plain(logits, y), _by_hand(logits, y)), "several results"),
        (
            lambda logits, y: (
                F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none"),
            ),
            "single tokens",
        ),
    ],
    ids=[
        "returned",
        "computed",
        "cumsum",
        "std",
        "perplexity",
        "squared",
        "two losses",
        "token losses",
    ],
)
def test_a_head_stays_whole_and_says_why(loss, reason):
    assert reason in _whole_because(loss)


def test_two_losses_whose_sum_is_returned():
    model = Model(lambda logits, y: _plain(logits, y) + 0.5 * _by_hand(logits, y))
    got = run(model, batch(), 3)
    assert_same(got, run(model, batch(), 1))
    assert got[2].plan.heads[0].chunks == 3


def test_twenty_steps_give_the_same_model():
    results = []
    for chunks in (1, 4):
        model = Model(_shifted, tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        program, _ = in_parts(model, chunks)
        for seed in range(20):
            program(*batch(seed=seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    for a, b in zip(*(m.parameters() for m in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_rule():
    assert rule_of_chunks(8192, 4096) == 4
    assert rule_of_chunks(65536, 4096) == 8
    assert rule_of_chunks(4096, 4096) == 1
    assert rule_of_chunks(65536, 768) == 1


def test_explain_tells():
    model = Model()
    text = str(fp8pass.explain(model, *batch(), config=Config(head_chunks=2)))
    assert "Logits of lm_head, 24×160: in 2 chunks of tokens" in text
    text = str(fp8pass.explain(model, *batch()))
    assert "of all tokens at once" in text
    assert "because there are too few tokens or features for chunks to pay" in text


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_wrong_options(value):
    with pytest.raises(ConfigError, match="head_chunks"):
        Config(head_chunks=value)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [_plain, _shifted, _softcapped_with_z_loss])
@pytest.mark.parametrize("fp8", [False, True])
def test_on_a_gpu(loss, fp8):
    model, data = Model(loss, dtype=torch.bfloat16).cuda(), [x.cuda() for x in batch((4, 64))]
    recipe = {"recipe": "coat", "quantize_lm_head": True} if fp8 else {"recipe": "exact"}
    options = {"compiler": "inductor", **recipe}
    loss_value, gradients, _ = run(model, data, 4, **options)
    exact, want, _ = run(model, data, 1, **options)
    assert relative(loss_value, exact) < 0.01
    assert all(relative(gradients[name], want[name]) < (0.1 if fp8 else 0.02) for name in want)
