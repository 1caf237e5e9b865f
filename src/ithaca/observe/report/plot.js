// Curves and stacked areas over steps or seconds. Pointer, finger and keys read values off; dragging zooms, a double click resets.
// Plots of one group share the cursor and the zoom, so that a dip in one curve can be found in the others.

class Group {
  static all = [];

  constructor(onzoom) {
    Group.all.push(this);
    this.plots = [];
    this.domain = null;
    this.onzoom = onzoom;
  }

  zoom(domain) {
    this.domain = domain;
    for (const plot of this.plots) plot.draw();
    this.onzoom(domain);
  }

  cursor(x) {
    for (const plot of this.plots) plot.cursor(x);
  }
}

function nearest(xs, x) {
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
}

function within(xs, [from, to]) {
  // First and last place inside, and one more on either side so that lines reach the edge.
  let first = 0,
    last = xs.length - 1;
  while (first < last && xs[first + 1] < from) first++;
  while (last > first && xs[last - 1] > to) last--;
  return [first, last];
}

class Plot {
  // spec: {name, label, kind, x_kind, height, zero, limit, limit_from, lines | x and layers, marks, x_labels, x_title, still}
  constructor(spec, group) {
    Object.assign(this, spec);
    this.group = group;
    const xs = this.layers ? [this.x] : this.lines.map((line) => line.x);
    this.full = [Math.min(...xs.map((each) => each[0])), Math.max(...xs.map((each) => each[each.length - 1]))];
    if (this.full[0] === this.full[1]) this.full = [this.full[0] - 0.5, this.full[1] + 0.5];
    if (this.layers)
      this.totals = this.x.map((_, index) => this.layers.reduce((sum, layer) => sum + layer.values[index], 0));
    this.host = h("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "data-chart": this.name,
      "aria-label": `${this.label}. Arrow keys read values${this.still ? "" : ", plus and minus zoom, Escape shows all"}.`,
    });
    this.host.style.height = `${this.height}px`;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.host);
    group.plots.push(this);
  }

  get domain() {
    return this.group.domain || this.full;
  }

  range() {
    let low = Infinity,
      high = -Infinity;
    const take = (xs, ys) => {
      const [first, last] = within(xs, this.domain);
      for (let index = first; index <= last; index++) {
        if (xs[index] < this.domain[0] || xs[index] > this.domain[1]) continue;
        low = Math.min(low, ys[index]);
        high = Math.max(high, ys[index]);
      }
    };
    if (this.layers) take(this.x, this.totals);
    else for (const line of this.lines) take(line.x, line.y);
    if (low === Infinity) [low, high] = [0, 1];
    if (this.limit && high >= this.limit_from * this.limit) high = Math.max(high, this.limit * 1.06);
    if (this.zero && low >= 0) return [0, high * 1.06 || 1];
    const room = (high - low) * 0.07 || Math.abs(high) * 0.05 || 1;
    return [low - room, high + room];
  }

  draw() {
    const width = this.host.clientWidth;
    if (!width) return;
    const box = (this.box = { left: 56, top: 10, width: Math.max(40, width - 56 - 12), height: this.height - 10 - 24 });
    const [low, high] = this.range();
    const [from, to] = this.domain;
    this.sx = (x) => ((x - from) / (to - from)) * box.width;
    this.sy = (y) => box.height - ((y - low) / (high - low)) * box.height;
    const y_axis = axis(this.kind, low, high, Math.max(2, Math.min(6, Math.round(box.height / 34))));
    const x_axis = this.x_labels
      ? { ticks: this.x_labels.map((_, index) => index), format: (index) => this.x_labels[index] }
      : axis(this.x_kind, from, to, Math.max(2, Math.min(10, Math.round(box.width / 66))));
    this.overlay = s("g", { class: "overlay" });
    const inside = s(
      "svg",
      { x: box.left, y: box.top, width: box.width, height: box.height, overflow: this.still ? "visible" : "hidden" },
      this.layers ? this.areas() : null,
      (this.marks || [])
        .filter((each) => each.x >= from && each.x <= to)
        .map((each) => s("line", { class: "event", x1: this.sx(each.x), x2: this.sx(each.x), y1: 0, y2: box.height })),
      this.markLabels(from, to),
      this.limit && this.limit <= high
        ? s("line", { class: "limit", x1: 0, x2: box.width, y1: this.sy(this.limit), y2: this.sy(this.limit) })
        : null,
      this.layers ? null : this.curves(),
      this.overlay,
    );
    const rules = y_axis.ticks.map((tick) =>
      s(
        "g",
        {},
        s("line", {
          class: "rule",
          x1: box.left,
          x2: box.left + box.width,
          y1: box.top + this.sy(tick),
          y2: box.top + this.sy(tick),
        }),
        s(
          "text",
          { class: "tick", x: box.left - 8, y: box.top + this.sy(tick) + 4, "text-anchor": "end" },
          y_axis.format(tick),
        ),
      ),
    );
    const below = x_axis.ticks.map((tick, index) => {
      const x = box.left + this.sx(tick);
      const end = !this.x_labels && index === x_axis.ticks.length - 1 && x > box.left + box.width - 18;
      return s(
        "g",
        {},
        s("line", { class: "tick-mark", x1: x, x2: x, y1: box.top + box.height, y2: box.top + box.height + 4 }),
        s(
          "text",
          {
            class: "tick",
            x: end ? box.left + box.width : x,
            y: box.top + box.height + 18,
            "text-anchor": end ? "end" : "middle",
          },
          x_axis.format(tick),
        ),
      );
    });
    if (this.x_kind === "step")
      below.push(
        s("text", { class: "tick", x: box.left - 8, y: box.top + box.height + 18, "text-anchor": "end" }, "step"),
      );
    const limit =
      this.limit && this.limit <= high
        ? s(
            "text",
            {
              class: "limit-label",
              x: this.still ? box.left + 4 : box.left + box.width - 2,
              y: box.top + this.sy(this.limit) - 4,
              "text-anchor": this.still ? "start" : "end",
            },
            `GPU ${show.bytes(this.limit)}`,
          )
        : null;
    this.host.replaceChildren(
      s(
        "svg",
        { width, height: this.height, role: "img", "aria-label": this.label },
        rules,
        s("line", {
          class: "base",
          x1: box.left,
          x2: box.left + box.width,
          y1: box.top + box.height,
          y2: box.top + box.height,
        }),
        below,
        inside,
        limit,
      ),
    );
  }

  // What begins at a mark, where there is room for it up to the next one.
  markLabels(from, to) {
    const marks = (this.marks || []).filter((each) => each.label);
    return marks.map((each, index) => {
      const left = Math.max(this.sx(each.x), 0);
      const right = Math.min(index + 1 < marks.length ? this.sx(marks[index + 1].x) : this.sx(to), this.sx(to));
      if (right - left < 9 + 6.6 * each.label.length) return null;
      return s("text", { class: "mark-label", x: left + 5, y: 13 }, each.label);
    });
  }

  path(xs, ys) {
    const [first, last] = within(xs, this.domain);
    let d = "";
    for (let index = first; index <= last; index++)
      d += `${index === first ? "M" : "L"}${this.sx(xs[index]).toFixed(1)},${this.sy(ys[index]).toFixed(1)}`;
    return d;
  }

  curves() {
    return this.lines.map((line) => {
      const dots = line.dots || line.x.length === 1;
      const [first, last] = within(line.x, this.domain);
      return s(
        "g",
        { class: `line ${line.style}` },
        s("path", {
          class: line.mean ? "raw" : "curve",
          d: this.path(line.x, line.y),
          "data-line": line.name,
          "data-points": line.x.length,
        }),
        line.mean ? s("path", { class: "curve mean", d: this.path(line.mean.x, line.mean.y) }) : null,
        dots
          ? line.x.slice(first, last + 1).map((x, index) =>
              s("circle", {
                class: line.open && line.open[first + index] ? "dot open" : "dot",
                cx: this.sx(x),
                cy: this.sy(line.y[first + index]),
                r: this.still ? 4 : 2.5,
              }),
            )
          : null,
      );
    });
  }

  areas() {
    const [first, last] = within(this.x, this.domain);
    const floor = this.x.map(() => 0);
    return this.layers.map((layer) => {
      let up = "",
        down = "";
      for (let index = first; index <= last; index++) {
        const x = this.sx(this.x[index]).toFixed(1);
        down = `L${x},${this.sy(floor[index]).toFixed(1)}${down}`;
        floor[index] += layer.values[index];
        up += `${index === first ? "M" : "L"}${x},${this.sy(floor[index]).toFixed(1)}`;
      }
      return s("path", { class: `area ${swatchOf(layer.name)}`, "data-category": layer.name, d: `${up}${down}Z` });
    });
  }

  // What is drawn at x: [place on the axis, title, lines for the tip]
  read(x) {
    if (this.layers) {
      const index = nearest(this.x, x);
      const parts = this.layers.map((layer) => [
        layer.name,
        show.bytes(layer.values[index]),
        swatchOf(layer.name),
        layer.values[index],
      ]);
      const rows = parts
        .filter((part) => part[3] > 0)
        .reverse()
        .map((part) => part.slice(0, 3));
      return [
        this.x[index],
        `${show.seconds(this.x[index])} · ${show.bytes(this.totals[index])}`,
        rows,
        [this.totals[index]],
      ];
    }
    const main = this.lines[0];
    const at = main.x[nearest(main.x, x)];
    const rows = [],
      ys = [];
    for (const line of this.lines) {
      const index = nearest(line.x, at);
      if (line.dots && line.x[index] !== at) continue;
      rows.push([line.label, show[this.kind](line.y[index]) + (line.unit || ""), `${line.style}`]);
      ys.push(line.y[index]);
    }
    return [at, this.x_labels ? `${this.x_title} ${this.x_labels[at]}` : `step ${show.integer(at)}`, rows, ys];
  }

  cursor(x) {
    if (!this.overlay) return;
    if (x === null) {
      this.overlay.replaceChildren();
      this.onread?.(null);
      return;
    }
    const [at, , rows, ys] = this.read(x);
    this.overlay.replaceChildren(
      s("line", { class: "cursor", x1: this.sx(at), x2: this.sx(at), y1: 0, y2: this.box.height }),
      ...ys.map((y) => s("circle", { class: "point", cx: this.sx(at), cy: this.sy(y), r: 3.5 })),
    );
    this.onread?.(rows);
  }

  point(x, client_x, client_y) {
    this.at = this.read(x)[0];
    this.group.cursor(this.at);
    const [, title, rows] = this.read(this.at);
    tip.show(client_x, client_y, title, rows);
  }

  leave() {
    this.group.cursor(null);
    tip.hide();
  }

  listen() {
    const place = (event) => {
      const inside = event.clientX - this.host.getBoundingClientRect().left - this.box.left;
      const share = Math.max(0, Math.min(1, inside / this.box.width));
      return this.domain[0] + share * (this.domain[1] - this.domain[0]);
    };
    let start = null;
    this.host.addEventListener("pointerdown", (event) => {
      if (!this.box || event.button !== 0) return;
      if (!this.still) {
        start = { x: place(event), client: event.clientX };
        this.host.setPointerCapture(event.pointerId);
      }
      this.point(place(event), event.clientX, event.clientY);
    });
    this.host.addEventListener("pointermove", (event) => {
      if (!this.box) return;
      this.point(place(event), event.clientX, event.clientY);
      if (start) {
        const [a, b] = [this.sx(start.x), this.sx(place(event))];
        this.overlay.append(
          s("rect", { class: "selection", x: Math.min(a, b), width: Math.abs(b - a), y: 0, height: this.box.height }),
        );
      }
    });
    this.host.addEventListener("pointerup", (event) => {
      if (!start) return;
      const range = [start.x, place(event)].sort((a, b) => a - b);
      const far = Math.abs(event.clientX - start.client) > 6;
      start = null;
      if (far) this.zoomTo(range);
      else this.cursor(this.at);
    });
    this.host.addEventListener("pointercancel", () => {
      start = null;
      this.leave();
    });
    this.host.addEventListener("pointerleave", (event) => {
      if (!start && event.pointerType !== "touch") this.leave(); // a finger that is lifted wants to read on
    });
    this.host.addEventListener("dblclick", () => this.still || this.group.zoom(null));
    this.host.addEventListener("blur", () => this.leave());
    this.host.addEventListener("keydown", (event) => this.key(event));
  }

  zoomTo([from, to]) {
    if (to - from <= (this.full[1] - this.full[0]) * 1e-5) return;
    this.group.zoom([Math.max(from, this.full[0]), Math.min(to, this.full[1])]);
  }

  key(event) {
    if (!this.box || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = this.layers ? this.x : this.lines[0].x;
    const [first, last] = within(xs, this.domain);
    const here = this.at === undefined ? first : nearest(xs, this.at);
    const stride = event.shiftKey ? Math.max(1, Math.round((last - first) / 20)) : 1;
    const move = { ArrowRight: here + stride, ArrowLeft: here - stride, Home: first, End: last }[event.key];
    const [from, to] = this.domain;
    const middle = Math.max(from, Math.min(to, xs[here]));
    if (move !== undefined) {
      const x = xs[Math.max(first, Math.min(last, move))];
      const box = this.host.getBoundingClientRect();
      this.point(x, box.left + this.box.left + this.sx(x), box.top + this.height / 2);
    } else if (this.still) return;
    else if (event.key === "+" || event.key === "=")
      this.zoomTo([middle - (middle - from) / 2, middle + (to - middle) / 2]);
    else if (event.key === "-") {
      const wide = [middle - (middle - from) * 2, middle + (to - middle) * 2];
      if (wide[0] <= this.full[0] && wide[1] >= this.full[1]) this.group.zoom(null);
      else this.zoomTo(wide);
    } else if (event.key === "Escape" || event.key === "0") this.group.zoom(null);
    else return;
    event.preventDefault();
  }
}

// A touch anywhere else ends the reading.
document.addEventListener(
  "pointerdown",
  () => {
    tip.hide();
    for (const group of Group.all) group.cursor(null);
  },
  { capture: true },
);

// A few dozen places of a long curve for the table beside it, with first, last, smallest and largest among them.
function sample(ys, count = 40) {
  if (ys.length <= count) return ys.map((_, index) => index);
  const places = new Set([ys.indexOf(Math.min(...ys)), ys.indexOf(Math.max(...ys))]);
  for (let index = 0; index < count; index++) places.add(Math.round((index * (ys.length - 1)) / (count - 1)));
  return [...places].sort((a, b) => a - b);
}
