// Keyboard, the page's address, printing, and the start.
function remember() {
  history.replaceState(null, "", `#step=${state.step}&view=${state.tab}${state.layer ? "&layer=" + encodeURIComponent(state.layer) : ""}`);
}

const inSearch = () => document.activeElement === byId("query");

function clearSearch() {
  byId("query").value = "";
  search("", true);
  byId("query").blur();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const { key, target } = event;
  if (key === "Escape") return clearSearch();
  if (inSearch()) {
    if (key === "Enter") {
      event.preventDefault();
      moveMatch(event.shiftKey ? -1 : 1, true);
    }
    return;
  }
  if (target.closest("select")) return;
  // Arrows scroll what can be scrolled, and choose where a tab or a box has the focus.
  const scrolls = target.closest(".pane, #canvas, #panel-refused");
  if ((key === "ArrowDown" || key === "ArrowUp") && scrolls) return;
  if ((key === "ArrowRight" || key === "ArrowLeft") && target.closest('[role="tab"]')) {
    chooseTab(TABS[(TABS.indexOf(state.tab) + (key === "ArrowRight" ? 1 : 2)) % 3]);
    byId("tab-" + state.tab).focus();
    return event.preventDefault();
  }
  const box = target.closest(".box");
  if (box && (key === "Enter" || key === " ")) {
    const node = graphOf(state.step).get(box.dataset.key);
    event.preventDefault();
    if (node) return key === " " || state.node !== node.name ? chooseNode(node) : showInText(node);
    return;
  }
  const action = ACTIONS[key];
  if (action && !(key === "Enter" && target.closest("button"))) {
    event.preventDefault();
    action();
  }
}

function stepLayer(direction) {
  const select = byId("layer");
  const at = Math.max(0, Math.min(select.options.length - 1, select.selectedIndex + direction));
  state.layer = select.options[at].value;
  paintGraph();
  remember();
}

function enter() {
  if (state.query) return moveMatch(1, true);
  if (state.tab === "graph") {
    const node = graphOf(state.step).get(state.node);
    return node && showInText(node);
  }
  const fold = view.shown.find((item) => typeof item === "object" && item.from + item.count > state.row);
  if (fold) unfoldRun(fold.fold);
}

const ACTIONS = {
  j: () => chooseStep(state.step + 1),
  ArrowDown: () => chooseStep(state.step + 1),
  k: () => chooseStep(state.step - 1),
  ArrowUp: () => chooseStep(state.step - 1),
  Home: () => chooseStep(0),
  End: () => chooseStep(STEPS.length - 1),
  1: () => chooseTab("diff"),
  2: () => chooseTab("graph"),
  3: () => chooseTab("refused"),
  "]": () => (state.tab === "graph" ? stepLayer(1) : nextChange(1)),
  "[": () => (state.tab === "graph" ? stepLayer(-1) : nextChange(-1)),
  "/": () => (byId("query").focus(), byId("query").select()),
  n: () => moveMatch(1, true),
  N: () => moveMatch(-1, true),
  w: () => byId("app").classList.toggle("wide"),
  a: toggleAll,
  Enter: enter,
  "?": () => byId("help").showModal(),
};

function toggleAll() {
  state.all = !state.all;
  layRows();
}

// Scrolling one text moves the other; the element that leads is the one that the user moved last.
function together(one, other) {
  one.addEventListener("scroll", () => {
    if (other.scrollTop !== one.scrollTop) other.scrollTop = one.scrollTop;
    if (other.scrollLeft !== one.scrollLeft && Math.abs(other.scrollLeft - one.scrollLeft) > 1) other.scrollLeft = one.scrollLeft;
  });
}

const PRINTED = 1500;

function preparePrint() {
  const step = STEPS[state.step];
  const page = byId("print");
  page.replaceChildren(make("h1", "", `${DATA.title}: ${byId("facts").textContent}`));
  const passes = make("table");
  const line = (cells, tag) => {
    const row = make("tr");
    cells.forEach((text) => row.append(make(tag, "", text)));
    passes.append(row);
  };
  line(["", "pass", "rewritten", "rejected", "near", "nodes", "ms", "proof"], "th");
  STEPS.forEach((s, i) => i && line([s.index, s.name, s.matched, s.rejected.length, s.near_misses.length, s.nodes_after, Math.round(s.ms), proofText(s)], "td"));
  page.append(passes, make("h2", "", `${step.name}: ${byId("step-facts").textContent}`));
  for (const { node, module, source, reason } of [...step.rejected, ...step.near_misses]) page.append(make("p", "", `${node}, ${module}, ${source}: ${reason}`));
  const text = make("table", "text");
  const rows = isSingle() ? view.rows.slice(0, PRINTED) : view.shown.slice(0, PRINTED).map((item) => (typeof item === "object" ? item : view.rows[item]));
  for (const item of rows) {
    const row = make("tr");
    if (item.fold !== undefined) row.append(Object.assign(make("td", "", `⋯ ${item.count} unchanged lines`), { colSpan: 2 }));
    else {
      const cell = (index, at, kind) => make("td", index < 0 ? "" : kind, index < 0 ? "" : LINES[textOf(at).ids[index]]);
      if (!isSingle()) row.append(cell(item.l, state.step - 1, item.kind === "both" ? "del" : item.kind));
      row.append(cell(item.r, state.step, item.kind === "both" ? "add" : item.kind));
    }
    text.append(row);
  }
  page.append(text);
}

function start() {
  byId("model").textContent = DATA.title;
  byId("facts").textContent = DATA.facts.join("  ·  ");
  byId("totals").textContent = DATA.totals;
  if (DATA.error) {
    byId("error").hidden = false;
    byId("error").textContent = `${DATA.error.step} failed: ${DATA.error.message}`;
  }
  together(left.element, right.element);
  together(right.element, left.element);
  byId("query").addEventListener("input", (event) => search(event.target.value));
  byId("find").addEventListener("submit", (event) => event.preventDefault());
  byId("next").addEventListener("click", () => moveMatch(1, true));
  byId("previous").addEventListener("click", () => moveMatch(-1, true));
  byId("wide").addEventListener("click", () => byId("app").classList.toggle("wide"));
  byId("unfold").addEventListener("click", toggleAll);
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("layer").addEventListener("change", (event) => ((state.layer = event.target.value), paintGraph(), remember()));
  for (const tab of TABS) byId("tab-" + tab).addEventListener("click", () => chooseTab(tab));
  document.addEventListener("keydown", onKey);
  window.addEventListener("beforeprint", preparePrint);
  const asked = new URLSearchParams(location.hash.slice(1));
  state.tab = TABS.includes(asked.get("view")) ? asked.get("view") : "diff";
  state.layer = asked.get("layer") || "";
  const failed = STEPS.findIndex((step) => step.failed);
  const first = failed > 0 ? failed : Math.max(0, STEPS.findIndex((step, i) => i && step.matched && step.edits.length));
  chooseStep(asked.has("step") ? Number(asked.get("step")) || 0 : first);
  byId("steps").focus({ preventScroll: true });
}

start();
