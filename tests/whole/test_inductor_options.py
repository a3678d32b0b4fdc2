"""Options of Inductor that fp8pass sets where they are needed, and that users pass."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import cosine, tokens
from torch._inductor import config as inductor_config
from torch._inductor.codegen import wrapper
from torch._inductor.utils import run_and_get_code

from fp8pass import compat, compiler, hardware
from fp8pass.compiler import Backend, inductor_defaults
from fp8pass.config import Config
from fp8pass.partition import Partitioner

RECIPES = ("linear", "coat")


def roberta():
    """Return a tiny Roberta. One loop adds up the gradients of its three embeddings."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    return RobertaForMaskedLM(
        RobertaConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            vocab_size=512,
            max_position_embeddings=128,
            type_vocab_size=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).bfloat16()


def embedding_gradients(model, run, ids) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run(ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if "_embeddings" in n}


def assert_right_embeddings(recipe: str, device: str) -> None:
    model = roberta().to(device)
    ids = tokens(2, 64, 512).clamp(min=3).to(device)
    want = embedding_gradients(model, model, ids)
    program = torch.compile(model, backend=Backend(Config.recipe(recipe)))
    got = embedding_gradients(model, program, ids)
    assert len(want) == 3
    for name, gradient in want.items():
        assert cosine(got[name], gradient) > 0.99, name
    (token_types,) = (gradient for name, gradient in got.items() if "token_type" in name)
    assert not token_types[1].any(), "no token is of this type"


@pytest.mark.long
@pytest.mark.long
def test_gradients_of_embeddings_are_right_on_the_cpu():
    """Two threads, because Inductor uses atomic additions only with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_right_embeddings("linear", "cpu")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_embeddings_are_right_on_a_gpu(recipe):
    assert_right_embeddings(recipe, "cuda")


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_the_cpu_has_the_options_of_stock_inductor(recipe):
    assert inductor_defaults(Config.recipe(recipe), [torch.ones(2), 3]) == {}


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_an_accelerator_has_options_tuned_by_measurements(recipe):
    options = inductor_defaults(Config.recipe(recipe), [3, torch.empty(2, device="meta")])
    assert options["realize_reads_threshold"] == 8
    assert ("realize_opcount_threshold" in options) == (recipe == "agoq")


@pytest.mark.parametrize(
    ("options", "has_stock"),
    [({}, True), ({"memory_budget": 0.9}, False), ({"realize_reads_threshold": 8}, False)],
)
def test_a_step_that_the_cpu_limits_has_the_options_of_stock(options, has_stock, monkeypatch):
    """A budget has priority, because stock's options raise the peak. So have users' options."""
    found = []

    def compile_half(gm, inputs, **kwargs):
        found.append(inductor_config.realize_reads_threshold == stock)
        return compat.interpret(gm)

    monkeypatch.setattr(compat, "compile_fx_inner", compile_half)
    stock = inductor_config.realize_reads_threshold
    monkeypatch.setattr(compiler, "inductor_defaults", lambda *_: {"realize_reads_threshold": 8})
    monkeypatch.setattr(hardware, "rates_of", lambda device: hardware.GPUS["H200"])
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 10.0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    program = torch.compile(layers.bfloat16(), backend="fp8pass", options=options)
    program(torch.randn(128, 64).bfloat16()).sum().backward()
    assert found == [has_stock] * 2


@pytest.mark.parametrize("options", [{}, {"allow_buffer_reuse": True}])
def test_small_buffers_are_reused(options, monkeypatch):
    """Larger buffers are freed, unless the user sets Inductor's option."""
    found = []

    def compile_half(gm, inputs, **kwargs):
        found.append((inductor_config.allow_buffer_reuse, wrapper.buffer_reuse_key))
        return compat.interpret(gm)

    before = wrapper.buffer_reuse_key
    monkeypatch.setattr(compat, "compile_fx_inner", compile_half)
    monkeypatch.setattr(compiler, "inductor_defaults", lambda *_: {"allow_buffer_reuse": False})
    program = torch.compile(torch.nn.Linear(64, 64), backend="fp8pass", options=options)
    program(torch.randn(128, 64)).sum().backward()
    assert [(reuses, key is before) for reuses, key in found] == [(True, bool(options))] * 2
    assert wrapper.buffer_reuse_key is before


def test_cache_keys_contain_which_options_users_leave_to_fp8pass():
    """Inductor's own key does not show which buffers are reused."""
    compilation = compiler.Compilation(Config(), compiler.Inputs.of([], frozenset()), ())
    keys = {Partitioner(compilation, options).uuid() for options in ({}, {"allow_buffer_reuse": 1})}
    assert len(keys) == 2


@pytest.mark.long
@pytest.mark.parametrize(("rows", "reuses"), [(512, True), (4096, False)])
def test_generated_code_reuses_buffers_up_to_a_size(rows, reuses):
    def function(x, w):
        for _ in range(4):
            x = (x @ w).relu() @ w
        return x

    def allocations():
        torch._dynamo.reset()
        _, code = run_and_get_code(torch.compile(function), *args)
        return code[0].count("= empty_strided_cpu(")

    args = torch.randn(rows, 128), torch.randn(128, 128)
    options = {"allow_buffer_reuse": False, "force_disable_caches": True}
    with inductor_config.patch(options):
        all_allocations = allocations()
        with compat.reuse_small_buffers():
            assert (allocations() < all_allocations) == reuses


COMPILE_WORKER = """
import torch
from torch._inductor.async_compile import AsyncCompile
from fp8pass import compat

if __name__ == "__main__":
    AsyncCompile.process_pool().submit(int).result()  # as if PyTorch had compiled something before
    options = {"compiler": "eager", compat.STATIC_LAUNCHES: True}
    torch.compile(torch.nn.Linear(2, 2), backend="fp8pass", options=options)(torch.ones(2))
    option = f"__import__('torch._inductor.config')._inductor.config.{compat.STATIC_LAUNCHES}"
    print(AsyncCompile.process_pool().submit(eval, option).result())
"""


@pytest.mark.long
def test_processes_that_compile_kernels_prepare_static_launches():
    """Inductor does not pass this option to the processes."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE_WORKER],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("name", "value"), [("max_autotune", "yes"), ("shape_padding", 1), ("triton.cudagraphs", "x")]
)
def test_values_of_another_type_are_refused(name, value):
    program = torch.compile(torch.nn.Linear(32, 32), backend="fp8pass", options={name: value})
    with pytest.raises(Exception, match=rf"{name} must be a bool.* got {value!r}"):
        program(torch.randn(16, 32))


@pytest.mark.long
def test_activation_quantization_of_pytorch_causes_a_warning():
    options = {"post_grad_fusion_options": {"activation_quantization_aten_pass": {}}}
    program = torch.compile(torch.nn.Linear(32, 32), backend="fp8pass", options=options)
    with pytest.warns(UserWarning, match="activation_quantization_aten_pass is on"):
        program(torch.randn(16, 32)).sum().backward()
