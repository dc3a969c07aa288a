"use strict";
const at = (id) => document.getElementById(id);
const tokenKey = "forage-token";

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;  // never innerHTML: passages are other people's text
  return made;
}

function say(text, isWrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", isWrong);
}

function words(text) {
  return text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];
}

function marked(text, query) {
  const wanted = new Set(words(query).filter((word) => word.length > 2 || /\d/.test(word)));
  const paragraph = element("p", "text", "");
  for (const piece of text.split(/([\p{L}\p{N}]+)/u)) {
    const isWanted = wanted.has(piece.toLowerCase());
    paragraph.append(isWanted ? element("mark", "", piece) : piece);
  }
  return paragraph;
}

function hitElement(hit, rank, best, query) {
  const line = hit.document.contents.indexOf("\n");
  const title = hit.document.contents.slice(0, Math.max(line, 0)).replace(/^"(.*)"$/, "$1");
  const item = element("li", "hit", "");
  const header = document.createElement("header");
  header.append(
    element("span", "rank", String(rank)),
    element("h2", "", title || "(no title)"),
    element("span", "score", hit.score.toFixed(3)),
  );
  const bar = element("div", "bar", "");
  bar.append(document.createElement("div"));
  // The best hit is the whole bar; scores below 0 (some rerankers) are an empty one.
  bar.firstChild.style.width = `${best > 0 ? Math.max(0, 100 * hit.score / best) : 0}%`;
  item.append(header, bar, marked(hit.document.contents.slice(line + 1), query));
  item.append(element("p", "id", hit.document.id));
  return item;
}

let latest = 0;

async function search() {
  const query = at("query").value;
  const topk = Math.max(1, Number.parseInt(at("topk").value, 10) || 1);
  const turn = ++latest;
  history.replaceState(null, "", `?${new URLSearchParams({q: query, k: topk})}`);
  say("Searching");
  const headers = {"Content-Type": "application/json"};
  const token = sessionStorage.getItem(tokenKey);
  if (token) headers.Authorization = `Bearer ${token}`;
  const started = performance.now();
  let response, reply;
  try {
    response = await fetch("retrieve", {
      method: "POST", headers, body: JSON.stringify({queries: [query], topk, return_scores: true}),
    });
    reply = await response.json();
  } catch (error) {
    if (turn === latest) { at("results").replaceChildren(); say(`No answer: ${error.message}`, true); }
    return;
  }
  if (turn !== latest) return;  // a newer search is on its way
  const milliseconds = performance.now() - started;
  at("token-form").hidden = response.status !== 401;
  if (!response.ok) {
    at("results").replaceChildren();
    say(`HTTP ${response.status}: ${reply.detail}`, true);
    if (response.status === 401) at("token").focus();
    return;
  }
  const hits = reply.result[0];
  const took = `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms round trip`;
  say(hits.length ? `${hits.length} passage${hits.length > 1 ? "s" : ""}, ${took}` : `Nothing found, ${took}`);
  const best = hits.length ? hits[0].score : 0;
  at("results").replaceChildren(...hits.map((hit, i) => hitElement(hit, i + 1, best, query)));
}

async function describe() {
  try {
    const ready = await (await fetch("readyz")).json();
    const count = ready.passages === null ? "" : `${ready.passages.toLocaleString("en")} passages, `;
    at("about").textContent = ready.backend ? `${count}${ready.backend}` : ready.detail;
  } catch {
    at("about").textContent = "The server does not answer.";
  }
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); search(); });
at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(tokenKey, at("token").value);
  search();
});
const asked = new URLSearchParams(location.search);
if (asked.has("k")) at("topk").value = asked.get("k");
describe();
if (asked.get("q")) { at("query").value = asked.get("q"); search(); }
