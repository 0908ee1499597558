// The page: what is chosen, and how the parts follow it.
const state = { step: 0, tab: "diff", query: "", all: false, opened: new Set(), layer: "", node: "", row: -1, at: -1 };
const TABS = ["diff", "graph", "refused"];
const view = { rows: [], shown: [], matches: [], hits: new Set(), excerptHere: -1 };

const left = new Pane(byId("left"), (i) => drawRow(i, "l"));
const right = new Pane(byId("right"), (i) => drawRow(i, "r"));
const excerpt = new Pane(byId("excerpt"), drawExcerpt);

function fileLine(step, index) {
  return STEPS[step].first + index;
}

function marksOf(id, isNow) {
  if (!state.query || !view.hits.has(id)) return [];
  const text = LINES[id].toLowerCase();
  const marks = [];
  for (let at = text.indexOf(state.query); at >= 0; at = text.indexOf(state.query, at + state.query.length)) {
    marks.push([at, at + state.query.length, isNow ? "now" : "hit"]);
  }
  return marks;
}

function drawRow(i, side) {
  const item = view.shown[i];
  if (typeof item === "object") {
    const row = make("div", "row fold");
    const button = make("button", "", side === "l" || isSingle() ? `⋯ ${item.count} unchanged lines` : "⋯");
    button.type = "button";
    button.setAttribute("aria-label", `Show ${item.count} unchanged lines`);
    button.addEventListener("click", () => unfoldRun(item.fold));
    row.append(button);
    return row;
  }
  const { l, r, kind } = view.rows[item];
  const index = side === "l" ? l : r;
  if (index < 0) return make("div", "row none");
  const step = side === "l" ? state.step - 1 : state.step;
  const text = textOf(step);
  const id = text.ids[index];
  const isNow = state.at >= 0 && view.matches[state.at] === item;
  const marks = marksOf(id, isNow);
  if (kind === "mod") {
    const [from, toLeft, toRight] = middle(LINES[textOf(state.step - 1).ids[l]], LINES[textOf(state.step).ids[r]]);
    marks.push([from, side === "l" ? toLeft : toRight, "deep " + side]);
  }
  const style = kind === "both" ? (side === "l" ? "del" : "add") : kind;
  const row = textRow(`${style}${item === state.row ? " here" : ""}`, fileLine(lastFile(step), index), id, marks);
  row.addEventListener("mouseenter", () => describe(id, text.origins[index]));
  row.addEventListener("click", () => {
    state.row = item;
    describe(id, text.origins[index]);
    left.paint(true);
    right.paint(true);
  });
  return row;
}

// The step whose file holds the text after `step`.
function lastFile(step) {
  while (step > 0 && !STEPS[step].edits.length) step--;
  return Math.max(step, 0);
}

function isSingle() {
  return state.step === 0 || !STEPS[state.step].edits.length;
}

function describe(id, origin) {
  const line = parse(id);
  const parts = [];
  if (line.kind === "call" || line.kind === "input" || line.kind === "weight") {
    parts.push([line.name, "d"], [line.op || line.kind, line.op ? "f-" + familyOf(line.op) : "soft"], [line.type, ""]);
  }
  if (origin.path) parts.push([origin.path, ""]);
  if (origin.source) parts.push([origin.source, "soft"], [origin.code, "code"]);
  byId("detail").replaceChildren(...parts.filter(([text]) => text).map(([text, name]) => Object.assign(make("span", name, text), { title: text })));
}

function hint() {
  byId("detail").replaceChildren(make("span", "soft", "Point at a line to see where it comes from. Press ? for the keys."));
}

function layRows() {
  view.shown = folded(view.rows, state.opened, state.all);
  const longest = (step) => textOf(step).ids.reduce((most, id) => Math.max(most, LINES[id].length), 40);
  right.set(view.shown.length, longest(state.step));
  left.set(isSingle() ? 0 : view.shown.length, isSingle() ? 0 : longest(state.step - 1));
  byId("unfold").textContent = state.all ? "Fold unchanged lines" : "Show all lines";
  byId("unfold").hidden = isSingle() || state.tab !== "diff";
}

function unfoldRun(start) {
  state.opened.add(start);
  layRows();
}

// Brings a row into sight, opening the fold that holds it.
function reveal(item) {
  let at = view.shown.indexOf(item);
  if (at < 0) {
    const fold = view.shown.find((s) => typeof s === "object" && item >= s.from && item < s.from + s.count);
    if (!fold) return;
    state.opened.add(fold.fold);
    layRows();
    at = view.shown.indexOf(item);
  }
  state.row = item;
  right.show(at);
  left.element.scrollTop = right.element.scrollTop;
  left.paint(true);
  const row = view.rows[item];
  const step = row.r >= 0 ? state.step : state.step - 1;
  const index = row.r >= 0 ? row.r : row.l;
  describe(textOf(step).ids[index], textOf(step).origins[index]);
}

function nextChange(direction) {
  const isChange = (k) => view.rows[k] && view.rows[k].kind !== "same" && (k === 0 || view.rows[k - 1].kind === "same");
  for (let k = state.row + direction; k >= 0 && k < view.rows.length; k += direction) {
    if (isChange(k)) return reveal(k);
  }
}

// --- search ---------------------------------------------------------------------------------------------------------

function search(query, stay) {
  state.query = query.toLowerCase();
  view.hits = new Set();
  if (state.query) LINES.forEach((line, id) => line.toLowerCase().includes(state.query) && view.hits.add(id));
  collectMatches();
  state.at = -1;
  if (state.query && !stay) moveMatch(1);
  paintSteps();
  left.paint(true);
  right.paint(true);
  excerpt.paint(true);
  markBoxes();
}

function collectMatches() {
  const before = isSingle() ? [] : textOf(state.step - 1).ids;
  const after = textOf(state.step).ids;
  const isHit = ({ l, r }) => (l >= 0 && view.hits.has(before[l])) || (r >= 0 && view.hits.has(after[r]));
  view.matches = state.query ? view.rows.flatMap((row, i) => (isHit(row) ? [i] : [])) : [];
  showHits();
}

function showHits() {
  const many = view.matches.length;
  byId("hits").textContent = !state.query ? "" : many ? `${state.at >= 0 ? state.at + 1 : "–"} / ${many}` : "none here";
}

// onward: where nothing matches here, the next pass with a match is chosen.
function moveMatch(direction, onward) {
  const many = view.matches.length;
  if (!many) return onward ? matchElsewhere(direction) : showHits();
  state.at = state.at < 0 ? (direction > 0 ? 0 : many - 1) : (state.at + direction + many) % many;
  reveal(view.matches[state.at]);
  right.paint(true);
  showHits();
  if (state.tab === "graph") showMatchInGraph();
  else if (state.tab !== "diff") chooseTab("diff");
}

function matchElsewhere(direction) {
  for (let k = 1; state.query && k < STEPS.length; k++) {
    const step = (state.step + direction * k + k * STEPS.length) % STEPS.length;
    if (textOf(step).ids.some((id) => view.hits.has(id))) {
      chooseStep(step);
      return moveMatch(direction);
    }
  }
}

function showMatchInGraph() {
  const line = parse(textOf(state.step).ids[view.rows[view.matches[state.at]].r]);
  const node = line && line.kind === "call" && graphOf(state.step).get(line.name);
  if (node) chooseNode(node);
}

// --- passes ---------------------------------------------------------------------------------------------------------

function paintSteps() {
  const list = byId("steps");
  const slowest = Math.max(1, ...STEPS.map((step) => step.ms || 0));
  const items = STEPS.map((step, i) => {
    const item = make("li", "step" + (step.edits.length || !i ? "" : " quiet") + (step.failed ? " failed" : ""));
    item.id = "step-" + i;
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", String(i === state.step));
    item.append(make("span", "number", String(step.index).padStart(2, "0")));
    const top = make("div", "top");
    top.append(make("span", "name", step.name));
    const found = state.query ? textOf(i).ids.reduce((sum, id) => sum + view.hits.has(id), 0) : 0;
    if (found) top.append(Object.assign(make("span", "found", String(found)), { title: `${found} lines match` }));
    if (step.ms !== undefined) top.append(make("span", "ms", milliseconds(step.ms)));
    item.append(top);
    if (!item.classList.contains("quiet")) item.append(stepCounts(step, i), stepBar(step, slowest));
    else item.title = "changed nothing" + (step.rejected.length ? `; ${step.rejected.length} rejected` : "");
    item.addEventListener("click", () => chooseStep(i));
    return item;
  });
  list.replaceChildren(...items);
  list.setAttribute("aria-activedescendant", "step-" + state.step);
}

function stepCounts(step, i) {
  const counts = make("div", "counts");
  const add = (text, name) => counts.append(make("span", name || "", text));
  if (!i) add(`${step.nodes_after} nodes`);
  else if (step.failed) add("failed", "bad");
  else {
    add(step.matched ? `${step.matched} rewritten` : "tidied");
    if (step.rejected.length) add(`${step.rejected.length} rejected`, "warn");
    if (step.near_misses.length) add(`${step.near_misses.length} near`, "warn");
    if (step.proof.sites) add(`✓ ${step.proof.error_bound ? number(step.proof.worst_error) : "exact"}`, "good");
  }
  const proof = proofText(step);
  if (proof) counts.lastChild.title = proof;
  return counts;
}

function stepBar(step, slowest) {
  const bar = make("div", "bar");
  const fill = make("i");
  fill.style.width = `${(100 * (step.ms || 0)) / slowest}%`;
  bar.append(fill);
  bar.hidden = step.ms === undefined;
  return bar;
}

function chooseStep(step) {
  state.step = Math.max(0, Math.min(STEPS.length - 1, step));
  state.opened = new Set();
  state.row = -1;
  state.at = -1;
  view.rows = rowsOf(state.step);
  collectMatches();
  paintSteps();
  byId("step-" + state.step).scrollIntoView({ block: "nearest" });
  paintHead();
  layRows();
  left.element.scrollTop = right.element.scrollTop = 0;
  paintRefused();
  paintTab();
  hint();
  remember();
}

function paintHead() {
  const step = STEPS[state.step];
  byId("step-title").textContent = step.name;
  const facts = byId("step-facts");
  const bits = state.step
    ? [
        `${step.matched} rewritten`, step.rejected.length ? `${step.rejected.length} rejected` : "",
        step.near_misses.length ? `${step.near_misses.length} near misses` : "",
        `${step.nodes_before} → ${step.nodes_after} nodes`, milliseconds(step.ms), proofText(step), `legal: ${step.stage}`,
      ].filter(Boolean)
    : [`${step.nodes_after} nodes`, "as captured, before any pass"];
  facts.textContent = (step.failed ? ["failed"] : bits).join("  ·  ");
  facts.title = facts.textContent;
  const single = isSingle();
  byId("panel-diff").classList.toggle("single", single);
  const file = (k) => STEPS[lastFile(k)].file || STEPS[k].name;
  byId("left-title").textContent = single ? "" : `before: ${file(state.step - 1)}`;
  byId("right-title").textContent = single && state.step ? `unchanged by this step: ${file(state.step)}` : single ? file(0) : `after: ${file(state.step)}`;
  const count = (side) => view.rows.filter((row) => row.kind === side || row.kind === "both").length;
  const changed = view.rows.filter((row) => row.kind === "mod").length;
  byId("changes").textContent = single ? "" : `${changed} lines changed, ${count("add")} added, ${count("del")} removed`;
}

// --- tabs -----------------------------------------------------------------------------------------------------------

function chooseTab(tab) {
  state.tab = tab;
  paintTab();
  remember();
}

function paintTab() {
  for (const tab of TABS) {
    const button = byId("tab-" + tab);
    button.setAttribute("aria-selected", String(tab === state.tab));
    button.tabIndex = tab === state.tab ? 0 : -1;
    byId("panel-" + tab).hidden = tab !== state.tab;
  }
  byId("changes").hidden = state.tab !== "diff";
  byId("unfold").hidden = isSingle() || state.tab !== "diff";
  if (state.tab === "graph") paintGraph();
}

function paintGraph() {
  const layers = [...layersOf(state.step).keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  if (!layers.includes(state.layer)) state.layer = layers.find((name) => name !== OUTSIDE) || layers[0] || "";
  const select = byId("layer");
  select.replaceChildren(
    ...layers.map((name) => Object.assign(make("option", "", `${name} (${layersOf(state.step).get(name).length} nodes)`), { value: name, selected: name === state.layer })),
  );
  drawLayer(state.step, state.layer, byId("canvas"), chooseNode);
  const inside = layersOf(state.step).get(state.layer) || [];
  const families = [...new Set(inside.map((node) => node.family))].sort();
  byId("legend").replaceChildren(...families.map((name) => {
    const entry = make("span");
    entry.append(make("i", "f-" + name), name);
    return entry;
  }));
  const ids = textOf(state.step).ids;
  excerpt.set(ids.length, ids.reduce((most, id) => Math.max(most, LINES[id].length), 40));
  const chosen = graphOf(state.step).get(state.node);
  const isNew = (node) => state.step && STEPS[state.step].edits.length && !graphOf(state.step - 1).has(node.name);
  showNode(chosen && chosen.layer === state.layer ? chosen : inside.find(isNew) || inside.find((n) => n.family === "attention") || inside[0]);
  const box = boxOf(state.node);
  if (box) box.scrollIntoView({ block: "center", inline: "center" });
  markBoxes();
}

function chooseNode(node) {
  if (node.kind !== "input" && node.layer !== state.layer) {
    state.layer = node.layer;
    state.node = node.name;
    paintGraph();
  } else showNode(node);
  const box = boxOf(node.name);
  if (box) box.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function boxOf(name) {
  return [...byId("canvas").querySelectorAll(".box")].find((box) => box.dataset.key === name);
}

function showNode(node) {
  if (!node) return;
  state.node = node.name;
  for (const box of byId("canvas").querySelectorAll(".box")) box.classList.toggle("chosen", box.dataset.key === node.name);
  for (const edge of byId("canvas").querySelectorAll(".edge")) edge.classList.toggle("lit", edge.dataset.from === node.name || edge.dataset.to === node.name);
  const facts = [["node", node.name], ["op", node.op], ["type", node.type], ["weights", node.weights.join(", ")], ["module", node.origin.path], ["line", node.origin.source], ["", node.origin.code]];
  const list = byId("node");
  list.replaceChildren();
  for (const [name, value] of facts) {
    if (value) list.append(make("dt", "", name), make("dd", name === "op" ? "f-" + node.family : "", value));
  }
  const button = make("button", "", "Show in the text (Enter)");
  button.type = "button";
  button.addEventListener("click", () => showInText(node));
  const last = make("dd", "wide");
  last.append(button);
  list.append(last);
  view.excerptHere = node.index;
  excerpt.element.scrollTop = Math.max(0, node.index * ROW - excerpt.element.clientHeight / 3);
  excerpt.paint(true);
  describe(textOf(state.step).ids[node.index], node.origin);
}

function drawExcerpt(index) {
  const id = textOf(state.step).ids[index];
  const row = textRow(index === view.excerptHere ? "mod here" : "", fileLine(lastFile(state.step), index), id, marksOf(id, false));
  row.addEventListener("click", () => {
    const node = graphOf(state.step).get(parse(id).name);
    if (node) chooseNode(node);
  });
  return row;
}

function showInText(node) {
  chooseTab("diff");
  const item = view.rows.findIndex((row) => row.r === node.index);
  if (item >= 0) reveal(item);
}

function markBoxes() {
  for (const box of byId("canvas").querySelectorAll(".box")) {
    const node = graphOf(state.step).get(box.dataset.key);
    box.classList.toggle("match", !!(state.query && node && view.hits.has(textOf(state.step).ids[node.index])));
  }
}
