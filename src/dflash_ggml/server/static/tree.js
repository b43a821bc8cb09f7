// Draws one decoding step: the candidate tree, left to right by depth, the accepted path in one row.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 22, HEIGHT = 18, GAP = 14, CHAR = 6.6, LONGEST = 12;
const PADDING = 10; // of the box, pixels
const OFFERED_BY = ["", ", drafted", ", prompt lookup", ", drafted and prompt lookup"]; // bits: 1 a draft model, 2 prompt lookup
const SMALLEST = 0.85, LARGEST = 1.5; // a tree is scaled to fill its box between these; a wider or taller one scrolls

function element(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent?.append(node);
  return node;
}

/** A token's text with its white space made visible. */
export function visible(text) {
  const shown = text.replace(/ {4,}/g, (run) => `␣${run.length}`).replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
}

/** The step with the model's own token, if it gave one, as one more node: the child of the last accepted one. */
function withBonus(step) {
  if (step.emitted.length < Math.max(1, step.path.length)) return { ...step, bonus: -1 }; // cut inside the path
  return {
    ...step,
    bonus: step.tokens.length,
    tokens: [...step.tokens, -1],
    parents: [...step.parents, step.path.at(-1) ?? -1], // a step without a draft has no other node
    texts: [...step.texts, step.emitted.at(-1)],
    log_probs: [...step.log_probs, 0],
    path: [...step.path, step.tokens.length],
  };
}

/** Depth and row of every node; `spine` is the row of the accepted path.
 *
 * A node's first child (the accepted one, else the most probable) goes on in its row. The others go above or below,
 * as near as what is already there in the columns that they need allows: short branches lie close to their parent,
 * beside longer ones, and no two edges cross.
 */
export function layout(step) {
  const kept = new Set(step.path);
  const children = step.tokens.map(() => []);
  const depth = step.tokens.map(() => 0);
  step.parents.forEach((parent, node) => {
    if (parent < 0) return;
    children[parent].push(node);
    depth[node] = depth[parent] + 1;
  });
  const order = (a, b) => kept.has(b) - kept.has(a) || step.log_probs[b] - step.log_probs[a];
  const low = [], high = [], shift = step.tokens.map(() => 0); // low, high: of a node's subtree, by depth below the node
  for (let node = step.tokens.length - 1; node >= 0; node -= 1) { // parents come before their children
    const [first, ...others] = children[node].sort(order);
    low[node] = [0, ...(first === undefined ? [] : low[first])];
    high[node] = [0, ...(first === undefined ? [] : high[first])];
    others.sort((a, b) => low[a].length - low[b].length);
    for (const child of others) place(low[node], high[node], low[child], high[child], (by) => { shift[child] = by; });
  }
  const row = step.tokens.map(() => 0);
  step.parents.forEach((parent, node) => {
    if (parent >= 0) row[node] = row[parent] + shift[node];
  });
  const top = Math.min(...row);
  return { depth, row: row.map((r) => r - top), spine: -top };
}

/** Puts a child's subtree above or below the others of its parent and widens their outline by it. */
function place(low, high, childLow, childHigh, shifted) {
  let below = 0, above = 0;
  childLow.forEach((_, i) => {
    if (low[i + 1] === undefined) return;
    below = Math.max(below, high[i + 1] - childLow[i] + 1);
    above = Math.min(above, low[i + 1] - childHigh[i] - 1);
  });
  const by = below <= -above ? below : above;
  childLow.forEach((_, i) => {
    low[i + 1] = Math.min(low[i + 1] ?? Infinity, childLow[i] + by);
    high[i + 1] = Math.max(high[i + 1] ?? -Infinity, childHigh[i] + by);
  });
  shifted(by);
}

function label(parent, x, y, width, text, kind, title, opacity) {
  const group = element("g", { class: `node ${kind}`, opacity }, parent);
  element("title", {}, group).textContent = title;
  element("rect", { x, y, width, height: HEIGHT, rx: 4 }, group);
  element("text", { x: x + width / 2, y: y + 12.8, "text-anchor": "middle" }, group).textContent = text;
}

function edge(parent, x1, y1, x2, y2, kind) {
  const middle = (x1 + x2) / 2;
  const path = y1 === y2 ? `M${x1} ${y1}H${x2}` : `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  element("path", { class: `edge ${kind}`, d: path }, parent);
}

function describe(step, node) {
  if (node === step.bonus) return `${JSON.stringify(step.texts[node])}: chosen by the model itself`;
  if (node === 0) return "root: the last token of the step before";
  const by = OFFERED_BY[step.sources?.[node]] ?? "";
  return `${JSON.stringify(step.texts[node])}: path probability ${(100 * Math.exp(step.log_probs[node])).toFixed(1)}%${by}`;
}

/** Replace the content of `box` by the drawing of `taken`. */
export function draw(box, taken) {
  box.replaceChildren();
  const step = withBonus(taken);
  if (!step.tokens.length) return;
  const { depth, row, spine } = layout(step);
  const kept = new Set(step.path);
  const texts = step.texts.map(visible);
  const kinds = texts.map((_, node) => (node === step.bonus ? "bonus" : kept.has(node) ? "kept" : "rejected"));
  const widths = [];
  texts.forEach((text, node) => {
    widths[depth[node]] = Math.max(widths[depth[node]] ?? 0, text.length * CHAR + 10);
  });
  const left = [0];
  widths.forEach((width, i) => left.push(left[i] + width + GAP));
  const width = left.at(-1) - GAP + 2, height = (Math.max(...row) + 1) * ROW;
  const svg = element("svg", {
    viewBox: `-1 -1 ${width} ${height}`, role: "img",
    "aria-label": `${Math.max(0, taken.tokens.length - 1)} candidates, ${step.accepted} accepted`,
  }, box); // an empty box is not shown and has no size
  const room = box.clientHeight - 2 * PADDING;
  const scale = Math.max(SMALLEST, Math.min(LARGEST, (box.clientWidth - 2 * PADDING) / width, Math.max(1, room / height)));
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
  const middle = (node) => row[node] * ROW + HEIGHT / 2;
  step.parents.forEach((parent, node) => {
    if (parent < 0) return;
    const from = left[depth[parent]] + widths[depth[parent]];
    edge(svg, from, middle(parent), left[depth[node]], middle(node), kinds[node]);
  });
  texts.forEach((text, node) => {
    const opacity = kinds[node] === "rejected" ? Math.max(0.8, Math.exp(step.log_probs[node] / 3)) : 1;
    const at = [left[depth[node]], row[node] * ROW, widths[depth[node]]];
    const kind = step.sources?.[node] & 2 && node !== step.bonus ? `${kinds[node]} lookup` : kinds[node];
    label(svg, ...at, text, kind, describe(step, node), opacity);
  });
  // the accepted path stays in the middle from step to step, as far as there is room
  const at = room / 2 - (spine + 0.5) * ROW * scale;
  svg.style.marginTop = `${Math.max(0, Math.min(at, room - height * scale))}px`;
  box.scrollTop = -at;
}
