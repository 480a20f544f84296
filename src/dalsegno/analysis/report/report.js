"use strict";
// A report: its curves and heatmaps, from the JSON in #data.

// Steps are stored as differences.
function steps(packed) {
  let sum = 0;
  return packed.map((difference) => (sum += difference));
}

function unpack(curve) {
  const at = steps(curve.steps), means = curve.means || curve.values;
  return { ...curve, steps: at, means, meanSteps: curve.meanSteps ? steps(curve.meanSteps) : at, smoothed: {} };
}

const report = JSON.parse(document.getElementById("data").textContent);
data.axes = report.axes;
buildControls();
for (const run of report.runs) {
  for (const axis of Object.values(run.axes)) axis.steps = steps(axis.steps);
  addRun(run);
}
for (const chart of report.charts) addChart({ ...chart, curves: chart.curves.map(unpack) });
redraw();
report.heatmaps.forEach((spec, number) => buildHeatmap(spec, document.querySelector(`[data-heatmap="${number}"]`)));
new ResizeObserver(redraw).observe(document.getElementById("charts"));
