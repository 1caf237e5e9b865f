// Two runs side by side.

function versus() {
  const found = data.versus;
  if (!found) return [];
  const group = new Group(() => {});
  const value = (kind, each) => (each === null ? "–" : show[kind](each));
  const figures = grid(
    "Figures of both runs",
    [{ label: "" }, ...found.names.map((name) => ({ label: name, number: true })), { label: "change", number: true }],
    found.figures.map((row) => [
      row.label,
      ...row.values.map((each) => value(row.kind, each)),
      row.change === null ? "" : signed(row.change),
    ]),
  );
  figures.dataset.table = "versus";
  return [
    h("div", { class: "card" }, figures),
    h("div", { class: "curves" }, curveCards(found.curves, group, [])),
    differences("Settings that differ", "versus-settings", found.settings, found.names, "All settings are the same."),
    differences("Machine and software that differ", "versus-environment", found.environment, found.names, null),
  ].filter(Boolean);
}

function differences(title, name, rows, names, none) {
  if (!rows.length && !none) return null;
  if (!rows.length) return h("p", { class: "card" }, none);
  const table = grid(
    title,
    [{ label: "" }, ...names.map((label) => ({ label }))],
    rows.map((row) => [row.name, ...row.values.map((value) => (value === null ? "–" : h("code", {}, value)))]),
  );
  table.dataset.table = name;
  return card(null, title, null, table);
}
