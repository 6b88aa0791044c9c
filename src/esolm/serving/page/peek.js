// The small panel with the probabilities of a word's tokens.

import { level } from "./text.js";

const PHASES = { diffusion: "drawn by diffusion", sequential: "drawn left to right" };

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100 %" : value < 0.1 ? "< 0.1 %" : `${value.toFixed(1)} %`;
};

const visible = (piece) => piece.replaceAll("\n", "↵").trim() || "␣";

function part(name, content, ...classes) {
  const element = document.createElement(name);
  element.classList.add(...classes);
  element.textContent = content;
  return element;
}

function rows_of(token, eos, most) {
  const name = (id, piece) => (id === eos ? "end of text" : visible(piece));
  if (token.logprob == null) return [part("p", `${name(token.id, token.piece)}: given`, "head")];
  const head = part("p", "", "head"), own = part("span", percent(token.logprob), level(Math.exp(token.logprob)));
  head.append(part("b", name(token.id, token.piece)), own);
  const phase = PHASES[token.phase] + (token.locked ? ", locked" : "");
  if (!token.top?.length) return [head, part("p", phase, "quiet")];
  const list = document.createElement("ol");
  for (const { id, piece, logprob } of token.top.slice(0, most)) {
    const row = part("li", name(id, piece), id === token.id ? "own" : "other");
    row.append(part("span", percent(logprob)));
    row.style.setProperty("--share", Math.exp(logprob - token.top[0].logprob));
    list.append(row);
  }
  return [head, part("p", `${phase}; the likeliest were`, "quiet"), list];
}

let waiting = 0;

export function hide_peek() {
  clearTimeout(waiting);
  const panel = document.getElementById("peek");
  panel.hidden = true;
  document.querySelector("[aria-describedby=peek]")?.removeAttribute("aria-describedby");
}

// Show the panel under a word, after a delay for a mouse that may only pass by.
export function show_peek(word, tokens, eos, delay = 0) {
  hide_peek();
  if (delay) {
    waiting = setTimeout(() => word.isConnected && show_peek(word, tokens, eos), delay);
    return;
  }
  const panel = document.getElementById("peek"), rect = word.lastElementChild.getBoundingClientRect();
  if (tokens.some((token) => token.id === null)) return;
  panel.replaceChildren(...tokens.flatMap((token) => rows_of(token, eos, Math.ceil(4 / tokens.length))));
  panel.hidden = false;
  word.setAttribute("aria-describedby", "peek");
  const wide = document.documentElement.clientWidth, high = document.documentElement.clientHeight;
  const left = Math.max(8, Math.min(rect.left, wide - panel.offsetWidth - 8));
  const lowest = high - panel.offsetHeight - 8, under = rect.bottom + 6, above = rect.top - panel.offsetHeight - 6;
  panel.style.left = `${left}px`;
  panel.style.top = `${Math.max(0, under <= lowest ? under : above > 0 ? above : lowest)}px`;
}
