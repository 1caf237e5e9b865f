// What the planner says to one set-up. Every number comes from it; here they are only drawn.

show.money = (value) => grouped(value, value < 100 ? 2 : 0);

function drawVerdict(answer) {
  const [word, ...why] = answer.verdict.split(": ");
  return h(
    "div",
    { class: `verdict ${answer.fits ? "good" : "bad"}` },
    h("p", { class: "word" }, h("span", { "aria-hidden": "true" }, answer.fits ? "✓" : "✕"), word.charAt(0).toUpperCase() + word.slice(1)),
    why.length ? h("p", {}, why.join(": ")) : null,
    answer.condition ? h("p", {}, answer.condition) : null,
    answer.counted ? h("p", {}, `Counted by ${answer.counted}.`) : null,
    answer.untimed ? h("p", {}, `No time is predicted: ${answer.untimed}.`) : null,
  );
}

// apply(change): take advice, or a cell of the grid; null where nobody can be asked.
function drawAdvice(answer, pieces, apply) {
  if (answer.fits) return null;
  const advice = pieces.advice || (answer.advice.length ? answer.advice : null);
  return card(
    null,
    "What would fit",
    null,
    advice
      ? h(
          "ul",
          { class: "advice" },
          advice.map((each) =>
            h(
              "li",
              {},
              h("span", {}, each.words),
              apply && Object.keys(each.change).length
                ? h("button", { type: "button", class: "small", "aria-label": `Use ${each.words.split(":")[0]}`, onclick: () => apply(each.change) }, "Use")
                : null,
            ),
          ),
        )
      : h("p", { class: "waiting" }, "looking for it"),
  );
}

function drawCost(answer) {
  const cost = answer.cost;
  if (!cost) return null;
  const rows = [
    ["tokens", show.count(cost.tokens)],
    ["steps", show.integer(cost.steps)],
    ["time on these GPUs", longTime(cost.seconds)],
    ["GPU-hours", show.integer(Math.ceil(cost.gpu_hours))],
    cost.money === null ? null : ["cost", show.money(cost.money)],
  ].filter(Boolean);
  return card(
    null,
    "What it costs",
    null,
    h("dl", { class: "pairs" }, rows.map(([name, value]) => h("div", { "data-cost": name }, h("dt", {}, name), h("dd", {}, value)))),
  );
}

function longTime(seconds) {
  if (seconds < 86400 * 2) return show.seconds(seconds);
  return `${(seconds / 86400).toFixed(1)}${GAP}days`;
}

function drawLongest(pieces, apply, ask) {
  const found = pieces.longest;
  if (found === undefined && !ask) return null;
  const body =
    found === undefined
      ? ask === "waiting"
        ? h("p", { class: "waiting" }, "looking for it")
        : h("p", {}, h("button", { type: "button", class: "small", onclick: ask }, "Find it by dry runs (minutes)"))
      : found === null
        ? h("p", { class: "about" }, pieces.longestWhy)
        : h(
            "p",
            { class: "longest" },
            h("b", {}, found.context === null ? "none fits" : found.context),
            found.context === null ? null : h("span", {}, `${show.bytes(found.peak)} a GPU${found.rate ? `, ${show.rate(found.rate)} tokens/s each` : ""}`),
            found.context !== null && apply
              ? h("button", { type: "button", class: "small", "aria-label": `Use a context of ${found.context}`, onclick: () => apply({ context: found.context }) }, "Use")
              : null,
          );
  return card(null, "Longest context", "of these GPUs, to 64K tokens", body);
}

// GPUs × context. One stop for the Tab key; arrows go from cell to cell.
function drawGrid(pieces, apply) {
  const found = pieces.grid;
  if (!found) return null;
  const cells = found.gpus.map(() => found.contexts.map(() => null));
  const rates = [];
  for (const cell of pieces.cells) {
    cells[cell.row][cell.column] = cell;
    if (cell.rate) rates.push(cell.rate);
  }
  const [atRow, atColumn] = found.at;
  const one = (cell, row, column) => {
    const here = row === atRow && column === atColumn;
    const name = `${found.gpus[row]} at ${found.contexts[column]}`;
    const [kind, text, sub, said] =
      cell === null
        ? ["open", "", "", "not looked at yet"]
        : cell.fits === null
          ? ["none", "–", "", cell.why]
          : cell.fits
            ? ["fits", cell.rate ? show.rate(cell.rate) : "✓", show.bytes(cell.peak), `${cell.why}${cell.rate ? `; ${show.rate(cell.rate)} tokens/s per GPU` : ""}`]
            : ["no", "✕", "", "does not fit"];
    const inside = [h("b", {}, text), sub ? h("small", {}, sub) : null];
    const props = { class: `cell ${kind}${here ? " here" : ""}`, title: `${name}: ${said}`, "aria-label": `${name}: ${said}`, "data-row": row, "data-column": column };
    return h(
      "td",
      {},
      apply
        ? h("button", { type: "button", ...props, tabindex: here ? "0" : "-1", "aria-current": here ? "true" : null, onclick: () => apply({ gpus: found.gpus[row], context: found.contexts[column] }) }, inside)
        : h("span", { ...props, role: "img" }, inside),
    );
  };
  const table = h(
    "table",
    { class: "map", onkeydown: (event) => walk(event, table) },
    h("thead", {}, h("tr", {}, h("td", {}), found.contexts.map((context) => h("th", { scope: "col" }, context)))),
    h("tbody", {}, found.gpus.map((gpu, row) => h("tr", {}, h("th", { scope: "row" }, gpu), cells[row].map((cell, column) => one(cell, row, column))))),
  );
  const known = pieces.cells.length, all = found.gpus.length * found.contexts.length;
  return card(
    null,
    "GPUs and context",
    `Tokens/s per GPU and memory of a GPU, where something fits.${apply ? " Choose a cell to plan it." : ""}`,
    h("div", { class: "scroll", role: "region", "aria-label": "GPUs and context", tabindex: apply ? null : "0" }, table),
    known < all ? h("p", { class: "waiting" }, `${known} of ${all}`) : null,
  );
}

function walk(event, table) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const from = event.target.closest("button.cell");
  if (!steps || !from) return;
  const to = table.querySelector(`[data-row="${Number(from.dataset.row) + steps[0]}"][data-column="${Number(from.dataset.column) + steps[1]}"]`);
  event.preventDefault();
  if (!to) return;
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

function drawLadder(pieces) {
  if (pieces.ladder) return ladder(pieces.ladder);
  return pieces.ladder === null ? card(null, "Ladder", pieces.ladderWhy) : null;
}

function drawRest(answer) {
  const saved = (text, name, kind) => () => {
    const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: kind })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const command = h(
    "section",
    { class: "card", "aria-label": "In a terminal" },
    h("div", { class: "card-head" }, h("h3", {}, "In a terminal"), copyButton("Copy the command", answer.command)),
    h("pre", { class: "command", tabindex: "0" }, answer.command),
  );
  const yaml = answer.yaml
    ? h(
        "section",
        { class: "card", "aria-label": "The run as YAML" },
        h(
          "div",
          { class: "card-head" },
          h("h3", {}, "The run as YAML"),
          h("span", {}, copyButton("Copy the YAML", answer.yaml), h("button", { type: "button", class: "small", "data-do": "yaml", onclick: saved(answer.yaml, "run.yaml", "application/yaml") }, "Download")),
        ),
        h("p", { class: "about" }, "Put in your data and model, then ", h("code", {}, "ithaca train run.yaml"), "."),
        h("pre", { tabindex: "0" }, answer.yaml),
      )
    : null;
  const notes = [...answer.assumed.map((each) => `assumed: ${each}`), answer.too_long].filter(Boolean);
  return [
    notes.length ? card(null, "What this rests on", null, h("ul", { class: "notes" }, notes.map((note) => h("li", {}, note)))) : null,
    h("div", { class: "stack-card" }, h("h3", {}, "Stack"), stack(answer.stack)),
    command,
    yaml,
  ];
}

function copyButton(label, text) {
  const button = h("button", { type: "button", class: "small", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// The two set-ups as a table.
function drawComparison(first, second) {
  const figures = (answer) => Object.fromEntries([...answer.figures.map((each) => [each.label, each]), ...(answer.cost && answer.cost.money !== null ? [["Cost", { kind: "money", value: answer.cost.money }]] : [])]);
  const [one, two] = [figures(first), figures(second)];
  const names = [...new Set([...Object.keys(one), ...Object.keys(two)])];
  const cell = (each) => h("td", { class: "number" }, each ? show[each.kind](each.value) : "–");
  const rows = names.map((name) => {
    const both = one[name] && two[name] && one[name].value;
    return h("tr", {}, h("th", { scope: "row" }, name), cell(one[name]), cell(two[name]), h("td", { class: "number" }, both ? signed(two[name].value / one[name].value - 1) : ""));
  });
  const words = (answer) => h("td", { class: `number ${answer.fits ? "yes" : "no"}` }, answer.fits ? "yes" : "no");
  const fields = (answer) => Object.fromEntries(answer.stack.map((row) => [row.field, row.value]));
  const [left, right] = [fields(first), fields(second)];
  const differ = [...new Set([...Object.keys(left), ...Object.keys(right)])].filter((name) => left[name] !== right[name]);
  const more = differ.map((name) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, left[name] || "–"), h("td", { class: "number" }, right[name] || "–"), h("td", {})));
  return h(
    "section",
    { class: "card side-by-side", "aria-label": "Side by side" },
    h("h2", {}, "Side by side"),
    h(
      "div",
      { class: "scroll", role: "region", "aria-label": "Side by side", tabindex: "0" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, h("td", {}), h("th", { scope: "col", class: "number" }, first.title), h("th", { scope: "col", class: "number" }, second.title), h("th", { scope: "col", class: "number" }, "difference"))),
        h("tbody", {}, h("tr", {}, h("th", { scope: "row" }, "Fits"), words(first), words(second), h("td", {})), rows, more),
      ),
    ),
  );
}
