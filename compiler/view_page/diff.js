// Side by side: rows of two texts, unchanged runs folded, drawn only where they are seen.
const ROW = 20;
const CONTEXT = 3;

// [{l, r, kind}] for the change that a step made; l and r are indices into the two texts, -1 where there is none.
const rowsOfStep = [];
function rowsOf(step) {
  if (rowsOfStep[step]) return rowsOfStep[step];
  const before = textOf(step - 1).ids;
  const after = textOf(step).ids;
  const rows = [];
  if (step === 0 || !STEPS[step].edits.length) {
    after.forEach((_, i) => rows.push({ l: -1, r: i, kind: "same" }));
    return (rowsOfStep[step] = rows);
  }
  let l = 0;
  let r = 0;
  const same = (until) => {
    while (l < until) rows.push({ l: l++, r: r++, kind: "same" });
  };
  for (const [start, removed, added] of STEPS[step].edits) {
    same(start);
    pairUp(before, l, l + removed, after, r, r + added.length, rows);
    l += removed;
    r += added.length;
  }
  same(before.length);
  return (rowsOfStep[step] = rows);
}

// Lines of one replaced region: those that define the same name stand beside each other.
function pairUp(before, l, lEnd, after, r, rEnd, rows) {
  const places = new Map();
  for (let j = r; j < rEnd; j++) places.set(parse(after[j]).key, j);
  const flush = (lTo, rTo) => {
    while (l < lTo || r < rTo) {
      const left = l < lTo ? l++ : -1;
      const right = r < rTo ? r++ : -1;
      rows.push({ l: left, r: right, kind: left < 0 ? "add" : right < 0 ? "del" : "both" });
    }
  };
  for (let i = l; i < lEnd; i++) {
    const mate = places.get(parse(before[i]).key);
    if (mate === undefined || mate < r) continue;
    flush(i, mate);
    rows.push({ l: l++, r: r++, kind: before[i] === after[mate] ? "same" : "mod" });
  }
  flush(lEnd, rEnd);
}

// What is on the screen of a row list: rows, and folds of runs that did not change.
function folded(rows, opened, all) {
  const shown = [];
  let i = 0;
  while (i < rows.length) {
    let end = i;
    while (end < rows.length && rows[end].kind === "same") end++;
    const from = i ? i + CONTEXT : 0;
    const to = end < rows.length ? end - CONTEXT : end;
    const folds = to - from > 2 && end - i < rows.length && !all && !opened.has(i);
    for (let k = i; k < end; k++) {
      if (folds && k >= from && k < to) {
        if (k === from) shown.push({ fold: i, from, count: to - from });
      } else {
        shown.push(k);
      }
    }
    if (end < rows.length) shown.push(end++);
    i = end;
  }
  return shown;
}

// Text of a line as pieces with classes: the name, the op in its family's colour, the type.
function pieces(id) {
  const text = LINES[id];
  const line = parse(id);
  if (line.kind === "origin") {
    const path = "    # ".length + line.path.length;
    return [["    ", "indent"], [text.slice(4, path), "p"], [text.slice(path), "o"]];
  }
  if (line.kind === "call") {
    return [
      ["    ", "indent"], [line.name, "d"], [" = ", ""], [line.op, "f-" + familyOf(line.op)], ["(" + line.args + ")", ""],
      ["  # " + line.type, "t"],
    ];
  }
  const rest = [text.replace(/^ {4}/, ""), line.kind === "weight" ? "w" : ""];
  return text.startsWith("    ") ? [["    ", "indent"], rest] : [rest];
}

// Marks [start, end, class] are laid over the pieces.
function writeLine(element, id, marks) {
  let at = 0;
  for (const [text, className] of pieces(id)) {
    const end = at + text.length;
    const cuts = new Set([at, end]);
    for (const [from, to] of marks) {
      if (from > at && from < end) cuts.add(from);
      if (to > at && to < end) cuts.add(to);
    }
    const sorted = [...cuts].sort((a, b) => a - b);
    for (let k = 0; k + 1 < sorted.length; k++) {
      const part = text.slice(sorted[k] - at, sorted[k + 1] - at);
      const over = marks.filter(([from, to]) => from <= sorted[k] && sorted[k + 1] <= to).map((mark) => mark[2]);
      const isHit = over.some((name) => name === "hit" || name === "now");
      const span = make(isHit ? "mark" : "span", [className, ...over].filter(Boolean).join(" "), part);
      element.append(span);
    }
    at = end;
  }
}

// Where two lines differ: what is left without their common beginning and end.
function middle(a, b) {
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  // Whole words: a half is hard to read.
  while (head && /\w/.test(a[head - 1])) head--;
  while (tail && /\w/.test(a[a.length - tail])) tail--;
  return [head, a.length - tail, b.length - tail];
}

// A scrolling list of rows of equal height, of which only those in sight exist.
class Pane {
  constructor(element, draw) {
    this.element = element;
    this.draw = draw;
    this.count = 0;
    this.sizer = make("div", "sizer");
    element.append(this.sizer);
    element.addEventListener("scroll", () => this.paint());
    new ResizeObserver(() => this.paint(true)).observe(element);
  }

  set(count, characters) {
    this.count = count;
    this.sizer.style.height = count * ROW + "px";
    this.sizer.style.width = `calc(${characters}ch + 84px)`;
    this.paint(true);
  }

  paint(anew) {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW) - 8);
    const last = Math.min(this.count, Math.ceil((this.element.scrollTop + this.element.clientHeight) / ROW) + 8);
    if (!anew && first === this.first && last === this.last) return;
    this.first = first;
    this.last = last;
    const rows = [];
    for (let i = first; i < last; i++) {
      const row = this.draw(i);
      row.style.top = i * ROW + "px";
      rows.push(row);
    }
    this.sizer.replaceChildren(...rows);
  }

  show(index) {
    const top = index * ROW;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop + ROW || top > scrollTop + clientHeight - 3 * ROW) {
      this.element.scrollTop = Math.max(0, top - clientHeight / 3);
    }
    this.paint(true);
  }
}

function textRow(kind, line, id, marks) {
  const row = make("div", "row " + kind);
  if (id === undefined) return row;
  row.append(make("span", "no", String(line)));
  writeLine(row, id, marks);
  return row;
}
