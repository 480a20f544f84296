"use strict";
// What the charts of a page draw, and how the user looks at it. The page's own script fills ``data``; every string of it
// is inserted as text, never as HTML.
//
// Marks are of the kind leg, rollback, checkpoint or command. A cut curve has records that are no longer in the log.

const data = {
  axes: {}, // label of each x axis, by name
  runs: [], // name, colour, marks [{step, kind, label}], axes: by name the places of some steps {steps, places}
  charts: [], // metric, label, shown, curves [{run, metric, dots, cut, setting, steps, values, meanSteps, means, smoothed}]
};
const SMOOTHING = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2]; // windows as fractions of a curve's records
const view = { axis: "step", smooth: 2, log: false, range: null, hidden: new Set(), shown: new Set() };

function element(name, attributes = {}, ...children) {
  const made = ["svg", "g", "path", "line", "text", "rect", "circle"].includes(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Position of a step on the chosen axis, interpolated between the known places.
function place(run, step) {
  const axis = data.runs[run].axes[view.axis];
  if (view.axis === "step") return step;
  if (!axis || !axis.steps.length) return NaN;
  const right = Math.min(after(axis.steps, step), axis.steps.length - 1), left = Math.max(right - 1, 0);
  const span = axis.steps[right] - axis.steps[left];
  const part = span ? Math.min(1, Math.max(0, (step - axis.steps[left]) / span)) : 0;
  return axis.places[left] + part * (axis.places[right] - axis.places[left]);
}

// First index whose value is greater than the given one.
function after(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

// Means of each value and those before it, as trailing_mean() computes them; for long logs, of the means of stretches.
function smoothed(curve) {
  const width = Math.round(SMOOTHING[view.smooth] * curve.means.length);
  if (width < 2 || curve.dots || curve.cut || curve.setting) return null;
  return curve.smoothed[width] ||= curve.means.map((_, index) => {
    let sum = 0, count = 0;
    for (let at = Math.max(0, index - width + 1); at <= index; at++) {
      if (curve.means[at] !== null) { sum += curve.means[at]; count++; }
    }
    return count ? sum / count : null;
  });
}

// --- numbers ---------------------------------------------------------------------------------------------------

function format(value) {
  if (value === null || value === undefined) return "not finite";
  if (value && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-4)) return value.toExponential(3).replace(/\.?0+e/, "e");
  const short = Number.isInteger(value) ? value : Number(value.toPrecision(5));
  return short.toLocaleString("en", { maximumFractionDigits: 20 });
}

function ticks(low, high, most) {
  // Between values that are equal but for their last bits there is no round number, and none to be counted up to.
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low];
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index++) found.push(index * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  }
  const inside = found.filter((value) => value >= low && value <= high);
  if (inside.length < 2) return ticks(low, high, 5);
  return inside.length > 7 ? inside.filter((value) => Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6)) : inside;
}
