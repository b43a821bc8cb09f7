// Requests to the server, and its server-sent events as an async iterator. Paths are relative to the page's own.

export class ServerError extends Error {
  constructor(message, status, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers(key) {
  const out = { "content-type": "application/json" };
  if (key) out.authorization = `Bearer ${key}`;
  return out;
}

async function failure(response) {
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not JSON: the status has to do */ }
  return new ServerError(message, response.status, Number(response.headers.get("retry-after")) || 0);
}

async function send(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server cannot be reached", 0);
  }
}

export async function get(path, key) {
  const response = await send(path, { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Yields the parsed data of each event until [DONE]; throws ServerError, or AbortError when `signal` aborts. */
export async function* stream(path, body, key, signal) {
  const response = await send(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError("the connection was lost before the answer ended", 0);
    });
    if (done) throw new ServerError("the connection ended before the answer did", 0);
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data) continue; // a comment that keeps the connection open
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 200);
      yield event;
    }
  }
}
