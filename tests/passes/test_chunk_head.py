"""The output head and its loss in chunks: the same numbers, without logits of all tokens."""

from __future__ import annotations

import re

import pytest
import torch
from head_helpers import (
    HIDDEN,
    LOSSES,
    VOCABULARY,
    Model,
    assert_same,
    batch,
    in_parts,
    plain,
    run,
    shifted,
    softcapped_with_z_loss,
)
from helpers import relative
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import fp8pass
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.graph.chunks import chunks_of
from fp8pass.option_checks import ConfigError
from fp8pass.passes.joint.chunk_head import choose_chunks


@pytest.mark.long
@pytest.mark.drawn(4)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_spelling_gives_the_same_numbers(loss):
    model, data = Model(loss), batch()
    got = run(model, data, 3)
    (head,) = got[2].plan.heads
    assert (head.chunks, head.reason) == (3, "")
    assert_same(got, run(model, data, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"bias": True}, {"frozen": True}, {"dtype": torch.bfloat16}], ids=str
)
def test_kinds_of_heads(options):
    model, data = Model(softcapped_with_z_loss, **options), batch()
    got = run(model, data, 4)
    assert got[2].plan.heads[0].chunks == 4
    assert_same(got, run(model, data, 1), head_tolerance=8e-3 if "dtype" in options else 1e-6)


@pytest.mark.long
def test_a_head_tied_to_the_embedding():
    model, data = Model(tied=True), batch()
    (loss, gradients, spy), want = run(model, data, 4), run(model, data, 1)
    assert spy.plan.heads[0].chunks == 4
    assert relative(loss, want[0]) < 1e-6
    assert all(relative(gradients[name], want[1][name]) < 1e-6 for name in gradients)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("loss", [plain, shifted, softcapped_with_z_loss])
def test_dynamic_shapes(loss):
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


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "agoq", "linear"])
def test_a_head_in_fp8(recipe):
    model, data = Model(plain, dtype=torch.bfloat16), batch((4, 16))
    loss, gradients, spy = run(model, data, 4, recipe=recipe, quantize_lm_head=True)
    head = spy.plan.linears[-1]
    assert (head.module, head.rows) == ("lm_head", "4 × 16")
    assert head.fp8 == ("forward", "dgrad", "wgrad")
    exact, want, _ = run(model, data, 1)
    assert relative(loss, exact) < 0.01
    assert all(relative(gradients[name], want[name]) < 0.2 for name in want)


@pytest.mark.long
def test_gradients_are_multiples_of_the_tangent():
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
    model, data = Model(shifted), batch()
    program, spy = in_parts(model, 3)
    with torch.no_grad():
        assert torch.equal(program(*data), model(*data))
    assert spy.plan.heads[0].chunks == 3


@pytest.mark.long
def test_inductor_runs_one_chunk_after_the_other():
    """The weight's gradient is summed in place."""
    model, data = Model(softcapped_with_z_loss), batch((4, 32))
    got = run(model, data, 4, compiler="inductor")
    loss, gradients, _ = run(model, data, 1, compiler="inductor")
    assert relative(got[0], loss) < 1e-6
    assert all(relative(got[1][name], g) < 1e-5 for name, g in gradients.items())
    (passes,) = got[2].passes
    halves = [p.after for p in passes if p.name == "unroll_chunks"]
    assert len(halves) == 2
    assert "in_chunks" not in "".join(halves)
    assert halves[0].count("add_product.default(") == 3


@pytest.mark.long
@pytest.mark.long
def test_logits_of_one_chunk_are_alive_at_once():
    """With Inductor's fusion on GPUs, which computes losses where they are concatenated."""
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


@pytest.mark.long
def test_no_value_of_all_tokens_and_the_whole_vocabulary():
    graphs = []
    config = Config.recipe("exact", compiler="eager", head_chunks=8)
    program = torch.compile(Model(), backend=Backend(config, graphs.append))
    program(*batch((8, 64))).backward()
    (compiled_graph,) = graphs
    assert chunks_of(compiled_graph.gm.graph)
    values = [n.meta.get("val") for n in compiled_graph.gm.graph.nodes]
    assert max(v.numel() for v in values if isinstance(v, torch.Tensor)) == 8 * 64 * HIDDEN


@pytest.mark.long
def test_twenty_steps_give_the_same_model():
    results = []
    for chunks in (1, 4):
        model = Model(shifted, tied=True)
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
    assert choose_chunks(8192, 4096) == 4
    assert choose_chunks(65536, 4096) == 8
    assert choose_chunks(4096, 4096) == 1
    assert choose_chunks(65536, 768) == 1


@pytest.mark.long
def test_explain_tells():
    model = Model()
    text = str(fp8pass.explain(model, *batch(), config=Config(head_chunks=2)))
    assert "Logits of lm_head, 24×160: computed in 2 chunks of tokens" in text
    text = str(fp8pass.explain(model, *batch()))
    assert "computed for all tokens at once" in text
    assert "because the head has too few tokens or features to gain from chunks" in text


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_wrong_options(value):
    with pytest.raises(ConfigError, match="head_chunks"):
        Config(head_chunks=value)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [plain, shifted, softcapped_with_z_loss])
@pytest.mark.parametrize("fp8", [False, True])
def test_on_a_gpu(loss, fp8):
    model, data = Model(loss, dtype=torch.bfloat16).cuda(), [x.cuda() for x in batch((4, 64))]
    recipe = {"recipe": "coat", "quantize_lm_head": True} if fp8 else {"recipe": "exact"}
    options = {"compiler": "inductor", **recipe}
    loss_value, gradients, _ = run(model, data, 4, **options)
    exact, want, _ = run(model, data, 1, **options)
    assert relative(loss_value, exact) < 0.01
    assert all(relative(gradients[name], want[name]) < (0.1 if fp8 else 0.02) for name in want)
