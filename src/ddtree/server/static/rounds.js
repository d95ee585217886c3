// The rounds of one answer: live while it is written, then to step through.

import { describe, draw, visible } from "./tree.js";

const LIVE_MS = 120; // between two drawings while the answer is written; faster, nobody can read
const CALM_MS = 800; // the same where the reader asked for less motion
const PLAY_MS = 700;

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

export class Rounds {
  #rounds = [];
  #shown = -1;
  #live = false;
  #drawTimer = 0;
  #playTimer = 0;
  #tallest = 1;
  #onShow;

  /** @param {(index: number) => void} onShow is told which round is drawn */
  constructor(onShow) {
    this.#onShow = onShow;
    byId("previous").addEventListener("click", () => this.show(this.#shown - 1));
    byId("next").addEventListener("click", () => this.show(this.#shown + 1));
    byId("round").addEventListener("input", (event) => this.show(Number(event.target.value) - 1));
    byId("play").addEventListener("click", () => (this.#playTimer ? this.#pause() : this.#play()));
    byId("bars").addEventListener("click", (event) => this.#pick(event));
    new ResizeObserver(() => this.#redraw()).observe(byId("canvas"));
  }

  /** Forgets the rounds before and follows the new ones. */
  start() {
    this.#pause();
    this.#rounds = [];
    this.#shown = -1;
    this.#live = true;
    this.#tallest = 1;
    byId("bars").replaceChildren();
    byId("canvas").style.minHeight = "";
    this.#label();
  }

  add(round) {
    this.#rounds.push(round);
    this.#addBar(round);
    if (!this.#live || this.#drawTimer) return;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.#drawTimer = setTimeout(() => {
      this.#drawTimer = 0;
      if (this.#live) this.#draw(this.#rounds.length - 1);
    }, this.#shown < 0 ? 0 : calm ? CALM_MS : LIVE_MS);
  }

  /** No more rounds come: the reader may step. */
  finish() {
    clearTimeout(this.#drawTimer);
    this.#drawTimer = 0;
    const wasLive = this.#live;
    this.#live = false;
    if (wasLive && this.#rounds.length) this.#draw(this.#rounds.length - 1);
    else this.#label();
    if (!this.#rounds.length) this.#empty();
  }

  /** Shows a round that the reader chose; stops following. */
  show(index) {
    if (index < 0 || index >= this.#rounds.length) return;
    this.#pause();
    this.#live = false;
    this.#draw(index);
  }

  #draw(index) {
    this.#shown = index;
    this.#redraw();
    byId("bars").querySelector(".shown")?.classList.remove("shown");
    byId("bars").children[index].classList.add("shown");
    this.#label();
    this.#onShow(index);
  }

  #redraw() {
    if (this.#shown < 0) return;
    const canvas = byId("canvas");
    if (!this.#live) canvas.style.minHeight = "";
    draw(canvas, this.#rounds[this.#shown]);
    // Grows only, so that the page stands still while trees of all sizes pass.
    if (this.#live) canvas.style.minHeight = `${Math.min(canvas.scrollHeight, 0.6 * innerHeight)}px`;
  }

  #empty() {
    const words = document.createElement("p");
    words.className = "empty";
    words.textContent = "No round was needed for this answer.";
    byId("canvas").replaceChildren(words);
  }

  #label() {
    const [count, at] = [this.#rounds.length, this.#shown];
    const round = this.#rounds[at];
    const slider = byId("round");
    slider.max = Math.max(1, count);
    slider.value = at + 1;
    slider.disabled = count < 2;
    byId("previous").disabled = at <= 0;
    byId("next").disabled = at < 0 || at >= count - 1;
    byId("play").disabled = count < 2 || this.#live;
    byId("round-label").textContent = round ? `round ${at + 1} of ${count}, ${round.round_ms.toFixed(1)} ms` : "";
    slider.setAttribute("aria-valuetext", round ? `round ${at + 1} of ${count}: ${describe(round)}` : "none");
    this.#caption(round);
  }

  #caption(round) {
    const caption = byId("caption");
    caption.textContent = round ? describe(round) : "";
    if (!round) return;
    const text = document.createElement("code");
    text.textContent = visible(round.accept_text);
    caption.append(" Tokens: ", text);
  }

  #addBar(round) {
    const [bars, count] = [byId("bars"), this.#rounds.length];
    const kept = round.accept_indices.length;
    const bar = document.createElementNS(SVG, "rect");
    bar.setAttribute("x", count - 1 + 0.1);
    bar.setAttribute("width", 0.8);
    bar.setAttribute("y", -kept);
    bar.setAttribute("height", kept);
    bars.append(bar);
    this.#tallest = Math.max(this.#tallest, kept);
    bars.setAttribute("viewBox", `0 ${-this.#tallest} ${count} ${this.#tallest}`);
  }

  #pick(event) {
    const area = byId("bars").getBoundingClientRect();
    this.show(Math.min(this.#rounds.length - 1,
      Math.floor(((event.clientX - area.left) / area.width) * this.#rounds.length)));
  }

  #play() {
    if (this.#shown >= this.#rounds.length - 1) this.#draw(0);
    byId("play").textContent = "Pause";
    this.#playTimer = setInterval(() => {
      if (this.#shown >= this.#rounds.length - 1) this.#pause();
      else this.#draw(this.#shown + 1);
    }, PLAY_MS);
  }

  #pause() {
    clearInterval(this.#playTimer);
    this.#playTimer = 0;
    byId("play").textContent = "Play";
  }
}
