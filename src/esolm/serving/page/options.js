// The options of the page: their values, those that a sampler takes, and how they are shown.

const $ = (id) => document.getElementById(id);
const SLIDERS = ["count", "per_blank", "alpha_0", "num_steps", "parallelism", "window", "temperature", "top_p"];
export const SETTINGS = [...SLIDERS, "sampler", "other"];
export const NOTHING = "-";  // the value of "compare with nothing"
let samplers = {};  // each with the options that it takes

export const settings = () => Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]));
export const title = (sampler) => (sampler ? sampler.replaceAll("_", " ") : "default sampler");

// The default sampler takes alpha_0 and num_steps where any does.
function taken_by(sampler) {
  if (sampler) return samplers[sampler] ?? [];
  return Object.values(samplers).flat().filter((name) => name === "alpha_0" || name === "num_steps");
}

// The sampling options of a request.
export function sampling_options(values, sampler) {
  const body = { temperature: Number(values.temperature), top_p: Number(values.top_p) }, takes = taken_by(sampler);
  if (sampler) body.sampler = sampler;
  if (values.alpha_0 >= 0 && takes.includes("alpha_0")) body.alpha_0 = Number(values.alpha_0);
  if (values.num_steps > 0 && takes.includes("num_steps")) body.num_steps = Number(values.num_steps);
  for (const name of ["parallelism", "window"]) if (takes.includes(name)) body[name] = Number(values[name]);
  return body;
}

// The surest of the next tokens first is what reads best of the samplers in any order, so it is chosen where it exists.
export function offer_samplers(model) {
  samplers = model.samplers;
  $("count").max = $("num_steps").max = model.max_length;
  for (const select of [$("sampler"), $("other")]) {
    const there = new Set([...select.options].map((option) => option.value));
    for (const name of Object.keys(samplers)) {
      const best = select.id === "sampler" && name === "confidence" && samplers[name].includes("window");
      if (name !== "order" && !there.has(name)) select.append(new Option(title(name), name, best, best));
    }
  }
  show_options();
}

// Show the value of each slider, and the options that the chosen samplers take.
export function show_options() {
  const named = { alpha_0: (v) => (v < 0 ? "as trained" : v), num_steps: (v) => (v > 0 ? v : "a token each") };
  for (const id of SLIDERS) {
    const value = Number($(id).value);
    $(id).closest("label").querySelector("output").textContent = named[id]?.(value) ?? value;
  }
  const chosen = [$("sampler").value, ...($("other").value === NOTHING ? [] : [$("other").value])];
  for (const label of document.querySelectorAll("[data-option]")) {
    label.hidden = !chosen.some((sampler) => taken_by(sampler).includes(label.dataset.option));
  }
}
