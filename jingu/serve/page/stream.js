// The server's side of a conversation: OpenAI's protocol.

/** What went wrong, in words for a person. */
export class ServerError extends Error {}

const headers = (key) => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });

/** Names of the models that are served. */
export async function models(key) {
  const reply = await fetch("v1/models", { headers: headers(key) });
  await check(reply);
  return (await reply.json()).data.map((model) => model.id);
}

/** The chunks of an answer as they come. Throws ServerError where it is refused, fails or breaks off. */
export async function* answer(body, key, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(asked), signal,
  });
  await check(reply);
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error));
    yield chunk;
  }
  throw new ServerError("");
}

async function check(reply) {
  if (reply.ok) return;
  const text = await reply.text();
  let message = text.slice(0, 500);
  try {
    const { error, detail } = JSON.parse(text);
    message = error?.message ?? error ?? detail ?? message;
  } catch {
    // Not JSON: the text itself.
  }
  throw new ServerError(`${reply.status}: ${typeof message === "string" ? message : JSON.stringify(message)}`);
}

/** The data of server-sent events. */
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
