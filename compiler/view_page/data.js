// The dump: texts as lists of line numbers into one table, each step as edits of the text before it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const LINES = DATA.lines;
const STEPS = DATA.steps;

const CALL = /^ {4}(\w+) = ([\w.]+)\((.*)\) {2}# (.*)$/;
const ORIGIN = /^ {4}# (.*)$/;
const PLACE = /^(?:(.*?) \| )?(\S+:\d+)(?: {2}(.*))?$/;
const WEIGHT = /^ {4}"((?:[^"\\]|\\.)*)": "(.*)",$/;
const INPUT = /^ {4}(\w+): "(.*)",$/;

// Families by the words of an op's name; the first that fits gives the colour.
const FAMILIES = [
  ["attention", /attention|softmax|scaled_dot/],
  ["memory", /kv_write|latent_write|embedding|gather|index|scatter|slot|cache/],
  ["norm", /norm|rsqrt|mean|var/],
  ["linear", /linear|(^|\.)(mm|bmm|matmul|addmm|einsum|moe|router)(\.|$)/],
  ["position", /rope|cos|sin|arange|position/],
  ["layout", /view|reshape|transpose|permute|expand|slice|select|split|chunk|cat|stack|squeeze|getitem|clone|contiguous|copy|alias|size/],
  ["elementwise", /add|mul|sub|div|pow|neg|silu|gelu|tanh|sigmoid|relu|exp|where|pointwise|act|scalar|full|zeros|ones|mask|l[et]\.|g[et]\./],
];

function familyOf(op) {
  const found = FAMILIES.find(([, words]) => words.test(op.replace(/^(aten|octavo|operator|torch)\./, "")));
  return found ? found[0] : "other";
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

const byId = (id) => document.getElementById(id);

// What a line is; every line of the table is looked at once.
const parsed = new Map();
function parse(id) {
  if (!parsed.has(id)) parsed.set(id, parseLine(LINES[id]));
  return parsed.get(id);
}

function parseLine(text) {
  let found = CALL.exec(text);
  if (found) return { kind: "call", name: found[1], op: found[2], args: found[3], type: found[4], key: found[1] };
  found = ORIGIN.exec(text);
  if (found) {
    const place = PLACE.exec(found[1]);
    const known = found[1] !== "no source";
    return {
      kind: "origin", path: place ? place[1] || "" : known ? found[1] : "", source: place ? place[2] : "",
      code: place ? place[3] || "" : "", key: "#" + found[1],
    };
  }
  found = WEIGHT.exec(text);
  if (found) return { kind: "weight", name: found[1], type: found[2], key: '"' + found[1] };
  found = INPUT.exec(text);
  if (found) return { kind: "input", name: found[1], type: found[2], key: found[1] };
  return { kind: "other", key: text };
}

const NO_ORIGIN = { path: "", source: "", code: "" };

// Text after a step: its lines, and where each of them comes from.
const texts = [];
function textOf(step) {
  if (step < 0) return { ids: [], origins: [] };
  if (!texts[step]) {
    if (step && !STEPS[step].edits.length) {
      texts[step] = textOf(step - 1);
    } else {
      const before = textOf(step - 1).ids;
      const ids = [];
      let at = 0;
      for (const [start, removed, added] of STEPS[step].edits) {
        for (; at < start; at++) ids.push(before[at]);
        for (const id of added) ids.push(id);
        at += removed;
      }
      for (; at < before.length; at++) ids.push(before[at]);
      let current = NO_ORIGIN;
      const origins = ids.map((id) => {
        const line = parse(id);
        if (line.kind === "origin") current = line;
        return line.kind === "call" || line.kind === "origin" ? current : NO_ORIGIN;
      });
      texts[step] = { ids, origins };
    }
  }
  return texts[step];
}

// Nodes of the graph after a step: name -> what the text says of it.
function graphOf(step) {
  const text = textOf(step);
  if (!text.nodes) {
    const nodes = new Map();
    text.ids.forEach((id, index) => {
      const line = parse(id);
      if (line.kind === "input") {
        nodes.set(line.name, { ...line, op: "input", index, origin: NO_ORIGIN, uses: [], weights: [], family: "input" });
      } else if (line.kind === "call") {
        const weights = [];
        const rest = line.args.replace(/w\["((?:[^"\\]|\\.)*)"\]/g, (_, name) => (weights.push(name), " "));
        const words = rest.replace(/"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'/g, " ").match(/[A-Za-z_]\w*/g) || [];
        const uses = [...new Set(words.filter((word) => nodes.has(word)))];
        nodes.set(line.name, { ...line, index, origin: text.origins[index], uses, weights, family: familyOf(line.op) });
      }
    });
    text.nodes = nodes;
  }
  return text.nodes;
}

function shortOp(op) {
  const parts = op.split(".");
  return parts.length > 2 ? parts[1] : parts[parts.length - 1];
}

function number(value) {
  return value >= 1e-2 && value < 1e4 ? String(Math.round(value * 1000) / 1000) : value.toExponential(1);
}

function milliseconds(ms) {
  return ms >= 1000 ? (ms / 1000).toFixed(1) + " s" : Math.round(ms) + " ms";
}

function proofText(step) {
  if (!step.proof || !step.proof.sites) return "";
  const { sites, worst_error: error, error_bound: bound } = step.proof;
  const limit = bound ? `error ${number(error)} of ${number(bound)} allowed` : "bit for bit";
  return `${sites} distinct ${sites === 1 ? "site" : "sites"} proven, ${limit}`;
}
