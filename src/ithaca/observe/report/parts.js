// Parts that every page of ours has: what a step's time goes to, the switches of the stack, and the theme.

function times(found) {
  if (!found) return null;
  const bars = found.bars.map((bar) => ({
    label: bar.label,
    parts: { [bar.label]: bar.value },
    total: bar.value,
    single: bar.bound ? "bound" : "part-of-time",
    strong: bar.bound,
    note: show.seconds(bar.value),
    sub_note: bar.bound ? "bound by this" : null,
  }));
  const max = Math.max(found.step || 0, ...bars.map((bar) => bar.total)) * 1.04;
  const rows = found.bars.map((bar) => [
    bar.label,
    show.seconds(bar.value),
    found.step ? show.share(bar.value / found.step) : "",
  ]);
  return card(
    "times",
    "A step, as planned",
    "Copies and links run beside computation, so the parts may add up to more than the step.",
    barChart(
      "times",
      "seconds",
      bars,
      [{ value: found.step, label: `step ${show.seconds(found.step || 0)}`, kind: "step" }],
      max,
    ),
    asTable(
      "Time of a step by part",
      [{ label: "" }, { label: "time", number: true }, { label: "of the step", number: true }],
      rows,
    ),
  );
}

function stack(fields) {
  if (!fields.length) return null;
  const rows = fields.map((row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, row.field),
      h("td", {}, h("code", {}, row.value), row.planned ? h("small", {}, ` planned: ${row.planned}`) : null),
      h("td", { class: "why" }, row.why || "", row.from ? h("small", {}, ` ${row.from}`) : null),
    ),
  );
  const reasons = fields.some((row) => row.why);
  return h(
    "div",
    { class: "card" },
    h(
      "table",
      { class: `stack${reasons ? "" : " bare"}`, "data-table": "stack" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["technique", "value", reasons ? "why" : ""].map((label) => h("th", { scope: "col" }, label)),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}

function themes() {
  const order = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("ithaca-theme") || "auto";
  } catch {
    /* a browser may refuse storage to a file; the choice then lasts as long as the page */
  }
  const apply = () => {
    if (!order.includes(chosen)) chosen = "auto";
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
  };
  button.addEventListener("click", () => {
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    try {
      localStorage.setItem("ithaca-theme", chosen);
    } catch {
      /* as above */
    }
    apply();
  });
  apply();
}
