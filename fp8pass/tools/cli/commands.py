"""The commands explain, fit, diagnose, bisect and demo: their options, their help, their calls."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from fp8pass.config import Config
from fp8pass.demo import options as demo
from fp8pass.tools.cli import target
from fp8pass.tools.cli.model_run import make_loss_fn, run_alone
from fp8pass.tools.cli.parsing import (
    Command,
    Failure,
    UsageError,
    check_output_file,
    check_plot,
    task,
)

REPORT = "--traceback shows where. To report the error, add the output of fp8pass env."
# Unlike other commands, `fit` does not first run the model without a backend, so the error may come
# from the model itself.
REPORT_FIT = (
    "--traceback shows where. If the error is not in the model or its loss_fn, report it with the "
    "output of fp8pass env."
)


def _add_options(parser: argparse.ArgumentParser, plot: str = "", runs: bool = True) -> None:
    target.add_options(parser, runs=runs)
    if plot:
        help = f"also draw {plot}, as PNG, SVG or PDF"
        parser.add_argument("--plot", type=check_output_file, metavar="FILE", help=help)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    add = parser.add_argument
    frontier = "also show the recomputation time of smaller memory budgets"
    add("--frontier", action="store_true", help=frontier)
    rules = "also show how much each part of the model amplifies rounding errors"
    add("--rules", action="store_true", help=rules)
    add(
        "--html",
        type=check_output_file,
        metavar="FILE",
        help="also write a report to open in a browser",
    )
    add(
        "--beside",
        action="append",
        default=[],
        type=target.option,
        metavar="KEY=VALUE",
        help="in the report, compare with another recipe or with other options; repeatable: "
        "recipe=agoq, memory_budget=0.6",
    )


def _add_fit_options(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, plot="memory over a step", runs=False)
    add = parser.add_argument
    gpu = "the GPU by name, memory or both: RTX4090, 16GiB, H200,16GiB (default: the local GPU)"
    add("--gpu", help=gpu)
    add("--host", help="host memory, such as 64GiB (default: the available memory of this machine)")
    sums = "micro-batches whose gradients are summed before an update (default: 1)"
    add("--accumulate", type=int, default=1, metavar="N", help=sums)
    blocks = (
        "modules that are compiled one by one, such as model.layers; repeatable (default: the "
        "model is compiled as a whole)"
    )
    add("--blocks", action="append", default=[], metavar="PATH", help=blocks)


def _explain(options: argparse.Namespace) -> None:
    if options.beside and not options.html:
        raise UsageError("--beside needs a report: add --html report.html.")
    config = target.parse_config(options)
    target.parse_beside(options, config or Config())  # find errors before the model runs
    found = target.load(options)
    run_alone(found)
    import fp8pass

    def explain(config: Config | None) -> Any:
        wanted = {"frontier": options.frontier, "rules": options.rules}
        return fp8pass.explain(found.model, *found.args, config=config, **wanted, **found.kwargs)

    with task("fp8pass.explain", REPORT):
        explanation = explain(config)
        other = target.parse_beside(options, explanation.config)
        beside = explain(other) if other else None
    if options.html:
        with task("writing the report", "Pass another file to --html."):
            explanation.save(options.html, beside=beside)
    _show(explanation, options)


def _fit(options: argparse.Namespace) -> None:
    check_plot(options)
    config = target.parse_config(options)
    found = target.load(options)
    import torch

    import fp8pass

    loss_fn = make_loss_fn(found)
    unpacks = isinstance(found.batch, torch.Tensor)  # fit passes a single tensor as a tuple
    with task("fp8pass.fit", REPORT_FIT):
        result = fp8pass.fit(
            found.model,
            *found.args,
            gpu=options.gpu,
            host=options.host,
            config=config,
            accumulate=options.accumulate,
            blocks=options.blocks,
            loss_fn=lambda model, batch: loss_fn(model, batch[0] if unpacks else batch),
            **found.kwargs,
        )
    result.notes[:0] = found.notes
    _show(result, options)
    if not result.fits:
        raise Failure("the model does not fit; the output shows what is too large.")


def _run_tool(name: str, options: argparse.Namespace) -> None:
    check_plot(options)
    config = target.parse_config(options)
    found = target.load(options)
    loss_fn = make_loss_fn(found)
    run_alone(found, partial(loss_fn, found.module, found.batch))
    import fp8pass

    with task(f"fp8pass.{name}", REPORT):
        result = getattr(fp8pass, name)(found.model, loss_fn, found.batch, config=config)
    _show(result, options)


def _show(result: Any, options: argparse.Namespace) -> None:
    if getattr(options, "plot", None):
        with task("drawing the plot", "Pass another file to --plot."):
            result.plot(options.plot)
    print(result.to_json() if options.json else str(result).rstrip())


def _run_demo(options: argparse.Namespace) -> None:
    from fp8pass.demo import compare

    compare.run_demo(options)


COMMANDS = (
    Command(
        "explain",
        "show the formats that fp8pass chooses for a model, the reasons, and the memory",
        "Show which linear layers run in FP8, the formats of saved tensors, and why. Runs one\n"
        "forward of the model and trains nothing.\n\n" + target.TARGET_HELP,
        (
            "fp8pass explain models:build",
            "fp8pass explain model.py:MLP --input 32x64:bfloat16",
            "fp8pass explain llama/config.json --recipe agoq --option memory_budget=0.6 --frontier",
            "fp8pass explain gpt2/ --input input_ids=8x1024:int64:50257 --html report.html",
            "fp8pass explain models:build --html report.html --beside recipe=agoq",
        ),
        _add_explain_options,
        _explain,
    ),
    Command(
        "fit",
        "find the options with which a model fits a GPU, without running it",
        "Show how much memory training takes on a GPU and its host, and the fastest options that\n"
        "fit, as lines to paste. fit runs nothing and needs neither the GPU nor its memory: a\n"
        "Hugging Face model is built on PyTorch's meta device, and a function may build its model\n"
        "there, too (docs/fit.md).\n\n" + target.TARGET_HELP,
        (
            "fp8pass fit llama/config.json --gpu RTX4090 --host 64GiB --blocks model.layers",
            "fp8pass fit llama/ --gpu 16GiB --accumulate 8 --input input_ids=4x2048:int64:32000 "
            "--input labels=4x2048:int64:32000",
            "fp8pass fit models:build --gpu RTX4090 --plot memory.png",
            "fp8pass fit model.py:MLP --input 32x64:bfloat16 --gpu H200,2GiB --json",
        ),
        _add_fit_options,
        _fit,
    ),
    Command(
        "diagnose",
        "measure the gradient error that each layer of a model adds",
        "Measure the gradient error that each layer adds on one batch, and compare it with the\n"
        "error that the rules predict. Errors far above the prediction are marked, with the\n"
        "option that avoids them.\n\n" + target.TARGET_HELP,
        (
            "fp8pass diagnose models:build",
            "fp8pass diagnose llama/config.json --recipe agoq --plot errors.png",
            "fp8pass diagnose models:build --option skip=layers.0 --json",
        ),
        partial(_add_options, plot="the errors"),
        partial(_run_tool, "diagnose"),
    ),
    Command(
        "bisect",
        "find the layers and saved tensors that cause a large gradient error",
        "Find the linear layers and saved tensors that cause a large gradient error.\n"
        "Runs one step of the model several times, each time with other layers and tensors in\n"
        "high precision.\n\n" + target.TARGET_HELP,
        (
            "fp8pass bisect models:build",
            "fp8pass bisect model.py:build --recipe agoq --device cuda --json",
        ),
        _add_options,
        partial(_run_tool, "bisect"),
    ),
    Command(
        "demo",
        "train a small language model with and without fp8pass, and compare",
        demo.DESCRIPTION,
        ("fp8pass demo", "fp8pass demo --steps 50 --recipe agoq", "fp8pass demo --data my/texts"),
        demo.add_options,
        _run_demo,
    ),
)
