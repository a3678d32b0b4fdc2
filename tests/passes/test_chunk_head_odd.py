"""Unusual losses: correct in chunks, or the head is not chunked and the plan has the reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from head_helpers import (
    VOCABULARY,
    Model,
    assert_same,
    batch,
    by_hand,
    in_parts,
    plain,
    run,
    shifted,
    summed,
)
from helpers import relative
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed

from fp8pass.graph import row_writer
from fp8pass.graph.classify import Kind


class _Adding(torch.autograd.Function):
    """A loss that adds a constant to the gradient of logits."""

    @staticmethod
    def forward(ctx, loss, logits):
        ctx.save_for_backward(logits)
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return gradient, logits * 1e-2


class _Clamping(torch.autograd.Function):
    """Identity that clamps the gradient of logits."""

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
    "adding": lambda logits, y: _Adding.apply(plain(logits, y), logits),
    "clamping": lambda logits, y: plain(_Clamping.apply(logits), y),
    "of the first token": _of_the_first_token,
    "with an accuracy": lambda logits, y: (
        plain(logits, y) + 0 * (logits.max(-1)[1] == y).float().mean()
    ),
    "with a largest logit": lambda logits, y: (
        plain(logits, y) + 1e-3 * logits.detach().max(-1).values.mean()
    ),
    "narrow": lambda logits, y: plain(torch.narrow(logits, -1, 0, 150), y % 150),
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
    """Gradients that are not multiples of the tangent, tokens that interact, several results."""
    model, data = Model(loss), batch((8, 20))  # as many tokens as words
    program, spy = in_parts(model, 3)
    (program(*data) * factor).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(*data) * factor).backward()
    for gradient, p in zip(got, model.parameters(), strict=True):
        assert relative(gradient, p.grad) < 1e-5
    assert len(spy.plan.heads) == 1


def test_an_exception_is_a_reason_and_fails_a_check(monkeypatch):
    def broken(*_):
        raise RuntimeError("of an operator")

    monkeypatch.setitem(row_writer._WRITERS_OF_KINDS, Kind.POINTWISE, broken)
    with pytest.raises(BackendCompilerFailed, match="of an operator"):  # tests set FP8PASS_CHECK
        run(Model(plain), batch(), 3)
    torch._dynamo.reset()
    monkeypatch.setenv("FP8PASS_CHECK", "0")
    (head,) = run(Model(plain), batch(), 3)[2].plan.heads
    assert head.chunks == 1
    assert "cannot be computed in chunks of tokens: of an operator" in head.reason


@pytest.mark.long
def test_a_sum_over_the_remaining_tokens():
    """The gradient of a factor of probabilities after a shift."""

    class Projected(Model):
        def __init__(self):
            super().__init__()
            places = torch.arange(VOCABULARY * VOCABULARY).view(VOCABULARY, VOCABULARY)
            self.projection = nn.Parameter(torch.sin(places))

        def forward(self, ids, targets):
            logits = self.lm_head(self.embedding(ids))
            p = logits[:, :-1].softmax(-1).flatten(0, 1)
            return shifted(logits, targets) + (p @ self.projection).square().sum()

    model, data = Projected(), batch()
    assert_same(run(model, data, 3), run(model, data, 1), head_tolerance=1e-5)


def test_gradients_in_float16_are_scaled_before_they_are_rounded():
    model, data = Model(summed, dtype=torch.float16), batch()
    spy = run(model, data, 3)[2]
    assert "float16" in spy.plan.heads[0].reason


@pytest.mark.long
@pytest.mark.parametrize("loss", [lambda logits, y: plain(logits * y.shape[1], y)])
def test_sizes_that_are_numbers_in_a_loss(loss):
    model, data = Model(loss), batch()
    program, spy = in_parts(model, 3, dynamic=True)
    torch.testing.assert_close(program(*data), model(*data))
    assert spy.plan.heads[0].chunks == 1


@pytest.mark.drawn(1)
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
    assert_same(run(model, data, 3), run(model, data, 1), head_tolerance=1e-5)


class _Returning(Model):
    """Also returns a value computed from logits."""

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
        (lambda logits, y: (plain(logits, y), logits), "the model returns the logits"),
        (lambda logits, y: (plain(logits, y), (logits * 2).exp()), "the model returns the logits"),
        (lambda logits, y: (plain(logits, y), logits.cumsum(0).mean()), "mix tokens"),
        (lambda logits, y: (plain(logits / logits.std(), y),), "needs all tokens"),
        (lambda logits, y: (plain(logits, y).exp(),), "needs all tokens"),
        (lambda logits, y: (by_hand(logits, y).square(),), "mix tokens"),
        (lambda logits, y: (plain(logits, y), by_hand(logits, y)), "several losses"),
        (
            lambda logits, y: (
                F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none"),
            ),
            "one loss for each token",
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


def test_dropout_of_logits_leaves_their_head_whole(caplog):
    program, spy = in_parts(Model(lambda logits, y: plain(F.dropout(logits, 0.3), y)), 3)
    program(*batch()).backward()
    (head,) = spy.plan.heads
    assert head.chunks == 1
    assert "draws random numbers for all tokens at once" in head.reason
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.long
def test_two_losses_whose_sum_is_returned():
    model = Model(lambda logits, y: plain(logits, y) + 0.5 * by_hand(logits, y))
    got = run(model, batch(), 3)
    assert_same(got, run(model, batch(), 1))
    assert got[2].plan.heads[0].chunks == 3


class TwoUses(Model):
    """One head used twice, or two heads, for the same labels: early exit, distillation."""

    def __init__(self, *, of_one_head: bool) -> None:
        super().__init__()
        self.other = self.lm_head if of_one_head else copy.deepcopy(self.lm_head)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        y = x + torch.tanh(self.block(x))
        return plain(self.lm_head(y), targets) + 0.3 * plain(self.other(x), targets)


@pytest.mark.long
@pytest.mark.parametrize("of_one_head", [True, False])
def test_heads_with_the_same_labels_go_together(of_one_head):
    """Both read one mask of the labels, as large as logits, so they are in one part."""
    model = TwoUses(of_one_head=of_one_head)
    got = run(model, batch(), 3)
    assert [head.chunks for head in got[2].plan.heads] == [3, 3]
    assert_same(got, run(model, batch(), 1))


@pytest.mark.long
def test_a_head_behind_a_teacher():
    class Taught(TwoUses):
        def forward(self, ids, targets):
            x = self.embedding(ids)
            student = self.lm_head(x + torch.tanh(self.block(x))).flatten(0, 1).log_softmax(-1)
            taught = self.other(x).detach().flatten(0, 1).softmax(-1)
            return F.kl_div(student, taught, reduction="batchmean")

    got = run(Taught(of_one_head=False), batch(), 3)
    assert [head.chunks for head in got[2].plan.heads] == [3, 3]
    assert_same(got, run(Taught(of_one_head=False), batch(), 1))
