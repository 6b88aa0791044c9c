// A link holds everything that determines a sample: the text or the tokens, every option and the seed.

export function write_link({ source, row, locked, settings, seed }) {
  const values = new URLSearchParams({ source, ...settings, seed });
  if (row) values.set("row", row.map((id) => id ?? "").join("."));
  if (locked?.length) values.set("locked", locked.join("."));
  return `${location.origin}${location.pathname}#${values}`;
}

const whole = (text) => {
  if (!/^\d+$/.test(text)) throw new Error("not a whole number");
  return Number(text);
};

// The request of a link, or null if there is none. Throws if the link is damaged.
export function read_link(hash, names) {
  if (hash.length < 2) return null;
  const values = new URLSearchParams(hash.slice(1)), list = (name) => values.get(name)?.split(".") ?? null;
  if (!values.has("source") || !values.has("seed")) throw new Error("source or seed is missing");
  return {
    source: values.get("source"),
    row: list("row")?.map((id) => (id === "" ? null : whole(id))) ?? null,
    locked: list("locked")?.map(whole) ?? [],
    settings: Object.fromEntries(names.filter((name) => values.has(name)).map((name) => [name, values.get(name)])),
    seed: whole(values.get("seed")),
  };
}
