// Draws the data of report/page.py. Names from the model are inserted as text, never as HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const digits = (number) => number.toLocaleString("en", { maximumFractionDigits: 1 });

function size(bytes) {
  const { name, factor } = unitOf(bytes, BYTES);
  return `${digits(bytes / factor)} ${name}`;
}

const BYTES = [{ name: "GiB", factor: 2 ** 30 }, { name: "MiB", factor: 2 ** 20 }, { name: "KiB", factor: 2 ** 10 }, { name: "B", factor: 1 }];
const TIMES = [{ name: "s", factor: 1 }, { name: "ms", factor: 1e-3 }, { name: "µs", factor: 1e-6 }];

// The largest unit in which `value` is at least 1.
function unitOf(value, units) {
  return units.find(({ factor }) => Math.abs(value) >= factor) ?? units.at(-1);
}

// --- the picture ---------------------------------------------------------------------------------

function pictureStyle(largest) {
  const fill = (node) => color(node.data("kind"));
  const boxed = { shape: "round-rectangle", width: "data(width)", height: "data(height)" };
  return [
    { selector: "node", style: { color: color("text"), "font-size": 12, "text-valign": "center", "z-index-compare": "manual", "z-index": 3 } },
    { selector: ".operator, .folded", style: {
      ...boxed, label: "data(label)", "background-color": fill, "background-opacity": 0.25, "border-width": 1.5,
      "border-color": fill } },
    { selector: ".operator", style: { height: NODE_HEIGHT } },
    { selector: ".folded", style: { "font-weight": "bold", "text-wrap": "wrap", "line-height": 1.2 } },
    { selector: ".cell", style: {
      ...boxed, "background-color": color("panel"), "border-width": 1, "border-color": color("line"), "z-index": 1 } },
    { selector: ".layer", style: {
      ...boxed, "background-opacity": 0, "border-width": 1.5, "border-style": "dashed", "border-color": color("faint"),
      "z-index": 0 } },
    { selector: ".title", style: {
      label: "data(label)", width: (node) => widthOf([node.data("label")]), height: TITLE_HEIGHT, "background-opacity": 0,
      "font-weight": "bold", "text-background-color": color("page"), "text-background-opacity": 0.8 } },
    { selector: "edge", style: {
      width: 1, "line-color": color("faint"), "target-arrow-color": color("faint"), "target-arrow-shape": "triangle",
      "arrow-scale": 0.7, opacity: 0.6, "curve-style": (edge) => (edge.data("weights").length ? "round-segments" : "straight"),
      "edge-distances": "endpoints", "source-endpoint": "data(from)", "target-endpoint": "data(to)",
      "segment-weights": (edge) => edge.data("weights"), "segment-distances": (edge) => edge.data("distances"),
      "segment-radii": 6, "z-index-compare": "manual", "z-index": 2 } },
    { selector: ".free, .recomputed", style: { "line-style": "dashed" } },
    { selector: ".recomputed", style: { "line-color": color("recomputed"), "target-arrow-color": color("recomputed") } },
    { selector: ".kept", style: {
      width: (edge) => 1.5 + 14 * Math.sqrt(edge.data("bytes") / largest), "line-color": color("kept"),
      "target-arrow-color": color("kept"), opacity: 0.65 } },
    { selector: ".faded", style: { opacity: 0.12 } },
    { selector: ":selected", style: { "border-width": 4, "border-color": color("accent") } },
  ];
}

const NARROW = 700; // in a narrower page, the line of places runs downwards
let picture;
let canvas;

function isNarrow() {
  return element("graph-picture").parentElement.clientWidth < NARROW;
}

function drawPicture() {
  const elements = picture.elements(isNarrow());
  const largest = Math.max(1, ...elements.map((x) => x.data.bytes ?? 0));
  const before = canvas && { zoom: canvas.zoom(), pan: canvas.pan() };
  canvas?.destroy();
  canvas = cytoscape({
    container: element("graph-picture"), elements, layout: { name: "preset", fit: false }, style: pictureStyle(largest),
    minZoom: 0.02, maxZoom: 3, autoungrabify: true, boxSelectionEnabled: false, ...before,
  });
  canvas.on("tap", "node.operator", (event) => describeOperator(picture.operators.get(event.target.id())));
  canvas.on("tap", "node.folded, node.cell, node.layer, node.title", (event) => describePlace(event.target.data("of") ?? event.target.id()));
  canvas.on("dbltap", "node.folded, node.cell, node.layer, node.title", (event) => toggle(picture.place(event.target.data("of") ?? event.target.id())));
  canvas.on("tap", "edge.kept", (event) => describeEdge(event.target));
  canvas.on("tap", (event) => { if (event.target === canvas) closeDetails(); });
  search();
}

const READABLE = 0.7;
const LARGE = 1.4;
const MARGIN = 24;

// Show the whole picture if its text is then large enough to read, else show its beginning.
function view() {
  const all = canvas.elements();
  canvas.fit(all, MARGIN);
  if (canvas.zoom() > LARGE) canvas.zoom(LARGE);
  if (canvas.zoom() >= READABLE) return canvas.center(all);
  const { x1, y1, w, h } = all.boundingBox();
  const [roomX, roomY] = [canvas.width() - w * READABLE, canvas.height() - h * READABLE];
  canvas.zoom(READABLE);
  canvas.pan({ x: Math.max(MARGIN, roomX / 2) - x1 * READABLE, y: Math.max(MARGIN, roomY / 2) - y1 * READABLE });
}

// Unfold as many levels as fit on the screen in a readable size.
function overview() {
  picture.unfoldWhile(() => {
    const nodes = picture.elements(isNarrow()).filter((x) => x.data.width);
    const extent = (axis, side) => Math.max(...nodes.map((x) => x.position[axis] + x.data[side] / 2)) - Math.min(...nodes.map((x) => x.position[axis] - x.data[side] / 2));
    const { clientWidth, clientHeight } = element("graph-picture");
    return Math.min((clientWidth - 2 * MARGIN) / extent("x", "width"), (clientHeight - 2 * MARGIN) / extent("y", "height")) >= READABLE;
  });
  drawPicture();
  view();
}

// Fold or unfold a place. Its corner stays at the same point of the screen.
function toggle(place) {
  const begin = () => {
    const corners = canvas.nodes(".folded, .cell").filter((n) => place.holds(n.data("first"))).map((n) => n.renderedBoundingBox());
    const [x, y] = ["x1", "y1"].map((side) => Math.min(...corners.map((box) => box[side])));
    return isNarrow() ? { x: 0, y } : { x, y: 0 };
  };
  const before = begin();
  if (!picture.unfolded.delete(place.id)) picture.unfolded.add(place.id);
  drawPicture();
  const after = begin();
  canvas.panBy({ x: before.x - after.x, y: before.y - after.y });
}

function text(tag, content) {
  const made = document.createElement(tag);
  made.textContent = content;
  return made;
}

function describe(title, entries, ...more) {
  const list = document.createElement("dl");
  for (const [name, value] of entries) list.append(text("dt", name), text("dd", value));
  const close = text("button", "×");
  close.className = "close";
  close.title = "close (Esc)";
  close.addEventListener("click", closeDetails);
  element("details").replaceChildren(close, text("h3", title), ...more, list);
  showDetails(true);
}

const closeDetails = () => showDetails(false);

function showDetails(shown) {
  element("details").hidden = !shown;
  canvas.resize();
  const selected = canvas.$("node:selected");
  if (!shown || selected.empty()) return;
  const { x2, y2 } = selected.renderedBoundingBox();
  canvas.panBy({ x: Math.min(0, canvas.width() - MARGIN - x2), y: Math.min(0, canvas.height() - MARGIN - y2) });
}

// Return the name of a saved tensor, and its size, format, reason and source line as text.
function tensorEntries(id) {
  const y = picture.operators.get(id);
  const known = ["saved as", "expected gradient error", "in the backward", "source"].map((name) => y.details[name]);
  return [`${y.label} (${id})`, [size(picture.bytes.get(id) ?? 0), ...known].filter(Boolean).join("; ")];
}

function describeEdge(edge) {
  const [from, to] = [edge.source(), edge.target()].map((box) => picture.place(box.id()).title);
  const tensors = edge.data("tensors").map(tensorEntries);
  describe(`${size(edge.data("bytes"))} saved`, [["of the forward of", from], ["for the backward of", to], ...tensors]);
}

function describeOperator(y) {
  const side = y.backward ? "backward" : "forward";
  const entries = [["module", y.module || "(top level)"], ["runs in the", side], ["is", data.kinds[y.kind]], ["name", y.id]];
  describe(y.label, [...entries, ...Object.entries(y.details)]);
}

// Describe a place. `id` is the id of one of its boxes, or of the frame around it if it is unfolded.
function describePlace(id) {
  const place = picture.place(id);
  const side = id.slice(place.id.length + 1);
  const own = [...picture.operators.values()].filter((y) => place.holds(y.column) && side !== (y.backward ? "forward" : "backward"));
  const entries = side ? [["runs in the", side]] : [];
  if (place.level === "module") entries.push(["operators", own.map((y) => y.label).join(", ")]);
  if (side !== "backward") {
    const kept = own.filter((y) => !y.backward && picture.bytes.has(y.id));
    entries.push(["saves for the backward", size(picture.kept(own))], ...kept.map((y) => tensorEntries(y.id)));
  }
  const button = text("button", picture.unfolded.has(place.id) ? "fold" : "unfold");
  button.addEventListener("click", () => { toggle(place); describePlace(place.id); });
  describe(place.title, entries, button);
}

let hits; // the boxes that the search found
let looked = -1; // index of the box in the middle of the picture

function search() {
  const wanted = element("search").value.trim();
  canvas.elements().removeClass("faded");
  element("matches").textContent = "";
  hits = canvas.collection();
  looked = -1;
  if (!wanted) return;
  const found = picture.matching(wanted);
  const visible = new Set(found.flatMap((y) => [y.id, picture.boxId(y)]));
  hits = canvas.nodes(".operator, .folded").filter((n) => visible.has(n.id()));
  const folded = picture.layers.some((y) => y.count > 1) ? "; of equal layers the first is drawn" : "";
  const hidden = found.length && !hits.length ? "; none of the modules shown" : "";
  element("matches").textContent = `${found.length} operators in ${hits.length} boxes${hidden || folded}`;
  canvas.elements().not(hits).not(".cell, .layer, .title").not(hits.connectedEdges()).addClass("faded");
}

function lookAtNext() {
  if (!hits.length) return;
  looked = (looked + 1) % hits.length;
  canvas.zoom(1);
  canvas.center(hits[looked]);
  canvas.$(":selected").unselect();
  hits[looked].select();
}

function setAllFolded(folded) {
  picture.unfolded = new Set(folded ? [] : picture.places.map((place) => place.id));
  drawPicture();
  view();
}

function showGraph(number) {
  for (const part of document.querySelectorAll(".graph")) part.hidden = part.dataset.graph !== String(number);
  picture = new Picture(data.pictures[number]);
  const paths = new Set(picture.columns.flatMap((path) => path.split(".").map((_, i, parts) => parts.slice(0, i + 1).join("."))));
  element("only").replaceChildren(new Option("all modules", ""), ...[...paths].filter(Boolean).map((path) => new Option(path, path)));
  element("details").hidden = true;
  overview();
}

function showOnly(path) {
  picture.only = path;
  if (path) picture.reveal(path);
  closeDetails();
  drawPicture();
  view();
}

// --- charts --------------------------------------------------------------------------------------

let charts = [];

function axis(title, more = {}) {
  return { title: { display: true, text: title, color: color("text") }, ticks: { color: color("faint") }, grid: { color: color("line") }, ...more };
}

function chart(id, configuration) {
  if (!element(id)) return;
  charts.push(new Chart(element(id), { ...configuration, options: { animation: false, maintainAspectRatio: false, ...configuration.options } }));
}

function drawCharts() {
  charts.forEach((x) => x.destroy());
  charts = [];
  drawTimeline();
  drawFrontier();
  drawErrors();
}

function drawTimeline() {
  const largest = Math.max(...[...data.timeline, ...data.stock].map((p) => p.bytes));
  const unit = unitOf(largest, BYTES);
  const xy = (p) => ({ ...p, x: p.position, y: p.bytes / unit.factor });
  const line = (label, points, name) => ({ label, data: points.map(xy), borderColor: color(name), backgroundColor: color(name), stepped: true, pointRadius: 0, pointHitRadius: 8, borderWidth: 1.5, fill: false });
  const forward = data.timeline.filter((p) => !p.backward);
  const backward = [...forward.slice(-1), ...data.timeline.filter((p) => p.backward)];
  const label = ({ dataset, raw }) => [
    `${dataset.label}: ${size(raw.bytes)} saved`,
    raw.change ? `${raw.change > 0 ? "saves" : "frees"} ${size(Math.abs(raw.change))} after ${raw.operator}` : "before the step",
  ];
  chart("timeline-chart", {
    type: "line",
    data: { datasets: [line("fp8pass, forward", forward, "fp8"), line("fp8pass, backward", backward, "kept"), line("stock torch.compile", data.stock, "faint")] },
    options: {
      parsing: false,
      scales: { x: axis("operators of the step", { type: "linear", max: data.timeline.at(-1).position }), y: axis(`saved, ${unit.name}`, { beginAtZero: true }) },
      plugins: { legend: { labels: { color: color("text") } }, tooltip: { callbacks: { title: () => "", label } } },
    },
  });
}

function drawFrontier() {
  const all = data.choices.flat();
  const space = unitOf(Math.max(0, ...all.map((c) => c.point.bytes)), BYTES);
  const time = unitOf(Math.max(0, ...all.map((c) => c.adds_seconds)), TIMES);
  const point = (c) => ({ x: c.point.bytes / space.factor, y: c.adds_seconds / time.factor, peak: c.point.peak_bytes });
  const style = (name, more) => ({ borderColor: color(name), backgroundColor: color(name), ...more });
  const sets = data.choices.flatMap((choices, i) => choices.length ? [
    { label: "this plan", data: choices.filter((c) => c.chosen).map(point), ...style("kept", { pointStyle: "triangle", pointRadius: 9 }) },
    { label: `graph ${i}`, data: choices.map(point), showLine: true, ...style("accent", { pointRadius: 4 }) },
  ] : []);
  const label = ({ raw }) => `saves ${digits(raw.x)} ${space.name}, peak ${size(raw.peak)}, adds ${digits(raw.y)} ${time.name} per step`;
  chart("frontier-chart", {
    type: "scatter",
    data: { datasets: sets },
    options: {
      scales: { x: axis(`saved for the backward, ${space.name}`, { beginAtZero: true }), y: axis(`added time, ${time.name} per step`) },
      plugins: { legend: { labels: { color: color("text"), usePointStyle: true } }, tooltip: { callbacks: { label } } },
    },
  });
}

function drawErrors() {
  const known = data.errors.filter((y) => y.predicted > 0 && y.relative > 0);
  if (!known.length) return;
  const ends = [Math.min(...known.map((y) => y.predicted)), Math.max(...known.map((y) => y.predicted))];
  const line = (label, factor, dash) => ({ label, data: ends.map((x) => ({ x, y: factor * x })), showLine: true, pointRadius: 0, borderColor: color("faint"), borderDash: dash });
  const points = known.map((y) => ({ x: y.predicted, y: y.relative, name: `${y.module} ${y.gradient}` }));
  chart("error-chart", {
    type: "scatter",
    data: { datasets: [
      { label: "gradients", data: points, backgroundColor: known.map((y) => color(y.far_above ? "kept" : "fp8")) },
      line("as predicted", 1, []), line("three times that", 3, [5, 5]),
    ] },
    options: {
      scales: { x: axis("predicted relative error", { type: "logarithmic" }), y: axis("measured relative error", { type: "logarithmic" }) },
      plugins: { legend: { labels: { color: color("text") } }, tooltip: { callbacks: { label: ({ raw }) => `${raw.name ?? ""} ${raw.y.toPrecision(3)} (predicted ${raw.x.toPrecision(3)})` } } },
    },
  });
}

// --- the page ------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const swatch of document.querySelectorAll("#legend i")) swatch.style[swatch.className ? "borderTopColor" : "background"] = color(swatch.dataset.kind);
  if (canvas) drawPicture();
  drawCharts();
}

element("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
element("search").addEventListener("input", search);
element("search").addEventListener("keydown", (event) => { if (event.key === "Enter") lookAtNext(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeDetails(); });
// The wheel zooms the picture only with Ctrl. Otherwise it scrolls the page.
element("graph-picture").addEventListener("wheel", (event) => { if (!event.ctrlKey) event.stopImmediatePropagation(); }, { capture: true });
element("only").addEventListener("change", () => showOnly(element("only").value));
element("unfold").addEventListener("click", () => setAllFolded(false));
element("fold").addEventListener("click", () => setAllFolded(true));
element("fit").addEventListener("click", () => canvas.fit(undefined, MARGIN));
element("graph")?.addEventListener("change", () => showGraph(Number(element("graph").value)));
// On a phone, each table row is a card, and each cell shows the name of its column.
for (const cell of document.querySelectorAll("td")) {
  cell.dataset.label = cell.closest("table").querySelectorAll("th")[cell.cellIndex]?.textContent ?? "";
}
let wasNarrow = isNarrow();
addEventListener("resize", () => {
  if (!canvas || wasNarrow === isNarrow()) return;
  wasNarrow = isNarrow();
  overview();
});
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
if (data.pictures.length) showGraph(0);
