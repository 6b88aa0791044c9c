"use strict";
// A text is a list of tokens {id, piece, phase, logprob, locked}; id is null where a token is still to be drawn.

const $ = (id) => document.getElementById(id);
const state = { text: [], past: [], future: [], last: null, running: null, samplers: {}, anchor: null, focus: 0 };
const SLIDERS = ["count", "per_blank", "alpha_0", "num_steps", "temperature", "top_p"];
const BLANK = /____+/;

// --- the server -------------------------------------------------------------------------------------------------

async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* not our JSON */ }
  throw new Error(message);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// Run one request for /v1/infill and show every step; returns the finished tokens.
async function sample(body, pane, old, signal) {
  const begin = performance.now();
  let text = [], passes = 0, final = null;
  for await (const event of events(await ask("/v1/infill", { ...body, stream: true, logprobs: 3 }, signal))) {
    if (event.error) throw new Error(event.error.message);
    if (event.object === "start") {
      text = event.tokens.map((id, i) => (id === null ? { id, piece: "·" } : { piece: "", ...old?.[i], id }));
      if (!old) await name_pieces(text, signal);
      draw(pane, text);
    } else if (event.object === "step") {
      passes += 1;
      event.positions.forEach((position, k) => {
        text[position] = { id: event.tokens[k], piece: event.pieces[k], phase: event.phases[k], logprob: event.logprobs[k], fresh: true };
      });
      draw(pane, text);
      text.forEach((token) => delete token.fresh);
      pane.status.textContent = `pass ${passes} …`;
    } else if (event.choices?.length) final = event;
  }
  if (!final) throw new Error("The server ended the answer early.");
  const choice = final.choices[0];
  choice.tokens.forEach((id, i) => {
    text[i] = { ...text[i], id, piece: choice.pieces[i], top: choice.top_logprobs[i], logprob: choice.logprobs[i] ?? text[i].logprob };
  });
  draw(pane, text);
  const seconds = ((performance.now() - begin) / 1000).toFixed(2);
  const drawn = choice.drawn.length;
  pane.status.textContent = `${drawn} tokens in ${choice.passes} passes, ${seconds} s, seed ${body.seed}`;
  return text;
}

async function name_pieces(text, signal) {
  const known = text.filter((token) => token.id !== null);
  if (!known.length) return;
  const found = await (await ask("/detokenize", { tokens: known.map((token) => token.id), with_pieces: true }, signal)).json();
  known.forEach((token, i) => { token.piece = found.pieces[i]; });
}

// --- requests ---------------------------------------------------------------------------------------------------

function chosen_options(sampler) {
  const takes = state.samplers[sampler || ""] ?? Object.values(state.samplers).flat();
  const value = (id) => Number($(id).value);
  const body = { temperature: value("temperature"), top_p: value("top_p") };
  if (sampler) body.sampler = sampler;
  if (value("alpha_0") >= 0 && takes.includes("alpha_0")) body.alpha_0 = value("alpha_0");
  if (value("num_steps") > 0 && takes.includes("num_steps")) body.num_steps = value("num_steps");
  if (sampler === "block") body.parallelism = 4;
  return body;
}

function new_seed() {
  const typed = $("seed").value;
  return typed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(typed);
}

async function generate() {
  const source = $("source").value, what = {};
  if (BLANK.test(source)) {
    Object.assign(what, { text: source, tokens_per_blank: Number($("per_blank").value) });
  } else {
    const ids = source ? (await (await ask("/tokenize", { content: source })).json()).tokens : [];
    const room = Math.max(1, Math.min(Number($("count").value), state.limit - ids.length));
    what.tokens = [...ids, ...Array(Math.ceil((ids.length + room) / state.block) * state.block - ids.length).fill(null)];
  }
  await perform({ ...what, seed: new_seed() }, null);
}

async function rewrite(first, last) {
  const old = state.text;
  const tokens = old.map((token, i) => (i >= first && i <= last && !token.locked ? null : token.id));
  if (!tokens.includes(null)) return fail("These words are locked. Unlock them to have them rewritten.");
  await perform({ tokens, seed: new_seed() }, old);
}

async function perform(what, old) {
  if (state.running) state.running.abort();
  const control = (state.running = new AbortController());
  const before = state.text, other = $("other").value;
  $("error").hidden = true;
  $("halt").hidden = false;
  $("second").hidden = other === "-";
  const panes = [{ words: $("text"), status: $("status"), live: true }, { words: $("text2"), status: $("status2") }];
  const bodies = [{ ...what, ...chosen_options($("sampler").value) }, { ...what, ...chosen_options(other) }];
  try {
    const second = other === "-" ? null : sample(bodies[1], panes[1], old, control.signal);
    second?.catch(() => {});
    const text = await sample(bodies[0], panes[0], old, control.signal);
    await second;
    state.past.push(before);
    state.future = [];
    state.text = text;
    state.last = { body: bodies[0], source: $("source").value };
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
    if (state.running === control) draw(panes[0], before);
  } finally {
    if (state.running === control) {
      state.running = null;
      $("halt").hidden = true;
    }
    buttons();
  }
}

function fail(message) {
  const sentence = message.charAt(0).toUpperCase() + message.slice(1);
  $("error").textContent = /[.!?]$/.test(sentence) ? sentence : `${sentence}.`;
  $("error").hidden = false;
}

// --- the text ---------------------------------------------------------------------------------------------------

// Words are runs of tokens; a token that begins with a space or a line break begins a word.
function words_of(text) {
  const found = [];
  text.forEach((token, i) => {
    const first = found.length === 0 || /^\s/.test(token.piece) || token.id === null || text[i - 1].id === null;
    if (first) found.push({ first: i, last: i });
    else found[found.length - 1].last = i;
  });
  return found;
}

function draw(pane, text) {
  const tint = $("tint").checked, words = words_of(text);
  pane.words.replaceChildren(...words.map((word, number) => {
    const span = document.createElement("span");
    span.className = "word";
    if (pane.live) {
      Object.assign(span.dataset, { first: word.first, last: word.last, number });
      span.setAttribute("role", "option");
      span.tabIndex = number === Math.min(state.focus, words.length - 1) ? 0 : -1;
    }
    for (let i = word.first; i <= word.last; i++) span.append(token_span(text[i], tint));
    return span;
  }));
}

function token_span(token, tint) {
  const span = document.createElement("span");
  span.textContent = token.id === null ? " ·" : token.piece;
  span.className = [token.id === null ? "todo" : token.phase ?? "", token.locked ? "locked" : "", token.fresh ? "fresh" : ""].join(" ");
  if (token.logprob != null) {
    const p = Math.exp(token.logprob);
    const others = (token.top ?? []).map(([, value]) => `${(100 * Math.exp(value)).toFixed(1)} %`).join(", ");
    span.title = `probability ${(100 * p).toFixed(1)} %` + (others ? `; the likeliest have ${others}` : "");
    if (tint) {
      span.classList.add("tinted");
      span.style.setProperty("--unlikely", 1 - p);
    }
  }
  return span;
}

function redraw() {
  draw({ words: $("text"), live: true }, state.text);
  buttons();
}

function buttons() {
  $("undo").disabled = !state.past.length || !!state.running;
  $("redo").disabled = !state.future.length || !!state.running;
}

function travel(from, to) {
  if (!from.length || state.running) return;
  to.push(state.text);
  state.text = from.pop();
  $("status").textContent = `${state.text.length} tokens`;
  redraw();
}

const word_at = (event) => document.elementFromPoint(event.clientX, event.clientY)?.closest?.("#text .word");

function mark(one, two) {
  const [low, high] = [Number(one), Number(two)].sort((a, b) => a - b);
  for (const word of $("text").children) {
    const inside = word.dataset.number >= low && word.dataset.number <= high;
    word.classList.toggle("selected", inside);
    word.setAttribute("aria-selected", inside);
  }
}

function act(tool) {
  const marked = [...$("text").querySelectorAll(".selected")];
  if (!marked.length || state.running) return;
  const first = Number(marked[0].dataset.first), last = Number(marked[marked.length - 1].dataset.last);
  mark(-1, -1);
  if (tool === "rewrite") return rewrite(first, last);
  const locked = state.text.slice(first, last + 1).every((token) => token.locked);
  state.past.push(state.text);
  state.text = state.text.map((token, i) => (i >= first && i <= last ? { ...token, locked: !locked } : token));
  redraw();
}

const tool = () => document.querySelector("input[name=tool]:checked").value;

$("text").addEventListener("pointerdown", (event) => {
  const word = word_at(event);
  if (!word || event.button) return;
  event.preventDefault();
  state.anchor = word.dataset.number;
  mark(state.anchor, state.anchor);
});
window.addEventListener("pointermove", (event) => {
  const word = state.anchor !== null && word_at(event);
  if (word) mark(state.anchor, word.dataset.number);
});
window.addEventListener("pointerup", () => {
  if (state.anchor === null) return;
  state.focus = Number(state.anchor);
  state.anchor = null;
  act(tool());
});
window.addEventListener("pointercancel", () => { state.anchor = null; mark(-1, -1); });

$("text").addEventListener("keydown", (event) => {
  const number = Number(event.target.dataset?.number ?? 0), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) {
    const next = $("text").children[number + step];
    if (!next) return;
    event.preventDefault();
    state.from = event.shiftKey ? state.from ?? number : null;
    state.focus = number + step;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    mark(state.from ?? number + step, number + step);
  } else if (event.key === "Enter" || event.key.toLowerCase() === "l") {
    event.preventDefault();
    if (!event.target.classList.contains("selected")) mark(number, number);
    act(event.key === "Enter" ? "rewrite" : "lock");
  }
});

// --- controls ---------------------------------------------------------------------------------------------------

function show_values() {
  const named = { alpha_0: (v) => (v < 0 ? "as trained" : v), num_steps: (v) => (v > 0 ? v : "one token each") };
  for (const id of SLIDERS) {
    const value = Number($(id).value);
    $(id).closest("label").querySelector("output").textContent = named[id] ? named[id](value) : value;
  }
}

function link() {
  const { body, source } = state.last ?? { body: null, source: $("source").value };
  const values = Object.fromEntries([...SLIDERS, "sampler"].map((id) => [id, $(id).value]));
  const hash = encodeURIComponent(JSON.stringify({ source, values, body }));
  return `${location.origin}${location.pathname}#${hash}`;
}

function restore() {
  if (location.hash.length < 2) return null;
  try {
    const { source, values, body } = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    $("source").value = String(source ?? "");
    for (const id of [...SLIDERS, "sampler"]) if (values?.[id] !== undefined) $(id).value = values[id];
    return body && typeof body === "object" ? body : null;
  } catch {
    fail("The link is damaged: its options cannot be read.");
    return null;
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); generate().catch((error) => fail(error.message)); });
$("source").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("halt").addEventListener("click", () => state.running?.abort());
$("undo").addEventListener("click", () => travel(state.past, state.future));
$("redo").addEventListener("click", () => travel(state.future, state.past));
$("tint").addEventListener("change", redraw);
$("form").addEventListener("input", show_values);
$("link").addEventListener("click", async () => {
  history.replaceState(null, "", link());
  try {
    await navigator.clipboard.writeText(location.href);
    $("status").textContent = "The link is copied; it reproduces this sample.";
  } catch {
    $("status").textContent = "The link is in the address bar; it reproduces this sample.";
  }
});
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); connect(); });
document.addEventListener("keydown", (event) => {
  if (event.target.closest("textarea, input, select") || !(event.ctrlKey || event.metaKey)) return;
  if (event.key.toLowerCase() !== "z") return;
  event.preventDefault();
  event.shiftKey ? travel(state.future, state.past) : travel(state.past, state.future);
});

async function connect() {
  try {
    const model = (await (await ask("/v1/models")).json()).data[0];
    state.samplers = model.samplers;
    state.limit = model.max_length;
    state.block = model.block_size;
    $("model").textContent = `${model.id}, system ${model.system}, up to ${model.max_length} tokens`;
    $("count").max = model.max_length;
    for (const select of [$("sampler"), $("other")]) {
      const there = new Set([...select.options].map((option) => option.value));
      for (const name of Object.keys(model.samplers)) {
        if (name !== "order" && !there.has(name)) select.append(new Option(name.replaceAll("_", " "), name));
      }
    }
    const takes = Object.values(model.samplers).flat();
    for (const label of document.querySelectorAll("[data-option]")) label.hidden = !takes.includes(label.dataset.option);
    $("error").hidden = true;
    const body = restore();
    show_values();
    if (body) perform_again(body);
  } catch (error) {
    fail(error.message);
  }
}

// The request of a link, with its own options and seed.
async function perform_again(body) {
  const { tokens, text, tokens_per_blank, seed } = body;
  await perform(tokens ? { tokens, seed } : { text, tokens_per_blank, seed }, null);
}

$("key").value = sessionStorage.getItem("key") ?? "";
show_values();
connect();
