"""Compare time, activation memory and gradient error of decoder layers, in one process.

    python benchmarks/layer.py                 all cases, writes benchmarks/results/layer.json
    python benchmarks/layer.py --cases h2048   one case
    python benchmarks/layer.py --tiny          a CPU-sized case, to check that the script works

Measured for each case and variant: seconds of a cold compilation; median milliseconds of forward
and backward (CUDA events), with alternating variants; milliseconds in which the CPU launches the
first step of a turn; bytes that the forward leaves allocated for the backward, without the output;
relative L2 errors against eager BF16: output, input gradient, worst weight gradient.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from models import Stack, init_weights, rope_tables
from report import environment, print_rows, write_json
from tables_layers import BASELINE, GRAPHED, layer_table
from torch import Tensor, nn

import fp8pass


@dataclass(frozen=True)
class Case:
    """A stack of decoder layers and the sizes of its input."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    seq: int
    batch: int = 4


CASES = (
    Case("h2048", 1, 2048, 16, 5504, 2048),
    Case("h4096", 1, 4096, 32, 11008, 4096),
    Case("h4096x4", 4, 4096, 32, 11008, 4096),
)
TINY = Case("tiny", 1, 128, 2, 384, 64)
# Length of a variant's turn. A turn has at least one step, even if the step takes longer.
TURN_MS = 20.0


@dataclass
class Times:
    """Milliseconds of a step, and milliseconds in which the CPU launches a step."""

    ms: float = 0.0
    cpu_ms: float = 0.0


@dataclass
class Result:
    """One variant on one case; see the module's docstring."""

    case: str
    variant: str
    rounds: int
    compile_s: float = 0.0
    ms: float = 0.0
    cpu_ms: float = 0.0
    activation_bytes: int = 0
    saved_bytes: int | None = None
    output_error: float = 0.0
    x_grad_error: float = 0.0
    worst_weight_grad_error: float = 0.0


class Subject:
    """A variant of a model with its inputs: runs steps and measures them."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        self.model, self.inputs, self.grad = model, inputs, grad

    def step(self) -> None:
        """Run forward and backward."""
        self.model(*self.inputs).backward(self.grad)

    def clear(self) -> None:
        """Delete the gradients."""
        self.inputs[0].grad = None
        self.model.zero_grad(set_to_none=True)

    def activation_bytes(self) -> int:
        """Return the bytes that the forward leaves allocated, without its output."""
        if self.inputs[0].device.type != "cuda":
            return 0
        self.clear()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = self.model(*self.inputs)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before - output.untyped_storage().nbytes()
        output.backward(self.grad)
        return held

    def gradients(self) -> dict[str, Tensor]:
        """Return output and gradients of one step."""
        self.clear()
        output = self.model(*self.inputs)
        output.backward(self.grad)
        found = {"output": output.detach(), "x": self.inputs[0].grad}
        for name, parameter in self.model.named_parameters():
            found[name.removeprefix("model.").replace("_orig_mod.", "")] = parameter.grad
        return {name: t.detach().clone() for name, t in found.items() if t is not None}


Variant = Callable[[nn.Module], nn.Module]


def torchao(recipe: str, **how: Any) -> Variant:
    """Return a function that converts a model with torchao's float8 recipe and compiles it."""
    return lambda m: torch.compile(in_torchao(recipe, m), **how)  # type: ignore[return-value]


def in_torchao(recipe: str, model: nn.Module) -> nn.Module:
    """Convert all linear layers of a model with torchao's float8 recipe. Return the model."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


# The option behind `mode="reduce-overhead"`; PyTorch does not accept a mode and options together.
CUDA_GRAPHS = {"triton.cudagraphs": True}


def with_fp8pass(**options: Any) -> Variant:
    """Return a function that compiles a model with fp8pass and these options."""
    return lambda m: torch.compile(m, backend="fp8pass", options=options or None)  # type: ignore[return-value]


def variants(extra: bool) -> dict[str, Variant]:
    """Return all variants; the first variant is the reference for errors."""
    table: dict[str, Variant] = {
        "bf16 eager": lambda m: m,
        "bf16 compile": lambda m: torch.compile(m),  # type: ignore[dict-item, return-value]
        "torchao tensorwise": torchao("tensorwise"),
        "torchao rowwise": torchao("rowwise"),
        "fp8pass coat": with_fp8pass(),
        "fp8pass agoq": with_fp8pass(recipe="agoq"),
        "fp8pass agoq, 4 bits": with_fp8pass(save_format="e2m1"),
    }
    if extra:
        table["fp8pass linear"] = with_fp8pass(recipe="linear")
        table["fp8pass block"] = with_fp8pass(recipe="block")
        table["fp8pass coat G=16"] = with_fp8pass(group_size=16)
        table["fp8pass e8m3 simulated"] = with_fp8pass(simulate="e8m3")
        graphed = {"mode": "reduce-overhead"}
        table["bf16 compile" + GRAPHED] = lambda m: torch.compile(m, **graphed)  # type: ignore[call-overload]
        table[BASELINE + GRAPHED] = torchao("tensorwise", **graphed)
        table["fp8pass coat" + GRAPHED] = lambda m: torch.compile(m, backend="fp8pass", **graphed)  # type: ignore[call-overload]
    return table


def with_own_code(model: nn.Module, method: str = "forward") -> nn.Module:
    """Give `model` its own copy of the code of `method`, and return the model.

    Dynamo stores compiled graphs with the code object, and each call checks the guards of all these
    graphs. With shared code every variant would check the guards of the other variants.
    """
    kind = type(model)
    old = getattr(kind, method)
    code, defaults = old.__code__.replace(), old.__defaults__
    copied = FunctionType(code, old.__globals__, old.__name__, defaults, old.__closure__)
    model.__class__ = type(kind.__name__, (kind,), {method: copied})
    return model


def share_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters and buffers."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def median_times(subjects: dict[str, Subject], rounds: int) -> dict[str, Times]:
    """Return the median times of each subject. Subjects alternate.

    The order changes: a GPU at its power limit is slower after a demanding variant.
    """
    steps = {
        name: max(1, round(TURN_MS / _turn(subject, 1).ms)) for name, subject in subjects.items()
    }
    order, shuffle = list(subjects), random.Random(0).shuffle
    times: dict[str, list[Times]] = {name: [] for name in subjects}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(_turn(subjects[name], steps[name]))
    median = statistics.median
    return {
        name: Times(median(t.ms for t in turns), median(t.cpu_ms for t in turns))
        for name, turns in times.items()
    }


def _turn(subject: Subject, steps: int) -> Times:
    """Return the times of `steps` steps of a subject, run without pauses, as in training."""
    subject.clear()
    if subject.inputs[0].device.type != "cuda":
        start = time.perf_counter()
        subject.step()
        ms = (time.perf_counter() - start) * 1e3
        return Times(ms, ms)
    torch.cuda.synchronize()
    start = time.perf_counter()
    subject.step()  # the GPU is busy and at full clock when the timed steps start
    cpu_ms = (time.perf_counter() - start) * 1e3
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    for _ in range(steps):
        subject.clear()
        subject.step()
    end_event.record()
    torch.cuda.synchronize()
    subject.clear()
    return Times(start_event.elapsed_time(end_event) / steps, cpu_ms)


def run_case(
    case: Case, chosen: dict[str, Variant], device: torch.device, rounds: int
) -> list[Result]:
    """Measure every variant on one case."""
    torch.manual_seed(0)
    base = Stack(case.layers, case.hidden, case.heads, case.ffn).to(device, torch.bfloat16)
    init_weights(base)
    x = torch.randn(case.batch, case.seq, case.hidden, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    tables = rope_tables(case.seq, case.hidden // case.heads, device)
    return compare(case.name, base, (x, *tables), grad, chosen, rounds)


def compare(
    case: str,
    base: nn.Module,
    inputs: tuple[Tensor, ...],
    grad: Tensor,
    chosen: dict[str, Variant],
    rounds: int,
) -> list[Result]:
    """Measure every variant of a model. The model's first input gets a gradient."""
    torch._dynamo.reset()  # otherwise sizes that differ from the previous case become dynamic
    (x, *others), device = inputs, grad.device
    subjects, results = {}, {}
    reference: dict[str, Tensor] = {}
    for name, make in chosen.items():
        model = make(with_own_code(copy.deepcopy(base)))
        subject = Subject(model, (x.clone().requires_grad_(), *others), grad)
        start = time.perf_counter()
        subject.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        result = Result(case, name, rounds, compile_s=time.perf_counter() - start)
        subject.clear()  # CUDA graphs overwrite the results of the previous step
        subject.step()
        subject.clear()
        if not name.endswith(GRAPHED):
            result.activation_bytes = subject.activation_bytes()
        found = subject.gradients()
        if not reference:
            reference = found
        errors = {n: relative_error(found[n], reference[n]) for n in reference}
        result.output_error, result.x_grad_error = errors.pop("output"), errors.pop("x")
        result.worst_weight_grad_error = max(errors.values())
        if (recipe := name.removeprefix("fp8pass ")) in fp8pass.RECIPES:
            config = fp8pass.Config.recipe(recipe)
            explanation = fp8pass.explain(base, *subject.inputs, config=config)
            result.saved_bytes = sum(g.plan.saved_bytes for g in explanation.graphs)
        subject.clear()
        subjects[name], results[name] = subject, result
        print(f"{case} {name}: {asdict(result)}", file=sys.stderr, flush=True)
    for name, times in median_times(subjects, rounds).items():
        results[name].ms, results[name].cpu_ms = times.ms, times.cpu_ms
    return list(results.values())


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Return ‖x - reference‖ / ‖reference‖."""
    return float((x.float() - reference.float()).norm() / reference.float().norm())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[c.name for c in CASES])
    parser.add_argument("--variants", nargs="*", help="measure only these")
    parser.add_argument("--extra", action="store_true", help="also other settings")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="one small case, on the CPU too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/layer.json")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [TINY] if args.tiny else [c for c in CASES if c.name in args.cases]
    chosen = {
        name: make
        for name, make in variants(bool(args.extra or args.variants)).items()
        if not args.variants or name in args.variants
    }
    results: list[Result] = []
    for case in cases:
        waits = case is CASES[0]  # in other cases the GPU does not wait for the CPU
        run = {n: make for n, make in chosen.items() if waits or not n.endswith(GRAPHED)}
        results += run_case(case, run, device, args.rounds)
        gc.collect()
        record = {**environment(), "results": [asdict(r) for r in results]}
        write_json(args.out, record)
    print_rows("decoder layers, forward + backward", layer_table(record))


if __name__ == "__main__":
    main()
