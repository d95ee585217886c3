// The list of requests, and what is told of the one that was picked.

const meanOf = (request) => request.rounds.reduce((sum, round) => sum + round.accept_tokens.length, 0) / request.rounds.length;

function option(request, index) {
  const name = element("span", "", tame(request.id));
  const figures = request.rounds.length
    ? `${plural(request.rounds.length, "round")} of ${meanOf(request).toFixed(2)}`
    : "no rounds";
  const item = element("li", "", element("b", "", name, element("small", "", figures)));
  item.append(element("em", "", tame(request.text.slice(0, 80).replace(/\s+/g, " ")) || "no text"));
  item.id = `request-${index}`;
  item.setAttribute("role", "option");
  item.addEventListener("click", () => pick(request));
  return item;
}

function search() {
  const wanted = byId("search").value.toLowerCase();
  const matches = (request) => [request.id, request.server_id ?? "", request.prompt.begin, request.prompt.end, request.text]
    .some((text) => text.toLowerCase().includes(wanted));
  state.shownRequests = data.requests.filter(matches);
  byId("requests").replaceChildren(...state.shownRequests.map((request) => option(request, data.requests.indexOf(request))));
  const [shown, all] = [state.shownRequests.length, data.requests.length];
  byId("requests-count").textContent = shown === all ? String(all) : `${shown} of ${all}`;
  markRequest();
}

function markRequest() {
  const list = byId("requests");
  list.querySelector("[aria-selected=true]")?.removeAttribute("aria-selected");
  const item = byId(`request-${data.requests.indexOf(state.request)}`);
  list.setAttribute("aria-activedescendant", item?.id ?? "");
  item?.setAttribute("aria-selected", "true");
  if (!item) return;
  // Not scrollIntoView, which would move the page too.
  if (item.offsetTop < list.scrollTop + list.offsetTop) list.scrollTop = item.offsetTop - list.offsetTop;
  const below = item.offsetTop + item.offsetHeight - list.offsetTop - list.clientHeight;
  if (below > list.scrollTop) list.scrollTop = below;
}

function onListKey(event) {
  const [list, at] = [state.shownRequests, state.shownRequests.indexOf(state.request)];
  const to = { ArrowDown: at + 1, ArrowUp: Math.max(at - 1, 0), Home: 0, End: list.length - 1, PageDown: Math.min(at + 10, list.length - 1), PageUp: Math.max(at - 10, 0) }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  if (list[to]) pick(list[to]);
}

function onSearchKey(event) {
  event.stopPropagation();
  if (event.key === "Enter" && state.shownRequests.length) pick(state.shownRequests[0]);
  if (event.key === "ArrowDown") {
    event.preventDefault();
    byId("requests").focus();
    if (!state.shownRequests.includes(state.request) && state.shownRequests.length) pick(state.shownRequests[0]);
  }
}

function pick(request, at = 0) {
  pause();
  state.request = request;
  let sum = 0;
  state.means = request.rounds.map((round, index) => (sum += round.accept_tokens.length) / (index + 1));
  markRequest();
  showPrompt();
  showFacts();
  drawChart();
  show(Math.min(at, Math.max(0, request.rounds.length - 1)));
}

function showPrompt() {
  const { prompt, prompt_tokens: tokens } = state.request;
  byId("prompt-hint").textContent = plural(tokens, "token");
  const left = prompt.left ? `\n[… ${prompt.left} characters left out …]\n` : "";
  byId("prompt").textContent = tame(prompt.begin) + left + tame(prompt.end);
}

function fact(name, value, className = "") {
  return element("div", className, element("dt", "", name), element("dd", "", tame(String(value))));
}

function showFacts() {
  const request = state.request;
  const facts = [fact("id", request.id)];
  if (request.server_id) facts.push(fact("SGLang's id", request.server_id));
  facts.push(
    fact("mode and node budget asked for", `${request.mode}, ${request.node_budget}`),
    fact("prompt", plural(request.prompt_tokens, "token")),
    fact("new text", plural(request.new_tokens, "token")),
    fact("ended by", request.finish_reason ?? "not ended: it ran still, or failed"),
  );
  if (request.first_token !== null) {
    const target = request.first_target ? `, target ${percent(request.first_target[0])}` : "";
    facts.push(fact("first token, by prefill", `${visible(textOf(request.first_token))}${target}`));
  }
  for (const [name, value] of Object.entries(request.stats)) {
    if (!["prompt_tokens", "new_tokens"].includes(name)) facts.push(fact(name.replaceAll("_", " "), value));
  }
  const sampling = Object.entries(request.sampling).map(([name, value]) => `${name} ${value}`);
  if (sampling.length) facts.push(fact("sampling", sampling.join(", "), "wide"));
  if (request.rounds_left) facts.push(fact("not in this page", `${plural(request.rounds_left, "later round")}`, "wide"));
  if (request.problems.length) facts.push(fact("what does not fit together", request.problems.join("\n"), "wide alert"));
  byId("facts").replaceChildren(...facts);
}
