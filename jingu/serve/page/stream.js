// Requests to the server in OpenAI's protocol.

/** An error that the server reported, with a message for the user. */
export class ServerError extends Error {}

export const headers = (key) => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });

/** The names of the served models. */
export async function models(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  await check(response);
  return (await response.json()).data.map((model) => model.id);
}

/** Yields the chunks of an answer. Throws ServerError if the server refuses it, fails, or closes the connection early. */
export async function* answer(body, key, signal) {
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(request), signal,
  });
  await check(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error));
    yield chunk;
  }
  throw new ServerError("");
}

async function check(response) {
  if (response.ok) return;
  const text = await response.text();
  let message = text.slice(0, 500);
  try {
    const { error, detail } = JSON.parse(text);
    message = error?.message ?? error ?? detail ?? message;
  } catch {
    // The body is not JSON: show its text.
  }
  throw new ServerError(`${response.status}: ${typeof message === "string" ? message : JSON.stringify(message)}`);
}

/** Yields the data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
