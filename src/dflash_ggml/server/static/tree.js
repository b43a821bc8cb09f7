// Draws one decoding step: the candidate tree, left to right by depth, the accepted path on the top row.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 24, HEIGHT = 19, GAP = 16, CHAR = 6.7, LONGEST = 14;

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

/** The step with the model's own token as one more node, the child of the last accepted one. */
function withBonus(step) {
  const bonus = step.emitted.at(-1);
  if (bonus === undefined) return { ...step, bonus: -1 };
  return {
    ...step,
    bonus: step.tokens.length,
    tokens: [...step.tokens, -1],
    parents: [...step.parents, step.path.at(-1) ?? 0],
    texts: [...step.texts, bonus],
    log_probs: [...step.log_probs, 0],
    path: [...step.path, step.tokens.length],
  };
}

/** Depth and row of every node; children in order of probability, an accepted child first and on its parent's row. */
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
  children.forEach((list) => list.sort(order));
  const row = step.tokens.map(() => 0);
  let next = 0;
  const place = [[0, 0]];
  while (place.length) {
    const [node, inherit] = place.pop();
    row[node] = inherit < 0 ? next : inherit;
    next = Math.max(next, row[node] + 1);
    // the first child stays on its parent's row, the others open rows below all that was placed before them
    children[node].forEach((_, i, list) => {
      const child = list[list.length - 1 - i];
      place.push([child, child === list[0] ? row[node] : -1]);
    });
  }
  return { depth, row };
}

function label(parent, x, y, width, text, kind, title, opacity) {
  const group = element("g", { class: `node ${kind}`, opacity }, parent);
  element("title", {}, group).textContent = title;
  element("rect", { x, y, width, height: HEIGHT, rx: 4 }, group);
  element("text", { x: x + width / 2, y: y + 13.5, "text-anchor": "middle" }, group).textContent = text;
}

function edge(parent, x1, y1, x2, y2, kind) {
  const middle = (x1 + x2) / 2;
  const path = y1 === y2 ? `M${x1} ${y1}H${x2}` : `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  element("path", { class: `edge ${kind}`, d: path }, parent);
}

function describe(step, node) {
  if (node === step.bonus) return `${JSON.stringify(step.texts[node])}: chosen by the model after the path`;
  if (node === 0) return "root: the last token of the step before";
  return `${JSON.stringify(step.texts[node])}: path probability ${(100 * Math.exp(step.log_probs[node])).toFixed(1)}%`;
}

/** Replace the content of `box` by the drawing of `taken`. */
export function draw(box, taken) {
  box.replaceChildren();
  if (!taken.tokens.length) return;
  const step = withBonus(taken);
  const { depth, row } = layout(step);
  const kept = new Set(step.path);
  const texts = step.texts.map(visible);
  const kinds = texts.map((_, node) => (node === step.bonus ? "bonus" : kept.has(node) ? "kept" : "rejected"));
  const widths = [];
  texts.forEach((text, node) => {
    widths[depth[node]] = Math.max(widths[depth[node]] ?? 0, text.length * CHAR + 12);
  });
  const left = [0];
  widths.forEach((width, i) => left.push(left[i] + width + GAP));
  const svg = element("svg", {
    width: left.at(-1), height: (Math.max(...row) + 1) * ROW, role: "img",
    "aria-label": `${taken.tokens.length - 1} candidates, ${step.accepted} accepted`,
  }, box);
  const middle = (node) => row[node] * ROW + HEIGHT / 2;
  step.parents.forEach((parent, node) => {
    if (parent < 0) return;
    const from = left[depth[parent]] + widths[depth[parent]];
    edge(svg, from, middle(parent), left[depth[node]], middle(node), kinds[node]);
  });
  texts.forEach((text, node) => {
    const opacity = kinds[node] === "rejected" ? Math.max(0.7, Math.exp(step.log_probs[node] / 3)) : 1;
    const at = [left[depth[node]], row[node] * ROW, widths[depth[node]]];
    label(svg, ...at, text, kinds[node], describe(step, node), opacity);
  });
}
