"use strict";
// Curves that grow record by record, as thin as a screen resolves: of long ones the lowest and highest values are kept.

const names = JSON.parse(document.getElementById("names").textContent);
const MOST_POINTS = 12000; // of a curve
const MOST_PLACES = 4000; // of an axis
const MOST_DOTS = 200;
const UNITS = [["hours", 3600, 7200], ["minutes", 60, 120], ["seconds", 1, 0]]; // name, seconds, least duration
let timeUnit = UNITS.at(-1);

function isOfEvaluation(name) {
  return names.evaluations.includes(name.split(/[/._-]/)[0].toLowerCase());
}

// The metric in whose chart another one is drawn: eval_loss in that of loss.
function chartOf(name, known) {
  if (!isOfEvaluation(name)) return name;
  const measures = known.filter((each) => !isOfEvaluation(each) && (name.endsWith(`_${each}`) || name.endsWith(`/${each}`)));
  return measures.sort((one, other) => other.length - one.length)[0] || name;
}

function number(value) {
  if (typeof value === "number") return Number.isFinite(value) ? value : null; // 1e999 is read as Infinity
  return ["NaN", "Infinity", "-Infinity"].includes(value) ? null : undefined; // undefined: not a number
}

class GrowingCurve {
  constructor(run, metric) {
    Object.assign(this, { run, metric, cut: false, setting: new RegExp(names.settings, "i").test(metric) });
    this.clear();
  }

  clear() {
    Object.assign(this, { steps: [], values: [], meanSteps: [], means: [], smoothed: {} });
    Object.assign(this, { stretch: 1, closed: 0, count: 0, sum: 0, known: 0 }); // of the values, the first are closed
  }

  get dots() {
    return !this.cut && isOfEvaluation(this.metric) && this.values.length <= MOST_DOTS;
  }

  add(step, value) {
    this.steps.push(step);
    this.values.push(value);
    this.smoothed = {};
    this.count++;
    if (value !== null) { this.sum += value; this.known++; }
    if (this.count === this.stretch) this.closeStretch();
  }

  closeStretch() {
    this.meanSteps.push(this.steps.at(-1));
    this.means.push(this.known ? this.sum / this.known : null);
    this.count = this.sum = this.known = 0;
    if (this.stretch > 1) this.keepExtremes(this.closed, this.values.length);
    this.closed = this.values.length;
    const factor = this.stretch === 1 ? 4 : 2; // a stretch of 4 keeps 2 values, one of 8 too
    if (this.closed > MOST_POINTS && this.means.length % factor === 0) this.thin(factor);
  }

  thin(factor) {
    this.keepExtremes(0, 4);
    const groups = this.means.flatMap((_, index) => (index % factor ? [] : [this.means.slice(index, index + factor).filter((mean) => mean !== null)]));
    this.means = groups.map((means) => (means.length ? means.reduce((sum, mean) => sum + mean) / means.length : null));
    this.meanSteps = this.meanSteps.filter((_, index) => index % factor === factor - 1);
    this.stretch *= factor;
    this.closed = this.values.length;
  }

  // Of each ``size`` values from ``begin`` on, keep the lowest, the highest and a gap.
  keepExtremes(begin, size) {
    const kept = [];
    for (let at = begin; at < this.values.length; at += size) {
      let low, high, gap;
      for (let index = at; index < Math.min(at + size, this.values.length); index++) {
        const value = this.values[index];
        if (value === null) { gap ??= index; continue; }
        if (low === undefined || value < this.values[low]) low = index;
        if (high === undefined || value > this.values[high]) high = index;
      }
      kept.push(...[...new Set([low, high, gap])].filter((index) => index !== undefined).sort((one, other) => one - other));
    }
    for (const key of ["steps", "values"]) this[key].splice(begin, Infinity, ...kept.map((index) => this[key][index]));
  }
}

class GrowingRun {
  constructor(name) {
    this.spec = { name, colour: names.colours[data.runs.length % names.colours.length], marks: [], axes: {} };
    this.index = addRun(this.spec);
    this.curves = new Map();
    this.began = null; // UTC seconds of the first record
    this.leftOver = []; // curves of records that were cut off the log
  }

  add(record) {
    if (record.kind === "header" || !Number.isInteger(record.global_step)) return;
    const step = record.global_step;
    if (!record.kind || record.kind === "train") this.addPlaces(step, record);
    if (record.kind === "final") return; // metrics of the whole run
    for (const [name, value] of Object.entries(record)) {
      const plotted = names.bookkeeping.includes(name) ? undefined : number(value);
      if (plotted !== undefined) this.curve(name).add(step, plotted);
    }
  }

  addPlaces(step, record) {
    if (Number.isFinite(record.epoch)) this.addPlace("epoch", step, record.epoch);
    if (Number.isFinite(record.timestamp)) {
      this.began ??= record.timestamp;
      this.addPlace("time", step, (record.timestamp - this.began) / timeUnit[1]);
      setTimeUnit(record.timestamp - this.began);
    }
    const tokens = names.tokens.find((name) => Number.isFinite(record[name]));
    if (tokens) this.addPlace("tokens", step, record[tokens]);
  }

  addPlace(axis, step, place) {
    const known = this.spec.axes[axis] ||= { steps: [], places: [] };
    if (known.steps.at(-1) === step) return;
    known.steps.push(step);
    known.places.push(place);
    if (known.steps.length > MOST_PLACES) {
      for (const key of ["steps", "places"]) known[key] = known[key].filter((_, index) => index % 2 === 0);
    }
  }

  curve(name) {
    let curve = this.curves.get(name);
    if (!curve) {
      curve = new GrowingCurve(this.index, name);
      this.curves.set(name, curve);
      const metric = chartOf(name, [...new Set([...data.charts.map((chart) => chart.metric), ...this.curves.keys()])]);
      const chart = data.charts.find((each) => each.metric === metric) || newChart(metric);
      chart.curves.push(curve);
    }
    return curve;
  }

  // The log now begins anew: keep the curves as cut off until cutAfter() tells from which step on they are.
  restart() {
    this.drop(() => true);
    for (const curve of this.curves.values()) {
      const old = new GrowingCurve(this.index, curve.metric);
      Object.assign(old, { cut: true, steps: curve.steps, values: curve.values });
      this.leftOver.push(old);
      data.charts.find((chart) => chart.curves.includes(curve)).curves.push(old);
      curve.clear();
    }
    this.spec.axes = {};
    this.began = null;
  }

  cutAfter(step) {
    for (const curve of this.leftOver) {
      const first = after(curve.steps, step);
      curve.steps = curve.steps.slice(first);
      curve.values = curve.values.slice(first);
    }
    this.drop((curve) => !curve.steps.length);
  }

  drop(unwanted) {
    const dropped = new Set(this.leftOver.filter(unwanted));
    this.leftOver = this.leftOver.filter((curve) => !dropped.has(curve));
    for (const chart of data.charts) chart.curves = chart.curves.filter((curve) => !dropped.has(curve));
  }
}

function newChart(metric) {
  const spec = { metric, label: names.labels[metric] || metric, curves: [], shown: metric.endsWith("loss") || names.shown.includes(metric) };
  addChart(spec);
  return spec;
}

// Measure the axis of time in hours, minutes or seconds, by the longest run.
function setTimeUnit(seconds) {
  const unit = UNITS.find(([, , least]) => seconds >= least);
  if (unit[1] <= timeUnit[1]) return;
  for (const run of data.runs) {
    if (run.axes.time) run.axes.time.places = run.axes.time.places.map((place) => place * timeUnit[1] / unit[1]);
  }
  timeUnit = unit;
  nameTime();
}

function nameTime() {
  data.axes.time = `${timeUnit[0]} since the first record`;
  document.querySelector("#axis option[value=time]").textContent = data.axes.time;
}
