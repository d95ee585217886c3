// Draws one round's draft tree as SVG: depth to the right, siblings best first from above.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const TREE = {
  row: 30, // from one node to the next below it, in pixels
  denseRow: 25, // the same in a tree of more than `large` nodes
  large: 64,
  gap: 36, // between columns, for the edges
  pad: 7, // beside a node's text
  margin: 12,
  smallestScale: 0.8, // below it texts cannot be read; the drawing scrolls instead
  longestLabel: 15, // characters
};
const SIGNS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
const MARKS = { root: "● ", path: "✓ ", bonus: "◆ ", wrong: "" };

const ruler = document.createElement("canvas").getContext("2d");

/** A token's text with white space, control and direction characters made visible. */
function visible(text) {
  if (text === "") return "∅";
  return text.replace(/[\s\p{C}]/gu, (sign) => SIGNS[sign] ?? `\\u${sign.codePointAt(0).toString(16)}`);
}

/** A probability as a reader wants it; "" where it is not known. */
function percent(logProb) {
  if (logProb === null || logProb === undefined) return "";
  const share = 100 * Math.exp(logProb);
  if (share < 0.1) return "<0.1%";
  return `${share < 9.95 ? share.toFixed(1) : Math.round(share)}%`;
}

const probability = (logProb) => (logProb === null ? 0 : Math.exp(logProb));

/** The nodes of a round's tree, and behind them the bonus token: where they hang, how likely, whether committed. */
function nodesOf(round) {
  const path = new Set(round.accept_indices);
  const counts = new Map(); // children so far
  const nodes = round.tokens.map((token, index) => {
    const parent = round.parents[index];
    counts.set(parent, (counts.get(parent) ?? 0) + 1);
    const [logProb, above] = [round.log_probs[index], parent < 0 ? 0 : round.log_probs[parent]];
    return {
      index,
      token,
      parent,
      logProb,
      given: logProb === null || above === null ? null : logProb - above,
      rank: counts.get(parent),
      kind: index === 0 ? "root" : path.has(index) ? "path" : "wrong",
    };
  });
  if (round.accept_tokens.length) {
    const [token, parent] = [round.accept_tokens.at(-1), round.accept_indices.at(-1)];
    nodes.push({ index: nodes.length, token, parent, logProb: null, given: null, rank: 0, kind: "bonus" });
  }
  nodes.forEach((node) => { node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1; });
  return nodes;
}

/**
 * Places nodes: returns the row of each; its depth is its column.
 *
 * Each column is filled downwards in the order of a depth-first walk, a child never above its parent. So no two nodes
 * share a place, edges do not cross, and the drawing is hardly taller than its widest level. Siblings stand in their
 * order, but `first` before all others.
 */
function place(parents, first = -1) {
  const children = parents.map(() => []);
  const depths = parents.map(() => 0);
  parents.forEach((parent, node) => {
    if (parent < 0) return;
    if (node === first) children[parent].unshift(node);
    else children[parent].push(node);
    depths[node] = depths[parent] + 1;
  });
  const rows = parents.map(() => 0);
  const free = parents.map(() => 0); // the first free row of each column
  const waiting = [0];
  while (waiting.length) {
    const node = waiting.pop();
    rows[node] = Math.max(parents[node] < 0 ? 0 : rows[parents[node]], free[depths[node]]);
    free[depths[node]] = rows[node] + 1;
    waiting.push(...children[node].reverse());
  }
  return rows;
}

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const advances = new Map(); // of a character, by font size

/** The width of a label in pixels; every printable ASCII character is as wide as any other. */
function widthOf(label, fontSize) {
  const isKnown = /^[ -~·]*$/.test(label) && advances.has(fontSize);
  if (isKnown) return label.length * advances.get(fontSize);
  ruler.font = `600 ${fontSize}px ${MONO}`;
  if (!advances.has(fontSize)) advances.set(fontSize, ruler.measureText("0").width);
  return ruler.measureText(label).width;
}

function measure(node, textOf) {
  const letters = [...visible(textOf(node.token))];
  const cut = letters.length > TREE.longestLabel ? [...letters.slice(0, TREE.longestLabel - 1), "…"] : letters;
  node.label = MARKS[node.kind] + cut.join("");
  const size = node.kind === "wrong" ? Math.sqrt(probability(node.logProb)) : 1;
  node.fontSize = Math.round(11 + 2 * size); // a new size costs the browser more than a node
  node.height = 19 + 5 * size;
  node.share = node.kind === "root" || node.kind === "bonus" ? "" : percent(node.logProb);
  const share = node.share ? TREE.pad + widthOf(node.share, 10) : 0;
  node.width = Math.max(22, Math.ceil(widthOf(node.label, node.fontSize) + share + 2 * TREE.pad));
}

function layOut(nodes) {
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const left = [TREE.margin];
  widths.forEach((width, depth) => { left[depth + 1] = left[depth] + width + TREE.gap; });
  const bonus = nodes.at(-1).kind === "bonus" ? nodes.length - 1 : -1; // goes on from the path in a straight line
  const rows = place(nodes.map((node) => node.parent), bonus);
  const pitch = nodes.length > TREE.large ? TREE.denseRow : TREE.row;
  nodes.forEach((node, index) => {
    node.x = left[node.depth];
    node.middle = TREE.margin + (rows[index] + 0.5) * pitch;
  });
  return {
    width: left.at(-1) - TREE.gap + TREE.margin,
    height: (Math.max(...rows) + 1) * pitch + 2 * TREE.margin,
  };
}

function edge(parent, node) {
  const [x1, y1, x2, y2] = [parent.x + parent.width, parent.middle, node.x, node.middle];
  // Straight to the end of the parent's column, then the bend within the gap, where no node stands.
  const start = Math.max(x1, x2 - TREE.gap);
  const bend = (start + x2) / 2;
  const made = make("path", { class: `edge ${node.kind}`, d: `M${x1} ${y1}H${start}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}` });
  if (node.kind === "wrong") made.setAttribute("stroke-width", (1 + 3 * probability(node.given)).toFixed(2));
  return made;
}

function box(node) {
  const group = make("g", {
    class: `node ${node.kind}`,
    transform: `translate(${node.x} ${node.middle - node.height / 2})`,
    role: "treeitem",
    "aria-level": node.depth + 1,
    "aria-label": node.words,
    tabindex: node.index === 0 ? 0 : -1,
  });
  group.dataset.node = node.index;
  const rect = make("rect", { width: node.width, height: node.height, rx: 6 });
  if (node.kind === "wrong") rect.setAttribute("fill-opacity", (0.04 + 0.6 * Math.sqrt(probability(node.logProb))).toFixed(3));
  const base = node.height / 2 + 0.35 * node.fontSize;
  const label = make("text", { x: TREE.pad, y: base, "font-size": node.fontSize, "xml:space": "preserve" }, node.label);
  group.append(make("title", {}, node.words), rect, label);
  // One text a node: a second one would double the browser's work.
  if (node.share) label.append(make("tspan", { class: "share", dx: TREE.pad, "font-size": 10 }, node.share));
  return group;
}

/**
 * Replaces what `container` shows by a tree.
 *
 * @param {object[]} nodes of `nodesOf`, each with its `words` for readers and tooltips
 * @param {(token: number) => string} textOf
 * @param {string} label of the whole drawing
 */
function drawTree(container, nodes, textOf, label) {
  for (const node of nodes) measure(node, textOf);
  const { width, height } = layOut(nodes);
  const scale = Math.min(1, Math.max(TREE.smallestScale, (container.clientWidth - 2) / width));
  const svg = make("svg", {
    viewBox: `0 0 ${width} ${height}`, width: Math.floor(width * scale), height: Math.floor(height * scale),
    role: "tree", "aria-label": label,
  });
  // Committed edges come last, over the others.
  const edges = nodes.slice(1).sort((a, b) => Number(a.kind !== "wrong") - Number(b.kind !== "wrong"));
  const lines = make("g", { "aria-hidden": "true" });
  lines.append(...edges.map((node) => edge(nodes[node.parent], node)));
  svg.append(lines, ...nodes.map(box));
  container.replaceChildren(svg);
  reveal(container, nodes.at(-1), scale);
}

// Scrolls to the end of the path where the tree is larger than its frame.
function reveal(container, end, scale) {
  container.scrollTop = Math.max(0, (end.middle + 60) * scale - container.clientHeight);
  container.scrollLeft = Math.max(0, (end.x + end.width + 48) * scale - container.clientWidth);
}

/** The node that an arrow key leads to from `node`; undefined where there is none. */
function neighbour(nodes, node, key) {
  const level = nodes.filter((other) => other.depth === node.depth).sort((a, b) => a.middle - b.middle);
  const at = level.indexOf(node);
  const children = nodes.filter((other) => other.parent === node.index);
  return {
    ArrowRight: children.find((child) => child.kind !== "wrong") ?? children[0],
    ArrowLeft: nodes[node.parent],
    ArrowUp: level[at - 1],
    ArrowDown: level[at + 1],
    Home: nodes[0],
    End: nodes.at(-1),
  }[key];
}
