// Draws one round's draft tree as SVG: depth to the right, and on top the drafter's favourite line.

const SVG = "http://www.w3.org/2000/svg";
const FONT = "12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const BOX = 22; // height of a node
const ROW = 29; // from one node to the next below it
const DENSE_ROW = 24; // the same in a large tree
const LARGE = 48; // nodes
const GAP = 34; // between columns, for the edges
const PAD = 8; // beside a node's text
const MARGIN = 10;
const SMALLEST_SCALE = 0.78; // below it the texts cannot be read; the drawing scrolls instead
const LONGEST_LABEL = 14;
const SIGNS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u200b": "¦" };

const ruler = document.createElement("canvas").getContext("2d");

/** A token's text with white space and control characters made visible. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replace(/[\s\p{C}]/gu, (sign) => SIGNS[sign] ?? `\\u${sign.codePointAt(0).toString(16)}`);
}

/** A probability as a reader wants it. */
export function percent(logProb) {
  const share = 100 * Math.exp(logProb);
  return share < 0.95 ? "<1%" : `${Math.round(share)}%`;
}

/**
 * What a round says about itself, worked out once.
 *
 * `bonus` is the text of the target's own next token; `chainKept` counts the tokens that the chain of likeliest
 * drafts would have kept, and is null where the tree does not tell.
 */
export function explain(round) {
  const path = round.accept_indices;
  const drafts = path.slice(1).map((node) => round.nodes[node].text).join("");
  // Parts of a character decode differently apart: then the texts do not line up and the bonus stays unnamed.
  const bonus = round.accept_text.startsWith(drafts) ? round.accept_text.slice(drafts.length) : "…";
  return { bonus, kept: path.length, chainKept: chainKept(round) };
}

function chainKept(round) {
  const favourite = new Map(); // parents come first and siblings in order of probability
  round.nodes.forEach((node, index) => {
    if (index > 0 && !favourite.has(node.parent)) favourite.set(node.parent, index);
  });
  const path = round.accept_indices;
  for (let step = 1; step < path.length; step += 1) {
    if (favourite.get(path[step - 1]) !== path[step]) return step;
  }
  return favourite.has(path.at(-1)) ? path.length : null; // the chain may go on where the tree ends
}

/**
 * Places nodes: `depths[i]` is the column, `rows[i]` the row.
 *
 * Each column is filled downwards in the order of a depth-first walk, a child never above its parent. So no two nodes
 * share a place, edges do not cross, and the drawing is hardly taller than the widest level. Siblings stand in order of
 * probability, but `first` nodes before the others, and the last node, which is the target's own, second: beside the
 * path, and not in the way of the favourite line.
 */
export function place(parents, first = new Set()) {
  const children = parents.map(() => []);
  const depths = parents.map(() => 0);
  for (let node = 1; node < parents.length; node += 1) {
    children[parents[node]].push(node);
    depths[node] = depths[parents[node]] + 1;
  }
  const siblings = children[parents.at(-1)];
  if (siblings?.length > 2) siblings.splice(1, 0, siblings.pop());
  for (const list of children) list.sort((a, b) => first.has(b) - first.has(a));
  const rows = parents.map(() => 0);
  const free = depths.map(() => 0);
  const waiting = [0];
  while (waiting.length) {
    const node = waiting.pop();
    const above = node === 0 ? 0 : rows[parents[node]];
    rows[node] = Math.max(above, free[depths[node]]);
    free[depths[node]] = rows[node] + 1;
    waiting.push(...children[node].reverse());
  }
  return { depths, rows };
}

/** Replaces what `container` shows by the round's tree. */
export function draw(container, round) {
  const nodes = labelled(round);
  // In a large tree the path could leave the frame; there it is the top line, whatever the drafter preferred.
  const isLarge = nodes.length > LARGE;
  const path = nodes.filter((node) => node.kind === "path" || node.kind === "bonus").map((node) => node.index);
  const { depths, rows } = place(nodes.map((node) => node.parent), new Set(isLarge ? path : []));
  const columns = columnsOf(nodes, depths);
  const pitch = isLarge ? DENSE_ROW : ROW;
  nodes.forEach((node, index) => {
    node.x = columns[depths[index]].x;
    node.y = MARGIN + rows[index] * pitch;
  });
  const last = columns.at(-1);
  const size = { width: last.x + last.width + MARGIN, height: Math.max(...rows) * pitch + BOX + 2 * MARGIN };
  const svg = make("svg", { viewBox: `0 0 ${size.width} ${size.height}`, role: "img" });
  svg.setAttribute("aria-label", describe(round));
  const scale = Math.min(1, Math.max(SMALLEST_SCALE, (container.clientWidth - 4) / size.width));
  svg.setAttribute("width", Math.floor(size.width * scale));
  svg.setAttribute("height", Math.floor(size.height * scale));
  // The path's edges come last, over the others.
  const edges = nodes.slice(1).sort((a, b) => Number(a.kind !== "draft") - Number(b.kind !== "draft"));
  for (const node of edges) svg.append(edge(nodes[node.parent], node));
  for (const node of nodes) svg.append(box(node));
  container.replaceChildren(svg);
  reveal(container, nodes.at(-1), scale);
}

// Scrolls to the end of the path where the tree is larger than its frame.
function reveal(container, end, scale) {
  container.scrollTop = Math.max(0, (end.y + BOX + 4 * MARGIN) * scale - container.clientHeight);
  container.scrollLeft = Math.max(0, (end.x + end.width + 4 * MARGIN) * scale - container.clientWidth);
}

function labelled(round) {
  const path = new Set(round.accept_indices);
  const { bonus } = explain(round);
  const nodes = round.nodes.map((node, index) => ({
    index,
    text: visible(node.text),
    parent: node.parent,
    probability: Math.exp(node.log_prob),
    share: index === 0 ? "" : percent(node.log_prob),
    kind: index === 0 ? "root" : path.has(index) ? "path" : "draft",
  }));
  const end = round.accept_indices.at(-1);
  nodes.push({ index: nodes.length, text: visible(bonus), parent: end, probability: 1, share: "", kind: "bonus" });
  for (const node of nodes) measure(node);
  return nodes;
}

function measure(node) {
  const letters = [...node.text];
  node.label = letters.length > LONGEST_LABEL ? `${letters.slice(0, LONGEST_LABEL - 1).join("")}…` : node.text;
  ruler.font = FONT;
  node.textWidth = ruler.measureText(node.label).width;
  const share = node.share ? 6 + 0.84 * ruler.measureText(node.share).width : 0;
  node.width = Math.max(BOX, Math.ceil(node.textWidth + share + 2 * PAD));
}

function columnsOf(nodes, depths) {
  const columns = [];
  nodes.forEach((node, index) => {
    columns[depths[index]] ??= { x: 0, width: 0 };
    columns[depths[index]].width = Math.max(columns[depths[index]].width, node.width);
  });
  let x = MARGIN;
  for (const column of columns) {
    column.x = x;
    x += column.width + GAP;
  }
  return columns;
}

function make(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function edge(parent, node) {
  const [x1, y1] = [parent.x + parent.width, parent.y + BOX / 2];
  const [x2, y2] = [node.x, node.y + BOX / 2];
  // Straight to the end of the parent's column, then the bend within the gap, where no node stands.
  const start = Math.max(x1, x2 - GAP);
  const middle = (start + x2) / 2;
  return make("path", {
    class: `edge ${node.kind}`,
    d: `M${x1} ${y1}H${start}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
    "stroke-width": node.kind === "draft" ? (1 + 4 * node.probability).toFixed(2) : 3,
  });
}

function box(node) {
  const group = make("g", { class: `node ${node.kind}`, transform: `translate(${node.x} ${node.y})` });
  group.dataset.node = node.index;
  const fill = node.kind === "draft" ? { "fill-opacity": (0.05 + 0.65 * Math.sqrt(node.probability)).toFixed(3) } : {};
  group.append(make("rect", { width: node.width, height: BOX, rx: 6, ...fill }));
  const left = node.share ? PAD : (node.width - node.textWidth) / 2;
  const label = make("text", { x: left, y: 15.5, "xml:space": "preserve" });
  label.textContent = node.label;
  group.append(label);
  if (node.share) {
    const share = make("text", { class: "share", x: node.width - PAD, y: 15, "text-anchor": "end" });
    share.textContent = node.share;
    group.append(share);
  }
  const title = make("title", {});
  title.textContent = { root: "root: ", path: "kept: ", bonus: "the target's own next token: ", draft: "" }[node.kind]
    + node.text + (node.share ? ` (${(100 * node.probability).toPrecision(3)} %)` : "");
  group.append(title);
  return group;
}

/** One round in words. */
export function describe(round) {
  const { kept, chainKept: chain } = explain(round);
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  if (round.mode === "ar") return "No draft in this round: the target wrote one token.";
  const drafts = plural(round.nodes.length - 1, "drafted token");
  const words = [`Kept ${kept - 1} of ${drafts}, and one token of the target's own.`];
  if (round.mode === "tree" && chain !== null && chain < kept) {
    words.push(`The chain of likeliest drafts would have kept ${chain - 1}.`);
  }
  return words.join(" ");
}
