// Lays out and draws what report/page.py found. Names from the model only ever become text.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const digits = (number) => number.toLocaleString("en", { maximumFractionDigits: 1 });

function size(bytes) {
  if (bytes < 2 ** 10) return `${bytes} B`;
  return bytes < 2 ** 20 ? `${digits(bytes / 2 ** 10)} KiB` : `${digits(bytes / 2 ** 20)} MiB`;
}

// --- the picture ---------------------------------------------------------------------------------

// What a folded module is coloured as: the first of these that it holds.
const STANDS_OUT = ["fp8", "attention", "linear", "nonlinear", "quantize", "dequantize", "recomputed", "input"];
const SMALL_ENOUGH_TO_UNFOLD = 60;
const A_FEW_SCALARS = 64; // bytes not worth a label
const NODE_HEIGHT = 26;
const COLUMN_GAP = 46;
const BAND_GAP = 220;
const widthOf = (label) => 18 + 7.5 * label.length;
const numbered = (path) => [path.replace(/\d+$/, ""), Number(path.match(/\d+$/)[0])];
const shortened = (path) => path.split(".").slice(-2).join(".") || "(top level)";

class Cell {
  // The operators of one module on one side of the step.
  constructor(column, module, backward, operators) {
    Object.assign(this, { column, module, backward, operators });
    this.id = `cell:${column}:${backward ? "backward" : "forward"}`;
    this.kind = STANDS_OUT.find((kind) => operators.some((y) => y.kind === kind));
  }

  get label() {
    return shortened(this.module);
  }
}

class Picture {
  constructor(picture) {
    this.columns = picture.columns;
    this.edges = picture.edges;
    this.layers = picture.layers;
    this.operators = new Map(picture.operators.map((y) => [y.id, y]));
    this.cells = [];
    for (const backward of [false, true]) {
      this.columns.forEach((module, column) => {
        const own = picture.operators.filter((y) => y.column === column && y.backward === backward);
        if (own.length) this.cells.push(new Cell(column, module, backward, own));
      });
    }
    this.cellOf = new Map(this.cells.flatMap((cell) => cell.operators.map((y) => [y.id, cell])));
    const small = picture.operators.length <= SMALL_ENOUGH_TO_UNFOLD;
    this.unfolded = new Set(small ? this.cells.map((cell) => cell.id) : []);
    this.only = "";
  }

  // The cells of the module asked for, and those at the other end of what it keeps or reads.
  shownCells() {
    const inside = (cell) => !this.only || cell.module === this.only || cell.module.startsWith(`${this.only}.`);
    const shown = new Set(this.cells.filter(inside));
    for (const edge of this.edges.filter((e) => e.bytes)) {
      const ends = [this.cellOf.get(edge.source), this.cellOf.get(edge.target)];
      if (ends.some(inside)) ends.forEach((cell) => shown.add(cell));
    }
    return this.cells.filter((cell) => shown.has(cell));
  }

  // Where each operator of a cell lies, from the cell's corner, and how large the cell is.
  layout(cell) {
    if (!this.unfolded.has(cell.id)) {
      return { width: widthOf(cell.label), height: 2 * NODE_HEIGHT, at: new Map() };
    }
    const graph = new dagre.graphlib.Graph().setGraph({ rankdir: "TB", nodesep: 14, ranksep: 20 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const y of cell.operators) graph.setNode(y.id, { width: widthOf(y.label), height: NODE_HEIGHT });
    for (const e of this.edges) {
      if (this.cellOf.get(e.source) === cell && this.cellOf.get(e.target) === cell) graph.setEdge(e.source, e.target);
    }
    dagre.layout(graph);
    const { width, height } = graph.graph();
    return { width, height, at: new Map(cell.operators.map((y) => [y.id, graph.node(y.id)])) };
  }

  elements() {
    const cells = this.shownCells();
    const layouts = new Map(cells.map((cell) => [cell, this.layout(cell)]));
    const lefts = this.placeColumns(cells, layouts);
    const above = Math.max(0, ...cells.filter((c) => !c.backward).map((c) => layouts.get(c).height));
    const nodes = this.layerNodes(cells);
    for (const cell of cells) {
      const { width, height, at } = layouts.get(cell);
      const room = lefts.get(cell.column);
      const corner = { x: room.left + (room.width - width) / 2, y: cell.backward ? above + BAND_GAP : above - height };
      nodes.push(...this.cellNodes(cell, corner, width, height, at));
    }
    return [...nodes, ...this.visibleEdges(cells)];
  }

  placeColumns(cells, layouts) {
    const places = new Map();
    let left = 0;
    this.columns.forEach((_, column) => {
      const own = cells.filter((cell) => cell.column === column);
      if (!own.length) return;
      const width = Math.max(...own.map((cell) => layouts.get(cell).width));
      places.set(column, { left, width });
      left += width + COLUMN_GAP;
    });
    return places;
  }

  layerNodes(cells) {
    const shown = new Set(cells.map((cell) => cell.column));
    return this.layers
      .map((layer, i) => ({ layer, i }))
      .filter(({ layer }) => layer.columns.some((c) => shown.has(c)))
      .map(({ layer, i }) => ({
        classes: "layer",
        data: {
          id: `layer:${i}`,
          label: layer.count > 1 ? `${layer.count} equal layers: ${layer.first} to ${layer.last}` : layer.first,
        },
      }));
  }

  cellNodes(cell, corner, width, height, at) {
    const layer = this.layers.findIndex((y) => y.columns.includes(cell.column));
    const parent = layer < 0 ? undefined : `layer:${layer}`;
    if (!this.unfolded.has(cell.id)) {
      return [{
        classes: "folded",
        data: { id: cell.id, parent, label: cell.label, kind: cell.kind, width },
        position: { x: corner.x + width / 2, y: corner.y + height / 2 },
      }];
    }
    return [
      { classes: "cell", data: { id: cell.id, parent, label: cell.label } },
      ...cell.operators.map((y) => ({
        classes: "operator",
        data: { id: y.id, parent: cell.id, label: y.label, kind: y.kind, width: widthOf(y.label) },
        position: { x: corner.x + at.get(y.id).x, y: corner.y + at.get(y.id).y },
      })),
    ];
  }

  // Edges between what is visible, those of a folded module put together.
  visibleEdges(cells) {
    const shown = new Set(cells);
    const standsFor = (id) => {
      const cell = this.cellOf.get(id);
      return shown.has(cell) ? (this.unfolded.has(cell.id) ? id : cell.id) : null;
    };
    const merged = new Map();
    for (const edge of this.edges) {
      const [source, target] = [standsFor(edge.source), standsFor(edge.target)];
      if (!source || !target || source === target) continue;
      const id = `${source}→${target}`;
      const known = merged.get(id) ?? { id, source, target, crosses: false, tensors: new Map() };
      known.crosses ||= edge.crosses;
      if (edge.crosses) known.tensors.set(edge.source, edge.bytes);
      merged.set(id, known);
    }
    return [...merged.values()].map(({ tensors, ...edge }) => {
      const bytes = [...tensors.values()].reduce((sum, x) => sum + x, 0);
      const tensorIds = [...tensors.keys()];
      return { classes: bytes ? "kept" : edge.crosses ? "free" : "", data: { ...edge, bytes, tensors: tensorIds, label: bytes > A_FEW_SCALARS ? size(bytes) : "" } };
    });
  }

  matching(text) {
    const wanted = this.drawnPath(text.toLowerCase());
    const words = (y) => [y.module, y.label, y.id, y.details.keeps ?? ""];
    return [...this.operators.values()].filter((y) => words(y).some((x) => x.toLowerCase().includes(wanted)));
  }

  // A layer that an equal one stands for is found there.
  drawnPath(text) {
    return text.replace(/(\w+\.)(\d+)/, (path, name, number) => {
      const stands = this.layers.map((y) => [...numbered(y.first), numbered(y.last)[1]])
        .find(([prefix, first, last]) => prefix.toLowerCase().endsWith(name) && first <= number && number <= last);
      return stands ? name + stands[1] : path;
    });
  }
}

function pictureStyle(largest) {
  const fill = (node) => color(node.data("kind"));
  return [
    { selector: "node", style: { label: "data(label)", color: color("text"), "font-size": 12, "text-valign": "center" } },
    { selector: ".operator, .folded", style: {
      shape: "round-rectangle", width: "data(width)", height: NODE_HEIGHT, "background-color": fill,
      "background-opacity": 0.25, "border-width": 1.5, "border-color": fill } },
    { selector: ".folded", style: { height: 2 * NODE_HEIGHT, "font-weight": "bold" } },
    { selector: ".cell", style: {
      shape: "round-rectangle", "background-color": color("panel"), "background-opacity": 0.6, "border-width": 1,
      "border-color": color("line"), "text-valign": "top", "font-size": 13, "font-weight": "bold", padding: 12 } },
    { selector: ".layer", style: {
      shape: "round-rectangle", "background-opacity": 0, "border-width": 2, "border-style": "dashed",
      "border-color": color("faint"), "text-valign": "top", "font-size": 18, color: color("faint"), padding: 22 } },
    { selector: "edge", style: {
      width: 1, "line-color": color("line"), "target-arrow-color": color("line"), "target-arrow-shape": "triangle",
      "arrow-scale": 0.7, "curve-style": "bezier" } },
    { selector: ".free", style: { "line-style": "dashed" } },
    { selector: ".kept", style: {
      width: (edge) => 1.5 + 14 * Math.sqrt(edge.data("bytes") / largest), "line-color": color("kept"),
      "target-arrow-color": color("kept"), opacity: 0.65, label: "data(label)", color: color("text"), "font-size": 11,
      "text-background-color": color("page"), "text-background-opacity": 0.8 } },
    { selector: ".faded", style: { opacity: 0.12 } },
    { selector: ":selected", style: { "border-width": 4, "border-color": color("accent") } },
  ];
}

let picture;
let canvas;

function drawPicture() {
  const elements = picture.elements();
  const largest = Math.max(1, ...elements.map((x) => x.data.bytes ?? 0));
  canvas?.destroy();
  canvas = cytoscape({
    container: element("graph-picture"), elements, layout: { name: "preset" }, style: pictureStyle(largest),
    minZoom: 0.02, maxZoom: 3, autoungrabify: true, boxSelectionEnabled: false,
  });
  canvas.on("tap", "node.operator", (event) => describeOperator(picture.operators.get(event.target.id())));
  canvas.on("tap", "node.folded, node.cell", (event) => {
    const id = event.target.id();
    // A tap on an operator arrives at the box around it, too.
    if (event.target.isParent() && picture.operators.has(canvas.$("node:selected").id())) return;
    describeCell(picture.cells.find((cell) => cell.id === id));
  });
  canvas.on("tap", "edge.kept", (event) => describeEdge(event.target));
  canvas.on("tap", (event) => { if (event.target === canvas) closeDetails(); });
  element("graph-picture").parentElement.classList.toggle("tall", picture.unfolded.size > 0);
  canvas.resize();
  search();
}

const READABLE = 0.75;
const LARGE = 1.4;

// All of it where that can be read, else its beginning.
function view(target = canvas.elements()) {
  canvas.fit(target, 30);
  if (canvas.zoom() > LARGE) canvas.zoom(LARGE);
  if (canvas.zoom() >= READABLE) return canvas.center(target);
  canvas.zoom(READABLE);
  canvas.center(target);
  canvas.panBy({ x: 40 - target.renderedBoundingBox().x1, y: 0 });
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
  element("details").replaceChildren(close, text("h3", title), list, ...more);
  showDetails(true);
}

const closeDetails = () => showDetails(false);

function showDetails(shown) {
  element("details").hidden = !shown;
  canvas.resize();
  const selected = canvas.$("node:selected");
  if (shown && selected.nonempty() && selected.renderedPosition().x > canvas.width()) canvas.center(selected);
}

// What is known of a tensor that is kept: by how much, in which form, why, and from which line.
function tensorEntries(id) {
  const y = picture.operators.get(id);
  const bytes = picture.edges.find((e) => e.source === id && e.bytes)?.bytes ?? 0;
  const known = ["kept as", "expected gradient error", "in the backward", "source"].map((name) => y.details[name]);
  return [`${y.label} (${id})`, [size(bytes), ...known].filter(Boolean).join("; ")];
}

function describeEdge(edge) {
  const ends = ["source", "target"].map((end) => picture.cellOf.get(edge.data(end)) ?? picture.cells.find((c) => c.id === edge.data(end)));
  const [from, to] = ends.map((cell) => cell.module || "(top level)");
  const tensors = edge.data("tensors").map(tensorEntries);
  describe(`${size(edge.data("bytes"))} kept`, [["of the forward of", from], ["for the backward of", to], ...tensors]);
}

function describeOperator(y) {
  const side = y.backward ? "backward" : "forward";
  const entries = [["module", y.module || "(top level)"], ["runs in the", side], ["is", data.kinds[y.kind]], ["name", y.id]];
  describe(y.label, [...entries, ...Object.entries(y.details)]);
}

function describeCell(cell) {
  const kept = new Map(picture.edges.filter((e) => e.crosses && e.bytes && picture.cellOf.get(e.source) === cell).map((e) => [e.source, e.bytes]));
  const total = [...kept.values()].reduce((sum, x) => sum + x, 0);
  const entries = [
    ["runs in the", cell.backward ? "backward" : "forward"],
    ["operators", cell.operators.map((y) => y.label).join(", ")],
  ];
  if (!cell.backward) {
    entries.push(["keeps for the backward", size(total)]);
    entries.push(...[...kept.keys()].map(tensorEntries));
  }
  const unfolded = picture.unfolded.has(cell.id);
  const toggle = text("button", unfolded ? "fold" : "unfold");
  toggle.addEventListener("click", () => {
    for (const other of picture.cells.filter((x) => x.column === cell.column)) {
      if (unfolded) picture.unfolded.delete(other.id);
      else picture.unfolded.add(other.id);
    }
    drawPicture();
    view(canvas.nodes().filter((n) => n.id() === cell.id));
    describeCell(cell);
  });
  describe(cell.module || "(top level)", entries, toggle);
}

let hits; // what the search found, and which of it is looked at
let looked = -1;

function search() {
  const wanted = element("search").value.trim();
  canvas.elements().removeClass("faded");
  element("matches").textContent = "";
  hits = canvas.collection();
  looked = -1;
  if (!wanted) return;
  const found = picture.matching(wanted);
  const visible = new Set(found.flatMap((y) => [y.id, picture.cellOf.get(y.id).id]));
  hits = canvas.nodes(".operator, .folded").filter((n) => visible.has(n.id()));
  const folded = picture.layers.some((y) => y.count > 1) ? "; of equal layers the first is drawn" : "";
  const hidden = found.length && !hits.length ? "; none of the modules shown" : "";
  element("matches").textContent = `${found.length} operators in ${hits.length} boxes${hidden || folded}`;
  canvas.elements().not(hits).not(hits.ancestors()).not(hits.connectedEdges()).addClass("faded");
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
  picture.unfolded = new Set(folded ? [] : picture.cells.map((cell) => cell.id));
  drawPicture();
  view();
}

function showGraph(number) {
  for (const part of document.querySelectorAll(".graph")) part.hidden = part.dataset.graph !== String(number);
  picture = new Picture(data.pictures[number]);
  const paths = new Set(picture.columns.flatMap((path) => path.split(".").map((_, i, parts) => parts.slice(0, i + 1).join("."))));
  element("only").replaceChildren(new Option("all modules", ""), ...[...paths].filter(Boolean).map((path) => new Option(path, path)));
  element("details").hidden = true;
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
  const side = (backward) => data.timeline.filter((m) => m.backward === backward).map((m) => ({ x: m.operator, y: m.bytes / 2 ** 20, module: m.module }));
  const forward = side(false);
  const line = (label, points, name) => ({ label, data: points, borderColor: color(name), backgroundColor: color(name), stepped: true, pointRadius: 0, pointHitRadius: 8, borderWidth: 1.5, fill: false });
  chart("timeline-chart", {
    type: "line",
    data: { datasets: [line("forward", forward, "fp8"), line("backward", [...forward.slice(-1), ...side(true)], "kept")] },
    options: {
      parsing: false,
      scales: { x: axis("operators of the step", { type: "linear", max: data.timeline.at(-1).operator }), y: axis("kept, MiB", { beginAtZero: true }) },
      plugins: { legend: { labels: { color: color("text") } }, tooltip: { callbacks: { label: ({ raw }) => `${raw.y.toFixed(2)} MiB after ${raw.module || "the inputs"}` } } },
    },
  });
}

function drawFrontier() {
  const point = (c) => ({ x: c.point.bytes / 2 ** 20, y: c.adds_seconds * 1e3, peak: c.point.peak_bytes });
  const style = (name, more) => ({ borderColor: color(name), backgroundColor: color(name), ...more });
  const sets = data.choices.flatMap((choices, i) => choices.length ? [
    { label: "this plan", data: choices.filter((c) => c.chosen).map(point), ...style("kept", { pointStyle: "triangle", pointRadius: 9 }) },
    { label: `graph ${i}`, data: choices.map(point), showLine: true, ...style("accent", { pointRadius: 4 }) },
  ] : []);
  const label = ({ raw }) => `keeps ${raw.x.toFixed(1)} MiB, peak ${size(raw.peak)}, ${raw.y.toFixed(2)} ms a step more`;
  chart("frontier-chart", {
    type: "scatter",
    data: { datasets: sets },
    options: {
      scales: { x: axis("kept for the backward, MiB", { beginAtZero: true }), y: axis("added to this plan, ms a step") },
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
  for (const swatch of document.querySelectorAll("#legend i")) swatch.style.background = color(swatch.dataset.kind);
  if (canvas) drawPicture();
  drawCharts();
}

element("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
element("search").addEventListener("input", search);
element("search").addEventListener("keydown", (event) => { if (event.key === "Enter") lookAtNext(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeDetails(); });
// Without Ctrl the wheel scrolls the page.
element("graph-picture").addEventListener("wheel", (event) => { if (!event.ctrlKey) event.stopImmediatePropagation(); }, { capture: true });
element("only").addEventListener("change", () => { picture.only = element("only").value; closeDetails(); drawPicture(); view(); });
element("unfold").addEventListener("click", () => setAllFolded(false));
element("fold").addEventListener("click", () => setAllFolded(true));
element("fit").addEventListener("click", () => canvas.fit(undefined, 20));
element("graph")?.addEventListener("change", () => showGraph(Number(element("graph").value)));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
if (data.pictures.length) showGraph(0);
