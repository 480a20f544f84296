"use strict";
// The live page: finds the jobs, follows up to MOST of them side by side, and connects again to a run whose job was
// restarted.

const MOST = 4; // each holds one of the six connections that a browser opens to a server
const LOOK_EVERY = 2000; // milliseconds between two looks for jobs
const LOOK_SOON = 300;
const DRAW_EVERY = 250;
const MOST_COMMANDS = 20;

const known = new Map(); // jobs by output_dir
let nextLook = null, nextDraw = null, lastDraw = 0; // timers; milliseconds that drawing took

function followed() {
  return [...known.values()].filter((job) => !job.isHidden);
}

function attached() {
  return followed().filter((job) => job.attached).length;
}

// --- finding jobs ----------------------------------------------------------------------------------------------

async function look() {
  let found = null;
  try {
    found = await listJobs();
    say("");
  } catch (error) {
    if (error instanceof Refused) return askForToken(error.message);
    say("The server does not answer. The page connects again when it does.");
  }
  document.getElementById("token").hidden = true;
  if (found) meet(found);
  lookIn(LOOK_EVERY);
}

function lookIn(milliseconds) {
  clearTimeout(nextLook);
  nextLook = setTimeout(look, milliseconds);
}

function meet({ jobs, own }) {
  const running = jobs.filter((each) => each.state === "running");
  const reachable = new Map(); // the newest of each run
  for (const each of running) {
    if (each.port !== null && (own === null || each.job_id === own) && !reachable.has(each.output_dir)) reachable.set(each.output_dir, each);
  }
  for (const [output, endpoint] of reachable) {
    const isWanted = [null, output].includes(sessionStorage.getItem(RUN)); // the run that the page was opened for
    if (!known.has(output) && isWanted && attached() < MOST) follow(endpoint);
    const job = known.get(output);
    if (job && !job.isHidden && !job.attached) job.attach(endpoint);
  }
  for (const job of followed()) {
    const died = jobs.some((each) => each.output_dir === job.output && each.state === "dead");
    if (!job.attached) job.show(job.reason ? `ended: ${job.reason}` : died ? "killed" : "no answer", job.reason === "finished" ? "good" : "bad");
  }
  const unreachable = running.filter((each) => !reachable.has(each.output_dir)).length;
  showOthers([...reachable.values()].filter((each) => !known.has(each.output_dir) || known.get(each.output_dir).isHidden),
    !unreachable ? "" : own === null ? `${unreachable} more without a server` : `${unreachable} more on this machine: dalsegno jobs open shows them`);
  document.getElementById("none").hidden = known.size > 0 || reachable.size > 0;
}

function follow(endpoint) {
  const job = known.get(endpoint.output_dir) || new Job(endpoint, { lost, hide, changed: scheduleDraw });
  known.set(job.output, job);
  job.isHidden = false;
  setVisible(job, true);
  document.getElementById("jobs").append(job.card);
}

function hide(job) {
  job.detach();
  job.isHidden = true;
  job.card.remove();
  setVisible(job, false);
  look();
}

function setVisible(job, isVisible) {
  const button = document.getElementById("runs").children[job.run.index];
  button.hidden = !isVisible;
  button.setAttribute("aria-pressed", "true");
  if (isVisible) view.hidden.delete(job.run.index); else view.hidden.add(job.run.index);
  scheduleDraw();
}

function lost(job, failure) {
  if (failure instanceof Refused) return askForToken(failure.message);
  lookIn(job.state === "running" ? LOOK_SOON : LOOK_EVERY);
  job.show(job.reason ? `ended: ${job.reason}` : "no answer", job.reason === "finished" ? "good" : "bad");
}

function showOthers(others, note) {
  const buttons = others.map((endpoint) => {
    const button = element("button", { type: "button", title: endpoint.output_dir }, nameOf(endpoint));
    button.disabled = attached() >= MOST;
    button.addEventListener("click", () => { follow(endpoint); look(); });
    return button;
  });
  const place = document.getElementById("others");
  if (place.contains(document.activeElement)) return; // the focus would be lost
  place.replaceChildren(...(buttons.length ? [element("span", { class: "quiet" }, "also running:"), ...buttons] : []),
    element("span", { class: "quiet" }, note));
}

// --- messages -------------------------------------------------------------------------------------------------

function say(text) {
  const place = document.getElementById("said");
  if (place.textContent !== text) place.textContent = text;
}

function askForToken(reason) {
  say(reason);
  for (const job of followed()) {
    job.detach();
    job.show("not connected", "bad");
  }
  document.getElementById("token").hidden = false;
}

function showCommands() {
  const rows = followed().flatMap((job) => job.history.commands.map((command) => ({ job, command })))
    .sort((one, other) => other.command.time - one.command.time).slice(0, MOST_COMMANDS);
  document.getElementById("commands").hidden = !rows.length;
  document.querySelector("#commands tbody").replaceChildren(...rows.map(({ job, command }) => {
    const { step, error, data: given } = command;
    const effect = error ? element("td", { class: "bad long" }, error) : element("td", { class: "number" }, step === null ? "waiting" : `step ${count(step)}`);
    const what = Object.keys(given).length ? `${command.command} ${JSON.stringify(given)}` : command.command;
    return element("tr", {}, ...[job.name, what, command.by, new Date(command.time * 1000).toLocaleString()].map((text) => element("td", {}, text)), effect);
  }));
}

function scheduleDraw() {
  nextDraw ??= setTimeout(() => {
    nextDraw = null;
    const began = performance.now(), first = followed()[0];
    document.getElementById("curves").hidden = !data.charts.length;
    redraw();
    showCommands();
    document.title = first ? `${first.part ? `${Math.floor(first.part * 100)} % ` : ""}${first.name}` : "dalsegno";
    lastDraw = performance.now() - began;
  }, Math.max(DRAW_EVERY, 4 * lastDraw));
}

// --- start -----------------------------------------------------------------------------------------------------

takeFragment();
data.axes = { step: "step", epoch: "epoch", time: "", tokens: "tokens" };
buildControls();
nameTime();
document.getElementById("token").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("token-field");
  sessionStorage.setItem(TOKEN, field.value.trim());
  field.value = "";
  look();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
new ResizeObserver(redraw).observe(document.getElementById("charts"));
look();
