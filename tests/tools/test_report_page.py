"""The page of the report in a browser: it draws, folds, searches, sorts, and runs no foreign code.

Needs Chromium and Playwright (`pip install playwright`, Debian's `chromium`); skipped without.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MLP, Residuals, explained_llama
from torch import nn

import fp8pass
from fp8pass import Config, explain
from fp8pass.tools.explanation import Explanation
from fp8pass.tools.report.page import format_size

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, or CHROMIUM=path")
# Without these flags a browser without a network keeps trying to connect.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
FLAGS += ("--no-first-run", "--disable-component-update", "--disable-quic")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Opened:
    """A page, with the errors and dialogs that it raised."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1400, "height": 1000}, **options)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("dialog", lambda d: (self.errors.append(d.message), d.dismiss()))
        self.page.on("request", lambda r: self.requests.append(r.url))
        start = time.perf_counter()
        self.page.goto(path.as_uri())
        self.seconds = time.perf_counter() - start

    def drawn(self, selector: str) -> int:
        """Return the number of elements of the picture that match."""
        return self.page.evaluate("(s) => canvas.$(s).length", selector)

    def click_in_picture(self, selector: str) -> None:
        """Click on the first element that matches."""
        place = self.page.evaluate(
            """async (s) => {
                const target = canvas.$(s).first();
                canvas.center(target);
                // Once the page has scrolled the picture knows where it is.
                for (const _ of [1, 2]) await new Promise(requestAnimationFrame);
                const box = canvas.container().getBoundingClientRect();
                const at = target.renderedPosition();
                return { x: box.x + at.x, y: box.y + at.y };
            }""",
            selector,
        )
        self.page.mouse.click(place["x"], place["y"])


@pytest.fixture(scope="module")
def decoder() -> Explanation:
    return explained_llama()


@pytest.fixture(scope="module")
def report(decoder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    decoder.save(path)
    return path


@pytest.fixture
def opened(browser, report) -> Iterator[Opened]:
    opened = Opened(browser, report)
    yield opened
    assert opened.errors == []
    assert opened.requests == [report.as_uri()]
    opened.page.close()


def test_the_page_renders(opened, decoder):
    page = opened.page
    assert page.inner_text("#kept") == format_size(decoder.saved_bytes)
    labels = page.evaluate("canvas.$('.folded').map((n) => n.data('label'))")
    assert len([x for x in labels if x.startswith("2 equal layers\nlayers.1 – 2")]) == 2  # sides
    saved = page.evaluate("canvas.$('.kept').map((e) => e.data('bytes'))")
    assert sum(saved) == decoder.saved_bytes
    page.click("#unfold")
    assert opened.drawn(".layer") == 1 + 3  # all layers, and the layers that differ
    assert opened.drawn(".kept") > 10


def test_charts(browser, tmp_path):
    model, x = MLP((64, 128, 32)).bfloat16(), torch.randn(64, 64, dtype=torch.bfloat16)
    diagnosis = fp8pass.diagnose(model, lambda m, b: m(b).float().square().mean(), x)
    explain(model, x, frontier=True).save(tmp_path / "report.html", diagnosis)
    opened = Opened(browser, tmp_path / "report.html")
    for chart in ("timeline-chart", "frontier-chart", "error-chart"):
        sets = opened.page.evaluate("(id) => Chart.getChart(id).data.datasets", chart)
        assert max(len(s["data"]) for s in sets) > 1
    assert opened.errors == []


def test_the_forward_is_above_the_backward_of_its_module(opened):
    ys = opened.page.evaluate("canvas.$('.folded').map((n) => [n.id(), n.position('y')])")
    forward, backward = ([y for i, y in ys if i.endswith(s)] for s in ("forward", "backward"))
    assert max(forward) < min(backward)


def test_the_width_of_lines_follows_the_size_of_tensors(opened):
    opened.page.click("#unfold")
    edges = opened.page.evaluate(
        "canvas.$('.kept').map((e) => [e.data('bytes'), parseFloat(e.style('width'))])"
    )
    assert [w for _, w in sorted(edges)] == sorted(w for _, w in edges)
    assert max(w for _, w in edges) > 1.5 * min(w for _, w in edges)


def test_click_unfold_fold(opened):
    page = opened.page
    page.evaluate("document.getElementById('picture').scrollIntoView()")
    page.evaluate("setAllFolded(true)")
    for label in ("4 layers", "layers.0", "mlp.gate_proj"):
        opened.click_in_picture(f".folded[label ^= '{label}']")
        assert "saves for the backward" in page.inner_text("#details")
        page.click("#details button:text-is('unfold')")
    assert opened.drawn(".operator[label = 'scaled_mm']") > 0
    opened.click_in_picture(".operator[label = 'scaled_mm']")
    page.wait_for_selector("#details h3:text-is('scaled_mm')")
    details = page.inner_text("#details")
    for known in ("linear layer in FP8", "one for each row", "modeling_llama.py", "model.layers."):
        assert known in details
    page.keyboard.press("Escape")
    assert not page.is_visible("#details")
    page.click("#fold")
    assert opened.drawn(".operator") == 0
    page.click("#unfold")
    assert opened.drawn(".folded") == 0
    assert opened.drawn(".operator") > 200


@pytest.mark.parametrize("width", [1440, 390])
def test_unfolding_keeps_the_position(browser, report, width):
    """Zoom and position do not change if a layer and then a module are unfolded."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    page.evaluate("setAllFolded(true)")
    begin = """(id) => Math.min(...["forward", "backward"].map((side) =>
        canvas.getElementById(`${id}:${side}`).renderedBoundingBox()[isNarrow() ? "y1" : "x1"]))"""
    steps = ("layers:0", "layer:0"), ("layer:0", "module:4"), ("module:4", "module:4")
    for outer, inner in steps:
        before = page.evaluate(begin, outer), page.evaluate("canvas.zoom()")
        page.evaluate("(id) => toggle(picture.place(id))", outer)
        after = page.evaluate(begin, inner), page.evaluate("canvas.zoom()")
        assert after == pytest.approx(before, abs=3)
    page.close()


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("unfolded", [(), ("layers:0", "layer:1", "module:26")])
def test_lines_cross_no_label(browser, report, width, unfolded):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    page.evaluate("setAllFolded(true)")
    page.evaluate("(ids) => ids.forEach((id) => toggle(picture.place(id)))", list(unfolded))
    lines, labels = page.evaluate(
        """[
            canvas.edges().map((e) => [
                e.source().id(), e.target().id(),
                [e.sourceEndpoint(), ...(e.segmentPoints() ?? []), e.targetEndpoint()],
            ]),
            canvas.nodes(".folded, .operator, .title").map((n) => {
                const letters = Math.max(...n.data("label").split("\\n").map((x) => x.length));
                return [n.id(), n.position(), 6 * letters, 12];
            }),
        ]"""
    )
    page.close()
    assert len(lines) > 20
    for source, target, points in lines:
        for name, center, width_, height in labels:
            crossed = any(crosses(a, b, center, width_, height) for a, b in pairwise(points))
            assert not crossed, f"{source} → {target} crosses {name}"


def crosses(a: dict, b: dict, center: dict, width: float, height: float) -> bool:
    """Whether the line from a to b meets the rectangle (Liang-Barsky clipping)."""
    begin, end = 0.0, 1.0
    for axis, extent in (("x", width), ("y", height)):
        way, low = b[axis] - a[axis], center[axis] - extent / 2 - a[axis]
        if way == 0:
            if not low < 0 < low + extent:
                return False
            continue
        enter, leave = sorted((low / way, (low + extent) / way))
        begin, end = max(begin, enter), min(end, leave)
    return begin < end


@pytest.mark.parametrize("size", [(1440, 900), (1024, 768), (390, 844)], ids=str)
def test_the_whole_picture_fits_the_screen(browser, report, size):
    """Nothing is wider than the screen, and the picture first shows all boxes."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    box, room = page.evaluate(
        "[canvas.elements().renderedBoundingBox(), [canvas.width(), canvas.height()]]"
    )
    assert min(box["x1"], box["y1"]) >= 0
    assert box["x2"] <= room[0]
    assert box["y2"] <= room[1]
    assert page.evaluate("canvas.zoom()") >= page.evaluate("READABLE")
    page.close()


def test_rows_are_cards_on_a_phone(browser, report):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(report.as_uri())
    row = page.locator("table.saved tbody tr").first
    assert row.evaluate("(row) => getComputedStyle(row).display") == "grid"
    shape = row.locator("td").nth(3)
    label = shape.evaluate("(cell) => getComputedStyle(cell, '::before').content")
    assert label == '"shape"'
    page.close()


def test_the_page_shows_a_comparison(browser, tmp_path):
    x = torch.randn(32, 64)
    exact = explain(Residuals(2), x, config=Config.recipe("exact"))
    explain(Residuals(2), x).save(tmp_path / "report.html", beside=exact)
    opened = Opened(browser, tmp_path / "report.html")
    rows = opened.page.locator("table.compared tbody tr")
    differences = [
        float(rows.nth(i).locator("td").nth(6).get_attribute("data-sort"))
        for i in range(rows.count())
    ]
    assert differences[0] > 0
    assert differences == sorted(differences, key=abs, reverse=True)
    assert opened.errors == []


def test_a_line_shows_the_saved_tensor_and_the_reason(opened):
    opened.page.evaluate(
        # `void`, because Playwright would serialize the whole picture as the result.
        "void canvas.edges('.kept').max((e) => e.data('bytes')).ele.emit('tap')"
    )
    details = opened.page.inner_text("#details")
    assert " saved" in details
    assert "amplif" in details


def test_diffs_can_be_read(opened):
    diff = opened.page.locator("#passes details", has_text="gate_proj").first
    diff.locator("summary").click()
    lines = diff.locator(".diff span").count()
    assert lines > 10
    assert 12 * lines < diff.locator(".diff").bounding_box()["height"] < 30 * lines


def test_search_and_filter(opened):
    page = opened.page
    page.fill("#search", "gate_proj")
    matches = int(page.inner_text("#matches").split()[0])
    assert 0 < matches < page.evaluate("picture.operators.size")
    assert 0 < opened.drawn(".folded.faded") < opened.drawn(".folded")
    page.press("#search", "Enter")
    first = page.evaluate("canvas.$(':selected').id()")
    page.press("#search", "Enter")
    assert page.evaluate("canvas.$(':selected').id()") not in ("", first)
    page.fill("#search", "layers.2.mlp")  # drawn by layer 1
    assert not page.inner_text("#matches").startswith("0 ")
    page.fill("#search", "")
    assert opened.drawn(".faded") == 0
    everything = opened.drawn("node")
    page.select_option("#only", "model.layers.1.mlp")
    assert 0 < opened.drawn("node") < everything
    shown = page.evaluate("canvas.$('.folded').map((n) => n.data('label'))")
    names = {label.split("\n")[0] for label in shown}
    assert {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} <= names
    assert not names & {"0.mlp", "lm_head"}


def test_sort(opened):
    def column() -> list[float]:
        cells = opened.page.query_selector_all("table.saved tbody tr td:nth-child(8)")
        return [float(cell.get_attribute("data-sort")) for cell in cells]

    unsorted = column()
    header = opened.page.locator("table.saved th", has_text=re.compile("^saved$"))
    for ascending in (False, True):
        header.click()
        wanted = sorted(unsorted, reverse=not ascending)
        for _ in range(50):  # it sorts after the event
            if column() == wanted:
                break
            opened.page.wait_for_timeout(100)
        assert column() == wanted
        assert header.get_attribute("aria-sort") == ("ascending" if ascending else "descending")


def test_help_opens(opened):
    section = opened.page.locator("#picture")
    assert not section.get_by_text("Drag to move").is_visible()
    section.locator(".help summary").click()
    assert section.get_by_text("Drag to move").is_visible()


def test_theme(opened):
    background = "getComputedStyle(document.body).backgroundColor"
    light = opened.page.evaluate(background)
    opened.page.click("#theme")
    assert opened.page.evaluate(background) != light
    opened.page.click("#theme")
    assert opened.page.evaluate(background) == light


def test_theme_of_the_system(browser, report):
    dark = Opened(browser, report, color_scheme="dark")
    assert dark.page.evaluate("document.documentElement.dataset.theme") == "dark"
    dark.page.close()


def test_several_graphs(browser, tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = torch.relu(self.first(x))
            torch._dynamo.graph_break()
            return torch.relu(self.second(x))

    explain(Broken(), torch.randn(32, 64)).save(tmp_path / "report.html")
    opened = Opened(browser, tmp_path / "report.html")
    assert opened.page.locator("table.linears:visible").inner_text().count("first") == 1
    opened.page.select_option("#graph", "1")
    assert opened.page.locator("table.linears:visible").inner_text().count("second") == 1
    assert opened.page.evaluate("picture.columns.includes('second')")
    opened.page.click("#unfold")
    assert opened.drawn(".operator") > 0
    assert opened.errors == []


def test_names_cannot_become_code(browser, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            names = (
                "<script>alert(1)</script>",
                "</script><img src=x onerror=alert(2)>",
                "\"'&`${3}",
            )
            self.parts = nn.ModuleDict({name: nn.Linear(64, 64) for name in names})

        def forward(self, x):
            for part in self.parts.values():
                x = torch.relu(part(x))
            return x

    explain(Model(), torch.randn(32, 64)).save(tmp_path / "report.html")
    opened = Opened(browser, tmp_path / "report.html")
    page = opened.page
    page.click("#fold")
    page.evaluate("document.getElementById('picture').scrollIntoView()")
    opened.click_in_picture(".folded[kind = 'fp8']")
    assert page.is_visible("#details h3")
    page.fill("#search", "<script>")
    assert "<script>alert(1)</script>" in page.inner_text("table.linears")
    page.wait_for_timeout(200)
    assert opened.errors == []


@pytest.mark.long
def test_thirty_two_layers_open_fast(browser, tmp_path):
    explanation = explain(Residuals(32), torch.randn(16, 64))
    explanation.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2e6
    opened = [Opened(browser, tmp_path / "report.html") for _ in range(3)]
    assert min(x.seconds for x in opened) < 2
    assert opened[0].page.inner_text("#kept") == format_size(explanation.saved_bytes)
    labels = opened[0].page.evaluate("canvas.$('.folded').map((n) => n.data('label'))")
    assert any(label.startswith("32 layers\nlayers.0 – 31\n") for label in labels)
