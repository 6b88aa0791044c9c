// Requests to the server. A failed one throws an Error whose message is a sentence, with the status if there is one.

export const access = { key: "" };

export async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (access.key) headers.Authorization = `Bearer ${access.key}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* not the API's JSON, as from a proxy */ }
  throw Object.assign(new Error(sentence(message)), { status: response.status });
}

export const fetch_json = async (...request) => (await ask(...request)).json();

// A message as a sentence; the names of options and systems stay as they are.
export function sentence(message) {
  const named = /^(\w*_\w*|ar|bd3lm|esolm|mdlm)\b/.test(message);
  const text = named ? message : message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

// The events of a response of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    let chunk;
    try {
      chunk = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The connection to the server was lost.");
    }
    if (chunk.done) return;
    const parts = (rest + chunk.value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// Run one request for /v1/infill. Calls start(ids), with null for what is to be drawn, then step(event) for every step.
// Returns the finished choice and the seconds it took.
export async function infill(body, signal, start, step) {
  const begin = performance.now();
  let choice = null;
  for await (const event of events(await ask("v1/infill", { ...body, stream: true, logprobs: 4 }, signal))) {
    if (event.error) throw new Error(sentence(event.error.message));
    if (event.object === "start") start(event.tokens);
    else if (event.object === "step") step(event);
    else if (event.choices?.length) choice = event.choices[0];
  }
  if (!choice) throw new Error("The server ended its answer early.");
  return { choice, seconds: (performance.now() - begin) / 1000 };
}
