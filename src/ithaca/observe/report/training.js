// The curves of a run over its steps.

const LINE_STYLES = { eval_loss: "second", host_peak: "second", disk_peak: "third" };

function training() {
  if (!data.curves.length) return [];
  const reset = h("button", { type: "button", class: "reset", hidden: true }, "Show all steps");
  const group = new Group((domain) => {
    reset.hidden = domain === null;
  });
  reset.addEventListener("click", () => group.zoom(null));
  const marks = data.events
    .filter((event) => event.event === "resume" && event.step !== null)
    .map((event) => ({ x: event.step }));
  const help = h(
    "p",
    { class: "about with-button" },
    h(
      "span",
      {},
      "Point at a curve to read it, drag to zoom, double-click to see all. ",
      marks.length ? "Dashed lines: the run was resumed." : "",
    ),
    reset,
  );
  return [help, h("div", { class: "curves" }, curveCards(data.curves, group, marks))];
}

function curveCards(charts, group, marks) {
  return charts.map((chart) => {
    const lines = chart.lines.map((line) => ({
      ...line,
      style: line.style || LINE_STYLES[line.name] || "first",
      dots: line.name === "eval_loss",
      unit: "",
    }));
    const plot = new Plot(
      {
        name: chart.name,
        label: `${chart.title} over steps`,
        kind: chart.kind,
        x_kind: "step",
        height: 190,
        zero: chart.zero,
        limit: chart.limit,
        limit_from: 0.2,
        lines,
        marks,
      },
      group,
    );
    const readout = h("span", { class: "readout" });
    const last = lines[0].y[lines[0].y.length - 1];
    plot.onread = (rows) => {
      readout.textContent = rows ? rows[0][1] : show[chart.kind](last);
    };
    plot.onread(null);
    const named = lines.length > 1 || lines[0].style !== "first" ? lines.filter((line) => !line.mean) : [];
    const keys = named.map((line) =>
      h("span", { class: "key" }, h("i", { class: `swatch ${line.style}` }), line.label),
    );
    const mean = lines[0].mean
      ? h("span", { class: "key" }, h("i", { class: "swatch mean" }), `mean of ${lines[0].mean.of}`)
      : null;
    return h(
      "section",
      { class: "card curve-card", "aria-label": chart.title },
      h("div", { class: "chart-head" }, h("h3", {}, chart.title), readout),
      plot.host,
      h("div", { class: "chart-foot" }, curveTable(chart, lines), h("span", { class: "keys" }, keys, mean)),
    );
  });
}

function curveTable(chart, lines) {
  const steps = new Set(lines.flatMap((line) => sample(line.y).map((index) => line.x[index])));
  const values = lines.map((line) => new Map(line.x.map((x, index) => [x, line.y[index]])));
  const rows = [...steps]
    .sort((a, b) => a - b)
    .map((step) => [
      show.integer(step),
      ...values.map((each) => (each.has(step) ? show[chart.kind](each.get(step)) : "")),
    ]);
  const points = lines[0].points;
  return asTable(
    `${chart.title}, values`,
    [{ label: "step", number: true }, ...lines.map((line) => ({ label: line.label, number: true }))],
    rows,
    rows.length < points ? `${rows.length} of ${show.integer(points)} steps, smallest and largest included.` : null,
  );
}
