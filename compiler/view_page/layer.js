// The graph of one layer: ranks by longest path, order by barycentres, straight boxes and curved edges.
const LAYER = /^(.*?\.\d+)(?:\.|$)/;
const OUTSIDE = "outside the layers";
const TOO_MANY = 700;
const BOX_H = 40;
const GAP_X = 18;
const GAP_Y = 30;
const SMALLEST = 0.72;

function layerOf(node) {
  const found = LAYER.exec(node.origin.path) || LAYER.exec(node.weights.find((name) => LAYER.test(name)) || "");
  return found ? found[1] : OUTSIDE;
}

// Layer names of a step in the order of the text, and the nodes of each.
function layersOf(step) {
  const text = textOf(step);
  if (!text.layers) {
    const layers = new Map();
    let last = OUTSIDE;
    for (const node of graphOf(step).values()) {
      if (node.kind === "input") continue;
      const known = node.origin.path || node.weights.length;
      node.layer = known ? layerOf(node) : last;
      last = node.layer;
      if (!layers.has(node.layer)) layers.set(node.layer, []);
      layers.get(node.layer).push(node);
    }
    text.layers = layers;
  }
  return text.layers;
}

// Nodes of a layer with what they take from outside and who outside takes from them.
function scene(step, layer) {
  const all = graphOf(step);
  const inside = layersOf(step).get(layer) || [];
  const names = new Set(inside.map((node) => node.name));
  const boxes = new Map();
  const edges = [];
  for (const node of inside) boxes.set(node.name, { node, key: node.name, port: false });
  for (const node of inside) {
    for (const use of node.uses) {
      const source = all.get(use);
      if (!names.has(use)) boxes.set(use, { node: source, key: use, port: true });
      edges.push([use, node.name]);
    }
  }
  const leaving = new Map();
  for (const node of all.values()) {
    if (names.has(node.name)) continue;
    for (const use of node.uses) {
      if (names.has(use)) leaving.set(use, [...(leaving.get(use) || []), node]);
    }
  }
  for (const [name, users] of leaving) {
    const key = "out:" + name;
    boxes.set(key, { node: users[0], key, port: true, leaves: users });
    edges.push([name, key]);
  }
  return { boxes, edges };
}

function layout({ boxes, edges }, measure) {
  const into = new Map([...boxes.keys()].map((key) => [key, []]));
  const outOf = new Map([...boxes.keys()].map((key) => [key, []]));
  for (const [from, to] of edges) {
    into.get(to).push(from);
    outOf.get(from).push(to);
  }
  const rank = new Map();
  const rankOf = (key) => {
    if (!rank.has(key)) {
      rank.set(key, 0);
      rank.set(key, Math.max(-1, ...into.get(key).map(rankOf)) + 1);
    }
    return rank.get(key);
  };
  // In the order of the text, so that recursion is never deep.
  [...boxes.values()].sort((a, b) => Number(!!a.leaves) - Number(!!b.leaves) || a.node.index - b.node.index).forEach((box) => rankOf(box.key));
  for (const box of boxes.values()) {
    // What comes from outside stands just above its first reader.
    if (box.port && !box.leaves) rank.set(box.key, Math.min(...outOf.get(box.key).map((key) => rank.get(key))) - 1);
  }
  const lowest = Math.min(0, ...rank.values());
  const ranks = [];
  const place = (cell, at) => (ranks[at] = ranks[at] || []).push(cell);
  const cells = new Map();
  for (const box of boxes.values()) {
    const cell = { key: box.key, box, width: measure(box), up: [], down: [] };
    cells.set(box.key, cell);
    place(cell, rank.get(box.key) - lowest);
  }
  const paths = [];
  for (const [from, to] of edges) {
    let previous = cells.get(from);
    const path = [previous];
    for (let at = rank.get(from) - lowest + 1; at < rank.get(to) - lowest; at++) {
      const bend = { width: 8, up: [], down: [] };
      place(bend, at);
      join(previous, bend);
      path.push((previous = bend));
    }
    join(previous, cells.get(to));
    path.push(cells.get(to));
    paths.push({ from, to, path });
  }
  for (let at = 0; at < ranks.length; at++) ranks[at] = ranks[at] || [];
  order(ranks);
  position(ranks);
  return { ranks, cells, paths };
}

function join(a, b) {
  a.down.push(b);
  b.up.push(a);
}

function order(ranks) {
  const number = (cells) => cells.forEach((cell, i) => (cell.at = i));
  ranks.forEach(number);
  for (let sweep = 0; sweep < 12; sweep++) {
    const down = sweep % 2 === 0;
    for (const cells of down ? ranks : [...ranks].reverse()) {
      const weight = new Map(
        cells.map((cell) => {
          const near = down ? cell.up : cell.down;
          return [cell, near.length ? near.reduce((sum, other) => sum + other.at, 0) / near.length : cell.at];
        }),
      );
      cells.sort((a, b) => weight.get(a) - weight.get(b) || a.at - b.at);
      number(cells);
    }
  }
}

// Cells drift to the mean of their neighbours and keep their distance and order.
function position(ranks) {
  for (const cells of ranks) {
    let x = 0;
    for (const cell of cells) {
      cell.x = x + cell.width / 2;
      x += cell.width + GAP_X;
    }
  }
  for (let sweep = 0; sweep < 24; sweep++) {
    const down = sweep % 2 === 0;
    for (const cells of down ? ranks : [...ranks].reverse()) {
      const wanted = cells.map((cell) => {
        const near = down ? (cell.up.length ? cell.up : cell.down) : cell.down.length ? cell.down : cell.up;
        return near.length ? near.reduce((sum, other) => sum + other.x, 0) / near.length : cell.x;
      });
      spread(cells, wanted);
    }
  }
  const left = Math.min(...ranks.flat().map((cell) => cell.x - cell.width / 2));
  ranks.forEach((cells, at) => cells.forEach((cell) => ((cell.x -= left - 12), (cell.y = 14 + at * (BOX_H + GAP_Y)))));
}

// The positions closest to those wanted in which nothing overlaps: neighbours that would are moved as one.
function spread(cells, wanted) {
  const groups = [];
  cells.forEach((cell, i) => {
    const weight = cell.box ? 1 : 4; // bends first: long edges run straight
    let group = { cells: [cell], offsets: [0], sum: weight * wanted[i], weight, at: wanted[i] };
    while (groups.length) {
      const last = groups[groups.length - 1];
      const end = last.cells[last.cells.length - 1];
      const needed = last.offsets[last.offsets.length - 1] + end.width / 2 + GAP_X + group.cells[0].width / 2;
      if (group.at >= last.at + needed) break;
      groups.pop();
      group = {
        cells: [...last.cells, ...group.cells],
        offsets: [...last.offsets, ...group.offsets.map((offset) => offset + needed)],
        sum: last.sum + group.sum - needed * group.weight,
        weight: last.weight + group.weight,
        at: 0,
      };
      group.at = group.sum / group.weight;
    }
    groups.push(group);
  });
  for (const group of groups) group.cells.forEach((cell, i) => (cell.x = group.at + group.offsets[i]));
}

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function labels(box) {
  const { node } = box;
  if (box.leaves) {
    const others = box.leaves.length > 1 ? ` and ${box.leaves.length - 1} more` : "";
    return { title: "to " + box.leaves[0].layer, type: shortOp(node.op) + others, weight: "" };
  }
  if (box.port) {
    return { title: node.kind === "input" ? node.name : shortOp(node.op), type: node.kind === "input" ? node.type : "from " + node.layer, weight: "" };
  }
  const weight = node.weights.map((name) => name.replace(LAYER, "").replace(/\.weight$/, "")).join(", ");
  return { title: shortOp(node.op), type: node.type, weight: weight.length > 34 ? weight.slice(0, 33) + "…" : weight };
}

// Draws the layer; choose(node) is called for the one that is clicked.
function drawLayer(step, layer, canvas, choose) {
  const inside = layersOf(step).get(layer) || [];
  if (inside.length > TOO_MANY) {
    canvas.replaceChildren(make("p", "", `${inside.length} nodes are too many to draw. A later pass has fewer; the text shows them all.`));
    return;
  }
  if (!inside.length) {
    canvas.replaceChildren(make("p", "", "This step has no such layer."));
    return;
  }
  const made = scene(step, layer);
  const measure = (box) => {
    const { title, type, weight } = labels(box);
    return Math.max(88, 22 + 7.3 * (title.length + (weight ? weight.length + 1 : 0)), 22 + 6.7 * type.length);
  };
  const { ranks, cells, paths } = layout(made, measure);
  const width = Math.max(...ranks.flat().map((cell) => cell.x + cell.width / 2)) + 14;
  const height = ranks.length * (BOX_H + GAP_Y);
  // As wide as the room there is, while it can be read.
  const scale = Math.min(1, Math.max(SMALLEST, (canvas.clientWidth - 16) / width));
  const picture = svg("svg", { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Graph of ${layer}` });
  const before = step ? graphOf(step - 1) : null;
  for (const { from, to, path } of paths) {
    const points = path.map((cell, i) => [cell.x, i === 0 ? cell.y + BOX_H : i === path.length - 1 ? cell.y : cell.y + BOX_H / 2]);
    let d = `M${points[0][0]},${points[0][1]}`;
    for (let i = 1; i < points.length; i++) {
      const [x0, y0] = points[i - 1];
      const [x1, y1] = points[i];
      const half = (y0 + y1) / 2;
      d += `C${x0},${half} ${x1},${half} ${x1},${y1}`;
    }
    const edge = svg("path", { d, class: "edge" });
    edge.dataset.from = from;
    edge.dataset.to = to;
    picture.append(edge);
  }
  for (const cell of cells.values()) picture.append(drawBox(cell, before, choose));
  canvas.replaceChildren(picture);
}

function drawBox({ box, key, x, y, width }, before, choose) {
  const { node } = box;
  const { title, type, weight } = labels(box);
  const fresh = before && !box.port && (!before.has(node.name) || before.get(node.name).op !== node.op);
  const group = svg("g", {
    class: `box f-${node.family}${box.port ? " port" : ""}${fresh ? " fresh" : ""}`, transform: `translate(${x - width / 2},${y})`,
    tabindex: box.leaves ? -1 : 0, role: "button", "aria-label": `${node.name}: ${node.op}, ${node.type}${fresh ? ", new in this step" : ""}`,
  });
  group.dataset.key = key;
  group.append(
    svg("rect", { class: "frame", width, height: BOX_H, rx: 7 }), svg("rect", { class: "tint", width, height: BOX_H, rx: 7 }),
    svg("rect", { class: "side", y: 6, x: 5, width: 3, height: BOX_H - 12, rx: 1.5 }),
    svg("text", { class: "title", x: 14, y: 17 }, title), svg("text", { class: "type", x: 14, y: 32 }, type),
  );
  if (weight) group.append(svg("text", { class: "weight", x: 14 + 7.3 * (title.length + 1), y: 17 }, weight));
  if (fresh) group.append(svg("text", { class: "badge", x: width - 6, y: -3, "text-anchor": "end" }, "new"));
  group.append(svg("title", {}, `${node.name} = ${node.op}(${node.args || ""})\n${node.type}\n${node.origin.path} ${node.origin.source}`));
  group.addEventListener("click", () => choose(node));
  return group;
}
