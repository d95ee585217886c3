// The page of a trace: requests to pick, rounds to step through, and what each round did.

const PLAY_MS = 900;
const CHART = { height: 92, left: 26, right: 8, top: 8, bottom: 6 };
// Characters that turn the direction of the text around them, and control characters but line feed and tab.
const UNRULY = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const STAGE_ORDER = ["prefill", "draft", "build", "verify", "accept", "commit"];

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const textOf = (token) => data.texts[token] ?? `#${token}`;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const tame = (text) => text.replace(UNRULY, visible);

const state = { request: null, at: 0, timer: 0, nodes: [], means: [], shownRequests: [] };

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// -- the chart -------------------------------------------------------------------------------------

/** Bars of accept length over rounds, and the running mean as a line. */
function drawChart() {
  const [chart, rounds] = [byId("chart"), state.request.rounds];
  const width = Math.max(120, chart.clientWidth);
  const highest = rounds.reduce((most, round) => Math.max(most, round.accept_tokens.length), 2);
  const step = (width - CHART.left - CHART.right) / Math.max(1, rounds.length);
  const up = (value) => CHART.height - CHART.bottom - (value / highest) * (CHART.height - CHART.top - CHART.bottom);
  chart.setAttribute("viewBox", `0 0 ${width} ${CHART.height}`);
  const parts = [...new Set([0, Math.round(highest / 2), highest])].flatMap((value) => [
    make("line", { class: "grid", x1: CHART.left, x2: width - CHART.right, y1: up(value), y2: up(value) }),
    make("text", { x: CHART.left - 6, y: up(value) + 4, "text-anchor": "end" }, String(value)),
  ]);
  const gap = step > 4 ? Math.min(0.15 * step, 4) : 0;
  rounds.forEach((round, index) => {
    const count = round.accept_tokens.length;
    const bar = make("rect", {
      class: "bar", x: CHART.left + index * step + gap / 2, width: Math.min(step - gap, 40), y: up(count), height: up(0) - up(count),
    });
    bar.append(make("title", {}, `round ${round.round}: ${plural(count, "token")}`));
    parts.push(bar);
  });
  const bar = Math.min(step - gap, 40);
  const points = state.means.map((mean, index) => `${CHART.left + index * step + gap / 2 + bar / 2},${up(mean)}`);
  if (points.length > 1) parts.push(make("polyline", { class: "mean", points: points.join(" ") }));
  chart.replaceChildren(...parts);
}

function markBar() {
  byId("chart").querySelector(".shown")?.classList.remove("shown");
  byId("chart").querySelectorAll(".bar")[state.at]?.classList.add("shown");
}

function onChartClick(event) {
  const area = byId("chart").getBoundingClientRect();
  const count = state.request.rounds.length;
  const share = (event.clientX - area.left - CHART.left) / (area.width - CHART.left - CHART.right);
  step(Math.min(count - 1, Math.max(0, Math.floor(share * count))));
}

// -- one round -------------------------------------------------------------------------------------

/** Shows a round, or says that the request has none. */
function show(at) {
  const { request } = state;
  const [count, round] = [request.rounds.length, request.rounds[at]];
  state.at = at;
  state.nodes = round?.tokens ? nodesOf(round) : [];
  byId("round-number").textContent = round ? `${at + 1} of ${count}` : "none";
  const slider = byId("round");
  slider.max = Math.max(1, count);
  slider.value = at + 1;
  slider.disabled = count < 2;
  slider.setAttribute("aria-valuetext", round ? `round ${at + 1} of ${count}, ${plural(round.accept_tokens.length, "token")}` : "none");
  byId("previous").disabled = at <= 0;
  byId("next").disabled = at >= count - 1;
  byId("play").disabled = count < 2;
  markBar();
  showFigures(round);
  showStages(round?.stages_ms);
  byId("caption").textContent = round ? describe(round) : "Prefill made all of this request's tokens: there was no round.";
  showTree(round);
  showPath(round);
  showText();
  const hash = `#request=${data.requests.indexOf(request) + 1}&round=${at + 1}`;
  if (location.hash !== hash) location.replace(hash);
}

/** A round that the reader chose. */
function step(at) {
  pause();
  if (state.request.rounds[at]) show(at);
}

/** How many tokens the chain of likeliest drafts would have committed; null where the tree ends before it does. */
function chainLength(round) {
  let at = 0;
  for (let length = 1; ; length += 1) {
    const first = state.nodes.find((node) => node.parent === at && node.rank === 1);
    if (!first) return null;
    if (first.index !== round.accept_indices[length]) return length;
    at = first.index;
  }
}

/** One round in words. */
function describe(round) {
  const [length, drafted] = [round.accept_tokens.length, state.nodes.length ? round.tokens.length - 1 : null];
  if (length === 0) return "Committed nothing.";
  if (round.mode === "ar" || drafted === 0) return "No draft in this round: the target wrote one token.";
  const drafts = drafted === null ? plural(length - 1, "drafted token") : `${length - 1} of ${plural(drafted, "drafted token")}`;
  const words = [`Committed ${drafts} and the bonus token.`];
  if (drafted && length > 1) {
    const chain = round.mode === "tree" ? chainLength(round) : null;
    if (chain !== null && chain < length) words.push(`The chain of likeliest drafts would have committed ${plural(chain, "token")}.`);
    const needed = Math.max(...round.accept_indices);
    if (needed < drafted) words.push(`A node budget of ${needed} would have been enough.`);
  }
  const past = pastEnd(round);
  if (past) words.push(`Not emitted, being behind the request's end: ${plural(past, "token")}.`);
  return words.join(" ");
}

/** How many of a round's tokens lie behind the request's end. */
function pastEnd(round) {
  const { prompt_tokens: begin, new_tokens: emitted } = state.request;
  const end = round.position - begin + 1 + round.accept_tokens.length;
  return Math.min(round.accept_tokens.length, Math.max(0, end - emitted));
}

function figure(name, value, unit = "", className = "") {
  const shown = element("dd", "", value);
  if (unit) shown.append(element("small", "", ` ${unit}`));
  return element("div", className, element("dt", "", name), shown);
}

function showFigures(round) {
  if (!round) return byId("figures").replaceChildren();
  const { round_ms: ms, accept_tokens: { length } } = round;
  const budget = round.tokens
    ? figure("nodes drafted", String(round.tokens.length - 1), `of ${round.node_budget}`)
    : figure("node budget", String(round.node_budget));
  const figures = [
    figure("accept length", String(length), length === 1 ? "token" : "tokens", "lead"),
    figure("running mean", state.means[state.at].toFixed(2), "tokens"),
    figure(data.source.engine === "sglang" ? "batch's round time" : "round time", ms === null ? "–" : ms.toFixed(ms < 10 ? 2 : 1), "ms"),
    figure("mode", round.mode),
    budget,
    figure("root's position", String(round.position)),
  ];
  byId("figures").replaceChildren(...figures);
}

function showStages(stages) {
  const rank = (name) => (STAGE_ORDER.indexOf(name) + STAGE_ORDER.length + 1) % (STAGE_ORDER.length + 1);
  const entries = Object.entries(stages ?? {}).sort((a, b) => rank(a[0]) - rank(b[0]));
  const total = entries.reduce((sum, [, ms]) => sum + ms, 0);
  const box = byId("stages");
  box.hidden = !(total > 0);
  if (box.hidden) return;
  const [bar, names] = [element("div", "stage-bar"), element("ul", "stage-names")];
  entries.forEach(([name, ms], index) => {
    const [part, key] = [element("i", `stage-${index % 6}`), element("i", `stage-${index % 6}`)];
    part.style.width = `${(100 * ms) / total}%`;
    bar.append(part);
    names.append(element("li", "", key, `${tame(name)} ${ms.toFixed(2)} ms`));
  });
  bar.setAttribute("aria-hidden", "true");
  names.setAttribute("aria-label", "Times of the round's steps");
  box.replaceChildren(bar, names);
}

// -- the tree --------------------------------------------------------------------------------------

/** What the target held of the i-th committed token. */
const targetOf = (round, index) => round.target[index] ?? [null, null];
const logProb = (value) => (value === null ? "" : ` (log-prob ${value.toFixed(3)})`);

function wordsOf(node, round) {
  const token = `“${visible(textOf(node.token))}”, token ${node.token}`;
  if (node.kind === "root") return `Root: ${token}, the last one committed before this round.`;
  const words = [];
  const committed = node.kind === "bonus" ? round.accept_tokens.length - 1 : round.accept_indices.indexOf(node.index) - 1;
  if (node.kind === "bonus") words.push(`Bonus token: ${token}, the target's own choice after the path.`);
  else {
    words.push(`Node ${node.index} of ${round.tokens.length - 1}: ${token}, depth ${node.depth}.`);
    words.push(`Drafter: ${percent(node.logProb) || "unknown"} from the root${logProb(node.logProb)}, ${percent(node.given) || "unknown"} after its parent, choice ${node.rank}.`);
  }
  if (node.kind === "wrong") {
    const step = round.accept_indices.indexOf(node.parent);
    words.push(step < 0
      ? "Wrong: it follows a wrong draft."
      : `Wrong: the target chose “${visible(textOf(round.accept_tokens[step]))}” here.`);
  } else {
    const [target, margin] = targetOf(round, committed);
    if (target !== null) words.push(`Target: ${percent(target)}${logProb(target)}${margin === null ? "" : `, margin ${margin.toFixed(3)}`}.`);
    if (node.kind === "path") words.push("Committed.");
  }
  return words.join(" ");
}

function showTree(round) {
  const canvas = byId("canvas");
  const hadFocus = canvas.contains(document.activeElement);
  byId("inspector").hidden = !state.nodes.length;
  byId("tree-card").hidden = !round;
  if (!state.nodes.length) {
    const why = round?.fault
      ? `This round's tree cannot be drawn: ${round.fault}.`
      : "No tree was recorded for this round. A trace at detail full has it.";
    canvas.replaceChildren(element("p", "empty", why));
    return;
  }
  for (const node of state.nodes) node.words = wordsOf(node, round);
  drawTree(canvas, state.nodes, textOf, `Draft tree of round ${round.round}. ${byId("caption").textContent}`);
  byId("inspector").textContent = "Point at a node, or focus the tree and walk it with the arrow keys.";
  if (hadFocus) focusNode(state.nodes[0]);
}

function boxOf(node) {
  return byId("canvas").querySelector(`[data-node="${node.index}"]`);
}

function inspect(event) {
  const group = event.target.closest(".node");
  if (!group) return;
  byId("canvas").querySelector(".inspected")?.classList.remove("inspected");
  group.classList.add("inspected");
  byId("inspector").textContent = state.nodes[group.dataset.node].words;
}

function focusNode(node) {
  byId("canvas").querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
  const group = boxOf(node);
  group.setAttribute("tabindex", 0);
  group.focus({ preventScroll: true });
  const [canvas, box] = [byId("canvas"), group.getBoundingClientRect()];
  const frame = canvas.getBoundingClientRect();
  canvas.scrollTop += Math.min(0, box.top - frame.top - 12) + Math.max(0, box.bottom - frame.bottom + 12);
  canvas.scrollLeft += Math.min(0, box.left - frame.left - 12) + Math.max(0, box.right - frame.right + 12);
}

function onTreeKey(event) {
  const group = event.target.closest(".node");
  if (!group || event.altKey || event.ctrlKey || event.metaKey) return;
  const rounds = { PageUp: state.at - 1, PageDown: state.at + 1 }[event.key];
  const next = neighbour(state.nodes, state.nodes[group.dataset.node], event.key);
  if (rounds === undefined && !next && !event.key.startsWith("Arrow")) return;
  event.preventDefault();
  event.stopPropagation();
  if (rounds !== undefined) step(rounds);
  else if (next) focusNode(next);
}

// -- committed tokens and text ---------------------------------------------------------------------

function showPath(round) {
  const table = byId("path");
  if (!round) return table.replaceChildren();
  const hasTree = Boolean(round.tokens);
  const names = ["", "token", "id", "node", ...(hasTree ? ["drafter, after its parent", "drafter, from the root"] : []), "target", "margin"];
  const head = element("tr", "", ...names.map((name) => element("th", "", name)));
  head.childNodes.forEach((cell) => cell.setAttribute("scope", "col"));
  const firstPast = round.accept_tokens.length - pastEnd(round);
  const rows = round.accept_tokens.map((token, index) => {
    const isBonus = index === round.accept_tokens.length - 1;
    const node = isBonus ? null : round.accept_indices[index + 1] ?? null;
    const [target, margin] = targetOf(round, index);
    const drafted = hasTree ? (node === null ? ["", ""] : [percent(state.nodes[node].given), percent(state.nodes[node].logProb)]) : [];
    const cells = [
      isBonus ? `${MARKS.bonus}bonus` : `${MARKS.path}draft ${index + 1}`, element("code", "", visible(textOf(token))), token,
      node ?? "–", ...drafted, percent(target), margin === null ? "" : margin.toFixed(3),
    ];
    return element("tr", `${isBonus ? "bonus" : "path"}${index >= firstPast ? " past" : ""}`, ...cells.map((cell) => element("td", "", cell instanceof Node ? cell : String(cell))));
  });
  table.replaceChildren(element("thead", "", head), element("tbody", "", ...rows));
}

function textAfter(step) {
  const [length, tail] = state.request.steps[step];
  return state.request.text.slice(0, length) + tail;
}

function showText() {
  const [box, { rounds, text }] = [byId("text"), state.request];
  if (!rounds.length) return box.replaceChildren(tame(text));
  const [before, after] = [textAfter(state.at), textAfter(state.at + 1)];
  // A character that was half there before this round is new in it.
  const shared = after.startsWith(before) ? before.length : state.request.steps[state.at][0];
  const news = element("mark", "", tame(after.slice(shared)));
  box.replaceChildren(tame(after.slice(0, shared)), news);
  if (!news.textContent) news.remove();
  box.scrollTop = box.scrollHeight;
}

// -- the whole page --------------------------------------------------------------------------------

function pause() {
  clearInterval(state.timer);
  state.timer = 0;
  byId("play").textContent = "Play";
}

function play() {
  const last = state.request.rounds.length - 1;
  if (state.at >= last) show(0);
  byId("play").textContent = "Pause";
  state.timer = setInterval(() => (state.at >= last ? pause() : show(state.at + 1)), PLAY_MS);
}

function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, .scroll")) return;
  if (event.target.closest(".text") && !event.key.startsWith("Arrow")) return;
  const to = { ArrowLeft: state.at - 1, ArrowRight: state.at + 1, Home: 0, End: state.request.rounds.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  step(to);
}

/** The request and the round that the address names, or the first ones. */
function fromAddress() {
  const named = new URLSearchParams(location.hash.slice(1));
  const index = (name) => Math.max(0, (Number.parseInt(named.get(name), 10) || 1) - 1);
  const request = data.requests[index("request")] ?? data.requests[0];
  if (request !== state.request || index("round") !== state.at) pick(request, index("round"));
}

function listen() {
  byId("search").addEventListener("input", search);
  byId("search").addEventListener("keydown", onSearchKey);
  byId("requests").addEventListener("keydown", onListKey);
  byId("previous").addEventListener("click", () => step(state.at - 1));
  byId("next").addEventListener("click", () => step(state.at + 1));
  byId("play").addEventListener("click", () => (state.timer ? pause() : play()));
  byId("round").addEventListener("input", (event) => step(Number(event.target.value) - 1));
  byId("chart").addEventListener("click", onChartClick);
  for (const name of ["pointerover", "focusin"]) byId("canvas").addEventListener(name, inspect);
  byId("canvas").addEventListener("keydown", onTreeKey);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", fromAddress);
}

function start() {
  const { source, notes, requests } = data;
  const drafter = source.drafter === null ? "no drafter" : `drafter ${source.drafter}`;
  const words = [`${source.engine} engine`, source.target, drafter, source.dtype, `on ${source.device}`, source.time_utc];
  byId("source").textContent = words.map(tame).join(" · ");
  const problems = requests.filter((request) => request.problems.length).length;
  const shown = [...notes];
  if (problems) shown.push(`In ${plural(problems, "request")} rounds do not fit together; what is wrong is told under Request.`);
  if (!requests.length) shown.push("This trace has no requests.");
  byId("notes").replaceChildren(...shown.map((note) => element("li", "", tame(note))));
  byId("notes").hidden = !shown.length;
  if (!requests.length) return;
  byId("main").hidden = false;
  byId("main").classList.toggle("many", requests.length > 1);
  document.querySelector(".requests").hidden = requests.length < 2;
  listen();
  fromAddress();
  search();
  new ResizeObserver(() => {
    drawChart();
    markBar();
  }).observe(byId("chart"));
}

start();
