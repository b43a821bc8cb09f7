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
  const shown = text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
}

/** Column (depth) and row of every node; children in order of probability, an accepted child first. */
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
    // the first child stays on its parent's row, the others open rows below all that was placed before
    children[node].forEach((_, i, list) => {
      const child = list[list.length - 1 - i];
      place.push([child, child === list[0] ? row[node] : -1]);
    });
  }
  return { depth, row, children };
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

/** Replace the content of `box` by the drawing of `step`. */
export function draw(box, step) {
  box.replaceChildren();
  if (!step.tokens.length) return;
  const { depth, row } = layout(step);
  const kept = new Set(step.path);
  const last = step.path.at(-1) ?? 0;
  const bonus = step.emitted.at(-1);
  const texts = step.texts.map(visible);
  const columns = [];
  const widen = (column, text) => {
    columns[column] = Math.max(columns[column] ?? 0, text.length * CHAR + 12);
  };
  texts.forEach((text, node) => widen(depth[node], text));
  const below = Math.max(...row) + 1;
  const bonusRow = step.parents.includes(last) ? below : row[last];
  if (bonus !== undefined) widen(depth[last] + 1, visible(bonus));
  const left = [0];
  columns.forEach((width, i) => left.push(left[i] + width + GAP));
  const svg = element("svg", {
    width: left.at(-1), height: (Math.max(below, bonusRow + 1)) * ROW, role: "img",
    "aria-label": `${step.tokens.length - 1} candidates, ${step.accepted} accepted`,
  }, box);
  const edges = element("g", {}, svg), nodes = element("g", {}, svg);
  const middle = (line) => line * ROW + HEIGHT / 2;
  step.parents.forEach((parent, node) => {
    if (parent < 0) return;
    const kind = kept.has(node) ? "kept" : "rejected";
    edge(edges, left[depth[parent]] + columns[depth[parent]], middle(row[parent]), left[depth[node]], middle(row[node]), kind);
  });
  texts.forEach((text, node) => {
    const kind = kept.has(node) ? "kept" : "rejected";
    const probability = Math.exp(step.log_probs[node]);
    const title = node ? `${JSON.stringify(step.texts[node])}: path probability ${(100 * probability).toFixed(1)}%` : "root: the token of the last step";
    const opacity = kind === "kept" ? 1 : Math.max(0.35, Math.sqrt(probability));
    label(nodes, left[depth[node]], row[node] * ROW, columns[depth[node]], text, kind, title, opacity);
  });
  if (bonus !== undefined) {
    const column = depth[last] + 1;
    edge(edges, left[depth[last]] + columns[depth[last]], middle(row[last]), left[column], middle(bonusRow), "bonus");
    label(nodes, left[column], bonusRow * ROW, columns[column], visible(bonus), "bonus", `${JSON.stringify(bonus)}: chosen by the model after the path`, 1);
  }
}
