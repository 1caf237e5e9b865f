// The page: each part is drawn if there is data for it, in the order of the calls at the end.

const data = JSON.parse(document.getElementById("data").textContent);
data.categories.forEach((name) => KNOWN.add(name));

const main = document.getElementById("main");
const nav = document.getElementById("nav");
let place = main; // where the next part goes

// A part of the page, with a link to it at the top. Nothing to show, nothing drawn.
function part(id, title, about, ...children) {
  children = children.flat().filter(Boolean);
  if (!children.length) return;
  place.append(
    h(
      "section",
      { class: "part", id, "aria-labelledby": `${id}-title` },
      h("h2", { id: `${id}-title` }, title),
      about ? h("p", { class: "about" }, about) : null,
      ...children,
    ),
  );
  nav.append(h("a", { href: `#${id}` }, title));
}

function ranking(table) {
  const seconds = table.measure === "seconds";
  const most = table.rows[0].value;
  const rows = table.rows.map((row) => {
    const bar = h("i");
    bar.style.width = `${(100 * row.value) / most}%`;
    return h(
      "tr",
      {},
      h(
        "th",
        { scope: "row" },
        h("span", { class: "name" }, row.name),
        h("span", { class: "inline-bar", "aria-hidden": "true" }, bar),
      ),
      h("td", { class: "number" }, show[table.measure](row.value)),
      seconds ? h("td", { class: "number" }, show.share(row.value / table.whole)) : null,
      seconds ? h("td", { class: "number calls" }, row.calls === null ? "" : show.integer(row.calls)) : null,
    );
  });
  const labels = seconds ? ["", "time", "share", "calls"] : ["", "bytes"];
  const shown = 10;
  const body = (from, to) =>
    h(
      "table",
      { class: "ranking", "data-table": from ? null : table.key },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          labels.map((label, index) => h("th", { scope: "col", class: index ? "number" : null }, label)),
        ),
      ),
      h("tbody", {}, rows.slice(from, to)),
    );
  const rest =
    rows.length > shown
      ? h("details", { class: "as-table" }, h("summary", {}, `${rows.length - shown} more`), body(shown))
      : null;
  return card(
    table.key,
    table.title,
    seconds ? (table.title === "Operators" ? "CPU time by operator, without those it calls." : "GPU time by kernel.") : "Held at the peak.",
    body(0, shown),
    rest,
    table.more ? h("p", { class: "note" }, `${show.integer(table.more)} smaller ones are left out.`) : null,
  );
}

function watched() {
  const found = data.profile;
  if (!found) return null;
  const facts = [];
  if (found.out) facts.push(["copied out", show.bytes(found.out)]);
  if (found.in) facts.push(["copied in", show.bytes(found.in)]);
  if (found.copies !== null) facts.push(["copies to and from the host", show.seconds(found.copies)]);
  if (found.exposed !== null) facts.push(["of which computation waited", show.seconds(found.exposed)]);
  if (found.copies && found.exposed !== null)
    facts.push(["hidden behind computation", show.share(Math.max(0, 1 - found.exposed / found.copies))]);
  if (found.alone !== null) facts.push(["copies with no kernel beside, by the trace", show.seconds(found.alone)]);
  if (found.busy) facts.push(["kernels ran", show.seconds(found.busy)]);
  if (found.counted && found.peak)
    facts.push(["torch's own count at the peak", `${show.bytes(found.counted)} (${signed(found.peak / found.counted - 1)})`]);
  const rows = found.steps.map((step, index) => [
    String(index + 1),
    step.seconds === null ? "" : show.seconds(step.seconds),
    step.peak === null ? "" : show.bytes(step.peak),
  ]);
  return card(
    "watched",
    "Steps and copies, as measured",
    null,
    facts.length
      ? h(
          "dl",
          { class: "pairs" },
          facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
        )
      : null,
    rows.length
      ? grid(
          "Steps that were profiled",
          [{ label: "step" }, { label: "time", number: true }, { label: "peak", number: true }],
          rows,
        )
      : null,
    found.missing.length ? h("p", { class: "note" }, `Not to be had without a GPU: ${found.missing.join("; ")}.`) : null,
  );
}

function record() {
  const events = data.events.length
    ? h(
        "details",
        {},
        h("summary", {}, `Starts, saves and stops (${data.events.length})`),
        grid(
          "Events",
          [{ label: "event" }, { label: "step", number: true }, { label: "time (UTC)" }, { label: "" }],
          data.events.map((event) => [
            event.event || "",
            event.step === null ? "" : show.integer(event.step),
            (event.time || "").replace("T", " ").replace("Z", ""),
            event.about || "",
          ]),
        ),
      )
    : null;
  const config = data.config
    ? h("details", {}, h("summary", {}, "config.yaml"), h("pre", { tabindex: "0" }, data.config))
    : null;
  return events || config ? h("div", { class: "card" }, events, config) : null;
}

themes();
header();
part("versus", data.versus ? `Beside ${data.versus.names[1]}` : "", null, versus());
part("plan", "Plan against measurement", null, comparison());
part("training", "Training", null, training());
part("evaluation", "Evaluation", null, evaluation());
const memory = [phases(data.phases), atPeak(), timeline()].filter(Boolean);
const rungs = [ladder(data.ladder), sweeps()].filter(Boolean);
const places = data.tables.filter((table) => table.measure === "bytes").map(ranking);
const keys = memory.length || rungs.length ? memoryLegend() : null;
part(
  "memory",
  "Memory",
  null,
  memory.length ? keys : null,
  memory,
  places.length ? h("div", { class: "pair" }, places) : null,
);
if (memory.length) place = document.getElementById("memory"); // the legend stays in view down to the last rung
part("ladder", "Ladder", null, memory.length ? null : keys, rungs);
place = main;
const kernels = data.tables.filter((table) => table.measure === "seconds").map(ranking);
const time = [times(data.times), watched()].filter(Boolean);
part("time", "Time", null, time.length ? h("div", { class: "pair" }, time) : null, kernels);
part("stack", "Settings", null, stack(data.stack), settings());
part("sources", "Data", null, sources());
part("environment", "Environment", null, environment());
part("record", "Record", null, record());
const state = data.heading.state;
document.getElementById("footer").textContent =
  `ithaca ${data.version}${state && state.time ? ` · as of ${state.time.replace("T", " ").replace("Z", " UTC")}` : ""} · 1 GB = 10⁹ bytes, 1M tokens = 1,048,576`;
document.body.dataset.ready = "yes";
