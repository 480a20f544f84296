"use strict";
// Chart: the curves of one metric in SVG, with axes, marks, hover and zoom.

const MOST_LISTED = 12; // curves in the tooltip
const HEIGHT = 260, TOP = 10, RIGHT = 12, BOTTOM = 34;

class Chart {
  constructor(spec, number) {
    this.spec = spec;
    this.svg = element("svg", { class: "chart", role: "img", "aria-label": spec.label });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.note = element("span");
    this.figure = element("figure", { "data-metric": spec.metric },
      element("figcaption", {}, spec.label, this.note), this.svg, this.tip);
    this.number = number;
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("dblclick", () => zoom(null));
  }

  // The visible lines, with points [x, y, step] on the chosen axis.
  lines() {
    const lines = [];
    for (const curve of this.spec.curves) {
      if (view.hidden.has(curve.run)) continue;
      const smooth = smoothed(curve);
      lines.push({ curve, faint: smooth !== null || curve.cut, points: this.points(curve.run, curve.steps, curve.values) });
      if (smooth) lines.push({ curve, faint: false, strong: true, points: this.points(curve.run, curve.meanSteps, smooth) });
    }
    return lines;
  }

  points(run, at, values) {
    const points = [];
    for (let index = 0; index < at.length; index++) {
      const x = place(run, at[index]);
      if (!Number.isNaN(x) && (!view.range || (x >= view.range[0] && x <= view.range[1]))) points.push([x, values[index], at[index]]);
    }
    return points;
  }

  draw() {
    if (!view.shown.has(this.number)) return;
    const width = this.width = Math.max(280, this.figure.clientWidth - 20 || 600);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    const evaluations = [...new Set(this.spec.curves.filter((curve) => curve.dots).map((curve) => curve.metric))];
    this.note.textContent = evaluations.length && evaluations[0] !== this.spec.metric ? `, dots: ${evaluations.join(", ")}` : "";
    this.drawn = this.lines();
    const xs = [], ys = [];
    for (const { points } of this.drawn) {
      for (const [x, y] of points) { xs.push(x); if (y !== null && (!view.log || y > 0)) ys.push(y); }
    }
    if (!xs.length || !ys.length) {
      this.scale = null;
      this.svg.append(element("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to draw"));
      return;
    }
    const bounds = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    let [left, right] = view.range || bounds(xs), [low, high] = bounds(ys);
    if (left === right) { left -= 0.5; right += 0.5; }
    const flat = (value) => (view.log ? Math.log10(value) : value);
    let [bottom, top] = [flat(low), flat(high)];
    const air = 0.04 * (top - bottom) || Math.abs(top) * 0.04 || 1;
    bottom -= air; top += air;
    const back = (value) => (view.log ? 10 ** value : value);
    const rows = view.log ? logTicks(back(bottom), back(top)) : ticks(bottom, top, 5);
    const LEFT = Math.max(30, 10 + 6.5 * Math.max(...rows.map((value) => format(value).length)));
    const X = (x) => LEFT + (x - left) / (right - left) * (width - LEFT - RIGHT);
    const Y = (y) => HEIGHT - BOTTOM - (flat(y) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
    this.scale = { left, right, LEFT, X, Y };
    this.axes(rows, ticks(left, right, Math.max(2, Math.floor(width / 75))));
    this.marks();
    for (const line of this.drawn) this.line(line);
    this.hover = element("g", { visibility: "hidden" });
    this.svg.append(this.hover);
    if (this.pointer) this.move(this.pointer);
  }

  axes(rows, columns) {
    const { X, Y, LEFT } = this.scale;
    for (const value of rows) {
      this.svg.append(element("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: Y(value), y2: Y(value) }),
        element("text", { x: LEFT - 6, y: Y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    for (const value of columns) {
      const anchor = X(value) > this.width - 30 ? "end" : "middle";
      this.svg.append(element("text", { x: X(value), y: HEIGHT - BOTTOM + 15, "text-anchor": anchor }, format(value)));
    }
    this.svg.append(element("text", { x: this.width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, data.axes[view.axis]));
  }

  marks() {
    this.marked = [];
    const runs = new Set(this.spec.curves.map((curve) => curve.run));
    for (const run of runs) {
      if (view.hidden.has(run)) continue;
      for (const mark of data.runs[run].marks) {
        const x = this.scale.X(place(run, mark.step));
        if (!(x >= this.scale.LEFT && x <= this.width - RIGHT)) continue;
        const bottom = HEIGHT - BOTTOM;
        const shape = mark.kind === "checkpoint" ? element("path", { d: `M${x} ${bottom - 7}l4 7h-8z` })
          : element("line", { x1: x, x2: x, y1: TOP, y2: bottom });
        shape.setAttribute("class", `mark ${mark.kind}`);
        if (data.runs.length > 1) shape.style.stroke = data.runs[run].colour;
        shape.append(element("title", {}, mark.label));
        this.svg.append(shape);
        this.marked.push({ x, label: data.runs.length > 1 ? `${data.runs[run].name}: ${mark.label}` : mark.label });
      }
    }
  }

  line({ curve, faint, strong, points }) {
    const { X, Y } = this.scale, colour = data.runs[curve.run].colour;
    const wider = data.runs.length > 3 || faint ? 0 : data.runs.length - 1 - curve.run; // shows below an identical run
    const seen = thinned(points, this.width);
    let path = "", pen = false;
    for (const [x, y] of seen) {
      const known = y !== null && (!view.log || y > 0);
      if (known) path += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}${pen ? "" : "h0"}`; // alone: a dot
      pen = known;
    }
    this.svg.append(element("path", { d: path, fill: "none", stroke: colour, "data-run": curve.run, "stroke-linejoin": "round", "stroke-linecap": "round",
      "stroke-width": (curve.cut ? 1.5 : curve.dots || faint ? 0.8 : strong ? 2 : 1.5) + wider, "stroke-dasharray": curve.cut ? "1 4" : "none", opacity: curve.cut ? 0.8 : curve.dots ? 0.5 : faint ? 0.3 : 1 }));
    if (curve.dots) {
      for (const [x, y] of points) {
        if (y !== null && (!view.log || y > 0)) {
          this.svg.append(element("circle", { cx: X(x), cy: Y(y), r: 3.2 + wider / 2, fill: colour, stroke: "var(--page)" }));
        }
      }
    }
    if (strong) return;
    const apart = new Map(points.filter(([, y]) => y === null).map(([x]) => [Math.round(X(x) / 9), X(x)]));
    for (const x of apart.values()) {
      this.svg.append(element("path", { d: `M${x - 3} ${TOP}l6 6m0 -6l-6 6`, stroke: colour, "stroke-width": 1.5, class: "broken" }));
    }
  }

  // --- pointer ---

  at(event) {
    const box = this.svg.getBoundingClientRect();
    return (event.clientX - box.left) / box.width * this.width;
  }

  value(pixel) {
    const { left, right, LEFT } = this.scale;
    return left + Math.min(1, Math.max(0, (pixel - LEFT) / (this.width - LEFT - RIGHT))) * (right - left);
  }

  move(event) {
    this.pointer = event;
    if (!this.scale) return;
    const pixel = this.at(event), x = this.value(pixel);
    this.hover.replaceChildren();
    if (this.from !== undefined) {
      const begin = Math.min(this.from, pixel);
      this.hover.append(element("rect", { class: "zoom", x: begin, y: TOP, width: Math.abs(pixel - this.from), height: HEIGHT - TOP - BOTTOM }));
    }
    const rows = [];
    let nearest = null;
    for (const line of this.drawn.filter((each) => !each.faint && each.points.length)) {
      const point = line.points[closest(line.points, x)];
      nearest = nearest === null || Math.abs(point[0] - x) < Math.abs(nearest[0] - x) ? point : nearest;
      rows.push([line, point]);
      if (point[1] !== null && (!view.log || point[1] > 0)) {
        this.hover.append(element("circle", { cx: this.scale.X(point[0]), cy: this.scale.Y(point[1]), r: 4, fill: data.runs[line.curve.run].colour }));
      }
    }
    if (!nearest) return;
    const across = this.scale.X(nearest[0]);
    this.hover.append(element("line", { class: "cross", x1: across, x2: across, y1: TOP, y2: HEIGHT - BOTTOM }));
    this.hover.setAttribute("visibility", "visible");
    this.showTip(nearest, this.near(rows, event), across);
  }

  // The curves nearest to the pointer, if there are many.
  near(rows, event) {
    if (rows.length <= MOST_LISTED) return rows;
    const box = this.svg.getBoundingClientRect(), height = (event.clientY - box.top) / box.height * HEIGHT;
    const distance = ([, point]) => (point[1] === null || (view.log && point[1] <= 0) ? Infinity : Math.abs(this.scale.Y(point[1]) - height));
    return [...rows].sort((one, other) => (distance(one) < distance(other) ? -1 : distance(one) > distance(other) ? 1 : 0)).slice(0, MOST_LISTED);
  }

  showTip(nearest, rows, across) {
    const where = view.axis === "step" ? "" : `${data.axes[view.axis]} ${format(nearest[0])}, `;
    this.tip.replaceChildren(element("div", { class: "quiet" }, `${where}step ${nearest[2].toLocaleString("en")}`));
    for (const [{ curve }, point] of rows) {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = data.runs[curve.run].colour;
      const name = data.runs.length > 1 ? `${data.runs[curve.run].name}${curve.dots ? `, ${curve.metric}` : ""}` : curve.metric;
      this.tip.append(element("div", {}, swatch, `${name}: ${format(point[1])}`));
    }
    const others = this.drawn.filter((each) => !each.faint && each.points.length).length - rows.length;
    if (others) this.tip.append(element("div", { class: "quiet" }, `and ${others} more`));
    const touched = this.marked.filter((mark) => Math.abs(mark.x - across) < 5).slice(0, MOST_LISTED);
    for (const mark of touched) this.tip.append(element("div", { class: "quiet" }, mark.label));
    this.tip.hidden = false;
    const left = across / this.width * this.figure.clientWidth;
    this.tip.style.top = "2.2rem";
    this.tip.style.left = left > this.figure.clientWidth / 2 ? "auto" : `${left + 24}px`;
    this.tip.style.right = left > this.figure.clientWidth / 2 ? `${this.figure.clientWidth - left + 12}px` : "auto";
  }

  leave() {
    this.from = this.pointer = undefined;
    this.tip.hidden = true;
    if (this.hover) this.hover.setAttribute("visibility", "hidden");
  }

  press(event) {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    this.from = this.at(event);
  }

  release(event) {
    const from = this.from, to = this.at(event);
    this.from = undefined;
    if (this.scale && from !== undefined && Math.abs(to - from) > 8) zoom([from, to].sort((a, b) => a - b).map((pixel) => this.value(pixel)));
  }
}

// Of the points on one pixel: the first, last, lowest and highest, and a gap if there is one.
function thinned(points, width) {
  if (points.length <= 4 * width) return points;
  const size = points.length / width, kept = [];
  for (let column = 0; column < width; column++) {
    const part = points.slice(Math.floor(column * size), Math.floor((column + 1) * size));
    let low = 0, high = 0, gap = 0;
    part.forEach(([, y], index) => {
      if (y === null) { gap = index; return; }
      if (part[low][1] === null || y < part[low][1]) low = index;
      if (part[high][1] === null || y > part[high][1]) high = index;
    });
    kept.push(...[...new Set([0, low, high, gap, part.length - 1])].sort((a, b) => a - b).map((index) => part[index]));
  }
  return kept;
}

function closest(points, x) {
  const right = Math.min(after(points.map((point) => point[0]), x), points.length - 1), left = Math.max(right - 1, 0);
  return Math.abs(points[left][0] - x) <= Math.abs(points[right][0] - x) ? left : right;
}
