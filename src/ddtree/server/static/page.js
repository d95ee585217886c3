// Wires the form, the answer, the tree and the comparison together.

import { ApiError, body, models, stream, textOf } from "./api.js";
import { compare } from "./compare.js";
import { Rounds } from "./rounds.js";

const ENDS = { stop: "Finished: the model ended its text.", length: "Finished: the token limit was reached." };
const WAITING = "Waiting for the engine, which runs one request at a time…";

const byId = (id) => document.getElementById(id);
const show = (id, text) => { byId(id).textContent = text; };

let model = "";
let running = null; // AbortController of the request under way
const rounds = new Rounds(markSpan);

/** What the form says. */
function settings() {
  const budget = byId("budget").value.trim();
  return {
    model,
    prompt: byId("prompt").value,
    raw: byId("raw").checked,
    mode: document.querySelector("input[name=mode]:checked").value,
    budget: budget === "auto" ? budget : Number(budget),
    maxTokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    seed: byId("seed").valueAsNumber,
  };
}

/** One answer as it comes in. */
class Answer {
  #tokens = 0;
  #rounds = 0;
  #began = 0;
  #finish = "";
  #summary = null;

  constructor() {
    byId("answer").replaceChildren();
    byId("answer-hint").hidden = true;
    for (const id of ["speed", "accept-length", "counts", "prefill"]) show(id, "–");
    rounds.start();
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    const extra = chunk.ddtree ?? {};
    if (choice?.finish_reason) this.#finish = choice.finish_reason;
    if (extra.rounds !== undefined) this.#summary = extra;
    if (chunk.usage) this.#tokens = chunk.usage.completion_tokens;
    if (extra.round !== undefined) this.#round(extra);
    const text = textOf(chunk);
    if (text && byId("status").textContent === WAITING) show("status", "Writing…");
    if (text) this.#write(text, extra.round === undefined ? null : extra);
  }

  #round(round) {
    if (!this.#rounds) {
      // The first token comes from reading the prompt; decoding begins with the first round.
      this.#began = performance.now() - round.round_ms;
      this.#tokens = 1;
    }
    this.#rounds += 1;
    this.#tokens += round.accept_indices.length;
    rounds.add(round);
    const seconds = (performance.now() - this.#began) / 1000;
    show("speed", ((this.#tokens - 1) / seconds).toFixed(1));
    show("accept-length", ((this.#tokens - 1) / this.#rounds).toFixed(2));
    show("counts", `${this.#tokens} / ${this.#rounds}`);
  }

  #write(text, round) {
    const box = byId("answer");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
    const span = document.createElement("span");
    span.textContent = text;
    if (round) {
      span.dataset.round = this.#rounds - 1;
      span.style.setProperty("--kept", Math.min(round.accept_indices.length - 1, 10));
    }
    box.append(span);
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  /** The server's own figures in place of those seen from here. */
  finish() {
    const summary = this.#summary;
    if (summary) {
      show("speed", summary.tokens_per_s.toFixed(1));
      show("accept-length", summary.accept_length.toFixed(2));
      show("counts", `${this.#tokens} / ${summary.rounds}`);
      show("prefill", `${(1000 * summary.prefill_s).toFixed(0)} ms`);
    }
    show("status", ENDS[this.#finish] ?? `Finished: ${this.#finish || "no reason given"}.`);
  }
}

/** Marks the text of the round that is drawn. */
function markSpan(index) {
  const box = byId("answer");
  box.querySelector(".shown")?.classList.remove("shown");
  const span = box.querySelector(`[data-round="${index}"]`);
  if (!span) return;
  span.classList.add("shown");
  const isSeen = span.offsetTop >= box.scrollTop && span.offsetTop + span.offsetHeight <= box.scrollTop + box.clientHeight;
  if (!running && !isSeen) box.scrollTop = span.offsetTop - box.clientHeight / 2;
}

function showError(error) {
  if (error.name === "AbortError") {
    show("status", "Stopped.");
    return;
  }
  const box = byId("error");
  const known = error instanceof ApiError;
  const title = document.createElement("strong");
  title.textContent = known ? error.title : "This page failed";
  box.replaceChildren(title, " ", known ? error.detail : String(error));
  box.hidden = false;
  show("status", "Not finished.");
  if (!known) throw error; // for the browser's console
  if (error.status === 401) askForKey();
  if (error.status === 404) model = ""; // the server may have been started again with another one
}

function askForKey() {
  byId("key-field").hidden = false;
  byId("key").focus();
}

/** Runs one job at a time, with the buttons and the error box as they should be. */
async function run(job) {
  if (running || !byId("request").reportValidity()) return;
  running = new AbortController();
  byId("error").hidden = true;
  setBusy(true);
  try {
    if (!model) await loadModel();
    await job(settings(), byId("key").value.trim(), running.signal);
  } catch (error) {
    showError(error);
  } finally {
    running = null;
    setBusy(false);
  }
}

function setBusy(busy) {
  byId("stop").disabled = !busy;
  byId("generate").disabled = busy;
  byId("answer").setAttribute("aria-busy", busy);
  document.body.classList.toggle("busy", busy);
  followMode();
}

async function generate(chosen, key, signal) {
  const answer = new Answer();
  show("status", WAITING);
  try {
    await stream(body(chosen, { rounds: true }), key, signal, (chunk) => answer.take(chunk));
    answer.finish();
  } finally {
    rounds.finish();
    byId("answer-hint").hidden = !byId("answer").querySelector("[data-round]");
  }
}

async function runComparison(chosen, key, signal) {
  try {
    await compare(chosen, key, signal);
  } catch (error) {
    show("compare-status", error.name === "AbortError" ? "Stopped." : "Not finished.");
    throw error;
  }
}

function followMode() {
  const mode = settings().mode;
  byId("budget-field").classList.toggle("off", mode !== "tree");
  byId("budget").disabled = mode !== "tree";
  const button = byId("compare");
  button.disabled = mode === "ar" || running !== null;
  button.title = mode === "ar" ? "choose tree or chain to compare it with plain" : "";
}

async function loadModel() {
  [model = ""] = await models(byId("key").value.trim());
  show("model", model);
}

function listen() {
  byId("request").addEventListener("submit", (event) => {
    event.preventDefault();
    run(generate);
  });
  byId("compare").addEventListener("click", () => run(runComparison));
  byId("stop").addEventListener("click", () => running?.abort());
  for (const input of document.getElementsByName("mode")) input.addEventListener("change", followMode);
  byId("examples").addEventListener("click", (event) => {
    if (event.target.matches("button")) byId("prompt").value = event.target.textContent;
  });
  byId("answer").addEventListener("click", (event) => {
    const { round } = event.target.dataset;
    if (round !== undefined && !running) rounds.show(Number(round));
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("request").requestSubmit();
  });
}

listen();
followMode();
loadModel().catch(showError);
