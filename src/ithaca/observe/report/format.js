"use strict";
// Numbers as people read them. Sizes are decimal (1 GB = 10⁹ bytes), contexts binary (1M = 1,048,576 tokens), as everywhere in ithaca.

const GAP = "\u00a0"; // a number and its unit stay on one line

function scaled(value, units, base) {
  // The largest unit that leaves at least 1 of it; rounding must not give 1000 of a smaller one.
  let [size, unit] = [1, units[0]];
  for (const each of units.slice(1)) {
    if (Math.abs(value) < size * base * 0.9995) break;
    [size, unit] = [size * base, each];
  }
  return [value / size, unit, size];
}

const BYTES = ["B", "KB", "MB", "GB", "TB", "PB"];
const COUNTS = ["", "K", "M", "B", "T"];

function grouped(value, digits = 0) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function plain(value) {
  // Four digits that count: 2.183, 0.01234, 8.5e-6.
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6)
    return value
      .toExponential(2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  return size >= 1000 ? grouped(value) : String(Number(value.toPrecision(4)));
}

function duration(value) {
  const size = Math.abs(value);
  if (size === 0) return `0${GAP}s`;
  if (size < 1e-3) return `${Number((value * 1e6).toPrecision(3))}${GAP}µs`;
  if (size < 0.9995) return `${Number((value * 1e3).toPrecision(3))}${GAP}ms`;
  if (size < 599.95) return `${value.toFixed(size < 9.995 ? 2 : 1)}${GAP}s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)}${GAP}min ${whole % 60}${GAP}s`;
  return `${Math.floor(whole / 3600)}${GAP}h ${Math.floor((whole % 3600) / 60)}${GAP}min`;
}

const show = {
  bytes(value) {
    const [size, unit] = scaled(value, BYTES, 1000);
    return `${size.toFixed(unit === "B" ? 0 : 1)}${GAP}${unit}`;
  },
  seconds: duration,
  rate(value) {
    if (value < 99.95) return value.toFixed(1);
    const [size, unit] = scaled(value, COUNTS, 1000);
    return value < 9999.5 ? grouped(value) : size.toFixed(1) + unit;
  },
  tokens(value) {
    for (const [size, unit] of [
      [2 ** 30, "G"],
      [2 ** 20, "M"],
      [2 ** 10, "K"],
    ])
      if (value % size === 0 && value) return value / size + unit;
    return grouped(value);
  },
  count(value) {
    const [size, unit] = scaled(value, COUNTS, 1000);
    return unit ? size.toPrecision(3) + unit : grouped(value);
  },
  share: (value) => `${(100 * value).toFixed(1)}${GAP}%`,
  times: (value) => `${Number(value.toPrecision(3))} ×`,
  loss: (value) => (Math.abs(value) < 1e3 && Math.abs(value) >= 1e-3 ? value.toFixed(4) : plain(value)),
  integer: (value) => grouped(value),
  number: plain,
  text: (value) => String(value),
  yes: (value) => (value ? "yes" : "no"),
};

function signed(share) {
  const value = 100 * share;
  const size = Math.abs(value);
  if (size >= 1000) return `${value < 0 ? "−" : "+"}${grouped(size)}${GAP}%`;
  return `${size < 0.05 ? "±" : value < 0 ? "−" : "+"}${size.toFixed(1)}${GAP}%`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  const lead = rough / power;
  return power * (lead < 1.4 ? 1 : lead < 2.3 ? 2 : lead < 3.6 ? 2.5 : lead < 7 ? 5 : 10);
}

// Ticks of an axis in one unit for all of them: {ticks, format}.
function axis(kind, low, high, count) {
  let unit = "",
    size = 1;
  const top = Math.max(Math.abs(low), Math.abs(high)) || 1;
  if (kind === "bytes") [, unit, size] = scaled(top * 1.0001, BYTES, 1000);
  if (kind === "rate" || kind === "count" || kind === "step")
    [, unit, size] = scaled(top < 9999.5 ? 1 : top, COUNTS, 1000);
  if (kind === "seconds") {
    [unit, size] =
      top < 1e-3
        ? ["µs", 1e-6]
        : top < 1
          ? ["ms", 1e-3]
          : top < 600
            ? ["s", 1]
            : top < 7200
              ? ["min", 60]
              : ["h", 3600];
  }
  if (unit && kind !== "rate" && kind !== "count" && kind !== "step") unit = GAP + unit;
  let step = niceStep(Math.max((high - low) / size / count, 1e-300));
  if (kind === "step" && step * size < 1) step = 1 / size;
  if (kind === "step" && step === 2.5 && size === 1) step = 2;
  const digits = decimals(step);
  const ticks = [];
  for (
    let n = Math.ceil(low / size / step - 1e-9);
    n * step * size <= high + (high - low) * 1e-9 && ticks.length < 40;
    n++
  )
    ticks.push(n * step * size || 0); // never −0
  const small = kind === "number" && (top < 0.01 || top >= 1e5);
  const format = (value) => {
    if (small && value) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
    return value === 0 ? "0" : grouped(value / size, digits) + unit;
  };
  return { ticks, format };
}

function decimals(step) {
  const text = String(Number(step.toPrecision(6)));
  if (text.includes("e-")) return Math.min(12, Number(text.split("e-")[1]));
  return text.includes(".") ? text.split(".")[1].length : 0;
}
