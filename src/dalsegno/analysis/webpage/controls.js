"use strict";
// Controls of the charts: axis, smoothing, scale, zoom, and which runs and metrics are shown.

const charts = [];

function zoom(range) {
  view.range = range;
  document.getElementById("reset").disabled = range === null;
  redraw();
}

function redraw() {
  for (const chart of charts) {
    chart.figure.hidden = !view.shown.has(chart.number);
    chart.draw();
  }
}

function toggle(set, member, button) {
  if (!set.delete(member)) set.add(member);
  button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
  redraw();
}

function buildControls() {
  const axis = document.getElementById("axis");
  for (const [name, label] of Object.entries(data.axes)) axis.append(element("option", { value: name }, label));
  axis.addEventListener("change", () => { view.axis = axis.value; zoom(null); });
  const smooth = document.getElementById("smooth"), value = document.getElementById("smooth-value");
  const showValue = () => { value.textContent = view.smooth ? `${SMOOTHING[view.smooth] * 100} %` : "none"; };
  smooth.addEventListener("input", () => { view.smooth = Number(smooth.value); showValue(); redraw(); });
  showValue();
  document.getElementById("log").addEventListener("change", (event) => { view.log = event.target.checked; redraw(); });
  document.getElementById("reset").addEventListener("click", () => zoom(null));
}

function addRun(run) {
  const index = data.runs.push(run) - 1;
  const swatch = element("span", { class: "swatch" });
  swatch.style.background = run.colour;
  const button = element("button", { type: "button", "aria-pressed": "true" }, swatch, run.name);
  button.addEventListener("click", () => toggle(view.hidden, index, button));
  document.getElementById("runs").append(button);
  return index;
}

function addChart(spec) {
  const index = data.charts.push(spec) - 1, chart = new Chart(spec, index);
  charts.push(chart);
  document.getElementById("charts").append(chart.figure);
  if (spec.shown) view.shown.add(index);
  const button = element("button", { type: "button", "aria-pressed": String(spec.shown) }, spec.metric);
  button.addEventListener("click", () => toggle(view.shown, index, button));
  document.getElementById("metrics").append(button);
}
