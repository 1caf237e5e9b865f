// Memory: by phase, at the peak, over time, and rung by rung of the ladder.

function memoryLegend() {
  const names = new Set();
  for (const bar of [...(data.phases?.bars || []), ...(data.at_peak?.bars || []), ...(data.ladder?.rungs || [])])
    Object.keys(bar.parts).forEach((name) => names.add(name));
  for (const layer of data.timeline?.layers || []) names.add(layer.name);
  return names.size ? legend(orderedCategories(names)) : null;
}

function phases(found) {
  if (!found) return null;
  const bars = found.bars.map((bar) => ({
    ...bar,
    strong: bar.peak,
    mark: bar.measured,
    note: show.bytes(bar.total) + (bar.peak ? ", peak" : ""),
    sub_note: bar.measured ? `measured ${show.bytes(bar.measured)}` : null,
  }));
  const both = found.measured.length > 0;
  const lines = [{ value: found.limit, label: found.limit ? `GPU ${show.bytes(found.limit)}` : "", kind: "gpu" }];
  if (found.budget && found.budget !== found.limit)
    lines.push({ value: found.budget, label: `budget ${show.bytes(found.budget)}`, kind: "budget" });
  const { max } = reachOf(bars, found.limit);
  return card(
    "phases",
    both ? "By phase, planned and measured" : "By phase, as planned",
    both ? "Bars are planned; the I-shaped mark is the measured peak of the phase." : null,
    barChart("phases", "bytes", bars, lines, max),
    partsTable("Memory by phase", "bytes", bars),
    both ? partsTable("Memory by phase, as measured", "bytes", found.measured, "Measured values as a table") : null,
  );
}

function atPeak() {
  const found = data.at_peak;
  if (!found) return null;
  const bars = found.bars.map((bar) => ({ ...bar, note: show.bytes(bar.total) }));
  const { max } = reachOf(bars, found.limit);
  return card(
    "at-peak",
    found.bars.length > 1 ? "At the peak, planned and measured" : "At the peak, as measured",
    null,
    barChart(
      "at-peak",
      "bytes",
      bars,
      [{ value: found.limit, label: `GPU ${show.bytes(found.limit || 0)}`, kind: "gpu" }],
      max,
    ),
    partsTable("Memory at the peak", "bytes", bars),
  );
}

// The right end of an axis of bars. One bar of terabytes would flatten all others: it is cut where the limit can still be read.
function reachOf(bars, limit) {
  const whole = Math.max(...bars.map((bar) => Math.max(bar.total, bar.mark || 0)), limit || 0) * 1.04;
  const most = limit ? 1.9 * limit : whole;
  return whole > most * 1.15 ? { max: most, whole } : { max: whole, whole };
}

function timeline() {
  const found = data.timeline;
  if (!found) return null;
  const reset = h("button", { type: "button", class: "reset", hidden: true }, "Show all of it");
  const group = new Group((domain) => {
    reset.hidden = domain === null;
  });
  reset.addEventListener("click", () => group.zoom(null));
  const plot = new Plot(
    {
      name: "timeline",
      label: "Memory over time",
      kind: "bytes",
      x_kind: "seconds",
      height: 300,
      zero: true,
      limit: found.limit,
      limit_from: 0.6,
      x: found.seconds,
      layers: found.layers,
      marks: found.phases,
    },
    group,
  );
  const places = sample(plot.totals);
  const rows = places.map((index) => [
    show.seconds(found.seconds[index]),
    show.bytes(plot.totals[index]),
    ...found.layers.map((layer) => show.bytes(layer.values[index])),
  ]);
  const columns = [
    { label: "time", number: true },
    { label: "total", number: true },
    ...found.layers.map((layer) => ({ label: layer.name, number: true })),
  ];
  return card(
    "timeline",
    "Over time, as measured",
    null,
    h(
      "p",
      { class: "about with-button" },
      h(
        "span",
        {},
        `Point to read, drag to zoom, double-click to see all. Times are those at which memory was asked for, in a step that counting slows down.${found.limit ? ` The GPU has ${show.bytes(found.limit)}.` : ""}`,
      ),
      reset,
    ),
    plot.host,
    asTable(
      "Memory over time, values",
      columns,
      rows,
      rows.length < found.samples
        ? `${rows.length} of ${show.integer(found.samples)} moments, smallest and largest included.`
        : null,
    ),
  );
}

function ladder(found) {
  if (!found) return null;
  const rungs = found.rungs.map((rung) => ({
    ...rung,
    sub: rung.adds,
    mark: rung.measured,
    strong: rung.fits === true,
    note: `${rung.fits === false ? "✕ " : rung.fits ? "✓ " : ""}${show.bytes(rung.total)}`,
    beside: rung.rate ? `${show.rate(rung.rate)}${GAP}tok/s` : null,
    sub_note: rung.largest
      ? `largest: ${rung.largest}${rung.largest_bytes ? ` ${show.bytes(rung.largest_bytes)}` : ""}`
      : null,
  }));
  const lines = [{ value: found.limit, label: `GPU ${show.bytes(found.limit || 0)}`, kind: "gpu" }];
  const { max, whole } = reachOf(rungs, found.limit);
  const holder = h("div", {}, barChart("ladder", "bytes", rungs, lines, max));
  let cut = true;
  const toggle =
    max < whole
      ? h(
          "button",
          {
            type: "button",
            class: "reset",
            onclick: () => {
              cut = !cut;
              holder.replaceChildren(barChart("ladder", "bytes", rungs, lines, cut ? max : whole));
              toggle.textContent = cut ? "Show whole bars" : "Show the part around the limit";
            },
          },
          "Show whole bars",
        )
      : null;
  const measured = found.rungs.filter((rung) => rung.measured || rung.problem);
  const about = `Each rung adds one technique to the one above.${measured.length ? " The I-shaped mark is the measured peak." : ""}${toggle ? " Torn bars go on beyond the axis." : ""}`;
  return card(
    "rungs",
    "Peak memory, rung by rung",
    null,
    h("p", { class: "about with-button" }, h("span", {}, about), toggle),
    holder,
    partsTable("Ladder, memory by category", "bytes", rungs),
    measured.length ? rungTable(measured) : null,
  );
}

function rungTable(rungs) {
  const rows = rungs.map((rung) => [
    rung.label,
    show.bytes(rung.total),
    rung.measured ? show.bytes(rung.measured) : rung.problem,
    rung.measured ? signed((rung.measured - rung.total) / rung.total) : "",
    rung.rate ? show.rate(rung.rate) : "",
    rung.measured_rate ? show.rate(rung.measured_rate) : "",
  ]);
  const table = asTable(
    "Ladder, predicted and measured",
    ["", "peak, predicted", "measured", "deviation", "tokens/s, predicted", "measured"].map((label, index) => ({
      label,
      number: index > 0,
    })),
    rows,
  );
  table.querySelector("summary").textContent = "Predicted and measured";
  return table;
}

function sweeps() {
  if (!data.ladder || !data.ladder.sweeps.length) return null;
  return h(
    "div",
    { class: "pair" },
    data.ladder.sweeps.map((sweep) => {
      const name = sweep.name.replaceAll("_", " ");
      const title = name.charAt(0).toUpperCase() + name.slice(1);
      const labels = sweep.points.map((point) =>
        /^\d+$/.test(point.value) && sweep.name !== "heads_per_stage" ? show.tokens(Number(point.value)) : point.value,
      );
      const measured = sweep.points.some((point) => point.measured_peak);
      const group = new Group(() => {});
      const chart = (key, kind, title, limit, unit) => {
        const line = (field, label, style) => {
          const places = sweep.points.map((point, index) => [index, point]).filter(([, point]) => point[field]);
          return {
            name: field,
            label,
            style,
            dots: true,
            unit,
            x: places.map(([index]) => index),
            y: places.map(([, point]) => point[field]),
            open: places.map(([, point]) => field === key && point.fits === false),
          };
        };
        const [first, second] = key === "peak" ? ["first", "second"] : ["second", "first"];
        const lines = [line(key, measured ? "predicted" : title, first), line(`measured_${key}`, "measured", second)];
        if (!lines[0].x.length) return null;
        const plot = new Plot(
          {
            name: `sweep-${sweep.name}-${key}`,
            label: `${title} by ${name}`,
            kind,
            height: 150,
            zero: true,
            limit,
            limit_from: 0.2,
            lines: lines.filter((each) => each.x.length),
            x_labels: labels,
            x_title: name,
            still: true,
          },
          group,
        );
        plot.full = [-0.4, labels.length - 0.6];
        return [h("h4", {}, title), plot.host];
      };
      const rows = sweep.points.map((point, index) => [
        labels[index],
        point.peak ? show.bytes(point.peak) : "",
        point.rate ? show.rate(point.rate) : "",
        point.fits === null ? "" : show.yes(point.fits),
        ...(measured
          ? [
              point.measured_peak ? show.bytes(point.measured_peak) : point.problem || "",
              point.measured_rate ? show.rate(point.measured_rate) : "",
            ]
          : []),
      ]);
      const open = sweep.points.some((point) => point.fits === false) ? " An open point does not fit." : "";
      return card(
        null,
        title,
        `What other values would cost${measured ? ", predicted and measured (the other colour)" : ""}.${open}`,
        chart("peak", "bytes", "Peak memory", data.ladder.limit, ""),
        chart("rate", "rate", "Tokens/s per GPU", null, " tok/s"),
        asTable(
          `Sweep of ${name}`,
          [
            { label: name },
            { label: "peak", number: true },
            { label: "tokens/s", number: true },
            { label: "fits" },
            ...(measured ? ["peak, measured", "tokens/s, measured"] : []).map((label) => ({ label, number: true })),
          ],
          rows,
        ),
      );
    }),
  );
}
