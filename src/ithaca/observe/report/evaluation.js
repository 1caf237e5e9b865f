// Does the model use its context: needles by length and depth, loss by position, tasks.

// Rust is never, teal always; the number in each cell says it too.
const HEAT = [
  [181, 67, 46],
  [240, 217, 160],
  [42, 127, 123],
];

function heat(share) {
  const place = Math.max(0, Math.min(1, share)) * 2;
  const from = Math.min(1, Math.floor(place));
  return HEAT[from].map((value, index) => Math.round(value + (HEAT[from + 1][index] - value) * (place - from)));
}

function heatMap(map, several) {
  const rows = map.lengths.map((length, row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, show.tokens(length)),
      map.cells[row].map((share, column) => {
        if (share === null) return h("td", { class: "heat-cell" });
        const [red, green, blue] = heat(share);
        const light = 0.299 * red + 0.587 * green + 0.114 * blue > 125;
        const cell = h(
          "td",
          {
            class: `heat-cell ${light ? "on-light" : "on-dark"}`,
            title: `${show.tokens(length)} tokens, depth ${Math.round(100 * map.depths[column])} %`,
          },
          String(Math.round(100 * share)),
        );
        cell.style.backgroundColor = `rgb(${red}, ${green}, ${blue})`;
        return cell;
      }),
    ),
  );
  const title = several ? `Needles found, step ${show.integer(map.step || 0)}` : "Needles found";
  const samples = map.samples ? `${show.integer(map.samples)} texts a cell. ` : "";
  return card(
    null,
    title,
    `${samples}Percent of answers right, by tokens (down) and depth of the needle in the text (across).`,
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      h(
        "table",
        { class: "heat", "data-chart": `needles-${map.step || 0}` },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, ""),
            map.depths.map((depth) => h("th", { scope: "col" }, `${Math.round(100 * depth)} %`)),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
    map.mean === null ? null : h("p", { class: "note" }, `${show.share(map.mean)} of all.`),
  );
}

function lossByPosition(found) {
  if (!found.length) return null;
  const last = found[found.length - 1];
  const labels = last.points.map((point) => show.tokens(point.to));
  const ends = last.points.map((point) => point.to);
  const lines = found
    .map((each, index) => ({
      name: index === found.length - 1 ? "loss" : "first",
      label: `step ${show.integer(each.step || 0)}`,
      style: index === found.length - 1 ? "first" : "second",
      dots: true,
      unit: "",
      points: each.points.filter((point) => ends.includes(point.to)),
    }))
    .filter((line) => line.points.length)
    .map((line) => ({
      ...line,
      x: line.points.map((point) => ends.indexOf(point.to)),
      y: line.points.map((point) => point.loss),
    }))
    .reverse();
  const plot = new Plot(
    {
      name: "loss-by-position",
      label: "Loss by position",
      kind: "loss",
      height: 200,
      zero: true,
      lines,
      x_labels: labels,
      x_title: "up to position",
      still: true,
    },
    new Group(() => {}),
  );
  plot.full = [-0.4, labels.length - 0.6];
  const keys = lines.map((line) => h("span", { class: "key" }, h("i", { class: `swatch ${line.style}` }), line.label));
  return card(
    "loss-by-position",
    "Loss by position",
    "On held-out data, by how much text a token could look back at. It falls where the model uses its context.",
    plot.host,
    h(
      "div",
      { class: "chart-foot" },
      asTable(
        "Loss by position",
        [{ label: "position" }, ...lines.map((line) => ({ label: line.label, number: true }))],
        last.points.map((point, index) => [
          `${show.tokens(point.from)} to ${show.tokens(point.to)}`,
          ...lines.map((line) => (line.x.includes(index) ? show.loss(line.y[line.x.indexOf(index)]) : "")),
        ]),
      ),
      h("span", { class: "keys" }, lines.length > 1 ? keys : null),
    ),
  );
}

function taskTable(tasks) {
  if (!tasks.length) return null;
  const percent = (value) => (value === null ? "" : show.share(value));
  return card(
    "tasks",
    "Tasks",
    "Answer tokens right given the answer so far, whole answers right, and the mean log-probability of an answer token.",
    grid(
      "Tasks",
      [
        { label: "task" },
        { label: "tokens", number: true },
        { label: "right", number: true },
        { label: "answers", number: true },
        { label: "log p", number: true },
      ],
      tasks.map((each) => [
        each.task.replaceAll("_", " "),
        each.length === null ? "" : show.tokens(each.length),
        percent(each.accuracy),
        percent(each.exact),
        each.log_probability === null ? "" : each.log_probability.toFixed(3),
      ]),
    ),
  );
}

function evaluation() {
  const found = data.evaluation;
  if (!found) return [];
  const maps = found.maps.map((map) => heatMap(map, found.maps.length > 1 || found.count > 1));
  const rest = [lossByPosition(found.positions), taskTable(found.tasks)].filter(Boolean);
  return [
    maps.length ? h("div", { class: "pair" }, maps) : null,
    rest.length ? h("div", { class: "pair" }, rest) : null,
  ].filter(Boolean);
}
