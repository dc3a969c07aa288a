const at = (id) => document.getElementById(id);
const tokenKey = "forage-token";

function say(text, isWrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", isWrong);
}

function words(text) {
  return text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];
}

// The text of a passage or document, with the words of the query marked.
function marked(text, query, file) {
  const wanted = new Set(words(query).filter((word) => word.length > 2 || /\d/.test(word)));
  const leaf = (text) => text.split(/([\p{L}\p{N}]+)/u).filter(Boolean)
    .map((piece) => wanted.has(piece.toLowerCase()) ? element("mark", "", piece) : piece);
  if (/\.(md|markdown)$/i.test(file)) return markdown(text, leaf);
  return fill(element("p", "text", ""), leaf(text));
}

// The location of a passage, as a link that shows its document as it was indexed.
function placeElement({ id, file, page, last_page, section }) {
  const place = element("p", "place", "");
  const link = element("a", "", file);
  link.href = `?${new URLSearchParams({document: id})}`;
  const pages = (last_page || page) === page ? `, page ${page}` : `, pages ${page} to ${last_page}`;
  place.append(link, page ? pages : "", section ? `, ${section}` : "");
  return place;
}

function hitElement(hit, rank, best, query) {
  const file = typeof hit.document.file === "string" ? hit.document.file : "";
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
  item.append(header, bar);
  if (file && Number.isInteger(hit.document.start)) item.append(placeElement(hit.document));
  item.append(marked(hit.document.contents.slice(line + 1), query, file));
  item.append(element("p", "id", hit.document.id));
  return item;
}

let latest = 0;

// The result of a request; undefined if it failed (the page says so) or a newer one replaced it.
async function resultOf(path, body) {
  const turn = ++latest;
  const headers = {"Content-Type": "application/json"};
  const token = sessionStorage.getItem(tokenKey);
  if (token) headers.Authorization = `Bearer ${token}`;
  let response, reply;
  try {
    response = await fetch(path, {method: "POST", headers, body: JSON.stringify(body)});
    reply = await response.json();
  } catch (error) {
    if (turn === latest) { at("results").replaceChildren(); say(`No answer: ${error.message}`, true); }
    return undefined;
  }
  if (turn !== latest) return undefined;  // a newer request is on its way
  at("token-form").hidden = response.status !== 401;
  if (response.ok) return reply.result[0];
  at("results").replaceChildren();
  say(`HTTP ${response.status}: ${reply.detail}`, true);
  if (response.status === 401) at("token").focus();
  return undefined;
}

async function openDocument(address) {
  say("Opening");
  const page = await resultOf("access", {urls: [address]});
  if (page === null) say(`The index has no document ${address}`, true);
  if (!page) return;
  const letters = Array.from(page.contents);  // the server counts an emoji as one
  const [start, end] = [page.start || 0, page.end || 0];
  const item = element("li", "hit", "");
  item.append(element("h2", "", page.url));
  for (const [from, to] of [[0, start], [start, end], [end, letters.length]]) {
    const part = marked(letters.slice(from, to).join(""), "", page.url);
    part.classList.toggle("here", from === start && to === end);
    if (to > from) item.append(part);
  }
  at("results").replaceChildren(item);
  say("The document as it was indexed");
  item.querySelector(".here")?.scrollIntoView();
}

async function search() {
  const query = at("query").value;
  const topk = Math.max(1, Number.parseInt(at("topk").value, 10) || 1);
  history.replaceState(null, "", `?${new URLSearchParams({q: query, k: topk})}`);
  say("Searching");
  const started = performance.now();
  const hits = await resultOf("retrieve", {queries: [query], topk, return_scores: true});
  if (!hits) return;
  const milliseconds = performance.now() - started;
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
  begin();
});
const asked = new URLSearchParams(location.search);
if (asked.has("k")) at("topk").value = asked.get("k");
at("query").value = asked.get("q") || "";
const begin = () => !at("query").value && asked.get("document") ? openDocument(asked.get("document")) : search();
describe();
if (asked.get("q") || asked.get("document")) begin();
