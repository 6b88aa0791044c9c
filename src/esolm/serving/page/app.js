// The page: its state, its buttons and options, and what they do. A version is {text, note, second, request}: undo goes
// back to the one before, and a link holds its request.

import { read_link, write_link } from "./link.js";
import { hide_peek, show_peek } from "./peek.js";
import { NOTHING, SETTINGS, offer_samplers, sampling_options, settings, show_options, title } from "./options.js";
import { pick } from "./pick.js";
import { access, fetch_json, infill } from "./server.js";
import { draw, draw_steps, plain, update } from "./text.js";

const $ = (id) => document.getElementById(id);
const BLANK = /___+/g;
const NEW = { text: [], note: "", second: null, request: null };
const state = { now: NEW, past: [], future: [], running: null, model: null, turn: 0, focus: 0 };
const panes = [
  { box: $("text"), note: $("note"), name: $("name"), text: [], live: true },
  { box: $("text2"), note: $("note2"), name: $("name2"), text: [], live: false },
];

// --- sampling ---------------------------------------------------------------------------------------------------

// A typed seed is that of a new text; rewrites count on from it, so that each draws anew.
function next_seed(fresh) {
  state.turn = fresh ? 0 : state.turn + 1;
  const typed = $("seed").value;
  return typed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(typed) + state.turn;
}

// Run one request and show every step; returns the tokens and a note of what it took. `old`: the text of a rewrite.
async function sample(pane, body, old, signal) {
  const eos = state.model.eos_id;
  let text = [], passes = 0;
  const start = (ids) => {
    text = pane.text = ids.map((id, i) => (id === null ? { id, piece: " " } : { piece: "", ...old?.[i], id }));
    draw_steps(pane.box, text, eos);
    if (!old) name_pieces(pane, text, signal).catch(() => {});  // the finished text names them as well
  };
  const step = ({ positions, tokens, pieces, phases, logprobs }) => {
    positions.forEach((position, k) => {
      text[position] = { id: tokens[k], piece: pieces[k], phase: phases[k], logprob: logprobs[k] };
      update(pane.box, position, text[position], eos);
    });
    pane.note.textContent = `step ${(passes += 1)} …`;
  };
  const { choice, seconds } = await infill(body, signal, start, step);
  choice.tokens.forEach((id, i) => Object.assign(text[i], { id, piece: choice.pieces[i] }));
  for (const i of choice.drawn) {
    const top = choice.top_logprobs[i].map(([id, logprob], k) => ({ id, logprob, piece: choice.top_pieces[i][k] }));
    Object.assign(text[i], { logprob: choice.logprobs[i], top, fresh: !!old });
  }
  const { passes: calls, drawn } = choice;
  const counted = (n, what) => `${n} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;
  const note = [counted(calls, "pass"), `${seconds.toFixed(2)} s`, counted(drawn.length, "token"), `seed ${body.seed}`];
  return { text, note: note.join(" · ") };
}

async function name_pieces(pane, text, signal) {
  const known = text.filter((token) => token.id !== null);
  if (!known.length) return;
  const found = await fetch_json("detokenize", { tokens: known.map(({ id }) => id), with_pieces: true }, signal);
  known.forEach((token, i) => { token.piece = found.pieces[i]; });
  if (pane.text === text && pane.box.hasAttribute("aria-busy")) draw_steps(pane.box, text, state.model.eos_id);
}

// What a request samples: a text with blanks, or tokens with nulls.
async function rows_of({ source, row, settings: values }, signal) {
  if (row) return { tokens: row };
  if (source.search(BLANK) >= 0) {
    return { text: source.replace(BLANK, "____"), tokens_per_blank: Number(values.per_blank) };
  }
  const ids = source ? (await fetch_json("tokenize", { content: source }, signal)).tokens : [];
  const { max_length, block_size } = state.model;
  const length = ids.length + Math.max(1, Math.min(Number(values.count), max_length - ids.length));
  return { tokens: [...ids, ...Array(Math.ceil(length / block_size) * block_size - ids.length).fill(null)] };
}

async function perform(request, old) {
  if (!state.model) return fail(new Error("The page is not connected to a model."));
  state.running?.abort();
  const control = (state.running = new AbortController()), { signal } = control, values = request.settings;
  hide_peek();
  $("error").hidden = true;
  $("status").textContent = "";
  $("note").textContent = $("note2").textContent = "";
  $("text2").replaceChildren();
  lay_out(values.other === NOTHING ? null : values, false);
  buttons();
  try {
    const body = { ...(await rows_of(request, signal)), seed: request.seed };
    const first = await sample(panes[0], { ...body, ...sampling_options(values, values.sampler) }, old, signal);
    for (const i of request.locked) if (first.text[i]) first.text[i].locked = true;
    const second = values.other === NOTHING ? null : await compare(body, values, old ?? first.text, signal);
    signal.throwIfAborted();
    commit({ text: first.text, note: first.note, second, request });
    $("status").textContent = summary(first, second, old, request);
    const drawn = first.text.filter((token, i) => token.id !== old?.[i].id);
    $("announce").textContent = old ? `Rewritten: ${plain(drawn, state.model.eos_id)}` : "The text is ready.";
  } catch (error) {
    if (state.running === control) {
      show(state.now);
      if (error.name !== "AbortError") fail(error);
    }
  } finally {
    if (state.running === control) state.running = null;
    buttons();
  }
}

// The other sampler, after the first has finished, so that neither slows the other down.
async function compare(body, values, old, signal) {
  try {
    const found = await sample(panes[1], { ...body, ...sampling_options(values, values.other) }, old, signal);
    found.text.forEach((token) => { token.fresh = false; });
    return found;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    fail(error);
    return null;
  }
}

function summary(first, second, old, request) {
  if (second) return "The two ran one after the other, with the same seed.";
  const begun = !old && !request.row && request.source.search(BLANK) < 0;
  if (begun && first.text.every(({ id }) => id !== state.model.eos_id)) {
    return "Cut at the number of new tokens; more make it longer.";
  }
  const same = old?.every((token, i) => token.id === first.text[i].id);
  return same ? "The same words were drawn again. Try once more, or raise the temperature." : "";
}

function request_now(fresh) {
  return { source: $("source").value, row: null, locked: [], settings: settings(), seed: next_seed(fresh) };
}

function rewrite(first, last) {
  const old = state.now.text, row = old.map(({ id, locked }, i) => (i >= first && i <= last && !locked ? null : id));
  if (!row.includes(null)) return fail(new Error("These words are locked. Unlock them to have them rewritten."));
  perform({ ...request_now(false), row, locked: old.flatMap(({ locked }, i) => (locked ? [i] : [])) }, old);
}

function lock(first, last) {
  const { text, request } = state.now, locked = !text.slice(first, last + 1).every((token) => token.locked);
  const changed = text.map((token, i) => (i >= first && i <= last ? { ...token, locked } : token));
  const positions = changed.flatMap((token, i) => (token.locked ? [i] : []));
  $("error").hidden = true;
  commit({ ...state.now, text: changed, request: { ...request, locked: positions } });
}

function act(first, last, key_tool) {
  if (state.running) return;
  const tool = key_tool ?? document.querySelector("input[name=tool]:checked").value;
  state.focus = first;
  if (tool === "rewrite") rewrite(first, last);
  else if (tool === "lock") lock(first, last);
  else peek_at($("text").querySelector(`[data-first="${first}"]`), panes[0]);
}

// --- versions ---------------------------------------------------------------------------------------------------

function commit(version) {
  state.past.push(state.now);
  state.future = [];
  show(version);
}

function travel(from, to) {
  if (!from.length || state.running) return;
  to.push(state.now);
  $("status").textContent = "";
  $("error").hidden = true;
  show(from.pop());
}

// Show the parts that a text or a comparison needs; `values` are the settings of a comparison.
function lay_out(values, empty) {
  $("empty").hidden = !empty;
  $("panes").hidden = $("legends").hidden = empty;
  $("second").hidden = $("name").hidden = !values;
  if (values) [$("name").textContent, $("name2").textContent] = [title(values.sampler), title(values.other)];
}

function show(version) {
  const { text, note, second, request } = version, eos = state.model?.eos_id;
  state.now = version;
  hide_peek();
  lay_out(second ? request.settings : null, !text.length);
  [text, second?.text ?? []].forEach((each, k) => {
    panes[k].text = each;
    draw(panes[k].box, each, eos, panes[k].live, state.focus);
    each.forEach((token) => { token.fresh = false; });
  });
  $("note").textContent = note;
  $("note2").textContent = second?.note ?? "";
  history.replaceState(null, "", request ? write_link(request) : location.pathname);
  buttons();
}

function buttons() {
  const busy = !!state.running;
  $("halt").hidden = !busy;
  $("undo").disabled = busy || !state.past.length;
  $("redo").disabled = busy || !state.future.length;
  $("copy").disabled = $("link").disabled = busy || !state.now.text.length;
  $("keep").disabled = busy;
}

function fail(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
  $("error").scrollIntoView({ block: "nearest" });
  if (error.status === 401) {
    $("key-label").hidden = false;
    $("options").open = true;
    $("key").focus();
  }
}

function peek_at(word, pane, delay) {
  const tokens = word && pane.text.slice(Number(word.dataset.first), Number(word.dataset.last) + 1);
  if (tokens) show_peek(word, tokens, state.model.eos_id, delay);
}

async function copy(text, done, otherwise) {
  try {
    await navigator.clipboard.writeText(text);
    $("status").textContent = done;
  } catch {
    fail(new Error(`The browser does not let this page copy. ${otherwise}`));
  }
}

// --- events -----------------------------------------------------------------------------------------------------

for (const pane of panes) {
  pane.box.addEventListener("pointerover", (event) => {
    if (event.pointerType !== "touch" && !event.buttons) peek_at(event.target.closest(".word"), pane, 150);
  });
  pane.box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide_peek(); });
  pane.box.addEventListener("focusin", (event) => {
    if (event.target.matches(".word:focus-visible")) peek_at(event.target, pane);
  });
  pane.box.addEventListener("focusout", hide_peek);
}
pick($("text"), act);

$("form").addEventListener("submit", (event) => { event.preventDefault(); perform(request_now(true), null); });
$("source").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => { $("source").value = example.dataset.source; $("form").requestSubmit(); });
}
$("halt").addEventListener("click", () => state.running?.abort());
$("undo").addEventListener("click", () => travel(state.past, state.future));
$("redo").addEventListener("click", () => travel(state.future, state.past));
$("copy").addEventListener("click", () => {
  const text = plain(state.now.text, state.model.eos_id);
  copy(text, "The text is copied.", "Browsers allow it over https and on localhost.");
});
$("link").addEventListener("click", () => {
  copy(location.href, "The link is copied. It reproduces this text.", "The link is in the address bar.");
});
$("keep").addEventListener("click", () => {
  const { second, request } = state.now;
  const values = { ...request.settings, sampler: request.settings.other, other: NOTHING };
  $("sampler").value = values.sampler;
  $("other").value = NOTHING;
  show_options();
  commit({ text: second.text, note: second.note, second: null, request: { ...request, settings: values } });
});
$("tint").addEventListener("change", () => $("sheet").classList.toggle("tinted", $("tint").checked));
$("settings").addEventListener("input", show_options);
$("settings").addEventListener("reset", () => setTimeout(show_options));
$("settings").addEventListener("submit", (event) => { event.preventDefault(); $("form").requestSubmit(); });
$("key").addEventListener("change", () => {
  access.key = $("key").value;
  sessionStorage.setItem("key", access.key);
  connect();
});
document.addEventListener("pointerdown", hide_peek);
document.addEventListener("scroll", hide_peek, { capture: true, passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return state.running ? state.running.abort() : hide_peek();
  const typing = event.target.closest("textarea, input:not([type=radio], [type=checkbox], [type=range])");
  if (typing || event.key.toLowerCase() !== "z" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  event.shiftKey ? travel(state.future, state.past) : travel(state.past, state.future);
});
window.addEventListener("hashchange", open_link);

function open_link() {
  try {
    const request = read_link(location.hash, SETTINGS);
    if (!request) return;
    $("source").value = request.source;
    for (const [name, value] of Object.entries(request.settings)) {
      const there = $(name).options;
      if (there && ![...there].some((option) => option.value === value)) {
        return fail(new Error(`The link uses the sampler ${title(value)}, which this model does not have.`));
      }
      $(name).value = value;
    }
    show_options();
    perform({ ...request, settings: { ...settings(), ...request.settings } }, null);
  } catch {
    fail(new Error("The link is damaged: its options cannot be read."));
  }
}

async function connect() {
  try {
    const model = (state.model = (await fetch_json("v1/models")).data[0]);
    $("model").textContent = `${model.id}: system ${model.system}, up to ${model.max_length} tokens`;
    $("error").hidden = true;
    offer_samplers(model);
    if (!state.now.request) open_link();
  } catch (error) {
    $("model").textContent = "not connected";
    fail(error);
  }
}

access.key = $("key").value = sessionStorage.getItem("key") ?? "";
$("options").open = matchMedia("(min-width: 62rem)").matches;
show_options();
connect();
