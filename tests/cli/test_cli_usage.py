"""The command line: exit codes, help and error messages."""

from __future__ import annotations

import re
import textwrap

import pytest
from cli_helpers import expect_ok, run_python

import fp8pass
from fp8pass.tools.cli import COMMANDS

# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explian"], "Unknown command 'explian'. Did you mean 'explain'?"),
        (["explain"], "required: TARGET"),
        (["explain", "factories:model", "--recipee", "coat"], "Did you mean '--recipe'?"),
        (["explain", "factories:model", "other"], "Unknown argument 'other'."),
        (["explain", "factories:model", "--recipe", "coats"], "Did you mean 'coat'?"),
        (["explain", "factories:model", "--option", "skp=up"], "Did you mean 'skip'?"),
        (["explain", "factories:model", "--option", "name=1"], "Unknown option 'name'"),
        (["explain", "factories:model", "--option", "recpe=agoq"], "Did you mean 'recipe'?"),
        (["explain", "factories:model", "--option", "skip"], "is not KEY=VALUE"),
        (["explain", "factories:model", "--option", "group_size=17"], "multiple of 16"),
        (["explain", "factories:model", "--option", "memory_budget=0"], "a share up to 2.0"),
        (["explain", "factories:model", "--option", "quantize_lm_head=yes"], "True or False"),
        (["explain", "factories:model", "--option", "memory_budget=7GX"], "such as '24GiB'"),
        (["explain", "factories:model", "--dtype", "bfloat"], "Did you mean 'bfloat16'?"),
        (["explain", "factories:model", "--dtype", "int8"], "Unknown dtype"),
        (["explain", "factories:model", "--device", "cud"], "Did you mean 'cuda'?"),
        (["explain", "factories:model", "--device", "cuda:99"], "--device cuda:99 does not exist"),
        (["explain", "factories:model", "--input", "4,8"], "is not [NAME=]SHAPE[:DTYPE[:BELOW]]"),
        (["explain", "factories:model", "--input", "4x8:int46:9"], "Did you mean 'int64'?"),
        (["explain", "factories:model", "--input", "4x8:int64"], "integers need an upper bound"),
        (
            ["explain", "factories:model", "--input", "4x8:float16:3"],
            "only integers have an upper bound",
        ),
        (
            ["explain", "factories:model", "--html", "no/where.html"],
            "folder 'no' does not exist",
        ),
        (["diagnose", "factories:model", "--plot", "."], "is a folder: name a file in it"),
        (["explain", "factories:model", "--beside", "recipe=agoq"], "add --html report.html"),
        (
            ["explain", "factories:model", "--html", "x.html", "--beside", "recipe=coats"],
            "Did you mean 'coat'?",
        ),
        (["explain", "factories"], "TARGET is module:function"),
        (["explain", "no.json"], "No file no.json"),
        (["explain", "."], "No config.json in the folder ."),
        (["explain", "no.py:build"], "No file 'no.py'"),
        (["explain", "factories.py"], "write factories.py:NAME"),
        (["explain", "factory:model"], "Unknown module 'factory'. Did you mean 'factories'?"),
        (["explain", "not/a.module:model"], "is not a module"),
        (["explain", "factories:modle"], "Did you mean 'model'? factories has "),
        (["explain", "factories:constant"], "is of type int. TARGET must name a function"),
        (["explain", "factories:with_argument"], "missing a required argument: 'size'"),
        (["explain", "factories:number"], "TARGET returned (int). It must return a model"),
        (["explain", "factories:model"], "takes x, scale: missing a required argument: 'x'"),
        (["explain", "factories:model", "--input", "y=4x64"], "whose forward takes x, scale"),
        (["demo", "--steps", "1"], "must be at least 2"),
        (["demo", "--recipe", "coats"], "Did you mean 'coat'?"),
        (["env", "--jsn"], "Did you mean '--json'?"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 2  # the message, and a pointer to help
    assert err.endswith(" --help.\n")


def test_warnings_come_without_lines_of_source(run):
    code, _, err = run("explain", "factories:with_tensor", "--option", "skip=no_such_layer")
    assert code == 0
    (warning,) = (line for line in err.splitlines() if "no_such_layer" in line)
    assert warning.startswith(
        "fp8pass: warning: skip pattern 'no_such_layer' matches no linear layer"
    )
    assert ".py" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["factories:fails"], "building factories:fails failed: ZeroDivisionError: division"),
        (["needs_more:build"], "No module named 'no_such_dependency'"),
        (["factories:broken"], "running the model without fp8pass failed: RuntimeError: it broke."),
        (
            ["factories:model", "--input", "3x5"],
            "The inputs were float32 3x5; pass other inputs with --input",
        ),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_failures_take_one_line(run, words, message):
    code, out, err = run("explain", *words)
    assert (code, out) == (1, "")
    (line,) = [x for x in err.splitlines() if x != "forward"]
    assert line.startswith("fp8pass explain: error: ")
    assert message in line


def test_failures_of_fp8pass_explain_how_to_report_them(run, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("No cut.")

    monkeypatch.setattr(fp8pass, "explain", fail)
    code, _, err = run("explain", "factories:with_args")
    assert code == 1
    assert "fp8pass.explain failed: RuntimeError: No cut. --traceback" in err
    assert "fp8pass env" in err


def test_invalid_options_are_usage_errors(run):
    code, _, err = run("explain", "factories:with_args", "--option", "memory_budget=1e-6")
    assert code == 2
    assert "cannot be met" in err
    assert "Raise memory_budget to" in err


def test_invalid_environment_variables_are_usage_errors(run, monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "plan_saved_value")
    code, _, err = run("explain", "factories:with_args")
    assert code == 2
    assert "error: Unknown pass" in err
    assert "'plan_saved_value'. Did you mean 'plan_saved_values'?" in err


def test_a_traceback_is_printed_on_request(run):
    code, _, err = run("explain", "factories:fails", "--traceback")
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "return 1 / 0" in err
    assert err.splitlines()[-1].startswith("fp8pass explain: error: ")


def test_an_interrupt_exits_quietly(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(fp8pass, "explain", interrupt)
    assert run("explain", "factories:with_args")[0] == 130


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_exit_codes(run, name):
    out = expect_ok(run(name, "--help"))
    assert f"examples:\n  fp8pass {name}" in out
    assert re.search(r"exit codes:\n  0 .*\n  1 .*\n  2 ", out)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_parsed(name):
    from fp8pass.tools.cli import _make_parsers

    for example in COMMANDS[name].examples:
        _, *words = example.split()
        assert _make_parsers()[0].parse_args(words).command == name


def test_help_is_printed_without_a_command(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert all(command.summary.split()[0] in err for command in COMMANDS.values())


def test_help_and_version_do_not_load_pytorch():
    script = f"""
        import sys
        from fp8pass.tools.cli import main
        for words in (["--version"], ["--help"], *([n, "--help"] for n in {list(COMMANDS)})):
            try:
                main(words)
            except SystemExit as stopped:
                assert stopped.code == 0
        assert "torch" not in sys.modules
    """
    out = run_python("-c", textwrap.dedent(script)).stdout
    assert out.startswith(f"fp8pass {fp8pass.__version__}\n")
