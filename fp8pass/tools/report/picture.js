// The layout of a graph. A place is a part of the picture that can be unfolded, such as a module. Places are
// arranged in a line, in the order of the forward. Each place has a box on the forward's side and a box on the
// backward's side. Saved tensors run in the band between the two sides.
//
//     all layers  →  a layer  →  a module  →  its operators      a place, unfolded step by step
//
// No line crosses a label. Saved tensors run in the band, lines to the next place in the gap between the boxes,
// and lines to a later place in lanes outside of the boxes. dagre routes the lines between operators. The line
// of places runs to the right, or downwards on a narrow screen.
"use strict";

// A folded place has the color of the first of these kinds that its operators have.
const STANDS_OUT = ["fp8", "attention", "linear", "nonlinear", "quantize", "dequantize", "recomputed", "input"];
const NODE_HEIGHT = 26;
const TITLE_HEIGHT = 24;
const PADDING = 12;
const GAP = 34;
const BAND = 170;
const LANE = 7;
const widthOf = (lines) => 18 + 7.2 * Math.max(...lines.map((line) => line.length));
const numbered = (path) => [path.replace(/\d+$/, ""), Number(path.match(/\d+$/)[0])];
const shortened = (path) => path.split(".").slice(-2).join(".");
const LEVELS = ["layers", "layer", "module"]; // the outer ones first
const total = (numbers) => [...numbers].reduce((sum, x) => sum + x, 0);

// A part of the picture that can be unfolded: a module, equal layers drawn as one layer, or all layers.
class Place {
  constructor(id, first, last, path, lines, title) {
    Object.assign(this, { id, first, last, path, lines, title });
  }

  // One of LEVELS.
  get level() {
    return this.id.split(":")[0];
  }

  holds(column) {
    return this.first <= column && column <= this.last;
  }

  contains(place) {
    return this.holds(place.first) && this.holds(place.last);
  }
}

function placesOf({ columns, layers, operators }) {
  const areInputs = (column) => operators.every((y) => y.column !== column || y.backward || y.kind === "input");
  const nameless = (column) => (areInputs(column) ? "inputs" : column === columns.length - 1 ? "outputs" : "(top level)");
  const modules = columns.map((path, i) => new Place(`module:${i}`, i, i, path, [shortened(path) || nameless(i)], path || nameless(i)));
  const drawn = layers.map((y, i) => {
    const lines = y.count > 1 ? [`${y.count} equal layers`, `${shortened(y.first)} – ${numbered(y.last)[1]}`] : [shortened(y.first)];
    const title = y.count > 1 ? `${y.count} equal layers: ${y.first} to ${y.last}` : y.first;
    return new Place(`layer:${i}`, y.columns[0], y.columns.at(-1), y.first, lines, title);
  });
  return [...stacksOf(layers), ...drawn, ...modules];
}

// Group layers that follow each other and are in the same module list.
function stacksOf(layers) {
  const stacks = [];
  for (const layer of layers) {
    const known = stacks.at(-1);
    if (known && numbered(known.at(-1).first)[0] === numbered(layer.first)[0]) known.push(layer);
    else stacks.push([layer]);
  }
  return stacks.filter((own) => own.length > 1).map((own, i) => {
    const [first, last, count] = [own[0], own.at(-1), total(own.map((y) => y.count))];
    const lines = [`${count} layers`, `${shortened(first.first)} – ${numbered(last.last)[1]}`];
    return new Place(`layers:${i}`, first.columns[0], last.columns.at(-1), numbered(first.first)[0].replace(/\.$/, ""), lines, `${count} layers: ${first.first} to ${last.last}`);
  });
}

class Picture {
  constructor(picture) {
    this.columns = picture.columns;
    this.edges = picture.edges;
    this.layers = picture.layers;
    this.operators = new Map(picture.operators.map((y) => [y.id, y]));
    this.places = placesOf(picture); // the outer ones first
    this.around = this.columns.map((_, column) => this.places.filter((place) => place.holds(column)));
    this.bytes = new Map(this.edges.filter((e) => e.bytes).map((e) => [e.source, e.bytes]));
    this.times = this.columns.map((_, c) => this.layers.find((y) => y.columns.includes(c))?.count ?? 1);
    this.unfolded = new Set();
    this.only = "";
  }

  // Unfold as many levels as `fits` allows.
  unfoldWhile(fits) {
    this.unfolded = new Set();
    for (const level of LEVELS) {
      const before = new Set(this.unfolded);
      this.unfoldAll(level);
      if (fits()) continue;
      this.unfolded = before;
      return;
    }
  }

  unfoldAll(level) {
    for (const place of this.places) if (place.level === level) this.unfolded.add(place.id);
  }

  // Unfold the layers that contain a module.
  reveal(path) {
    const column = this.columns.findIndex((module) => `${module}.`.startsWith(`${path}.`));
    const around = this.around[column].filter((place) => place.level !== "module");
    for (const place of around) if (!place.path || `${path}.`.startsWith(`${place.path}.`)) this.unfolded.add(place.id);
  }

  // The place that a box or a frame belongs to.
  place(id) {
    return this.places.find((place) => id === place.id || id.startsWith(`${place.id}:`));
  }

  boxId(operator) {
    return `${this.placeAt(operator.column).id}:${operator.backward ? "backward" : "forward"}`;
  }

  // Saved bytes of the results of forward operators, summed over all equal layers.
  kept(operators) {
    return total(operators.filter((y) => !y.backward).map((y) => this.times[y.column] * (this.bytes.get(y.id) ?? 0)));
  }

  placeAt(column) {
    return this.around[column].find((place) => !this.unfolded.has(place.id)) ?? this.around[column].at(-1);
  }

  // The columns of the selected module, and of the modules that its saved tensors come from or go to.
  shownColumns() {
    const inside = (column) => `${this.columns[column]}.`.startsWith(`${this.only}.`) || !this.only;
    const shown = new Set([...this.columns.keys()].filter(inside));
    for (const edge of this.edges.filter((e) => e.bytes)) {
      const ends = [edge.source, edge.target].map((id) => this.operators.get(id).column);
      if (ends.some(inside)) ends.forEach((column) => shown.add(column));
    }
    return shown;
  }

  boxes() {
    const shown = this.shownColumns();
    const boxes = new Map();
    for (const operator of this.operators.values()) {
      if (!shown.has(operator.column)) continue;
      const id = this.boxId(operator);
      if (!boxes.has(id)) boxes.set(id, { id, place: this.place(id), backward: operator.backward, operators: [] });
      boxes.get(id).operators.push(operator);
    }
    for (const box of boxes.values()) {
      Object.assign(box, this.look(box));
      Object.assign(box, this.inside(box));
    }
    return [...boxes.values()].sort((a, b) => a.place.first - b.place.first);
  }

  look({ place, operators }) {
    const kept = this.kept(operators);
    const lines = kept ? [...place.lines, size(kept)] : place.lines;
    return { kind: STANDS_OUT.find((kind) => operators.some((y) => y.kind === kind)), lines };
  }

  // The size of a box, and the positions of its operators and lines relative to its corner.
  inside({ place, operators, lines }) {
    if (!this.unfolded.has(place.id)) {
      return { isOpen: false, width: widthOf([...lines, "000.0 KiB"]), height: 2 * NODE_HEIGHT, at: new Map(), routes: [] };
    }
    const graph = new dagre.graphlib.Graph().setGraph({ rankdir: "TB", nodesep: 14, ranksep: 20 });
    graph.setDefaultEdgeLabel(() => ({}));
    const own = new Set(operators.map((y) => y.id));
    for (const y of operators) graph.setNode(y.id, { width: widthOf([this.labelOf(y)]), height: NODE_HEIGHT });
    const edges = this.edges.filter((e) => own.has(e.source) && own.has(e.target));
    for (const e of edges) graph.setEdge(e.source, e.target);
    dagre.layout(graph);
    const moved = ({ x, y }) => ({ x: x + PADDING, y: y + PADDING + TITLE_HEIGHT });
    const routes = edges.map((e) => ({ ...e, points: graph.edge(e.source, e.target).points.map(moved) }));
    return {
      isOpen: true,
      width: Math.max(graph.graph().width, widthOf(lines)) + 2 * PADDING,
      height: graph.graph().height + 2 * PADDING + TITLE_HEIGHT,
      at: new Map(operators.map((y) => [y.id, moved(graph.node(y.id))])),
      routes,
    };
  }

  labelOf(operator) {
    const bytes = operator.backward ? 0 : this.bytes.get(operator.id);
    return bytes ? `${operator.label}  ${size(bytes)}` : operator.label;
  }

  // All drawn elements. The band begins at 0, so that unfolding a place moves other boxes only along the line.
  elements(downwards) {
    const layout = new Layout(this, this.boxes(), downwards);
    return [...layout.frames(), ...layout.boxes.flatMap((box) => layout.nodes(box)), ...layout.lines()];
  }

  matching(text) {
    const wanted = this.drawnPath(text.toLowerCase());
    const words = (y) => [y.module, y.label, y.id, y.details.saves ?? ""];
    return [...this.operators.values()].filter((y) => words(y).some((x) => x.toLowerCase().includes(wanted)));
  }

  // Replace the path of a layer that is not drawn by the path of the equal layer that is drawn.
  drawnPath(text) {
    return text.replace(/(\w+\.)(\d+)/, (path, name, number) => {
      const stands = this.layers.map((y) => [...numbered(y.first), numbered(y.last)[1]])
        .find(([prefix, first, last]) => prefix.toLowerCase().endsWith(name) && first <= number && number <= last);
      return stands ? name + stands[1] : path;
    });
  }
}

// The positions of boxes, frames and lines. `along` is parallel to the line of places, `across` perpendicular.
class Layout {
  constructor(picture, boxes, downwards) {
    Object.assign(this, { picture, boxes, downwards });
    this.band = downwards ? BAND / 2 : BAND;
    this.boxOf = new Map(boxes.flatMap((box) => box.operators.map((y) => [y.id, box])));
    this.order = [...new Set(boxes.map((box) => box.place))];
    this.number = new Map(this.order.map((place, i) => [place, i]));
    this.placeBoxes();
    const titles = downwards ? this.order.flatMap(this.openAround).map((place) => widthOf([place.lines[0]]) + 2 * PADDING) : [];
    const deepest = (backward) => Math.max(2 * NODE_HEIGHT, ...titles, ...boxes.filter((b) => b.backward === backward).map((b) => this.across(b)));
    this.depth = { forward: deepest(false), backward: deepest(true) };
    this.outer = this.mergedLines();
    this.lanes = { forward: this.lanesOf(false), backward: this.lanesOf(true) };
  }

  along = (box) => (this.downwards ? box.height : box.width);
  across = (box) => (this.downwards ? box.width : box.height);
  point = (along, across) => (this.downwards ? { x: across, y: along } : { x: along, y: across });
  openAround = (place) => this.picture.around[place.first].filter((p) => p !== place && this.picture.unfolded.has(p.id));

  placeBoxes() {
    let next = 0;
    let around = [];
    for (const place of this.order) {
      const own = this.boxes.filter((box) => box.place === place);
      const opened = this.openAround(place);
      const changes = opened.filter((p) => !around.includes(p)).length + around.filter((p) => !opened.includes(p)).length;
      next += changes * (this.downwards ? TITLE_HEIGHT : PADDING);
      around = opened;
      const room = Math.max(...own.map(this.along));
      for (const box of own) {
        box.begin = next + (room - this.along(box)) / 2;
        box.middle = next + room / 2;
        const across = box.backward ? this.band : -this.across(box);
        box.corner = this.point(box.begin, across);
        box.center = { x: box.corner.x + box.width / 2, y: box.corner.y + box.height / 2 };
      }
      next += room + GAP;
    }
  }

  nodes(box) {
    const data = { id: box.id, first: box.place.first, width: box.width, height: box.height, kind: box.kind };
    if (!box.isOpen) return [{ classes: "folded", data: { ...data, label: box.lines.join("\n") }, position: box.center }];
    const title = { x: box.center.x, y: box.corner.y + PADDING / 2 + TITLE_HEIGHT / 2 };
    return [
      { classes: "cell", data: { ...data, label: box.place.title }, position: box.center },
      { classes: "title", data: { id: `title:${box.id}`, of: box.id, label: box.lines.join(", ") }, position: title },
      ...box.operators.map((y) => {
        const label = this.picture.labelOf(y);
        return { classes: "operator", data: { id: y.id, label, name: y.label, kind: y.kind, width: widthOf([label]) }, position: this.inBox(box, box.at.get(y.id)) };
      }),
    ];
  }

  inBox = (box, { x, y }) => ({ x: box.corner.x + x, y: box.corner.y + y });

  // A frame around each unfolded layer, and around all of them.
  frames() {
    const found = new Set(this.order.flatMap((place) => this.openAround(place)));
    return [...found].flatMap((place) => {
      const own = this.boxes.filter((box) => place.holds(box.place.first));
      const outer = [...found].some((p) => p !== place && place.contains(p)) ? 1 : 0;
      const margin = (this.downwards ? TITLE_HEIGHT : PADDING) * (outer + 0.6);
      const begin = Math.min(...own.map((b) => b.begin)) - margin;
      const end = Math.max(...own.map((b) => b.begin + this.along(b))) + (outer + 0.6) * PADDING;
      const beside = PADDING + (this.downwards ? outer * PADDING : TITLE_HEIGHT * (1 + outer));
      const top = -this.depth.forward - LANE * (this.lanes.forward.count + 1) - beside;
      const bottom = this.band + this.depth.backward + LANE * (this.lanes.backward.count + 1) + PADDING * (1 + outer);
      const [corner, far] = [this.point(begin, top), this.point(end, bottom)];
      const [width, height] = [far.x - corner.x, far.y - corner.y];
      const label = this.downwards ? place.lines[0] : place.title;
      const title = { x: (this.downwards ? -this.depth.forward : corner.x) + widthOf([label]) / 2, y: corner.y + TITLE_HEIGHT / 2 };
      return [
        { classes: "layer", data: { id: place.id, label: place.title, width, height }, position: { x: corner.x + width / 2, y: corner.y + height / 2 } },
        { classes: "title", data: { id: `title:${place.id}`, of: place.id, label }, position: title },
      ];
    });
  }

  // Lines between boxes. All tensors from one box to another box share a line.
  mergedLines() {
    const merged = new Map();
    for (const edge of this.picture.edges) {
      const [source, target] = [this.boxOf.get(edge.source), this.boxOf.get(edge.target)];
      if (!source || !target || source === target) continue;
      const id = `${source.id}→${target.id}`;
      const known = merged.get(id) ?? { id, source, target, crosses: false, recomputed: true, tensors: new Map() };
      known.crosses ||= edge.crosses || source.backward !== target.backward;
      known.recomputed &&= ["recomputed", "dequantize"].includes(this.picture.operators.get(edge.source).kind);
      if (edge.crosses) known.tensors.set(edge.source, (known.tensors.get(edge.source) ?? 0) + this.keptOf(edge));
      merged.set(id, known);
    }
    return [...merged.values()];
  }

  keptOf({ source, bytes }) {
    return bytes * this.picture.times[this.picture.operators.get(source).column];
  }

  isNext({ source, target }) {
    return Math.abs(this.number.get(source.place) - this.number.get(target.place)) === 1;
  }

  // If places run downwards, titles of frames are next to the boxes. So lanes are outside of all boxes.
  depthBetween(backward, from, to) {
    if (this.downwards) return this.depth[backward ? "backward" : "forward"];
    const passed = this.boxes.filter((b) => b.backward === backward && from <= this.number.get(b.place) && this.number.get(b.place) <= to);
    return Math.max(...passed.map(this.across));
  }

  laneOf(box) {
    return this.lanes[box.backward ? "backward" : "forward"].of.get(box);
  }

  // If a box has lines to boxes other than the next one, it gets a lane. Return the distance of each lane from
  // the band. A lane is outside of the boxes that it passes, and does not overlap with other lanes.
  lanesOf(backward) {
    const spans = new Map();
    for (const line of this.outer) {
      if (line.crosses || line.source.backward !== backward || this.isNext(line)) continue;
      const ends = [line.source, line.target].map((box) => this.number.get(box.place));
      const known = spans.get(line.source) ?? ends;
      spans.set(line.source, [Math.min(...known, ...ends), Math.max(...known, ...ends)]);
    }
    const taken = [];
    const lanes = new Map();
    for (const [box, [from, to]] of [...spans].sort(([, a], [, b]) => a[1] - a[0] - (b[1] - b[0]))) {
      const free = taken.findIndex((own) => own.every(([start, end]) => to < start || end < from));
      const lane = free < 0 ? taken.push([]) - 1 : free;
      taken[lane].push([from, to]);
      lanes.set(box, this.depthBetween(backward, from, to) + LANE * (lane + 1));
    }
    return { of: lanes, count: taken.length };
  }

  lines() {
    const inner = this.boxes.flatMap((box) => box.routes.map((e) => {
      const [source, target] = [e.source, e.target].map((id) => this.inBox(box, box.at.get(id)));
      return { data: { id: `${e.source}→${e.target}`, source: e.source, target: e.target, ...relative(e.points.map((p) => this.inBox(box, p)), source, target) } };
    }));
    const outer = this.outer.map((line) => {
      const bytes = total(line.tensors.values());
      const ends = { source: line.source.id, target: line.target.id, bytes, tensors: [...line.tensors.keys()] };
      return {
        classes: bytes ? "kept" : line.recomputed ? "recomputed" : line.crosses ? "free" : "",
        data: { id: line.id, ...ends, ...relative(this.route(line), line.source.center, line.target.center) },
      };
    });
    return [...inner, ...outer];
  }

  route(line) {
    const { source, target } = line;
    if (line.crosses) return [this.point(source.middle, 0), this.point(target.middle, this.band)];
    if (this.isNext(line)) return this.throughGap(source, target);
    const outwards = source.backward ? 1 : -1;
    const edge = (box) => (source.backward ? this.band : 0) + outwards * this.across(box);
    const lane = (source.backward ? this.band : 0) + outwards * this.laneOf(source);
    const [out, into] = [source, target].map((box, i) => box.middle + (i ? outwards : -outwards) * 0.2 * this.along(box));
    return [this.point(out, edge(source)), this.point(out, lane), this.point(into, lane), this.point(into, edge(target))];
  }

  throughGap(source, target) {
    const inside = this.downwards ? PADDING : NODE_HEIGHT;
    const across = source.backward ? this.band + inside : -inside;
    const forwards = source.begin < target.begin;
    const out = source.begin + (forwards ? this.along(source) : 0);
    const into = target.begin + (forwards ? 0 : this.along(target));
    return [this.point(out, across), this.point(into, across)];
  }
}

// Convert a route for Cytoscape: ends relative to the centers of their boxes, bends relative to the line
// between the ends.
function relative(points, source, target) {
  const [from, to] = [points[0], points.at(-1)];
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const bends = points.slice(1, -1).map(({ x, y }) => [x - from.x, y - from.y]);
  return {
    from: `${from.x - source.x}px ${from.y - source.y}px`,
    to: `${to.x - target.x}px ${to.y - target.y}px`,
    weights: bends.map(([x, y]) => (x * dx + y * dy) / length ** 2),
    distances: bends.map(([x, y]) => (y * dx - x * dy) / length),
  };
}
