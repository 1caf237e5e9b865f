// Horizontal bars, stacked by category. Positions are shares of the width, so a bar follows the page without being drawn again.

const KNOWN = new Set();

function swatchOf(category) {
  return `cat-${KNOWN.has(category) ? category : "other"}`;
}

function orderedCategories(names) {
  const known = [...KNOWN].filter((name) => names.has(name));
  return [...known, ...[...names].filter((name) => !KNOWN.has(name))];
}

// One legend for all charts of memory. Pointing at a category, or choosing it, fades the others everywhere.
function legend(names) {
  let chosen = null;
  const fade = (category) => {
    for (const each of document.querySelectorAll("[data-category]"))
      each.classList.toggle("faded", category !== null && each.dataset.category !== category);
  };
  const buttons = names.map((name) =>
    h(
      "button",
      {
        type: "button",
        class: "key",
        "data-category": name,
        "aria-pressed": "false",
        onpointerenter: () => fade(name),
        onpointerleave: () => fade(chosen),
        onclick: () => {
          chosen = chosen === name ? null : name;
          for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.category === chosen));
          fade(chosen);
        },
      },
      h("i", { class: `swatch ${swatchOf(name)}` }),
      name,
    ),
  );
  return h(
    "div",
    { class: "legend", role: "group", "aria-label": "Categories of memory; choose one to see it alone" },
    buttons,
  );
}

function percent(value, max) {
  return `${Math.max(0, Math.min(100, (100 * value) / max)).toFixed(3)}%`;
}

// rows: [{label, sub, parts, total, note, beside, sub_note, mark}]; lines: [{value, label, kind}]; max: the right end of the axis.
function barChart(name, kind, rows, lines, max) {
  lines = lines.filter((line) => line.value && line.value <= max);
  const { ticks, format } = axis(kind, 0, max, 4);
  const rules = () =>
    ticks.map((tick) =>
      s("line", { class: "rule", x1: percent(tick, max), x2: percent(tick, max), y1: "0", y2: "100%" }),
    );
  const limits = () =>
    lines.map((line) =>
      s("line", {
        class: `limit ${line.kind}`,
        x1: percent(line.value, max),
        x2: percent(line.value, max),
        y1: "0",
        y2: "100%",
      }),
    );
  const anchor = (value) => (value > 0.88 * max ? "end" : value < 0.06 * max ? "start" : "middle");
  const body = rows.map((row) =>
    h(
      "div",
      { class: `bar-row${row.strong ? " strong" : ""}` },
      h("div", { class: "bar-label" }, row.label, row.sub ? h("small", {}, row.sub) : null),
      h(
        "div",
        { class: "bar-cell" },
        s(
          "svg",
          { class: "bar", role: "img", "aria-label": `${row.label}: ${show[kind](row.total)}` },
          rules(),
          segments(row, kind, max),
          limits(),
          row.total > max * 1.0001 ? torn() : null,
          row.mark && row.mark <= max ? mark(row, kind, max) : null,
        ),
      ),
      h(
        "div",
        { class: "bar-note" },
        row.note,
        row.beside ? h("span", {}, row.beside) : null,
        row.sub_note ? h("small", {}, row.sub_note) : null,
      ),
    ),
  );
  const labels = lines.length
    ? h(
        "div",
        { class: "bar-row lines" },
        h("div", { class: "bar-label" }),
        h(
          "div",
          { class: "bar-cell" },
          s(
            "svg",
            { class: "bar-lines", "aria-hidden": "true" },
            lines.map((line) =>
              s(
                "text",
                {
                  class: `limit-label ${line.kind}`,
                  x: percent(line.value, max),
                  y: line.kind === "budget" ? 25 : 11,
                  "text-anchor": anchor(line.value),
                },
                line.label,
              ),
            ),
          ),
        ),
        h("div", { class: "bar-note" }),
      )
    : null;
  if (labels && lines.length > 1) labels.classList.add("two");
  const foot = h(
    "div",
    { class: "bar-row foot" },
    h("div", { class: "bar-label" }),
    h(
      "div",
      { class: "bar-cell" },
      s(
        "svg",
        { class: "bar-axis", "aria-hidden": "true" },
        ticks.map((tick) =>
          s(
            "text",
            {
              x: percent(tick, max),
              y: 14,
              "text-anchor": tick === 0 ? "start" : anchor(tick) === "end" && tick > 0.97 * max ? "end" : "middle",
            },
            format(tick),
          ),
        ),
      ),
    ),
    h("div", { class: "bar-note" }),
  );
  return h("div", { class: "bars", "data-chart": name }, labels, body, foot);
}

function segments(row, kind, max) {
  let start = 0;
  return Object.entries(row.parts).map(([category, value]) => {
    const from = start;
    start += value;
    const end = Math.min(start, max);
    if (from >= max) return null;
    const point = (event) =>
      tip.show(event.clientX, event.clientY, row.label, [
        [category, `${show[kind](value)} · ${show.share(value / row.total)}`, row.single ? null : swatchOf(category)],
      ]);
    return s("rect", {
      class: row.single ? `segment ${row.single}` : `segment ${swatchOf(category)}`,
      "data-category": row.single ? null : category,
      "data-value": value,
      x: percent(from, max),
      width: percent(end - from, max),
      y: "50%",
      height: 20,
      onpointermove: point,
      onpointerdown: point,
      onpointerleave: (event) => event.pointerType === "touch" || tip.hide(),
    });
  });
}

function torn() {
  // The bar goes on beyond the axis.
  return s(
    "svg",
    { x: "100%", y: "50%", overflow: "visible", "aria-hidden": "true" },
    s("path", { class: "torn", d: "M-8,-11 l5,5.5 -5,5.5 5,5.5 -5,5.5 H2 V-11 z" }),
  );
}

function mark(row, kind, max) {
  const point = (event) =>
    tip.show(event.clientX, event.clientY, row.label, [
      ["measured", show[kind](row.mark), null],
      ["predicted", show[kind](row.total), null],
    ]);
  return s(
    "svg",
    { x: percent(row.mark, max), y: "50%", overflow: "visible" },
    s("path", {
      class: "mark",
      d: "M-4,-14 h8 v2.5 h-2.75 v23 h2.75 v2.5 h-8 v-2.5 h2.75 v-23 h-2.75 z",
      "data-value": row.mark,
      onpointermove: point,
      onpointerdown: point,
      onpointerleave: (event) => event.pointerType === "touch" || tip.hide(),
    }),
  );
}

// The table behind stacked bars: a row a category, a column a bar.
function partsTable(label, kind, bars, summary = null) {
  const names = new Set(bars.flatMap((bar) => Object.keys(bar.parts)));
  const columns = [{ label: "" }, ...bars.map((bar) => ({ label: bar.label, number: true }))];
  const rows = orderedCategories(names).map((name) => [
    name,
    ...bars.map((bar) => (bar.parts[name] ? show[kind](bar.parts[name]) : "")),
  ]);
  rows.push(["total", ...bars.map((bar) => show[kind](bar.total))]);
  const table = asTable(label, columns, rows);
  if (summary) table.querySelector("summary").textContent = summary;
  return table;
}
