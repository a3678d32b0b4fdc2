"""Take the README's picture of a report on the demo's small model, with one module unfolded.

pip install playwright    # and a Chromium, such as Debian's
python benchmarks/screenshot.py
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import fp8pass
from fp8pass.demo.model import VOCABULARY, new_model
from fp8pass.demo.sizes import SIZES

DOCS = Path(__file__).parent.parent / "docs"
MODULE = "layers.0.mlp.gate_proj"

# Unfold the module and its parents, move the module to the left of the details, and show how its
# result is saved.
ARRANGE = """(module) => {
    document.getElementById("picture").scrollIntoView();
    picture.reveal(module);
    const place = picture.places.find((p) => p.path === module && p.level === "module");
    toggle(place);
    canvas.zoom(0.85);
    const kept = canvas.nodes(".operator").filter((n) => n.data("name") === "quantize");
    kept.first().select();
    kept.first().emit("tap");
    canvas.center(canvas.getElementById(`${place.id}:forward`));
    canvas.panBy({ x: 0, y: -60 });
}"""


def main() -> None:
    """Write docs/report.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="path of the browser")
    chromium = parser.parse_args().chromium
    model = new_model(SIZES["small"], 0, torch.device("cpu"))
    tokens = torch.randint(VOCABULARY, (SIZES["small"].batch, SIZES["small"].seq))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        fp8pass.explain(model, tokens, tokens).save(path)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(path.as_uri())
        page.evaluate(ARRANGE, MODULE)
        page.screenshot(path=DOCS / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
