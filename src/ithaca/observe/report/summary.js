// The top of the page: what ran, how it ended, the figures that matter, and the plan beside the measurement.

function header() {
  const { title, kind, description, facts, state } = data.heading;
  document.title = `${title} · ithaca`;
  document.getElementById("kind").textContent = kind;
  const progress =
    state && state.step !== null
      ? `step ${show.integer(state.step)}${state.steps ? ` of ${show.integer(state.steps)}` : ""}`
      : null;
  const trouble = state && (state.cause || state.resume);
  main.append(
    h(
      "section",
      { class: "summary", "aria-label": "Summary" },
      h(
        "div",
        { class: "title" },
        h("h1", {}, title),
        state ? h("span", { class: `state ${/^[a-z]+$/.test(state.name) ? state.name : ""}` }, state.name) : null,
        progress ? h("span", { class: "progress" }, progress) : null,
      ),
      description && description !== title ? h("p", { class: "description" }, description) : null,
      h(
        "dl",
        { class: "facts" },
        facts.map((fact) => h("div", {}, h("dt", {}, fact.label), h("dd", {}, show[fact.kind](fact.value)))),
      ),
      trouble
        ? h(
            "div",
            { class: `callout ${state.name === "stopped" ? "calm" : ""}`, role: "note" },
            state.cause
              ? h(
                  "p",
                  {},
                  state.cause,
                  state.exit_code !== null ? h("span", { class: "code" }, ` exit code ${state.exit_code}`) : null,
                )
              : null,
            state.resume ? h("p", {}, "Go on with ", h("code", {}, state.resume)) : null,
          )
        : null,
      figures(data.figures),
    ),
  );
}

function figures(found) {
  return h(
    "dl",
    { class: "figures" },
    found.map((figure) => {
      const share = figure.of ? figure.value / figure.of : null;
      const bar = share === null ? null : h("i", { class: share > 1 ? "over" : null });
      if (bar) bar.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
      const note = [figure.note, share === null ? null : `${show.share(share)} of ${show.bytes(figure.of)}`]
        .filter(Boolean)
        .join(", ");
      const [number, unit] = show[figure.kind](figure.value).split(GAP);
      const long = show[figure.kind](figure.value).split(GAP).length > 2;
      return h(
        "div",
        { class: "figure", "data-figure": figure.label, "data-value": String(figure.value) },
        h("dt", {}, figure.label),
        h(
          "dd",
          {},
          h(
            "span",
            { class: `value${long ? " long" : ""}${figure.kind === "yes" && !figure.value ? " bad" : ""}` },
            long ? show[figure.kind](figure.value) : number,
            !long && unit ? h("small", {}, GAP + unit) : null,
          ),
          bar ? h("span", { class: "meter", "aria-hidden": "true" }, bar) : null,
          note ? h("span", { class: "note" }, note) : null,
        ),
      );
    }),
  );
}

function comparison() {
  if (!data.comparison.length) return [];
  const reach = Math.max(0.1, ...data.comparison.map((row) => Math.abs(row.deviation ?? 0)));
  const rows = data.comparison.map((row) => {
    const far = Math.abs(row.deviation ?? 1) > 0.1;
    const bar = h("i", { class: far ? "far" : null });
    const size = Math.min(50, (50 * Math.abs(row.deviation ?? 0)) / reach);
    bar.style.width = `${size}%`;
    bar.style.left = `${(row.deviation ?? 0) < 0 ? 50 - size : 50}%`;
    return h(
      "tr",
      { "data-compare": row.label },
      h("th", { scope: "row" }, row.label),
      h("td", { class: "number" }, show[row.kind](row.predicted)),
      h("td", { class: "number" }, show[row.kind](row.measured)),
      h("td", { class: `number deviation${far ? " far" : ""}` }, row.deviation === null ? "–" : signed(row.deviation)),
      h("td", { class: "off", "aria-hidden": "true" }, h("span", {}, bar)),
    );
  });
  return h(
    "div",
    { class: "card" },
    h(
      "table",
      { class: "comparison" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["", "planned", "measured", "deviation"].map((label, index) =>
            h("th", { scope: "col", class: index ? "number" : null }, label),
          ),
          h(
            "th",
            { class: "off", "aria-hidden": "true" },
            h("span", {}, h("span", {}, `−${show.share(reach)}`), h("span", {}, `+${show.share(reach)}`)),
          ),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}
