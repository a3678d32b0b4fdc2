"""A second process starts from the caches; another configuration or source does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import fx

from fp8pass import compilation
from fp8pass.compilation import Compilation, Inputs, match_names
from fp8pass.config import Config
from fp8pass.partition import Partitioner

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters

keys = {
    "aot_hit": ("aot_autograd", "autograd_cache_hit"),
    "aot_miss": ("aot_autograd", "autograd_cache_miss"),
    "aot_saved": ("aot_autograd", "autograd_cache_saved"),
    "bypass": ("aot_autograd", "autograd_cache_bypass"),
    "fx_hit": ("inductor", "fxgraph_cache_hit"),
    "fx_miss": ("inductor", "fxgraph_cache_miss"),
}
for options in map(json.loads, sys.argv[1:]):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh())
    compiled = torch.compile(model, backend="fp8pass", options=options)
    x = torch.randn(32, 32, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    found = {name: counters[a][b] for name, (a, b) in keys.items()}
    found["sums"] = [y.sum().item(), x.grad.sum().item(), model[0].weight.grad.sum().item()]
    print(json.dumps(found))
"""


def run(folder, *options):
    """Compile a model in a new process, once for each of `options`. Return its cache counters."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        # Skip the test of vector instructions, which compiles a program.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "FP8PASS_CHECK": "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(json.dumps, options)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()[-len(options) :]]


@pytest.mark.long
def test_a_second_process_hits_the_caches_and_another_config_misses(tmp_path):
    (first,) = run(tmp_path, {})
    assert (first["aot_hit"], first["aot_miss"], first["bypass"]) == (0, 1, 0)
    assert first["aot_saved"] == 1

    second, other = run(tmp_path, {}, {"recipe": "exact"})
    assert (second["aot_hit"], second["aot_miss"], second["bypass"]) == (1, 0, 0)
    assert second["fx_miss"] == 0
    assert second["fx_hit"] > 0
    assert second["sums"] == first["sums"]
    assert (other["aot_hit"], other["aot_miss"]) == (0, 1)


LEAF = Inputs(frozenset({0}))


def key_of(config: Config | None = None, inputs: Inputs = LEAF) -> str:
    return Partitioner(Compilation(config or Config(), inputs)).uuid()


@pytest.fixture
def key():
    return key_of()


def test_equal_partitioners_share_a_key(key):
    assert key_of(Config.recipe("coat")) == key
    assert isinstance(key, str)


@pytest.mark.parametrize(
    "config", [Config(group_size=16), Config.recipe("exact"), Config(skip=("a",))]
)
def test_key_covers_the_config(key, config):
    assert key_of(config) != key


@pytest.mark.parametrize(("held", "activations"), [((), ()), ((), (0,)), ((0,), (1,))])
def test_key_covers_the_inputs(key, held, activations):
    inputs = Inputs(frozenset(held), frozenset(activations))
    assert key_of(inputs=inputs) != key


def test_key_covers_the_source(key, monkeypatch):
    monkeypatch.setattr(compilation, "source_hash", lambda: "edited")
    assert key_of() != key


def test_key_covers_pytorch(key, monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.12.0")
    assert key_of() != key


@pytest.mark.parametrize(
    ("room", "changes"), [("passes", True), ("graph", True), ("optim", False), ("tools", False)]
)
def test_source_hash_covers_the_compiler(monkeypatch, tmp_path, room, changes):
    """An edit in a room of the compiler changes the hash, an edit in another room does not."""
    package = tmp_path / "fp8pass"
    (package / room / "joint").mkdir(parents=True)
    (package / "compilation.py").write_text("a = 1\n")
    edited = package / room / "joint" / "module.py"
    edited.write_text("b = 1\n")
    monkeypatch.setattr(compilation, "__file__", str(package / "compilation.py"))
    before = compilation.source_hash.__wrapped__()
    edited.write_text("b = 2\n")
    assert (compilation.source_hash.__wrapped__() != before) == changes


@pytest.mark.parametrize("variable", ["FP8PASS_DISABLE_PASSES"])
def test_key_covers_the_environment_that_changes_the_passes(key, monkeypatch, variable):
    """A run with a pass must not load a graph that was compiled without it."""
    monkeypatch.setenv(variable, "quantize_linears")
    assert key_of() != key


NAMES = '''
import sys
import torch
from torch import nn
from torch._dynamo.utils import counters

class Product(nn.Module):
    def forward(self, x, weight):
        return nn.functional.linear(x, weight)

class Named(nn.Module):
    """The source of its weight does not depend on the name of the module that uses it."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.add_module(name, Product())

    def forward(self, x):
        return nn.functional.gelu(self.get_submodule(self.name)(x, self.weight))

x = torch.randn(32, 64)
options = {"skip": ("skipped",)}
for name in sys.argv[1:]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Named(name)
    y = torch.compile(model, backend="fp8pass", options=options)(x)
    hits = counters["aot_autograd"].pop("autograd_cache_hit", 0)
    print(name, hits, bool(torch.allclose(y, model(x), rtol=1e-4, atol=1e-5)))
    y.sum().backward()
'''


@pytest.mark.long
def test_graphs_that_differ_in_names_that_matter_do_not_share_an_entry(tmp_path):
    """The name of a layer can keep it exact, which must not affect equal layers."""
    names = ("body", "lm_head", "skipped", "other")
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "FP8PASS_CHECK": "0"}
    result = subprocess.run(
        [sys.executable, "-c", NAMES, *names],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = [line.split() for line in result.stdout.splitlines()]
    assert found == [
        ["body", "0", "False"],
        ["lm_head", "0", "True"],
        ["skipped", "0", "True"],
        ["other", "1", "False"],
    ]


LOGGED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, dtype=torch.float64).float())
torch.compile(model, backend="fp8pass")(torch.randn(32, 64)).sum().backward()
"""


HINTED = """
import torch
from torch import nn
from fp8pass import compile_log

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, x, targets):
        logits = self.lm_head(self.body(x))
        return nn.functional.cross_entropy(logits, targets), logits

compile_log.LARGE_LOGITS = 0
program = torch.compile(Head(), backend="fp8pass", options={"head_chunks": 2})
program(torch.randn(32, 64), torch.randint(256, (32,)))[0].backward()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "messages"),
    [
        (LOGGED, ["2 of 2 linear layers in FP8"]),
        (HINTED, ["1 of 2 linear layers in FP8", "return_logits=False saves 32 KiB"]),
    ],
)
def test_messages_about_cached_graphs_are_logged_again(tmp_path, script, messages):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "FP8PASS_CHECK": "0"}
    found = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
        found.append([line for line in result.stderr.splitlines() if "fp8pass:" in line])
    assert found[0] == found[1]
    for message in messages:
        assert any(message in line for line in found[0])


def named(path: str) -> fx.GraphModule:
    """Return a graph of one operator of the module `path`."""
    g = fx.Graph()
    node = g.call_function(torch.relu, (g.placeholder("x"),))
    node.meta["nn_module_stack"] = {"1": (f"L['self'].{path}", torch.nn.ReLU)}
    g.output(node)
    return fx.GraphModule(torch.nn.Module(), g)


@pytest.mark.parametrize(
    ("options", "matters"),
    [
        ({}, False),
        ({"skip": ("layers.0",)}, True),
        ({"skip": ("layers",)}, False),
        ({"keep_exact": ("*.0",)}, True),
        ({"keep_exact": ("layers.1.mlp",)}, False),
        ({"keep_exact": ("layers.2:relu:0",)}, True),
        ({"calibration": (("layers.2:relu:0", 0.0, 1.0),)}, True),
    ],
)
def test_key_covers_what_names_decide(options, matters):
    """Names that do not matter are not in the key, so that equal layers share an entry."""
    first, second = (match_names(named(f"layers.{i}"), Config(**options)) for i in range(2))
    assert (first != second) == matters
    keys = [Compilation(Config(**options), by_name=names).cache_key() for names in (first, second)]
    assert (keys[0] != keys[1]) == matters


def test_functions_in_skip_count_by_what_they_select():
    def select(last: str):
        return lambda path: path.endswith(last)

    for calibration in ((), (("a.b:relu:0", 0.0, 1.0),)):
        keys = []
        for last in ("b", "b", "c"):
            config = Config(skip=select(last), calibration=calibration)
            keys.append(Compilation(config, by_name=match_names(named("a.b"), config)).cache_key())
        assert keys[0] == keys[1] != keys[2]


def test_key_covers_the_names_of_heads_and_of_modules_in_checkpointed_regions():
    body, head = (match_names(named(path), Config()) for path in ("a.body", "a.lm_head"))
    assert body != head
    outer = named("a")
    outer.add_module("wrap_body_0", named("lm_head"))
    assert match_names(outer, Config()) != match_names(named("a"), Config())
