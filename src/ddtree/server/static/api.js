// Talks to the server: one request, its events, its errors in words.

/** What went wrong, as the server or the network said it. */
export class ApiError extends Error {
  constructor(title, detail, status = 0) {
    super(detail ? `${title}: ${detail}` : title);
    this.title = title;
    this.detail = detail;
    this.status = status;
  }
}

/** Turns pieces of a server-sent event stream into the data of its events. */
export class EventParser {
  #rest = "";
  #data = [];
  #endedInReturn = false; // a line feed that follows belongs to the same line end

  /** @param {string} piece any part of the stream  @returns {string[]} data of the events it completes */
  push(piece) {
    if (!piece) return [];
    const text = this.#endedInReturn && piece.startsWith("\n") ? piece.slice(1) : piece;
    this.#endedInReturn = piece.endsWith("\r");
    const lines = (this.#rest + text).split(/\r\n|\n|\r/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) this.#take(line, events);
    return events;
  }

  #take(line, events) {
    if (line === "") {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line === "data" || line.startsWith("data:")) {
      this.#data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

function headers(key) {
  const result = { "Content-Type": "application/json" };
  if (key) result.Authorization = `Bearer ${key}`;
  return result;
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // An API key with characters that no header may have never reaches the network.
    const reason = error instanceof TypeError && /header|ISO-8859-1|ByteString/i.test(error.message);
    throw reason
      ? new ApiError("The API key cannot be sent", "it has characters that no HTTP header may carry")
      : new ApiError("The server cannot be reached", "is it still running, and is the network up?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let detail = text.slice(0, 2000);
  try {
    detail = JSON.parse(text).error?.message ?? detail;
  } catch {
    // Not JSON: a proxy's own words are shown as they are.
  }
  const retry = response.headers.get("Retry-After");
  if (retry) detail += ` (the server asks to try again after ${retry} s)`;
  return new ApiError(`${response.status} ${response.statusText}`.trim(), detail, response.status);
}

/** Names of the models that the server has. */
export async function models(key) {
  const answer = await (await call("v1/models", { headers: headers(key) })).json();
  return answer.data.map((model) => model.id);
}

/**
 * Streams one answer.
 *
 * @param {object} request as `body` makes it of the settings
 * @param {string} key the API key or ""
 * @param {AbortSignal} signal ends the request
 * @param {(chunk: object) => void} onChunk gets every chunk in order
 */
export async function stream(request, key, signal, onChunk) {
  const path = request.messages ? "v1/chat/completions" : "v1/completions";
  const response = await call(path, { method: "POST", headers: headers(key), body: JSON.stringify(request), signal });
  const reader = response.body.getReader();
  const decoder = new TextDecoder(); // keeps bytes of a character that a network packet cut in two
  const parser = new EventParser();
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection was lost", "the answer is not complete");
    });
    for (const data of parser.push(decoder.decode(value, { stream: !done }))) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError("The server ended the answer", chunk.error.message);
      onChunk(chunk);
    }
    if (done) throw new ApiError("The connection ended early", "the answer is not complete");
  }
}

/** The JSON body of a request with those settings. */
export function body(settings, { mode = settings.mode, rounds = false, maxTokens = settings.maxTokens } = {}) {
  const ddtree = { mode };
  if (mode === "tree") ddtree.budget = settings.budget;
  if (rounds) ddtree.rounds = true;
  const prompt = settings.raw
    ? { prompt: settings.prompt }
    : { messages: [{ role: "user", content: settings.prompt }] };
  return {
    model: settings.model,
    ...prompt,
    max_tokens: maxTokens,
    temperature: settings.temperature,
    seed: settings.seed,
    stream: true,
    stream_options: { include_usage: true },
    ddtree,
  };
}

/** New text of a chunk, of either endpoint. */
export function textOf(chunk) {
  const choice = chunk.choices?.[0];
  return choice?.delta?.content ?? choice?.text ?? "";
}
