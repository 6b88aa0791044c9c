// Texts and how they are drawn. A text is a list of tokens {id, piece, phase, logprob, top, locked}; id is null where a
// token is still to be drawn, phase is undefined where it was given.

const BEGINS = /^[\p{L}\p{N}\p{M}'’-]/u, ENDS = /[\p{L}\p{N}\p{M}'’-]$/u;
const BOUNDS = [0.5, 0.2, 0.05, 0.01];

// Runs of tokens that are one word, or one punctuation mark, for the reader.
export function words_of(text) {
  const found = [];
  let word = "";
  text.forEach(({ piece }, i) => {
    const inside = i > 0 && (piece === "" || (BEGINS.test(piece) && ENDS.test(word)));
    if (inside) found.at(-1).last = i;
    else found.push({ first: i, last: i });
    word = inside ? word + piece : piece;
  });
  return found;
}

// The class of a probability on the scale of five colours.
export function level(probability) {
  const found = BOUNDS.findIndex((bound) => probability >= bound);
  return `p${found < 0 ? BOUNDS.length : found}`;
}

function token_span(token, eos) {
  const span = document.createElement("span");
  if (token.id === null) {
    span.className = "todo";
    return [span];
  }
  const gap = token.piece.match(/^\s*/)[0], ink = token.piece.slice(gap.length), ends = token.id === eos;
  span.textContent = ends ? "" : ink;
  span.className = `token ${token.phase ?? "given"}`;
  if (ends) span.classList.add("end");
  else if (!ink && gap.includes("\n")) span.classList.add("break");
  if (token.locked) span.classList.add("locked");
  if (token.fresh) span.classList.add("fresh");
  if (token.logprob != null) span.classList.add(level(Math.exp(token.logprob)));
  if (!gap) return [span];
  return span.classList.contains("break") ? [span, document.createTextNode(gap)] : [document.createTextNode(gap), span];
}

// Draw a finished text as words. With `live` they can be chosen, and the word with token `focus` takes the tab stop.
export function draw(box, text, eos, live, focus = 0) {
  const had_focus = box.contains(document.activeElement), words = words_of(text);
  box.removeAttribute("aria-busy");
  box.replaceChildren(...words.map(({ first, last }) => {
    const span = document.createElement("span");
    span.className = "word";
    Object.assign(span.dataset, { first, last });
    if (live) {
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      span.tabIndex = focus >= first && focus <= last ? 0 : -1;
    }
    for (let i = first; i <= last; i++) span.append(...token_span(text[i], eos));
    return span;
  }));
  if (!live || !words.length) return;
  const stop = box.querySelector("[tabindex='0']") ?? box.lastElementChild;
  stop.tabIndex = 0;
  if (had_focus) stop.focus({ preventScroll: true });
}

// Draw an unfinished text, token by token; `update` then replaces single ones, so that nothing else is drawn again.
export function draw_steps(box, text, eos) {
  if (box.contains(document.activeElement)) {
    box.tabIndex = -1;
    box.focus({ preventScroll: true });
  }
  box.setAttribute("aria-busy", "true");
  box.replaceChildren(...text.map((token) => {
    const cell = document.createElement("span");
    cell.append(...token_span(token, eos));
    return cell;
  }));
}

export function update(box, position, token, eos) {
  box.children[position].replaceChildren(...token_span({ ...token, fresh: true }, eos));
}

export const plain = (text, eos) => text.filter((token) => token.id !== eos).map((token) => token.piece).join("");
