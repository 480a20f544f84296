"use strict";
// Heatmaps of a report: one row per parameter, one column per record.

const LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];

function shade(part) {
  const at = part * (VIRIDIS.length - 1), left = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const channel = (colour, index) => parseInt(colour.slice(1 + 2 * index, 3 + 2 * index), 16);
  return [0, 1, 2].map((index) => Math.round(channel(VIRIDIS[left], index) * (1 - at + left) + channel(VIRIDIS[left + 1], index) * (at - left)));
}

function buildHeatmap(spec, place) {
  const rows = spec.parameters.length, columns = spec.steps.length;
  const height = rows > 60 ? Math.max(2, Math.floor(700 / rows)) : 14;
  const canvas = element("canvas", { width: columns, height: rows, role: "img", "aria-label": spec.label });
  canvas.style.height = `${rows * height}px`;
  const pixels = new ImageData(columns, rows), context = canvas.getContext("2d");
  spec.rows.forEach((row, y) => [...row].forEach((level, x) => {
    const known = LEVELS.indexOf(level), at = 4 * (y * columns + x);
    if (known >= 0) pixels.data.set([...shade(known / (LEVELS.length - 1)), 255], at);
  }));
  context.putImageData(pixels, 0, 0);
  const names = element("div", { class: "names" });
  spec.parameters.forEach((name) => {
    const row = element("div", { title: name }, rows > 60 ? "" : name);
    row.style.height = row.style.lineHeight = `${height}px`;
    names.append(row);
  });
  const below = element("div", { class: "below" }, element("span", {}, `step ${format(spec.steps[0])}`),
    element("output", {}, `${format(spec.low)} to ${format(spec.high)}, log scale`), element("span", {}, format(spec.steps[columns - 1])));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns)));
    const y = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows)));
    const level = LEVELS.indexOf(spec.rows[y][x]);
    const value = level < 0 ? "no value" : `≈ ${format(Number((spec.low * (spec.high / spec.low) ** (level / (LEVELS.length - 1))).toPrecision(2)))}`;
    below.children[1].textContent = `${spec.parameters[y]}, step ${format(spec.steps[x])}: ${value}`;
  });
  place.append(names, canvas, below);
}
