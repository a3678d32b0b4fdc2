"""The layout of the report's graph, computed by its JavaScript. Needs Node.js, but no browser."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import Residuals

from fp8pass import explain
from fp8pass.tools import report
from fp8pass.tools.report.page import page_data

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(not NODE, reason="needs Node.js")

FOLDER = Path(report.__file__).parent

# Print the elements of the picture, folded and with everything unfolded.
PROGRAM = """
const [fs, vm] = [require("fs"), require("vm")];
const [folder] = process.argv.slice(1);
const picture = JSON.parse(fs.readFileSync(0, "utf8"));
const context = vm.createContext({ structuredClone, picture, size: (bytes) => `${bytes} B` });
for (const file of ["vendor/dagre.min.js", "picture.js"])
    vm.runInContext(fs.readFileSync(`${folder}/${file}`, "utf8"), context);
const found = vm.runInContext(`
    const drawn = new Picture(picture);
    const folded = drawn.elements(false);
    LEVELS.forEach((level) => drawn.unfoldAll(level));
    ({ folded, right: drawn.elements(false), down: drawn.elements(true) })
`, context);
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def elements() -> dict[str, list[dict]]:
    explanation = explain(Residuals(3), torch.randn(32, 64))
    (picture,) = page_data(explanation, None)["pictures"]
    command = [str(NODE), "-e", PROGRAM, str(FOLDER)]
    done = subprocess.run(command, input=json.dumps(picture), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("direction", ["right", "down"])
def test_titles_do_not_overlap(elements, direction):
    titles = [x for x in elements[direction] if x.get("classes") == "title"]
    assert any("layers: " in x["data"]["label"] for x in elements["right"] if "label" in x["data"])
    for a, b in itertools.combinations(titles, 2):
        half = 3.5 * (len(a["data"]["label"]) + len(b["data"]["label"]))
        dx, dy = (abs(a["position"][axis] - b["position"][axis]) for axis in "xy")
        assert dx > half or dy > 14, (a["data"]["label"], b["data"]["label"])


def test_the_first_and_the_last_box_are_inputs_and_outputs(elements):
    labels = [x["data"]["label"] for x in elements["folded"] if x.get("classes") == "folded"]
    assert labels[0].startswith("inputs")
    assert labels[-1].startswith("outputs")


def test_reads_of_recomputed_values_are_drawn_apart_from_gradients(elements):
    """Gradients flow in reverse. All other lines of the backward are `recomputed`."""
    for line in elements["right"]:
        ends = line["data"].get("source", ""), line["data"].get("target", "")
        columns = [re.fullmatch(r"module:(\d+):backward", end) for end in ends]
        if all(columns) and line["classes"] != "recomputed":
            source, target = (int(found[1]) for found in columns if found)
            assert source > target, ends
