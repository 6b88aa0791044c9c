// Choosing words of a text: by a click, by dragging over several, or with the keyboard.

const ARROWS = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]);

function mark(box, one, two) {
  const words = [...box.children], [low, high] = [words.indexOf(one), words.indexOf(two)].sort((a, b) => a - b);
  words.forEach((word, i) => {
    const inside = low >= 0 && i >= low && i <= high;
    word.classList.toggle("selected", inside);
    word.setAttribute("aria-selected", inside);
  });
}

// The word above or below: the nearest one of the next line.
function vertical(box, word, direction) {
  const from = word.getBoundingClientRect(), middle = (from.left + from.right) / 2;
  const rects = [...box.children].map((each) => [each, each.lastElementChild.getBoundingClientRect()]);
  const beyond = rects.filter(([, r]) => (direction > 0 ? r.top >= from.bottom - 4 : r.bottom <= from.top + 4));
  const next = direction > 0 ? Math.min(...beyond.map(([, r]) => r.top)) : Math.max(...beyond.map(([, r]) => r.top));
  const line = beyond.filter(([, r]) => Math.abs(r.top - next) < 4);
  const distance = ([, r]) => Math.abs((r.left + r.right) / 2 - middle);
  return line.sort((a, b) => distance(a) - distance(b))[0]?.[0];
}

function neighbour(box, word, key) {
  if (key === "Home") return box.firstElementChild;
  if (key === "End") return box.lastElementChild;
  if (key === "ArrowLeft") return word.previousElementSibling;
  if (key === "ArrowRight") return word.nextElementSibling;
  return vertical(box, word, key === "ArrowDown" ? 1 : -1);
}

// Calls act(first, last, tool) with the tokens that were chosen, and the tool of a key or null for the current one.
export function pick(box, act) {
  let anchor = null, drag = null;  // where Shift and where dragging began

  const chosen = (tool) => {
    const marked = [...box.querySelectorAll(".selected")];
    mark(box, null, null);
    anchor = null;
    if (marked.length) act(Number(marked[0].dataset.first), Number(marked.at(-1).dataset.last), tool);
  };
  const word_at = ({ clientX, clientY }) => {
    const word = document.elementFromPoint(clientX, clientY)?.closest?.(".word");
    return word && box.contains(word) ? word : null;
  };

  box.addEventListener("pointerdown", (event) => {
    const word = word_at(event);
    if (!word || event.button || box.hasAttribute("aria-busy")) return;
    drag = word;
    mark(box, word, word);
  });
  window.addEventListener("pointermove", (event) => {
    const word = drag && word_at(event);
    if (word) mark(box, drag, word);
  });
  window.addEventListener("pointerup", () => {
    if (drag) chosen(null);
    drag = null;
  });
  window.addEventListener("pointercancel", () => {
    if (drag) mark(box, null, null);
    drag = null;
  });

  box.addEventListener("keydown", (event) => {
    const word = event.target.closest(".word"), control = event.ctrlKey || event.metaKey;
    if (!word || event.altKey) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (ARROWS.has(key) && !control) {
      const next = neighbour(box, word, key);
      if (next) {
        anchor = event.shiftKey ? anchor ?? word : null;
        word.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
        mark(box, anchor, next);
      }
    } else if (key === "a" && control) {
      mark(box, box.firstElementChild, box.lastElementChild);
    } else if (key === "Escape") {
      mark(box, null, null);
      anchor = null;
      return;
    } else if ((key === "Enter" || key === " " || key === "l") && !control) {
      if (!word.classList.contains("selected")) mark(box, word, word);
      chosen({ Enter: "rewrite", l: "lock" }[key] ?? null);
    } else return;
    event.preventDefault();
  });
}
