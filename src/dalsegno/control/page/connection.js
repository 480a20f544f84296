"use strict";
// Requests to the server that this page is from. The token and the user's name arrive in the address's fragment, which a
// browser never sends; they are kept for this tab, and the token is sent as a header only.

const TOKEN = "dalsegno token", RUN = "dalsegno run", BY = "dalsegno by"; // keys of this tab's storage

class Refused extends Error {} // the token is missing or wrong

// Take over the fragment, and remove it from the address and the tab's history.
function takeFragment() {
  if (!location.hash) return;
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, key] of [["token", TOKEN], ["run", RUN], ["by", BY]]) {
    if (given.has(name)) sessionStorage.setItem(key, given.get(name)); else sessionStorage.removeItem(key);
  }
  history.replaceState(null, "", location.pathname);
}

async function request(path, { method = "GET", body, headers = {}, signal } = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const answer = await fetch(path, {
    method, signal, cache: "no-store", credentials: "omit", redirect: "error",
    headers: { ...headers, ...(token ? { Authorization: `Bearer ${token}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) },
    body: body && JSON.stringify(body),
  });
  if (answer.status === 401) throw new Refused(token ? "The token was refused." : "This server answers only with its token.");
  return answer;
}

// The content of an answer; raises with the server's reason if it is not a success.
async function ask(path, options) {
  const answer = await request(path, options), content = await answer.json();
  if (!answer.ok) throw new Error(content.error || answer.statusText);
  return content;
}

// Who is at this page, if the command that opened it has told.
function sender() {
  const by = sessionStorage.getItem(BY);
  return by ? { by } : {};
}

// Server-sent events, read by fetch because an EventSource cannot send the token. Ends when the server ends them.
async function* messages(path, lastId, signal) {
  const answer = await request(path, { signal, headers: lastId ? { "Last-Event-ID": lastId } : {} });
  if (!answer.ok) throw new Error((await answer.json()).error || answer.statusText);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const message = { event: "message", data: "", id: null };
      for (const line of block.split("\n")) {
        const colon = line.indexOf(": ");
        if (colon > 0) message[line.slice(0, colon)] = line.slice(colon + 2);
      }
      if (message.data) yield { kind: message.event, id: message.id, content: JSON.parse(message.data) };
    }
  }
}

// The job whose own server this is; null if the server passes requests on to all jobs.
async function listJobs() {
  const answer = await request("/jobs");
  if (!answer.ok) throw new Error(answer.statusText);
  return { jobs: (await answer.json()).jobs, own: answer.headers.get("Dalsegno-Job") };
}
