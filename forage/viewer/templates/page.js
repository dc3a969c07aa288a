// Tooltips for tokens. Texts go in as text, never as markup.
(() => {
  "use strict";
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);

  function show(lines, x, y) {
    tip.replaceChildren(...lines.map((line) => {
      const row = document.createElement("div");
      row.textContent = line;
      return row;
    }));
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    const room = document.documentElement.clientWidth;
    tip.style.left = Math.max(6, Math.min(x + 14, room - width - 6)) + "px";
    tip.style.top = (y - height - 14 < 6 ? y + 20 : y - height - 14) + "px";
  }

  function otherLines(others) {
    const share = (logprob) => (100 * Math.exp(logprob)).toPrecision(3) + " %";
    return others === undefined ? [] : ["most likely here:",
      ...JSON.parse(others).map(([text, logprob]) => "\u201c" + text.replace(/\n/g, "\u21b5") + "\u201d " + share(logprob))];
  }

  function tokenLines(info) {
    const [id, logprob, version, advantage = "-", difference = "-"] = info.split(" ");
    if (logprob === undefined) return ["token " + id];
    const probability = 100 * Math.exp(Number(logprob));
    return ["token " + id,
      "log-probability " + logprob + " (" + probability.toPrecision(3) + " %)",
      ...(version === "-" ? [] : ["policy version " + version]),
      ...(advantage === "-" ? [] : ["advantage " + advantage]),
      ...(difference === "-" ? [] : ["trainer minus sampler " + difference])];
  }

  function showToken(token, x, y) {
    show([...tokenLines(token.dataset.t), ...otherLines(token.dataset.o)], x, y);
  }

  function clear() {
    tip.hidden = true;
  }

  function point(event) {
    const token = event.target instanceof Element && event.target.closest("[data-t]");
    if (token) showToken(token, event.clientX, event.clientY);
    else clear();
  }

  document.addEventListener("focusin", (event) => {
    const token = event.target.closest("[data-t]");
    if (!token) return clear();
    const box = token.getBoundingClientRect();
    showToken(token, box.left, box.top);
  });
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", clear, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") clear(); });
  document.documentElement.addEventListener("pointerleave", clear);
})();
