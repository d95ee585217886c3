// The same request plainly and with drafts: speeds side by side, and whether the texts are the same.

import { body, stream, textOf } from "./api.js";

const WARM_UP_TOKENS = 8; // the first rounds of a mode compile kernels or capture graphs
const NAMES = { ar: "plain", chain: "chain" };

const byId = (id) => document.getElementById(id);

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

const nameOf = (settings, mode) => NAMES[mode] ?? `tree, ${settings.budget} nodes`;

class Arm {
  text = "";
  summary = null;

  constructor(title, kind) {
    this.card = element("article", `arm ${kind}`);
    this.speed = element("p", "arm-speed", "–");
    this.bar = element("i", "arm-bar");
    this.words = element("div", "text");
    this.words.tabIndex = 0;
    this.words.setAttribute("role", "region");
    this.words.setAttribute("aria-label", `Text, ${title}`);
    this.card.append(element("h3", "", title), this.speed, this.bar, this.words);
  }

  take(chunk) {
    this.text += textOf(chunk);
    this.words.textContent = this.text;
    if (chunk.ddtree?.rounds !== undefined) this.summary = chunk.ddtree;
  }

  finish(fastest) {
    const { tokens_per_s: speed, accept_length: length, decode_s: seconds } = this.summary;
    this.speed.textContent = `${speed.toFixed(1)} tokens/s`;
    this.speed.append(element("small", "", ` ${seconds.toFixed(2)} s, ${length.toFixed(2)} tokens a round`));
    this.bar.style.width = `${(100 * speed) / fastest}%`;
  }
}

/** Where two texts part, counted in characters; -1 if they are the same. */
export function partingOf(first, second) {
  const [a, b] = [[...first], [...second]];
  const at = a.findIndex((sign, index) => sign !== b[index]);
  return at >= 0 ? at : a.length === b.length ? -1 : a.length;
}

function mark(arm, at) {
  const letters = [...arm.text];
  const rest = element("mark", "", letters.slice(at).join(""));
  arm.words.replaceChildren(letters.slice(0, at).join(""), rest);
}

function verdict(plain, drafted) {
  const at = partingOf(plain.text, drafted.text);
  const equal = byId("equal");
  equal.className = at < 0 ? "equal same" : "equal parted";
  equal.textContent = at < 0
    ? "✓ Both texts are the same, character for character."
    : `✗ The texts part after ${at} characters. In float32 that is a fault. In bfloat16 and float16 it can happen: a `
      + "pass over several tokens rounds differently from a pass over one, so where two tokens nearly tie, either may win.";
  if (at >= 0) [plain, drafted].forEach((arm) => mark(arm, at));
}

/** Ratios of all comparisons of one request so far. */
export class Ratios {
  #request = "";
  #values = [];

  /** Adds one and returns all of that request, smallest first. */
  add(request, ratio) {
    const name = JSON.stringify(request);
    if (name !== this.#request) this.#values = [];
    this.#request = name;
    this.#values.push(ratio);
    return [...this.#values].sort((a, b) => a - b);
  }
}

const ratios = new Ratios();

function showRatio(request, plain, drafted) {
  if (!(plain.summary.tokens_per_s > 0 && drafted.summary.tokens_per_s > 0)) {
    byId("ratio").textContent = "One token: nothing to time";
    return;
  }
  const all = ratios.add(request, drafted.summary.tokens_per_s / plain.summary.tokens_per_s);
  const middle = (all[(all.length - 1) >> 1] + all[all.length >> 1]) / 2;
  const ratio = byId("ratio");
  ratio.className = middle < 1 ? "ratio slower" : "ratio";
  ratio.textContent = `${middle.toFixed(2)} × plain`;
  const runs = all.length === 1
    ? "one run; compare again to see the spread"
    : `median of ${all.length} runs, ${all[0].toFixed(2)} to ${all.at(-1).toFixed(2)}`;
  ratio.append(element("small", "", ` ${runs}`));
}

/** Runs both; throws what `stream` throws. */
export async function compare(settings, key, signal) {
  const status = byId("compare-status");
  const plain = new Arm(nameOf(settings, "ar"), "plain");
  const drafted = new Arm(nameOf(settings, settings.mode), "drafted");
  for (const id of ["ratio", "equal"]) byId(id).textContent = "";
  byId("arms").replaceChildren(plain.card, drafted.card);
  byId("comparison").hidden = false;
  byId("comparison").scrollIntoView({ block: "nearest" });
  const arms = [[plain, "ar"], [drafted, settings.mode]];
  status.textContent = "Warming up…";
  for (const [, mode] of arms) {
    await stream(body(settings, { mode, maxTokens: Math.min(WARM_UP_TOKENS, settings.maxTokens) }), key, signal, () => {});
  }
  for (const [arm, mode] of arms) {
    status.textContent = `Running ${nameOf(settings, mode)}…`;
    await stream(body(settings, { mode }), key, signal, (chunk) => arm.take(chunk));
  }
  const fastest = Math.max(...arms.map(([arm]) => arm.summary.tokens_per_s), 1e-9);
  for (const [arm] of arms) arm.finish(fastest);
  status.textContent = "";
  verdict(plain, drafted);
  showRatio(body(settings), plain, drafted);
}
