// Tooltips for tokens, charts and whiskers. Texts go in as text, never as markup.
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
    return others === undefined ? [] : ["likeliest here:",
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
      ...(difference === "-" ? [] : ["trainer less sampler " + difference])];
  }

  function showToken(token, x, y) {
    show([...tokenLines(token.dataset.t), ...otherLines(token.dataset.o)], x, y);
  }

  const columns = new WeakMap();
  let shownChart = null;

  function chartLines(svg, clientX) {
    if (!columns.has(svg)) columns.set(svg, JSON.parse(svg.dataset.hover));
    const box = svg.getBoundingClientRect();
    const x = (clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = null;
    for (const column of columns.get(svg)) {
      if (best === null || Math.abs(column[0] - x) < Math.abs(best[0] - x)) best = column;
    }
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("x1", best[0]);
    cursor.setAttribute("x2", best[0]);
    cursor.classList.add("on");
    return best[1];
  }

  function clear() {
    tip.hidden = true;
    if (shownChart !== null) {
      shownChart.querySelector(".cursor").classList.remove("on");
      shownChart = null;
    }
  }

  function point(event) {
    const target = event.target instanceof Element ? event.target : null;
    const token = target && target.closest("[data-t]");
    if (token) return showToken(token, event.clientX, event.clientY);
    const whisker = target && target.closest("[data-tip]");
    if (whisker) return show([whisker.dataset.tip], event.clientX, event.clientY);
    const svg = target && target.closest("svg[data-hover]");
    if (shownChart !== null && shownChart !== svg) clear();
    if (!svg) return clear();
    shownChart = svg;
    show(chartLines(svg, event.clientX), event.clientX, event.clientY);
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
