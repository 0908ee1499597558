// What a pass left alone, with its reasons, and what it noted.
function paintRefused() {
  const step = STEPS[state.step];
  const panel = byId("panel-refused");
  const many = step.rejected.length + step.near_misses.length;
  byId("refused-count").textContent = many ? `(${many})` : "";
  panel.replaceChildren();
  if (step.failed) panel.append(make("h3", "bad", "Failed"), make("p", "", DATA.error.message));
  refusals(panel, "Rejected: the pattern fits, and the rewrite would not be right", step.rejected);
  refusals(panel, "Near misses: most of the pattern fits", step.near_misses);
  if (!many && !step.failed) panel.append(make("p", "empty", state.step ? "This pass rejected nothing and nearly matched nothing." : "No pass has run yet."));
  const notes = Object.entries(step.notes || {}).filter(([, value]) => value !== null && value !== "" && value !== 0);
  if (notes.length) {
    const list = make("dl", "notes");
    for (const [name, value] of notes) list.append(make("dt", "", name), make("dd", "", typeof value === "object" ? JSON.stringify(value) : String(value)));
    panel.append(make("h3", "", "Notes"), list);
  }
}

function refusals(panel, title, places) {
  if (!places.length) return;
  panel.append(make("h3", "", `${title} (${places.length})`));
  const reasons = new Map();
  for (const place of places) reasons.set(place.reason, [...(reasons.get(place.reason) || []), place]);
  for (const [reason, same] of reasons) {
    const box = make("div", "reason");
    box.append(make("p", "", same.length > 1 ? `${reason} (${same.length} places)` : reason));
    const table = make("table");
    for (const { node, module, source } of same) {
      const row = make("tr");
      const button = make("button", "", node);
      button.type = "button";
      button.addEventListener("click", () => showNamed(node));
      const cell = make("td");
      cell.append(button);
      row.append(cell, make("td", "", module), make("td", "", source));
      table.append(row);
    }
    box.append(table);
    panel.append(box);
  }
}

// The line of a node in the text after the step, or in the text before it.
function showNamed(name) {
  chooseTab("diff");
  const index = (step) => textOf(step).ids.findIndex((id) => parse(id).kind === "call" && parse(id).name === name);
  const after = index(state.step);
  const item = view.rows.findIndex((row) => (after >= 0 ? row.r === after : row.l === index(state.step - 1)));
  if (item >= 0) reveal(item);
}
