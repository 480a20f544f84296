"use strict";
// Job: the card of one run, which follows it from leg to leg: its state, its buttons, and the stream that its curves
// grow from.

const SPEED_SAMPLES = 20;
const STATUS_EVERY = 1000; // milliseconds
const HISTORY_EVERY = 5; // in states
const LISTED = 12; // values of the last record

const COMMANDS = {
  save_checkpoint: ["Save", "Save a checkpoint at the end of the present step?"],
  evaluate: ["Evaluate", "Evaluate at the end of the present step?"],
  graceful_stop: ["Stop", "Save a checkpoint and end the run? The next start resumes it."],
  abort: ["Abort", "End the run without a checkpoint? The next start resumes from the newest one, so the steps since then are lost."],
};

const RATE = { pattern: "[x×*]? *[0-9]*[.]?[0-9]+([eE](\\+|-)?[0-9]+)?", title: "a rate, such as 3e-4, or a factor, such as x0.5" };

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 100) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes < 60 * 48 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.round(minutes / 1440)} days`;
}

function count(value) {
  return Number.isFinite(value) ? value.toLocaleString("en") : "–";
}

function nameOf(endpoint) {
  return endpoint.output_dir.split(/[/\\]/).filter(Boolean).at(-1) || endpoint.job_id;
}

class Job {
  constructor(endpoint, callbacks) {
    this.output = endpoint.output_dir; // identifies the run, over its legs
    this.name = nameOf(endpoint);
    this.callbacks = callbacks; // lost: the connection ended; changed: something to redraw
    this.run = new GrowingRun(this.name);
    this.history = { legs: [], checkpoints: [], commands: [] };
    this.rollbacks = [];
    this.position = null;
    this.isHidden = false;
    this.backTo = null; // step to which the run went back, if that is known before its log begins anew
    this.awaitsStep = false; // its log began anew, and the step is not known yet
    this.build();
  }

  build() {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = this.run.spec.colour;
    this.badge = element("span", { class: "badge", role: "status" });
    this.where = element("p", { class: "quiet where" });
    this.bar = element("progress", { "aria-label": `progress of ${this.name}` });
    this.progress = element("p", { class: "progress" });
    this.facts = element("dl", { class: "facts" });
    this.answer = element("p", { class: "answer quiet", role: "status" });
    this.buttons = Object.entries(COMMANDS).map(([command, [label]]) => {
      const button = element("button", { type: "button", "data-command": command, class: command === "abort" ? "danger" : "" }, label);
      button.addEventListener("click", () => this.confirm(command));
      return button;
    });
    this.rate = element("input", { size: 9, placeholder: "3e-4 or x0.5", autocomplete: "off", required: "", ...RATE });
    const set = element("button", { "data-command": "set" }, "Set");
    this.buttons.push(set);
    const setting = element("form", { class: "setting" }, element("label", {}, "learning rate ", this.rate), set);
    setting.addEventListener("submit", (event) => { event.preventDefault(); this.confirmRate(); });
    this.close = element("button", { type: "button", class: "close", "aria-label": `hide ${this.name}`, title: "hide" }, "×");
    this.close.addEventListener("click", () => this.callbacks.hide(this));
    this.card = element("article", { class: "card", "aria-label": this.name },
      element("header", {}, element("h2", {}, swatch, this.name), this.badge, this.close),
      this.where, this.bar, this.progress, this.facts, element("div", { class: "buttons" }, ...this.buttons.slice(0, -1)), setting, this.answer);
    this.show("connecting");
  }

  show(state, kind = "") {
    if (state === this.state) return; // said once
    this.state = state;
    this.badge.textContent = state;
    this.badge.className = `badge ${kind}`;
    this.facts.classList.toggle("old", state !== "running");
    for (const button of this.buttons) button.disabled = state !== "running";
  }

  // --- connection ---

  // Follow a process of the run until the connection to it ends.
  async attach(endpoint) {
    const isNew = this.endpoint?.job_id !== endpoint.job_id || this.endpoint?.pid !== endpoint.pid;
    this.endpoint = endpoint;
    this.path = `/jobs/${encodeURIComponent(endpoint.job_id)}`;
    this.where.textContent = `${endpoint.job_id} · process ${endpoint.pid} on ${endpoint.hostname} · ${endpoint.output_dir}`;
    this.attached = new AbortController();
    const { signal } = this.attached;
    this.samples = [];
    if (isNew) this.reason = null;
    let failure = null;
    try {
      await Promise.all([this.updateStatus(signal), this.updateHistory(signal)]);
      this.show("running", "good");
      this.watch(signal);
      for await (const message of messages(`${this.path}/stream`, this.position, signal)) this.take(message);
    } catch (error) {
      failure = error;
    }
    if (signal.aborted) return;
    this.attached.abort();
    this.attached = null;
    this.callbacks.lost(this, failure);
  }

  detach() {
    this.attached?.abort();
    this.attached = null;
  }

  async watch(signal) {
    for (let round = 1; !signal.aborted; round++) {
      await new Promise((done) => setTimeout(done, STATUS_EVERY));
      if (signal.aborted || document.hidden) continue;
      try {
        await this.updateStatus(signal);
        if (round % HISTORY_EVERY === 0 || this.isStale) await this.updateHistory(signal);
      } catch (error) {
        if (error instanceof Refused) this.detach(), this.callbacks.lost(this, error);
        // whether the server is gone is known by the stream
      }
    }
  }

  take({ kind, id, content }) {
    if (kind === "reset") {
      this.run.restart();
      if (this.backTo !== null) this.run.cutAfter(this.backTo);
      this.awaitsStep = this.backTo === null;
      this.backTo = null;
      this.isStale = true;
    } else if (kind === "record") {
      this.run.add(content);
      this.backTo = null;
    } else if (kind === "event") {
      this.note(content);
    }
    if (id !== null) this.position = id;
    this.callbacks.changed();
  }

  wentBack(step) {
    if (this.awaitsStep) this.run.cutAfter(step);
    else this.backTo = step;
    this.awaitsStep = false;
  }

  note(event) {
    this.isStale = true;
    if (event.event === "rollback") {
      this.wentBack(event.to_step);
      this.rollbacks.push({ step: event.to_step, kind: "rollback", label: `rollback: went back to step ${count(event.to_step)}` });
      this.mark();
    } else if (event.event === "train_end") {
      this.reason = event.reason;
    } else if (event.event === "exception") {
      this.reason = event.type;
    }
  }

  // --- state ---

  async updateStatus(signal) {
    const status = await ask(`${this.path}/status`, { signal });
    const { global_step: step, max_steps: most } = status;
    this.samples = [...this.samples.filter((each) => each.step <= step), { step, time: status.timestamp }].slice(-SPEED_SAMPLES);
    const first = this.samples[0], speed = (step - first.step) / (status.timestamp - first.time);
    this.part = most > 0 ? step / most : null;
    this.bar.hidden = this.part === null;
    if (this.part !== null) this.bar.value = Math.min(1, this.part);
    this.progress.textContent = this.part === null ? `step ${count(step)}` : `step ${count(step)} of ${count(most)} · ${Math.floor(this.part * 100)} %`;
    const rate = speed >= 1 ? `${format(Number(speed.toPrecision(3)))} steps/s` : `${format(Number((1 / speed).toPrecision(3)))} s/step`;
    const facts = [["speed", speed > 0 ? rate : "–"], ["time left", speed > 0 && most > 0 ? duration((most - step) / speed) : "–"]];
    facts.push(["epoch", format(Number(status.epoch.toPrecision(4)))], ["last checkpoint", count(this.history.checkpoints.at(-1))]);
    if (status.logged_at) facts.push(["last log", `${duration(Math.max(0, status.timestamp - status.logged_at))} ago`]);
    const own = ["job_id", "status", "logged_at", "max_steps", ...names.bookkeeping];
    const isShown = (name) => !own.includes(name) && !names.durations.some((ending) => name.endsWith(ending));
    const logged = Object.entries(status).filter(([name, value]) => isShown(name) && number(value) !== undefined);
    for (const [name, value] of logged.slice(0, LISTED)) facts.push(fact(names.labels[name] || name, number(value)));
    this.facts.replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }

  async updateHistory(signal) {
    this.isStale = false;
    const legs = this.history.legs.length;
    this.history = await ask(`${this.path}/history`, { signal });
    if (legs && this.history.legs.length > legs) this.wentBack(this.history.legs.at(-1).first_step);
    this.mark();
    this.callbacks.changed();
  }

  mark() {
    const legs = this.history.legs.slice(1).map((leg, index) => {
      const last = this.history.legs[index], redone = last.last_step - leg.first_step, why = last.cause || last.why;
      const from = leg.from_checkpoint === null ? "started anew" : `resumed from step ${count(leg.first_step)}`;
      const repeated = redone > 0 ? `, ${count(redone)} steps repeated` : "", ended = why ? ` (${why.split("\n")[0]})` : "";
      return { step: leg.first_step, kind: "leg", label: [`leg ${leg.leg}: ${from}${repeated}${ended}`, ...leg.changed].join("; ") };
    });
    const checkpoints = this.history.checkpoints.map((step) => ({ step, kind: "checkpoint", label: `checkpoint ${count(step)}` }));
    const commands = this.history.commands.filter((each) => each.step !== null && each.error === null)
      .map((each) => ({ step: each.step, kind: "command", label: `${describe(each)}, at step ${count(each.step)}` }));
    this.run.spec.marks = [...checkpoints, ...legs, ...this.rollbacks, ...commands];
  }

  // --- commands ---

  async confirm(command) {
    const [label, question] = COMMANDS[command];
    if (await confirmed(this.name, question, label, command === "abort")) await this.send(command, label);
  }

  async confirmRate() {
    const text = this.rate.value.trim(), isFactor = !/^[0-9.]/.test(text), value = Number(isFactor ? text.slice(1) : text);
    const question = isFactor ? `Multiply the learning rate by ${value} from the next step on, and the rest of its schedule?`
      : `Set the learning rate to ${value} from the next step on, and scale the rest of its schedule likewise?`;
    if (!await confirmed(this.name, question, "Set", false)) return;
    await this.send("set", "Learning rate", { learning_rate: isFactor ? { factor: value } : value });
    this.rate.value = "";
  }

  async send(command, label, given = {}) {
    const { signal } = this.attached || {};
    const say = (text, kind = "quiet") => {
      this.answer.textContent = `${label}: ${text}`;
      this.answer.className = `answer ${kind}`;
    };
    if (!signal) return say("the job does not answer; nothing was sent", "bad");
    say("sent");
    try {
      let answer = await ask(`${this.path}/control?wait=1`, { method: "POST", body: { command, data: given, ...sender() }, signal });
      while (answer.step === null && answer.error === null) {
        say("accepted; it takes effect at the end of a step");
        answer = await ask(`${this.path}/commands/${answer.id}?wait=10`, { signal });
      }
      if (answer.error === null) say(`took effect at the end of step ${count(answer.step)}`, "good");
      else say(`had no effect: ${answer.error}`, "bad");
    } catch (error) {
      if (signal.aborted && this.reason) say(`the run has ended: ${this.reason}`);
      else say(signal.aborted ? "the connection ended before the answer; the list of commands shows what became of it" : error.message, "bad");
    }
    this.isStale = true;
  }
}

function fact(label, value) {
  const [name, unit] = label.split(" (bytes)");
  return [name, unit === undefined || typeof value !== "number" ? format(value) : `${(value / 2 ** 30).toFixed(2)} GiB`];
}

function describe(command) {
  const values = Object.entries(command.data).map(([name, value]) => ` ${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
  return `${command.command}${values.join(",")} (${command.by})`;
}

// Ask in a dialog; the key Escape means no.
function confirmed(name, question, label, isDangerous) {
  const dialog = document.getElementById("confirm"), yes = document.getElementById("yes");
  document.getElementById("confirm-name").textContent = name;
  document.getElementById("question").textContent = question;
  yes.textContent = label;
  yes.className = isDangerous ? "danger" : "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}
