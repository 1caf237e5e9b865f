// What a run was made of: data, machine and software, and the settings that were given.

function sources() {
  const found = data.data;
  if (!found) return null;
  const shown = (kind, value) => (value === null ? "–" : show[kind](value));
  const rows = found.sources.map((source) => [
    h("span", { class: "name" }, source.name),
    source.kind || "–",
    shown("share", source.share),
    shown("count", source.documents),
    shown("count", source.tokens),
    source.tokens && source.supervised !== null ? show.share(source.supervised / source.tokens) : "–",
    shown("count", source.rows),
    shown("share", source.full),
  ]);
  const names = ["source", "kind", "share of steps", "documents", "tokens", "supervised", "rows", "rows full"];
  const table = grid(
    "Sources",
    names.map((label, index) => ({ label, number: index > 1 })),
    rows,
  );
  table.dataset.table = "sources";
  const notes = found.sources.flatMap((source) => source.notes.map((note) => h("li", {}, h("b", {}, source.name), `: ${note}`)));
  return h(
    "div",
    { class: "card" },
    found.counted ? table : h("p", {}, found.sources.map((source) => source.name).join(", ")),
    notes.length ? h("ul", { class: "notes" }, notes) : null,
    found.counted
      ? null
      : h("p", { class: "note" }, "This run kept no counts of its data: it is of an older ithaca, or did not get that far."),
  );
}

function environment() {
  const found = data.environment;
  if (!found) return null;
  const pairs = (rows) =>
    h(
      "dl",
      { class: "pairs" },
      rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    );
  return [
    found.command ? h("div", { class: "card" }, h("pre", { class: "command", tabindex: "0" }, found.command)) : null,
    h(
      "div",
      { class: "pair" },
      card("machine", "Machine", null, pairs(found.facts.map((fact) => [fact.label, show[fact.kind](fact.value)]))),
      card("versions", "Software", null, pairs(found.versions.map((each) => [each.name, each.version]))),
    ),
  ];
}

function settings() {
  if (!data.settings.length) return null;
  const rows = data.settings.map((row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, row.name),
      h("td", {}, h("code", {}, row.value)),
      h("td", { class: "why" }, row.why || "", h("small", {}, ` ${row.from}`)),
    ),
  );
  return h(
    "details",
    { class: "card" },
    h("summary", {}, `Other settings that were given (${rows.length}); the rest has its defaults`),
    h("table", { class: "stack", "data-table": "settings" }, h("tbody", {}, rows)),
  );
}
