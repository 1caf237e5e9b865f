// Elements, and the few things every part of the page is made of. Text goes in as text: no markup is ever parsed here.

function h(tag, props, ...children) {
  return filled(document.createElement(tag), props, children);
}

function s(tag, props, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

// Small text beside the pointer. lines: [name, value, category or null].
const tip = {
  element: document.getElementById("tip"),
  show(x, y, title, lines) {
    const rows = lines.map(([name, value, swatch]) =>
      h(
        "div",
        { class: "tip-row" },
        swatch === null ? null : h("i", { class: `swatch ${swatch}` }),
        h("span", {}, name),
        h("b", {}, value),
      ),
    );
    this.element.replaceChildren(title ? h("div", { class: "tip-title" }, title) : "", ...rows);
    this.element.hidden = false;
    const box = this.element.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth - 8 ? x - 14 - box.width : x + 14;
    this.element.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    this.element.style.top = `${Math.max(8, Math.min(y - box.height / 2, innerHeight - box.height - 8))}px`;
  },
  hide() {
    this.element.hidden = true;
  },
};

addEventListener("scroll", () => tip.hide(), { passive: true });

// A chart as a table, folded away. columns: [{label, number}], rows: lists of texts.
function asTable(label, columns, rows, note) {
  return h(
    "details",
    { class: "as-table" },
    h("summary", {}, "Values as a table"),
    grid(label, columns, rows),
    note ? h("p", { class: "note" }, note) : null,
  );
}

function grid(label, columns, rows) {
  const head = columns.map((column) => h("th", { scope: "col", class: column.number ? "number" : null }, column.label));
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      row.map((cell, index) =>
        h(index ? "td" : "th", { scope: index ? null : "row", class: columns[index].number ? "number" : null }, cell),
      ),
    ),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

function card(id, title, about, ...children) {
  return h(
    "section",
    { class: "card", id, "aria-label": title },
    h("h3", {}, title),
    about ? h("p", { class: "about" }, about) : null,
    ...children,
  );
}
