// The chat of forage play --web: sends a question and shows the events of its episode as they arrive.
// Everything is inserted as text, never as markup.
(() => {
  "use strict";
  const HEADINGS = { think: "Thought", search: "Search", answer: "Answer", tool_call: "Tool call",
    text: "Text", observation: "Observation" };
  const asked = document.getElementById("asked"), form = document.getElementById("ask");
  const field = form.question, stop = document.getElementById("stop");
  let running = null;

  function add(parent, tag, className, text = "") {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    parent.append(element);
    return element;
  }

  function toEnd() {
    window.scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
  }

  // Makes a change, and keeps the end in view unless the reader has scrolled up.
  function following(change) {
    const rest = document.documentElement.scrollHeight - window.innerHeight - window.scrollY;
    change();
    if (rest < 40) toEnd();
  }

  // The element of one episode: pieces of the same part of the same turn go into one block.
  function openEpisode(question) {
    const article = add(asked, "article", "exchange");
    add(article, "h2", "question-text", question);
    const blocks = [];

    function show(event) {
      const last = blocks[blocks.length - 1];
      const kind = event.part === "observation" ? "observation" : "sampled";
      let block = last && last.part === event.part && last.turn === event.turn ? last : null;
      if (block === null) {
        if (!event.text.trim()) return;  // whitespace between two tags
        const element = add(article, "div", "block " + kind + " " + event.part);
        const head = add(element, "p", "block-head");
        const isFound = kind === "observation" && last && last.part === "search";
        add(head, "span", "heading", isFound ? "Passages" : HEADINGS[event.part]);
        const detail = add(head, "span", "detail", "after " + event.at_s.toFixed(1) + " s");
        block = { part: event.part, turn: event.turn, element, detail, text: add(element, "div", "tokens") };
        blocks.push(block);
      }
      const isFirst = !block.text.hasChildNodes();
      block.text.append(kind === "observation" ? event.text.trim() : isFirst ? event.text.trimStart() : event.text);
    }

    function end(event) {
      event.turns.forEach((turn, number) => {
        const own = blocks.filter((block) => block.turn === number);
        const sampled = own.filter((block) => block.part !== "observation").pop();
        const shown = own.find((block) => block.part === "observation");
        if (sampled) sampled.detail.append(" · " + turn.sampled + (turn.invalid ? " · invalid action: " + turn.invalid : ""));
        if (shown && turn.called) shown.detail.append(" · " + turn.called);
        if (shown && turn.is_failure) shown.element.classList.add("failed");
        if (shown && turn.passages.length) {
          const list = document.createElement("ul");
          list.className = "passages";
          turn.passages.forEach((passage) => add(list, "li", "", passage));
          shown.text.before(list);
        }
      });
      if (event.citations.length) {
        const sources = add(article, "div", "citations");
        add(sources, "p", "heading", event.resting);
        const list = add(sources, "ol", "");
        event.citations.forEach((citation) => {
          const item = add(list, "li", "");
          const title = add(item, citation.link ? "a" : "span", "", citation.title);
          if (citation.link) Object.assign(title, { href: citation.link, target: "_blank", rel: "noreferrer noopener" });
          add(item, "span", "detail", citation.place);
        });
      }
      if (event.answer === null) fail(event.is_failure ? "The episode failed: " + event.figures[0] : "No answer: " + event.figures[0]);
      const figures = add(article, "ul", "figures");
      event.figures.forEach((figure) => add(figures, "li", "", figure));
    }

    function fail(text) {
      following(() => add(article, "p", "failed", text).setAttribute("role", "alert"));
    }
    return { article, show, end, fail };
  }

  async function readEvents(reply, take) {
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      events.forEach((event) => take(JSON.parse(event.slice("data: ".length))));
    }
  }

  async function refusalOf(reply) {
    const text = await reply.text();
    try {
      const { detail } = JSON.parse(text);
      return typeof detail === "string" ? detail : JSON.stringify(detail);
    } catch {
      return text;
    }
  }

  async function ask(question) {
    const episode = openEpisode(question);
    running = new AbortController();
    stop.hidden = false;
    form.querySelector("[type=submit]").disabled = true;
    episode.article.setAttribute("aria-busy", "true");
    toEnd();
    let isOver = false;
    try {
      const reply = await fetch("/ask", { method: "POST", body: JSON.stringify({ question }),
        headers: { "Content-Type": "application/json" }, signal: running.signal });
      if (!reply.ok) {
        episode.fail("Refused (" + reply.status + "): " + await refusalOf(reply));
        return;
      }
      await readEvents(reply, (event) => {
        following(() => {
          if (event.end) episode.end(event.end);
          else if (event.error !== undefined) episode.fail(event.error);
          else episode.show(event);
        });
        isOver = isOver || Boolean(event.end) || event.error !== undefined;
      });
      if (!isOver) episode.fail("The connection broke off: forage play has stopped.");
    } catch (error) {
      episode.fail(error.name === "AbortError" ? "Stopped." : "Cannot reach forage play: " + error.message);
    } finally {
      running = null;
      stop.hidden = true;
      form.querySelector("[type=submit]").disabled = false;
      episode.article.removeAttribute("aria-busy");
      field.focus({ preventScroll: true });
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const question = field.value.trim();
    if (!question || running !== null) return;
    field.value = "";
    ask(question);
  });
  stop.addEventListener("click", () => running && running.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running !== null) running.abort();
    if (event.key === "/" && document.activeElement !== field) {
      event.preventDefault();
      field.focus();
    }
  });
})();
