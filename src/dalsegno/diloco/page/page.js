"use strict";
// Asks the server every second for its state and for the rounds that are new.

const rounds = []; // records, by version
const SHOWN = 20; // newest rounds in the table

const show = (text) => { document.getElementById("said").textContent = text; };
const number = (value, digits = 0) => value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

function bytes(count) {
  const size = Math.min(4, Math.floor(Math.log(Math.max(1, count)) / Math.log(1000)));
  return `${number(count / 1000 ** size, 1)} ${["B", "kB", "MB", "GB", "TB"][size]}`;
}

function fill(id, rows) {
  document.querySelector(`#${id} tbody`).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map(([text, kind]) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (kind) cell.className = kind;
      return cell;
    }));
    return row;
  }));
}

function facts(status) {
  const shown = {
    mode: status.mode, round: number(status.version), workers: `${status.workers.length} of ${status.num_workers}`,
    parameters: number(status.parameters), received: bytes(status.bytes_received),
    loss: number(status.newest?.loss, 4), fragments: number(status.num_fragments),
  };
  document.querySelector(".facts").replaceChildren(...Object.entries(shown).flatMap(([name, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name; text.textContent = value;
    const both = document.createElement("div");
    both.append(term, text);
    return [both];
  }));
}

function curve() {
  const points = rounds.filter((each) => Number.isFinite(each.loss));
  const losses = points.map((each) => each.loss), low = Math.min(...losses), high = Math.max(...losses);
  const first = points[0]?.global_step, last = points.at(-1)?.global_step;
  const place = (each) => [
    600 * (each.global_step - first) / Math.max(1, last - first), 195 - 190 * (each.loss - low) / (high - low || 1),
  ].map((value) => value.toFixed(1)).join(" ");
  document.querySelector("#loss path").setAttribute("d", points.length ? `M${points.map(place).join("L")}` : "");
  document.getElementById("range").textContent =
    points.length ? `rounds ${number(first)} to ${number(last)}; ${number(low, 4)} to ${number(high, 4)}` : "no round yet";
}

async function look() {
  const answer = await ask(`/feed?after=${rounds.at(-1)?.global_step ?? 0}`);
  if (answer.status.version < (rounds.at(-1)?.global_step ?? 0)) rounds.length = 0; // another run at this address
  rounds.push(...answer.rounds);
  const { status } = answer;
  facts(status);
  fill("workers", status.workers.map((each) => [
    [each.worker_id], [each.state, { dead: "bad", training: "good" }[each.state]], [number(each.submissions), "number"],
    [number(each.staleness), "number"], [number(each.steps_per_second, 2), "number"],
    [each.seen_seconds_ago == null ? "–" : `${number(each.seen_seconds_ago)} s ago`, "number"],
  ]));
  fill("rounds", rounds.slice(-SHOWN).reverse().map((each) => [
    number(each.global_step), number(each.loss, 4), number(each.workers), number(each.samples), number(each.staleness),
    number(each.round_runtime, 1),
  ].map((text) => [text, "number"])));
  curve();
  show(status.failure ?? status.obstacle ?? "");
  document.querySelector("main").hidden = false;
}

async function follow() {
  const form = document.getElementById("token");
  for (;;) {
    try {
      await look();
      form.hidden = true;
    } catch (error) {
      show(error instanceof Refused ? error.message : "The server does not answer; trying again.");
      if (error instanceof Refused) {
        form.hidden = false;
        await new Promise((resolve) => form.addEventListener("submit", (event) => { event.preventDefault(); resolve(); }, { once: true }));
        sessionStorage.setItem(TOKEN, document.getElementById("token-field").value.trim());
        continue;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

takeFragment();
follow();
